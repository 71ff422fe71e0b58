// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/dims.hpp>

#include <cstddef>
#include <cstdint>
#include <limits>

namespace indexshare {
inline namespace v0 {

/// Every block that a carver hands out starts at a multiple of this.
inline constexpr std::size_t workspace_alignment = 256;

/// Bytes of scratch memory. The memory must be aligned to `workspace_alignment`.
struct WorkspaceSize {
  std::size_t bytes = 0;
};

/// Scratch memory of one call, in the executor's space. Its contents mean nothing between calls;
/// two calls in flight need two.
struct Workspace {
  void* data = nullptr;
  std::size_t bytes = 0;
};

/// No size is larger: sizes saturate here instead of wrapping around, so that an absurd shape asks
/// for more than anyone has.
inline constexpr std::size_t max_workspace_bytes = std::numeric_limits<std::size_t>::max() / 4;

/// `count` elements of `size` bytes, at most `max_workspace_bytes`.
constexpr std::size_t saturating_bytes(std::size_t count, std::size_t size) noexcept {
  return count > max_workspace_bytes / size ? max_workspace_bytes : count * size;
}

/// Elements of a [rows, columns] block, saturating likewise; none for a negative extent.
constexpr std::size_t saturating_area(index_t rows, index_t columns) noexcept {
  if (rows <= 0 || columns <= 0) return 0;
  return saturating_bytes(static_cast<std::size_t>(rows), static_cast<std::size_t>(columns));
}

constexpr std::size_t align_up(std::size_t bytes) noexcept {
  return (bytes + workspace_alignment - 1) / workspace_alignment * workspace_alignment;
}

/// How far `data` is past the last aligned address, in bytes.
inline std::size_t misalignment(void const* data) noexcept {
  return reinterpret_cast<std::uintptr_t>(data) % workspace_alignment;
}

/// One walk, two uses: without memory it counts, with memory it hands out aligned blocks; so the
/// size query and the run cannot disagree.
class WorkspaceCarver {
 public:
  constexpr WorkspaceCarver() noexcept = default;
  explicit WorkspaceCarver(Workspace memory) noexcept : memory_(memory) {}

  /// The next `count` elements; nullptr while counting.
  template <class T>
  constexpr T* take(std::size_t count) noexcept {
    std::size_t const start = used_;
    std::size_t const bytes = align_up(saturating_bytes(count, sizeof(T)));
    used_ = bytes > max_workspace_bytes - used_ ? max_workspace_bytes : used_ + bytes;
    if (memory_.data == nullptr || used_ > memory_.bytes) return nullptr;
    return reinterpret_cast<T*>(static_cast<std::byte*>(memory_.data) + start);
  }

  /// What is left, for a callee with its own walk.
  Workspace rest() const noexcept {
    if (memory_.data == nullptr || used_ > memory_.bytes) return {};
    return {static_cast<std::byte*>(memory_.data) + used_, memory_.bytes - used_};
  }

  constexpr WorkspaceSize size() const noexcept { return {used_}; }

 private:
  Workspace memory_{};
  std::size_t used_ = 0;
};

}  // namespace v0
}  // namespace indexshare
