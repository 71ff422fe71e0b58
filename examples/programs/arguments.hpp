// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda/std/expected>

#include <algorithm>
#include <charconv>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <limits>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

/// @file Command lines of the example programs: `--name value`, `--name=value`, flags, and plain
/// words where a program takes some. Every error names the option.

namespace programs {

/// What is wrong with a command line: the option (or the stray word) and the problem.
struct ArgumentError {
  std::string option;
  std::string problem;

  std::string message() const { return option + ": " + problem; }
};

template <class T>
using Parsed = cuda::std::expected<T, ArgumentError>;

inline cuda::std::unexpected<ArgumentError> reject(std::string_view option, std::string problem) {
  return cuda::std::unexpected<ArgumentError>(
      ArgumentError{std::string(option), std::move(problem)});
}

/// A text that may come from a file or a user, without control characters.
inline std::string one_line(std::string text) {
  for (char& c : text)
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) c = '?';
  return text;
}

/// `"text"` as the user typed it, on one line.
inline std::string quoted(std::string_view text) {
  return "\"" + one_line(std::string(text)) + "\"";
}

/// An option that a program has.
struct OptionSpec {
  std::string_view name;   ///< with its dashes
  std::string_view value;  ///< what its value is called in the help; empty: a flag without one
  std::string_view help;   ///< one line
};

/// A whole number; with a suffix K or M, so many times 1024 or 1024 * 1024.
/// @param option named in errors
inline Parsed<std::int64_t> parse_integer(std::string_view option, std::string_view text,
                                          std::int64_t low, std::int64_t high) {
  std::string const expected =
      "expected a whole number from " + std::to_string(low) + " to " + std::to_string(high);
  std::string_view digits = text;
  std::int64_t unit = 1;
  if (digits.ends_with('K')) unit = 1024;
  if (digits.ends_with('M')) unit = 1024 * 1024;
  if (unit > 1) digits.remove_suffix(1);
  std::int64_t number = 0;
  auto const [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), number);
  bool const whole = error == std::errc() && end == digits.data() + digits.size();
  bool const fits = whole && number <= std::numeric_limits<std::int64_t>::max() / unit &&
                    number >= std::numeric_limits<std::int64_t>::min() / unit;
  if (!fits || number * unit < low || number * unit > high)
    return reject(option, "got " + quoted(text) + ", " + expected);
  return number * unit;
}

