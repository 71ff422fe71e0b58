// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/io/detail/field_reader.hpp>
#include <indexshare/model_config.hpp>
#include <indexshare/share/schedule.hpp>

#include <cstdint>
#include <optional>
#include <string>

namespace indexshare {
inline namespace v0 {
namespace io::detail {

inline void read_layer_counts(FieldReader const& fields, ModelConfig& model) {
  model.num_hidden_layers =
      static_cast<std::int32_t>(fields.integer("num_hidden_layers", {1, max_schedule_layers}));
  index_t const room = max_schedule_layers - model.num_hidden_layers;
  model.num_nextn_predict_layers = static_cast<std::int32_t>(
      fields.optional_integer("num_nextn_predict_layers", {0, room}).value_or(0));
  model.max_position_embeddings =
      fields.optional_integer("max_position_embeddings", any_position_count).value_or(0);
  model.index_share_for_mtp_iteration =
      fields.optional_flag("index_share_for_mtp_iteration").value_or(false);
}

/// A stated sum or count must be what the other fields make of it.
inline void check_equal(FieldReader const& fields, FieldName name, index_t expected,
                        char const* because) {
  std::optional<index_t> const stated = fields.optional_integer(name, any_width_or_none);
  if (stated && *stated != expected) fields.refuse(name, std::to_string(expected) + ", " + because);
}

inline void read_attention(FieldReader const& fields, ModelConfig& model) {
  model.hidden_size = fields.integer("hidden_size", any_width);
  model.num_attention_heads = fields.integer("num_attention_heads", any_head_count);
  model.q_lora_rank = fields.integer("q_lora_rank", any_width);
  model.kv_lora_rank = fields.integer("kv_lora_rank", any_width);
  model.qk_nope_head_dim = fields.integer("qk_nope_head_dim", any_width);
  model.qk_rope_head_dim = fields.integer("qk_rope_head_dim", any_width_or_none);
  model.v_head_dim = fields.integer("v_head_dim", any_width);
  if (fields.failed()) return;
  check_equal(fields, "num_key_value_heads", model.num_attention_heads,
              "as num_attention_heads: every head has its own keys, made from one latent");
  check_equal(fields, "qk_head_dim", qk_head_dim(model),
              "the sum of qk_nope_head_dim and qk_rope_head_dim");
}

inline void read_indexer(FieldReader const& fields, ModelConfig& model) {
  model.index_n_heads = fields.integer("index_n_heads", any_head_count);
  model.index_head_dim = fields.integer("index_head_dim", any_width);
  model.index_topk = fields.integer("index_topk", any_position_count);
}

inline void read_norm_eps(FieldReader const& fields, ModelConfig& model) {
  model.norm_eps.layer = fields.number("rms_norm_eps", {0});
  model.norm_eps.latent = model.norm_eps.layer;
}

/// Fields that only one family has. Elsewhere refused_fields.hpp holds them to their neutral value.
inline void read_hy_v4(FieldReader const& fields, ModelConfig& model) {
  if (model.family != ModelFamily::hy_v4) return;
  // transformers saves configs without them; its model has both
  auto const stated = [&fields](FieldName name) {
    if (!fields.has(name))
      fields.refuse(name, "true or false (a config that transformers saved means true)");
    return fields.flag(name);
  };
  model.learnable_sink = stated("learnable_sink");
  model.gated_output = stated("gated_mla");
  std::optional<std::string> const gate = fields.optional_word("gating_type", "\"elementwise\"");
  if (gate && *gate != "elementwise") fields.refuse("gating_type", "\"elementwise\"");
}

inline void read_key_pooling(FieldReader const& fields, ModelConfig& model) {
  if (model.family != ModelFamily::glm5_next) return;
  KeyPooling& pooling = model.key_pooling;
  pooling.tokens_per_key = fields.integer("index_kpool", {1, model.index_topk});
  pooling.compress = fields.flag("index_kpool_compress");
  pooling.always_select_tail = fields.flag("index_kpool_always_select_tail");
  if (!fields.failed() && model.index_topk % pooling.tokens_per_key != 0)
    fields.refuse("index_kpool",
                  "a divisor of index_topk (" + std::to_string(model.index_topk) + ")");
}

}  // namespace io::detail
}  // namespace v0
}  // namespace indexshare
