// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/concepts.hpp>
#include <indexshare/topk/order.hpp>
#include <indexshare/topk/radix.hpp>

#include <algorithm>
#include <cstdint>

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
void collect(index_t length, index_t n, KeyAt const& key_at, position_t* out,
             index_t stride) noexcept {
  Cut const cut = find_cut(length, n, key_at);
  index_t ties = cut.ties;
  index_t written = 0;
  for (index_t s = 0; written < n; ++s) {
    std::uint32_t const key = key_at(s);
    if (key < cut.threshold || (key == cut.threshold && ties-- <= 0)) continue;
    out[written++ * stride] = static_cast<position_t>(s);
  }
}

}  // namespace detail

/// None: the histogram lies on the worker's stack (8 KiB).
template <class PF>
Result<WorkspaceSize> topk_workspace(HostExec<PF> const&, RadixTopK, Shape const&) noexcept {
  return WorkspaceSize{0};
}

/// Reads each score of a row four times, whatever the data; rows run in parallel.
template <class PF, Element Score>
Status topk_select(HostExec<PF> const& x, RadixTopK,
                   ScoreView<Space::host, Score const> const& scores,
                   LengthView<Space::host> const& lengths,
                   SelectionView<Space::host> const& out, Workspace) noexcept {
  index_t const width = out.indices.extent(1);
  x.parallel_for(scores.extent(0), [&](index_t begin, index_t end, int) noexcept {
    for (index_t row = begin; row < end; ++row) {
      index_t const length = clamp_length(lengths(row), scores.extent(1));
      index_t const chosen = std::min(width, length);
      if (length <= width) {
        for (index_t s = 0; s < length; ++s) out.indices(row, s) = static_cast<position_t>(s);
      } else {
        detail::collect(
            length, chosen,
            [&](index_t s) noexcept { return order_key(to_float(scores(row, s))); },
            &out.indices(row, 0), out.indices.stride(1));
      }
      for (index_t j = chosen; j < width; ++j) out.indices(row, j) = no_position;
      out.counts(row) = static_cast<position_t>(chosen);
    }
  });
  return {};
}

}  // namespace v0
}  // namespace indexshare
