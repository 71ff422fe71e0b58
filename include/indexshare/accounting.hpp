// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/dims.hpp>
#include <indexshare/model_config.hpp>
#include <indexshare/share_plan.hpp>
#include <indexshare/status.hpp>

#include <cstdint>

/// @file What a model's sparse attention costs, counted from its config alone. Counts are of
/// arithmetic and of cache bytes; neither is a time, and a ratio of counts is not a speed-up.
///
/// All counts are for one decoded token and leave MTP layers out. A multiply-add is 2 FLOPs.
/// Doubles: a count below 2^53 is exact, a larger one does not wrap.

namespace indexshare {
inline namespace v0 {

/// The two ways to write multi-head latent attention, which differ in their arithmetic.
enum class CoreForm : std::uint8_t {
  absorbed,  ///< queries meet latents: key kv_lora + rope lanes, value kv_lora lanes, per head
  expanded,  ///< queries meet per-head keys and values; making those is not counted
};

namespace detail {
constexpr double flops(double multiply_adds) noexcept { return 2 * multiply_adds; }
constexpr double real(index_t number) noexcept { return static_cast<double>(number); }
}  // namespace detail

/// Projections around the attention of one layer: queries, KV latent, head keys and values (once,
/// absorbed), output. A gate on the output (Hy4) is not in it.
constexpr double attention_projection_flops(ModelConfig const& c) noexcept {
  using detail::real;
  double const queries = real(c.q_lora_rank) *
                         (real(c.hidden_size) + real(c.num_attention_heads) * real(qk_head_dim(c)));
  double const latent = real(c.hidden_size) * real(c.kv_lora_rank + c.qk_rope_head_dim);
  double const head_keys_and_values =
      real(c.kv_lora_rank) * real(c.num_attention_heads) * real(c.qk_nope_head_dim + c.v_head_dim);
  double const output = real(c.num_attention_heads) * real(c.v_head_dim) * real(c.hidden_size);
  return detail::flops(queries + latent + head_keys_and_values + output);
}

/// Projections of one layer's indexer: index queries, the index key, head weights.
constexpr double indexer_projection_flops(ModelConfig const& c) noexcept {
  using detail::real;
  double const queries = real(c.q_lora_rank) * real(c.index_n_heads) * real(c.index_head_dim);
  double const key_and_weights = real(c.hidden_size) * real(c.index_head_dim + c.index_n_heads);
  return detail::flops(queries + key_and_weights);
}

/// Dot products of one layer's index scores over `keys` keys. The ReLU, the head weight and the sum
/// over heads (3 per head and key) and the top-k (no multiply-adds) are not in it.
constexpr double index_scoring_flops(ModelConfig const& c, index_t keys) noexcept {
  return detail::flops(detail::real(c.index_n_heads) * detail::real(c.index_head_dim) *
                       detail::real(keys));
}

/// Logits and weighted sum of one layer over `attended` keys: min(index_topk, length) for the
/// sparse layer, the length for a dense one.
constexpr double attention_core_flops(ModelConfig const& c, index_t attended,
                                      CoreForm form) noexcept {
  index_t const lanes = form == CoreForm::absorbed ? 2 * c.kv_lora_rank + c.qk_rope_head_dim
                                                   : qk_head_dim(c) + c.v_head_dim;
  return detail::flops(detail::real(c.num_attention_heads) * detail::real(attended) *
                       detail::real(lanes));
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

/// Feed-forward of all layers: three matrices per dense block, the chosen and the shared experts
/// and the router elsewhere. Precondition: can_count_complete(c).
constexpr double feed_forward_flops(ModelConfig const& c) noexcept {
  using detail::real;
  FeedForward const& f = c.feed_forward;
  double const hidden = real(c.hidden_size);
  double const dense = 3 * hidden * real(f.intermediate_size);
  double const experts =
      real(f.experts_per_token + f.shared_experts) * 3 * hidden * real(f.moe_intermediate_size) +
      hidden * real(f.routed_experts);
  return detail::flops(real(f.dense_layers) * dense +
                       real(c.num_hidden_layers - f.dense_layers) * experts);
}

/// Output head. Precondition: can_count_complete(c).
constexpr double output_head_flops(ModelConfig const& c) noexcept {
  return detail::flops(detail::real(c.feed_forward.vocab_size) * detail::real(c.hidden_size));
}

/// The complete count for one decoded token, all layers, by part.
struct CompleteFlops {
  double attention_projections = 0;
  double indexer_projections = 0;
  double index_scoring = 0;
  double attention_core = 0;
  double feed_forward = 0;
  double output_head = 0;

  constexpr double total() const noexcept {
    return attention_projections + indexer_projections + index_scoring + attention_core +
           feed_forward + output_head;
  }
};

/// The complete count for one token decoded at a length of `keys` visible keys, in a model whose
/// trunk has `full_layers` indexers: every matrix of every layer, the index scores, the sparse
/// attention core, the output head. Index scoring covers all `keys` even where they all fit the
/// selection, although a layer may skip it then.
/// Preconditions: can_count_complete(c), keys >= 0.
/// @source counted from the equations; the ratio "2.9" published for GLM-5.2 comes from counts that
/// leave parts out
constexpr CompleteFlops complete_decode_flops(ModelConfig const& c, index_t full_layers,
                                              index_t keys, CoreForm form) noexcept {
  double const layers = detail::real(c.num_hidden_layers);
  double const indexers = detail::real(full_layers);
  index_t const attended = keys < c.index_topk ? keys : c.index_topk;
  CompleteFlops flops;
  flops.attention_projections = layers * attention_projection_flops(c);
  flops.indexer_projections = indexers * indexer_projection_flops(c);
  flops.index_scoring = indexers * index_scoring_flops(c, keys);
  flops.attention_core = layers * attention_core_flops(c, attended, form);
  flops.feed_forward = feed_forward_flops(c);
  flops.output_head = output_head_flops(c);
  return flops;
}

/// The complete count with an indexer in every trunk layer and with those of the plan.
struct SharingFlops {
  CompleteFlops all_full{};
  CompleteFlops shared{};

  /// How many times fewer FLOPs the shared schedule needs, by the complete count.
  constexpr double ratio() const noexcept { return all_full.total() / shared.total(); }
};

/// Compares a schedule with one that shares nothing. Preconditions as for `complete_decode_flops`.
constexpr SharingFlops complete_sharing_flops(ModelConfig const& c, SharePlan const& plan,
                                              index_t keys, CoreForm form) noexcept {
  return {complete_decode_flops(c, plan.num_layers(), keys, form),
          complete_decode_flops(c, plan.full_layers().count(), keys, form)};
}

/// Whether the byte formulas describe the model's caches. Errors: unsupported, `what` is the
/// reason.
constexpr Status can_count_cache_bytes(ModelConfig const& c) noexcept {
  if (c.family == ModelFamily::glm5_next)
    return failure(Errc::unsupported,
                   "the cache layouts have no linear-attention layers and pooled index keys");
  return {};
}

/// Bytes of one index key: e4m3 lanes and one fp32 scale.
constexpr index_t index_key_bytes(ModelConfig const& c) noexcept { return c.index_head_dim + 4; }

/// Bytes of one layer's KV entry in the fp8 form: e4m3 latent, one fp32 scale per 128 lanes, bf16
/// rotary lanes.
constexpr index_t kv_entry_bytes(ModelConfig const& c) noexcept {
  index_t const scales = (c.kv_lora_rank + 127) / 128;
  return c.kv_lora_rank + 4 * scales + 2 * c.qk_rope_head_dim;
}

/// Cache bytes of one token over the trunk, fp8 forms. Sharing leaves `kv` as it is: a shared layer
/// attends to its own keys and values.
struct CacheBytes {
  index_t index_key_all_full = 0;  ///< were every layer full
  index_t index_key = 0;
  index_t kv = 0;
};

/// Precondition: can_count_cache_bytes(c).
constexpr CacheBytes cache_bytes_per_token(ModelConfig const& c, SharePlan const& plan) noexcept {
  return {plan.num_layers() * index_key_bytes(c), plan.full_layers().count() * index_key_bytes(c),
          plan.num_layers() * kv_entry_bytes(c)};
}

}  // namespace v0
}  // namespace indexshare
