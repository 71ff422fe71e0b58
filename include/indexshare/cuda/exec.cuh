// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/cuda/device_limits.hpp>
#include <indexshare/exec.hpp>
#include <indexshare/status.hpp>

#include <concepts>
#include <cstddef>
#include <type_traits>

#include <cuda_runtime_api.h>

namespace indexshare {
inline namespace v0 {

/// A failed call of the CUDA runtime, with its code in `cuda_error`.
constexpr Status cuda_failure(cudaError_t error, char const* what) noexcept {
  Status status = failure(Errc::backend_error, what);
  status.cuda_error = static_cast<int>(error);
  return status;
}

/// Limits of a device of this machine. Not for the hot path: ask once and keep the value.
/// Errors: backend_error with the runtime's code.
inline Result<DeviceLimits> device_limits(int device) noexcept {
  int major = 0;
  int minor = 0;
  DeviceLimits limits;
  struct Query {
    int* value;
    cudaDeviceAttr attribute;
  };
  for (Query const query :
       {Query{&major, cudaDevAttrComputeCapabilityMajor},
        Query{&minor, cudaDevAttrComputeCapabilityMinor},
        Query{&limits.multiprocessors, cudaDevAttrMultiProcessorCount},
        Query{&limits.shared_memory_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin}}) {
    cudaError_t const error = cudaDeviceGetAttribute(query.value, query.attribute, device);
    if (error != cudaSuccess) {
      cudaGetLastError();  // reported here, and to nobody else's next call
      return refuse(cuda_failure(error, "attribute of the device"));
    }
  }
  limits.compute_capability = 10 * major + minor;
  return limits;
}

/// Execution on a CUDA stream of the caller. There is no default stream: CudaExec{0, ...} and
/// CudaExec{nullptr, ...} do not compile, and the limits of the stream's device are stated.
///
/// Calls only enqueue kernels on the stream: no allocation, synchronisation or copy to the host, so
/// they can be captured into a graph and replayed with new data in the same memory.
class CudaExec {
 public:
  static constexpr Space space = Space::device;

  constexpr CudaExec(cudaStream_t stream, DeviceLimits const& limits) noexcept
      : stream_(stream), limits_(limits) {}
  /// cuda::stream_ref and an engine's own stream class.
  template <class Stream>
  requires requires(Stream const& stream) {
    { stream.get() } -> std::convertible_to<cudaStream_t>;
  }
  constexpr CudaExec(Stream const& stream, DeviceLimits const& limits) noexcept
      : CudaExec(static_cast<cudaStream_t>(stream.get()), limits) {}
  template <std::integral Number>
  CudaExec(Number, DeviceLimits const&) = delete;
  CudaExec(std::nullptr_t, DeviceLimits const&) = delete;

  constexpr cudaStream_t stream() const noexcept { return stream_; }
  constexpr DeviceLimits const& limits() const noexcept { return limits_; }

  /// For debugging, not for graphs: every kernel is waited for and a fault is reported by the call
  /// that launched it, under the kernel's name, instead of by whatever comes next.
  constexpr CudaExec checking_each_kernel() const noexcept {
    CudaExec other = *this;
    other.checks_each_kernel_ = true;
    return other;
  }
  constexpr bool checks_each_kernel() const noexcept { return checks_each_kernel_; }

 private:
  cudaStream_t stream_;
  DeviceLimits limits_;
  bool checks_each_kernel_ = false;
};
static_assert(Executor<CudaExec> && std::is_trivially_copyable_v<CudaExec>);

}  // namespace v0
}  // namespace indexshare
