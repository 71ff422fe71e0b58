// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "demo_backend.hpp"
#include "golden_replay.hpp"

#include <indexshare/indexshare.hpp>

#include <nlohmann/json.hpp>

#include <cstdio>
#include <optional>
#include <string>

/// @file What the demo prints, for people and as JSON.

namespace programs {

/// Everything that a report is made from.
struct DemoOutcome {
  std::string model;
  indexshare::ModelConfig config;
  indexshare::SharePlan plan;
  DemoSettings settings;
  DemoBackend backend;
  DemoResult result;
  std::string golden_name;
  std::optional<GoldenReport> golden;  ///< absent: `golden_note` says why

  std::string golden_note;

  bool golden_passed() const {
    return !golden || (golden->wrong == 0 && golden->shared_wrong == 0 &&
                       golden->score_error < 1e-5 && golden->output_error < 1e-5);
  }
  bool passed() const { return result.checker.passed() && golden_passed(); }
};

namespace report_detail {

/// The columns of the two stages: milliseconds, or rows where there are no times.
struct StageColumns {
  bool timed;

  std::string heading(char const* stage) const {
    return std::string(stage) + (timed ? " ms" : " rows");
  }
  std::string cell(Meter const& meter) const {
    if (!timed) return std::to_string(meter.rows);
    char text[32];
    std::snprintf(text, sizeof text, "%.1f", meter.milliseconds);
    return text;
  }
};

inline void print_stack(char const* title, StackReport const& stack, StageColumns columns) {
  std::printf("\n%s\n%6s  %-6s %6s %14s %14s %14s\n", title, "layer", "role", "source",
              columns.heading("selection").c_str(), columns.heading("attention").c_str(),
              "keys per row");
  for (auto const& [number, layer] : stack.layers) {
    std::printf("%6d  %-6s %6d %14s %14s %14.1f\n", number, layer.role.c_str(), layer.source,
                columns.cell(layer.selection).c_str(), columns.cell(layer.attention).c_str(),
                static_cast<double>(layer.selected) / static_cast<double>(layer.rows));
  }
}

inline void print_totals_heading(StageColumns columns) {
  std::printf("\n%-12s %14s %14s %14s", "totals", "indexer calls",
              columns.heading("selection").c_str(), columns.heading("attention").c_str());
  if (columns.timed) std::printf(" %12s", "sum ms");
  std::printf("\n");
}

inline void print_totals(char const* name, StackReport const& stack, StageColumns columns) {
  Meter const selection = stack.total(&LayerReport::selection);
  Meter const attention = stack.total(&LayerReport::attention);
  std::printf("%-12s %14lld %14s %14s", name, static_cast<long long>(selection.calls),
              columns.cell(selection).c_str(), columns.cell(attention).c_str());
  if (columns.timed) std::printf(" %12.1f", selection.milliseconds + attention.milliseconds);
  std::printf("\n");
}

inline void print_model_counts(DemoOutcome const& outcome) {
  if (indexshare::can_count_complete(outcome.config).ok()) {
    std::printf(
        "\nFLOPs of one decoded token at %lld keys, whole model without MTP, complete count "
        "(2 per multiply-add)\n",
        static_cast<long long>(outcome.settings.context));
    for (auto const form : {indexshare::CoreForm::absorbed, indexshare::CoreForm::expanded}) {
      auto const flops = indexshare::complete_sharing_flops(outcome.config, outcome.plan,
                                                            outcome.settings.context, form);
      std::printf(
          "  %s core: %.1f G every layer full, %.1f G as scheduled, ratio %.2f (of counts, "
          "not a speed-up)\n",
          form == indexshare::CoreForm::absorbed ? "absorbed" : "expanded",
          flops.all_full.total() * 1e-9, flops.shared.total() * 1e-9, flops.ratio());
    }
  }
  if (indexshare::can_count_cache_bytes(outcome.config).ok()) {
    auto const bytes = indexshare::cache_bytes_per_token(outcome.config, outcome.plan);
    std::printf(
        "Cache bytes per token, whole model without MTP, fp8 forms: index keys %lld every "
        "layer full, %lld as scheduled; KV %lld either way\n",
        static_cast<long long>(bytes.index_key_all_full), static_cast<long long>(bytes.index_key),
        static_cast<long long>(bytes.kv));
  }
}

inline void print_check(DemoOutcome const& outcome) {
  DemoChecker const& check = outcome.result.checker;
  std::printf("\nCheck against the reference back end\n");
  std::printf("  selections: %lld rows recomputed, %lld differ (byte for byte)\n",
              static_cast<long long>(check.selections),
              static_cast<long long>(check.wrong_selections));
  std::printf("  reuse: %lld rows of shared layers, %lld differ from their source\n",
              static_cast<long long>(check.reused), static_cast<long long>(check.wrong_reused));
  std::printf(
      "  attention: %lld head rows recomputed, %lld off, worst error %.1e of the largest "
      "value (allowed %.0e)\n",
      static_cast<long long>(check.outputs), static_cast<long long>(check.wrong_outputs),
      check.worst_output, check.allowed);
  if (check.host_rows > 0) {
    std::printf("  selections equal on host and CUDA: %lld of %lld rows\n",
                static_cast<long long>(check.host_rows - check.host_differ),
                static_cast<long long>(check.host_rows));
  }
  if (outcome.golden) {
    GoldenReport const& golden = *outcome.golden;
    std::printf(
        "  transformers' fixture %s: %lld rows compared, %lld skipped, %lld differ; %lld "
        "reused, %lld differ; worst errors score %.1e, lse %.1e, output %.1e\n",
        outcome.golden_name.c_str(), static_cast<long long>(golden.rows),
        static_cast<long long>(golden.skipped), static_cast<long long>(golden.wrong),
        static_cast<long long>(golden.shared_rows), static_cast<long long>(golden.shared_wrong),
        golden.score_error, golden.lse_error, golden.output_error);
  } else {
    std::printf("  transformers' fixture: not replayed, %s\n", outcome.golden_note.c_str());
  }
  std::printf("%s%s\n", outcome.passed() ? "CHECK PASSED" : "CHECK FAILED",
              outcome.golden ? "" : " (without transformers' fixture)");
}

inline void add_times(nlohmann::json& object, Meter const& selection, Meter const& attention) {
  object["selection_ms"] = selection.milliseconds;
  object["attention_ms"] = attention.milliseconds;
}

inline nlohmann::json json_of(StackReport const& stack, StageColumns columns) {
  nlohmann::json layers = nlohmann::json::array();
  for (auto const& [number, layer] : stack.layers) {
    nlohmann::json entry = {{"layer", number},        {"role", layer.role},
                            {"source", layer.source}, {"indexer_calls", layer.selection.calls},
                            {"rows", layer.rows},     {"keys_selected", layer.selected}};
    if (columns.timed) add_times(entry, layer.selection, layer.attention);
    layers.push_back(entry);
  }
  Meter const selection = stack.total(&LayerReport::selection);
  nlohmann::json report = {{"indexer_calls", selection.calls}, {"layers", layers}};
  if (columns.timed) add_times(report, selection, stack.total(&LayerReport::attention));
  return report;
}

}  // namespace report_detail

inline void print_report(DemoOutcome const& outcome) {
  using namespace report_detail;
  DemoSettings const& settings = outcome.settings;
  StageColumns const columns{outcome.backend.timed};
  if (settings.share_off) {
    print_stack("Sharing off: every layer selects", outcome.result.off, columns);
  }
  if (settings.share_on) {
    print_stack("Sharing on: the model's schedule", outcome.result.on, columns);
  }

  print_totals_heading(columns);
  if (settings.share_off) print_totals("sharing off", outcome.result.off, columns);
  if (settings.share_on) print_totals("sharing on", outcome.result.on, columns);
  if (settings.share_off && settings.share_on) {
    auto const calls = outcome.result.off.total(&LayerReport::selection).calls;
    auto const made = outcome.result.on.total(&LayerReport::selection).calls;
    std::printf("indexer calls made with sharing %lld, saved %lld\n", static_cast<long long>(made),
                static_cast<long long>(calls - made));
  }
  print_model_counts(outcome);
  print_check(outcome);
}

inline nlohmann::json json_report(DemoOutcome const& outcome) {
  DemoSettings const& settings = outcome.settings;
  DemoChecker const& check = outcome.result.checker;
  nlohmann::json report = {{"model", outcome.model},
                           {"layers", {settings.first_layer, settings.last_layer}},
                           {"context", settings.context},
                           {"decode", settings.decode_steps},
                           {"draft", settings.draft_steps},
                           {"threads", settings.threads},
                           {"where", outcome.backend.where},
                           {"seed", settings.seed},
                           {"check",
                            {{"passed", outcome.passed()},
                             {"selections", check.selections},
                             {"wrong_selections", check.wrong_selections},
                             {"reused", check.reused},
                             {"wrong_reused", check.wrong_reused},
                             {"outputs", check.outputs},
                             {"wrong_outputs", check.wrong_outputs},
                             {"worst_output_error", check.worst_output},
                             {"host_rows", check.host_rows},
                             {"host_differ", check.host_differ}}}};
  report_detail::StageColumns const columns{outcome.backend.timed};
  if (settings.share_off) {
    report["sharing_off"] = report_detail::json_of(outcome.result.off, columns);
  }
  if (settings.share_on) {
    report["sharing_on"] = report_detail::json_of(outcome.result.on, columns);
  }
  if (outcome.golden) {
    report["golden"] = {{"fixture", outcome.golden_name},
                        {"rows", outcome.golden->rows},
                        {"skipped", outcome.golden->skipped},
                        {"wrong", outcome.golden->wrong},
                        {"shared_rows", outcome.golden->shared_rows},
                        {"shared_wrong", outcome.golden->shared_wrong},
                        {"score_error", outcome.golden->score_error},
                        {"lse_error", outcome.golden->lse_error},
                        {"output_error", outcome.golden->output_error}};
  } else {
    report["golden"] = nullptr;
  }
  return report;
}

}  // namespace programs
