// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdio>
#include <span>
#include <string>
#include <string_view>

/// @file A drawing as SVG text: the few shapes that the programs' plots are made of. Lengths are
/// pixels, y grows downwards. A text may hold anything a file or a user says.

namespace programs {

struct SvgPoint {
  double x = 0;
  double y = 0;
};

/// Where a text stands relative to its point.
enum class SvgAnchor { start, middle, end };

struct SvgTextStyle {
  double size = 12;
  SvgAnchor anchor = SvgAnchor::start;
  std::string_view colour = "#222";
  double turned = 0;  ///< degrees, clockwise, about the point
};

class SvgDrawing {
 public:
  SvgDrawing(double width, double height) : width_(width), height_(height) {}

  void rectangle(SvgPoint corner, double width, double height, std::string_view fill) {
    body_ += "<rect x=\"" + length(corner.x) + "\" y=\"" + length(corner.y) + "\" width=\"" +
             length(width) + "\" height=\"" + length(height) + "\" fill=\"" + std::string(fill) +
             "\"/>\n";
  }

  void outline(SvgPoint corner, double width, double height, std::string_view colour,
               double stroke) {
    body_ += "<rect x=\"" + length(corner.x) + "\" y=\"" + length(corner.y) + "\" width=\"" +
             length(width) + "\" height=\"" + length(height) + "\" fill=\"none\" stroke=\"" +
             std::string(colour) + "\" stroke-width=\"" + length(stroke) + "\"/>\n";
  }

  /// @param dashes  lengths of strokes and gaps such as "6 3"; empty: one stroke
  void line(std::span<SvgPoint const> points, std::string_view colour, double stroke,
            std::string_view dashes = "") {
    body_ += "<polyline points=\"";
    for (SvgPoint const& point : points) body_ += length(point.x) + "," + length(point.y) + " ";
    body_ += "\" fill=\"none\" stroke=\"" + std::string(colour) + "\" stroke-width=\"" +
             length(stroke) + "\"";
    if (!dashes.empty()) body_ += " stroke-dasharray=\"" + std::string(dashes) + "\"";
    body_ += "/>\n";
  }

  void dot(SvgPoint centre, double radius, std::string_view fill) {
    body_ += "<circle cx=\"" + length(centre.x) + "\" cy=\"" + length(centre.y) + "\" r=\"" +
             length(radius) + "\" fill=\"" + std::string(fill) + "\"/>\n";
  }

  void text(SvgPoint at, std::string_view words, SvgTextStyle const& style = {}) {
    static constexpr std::string_view anchors[] = {"start", "middle", "end"};
    body_ += "<text x=\"" + length(at.x) + "\" y=\"" + length(at.y) + "\" font-size=\"" +
             length(style.size) + "\" fill=\"" + std::string(style.colour) + "\" text-anchor=\"" +
             std::string(anchors[static_cast<int>(style.anchor)]) + "\"";
    if (style.turned != 0)
      body_ += " transform=\"rotate(" + length(style.turned) + " " + length(at.x) + " " +
               length(at.y) + ")\"";
    body_ += ">" + escaped(words) + "</text>\n";
  }

  /// The whole file, on white.
  std::string str() const {
    std::string const size = length(width_) + "\" height=\"" + length(height_);
    return "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"" + size + "\" viewBox=\"0 0 " +
           length(width_) + " " + length(height_) +
           "\" font-family=\"sans-serif\">\n<rect width=\"" + size + "\" fill=\"white\"/>\n" +
           body_ + "</svg>\n";
  }

 private:
  static std::string length(double value) {
    char text[32];
    std::snprintf(text, sizeof text, "%.6g", value);
    return text;
  }

  static std::string escaped(std::string_view words) {
    std::string text;
    for (char const c : words) {
      switch (c) {
        case '&':
          text += "&amp;";
          break;
        case '<':
          text += "&lt;";
          break;
        case '>':
          text += "&gt;";
          break;
        default:
          text += static_cast<unsigned char>(c) < 0x20 ? '?' : c;
      }
    }
    return text;
  }

  double width_;
  double height_;
  std::string body_;
};

}  // namespace programs
