// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/detail/check.hpp>
#include <indexshare/model_config.hpp>
#include <indexshare/status.hpp>
#include <indexshare/views.hpp>

#include <cuda/std/optional>

namespace indexshare {
inline namespace v0 {

/// A weight matrix [out, in]: y = W x. The front end never reads its elements, it hands views to
/// the caller's matrix product, so T may be any type that the product knows.
template <Space S, class T>
using MatrixView = Tensor<S, T const, 2>;

/// Gains, biases and sinks, in fp32.
template <Space S>
using VectorView = Tensor<S, float const, 1>;

/// Weights of the indexer of a full layer, under their names in a checkpoint.
/// @source tensor names and shapes: transformers GlmMoeDsaIndexer, release 5.24.0
template <Space S, class T>
struct IndexerWeights {
  MatrixView<S, T> wq_b{};              ///< [index heads * index dim, q_lora_rank]
  MatrixView<S, T> wk{};                ///< [index dim, hidden]
  VectorView<S> k_norm_weight{};        ///< [index dim]
  VectorView<S> k_norm_bias{};          ///< [index dim]
  MatrixView<S, float> weights_proj{};  ///< [index heads, hidden], fp32 whatever the file has
};

/// Weights of one self-attention module, under their names in a checkpoint. Views: whoever loaded
/// them owns the memory.
template <Space S, class T>
struct AttentionWeights {
  MatrixView<S, T> q_a_proj{};     ///< [q_lora_rank, hidden]
  VectorView<S> q_a_layernorm{};   ///< [q_lora_rank]
  MatrixView<S, T> q_b_proj{};     ///< [heads * (nope + rope), q_lora_rank]
  MatrixView<S, T> kv_a_proj{};    ///< kv_a_proj_with_mqa: [kv_lora_rank + rope, hidden]
  VectorView<S> kv_a_layernorm{};  ///< [kv_lora_rank]
  MatrixView<S, T> kv_b_proj{};    ///< [heads * (nope + v), kv_lora_rank], of each head W_UK, W_UV
  MatrixView<S, T> o_proj{};       ///< [hidden, heads * v]
  MatrixView<S, T> gate_proj{};    ///< gated_output only: [heads * v, hidden]
  VectorView<S> sinks{};           ///< learnable_sink only: [heads], natural-log units
  cuda::std::optional<IndexerWeights<S, T>> indexer{};  ///< full layers only
};

namespace detail {

/// A readable matrix of the given extents. Its rows lie dense, as MatrixProduct promises.
template <class View>
constexpr Status check_matrix(char const* what, View const& view, index_t out,
                              index_t in) noexcept {
  return first_failure({check_extent(what, out, view.extent(0)),
                        check_extent(what, in, view.extent(1)), check_readable(what, view)});
}

template <class View>
constexpr Status check_vector(char const* what, View const& view, index_t n) noexcept {
  return first_failure({check_extent(what, n, view.extent(0)), check_readable(what, view)});
}

}  // namespace detail

/// Whether `weights` fit `config`. `what` names the tensor. Errors: bad_shape, bad_stride,
/// missing_input.
template <Space S, class T>
constexpr Status check_weights(ModelConfig const& config,
                               IndexerWeights<S, T> const& weights) noexcept {
  using namespace detail;
  return first_failure({
      check_matrix("indexer.wq_b", weights.wq_b, config.index_n_heads * config.index_head_dim,
                   config.q_lora_rank),
      check_matrix("indexer.wk", weights.wk, config.index_head_dim, config.hidden_size),
      check_vector("indexer.k_norm.weight", weights.k_norm_weight, config.index_head_dim),
      check_vector("indexer.k_norm.bias", weights.k_norm_bias, config.index_head_dim),
      check_matrix("indexer.weights_proj", weights.weights_proj, config.index_n_heads,
                   config.hidden_size),
  });
}

template <Space S, class T>
constexpr Status check_weights(ModelConfig const& config,
                               AttentionWeights<S, T> const& weights) noexcept {
  using namespace detail;
  index_t const heads = config.num_attention_heads;
  index_t const values = heads * config.v_head_dim;
  return first_failure({
      check_matrix("q_a_proj", weights.q_a_proj, config.q_lora_rank, config.hidden_size),
      check_vector("q_a_layernorm", weights.q_a_layernorm, config.q_lora_rank),
      check_matrix("q_b_proj", weights.q_b_proj, heads * qk_head_dim(config), config.q_lora_rank),
      check_matrix("kv_a_proj_with_mqa", weights.kv_a_proj,
                   config.kv_lora_rank + config.qk_rope_head_dim, config.hidden_size),
      check_vector("kv_a_layernorm", weights.kv_a_layernorm, config.kv_lora_rank),
      check_matrix("kv_b_proj", weights.kv_b_proj,
                   heads * (config.qk_nope_head_dim + config.v_head_dim), config.kv_lora_rank),
      check_matrix("o_proj", weights.o_proj, config.hidden_size, values),
      config.gated_output
          ? check_matrix("gate_proj", weights.gate_proj, values, config.hidden_size)
          : check_extent("gate_proj of a model without a gate", 0, weights.gate_proj.extent(0)),
      config.learnable_sink
          ? check_vector("sinks", weights.sinks, heads)
          : check_extent("sinks of a model without sinks", 0, weights.sinks.extent(0)),
      weights.indexer ? check_weights(config, *weights.indexer) : Status{},
  });
}

}  // namespace v0
}  // namespace indexshare
