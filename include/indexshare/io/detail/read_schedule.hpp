// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/io/detail/field_reader.hpp>
#include <indexshare/io/detail/read_sparse_layers.hpp>
#include <indexshare/model_config.hpp>
#include <indexshare/share/schedule.hpp>
#include <indexshare/share_plan.hpp>

#include <cuda/std/span>

#include <nlohmann/json.hpp>

#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <vector>

namespace indexshare {
inline namespace v0 {
namespace io::detail {

using LayerRoles = std::vector<LayerRole>;

/// The words of indexer_types. Case matters: readers that guess at other spellings have guessed
/// opposite things.
inline LayerRoles roles_of_words(FieldReader const& fields, FieldName name,
                                 nlohmann::json const& words) {
  LayerRoles roles;
  for (nlohmann::json const& word : words) {
    if (word != "full" && word != "shared")
      fields.refuse_at(element_path(fields.path(name), roles.size()), shown(word),
                       "\"full\" or \"shared\"");
    roles.push_back(word == "full" ? LayerRole::full : LayerRole::shared);
  }
  return roles;
}

/// The letters of index_topk_pattern.
inline LayerRoles roles_of_letters(FieldReader const& fields, std::string const& letters,
                                   std::int32_t num_layers) {
  LayerRoles roles;
  for (char const letter : letters) {
    if (letter != 'F' && letter != 'S')
      fields.refuse("index_topk_pattern", "only F and S, but the letter of layer " +
                                              std::to_string(roles.size()) + " is another");
    roles.push_back(letter == 'F' ? LayerRole::full : LayerRole::shared);
  }
  if (roles.size() != static_cast<std::size_t>(num_layers))
    fields.refuse_at(fields.path("index_topk_pattern"), std::to_string(roles.size()) + " letters",
                     std::to_string(num_layers) + " letters, one for each of num_hidden_layers");
  return roles;
}

inline std::optional<LayerRoles> read_types(FieldReader const& fields, std::int32_t num_layers) {
  nlohmann::json const* const words = fields.optional_list("indexer_types", num_layers);
  if (words == nullptr) return std::nullopt;
  return roles_of_words(fields, "indexer_types", *words);
}

/// index_topk_pattern: a string of letters, or a list of the words of indexer_types.
inline std::optional<LayerRoles> read_pattern(FieldReader const& fields, std::int32_t num_layers) {
  nlohmann::json const* const value = fields.find("index_topk_pattern");
  if (value == nullptr) return std::nullopt;
  if (value->is_string()) return roles_of_letters(fields, value->get<std::string>(), num_layers);
  if (!value->is_array()) {
    fields.refuse("index_topk_pattern",
                  "a string of F and S, or a list of \"full\" and \"shared\"");
    return std::nullopt;
  }
  nlohmann::json const* const words = fields.optional_list("index_topk_pattern", num_layers);
  if (words == nullptr) return std::nullopt;
  return roles_of_words(fields, "index_topk_pattern", *words);
}

/// Where the layer that has no source is called shared.
inline std::string blamed_path(FieldReader const& fields, ScheduleSource decided_by,
                               std::int32_t layer) {
  auto const at = static_cast<std::size_t>(layer);
  if (decided_by == ScheduleSource::indexer_types)
    return element_path(fields.path("indexer_types"), at);
  if (decided_by == ScheduleSource::pattern) return fields.path("index_topk_pattern");
  return fields.path("index_topk_freq");
}

inline cuda::std::span<LayerRole const> view_of(LayerRoles const& roles) {
  return {roles.data(), roles.size()};
}

inline SharePlan read_schedule(FieldReader const& fields, ModelConfig const& model) {
  std::int32_t const layers = model.num_hidden_layers;
  std::optional<LayerRoles> const types = read_types(fields, layers);
  std::optional<LayerRoles> const pattern = read_pattern(fields, layers);
  std::optional<LayerMask> const sparse = read_sparse_layers(fields, model);
  // An offset past the last layer has a meaning (every layer is full), so the bound is the type's.
  constexpr Between at_least_one{1, std::numeric_limits<std::int32_t>::max()};
  std::optional<index_t> const freq = fields.optional_integer("index_topk_freq", at_least_one);
  std::optional<index_t> const offset =
      fields.optional_integer("index_skip_topk_offset", at_least_one);
  if (fields.failed()) return {};

  ScheduleFields stated;
  stated.num_layers = layers;
  stated.mtp_layers = model.num_nextn_predict_layers;
  if (types) stated.types = view_of(*types);
  if (pattern) stated.pattern = view_of(*pattern);
  if (freq) stated.freq = *freq;
  if (offset) stated.offset = *offset;
  if (sparse)
    stated.sparse = cuda::std::span<bool const>(sparse->data(), static_cast<std::size_t>(layers));

  Result<SharePlan> const plan = make_share_plan(stated);
  if (plan) return *plan;
  // After the checks above only one thing is left to go wrong.
  std::int32_t const layer = plan.error().layer;
  fields.refuse_at(
      blamed_path(fields, indexshare::detail::SharePlanBuilder(stated).decided_by(), layer),
      "a shared layer " + std::to_string(layer) + " without a source",
      "a full layer below every shared one");
  return {};
}

}  // namespace io::detail
}  // namespace v0
}  // namespace indexshare
