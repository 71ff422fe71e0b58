// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/exec.hpp>
#include <indexshare/frontend/rotary.hpp>
#include <indexshare/frontend/weights.hpp>
#include <indexshare/host/rows.hpp>
#include <indexshare/status.hpp>
#include <indexshare/views.hpp>

#include <cmath>

/// @file The front end's steps between its matrix products, on the host. All compute in fp32, with
/// sums in double; inputs and outputs may be the same memory, and do not overlap otherwise. Extents
/// are checked by their callers (frontend/steps.hpp). A back end for another space overloads the
/// same functions.

namespace indexshare {
inline namespace v0 {
/// out = in * gain / sqrt(mean(in^2) + eps), row by row.
template <HostSpaceExecutor X>
Status rms_norm(X const& x, Tensor<Space::host, float const, 2> const& in,
                VectorView<Space::host> const& gain, double eps,
                Tensor<Space::host, float, 2> const& out) noexcept {
  index_t const n = in.extent(1);
  detail::for_each_row(x, in.extent(0), [&](index_t row) noexcept {
    double squares = 0;
    for (index_t i = 0; i < n; ++i) squares += double{in(row, i)} * double{in(row, i)};
    auto const factor = static_cast<float>(1 / std::sqrt(squares / static_cast<double>(n) + eps));
    for (index_t i = 0; i < n; ++i) out(row, i) = in(row, i) * factor * gain(i);
  });
  return {};
}

/// out = (in - mean) / sqrt(variance + eps) * gain + bias, row by row; the variance is that of the
/// row, divided by its width.
template <HostSpaceExecutor X>
Status layer_norm(X const& x, Tensor<Space::host, float const, 2> const& in,
                  VectorView<Space::host> const& gain, VectorView<Space::host> const& bias,
                  double eps, Tensor<Space::host, float, 2> const& out) noexcept {
  index_t const n = in.extent(1);
  detail::for_each_row(x, in.extent(0), [&](index_t row) noexcept {
    double sum = 0;
    for (index_t i = 0; i < n; ++i) sum += double{in(row, i)};
    double const mean = sum / static_cast<double>(n);
    double squares = 0;
    for (index_t i = 0; i < n; ++i) {
      double const deviation = double{in(row, i)} - mean;
      squares += deviation * deviation;
    }
    double const factor = 1 / std::sqrt(squares / static_cast<double>(n) + eps);
    for (index_t i = 0; i < n; ++i) {
      out(row, i) = static_cast<float>((double{in(row, i)} - mean) * factor * double{gain(i)} +
                                       double{bias(i)});
    }
  });
  return {};
}

/// Turns the lanes [rows, heads, 2 * pairs] of each row by its position's angles; a pair (a, b)
/// becomes (a cos - b sin, a sin + b cos) in the same two lanes.
template <HostSpaceExecutor X>
Status rotate(X const& x, Tensor<Space::host, float const, 3> const& in,
              PositionView<Space::host> const& positions, RotaryFrequencies const& frequencies,
              RopeLayout layout, Tensor<Space::host, float, 3> const& out) noexcept {
  index_t const pairs = frequencies.pairs;
  index_t const step = layout == RopeLayout::interleaved ? 2 : 1;       // from pair to pair
  index_t const apart = layout == RopeLayout::interleaved ? 1 : pairs;  // within a pair
  detail::for_each_row(x, in.extent(0), [&](index_t row) noexcept {
    for (index_t i = 0; i < pairs; ++i) {
      float const angle = static_cast<float>(positions(row)) * frequencies.inverse[i];
      float const cosine = std::cos(angle) * frequencies.amplitude;
      float const sine = std::sin(angle) * frequencies.amplitude;
      for (index_t h = 0; h < in.extent(1); ++h) {
        float const a = in(row, h, i * step);
        float const b = in(row, h, i * step + apart);
        out(row, h, i * step) = a * cosine - b * sine;
        out(row, h, i * step + apart) = a * sine + b * cosine;
      }
    }
  });
  return {};
}

/// Sylvester's Hadamard transform of the lanes of each head, times lanes^-0.5: orthogonal and its
/// own inverse. Precondition: the number of lanes is a power of two.
/// @source DeepSeek-V3.2-Exp inference/model.py, rotate_activation, commit 3b99a53
template <HostSpaceExecutor X>
Status hadamard(X const& x, Tensor<Space::host, float, 3> const& lanes) noexcept {
  index_t const n = lanes.extent(2);
  auto const factor = static_cast<float>(1 / std::sqrt(static_cast<double>(n)));
  detail::for_each_row(x, lanes.extent(0), [&](index_t row) noexcept {
    for (index_t h = 0; h < lanes.extent(1); ++h) {
      for (index_t apart = 1; apart < n; apart *= 2) {
        for (index_t i = 0; i < n; ++i) {
          if ((i & apart) != 0) continue;
          float const a = lanes(row, h, i);
          float const b = lanes(row, h, i + apart);
          lanes(row, h, i) = a + b;
          lanes(row, h, i + apart) = a - b;
        }
      }
      for (index_t i = 0; i < n; ++i) lanes(row, h, i) *= factor;
    }
  });
  return {};
}

/// out = in * factor. Copies where the factor is 1 and the memory differs.
template <HostSpaceExecutor X>
Status scale(X const& x, Tensor<Space::host, float const, 3> const& in, float factor,
             Tensor<Space::host, float, 3> const& out) noexcept {
  detail::for_each_row(x, in.extent(0), [&](index_t row) noexcept {
    for (index_t h = 0; h < in.extent(1); ++h) {
      for (index_t i = 0; i < in.extent(2); ++i) out(row, h, i) = in(row, h, i) * factor;
    }
  });
  return {};
}

/// out = values * sigmoid(gates).
template <HostSpaceExecutor X>
Status gate(X const& x, Tensor<Space::host, float const, 3> const& values,
            Tensor<Space::host, float const, 3> const& gates,
            Tensor<Space::host, float, 3> const& out) noexcept {
  detail::for_each_row(x, values.extent(0), [&](index_t row) noexcept {
    for (index_t h = 0; h < values.extent(1); ++h) {
      for (index_t i = 0; i < values.extent(2); ++i) {
        out(row, h, i) = values(row, h, i) / (1.0f + std::exp(-gates(row, h, i)));
      }
    }
  });
  return {};
}

}  // namespace v0
}  // namespace indexshare
