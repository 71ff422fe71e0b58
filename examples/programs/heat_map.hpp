// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "svg.hpp"

/// @file A square matrix of numbers in [0, 1] as an SVG heat map.

namespace programs {

/// Rows and columns [first, last] of a heat map, which a box is drawn about.
struct HeatMapBox {
  std::size_t first = 0;
  std::size_t last = 0;
};

/// What is drawn. The diagonal is left grey: an overlap of a layer with itself says nothing, and
/// the colours are spread over the rest.
struct HeatMap {
  std::string title;
  std::vector<std::string> notes;     ///< lines under the title
  std::string axis;                   ///< what rows and columns are
  std::string scale;                  ///< what the colours are
  std::vector<std::int32_t> numbers;  ///< of rows and columns
  std::vector<double> values;         ///< [numbers, numbers], row-major
  std::vector<HeatMapBox> boxes;
};

namespace heat_map_detail {

inline constexpr double margin = 20;
inline constexpr double axis_width = 56;  // title and numbers
inline constexpr double line_height = 18;
inline constexpr double bar_width = 18;
inline constexpr double bar_room = 110;  // with its gap and numbers

/// Sides of the cells, in pixels: large for few, and never too small to tell apart.
inline double cell_side(std::size_t cells) {
  return std::clamp(std::floor(900 / static_cast<double>(std::max<std::size_t>(cells, 1))), 10.0,
                    44.0);
}

/// A range of values in whole tenths that has all but the diagonal.
struct ValueRange {
  double low = 0;
  double high = 1;

  double part(double value) const { return std::clamp((value - low) / (high - low), 0.0, 1.0); }
};

inline ValueRange range_of(HeatMap const& map) {
  std::size_t const size = map.numbers.size();
  double low = 1;
  double high = 0;
  for (std::size_t i = 0; i < map.values.size(); ++i) {
    if (i / size == i % size) continue;
    low = std::min(low, map.values[i]);
    high = std::max(high, map.values[i]);
  }
  if (low > high) return {};
  constexpr double tolerance = 1e-9;  // 0.3 is not three tenths to the last bit
  low = std::floor(low * 10 + tolerance) / 10;
  high = std::max(std::ceil(high * 10 - tolerance) / 10, low + 0.1);
  return {low, high};
}

/// Light to dark blue, readable without colour vision too.
/// @source ColorBrewer 2.0, "Blues" with 9 classes
inline std::array<double, 3> colour_at(double part) {
  static constexpr std::array<double, 3> stops[] = {
      {247, 251, 255}, {222, 235, 247}, {198, 219, 239}, {158, 202, 225}, {107, 174, 214},
      {66, 146, 198},  {33, 113, 181},  {8, 81, 156},    {8, 48, 107}};
  constexpr std::size_t last = std::size(stops) - 1;
  double const place = part * static_cast<double>(last);
  auto const stop = std::min(static_cast<std::size_t>(place), last - 1);
  std::array<double, 3> colour{};
  for (std::size_t i = 0; i < 3; ++i) {
    colour[i] = stops[stop][i] +
                (stops[stop + 1][i] - stops[stop][i]) * (place - static_cast<double>(stop));
  }
  return colour;
}

inline std::string hex(std::array<double, 3> const& colour) {
  char text[8];
  std::snprintf(text, sizeof text, "#%02x%02x%02x", static_cast<unsigned>(colour[0]) & 255u,
                static_cast<unsigned>(colour[1]) & 255u, static_cast<unsigned>(colour[2]) & 255u);
  return text;
}

/// `62` for 0.62: two digits fit a small cell.
inline std::string hundredths(double value) { return std::to_string(std::lround(value * 100)); }

/// The largest value of the map, as it stands in a cell and as the number it is: `62: 0.62`.
inline std::string digits_note(HeatMap const& map) {
  std::size_t const size = map.numbers.size();
  double largest = 0;
  for (std::size_t i = 0; i < map.values.size(); ++i) {
    if (i / size != i % size) largest = std::max(largest, map.values[i]);
  }
  char text[16];
  std::snprintf(text, sizeof text, "%.2f", static_cast<double>(std::lround(largest * 100)) / 100);
  return hundredths(largest) + ": " + text;
}

inline std::string one_digit(double value) {
  char text[16];
  std::snprintf(text, sizeof text, "%.1f", value);
  return text;
}

class HeatMapDrawing {
 public:
  explicit HeatMapDrawing(HeatMap const& map)
      : map_(map),
        range_(range_of(map)),
        cell_(cell_side(map.numbers.size())),
        side_(cell_ * static_cast<double>(map.numbers.size())),
        left_(margin + axis_width),
        top_(margin + line_height * static_cast<double>(2 + map.notes.size()) + 34),
        drawing_(std::max(left_ + side_ + bar_room, widest_text()), top_ + side_ + margin) {}

  std::string str() {
    draw_texts();
    draw_cells();
    draw_numbers();
    draw_boxes();
    draw_bar();
    return drawing_.str();
  }

 private:
  static constexpr double title_size = 16;
  static constexpr double note_size = 12;
  static constexpr double number_size = 11;
  static constexpr double smallest_digits = 16;  // side of a cell that two digits fit

