// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/cuda/exec.cuh>
#include <indexshare/element.hpp>
#include <indexshare/status.hpp>
#include <indexshare/workspace.hpp>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>

#include <cuda_runtime_api.h>

/// @file What the CUDA examples have in common: failures, a stream, memory with data in it.

namespace example {

[[noreturn]] inline void fail(char const* what, cudaError_t error) {
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(error));
  std::exit(1);
}
inline void require(cudaError_t error) {
  if (error != cudaSuccess) fail("failed call", error);
}
inline void require(indexshare::Status const& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "layer %d: %s (expected %lld, got %lld, CUDA error %d)\n", status.layer,
               status.what, static_cast<long long>(status.expected),
               static_cast<long long>(status.got), status.cuda_error);
  std::exit(1);
}

/// A stream of its own on device 0, which does not wait for the default stream.
class Stream {
 public:
  Stream() {
    int devices = 0;
    cudaError_t const error = cudaGetDeviceCount(&devices);
    if (error != cudaSuccess || devices == 0) {
      fail("no CUDA device", error == cudaSuccess ? cudaErrorNoDevice : error);
    }
    require(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
  }
  Stream(Stream const&) = delete;
  Stream& operator=(Stream const&) = delete;
  ~Stream() { cudaStreamDestroy(stream_); }

  cudaStream_t get() const { return stream_; }
  void wait() const { require(cudaStreamSynchronize(stream_)); }

 private:
  cudaStream_t stream_ = nullptr;
};

/// Managed memory, so that the examples can run the reference back end on the same bytes while the
/// stream is idle. An engine has device memory and copies on its stream.
template <class T>
class Array {
 public:
  explicit Array(indexshare::index_t count) : size_(count) {
    require(cudaMallocManaged(&data_, static_cast<std::size_t>(count) * sizeof(T)));
  }
  Array(Array const&) = delete;
  Array& operator=(Array const&) = delete;
  ~Array() { cudaFree(data_); }

  T* data() const { return data_; }
  T& operator[](indexshare::index_t i) const { return data_[i]; }
  indexshare::index_t size() const { return size_; }
  indexshare::Workspace workspace() const {
    return {data_, static_cast<std::size_t>(size_) * sizeof(T)};
  }

  /// Whole numbers from -limit to limit. As index data they make every score exact, whatever the
  /// order of its sum, so that back ends must select the same bytes.
  void fill(unsigned seed, int limit) const {
    unsigned state = seed * 2654435761u + 1;
    for (indexshare::index_t i = 0; i < size_; ++i) {
      state = state * 1664525u + 1013904223u;
      int const number = static_cast<int>((state >> 16) % static_cast<unsigned>(2 * limit + 1));
      data_[i] = indexshare::from_float<T>(static_cast<float>(number - limit));
    }
  }

 private:
  T* data_ = nullptr;
  indexshare::index_t size_;
};

/// Whether two states hold the same selection, byte for byte.
template <class A, class B>
bool same_entries(A const& a, B const& b) {
  auto const left = a.selection().indices;
  auto const right = b.selection().indices;
  auto const* const entries = left.data_handle();
  return left.extent(0) == right.extent(0) && left.extent(1) == right.extent(1) &&
         std::equal(entries, entries + left.extent(0) * left.extent(1), right.data_handle());
}

/// Whether outputs differ by less than 2^-7 of the largest: the library's attention rounds softmax
/// weights to bf16, each by at most 2^-8 of itself.
inline bool agree(Array<float> const& got, Array<float> const& expected) {
  float worst = 0, largest = 0;
  for (indexshare::index_t i = 0; i < got.size(); ++i) {
    worst = std::max(worst, std::abs(got[i] - expected[i]));
    largest = std::max(largest, std::abs(expected[i]));
  }
  return worst < 0x1p-7f * largest;
}

}  // namespace example
