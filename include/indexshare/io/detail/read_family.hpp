// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/io/config_error.hpp>
#include <indexshare/io/detail/field_names.hpp>
#include <indexshare/io/detail/field_reader.hpp>
#include <indexshare/io/detail/json_path.hpp>
#include <indexshare/model_config.hpp>

#include <nlohmann/json.hpp>

#include <optional>
#include <string>
#include <string_view>

namespace indexshare {
inline namespace v0 {
namespace io::detail {

struct NamedFamily {
  std::string_view model_type;
  ModelFamily family;
};

inline constexpr NamedFamily families[] = {
    {"glm_moe_dsa", ModelFamily::glm_moe_dsa},
    {"deepseek_v32", ModelFamily::deepseek_v32},
    {"hy_v4", ModelFamily::hy_v4},
    {"glm5_next", ModelFamily::glm5_next},
};

inline std::optional<ModelFamily> family_named(std::string_view model_type) {
  for (NamedFamily const& known : families)
    if (known.model_type == model_type) return known.family;
  return std::nullopt;
}

/// The family a nested text model names: `glm5_next_text` is the text model of glm5_next.
inline std::optional<ModelFamily> text_family_named(std::string_view model_type) {
  constexpr std::string_view suffix = "_text";
  if (model_type.ends_with(suffix)) model_type.remove_suffix(suffix.size());
  return family_named(model_type);
}

inline std::string known_families() {
  std::string names = "one of";
  for (NamedFamily const& known : families)
    names += (&known == families ? " " : ", ") + std::string(known.model_type);
  return names;
}

/// The part of a config that describes the text model, and what model it is.
struct TextModel {
  ModelFamily family;
  FieldReader fields;
};

/// In a config with a text_config, a field that the reader uses must not also stand outside it with
/// another value: one of the two would be ignored.
inline void check_outer_fields(FieldReader const& outer, FieldReader const& inner) {
  for (auto const& [key, value] : outer.object().items()) {
    if (key == "model_type" || value.is_null() || !lists(config_fields, key)) continue;
    auto const same = inner.object().find(key);
    if (same == inner.object().end() || *same != value)
      outer.refuse_at(member_path("$", key), shown(value),
                      "the same value as in $.text_config, or nothing");
  }
}

/// The family by `model_type`, or an error at the reader's model_type.
inline std::optional<ModelFamily> read_family(FieldReader const& fields) {
  std::optional<std::string> const name = fields.optional_word("model_type", "a string");
  std::optional<ModelFamily> const family = name ? family_named(*name) : std::nullopt;
  if (!family) fields.refuse("model_type", known_families());
  return family;
}

/// A multimodal config nests its text model, whose own model_type decides where it is one we know;
/// else the outer one does. If both name a family, they must agree.
inline std::optional<ModelFamily> read_nested_family(FieldReader const& outer,
                                                     FieldReader const& inner) {
  std::optional<std::string> const inner_name = inner.optional_word("model_type", "a string");
  if (!inner_name) return read_family(outer);
  std::optional<ModelFamily> const family = text_family_named(*inner_name);
  std::optional<std::string> const outer_name = outer.optional_word("model_type", "a string");
  std::optional<ModelFamily> const outer_family =
      outer_name ? family_named(*outer_name) : std::nullopt;
  if (!family) {
    FieldReader const& unknown = outer_name && !outer_family ? outer : inner;
    unknown.refuse("model_type", known_families());
  } else if (outer_family && outer_family != family) {
    inner.refuse("model_type", "the text model of " + *outer_name);
  }
  return family;
}

/// Finds the text model in a whole config.
inline std::optional<TextModel> find_text_model(nlohmann::json const& document,
                                                std::optional<ConfigError>& error) {
  FieldReader const outer(document, "$", error);
  auto const nested = document.find("text_config");
  if (nested == document.end() || nested->is_null()) {
    std::optional<ModelFamily> const family = read_family(outer);
    return family ? std::optional(TextModel{*family, outer}) : std::nullopt;
  }
  if (!nested->is_object()) {
    outer.refuse_at("$.text_config", shown(*nested), "an object");
    return std::nullopt;
  }
  FieldReader const inner(*nested, "$.text_config", error);
  std::optional<ModelFamily> const family = read_nested_family(outer, inner);
  if (family) check_outer_fields(outer, inner);
  return family ? std::optional(TextModel{*family, inner}) : std::nullopt;
}

}  // namespace io::detail
}  // namespace v0
}  // namespace indexshare
