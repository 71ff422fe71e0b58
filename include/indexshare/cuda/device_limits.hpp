// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/exec.hpp>
#include <indexshare/status.hpp>

#include <concepts>

namespace indexshare {
inline namespace v0 {

/// What the back end asks of a GPU. A plain value: sizes and the capability query are arithmetic
/// on it, on any machine; `device_limits` (cuda/exec.cuh) reads it from a device.
struct DeviceLimits {
  int compute_capability = 0;   ///< 10 * major + minor: 80, 86, 89, 90, 100, 120, 121
  int multiprocessors = 0;      ///< SMs; they shape grids, never results, and count as 1 at least
  int shared_memory_bytes = 0;  ///< most that one block may opt in to

  friend constexpr bool operator==(DeviceLimits const&, DeviceLimits const&) noexcept = default;
};

/// An executor that answers size queries and runs nothing: for a device of another machine, and for
/// code without a CUDA toolkit. Every size and every refusal is that of a CudaExec with the same
/// limits, since both take the same overloads.
struct CudaPlanner {
  static constexpr Space space = Space::device;

  DeviceLimits device{};

  constexpr DeviceLimits const& limits() const noexcept { return device; }
};
static_assert(Executor<CudaPlanner>);

namespace detail {

/// CudaExec and CudaPlanner: what a call takes is arithmetic on the limits.
template <class X>
concept HasDeviceLimits = Executor<X> && requires(X const x) {
  { x.limits() }
  noexcept->std::same_as<DeviceLimits const&>;
};

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
