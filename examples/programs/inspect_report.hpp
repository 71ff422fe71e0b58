// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/accounting.hpp>
#include <indexshare/dims.hpp>
#include <indexshare/io/config.hpp>
#include <indexshare/io/diagnostic_text.hpp>
#include <indexshare/model_config.hpp>
#include <indexshare/share_plan.hpp>
#include <indexshare/status.hpp>

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "inspect_costs.hpp"
#include "inspect_memory.hpp"

namespace programs {

/// Everything `indexshare-inspect` shows, before it is written down. What could not be counted is
/// absent here and has its reason in `unsupported`.
struct InspectReport {
  indexshare::io::LoadedConfig config;
  std::vector<indexshare::StagePlan> stages;
  std::optional<indexshare::index_t> context;  ///< visible keys that the FLOPs are counted at
  std::optional<FlopsByForm> flops;
  CacheForms forms;
  std::optional<indexshare::CacheBytes> bytes;
  std::optional<indexshare::SharingBytes> moved;  ///< by a token decoded at `context`
  std::optional<PrefillReport> prefill;
  std::optional<LayerReport> layers;
  std::optional<AccountingReport> accountings;
  std::optional<MemoryReport> memory;
  std::vector<std::string> unsupported;
};

inline std::string_view family_name(indexshare::ModelFamily family) {
  for (auto const& known : indexshare::io::detail::families)
    if (known.family == family) return known.model_type;
  return "unknown";
}

inline std::string_view layout_name(indexshare::RopeLayout layout) {
  return layout == indexshare::RopeLayout::interleaved ? "interleaved" : "half_split";
}

/// `3, 7, 11`
template <class Layers>
std::string joined(Layers const& layers) {
  std::string text;
  for (std::int32_t const layer : layers)
    text += (text.empty() ? "" : ", ") + std::to_string(layer);
  return text;
}

/// The trunk layers that have sparse attention, full and shared.
inline std::vector<std::int32_t> sparse_layers(indexshare::SharePlan const& plan) {
  std::vector<std::int32_t> layers;
  for (std::int32_t layer = 0; layer < plan.num_layers(); ++layer)
    if (plan.role(layer) != indexshare::LayerRole::none) layers.push_back(layer);
  return layers;
}

inline void count_flops(InspectReport& report) {
  indexshare::ModelConfig const& model = report.config.model;
  indexshare::Status const countable = indexshare::can_count_complete(model);
  if (!countable.ok()) {
    report.unsupported.push_back(std::string("flops: ") + countable.what);
    return;
  }
  if (!report.context) {
    report.unsupported.push_back(
        "flops: max_position_embeddings is not stated, nor --context given");
    return;
  }
  report.flops = flops_by_form(report.config, indexshare::decoded_row(model, *report.context));
  if (model.family == indexshare::ModelFamily::hy_v4)
    report.unsupported.push_back(
        "flops: the count leaves out hy_v4's output gate and its hyper-connections");
}

inline void count_bytes(InspectReport& report) {
  auto const& [model, plan] = report.config;
  indexshare::Status const countable = indexshare::can_count_cache_bytes(model);
  if (!countable.ok()) {
    report.unsupported.push_back(std::string("bytes: ") + countable.what);
    return;
  }
  auto const [kv, index_key] = report.forms;
  report.bytes = indexshare::cache_bytes_per_token(model, plan, kv, index_key);
  if (report.context)
    report.moved = indexshare::sharing_bytes(
        model, plan, indexshare::decoded_row(model, *report.context), kv, index_key);
}

/// Plans a call, unless the model's layers cannot run. Precondition: the report has a context.
inline void add_memory(InspectReport& report, indexshare::index_t rows, std::size_t budget) {
  if (indexshare::Status const runnable = indexshare::can_run(report.config.model);
      !runnable.ok()) {
    report.unsupported.push_back(std::string("memory: ") + runnable.what);
    return;
  }
  report.memory = plan_memory(report.config.model, rows, *report.context, budget);
}

/// Preconditions: every range is a stage of the config's plan.
/// @param context visible keys; absent: the model's longest context, if it states one
inline InspectReport make_report(indexshare::io::LoadedConfig const& config,
                                 std::vector<indexshare::StageRange> const& stages,
                                 std::optional<indexshare::index_t> context,
                                 CacheForms const& forms = {}) {
  InspectReport report;
  report.config = config;
  report.context = context;
  report.forms = forms;
  indexshare::ModelConfig const& model = config.model;
  if (!context && model.max_position_embeddings > 0) report.context = model.max_position_embeddings;
  for (indexshare::StageRange const& range : stages)
    report.stages.push_back(*config.plan.stage(range.first, range.last, range.start));
  if (indexshare::Status const runnable = indexshare::can_run(model); !runnable.ok())
    report.unsupported.push_back("layers " + joined(sparse_layers(config.plan)) + ": " +
                                 runnable.what + ", index_kpool is " +
                                 std::to_string(model.key_pooling.tokens_per_key));
  count_flops(report);
  count_bytes(report);
  return report;
}

}  // namespace programs
