// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/topk/radix.hpp>

namespace indexshare {
inline namespace v0 {

/// Exact top-k by sorting the whole row, stably, then the winners by position: the same selection
/// as RadixTopK for several times the work and the memory. For comparison.
struct FullSortTopK {};

/// The checks of RadixTopK.
template <Space S, class Score>
Status check_inputs(FullSortTopK const&, Tensor<S, Score, 2> const& scores,
                    LengthView<S> const& lengths, SelectionView<S> const& out) noexcept {
  return check_inputs(RadixTopK{}, scores, lengths, out);
}

}  // namespace v0
}  // namespace indexshare
