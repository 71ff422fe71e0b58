// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace test {

/// Gigabytes of addresses, of which only the touched pages take memory: offsets past 2^31 for real.
class HugeMemory {
 public:
  explicit HugeMemory(std::size_t bytes) : bytes_(bytes) {
#if defined(__linux__)
    void* const memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                              MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory != MAP_FAILED) data_ = memory;
#endif
  }
  HugeMemory(HugeMemory const&) = delete;
  HugeMemory& operator=(HugeMemory const&) = delete;
  ~HugeMemory() {
#if defined(__linux__)
    if (data_ != nullptr) munmap(data_, bytes_);
#endif
  }

  /// Null where the system does not give so many addresses.
  template <class T>
  T* as() const noexcept {
    return static_cast<T*>(data_);
  }

 private:
  std::size_t bytes_;
  void* data_ = nullptr;
};

}  // namespace test
