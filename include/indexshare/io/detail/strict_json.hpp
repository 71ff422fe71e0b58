// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/io/config_error.hpp>
#include <indexshare/io/detail/json_path.hpp>

#include <cuda/std/expected>

#include <nlohmann/json.hpp>

#include <cstddef>
#include <cstdint>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace indexshare {
inline namespace v0 {
namespace io::detail {

/// Reads through JSON text and stops at the first thing that a config must not contain: a syntax
/// error, text after the end, a number no double holds, a key given twice (JSON readers disagree
/// about which one counts), nesting without end. Builds nothing.
class StrictJsonCheck {
 public:
  using Json = nlohmann::json;

  explicit StrictJsonCheck(std::string_view text) : text_(text) {}

  ConfigError const& error() const noexcept { return error_; }

  bool null() { return value(); }
  bool boolean(bool) { return value(); }
  bool number_integer(Json::number_integer_t) { return value(); }
  bool number_unsigned(Json::number_unsigned_t) { return value(); }
  bool number_float(Json::number_float_t, Json::string_t const&) { return value(); }
  bool string(Json::string_t&) { return value(); }
  bool binary(Json::binary_t&) { return value(); }
  bool start_object(std::size_t) { return open(false); }
  bool start_array(std::size_t) { return open(true); }
  bool end_object() { return close(); }
  bool end_array() { return close(); }

  bool key(Json::string_t& name) {
    Level& level = levels_.back();
    level.key = name;
    if (level.keys.insert(name).second) return true;
    return refuse("a second value", "each key once");
  }

  bool parse_error(std::size_t position, std::string const&,
                   nlohmann::detail::exception const& reason) {
    constexpr int number_out_of_range = 406;
    if (reason.id == number_out_of_range)
      return refuse("a number too large for a double", "a finite number");
    return refuse("invalid JSON at " + place(position), "one JSON object and nothing after it");
  }

 private:
  static constexpr std::size_t max_depth = 32;

  struct Level {
    std::string path;  // of this object or array
    bool is_array = false;
    std::size_t index = 0;         // array: number of the value that comes next
    std::string key{};             // object: key of the value that comes next
    std::set<std::string> keys{};  // object: all keys so far
  };

  bool value() {
    if (!levels_.empty()) ++levels_.back().index;
    return true;
  }

  bool open(bool is_array) {
    if (levels_.size() == max_depth)
      return refuse("nesting deeper than " + std::to_string(max_depth) + " levels",
                    "at most that many");
    levels_.push_back(Level{here(), is_array});
    return true;
  }

  bool close() {
    levels_.pop_back();
    return value();
  }

  std::string here() const {
    if (levels_.empty()) return "$";
    Level const& level = levels_.back();
    if (level.is_array) return element_path(level.path, level.index);
    return level.keys.empty() ? level.path : member_path(level.path, level.key);
  }

  bool refuse(std::string value, std::string expected) {
    error_ = {here(), std::move(value), std::move(expected)};
    return false;
  }

  std::string place(std::size_t position) const {
    std::size_t line = 1;
    std::size_t column = 1;
    for (char const c : text_.substr(0, position > 0 ? position - 1 : 0)) {
      column = c == '\n' ? 1 : column + 1;
      line += c == '\n' ? 1 : 0;
    }
    return "line " + std::to_string(line) + ", column " + std::to_string(column);
  }

  std::string_view text_;
  std::vector<Level> levels_;
  ConfigError error_;
};

/// Parses JSON text that must be one object.
inline cuda::std::expected<nlohmann::json, ConfigError> parse_object(std::string_view text) {
  if (text.find('\0') != std::string_view::npos) {  // the parser would take it for the end
    return cuda::std::unexpected<ConfigError>(
        ConfigError{"$", "a NUL byte", "one JSON object and nothing after it"});
  }
  StrictJsonCheck check(text);
  if (!nlohmann::json::sax_parse(text.begin(), text.end(), &check))
    return cuda::std::unexpected<ConfigError>(check.error());
  nlohmann::json document = nlohmann::json::parse(text.begin(), text.end(), nullptr, false);
  if (!document.is_object())
    return cuda::std::unexpected<ConfigError>(ConfigError{"$", shown(document), "a JSON object"});
  return document;
}

}  // namespace io::detail
}  // namespace v0
}  // namespace indexshare
