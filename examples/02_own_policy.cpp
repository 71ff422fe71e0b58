// SPDX-License-Identifier: Apache-2.0
//
// Policies of your own in a layer of the library:
//   WindowTopK      a top-k that always keeps the newest keys and fills up with the best others
//   RecencyIndexer  an indexer without weights: the score of a key is its position
//   select(...)     an overload for that indexer that skips scores altogether
// The free functions are found by argument-dependent lookup in the policy's own namespace.
#include <indexshare/indexshare.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdio>
#include <limits>
#include <vector>

namespace mine {

using namespace indexshare;

// ---- a top-k policy

/// The last `window` visible keys of a row are always selected; the rest of k goes by score.
struct WindowTopK {
  index_t window = 0;
};

/// Scratch: one copy of a row's scores, and whatever RadixTopK needs.
template <HostSpaceExecutor X>
Result<WorkspaceSize> topk_workspace(X const& x, WindowTopK, Shape const& shape) noexcept {
  Result<WorkspaceSize> const inner = topk_workspace(x, RadixTopK{}, shape);
  if (!inner) return inner;
  WorkspaceCarver carver;
  carver.take<float>(static_cast<std::size_t>(shape.keys));
  return WorkspaceSize{carver.size().bytes + inner->bytes};
}

template <HostSpaceExecutor X, Element Score>
Status topk_select(X const& x, WindowTopK const& policy,
                   ScoreView<Space::host, Score const> const& scores,
                   LengthView<Space::host> const& lengths, SelectionView<Space::host> const& out,
                   Workspace ws) noexcept {
  WorkspaceCarver carver(ws);
  index_t const keys = scores.extent(1);
  auto* const copy = carver.take<float>(static_cast<std::size_t>(keys));
  auto const copy_view = make_dense<Space::host, float const, 2>(copy, {1, keys});
  for (index_t row = 0; row < scores.extent(0); ++row) {
    index_t const length = clamp_length(lengths(row), keys);
    if (length > out.indices.extent(1)) {  // else all are selected and scores(row, .) is unwritten
      for (index_t s = 0; s < length; ++s) copy[s] = to_float(scores(row, s));
      std::fill(copy + std::max<index_t>(0, length - policy.window), copy + length,
                std::numeric_limits<float>::infinity());
    }
    Status const status = topk_select(
        x, RadixTopK{}, copy_view, rows_of(lengths, row, 1),
        SelectionView<Space::host>{rows_of(out.indices, row, 1), rows_of(out.counts, row, 1)},
        carver.rest());
    if (!status.ok()) return status;
  }
  return {};
}
static_assert(TopKPolicy<WindowTopK, HostExec<>, float>);

// ---- an indexer policy

struct RecencyIndexer {
  using score_type = float;
  template <Space S>
  struct inputs {};  // no queries, no keys
};

template <HostSpaceExecutor X>
Result<WorkspaceSize> indexer_workspace(X const&, RecencyIndexer, Shape const&) noexcept {
  return WorkspaceSize{0};
}

template <HostSpaceExecutor X>
Status indexer_check(X const&, RecencyIndexer, RecencyIndexer::inputs<Space::host> const&,
                     RowBatch<Space::host> const&, Shape const&) noexcept {
  return {};
}

template <HostSpaceExecutor X>
Status indexer_score(X const&, RecencyIndexer, RecencyIndexer::inputs<Space::host> const&,
                     RowBatch<Space::host> const& batch, ScoreRequest const& request,
                     ScoreView<Space::host> const& scores, Workspace) noexcept {
  for (index_t i = 0; i < request.rows.count; ++i) {
    index_t const length = clamp_length(batch.lengths(request.rows.first + i), scores.extent(1));
    for (index_t s = 0; s < length; ++s) scores(i, s) = static_cast<float>(s);
  }
  return {};
}
static_assert(IndexerPolicy<RecencyIndexer, HostExec<>>);

// ---- both at once: the layer prefers these to the library's composition

template <HostSpaceExecutor X>
Result<WorkspaceSize> select_workspace(X const&, RecencyIndexer const&, RadixTopK const&,
                                       Shape const&, std::size_t) noexcept {
  return WorkspaceSize{0};
}

template <HostSpaceExecutor X>
Status select(X const&, RecencyIndexer const&, RadixTopK const&,
              RecencyIndexer::inputs<X::space> const&, RowBatch<X::space> const& batch,
              Shape const& shape, SelectionView<X::space> const& out, Workspace) noexcept {
  index_t const k = out.indices.extent(1);
  for (index_t row = 0; row < batch.count(); ++row) {
    index_t const length = clamp_length(batch.lengths(row), shape.keys);
    index_t const count = std::min(k, length);
    for (index_t j = 0; j < k; ++j) {
      out.indices(row, j) = j < count ? static_cast<position_t>(length - count + j) : no_position;
    }
    out.counts(row) = static_cast<position_t>(count);
  }
  return {};
}

}  // namespace mine

