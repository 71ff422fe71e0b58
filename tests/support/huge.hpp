// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>

#if defined(INDEXSHARE_TEST_CUDA)
#include <cuda_runtime_api.h>
#elif defined(__linux__)
#include <sys/mman.h>
#endif

namespace test {

/// Gigabytes of addresses, of which only the touched pages take memory: offsets past 2^31 for real.
class HugeMemory {
 public:
  explicit HugeMemory(std::size_t bytes) : bytes_(bytes) { reserve(); }
  HugeMemory(HugeMemory const&) = delete;
  HugeMemory& operator=(HugeMemory const&) = delete;
  ~HugeMemory() {
    if (data_ != nullptr) release();
  }

  /// Null where the system does not give so many addresses.
  template <class T>
  T* as() const noexcept {
    return static_cast<T*>(data_);
  }

 private:
#if defined(INDEXSHARE_TEST_CUDA)
  void reserve() {
    if (cudaMallocManaged(&data_, bytes_) != cudaSuccess) data_ = nullptr;
  }
  void release() { cudaFree(data_); }
#elif defined(__linux__)
  void reserve() {
    void* const memory = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE,
                              MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory != MAP_FAILED) data_ = memory;
  }
  void release() { munmap(data_, bytes_); }
#else
  void reserve() {}
  void release() {}
#endif

  std::size_t bytes_;
  void* data_ = nullptr;
};

}  // namespace test
