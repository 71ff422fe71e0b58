// SPDX-License-Identifier: Apache-2.0
//
// Prefetch in graphs: replayed with everything new, and copies on a second stream beside attention.
#include "../../examples/graph_paths.cuh"
#include "changes.hpp"
#include "graph.hpp"

#include <indexshare/cuda/prefetch.cuh>
#include <indexshare/cuda/records.cuh>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace {
using namespace layer_test;
using cuda_test::Graph;

/// Host memory that the device reads at its own address: where the KV of shared layers lies.
template <class T>
class Pinned {
 public:
  explicit Pinned(test::Guarded<T> const& contents) {
    test::require(cudaHostAlloc(&host_, contents.bytes(), cudaHostAllocMapped));
    void* device = nullptr;
    test::require(cudaHostGetDevicePointer(&device, host_, 0));
    device_ = static_cast<T*>(device);
    write(contents);
  }
  Pinned(Pinned const&) = delete;
  Pinned& operator=(Pinned const&) = delete;
  ~Pinned() { cudaFreeHost(host_); }

  void write(test::Guarded<T> const& contents) {
    std::memcpy(host_, contents.data(), contents.bytes());
  }
  T* device() const { return device_; }

 private:
  void* host_ = nullptr;
  T* device_ = nullptr;
};

class Event {
 public:
  Event() { test::require(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming)); }
  Event(Event const&) = delete;
  Event& operator=(Event const&) = delete;
  ~Event() { cudaEventDestroy(event_); }
  void record(CudaExec const& x) const { test::require(cudaEventRecord(event_, x.stream())); }
  void wait(CudaExec const& x) const { test::require(cudaStreamWaitEvent(x.stream(), event_, 0)); }

 private:
  cudaEvent_t event_ = nullptr;
};

inline constexpr std::int32_t layers = 4;
constexpr char const* group = "FSSS";
inline constexpr index_t staging_page = 16;

template <class M>
using Storage = typename decltype(std::declval<M&>().kv(0).view())::format_type::storage;

/// A group whose shared layers have their KV in pinned memory, and two staging caches.
template <class M>
struct Prefetched {
  using S = Session<test::Cuda, M, Schedule>;
  using T = Storage<M>;

  test::Cuda x;
  M& model;
  S session;
  cudaStream_t second = nullptr;
  index_t capacity;
  test::Guarded<position_t> listed, count{1, test::unwritten};
  PrefetchList<space> list;
  test::Scratch scratch;
  std::vector<std::unique_ptr<Pinned<T>>> far{};
  std::vector<test::Guarded<T>> staging{};
  Event planned{}, copied[layers]{}, attended[layers]{};

  Prefetched(M& m, RowList const& rows)
      : model(m),
        session(x, m, Schedule(group), rows),
        capacity(
            prefetch_capacity(Rows{session.row_count()}, TopK{m.shape.top_k}, m.kv(0).slots())),
        listed(to_size(capacity), test::unwritten),
        list(make_prefetch_list<space>(listed.data(), count.data(), Rows{capacity},
                                       PageSize{staging_page})),
        scratch(prefetch_workspace(x, m.kv(0).slots())) {
    test::require(cudaStreamCreateWithFlags(&second, cudaStreamNonBlocking));
    auto const like = m.kv(0).view();
    index_t const elements = like.block_stride / like.block_size * list.blocks() * staging_page;
    for (int i = 0; i < 2; ++i) staging.emplace_back(to_size(elements));
    for (std::int32_t n = 1; n < layers; ++n) {
      far.push_back(std::make_unique<Pinned<T>>(m.kv(n).memory()));
    }
  }
  ~Prefetched() { cudaStreamDestroy(second); }

  void send_tokens() {
    for (std::int32_t n = 1; n < layers; ++n) far[to_size(n - 1)]->write(model.kv(n).memory());
  }

  /// The cache of a layer in its pinned memory.
  auto far_cache(std::int32_t n) {
    auto view = model.kv(n).view();
    view.data = far[to_size(n - 1)]->device();
    return view;
  }
  auto staging_cache(std::int32_t n) {
    auto const like = model.kv(n).view();
    index_t const row = like.block_stride / like.block_size;
    return MutableCacheView<space, typename decltype(like)::format_type>{
        staging[to_size(n % 2)].data(),
        list.blocks(),
        staging_page,
        like.lanes,
        staging_page * row,
        row,
        like.format};
  }

