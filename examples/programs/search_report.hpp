// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/indexcache/role_pattern.hpp>
#include <indexshare/indexcache/search.hpp>
#include <indexshare/io/write_schedule.hpp>

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdio>
#include <optional>
#include <ostream>
#include <string>
#include <vector>

#include "search_baselines.hpp"

/// @file What indexshare-search prints.

namespace programs {

struct SearchReport {
  std::int32_t layers = 0;
  std::optional<indexshare::indexcache::SearchOutcome> outcome{};  ///< absent: baselines only
  std::vector<NamedPattern> baselines{};
};

namespace detail {

template <class... Values>
std::string formatted(char const* format, Values... values) {
  char text[160];
  std::snprintf(text, sizeof text, format, values...);
  return text;
}

inline std::string number_list(std::vector<std::int32_t> const& numbers,
                               char const* between = " ") {
  std::string text;
  for (std::int32_t const number : numbers)
    text += (text.empty() ? "" : between) + std::to_string(number);
  return text;
}

inline nlohmann::ordered_json pattern_json(indexshare::indexcache::RolePattern const& pattern) {
  return {{"pattern", pattern_text(pattern)}, {"full_layers", pattern.full_layers()}};
}

inline void write_outcome(std::ostream& out, indexshare::indexcache::SearchOutcome const& outcome) {
  out << "all layers full: loss " << formatted("%.6g", outcome.all_full_loss) << "\n\n"
      << "step  shared  loss          against all full\n";
  for (auto const& flip : outcome.flips)
    out << formatted("%4d  %6d  %-12.6g  %+.3g\n", static_cast<int>(flip.step),
                     static_cast<int>(flip.layer), flip.loss, flip.loss - outcome.all_full_loss);
  auto const full = outcome.pattern.full_layers();
  out << "\nlosses: 1 of all layers full, " << outcome.evaluations << " of candidates; "
      << outcome.from_records << " of them from the log\n"
      << "pattern: " << pattern_text(outcome.pattern) << "\n"
      << "full layers, " << full.size() << " of " << outcome.pattern.layers() << ": "
      << number_list(full) << "\n"
      << "indexer_types: " << indexshare::io::indexer_types(outcome.pattern).dump() << "\n";
}

inline void write_baselines(std::ostream& out, std::vector<NamedPattern> const& baselines) {
  std::size_t width = 0;
  for (NamedPattern const& named : baselines) width = std::max(width, named.name.size());
  out << "baselines:\n";
  for (NamedPattern const& named : baselines) {
    out << "  " << named.name << std::string(width - named.name.size(), ' ') << "  "
        << formatted("%3d full  ", static_cast<int>(named.pattern.full_count()));
    if (named.loss) out << formatted("loss %-12.6g  ", *named.loss);
    out << pattern_text(named.pattern);
    if (!named.shares_pinned.empty())
      out << "  (shares pinned layers " << number_list(named.shares_pinned, ", ") << ")";
    out << "\n";
  }
}

}  // namespace detail

inline void write_report(std::ostream& out, SearchReport const& report) {
  if (report.outcome) detail::write_outcome(out, *report.outcome);
  if (report.outcome && !report.baselines.empty()) out << "\n";
  if (!report.baselines.empty()) detail::write_baselines(out, report.baselines);
}

inline nlohmann::ordered_json report_json(SearchReport const& report) {
  nlohmann::ordered_json json = {{"layers", report.layers}};
  if (report.outcome) {
    auto const& outcome = *report.outcome;
    json.update(detail::pattern_json(outcome.pattern));
    json["indexer_types"] = indexshare::io::indexer_types(outcome.pattern);
    json["all_full_loss"] = outcome.all_full_loss;
    json["flips"] = nlohmann::ordered_json::array();
    for (auto const& flip : outcome.flips)
      json["flips"].push_back({{"step", flip.step}, {"shared", flip.layer}, {"loss", flip.loss}});
    json["evaluations"] = outcome.evaluations;
    json["from_log"] = outcome.from_records;
  }
  for (NamedPattern const& named : report.baselines) {
    nlohmann::ordered_json baseline = {{"name", named.name}};
    baseline.update(detail::pattern_json(named.pattern));
    if (named.loss) baseline["loss"] = *named.loss;
    if (!named.shares_pinned.empty()) baseline["shares_pinned_layers"] = named.shares_pinned;
    json["baselines"].push_back(baseline);
  }
  return json;
}

/// `1h 02m`, `3m 20s` or `12s`.
inline std::string duration_text(double seconds) {
  auto const whole = static_cast<long long>(seconds + 0.5);
  if (whole >= 3600) return detail::formatted("%lldh %02lldm", whole / 3600, whole / 60 % 60);
  if (whole >= 60) return detail::formatted("%lldm %02llds", whole / 60, whole % 60);
  return detail::formatted("%llds", whole);
}

inline std::string progress_line(indexshare::indexcache::SearchProgress const& progress) {
  return detail::formatted("step %d of %d, loss %lld of %lld: %.6g; ",
                           static_cast<int>(progress.step), static_cast<int>(progress.steps),
                           static_cast<long long>(progress.evaluations),
                           static_cast<long long>(progress.evaluations_total), progress.loss) +
         duration_text(progress.elapsed_s) + ", about " + duration_text(progress.remaining_s) +
         " left\n";
}

}  // namespace programs
