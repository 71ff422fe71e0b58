// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/cuda/exec.cuh>

#include <type_traits>

#include <cuda_runtime.h>

namespace indexshare {
inline namespace v0 {
namespace detail {

/// Shape of a launch. A grid without blocks is legal and launches nothing.
struct LaunchShape {
  dim3 grid;
  int threads = 0;
  int shared_bytes = 0;  ///< dynamic shared memory
};

/// Without an opt-in a kernel gets no more dynamic shared memory than this.
inline constexpr int plain_shared_bytes = 48 * 1024;

/// Enqueues a kernel on the executor's stream. `what` names the kernel in errors, which are those
/// of this launch alone.
template <class... Parameters, class... Arguments>
Status launch(CudaExec const& x, char const* what, void (*kernel)(Parameters...),
              LaunchShape const& shape, Arguments const&... arguments) noexcept {
  if (shape.grid.x == 0 || shape.grid.y == 0 || shape.grid.z == 0) return {};
  if (shape.shared_bytes > plain_shared_bytes) {
    // The opt-in belongs to the kernel, not to the launch: always the same one, so that a thread
    // with a smaller launch takes nothing from another between its opt-in and its launch.
    cudaError_t const error = cudaFuncSetAttribute(
        kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, x.limits().shared_memory_bytes);
    if (error != cudaSuccess) return cuda_failure(error, what);
  }
  cudaLaunchConfig_t config{};
  config.gridDim = shape.grid;
  config.blockDim = dim3(static_cast<unsigned>(shape.threads));
  config.dynamicSmemBytes = static_cast<std::size_t>(shape.shared_bytes);
  config.stream = x.stream();
  cudaError_t error = cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...);
  if (error == cudaSuccess && x.checks_each_kernel()) error = cudaStreamSynchronize(x.stream());
  return error == cudaSuccess ? Status{} : cuda_failure(error, what);
}

}  // namespace detail
}  // namespace v0
}  // namespace indexshare
