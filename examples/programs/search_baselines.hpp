// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/indexcache/baselines.hpp>
#include <indexshare/indexcache/role_pattern.hpp>
#include <indexshare/indexcache/search.hpp>
#include <indexshare/io/detail/strict_json.hpp>
#include <indexshare/io/detail/text_file.hpp>

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "arguments.hpp"

/// @file Patterns that indexshare-search compares with.

namespace programs {

struct NamedPattern {
  std::string name;
  indexshare::indexcache::RolePattern pattern;
  std::optional<double> loss{};
  std::vector<std::int32_t> shares_pinned{};  ///< layers that share here and must not in the search
};

/// A square matrix, row-major.
struct SquareMatrix {
  std::vector<double> values;
  std::int32_t size = 0;
};

/// 0, 1, ..., count - 1.
inline nlohmann::json first_numbers(std::int32_t count) {
  std::vector<std::int32_t> numbers(static_cast<std::size_t>(count));
  std::iota(numbers.begin(), numbers.end(), 0);
  return numbers;
}

/// Reads a JSON matrix: a list of rows, or an object that has one under "overlap", as
/// indexshare-overlap writes it; it must then be of all layers and of counted rows. Errors name the
/// option, the file and the place in it.
inline Parsed<SquareMatrix> read_matrix(std::string_view option, std::string const& file,
                                        std::int32_t size) {
  auto const refuse = [&](std::string const& place, std::string const& got,
                          std::string const& expected) {
    return reject(option, one_line(file) + ": " + place + "got " + got + ", expected " + expected);
  };
  auto const text = indexshare::io::detail::read_text_file(file);
  if (!text) return refuse("", text.error().value, text.error().expected);
  auto const document = nlohmann::json::parse(*text, nullptr, false);
  bool const wrapped = document.is_object() && document.contains("overlap");
  if (wrapped) {
    if (document.contains("layer_numbers") && document["layer_numbers"] != first_numbers(size))
      return refuse("layer_numbers: ", indexshare::io::detail::shown(document["layer_numbers"]),
                    "0 to " + std::to_string(size - 1) + ", all layers of the model");
    if (document.contains("rows") && document["rows"] == 0)
      return refuse("rows: ", "0", "overlaps of at least one counted row");
  }
  nlohmann::json const& rows = wrapped ? document["overlap"] : document;
  std::string const wanted = std::to_string(size) + " rows of as many numbers";
  if (!rows.is_array())
    return refuse("", document.is_discarded() ? "no JSON" : "no list of lists",
                  wanted + ", alone or under \"overlap\"");
  if (rows.size() != static_cast<std::size_t>(size))
    return refuse("", std::to_string(rows.size()) + " rows", wanted);
  SquareMatrix matrix;
  matrix.size = size;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    std::string const row = "row " + std::to_string(i) + ": ";
    if (!rows[i].is_array() || rows[i].size() != rows.size())
      return refuse(row, indexshare::io::detail::shown(rows[i]), std::to_string(size) + " numbers");
    for (std::size_t j = 0; j < rows.size(); ++j) {
      if (!rows[i][j].is_number())
        return refuse(row + "column " + std::to_string(j) + ": ",
                      indexshare::io::detail::shown(rows[i][j]), "a number");
      matrix.values.push_back(rows[i][j].get<double>());
    }
  }
  return matrix;
}

/// Notes which layers that stay full in the search share in the patterns, which know nothing of
/// --pin and --blocks.
inline void mark_pinned(indexshare::indexcache::SearchProblem const& problem,
                        std::span<NamedPattern> patterns) {
  auto const pinned = indexshare::indexcache::detail::pinned_layers(problem);
  for (NamedPattern& named : patterns)
    for (std::int32_t layer = 0; layer < problem.layers; ++layer)
      if (pinned[static_cast<std::size_t>(layer)] && !named.pattern.is_full(layer))
        named.shares_pinned.push_back(layer);
}

/// The baselines for a model of `layers` layers of which `full` stay full. Uniform ones have the
/// period that comes nearest, and as many full layers as it gives.
/// @param similarity  null: without the pattern that it gives
inline std::vector<NamedPattern> baseline_patterns(std::int32_t layers, std::int32_t full,
                                                   SquareMatrix const* similarity) {
  namespace ic = indexshare::indexcache;
  auto const freq = static_cast<std::int32_t>(std::lround(static_cast<double>(layers) / full));
  std::string const period = ", period " + std::to_string(freq);
  std::vector<NamedPattern> list;
  list.push_back({"uniform, paper" + period, *ic::uniform_paper(layers, freq)});
  list.push_back({"uniform, patches" + period, *ic::uniform_patches(layers, freq)});
  list.push_back({"random, seed 1", *ic::random_pattern(layers, full, 1)});
  if (similarity != nullptr)
    list.push_back(
        {"highest similarity", *ic::similarity_pattern(similarity->values, layers, full)});
  return list;
}

/// Asks for the losses of patterns. @param accepted  what the evaluator works from; may have no
/// layers. Returns why a loss is missing.
inline std::optional<std::string> evaluate_patterns(
    indexshare::indexcache::Evaluator const& evaluator,
    indexshare::indexcache::RolePattern const& accepted, std::span<NamedPattern> patterns) {
  std::vector<indexshare::indexcache::Candidate> candidates;
  for (NamedPattern const& named : patterns) {
    bool const known = accepted.layers() > 0;
    candidates.push_back({named.pattern, indexshare::indexcache::no_layer,
                          known ? first_difference(accepted, named.pattern) : 0});
  }
  auto const report = [&](std::size_t index, double loss) {
    patterns[index].loss = loss;
    return true;
  };
  if (auto const problem = evaluator.evaluate(candidates, report)) return problem;
  for (NamedPattern const& named : patterns)
    if (!named.loss || !std::isfinite(*named.loss))
      return named.name + ": the loss is not a finite number";
  return std::nullopt;
}

}  // namespace programs
