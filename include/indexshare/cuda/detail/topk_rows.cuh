// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/dims.hpp>
#include <indexshare/element.hpp>
#include <indexshare/topk/order.hpp>
#include <indexshare/views.hpp>

#include <cstdint>

namespace indexshare {
inline namespace v0 {
namespace detail {

/// The views of a top-k call, for kernels.
template <class Score>
struct TopKRows {
  Score const* scores;  ///< [rows, width]
  index_t score_stride;
  index_t width;
  position_t const* lengths;
  index_t length_stride;
  position_t* indices;  ///< [rows, top_k]
  index_t index_stride;
  index_t top_k;
  position_t* counts;
  index_t count_stride;

  __device__ std::uint32_t length(index_t row) const {
    index_t const stated = lengths[row * length_stride];
    return static_cast<std::uint32_t>(stated < 0 ? 0 : stated < width ? stated : width);
  }
  __device__ Score const* row(index_t row) const { return scores + row * score_stride; }
  __device__ position_t* selection(index_t row) const { return indices + row * index_stride; }
};

template <class Score>
TopKRows<Score> topk_rows(ScoreView<Space::device, Score const> const& scores,
                          LengthView<Space::device> const& lengths,
                          SelectionView<Space::device> const& out) noexcept {
  return {scores.data_handle(),  scores.stride(0),      scores.extent(1),
          lengths.data_handle(), lengths.stride(0),     out.indices.data_handle(),
          out.indices.stride(0), out.indices.extent(1), out.counts.data_handle(),
          out.counts.stride(0)};
}

template <class Score>
Shape topk_shape(ScoreView<Space::device, Score const> const& scores,
                 SelectionView<Space::device> const& out) noexcept {
  Shape shape;
  shape.rows = scores.extent(0);
  shape.keys = scores.extent(1);
  shape.top_k = out.indices.extent(1);
  return shape;
}

template <class Score>
__device__ inline float score_value(Score score) {
  return to_float(score);
}
/// The same value in one instruction.
__device__ inline float score_value(fp16 score) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(score.bits));
  return value;
}
template <class Score>
__device__ inline std::uint32_t score_key(Score score) {
  return order_key(score_value(score));
}
/// Last bits that are 0 in the keys of all scores: those that a wider significand has more.
template <class Score>
inline constexpr int key_zeros = 0;
template <>
inline constexpr int key_zeros<bf16> = 16;
template <>
inline constexpr int key_zeros<fp16> = 13;

/// A row that selects all it sees, by `threads` threads.
__device__ inline void write_whole_row(std::uint32_t length, std::uint32_t top_k,
                                       std::uint32_t threads, position_t* out) {
  for (std::uint32_t j = threadIdx.x; j < top_k; j += threads) {
    out[j] = j < length ? static_cast<position_t>(j) : no_position;
  }
}

}  // namespace detail
}  // namespace v0
}  // namespace indexshare