  void enqueue(example::GraphPaths& paths) {
    CudaExec const copying(second, x.limits());
    REQUIRE_THAT(session.enqueue(0), succeeded());
    paths.step("plan", x.stream(), [&] {
      REQUIRE_THAT(plan_prefetch(x, model.kv(0).slots(), session.state(), list, scratch.get()),
                   succeeded());
    });
    planned.record(x);
    planned.wait(copying);
    for (std::int32_t n = 1; n < layers; ++n) {
      if (n > 2) attended[n - 2].wait(copying);  // of the layer that had this staging cache
      paths.step("copy " + std::to_string(n), x.stream(), [&] {
        REQUIRE_THAT(copy_rows(copying, far_cache(n), SlotView<space>(list.slots), staging_cache(n),
                               SlotView<space>{}),
                     succeeded());
      });
      copied[n].record(copying);
      copied[n].wait(x);
      auto in = session.inputs(n);
      in.attention.kv = staging_cache(n);
      in.batch.kv_pages = list.pages(in.batch.kv_pages);
      paths.step("attention " + std::to_string(n), x.stream(),
                 [&] { REQUIRE_THAT(session.enqueue(n, in, session.state()), succeeded()); });
      attended[n].record(x);
    }
  }

  std::vector<std::vector<std::uint32_t>> results() const {
    std::vector<std::vector<std::uint32_t>> all;
    for (std::int32_t n = 0; n < layers; ++n) all.push_back(session.result(n));
    return all;
  }
};

using Bf16Model = Model<bf16, format::Plain<bf16>, format::Plain<bf16>>;
using Fp8Model = Model<bf16, format::IndexKeyE4m3, format::LatentE4m3>;

template <class M>
M make_model() {
  Shape shape = small_shape;
  if (!std::is_same_v<M, Model<>>) {
    shape.index_heads = shape.heads = 8;
    shape.index_dim = 128;
    shape.key_dim = 576;
    shape.value_dim = 512;
  }
  return M(Schedule(group), layers, shape);
}

TEMPLATE_TEST_CASE("GRAPH: host-resident KV, captured once with copies beside attention, replayed",
                   "[prefetch][graph]", Model<>, Bf16Model, Fp8Model) {
  auto model = make_model<TestType>();
  auto const all = batches();
  Prefetched<TestType> prefetched(model, all[0]);
  example::GraphPaths paths;
  Graph const graph(prefetched.x, [&] { prefetched.enqueue(paths); });
  CHECK(graph.only_device_work());

  for (std::int32_t n = 1; n < layers; ++n) {
    std::string const number = std::to_string(n);
    CAPTURE(number);
    CHECK(paths.waits(graph.get(), "attention " + number, "copy " + number));
    CHECK(paths.waits(graph.get(), "copy " + number, "plan"));
    CHECK_FALSE(paths.waits(graph.get(), "copy " + number, "attention " + number));
    if (n > 1) {
      CHECK(paths.apart(graph.get(), "copy " + number, "attention " + std::to_string(n - 1)));
    }
    if (n > 2) {
      CHECK(paths.waits(graph.get(), "copy " + number, "attention " + std::to_string(n - 2)));
    }
  }

  for (std::size_t replay = 0; replay < all.size() + 1; ++replay) {
    CAPTURE(replay);
    RowList const& rows = all[replay % all.size()];
    move_pages(model, static_cast<index_t>(replay % 3), 3);
    set_tokens(model, static_cast<std::int32_t>(layers * replay));
    prefetched.send_tokens();
    set_rows(prefetched.session, rows);
    set_queries(model, prefetched.session, rows);
    overwrite(prefetched.session.workspace(), replay % 2 == 0 ? 0x5A : 0xFF);
    overwrite(prefetched.scratch.get(), replay % 2 == 0 ? 0xFF : 0x5A);
    graph.replay();
    typename Prefetched<TestType>::S eager(test::Cuda{}, model, Schedule(group), rows);
    eager.run_all();
    std::vector<std::vector<std::uint32_t>> expected;
    for (std::int32_t n = 0; n < layers; ++n) expected.push_back(eager.result(n));
    CHECK((prefetched.results() == expected));
  }
}

}  // namespace
