// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/indexcache/overlap_counts.hpp>
#include <indexshare/indexcache/overlap_matrix.hpp>
#include <indexshare/share_plan.hpp>

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <optional>
#include <ostream>
#include <string>
#include <vector>

#include "heat_map.hpp"
#include "overlap_measure.hpp"

/// @file What indexshare-overlap shows: a table, JSON and a heat map.

namespace programs {

/// A measurement and, if the user has one, the schedule to judge by it.
struct OverlapReport {
  OverlapMeasurement measured;
  std::optional<indexshare::SharePlan> plan;
};

namespace overlap_detail {

using indexshare::indexcache::OverlapMatrix;
using indexshare::indexcache::OverlapSummary;
using indexshare::indexcache::SourceOverlap;

inline std::string three_digits(std::optional<double> value) {
  if (!value) return "-";
  char text[16];
  std::snprintf(text, sizeof text, "%.3f", *value);
  return text;
}

inline std::string right(std::string const& text, std::size_t width) {
  return std::string(width - std::min(width, text.size()), ' ') + text;
}

inline std::vector<SourceOverlap> sources_of(OverlapReport const& report) {
  if (!report.plan) return {};
  return source_overlaps(report.measured.matrix, *report.plan);
}

/// Lags that are shown: all small ones, few of the rest, and the largest.
inline std::vector<std::int32_t> shown_lags(OverlapMatrix const& matrix) {
  std::vector<std::int32_t> lags;
  if (matrix.size() < 2) return lags;
  std::int32_t const longest = matrix.layers().back() - matrix.layers().front();
  for (std::int32_t const lag : {1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 40, 48, 56, 64, 72, 96})
    if (lag < longest) lags.push_back(lag);
  lags.push_back(longest);
  return lags;
}

inline void write_summary(std::ostream& out, std::string const& name,
                          OverlapSummary const& summary) {
  out << right(name, 5) << right(std::to_string(summary.pairs), 8)
      << right(three_digits(summary.mean), 8) << right(three_digits(summary.low), 8)
      << right(three_digits(summary.high), 8) << "\n";
}

inline void write_lags(std::ostream& out, OverlapMatrix const& matrix) {
  auto const all = summarize_pairs(matrix);
  if (!all) return;
  out << "\n  lag   pairs    mean     min     max\n";
  for (std::int32_t const lag : shown_lags(matrix)) {
    auto const summary = summarize_lag(matrix, lag);
    if (summary) write_summary(out, std::to_string(lag), *summary);
  }
  write_summary(out, "all", *all);
}

inline char const* role_name(indexshare::LayerRole role) {
  switch (role) {
    case indexshare::LayerRole::full:
      return "full";
    case indexshare::LayerRole::shared:
      return "shared";
    case indexshare::LayerRole::none:
      break;
  }
  return "none";
}

/// Overlap with the recorded layer below.
inline std::optional<double> overlap_below(OverlapMatrix const& matrix, std::size_t place) {
  if (place == 0) return std::nullopt;
  auto const at = static_cast<indexshare::index_t>(place);
  return matrix.at(at, at - 1);
}

inline void write_layers(std::ostream& out, OverlapReport const& report) {
  OverlapMatrix const& matrix = report.measured.matrix;
  auto const sources = sources_of(report);
  out << "\nlayer" << (report.plan ? "  role    source  with source" : "")
      << "  with layer below\n";
  for (std::size_t place = 0; place < matrix.layers().size(); ++place) {
    std::int32_t const layer = matrix.layers()[place];
    out << right(std::to_string(layer), 5);
    if (report.plan) {
      auto const found =
          std::find_if(sources.begin(), sources.end(),
                       [&](SourceOverlap const& source) { return source.layer == layer; });
      std::string role = role_name(report.plan->role(layer));
      role.resize(8, ' ');
      out << "  " << role;
      bool const has = found != sources.end();
      out << right(has ? std::to_string(found->source) : "-", 6)
          << right(three_digits(has ? std::optional(found->overlap) : std::nullopt), 13);
    }
    out << right(three_digits(overlap_below(matrix, place)), 18) << "\n";
  }
}

/// `960 rows counted, 64 left out; 64 select every key they see`
inline std::string rows_text(indexshare::indexcache::OverlapCounts const& counts) {
  std::string text = std::to_string(counts.rows()) + " rows counted, " +
                     std::to_string(counts.rows_left_out()) + " left out";
  if (counts.short_rows() > 0)
    text += "; " + std::to_string(counts.short_rows()) + " select every key they see";
  return text;
}

inline bool all_whole(std::vector<SourceOverlap> const& sources) {
  return std::all_of(sources.begin(), sources.end(),
                     [](SourceOverlap const& source) { return source.overlap == 1; });
}

inline nlohmann::ordered_json optional_json(std::optional<double> value) {
  return value ? nlohmann::ordered_json(*value) : nlohmann::ordered_json(nullptr);
}

inline nlohmann::ordered_json lags_json(OverlapMatrix const& matrix) {
  auto lags = nlohmann::ordered_json::array();
  if (matrix.size() < 2) return lags;
  for (std::int32_t lag = 1; lag <= matrix.layers().back() - matrix.layers().front(); ++lag) {
    auto const summary = summarize_lag(matrix, lag);
    if (!summary) continue;
    lags.push_back({{"lag", lag},
                    {"pairs", summary->pairs},
                    {"mean", summary->mean},
                    {"min", summary->low},
                    {"max", summary->high}});
  }
  return lags;
}

inline nlohmann::ordered_json matrix_json(OverlapMatrix const& matrix) {
  auto rows = nlohmann::ordered_json::array();
  for (indexshare::index_t i = 0; i < matrix.size(); ++i) {
    auto row = nlohmann::ordered_json::array();
    for (indexshare::index_t j = 0; j < matrix.size(); ++j) row.push_back(matrix.at(i, j));
    rows.push_back(std::move(row));
  }
  return rows;
}

/// Places of layers that read the same selection, group by group.
inline std::vector<HeatMapBox> group_boxes(OverlapReport const& report) {
  std::vector<HeatMapBox> boxes;
  if (!report.plan) return boxes;
  std::int32_t open = indexshare::no_source;
  auto const& layers = report.measured.matrix.layers();
  for (std::size_t place = 0; place < layers.size(); ++place) {
    std::int32_t const source = share_source(*report.plan, layers[place]);
    if (source != indexshare::no_source && source == open)
      boxes.back().last = place;
    else if (source != indexshare::no_source)
      boxes.push_back({place, place});
    open = source;
  }
  return boxes;
}

}  // namespace overlap_detail

/// The table. Names of files may hold anything.
inline void write_overlap(std::ostream& out, OverlapReport const& report) {
  using namespace overlap_detail;
  OverlapMeasurement const& measured = report.measured;
  out << measured.files.size() << (measured.files.size() == 1 ? " file, " : " files, ")
      << measured.matrix.size() << " of " << measured.model_layers << " layers, top_k "
      << measured.top_k << "; " << rows_text(measured.counts) << "\n";
  if (auto const random = measured.counts.random_overlap())
    out << "random selections of these sizes would overlap " << three_digits(random) << "\n";
  write_layers(out, report);
  write_lags(out, measured.matrix);
  auto const sources = sources_of(report);
  if (sources.empty()) return;
  out << "\nmean overlap of " << sources.size()
      << " shared layers with their sources: " << three_digits(mean_of(sources)) << "\n";
  if (all_whole(sources))
    out << "All are 1: if these layers were recorded while they shared, record them again with "
           "every layer full.\n";
}

/// The report as JSON; `overlap` is the matrix, its rows and columns are `layer_numbers`.
inline nlohmann::ordered_json overlap_json(OverlapReport const& report) {
  using namespace overlap_detail;
  OverlapMeasurement const& measured = report.measured;
  nlohmann::ordered_json json = {
      {"format", "indexshare-overlap-1"},
      {"files", measured.files},
      {"layers", measured.matrix.size()},
      {"layer_numbers", measured.matrix.layers()},
      {"top_k", measured.top_k},
      {"rows", measured.counts.rows()},
      {"rows_skipped", measured.counts.rows_left_out()},
      {"rows_short", measured.counts.short_rows()},
      {"random_overlap", optional_json(measured.counts.random_overlap())},
      {"lags", lags_json(measured.matrix)},
  };
  if (report.plan) {
    auto sources = nlohmann::ordered_json::array();
    for (SourceOverlap const& each : sources_of(report))
      sources.push_back(
          {{"layer", each.layer}, {"source", each.source}, {"overlap", each.overlap}});
    json["sources"] = std::move(sources);
    json["mean_source_overlap"] = optional_json(mean_of(sources_of(report)));
  }
  json["overlap"] = matrix_json(measured.matrix);
  return json;
}

/// The heat map as a file's text.
inline std::string overlap_svg(OverlapReport const& report) {
  using namespace overlap_detail;
  OverlapMeasurement const& measured = report.measured;
  OverlapMatrix const& matrix = measured.matrix;
  HeatMap map;
  map.title = "Overlap of the layers' selections";
  map.notes.push_back("top_k " + std::to_string(measured.top_k) + "; " +
                      rows_text(measured.counts));
  std::string random;
  if (auto const expected = measured.counts.random_overlap())
    random = "random selections: " + three_digits(expected) + "; ";
  if (auto const all = summarize_pairs(matrix))
    map.notes.push_back(random + "all pairs: mean " + three_digits(all->mean) + ", " +
                        three_digits(all->low) + " to " + three_digits(all->high));
  if (auto const mean = mean_of(sources_of(report)))
    map.notes.push_back(
        "boxes: share groups; left column of a box: a layer with its source, mean " +
        three_digits(mean));
  map.axis = "layer";
  map.scale = "overlap";
  map.numbers = matrix.layers();
  for (indexshare::index_t i = 0; i < matrix.size(); ++i)
    for (indexshare::index_t j = 0; j < matrix.size(); ++j) map.values.push_back(matrix.at(i, j));
  map.boxes = group_boxes(report);
  return heat_map_svg(map);
}

}  // namespace programs
