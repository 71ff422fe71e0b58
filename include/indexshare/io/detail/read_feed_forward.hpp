// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/io/detail/field_reader.hpp>
#include <indexshare/model_config.hpp>

#include <nlohmann/json.hpp>

#include <cstddef>
#include <optional>

namespace indexshare {
inline namespace v0 {
namespace io::detail {

inline constexpr Between any_vocabulary{1, index_t{1} << 30};

/// Number of dense layers in mlp_layer_types. If `first_dense` is stated as well, the list must
/// name exactly the layers below it.
inline index_t count_dense_layers(FieldReader const& fields, nlohmann::json const& types,
                                  std::optional<index_t> first_dense) {
  index_t dense = 0;
  for (std::size_t layer = 0; layer < types.size(); ++layer) {
    bool const is_dense = types[layer] == "dense";
    if (!is_dense && types[layer] != "sparse")
      fields.refuse_at(element_path(fields.path("mlp_layer_types"), layer), shown(types[layer]),
                       "\"dense\" or \"sparse\"");
    if (first_dense && is_dense != (static_cast<index_t>(layer) < *first_dense))
      fields.refuse_at(element_path(fields.path("mlp_layer_types"), layer), shown(types[layer]),
                       "dense layers below first_k_dense_replace (" + std::to_string(*first_dense) +
                           ") and sparse ones from there on");
    dense += is_dense ? 1 : 0;
  }
  return dense;
}

/// Everything here may be absent: only the FLOP accounting asks for it, and says what it lacks.
inline void read_feed_forward(FieldReader const& fields, ModelConfig& model) {
  auto const stated = [&](FieldName name, Between bounds) {
    return fields.optional_integer(name, bounds).value_or(FeedForward::not_stated);
  };
  FeedForward& feed_forward = model.feed_forward;
  feed_forward.vocab_size = stated("vocab_size", any_vocabulary);
  feed_forward.intermediate_size = stated("intermediate_size", any_width);
  feed_forward.moe_intermediate_size = stated("moe_intermediate_size", any_width);
  feed_forward.routed_experts = stated("n_routed_experts", any_width);
  feed_forward.shared_experts = stated("n_shared_experts", any_width_or_none);
  feed_forward.experts_per_token = stated("num_experts_per_tok", any_width);
  if (feed_forward.routed_experts != FeedForward::not_stated &&
      feed_forward.experts_per_token > feed_forward.routed_experts)
    fields.refuse("num_experts_per_tok",
                  "at most n_routed_experts (" + std::to_string(feed_forward.routed_experts) + ")");

  std::optional<index_t> const first_dense =
      fields.optional_integer("first_k_dense_replace", {0, model.num_hidden_layers});
  nlohmann::json const* const types =
      fields.optional_list("mlp_layer_types", model.num_hidden_layers);
  feed_forward.dense_layers = first_dense.value_or(FeedForward::not_stated);
  if (types != nullptr) feed_forward.dense_layers = count_dense_layers(fields, *types, first_dense);
}

}  // namespace io::detail
}  // namespace v0
}  // namespace indexshare
