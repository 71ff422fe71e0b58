// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/io/safetensors_format.hpp>

#include <cuda/std/expected>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "arguments.hpp"
#include "compare_result.hpp"
#include "compare_selection.hpp"
#include "compare_tensors.hpp"
#include "recording.hpp"

/// @file Walks two recordings layer by layer, in pipeline order.

namespace programs {

/// Relative to the largest magnitude of a token or row, see `ErrorScale`.
inline constexpr double default_tolerance = 1e-4;
inline constexpr double default_tolerance_16_bit = 2e-2;

struct CompareSettings {
  std::optional<double> tolerance = {};    ///< absent: the defaults
  std::optional<NumberRange> layers = {};  ///< absent: all
};

namespace compare_detail {

/// `subject: VALUE in A, VALUE in B`
inline cuda::std::unexpected<ArgumentError> mismatch(std::string const& subject,
                                                     std::string const& of_a,
                                                     std::string const& of_b,
                                                     char const* expected) {
  return reject(subject, "got " + of_a + " in A and " + of_b + " in B, expected " + expected);
}

/// Errors: other tokens or other rows, so that no element has a counterpart.
inline Parsed<bool> check_tokens(Recording const& a, Recording const& b) {
  if (a.tokens() != b.tokens())
    return mismatch("positions", std::to_string(a.tokens()) + " tokens", std::to_string(b.tokens()),
                    "the same tokens");
  for (std::size_t token = 0; token < a.tokens(); ++token) {
    std::string const of_token = " of token " + std::to_string(token);
    TokenPlace const& in_a = a.place(token);
    TokenPlace const& in_b = b.place(token);
    if (in_a.rotary != in_b.rotary)
      return mismatch("positions", std::to_string(in_a.rotary) + of_token,
                      std::to_string(in_b.rotary), "the same tokens");
    // numbers of requests are names; where one starts is what counts
    if (in_a.position != in_b.position)
      return mismatch("requests", "position " + std::to_string(in_a.position) + of_token,
                      std::to_string(in_b.position), "requests that start at the same tokens");
  }
  if (a.rows() != b.rows())
    return mismatch("rows", std::to_string(a.rows()) + " rows", std::to_string(b.rows()),
                    "the same rows");
  auto const [in_a, in_b] =
      std::mismatch(a.row_tokens().begin(), a.row_tokens().end(), b.row_tokens().begin());
  if (in_a != a.row_tokens().end())
    return mismatch("rows",
                    "token " + std::to_string(*in_a) + " as row " +
                        std::to_string(in_a - a.row_tokens().begin()),
                    std::to_string(*in_b), "the same rows");
  return true;
}

/// Errors: another shape; index vectors in two bases that cannot be brought together. Scores and
/// selections may be padded to another width.
inline Parsed<bool> check_shapes(Recording const& a, Recording const& b, std::int32_t layer) {
  for (QuantitySpec const& spec : quantities) {
    if (!a.has(layer, spec.id) || !b.has(layer, spec.id)) continue;
    if (spec.id == Quantity::scores || spec.id == Quantity::selection) continue;
    auto const& shape = a.tensor(layer, spec.id).shape();
    auto const& other = b.tensor(layer, spec.id).shape();
    std::string const name = tensor_name(layer, spec.id);
    if (shape != other)
      return mismatch(name, "shape " + indexshare::io::shape_text(shape),
                      indexshare::io::shape_text(other), "the same shape");
    bool const index = spec.id == Quantity::index_q || spec.id == Quantity::index_k;
    auto const lanes = static_cast<std::size_t>(shape.back());
    if (index && a.index_basis() != b.index_basis() && (lanes & (lanes - 1)) != 0)
      return reject(name, "got " + std::to_string(lanes) +
                              " lanes, expected a power of two, as index_basis differs");
  }
  return true;
}

}  // namespace compare_detail

/// Compares two recordings of the same tokens, rows and shapes, a layer at a time.
class LayerComparison {
 public:
  LayerComparison(Recording const& a, Recording const& b, std::optional<double> tolerance)
      : a_(&a), b_(&b), tolerance_(tolerance) {
    for (Recording const* const recording : {a_, b_})
      for (std::int32_t const layer : recording->layers())
        for (QuantitySpec const& spec : quantities)
          if (belongs_to_indexer(spec.id) && recording->has(layer, spec.id))
            full_layers_.insert(layer);
  }

