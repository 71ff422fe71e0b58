// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/dims.hpp>
#include <indexshare/model_config.hpp>

/// @file What the counts of accounting/ are sums over: query tokens, and the keys that each of them
/// sees and attends to.

namespace indexshare {
inline namespace v0 {

/// Query tokens at positions first .. last - 1 of one sequence. The token at position t sees t + 1
/// keys, itself among them.
struct TokenRange {
  index_t first = 0;
  index_t last = 0;

  friend constexpr bool operator==(TokenRange const&, TokenRange const&) = default;
};

namespace detail {
/// t + 1 summed over t in [first, last). Exact up to last = 2^31.
constexpr index_t sum_of_lengths(index_t first, index_t last) noexcept {
  return (last - first) * (first + last + 1) / 2;
}
constexpr double real(index_t number) noexcept { return static_cast<double>(number); }
}  // namespace detail

/// Rows with the sums that costs depend on.
struct CountedRows {
  double rows = 0;
  double visible_keys = 0;   ///< over the rows, the keys that each sees: what an indexer scores
  double attended_keys = 0;  ///< over the rows, min(visible, index_topk)

  friend constexpr bool operator==(CountedRows const&, CountedRows const&) = default;
};

/// One token decoded at a length of `keys` visible keys. Precondition: keys >= 0.
constexpr CountedRows decoded_row(ModelConfig const& c, index_t keys) noexcept {
  return {1, detail::real(keys), detail::real(keys < c.index_topk ? keys : c.index_topk)};
}

/// A prefill of the tokens of `range`, summed row by row: the exact integers, not a mean length
/// times the number of rows. Precondition: 0 <= first <= last <= 2^31.
constexpr CountedRows prefilled_rows(ModelConfig const& c, TokenRange range) noexcept {
  // Up to `dense` a row attends to all it sees, from there on to index_topk keys.
  index_t const dense = range.last < c.index_topk    ? range.last
                        : range.first > c.index_topk ? range.first
                                                     : c.index_topk;
  index_t const attended =
      detail::sum_of_lengths(range.first, dense) + (range.last - dense) * c.index_topk;
  return {detail::real(range.last - range.first),
          detail::real(detail::sum_of_lengths(range.first, range.last)), detail::real(attended)};
}

}  // namespace v0
}  // namespace indexshare
