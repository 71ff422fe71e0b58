// SPDX-License-Identifier: Apache-2.0
#include "engine.hpp"

#include <cstdio>
#include <stdexcept>
#include <vector>

#include <cuda_runtime_api.h>

namespace {

void require(cudaError_t error) {
  if (error != cudaSuccess) throw std::runtime_error(cudaGetErrorString(error));
}

class CudaDevice : public engine::Device {
 public:
  CudaDevice() { require(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking)); }
  ~CudaDevice() override {
    for (void* const block : blocks_) cudaFree(block);
    cudaStreamDestroy(stream_);
  }
  CudaDevice(CudaDevice const&) = delete;
  CudaDevice& operator=(CudaDevice const&) = delete;

  cudaStream_t stream() const { return stream_; }
  void* allocate(std::size_t bytes) override {
    void* memory = nullptr;
    require(cudaMalloc(&memory, bytes));
    blocks_.push_back(memory);
    return memory;
  }
  void upload(void* to, void const* from, std::size_t bytes) override {
    require(cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, stream_));
    require(cudaStreamSynchronize(stream_));
  }
  void download(void* to, void const* from, std::size_t bytes) override {
    require(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, stream_));
    require(cudaStreamSynchronize(stream_));
  }

 private:
  cudaStream_t stream_ = nullptr;
  std::vector<void*> blocks_;
};

}  // namespace

int main() {
  int devices = 0;
  cudaError_t const found = cudaGetDeviceCount(&devices);
  if (found != cudaSuccess || devices == 0) {
    std::fprintf(stderr, "no CUDA device: %s\n",
                 cudaGetErrorString(found == cudaSuccess ? cudaErrorNoDevice : found));
    return 1;
  }
  try {
    CudaDevice device;
    auto const stack = engine::cuda_stack(engine::config(), device.stream());
    return stack == nullptr ? 1 : engine::run(device, *stack);
  } catch (std::runtime_error const& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
