// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/accounting/parameters.hpp>
#include <indexshare/accounting/rows.hpp>
#include <indexshare/dims.hpp>
#include <indexshare/model_config.hpp>
#include <indexshare/share_plan.hpp>
#include <indexshare/status.hpp>

#include <cstdint>

/// @file FLOPs of a model's sparse attention and of what is around it. A multiply-add is 2.
///
/// Functions of one row count the work of one token; those of CountedRows that of all its rows.

namespace indexshare {
inline namespace v0 {

/// The two ways to write multi-head latent attention, which differ in their arithmetic.
enum class CoreForm : std::uint8_t {
  absorbed,  ///< queries meet latents: key kv_lora + rope lanes, value kv_lora lanes, per head
  expanded,  ///< queries meet per-head keys and values; making those is not counted
};

namespace detail {
constexpr double flops(double multiply_adds) noexcept { return 2 * multiply_adds; }
}  // namespace detail

/// Projections around the attention of one layer and row: queries, KV latent, head keys and values
/// (once, absorbed), output. A gate on the output (Hy4) is not in it.
constexpr double attention_projection_flops(ModelConfig const& c) noexcept {
  return detail::flops(attention_projection_parameters(c));
}

/// Projections of one layer's indexer for a row: index queries, the index key, head weights.
constexpr double indexer_projection_flops(ModelConfig const& c) noexcept {
  return detail::flops(indexer_parameters(c));
}

namespace detail {
constexpr double index_scoring(ModelConfig const& c, double keys) noexcept {
  return flops(real(c.index_n_heads) * real(c.index_head_dim) * keys);
}
constexpr double index_reduction(ModelConfig const& c, double keys) noexcept {
  return 3 * real(c.index_n_heads) * keys;
}
constexpr double attention_core(ModelConfig const& c, double attended, CoreForm form) noexcept {
  index_t const lanes = form == CoreForm::absorbed ? 2 * c.kv_lora_rank + c.qk_rope_head_dim
                                                   : qk_head_dim(c) + c.v_head_dim;
  return flops(real(c.num_attention_heads) * attended * real(lanes));
}
}  // namespace detail

/// Dot products of one layer's index scores over `keys` keys. `index_reduction_flops` and the top-k
/// (no multiply-adds) are not in it.
constexpr double index_scoring_flops(ModelConfig const& c, index_t keys) noexcept {
  return detail::index_scoring(c, detail::real(keys));
}

/// What makes index scores of the dot products: the ReLU, the head weight and the sum over heads, 3
/// per head and key. In no count unless it says so.
constexpr double index_reduction_flops(ModelConfig const& c, index_t keys) noexcept {
  return detail::index_reduction(c, detail::real(keys));
}

/// Logits and weighted sum of one layer over `attended` keys: min(index_topk, length) for the
/// sparse layer, the length for a dense one.
constexpr double attention_core_flops(ModelConfig const& c, index_t attended,
                                      CoreForm form) noexcept {
  return detail::attention_core(c, detail::real(attended), form);
}

/// Feed-forward of all layers, for a row: three matrices per dense block, the chosen and the shared
/// experts and the router elsewhere. Precondition: can_count_complete(c).
constexpr double feed_forward_flops(ModelConfig const& c) noexcept {
  FeedForward const& f = c.feed_forward;
  return detail::flops(detail::feed_forward_parameters(c, f.experts_per_token + f.shared_experts));
}

/// Feed-forward of one layer, for a row. Dense blocks are taken to be the lowest ones, as in every
/// published config. Precondition: can_count_complete(c).
constexpr double feed_forward_flops(ModelConfig const& c, std::int32_t layer) noexcept {
  FeedForward const& f = c.feed_forward;
  return detail::flops(layer < f.dense_layers ? detail::dense_block_parameters(c)
                                              : detail::expert_block_parameters(
                                                    c, f.experts_per_token + f.shared_experts));
}

/// Output head, for a row. Precondition: can_count_complete(c).
constexpr double output_head_flops(ModelConfig const& c) noexcept {
  return detail::flops(detail::embedding_parameters(c));
}

/// The complete count by part: of a model, a share group or a layer, whose output head is then 0.
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

  constexpr CompleteFlops& operator+=(CompleteFlops const& other) noexcept {
    attention_projections += other.attention_projections;
    indexer_projections += other.indexer_projections;
    index_scoring += other.index_scoring;
    attention_core += other.attention_core;
    feed_forward += other.feed_forward;
    output_head += other.output_head;
    return *this;
  }
};

/// The complete count for `rows`, in a model whose trunk has `full_layers` indexers: every matrix
/// of every layer, the index scores, the sparse attention core, the output head for every row
/// (a prefill may run it for its last row only). Index scoring covers all visible keys even where
/// they all fit the selection, although a layer may skip it then.
/// Precondition: can_count_complete(c).
/// @param full_layers  a fraction where a schedule is idealised, such as 78 / 4.0
/// @source counted from the equations; the ratio "2.9" published for GLM-5.2 comes from counts that
/// leave parts out: see named.hpp
constexpr CompleteFlops complete_flops(ModelConfig const& c, double full_layers,
                                       CountedRows const& rows, CoreForm form) noexcept {
  double const layers = detail::real(c.num_hidden_layers);
  CompleteFlops flops;
  flops.attention_projections = rows.rows * layers * attention_projection_flops(c);
  flops.indexer_projections = rows.rows * full_layers * indexer_projection_flops(c);
  flops.index_scoring = full_layers * detail::index_scoring(c, rows.visible_keys);
  flops.attention_core = layers * detail::attention_core(c, rows.attended_keys, form);
  flops.feed_forward = rows.rows * feed_forward_flops(c);
  flops.output_head = rows.rows * output_head_flops(c);
  return flops;
}

/// `complete_flops` of one decoded token. Preconditions: can_count_complete(c), keys >= 0.
/// @param keys  visible to the token
constexpr CompleteFlops complete_decode_flops(ModelConfig const& c, double full_layers,
                                              index_t keys, CoreForm form) noexcept {
  return complete_flops(c, full_layers, decoded_row(c, keys), form);
}

/// One trunk layer's part of `complete_flops`. The parts of all layers and the output head are the
/// model's. Preconditions: can_count_complete(c), 0 <= layer < plan.num_layers().
constexpr CompleteFlops layer_flops(ModelConfig const& c, SharePlan const& plan, std::int32_t layer,
                                    CountedRows const& rows, CoreForm form) noexcept {
  CompleteFlops flops;
  flops.attention_projections = rows.rows * attention_projection_flops(c);
  if (plan.is_full(layer)) {
    flops.indexer_projections = rows.rows * indexer_projection_flops(c);
    flops.index_scoring = detail::index_scoring(c, rows.visible_keys);
  }
  flops.attention_core = detail::attention_core(c, rows.attended_keys, form);
  flops.feed_forward = rows.rows * feed_forward_flops(c, layer);
  return flops;
}

/// What the layers that read the selection of `source` cost together, itself included.
/// Preconditions: can_count_complete(c), `source` is a full layer of the trunk.
constexpr CompleteFlops share_group_flops(ModelConfig const& c, SharePlan const& plan,
                                          std::int32_t source, CountedRows const& rows,
                                          CoreForm form) noexcept {
  CompleteFlops flops;
  for (std::int32_t layer = source; layer < plan.num_layers(); ++layer)
    if (share_source(plan, layer) == source) flops += layer_flops(c, plan, layer, rows, form);
  return flops;
}

/// The complete count with an indexer in every trunk layer and with those of the plan.
struct SharingFlops {
  CompleteFlops all_full{};
  CompleteFlops shared{};

  /// How many times fewer FLOPs the shared schedule needs, by the complete count.
  constexpr double ratio() const noexcept { return all_full.total() / shared.total(); }
};

/// Compares a schedule with one that shares nothing. Precondition: can_count_complete(c).
constexpr SharingFlops complete_sharing_flops(ModelConfig const& c, SharePlan const& plan,
                                              CountedRows const& rows, CoreForm form) noexcept {
  return {complete_flops(c, plan.num_layers(), rows, form),
          complete_flops(c, plan.full_layers().count(), rows, form)};
}

/// The same for one decoded token. Preconditions as for `complete_decode_flops`.
constexpr SharingFlops complete_sharing_flops(ModelConfig const& c, SharePlan const& plan,
                                              index_t keys, CoreForm form) noexcept {
  return complete_sharing_flops(c, plan, decoded_row(c, keys), form);
}

}  // namespace v0
}  // namespace indexshare
