// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/cuda/detail/mma.cuh>
#include <indexshare/cuda/detail/score_rows.cuh>
#include <indexshare/cuda/detail/words.cuh>
#include <indexshare/cuda/indexer_plan.hpp>

#include <cstddef>
#include <cstdint>

/// @file The indexer for any types, lanes and heads, in fp32: a thread scores one key for one row.

namespace indexshare {
inline namespace v0 {
namespace detail {

/// What the scalar kernel is given.
template <class Query, class KeyFormat>
struct ScalarScoreCall : ScoreCall<Query, KeyFormat> {
  ScalarBlock block;
};

/// Decodes a key by a whole warp. A format of the user is decoded by one thread, with its
/// `decode_row`.
template <class Format>
__device__ inline void decode_key(CacheView<Space::device, Format> const& cache, index_t slot,
                                  float* out, int lane) {
  if (lane == 0) decode_row(cache, slot, out);
}
template <class T>
__device__ inline void decode_key(CacheView<Space::device, format::Plain<T>> const& cache,
                                  index_t slot, float* out, int lane) {
  T const* const row = cache.row(slot);
  for (index_t i = lane; i < cache.lanes; i += 32) out[i] = to_float(row[i]);
}
__device__ inline void decode_key(CacheView<Space::device, format::IndexKeyE4m3> const& cache,
                                  index_t slot, float* out, int lane) {
  std::byte const* const codes = cache.row(slot);
  std::byte const* const scales = cache.block_of(slot) + cache.block_size * cache.row_stride;
  auto const scale = load_unaligned<float>(scales + slot % cache.block_size * 4);
  for (index_t i = lane; i < cache.lanes; i += 32) {
    out[i] = to_float(e4m3{static_cast<std::uint8_t>(codes[i])}) * scale;
  }
}

/// The arithmetic of one warp: 32 keys, or as many as the tile has, for one row.
template <class Query, class KeyFormat>
class WarpScalarScores {
 public:
  /// `key`: the thread's decoded key; `staged`: the warp's own [heads_at_once][lanes_at_once].
  __device__ WarpScalarScores(ScalarScoreCall<Query, KeyFormat> const& call, float const* key,
                              float* staged)
      : call_(call), key_(key), staged_(staged) {}

  /// Lanes of each dot ascending, then heads ascending, by fused multiply-adds.
  __device__ float score(index_t row) const {
    index_t const heads = call_.in.q.extent(1);
    float sum = 0;
    for (index_t head = 0; head < heads; head += at_once) {
      float dots[at_once] = {};
      for (index_t lane = 0; lane < call_.in.q.extent(2); lane += width) {
        stage(row, head, lane);
        multiply(lane, dots);
      }
      for (int h = 0; h < at_once; ++h) {
        if (head + h < heads) sum = __fmaf_rn(call_.in.weights(row, head + h), relu(dots[h]), sum);
      }
    }
    return sum;
  }

 private:
  static constexpr int at_once = ScalarBlock::heads_at_once;
  static constexpr int width = ScalarBlock::lanes_at_once;

  /// A piece of the query, zero past its heads and lanes.
  __device__ void stage(index_t row, index_t head, index_t lane) const {
    __syncwarp();  // the piece before has been used
    for (int i = lane_of_thread(); i < at_once * width; i += 32) {
      index_t const h = head + i / width;
      index_t const d = lane + i % width;
      bool const filled = h < call_.in.q.extent(1) && d < call_.in.q.extent(2);
      staged_[i] = filled ? to_float(call_.in.q(row, h, d)) : 0.0f;
    }
    __syncwarp();
  }

  __device__ void multiply(index_t lane, float (&dots)[at_once]) const {
    int const count = static_cast<int>(min(index_t{width}, call_.in.q.extent(2) - lane));
    for (int d = 0; d < count; d += 4) {
      auto const key = *reinterpret_cast<float4 const*>(key_ + lane + d);
      for (int h = 0; h < at_once; ++h) {
        auto const query = *reinterpret_cast<float4 const*>(staged_ + h * width + d);
        dots[h] = __fmaf_rn(query.x, key.x, dots[h]);
        dots[h] = __fmaf_rn(query.y, key.y, dots[h]);
        dots[h] = __fmaf_rn(query.z, key.z, dots[h]);
        dots[h] = __fmaf_rn(query.w, key.w, dots[h]);
      }
    }
  }

  ScalarScoreCall<Query, KeyFormat> const& call_;
  float const* key_;
  float* staged_;
};

/// Decodes the keys of a tile, a warp per key, and notes which exist. Lanes up to a multiple of
/// four and keys that do not exist or are not seen become zeros.
template <class Query, class KeyFormat>
__device__ void decode_tile(ScalarScoreCall<Query, KeyFormat> const& call, ScoreTiles const& tile,
                            float* keys, int* exists) {
  int const lane = lane_of_thread();
  int const warp = warp_of_thread();
  auto const& cache = call.in.keys;
  for (int i = warp; i < call.block.tile; i += call.block.warps()) {
    float* const line = keys + i * call.block.line;
    std::uint32_t const position = tile.first() + static_cast<std::uint32_t>(i);
    position_t const slot =
        position < tile.end() ? call.pages.slot(tile.request(), position) : no_position;
    bool const found = cache.has(slot);
    if (found) decode_key(cache, slot, line, lane);
    index_t const filled = found ? cache.lanes : 0;
    for (index_t d = filled + lane; d < call.block.line; d += 32) line[d] = 0.0f;
    if (lane == 0) exists[i] = found ? 1 : 0;
  }
}

/// grid: x groups of rows, y chunks of keys. Two barriers of the block per tile: before the keys of
/// the last one are overwritten, and before those of this one are read. Blocks share nothing.
template <class Query, class KeyFormat>
INDEXSHARE_KERNEL void score_scalar_kernel(
    __grid_constant__ ScalarScoreCall<Query, KeyFormat> const call) {
  extern __shared__ __align__(128) std::byte shared[];
  ScalarBlock const& block = call.block;
  auto* const keys = reinterpret_cast<float*>(shared);
  auto* const exists = reinterpret_cast<int*>(shared + block.exists_at());
  int const warp = warp_of_thread();
  int const key = 32 * (warp % block.key_warps()) + lane_of_thread();
  int const own_row = warp / block.key_warps();
  bool const has_key = key < block.tile;  // a tile of long keys has fewer than 32
  auto* const staged = reinterpret_cast<float*>(shared + block.queries_at()) +
                       warp * ScalarBlock::heads_at_once * ScalarBlock::lanes_at_once;
  WarpScalarScores<Query, KeyFormat> const scores(call, keys + (has_key ? key : 0) * block.line,
                                                  staged);

  for (ScoreTiles tile(call, block.rows, 0, block.tile); tile.valid(); tile.advance()) {
    __syncthreads();  // the tile before has been used
    decode_tile(call, tile, keys, exists);
    __syncthreads();
    std::uint32_t const length = tile.length(own_row);
    if (own_row < tile.first_row() || own_row >= tile.last_row() || length <= tile.first()) {
      continue;
    }
    index_t const place = index_t{blockIdx.x} * block.rows + own_row;
    float const score = scores.score(call.request.rows.first + place);
    std::uint32_t const position = tile.first() + static_cast<std::uint32_t>(key);
    if (has_key && position < length) {
      call.scores(place, position) = exists[key] != 0 ? score : minus_infinity();
    }
  }
}

}  // namespace detail
}  // namespace v0
}  // namespace indexshare
