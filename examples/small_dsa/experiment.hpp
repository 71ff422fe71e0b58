// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "pattern_search.hpp"

#include <indexshare/indexcache/baselines.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

/// @file The experiment on one model: patterns searched on calibration data against uniform ones,
/// one by similarity and random ones with as many full layers, and against random selections; all
/// judged on held-out data.

namespace small_dsa {

struct NamedScore {
  std::string rule;  ///< searched, uniform_paper, ...
  Choices choices;
  Score held_out;
};

/// What the search did in a step, and what that costs on held-out data.
struct Step {
  std::int32_t layer = 0;  ///< shared from here on
  double calibration_loss = 0;
  Choices choices;
  Score held_out;
};

/// Patterns with the same number of full layers.
struct Budget {
  std::int32_t full = 0;
  std::vector<NamedScore> rules;
  std::vector<NamedScore> random_patterns;
};

struct Experiment {
  double all_full_calibration_loss = 0;
  NamedScore all_full;
  NamedScore random_selection;  ///< in every layer
  std::vector<Step> steps;
  std::vector<Budget> budgets;  ///< from many full layers to few
  std::vector<double> overlap;  ///< [layers, layers] of all layers full, on calibration data
};

struct ExperimentSettings {
  /// Per budget. Each is drawn by itself, so that a pattern may come twice where few exist: of the
  /// ten with 3 of 12 full layers (55 exist) eight differ, those of larger budgets all do.
  std::int32_t random_patterns = 10;
};

namespace detail {

using indexshare::indexcache::RolePattern;

/// The searched pattern's shared layers with random selections in place of shared ones: what their
/// selection is worth at all.
inline Choices random_where_shared(Choices choices) {
  std::replace(choices.begin(), choices.end(), Choice::shared, Choice::random);
  return choices;
}

/// The uniform patterns at a half and a quarter, by both rules: name and pattern.
inline std::vector<std::pair<std::string, RolePattern>> uniform_patterns(std::int32_t layers) {
  std::vector<std::pair<std::string, RolePattern>> patterns;
  for (std::int32_t const freq : {2, 4}) {
    patterns.emplace_back("uniform_patches",
                          *indexshare::indexcache::uniform_patches(layers, freq));
    patterns.emplace_back("uniform_paper", *indexshare::indexcache::uniform_paper(layers, freq));
  }
  return patterns;
}

inline Budget plan_budget(Model const& model, Experiment const& experiment,
                          std::pair<std::string, RolePattern> const& uniform,
                          ExperimentSettings const& settings) {
  std::int32_t const layers = model.layers();
  Budget budget;
  budget.full = uniform.second.full_count();
  auto const shared = static_cast<std::size_t>(layers - budget.full);
  Choices const searched =
      shared == 0 ? experiment.all_full.choices : experiment.steps[shared - 1].choices;
  budget.rules.push_back({"searched", searched, {}});
  budget.rules.push_back({uniform.first, choices_of(uniform.second), {}});
  budget.rules.push_back({"similarity",
                          choices_of(*indexshare::indexcache::similarity_pattern(
                              experiment.overlap, layers, budget.full)),
                          {}});
  budget.rules.push_back({"random_where_shared", random_where_shared(searched), {}});
  for (std::int32_t number = 0; number < settings.random_patterns; ++number) {
    auto const seed = static_cast<std::uint64_t>(1000 * budget.full + number);
    budget.random_patterns.push_back(
        {"random",
         choices_of(*indexshare::indexcache::random_pattern(layers, budget.full, seed)),
         {}});
  }
  return budget;
}

/// Everything of the experiment that wants a score, and where the score goes.
inline std::vector<std::pair<Choices const*, Score*>> scores_wanted(Experiment& experiment) {
  std::vector<std::pair<Choices const*, Score*>> wanted;
  auto const add = [&](auto& entry) { wanted.emplace_back(&entry.choices, &entry.held_out); };
  add(experiment.all_full);
  add(experiment.random_selection);
  for (Step& step : experiment.steps) add(step);
  for (Budget& budget : experiment.budgets) {
    for (NamedScore& entry : budget.rules) add(entry);
    for (NamedScore& entry : budget.random_patterns) add(entry);
  }
  return wanted;
}

}  // namespace detail

/// The plan of the experiment: all patterns, not yet their held-out scores.
/// @param found        of a search down to one full layer, on the calibration data
/// @param calibration  on the data of the search
inline Expected<Experiment> plan_experiment(Model const& model,
                                            indexshare::indexcache::SearchOutcome const& found,
                                            Evaluator& calibration,
                                            ExperimentSettings const& settings) {
  std::int32_t const layers = model.layers();
  auto const count = static_cast<std::size_t>(layers);
  Experiment experiment;
  experiment.all_full_calibration_loss = found.all_full_loss;
  experiment.all_full = {"all_full", Choices(count, Choice::full), {}};
  experiment.random_selection = {"random_selection", Choices(count, Choice::random), {}};
  auto const selections = calibration.selections(experiment.all_full.choices);
  if (!selections) return refuse(selections.error());
  auto overlap = selection_overlap(model, *selections);
  if (!overlap) return refuse(overlap.error());
  experiment.overlap = std::move(*overlap);
  for (auto const& flip : found.flips) {
    experiment.steps.push_back(
        {flip.layer, flip.loss, choices_of(found.pattern_at(flip.step)), {}});
  }
  for (auto const& uniform : detail::uniform_patterns(layers)) {
    experiment.budgets.push_back(detail::plan_budget(model, experiment, uniform, settings));
  }
  return experiment;
}

/// Fills in the held-out scores. @param held_out  on data that the search has not seen
inline Expected<void> score_experiment(Experiment& experiment, Evaluator& held_out) {
  if (auto const kept = held_out.keep(experiment.all_full.choices); !kept) return kept;
  auto const wanted = detail::scores_wanted(experiment);
  std::vector<Choices> all;
  for (auto const& [choices, score] : wanted) all.push_back(*choices);
  auto const scores = held_out.evaluate(all);
  if (!scores) return refuse(scores.error());
  for (std::size_t i = 0; i < wanted.size(); ++i) *wanted[i].second = (*scores)[i];
  return {};
}

}  // namespace small_dsa
