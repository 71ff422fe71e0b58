// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/element.hpp>
#include <indexshare/exec.hpp>
#include <indexshare/frontend/product.hpp>
#include <indexshare/host/decode.hpp>
#include <indexshare/host/isa.hpp>
#include <indexshare/host/simd/foreach.hpp>

#include <algorithm>

namespace indexshare {
inline namespace v0 {
namespace detail {

/// Products of a panel of rows with a range of outputs, a chunk of inputs at a time, so that what
/// is packed and decoded fits the stack and the first-level caches.
struct ProductBlocking {
  static constexpr index_t inputs = 256;
  static constexpr index_t rows = 24;      ///< of weights that are decoded together: whole tiles
  static constexpr index_t outputs = 240;  ///< per task: each packs the panel again
};

/// Inputs [first, first + count) of output o's weights, which may lie transposed.
template <class T>
void widen_weights(WidenKernels const& widen, MatrixView<Space::host, T> const& w, index_t o,
                   index_t first, index_t count, float* out) noexcept {
  if (w.stride(1) == 1) {
    widen_row(widen, &w(o, first), count, out);
  } else {
    for (index_t i = 0; i < count; ++i) out[i] = to_float(w(o, first + i));
  }
}

/// Outputs [first_out, last_out) of rows [first_row, first_row + panel_width).
template <class T>
void multiply_panel(HostIsa isa, Tensor<Space::host, float const, 2> const& in,
                    MatrixView<Space::host, T> const& w, Tensor<Space::host, float, 2> const& out,
                    index_t first_row, index_t first_out, index_t last_out) noexcept {
  constexpr index_t inputs = ProductBlocking::inputs;
  PanelKernels const& panels = kernels<PanelKernels>(isa);
  WidenKernels const& widen = kernels<WidenKernels>(isa);
  constexpr index_t together = ProductBlocking::rows;
  float panel[inputs * panel_width];
  float weights[together * inputs];
  float totals[ProductBlocking::outputs * panel_width] = {};
  index_t const rows = std::min(panel_width, in.extent(0) - first_row);
  for (index_t lane = 0; lane < in.extent(1); lane += inputs) {
    index_t const count = std::min(inputs, in.extent(1) - lane);
    panels.pack(&in(first_row, lane), in.stride(0), rows, count, panel);
    for (index_t first = first_out; first < last_out; first += together) {
      index_t const n = std::min(together, last_out - first);
      for (index_t i = 0; i < n; ++i) {
        widen_weights(widen, w, first + i, lane, count, weights + i * inputs);
      }
      float sums[together * panel_width] = {};
      panels.multiply(panel, weights, inputs, n, count, sums);
      float* const total = totals + (first - first_out) * panel_width;
      for (index_t i = 0; i < n * panel_width; ++i) total[i] += sums[i];
    }
  }
  for (index_t o = first_out; o < last_out; ++o) {
    for (index_t r = 0; r < rows; ++r) {
      out(first_row + r, o) = totals[(o - first_out) * panel_width + r];
    }
  }
}

}  // namespace detail

/// Matrix products without a library. HostExec: fp32, inputs summed in ascending order within
/// chunks of 256, then chunks in ascending order; a row's bits depend on nothing else.
/// ReferenceExec: double, rounded once. Allocates nothing. Errors: unsupported (the instruction set
/// of the executor).
struct PlainProduct {
  template <class PF, Element T>
  Status operator()(HostExec<PF> const& x, Tensor<Space::host, float const, 2> const& in,
                    MatrixView<Space::host, T> const& w,
                    Tensor<Space::host, float, 2> const& out) const noexcept {
    if (Status const status = detail::check_executor(x); !status.ok()) return status;
    constexpr index_t outputs = detail::ProductBlocking::outputs;
    index_t const panels = (in.extent(0) + detail::panel_width - 1) / detail::panel_width;
    index_t const blocks = (w.extent(0) + outputs - 1) / outputs;
    x.parallel_for(panels * blocks, [&](index_t begin, index_t end, int) noexcept {
      for (index_t task = begin; task < end; ++task) {
        index_t const first = task % blocks * outputs;
        detail::multiply_panel(x.isa, in, w, out, task / blocks * detail::panel_width, first,
                               std::min(first + outputs, w.extent(0)));
      }
    });
    return {};
  }

  template <Element T>
  Status operator()(ReferenceExec const&, Tensor<Space::host, float const, 2> const& in,
                    MatrixView<Space::host, T> const& w,
                    Tensor<Space::host, float, 2> const& out) const noexcept {
    for (index_t r = 0; r < in.extent(0); ++r) {
      for (index_t o = 0; o < w.extent(0); ++o) {
        double sum = 0;
        for (index_t i = 0; i < w.extent(1); ++i) {
          sum += double{to_float(w(o, i))} * double{in(r, i)};
        }
        out(r, o) = static_cast<float>(sum);
      }
    }
    return {};
  }
};
static_assert(MatrixProduct<PlainProduct, HostExec<>, bf16> &&
              MatrixProduct<PlainProduct, ReferenceExec, float>);

}  // namespace v0
}  // namespace indexshare
