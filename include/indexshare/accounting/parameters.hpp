// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/accounting/rows.hpp>
#include <indexshare/dims.hpp>
#include <indexshare/model_config.hpp>
#include <indexshare/status.hpp>

/// @file Numbers of matrix entries. Norms, biases and MTP layers are left out.

namespace indexshare {
inline namespace v0 {

/// Projections around the attention of one layer: queries, KV latent, head keys and values, output.
/// A gate on the output (Hy4) is not in it.
constexpr double attention_projection_parameters(ModelConfig const& c) noexcept {
  using detail::real;
  double const queries = real(c.q_lora_rank) *
                         (real(c.hidden_size) + real(c.num_attention_heads) * real(qk_head_dim(c)));
  double const latent = real(c.hidden_size) * real(c.kv_lora_rank + c.qk_rope_head_dim);
  double const head_keys_and_values =
      real(c.kv_lora_rank) * real(c.num_attention_heads) * real(c.qk_nope_head_dim + c.v_head_dim);
  double const output = real(c.num_attention_heads) * real(c.v_head_dim) * real(c.hidden_size);
  return queries + latent + head_keys_and_values + output;
}

/// Projections of one layer's indexer: index queries, the index key, head weights.
constexpr double indexer_parameters(ModelConfig const& c) noexcept {
  using detail::real;
  double const queries = real(c.q_lora_rank) * real(c.index_n_heads) * real(c.index_head_dim);
  double const key_and_weights = real(c.hidden_size) * real(c.index_head_dim + c.index_n_heads);
  return queries + key_and_weights;
}

/// Whether the config says enough for the complete count, and the formulas know the model.
/// Errors: unsupported, `what` is the reason.
constexpr Status can_count_complete(ModelConfig const& c) noexcept {
  FeedForward const& f = c.feed_forward;
  constexpr index_t none = FeedForward::not_stated;
  if (c.family == ModelFamily::glm5_next)
    return failure(Errc::unsupported,
                   "the count has no terms for linear-attention layers and pooled index keys");
  if (f.vocab_size == none) return failure(Errc::unsupported, "vocab_size is not stated");
  if (f.dense_layers == none)
    return failure(Errc::unsupported,
                   "neither first_k_dense_replace nor mlp_layer_types is stated");
  if (f.dense_layers > 0 && f.intermediate_size == none)
    return failure(Errc::unsupported, "intermediate_size is not stated");
  if (f.dense_layers < c.num_hidden_layers &&
      (f.moe_intermediate_size == none || f.routed_experts == none || f.shared_experts == none ||
       f.experts_per_token == none))
    return failure(Errc::unsupported,
                   "moe_intermediate_size, n_routed_experts, n_shared_experts or "
                   "num_experts_per_tok is not stated");
  return {};
}

namespace detail {
/// Three matrices of a dense block.
constexpr double dense_block_parameters(ModelConfig const& c) noexcept {
  return 3 * real(c.hidden_size) * real(c.feed_forward.intermediate_size);
}
/// The router and `experts` experts of a block.
constexpr double expert_block_parameters(ModelConfig const& c, index_t experts) noexcept {
  FeedForward const& f = c.feed_forward;
  return real(experts) * 3 * real(c.hidden_size) * real(f.moe_intermediate_size) +
         real(c.hidden_size) * real(f.routed_experts);
}
constexpr double embedding_parameters(ModelConfig const& c) noexcept {
  return real(c.feed_forward.vocab_size) * real(c.hidden_size);
}
/// All blocks, with `experts` experts in each that is not dense.
constexpr double feed_forward_parameters(ModelConfig const& c, index_t experts) noexcept {
  FeedForward const& f = c.feed_forward;
  return real(f.dense_layers) * dense_block_parameters(c) +
         real(c.num_hidden_layers - f.dense_layers) * expert_block_parameters(c, experts);
}
}  // namespace detail

/// Entries that one token's forward multiplies with: all but the experts that are not chosen and
/// the embedding, of which it reads one row. Precondition: can_count_complete(c).
/// @param full_layers  indexers in the trunk; a fraction where a schedule is idealised
constexpr double active_parameters(ModelConfig const& c, double full_layers) noexcept {
  FeedForward const& f = c.feed_forward;
  return detail::real(c.num_hidden_layers) * attention_projection_parameters(c) +
         full_layers * indexer_parameters(c) +
         detail::feed_forward_parameters(c, f.experts_per_token + f.shared_experts) +
         detail::embedding_parameters(c);
}

/// All entries, embedding and output head among them. Precondition: can_count_complete(c).
constexpr double total_parameters(ModelConfig const& c, double full_layers) noexcept {
  FeedForward const& f = c.feed_forward;
  return detail::real(c.num_hidden_layers) * attention_projection_parameters(c) +
         full_layers * indexer_parameters(c) +
         detail::feed_forward_parameters(c, f.routed_experts + f.shared_experts) +
         2 * detail::embedding_parameters(c);
}

}  // namespace v0
}  // namespace indexshare
