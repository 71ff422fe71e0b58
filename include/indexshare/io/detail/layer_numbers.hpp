// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/io/checkpoint.hpp>
#include <indexshare/io/detail/attention_tensors.hpp>
#include <indexshare/share_plan.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace indexshare {
inline namespace v0 {
namespace io::detail {

/// Where a self-attention tensor belongs.
struct TensorPlace {
  std::string module;  ///< what its name begins with
  std::int32_t layer;  ///< MTP lists count on from the trunk; saturates
};

inline std::int32_t saturated_number(std::string_view digits) {
  constexpr std::int64_t most = std::numeric_limits<std::int32_t>::max();
  std::int64_t number = 0;
  for (char const digit : digits) number = std::min(most, number * 10 + (digit - '0'));
  return static_cast<std::int32_t>(number);
}

/// The place of a tensor below `list`, which begins the name; nothing if it is none of a
/// self-attention module.
inline std::optional<TensorPlace> place_below(std::string_view list, std::string_view name) {
  if (!name.starts_with(list)) return std::nullopt;
  std::string_view const rest = name.substr(list.size());
  std::size_t const digits = std::min(rest.find_first_not_of("0123456789"), rest.size());
  bool const is_number = digits > 0 && (digits == 1 || rest[0] != '0');  // 01 is nobody's layer
  if (!is_number || !rest.substr(digits).starts_with(attention_module)) return std::nullopt;
  return TensorPlace{std::string(name.substr(0, list.size() + digits + attention_module.size())),
                     saturated_number(rest.substr(0, digits))};
}

inline std::optional<TensorPlace> place_of(std::string_view name, std::int32_t trunk_layers) {
  for (std::string_view const model : model_prefixes) {
    if (auto place = place_below(std::string(model) + std::string(trunk_list), name)) return place;
    if (auto place = place_below(std::string(model) + std::string(mtp_list), name)) {
      constexpr std::int32_t most = std::numeric_limits<std::int32_t>::max();
      place->layer = std::min(place->layer, most - trunk_layers) + trunk_layers;
      return place;
    }
  }
  return std::nullopt;
}

/// Numbers of the layers whose self-attention modules belong to no layer of the plan.
inline std::vector<std::int32_t> layers_outside(Checkpoint const& checkpoint,
                                                SharePlan const& plan) {
  std::set<std::string> used;
  for (std::int32_t layer = 0; layer < plan.total_layers(); ++layer) {
    for (std::string& prefix : attention_prefixes(plan, layer)) used.insert(std::move(prefix));
  }
  std::set<std::int32_t> outside;
  for (std::string const& name : checkpoint.names()) {
    auto const place = place_of(name, plan.num_layers());
    if (place && !used.contains(place->module)) outside.insert(place->layer);
  }
  return {outside.begin(), outside.end()};
}

}  // namespace io::detail
}  // namespace v0
}  // namespace indexshare
