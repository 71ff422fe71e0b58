// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/frontend/lanes.hpp>
#include <indexshare/model_config.hpp>
#include <indexshare/views.hpp>
#include <indexshare/workspace.hpp>

#include <cstddef>
#include <cstdint>

/// @file What a layer's front end computes, in fp32, in memory that the caller gives. The names are
/// those of docs/comparing.md.

namespace indexshare {
inline namespace v0 {

/// Whether intermediate values keep memory of their own, to be looked at afterwards, or are
/// overwritten by what is made of them.
enum class Keep : std::uint8_t { results, intermediates };

/// The query side of rows. Made with Keep::results, q_a, index_q_raw and head_weights_raw are the
/// memory of what is made of them, and hold that after a call.
template <Space S>
struct QuerySide {
  Tensor<S, float, 2> q_a{};         ///< [rows, q_lora_rank] before the latent norm
  Tensor<S, float, 2> q_resid{};     ///< [rows, q_lora_rank] after it: what wq_b and q_b_proj read
  Tensor<S, float, 3> q{};           ///< [rows, heads, nope + rope] before the rotation
  Tensor<S, float, 3> q_absorbed{};  ///< [rows, heads, latent + rope] W_UK^T q_nope | rotated lanes
  Tensor<S, float, 3> index_q_raw{};       ///< [rows, index heads, index dim] before the rotation
  Tensor<S, float, 3> index_q{};           ///< the same after it, in the front end's index basis
  Tensor<S, float, 2> head_weights_raw{};  ///< [rows, index heads] weights_proj alone
  Tensor<S, float, 2> head_weights{};      ///< the same with every constant folded in

  /// [rows, heads, rope]: the rotated lanes of the attention queries.
  constexpr Tensor<S, float, 3> q_rope(ModelConfig const& config) const noexcept {
    return detail::lanes_of(q_absorbed, config.kv_lora_rank, config.qk_rope_head_dim);
  }
};

/// The key side of tokens. Made with Keep::results, kv_a, index_k_raw and index_k_norm are the
/// memory of the rows made of them.
template <Space S>
struct KeySide {
  Tensor<S, float, 2> kv_a{};         ///< [tokens, latent + rope] before norm and rotation
  Tensor<S, float, 2> kv_row{};       ///< [tokens, latent + rope] after both: a row of the KV cache
  Tensor<S, float, 2> index_k_raw{};  ///< [tokens, index dim] before the norm
  Tensor<S, float, 2> index_k_norm{};  ///< after the norm, before the rotation
  Tensor<S, float, 2> index_k{};       ///< a row of the index-key cache
};

/// The output side of rows. Made with Keep::results, `attention` is the memory of `gated`.
template <Space S>
struct OutputSide {
  Tensor<S, float, 3> attention{};  ///< [rows, heads, v]: W_UV of the latent output
  Tensor<S, float, 3> gate{};       ///< [rows, heads, v], gated models only: before the sigmoid
  Tensor<S, float, 3> gated{};      ///< attention * sigmoid(gate); without a gate, `attention`
  Tensor<S, float, 2> output{};     ///< [rows, hidden]: the self-attention module's
};

namespace detail {

/// Hands out activations from one block; a second name of the same memory where nothing is kept.
template <Space S>
class ActivationCarver {
 public:
  ActivationCarver(WorkspaceCarver& carver, index_t rows, Keep keep) noexcept
      : carver_(carver), rows_(rows), keep_(keep) {}

  Tensor<S, float, 2> matrix(index_t lanes) noexcept {
    return make_dense<S, float, 2>(carver_.take<float>(saturating_area(rows_, lanes)),
                                   {rows_, lanes});
  }
  Tensor<S, float, 3> heads(index_t count, index_t lanes) noexcept {
    return make_dense<S, float, 3>(carver_.take<float>(saturating_area(rows_, count * lanes)),
                                   {rows_, count, lanes});
  }
  /// What is made in place of `raw`, or beside it.
  Tensor<S, float, 2> made_of(Tensor<S, float, 2> const& raw) noexcept {
    return keep_ == Keep::results ? raw : matrix(raw.extent(1));
  }
  Tensor<S, float, 3> made_of(Tensor<S, float, 3> const& raw) noexcept {
    return keep_ == Keep::results ? raw : heads(raw.extent(1), raw.extent(2));
  }

 private:
  WorkspaceCarver& carver_;
  index_t rows_;
  Keep keep_;
};

}  // namespace detail

/// Carves the query side of `rows` rows. As with every walk of a carver, call it once without
/// memory to learn the size and once with it.
/// @param full  whether the layer has an indexer; a shared layer gets empty index views
template <Space S>
QuerySide<S> carve_query_side(WorkspaceCarver& carver, ModelConfig const& config, Rows rows,
                              bool full, Keep keep) noexcept {
  detail::ActivationCarver<S> carve(carver, rows.n, keep);
  QuerySide<S> side;
  side.q_a = carve.matrix(config.q_lora_rank);
  side.q_resid = carve.made_of(side.q_a);
  side.q = carve.heads(config.num_attention_heads, qk_head_dim(config));
  side.q_absorbed =
      carve.heads(config.num_attention_heads, config.kv_lora_rank + config.qk_rope_head_dim);
  if (!full) return side;
  side.index_q_raw = carve.heads(config.index_n_heads, config.index_head_dim);
  side.index_q = carve.made_of(side.index_q_raw);
  side.head_weights_raw = carve.matrix(config.index_n_heads);
  side.head_weights = carve.made_of(side.head_weights_raw);
  return side;
}

/// Carves the key side of `tokens` tokens.
template <Space S>
KeySide<S> carve_key_side(WorkspaceCarver& carver, ModelConfig const& config, Rows tokens,
                          bool full, Keep keep) noexcept {
  detail::ActivationCarver<S> carve(carver, tokens.n, keep);
  KeySide<S> side;
  side.kv_a = carve.matrix(config.kv_lora_rank + config.qk_rope_head_dim);
  side.kv_row = carve.made_of(side.kv_a);
  if (!full) return side;
  side.index_k_raw = carve.matrix(config.index_head_dim);
  side.index_k_norm = carve.made_of(side.index_k_raw);
  side.index_k = carve.made_of(side.index_k_norm);
  return side;
}

/// Carves the output side of `rows` rows.
template <Space S>
OutputSide<S> carve_output_side(WorkspaceCarver& carver, ModelConfig const& config, Rows rows,
                                Keep keep) noexcept {
  detail::ActivationCarver<S> carve(carver, rows.n, keep);
  OutputSide<S> side;
  side.attention = carve.heads(config.num_attention_heads, config.v_head_dim);
  if (config.gated_output) {
    side.gate = carve.heads(config.num_attention_heads, config.v_head_dim);
    side.gated = carve.made_of(side.attention);
  } else {
    side.gated = side.attention;
  }
  side.output = carve.matrix(config.hidden_size);
  return side;
}

}  // namespace v0
}  // namespace indexshare
