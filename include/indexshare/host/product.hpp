// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/element.hpp>
#include <indexshare/exec.hpp>
#include <indexshare/frontend/product.hpp>
#include <indexshare/host/panel.hpp>

#include <algorithm>

namespace indexshare {
inline namespace v0 {
namespace detail {

/// Products of a panel of rows with all of a range of outputs, a chunk of inputs at a time, so that
/// what is packed fits the stack and the first-level cache.
struct ProductBlocking {
  static constexpr index_t inputs = 256;
  static constexpr index_t outputs = 64;  ///< per task
};

/// Lanes [first, first + count) of rows o and o + 1 of `w`; zeros where there is no such row.
template <class T>
void decode_pair(MatrixView<Space::host, T> const& w, index_t o, index_t first, index_t count,
                 float* out) noexcept {
  for (index_t which = 0; which < 2; ++which, out += count) {
    if (o + which < w.extent(0)) {
      for (index_t i = 0; i < count; ++i) out[i] = to_float(w(o + which, first + i));
    } else {
      std::fill_n(out, count, 0.0f);
    }
  }
}

/// Rows [first_row, first_row + panel) times outputs [first_out, last_out).
template <class T>
void multiply_panel(Tensor<Space::host, float const, 2> const& in,
                    MatrixView<Space::host, T> const& w, Tensor<Space::host, float, 2> const& out,
                    index_t first_row, index_t first_out, index_t last_out) noexcept {
  float packed[panel_width * ProductBlocking::inputs];
  float weights[2 * ProductBlocking::inputs];
  index_t const rows = std::min(panel_width, in.extent(0) - first_row);
  for (index_t r = 0; r < rows; ++r) {
    for (index_t o = first_out; o < last_out; ++o) out(first_row + r, o) = 0;
  }
  for (index_t lane = 0; lane < in.extent(1); lane += ProductBlocking::inputs) {
    index_t const count = std::min(ProductBlocking::inputs, in.extent(1) - lane);
    pack_panels(rows, count, packed,
                [&](index_t r, index_t i) noexcept { return in(first_row + r, lane + i); });
    for (index_t o = first_out; o < last_out; o += 2) {
      PanelPair sums;
      decode_pair(w, o, lane, count, weights);
      dot_pair(packed, weights, count, sums);
      for (index_t which = 0; which < std::min<index_t>(2, last_out - o); ++which) {
        for (index_t r = 0; r < rows; ++r) out(first_row + r, o + which) += sums.of[which][r];
      }
    }
  }
}

}  // namespace detail

/// Matrix products in plain loops. HostExec: fp32, inputs summed in ascending order within chunks
/// of 256, then chunks in ascending order; a row's bits depend on nothing else. ReferenceExec:
/// double, rounded once. Allocates nothing.
struct PlainProduct {
  template <class PF, Element T>
  Status operator()(HostExec<PF> const& x, Tensor<Space::host, float const, 2> const& in,
                    MatrixView<Space::host, T> const& w,
                    Tensor<Space::host, float, 2> const& out) const noexcept {
    constexpr index_t outputs = detail::ProductBlocking::outputs;
    index_t const panels = (in.extent(0) + detail::panel_width - 1) / detail::panel_width;
    index_t const blocks = (w.extent(0) + outputs - 1) / outputs;
    x.parallel_for(panels * blocks, [&](index_t begin, index_t end, int) noexcept {
      for (index_t task = begin; task < end; ++task) {
        index_t const first = task % blocks * outputs;
        detail::multiply_panel(in, w, out, task / blocks * detail::panel_width, first,
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
