// SPDX-License-Identifier: Apache-2.0
//
// The engine on CUDA: its device, and the library's CUDA back end. The only part of the program
// that a CUDA compiler sees.
#include "../programs/cuda_machine.cuh"
#include "platform.hpp"

#include <indexshare/indexshare.cuh>

#include <memory>
#include <string>
#include <vector>

#include <cuda_runtime_api.h>

namespace mini {
namespace {

/// Managed memory, since the synthetic model computes on the host, and streams that do not wait for
/// the default stream.
class CudaDevice final : public Device {
 public:
  ~CudaDevice() override {
    for (cudaStream_t const stream : streams_) cudaStreamDestroy(stream);
  }
  void* allocate(std::size_t bytes) override {
    void* memory = nullptr;
    programs::require(cudaMallocManaged(&memory, bytes), "managed memory");
    return memory;
  }
  void release(void* memory) noexcept override { cudaFree(memory); }
  void* new_stream() override {
    cudaStream_t stream = nullptr;
    programs::require(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
    streams_.push_back(stream);
    return stream;
  }
  void wait(void* stream) override {
    programs::require(cudaStreamSynchronize(static_cast<cudaStream_t>(stream)),
                      "the device's work");
  }

 private:
  std::vector<cudaStream_t> streams_;
};

struct CudaPlace {
  static constexpr Space space = Space::device;
  indexshare::DeviceLimits limits;

  indexshare::CudaExec exec(void* stream) const {
    return {static_cast<cudaStream_t>(stream), limits};
  }
};

}  // namespace

Platform cuda_platform(CacheFormat format) {
  int device = 0;
  cudaDeviceProp properties{};
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaGetDeviceProperties(&properties, device);
  if (error != cudaSuccess) {
    Platform none;
    none.refusal = std::string("no CUDA device: ") + cudaGetErrorString(error);
    return none;
  }
  return platform_on(CudaPlace{value_of(indexshare::device_limits(device))},
                     std::string("CUDA on ") + properties.name, std::make_unique<CudaDevice>(),
                     format);
}

}  // namespace mini
