// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/element.hpp>
#include <indexshare/status.hpp>
#include <indexshare/workspace.hpp>

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <cuda_runtime.h>

/// @file Device memory of the benchmarks, filled on the device from a seed.

namespace bench {

using indexshare::index_t;
using indexshare::position_t;

inline void require(cudaError_t error) {
  if (error != cudaSuccess) throw std::runtime_error(cudaGetErrorString(error));
}
inline void require(indexshare::Status const& status) {
  if (status.ok()) return;
  throw std::runtime_error(std::string(status.what) + ", expected " +
                           std::to_string(status.expected) + ", got " + std::to_string(status.got) +
                           ", CUDA error " + std::to_string(status.cuda_error));
}

template <class T>
class DeviceArray {
 public:
  explicit DeviceArray(index_t count) : count_(count) {
    require(cudaMalloc(&data_, sizeof(T) * static_cast<std::size_t>(count > 0 ? count : 1)));
  }
  explicit DeviceArray(std::vector<T> const& values)
      : DeviceArray(static_cast<index_t>(values.size())) {
    require(cudaMemcpy(data_, values.data(), sizeof(T) * values.size(), cudaMemcpyHostToDevice));
  }
  DeviceArray(DeviceArray&& other) noexcept
      : count_(other.count_), data_(std::exchange(other.data_, nullptr)) {}
  DeviceArray& operator=(DeviceArray&&) = delete;
  ~DeviceArray() { cudaFree(data_); }

  T* data() const { return data_; }
  index_t size() const { return count_; }

 private:
  index_t count_;
  T* data_ = nullptr;
};

/// One of 2^64 well mixed words (splitmix64's finish).
__host__ __device__ inline std::uint64_t mixed(std::uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

/// About normal: the sum of four uniform numbers, variance 1.
__host__ __device__ inline float normal_value(std::uint64_t seed, index_t i) {
  std::uint64_t const word = mixed(seed * 0x9E3779B97F4A7C15u + static_cast<std::uint64_t>(i));
  float sum = 0;
  for (int part = 0; part < 4; ++part) {
    sum += static_cast<float>((word >> (16 * part)) & 0xFFFFu) * 0x1p-16f - 0.5f;
  }
  return sum * 1.7320508f;
}

// ---- arrays of float values of a position, rounded to T

struct Normal {
  std::uint64_t seed;
  __device__ float operator()(index_t i) const { return normal_value(seed, i); }
};
/// Zero in half of the places, which a hash picks, and positive in the others.
struct HalfZeros {
  __device__ float operator()(index_t i) const {
    return mixed(static_cast<std::uint64_t>(i)) % 2 == 0 ? 0.0f : fabsf(normal_value(4, i));
  }
};
struct Ascending {
  __device__ float operator()(index_t i) const { return static_cast<float>(i); }
};

template <class T, class F>
static __global__ void fill(T* out, index_t count, F value) {
  for (index_t i = blockIdx.x * index_t{blockDim.x} + threadIdx.x; i < count;
       i += index_t{gridDim.x} * blockDim.x) {
    out[i] = indexshare::from_float<T>(value(i));
  }
}

template <class T, class F>
DeviceArray<T> filled_array(index_t count, F value) {
  DeviceArray<T> array(count);
  if (count > 0) fill<<<512, 256>>>(array.data(), count, value);
  require(cudaGetLastError());
  return array;
}
template <class T>
DeviceArray<T> normal_array(index_t count, std::uint64_t seed) {
  return filled_array<T>(count, Normal{seed});
}

/// Blocks of a quantised cache: random codes without NaN, and scales near 1/64 in `tail` bytes at
/// the end of each unit of `unit` bytes: a page of index keys, a latent row (there the rotary lanes
/// follow the scales).
static __global__ void fill_codes(std::byte* out, index_t bytes, std::uint64_t seed) {
  for (index_t i = blockIdx.x * index_t{blockDim.x} + threadIdx.x; i < bytes;
       i += index_t{gridDim.x} * blockDim.x) {
    out[i] = std::byte{static_cast<unsigned char>(
        indexshare::from_float<indexshare::e4m3>(64 * normal_value(seed, i)).bits)};
  }
}
/// `count` floats near 1/64 at `first` of each unit.
static __global__ void fill_scales(std::byte* out, index_t units, index_t unit, index_t first,
                                   index_t count) {
  for (index_t i = blockIdx.x * index_t{blockDim.x} + threadIdx.x; i < units * count;
       i += index_t{gridDim.x} * blockDim.x) {
    float const scale = 0x1p-6f * (1.0f + 0.25f * static_cast<float>(i % 4));
    *reinterpret_cast<float*>(out + i / count * unit + first + i % count * 4) = scale;
  }
}
/// `count` bf16 values at `first` of each unit.
static __global__ void fill_rotary(std::byte* out, index_t units, index_t unit, index_t first,
                                   index_t count) {
  for (index_t i = blockIdx.x * index_t{blockDim.x} + threadIdx.x; i < units * count;
       i += index_t{gridDim.x} * blockDim.x) {
    *reinterpret_cast<indexshare::bf16*>(out + i / count * unit + first + i % count * 2) =
        indexshare::from_float<indexshare::bf16>(normal_value(77, i));
  }
}

}  // namespace bench
