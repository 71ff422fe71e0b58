// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/cache.hpp>
#include <indexshare/concepts.hpp>
#include <indexshare/cuda/detail/warp.cuh>
#include <indexshare/cuda/indexer_plan.hpp>
#include <indexshare/indexer/relu_dot.hpp>

#include <cstdint>

/// @file What a block of an indexer kernel works on: its query rows, cut into runs of one request,
/// and the tiles of keys that each run sees.

namespace indexshare {
inline namespace v0 {
namespace detail {

/// What both indexer kernels are given.
template <class Query, class KeyFormat>
struct ScoreCall {
  typename ReluDotIndexer<Query, KeyFormat>::template inputs<Space::device> in;
  LengthView<Space::device> lengths;
  LengthView<Space::device> requests;
  PageTable<Space::device> pages;
  ScoreView<Space::device> scores;
  ScoreRequest request;
  index_t chunk;  ///< keys of a block
};

/// Walks key tiles of a block, run by run; a run is rows that follow each other in one request, so
/// a tile is read once for all of them. A warp walks for itself: lane i holds row i of the block.
/// Its first tile of a run is `first` keys into the block's chunk, the others follow in steps of
/// `step` keys. Rows that select everything have length 0.
class ScoreTiles {
 public:
  template <class Call>
  __device__ ScoreTiles(Call const& call, int block_rows, int first, int step)
      : rows_(block_rows), step_(static_cast<std::uint32_t>(step)) {
    int const lane = lane_of_thread();
    index_t const place = index_t{blockIdx.x} * block_rows + lane;
    index_t const chunk = index_t{blockIdx.y} * call.chunk;
    first_key_ = static_cast<std::uint32_t>(min(chunk + first, max_position));
    last_key_ = static_cast<std::uint32_t>(min(chunk + call.chunk, max_position));
    if (lane < block_rows && place < call.request.rows.count) {
      index_t const row = call.request.rows.first + place;
      index_t const visible = clamp_length(call.lengths(row), call.scores.extent(1));
      length_ = visible > call.request.top_k ? static_cast<std::uint32_t>(visible) : 0;
      request_ = call.requests(row);
    }
    int const before = __shfl_up_sync(full_warp, request_, 1);
    starts_ = __ballot_sync(full_warp, lane < block_rows && (lane == 0 || before != request_));
    needed_ = __ballot_sync(full_warp, length_ > static_cast<std::uint32_t>(chunk));
    enter(0);
  }

  /// Whether there is a tile. The rest is about this tile.
  __device__ bool valid() const { return first_row_ < rows_; }
  __device__ int first_row() const { return first_row_; }  ///< of the run, in the block
  __device__ int last_row() const { return last_row_; }    ///< past the run
  __device__ int request() const { return run_request_; }
  __device__ std::uint32_t first() const { return position_; }  ///< position of its first key
  /// Past the keys that any row of the run sees.
  __device__ std::uint32_t end() const { return end_; }

  /// Keys that a row of the block sees.
  __device__ std::uint32_t length(int row) const { return of_lane(length_, row); }
  /// The rows for which any key of the chunk is scored, one bit each: the same in all warps.
  __device__ unsigned needed() const { return needed_; }

  __device__ void advance() {
    position_ += step_;
    if (position_ >= end_) enter(last_row_);
  }

 private:
  /// The first tile of the first run from `row` on that has one.
  __device__ void enter(int row) {
    int const lane = lane_of_thread();
    for (; row < rows_; row = last_row_) {
      unsigned const later = starts_ & (full_warp << 1 << row);
      last_row_ = later != 0 ? __ffs(static_cast<int>(later)) - 1 : rows_;
      unsigned const longest =
          __reduce_max_sync(full_warp, lane >= row && lane < last_row_ ? length_ : 0u);
      if (longest <= first_key_) continue;
      run_request_ = __shfl_sync(full_warp, request_, row);
      position_ = first_key_;
      end_ = min(longest, last_key_);
      break;
    }
    first_row_ = row;
  }

  int rows_;
  std::uint32_t step_;
  std::uint32_t first_key_;
  std::uint32_t last_key_;
  std::uint32_t length_ = 0;
  int request_ = no_position;
  unsigned starts_;
  unsigned needed_;

  int first_row_;
  int last_row_ = 0;
  int run_request_ = no_position;
  std::uint32_t position_ = 0;
  std::uint32_t end_ = 0;
};

/// Where a key lies: `block` of the cache, or none below zero, and its place in there. The same
/// answer as PageTable::slot and CacheView::has, for a table and a cache with blocks of one size
/// (indexer_check), in 32 bits.
struct KeyPlace {
  int block = no_position;
  std::uint32_t place = 0;
};

template <class Format>
__device__ KeyPlace find_key(PageTable<Space::device> const& table,
                             CacheView<Space::device, Format> const& cache, int request,
                             std::uint32_t position) {
  auto const page_size = static_cast<std::uint32_t>(table.page_size);
  std::uint32_t const page = position / page_size;
  KeyPlace found{no_position, position - page * page_size};
  if (table.contiguous()) {
    if (page == 0) found.block = request;
  } else if (request >= 0 && request < table.pages.extent(0) && page < table.pages.extent(1)) {
    found.block = table.pages(request, page);
  }
  if (found.block >= cache.blocks) found.block = no_position;
  return found;
}

}  // namespace detail
}  // namespace v0
}  // namespace indexshare
