// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <initializer_list>
#include <memory>
#include <new>
#include <utility>

/// @file The engine's memory: devices and tensors. Nothing here knows the library.

namespace mini {

/// Where tensors lie and on which streams work is enqueued. This one is the host, which has no
/// streams; cuda_platform.cu has the other.
class Device {
 public:
  static constexpr std::size_t alignment = 256;

  virtual ~Device() = default;
  /// Memory that the host may touch while nothing that uses it is enqueued. Throws.
  virtual void* allocate(std::size_t bytes) {
    return ::operator new (bytes, std::align_val_t{alignment});
  }
  virtual void release(void* memory) noexcept {
    ::operator delete (memory, std::align_val_t{alignment});
  }
  /// The device owns its streams.
  virtual void* new_stream() { return nullptr; }
  /// Returns when all that was enqueued on the stream is done. Throws if it failed.
  virtual void wait(void* /*stream*/) {}
};

/// A dense tensor of up to three dimensions that owns its memory on a device.
template <class T>
class Tensor {
 public:
  Tensor() = default;
  Tensor(Device& device, std::initializer_list<std::int64_t> sizes)
      : memory_(nullptr, Release{&device}) {
    std::size_t axis = 0;
    for (std::int64_t const size : sizes) sizes_[axis++] = size;
    memory_.reset(static_cast<T*>(device.allocate(bytes())));
  }

  T* data() const { return memory_.get(); }
  std::int64_t size(std::size_t axis) const { return sizes_[axis]; }
  std::int64_t count() const { return sizes_[0] * sizes_[1] * sizes_[2]; }
  std::size_t bytes() const { return static_cast<std::size_t>(count()) * sizeof(T); }
  /// Element i of the first axis and all below it.
  T* row(std::int64_t i) const { return data() + i * sizes_[1] * sizes_[2]; }
  T& operator[](std::int64_t i) const { return data()[i]; }

 private:
  struct Release {
    Device* device = nullptr;
    void operator()(T* memory) const noexcept { device->release(memory); }
  };
  std::array<std::int64_t, 3> sizes_{1, 1, 1};
  std::unique_ptr<T[], Release> memory_{nullptr};
};

/// The upper half of a float, rounded to nearest even: what bf16 tensors hold.
using Bf16 = std::uint16_t;

}  // namespace mini
