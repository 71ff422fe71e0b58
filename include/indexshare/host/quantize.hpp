// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/exec.hpp>
#include <indexshare/frontend/quantize.hpp>
#include <indexshare/host/frontend.hpp>

#include <algorithm>

namespace indexshare {
inline namespace v0 {

/// out(r, h, i) = q(r, h, i) / scale(r, h) in e4m3, rounded to nearest, and weights(r, h) *=
/// scale(r, h) in fp32, with scale = max(largest |q| of the head, amax_floor) / 448, as `recipe`
/// says. So `ReluDotIndexer<e4m3, ...>` scores as one with `q` would, up to the rounding of `out`.
/// Zeros give zeros and a finite weight. A lane that is NaN or infinite becomes NaN, and takes no
/// part in the scale. All back ends give the same bits.
///
/// @param q        [rows, heads, lanes] index queries, rotated, in the basis of the index keys
/// @param weights  [rows, heads] head weights with their constants folded in; changed in place
/// @param out      [rows, heads, lanes]; not the memory of `q`
/// Errors: bad_shape, bad_stride, missing_input, bad_value (amax_floor). Allocates nothing.
template <HostSpaceExecutor X>
Status quantize_queries(X const& x, Tensor<Space::host, float const, 3> const& q,
                        Tensor<Space::host, float, 2> const& weights,
                        Tensor<Space::host, e4m3, 3> const& out,
                        ScaleRecipe const& recipe = {}) noexcept {
  if (Status const status = detail::check_quantize(q, weights, out, recipe); !status.ok()) {
    return status;
  }
  detail::for_each_row(x, q.extent(0), [&](index_t row) noexcept {
    for (index_t h = 0; h < q.extent(1); ++h) {
      float amax = 0;
      for (index_t i = 0; i < q.extent(2); ++i) {
        amax = std::max(amax, detail::finite_magnitude(q(row, h, i)));
      }
      float const scale = detail::scale_of_lanes(amax, recipe);
      for (index_t i = 0; i < q.extent(2); ++i) {
        out(row, h, i) = detail::quantized(q(row, h, i), scale);
      }
      weights(row, h) *= scale;
    }
  });
  return {};
}

}  // namespace v0
}  // namespace indexshare