namespace {

using namespace indexshare;
constexpr Space host = Space::host;

alignas(workspace_alignment) std::byte state_memory[2048];
alignas(workspace_alignment) std::byte scratch[1 << 16];

/// Two query rows of one request whose index keys are 7, 9, 1, 8, 2, 3, 0, 4; k is 4.
constexpr Shape shape{.rows = 2,
                      .keys = 8,
                      .top_k = 4,
                      .index_heads = 1,
                      .index_dim = 1,
                      .heads = 1,
                      .key_dim = 1,
                      .value_dim = 1};
constexpr position_t lengths[]{8, 3};
constexpr position_t requests[]{0, 0};
constexpr float index_keys[]{7, 9, 1, 8, 2, 3, 0, 4};
constexpr float ones[]{1, 1};
constexpr float kv[]{0, 1, 2, 3, 4, 5, 6, 7};

template <class Indexer>
void set_indexer(typename Indexer::template inputs<host>& in) {
  if constexpr (requires { in.keys; }) {
    in = {make_query<host>(ones, Rows{2}, Heads{1}, HeadDim{1}),
          make_head_weights<host>(ones, Rows{2}, Heads{1}),
          make_contiguous_cache<host>(index_keys, Requests{1}, Keys{8}, HeadDim{1})};
  }
}

template <class Indexer, class TopKPolicyType>
void run(char const* name, Indexer const& indexer, TopKPolicyType const& topk) {
  using Layer = SparseAttentionLayer<Indexer, TopKPolicyType, EveryLayer,
                                     SparseMla<float, format::Plain<float>>>;
  HostExec<> const exec;
  Layer const layer{
      .indexer = indexer, .topk = topk, .share = {.layers = 1}, .shape = shape, .layer = 0};
  auto state =
      SelectionState<host>::make({state_memory, sizeof state_memory}, Rows{2}, TopK{4}).value();
  typename Layer::template inputs<host> in{};
  in.indexer.emplace();
  set_indexer<Indexer>(*in.indexer);
  in.attention = {make_query<host>(ones, Rows{2}, Heads{1}, HeadDim{1}),
                  make_contiguous_cache<host>(kv, Requests{1}, Keys{8}, HeadDim{1}), 1.0f};
  in.batch = {make_lengths<host>(lengths, Rows{2}), make_lengths<host>(requests, Rows{2}),
              make_contiguous_table<host>(Keys{8}), make_contiguous_table<host>(Keys{8})};
  in.id = {.forward = 1, .batch = 0};
  float out[2];
  Status const status =
      layer.run(exec, in, state, {make_output<host>(out, Rows{2}, Heads{1}, HeadDim{1}), {}},
                {scratch, sizeof scratch});
  std::printf("%-28s", status.ok() ? name : status.what);
  for (index_t row = 0; row < state.selection().counts.extent(0); ++row) {
    std::printf(" [");
    for (index_t j = 0; j < 4; ++j) std::printf(" %d", state.selection().indices(row, j));
    std::printf(" ]");
  }
  std::printf("\n");
}

}  // namespace

int main() {
  using Scored = ReluDotIndexer<float, format::Plain<float>>;
  run("best by score", Scored{}, RadixTopK{});
  run("newest 2, then by score", Scored{}, mine::WindowTopK{.window = 2});
  run("newest 2, then by position", mine::RecencyIndexer{}, mine::WindowTopK{.window = 2});
  run("newest, no scores at all", mine::RecencyIndexer{}, RadixTopK{});

  // The library's composition of the same pair, by its qualified name, needs room for scores.
  Shape const long_context = [] {
    Shape s = shape;
    s.keys = 1 << 20;
    return s;
  }();
  std::size_t const budget = std::size_t{64} << 20;
  HostExec<> const exec;
  std::printf(
      "selection scratch at 1M keys: %zu bytes composed, %zu fused\n",
      indexshare::select_workspace(exec, mine::RecencyIndexer{}, RadixTopK{}, long_context, budget)
          ->bytes,
      select_workspace(exec, mine::RecencyIndexer{}, RadixTopK{}, long_context, budget)->bytes);
}
