// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

/// @file The structs of DLPack's C ABI, as far as the tests need them, under names of our own: one
/// set of version 1.0 (with DLManagedTensorVersioned) and what a version before it has.

namespace test::dlpack {

enum DeviceType : std::int32_t { cpu = 1, cuda = 2, cuda_host = 3, vulkan = 7, cuda_managed = 13 };

struct Device {
  DeviceType device_type;
  std::int32_t device_id;
};

struct DataType {
  std::uint8_t code;
  std::uint8_t bits;
  std::uint16_t lanes;
};

struct Tensor {
  void* data;
  Device device;
  std::int32_t ndim;
  DataType dtype;
  std::int64_t* shape;
  std::int64_t* strides;
  std::uint64_t byte_offset;
};

struct Managed {
  Tensor dl_tensor;
  void* manager_ctx;
  void (*deleter)(Managed*);
};

struct Version {
  std::uint32_t major;
  std::uint32_t minor;
};

struct Versioned {
  Version version;
  void* manager_ctx;
  void (*deleter)(Versioned*);
  std::uint64_t flags;
  Tensor dl_tensor;
};

}  // namespace test::dlpack
