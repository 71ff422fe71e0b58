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

/// Scoring in blocks: a tile of rows against a chunk of keys, block by block. The queries of a tile
/// are packed once per chunk, the keys of a block are decoded once for all rows of the tile that
/// belong to one request.
struct ScoreBlocking {
  static constexpr index_t rows = 8;
  static constexpr index_t keys = 64;
  static constexpr index_t chunk = 16 * keys;
};

/// Scratch of one worker: `keys` [block keys][lanes], `queries` [tile rows][panels][lanes][panel].
struct ScoreScratch {
  float* keys;
  float* queries;
};

inline ScoreScratch carve_score_scratch(WorkspaceCarver& carver, index_t heads,
                                        index_t lanes) noexcept {
  return {carver.take<float>(static_cast<std::size_t>(ScoreBlocking::keys * lanes)),
          carver.take<float>(
              static_cast<std::size_t>(ScoreBlocking::rows * padded_to_panel(heads) * lanes))};
}

/// Scores of one row against the decoded keys: fp32, lanes in ascending order, then heads in
/// ascending order.
template <class Weights>
void score_block(float const* packed, float const* keys, index_t heads, index_t lanes,
                 Weights const& weights, index_t count, float* out) noexcept {
  std::fill(out, out + count, 0.0f);
  for (index_t panel = 0; panel * panel_width < heads; ++panel) {
    float const* queries = packed + panel * panel_width * lanes;
    index_t const width = std::min(panel_width, heads - panel * panel_width);
    for (index_t s = 0; s < count; s += 2) {
      PanelPair dots;
      dot_pair(queries, keys + s * lanes, lanes, dots);
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

/// Scores the keys from `first` to `last` at most for rows that follow each other in one request.
template <class Query, class KeyFormat>
class ScoreRun {
 public:
  using Inputs = typename ReluDotIndexer<Query, KeyFormat>::template inputs<Space::host>;

  ScoreRun(Inputs const& in, RowBatch<Space::host> const& batch, ScoreRequest const& request,
           RowRange run, ScoreView<Space::host> const& scores, ScoreScratch const& scratch) noexcept
      : in_(in), batch_(batch), request_(request), run_(run), scores_(scores), scratch_(scratch) {
    for (index_t i = 0; i < run.count; ++i) longest_ = std::max(longest_, length(i));
  }

  void score(index_t first, index_t last) const noexcept {
    index_t const end = std::min(last, longest_);
    if (first >= end) return;
    for (index_t i = 0; i < run_.count; ++i) {
      if (length(i) > first) pack(i);
    }
    for (index_t block = first; block < end; block += ScoreBlocking::keys) {
      score_keys(block, std::min(ScoreBlocking::keys, end - block));
    }
  }

 private:
  /// Keys to score for row i of the run: none if it selects everything.
  index_t length(index_t i) const noexcept {
    index_t const visible = clamp_length(batch_.lengths(run_.first + i), scores_.extent(1));
    return visible > request_.top_k ? visible : 0;
  }

  index_t heads() const noexcept { return in_.q.extent(1); }
  index_t lanes() const noexcept { return in_.q.extent(2); }
  float* packed(index_t i) const noexcept {
    return scratch_.queries + i * padded_to_panel(heads()) * lanes();
  }

  void pack(index_t i) const noexcept {
    pack_panels(heads(), lanes(), packed(i), [&](index_t h, index_t lane) noexcept {
      return to_float(in_.q(run_.first + i, h, lane));
    });
  }

  void score_keys(index_t first, index_t count) const noexcept {
    bool mapped[ScoreBlocking::keys];
    for (index_t s = 0; s < count; ++s) {
      position_t const slot = batch_.index_pages.slot(batch_.requests(run_.first), first + s);
      float* const key = scratch_.keys + s * lanes();
      mapped[s] = in_.keys.has(slot);
      if (mapped[s]) {
        decode_row(in_.keys, slot, key);
      } else {
        std::fill_n(key, lanes(), 0.0f);
      }
    }
    if (count % 2 != 0) std::fill_n(scratch_.keys + count * lanes(), lanes(), 0.0f);  // half a pair

    float block[ScoreBlocking::keys];
    for (index_t i = 0; i < run_.count; ++i) {
      index_t const visible = std::min(count, length(i) - first);
      if (visible <= 0) continue;
      index_t const row = run_.first + i;
      score_block(
          packed(i), scratch_.keys, heads(), lanes(),
          [&](index_t h) noexcept { return in_.weights(row, h); }, visible, block);
      for (index_t s = 0; s < visible; ++s) {
        scores_(row - request_.rows.first, first + s) =
            mapped[s] ? block[s] : -std::numeric_limits<float>::infinity();
      }
    }
  }

  Inputs const& in_;
  RowBatch<Space::host> const& batch_;
  ScoreRequest const& request_;
  RowRange run_;
  ScoreView<Space::host> const& scores_;
  ScoreScratch scratch_;
  index_t longest_ = 0;
};

}  // namespace detail

/// Scratch of every worker; does not grow with the rows.
template <class PF, class Query, class KeyFormat>
Result<WorkspaceSize> indexer_workspace(HostExec<PF> const& x,
                                        ReluDotIndexer<Query, KeyFormat> policy,
                                        Shape const& shape) noexcept {
  if (Status const status = check_shape(policy, shape); !status.ok()) return refuse(status);
  WorkspaceCarver carver;
  for (int worker = 0; worker < x.parallel_for.concurrency(); ++worker) {
    detail::carve_score_scratch(carver, shape.index_heads, shape.index_dim);
  }
  return carver.size();
}

template <class PF, class Query, class KeyFormat>
Status indexer_check(
    HostExec<PF> const&, ReluDotIndexer<Query, KeyFormat> policy,
    typename ReluDotIndexer<Query, KeyFormat>::template inputs<Space::host> const& in,
    RowBatch<Space::host> const& batch, Shape const& shape) noexcept {
  return check_inputs(policy, in, batch, shape);
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
  index_t const chunks = (scores.extent(1) + Blocking::chunk - 1) / Blocking::chunk;
  index_t const last_row = request.rows.first + request.rows.count;

  x.parallel_for(tiles * chunks, [&](index_t begin, index_t end, int worker) noexcept {
    WorkspaceCarver carver(ws);
    detail::ScoreScratch scratch{};
    for (int w = 0; w <= worker; ++w) {
      scratch = detail::carve_score_scratch(carver, in.q.extent(1), in.q.extent(2));
    }
    for (index_t task = begin; task < end; ++task) {
      index_t const first_key = task % chunks * Blocking::chunk;
      index_t const tile_first = request.rows.first + task / chunks * Blocking::rows;
      index_t const tile_last = std::min(tile_first + Blocking::rows, last_row);
      for (index_t row = tile_first; row < tile_last;) {
        index_t next = row + 1;
        while (next < tile_last && batch.requests(next) == batch.requests(row)) ++next;
        detail::ScoreRun<Query, KeyFormat>(in, batch, request, {row, next - row}, scores, scratch)
            .score(first_key, first_key + Blocking::chunk);
        row = next;
      }
    }
  });
  return {};
}

}  // namespace v0
}  // namespace indexshare
