// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "sparse_stack.hpp"

#include <indexshare/indexshare.hpp>
#include <indexshare/interop/boundary_views.hpp>

#include <algorithm>

/// @file The other side of the seam, C++20: the stack on any executor whose back end is included.

namespace engine {

template <indexshare::Executor X>
class StackOn : public SparseStack {
 public:
  StackOn(X const& exec, Config const& config) : exec_(exec), config_(config) {}

  bool is_full(std::int32_t number) const noexcept override { return layer(number).is_full(); }

  indexshare::Status sizes(std::size_t budget, Sizes& bytes) const noexcept override {
    bytes.state = State::size(rows(), top_k()).bytes;
    for (std::int32_t number = 0; number < config_.layers; ++number) {
      auto const scratch = layer(number).workspace(exec_, budget);
      if (!scratch) return scratch.error();
      bytes.scratch = std::max(bytes.scratch, scratch->bytes);
    }
    return {};
  }

  indexshare::Status bind(indexshare::Workspace state,
                          indexshare::Workspace scratch) noexcept override {
    auto const made = State::make(state, rows(), top_k());
    if (!made) return made.error();
    state_ = *made;
    scratch_ = scratch;
    return {};
  }

  indexshare::Status run(std::int32_t number,
                         indexshare::boundary::LayerCall const& call) noexcept override {
    using namespace indexshare::boundary;
    return layer(number).run(exec_, to_inputs<Layer, X::space>(call), state_,
                             to_outputs<Layer, X::space>(call), scratch_);
  }

 private:
  using State = indexshare::SelectionState<X::space>;
  using Cached = indexshare::format::Plain<indexshare::bf16>;
  using Layer =
      indexshare::SparseAttentionLayer<indexshare::ReluDotIndexer<indexshare::bf16, Cached>,
                                       indexshare::RadixTopK, indexshare::Periodic,
                                       indexshare::SparseMla<indexshare::bf16, Cached>>;

  indexshare::Rows rows() const { return {config_.shape.rows}; }
  indexshare::TopK top_k() const { return {config_.shape.top_k}; }
  Layer layer(std::int32_t number) const {
    Layer layer{};
    layer.share = {.layers = config_.layers, .freq = config_.share_every, .offset = 1};
    layer.shape = config_.shape;
    layer.layer = number;
    return layer;
  }

  X exec_;
  Config config_;
  State state_;
  indexshare::Workspace scratch_{};
};

}  // namespace engine
