// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/workspace.hpp>

#include <cstddef>
#include <memory>
#include <new>
#include <utility>

namespace indexshare {
inline namespace v0 {

/// Host memory with the alignment that workspaces and selection states need, for callers without an
/// allocator of their own. The library itself allocates nothing.
class HostMemory {
 public:
  HostMemory() = default;
  HostMemory(HostMemory&& other) noexcept
      : bytes_(std::exchange(other.bytes_, 0)), data_(std::move(other.data_)) {}
  HostMemory& operator=(HostMemory&& other) noexcept {
    bytes_ = std::exchange(other.bytes_, 0);
    data_ = std::move(other.data_);
    return *this;
  }
  /// Throws std::bad_alloc. The memory is not initialised.
  explicit HostMemory(WorkspaceSize size)
      : bytes_(size.bytes), data_(::operator new (bytes_, std::align_val_t{workspace_alignment})) {}

  Workspace view() const noexcept { return {data_.get(), bytes_}; }

 private:
  struct Free {
    void operator()(void* data) const noexcept {
      ::operator delete (data, std::align_val_t{workspace_alignment});
    }
  };
  std::size_t bytes_ = 0;
  std::unique_ptr<void, Free> data_;
};

}  // namespace v0
}  // namespace indexshare
