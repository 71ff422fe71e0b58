// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string_view>

namespace indexshare {
inline namespace v0 {
namespace io::detail {

/// Every field of a config (or of its text_config) that the reader uses or refuses. The tests walk
/// this list and demand that a change of any of them changes the result or is an error.
inline constexpr std::string_view config_fields[] = {
    "attention_bias",
    "attn_logit_softcapping",
    "compress_ratios",
    "first_k_dense_replace",
    "gated_mla",
    "gating_type",
    "hidden_size",
    "index_head_dim",
    "index_init_tokens",
    "index_k_norm_type",
    "index_kpool",
    "index_kpool_always_select_tail",
    "index_kpool_compress",
    "index_local_tokens",
    "index_n_heads",
    "index_share_for_mtp_iteration",
    "index_skip_topk_offset",
    "index_topk",
    "index_topk_freq",
    "index_topk_pattern",
    "indexer_rope_interleave",
    "indexer_types",
    "intermediate_size",
    "kv_lora_rank",
    "kv_source_layer_ids",
    "layer_types",
    "learnable_sink",
    "linear_attn_config",
    "max_position_embeddings",
    "mlp_layer_types",
    "model_type",
    "moe_intermediate_size",
    "moe_layer_freq",
    "n_routed_experts",
    "n_shared_experts",
    "num_attention_heads",
    "num_experts_per_tok",
    "num_hidden_layers",
    "num_key_value_heads",
    "num_nextn_predict_layers",
    "partial_rotary_factor",
    "q_lora_rank",
    "qk_head_dim",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "rms_norm_eps",
    "rope_interleave",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "sliding_window",
    "use_index_cache",
    "use_sliding_window",
    "v_head_dim",
    "vocab_size",
};

/// Fields inside rope_parameters or rope_scaling. Every other field there is refused.
inline constexpr std::string_view rope_fields[] = {
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "factor",
    "mscale",
    "mscale_all_dim",
    "original_max_position_embeddings",
    "partial_rotary_factor",
    "rope_theta",
    "rope_type",
    "truncate",
    "type",
};

/// Fields inside linear_attn_config that say which layers it governs; the rest of it describes
/// layers that this library does not compute.
inline constexpr std::string_view linear_attention_fields[] = {"full_attn_layers", "kda_layers"};

template <class List>
constexpr bool lists(List const& names, std::string_view name) noexcept {
  for (std::string_view const known : names)
    if (known == name) return true;
  return false;
}

/// A field's name, checked while compiling: the reader cannot look up a field that is missing from
/// the lists above, so no field escapes the tests.
class FieldName {
 public:
  consteval FieldName(char const* name) : name_(name) {
    if (!lists(config_fields, name) && !lists(rope_fields, name) &&
        !lists(linear_attention_fields, name))
      throw "add the field to the lists in field_names.hpp";
  }

  constexpr std::string_view text() const noexcept { return name_; }

 private:
  std::string_view name_;
};

}  // namespace io::detail
}  // namespace v0
}  // namespace indexshare