/// A real number. @param option named in errors
inline Parsed<double> parse_number(std::string_view option, std::string_view text, double low,
                                   double high) {
  double number = 0;
  auto const [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  bool const whole = error == std::errc() && end == text.data() + text.size();
  if (whole && low <= number && number <= high) return number;
  char bounds[80];
  std::snprintf(bounds, sizeof bounds, "expected a number from %g to %g", low, high);
  return reject(option, "got " + programs::quoted(text) + ", " + bounds);
}

/// A half-open range of numbers.
struct NumberRange {
  std::int64_t first = 0;
  std::int64_t last = 0;
};

/// `A:B`, the numbers A .. B - 1, not empty, within [0, end).
inline Parsed<NumberRange> parse_range(std::string_view option, std::string_view text,
                                       std::int64_t end) {
  std::size_t const colon = text.find(':');
  if (colon == std::string_view::npos)
    return reject(option, "got " + quoted(text) + ", expected A:B, the layers A to B - 1");
  auto const first = parse_integer(option, text.substr(0, colon), 0, end);
  if (!first) return reject(option, first.error().problem);
  auto const last = parse_integer(option, text.substr(colon + 1), 0, end);
  if (!last) return reject(option, last.error().problem);
  if (*first >= *last)
    return reject(option, "got " + quoted(text) + ", expected A below B in A:B (half-open)");
  return NumberRange{*first, *last};
}

/// What becomes of a word that is neither an option nor the value of one.
enum class PlainWords {
  refused,
  kept,  ///< it is one of `Arguments::words`, such as a file
};

/// A command line, taken apart. Values are checked when they are asked for.
class Arguments {
 public:
  /// Errors: a word that is no option unless these are kept, an option that is not in `specs` or is
  /// given twice, a missing value, a value for a flag.
  static Parsed<Arguments> parse(std::span<OptionSpec const> specs, int argc,
                                 char const* const* argv, PlainWords plain = PlainWords::refused) {
    Arguments arguments;
    for (int i = 1; i < argc; ++i) {
      std::string_view word = argv[i];
      if (plain == PlainWords::kept && !word.starts_with("--")) {
        arguments.words_.emplace_back(word);
        continue;
      }
      std::optional<std::string_view> value;
      if (std::size_t const equals = word.find('='); equals != std::string_view::npos) {
        value = word.substr(equals + 1);
        word = word.substr(0, equals);
      }
      OptionSpec const* const spec = find(specs, word);
      if (spec == nullptr) return reject(quoted(word), "unknown option; --help lists them");
      bool const takes_value = !spec->value.empty();
      if (!takes_value && value) return reject(word, "takes no value");
      if (takes_value && !value) {
        bool const next_is_value = i + 1 < argc && !std::string_view(argv[i + 1]).starts_with("--");
        if (!next_is_value) return reject(word, "expected a value: " + std::string(spec->value));
        value = argv[++i];
      }
      bool const fresh =
          arguments.values_.emplace(std::string(word), std::string(value.value_or(""))).second;
      if (!fresh) return reject(word, "given twice");
    }
    return arguments;
  }

  /// The words that are no options, in their order.
  std::vector<std::string> const& words() const { return words_; }

  bool has(std::string_view name) const { return values_.find(name) != values_.end(); }

  /// The option's text, or `otherwise` if it is not given.
  std::string text(std::string_view name, std::string_view otherwise = "") const {
    auto const found = values_.find(name);
    return found == values_.end() ? std::string(otherwise) : found->second;
  }

  /// The option's number, or `otherwise` if it is not given.
  Parsed<std::int64_t> integer(std::string_view name, std::int64_t otherwise, std::int64_t low,
                               std::int64_t high) const {
    return has(name) ? parse_integer(name, text(name), low, high) : Parsed<std::int64_t>(otherwise);
  }

  /// The option's range, or `otherwise` if it is not given.
  Parsed<NumberRange> range(std::string_view name, NumberRange otherwise, std::int64_t end) const {
    return has(name) ? parse_range(name, text(name), end) : Parsed<NumberRange>(otherwise);
  }

 private:
  static OptionSpec const* find(std::span<OptionSpec const> specs, std::string_view name) {
    for (OptionSpec const& spec : specs)
      if (spec.name == name) return &spec;
    return nullptr;
  }

  std::vector<std::string> words_;
  std::map<std::string, std::string, std::less<>> values_;
};

/// An option with a whole number, what it is without one, and where the number goes.
struct NumberOption {
  std::string_view name;
  std::int64_t otherwise;
  std::int64_t low;
  std::int64_t high;
  std::int64_t* value;
};

/// Reads all of them; the first error counts.
inline Parsed<bool> read_numbers(Arguments const& arguments,
                                 std::span<NumberOption const> options) {
  for (NumberOption const& option : options) {
    auto const value = arguments.integer(option.name, option.otherwise, option.low, option.high);
    if (!value) return cuda::std::unexpected(value.error());
    *option.value = *value;
  }
  return true;
}

/// The text of `--help`: what the program does, then one line per option.
inline std::string help_text(std::string_view program, std::string_view purpose,
                             std::span<OptionSpec const> specs) {
  std::size_t width = 0;
  auto const usage = [](OptionSpec const& spec) {
    std::string words(spec.name);
    if (!spec.value.empty()) words += " " + std::string(spec.value);
    return words;
  };
  for (OptionSpec const& spec : specs) width = std::max(width, usage(spec).size());
  std::string text =
      "usage: " + std::string(program) + " [options]\n" + std::string(purpose) + "\n\n";
  for (OptionSpec const& spec : specs) {
    std::string words = usage(spec);
    words.resize(width + 2, ' ');
    text += "  " + words + std::string(spec.help) + "\n";
  }
  return text;
}

}  // namespace programs
