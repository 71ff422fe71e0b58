// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "../programs/arguments.hpp"
#include "evaluator.hpp"

#include <array>
#include <charconv>
#include <cstddef>
#include <cstdint>
#include <istream>
#include <optional>
#include <ostream>
#include <sstream>
#include <string>
#include <string_view>

/// @file The other end of indexshare-search --evaluator: answers with losses, line by line.

namespace small_dsa {

namespace detail {

/// With all digits, so that the search sees the same number as one in this process.
inline std::string number_text(double number) {
  std::array<char, 32> text;
  auto const [end, error] = std::to_chars(text.data(), text.data() + text.size(), number);
  return {text.data(), end};
}

/// A pattern of the model's layers; none if it is something else.
inline std::optional<Choices> pattern_of(std::string const& text, Model const& model) {
  auto choices = parse_choices(text);
  if (choices && choices->size() != static_cast<std::size_t>(model.layers())) choices.reset();
  return choices;
}

/// What `pattern_of` takes.
inline std::string expected_pattern(Model const& model) {
  return "expected " + std::to_string(model.layers()) +
         " letters F, S or R, the first of them not S";
}

inline std::string answer(Evaluator& evaluator, Model const& model, std::string const& id,
                          std::string const& text) {
  auto const choices = pattern_of(text, model);
  if (!choices) {
    return "error " + id + " got " + programs::quoted(text) + ", " + expected_pattern(model);
  }
  auto const score = evaluator.evaluate(*choices);
  return score ? "loss " + id + " " + number_text(score->loss)
               : "error " + id + " " + score.error();
}

}  // namespace detail

/// Answers until `bye` or the end of the input; the protocol is in programs/search_evaluator.hpp.
/// Returns nothing, or what was wrong with a line.
inline std::optional<std::string> serve(Evaluator& evaluator, Model const& model, std::istream& in,
                                        std::ostream& out) {
  std::string const hello = "hello indexshare-search 1 " + std::to_string(model.layers());
  std::string line;
  if (!std::getline(in, line) || line != hello) {
    return "input: got \"" + line + "\", expected \"" + hello +
           "\": this command is for indexshare-search --evaluator";
  }
  while (std::getline(in, line) && line != "bye") {
    std::istringstream words(line);
    std::string kind, first, second;
    words >> kind >> first >> second;
    if (kind == "evaluate" && !second.empty()) {
      out << detail::answer(evaluator, model, first, second) << "\n" << std::flush;
      continue;
    }
    auto const base = kind == "accepted" ? detail::pattern_of(first, model) : std::nullopt;
    if (!base) return "input: got \"" + line + "\", expected accepted, evaluate or bye";
    if (auto const kept = evaluator.keep(*base); !kept) return kept.error();
  }
  return std::nullopt;
}

}  // namespace small_dsa
