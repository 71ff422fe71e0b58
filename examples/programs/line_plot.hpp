// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdio>
#include <iterator>
#include <string>
#include <string_view>
#include <vector>

#include "svg.hpp"

/// @file Lines over two axes, drawn into a rectangle of an SVG drawing: series with a legend,
/// ticks, titles, single marked points.

namespace programs {

enum class PlotScale {
  linear,
  log2,  ///< numbers above 0 only; ticks at powers of two
};

struct PlotAxis {
  std::string title{};
  PlotScale scale = PlotScale::linear;
  bool tokens = false;     ///< ticks are labelled 8K, 1M
  bool from_zero = false;  ///< linear: the axis begins at 0 even if no point is near it
};

/// A line through points in the order given; points that are not numbers, or have no place on a
/// log2 axis, are gaps.
struct PlotSeries {
  std::string name{};  ///< in the legend; empty: not in the legend
  std::vector<SvgPoint> points{};
  std::string colour{};
  std::string dashes{};   ///< as for SvgDrawing::line
  double stroke = 2;      ///< 0: no line
  double dot_radius = 0;  ///< 0: no dots at the points
};

/// One point with words beside it.
struct PlotMark {
  SvgPoint at;
  std::string label;
  std::string colour;
  double down = 4;  ///< from the point to the baseline of the words
};

struct LinePlot {
  std::string title;
  PlotAxis x;
  PlotAxis y;
  std::vector<PlotSeries> series;
  std::vector<PlotMark> marks;
};

/// A colour that is told apart from its neighbours, also without seeing red and green alike.
inline std::string_view plot_colour(std::size_t number) {
  static constexpr std::string_view colours[] = {"#0072b2", "#d55e00", "#009e73", "#cc79a7",
                                                 "#b8860b", "#56b4e9", "#444444"};
  return colours[number % std::size(colours)];
}

/// `8K`, `1M`: a number of tokens as it is counted, in units of 1024.
inline std::string token_label(double value) {
  constexpr double kibi = 1024;
  char text[40];
  if (value >= kibi * kibi)
    std::snprintf(text, sizeof text, "%.6gM", value / (kibi * kibi));
  else if (value >= kibi)
    std::snprintf(text, sizeof text, "%.6gK", value / kibi);
  else
    std::snprintf(text, sizeof text, "%.6g", value);
  return text;
}

inline std::string tick_label(double value) {
  char text[40];
  std::snprintf(text, sizeof text, "%.6g", value);
  return text;
}

namespace detail {

/// Where on an axis a value stands, and which values get a tick.
class PlotRange {
 public:
  PlotRange(PlotAxis const& axis, std::vector<double> const& values) : scale_(axis.scale) {
    bool any = false;
    for (double const value : values) {
      if (!has_place(value)) continue;
      double const at = position(value);
      low_ = any ? std::min(low_, at) : at;
      high_ = any ? std::max(high_, at) : at;
      any = true;
    }
    if (scale_ == PlotScale::linear && axis.from_zero) {
      low_ = std::min(low_, 0.0);
      high_ = std::max(high_, 0.0);
    }
    if (!(low_ < high_)) {  // nothing, or one value: something around it
      double const around = low_ == 0 ? 1 : std::abs(low_) / 2;
      low_ -= around;
      high_ = low_ + 2 * around;
    }
  }

  bool has_place(double value) const {
    return std::isfinite(value) && (scale_ == PlotScale::linear || value > 0);
  }

  /// 0 at the low end of the axis, 1 at the high end.
  double fraction(double value) const { return (position(value) - low_) / (high_ - low_); }

  /// Room at the ends, so that no line hides in the frame: up to a tick on a linear axis.
  void round_out() {
    if (scale_ == PlotScale::log2) {
      double const room = (high_ - low_) / 16;
      low_ -= room;
      high_ += room;
      return;
    }
    double const step = tick_step();
    low_ = step * std::floor(low_ / step + 1e-9);
    high_ = step * std::ceil(high_ / step - 1e-9);
  }

  std::vector<double> ticks() const {
    std::vector<double> at;
    double const step = tick_step();
    double const first = std::ceil(low_ / step - 1e-9) + 0.0;  // no -0
    for (double number = first; number * step <= high_ + 1e-9 * step; ++number) {
      double const place = number * step;
      at.push_back(scale_ == PlotScale::log2 ? std::exp2(place) : place);
    }
    return at;
  }

 private:
  double position(double value) const {
    return scale_ == PlotScale::log2 ? std::log2(value) : value;
  }

  /// 1, 2 or 5 times a power of ten, so that there are about six ticks. On a log2 axis a whole
  /// number of doublings, unless the axis has less than two of them.
  double tick_step() const {
    double const rough = (high_ - low_) / 6;
    if (scale_ == PlotScale::log2 && high_ - low_ >= 2) return std::max(1.0, std::round(rough));
    double const power = std::pow(10, std::floor(std::log10(rough)));
    for (double const factor : {1.0, 2.0, 5.0})
      if (rough <= factor * power * 1.01) return factor * power;
    return 10 * power;
  }

  PlotScale scale_;
  double low_ = 0;
  double high_ = 0;
};

inline PlotRange plot_range(LinePlot const& plot, PlotAxis const& axis, double SvgPoint::*lane) {
  std::vector<double> values;
  for (PlotSeries const& series : plot.series)
    for (SvgPoint const& point : series.points) values.push_back(point.*lane);
  for (PlotMark const& mark : plot.marks) values.push_back(mark.at.*lane);
  return PlotRange(axis, values);
}

/// Where things stand: the frame of the lines inside the rectangle of the whole plot.
struct PlotFrame {
  PlotRange x;
  PlotRange y;
  SvgPoint corner;  ///< of the whole plot
  double left;
  double right;
  double top;
  double bottom;

