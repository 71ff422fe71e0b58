// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/cuda/detail/launch.cuh>
#include <indexshare/dims.hpp>
#include <indexshare/macros.hpp>

#include <algorithm>
#include <type_traits>

/// @file Kernels that treat lanes one by one: a warp per stretch of a line, lines being the rows of
/// a matrix or the heads of rows.

namespace indexshare {
inline namespace v0 {
namespace detail {

/// As many blocks fill every GPU; where there are more items, each block takes several.
inline constexpr index_t most_blocks = 4096;
constexpr unsigned blocks_for(index_t items) noexcept {
  return static_cast<unsigned>(std::min(items, most_blocks));
}

/// [rows, heads, lanes] cut into stretches.
struct Lines {
  static constexpr index_t stretch = 256;  ///< lanes: 8 for each thread of a warp

  index_t rows;
  index_t heads;
  index_t lanes;

  INDEXSHARE_HD constexpr index_t stretches_of_a_line() const noexcept {
    return (lanes + stretch - 1) / stretch;
  }
  INDEXSHARE_HD constexpr index_t stretches() const noexcept {
    return rows * heads * stretches_of_a_line();
  }
};

/// One thread's lanes of a stretch: neighbours in a warp have neighbouring lanes.
struct LaneRange {
  index_t first;
  index_t last;

  template <class F>
  __device__ void for_each(F const& f) const {
    for (index_t lane = first; lane < last; lane += warp_threads) f(lane);
  }

  static constexpr int warp_threads = 32;
};

inline constexpr int line_warps = 8;  ///< of a block

/// f(row, head, lanes) on every thread of a warp, for every stretch.
template <class F>
INDEXSHARE_KERNEL void each_line_kernel(__grid_constant__ Lines const lines,
                                        __grid_constant__ F const f) {
  index_t const warp = index_t{blockIdx.x} * line_warps + threadIdx.x / LaneRange::warp_threads;
  index_t const member = threadIdx.x % LaneRange::warp_threads;
  index_t const per_line = lines.stretches_of_a_line();
  for (index_t i = warp; i < lines.stretches(); i += index_t{gridDim.x} * line_warps) {
    index_t const line = i / per_line;
    index_t const begin = i % per_line * Lines::stretch;
    index_t const end = begin + Lines::stretch < lines.lanes ? begin + Lines::stretch : lines.lanes;
    f(line / lines.heads, line % lines.heads, LaneRange{begin + member, end});
  }
}

/// Runs `f`, a trivially copyable function object for the device, over all lines. `what` names it.
template <class F>
Status for_each_line(CudaExec const& x, char const* what, Lines const& lines, F const& f) noexcept {
  static_assert(std::is_trivially_copyable_v<F>);
  return launch(x, what, each_line_kernel<F>,
                {dim3(blocks_for((lines.stretches() + line_warps - 1) / line_warps)),
                 line_warps * LaneRange::warp_threads, 0},
                lines, f);
}

}  // namespace detail
}  // namespace v0
}  // namespace indexshare
