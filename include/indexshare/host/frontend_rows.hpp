// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/dims.hpp>
#include <indexshare/frontend/rotary.hpp>
#include <indexshare/frontend/weights.hpp>
#include <indexshare/model_config.hpp>

#include <cmath>

/// @file The front end's arithmetic on one row of the host. `in(i)` is a lane to read, `out(i)` the
/// same lane to write; they may be the same memory.

namespace indexshare {
inline namespace v0 {
namespace detail {

template <class In, class Out>
void rms_norm_row(index_t n, In const& in, VectorView<Space::host> const& gain, double eps,
                  Out const& out) noexcept {
  double squares = 0;
  for (index_t i = 0; i < n; ++i) squares += double{in(i)} * double{in(i)};
  auto const factor = static_cast<float>(1 / std::sqrt(squares / static_cast<double>(n) + eps));
  for (index_t i = 0; i < n; ++i) out(i) = in(i)*factor * gain(i);
}

template <class In, class Out>
void layer_norm_row(index_t n, In const& in, VectorView<Space::host> const& gain,
                    VectorView<Space::host> const& bias, double eps, Out const& out) noexcept {
  double sum = 0;
  for (index_t i = 0; i < n; ++i) sum += double{in(i)};
  double const mean = sum / static_cast<double>(n);
  double squares = 0;
  for (index_t i = 0; i < n; ++i) {
    double const deviation = double{in(i)} - mean;
    squares += deviation * deviation;
  }
  double const factor = 1 / std::sqrt(squares / static_cast<double>(n) + eps);
  for (index_t i = 0; i < n; ++i) {
    out(i) =
        static_cast<float>((double{in(i)} - mean) * factor * double{gain(i)} + double{bias(i)});
  }
}

/// Rotates `heads` heads of a row; lanes are in(head, i) and out(head, i).
template <class In, class Out>
void rotate_row(index_t heads, position_t position, RotaryFrequencies const& frequencies,
                RopeLayout layout, In const& in, Out const& out) noexcept {
  index_t const pairs = frequencies.pairs;
  index_t const step = layout == RopeLayout::interleaved ? 2 : 1;       // from pair to pair
  index_t const apart = layout == RopeLayout::interleaved ? 1 : pairs;  // within a pair
  for (index_t i = 0; i < pairs; ++i) {
    float const angle = static_cast<float>(position) * frequencies.inverse[i];
    float const cosine = std::cos(angle) * frequencies.amplitude;
    float const sine = std::sin(angle) * frequencies.amplitude;
    for (index_t h = 0; h < heads; ++h) {
      float const a = in(h, i * step);
      float const b = in(h, i * step + apart);
      out(h, i * step) = a * cosine - b * sine;
      out(h, i * step + apart) = a * sine + b * cosine;
    }
  }
}

/// lane(i) is a lane to read and write.
template <class Lane>
void hadamard_row(index_t n, Lane const& lane) noexcept {
  auto const factor = static_cast<float>(1 / std::sqrt(static_cast<double>(n)));
  for (index_t apart = 1; apart < n; apart *= 2) {
    for (index_t i = 0; i < n; ++i) {
      if ((i & apart) != 0) continue;
      float const a = lane(i);
      float const b = lane(i + apart);
      lane(i) = a + b;
      lane(i + apart) = a - b;
    }
  }
  for (index_t i = 0; i < n; ++i) lane(i) *= factor;
}

}  // namespace detail
}  // namespace v0
}  // namespace indexshare
