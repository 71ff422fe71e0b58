// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/exec.hpp>
#include <indexshare/frontend/rotary.hpp>
#include <indexshare/frontend/weights.hpp>
#include <indexshare/host/frontend_rows.hpp>
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
  detail::for_each_row(x, in.extent(0), [&](index_t row) noexcept {
    detail::rms_norm_row(
        in.extent(1), [&](index_t i) noexcept { return in(row, i); }, gain, eps,
        [&](index_t i) noexcept -> float& { return out(row, i); });
  });
  return {};
}

/// out = (in - mean) / sqrt(variance + eps) * gain + bias, row by row; the variance is that of the
/// row, divided by its width.
template <HostSpaceExecutor X>
Status layer_norm(X const& x, Tensor<Space::host, float const, 2> const& in,
                  VectorView<Space::host> const& gain, VectorView<Space::host> const& bias,
                  double eps, Tensor<Space::host, float, 2> const& out) noexcept {
  detail::for_each_row(x, in.extent(0), [&](index_t row) noexcept {
    detail::layer_norm_row(
        in.extent(1), [&](index_t i) noexcept { return in(row, i); }, gain, bias, eps,
        [&](index_t i) noexcept -> float& { return out(row, i); });
  });
  return {};
}

/// Turns the lanes [rows, heads, 2 * pairs] of each row by its position's angles; a pair (a, b)
/// becomes (a cos - b sin, a sin + b cos) in the same two lanes.
template <HostSpaceExecutor X>
Status rotate(X const& x, Tensor<Space::host, float const, 3> const& in,
              PositionView<Space::host> const& positions, RotaryFrequencies const& frequencies,
              RopeLayout layout, Tensor<Space::host, float, 3> const& out) noexcept {
  detail::for_each_row(x, in.extent(0), [&](index_t row) noexcept {
    detail::rotate_row(
        in.extent(1), positions(row), frequencies, layout,
        [&](index_t h, index_t i) noexcept { return in(row, h, i); },
        [&](index_t h, index_t i) noexcept -> float& { return out(row, h, i); });
  });
  return {};
}

/// Sylvester's Hadamard transform of the lanes of each head, times lanes^-0.5: orthogonal and its
/// own inverse. Precondition: the number of lanes is a power of two.
/// @source DeepSeek-V3.2-Exp inference/model.py, rotate_activation, commit 3b99a53
template <HostSpaceExecutor X>
Status hadamard(X const& x, Tensor<Space::host, float, 3> const& lanes) noexcept {
  detail::for_each_row(x, lanes.extent(0), [&](index_t row) noexcept {
    for (index_t h = 0; h < lanes.extent(1); ++h) {
      detail::hadamard_row(lanes.extent(2),
                           [&](index_t i) noexcept -> float& { return lanes(row, h, i); });
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