  bool has_place(SvgPoint const& value) const {
    return x.has_place(value.x) && y.has_place(value.y);
  }
  double across(double value) const { return left + x.fraction(value) * (right - left); }
  double down(double value) const { return bottom - y.fraction(value) * (bottom - top); }
  SvgPoint place(SvgPoint const& value) const { return {across(value.x), down(value.y)}; }
};

inline constexpr double plot_legend_line = 17;

inline PlotFrame plot_frame(LinePlot const& plot, SvgPoint corner, double width, double height) {
  auto const in_legend =
      std::count_if(plot.series.begin(), plot.series.end(),
                    [](PlotSeries const& series) { return !series.name.empty(); });
  PlotFrame frame{plot_range(plot, plot.x, &SvgPoint::x),
                  plot_range(plot, plot.y, &SvgPoint::y),
                  corner,
                  corner.x + 66,
                  corner.x + width - 18,
                  corner.y + (plot.title.empty() ? 12 : 34),
                  corner.y + height - 50 - plot_legend_line * static_cast<double>(in_legend)};
  frame.y.round_out();
  return frame;
}

inline void draw_axes(SvgDrawing& drawing, LinePlot const& plot, PlotFrame const& frame) {
  static constexpr std::string_view grid_colour = "#ddd";
  for (double const tick : frame.y.ticks()) {
    SvgPoint const grid[] = {{frame.left, frame.down(tick)}, {frame.right, frame.down(tick)}};
    drawing.line(grid, grid_colour, 1);
    drawing.text({frame.left - 6, frame.down(tick) + 4},
                 plot.y.tokens ? token_label(tick) : tick_label(tick), {.anchor = SvgAnchor::end});
  }
  for (double const tick : frame.x.ticks()) {
    SvgPoint const grid[] = {{frame.across(tick), frame.top}, {frame.across(tick), frame.bottom}};
    drawing.line(grid, grid_colour, 1);
    drawing.text({frame.across(tick), frame.bottom + 16},
                 plot.x.tokens ? token_label(tick) : tick_label(tick),
                 {.anchor = SvgAnchor::middle});
  }
  drawing.outline({frame.left, frame.top}, frame.right - frame.left, frame.bottom - frame.top,
                  "#222", 1);
  double const middle = (frame.left + frame.right) / 2;
  drawing.text({middle, frame.corner.y + 20}, plot.title,
               {.size = 15, .anchor = SvgAnchor::middle});
  drawing.text({middle, frame.bottom + 36}, plot.x.title,
               {.size = 13, .anchor = SvgAnchor::middle});
  drawing.text({frame.corner.x + 14, (frame.top + frame.bottom) / 2}, plot.y.title,
               {.size = 13, .anchor = SvgAnchor::middle, .turned = -90});
}

inline void draw_series(SvgDrawing& drawing, PlotSeries const& series, PlotFrame const& frame) {
  std::vector<SvgPoint> run;
  auto const finish_run = [&] {
    if (run.size() > 1 && series.stroke > 0)
      drawing.line(run, series.colour, series.stroke, series.dashes);
    run.clear();
  };
  for (SvgPoint const& point : series.points) {
    if (!frame.has_place(point)) {
      finish_run();
      continue;
    }
    run.push_back(frame.place(point));
    if (series.dot_radius > 0) drawing.dot(run.back(), series.dot_radius, series.colour);
  }
  finish_run();
}

/// The words go to the side where there is room.
inline void draw_mark(SvgDrawing& drawing, PlotMark const& mark, PlotFrame const& frame) {
  if (!frame.has_place(mark.at)) return;
  SvgPoint const at = frame.place(mark.at);
  bool const words_before = at.x > (frame.left + frame.right) / 2;
  drawing.dot(at, 4, mark.colour);
  drawing.text({at.x + (words_before ? -8 : 8), at.y + mark.down}, mark.label,
               {.anchor = words_before ? SvgAnchor::end : SvgAnchor::start, .colour = mark.colour});
}

inline void draw_legend(SvgDrawing& drawing, LinePlot const& plot, PlotFrame const& frame) {
  double line = frame.bottom + 54;
  for (PlotSeries const& series : plot.series) {
    if (series.name.empty()) continue;
    SvgPoint const sample[] = {{frame.left, line - 4}, {frame.left + 28, line - 4}};
    if (series.stroke > 0) drawing.line(sample, series.colour, series.stroke, series.dashes);
    if (series.dot_radius > 0)
      drawing.dot({frame.left + 14, line - 4}, series.dot_radius, series.colour);
    drawing.text({frame.left + 36, line}, series.name);
    line += plot_legend_line;
  }
}

}  // namespace detail

/// Draws `plot` into the rectangle at `corner`. The legend is below the x axis, one line for each
/// series that has a name: it covers no line of the plot.
inline void draw(SvgDrawing& drawing, LinePlot const& plot, SvgPoint corner, double width,
                 double height) {
  detail::PlotFrame const frame = detail::plot_frame(plot, corner, width, height);
  detail::draw_axes(drawing, plot, frame);
  for (PlotSeries const& series : plot.series) detail::draw_series(drawing, series, frame);
  for (PlotMark const& mark : plot.marks) detail::draw_mark(drawing, mark, frame);
  detail::draw_legend(drawing, plot, frame);
}

}  // namespace programs
