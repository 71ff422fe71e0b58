// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/io/diagnostic_text.hpp>

#include <nlohmann/json.hpp>

#include <cmath>
#include <cstdint>
#include <string>

#include "inspect_report.hpp"

namespace programs {

using ReportJson = nlohmann::ordered_json;

/// A count as a whole number while it is exact.
inline ReportJson count_json(double count) {
  constexpr double exact_below = 9007199254740992.0;  // 2^53
  return count < exact_below ? ReportJson(static_cast<std::int64_t>(count)) : ReportJson(count);
}

/// Trunk only; a layer without sparse attention has no source.
inline ReportJson sources_json(indexshare::SharePlan const& plan) {
  ReportJson sources = ReportJson::array();
  for (std::int32_t layer = 0; layer < plan.num_layers(); ++layer) {
    std::int32_t const source = share_source(plan, layer);
    sources.push_back(source == indexshare::no_source ? ReportJson(nullptr) : ReportJson(source));
  }
  return sources;
}

/// Per stage, the cache slot of each full layer; MTP layers included.
inline ReportJson slots_json(InspectReport const& report) {
  ReportJson stages = ReportJson::array();
  for (indexshare::StagePlan const& stage : report.stages) {
    ReportJson slots = ReportJson::object();
    for (std::int32_t const layer : report.config.plan.full_layers(stage.first(), stage.last()))
      slots[std::to_string(layer)] = *stage.index_cache_slot(layer);
    stages.push_back(slots);
  }
  return stages;
}

inline ReportJson diagnostics_json(indexshare::SharePlan const& plan) {
  ReportJson list = ReportJson::array();
  for (indexshare::ScheduleDiagnostic const diagnostic : plan.diagnostics())
    list.push_back({{"layer", diagnostic.layer},
                    {"winner", indexshare::io::field_name(diagnostic.winner)},
                    {"loser", indexshare::io::field_name(diagnostic.loser)},
                    {"text", indexshare::io::diagnostic_text(plan, diagnostic)}});
  return list;
}

inline ReportJson indexer_rope_json(indexshare::ModelConfig const& model) {
  bool const rotates = model.indexer_rope.dims > 0;
  return {{"layout", rotates ? layout_name(model.indexer_rope.layout) : "none"},
          {"dims", {rope_begin(model), rope_end(model)}}};
}

inline ReportJson form_json(indexshare::SharingFlops const* flops) {
  if (flops == nullptr) return {{"all_full", nullptr}, {"shared", nullptr}, {"ratio", nullptr}};
  return {{"all_full", count_json(flops->all_full.total())},
          {"shared", count_json(flops->shared.total())},
          {"ratio", flops->ratio()}};
}

inline ReportJson flops_json(InspectReport const& report) {
  return {{"absorbed", form_json(report.flops ? &report.flops->absorbed : nullptr)},
          {"expanded", form_json(report.flops ? &report.flops->expanded : nullptr)}};
}

inline ReportJson bytes_json(InspectReport const& report) {
  if (!report.bytes)
    return {{"index_key_all_full", nullptr}, {"index_key", nullptr}, {"kv", nullptr}};
  return {{"index_key_all_full", report.bytes->index_key_all_full},
          {"index_key", report.bytes->index_key},
          {"kv", report.bytes->kv}};
}

inline ReportJson memory_json(MemoryReport const& memory) {
  ReportJson json{{"rows", memory.shape.rows},
                  {"keys", memory.shape.keys},
                  {"budget", memory.budget},
                  {"selection", memory.selection},
                  {"scratch", ReportJson::object()}};
  for (ScratchPlan const& plan : memory.plans) {
    json["scratch"][std::string(plan.name)] =
        plan.scratch ? ReportJson(plan.scratch->bytes)
                     : ReportJson{{"refused", plan.scratch.error().what},
                                  {"expected", plan.scratch.error().expected}};
  }
  return json;
}

/// The report for programs. README describes its keys.
inline ReportJson report_json(InspectReport const& report) {
  auto const& [model, plan] = report.config;
  ReportJson json;
  json["model_type"] = family_name(model.family);
  json["layers"] = plan.num_layers();
  json["mtp_layers"] = plan.mtp_layers();
  json["context"] = report.context ? ReportJson(*report.context) : ReportJson(nullptr);
  json["full_layers"] = ReportJson::array();
  for (std::int32_t const layer : plan.full_layers()) json["full_layers"].push_back(layer);
  json["sources"] = sources_json(plan);
  json["index_cache_slots"] = slots_json(report);
  json["diagnostics"] = diagnostics_json(plan);
  json["rope_theta"] = model.rope.theta > 0 ? ReportJson(model.rope.theta) : ReportJson(nullptr);
  json["indexer_rope"] = indexer_rope_json(model);
  json["unsupported"] = report.unsupported;
  json["flops"] = flops_json(report);
  json["bytes"] = bytes_json(report);
  if (report.memory) json["memory"] = memory_json(*report.memory);
  return json;
}

}  // namespace programs
