// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/dims.hpp>

/// @file Products of one query row's heads with decoded key rows. Heads lie side by side in panels
/// of a fixed width, so that a compiler can keep them in vector registers without being asked to
/// reorder a sum.

namespace indexshare {
inline namespace v0 {
namespace detail {

inline constexpr index_t panel_width = 16;

constexpr index_t padded_to_panel(index_t n) noexcept {
  return (n + panel_width - 1) / panel_width * panel_width;
}

/// panels[p][lane][h] = value(p * panel_width + h, lane), zero past the last head.
template <class Value>
void pack_panels(index_t heads, index_t lanes, float* panels, Value const& value) noexcept {
  for (index_t first = 0; first < heads; first += panel_width) {
    float* const panel = panels + first * lanes;
    for (index_t lane = 0; lane < lanes; ++lane) {
      for (index_t h = 0; h < panel_width; ++h) {
        panel[lane * panel_width + h] = first + h < heads ? value(first + h, lane) : 0.0f;
      }
    }
  }
}

/// Dot products of one panel of heads with two key rows.
struct PanelPair {
  float of[2][panel_width];
};

/// out.of[i][h] = sum over lanes, ascending, of panel[lane][h] * keys[i][lane]. `keys` holds two
/// rows of `lanes` floats.
inline void dot_pair(float const* panel, float const* keys, index_t lanes,
                     PanelPair& out) noexcept {
  float first[panel_width] = {};
  float second[panel_width] = {};
  for (index_t lane = 0; lane < lanes; ++lane) {
    float const* const heads = panel + lane * panel_width;
    float const a = keys[lane];
    float const b = keys[lanes + lane];
    for (index_t h = 0; h < panel_width; ++h) first[h] += heads[h] * a;
    for (index_t h = 0; h < panel_width; ++h) second[h] += heads[h] * b;
  }
  for (index_t h = 0; h < panel_width; ++h) out.of[0][h] = first[h];
  for (index_t h = 0; h < panel_width; ++h) out.of[1][h] = second[h];
}

}  // namespace detail
}  // namespace v0
}  // namespace indexshare
