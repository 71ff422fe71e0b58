// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/cache.hpp>
#include <indexshare/detail/append.hpp>
#include <indexshare/detail/int8.hpp>
#include <indexshare/element.hpp>
#include <indexshare/exec.hpp>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

namespace indexshare {
inline namespace v0 {
namespace detail {

/// Calls write(i, slot) for each token i, if all of them have a slot.
template <class Rows, class Cache, class Write>
Status append_each(Rows const& rows, LengthView<Space::host> const& positions,
                   LengthView<Space::host> const& requests, PageTable<Space::host> const& pages,
                   Cache const& cache, Write const& write) noexcept {
  if (Status const status = check_append(rows, positions, requests, pages, cache); !status.ok()) {
    return status;
  }
  for (index_t i = 0; i < rows.extent(0); ++i) {
    if (!cache.has(pages.slot(requests(i), positions(i)))) {
      return failure(Errc::bad_value, "position without a slot in the cache to append to",
                     pages.keys(), positions(i));
    }
  }
  for (index_t i = 0; i < rows.extent(0); ++i) write(i, pages.slot(requests(i), positions(i)));
  return {};
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
  return detail::append_each(rows, positions, requests, pages, cache,
                             [&](index_t i, position_t slot) noexcept {
                               T* const row = cache.row(slot);
                               for (index_t lane = 0; lane < cache.lanes; ++lane) {
                                 row[lane] = detail::stored_as<T>(rows(i, lane));
                               }
                             });
}

/// The same into a cache of int8 codes, from fp32 rows: scale = largest magnitude of the row / 127
/// (of 2^-100, where all are below it), code = lane / scale, to nearest, ties to even. A row with a
/// lane that is NaN or infinite gets the scale NaN and codes of 0, so it scores NaN.
template <HostSpaceExecutor X>
Status append_rows(X const&, Tensor<Space::host, float const, 2> const& rows,
                   LengthView<Space::host> const& positions,
                   LengthView<Space::host> const& requests, PageTable<Space::host> const& pages,
                   MutableCacheView<Space::host, format::IndexKeyInt8> const& cache) noexcept {
  return detail::append_each(rows, positions, requests, pages, cache,
                             [&](index_t i, position_t slot) noexcept {
                               std::byte* const codes = cache.row(slot);
                               float const scale = detail::quantize_int8(
                                   cache.lanes, detail::largest_key_code,
                                   [&](index_t lane) noexcept { return rows(i, lane); },
                                   [&](index_t lane, std::int8_t code) noexcept {
                                     codes[lane] = static_cast<std::byte>(code);
                                   });
                               std::memcpy(detail::scale_of(cache, slot), &scale, sizeof(scale));
                             });
}

}  // namespace v0
}  // namespace indexshare
