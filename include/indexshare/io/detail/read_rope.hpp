// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/io/detail/field_reader.hpp>
#include <indexshare/model_config.hpp>

#include <nlohmann/json.hpp>

#include <optional>
#include <string>

namespace indexshare {
inline namespace v0 {
namespace io::detail {

/// What one of the two objects that describe rotary embeddings states.
struct StatedRope {
  std::optional<double> theta;
  RopeScaling scaling = RopeScaling::none;
  YarnScaling yarn{};
};

inline constexpr NumberFrom any_theta{1};

/// Every field of such an object bends the angles, so an unknown one is refused.
inline void check_rope_fields_known(FieldReader const& rope) {
  for (auto const& [key, value] : rope.object().items())
    if (!value.is_null() && !lists(rope_fields, key))
      rope.refuse_at(member_path(rope.path(), key), shown(value),
                     "nothing: not a rotary option that this library knows");
}

inline void check_rope_constants(FieldReader const& rope) {
  if (rope.has("attention_factor"))
    rope.refuse("attention_factor", "nothing: it is computed from mscale and mscale_all_dim");
  if (!rope.optional_flag("truncate").value_or(true)) rope.refuse("truncate", "true or nothing");
  if (rope.optional_number("partial_rotary_factor", {0}).value_or(1) != 1)
    rope.refuse("partial_rotary_factor", "1 or nothing: qk_rope_head_dim counts the rotated lanes");
}

/// `type` is the older name of `rope_type`; files exist that have both.
inline std::string rope_type(FieldReader const& rope) {
  constexpr char const* expected = "\"default\" or \"yarn\"";
  std::optional<std::string> const newer = rope.optional_word("rope_type", expected);
  std::optional<std::string> const older = rope.optional_word("type", expected);
  if (newer && older && *newer != *older) rope.refuse("type", "the same as rope_type, or nothing");
  if (!newer && !older) return "default";
  std::string const type = newer ? *newer : *older;
  if (type != "default" && type != "yarn") {
    if (newer)
      rope.refuse("rope_type", expected);
    else
      rope.refuse("type", expected);
  }
  return type;
}

inline void check_no_yarn_fields(FieldReader const& rope) {
  constexpr FieldName names[] = {"factor", "beta_fast",      "beta_slow",
                                 "mscale", "mscale_all_dim", "original_max_position_embeddings"};
  for (FieldName const name : names)
    if (rope.has(name)) rope.refuse(name, "nothing, or rope_type \"yarn\" beside it");
}

inline YarnScaling read_yarn(FieldReader const& rope) {
  YarnScaling yarn;
  yarn.factor = rope.number("factor", {1, true});
  yarn.beta_fast = rope.optional_number("beta_fast", {0}).value_or(yarn.beta_fast);
  yarn.beta_slow = rope.optional_number("beta_slow", {0}).value_or(yarn.beta_slow);
  yarn.mscale = rope.optional_number("mscale", {0, true}).value_or(0);
  yarn.mscale_all_dim = rope.optional_number("mscale_all_dim", {0, true}).value_or(0);
  yarn.original_max_position_embeddings =
      rope.integer("original_max_position_embeddings", any_position_count);
  if (!rope.failed() && yarn.beta_fast <= yarn.beta_slow)
    rope.refuse_at(rope.path("beta_fast"), shown(yarn.beta_fast),
                   "more than beta_slow (" + shown(yarn.beta_slow) + ")");
  return yarn;
}

inline StatedRope read_rope_object(FieldReader const& rope) {
  check_rope_fields_known(rope);
  check_rope_constants(rope);
  StatedRope stated;
  stated.theta = rope.optional_number("rope_theta", any_theta);
  if (rope_type(rope) == "yarn") {
    stated.scaling = RopeScaling::yarn;
    stated.yarn = read_yarn(rope);
  } else {
    check_no_yarn_fields(rope);
  }
  return stated;
}

inline std::optional<StatedRope> read_optional_rope(FieldReader const& fields, FieldName name) {
  if (!fields.has(name)) return std::nullopt;
  std::optional<FieldReader> const rope = fields.object_in(name);
  return rope ? std::optional(read_rope_object(*rope)) : std::nullopt;
}

inline bool same_scaling(StatedRope const& a, StatedRope const& b) {
  return a.scaling == b.scaling && a.yarn == b.yarn;
}

/// The base of the frequencies from up to three places, which must agree.
inline double agreed_theta(FieldReader const& fields, std::optional<StatedRope> const& newer,
                           std::optional<StatedRope> const& older) {
  std::optional<double> theta = newer ? newer->theta : std::nullopt;
  auto const agree = [&](std::optional<double> other, std::string const& path) {
    if (theta && other && *theta != *other)
      fields.refuse_at(path, shown(*other),
                       shown(*theta) + " as elsewhere in the file, or nothing");
    if (!theta) theta = other;
  };
  agree(fields.optional_number("rope_theta", any_theta), fields.path("rope_theta"));
  if (older) agree(older->theta, fields.path("rope_scaling") + ".rope_theta");
  return theta.value_or(0);
}

/// Angles: `rope_parameters`, or the older `rope_theta` with `rope_scaling`. Both may stand there
/// if they say the same.
inline void read_rope(FieldReader const& fields, ModelConfig& model) {
  std::optional<StatedRope> const newer = read_optional_rope(fields, "rope_parameters");
  std::optional<StatedRope> const older = read_optional_rope(fields, "rope_scaling");
  if (newer && older && !same_scaling(*newer, *older))
    fields.refuse("rope_scaling", "the same scaling as in rope_parameters, or nothing");
  model.rope.theta = agreed_theta(fields, newer, older);
  if (model.rope.theta == 0 && model.qk_rope_head_dim > 0)
    fields.refuse_at(fields.path("rope_theta"), "",
                     "rope_theta, alone or inside rope_parameters (no value is assumed)");
  if (StatedRope const* const stated = newer ? &*newer : older ? &*older : nullptr) {
    model.rope.scaling = stated->scaling;
    model.rope.yarn = stated->yarn;
  }
}

/// Pairing of rotary lanes. A file that states none means its family's: DeepSeek-V3.2 pairs the
/// attention and the indexer differently.
/// @source transformers, one modeling file per family; DeepSeek-V3.2's corrected inference code.
/// For Hy4's attention, sources disagree: transformers pairs halves
inline void read_rope_layout(FieldReader const& fields, ModelConfig& model) {
  auto const layout = [&](FieldName name, RopeLayout otherwise) {
    std::optional<bool> const interleaved = fields.optional_flag(name);
    if (!interleaved) return otherwise;
    return *interleaved ? RopeLayout::interleaved : RopeLayout::half_split;
  };
  bool const hy_v4 = model.family == ModelFamily::hy_v4;
  bool const half_split_indexer = hy_v4 || model.family == ModelFamily::deepseek_v32;
  model.rope.layout =
      layout("rope_interleave", hy_v4 ? RopeLayout::half_split : RopeLayout::interleaved);
  model.indexer_rope.layout =
      layout("indexer_rope_interleave",
             half_split_indexer ? RopeLayout::half_split : RopeLayout::interleaved);
  model.indexer_rope.lanes = hy_v4 ? RopeLanes::last : RopeLanes::first;
  model.indexer_rope.dims = model.qk_rope_head_dim;
  if (model.qk_rope_head_dim % 2 != 0)
    fields.refuse("qk_rope_head_dim", "an even number: lanes are rotated in pairs");
  if (model.qk_rope_head_dim > model.index_head_dim)
    fields.refuse("qk_rope_head_dim", "at most index_head_dim (" +
                                          std::to_string(model.index_head_dim) +
                                          "): the indexer rotates as many lanes");
}

}  // namespace io::detail
}  // namespace v0
}  // namespace indexshare