  LayerResult compare(std::int32_t layer) {
    LayerResult result;
    result.layer = layer;
    result.rows = a_->rows();
    result.source = source_of(layer);
    result.selection = compare_selection(layer);
    std::vector<bool> const near_ties = near_tie_rows(layer, result.selection);
    for (QuantitySpec const& spec : quantities) {
      bool const in_a = a_->has(layer, spec.id);
      bool const in_b = b_->has(layer, spec.id);
      if (!in_a && !in_b) continue;
      if (!in_a || !in_b)
        result.quantities.push_back(unpaired(spec.id, in_a ? Verdict::only_a : Verdict::only_b));
      else if (spec.id == Quantity::selection)
        result.quantities.push_back(summary(*result.selection));
      else if (spec.id == Quantity::scores)
        result.quantities.push_back(scores(layer));
      else
        result.quantities.push_back(compare_floats(
            layer, spec.id, spec.id > Quantity::selection ? near_ties : std::vector<bool>()));
    }
    for (Side const side : {Side::a, Side::b})
      if (auto const fault = reuse_fault(layer, side)) result.reuse_faults.push_back(*fault);
    return result;
  }

 private:
  /// Where a layer's selection comes from: the nearest full layer, itself included.
  std::optional<std::int32_t> source_of(std::int32_t layer) const {
    auto const above = full_layers_.upper_bound(layer);
    return above == full_layers_.begin() ? std::nullopt : std::optional(*std::prev(above));
  }

  bool both_have(std::int32_t layer, Quantity id) const {
    return a_->has(layer, id) && b_->has(layer, id);
  }

  static QuantityResult unpaired(Quantity id, Verdict verdict) {
    QuantityResult result;
    result.id = id;
    result.verdict = verdict;
    return result;
  }

  /// The wider tolerance where the quantity, or one that it is computed from, has 16 bits. The
  /// layer's input does not count for the others: both sides may well have computed from it as it
  /// is.
  double tolerance_of(std::int32_t layer, Quantity id) const {
    if (tolerance_) return *tolerance_;
    for (QuantitySpec const& spec : quantities) {
      if (spec.id > id) break;
      bool const input = spec.id == Quantity::hidden && id != Quantity::hidden;
      if (input || spec.id == Quantity::selection) continue;
      for (Recording const* const recording : {a_, b_})
        if (recording->has(layer, spec.id) && recording->tensor(layer, spec.id).is_16_bit())
          return default_tolerance_16_bit;
    }
    return default_tolerance;
  }

  QuantityResult compare_floats(std::int32_t layer, Quantity id,
                                std::vector<bool> const& left_out) const {
    TensorPair pair(*a_, *b_, layer, id);
    return compare_tensors(pair, id, tolerance_of(layer, id), left_out);
  }

  /// @pre both files have them
  QuantityResult const& scores(std::int32_t layer) {
    auto const known = scores_.find(layer);
    if (known != scores_.end()) return known->second;
    return scores_.emplace(layer, compare_floats(layer, Quantity::scores, {})).first->second;
  }

  ScoreSource score_source(std::int32_t layer) {
    auto const source = source_of(layer);
    if (!source) return {};
    bool const in_a = a_->has(*source, Quantity::scores);
    if (!in_a && !b_->has(*source, Quantity::scores)) return {};
    ScoreSource found;
    found.recording = in_a ? a_ : b_;
    found.side = in_a ? Side::a : Side::b;
    found.layer = *source;
    if (!both_have(*source, Quantity::scores)) return found;
    QuantityResult const& compared = scores(*source);
    if (compared.verdict == Verdict::differs) return found;
    found.error = compared.distance;
    found.other = b_;
    found.rounding = rounding(*source);
    return found;
  }

  /// How far a recorded score may be from the one that was selected by: half a step of its type.
  double rounding(std::int32_t layer) const {
    double largest = 0;
    for (Recording const* const recording : {a_, b_}) {
      std::string const& dtype = recording->tensor(layer, Quantity::scores).dtype();
      if (dtype == "BF16") largest = std::max(largest, 0x1p-9);
      if (dtype == "F16") largest = std::max(largest, 0x1p-12);
    }
    return largest;
  }

  std::optional<SelectionResult> compare_selection(std::int32_t layer) {
    if (!both_have(layer, Quantity::selection)) return std::nullopt;
    return compare_selections(*a_, *b_, layer, score_source(layer));
  }

  static QuantityResult summary(SelectionResult const& selection) {
    QuantityResult result;
    result.id = Quantity::selection;
    result.elements = selection.rows;
    result.off = selection.different.size() - selection.near_ties();
    result.verdict = result.off > 0 ? Verdict::differs : Verdict::same;
    return result;
  }

