// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/cache.hpp>
#include <indexshare/detail/check.hpp>
#include <indexshare/element.hpp>
#include <indexshare/macros.hpp>

#include <type_traits>

namespace indexshare {
inline namespace v0 {
namespace detail {

/// A value as it lies in the cache: itself, or rounded once.
template <class T, class Row>
INDEXSHARE_HD constexpr T stored_as(Row value) noexcept {
  if constexpr (std::is_same_v<T, Row>) {
    return value;
  } else {
    return from_float<T>(value);
  }
}

/// What every back end asks of the arguments of `append_rows`.
template <Space S, class Row, class Cache>
Status check_append(Tensor<S, Row const, 2> const& rows, LengthView<S> const& positions,
                    LengthView<S> const& requests, PageTable<S> const& pages,
                    Cache const& cache) noexcept {
  constexpr CacheNames names{"memory of the cache to append to",
                             "lanes of the cache against the rows to append",
                             "block size of the cache against the table's page_size",
                             "blocks of the cache (slots are int32)",
                             "strides of the cache",
                             "format of the cache"};
  return first_failure(
      {check_extent("positions of the rows to append", rows.extent(0), positions.extent(0)),
       check_extent("requests of the rows to append", rows.extent(0), requests.extent(0)),
       check_readable("rows to append", rows),
       check_readable("positions of the rows to append", positions),
       check_readable("requests of the rows to append", requests),
       check_table({"page_size of the page table", "pages of the page table", "page table"}, pages),
       check_cache(names, cache, rows.extent(1), pages), check_distinct_rows(names, cache)});
}

}  // namespace detail
}  // namespace v0
}  // namespace indexshare
