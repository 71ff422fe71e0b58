// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/status.hpp>

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

namespace detail {

/// What every kernel needs: cp.async and mma.sync of bf16.
inline constexpr int oldest_compute_capability = 80;

constexpr Status check_compute_capability(char const* what, DeviceLimits const& limits) noexcept {
  return limits.compute_capability >= oldest_compute_capability
             ? Status{}
             : failure(Errc::unsupported, what, oldest_compute_capability,
                       limits.compute_capability);
}
constexpr Status check_shared_memory(char const* what, DeviceLimits const& limits,
                                     int bytes) noexcept {
  return limits.shared_memory_bytes >= bytes
             ? Status{}
             : failure(Errc::unsupported, what, bytes, limits.shared_memory_bytes);
}

}  // namespace detail

}  // namespace v0
}  // namespace indexshare
