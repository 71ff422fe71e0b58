// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/share_plan.hpp>

#include <cuda/std/span>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace small_dsa {

/// Where a layer gets its selection from.
enum class Choice : char {
  full = 'F',    ///< its own indexer
  shared = 'S',  ///< the nearest layer below that is not shared
  random = 'R',  ///< keys at random; layers above may share them
};

/// One per layer; the first is not shared.
using Choices = std::vector<Choice>;

/// FFSR.. as choices; none for other letters or a first layer that has nothing to share.
inline std::optional<Choices> parse_choices(std::string_view text) {
  Choices choices;
  for (char const letter : text) {
    if (letter != 'F' && letter != 'S' && letter != 'R') return std::nullopt;
    choices.push_back(static_cast<Choice>(letter));
  }
  if (choices.empty() || choices[0] == Choice::shared) return std::nullopt;
  return choices;
}

inline std::string text_of(Choices const& choices) {
  std::string text;
  for (Choice const choice : choices) text += static_cast<char>(choice);
  return text;
}

/// The first layer in which the two differ; their size if they do not.
inline std::int32_t first_difference(Choices const& a, Choices const& b) {
  auto const end = a.begin() + static_cast<std::ptrdiff_t>(std::min(a.size(), b.size()));
  return static_cast<std::int32_t>(std::mismatch(a.begin(), end, b.begin()).first - a.begin());
}

/// The share policy of the layers.
inline indexshare::SharePlan share_plan(Choices const& choices) {
  std::vector<indexshare::LayerRole> roles;
  for (Choice const choice : choices) {
    roles.push_back(choice == Choice::shared ? indexshare::LayerRole::shared
                                             : indexshare::LayerRole::full);
  }
  indexshare::ScheduleFields fields;
  fields.num_layers = static_cast<std::int32_t>(choices.size());
  fields.types = cuda::std::span<indexshare::LayerRole const>(roles.data(), roles.size());
  return make_share_plan(fields).value();
}

}  // namespace small_dsa
