// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/share/stage_plan.hpp>
#include <indexshare/share_plan.hpp>
#include <indexshare/status.hpp>

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "arguments.hpp"

namespace programs {

/// One stage as typed: `A:B`, or `A:B+import` if the stage is handed the selection it starts with.
inline Parsed<indexshare::StageRange> parse_stage(std::string_view option, std::string_view text,
                                                  std::int32_t layers) {
  constexpr std::string_view import = "+import";
  indexshare::StageRange stage;
  if (text.ends_with(import)) {
    stage.start = indexshare::StageStart::imports_selection;
    text.remove_suffix(import.size());
  }
  auto const range = parse_range(option, text, layers);
  if (!range) return reject(option, range.error().problem);
  stage.first = static_cast<std::int32_t>(range->first);
  stage.last = static_cast<std::int32_t>(range->last);
  return stage;
}

/// What a user can do about a stage that the plan refuses.
inline std::string stage_problem(indexshare::SharePlan const& plan,
                                 indexshare::StageRange const& stage) {
  std::string const name = std::to_string(stage.first) + ":" + std::to_string(stage.last);
  std::int32_t const source = plan.import_source(stage.first, stage.last);
  return "stage " + name + " starts on a shared layer that reads the selection of layer " +
         std::to_string(source) + "; write " + name + "+import if that is handed over";
}

/// `A:B,C:D,...`: stages that follow one another. They need not cover the model.
inline Parsed<std::vector<indexshare::StageRange>> parse_stages(std::string_view option,
                                                                std::string_view text,
                                                                indexshare::SharePlan const& plan) {
  std::vector<indexshare::StageRange> stages;
  for (bool more = true; more;) {
    std::size_t const comma = text.find(',');
    auto const stage = parse_stage(option, text.substr(0, comma), plan.total_layers());
    if (!stage) return reject(option, stage.error().problem);
    if (!stages.empty() && stage->first != stages.back().last)
      return reject(option, "got a stage from layer " + std::to_string(stage->first) +
                                ", expected one from layer " + std::to_string(stages.back().last) +
                                ", where the stage before it ends");
    if (!plan.stage(stage->first, stage->last, stage->start))
      return reject(option, stage_problem(plan, *stage));
    if (stage->start == indexshare::StageStart::imports_selection &&
        plan.import_source(stage->first, stage->last) == indexshare::no_source)
      return reject(option, "got +import on the stage from layer " + std::to_string(stage->first) +
                                ", which reads no selection from below it");
    stages.push_back(*stage);
    more = comma != std::string_view::npos;
    if (more) text.remove_prefix(comma + 1);
  }
  return stages;
}

}  // namespace programs
