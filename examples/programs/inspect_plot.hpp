// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/accounting.hpp>
#include <indexshare/dims.hpp>
#include <indexshare/io/config.hpp>
#include <indexshare/model_config.hpp>
#include <indexshare/share_plan.hpp>

#include <cmath>
#include <cstdio>
#include <functional>
#include <string>
#include <vector>

#include "inspect_cost_options.hpp"
#include "inspect_costs.hpp"
#include "line_plot.hpp"
#include "svg.hpp"

namespace programs {

/// What one decoded token costs at a length, with an indexer in every layer, with those of the
/// plan, and with none.
struct CostAtLength {
  double all_full = 0;
  double shared = 0;
  double without_indexers = 0;
};

/// A panel of costs from `first` to `last` visible keys. Both axes are of doublings: the distance
/// of two lines is their ratio, which is written beside some points.
inline LinePlot cost_panel(std::string const& title, std::string const& unit, double first,
                           double last, std::string const& schedule,
                           std::function<CostAtLength(double)> const& cost) {
  LinePlot plot;
  plot.title = title;
  plot.x = {.title = "visible keys", .scale = PlotScale::log2, .tokens = true};
  plot.y = {.title = unit, .scale = PlotScale::log2};
  plot.series = {{.name = "an indexer in every layer", .colour = std::string(plot_colour(1))},
                 {.name = schedule, .colour = std::string(plot_colour(0))},
                 {.name = "what no schedule changes", .colour = "#777", .dashes = "6 4"}};
  constexpr int steps = 8;  // for each doubling
  int const count = static_cast<int>(std::ceil(std::log2(last / first) * steps));
  for (int step = 0; step <= count; ++step) {
    double const keys = step == count ? last : std::round(first * std::exp2(step * 1.0 / steps));
    CostAtLength const at = cost(keys);
    plot.series[0].points.push_back({keys, at.all_full});
    plot.series[1].points.push_back({keys, at.shared});
    plot.series[2].points.push_back({keys, at.without_indexers});
    bool const two_doublings = (count - step) % (2 * steps) == 0 && count - step <= 4 * steps;
    if (!two_doublings) continue;
    char ratio[40];
    std::snprintf(ratio, sizeof ratio, "%.2fx less", at.all_full / at.shared);
    // The lines rise: there is room above them on the left and below them on the right.
    bool const left_half = step < count / 2;
    plot.marks.push_back(
        {{keys, at.shared}, ratio, std::string(plot_colour(0)), left_half ? 14.0 : -2.0});
  }
  return plot;
}

/// FLOPs and bytes of one decoded token against its length, from 8K keys to `longest`.
/// Preconditions: can_count_complete, can_count_cache_bytes, longest >= 16K.
inline std::string cost_drawing(indexshare::io::LoadedConfig const& config, CacheForms const& forms,
                                indexshare::index_t longest) {
  indexshare::ModelConfig const& model = config.model;
  indexshare::SharePlan const& plan = config.plan;
  double const all = plan.num_layers();
  double const full = plan.full_layers().count();
  auto const row = [&](double keys) {
    return indexshare::decoded_row(model, static_cast<indexshare::index_t>(keys));
  };
  auto const flops = [&](double keys) {
    auto const count = accounted_flops(indexshare::Accounting::complete_absorbed, model, row(keys));
    return CostAtLength{count.total(all) / 1e9, count.total(full) / 1e9, count.fixed / 1e9};
  };
  auto const bytes = [&](double keys) {
    auto const moved = [&](double full_layers) {
      return moved_bytes(model, full_layers, row(keys), forms.kv, forms.index_key).total() / 1e9;
    };
    return CostAtLength{moved(all), moved(full), moved(0)};
  };
  std::string const schedule = "this schedule: " + std::to_string(plan.full_layers().count()) +
                               " of " + std::to_string(plan.num_layers()) + " layers";
  constexpr double first = 8 * 1024;
  constexpr double width = 560;
  constexpr double height = 470;
  SvgDrawing drawing(2 * width, height);
  auto const last = static_cast<double>(longest);
  draw(drawing,
       cost_panel("FLOPs per decoded token, complete count, absorbed core", "GFLOP", first, last,
                  schedule, flops),
       {0, 0}, width, height);
  draw(drawing,
       cost_panel("bytes moved per decoded token", "GB: " + forms_text(forms) + ", fp32 scores",
                  first, last, schedule, bytes),
       {width, 0}, width, height);
  return drawing.str();
}

}  // namespace programs
