// SPDX-License-Identifier: Apache-2.0
//
// A third back end: a toy device with its own memory, which the operating system closes to the
// host except during copies and kernels, and a queue of kernels that run when somebody waits for
// them. The overloads for its executor make the library's layers run on it. The same stack then
// runs on the reference back end, and both must agree. docs/porting.md explains the parts.
#include <indexshare/indexshare.hpp>

#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <functional>
#include <limits>
#include <utility>
#include <vector>

namespace toy {

using namespace indexshare;

// ---- the device: memory and a queue

class Device {
 public:
  explicit Device(std::size_t bytes)
      : bytes_(bytes),
        base_(static_cast<std::byte*>(
            mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0))) {}
  Device(Device const&) = delete;
  Device& operator=(Device const&) = delete;
  ~Device() { munmap(base_, bytes_); }

  template <class T>
  T* allocate(std::size_t count) {
    auto* const block = reinterpret_cast<T*>(base_ + used_);
    used_ += align_up(count * sizeof(T));
    return block;
  }
  template <class T>
  T* upload(std::vector<T> const& values) {
    T* const block = allocate<T>(values.size());
    open();
    std::memcpy(block, values.data(), values.size() * sizeof(T));
    close();
    return block;
  }
  template <class T>
  std::vector<T> download(T const* block, std::size_t count) {
    synchronize();
    open();
    std::vector<T> values(block, block + count);
    close();
    return values;
  }

  void enqueue(std::function<void()> kernel) { queue_.push_back(std::move(kernel)); }
  std::size_t waiting() const { return queue_.size(); }
  void synchronize() {
    open();
    for (auto const& kernel : queue_) kernel();
    close();
    queue_.clear();
  }

 private:
  void open() { mprotect(base_, bytes_, PROT_READ | PROT_WRITE); }
  void close() { mprotect(base_, bytes_, PROT_NONE); }

  std::size_t bytes_;
  std::byte* base_;
  std::size_t used_ = 0;
  std::vector<std::function<void()>> queue_;
};

// ---- the back end: an executor and its overloads

struct DeviceExec {
  static constexpr Space space = Space::device;
  Device* device = nullptr;
};
inline constexpr Space device = Space::device;

/// Room for one decoded row of `lanes` floats.
inline WorkspaceSize row_scratch(index_t lanes) {
  WorkspaceCarver carver;
  carver.take<float>(static_cast<std::size_t>(lanes));
  return carver.size();
}

template <class Q, class F>
Result<WorkspaceSize> indexer_workspace(DeviceExec const&, ReluDotIndexer<Q, F> const&,
                                        Shape const& shape) noexcept {
  return row_scratch(shape.index_dim);
}

template <class Q, class F>
Status indexer_check(DeviceExec const&, ReluDotIndexer<Q, F> const& policy,
                     typename ReluDotIndexer<Q, F>::template inputs<device> const& in,
                     RowBatch<device> const& batch, Shape const& shape) noexcept {
  return check_inputs(policy, in, batch, shape);
}

template <class Q, class F>
Status indexer_score(DeviceExec const& x, ReluDotIndexer<Q, F> const&,
                     typename ReluDotIndexer<Q, F>::template inputs<device> const& in,
                     RowBatch<device> const& batch, ScoreRequest const& request,
                     ScoreView<device> const& scores, Workspace ws) noexcept {
  x.device->enqueue([=] {
    auto* const key = static_cast<float*>(ws.data);
    for (index_t i = 0; i < request.rows.count; ++i) {
      index_t const row = request.rows.first + i;
      index_t const length = clamp_length(batch.lengths(row), scores.extent(1));
      if (length <= request.top_k) continue;  // everything is selected, nobody reads the scores
      for (index_t s = 0; s < length; ++s) {
        position_t const slot = batch.index_pages.slot(batch.requests(row), s);
        if (!in.keys.has(slot)) {
          scores(i, s) = -std::numeric_limits<float>::infinity();
          continue;
        }
        decode_row(in.keys, slot, key);
        float score = 0;
        for (index_t h = 0; h < in.q.extent(1); ++h) {
          float dot = 0;
          for (index_t d = 0; d < in.q.extent(2); ++d) dot += to_float(in.q(row, h, d)) * key[d];
          score += in.weights(row, h) * (dot < 0 ? 0.0f : dot);
        }
        scores(i, s) = score;
      }
    }
  });
  return {};
}

