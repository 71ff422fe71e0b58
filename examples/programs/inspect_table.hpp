// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/io/diagnostic_text.hpp>

#include <cstddef>
#include <cstdint>
#include <iomanip>
#include <optional>
#include <ostream>
#include <string>
#include <string_view>
#include <vector>

#include "inspect_costs_table.hpp"
#include "inspect_report.hpp"

namespace programs {

inline std::ostream& row(std::ostream& out, std::string_view name) {
  return out << std::left << std::setw(12) << name << std::right;
}

inline void write_model(std::ostream& out, indexshare::ModelConfig const& model) {
  row(out, "model") << family_name(model.family) << ", " << model.num_hidden_layers << " layers, "
                    << model.num_nextn_predict_layers << " MTP\n";
  row(out, "attention") << model.num_attention_heads << " heads, key row " << model.kv_lora_rank
                        << " latent + " << model.qk_rope_head_dim << " rope, softmax scale "
                        << softmax_scale(model) << (model.learnable_sink ? ", learned sink" : "")
                        << (model.gated_output ? ", gated output" : "") << "\n";
  row(out, "indexer") << model.index_n_heads << " heads of " << model.index_head_dim << ", top-k "
                      << model.index_topk << "\n";
}

inline void write_rope(std::ostream& out, indexshare::ModelConfig const& model) {
  if (model.qk_rope_head_dim == 0) {
    row(out, "rope") << "none\n";
    return;
  }
  bool const yarn = model.rope.scaling == indexshare::RopeScaling::yarn;
  row(out, "rope") << "theta " << std::fixed << std::setprecision(0) << model.rope.theta
                   << std::defaultfloat << std::setprecision(6);
  if (yarn) out << ", yarn factor " << model.rope.yarn.factor;
  out << "; attention " << layout_name(model.rope.layout) << ", indexer "
      << layout_name(model.indexer_rope.layout) << " on lanes " << rope_begin(model) << ".."
      << rope_end(model) - 1 << "\n";
}

/// The layers that read the selection of `source`, as a range where they are one.
inline std::string trunk_readers(indexshare::SharePlan const& plan, std::int32_t source) {
  std::vector<std::int32_t> layers;
  for (std::int32_t layer = source + 1; layer < plan.num_layers(); ++layer)
    if (share_source(plan, layer) == source) layers.push_back(layer);
  if (layers.empty()) return "-";
  auto const span = static_cast<std::size_t>(layers.back() - layers.front()) + 1;
  if (span != layers.size() || span == 1) return joined(layers);
  return std::to_string(layers.front()) + ".." + std::to_string(layers.back());
}

inline void write_schedule(std::ostream& out, indexshare::SharePlan const& plan) {
  auto const full = static_cast<std::size_t>(plan.full_layers().count());
  std::size_t const sparse = sparse_layers(plan).size();
  row(out, "schedule") << full << " full, " << sparse - full << " shared";
  if (auto const others = static_cast<std::size_t>(plan.num_layers()) - sparse; others > 0)
    out << ", " << others << " without sparse attention";
  if (plan.decided_by() == indexshare::ScheduleSource::all_full)
    out << "; the config states no schedule\n";
  else
    out << "; decided by " << indexshare::io::field_name(plan.decided_by()) << "\n";
}

/// What reads the selection of a full layer besides the layer itself.
inline std::string readers(indexshare::io::LoadedConfig const& config, std::int32_t full_layer) {
  if (full_layer < config.plan.num_layers()) return trunk_readers(config.plan, full_layer);
  return config.model.index_share_for_mtp_iteration ? "later draft steps (MTP)" : "- (MTP)";
}

inline void write_slot(std::ostream& out, std::string const& layer, std::string const& slot,
                       std::string const& read_by) {
  out << std::setw(12) << layer << std::setw(12) << slot << "  " << read_by << "\n";
}

/// One line per full layer; a run of layers that nobody reads from is one line.
inline void write_slots(std::ostream& out, indexshare::io::LoadedConfig const& config,
                        indexshare::StagePlan const& stage) {
  auto const span = [](std::int32_t first, std::int32_t last) {
    std::string const text = std::to_string(first);
    return first == last ? text : text + ".." + std::to_string(last);
  };
  std::int32_t layer = stage.first();
  while (layer < stage.last()) {
    auto const slot = stage.index_cache_slot(layer);
    if (!slot) {
      ++layer;
      continue;
    }
    std::string const read_by = readers(config, layer);
    std::int32_t last = layer;
    while (read_by == "-" && stage.index_cache_slot(last + 1) && readers(config, last + 1) == "-")
      ++last;
    write_slot(out, span(layer, last), span(*slot, *slot + last - layer), read_by);
    layer = last + 1;
  }
}

inline void write_stage(std::ostream& out, indexshare::io::LoadedConfig const& config,
                        indexshare::StagePlan const& stage, std::size_t number) {
  out << "\nstage " << number << ": layers " << stage.first() << ".." << stage.last() - 1 << ", "
      << stage.index_caches() << " index-key caches";
  if (stage.import_source() != indexshare::no_source)
    out << ", imports the selection of layer " << stage.import_source();
  out << "\n";
  write_slot(out, "full layer", "cache slot", "read by");
  write_slots(out, config, stage);
}

/// Per token, and for one request of `context` tokens.
inline void write_bytes(std::ostream& out, indexshare::CacheBytes const& bytes,
                        CacheForms const& forms, std::optional<indexshare::index_t> context) {
  auto const line = [&](std::string_view name, indexshare::index_t of_token) {
    out << "  " << std::left << std::setw(22) << name << std::right << std::setw(9) << of_token;
    if (context) out << std::setw(17) << of_token * *context;
    out << "\n";
  };
  out << "\ncache bytes, " << forms_text(forms)
      << ", without MTP\n                        per token";
  if (context) out << std::setw(7) << "at " << *context << " tokens";
  out << "\n";
  line("index keys, all full", bytes.index_key_all_full);
  line("index keys", bytes.index_key);
  line("KV (sharing or not)", bytes.kv);
}

inline void write_costs(std::ostream& out, InspectReport const& report) {
  if (report.flops) {
    out << "\nGFLOP per decoded token at " << *report.context
        << " visible keys, complete count without MTP\n";
    write_flops(out, *report.flops);
  }
  if (report.bytes) write_bytes(out, *report.bytes, report.forms, report.context);
  if (report.moved) {
    out << "\nMB moved per decoded token at " << *report.context << " visible keys, "
        << forms_text(report.forms) << "\n";
    write_moved(out, *report.moved);
  }
  if (report.prefill) write_prefill(out, *report.prefill, report.forms);
  double const tokens = report.prefill ? report.prefill->rows.rows : 1;
  if (report.layers)
    write_layers(out, *report.layers, rows_text(report.prefill, report.context), tokens);
  if (report.accountings)
    write_accountings(out, *report.accountings, report.config.plan.num_layers(),
                      rows_text(report.prefill, report.context), tokens);
}

inline void write_memory(std::ostream& out, MemoryReport const& memory) {
  out << "\nmemory of a call of " << memory.shape.rows << " rows at " << memory.shape.keys
      << " keys, in bytes, within " << memory.budget << "\n"
      << "                      selection       scratch      together\n";
  for (ScratchPlan const& plan : memory.plans) {
    out << "  " << std::left << std::setw(18) << plan.name << std::right;
    if (plan.scratch) {
      out << std::setw(11) << memory.selection << std::setw(14) << plan.scratch->bytes
          << std::setw(14) << memory.selection + plan.scratch->bytes << "\n";
    } else {
      out << "  refused: " << plan.scratch.error().what << ", expected "
          << plan.scratch.error().expected << ", got " << plan.scratch.error().got << "\n";
    }
  }
}

template <class Lines>
void write_lines(std::ostream& out, std::string_view title, Lines const& lines) {
  out << "\n" << title << ":" << (lines.empty() ? " none\n" : "\n");
  for (std::string const& line : lines) out << "  " << line << "\n";
}

/// The report for people.
inline void write_table(std::ostream& out, InspectReport const& report) {
  auto const& [model, plan] = report.config;
  write_model(out, model);
  write_rope(out, model);
  write_schedule(out, plan);
  for (std::size_t i = 0; i < report.stages.size(); ++i)
    write_stage(out, report.config, report.stages[i], i);
  write_costs(out, report);
  if (report.memory) write_memory(out, *report.memory);
  std::vector<std::string> diagnostics;
  for (indexshare::ScheduleDiagnostic const diagnostic : plan.diagnostics())
    diagnostics.push_back(indexshare::io::diagnostic_text(plan, diagnostic));
  write_lines(out, "fields that disagree", diagnostics);
  write_lines(out, "not supported", report.unsupported);
}

}  // namespace programs
