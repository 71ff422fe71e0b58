// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/accounting.hpp>

#include <cstdio>
#include <optional>
#include <ostream>
#include <string>
#include <string_view>
#include <vector>

#include "inspect_cost_options.hpp"
#include "inspect_costs.hpp"

namespace programs {

/// As printf prints it, one line at most.
template <class... Values>
std::string printed(char const* format, Values... values) {
  char text[240];
  std::snprintf(text, sizeof text, format, values...);
  return text;
}

/// Counts of `tokens` tokens, divided by their number.
inline void write_flops_row(std::ostream& out, char const* form,
                            indexshare::SharingFlops const& flops, double tokens) {
  out << printed("  %-14s%10.1f%15.1f%8.2f\n", form, flops.all_full.total() / tokens / 1e9,
                 flops.shared.total() / tokens / 1e9, flops.ratio());
}

inline void write_flops(std::ostream& out, FlopsByForm const& flops, double tokens = 1) {
  out << "  core form       all full  this schedule   ratio\n";
  write_flops_row(out, "absorbed", flops.absorbed, tokens);
  write_flops_row(out, "expanded", flops.expanded, tokens);
}

inline void write_moved(std::ostream& out, indexshare::SharingBytes const& moved,
                        double tokens = 1) {
  auto const line = [&](char const* name, double all_full, double shared) {
    out << printed("  %-14s%10.1f%15.1f%8.2f\n", name, all_full / tokens / 1e6,
                   shared / tokens / 1e6, all_full / shared);
  };
  auto const& [all_full, shared] = moved;
  out << "                  all full  this schedule   ratio\n";
  line("index keys", all_full.index_keys, shared.index_keys);
  line("fp32 scores", all_full.scores, shared.scores);
  line("KV entries", all_full.kv_entries, shared.kv_entries);
  line("together", all_full.total(), shared.total());
}

inline void write_prefill(std::ostream& out, PrefillReport const& prefill,
                          CacheForms const& forms) {
  std::string const tokens = "per token of a prefill of tokens " +
                             std::to_string(prefill.range.first) + ".." +
                             std::to_string(prefill.range.last - 1);
  out << "\nGFLOP " << tokens << ", complete count without MTP\n";
  write_flops(out, prefill.flops, prefill.rows.rows);
  out << "\nMB moved " << tokens << ", if no token shares a read with another, "
      << forms_text(forms) << "\n";
  write_moved(out, prefill.moved, prefill.rows.rows);
}

/// What the layer table and the accountings are of.
inline std::string rows_text(std::optional<PrefillReport> const& prefill,
                             std::optional<indexshare::index_t> context) {
  if (prefill)
    return "per token of the prefill of tokens " + std::to_string(prefill->range.first) + ".." +
           std::to_string(prefill->range.last - 1);
  return "per decoded token at " + std::to_string(*context) + " visible keys";
}

inline void write_layer_costs(std::ostream& out, char const* first_column,
                              std::vector<LayerCost> const& costs, bool groups, double tokens) {
  out << printed("%7s %7s %12s%12s%12s%14s%12s%13s%9s%6s\n", first_column,
                 groups ? "layers" : "source", "projections", "indexer", "core", "feed-forward",
                 "together", "MB moved", "key B", "KV B");
  for (LayerCost const& cost : costs) {
    indexshare::CompleteFlops const& f = cost.flops;
    out << printed(
        "%7d %7d %12.4f%12.4f%12.4f%14.4f%12.4f%13.3f%9lld%6lld\n", cost.layer,
        groups ? cost.layers : cost.source, f.attention_projections / tokens / 1e9,
        (f.indexer_projections + f.index_scoring) / tokens / 1e9, f.attention_core / tokens / 1e9,
        f.feed_forward / tokens / 1e9, f.total() / tokens / 1e9, cost.moved.total() / tokens / 1e6,
        static_cast<long long>(cost.index_key_bytes), static_cast<long long>(cost.kv_bytes));
  }
}

inline void write_layers(std::ostream& out, LayerReport const& report, std::string const& rows,
                         double tokens) {
  out << "\nGFLOP " << rows << " by layer, absorbed core; MB moved; cache bytes per token\n";
  write_layer_costs(out, "layer", report.layers, false, tokens);
  out << "\nthe same by share group, under the number of its full layer\n";
  write_layer_costs(out, "group", report.groups, true, tokens);
}

inline void write_accountings(std::ostream& out, AccountingReport const& report, int layers,
                              std::string const& rows, double tokens) {
  if (!report.rows.empty()) {
    out << "\naccountings, GFLOP " << rows << "; ratios of " << layers << " indexers to\n"
        << printed("  %-28s%11s%13s", "", "fixed", "per indexer");
    for (double const full : report.request.indexers) out << printed("%8g", full);
    out << "\n";
    for (AccountedRow const& row : report.rows) {
      out << printed("  %-28s%11.2f%13.3f", row.named.name, row.flops.fixed / tokens / 1e9,
                     row.flops.per_full_layer / tokens / 1e9);
      for (double const full : report.request.indexers)
        out << printed("%8.3f", row.flops.ratio(layers, full));
      out << "  " << row.named.what << "\n";
    }
  }
  if (!report.request.published) return;
  std::string const ratio =
      printed("%.*f", report.request.published->decimals, report.request.published->value);
  out << "\naccountings " << rows << " that give " << ratio << ", rounded once"
      << (report.matches.empty() ? ": none\n" : "\n");
  for (PublishedMatch const& match : report.matches)
    out << printed("  %d : %-6g%7.3f  %s: %s\n", layers, match.full_layers, match.ratio,
                   match.named.name, match.named.what);
}

}  // namespace programs
