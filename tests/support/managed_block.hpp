// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "memory.hpp"

#include <cstddef>

namespace test {

/// A state's or workspace's memory, made from its size, that device and host both address.
class ManagedBlock {
 public:
  explicit ManagedBlock(indexshare::WorkspaceSize size) : memory_(size.bytes) {}
  indexshare::Workspace view() const { return {memory_.data(), memory_.bytes()}; }

 private:
  mutable Guarded<std::byte> memory_;
};

}  // namespace test
