// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/concepts.hpp>
#include <indexshare/topk/order.hpp>
#include <indexshare/topk/radix.hpp>

#include <algorithm>
#include <cstdint>
#include <numeric>

namespace indexshare {
inline namespace v0 {
namespace detail {

/// The n best of a row, as: every key above `threshold`, and the first `ties` that equal it.
struct Cut {
  std::uint32_t threshold;
  index_t ties;
};

/// Finds the cut digit by digit (11 + 11 + 10 bits of the order key), from the most significant.
/// `key_at(s)` gives the order key of position s; 1 <= n <= length.
template <class KeyAt>
Cut find_cut(index_t length, index_t n, KeyAt const& key_at) noexcept {
  struct Digit {
    int shift;
    int bits;
  };
  constexpr Digit digits[] = {{21, 11}, {10, 11}, {0, 10}};
  std::int32_t histogram[1 << 11];
  std::uint32_t prefix = 0;
  std::uint32_t prefix_mask = 0;
  index_t wanted = n;
  for (Digit const digit : digits) {
    std::uint32_t const digit_mask = (std::uint32_t{1} << digit.bits) - 1;
    std::fill_n(histogram, digit_mask + 1, 0);
    for (index_t s = 0; s < length; ++s) {
      std::uint32_t const key = key_at(s);
      if ((key & prefix_mask) == prefix) ++histogram[(key >> digit.shift) & digit_mask];
    }
    std::uint32_t value = digit_mask;
    while (histogram[value] < wanted) wanted -= histogram[value--];
    prefix |= value << digit.shift;
    prefix_mask |= digit_mask << digit.shift;
  }
  return {prefix, wanted};
}

/// Writes the positions of a row's n best keys in ascending order.
template <class KeyAt>
void collect(index_t length, index_t n, KeyAt const& key_at, position_t* out) noexcept {
  Cut const cut = find_cut(length, n, key_at);
  index_t ties = cut.ties;
  index_t written = 0;
  for (index_t s = 0; written < n; ++s) {
    std::uint32_t const key = key_at(s);
    if (key < cut.threshold || (key == cut.threshold && ties-- <= 0)) continue;
    out[written++] = static_cast<position_t>(s);
  }
}

}  // namespace detail

/// None: the histogram lies on the worker's stack (8 KiB).
template <class PF>
Result<WorkspaceSize> topk_workspace(HostExec<PF> const&, RadixTopK, Shape const&) noexcept {
  return WorkspaceSize{0};
}

/// Reads each score of a row four times, whatever the data; rows run in parallel.
/// Errors: bad_shape, bad_stride, missing_input for `scores` [rows, keys], `lengths` [rows] and
/// `out` [rows, k]; their innermost strides are 1.
template <class PF, Element Score>
Status topk_select(HostExec<PF> const& x, RadixTopK policy,
                   ScoreView<Space::host, Score const> const& scores,
                   LengthView<Space::host> const& lengths, SelectionView<Space::host> const& out,
                   Workspace) noexcept {
  if (Status const status = check_inputs(policy, scores, lengths, out); !status.ok()) return status;
  index_t const width = out.indices.extent(1);
  x.parallel_for(scores.extent(0), [&](index_t begin, index_t end, int) noexcept {
    for (index_t row = begin; row < end; ++row) {
      index_t const length = clamp_length(lengths(row), scores.extent(1));
      index_t const chosen = std::min(width, length);
      position_t* const indices = out.indices.data_handle() + row * out.indices.stride(0);
      if (length <= width) {
        std::iota(indices, indices + length, position_t{0});
      } else {
        Score const* const best = scores.data_handle() + row * scores.stride(0);
        detail::collect(
            length, chosen, [best](index_t s) noexcept { return order_key(to_float(best[s])); },
            indices);
      }
      std::fill(indices + chosen, indices + width, no_position);
      out.counts(row) = static_cast<position_t>(chosen);
    }
  });
  return {};
}

}  // namespace v0
}  // namespace indexshare
