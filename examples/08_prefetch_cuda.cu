// SPDX-License-Identifier: Apache-2.0
//
// A share group of one full and three shared layers. The KV of the shared ones lies in pinned host
// memory; which of its rows they read is known when the full layer has selected. One stream copies
// the rows of layer n + 1 into a staging cache while another attends to layer n. Captured into a
// graph, checked for what waits for what, replayed for two forwards, and compared with layers that
// read host memory directly.
#include "cuda_small_model.cuh"
#include "cuda_support.cuh"
#include "graph_paths.cuh"

#include <indexshare/indexshare.cuh>

#include <cstring>
#include <string>

namespace example {

constexpr Space device = Space::device;
constexpr std::int32_t layers = 4;
using Cached = format::Plain<bf16>;
using Layer = SparseAttentionLayer<ReluDotIndexer<bf16, Cached>, RadixTopK, Pattern<"FSSS">,
                                   SparseMla<bf16, Cached>>;
using Cache = MutableCacheView<device, Cached>;

/// Host memory that the device reads and writes at its own address.
class Pinned {
 public:
  explicit Pinned(index_t count) {
    require(
        cudaHostAlloc(&host_, static_cast<std::size_t>(count) * sizeof(bf16), cudaHostAllocMapped));
    require(cudaHostGetDevicePointer(&device_, host_, 0));
    for (index_t i = 0; i < count; ++i) {  // NaN where no token was ever written
      static_cast<bf16*>(host_)[i] = bf16{0xFFFF};
    }
  }
  Pinned(Pinned const&) = delete;
  Pinned& operator=(Pinned const&) = delete;
  ~Pinned() { cudaFreeHost(host_); }
  bf16* host() const { return static_cast<bf16*>(host_); }
  bf16* on_device() const { return static_cast<bf16*>(device_); }

 private:
  void* host_ = nullptr;
  void* device_ = nullptr;
};

/// The model's inputs; the newest token of each row is appended by the forward itself.
struct Model {
  static constexpr index_t elements = slots * shape.key_dim;

  Inputs inputs;  // lengths, queries, index keys; kv[0] is the full layer's
  Pinned far[layers - 1] = {Pinned{elements}, Pinned{elements}, Pinned{elements}};
  Array<position_t> positions{rows.n};
  Array<bf16> new_kv[layers] = {
      Array<bf16>{rows.n * shape.key_dim}, Array<bf16>{rows.n * shape.key_dim},
      Array<bf16>{rows.n * shape.key_dim}, Array<bf16>{rows.n * shape.key_dim}};

  Model() {
    for (int n = 0; n < layers - 1; ++n) {
      std::memcpy(far[n].host(), inputs.kv[n % 2].data(), elements * sizeof(bf16));
    }
  }
  void next_forward(position_t forward) const {
    inputs.next_forward(forward);
    for (index_t row = 0; row < rows.n; ++row) positions[row] = inputs.lengths[row] - 1;
    for (int n = 0; n < layers; ++n) new_kv[n].fill(static_cast<unsigned>(40 * forward + n), 8);
  }

  Cache kv(int n) const {
    return make_paged_cache<device>(n == 0 ? inputs.kv[0].data() : far[n - 1].on_device(), pages,
                                    page_size, HeadDim{shape.key_dim});
  }
  PageTable<device> table() const {
    return make_page_table<device>(inputs.table.data(), Requests{2}, Pages{pages.n / 2}, page_size);
  }
};

class Event {
 public:
  Event() { require(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming)); }
  Event(Event const&) = delete;
  Event& operator=(Event const&) = delete;
  ~Event() { cudaEventDestroy(event_); }
  void record(CudaExec const& x) const { require(cudaEventRecord(event_, x.stream())); }
  void wait(CudaExec const& x) const { require(cudaStreamWaitEvent(x.stream(), event_, 0)); }

 private:
  cudaEvent_t event_ = nullptr;
};

Tensor<device, position_t, 1> vector(Array<position_t> const& values) {
  return make_dense<device, position_t, 1>(values.data(), {values.size()});
}

/// One forward of the group: its state, outputs and scratch.
struct Group {
  static constexpr index_t outputs = rows.n * shape.heads * shape.value_dim;
  using State = SelectionState<device>;

  CudaExec compute;
  Array<std::byte> memory{static_cast<index_t>(State::size(rows, top_k).bytes)};
  State state = State::make(memory.workspace(), rows, top_k).value();
  Array<float> out[layers] = {Array<float>{outputs}, Array<float>{outputs}, Array<float>{outputs},
                              Array<float>{outputs}};
  Array<std::byte> scratch{static_cast<index_t>(
      Layer{.shape = shape}.workspace(compute, std::size_t{1} << 20).value().bytes)};

  void append(Model const& model, int n) {
    auto const new_rows =
        make_dense<device, bf16 const, 2>(model.new_kv[n].data(), {rows.n, shape.key_dim});
    require(append_rows(compute, new_rows, vector(model.positions), vector(model.inputs.requests),
                        model.table(), model.kv(n)));
  }
  void attend(Model const& model, int n, Cache const& kv, PageTable<device> const& kv_pages) {
    Inputs const& from = model.inputs;
    Layer const layer{.shape = shape, .layer = n};
    Layer::inputs<device> in{};
    in.batch = {make_lengths<device>(from.lengths.data(), rows),
                make_lengths<device>(from.requests.data(), rows), model.table(), kv_pages};
    in.id = {.forward = 1};
    in.attention = {make_query<device>(from.q.data(), rows, heads, HeadDim{shape.key_dim}), kv,
                    1.0f / 64};
    if (layer.is_full()) {
      in.indexer = {make_query<device>(from.index_q.data(), rows, index_heads, index_dim),
                    make_head_weights<device>(from.weights.data(), rows, index_heads),
                    make_paged_cache<device>(from.index_keys.data(), pages, page_size, index_dim)};
    }
    auto const output = make_output<device>(out[n].data(), rows, heads, HeadDim{shape.value_dim});
    require(layer.run(compute, in, state, {output}, scratch.workspace()));
  }

