// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/concepts.hpp>
#include <indexshare/host/panel.hpp>
#include <indexshare/indexer/relu_dot.hpp>

#include <algorithm>
#include <cstddef>
#include <limits>

namespace indexshare {
inline namespace v0 {
namespace detail {

/// Scoring in blocks: a tile of rows against a block of keys. The keys of a block are decoded once
/// for all rows of the tile that belong to one request.
struct ScoreBlocking {
  static constexpr index_t rows = 8;
  static constexpr index_t keys = 64;
};

/// Scratch of one worker: `keys` [block keys][lanes], `queries` [panels][lanes][panel_width].
struct ScoreScratch {
  float* keys;
  float* queries;
};

inline ScoreScratch carve_score_scratch(WorkspaceCarver& carver, index_t heads,
                                        index_t lanes) noexcept {
  return {carver.take<float>(static_cast<std::size_t>(ScoreBlocking::keys * lanes)),
          carver.take<float>(static_cast<std::size_t>(padded_to_panel(heads) * lanes))};
}

/// Scores of one row against the decoded keys: fp32, lanes in ascending order, then heads in
/// ascending order.
template <class Weights>
void score_block(ScoreScratch const& scratch, index_t heads, index_t lanes, Weights const& weights,
                 index_t count, float* out) noexcept {
  std::fill(out, out + count, 0.0f);
  for (index_t panel = 0; panel * panel_width < heads; ++panel) {
    float const* queries = scratch.queries + panel * panel_width * lanes;
    index_t const width = std::min(panel_width, heads - panel * panel_width);
    for (index_t s = 0; s < count; s += 2) {
      PanelPair dots;
      dot_pair(queries, scratch.keys + s * lanes, lanes, dots);
      for (index_t which = 0; which < std::min<index_t>(2, count - s); ++which) {
        float sum = out[s + which];
        for (index_t h = 0; h < width; ++h) {
          float const dot = dots.of[which][h];
          // a NaN dot must stay NaN, so no std::max
          sum += weights(panel * panel_width + h) * (dot < 0 ? 0.0f : dot);
        }
        out[s + which] = sum;
      }
    }
  }
}

/// Scores the keys [first, first + ScoreBlocking::keys) for rows that follow each other in one
/// request.
template <class Query, class KeyFormat>
void score_run(typename ReluDotIndexer<Query, KeyFormat>::template inputs<Space::host> const& in,
               RowBatch<Space::host> const& batch, ScoreRequest const& request, RowRange run,
               index_t first, ScoreView<Space::host> const& scores,
               ScoreScratch const& scratch) noexcept {
  index_t const heads = in.q.extent(1);
  index_t const lanes = in.q.extent(2);
  index_t const request_number = batch.requests(run.first);
  index_t longest = 0;
  for (index_t row = run.first; row < run.first + run.count; ++row) {
    index_t const length = clamp_length(batch.lengths(row), scores.extent(1));
    if (length > request.top_k) longest = std::max(longest, length);
  }
  index_t const count = std::min(ScoreBlocking::keys, longest - first);
  if (count <= 0) return;

  bool mapped[ScoreBlocking::keys];
  for (index_t s = 0; s < count; ++s) {
    position_t const slot = batch.index_pages.slot(request_number, first + s);
    mapped[s] = in.keys.has(slot);
    if (mapped[s]) {
      decode_row(in.keys, slot, scratch.keys + s * lanes);
    } else {
      std::fill_n(scratch.keys + s * lanes, lanes, 0.0f);
    }
  }
  if (count % 2 != 0) std::fill_n(scratch.keys + count * lanes, lanes, 0.0f);  // the pair's other half

  float block[ScoreBlocking::keys];
  for (index_t row = run.first; row < run.first + run.count; ++row) {
    index_t const length = clamp_length(batch.lengths(row), scores.extent(1));
    index_t const visible = std::min(count, length - first);
    if (length <= request.top_k || visible <= 0) continue;
    pack_panels(heads, lanes, scratch.queries,
                [&](index_t h, index_t d) noexcept { return to_float(in.q(row, h, d)); });
    score_block(
        scratch, heads, lanes, [&](index_t h) noexcept { return in.weights(row, h); }, visible,
        block);
    for (index_t s = 0; s < visible; ++s) {
      scores(row - request.rows.first, first + s) =
          mapped[s] ? block[s] : -std::numeric_limits<float>::infinity();
    }
  }
}

}  // namespace detail

/// Scratch of every worker; does not grow with the rows.
template <class PF, class Query, class KeyFormat>
Result<WorkspaceSize> indexer_workspace(HostExec<PF> const& x, ReluDotIndexer<Query, KeyFormat>,
                                        Shape const& shape) noexcept {
  WorkspaceCarver carver;
  for (int worker = 0; worker < x.parallel_for.concurrency(); ++worker) {
    detail::carve_score_scratch(carver, shape.index_heads, shape.index_dim);
  }
  return carver.size();
}

template <class PF, class Query, class KeyFormat>
Status indexer_check(
    HostExec<PF> const&, ReluDotIndexer<Query, KeyFormat>,
    typename ReluDotIndexer<Query, KeyFormat>::template inputs<Space::host> const& in,
    RowBatch<Space::host> const& batch, Shape const& shape) noexcept {
  return detail::check_relu_dot<Query, KeyFormat>(in, batch, shape);
}

/// Scores in fp32: lanes summed in ascending order, then heads in ascending order.
template <class PF, class Query, class KeyFormat>
Status indexer_score(
    HostExec<PF> const& x, ReluDotIndexer<Query, KeyFormat>,
    typename ReluDotIndexer<Query, KeyFormat>::template inputs<Space::host> const& in,
    RowBatch<Space::host> const& batch, ScoreRequest const& request,
    ScoreView<Space::host> const& scores, Workspace ws) noexcept {
  using Blocking = detail::ScoreBlocking;
  index_t const tiles = (request.rows.count + Blocking::rows - 1) / Blocking::rows;
  index_t const blocks = (scores.extent(1) + Blocking::keys - 1) / Blocking::keys;
  index_t const last_row = request.rows.first + request.rows.count;

  x.parallel_for(tiles * blocks, [&](index_t begin, index_t end, int worker) noexcept {
    WorkspaceCarver carver(ws);
    detail::ScoreScratch scratch{};
    for (int w = 0; w <= worker; ++w) {
      scratch = detail::carve_score_scratch(carver, in.q.extent(1), in.q.extent(2));
    }
    for (index_t task = begin; task < end; ++task) {
      index_t const tile_first = request.rows.first + task / blocks * Blocking::rows;
      index_t const tile_last = std::min(tile_first + Blocking::rows, last_row);
      for (index_t row = tile_first; row < tile_last;) {
        index_t next = row + 1;
        while (next < tile_last && batch.requests(next) == batch.requests(row)) ++next;
        detail::score_run<Query, KeyFormat>(in, batch, request, {row, next - row},
                                            task % blocks * Blocking::keys, scores, scratch);
        row = next;
      }
    }
  });
  return {};
}

}  // namespace v0
}  // namespace indexshare
