// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/detail/check.hpp>
#include <indexshare/views.hpp>

namespace indexshare {
inline namespace v0 {

/// Exact top-k by radix selection: finds the k-th best score digit by digit, then collects in
/// position order, so the output is ascending without a sort. Deterministic; ties go to the lower
/// position; no candidate buffer that a plateau could overflow.
struct RadixTopK {};

/// The checks that every back end shares, for its `topk_select`.
/// Errors: bad_shape, bad_stride, missing_input; `what` names the extent.
template <Space S, class Score>
Status check_inputs(RadixTopK const&, Tensor<S, Score, 2> const& scores,
                    LengthView<S> const& lengths, SelectionView<S> const& out) noexcept {
  using namespace detail;
  return first_failure({
      check_extent("rows of the lengths against the scores", scores.extent(0), lengths.extent(0)),
      check_extent("rows of the selection against the scores", scores.extent(0),
                   out.indices.extent(0)),
      check_extent("rows of the selection's counts", scores.extent(0), out.counts.extent(0)),
      check_at_least("width of the selection", 1, out.indices.extent(1)),
      check_readable("scores", scores),
      check_readable("lengths", lengths),
      check_writable("indices of the selection", out.indices),
      check_writable("counts of the selection", out.counts),
  });
}

}  // namespace v0
}  // namespace indexshare
