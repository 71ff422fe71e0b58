// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/cuda/detail/warp.cuh>

#include <cstdint>

/// @file Sums over the threads of a block of `Warps` warps, through a number per warp in shared
/// memory. All threads of the block call these functions.

namespace indexshare {
inline namespace v0 {
namespace detail {

__device__ inline std::uint32_t warp_lane() { return threadIdx.x % 32; }
__device__ inline std::uint32_t warp_index() { return threadIdx.x / 32; }

struct BlockSum {
  std::uint32_t before;  ///< of the threads with lower numbers
  std::uint32_t total;
};

__device__ inline std::uint32_t inclusive_warp_sum(std::uint32_t value) {
  for (int step = 1; step < 32; step *= 2) {
    std::uint32_t const other = __shfl_up_sync(full_warp, value, static_cast<unsigned>(step));
    if (warp_lane() >= static_cast<std::uint32_t>(step)) value += other;
  }
  return value;
}

/// Sums of a number per warp. Passes one barrier; two calls need another one between them.
struct WarpSums {
  std::uint32_t inclusive;  ///< of the warps up to number warp_lane()

  __device__ std::uint32_t through(std::uint32_t warp) const {
    return __shfl_sync(full_warp, inclusive, static_cast<int>(warp));
  }
};
template <int Warps>
__device__ WarpSums sum_of_warps(std::uint32_t* warps, std::uint32_t value) {
  if (warp_lane() == 31) warps[warp_index()] = value;
  __syncthreads();
  return {inclusive_warp_sum(warp_lane() < Warps ? warps[warp_lane()] : 0)};
}

/// The same of a number per thread.
template <int Warps>
__device__ BlockSum block_sum(std::uint32_t* warps, std::uint32_t value) {
  std::uint32_t const inclusive = inclusive_warp_sum(value);
  WarpSums const sums = sum_of_warps<Warps>(warps, inclusive);
  // The warp's own sum is read back: a register for it would spill one in topk_row on sm_90.
  std::uint32_t const own = warps[warp_index()];
  return {sums.through(warp_index()) - own + inclusive - value, sums.through(Warps - 1)};
}

}  // namespace detail
}  // namespace v0
}  // namespace indexshare