inline Result<WorkspaceSize> topk_workspace(DeviceExec const&, RadixTopK, Shape const&) noexcept {
  return WorkspaceSize{};
}

/// A key is chosen if fewer than n keys are better. Quadratic, and right for every plateau.
template <class Score>
Status topk_select(DeviceExec const& x, RadixTopK, ScoreView<device, Score const> const& scores,
                   LengthView<device> const& lengths, SelectionView<device> const& out,
                   Workspace) noexcept {
  x.device->enqueue([=] {
    index_t const k = out.indices.extent(1);
    for (index_t row = 0; row < scores.extent(0); ++row) {
      index_t const length = clamp_length(lengths(row), scores.extent(1));
      index_t chosen = 0;
      for (index_t s = 0; s < length; ++s) {
        index_t better = 0;
        for (index_t t = 0; length > k && t < length; ++t) {
          auto const a = order_key(to_float(scores(row, t)));
          auto const b = order_key(to_float(scores(row, s)));
          better += a > b || (a == b && t < s) ? 1 : 0;
        }
        if (better < k) out.indices(row, chosen++) = static_cast<position_t>(s);
      }
      out.counts(row) = static_cast<position_t>(chosen);
      while (chosen < k) out.indices(row, chosen++) = no_position;
    }
  });
  return {};
}

template <class Q, class F, class O>
Result<WorkspaceSize> attention_workspace(DeviceExec const&, SparseMla<Q, F, O> const&,
                                          Shape const& shape) noexcept {
  return row_scratch(shape.key_dim + shape.value_dim);
}

template <class Q, class F, class O>
Status attention_check(DeviceExec const&, SparseMla<Q, F, O> const&,
                       MlaInputs<Q, F, device> const& in, MlaOutputs<O, device> const& out,
                       RowBatch<device> const& batch, Shape const& shape) noexcept {
  if (in.sink.data_handle() != nullptr) {
    return failure(Errc::unsupported, "the toy device knows no sink");
  }
  return check_inputs(in, out, batch, shape);
}

template <class Q, class F, class O>
Status attention_run(DeviceExec const& x, SparseMla<Q, F, O> const&,
                     MlaInputs<Q, F, device> const& in, RowBatch<device> const&, RowRange rows,
                     GroupPlan<device> const& plan, MlaOutputs<O, device> const& out,
                     Shape const& shape, Workspace ws) noexcept {
  x.device->enqueue([=] {
    auto* const key = static_cast<float*>(ws.data);
    float* const sums = key + shape.key_dim;
    for (index_t row = rows.first; row < rows.first + rows.count; ++row) {
      index_t const count = clamp_length(plan.counts(row), plan.slots.extent(1));
      for (index_t h = 0; h < shape.heads; ++h) {
        float largest = -std::numeric_limits<float>::infinity();
        float total = 0;
        std::fill_n(sums, shape.value_dim, 0.0f);
        for (index_t j = 0; j < count; ++j) {
          if (!in.kv.has(plan.slots(row, j))) continue;  // contributes nothing
          decode_row(in.kv, plan.slots(row, j), key);
          float logit = 0;
          for (index_t d = 0; d < shape.key_dim; ++d) logit += to_float(in.q(row, h, d)) * key[d];
          logit *= in.scale;
          float const next = std::max(largest, logit);
          float const keep = std::exp(largest - next);
          float const weight = std::exp(logit - next);
          largest = next;
          total = total * keep + weight;
          for (index_t v = 0; v < shape.value_dim; ++v) sums[v] = sums[v] * keep + weight * key[v];
        }
        for (index_t v = 0; v < shape.value_dim; ++v) {
          out.out(row, h, v) = from_float<O>(total > 0 ? sums[v] / total : 0.0f);
        }
        if (out.lse.data_handle() != nullptr) out.lse(row, h) = largest + std::log(total);
      }
    }
  });
  return {};
}

