// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "recording.hpp"

/// @file What `indexshare-compare` finds out, before it is written down.

namespace programs {

enum class Side { a, b };

/// `not_compared`: both files have the quantity, but no element of it that tells anything.
enum class Verdict { same, differs, only_a, only_b, not_compared };

/// An element of a tensor. `slice` is a token or a row, as the quantity is recorded.
struct ElementPlace {
  std::size_t slice = 0;
  std::size_t head = 0;
  std::size_t lane = 0;
};

/// One quantity of one layer. Without numbers where only one file has it.
struct QuantityResult {
  Quantity id = Quantity::hidden;
  Verdict verdict = Verdict::same;
  std::size_t elements = 0;  ///< that were compared; of a selection: rows
  std::size_t off = 0;       ///< of these, past the tolerance
  std::size_t both_nan = 0;  ///< of these, NaN in both files: not off
  std::size_t rows_left_out = 0;
  double tolerance = 0;
  double error = 0;        ///< the largest, divided by its `magnitude`; infinite: NaN or infinity
  double magnitude = 0;    ///< what that error is relative to
  bool by_median = false;  ///< `magnitude` is the median slice's, which is more than its own
  double distance = 0;     ///< the largest error, not divided by anything
  ElementPlace at;         ///< of the largest `error`
  double a = 0;
  double b = 0;

  bool paired() const { return verdict != Verdict::only_a && verdict != Verdict::only_b; }
  bool compared() const { return verdict == Verdict::same || verdict == Verdict::differs; }
  /// All rows left out; else what was not compared is NaN in both files.
  bool all_left_out() const { return verdict == Verdict::not_compared && elements == 0; }
};

/// A row whose selections are different sets.
struct SelectionRow {
  std::size_t row = 0;
  std::vector<std::int32_t> only_a;
  std::vector<std::int32_t> only_b;
  std::optional<double> gap;      ///< the last score that is chosen minus the first that is not
  std::optional<double> swapped;  ///< most that the scores of a position in A and one in B differ
  std::optional<double> score_error;  ///< absolute, of this row; absent as in `SelectionResult`
  bool near_tie = false;
};

/// The selections of one layer, compared as sets.
struct SelectionResult {
  std::size_t rows = 0;
  double mean_overlap = 1;  ///< common positions, divided by the larger set
  std::vector<SelectionRow> different;
  std::optional<Side> scores_of;      ///< whose scores `gap` and `swapped` are taken from
  std::int32_t scores_layer = 0;      ///< the layer that they were recorded in
  std::optional<double> score_error;  ///< absolute; absent: one file has none, or they differ

  std::size_t near_ties() const {
    return static_cast<std::size_t>(std::count_if(
        different.begin(), different.end(), [](SelectionRow const& row) { return row.near_tie; }));
  }
};

/// A shared layer whose selection is not that of its source, in one file.
struct ReuseFault {
  Side side = Side::a;
  std::int32_t source = 0;
  std::size_t rows = 0;  ///< that differ
  std::size_t first_row = 0;
};

struct LayerResult {
  std::int32_t layer = 0;
  std::size_t rows = 0;  ///< of the recordings
  /// The nearest layer, up to this one, of which a file has a quantity of the indexer.
  std::optional<std::int32_t> source;
  std::vector<QuantityResult> quantities;  ///< that a file has, in pipeline order
  std::optional<SelectionResult> selection;
  std::vector<ReuseFault> reuse_faults;

  bool full() const { return source == layer; }

  /// A fault that both files have is no difference between them.
  bool reuse_differs() const { return reuse_faults.size() == 1; }

  /// Nothing: the layer agrees.
  QuantityResult const* first_difference() const {
    for (QuantityResult const& result : quantities) {
      bool const reuse = result.id == Quantity::selection && reuse_differs();
      if (result.verdict == Verdict::differs || reuse) return &result;
    }
    return nullptr;
  }

  bool compared() const {
    return std::any_of(quantities.begin(), quantities.end(),
                       [](QuantityResult const& result) { return result.compared(); });
  }
  bool paired() const {
    return std::any_of(quantities.begin(), quantities.end(),
                       [](QuantityResult const& result) { return result.paired(); });
  }

  /// Of everything that both files have, something was compared.
  bool complete() const {
    return std::none_of(quantities.begin(), quantities.end(), [](QuantityResult const& result) {
      return result.verdict == Verdict::not_compared;
    });
  }
};

struct CompareReport {
  std::vector<LayerResult> layers;  ///< that both files have
  std::vector<std::int32_t> only_a;
  std::vector<std::int32_t> only_b;

  /// The lowest layer that differs, or nothing.
  LayerResult const* first_difference() const {
    for (LayerResult const& layer : layers)
      if (layer.first_difference() != nullptr) return &layer;
    return nullptr;
  }
  std::size_t compared() const {
    return static_cast<std::size_t>(std::count_if(
        layers.begin(), layers.end(), [](LayerResult const& layer) { return layer.compared(); }));
  }
  bool paired() const {
    return std::any_of(layers.begin(), layers.end(),
                       [](LayerResult const& layer) { return layer.paired(); });
  }
  bool complete() const {
    return std::all_of(layers.begin(), layers.end(),
                       [](LayerResult const& layer) { return layer.complete(); });
  }
};

}  // namespace programs
