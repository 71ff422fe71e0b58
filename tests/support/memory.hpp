// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/workspace.hpp>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <initializer_list>
#include <new>
#include <span>
#include <type_traits>
#include <vector>

#if defined(INDEXSHARE_TEST_CUDA)
#include "cuda_executor.hpp"
#endif

#if defined(__SANITIZE_ADDRESS__)
#define TEST_HAS_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define TEST_HAS_ASAN 1
#endif
#endif
#if defined(TEST_HAS_ASAN)
#include <sanitizer/asan_interface.h>
#endif

/// @file Memory that shows who wrote or read outside of it. On CUDA it is managed memory without
/// guard zones: there compute-sanitizer or an emulator knows each allocation's end.

namespace test {

/// Makes any access to the bytes an error under the address sanitizer; nothing elsewhere.
inline void forbid([[maybe_unused]] void const* data, [[maybe_unused]] std::size_t bytes) {
#if defined(TEST_HAS_ASAN)
  __asan_poison_memory_region(data, bytes);
#endif
}
inline void allow([[maybe_unused]] void const* data, [[maybe_unused]] std::size_t bytes) {
#if defined(TEST_HAS_ASAN)
  __asan_unpoison_memory_region(data, bytes);
#endif
}

/// A NaN in every floating element type, -1 in an integer.
inline constexpr std::byte nan_poison{0xFF};
/// For outputs: neither NaN nor `no_position`, so an entry that was not written shows.
inline constexpr std::byte unwritten{0xA5};

inline constexpr std::size_t block_alignment = indexshare::workspace_alignment;

#if defined(INDEXSHARE_TEST_CUDA)
inline constexpr std::size_t guard_bytes = 0;
inline std::byte* allocate(std::size_t bytes) { return allocate_managed(bytes); }
inline void release(std::byte* memory) { cudaFree(memory); }
#else
inline constexpr std::size_t guard_bytes = 256;
inline std::byte* allocate(std::size_t bytes) {
  return static_cast<std::byte*>(::operator new (bytes, std::align_val_t{block_alignment}));
}
inline void release(std::byte* memory) {
  ::operator delete (memory, std::align_val_t{block_alignment});
}
#endif

/// Exactly `count` elements, aligned to 256 bytes, between guard zones.
template <class T>
class Guarded {
  static_assert(std::is_trivially_copyable_v<T>);

 public:
  explicit Guarded(std::size_t count, std::byte fill = nan_poison)
      : count_(count), memory_(allocate(total())) {
    std::memset(memory_, static_cast<int>(guard_byte), total());
    std::memset(memory_ + guard, static_cast<int>(fill), bytes());
    forbid_guards();
  }
  explicit Guarded(std::span<T const> values) : Guarded(values.size()) {
    std::copy(values.begin(), values.end(), data());
  }
  Guarded(Guarded const& other) : Guarded(std::span<T const>(other.data(), other.size())) {}
  Guarded(Guarded&& other) noexcept : count_(other.count_), memory_(other.memory_) {
    other.memory_ = nullptr;
  }
  Guarded& operator=(Guarded const&) = delete;
  Guarded& operator=(Guarded&&) = delete;
  ~Guarded() {
    if (memory_ == nullptr) return;
    allow(memory_, total());
    release(memory_);
  }

  T* data() noexcept { return reinterpret_cast<T*>(memory_ + guard); }
  T const* data() const noexcept { return reinterpret_cast<T const*>(memory_ + guard); }
  std::size_t size() const noexcept { return count_; }
  std::size_t bytes() const noexcept { return count_ * sizeof(T); }
  T& operator[](std::size_t i) noexcept { return data()[i]; }
  T const& operator[](std::size_t i) const noexcept { return data()[i]; }
  std::span<T const> span() const noexcept { return {data(), count_}; }
  void fill(std::byte value) { std::memset(data(), static_cast<int>(value), bytes()); }

  /// Whether the guard zones are as they were.
  bool intact() const {
    allow(memory_, total());
    auto const untouched = [](std::byte b) { return b == guard_byte; };
    bool const ok = std::all_of(memory_, memory_ + guard, untouched) &&
                    std::all_of(memory_ + guard + bytes(), memory_ + total(), untouched);
    forbid_guards();
    return ok;
  }

 private:
  static constexpr std::size_t guard = guard_bytes;
  static constexpr std::byte guard_byte{0xFF};  // what lies around is NaN, too

  std::size_t total() const noexcept { return bytes() + 2 * guard; }
  void forbid_guards() const {
    forbid(memory_, guard);
    forbid(memory_ + guard + bytes(), guard);
  }

  std::size_t count_;
  std::byte* memory_;
};

/// The values, where any executor can read them.
template <class T>
Guarded<T> guarded(std::vector<T> const& values) {
  return Guarded<T>(std::span<T const>(values));
}
template <class T>
Guarded<T> guarded(std::initializer_list<T> values) {
  return guarded(std::vector<T>(values));
}

/// The bytes of `unwritten` as a T.
template <class T>
T unwritten_value() {
  T value;
  std::memset(&value, static_cast<int>(unwritten), sizeof(T));
  return value;
}

#if defined(INDEXSHARE_TEST_CUDA)
/// Scratch of exactly `bytes` bytes of device memory. Without another fill it is left as it comes,
/// so that a checker for uninitialised memory sees what is read before it is written.
class Scratch {
 public:
  explicit Scratch(indexshare::WorkspaceSize size, std::byte fill = nan_poison)
      : bytes_(size.bytes), memory_(allocate_device(size.bytes)) {
    if (fill == nan_poison) return;
    require(cudaMemset(memory_, static_cast<int>(fill), bytes_));
    require(cudaDeviceSynchronize());
  }
  Scratch(Scratch const&) = delete;
  Scratch& operator=(Scratch const&) = delete;
  ~Scratch() { cudaFree(memory_); }
  indexshare::Workspace get() noexcept { return {memory_, bytes_}; }
  bool intact() const { return true; }

 private:
  std::size_t bytes_;
  std::byte* memory_;
};
#else
/// Scratch of exactly `bytes` bytes, full of NaN.
class Scratch {
 public:
  explicit Scratch(indexshare::WorkspaceSize size, std::byte fill = nan_poison)
      : memory_(size.bytes, fill) {}
  indexshare::Workspace get() noexcept { return {memory_.data(), memory_.size()}; }
  bool intact() const { return memory_.intact(); }

 private:
  Guarded<std::byte> memory_;
};
#endif

}  // namespace test
