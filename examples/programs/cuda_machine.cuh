// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "host_machine.hpp"

#include <indexshare/cuda/exec.cuh>
#include <indexshare/workspace.hpp>

#include <cstddef>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <cuda_runtime_api.h>

namespace programs {

/// Throws std::runtime_error with the runtime's words.
inline void require(cudaError_t error, char const* what) {
  if (error == cudaSuccess) return;
  throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error));
}

/// Memory that the host and the device address alike, aligned to `workspace_alignment`. The host
/// may touch it while nothing that uses it is enqueued.
class ManagedMemory {
 public:
  ManagedMemory() = default;
  explicit ManagedMemory(indexshare::WorkspaceSize size) : bytes_(size.bytes) {
    if (bytes_ == 0) return;
    void* memory = nullptr;
    require(cudaMallocManaged(&memory, bytes_), "managed memory");
    data_.reset(memory);
  }
  ManagedMemory(ManagedMemory&& other) noexcept
      : bytes_(std::exchange(other.bytes_, 0)), data_(std::move(other.data_)) {}
  ManagedMemory& operator=(ManagedMemory&& other) noexcept {
    bytes_ = std::exchange(other.bytes_, 0);
    data_ = std::move(other.data_);
    return *this;
  }

  indexshare::Workspace view() const noexcept { return {data_.get(), bytes_}; }

 private:
  struct Free {
    void operator()(void* data) const noexcept { cudaFree(data); }
  };
  std::size_t bytes_ = 0;
  std::unique_ptr<void, Free> data_;
};

/// The same as an allocator of standard containers.
template <class T>
struct ManagedAllocator {
  using value_type = T;

  ManagedAllocator() = default;
  template <class U>
  ManagedAllocator(ManagedAllocator<U> const&) noexcept {}

  T* allocate(std::size_t count) {
    void* memory = nullptr;
    require(cudaMallocManaged(&memory, count * sizeof(T)), "managed memory");
    return static_cast<T*>(memory);
  }
  void deallocate(T* memory, std::size_t) noexcept { cudaFree(memory); }
  template <class U>
  bool operator==(ManagedAllocator<U> const&) const noexcept {
    return true;
  }
};

/// The current device as a machine of the demo (host_machine.hpp says what that is): a stream of
/// its own, which does not wait for the default stream, and managed memory. Copies share the
/// stream.
class CudaMachine {
 public:
  using Exec = indexshare::CudaExec;
  static constexpr indexshare::Space space = indexshare::Space::device;
  using Memory = ManagedMemory;
  template <class T>
  using Vector = std::vector<T, ManagedAllocator<T>>;

  /// The attention rounds softmax weights w to bf16, each by at most 2^-8 of itself: an output, the
  /// sum of w * v, is off by at most 2^-8 of the sum of w * |v|. With one key that is 2^-8 of the
  /// output. With many keys of either sign it is more than the output, but the roundings are
  /// independent: they add up as the terms do, to 0.42 * 2^-8 of the outputs in the root mean
  /// square, and over 512 lanes the largest error is to the largest output as the one mean is to
  /// the other. Twice the bound for one key covers both, with the fp32 sums.
  static constexpr double output_tolerance = 0x1p-7;

  CudaMachine(ThreadPool& pool, indexshare::DeviceLimits const& limits)
      : pool_(&pool), limits_(limits) {
    cudaStream_t stream = nullptr;
    require(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
    stream_.reset(stream, [](cudaStream_t s) { cudaStreamDestroy(s); });
  }

  Exec exec() const { return {stream_.get(), limits_}; }
  HostMachine::Exec host() const { return {{pool_}}; }
  void finish() const { require(cudaStreamSynchronize(stream_.get()), "the device's work"); }

 private:
  ThreadPool* pool_;
  indexshare::DeviceLimits limits_;
  std::shared_ptr<CUstream_st> stream_;
};

}  // namespace programs