/// Positions to slots, once per share group.
inline Status map_slots(DeviceExec const& x,
                        SelectionView<device, position_t const> const& selection,
                        LengthView<device> const& requests, PageTable<device> const& pages,
                        Tensor<device, position_t, 2> const& slots) noexcept {
  x.device->enqueue([=] {
    for (index_t row = 0; row < slots.extent(0); ++row) {
      for (index_t j = 0; j < slots.extent(1); ++j) {
        slots(row, j) = j < selection.counts(row)
                            ? pages.slot(requests(row), selection.indices(row, j))
                            : no_position;
      }
    }
  });
  return {};
}

/// Rows of a selection into another state; used by import_selection and compact_selection.
inline Status gather_selection(DeviceExec const& x,
                               SelectionView<device, position_t const> const& from,
                               LengthView<device> const& rows,
                               SelectionView<device> const& to) noexcept {
  x.device->enqueue([=] {
    for (index_t i = 0; i < to.indices.extent(0); ++i) {
      index_t const row = rows.data_handle() == nullptr ? i : rows(i);
      bool const exists = row >= 0 && row < from.indices.extent(0);
      to.counts(i) = exists ? from.counts(row) : 0;
      for (index_t j = 0; j < to.indices.extent(1); ++j) {
        to.indices(i, j) = j < to.counts(i) ? from.indices(row, j) : no_position;
      }
    }
  });
  return {};
}

using Indexer = ReluDotIndexer<bf16, format::Plain<bf16>>;
using Attention = SparseMla<bf16, format::Plain<bf16>>;
static_assert(IndexerPolicy<Indexer, DeviceExec> && TopKPolicy<RadixTopK, DeviceExec, float> &&
              AttentionPolicy<Attention, DeviceExec>);

}  // namespace toy

// ---- the same stack on the toy device and on the reference

namespace {

using namespace indexshare;

/// Host memory with the interface of toy::Device, so that one function can run on either.
class HostArena {
 public:
  template <class T>
  T* allocate(std::size_t count) {
    blocks_.emplace_back(count * sizeof(T) / sizeof(Block) + 1);
    return reinterpret_cast<T*>(blocks_.back().data());
  }
  template <class T>
  T* upload(std::vector<T> const& values) {
    return static_cast<T*>(
        std::memcpy(allocate<T>(values.size()), values.data(), values.size() * sizeof(T)));
  }
  template <class T>
  std::vector<T> download(T const* block, std::size_t count) const {
    return {block, block + count};
  }
  static std::size_t waiting() { return 0; }

