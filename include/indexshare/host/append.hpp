// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/cache.hpp>
#include <indexshare/detail/check.hpp>
#include <indexshare/element.hpp>
#include <indexshare/exec.hpp>

#include <type_traits>

namespace indexshare {
inline namespace v0 {

namespace detail {

template <class T, class Row>
constexpr T stored_as(Row value) noexcept {
  if constexpr (std::is_same_v<T, Row>) {
    return value;
  } else {
    return from_float<T>(value);
  }
}

}  // namespace detail

/// Writes token rows into a plain cache: index keys, or latent | rope rows. Called before the
/// layer's `run`, on every layer that owns the cache, also where the selection will be reused or
/// everything is selected without scoring.
///
/// @param rows       [tokens, lanes] in the cache's element type, or fp32: then rounded
///                   once by `from_float`, which a type of your own specialises
/// @param positions  [tokens] token number in its request
/// @param requests   [tokens] line of `pages`
/// Errors: bad_shape, bad_stride, missing_input; bad_value for a position that `pages` maps to no
/// slot of the cache. Nothing is written on error.
template <HostSpaceExecutor X, Element Row, Element T>
requires(std::is_same_v<Row, T> || std::is_same_v<Row, float>) Status
    append_rows(X const&, Tensor<Space::host, Row const, 2> const& rows,
                LengthView<Space::host> const& positions, LengthView<Space::host> const& requests,
                PageTable<Space::host> const& pages,
                MutableCacheView<Space::host, format::Plain<T>> const& cache)
noexcept {
  constexpr detail::CacheNames names{"memory of the cache to append to",
                                     "lanes of the rows to append",
                                     "block size of the cache against the table's page_size",
                                     "blocks of the cache (slots are int32)",
                                     "strides of the cache",
                                     "format of the cache"};
  if (Status const status = detail::first_failure(
          {detail::check_extent("positions of the rows to append", rows.extent(0),
                                positions.extent(0)),
           detail::check_extent("requests of the rows to append", rows.extent(0),
                                requests.extent(0)),
           detail::check_readable("rows to append", rows),
           detail::check_readable("positions of the rows to append", positions),
           detail::check_readable("requests of the rows to append", requests),
           detail::check_table(
               {"page_size of the page table", "pages of the page table", "page table"}, pages),
           detail::check_cache(names, cache, rows.extent(1), pages),
           detail::check_distinct_rows(names, cache)});
      !status.ok()) {
    return status;
  }
  for (index_t i = 0; i < rows.extent(0); ++i) {
    if (!cache.has(pages.slot(requests(i), positions(i)))) {
      return failure(Errc::bad_value, "position without a slot in the cache to append to",
                     pages.keys(), positions(i));
    }
  }
  for (index_t i = 0; i < rows.extent(0); ++i) {
    T* const row = cache.row(pages.slot(requests(i), positions(i)));
    for (index_t lane = 0; lane < cache.lanes; ++lane)
      row[lane] = detail::stored_as<T>(rows(i, lane));
  }
  return {};
}

}  // namespace v0
}  // namespace indexshare
