// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <new>

/// @file The engine's memory, and what it asks of whoever computes its attention, in its own terms.
/// indexshare_backend.hpp answers with the library.

namespace mini {

// ---- memory

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

// ---- attention

/// What a call may bring at most, and the model's widths.
struct Sizes {
  int layers = 0;  ///< of the trunk; the MTP layer is number `layers`
  int rows = 0;    ///< of one micro-batch, at most
  int keys = 0;    ///< tokens of one request, at most
  int requests = 0;
  int top_k = 0;
  int index_heads = 0;
  int index_dim = 0;
  int heads = 0;
  int key_dim = 0;    ///< latent + rope
  int value_dim = 0;  ///< latent
  int drafts = 0;     ///< tokens drafted after each step
  int page_size = 0;
  int pages = 0;

  int mtp_layer() const { return layers; }
  int request_pages() const { return (keys + page_size - 1) / page_size; }
};

/// The rows of one forward as the scheduler lays them out: chunk after chunk, one per request.
struct Batch {
  int requests = 0;
  int rows = 0;
  Tensor<std::int32_t> starts;   ///< [requests + 1] first row of each chunk
  Tensor<std::int32_t> lengths;  ///< [requests] tokens of the request up to and with its chunk
  Tensor<std::int32_t> pages;    ///< [requests, pages of a request], -1 where there is none
};

/// What the model brings to one layer, and what it gets back.
struct LayerTensors {
  Tensor<float> kv;          ///< [rows, key_dim] of the new tokens
  Tensor<Bf16> q;            ///< [rows, heads, key_dim]
  Tensor<float> index_keys;  ///< [rows, index_dim]; only where the layer selects, as the next two
  Tensor<Bf16> index_q;      ///< [rows, index_heads, index_dim]
  Tensor<float> weights;     ///< [rows, index_heads]
  Tensor<float> out;         ///< [rows, heads, value_dim]
};

/// One call: which micro-batch's rows, on which stream, in which layer. Draft steps run the MTP
/// layer: step 0 on the rows of the forward, the others on one row per request.
struct Call {
  int micro = 0;
  void* stream = nullptr;
  int layer = 0;
  int draft_step = 0;
};

/// The selection that a call used, readable by the host once the stream is waited for.
struct SelectionRows {
  std::int32_t const* positions;  ///< [rows, top_k]
  int top_k;
};

/// All calls only enqueue; they throw std::runtime_error when one is refused.
class AttentionBackend {
 public:
  virtual ~AttentionBackend() = default;

  /// Whether the layer of the call has an index-key cache of its own to append to.
  virtual bool has_index_keys(Call const& call) const = 0;
  /// Whether the model must bring index queries and weights. Not where a selection is reused.
  virtual bool selects(Call const& call) const = 0;

  /// A new forward of a micro-batch.
  virtual void begin(Call const& call, Batch const& batch) = 0;
  /// Draft step 1 or later: `batch` has a row for each of the forward's first requests, and
  /// `accepted` says how many tokens of each request's chunk were accepted.
  virtual void begin_draft(Call const& call, Batch const& batch,
                           Tensor<std::int32_t> const& accepted) = 0;
  /// Writes the new tokens' rows into the layer's caches. Before `attend`, on every layer.
  virtual void append(Call const& call, LayerTensors const& tensors) = 0;
  virtual void attend(Call const& call, LayerTensors const& tensors) = 0;

  virtual SelectionRows selection(Call const& call) const = 0;
};

}  // namespace mini
