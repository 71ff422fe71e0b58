// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/io/config_error.hpp>
#include <indexshare/io/detail/field_reader.hpp>
#include <indexshare/io/detail/read_dimensions.hpp>
#include <indexshare/io/detail/read_family.hpp>
#include <indexshare/io/detail/read_feed_forward.hpp>
#include <indexshare/io/detail/read_rope.hpp>
#include <indexshare/io/detail/read_schedule.hpp>
#include <indexshare/io/detail/refused_fields.hpp>
#include <indexshare/io/detail/strict_json.hpp>
#include <indexshare/io/detail/text_file.hpp>
#include <indexshare/model_config.hpp>
#include <indexshare/share_plan.hpp>

#include <cuda/std/expected>

#include <nlohmann/json.hpp>

#include <optional>
#include <string>
#include <string_view>

namespace indexshare {
inline namespace v0 {
namespace io {

/// What a config.json says about sparse attention.
struct LoadedConfig {
  ModelConfig model;
  SharePlan plan;
};

template <class T>
using ConfigResult = cuda::std::expected<T, ConfigError>;

namespace detail {

/// The order matters: a step may rely on what the steps before it read.
inline constexpr void (*config_steps[])(FieldReader const&, ModelConfig&) = {
    read_layer_counts, read_attention,       read_indexer,         read_norm_eps,
    read_rope,         read_rope_layout,     read_hy_v4,           read_key_pooling,
    read_feed_forward, check_neutral_fields, check_unknown_fields,
};

inline LoadedConfig read_text_model(TextModel const& text) {
  LoadedConfig config;
  config.model.family = text.family;
  for (auto const step : config_steps) {
    if (text.fields.failed()) return config;
    step(text.fields, config.model);
  }
  if (!text.fields.failed()) config.plan = read_schedule(text.fields, config.model);
  return config;
}

}  // namespace detail

/// Reads the text of a Hugging Face config.json.
///
/// Understood: glm_moe_dsa, deepseek_v32, hy_v4 and glm5_next, alone or as the text_config of a
/// multimodal model. A null field is an absent one. Every field that changes a result is used, or
/// refused where this library does not follow it; `head_dim` is never read. Nothing is guessed: a
/// required field that is absent is an error, and so are a key given twice, two fields that
/// contradict each other, and an option of the indexer that is not known. Weaker schedule fields
/// that disagree with the deciding one are not errors but diagnostics of the plan.
///
/// A loaded config may still be one whose layers this library cannot compute: see `can_run`.
/// Errors: the first thing found wrong, by JSON path. Never throws but for lack of memory.
inline ConfigResult<LoadedConfig> parse_config(std::string_view json_text) {
  auto const document = detail::parse_object(json_text);
  if (!document) return cuda::std::unexpected<ConfigError>(document.error());
  std::optional<ConfigError> error;
  std::optional<detail::TextModel> const text = detail::find_text_model(*document, error);
  LoadedConfig config;
  if (text) config = detail::read_text_model(*text);
  if (error) return cuda::std::unexpected<ConfigError>(*error);
  return config;
}

/// Reads a config.json file. Errors: as `parse_config`; for a file that cannot be read, `path` is
/// the file's name.
inline ConfigResult<LoadedConfig> read_config_file(std::string const& file) {
  auto const text = detail::read_text_file(file);
  if (!text) return cuda::std::unexpected<ConfigError>(text.error());
  return parse_config(*text);
}

}  // namespace io
}  // namespace v0
}  // namespace indexshare
