// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <iomanip>
#include <optional>
#include <ostream>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "compare_result.hpp"
#include "compare_summary.hpp"
#include "recording.hpp"

/// @file What `indexshare-compare` prints, for people and as JSON.

namespace programs {
namespace compare_detail {

/// Rows of a selection that are listed, of each kind; the JSON report has all.
inline constexpr std::size_t listed_rows = 8;

inline std::string formatted(char const* format, double value) {
  char text[64];
  std::snprintf(text, sizeof text, format, value);
  return text;
}
inline std::string value_text(double value) { return formatted("%.7g", value); }
inline std::string error_text(double value) {
  return std::isfinite(value) ? formatted("%.1e", value) : "NaN or inf";
}
inline std::string percent(std::size_t part, std::size_t whole) {
  return formatted("%.3g %%", 100 * static_cast<double>(part) / static_cast<double>(whole));
}

/// `token 5 (request 7, position 1, rotary 11)`
inline std::string token_text(Recording const& recording, std::size_t token) {
  TokenPlace const& place = recording.place(token);
  std::string text = "token " + std::to_string(token) + " (request " +
                     std::to_string(place.request) + ", position " + std::to_string(place.position);
  if (place.rotary != place.position) text += ", rotary " + std::to_string(place.rotary);
  return text + ")";
}

inline std::string row_text(Recording const& recording, std::size_t row) {
  return "row " + std::to_string(row) + ", " + token_text(recording, recording.token_of(row));
}

/// What the last index of a quantity counts.
inline std::string_view lane_name(Quantity id) {
  if (id == Quantity::scores) return "key";
  if (id == Quantity::head_weights_raw || id == Quantity::head_weights || id == Quantity::lse)
    return "head";
  return "lane";
}

inline std::string place_text(Recording const& recording, QuantityResult const& result) {
  QuantitySpec const& spec = spec_of(result.id);
  std::string text = spec.per_token() ? token_text(recording, result.at.slice)
                                      : row_text(recording, result.at.slice);
  if (spec.rank() == 3) text += ", head " + std::to_string(result.at.head);
  return text + ", " + std::string(lane_name(result.id)) + " " + std::to_string(result.at.lane);
}

inline std::ostream& line(std::ostream& out, std::string_view name) {
  return out << "  " << std::left << std::setw(16) << name << std::right;
}

inline void write_selection_row(std::ostream& out, Recording const& recording,
                                SelectionRow const& row) {
  line(out, row.near_tie ? "  near tie" : "  differs")
      << row_text(recording, row.row) << ": only A has " << list_text(row.only_a) << ", only B has "
      << list_text(row.only_b);
  if (row.gap) out << "; gap at the boundary " << error_text(*row.gap);
  if (row.swapped) out << ", swapped scores up to " << error_text(*row.swapped) << " apart";
  if (row.score_error) out << ", scores of the row agree within " << error_text(*row.score_error);
  out << "\n";
}

inline void write_selection_rows(std::ostream& out, Recording const& recording,
                                 SelectionResult const& selection, bool near_ties) {
  std::size_t count = 0;
  for (SelectionRow const& row : selection.different)
    if (row.near_tie == near_ties && count++ < listed_rows)
      write_selection_row(out, recording, row);
  if (count > listed_rows) line(out, "") << "... and " << count - listed_rows << " more rows\n";
}

inline void write_selection(std::ostream& out, Recording const& recording,
                            SelectionResult const& selection) {
  if (selection.different.empty()) return;
  line(out, "selection") << selection.different.size() << " of " << selection.rows
                         << " rows differ, " << selection.near_ties()
                         << " of them near ties; mean overlap "
                         << formatted("%.6g %%", 100 * selection.mean_overlap) << "\n";
  line(out, "  judged by");
  if (!selection.scores_of)
    out << "nothing: no scores are recorded\n";
  else
    out << (*selection.scores_of == Side::a ? "A's" : "B's") << " scores of layer "
        << selection.scores_layer
        << (selection.score_error
                ? ", which agree within " + error_text(*selection.score_error)
                : std::string(", which do not agree with the other file's or are not in it"))
        << "\n";
  write_selection_rows(out, recording, selection, false);
  write_selection_rows(out, recording, selection, true);
}

inline std::string reuse_text(LayerResult const& layer) {
  std::string text;
  for (ReuseFault const& fault : layer.reuse_faults)
    text += std::string(text.empty() ? "" : "; ") + (fault.side == Side::a ? "in A" : "in B") +
            " layer " + std::to_string(layer.layer) + " does not reuse layer " +
            std::to_string(fault.source) +
            "'s selection (rows that differ: " + std::to_string(fault.rows) +
            ", the first is row " + std::to_string(fault.first_row) + ")";
  return text;
}

/// What the largest error is relative to.
inline std::string scale_text(QuantityResult const& result) {
  std::string const slice = spec_of(result.id).per_token() ? "token" : "row";
  return result.by_median ? "the median of the " + slice + "s' largest magnitudes"
                          : "the largest magnitude of the " + slice;
}

inline void write_first(std::ostream& out, Recording const& recording,
                        QuantityResult const& first) {
  if (first.id != Quantity::selection) {
    line(out, "largest error") << error_text(first.error) << " of " << value_text(first.magnitude)
                               << ", " << scale_text(first) << "; tolerance "
                               << error_text(first.tolerance) << "\n";
    line(out, "at") << place_text(recording, first) << "\n";
    line(out, "values") << value_text(first.a) << " in A, " << value_text(first.b) << " in B\n";
    line(out, "off") << first.off << " of " << first.elements << " elements, "
                     << percent(first.off, first.elements) << "\n";
  }
  line(out, "often") << spec_of(first.id).hint << "\n";
}

inline char const* verdict_name(Verdict verdict) {
  static constexpr char const* names[] = {"ok", "differs", "only in A", "only in B",
                                          "not compared"};
  return names[static_cast<std::size_t>(verdict)];
}

inline std::string verdict_text(LayerResult const& layer, QuantityResult const& result) {
  std::string text = verdict_name(result.verdict);
  if (result.off > 0)
    text += ", " + std::to_string(result.off) + " of " + std::to_string(result.elements);
  auto const note = [&text](char const* what, std::size_t count) {
    if (count > 0) text += "; " + std::string(what) + ": " + std::to_string(count);
  };
  if (result.id == Quantity::selection && layer.selection)
    note("near-tie rows", layer.selection->near_ties());
  note("NaN in both", result.both_nan);
  note("near-tie rows left out", result.rows_left_out);
  return text;
}

/// The same, and whether a shared layer's selection is its source's.
inline std::string table_text(LayerResult const& layer, QuantityResult const& result) {
  std::string text = verdict_text(layer, result);
  if (result.id == Quantity::selection && !layer.reuse_faults.empty()) text += "; not its source's";
  return text;
}

inline void write_quantities(std::ostream& out, LayerResult const& layer) {
  out << "  " << std::left << std::setw(18) << "quantity" << std::right << std::setw(12)
      << "elements" << std::setw(15) << "largest error" << std::setw(11) << "tolerance"
      << "  verdict\n";
  for (QuantityResult const& result : layer.quantities) {
    bool const numbers = result.compared() && result.id != Quantity::selection;
    out << "  " << std::left << std::setw(18) << spec_of(result.id).name << std::right
        << std::setw(12) << (result.paired() ? std::to_string(result.elements) : "-")
        << std::setw(15) << (numbers ? error_text(result.error) : "-") << std::setw(11)
        << (numbers ? error_text(result.tolerance) : "-") << "  " << table_text(layer, result)
        << "\n";
  }
}

/// Without an indexer here or below, nothing tells.
inline char const* role_text(LayerResult const& layer) {
  if (!layer.source) return "no indexer recorded";
  return layer.full() ? "full" : "shared";
}

inline void write_layer(std::ostream& out, Recording const& recording, LayerResult const& layer) {
  QuantityResult const* const first = layer.first_difference();
  out << "\nlayer " << layer.layer << " (" << role_text(layer) << "): ";
  if (first != nullptr)
    out << "the first difference is in " << spec_of(first->id).name << "\n";
  else if (!layer.paired())
    out << "nothing that both files have\n";
  else if (!layer.compared())
    out << "nothing that could be compared\n";
  else
    out << (layer.complete() ? "agrees\n" : "agrees as far as it could be compared\n");
  if (first != nullptr) write_first(out, recording, *first);
  if (layer.selection) write_selection(out, recording, *layer.selection);
  if (!layer.reuse_faults.empty()) line(out, "reuse") << reuse_text(layer) << "\n";
  write_quantities(out, layer);
}

inline void write_missing(std::ostream& out, char const* side,
                          std::vector<std::int32_t> const& layers) {
  if (layers.empty()) return;
  out << "layers only in " << side << ":";
  for (std::int32_t const layer : layers) out << " " << layer;
  out << "\n";
}

// ---- JSON

/// A number, or its name where JSON has none.
inline nlohmann::ordered_json number_json(double value) {
  if (std::isfinite(value)) return value;
  return std::isnan(value) ? "nan" : value > 0 ? "inf" : "-inf";
}

inline nlohmann::ordered_json place_json(Recording const& recording, std::size_t token) {
  TokenPlace const& place = recording.place(token);
  return {{"token", token},
          {"request", place.request},
          {"position", place.position},
          {"rotary", place.rotary}};
}

inline nlohmann::ordered_json quantity_json(Recording const& recording,
                                            QuantityResult const& result) {
  nlohmann::ordered_json json{{"quantity", std::string(spec_of(result.id).name)},
                              {"verdict", verdict_name(result.verdict)}};
  if (!result.paired()) return json;
  json["elements"] = result.elements;
  json["off"] = result.off;
  if (result.id == Quantity::selection) return json;
  json["both_nan"] = result.both_nan;
  json["rows_left_out"] = result.rows_left_out;
  json["tolerance"] = result.tolerance;
  if (!result.compared()) return json;
  QuantitySpec const& spec = spec_of(result.id);
  json["magnitude"] = result.magnitude;
  json["magnitude_of"] = result.by_median ? "median" : spec.per_token() ? "token" : "row";
  json["error"] = number_json(result.error);
  std::size_t const slice = result.at.slice;
  json["at"] = place_json(recording, spec.per_token() ? slice : recording.token_of(slice));
  if (!spec.per_token()) json["at"]["row"] = slice;
  if (spec.rank() == 3) json["at"]["head"] = result.at.head;
  json["at"][std::string(lane_name(result.id))] = result.at.lane;
  json["a"] = number_json(result.a);
  json["b"] = number_json(result.b);
  return json;
}

inline nlohmann::ordered_json optional_json(std::optional<double> value) {
  return value ? number_json(*value) : nlohmann::ordered_json(nullptr);
}

inline nlohmann::ordered_json selection_json(Recording const& recording,
                                             SelectionResult const& selection) {
  nlohmann::ordered_json rows = nlohmann::ordered_json::array();
  for (SelectionRow const& row : selection.different) {
    nlohmann::ordered_json json = place_json(recording, recording.token_of(row.row));
    json["row"] = row.row;
    json["only_a"] = row.only_a;
    json["only_b"] = row.only_b;
    json["gap"] = optional_json(row.gap);
    json["swapped"] = optional_json(row.swapped);
    json["score_error"] = optional_json(row.score_error);
    json["near_tie"] = row.near_tie;
    rows.push_back(std::move(json));
  }
  return {{"rows", selection.rows},
          {"different", selection.different.size()},
          {"near_ties", selection.near_ties()},
          {"mean_overlap", selection.mean_overlap},
          {"score_error", optional_json(selection.score_error)},
          {"different_rows", std::move(rows)}};
}

inline nlohmann::ordered_json layer_json(Recording const& recording, LayerResult const& layer) {
  QuantityResult const* const first = layer.first_difference();
  nlohmann::ordered_json json{{"layer", layer.layer},
                              {"role", layer.source ? role_text(layer) : "unknown"}};
  json["first_difference"] = nullptr;
  if (first != nullptr) json["first_difference"] = std::string(spec_of(first->id).name);
  json["quantities"] = nlohmann::ordered_json::array();
  for (QuantityResult const& result : layer.quantities)
    json["quantities"].push_back(quantity_json(recording, result));
  json["selection"] = layer.selection ? selection_json(recording, *layer.selection)
                                      : nlohmann::ordered_json(nullptr);
  json["not_reused"] = nlohmann::ordered_json::array();
  for (ReuseFault const& fault : layer.reuse_faults)
    json["not_reused"].push_back({{"file", fault.side == Side::a ? "A" : "B"},
                                  {"source", fault.source},
                                  {"rows", fault.rows},
                                  {"first_row", fault.first_row}});
  return json;
}

}  // namespace compare_detail

/// The report for people.
/// @param a  one of the recordings; places are the same in both
inline void write_comparison(std::ostream& out, Recording const& a, CompareReport const& report) {
  for (LayerResult const& layer : report.layers) compare_detail::write_layer(out, a, layer);
  out << "\n";
  compare_detail::write_missing(out, "A", report.only_a);
  compare_detail::write_missing(out, "B", report.only_b);
  out << compare_summary(report) << "\n";
}

/// The report for programs. docs/comparing.md describes its keys.
inline nlohmann::ordered_json comparison_json(Recording const& a, Recording const& b,
                                              CompareReport const& report) {
  nlohmann::ordered_json json{{"a", a.name()}, {"b", b.name()}};
  LayerResult const* const first = report.first_difference();
  json["same"] = first == nullptr && report.complete();
  json["first_difference"] = nullptr;
  if (first != nullptr)
    json["first_difference"] = {
        {"layer", first->layer},
        {"quantity", std::string(spec_of(first->first_difference()->id).name)}};
  json["not_compared"] = nlohmann::ordered_json::array();
  for (LayerResult const& layer : report.layers)
    for (QuantityResult const& result : layer.quantities)
      if (result.verdict == Verdict::not_compared)
        json["not_compared"].push_back(
            {{"layer", layer.layer},
             {"quantity", std::string(spec_of(result.id).name)},
             {"reason", result.all_left_out() ? "near ties" : "NaN in both"}});
  json["layers_only_in_a"] = report.only_a;
  json["layers_only_in_b"] = report.only_b;
  json["layers"] = nlohmann::ordered_json::array();
  for (LayerResult const& layer : report.layers)
    json["layers"].push_back(compare_detail::layer_json(a, layer));
  return json;
}

}  // namespace programs