  /// Every layer on its own cache, wherever that lies.
  void run(Model const& model) {
    for (int n = 0; n < layers; ++n) {
      append(model, n);
      attend(model, n, model.kv(n), model.table());
    }
  }
};

/// The same with prefetched rows. Two staging caches suffice: that of layer n is filled again for
/// layer n + 2, once layer n has attended.
struct PrefetchedGroup : Group {
  static constexpr index_t capacity = prefetch_capacity(rows, top_k, slots);

  CudaExec copying;
  Array<position_t> listed{capacity}, count{1}, new_slots{rows.n}, new_rows{rows.n};
  PrefetchList<device> list =
      make_prefetch_list<device>(listed.data(), count.data(), Rows{capacity}, page_size);
  Array<bf16> staging[2] = {Array<bf16>{list.blocks() * list.page_size * shape.key_dim},
                            Array<bf16>{list.blocks() * list.page_size * shape.key_dim}};
  Array<std::byte> plan_scratch{static_cast<index_t>(prefetch_workspace(compute, slots).bytes)};
  Event planned{}, copied[layers]{}, attended[layers]{};

  void run(Model const& model, GraphPaths& paths) {
    append(model, 0);
    attend(model, 0, model.kv(0), model.table());
    require(plan_prefetch(compute, slots, state, list, plan_scratch.workspace()));
    require(appended_rows(compute, list, vector(model.positions), vector(model.inputs.requests),
                          model.table(), vector(new_slots), vector(new_rows)));
    planned.record(compute);
    planned.wait(copying);
    for (int n = 1; n < layers; ++n) {
      auto const stage = make_paged_cache<device>(staging[n % 2].data(), Pages{list.blocks()},
                                                  PageSize{list.page_size}, HeadDim{shape.key_dim});
      if (n > 2) attended[n - 2].wait(copying);
      paths.step("copy " + std::to_string(n), compute.stream(), [&] {
        require(copy_rows(copying, model.kv(n), SlotView<device>(list.slots), stage, {}));
      });
      copied[n].record(copying);

      // The layer's new rows exist only now: the copy has missed them.
      copied[n].wait(compute);
      append(model, n);
      require(copy_rows(compute, model.kv(n), SlotView<device>(vector(new_slots)), stage,
                        SlotView<device>(vector(new_rows))));
      paths.step("attention " + std::to_string(n), compute.stream(),
                 [&] { attend(model, n, stage, list.pages(model.table())); });
      attended[n].record(compute);
    }
  }
};

/// The graph does what the two streams are for.
bool overlaps(GraphPaths const& paths, cudaGraph_t graph) {
  bool good = true;
  for (int n = 1; n < layers; ++n) {
    std::string const copy = "copy " + std::to_string(n);
    std::string const attention = "attention " + std::to_string(n);
    bool const ordered = paths.waits(graph, attention, copy);
    std::printf("%s waits for %s: %s\n", attention.c_str(), copy.c_str(), ordered ? "yes" : "no");
    good = good && ordered;
    if (n == 1) continue;
    std::string const earlier = "attention " + std::to_string(n - 1);
    bool const apart = paths.apart(graph, copy, earlier);
    std::printf("%s and %s: %s\n", copy.c_str(), earlier.c_str(),
                apart ? "no path in either direction" : "one waits for the other");
    good = good && apart;
  }
  return good;
}

/// Returns whether everything was as it should be.
bool run_prefetch() {
  Stream const stream, second;
  DeviceLimits const limits = device_limits(0).value();
  Model const model;
  PrefetchedGroup prefetched{{{stream, limits}}, {second, limits}};
  Group direct{{stream, limits}};

  GraphPaths paths;
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t replay = nullptr;
  require(cudaStreamBeginCapture(stream.get(), cudaStreamCaptureModeThreadLocal));
  prefetched.run(model, paths);
  require(cudaStreamEndCapture(stream.get(), &graph));
  require(cudaGraphInstantiate(&replay, graph, 0));

  bool passed = overlaps(paths, graph);
  for (position_t forward = 1; forward <= 2; ++forward) {
    model.next_forward(forward);
    require(cudaGraphLaunch(replay, stream.get()));
    direct.run(model);
    stream.wait();
    std::printf("replay %d, rows of %d to %d keys: %d of %lld rows fetched per layer;", forward,
                model.inputs.lengths[0], model.inputs.lengths[rows.n - 1], prefetched.count[0],
                static_cast<long long>(example::slots));
    int equal = 0;
    for (int n = 0; n < layers; ++n) {
      equal += std::memcmp(prefetched.out[n].data(), direct.out[n].data(),
                           Group::outputs * sizeof(float)) == 0;
    }
    std::printf(" %d of %d layers equal the run without prefetch\n", equal, layers);
    passed = passed && equal == layers;
  }
  require(cudaGraphExecDestroy(replay));
  require(cudaGraphDestroy(graph));
  return passed;
}

}  // namespace example

int main() { return example::run_prefetch() ? 0 : 1; }
