// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/cuda/exec.cuh>

#include <catch2/catch_test_macros.hpp>

#include <cstddef>
#include <string>

#include <cuda_runtime_api.h>

/// @file The GPU (or an emulator in its place) as an executor of the case lists. Without a device
/// every test that needs one is skipped with the runtime's reason.

namespace test {

/// Ends the test case as skipped if there is no device.
inline void need_device() {
  static cudaError_t const error = [] {
    int devices = 0;
    cudaError_t const asked = cudaGetDeviceCount(&devices);
    return asked == cudaSuccess && devices == 0 ? cudaErrorNoDevice : asked;
  }();
  if (error != cudaSuccess) SKIP("no CUDA device: " << cudaGetErrorString(error));
}

inline void require(cudaError_t error) {
  INFO(cudaGetErrorString(error));
  REQUIRE(error == cudaSuccess);
}

/// A stream that does not wait for the default stream, one per program.
inline cudaStream_t cuda_stream() {
  need_device();
  static cudaStream_t const stream = [] {
    cudaStream_t made = nullptr;
    require(cudaStreamCreateWithFlags(&made, cudaStreamNonBlocking));
    return made;
  }();
  return stream;
}

inline indexshare::DeviceLimits cuda_limits() {
  need_device();
  auto const limits = indexshare::device_limits(0);
  REQUIRE(limits.has_value());
  return *limits;
}

struct Cuda : indexshare::CudaExec {
  Cuda() : CudaExec(cuda_stream(), cuda_limits()) {}
};

/// Waits for what was enqueued; the host may then read managed memory.
inline void finish(indexshare::CudaExec const& x) { require(cudaStreamSynchronize(x.stream())); }

/// Memory that the host and the device address alike.
inline std::byte* allocate_managed(std::size_t bytes) {
  need_device();
  void* memory = nullptr;
  require(cudaMallocManaged(&memory, bytes > 0 ? bytes : 1));
  return static_cast<std::byte*>(memory);
}

/// Memory of the device alone, of unknown contents.
inline std::byte* allocate_device(std::size_t bytes) {
  need_device();
  void* memory = nullptr;
  require(cudaMalloc(&memory, bytes > 0 ? bytes : 1));
  return static_cast<std::byte*>(memory);
}

}  // namespace test