  /// Rows that attend over another key for no fault: their attention has no counterpart. A shared
  /// layer without a recorded selection has that of its source. None, where one file was made over
  /// the other's selection.
  std::vector<bool> near_tie_rows(std::int32_t layer, std::optional<SelectionResult> selection) {
    std::vector<bool> rows;
    if (a_->attends_recorded() || b_->attends_recorded()) return rows;
    auto const source = source_of(layer);
    if (!selection && source && *source != layer) selection = compare_selection(*source);
    if (!selection || selection->near_ties() == 0) return rows;
    rows.resize(a_->rows());
    for (SelectionRow const& row : selection->different)
      if (row.near_tie) rows[row.row] = true;
    return rows;
  }

  std::optional<ReuseFault> reuse_fault(std::int32_t layer, Side side) const {
    Recording const& recording = side == Side::a ? *a_ : *b_;
    auto const source = source_of(layer);
    bool const checkable = source && *source != layer &&
                           recording.has(layer, Quantity::selection) &&
                           recording.has(*source, Quantity::selection);
    return checkable ? check_reuse(recording, side, layer, *source) : std::nullopt;
  }

  Recording const* a_;
  Recording const* b_;
  std::optional<double> tolerance_;
  std::set<std::int32_t> full_layers_;
  std::map<std::int32_t, QuantityResult> scores_;
};

namespace compare_detail {

/// A file that attends over recorded selections can be held against the file that has them, and
/// against one that attends over the same. One that does not say whose they are is taken at its
/// word.
inline Parsed<bool> check_attention(Recording const& attends, char const* side,
                                    Recording const& other) {
  if (!attends.attends_recorded()) return true;
  auto const stated = [](Recording const& recording) {
    auto const found = recording.metadata().find("attended_selections");
    return found == recording.metadata().end() ? std::string() : found->second;
  };
  if (other.attends_recorded()) {
    if (!stated(attends).empty() && stated(attends) == stated(other)) return true;
    return reject("attention_selection",
                  "both files attend over selections of others; compare each with that one");
  }
  if (stated(attends).empty()) return true;
  std::vector<std::int32_t> layers;
  for (std::int32_t const layer : attends.layers()) {
    if (attends.has(layer, Quantity::selection) && other.has(layer, Quantity::selection)) {
      layers.push_back(layer);
    }
  }
  if (selection_fingerprint(other, layers) == stated(attends)) return true;
  return reject("attention_selection", std::string(side) + " attends over selections of a file " +
                                           "that the other one is not");
}

}  // namespace compare_detail

/// Errors: other tokens, rows or shapes; nothing that both files have; attention over selections
/// that are not the other file's.
inline Parsed<CompareReport> compare_recordings(Recording const& a, Recording const& b,
                                                CompareSettings const& settings) {
  if (auto const fits = compare_detail::check_tokens(a, b); !fits)
    return cuda::std::unexpected(fits.error());
  if (auto const fits = compare_detail::check_attention(a, "A", b); !fits)
    return cuda::std::unexpected(fits.error());
  if (auto const fits = compare_detail::check_attention(b, "B", a); !fits)
    return cuda::std::unexpected(fits.error());
  auto const wanted = [&settings](std::int32_t layer) {
    auto const& range = settings.layers;
    return !range || (layer >= range->first && layer < range->last);
  };
  CompareReport report;
  LayerComparison comparison(a, b, settings.tolerance);
  std::vector<std::int32_t> common;
  std::set_intersection(a.layers().begin(), a.layers().end(), b.layers().begin(), b.layers().end(),
                        std::back_inserter(common));
  // a layer's source may lie outside of the wanted ones
  for (std::int32_t const layer : common)
    if (auto const fits = compare_detail::check_shapes(a, b, layer); !fits)
      return cuda::std::unexpected(fits.error());
  for (std::int32_t const layer : common)
    if (wanted(layer)) report.layers.push_back(comparison.compare(layer));
  for (std::int32_t const layer : a.layers())
    if (wanted(layer) && !b.layers().contains(layer)) report.only_a.push_back(layer);
  for (std::int32_t const layer : b.layers())
    if (wanted(layer) && !a.layers().contains(layer)) report.only_b.push_back(layer);
  if (!report.paired())
    return reject(settings.layers ? "--layers" : "layers",
                  "there is no quantity of a layer that both files have");
  return report;
}

}  // namespace programs
