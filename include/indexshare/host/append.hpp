// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/cache.hpp>
#include <indexshare/detail/append.hpp>
#include <indexshare/element.hpp>
#include <indexshare/exec.hpp>

#include <type_traits>

namespace indexshare {
inline namespace v0 {

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
  if (Status const status = detail::check_append(rows, positions, requests, pages, cache);
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
