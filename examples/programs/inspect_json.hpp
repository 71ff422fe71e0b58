// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/io/diagnostic_text.hpp>

#include <nlohmann/json.hpp>

#include <cmath>
#include <cstdint>
#include <string>

#include "inspect_cost_options.hpp"
#include "inspect_costs_json.hpp"
#include "inspect_report.hpp"

namespace programs {

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
  json["flops"] = forms_json(report.flops ? &*report.flops : nullptr);
  json["cache_forms"] = {{"index_key", form_name(report.forms.index_key)},
                         {"kv", form_name(report.forms.kv)}};
  json["bytes"] = bytes_json(report);
  json["moved_bytes"] = report.moved ? sharing_json(*report.moved) : ReportJson(nullptr);
  if (report.prefill) json["prefill"] = prefill_json(*report.prefill);
  if (report.layers) {
    json["by_layer"] = layer_list_json(report.layers->layers);
    json["by_group"] = layer_list_json(report.layers->groups);
  }
  if (report.accountings) {
    if (!report.accountings->rows.empty())
      json["accountings"] = accountings_json(*report.accountings, plan.num_layers());
    if (report.accountings->request.published)
      json["published"] = published_json(*report.accountings);
  }
  if (report.memory) json["memory"] = memory_json(*report.memory);
  return json;
}

}  // namespace programs
