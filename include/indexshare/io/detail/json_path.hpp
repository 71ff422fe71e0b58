// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <nlohmann/json.hpp>

#include <cstddef>
#include <string>
#include <string_view>

namespace indexshare {
inline namespace v0 {
namespace io::detail {

/// JSON text of a value on one line of ASCII, cut after about `longest` characters.
inline std::string shown(nlohmann::json const& value, std::size_t longest = 48) {
  std::string text = value.dump(-1, ' ', true, nlohmann::json::error_handler_t::replace);
  if (text.size() > longest) text = text.substr(0, longest) + "...";
  return text;
}

inline bool is_plain_key(std::string_view key) {
  for (char const c : key)
    if (!(c == '_' || (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z')))
      return false;
  return !key.empty();
}

inline std::string member_path(std::string const& parent, std::string_view key) {
  if (is_plain_key(key)) return parent + "." + std::string(key);
  return parent + "[" + shown(nlohmann::json(std::string(key))) + "]";
}

inline std::string element_path(std::string const& parent, std::size_t index) {
  return parent + "[" + std::to_string(index) + "]";
}

}  // namespace io::detail
}  // namespace v0
}  // namespace indexshare