  double at(std::size_t row, std::size_t column) const {
    return map_.values[row * map_.numbers.size() + column];
  }
  double x_of(std::size_t column) const { return left_ + cell_ * static_cast<double>(column); }
  double y_of(std::size_t row) const { return top_ + cell_ * static_cast<double>(row); }

  /// Room for the title and notes, from the usual width of a sans-serif letter.
  double widest_text() const {
    double width = 0.58 * title_size * static_cast<double>(map_.title.size());
    for (std::string const& note : map_.notes) {
      width = std::max(width, 0.54 * note_size * static_cast<double>(note.size()));
    }
    return width + 2 * margin;
  }

  void draw_texts() {
    double y = margin + title_size;
    drawing_.text({margin, y}, map_.title, {.size = title_size});
    for (std::string const& note : map_.notes) {
      y += line_height;
      drawing_.text({margin, y}, note, {.size = note_size, .colour = "#555"});
    }
    double const middle = side_ / 2;
    drawing_.text({left_ + middle, top_ - 24}, map_.axis, {.anchor = SvgAnchor::middle});
    drawing_.text({margin + 12, top_ + middle}, map_.axis,
                  {.anchor = SvgAnchor::middle, .turned = -90});
  }

  void draw_cells() {
    std::size_t const size = map_.numbers.size();
    bool const digits = cell_ >= smallest_digits;
    for (std::size_t row = 0; row < size; ++row) {
      for (std::size_t column = 0; column < size; ++column) {
        bool const diagonal = row == column;
        double const part = range_.part(at(row, column));
        drawing_.rectangle({x_of(column), y_of(row)}, cell_, cell_,
                           diagonal ? "#d9d9d9" : hex(colour_at(part)));
        if (!digits || diagonal) continue;
        double const text = std::min(cell_ * 0.55, 14.0);
        drawing_.text({x_of(column) + cell_ / 2, y_of(row) + cell_ / 2 + text * 0.36},
                      hundredths(at(row, column)),
                      {.size = text,
                       .anchor = SvgAnchor::middle,
                       .colour = part > 0.55 ? "#ffffff" : "#222222"});
      }
    }
  }

  /// Every so many numbers that they do not run into each other.
  std::int32_t number_step() const {
    for (std::int32_t const step : {1, 2, 5, 10, 20}) {
      if (cell_ * step >= 19) return step;
    }
    return 50;
  }

  void draw_numbers() {
    std::int32_t const step = number_step();
    for (std::size_t i = 0; i < map_.numbers.size(); ++i) {
      if (map_.numbers[i] % step != 0) continue;
      std::string const number = std::to_string(map_.numbers[i]);
      drawing_.text({x_of(i) + cell_ / 2, top_ - 7}, number,
                    {.size = number_size, .anchor = SvgAnchor::middle});
      drawing_.text({left_ - 7, y_of(i) + cell_ / 2 + 4}, number,
                    {.size = number_size, .anchor = SvgAnchor::end});
    }
  }

  void draw_boxes() {
    for (HeatMapBox const& box : map_.boxes) {
      double const side = cell_ * static_cast<double>(box.last - box.first + 1);
      drawing_.outline({x_of(box.first), y_of(box.first)}, side, side, "#e6550d",
                       cell_ < smallest_digits ? 1.8 : 2.5);
    }
  }

  void draw_bar() {
    double const x = left_ + side_ + 30;
    double const height = std::min(side_, 320.0);
    constexpr int steps = 100;
    for (int i = 0; i < steps; ++i) {
      double const part = (i + 0.5) / steps;
      // a little higher than a step, or hairlines show between them
      drawing_.rectangle({x, top_ + height * (1 - (i + 1.0) / steps)}, bar_width,
                         height / steps + (i > 0 ? 0.6 : 0), hex(colour_at(part)));
    }
    drawing_.outline({x, top_}, bar_width, height, "#888", 0.8);
    auto const tenths = static_cast<int>(std::lround((range_.high - range_.low) * 10));
    for (int i = 0; i <= tenths; ++i) {
      double const y = top_ + height * (1 - static_cast<double>(i) / tenths);
      SvgPoint const tick[] = {{x + bar_width, y}, {x + bar_width + 5, y}};
      drawing_.line(tick, "#444", 1);
      drawing_.text({x + bar_width + 9, y + 4}, one_digit(range_.low + i * 0.1),
                    {.size = number_size});
    }
    drawing_.text({x, top_ - 10}, map_.scale, {.size = note_size});
    if (cell_ >= smallest_digits && map_.numbers.size() > 1)
      drawing_.text({x, top_ + height + 20}, digits_note(map_),
                    {.size = number_size, .colour = "#555"});
  }

  HeatMap const& map_;
  ValueRange range_;
  double cell_;
  double side_;
  double left_;
  double top_;
  SvgDrawing drawing_;
};

}  // namespace heat_map_detail

/// The drawing as a file's text. Cells have two digits, hundredths, where they are large enough.
inline std::string heat_map_svg(HeatMap const& map) {
  return heat_map_detail::HeatMapDrawing(map).str();
}

}  // namespace programs
