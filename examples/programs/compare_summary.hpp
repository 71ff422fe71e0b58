// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "compare_result.hpp"
#include "recording.hpp"

/// @file The last line of `indexshare-compare`: what was found, and what could not be looked at.

namespace programs {
namespace compare_detail {

/// Numbers of a list that are written out; the JSON report has all.
inline constexpr std::size_t listed_numbers = 8;

inline std::string list_text(std::vector<std::int32_t> const& numbers) {
  std::string text;
  std::size_t const shown = std::min(numbers.size(), listed_numbers);
  for (std::size_t i = 0; i < shown; ++i) text += (i > 0 ? ", " : "") + std::to_string(numbers[i]);
  if (shown < numbers.size()) text += ", ... (" + std::to_string(numbers.size()) + ")";
  return text.empty() ? "nothing" : text;
}

/// `layer 3`, `layers 3, 4`
inline std::string layers_text(std::vector<std::int32_t> const& layers) {
  return (layers.size() == 1 ? "layer " : "layers ") + list_text(layers);
}

/// In pipeline order.
inline std::string names_text(std::set<Quantity> const& quantities_of) {
  std::string text;
  for (Quantity const id : quantities_of)
    text += (text.empty() ? "" : ", ") + std::string(spec_of(id).name);
  return text;
}

/// What a layer has that was not compared, for one of the two reasons.
inline std::set<Quantity> not_compared(LayerResult const& layer, bool left_out) {
  std::set<Quantity> found;
  for (QuantityResult const& result : layer.quantities)
    if (result.verdict == Verdict::not_compared && result.all_left_out() == left_out)
      found.insert(result.id);
  return found;
}

/// `nothing of lse, output of layers 3, 4 was compared: every row is a near tie`; empty: there is
/// no such quantity. Layers that lack the same quantities share a clause.
inline std::string gaps_text(std::span<LayerResult const> layers, bool left_out) {
  std::map<std::set<Quantity>, std::vector<std::int32_t>> gaps;
  for (LayerResult const& layer : layers)
    if (auto const found = not_compared(layer, left_out); !found.empty())
      gaps[found].push_back(layer.layer);
  if (gaps.empty()) return "";
  std::string text;
  for (auto const& [names, of] : gaps)
    text +=
        (text.empty() ? "nothing of " : ", nor of ") + names_text(names) + " of " + layers_text(of);
  return text + " was compared: " +
         (left_out ? "every row is a near tie" : "all of it is NaN in both files");
}

/// `near-tie rows left out of lse, output: 2 of 6, in layers 3, 4`; empty: none, or all.
inline std::string left_out_text(std::span<LayerResult const> layers) {
  std::set<Quantity> names;
  std::vector<std::int32_t> of;
  std::size_t rows = 0;
  std::size_t all = 0;
  for (LayerResult const& layer : layers) {
    std::size_t most = 0;
    for (QuantityResult const& result : layer.quantities) {
      if (result.rows_left_out == 0 || result.all_left_out()) continue;
      names.insert(result.id);
      most = result.rows_left_out;  // the same for all of a layer
    }
    if (most == 0) continue;
    of.push_back(layer.layer);
    rows += most;
    all += layer.rows;
  }
  if (names.empty()) return "";
  return "near-tie rows left out of " + names_text(names) + ": " + std::to_string(rows) + " of " +
         std::to_string(all) + ", in " + layers_text(of);
}

/// What of these layers was not looked at, and what helps; empty: nothing.
inline std::string unseen_text(std::span<LayerResult const> layers) {
  std::string const near_ties = gaps_text(layers, true);
  std::string const some_rows = left_out_text(layers);
  std::string text;
  for (std::string const& part : {near_ties, gaps_text(layers, false), some_rows})
    if (!part.empty()) text += (text.empty() ? "" : "; ") + part;
  if (!near_ties.empty() || !some_rows.empty())
    text += "; a run of indexshare-demo with --attend-recorded compares them";
  return text;
}

}  // namespace compare_detail

/// The last line of the report. Of a difference it says what was not looked at below it.
inline std::string compare_summary(CompareReport const& report) {
  using namespace compare_detail;
  std::span<LayerResult const> const layers(report.layers);
  LayerResult const* const first = report.first_difference();
  if (first != nullptr) {
    auto const below = layers.first(static_cast<std::size_t>(first - layers.data()));
    std::string const unseen = unseen_text(below);
    return "first difference: layer " + std::to_string(first->layer) + ", quantity " +
           std::string(spec_of(first->first_difference()->id).name) +
           (unseen.empty() ? "" : "; " + unseen);
  }
  std::string const unseen = unseen_text(layers);
  if (report.compared() == 0) return unseen;
  std::string const agree = "all " + std::to_string(report.compared()) + " layers agree";
  if (unseen.empty()) return agree;
  return agree + (report.complete() ? "; " : ", but ") + unseen;
}

}  // namespace programs
