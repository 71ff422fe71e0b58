// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/cache.hpp>
#include <indexshare/detail/append.hpp>
#include <indexshare/detail/int8.hpp>
#include <indexshare/element.hpp>
#include <indexshare/exec.hpp>
#include <indexshare/scale_recipe.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

namespace indexshare {
inline namespace v0 {
namespace detail {

/// Why a token has no slot in the cache.
template <class Cache>
Status missing_slot(PageTable<Space::host> const& pages, Cache const& cache, index_t request,
                    index_t position) noexcept {
  index_t const lines = pages.contiguous() ? cache.blocks : pages.pages.extent(0);
  if (request < 0 || request >= lines) {
    return failure(Errc::bad_value, "request of a token to append, against the table's lines",
                   lines, request);
  }
  if (position < 0 || position >= pages.keys()) {
    return failure(Errc::bad_value, "position without a slot in the cache to append to",
                   pages.keys(), position);
  }
  return failure(Errc::bad_value,
                 "position without a slot: its page is no block of the cache to append to",
                 cache.blocks, pages.pages(request, position / pages.page_size));
}

/// All tokens have a slot, but for padding.
template <class Cache>
Status check_slots_of_tokens(LengthView<Space::host> const& positions,
                             LengthView<Space::host> const& requests,
                             PageTable<Space::host> const& pages, Cache const& cache) noexcept {
  for (index_t i = 0; i < positions.extent(0); ++i) {
    if (positions(i) == no_position) continue;
    if (!cache.has(pages.slot(requests(i), positions(i)))) {
      return missing_slot(pages, cache, requests(i), positions(i));
    }
  }
  return {};
}

// store_row(cache, slot, recipe, get) writes the row of which get(lane) is a lane.

template <class T, class Get>
void store_row(MutableCacheView<Space::host, format::Plain<T>> const& cache, index_t slot,
               ScaleRecipe const&, Get const& get) noexcept {
  T* const row = cache.row(slot);
  for (index_t lane = 0; lane < cache.lanes; ++lane) row[lane] = stored_as<T>(get(lane));
}

template <class Get>
void store_row(MutableCacheView<Space::host, format::IndexKeyInt8> const& cache, index_t slot,
               ScaleRecipe const&, Get const& get) noexcept {
  std::byte* const codes = cache.row(slot);
  float const scale = quantize_int8(
      cache.lanes, largest_key_code, get,
      [&](index_t lane, std::int8_t code) noexcept { codes[lane] = static_cast<std::byte>(code); });
  std::memcpy(scale_of(cache, slot), &scale, sizeof(scale));
}

template <class Get>
void store_codes(ScaledLanes const& lanes, ScaleRecipe const& recipe, Get const& get) noexcept {
  float amax = 0;
  for (index_t i = 0; i < lanes.count; ++i) {
    amax = std::max(amax, finite_magnitude(to_float(get(lanes.first + i))));
  }
  float const scale = scale_of_lanes(amax, recipe);
  for (index_t i = 0; i < lanes.count; ++i) {
    lanes.codes[i] = std::byte{quantized(to_float(get(lanes.first + i)), scale).bits};
  }
  store_unaligned(lanes.scale, scale);
}

template <class Get>
void store_row(MutableCacheView<Space::host, format::IndexKeyE4m3> const& cache, index_t slot,
               ScaleRecipe const& recipe, Get const& get) noexcept {
  store_codes(scaled_lanes(cache, slot, 0), recipe, get);
}

template <class Get>
void store_row(MutableCacheView<Space::host, format::LatentE4m3> const& cache, index_t slot,
               ScaleRecipe const& recipe, Get const& get) noexcept {
  for (index_t tile = 0; tile < scales_of_a_row(cache.format); ++tile) {
    store_codes(scaled_lanes(cache, slot, tile), recipe, get);
  }
  for (index_t lane = cache.format.latent; lane < cache.lanes; ++lane) {
    store_unaligned(place_of_rotary(cache, slot, lane), stored_as<bf16>(get(lane)));
  }
}

template <class Row, class Cache>
Status append(Tensor<Space::host, Row const, 2> const& rows,
              LengthView<Space::host> const& positions, LengthView<Space::host> const& requests,
              PageTable<Space::host> const& pages, Cache const& cache,
              ScaleRecipe const& recipe) noexcept {
  Status const status = check_append(rows, positions, requests, pages, cache, recipe);
  if (!status.ok()) return status;
  Status const places = check_slots_of_tokens(positions, requests, pages, cache);
  if (!places.ok()) return places;
  for (index_t i = 0; i < rows.extent(0); ++i) {
    if (positions(i) == no_position) continue;
    store_row(cache, pages.slot(requests(i), positions(i)), recipe,
              [&](index_t lane) noexcept { return rows(i, lane); });
  }
  return {};
}

}  // namespace detail

/// Writes token rows into a plain cache: index keys, or latent | rope rows. Called before the
/// layer's `run`, on every layer that owns the cache, also where the selection will be reused or
/// everything is selected without scoring.
///
/// @param rows       [tokens, lanes] in the cache's element type, or fp32: then rounded
///                   once by `from_float`, which a type of your own specialises
/// @param positions  [tokens] token number in its request; `no_position`: padding, not written
/// @param requests   [tokens] line of `pages`
/// Errors: bad_shape, bad_stride, missing_input; bad_value for a request or another position
/// that `pages` maps to no slot of the cache. Nothing is written on error.
template <HostSpaceExecutor X, Element Row, Element T>
requires(std::is_same_v<Row, T> || std::is_same_v<Row, float>) Status
    append_rows(X const&, Tensor<Space::host, Row const, 2> const& rows,
                LengthView<Space::host> const& positions, LengthView<Space::host> const& requests,
                PageTable<Space::host> const& pages,
                MutableCacheView<Space::host, format::Plain<T>> const& cache)
noexcept { return detail::append(rows, positions, requests, pages, cache, {}); }

/// The same into a cache of int8 codes, from fp32 rows: scale = largest magnitude of the row / 127
/// (of 2^-100, where all are below it), code = lane / scale, to nearest, ties to even. A row with a
/// lane that is NaN or infinite gets the scale NaN and codes of 0, so it scores NaN.
template <HostSpaceExecutor X>
Status append_rows(X const&, Tensor<Space::host, float const, 2> const& rows,
                   LengthView<Space::host> const& positions,
                   LengthView<Space::host> const& requests, PageTable<Space::host> const& pages,
                   MutableCacheView<Space::host, format::IndexKeyInt8> const& cache) noexcept {
  return detail::append(rows, positions, requests, pages, cache, {});
}

/// The same into a cache of e4m3 codes with scales, from rows of any element type: index keys with
/// one scale per row (IndexKeyE4m3), or latents with one per tile and rotary lanes rounded to bf16
/// (LatentE4m3). code = lane / scale, to nearest, ties to even, with the scale that `recipe` makes
/// of the lanes; so a lane is off by half a unit of its code. Zeros give zeros. A lane that is NaN
/// or infinite becomes NaN, and takes no part in the scale. All back ends write the same bytes.
///
/// Errors: as above, and bad_value for the recipe's floor.
template <HostSpaceExecutor X, Element Row, class Format>
requires detail::has_e4m3_codes<Format> Status
append_rows(X const&, Tensor<Space::host, Row const, 2> const& rows,
            LengthView<Space::host> const& positions, LengthView<Space::host> const& requests,
            PageTable<Space::host> const& pages,
            CacheView<Space::host, Format, std::byte> const& cache, ScaleRecipe const& recipe = {})
noexcept { return detail::append(rows, positions, requests, pages, cache, recipe); }

}  // namespace v0
}  // namespace indexshare
