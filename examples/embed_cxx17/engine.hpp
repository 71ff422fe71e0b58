// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "sparse_stack.hpp"

#include <cstddef>

/// @file The engine, C++17.

namespace engine {

/// The engine's memory and copies. Memory is aligned to 256 bytes and lives as long as the device.
class Device {
 public:
  virtual ~Device() = default;
  virtual void* allocate(std::size_t bytes) = 0;
  virtual void upload(void* to, void const* from, std::size_t bytes) = 0;
  /// Waits for the work before it.
  virtual void download(void* to, void const* from, std::size_t bytes) = 0;
};

/// What the engine below is built for.
SparseStack::Config config();

/// One forward through the stack; prints what comes out. Returns an exit status.
int run(Device& device, SparseStack& stack);

}  // namespace engine
