// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/dims.hpp>
#include <indexshare/element.hpp>

/// @file What the kernels of every instruction set take: a table of function pointers per stage.
/// Layouts do not depend on the instruction set.

namespace indexshare {
inline namespace v0 {
namespace detail {

/// Heads lie side by side in panels of this many floats, whatever the width of a vector.
inline constexpr index_t panel_width = 16;

constexpr index_t padded_to_panel(index_t n) noexcept {
  return (n + panel_width - 1) / panel_width * panel_width;
}

/// Exact conversions of `n` elements to float, NaN to NaN.
struct WidenKernels {
  void (*from_bf16)(bf16 const* source, index_t n, float* out) noexcept;
  void (*from_fp16)(fp16 const* source, index_t n, float* out) noexcept;
  /// times `scale`, rounded once
  void (*from_e4m3)(e4m3 const* source, index_t n, float scale, float* out) noexcept;
};

/// Keys that are scored at a time: they lie decoded in the first-level cache beside the queries.
inline constexpr index_t score_block_keys = 12;

/// One query row against one block of keys.
struct ScoreBlock {
  float const* queries;  ///< [panels][dim][panel_width], zero past the last head
  float const* weights;  ///< [panels][panel_width], zero past the last head
  index_t heads;
  index_t dim;
  float const* keys;  ///< [score_block_keys][dim]; rows past `count` may hold anything
  index_t count;
};

struct ScoreKernels {
  /// out[s] = sum_h weights[h] * max(0, sum_d queries[h][d] * keys[s][d]) for s < count, in floats:
  /// lanes ascending, fused where the instruction set has it; then the heads that share a place in
  /// a vector ascending; then the places of a vector in a fixed tree. NaN stays NaN.
  void (*score)(ScoreBlock const& block, float* out) noexcept;
};

}  // namespace detail
}  // namespace v0
}  // namespace indexshare
