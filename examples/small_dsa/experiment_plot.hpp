// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "../programs/line_plot.hpp"
#include "../programs/svg.hpp"
#include "model.hpp"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cstddef>
#include <string>
#include <utility>
#include <vector>

/// @file Experiments as a drawing, from their JSON: loss against the number of shared layers, one
/// panel for each model.

namespace small_dsa {

namespace detail {

struct RuleLook {
  char const* rule;  ///< in the JSON
  char const* name;  ///< in the legend
  std::size_t colour;
  double beside;  ///< how far its points stand beside their place, so that none covers another
};

inline constexpr RuleLook rule_looks[] = {
    {"uniform_paper", "uniform, layer % r == 0 (paper)", 1, -0.18},
    {"uniform_patches", "uniform, (layer - 1) % r == 0 (patches)", 3, -0.18},
    {"similarity", "highest overlap with the source (dynamic programming)", 2, 0.18},
    {"random_where_shared", "searched, but random keys where it shares", 4, 0.09},
};

inline double loss_of(nlohmann::json const& entry) {
  return entry.at("held_out").at("loss").get<double>();
}

/// Points without a line: x is the number of shared layers, and `beside`.
inline programs::PlotSeries points_of(nlohmann::json const& experiment, char const* list,
                                      char const* rule, double beside) {
  programs::PlotSeries series;
  series.stroke = 0;
  for (auto const& budget : experiment.at("budgets")) {
    double const shared =
        experiment.at("layers").get<double>() - budget.at("full_layers").get<double>();
    for (auto const& entry : budget.at(list)) {
      if (entry.at("rule") == rule) series.points.push_back({shared + beside, loss_of(entry)});
    }
  }
  return series;
}

inline programs::PlotSeries searched_line(nlohmann::json const& experiment, bool held_out) {
  programs::PlotSeries series;
  auto const& all_full = experiment.at("all_full");
  series.points.push_back(
      {0, held_out ? loss_of(all_full) : all_full.at("calibration_loss").get<double>()});
  for (auto const& step : experiment.at("steps")) {
    series.points.push_back({step.at("shared_layers").get<double>(),
                             held_out ? loss_of(step) : step.at("calibration_loss").get<double>()});
  }
  series.name = held_out ? "searched, held-out data" : "searched, calibration data";
  series.colour = std::string(programs::plot_colour(0));
  series.dashes = held_out ? "" : "2 4";
  series.stroke = held_out ? 2 : 1.5;
  series.dot_radius = held_out ? 3 : 0;
  return series;
}

/// A straight line of no legend.
inline programs::PlotSeries rule_line(programs::SvgPoint from, programs::SvgPoint to,
                                      std::string name) {
  programs::PlotSeries series;
  series.name = std::move(name);
  series.points = {from, to};
  series.colour = "#777";
  series.dashes = "6 4";
  series.stroke = 1;
  return series;
}

inline programs::LinePlot panel(nlohmann::json const& experiment) {
  programs::LinePlot plot;
  auto const layers = experiment.at("layers").get<double>();
  plot.title = "Small model " + experiment.at("model").get<std::string>() +
               ": loss against the number of layers that share";
  plot.x.title = "shared layers of " + std::to_string(static_cast<int>(layers));
  plot.y.title = "loss, nats per query";
  plot.y.from_zero = true;
  auto const random = loss_of(experiment.at("random_selection"));
  plot.series.push_back(rule_line({0, random}, {layers - 1, random}, "random keys in every layer"));
  double highest = random;
  programs::PlotSeries random_patterns = points_of(experiment, "random_patterns", "random", -0.09);
  random_patterns.name = "random patterns";
  random_patterns.colour = "#aaa";
  random_patterns.dot_radius = 2;
  plot.series.push_back(random_patterns);
  for (RuleLook const& look : rule_looks) {
    programs::PlotSeries series = points_of(experiment, "rules", look.rule, look.beside);
    series.name = look.name;
    series.colour = std::string(programs::plot_colour(look.colour));
    series.dot_radius = 4;
    plot.series.push_back(series);
  }
  plot.series.push_back(searched_line(experiment, false));
  plot.series.push_back(searched_line(experiment, true));
  for (auto const& series : plot.series) {
    for (auto const& point : series.points) highest = std::max(highest, point.y);
  }
  highest *= 1.08;  // the words stand above everything else
  for (double const kept : {0.5, 0.25}) {
    double const shared = layers - kept * layers;
    plot.series.push_back(rule_line({shared, 0}, {shared, highest}, ""));
    plot.marks.push_back({{shared, highest}, kept == 0.5 ? "half" : "a quarter", "#555"});
  }
  return plot;
}

}  // namespace detail

/// One panel below the other. Errors: a JSON that no experiment wrote.
/// @param names  what errors call the experiments
inline Expected<std::string> experiment_svg(std::vector<nlohmann::json> const& experiments,
                                            std::vector<std::string> const& names) {
  constexpr double width = 760;
  constexpr double height = 560;
  programs::SvgDrawing drawing(width, height * static_cast<double>(experiments.size()));
  for (std::size_t i = 0; i < experiments.size(); ++i) {
    try {
      draw(drawing, detail::panel(experiments[i]), {0, height * static_cast<double>(i)}, width,
           height - 10);
    } catch (nlohmann::json::exception const& error) {
      return refuse(names[i] + ": no result of small_dsa experiment: " + error.what());
    }
  }
  return drawing.str();
}

}  // namespace small_dsa
