// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/io/detail/field_reader.hpp>
#include <indexshare/model_config.hpp>
#include <indexshare/share/schedule.hpp>

#include <nlohmann/json.hpp>

#include <array>
#include <cstddef>
#include <optional>
#include <string>

namespace indexshare {
inline namespace v0 {
namespace io::detail {

/// One flag per trunk layer.
using LayerMask = std::array<bool, max_schedule_layers>;

/// layer_types: which layers have sparse attention. Only glm5_next mixes in linear attention.
inline std::optional<LayerMask> read_layer_types(FieldReader const& fields,
                                                 ModelConfig const& model) {
  nlohmann::json const* const types = fields.optional_list("layer_types", model.num_hidden_layers);
  if (types == nullptr) return std::nullopt;
  bool const may_be_linear = model.family == ModelFamily::glm5_next;
  LayerMask sparse{};
  for (std::size_t layer = 0; layer < types->size(); ++layer) {
    nlohmann::json const& type = (*types)[layer];
    sparse[layer] = type == "deepseek_sparse_attention" || type == "indexed_attention";
    bool const linear = may_be_linear && type == "linear_attention";
    if (!sparse[layer] && !linear)
      fields.refuse_at(element_path(fields.path("layer_types"), layer), shown(type),
                       may_be_linear ? "\"deepseek_sparse_attention\" or \"linear_attention\""
                                     : "\"deepseek_sparse_attention\"");
  }
  return sparse;
}

/// A list of layer numbers.
inline std::optional<LayerMask> read_layer_numbers(FieldReader const& lists, FieldName name,
                                                   std::int32_t num_layers) {
  nlohmann::json const* const numbers = lists.find(name);
  if (numbers == nullptr) return std::nullopt;
  if (!numbers->is_array()) lists.refuse(name, "a list of layer numbers");
  LayerMask listed{};
  std::size_t place = 0;
  for (nlohmann::json const& number : *numbers) {
    bool const valid = number.is_number_integer() && number >= 0 && number < num_layers;
    if (valid)
      listed[number.get<std::size_t>()] = true;
    else
      lists.refuse_at(element_path(lists.path(name), place), shown(number),
                      "a layer number below " + std::to_string(num_layers));
    ++place;
  }
  return listed;
}

/// Holds a list of layer numbers against the mask that was settled on.
inline void check_layer_numbers(FieldReader const& lists, FieldName name,
                                std::optional<LayerMask> const& listed, LayerMask const& sparse,
                                bool names_sparse_layers, std::int32_t num_layers) {
  if (!listed) return;
  for (std::int32_t layer = 0; layer < num_layers; ++layer) {
    auto const at = static_cast<std::size_t>(layer);
    bool const belongs = sparse[at] == names_sparse_layers;
    if ((*listed)[at] == belongs) continue;
    lists.refuse_at(
        lists.path(name), ((*listed)[at] ? "layer " : "no layer ") + std::to_string(layer),
        "the layers that layer_types and the other list of linear_attn_config make of it");
  }
}

/// The sparse layers of a glm5_next model, from layer_types and the two lists of
/// linear_attn_config. At least one of the three must be there, and all that are there must agree.
inline std::optional<LayerMask> read_mixed_layers(FieldReader const& fields,
                                                  ModelConfig const& model) {
  std::optional<LayerMask> sparse = read_layer_types(fields, model);
  std::optional<FieldReader> const lists =
      fields.has("linear_attn_config") ? fields.object_in("linear_attn_config") : std::nullopt;
  if (lists) {
    std::int32_t const layers = model.num_hidden_layers;
    std::optional<LayerMask> const full = read_layer_numbers(*lists, "full_attn_layers", layers);
    std::optional<LayerMask> const linear = read_layer_numbers(*lists, "kda_layers", layers);
    if (!sparse) sparse = full;
    if (!sparse && linear) {
      sparse.emplace();
      for (std::size_t layer = 0; layer < sparse->size(); ++layer)
        (*sparse)[layer] = !(*linear)[layer];
    }
    if (sparse) {
      check_layer_numbers(*lists, "full_attn_layers", full, *sparse, true, layers);
      check_layer_numbers(*lists, "kda_layers", linear, *sparse, false, layers);
    }
  }
  if (!sparse) fields.refuse("layer_types", "a list that tells sparse from linear layers");
  return sparse;
}

inline std::optional<LayerMask> read_sparse_layers(FieldReader const& fields,
                                                   ModelConfig const& model) {
  return model.family == ModelFamily::glm5_next ? read_mixed_layers(fields, model)
                                                : read_layer_types(fields, model);
}

}  // namespace io::detail
}  // namespace v0
}  // namespace indexshare
