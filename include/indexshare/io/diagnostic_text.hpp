// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/share/schedule.hpp>
#include <indexshare/share_plan.hpp>

#include <string>

namespace indexshare {
inline namespace v0 {
namespace io {

/// The config field that a schedule source stands for.
constexpr char const* field_name(ScheduleSource source) noexcept {
  switch (source) {
    case ScheduleSource::layer_types:
      return "layer_types";
    case ScheduleSource::indexer_types:
      return "indexer_types";
    case ScheduleSource::pattern:
      return "index_topk_pattern";
    case ScheduleSource::freq_offset:
      return "index_topk_freq";
    case ScheduleSource::all_full:
      return "default";
  }
  return "unknown";
}

/// One sentence, naming the layer: what the plan uses and what the losing field says instead.
inline std::string diagnostic_text(SharePlan const& plan, ScheduleDiagnostic const& diagnostic) {
  std::string const layer = "layer " + std::to_string(diagnostic.layer);
  std::string const winner = field_name(diagnostic.winner);
  std::string const loser = field_name(diagnostic.loser);
  if (plan.role(diagnostic.layer) == LayerRole::none)
    return layer + " has linear attention and no indexer by " + winner + ", but " + loser +
           " calls it full";
  bool const full = plan.is_full(diagnostic.layer);
  return layer + " is " + (full ? "full" : "shared") + " by " + winner + ", but " + loser +
         " calls it " + (full ? "shared" : "full");
}

}  // namespace io
}  // namespace v0
}  // namespace indexshare
