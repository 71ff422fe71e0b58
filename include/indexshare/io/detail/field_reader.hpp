// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/dims.hpp>
#include <indexshare/io/config_error.hpp>
#include <indexshare/io/detail/field_names.hpp>
#include <indexshare/io/detail/json_path.hpp>

#include <nlohmann/json.hpp>

#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

namespace indexshare {
inline namespace v0 {
namespace io::detail {

/// Bounds of an integer field, both included.
struct Between {
  index_t low;
  index_t high;
};

/// Bounds of a real field: above `low`, or `low` itself where included, and at most
/// `largest_number`.
struct NumberFrom {
  double low;
  bool included = false;
};

/// Above any base, scale or factor of a model, and such that squares and products stay finite.
inline constexpr double largest_number = 1e12;

/// Widths and counts of a model: far above any model, and such that no product of a few wraps.
inline constexpr Between any_width{1, index_t{1} << 20};
inline constexpr Between any_width_or_none{0, index_t{1} << 20};
inline constexpr Between any_head_count{1, index_t{1} << 16};
inline constexpr Between any_position_count{1, std::numeric_limits<position_t>::max()};

/// Reads typed fields of one JSON object. An absent field and a null one are the same.
///
/// The first error is kept and ends nothing: a read that fails returns a default, so that the code
/// that lists a model's fields stays a list. Look at `failed()` before values are combined.
class FieldReader {
 public:
  FieldReader(nlohmann::json const& object, std::string path, std::optional<ConfigError>& error)
      : object_(&object), path_(std::move(path)), error_(&error) {}

  bool failed() const { return error_->has_value(); }
  std::string const& path() const { return path_; }
  std::string path(FieldName name) const { return member_path(path_, name.text()); }
  nlohmann::json const& object() const { return *object_; }

  /// The field's value; null if it is absent or null.
  nlohmann::json const* find(FieldName name) const {
    auto const found = object_->find(std::string(name.text()));
    return found == object_->end() || found->is_null() ? nullptr : &*found;
  }
  bool has(FieldName name) const { return find(name) != nullptr; }

  /// Records an error at `path`, unless there is one already.
  void refuse_at(std::string path, std::string value, std::string expected) const {
    if (!failed()) *error_ = ConfigError{std::move(path), std::move(value), std::move(expected)};
  }

  /// Records that the field's present value (or its absence) is not what was expected.
  void refuse(FieldName name, std::string expected) const {
    nlohmann::json const* const value = find(name);
    refuse_at(path(name), value != nullptr ? shown(*value) : "", std::move(expected));
  }

  std::optional<index_t> optional_integer(FieldName name, Between bounds) const {
    nlohmann::json const* const value = find(name);
    if (value == nullptr) return std::nullopt;
    std::optional<index_t> const number = as_integer(*value);
    if (number && bounds.low <= *number && *number <= bounds.high) return number;
    refuse(name, integer_text(bounds));
    return std::nullopt;
  }

  index_t integer(FieldName name, Between bounds) const {
    if (!has(name)) refuse(name, integer_text(bounds));
    return optional_integer(name, bounds).value_or(0);
  }

  std::optional<double> optional_number(FieldName name, NumberFrom bound) const {
    nlohmann::json const* const value = find(name);
    if (value == nullptr) return std::nullopt;
    if (value->is_number()) {
      auto const number = value->get<double>();
      bool const allowed = number > bound.low || (bound.included && number == bound.low);
      if (allowed && number <= largest_number) return number;
    }
    refuse(name, number_text(bound));
    return std::nullopt;
  }

  double number(FieldName name, NumberFrom bound) const {
    if (!has(name)) refuse(name, number_text(bound));
    return optional_number(name, bound).value_or(0);
  }

  std::optional<bool> optional_flag(FieldName name) const {
    nlohmann::json const* const value = find(name);
    if (value == nullptr) return std::nullopt;
    if (value->is_boolean()) return value->get<bool>();
    refuse(name, "true or false");
    return std::nullopt;
  }

  bool flag(FieldName name) const {
    if (!has(name)) refuse(name, "true or false");
    return optional_flag(name).value_or(false);
  }

  std::optional<std::string> optional_word(FieldName name, char const* expected) const {
    nlohmann::json const* const value = find(name);
    if (value == nullptr) return std::nullopt;
    if (value->is_string()) return value->get<std::string>();
    refuse(name, expected);
    return std::nullopt;
  }

  /// The elements of an array with exactly `count` entries; null if the field is absent or was
  /// refused.
  nlohmann::json const* optional_list(FieldName name, std::int32_t count) const {
    nlohmann::json const* const value = find(name);
    if (value == nullptr) return nullptr;
    std::string const expected =
        "a list of " + std::to_string(count) + " entries, one for each of num_hidden_layers";
    if (!value->is_array()) {
      refuse(name, expected);
      return nullptr;
    }
    if (value->size() != static_cast<std::size_t>(count)) {
      refuse_at(path(name), std::to_string(value->size()) + " entries", expected);
      return nullptr;
    }
    return value;
  }

  /// A reader for the object in a field. Precondition: has(name).
  std::optional<FieldReader> object_in(FieldName name) const {
    nlohmann::json const* const value = find(name);
    if (value->is_object()) return FieldReader(*value, path(name), *error_);
    refuse(name, "an object");
    return std::nullopt;
  }

 private:
  static std::optional<index_t> as_integer(nlohmann::json const& value) {
    if (value.is_number_unsigned()) {
      auto const number = value.get<std::uint64_t>();
      if (number > static_cast<std::uint64_t>(std::numeric_limits<index_t>::max()))
        return std::nullopt;
      return static_cast<index_t>(number);
    }
    if (value.is_number_integer()) return value.get<index_t>();
    return std::nullopt;
  }

  static std::string integer_text(Between bounds) {
    return "an integer from " + std::to_string(bounds.low) + " to " + std::to_string(bounds.high);
  }

  static std::string number_text(NumberFrom bound) {
    return (bound.included ? "a number from " : "a number above ") + shown(bound.low) + " up to " +
           shown(largest_number);
  }

  nlohmann::json const* object_;
  std::string path_;
  std::optional<ConfigError>* error_;
};

}  // namespace io::detail
}  // namespace v0
}  // namespace indexshare
