// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <iterator>
#include <limits>
#include <optional>
#include <utility>
#include <vector>

#include "compare_result.hpp"
#include "recording.hpp"

/// @file Compares selections as sets, and tells a near tie from a fault.

namespace programs {

/// The scores that a layer's selection was made from, as far as they were recorded.
struct ScoreSource {
  Recording const* recording = nullptr;  ///< null: neither file has them
  Side side = Side::a;
  std::int32_t layer = 0;
  std::optional<double> error;       ///< absolute, where both files have them and they agree
  Recording const* other = nullptr;  ///< then, the other file
  double rounding = 0;               ///< relative distance from the score that was selected by
};

/// One row of scores, its visible keys alone. NaN is below every number, as in a selection.
inline std::vector<double> visible_scores(Recording const& recording, std::int32_t layer,
                                          std::size_t row) {
  RecordedTensor const tensor = recording.tensor(layer, Quantity::scores);
  std::vector<double> scores(tensor.slice_size());
  tensor.read_slice(row, scores);
  scores.resize(recording.visible_keys(row));
  for (double& score : scores)
    if (std::isnan(score)) score = -std::numeric_limits<double>::infinity();
  return scores;
}

/// The k-th best score minus the next; nothing if there is no next or no number.
inline std::optional<double> boundary_gap(std::vector<double> scores, std::size_t k) {
  if (k == 0 || k >= scores.size()) return std::nullopt;
  auto const next = scores.begin() + static_cast<std::ptrdiff_t>(k);
  std::nth_element(scores.begin(), next, scores.end(), std::greater<>());
  double const gap = *std::min_element(scores.begin(), next) - *next;
  return std::isfinite(gap) ? std::optional(gap) : std::nullopt;
}

/// The most by which the score of a position of one list differs from that of one of the other.
/// @pre neither list is empty, and the scores are finite
inline double swapped_difference(std::vector<double> const& scores, SelectionRow const& row) {
  auto const range = [&scores](std::vector<std::int32_t> const& positions) {
    auto const less = [&scores](std::int32_t x, std::int32_t y) {
      return scores[static_cast<std::size_t>(x)] < scores[static_cast<std::size_t>(y)];
    };
    auto const [low, high] = std::minmax_element(positions.begin(), positions.end(), less);
    return std::pair(scores[static_cast<std::size_t>(*low)],
                     scores[static_cast<std::size_t>(*high)]);
  };
  auto const [low_a, high_a] = range(row.only_a);
  auto const [low_b, high_b] = range(row.only_b);
  return std::max(high_a - low_b, high_b - low_a);
}

/// Whether the positions' scores are numbers: of others nobody can say that they are near.
inline bool have_numbers(std::vector<double> const& scores,
                         std::vector<std::int32_t> const& positions) {
  return std::all_of(positions.begin(), positions.end(), [&scores](std::int32_t position) {
    return std::isfinite(scores[static_cast<std::size_t>(position)]);
  });
}

/// How far a row's scores may be from those that the other file selected by; of this row alone, as
/// a row of large scores has large errors.
/// @pre the scores of both files agree
inline double row_score_error(ScoreSource const& source, std::vector<double> const& scores,
                              std::size_t row) {
  std::vector<double> const others = visible_scores(*source.other, source.layer, row);
  double distance = 0;
  double largest = 0;
  for (std::size_t key = 0; key < scores.size(); ++key) {
    if (scores[key] != others[key])
      distance = std::max(distance, std::abs(scores[key] - others[key]));
    for (double const value : {std::abs(scores[key]), std::abs(others[key])})
      if (std::isfinite(value)) largest = std::max(largest, value);
  }
  return distance + source.rounding * largest;
}

/// If both files chose the best of their own scores, and no score is off by more than e, then two
/// positions that changed places differ by at most 2 e.
inline void judge_row(SelectionRow& row, ScoreSource const& source, std::size_t chosen) {
  if (source.recording == nullptr) return;
  std::vector<double> const scores = visible_scores(*source.recording, source.layer, row.row);
  row.gap = boundary_gap(scores, chosen);
  if (source.error) row.score_error = row_score_error(source, scores, row.row);
  if (row.only_a.empty() || row.only_b.empty()) return;
  if (!have_numbers(scores, row.only_a) || !have_numbers(scores, row.only_b)) return;
  row.swapped = swapped_difference(scores, row);
  row.near_tie = row.score_error && row.only_a.size() == row.only_b.size() &&
                 *row.swapped <= 2 * *row.score_error;
}

/// @pre both files have the layer's selection
inline SelectionResult compare_selections(Recording const& a, Recording const& b,
                                          std::int32_t layer, ScoreSource const& source) {
  SelectionResult result;
  result.rows = a.rows();
  if (source.recording != nullptr) result.scores_of = source.side;
  result.scores_layer = source.layer;
  result.score_error = source.error;
  double overlaps = 0;
  for (std::size_t row = 0; row < a.rows(); ++row) {
    auto const of_a = a.selection(layer, row);
    auto const of_b = b.selection(layer, row);
    std::size_t const larger = std::max(of_a.size(), of_b.size());
    SelectionRow found;
    found.row = row;
    std::set_difference(of_a.begin(), of_a.end(), of_b.begin(), of_b.end(),
                        std::back_inserter(found.only_a));
    std::set_difference(of_b.begin(), of_b.end(), of_a.begin(), of_a.end(),
                        std::back_inserter(found.only_b));
    std::size_t const common = of_a.size() - found.only_a.size();
    overlaps += larger == 0 ? 1 : static_cast<double>(common) / static_cast<double>(larger);
    if (found.only_a.empty() && found.only_b.empty()) continue;
    judge_row(found, source, (source.side == Side::a ? of_a : of_b).size());
    result.different.push_back(std::move(found));
  }
  result.mean_overlap = overlaps / static_cast<double>(result.rows);
  return result;
}

/// Compares a shared layer's selection with its source's, inside one file.
/// @pre the file has both
inline std::optional<ReuseFault> check_reuse(Recording const& recording, Side side,
                                             std::int32_t layer, std::int32_t source) {
  ReuseFault fault{side, source, 0, 0};
  for (std::size_t row = 0; row < recording.rows(); ++row) {
    if (recording.selection(layer, row) == recording.selection(source, row)) continue;
    if (fault.rows++ == 0) fault.first_row = row;
  }
  return fault.rows > 0 ? std::optional(fault) : std::nullopt;
}

}  // namespace programs
