// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <charconv>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <system_error>

/// @file Names in a file of recorded selections. docs/overlap.md describes the whole layout.

namespace indexshare {
inline namespace v0 {
namespace io {

/// Value of the metadata's `format`: name and version of the layout.
inline constexpr std::string_view selection_format = "indexshare-selections-1";

/// Name of the tensor of visible keys, [rows].
inline constexpr std::string_view selection_lengths_name = "lengths";

/// Name of a layer's tensor, [rows, top_k].
inline std::string selection_tensor_name(std::int32_t layer) {
  return "selection.layer." + std::to_string(layer);
}

/// The layer of such a name; nothing for any other name.
inline std::optional<std::int32_t> parse_selection_tensor_name(std::string_view name) {
  std::size_t const dot = name.rfind('.');
  if (dot == std::string_view::npos) return std::nullopt;
  std::string_view const digits = name.substr(dot + 1);
  std::int32_t layer = 0;
  auto const [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), layer);
  bool const whole = error == std::errc() && end == digits.data() + digits.size() && layer >= 0;
  if (!whole || name != selection_tensor_name(layer)) return std::nullopt;
  return layer;
}

}  // namespace io
}  // namespace v0
}  // namespace indexshare
