// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/accounting.hpp>

#include <nlohmann/json.hpp>

#include <cmath>
#include <cstdint>
#include <vector>

#include "inspect_costs.hpp"

namespace programs {

using ReportJson = nlohmann::ordered_json;

/// A count as a whole number while it is exact. Idealised schedules have fractions of an indexer.
inline ReportJson count_json(double count) {
  constexpr double exact_below = 9007199254740992.0;  // 2^53
  bool const whole = count < exact_below && count == std::floor(count);
  return whole ? ReportJson(static_cast<std::int64_t>(count)) : ReportJson(count);
}

inline ReportJson form_json(indexshare::SharingFlops const* flops) {
  if (flops == nullptr) return {{"all_full", nullptr}, {"shared", nullptr}, {"ratio", nullptr}};
  return {{"all_full", count_json(flops->all_full.total())},
          {"shared", count_json(flops->shared.total())},
          {"ratio", flops->ratio()}};
}

inline ReportJson forms_json(FlopsByForm const* flops) {
  return {{"absorbed", form_json(flops ? &flops->absorbed : nullptr)},
          {"expanded", form_json(flops ? &flops->expanded : nullptr)}};
}

inline ReportJson moved_json(indexshare::MovedBytes const& moved) {
  return {{"index_keys", count_json(moved.index_keys)},
          {"scores", count_json(moved.scores)},
          {"kv", count_json(moved.kv_entries)},
          {"total", count_json(moved.total())}};
}

inline ReportJson sharing_json(indexshare::SharingBytes const& moved) {
  return {{"all_full", moved_json(moved.all_full)},
          {"shared", moved_json(moved.shared)},
          {"ratio", moved.ratio()}};
}

inline ReportJson prefill_json(PrefillReport const& prefill) {
  return {{"first", prefill.range.first},
          {"last", prefill.range.last},
          {"visible_keys", count_json(prefill.rows.visible_keys)},
          {"attended_keys", count_json(prefill.rows.attended_keys)},
          {"flops", forms_json(&prefill.flops)},
          {"moved_bytes", sharing_json(prefill.moved)}};
}

inline ReportJson layer_json(LayerCost const& cost) {
  return {{"layer", cost.layer},
          {"source", cost.source},
          {"layers", cost.layers},
          {"flops",
           {{"attention_projections", count_json(cost.flops.attention_projections)},
            {"indexer_projections", count_json(cost.flops.indexer_projections)},
            {"index_scoring", count_json(cost.flops.index_scoring)},
            {"attention_core", count_json(cost.flops.attention_core)},
            {"feed_forward", count_json(cost.flops.feed_forward)},
            {"total", count_json(cost.flops.total())}}},
          {"moved_bytes", moved_json(cost.moved)},
          {"cache_bytes", {{"index_key", cost.index_key_bytes}, {"kv", cost.kv_bytes}}}};
}

inline ReportJson layer_list_json(std::vector<LayerCost> const& costs) {
  ReportJson list = ReportJson::array();
  for (LayerCost const& cost : costs) list.push_back(layer_json(cost));
  return list;
}

/// @param layers  of the trunk, which ratios are relative to
inline ReportJson accountings_json(AccountingReport const& report, double layers) {
  ReportJson list = ReportJson::array();
  for (AccountedRow const& row : report.rows) {
    ReportJson counts = ReportJson::array();
    for (double const full : report.request.indexers)
      counts.push_back({{"full_layers", full},
                        {"total", count_json(row.flops.total(full))},
                        {"ratio", row.flops.ratio(layers, full)},
                        {"indexer_share", row.flops.indexer_share(full)}});
    list.push_back({{"name", row.named.name},
                    {"counts", row.named.what},
                    {"fixed", count_json(row.flops.fixed)},
                    {"per_full_layer", count_json(row.flops.per_full_layer)},
                    {"all_full", count_json(row.flops.total(layers))},
                    {"indexers", counts}});
  }
  return list;
}

inline ReportJson published_json(AccountingReport const& report) {
  ReportJson matches = ReportJson::array();
  for (PublishedMatch const& match : report.matches)
    matches.push_back({{"name", match.named.name},
                       {"counts", match.named.what},
                       {"full_layers", match.full_layers},
                       {"ratio", match.ratio}});
  return {{"ratio", report.request.published->value},
          {"decimals", report.request.published->decimals},
          {"given_by", matches}};
}

}  // namespace programs
