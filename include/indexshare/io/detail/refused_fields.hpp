// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/io/detail/field_names.hpp>
#include <indexshare/io/detail/field_reader.hpp>
#include <indexshare/io/detail/json_path.hpp>
#include <indexshare/model_config.hpp>

#include <nlohmann/json.hpp>

#include <optional>
#include <string_view>

namespace indexshare {
inline namespace v0 {
namespace io::detail {

/// A field that would change what a model computes in a way this library does not follow. It may be
/// absent, or have one of its neutral values.
struct NeutralField {
  FieldName name;
  std::string_view neutral;  ///< JSON array of the values that change nothing
  char const* expected;
  std::optional<ModelFamily> except = std::nullopt;  ///< the family whose own field it is
};

inline constexpr NeutralField neutral_fields[] = {
    {"attention_bias", "[false]", "false: the projections have no bias"},
    {"attn_logit_softcapping", "[]", "nothing: the logits are not capped"},
    {"compress_ratios", "[]", "nothing: compressed keys and values are not implemented"},
    {"index_init_tokens", "[0]", "0: no token is selected by its position"},
    {"index_local_tokens", "[0]", "0: no token is selected by its position"},
    {"index_k_norm_type", R"(["layer", "layernorm", "layer_norm"])",
     "\"layernorm\": index keys pass a LayerNorm with bias"},
    {"kv_source_layer_ids", "[]", "nothing: a layer attends to its own keys and values"},
    {"moe_layer_freq", "[1]", "1: every layer after the dense ones has experts"},
    {"partial_rotary_factor", "[1]", "1: qk_rope_head_dim counts the rotated lanes"},
    {"sliding_window", "[]", "nothing: there is no window"},
    {"use_index_cache", "[true]", "true: the schedule alone says which layers share"},
    {"use_sliding_window", "[false]", "false: there is no window"},
    {"index_kpool", "[1]", "1: only glm5_next pools index keys", ModelFamily::glm5_next},
    {"index_kpool_compress", "[false]", "false: only glm5_next pools index keys",
     ModelFamily::glm5_next},
    {"index_kpool_always_select_tail", "[false]", "false: only glm5_next pools index keys",
     ModelFamily::glm5_next},
    {"linear_attn_config", "[]", "nothing: only glm5_next has linear-attention layers",
     ModelFamily::glm5_next},
    {"learnable_sink", "[false]", "false: only hy_v4 has learned sinks", ModelFamily::hy_v4},
    {"gated_mla", "[false]", "false: only hy_v4 gates the attention output", ModelFamily::hy_v4},
    {"gating_type", "[]", "nothing: only hy_v4 gates the attention output", ModelFamily::hy_v4},
};

inline void check_neutral_fields(FieldReader const& fields, ModelConfig& model) {
  for (NeutralField const& field : neutral_fields) {
    nlohmann::json const* const value = fields.find(field.name);
    if (value == nullptr || field.except == model.family) continue;
    bool neutral = false;
    for (nlohmann::json const& allowed : nlohmann::json::parse(field.neutral))
      neutral = neutral || *value == allowed;
    if (!neutral) fields.refuse(field.name, field.expected);
  }
}

/// Names under which new options of the indexer and of the rotation appear. One that this library
/// does not know would be ignored and change the selection unseen.
inline bool looks_like_an_option_of_the_indexer(std::string_view key) {
  return key.starts_with("index_") || key.starts_with("indexer_") || key.starts_with("rope_");
}

inline void check_unknown_fields(FieldReader const& fields, ModelConfig&) {
  for (auto const& [key, value] : fields.object().items())
    if (!value.is_null() && looks_like_an_option_of_the_indexer(key) && !lists(config_fields, key))
      fields.refuse_at(member_path(fields.path(), key), shown(value),
                       "nothing: not an option of the indexer or the rotation that this library "
                       "knows");
}

}  // namespace io::detail
}  // namespace v0
}  // namespace indexshare
