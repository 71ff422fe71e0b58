// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/interop/boundary.hpp>

#include <cstddef>
#include <cstdint>
#include <memory>

/// @file The seam, C++17: what the engine sees of its sparse-attention layers. Element types and
/// policies are chosen behind it, in stack_on.hpp.

namespace engine {

/// Layers that share one state, one scratch and a schedule: layer i is full if i is a multiple of
/// `share_every`. Elements are bf16, outputs fp32.
class SparseStack {
 public:
  struct Config {
    indexshare::Shape shape;
    std::int32_t layers = 0;
    std::int32_t share_every = 1;
  };
  struct Sizes {
    std::size_t state = 0;
    std::size_t scratch = 0;
  };

  virtual ~SparseStack() = default;
  virtual bool is_full(std::int32_t layer) const noexcept = 0;
  /// Bytes for all layers; scratch takes at most `budget`.
  virtual indexshare::Status sizes(std::size_t budget, Sizes& bytes) const noexcept = 0;
  /// Memory of those sizes, where the back end works. It stays the engine's.
  virtual indexshare::Status bind(indexshare::Workspace state,
                                  indexshare::Workspace scratch) noexcept = 0;
  virtual indexshare::Status run(std::int32_t layer,
                                 indexshare::boundary::LayerCall const& call) noexcept = 0;
};

std::unique_ptr<SparseStack> host_stack(SparseStack::Config const& config);

/// @param stream  a cudaStream_t of device 0. Null: there is no such device or stream.
std::unique_ptr<SparseStack> cuda_stack(SparseStack::Config const& config, void* stream);

}  // namespace engine
