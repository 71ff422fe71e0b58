// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "experiment.hpp"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <ostream>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

/// @file An experiment as JSON and as a table.

namespace small_dsa {

using Json = nlohmann::ordered_json;

/// Where an experiment's numbers are from.
struct ExperimentSource {
  std::string model;  ///< name of the model's directory
  std::size_t calibration_sequences = 0;
  std::size_t held_out_sequences = 0;
};

namespace detail {

inline Json score_json(Score const& score) {
  Json const error = score.loss_error ? Json(*score.loss_error) : Json(nullptr);
  return {{"loss", score.loss}, {"loss_error", error}, {"accuracy", score.accuracy}};
}

inline Json named_json(NamedScore const& entry) {
  return {{"rule", entry.rule},
          {"pattern", text_of(entry.choices)},
          {"held_out", score_json(entry.held_out)}};
}

inline Json list_json(std::vector<NamedScore> const& entries) {
  Json list = Json::array();
  for (NamedScore const& entry : entries) list.push_back(named_json(entry));
  return list;
}

inline Json budget_json(Budget const& budget) {
  return {{"full_layers", budget.full},
          {"rules", list_json(budget.rules)},
          {"random_patterns", list_json(budget.random_patterns)}};
}

inline Json step_json(Step const& step, std::size_t shared) {
  return {{"shared_layers", shared},
          {"layer", step.layer},
          {"pattern", text_of(step.choices)},
          {"calibration_loss", step.calibration_loss},
          {"held_out", score_json(step.held_out)}};
}

}  // namespace detail

inline Json experiment_json(Model const& model, Experiment const& experiment,
                            ExperimentSource const& source) {
  TaskSizes const& task = model.task();
  Json json{{"format", "indexshare-small-dsa-1"},
            {"model", source.model},
            {"layers", model.layers()},
            {"index_topk", model.config().index_topk},
            {"task",
             {{"keys", task.keys},
              {"records", task.records},
              {"queries", task.queries},
              {"max_hops", task.max_hops}}},
            {"calibration_sequences", source.calibration_sequences},
            {"held_out_sequences", source.held_out_sequences},
            {"all_full", detail::named_json(experiment.all_full)}};
  json["all_full"]["calibration_loss"] = experiment.all_full_calibration_loss;
  json["random_selection"] = detail::named_json(experiment.random_selection);
  json["steps"] = Json::array();
  for (std::size_t i = 0; i < experiment.steps.size(); ++i) {
    json["steps"].push_back(detail::step_json(experiment.steps[i], i + 1));
  }
  json["budgets"] = Json::array();
  for (Budget const& budget : experiment.budgets) {
    json["budgets"].push_back(detail::budget_json(budget));
  }
  json["overlap"] = Json::array();
  auto const layers = static_cast<std::size_t>(model.layers());
  for (std::size_t row = 0; row < layers; ++row) {
    Json line = Json::array();
    for (std::size_t column = 0; column < layers; ++column) {
      // four digits: a matrix to look at
      line.push_back(std::round(experiment.overlap[row * layers + column] * 1e4) / 1e4);
    }
    json["overlap"].push_back(line);
  }
  return json;
}

namespace detail {

/// The standard error of a loss, `-` without one.
inline std::string error_text(Score const& score, int digits) {
  if (!score.loss_error) return "-";
  char text[32];
  std::snprintf(text, sizeof text, "%.*f", digits, *score.loss_error);
  return text;
}

inline void write_line(std::ostream& out, std::string_view name, std::string_view pattern,
                       Score const& score) {
  char text[160];
  std::snprintf(text, sizeof text, "  %-20.*s %-16.*s %8.4f +- %-6s %9.2f %%\n",
                static_cast<int>(name.size()), name.data(), static_cast<int>(pattern.size()),
                pattern.data(), score.loss, error_text(score, 4).c_str(), 100 * score.accuracy);
  out << text;
}

inline void write_random_patterns(std::ostream& out, std::vector<NamedScore> const& entries) {
  if (entries.empty()) return;
  Score mean{};
  auto const count = static_cast<double>(entries.size());
  double low = entries[0].held_out.loss;
  double high = low;
  for (NamedScore const& entry : entries) {
    mean.loss += entry.held_out.loss / count;
    mean.accuracy += entry.held_out.accuracy / count;
    low = std::min(low, entry.held_out.loss);
    high = std::max(high, entry.held_out.loss);
  }
  char text[160];
  std::snprintf(text, sizeof text,
                "  %-20s %-16s %8.4f           %9.2f %%   loss from %.4f to %.4f\n",
                "random patterns", ("mean of " + std::to_string(entries.size())).c_str(), mean.loss,
                100 * mean.accuracy, low, high);
  out << text;
}

}  // namespace detail

/// Losses are in nats, on held-out data, with their standard error.
inline void write_experiment(std::ostream& out, Experiment const& experiment) {
  using detail::write_line;
  out << "  rule                 pattern              loss    error   accuracy\n";
  for (NamedScore const* const entry : {&experiment.all_full, &experiment.random_selection}) {
    write_line(out, entry->rule, text_of(entry->choices), entry->held_out);
  }
  out << "search, step by step\n";
  for (std::size_t i = 0; i < experiment.steps.size(); ++i) {
    Step const& step = experiment.steps[i];
    write_line(out, std::to_string(i + 1) + " shared, + layer " + std::to_string(step.layer),
               text_of(step.choices), step.held_out);
  }
  for (Budget const& budget : experiment.budgets) {
    out << budget.full << " full layers\n";
    for (NamedScore const& entry : budget.rules) {
      write_line(out, entry.rule, text_of(entry.choices), entry.held_out);
    }
    detail::write_random_patterns(out, budget.random_patterns);
  }
}

}  // namespace small_dsa
