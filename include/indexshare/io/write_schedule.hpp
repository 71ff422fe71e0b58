// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/indexcache/role_pattern.hpp>
#include <indexshare/io/config.hpp>
#include <indexshare/io/config_error.hpp>
#include <indexshare/io/detail/replace_file.hpp>
#include <indexshare/io/detail/text_file.hpp>
#include <indexshare/share/periodic.hpp>
#include <indexshare/share_plan.hpp>

#include <cuda/std/expected>

#include <nlohmann/json.hpp>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <ostream>
#include <string>
#include <string_view>

namespace indexshare {
inline namespace v0 {
namespace io {

/// The pattern as the list that a config calls `indexer_types`: "full" or "shared" per layer.
inline nlohmann::ordered_json indexer_types(indexcache::RolePattern const& pattern) {
  nlohmann::ordered_json words = nlohmann::ordered_json::array();
  for (LayerRole const role : pattern.roles())
    words.push_back(role == LayerRole::full ? "full" : "shared");
  return words;
}

namespace detail {

inline bool states(nlohmann::ordered_json const& object, char const* field) {
  auto const found = object.find(field);
  return found != object.end() && !found->is_null();
}

/// Whether index_topk_freq and index_skip_topk_offset of a valid config give the pattern.
inline bool period_gives(nlohmann::ordered_json const& object,
                         indexcache::RolePattern const& pattern) {
  auto const freq = object["index_topk_freq"].get<std::int64_t>();
  std::int64_t const offset = states(object, "index_skip_topk_offset")
                                  ? object["index_skip_topk_offset"].get<std::int64_t>()
                                  : default_share_offset;
  for (std::int32_t layer = 0; layer < pattern.layers(); ++layer)
    if (is_full_by_period(layer, freq, offset) != pattern.is_full(layer)) return false;
  return true;
}

/// Makes the schedule fields that the object states say the same as the pattern. A period can only
/// be right or be dropped.
inline void update_schedule(nlohmann::ordered_json& object,
                            indexcache::RolePattern const& pattern) {
  if (states(object, "indexer_types")) object["indexer_types"] = indexer_types(pattern);
  if (states(object, "index_topk_pattern")) {
    bool const letters = object["index_topk_pattern"].is_string();
    object["index_topk_pattern"] =
        letters ? nlohmann::ordered_json(pattern_text(pattern)) : indexer_types(pattern);
  }
  if (states(object, "index_topk_freq") && !period_gives(object, pattern)) {
    object.erase("index_topk_freq");
    object.erase("index_skip_topk_offset");
  }
}

/// Spaces that the text indents its first line with; -1: it is all on one line.
inline int indentation_of(std::string_view json_text) {
  std::size_t const line = json_text.find('\n');
  std::size_t const first = json_text.find('"');
  if (line == std::string_view::npos || first == std::string_view::npos || first < line) return -1;
  return static_cast<int>(first - json_text.rfind('\n', first) - 1);
}

inline std::optional<ConfigError> check_layers(LoadedConfig const& config,
                                               indexcache::RolePattern const& pattern) {
  if (config.model.num_hidden_layers != pattern.layers())
    return ConfigError{"num_hidden_layers", std::to_string(config.model.num_hidden_layers),
                       std::to_string(pattern.layers()) + ", the layers of the pattern"};
  for (std::int32_t layer = 0; layer < pattern.layers(); ++layer)
    if (config.plan.role(layer) == LayerRole::none)
      return ConfigError{"layer " + std::to_string(layer), "a layer without sparse attention",
                         "a model whose layers all have it"};
  return std::nullopt;
}

}  // namespace detail

/// The text of a config.json with another schedule: `indexer_types` says what the pattern says. All
/// other fields keep their values and their order. An `index_topk_pattern` that is there is
/// updated; an `index_topk_freq` that gives other layers is dropped, with its offset. Reading the
/// result gives the plan of the pattern, without diagnostics.
///
/// Whether the model has the weights of an indexer that the pattern calls full, a config does not
/// tell.
/// Errors: those of `parse_config`; a model with another number of layers than the pattern, or with
/// layers without sparse attention.
inline ConfigResult<std::string> with_schedule(std::string_view json_text,
                                               indexcache::RolePattern const& pattern) {
  auto const config = parse_config(json_text);
  if (!config) return cuda::std::unexpected<ConfigError>(config.error());
  if (auto const error = detail::check_layers(*config, pattern))
    return cuda::std::unexpected<ConfigError>(*error);
  auto document = nlohmann::ordered_json::parse(json_text);
  detail::update_schedule(document, pattern);
  nlohmann::ordered_json* model = &document;
  if (detail::states(document, "text_config")) {
    model = &document["text_config"];
    detail::update_schedule(*model, pattern);
  }
  (*model)["indexer_types"] = indexer_types(pattern);
  std::string text = document.dump(detail::indentation_of(json_text));
  if (json_text.ends_with('\n')) text += '\n';
  return text;
}

/// Sets the schedule in a config.json file, as `with_schedule`. The file is replaced as a whole
/// once all is written. Returns the config as it then reads. Errors: those of `with_schedule`; a
/// file that cannot be read or written, which then is as it was.
inline ConfigResult<LoadedConfig> write_schedule(std::string const& file,
                                                 indexcache::RolePattern const& pattern) {
  auto const text = detail::read_text_file(file);
  if (!text) return cuda::std::unexpected<ConfigError>(text.error());
  auto const changed = with_schedule(*text, pattern);
  if (!changed) return cuda::std::unexpected<ConfigError>(changed.error());
  if (detail::replace_file(file, [&](std::ostream& stream) { stream << *changed; }))
    return cuda::std::unexpected<ConfigError>(
        ConfigError{file, "a write error", "a file in a directory with room that can be written"});
  return read_config_file(file);
}

}  // namespace io
}  // namespace v0
}  // namespace indexshare