 private:
  struct alignas(workspace_alignment) Block {
    std::byte bytes[workspace_alignment];
  };
  std::vector<std::vector<Block>> blocks_;
};

constexpr Shape shape{.rows = 5,
                      .keys = 32,
                      .top_k = 6,
                      .index_heads = 4,
                      .index_dim = 16,
                      .heads = 3,
                      .key_dim = 12,
                      .value_dim = 8};
constexpr index_t requests = 2, page_size = 4, pages_per_request = 8;

/// Small integers, so that every score is exact and ties occur.
std::vector<bf16> integers(index_t count, int seed) {
  std::vector<bf16> values;
  auto state = static_cast<unsigned>(seed) * 2654435761u + 1u;
  for (index_t i = 0; i < count; ++i) {
    state = state * 1664525u + 1013904223u;
    values.push_back(from_float<bf16>(static_cast<float>(state >> 16 & 7u) - 3.0f));
  }
  return values;
}

struct Answer {
  std::vector<position_t> selection;
  std::vector<float> out;
};

/// Runs layer 0 (full) and layer 1 (shared) and returns what layer 1 left behind.
template <class X, class Memory>
Answer run_stack(X const& x, Memory& memory) {
  constexpr Space space = X::space;
  using Layer = SparseAttentionLayer<toy::Indexer, RadixTopK, Pattern<"FS">, toy::Attention>;
  Rows const rows{shape.rows};
  Pages const pages{requests * pages_per_request};

  std::vector<position_t> page_numbers;  // page j of request r lies in block 2 j + r
  for (position_t r = 0; r < requests; ++r) {
    for (position_t j = 0; j < pages_per_request; ++j) page_numbers.push_back(2 * j + r);
  }
  auto const table = make_page_table<space>(memory.upload(page_numbers), Requests{requests},
                                            Pages{pages_per_request}, PageSize{page_size});
  typename Layer::template inputs<space> in{};
  in.batch = {make_lengths<space>(memory.upload(std::vector<position_t>{29, 30, 31, 32, 4}), rows),
              make_lengths<space>(memory.upload(std::vector<position_t>{0, 0, 0, 0, 1}), rows),
              table, table};
  in.id = {.forward = 1, .batch = 0};
  in.attention.scale = 0.125f;

  auto const plane = static_cast<std::size_t>(shape.rows * shape.heads * shape.value_dim);
  float* const out = memory.template allocate<float>(plane);
  typename Layer::template outputs<space> const outputs{
      make_output<space>(out, rows, Heads{shape.heads}, HeadDim{shape.value_dim}), {}};

  auto const memory_of = [&](WorkspaceSize size) {
    return Workspace{memory.template allocate<std::byte>(size.bytes), size.bytes};
  };
  using State = SelectionState<space>;
  TopK const top_k{shape.top_k};
  State state = State::make(memory_of(State::size(rows, top_k)), rows, top_k).value();

  for (std::int32_t number = 0; number < 2; ++number) {
    Layer const layer{.shape = shape, .layer = number};
    in.attention.q = make_query<space>(
        memory.upload(integers(rows.n * shape.heads * shape.key_dim, 10 + number)), rows,
        Heads{shape.heads}, HeadDim{shape.key_dim});
    in.attention.kv = make_paged_cache<space>(
        memory.upload(integers(pages.n * page_size * shape.key_dim, 20 + number)), pages,
        PageSize{page_size}, HeadDim{shape.key_dim});
    in.indexer.reset();
    if (layer.is_full()) {
      std::vector<float> const weights(static_cast<std::size_t>(rows.n * shape.index_heads), 0.25f);
      in.indexer.emplace();
      in.indexer->q = make_query<space>(
          memory.upload(integers(rows.n * shape.index_heads * shape.index_dim, 30)), rows,
          Heads{shape.index_heads}, HeadDim{shape.index_dim});
      in.indexer->weights =
          make_head_weights<space>(memory.upload(weights), rows, Heads{shape.index_heads});
      in.indexer->keys = make_paged_cache<space>(
          memory.upload(integers(pages.n * page_size * shape.index_dim, 40)), pages,
          PageSize{page_size}, HeadDim{shape.index_dim});
    }
    Workspace const scratch = memory_of(layer.workspace(x, std::size_t{1} << 20).value());
    Status const status = layer.run(x, in, state, outputs, scratch);
    std::printf("  layer %d: %s; kernels waiting: %zu\n", number,
                status.ok() ? "accepted" : status.what, memory.waiting());
  }
  return {memory.download(state.selection().indices.data_handle(),
                          static_cast<std::size_t>(rows.n * top_k.n)),
          memory.download(out, plane)};
}

}  // namespace

int main() {
  toy::Device device(std::size_t{1} << 20);
  std::printf("toy device\n");
  Answer const toy = run_stack(toy::DeviceExec{&device}, device);
  HostArena host;
  std::printf("reference\n");
  Answer const reference = run_stack(ReferenceExec{}, host);

  float worst = 0;
  for (std::size_t i = 0; i < toy.out.size(); ++i) {
    worst = std::max(worst, std::abs(toy.out[i] - reference.out[i]));
  }
  std::printf("selections: %s\n",
              toy.selection == reference.selection ? "the same bytes" : "differ");
  std::printf("outputs: %zu values, %s 1e-5\n", toy.out.size(),
              worst < 1e-5f ? "within" : "off by more than");
}
