// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/indexcache/role_pattern.hpp>
#include <indexshare/io/config_error.hpp>
#include <indexshare/share/schedule.hpp>

#include <cuda/std/expected>

#include <cstddef>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace indexshare {
inline namespace v0 {
namespace io {

/// Reads a pattern such as `FFSSFS`, one letter per layer: what `indexcache::pattern_text` writes.
/// @param where  what errors call the text: an option, a field, a file
/// Errors: no letters or more than `max_schedule_layers`, a letter other than F and S (case
/// matters), an S for layer 0.
inline cuda::std::expected<indexcache::RolePattern, ConfigError> parse_pattern(
    std::string_view text, std::string where = "pattern") {
  auto const refuse = [&](std::string value, std::string expected) {
    return cuda::std::unexpected<ConfigError>(
        ConfigError{std::move(where), std::move(value), std::move(expected)});
  };
  auto const most = static_cast<std::size_t>(max_schedule_layers);
  if (text.empty() || text.size() > most)
    return refuse(std::to_string(text.size()) + " letters",
                  "1 to " + std::to_string(most) + " letters, one for each layer");
  std::vector<LayerRole> roles;
  for (char const letter : text) {
    if (letter != 'F' && letter != 'S') {
      bool const printable = letter > ' ' && letter <= '~';
      return refuse((printable ? std::string("'") + letter + "'" : "another character") +
                        " for layer " + std::to_string(roles.size()),
                    "only F (full) and S (shared)");
    }
    roles.push_back(letter == 'F' ? LayerRole::full : LayerRole::shared);
  }
  auto const pattern = indexcache::RolePattern::from_roles(roles);
  if (!pattern) return refuse("'S' for layer 0", "F: layer 0 has no layer below it to read from");
  return *pattern;
}

}  // namespace io
}  // namespace v0
}  // namespace indexshare
