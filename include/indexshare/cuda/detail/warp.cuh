// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

/// @file Threads of a warp, and values that stay in their registers.

namespace indexshare {
inline namespace v0 {
namespace detail {

inline constexpr unsigned full_warp = 0xFFFFFFFFu;
__device__ inline int warp_of_thread() { return static_cast<int>(threadIdx.x / 32); }
__device__ inline int lane_of_thread() { return static_cast<int>(threadIdx.x % 32); }

/// A value that is computed here, once: without this the compiler prefers to compute a thread's
/// constants anew in the innermost loop.
template <class T>
__device__ __forceinline__ T kept(T value) {
  if constexpr (sizeof(T) == 8) {
    asm("" : "+l"(value));
  } else {
    asm("" : "+r"(value));
  }
  return value;
}

/// The value of lane `lane` of the warp.
__device__ inline std::uint32_t of_lane(std::uint32_t value, int lane) {
  std::uint32_t result;
  asm volatile("shfl.sync.idx.b32 %0, %1, %2, 31, 0xFFFFFFFF;"
               : "=r"(result)
               : "r"(value), "r"(lane));
  return result;
}

/// The largest of the warp's values, on all of its threads.
__device__ inline float largest_of_warp(float value) {
  for (int apart = 16; apart > 0; apart /= 2) {
    value = fmaxf(value, __shfl_xor_sync(full_warp, value, apart));
  }
  return value;
}

/// A number of 64 bits for each lane, to be asked of other lanes.
class LaneNumbers {
 public:
  __device__ explicit LaneNumbers(std::int64_t own)
      : low_(static_cast<std::uint32_t>(own)), high_(static_cast<std::uint32_t>(own >> 32)) {}

  __device__ std::int64_t of(int lane) const {
    std::int64_t number;
    asm("mov.b64 %0, {%1, %2};"
        : "=l"(number)
        : "r"(of_lane(low_, lane)), "r"(of_lane(high_, lane)));
    return number;
  }

 private:
  std::uint32_t low_;
  std::uint32_t high_;
};

}  // namespace detail
}  // namespace v0
}  // namespace indexshare
