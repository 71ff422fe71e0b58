// SPDX-License-Identifier: Apache-2.0
#include <catch2/catch_approx.hpp>
#include <catch2/catch_test_macros.hpp>

#include <cmath>
#include <cstdlib>
#include <limits>
#include <string>
#include <vector>

#include "line_plot.hpp"
#include "svg.hpp"

using namespace programs;
using Catch::Approx;

namespace {

std::string drawn(LinePlot const& plot) {
  SvgDrawing drawing(400, 300);
  draw(drawing, plot, {0, 0}, 400, 300);
  return drawing.str();
}

std::size_t times(std::string const& text, std::string const& part) {
  std::size_t count = 0;
  for (std::size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1))
    ++count;
  return count;
}

/// The points of the first line in `colour`.
std::vector<SvgPoint> line_in(std::string const& text, std::string const& colour) {
  std::size_t const end = text.find("\" fill=\"none\" stroke=\"" + colour);
  REQUIRE(end != std::string::npos);
  std::size_t const begin = text.rfind("points=\"", end) + 8;
  std::vector<SvgPoint> points;
  char const* at = text.c_str() + begin;
  while (at < text.c_str() + end) {
    char* next = nullptr;
    double const x = std::strtod(at, &next);
    double const y = std::strtod(next + 1, &next);
    points.push_back({x, y});
    at = next + 1;
  }
  return points;
}

LinePlot plot_of(std::vector<SvgPoint> const& points, PlotScale x = PlotScale::linear,
                 PlotScale y = PlotScale::linear) {
  LinePlot plot;
  plot.x = {.title = "along", .scale = x};
  plot.y = {.title = "up", .scale = y};
  plot.series = {{.name = "a < b", .points = points, .colour = "#123456"}};
  return plot;
}

}  // namespace

TEST_CASE("a linear plot puts points where their axes say") {
  std::string const text = drawn(plot_of({{0, 0}, {5, 50}, {10, 100}}));
  auto const points = line_in(text, "#123456");
  REQUIRE(points.size() == 3);
  CHECK(points[0].x < points[1].x);
  CHECK(points[0].y > points[1].y);  // y grows downwards
  CHECK(points[1].x == Approx((points[0].x + points[2].x) / 2));
  CHECK(points[1].y == Approx((points[0].y + points[2].y) / 2));
  for (char const* words : {">along<", ">up<", ">a &lt; b<", ">0<", ">10<", ">100<"})
    CHECK(times(text, words) >= 1);
  CHECK(times(text, ">-0<") == 0);
}

TEST_CASE("on a log2 axis a doubling is always as far; tokens are labelled in units of 1024") {
  LinePlot plot = plot_of({{8192, 1}, {16384, 2}, {32768, 4}, {1048576, 3}}, PlotScale::log2);
  plot.x.tokens = true;
  std::string const text = drawn(plot);
  auto const points = line_in(text, "#123456");
  REQUIRE(points.size() == 4);
  CHECK(points[1].x - points[0].x == Approx(points[2].x - points[1].x).epsilon(1e-4));
  CHECK(points[3].x - points[0].x == Approx(7 * (points[1].x - points[0].x)).epsilon(1e-4));
  CHECK(times(text, ">8K<") == 1);
  CHECK(times(text, ">1M<") == 1);
  plot.x.tokens = false;
  CHECK(times(drawn(plot), ">8192<") == 1);
}

TEST_CASE("points that are no numbers or have no place are gaps") {
  double const nan = std::numeric_limits<double>::quiet_NaN();
  std::string const text =
      drawn(plot_of({{1, 1}, {2, 2}, {3, nan}, {4, 4}, {5, 5}, {6, nan}, {7, 7}}));
  CHECK(times(text, "stroke=\"#123456\"") == 2 + 1);  // two runs and the legend
  CHECK(times(text, "nan") == 0);
  std::string const log =
      drawn(plot_of({{1, 0}, {2, 2}, {3, 8}}, PlotScale::linear, PlotScale::log2));
  CHECK(line_in(log, "#123456").size() == 2);
  CHECK(times(log, "inf") == 0);
}

TEST_CASE("plots of nothing, of one point and of a flat line are drawn") {
  for (auto const& points : std::vector<std::vector<SvgPoint>>{
           {}, {{3, 4}}, {{1, 0}, {2, 0}}, {{1, -7}, {2, -7}}, {{1e-9, 1e12}, {2e-9, 1e12}}})
    for (PlotScale const scale : {PlotScale::linear, PlotScale::log2}) {
      std::string const text = drawn(plot_of(points, scale, scale));
      CHECK(text.ends_with("</svg>\n"));
      CHECK(times(text, "nan") + times(text, "inf") == 0);
    }
}

TEST_CASE("an axis from zero begins there; marks have their words") {
  LinePlot plot = plot_of({{1, 90}, {2, 100}});
  CHECK(times(drawn(plot), ">0<") == 0);
  plot.y.from_zero = true;
  plot.marks = {{{2, 100}, "here & now", "#654321"}};
  std::string const text = drawn(plot);
  CHECK(times(text, ">0<") == 1);
  CHECK(times(text, ">here &amp; now<") == 1);
  CHECK(times(text, "<circle") == 1);
}
