// SPDX-License-Identifier: Apache-2.0
//
// The demo's layers on the CUDA back end: the only part of the program that a CUDA compiler sees.
#include "cuda_machine.cuh"
#include "demo_backend.hpp"

#include <indexshare/indexshare.cuh>

#include <string>

#include <cuda_runtime_api.h>

namespace programs {

DemoBackend cuda_backend(ThreadPool& pool) {
  DemoBackend backend;
  auto const refused = [&backend](cudaError_t error) {
    if (error == cudaSuccess) return false;
    backend.refusal = std::string("no CUDA device: ") + cudaGetErrorString(error);
    return true;
  };
  int device = 0;
  cudaDeviceProp properties{};
  if (refused(cudaGetDevice(&device))) return backend;
  if (refused(cudaGetDeviceProperties(&properties, device))) return backend;
  auto const limits = indexshare::device_limits(device);
  if (!limits) {
    refused(static_cast<cudaError_t>(limits.error().cuda_error));
    return backend;
  }
  backend.where = std::string("CUDA on ") + properties.name;
  backend.timed = false;  // managed memory, which the checks on the host pull back and forth
  backend.run = run_on(CudaMachine(pool, *limits));
  return backend;
}

}  // namespace programs
