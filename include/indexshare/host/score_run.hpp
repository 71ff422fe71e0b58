// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/cache.hpp>
#include <indexshare/concepts.hpp>
#include <indexshare/host/simd/tables.hpp>

#include <algorithm>
#include <limits>

/// @file Scoring as a walk over tiles: rows that follow each other in one request share decoded
/// keys. Both scoring alone and the fused selection walk so, for every policy that has a scorer.

namespace indexshare {
inline namespace v0 {
namespace detail {

/// Most rows of a tile.
inline constexpr index_t score_tile_rows = 8;
constexpr index_t rows_of_tile(index_t rows) noexcept {
  return std::clamp<index_t>(rows, 1, score_tile_rows);
}

/// Rows of one request, and how many keys the longest of them scores.
struct RowTile {
  RowRange rows;
  index_t keys;
};

/// Keys [first, last) of a tile.
struct TilePiece {
  RowTile tile;
  index_t first;
  index_t last;

  bool whole() const noexcept { return first == 0 && last == tile.keys; }
};

/// Where parts may meet: inside a tile at whole blocks of keys, or only between tiles.
enum class CutAt { blocks, tiles };

/// Cuts the scoring of a batch into parts of about equal work, whatever the lengths: a part begins
/// and ends anywhere, in the middle of a tile too.
class ScoreCut {
 public:
  /// @param keys  capacity that lengths are clamped to
  ScoreCut(RowBatch<Space::host> const& batch, ScoreRequest const& request, index_t keys,
           index_t tile_rows, CutAt at) noexcept
      : batch_(batch), request_(request), keys_(keys), tile_rows_(tile_rows), at_(at) {
    for_each_tile([&, this](RowTile const& tile) noexcept { work_ += work(tile); });
  }

  /// Keys to score for a row: none if it selects everything.
  index_t length(index_t row) const noexcept {
    return visible(row) > request_.top_k ? visible(row) : 0;
  }
  index_t visible(index_t row) const noexcept { return clamp_length(batch_.lengths(row), keys_); }

  /// Calls f(piece) for each piece of part `part` of `parts`, in order of rows.
  template <class F>
  void for_each_piece(index_t part, index_t parts, F const& f) const noexcept {
    index_t begin = 0;
    for_each_tile([&, this](RowTile const& tile) noexcept {
      TilePiece const piece{tile, cut_key(tile, bound(part, parts) - begin),
                            cut_key(tile, bound(part + 1, parts) - begin)};
      if (piece.first < piece.last) f(piece);
      begin += work(tile);
    });
  }

 private:
  /// Parts meet at multiples of this many keys, whole blocks of a kernel.
  static constexpr index_t granule = 8 * score_block_keys;

  template <class F>
  void for_each_tile(F const& f) const noexcept {
    index_t const end = request_.rows.first + request_.rows.count;
    for (index_t row = request_.rows.first; row < end;) {
      RowTile tile{{row, 0}, 0};
      for (; row < end && tile.rows.count < tile_rows_ &&
             batch_.requests(row) == batch_.requests(tile.rows.first);
           ++row) {
        ++tile.rows.count;
        tile.keys = std::max(tile.keys, length(row));
      }
      f(tile);
    }
  }

  /// Scores to compute, the shorter rows counted like the longest.
  static index_t work(RowTile const& tile) noexcept { return tile.rows.count * tile.keys; }

  index_t bound(index_t part, index_t parts) const noexcept {
    return work_ / parts * part + work_ % parts * part / parts;
  }

  /// The key of a tile before which `share` of its work lies.
  index_t cut_key(RowTile const& tile, index_t share) const noexcept {
    if (share >= work(tile)) return tile.keys;
    if (at_ == CutAt::tiles) return 0;
    return std::max<index_t>(share, 0) / tile.rows.count / granule * granule;
  }

  RowBatch<Space::host> const& batch_;
  ScoreRequest request_;
  index_t keys_;
  index_t tile_rows_;
  CutAt at_;
  index_t work_ = 0;
};

/// How the host scores for a policy: a specialisation per policy,
///   Scratch, carve(carver, tile rows, shape)  memory of one worker
///   Scorer(isa, inputs, scratch)
///   pack(i, row)            takes the queries of a row as the tile's i-th
///   take(s, slot, n)        takes n keys that lie behind each other in a block of the cache, from
///                           that at `slot` on, as the block's s-th and following
///   blank(s)                there is no s-th key
///   score(i, count, ahead, out)  scores of the first `count` keys for the tile's i-th row; `ahead`
///                           are rows to fetch meanwhile, or null
template <class Policy>
struct HostScorer;

template <class Policy>
concept HostScored = requires {
  typename HostScorer<Policy>::Scratch;
};

/// Scores pieces of tiles on one worker.
template <class Policy>
class ScoreRun {
 public:
  using Scorer = HostScorer<Policy>;
  using Inputs = typename Policy::template inputs<Space::host>;

  ScoreRun(HostIsa isa, Inputs const& inputs, RowBatch<Space::host> const& batch,
           ScoreCut const& cut, typename Scorer::Scratch const& scratch) noexcept
      : in_(inputs), batch_(batch), cut_(cut), scorer_(isa, inputs, scratch) {}

  /// Calls take(row of the batch, first key, count, scores) for blocks of keys of each row of the
  /// piece, keys ascending; `count` ends at the row's length.
  template <class Take>
  void score(TilePiece const& piece, Take const& take) const noexcept {
    for (index_t i = 0; i < piece.tile.rows.count; ++i) {
      index_t const row = piece.tile.rows.first + i;
      if (cut_.length(row) > piece.first) scorer_.pack(i, row);
    }
    for (index_t first = piece.first; first < piece.last; first += score_block_keys) {
      score_keys(piece.tile, first, std::min(score_block_keys, piece.last - first), take);
    }
  }

 private:
  /// How far ahead of the decoded block rows are fetched.
  static constexpr index_t blocks_ahead = 2;

  /// Calls f(slot or no_position, n, i) for runs of keys that lie behind each other in the cache:
  /// keys first + i to first + i + n.
  template <class F>
  void for_each_run(index_t request, index_t first, index_t count, F const& f) const noexcept {
    index_t const page_size = batch_.index_pages.page_size;
    for (index_t i = 0; i < count;) {
      index_t const in_page = page_size - (first + i) % page_size;
      position_t const slot = batch_.index_pages.slot(request, first + i);
      bool const mapped = in_.keys.has(slot);
      index_t n = std::min(in_page, count - i);
      if (mapped) n = std::min(n, in_.keys.block_size - slot % in_.keys.block_size);
      f(mapped ? slot : no_position, n, i);
      i += n;
    }
  }

  /// The rows of the block that begins at `first`, for a kernel that fetches them as it goes.
  void find_rows(index_t request, index_t first, char const** rows) const noexcept {
    auto const* const nowhere = reinterpret_cast<char const*>(rows);  // which is in the cache
    for_each_run(request, first, score_block_keys,
                 [&, this](position_t slot, index_t n, index_t i) noexcept {
                   if (slot == no_position) {
                     std::fill_n(rows + i, n, nowhere);
                     return;
                   }
                   auto const* const row = in_.keys.row(slot);
                   for (index_t j = 0; j < n; ++j) {
                     rows[i + j] = reinterpret_cast<char const*>(row + j * in_.keys.row_stride);
                   }
                 });
  }

  template <class Take>
  void score_keys(RowTile const& tile, index_t first, index_t count,
                  Take const& take) const noexcept {
    index_t const request = batch_.requests(tile.rows.first);
    char const* ahead[score_block_keys] = {};
    find_rows(request, first + blocks_ahead * score_block_keys, ahead);
    bool unmapped[score_block_keys] = {};
    bool any_unmapped = false;
    for_each_run(request, first, count, [&, this](position_t slot, index_t n, index_t i) noexcept {
      if (slot != no_position) return scorer_.take(i, slot, n);
      for (index_t last = i + n; i < last; ++i) {
        scorer_.blank(i);
        unmapped[i] = true;
      }
      any_unmapped = true;
    });

    char const* const* fetched = ahead;
    float scores[score_block_keys];
    for (index_t i = 0; i < tile.rows.count; ++i) {
      index_t const row = tile.rows.first + i;
      index_t const visible = std::min(count, cut_.length(row) - first);
      if (visible <= 0) continue;
      scorer_.score(i, visible, fetched, scores);
      fetched = nullptr;  // once is enough
      if (any_unmapped) {
        for (index_t s = 0; s < visible; ++s) {
          if (unmapped[s]) scores[s] = -std::numeric_limits<float>::infinity();
        }
      }
      take(row, first, visible, scores);
    }
  }

  Inputs const& in_;
  RowBatch<Space::host> const& batch_;
  ScoreCut const& cut_;
  Scorer scorer_;
};

}  // namespace detail
}  // namespace v0
}  // namespace indexshare
