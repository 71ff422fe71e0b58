// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace indexshare {
inline namespace v0 {

/// What the back end asks of a GPU. A plain value: sizes and the capability query are arithmetic
/// on it, on any machine; `device_limits` (cuda/exec.cuh) reads it from a device.
struct DeviceLimits {
  int compute_capability = 0;   ///< 10 * major + minor: 80, 86, 89, 90, 100, 120, 121
  int multiprocessors = 0;      ///< SMs; they shape grids, never results
  int shared_memory_bytes = 0;  ///< most that one block may opt in to

  friend constexpr bool operator==(DeviceLimits const&, DeviceLimits const&) noexcept = default;
};

/// Whether the tensor cores multiply e4m3 (mma.sync m16n8k32). The others convert exactly.
constexpr bool multiplies_e4m3(DeviceLimits const& limits) noexcept {
  return limits.compute_capability >= 89;
}

}  // namespace v0
}  // namespace indexshare
