// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/cache.hpp>
#include <indexshare/detail/check.hpp>
#include <indexshare/element.hpp>
#include <indexshare/macros.hpp>
#include <indexshare/scale_recipe.hpp>

#include <cstddef>
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
    return from_float<T>(to_float(value));
  }
}

/// Formats whose rows are e4m3 codes with scales by a ScaleRecipe.
template <class Format>
inline constexpr bool has_e4m3_codes =
    std::is_same_v<Format, format::IndexKeyE4m3> || std::is_same_v<Format, format::LatentE4m3>;

/// Lanes of a row that share a scale, and where they lie: codes of lanes [first, first + count)
/// from `codes` on, and their scale.
struct ScaledLanes {
  index_t first;
  index_t count;
  std::byte* codes;
  std::byte* scale;
};

INDEXSHARE_HD constexpr index_t scales_of_a_row(format::IndexKeyE4m3 const&) noexcept { return 1; }
INDEXSHARE_HD constexpr index_t scales_of_a_row(format::LatentE4m3 const& layout) noexcept {
  return scale_bytes_of_latent(layout) / 4;
}

template <Space S>
INDEXSHARE_HD constexpr ScaledLanes scaled_lanes(
    CacheView<S, format::IndexKeyE4m3, std::byte> const& cache, index_t slot, index_t) noexcept {
  return {0, cache.lanes, cache.row(slot), scale_of(cache, slot)};
}
/// Tile `tile` of a latent row.
template <Space S>
INDEXSHARE_HD constexpr ScaledLanes scaled_lanes(
    CacheView<S, format::LatentE4m3, std::byte> const& cache, index_t slot, index_t tile) noexcept {
  index_t const first = tile * cache.format.tile;
  index_t const rest = cache.format.latent - first;
  std::byte* const row = cache.row(slot);
  return {first, rest < cache.format.tile ? rest : cache.format.tile, row + first,
          row + cache.format.latent + tile * 4};
}

/// Rotary lane `lane` of a latent row, counted from the row's first lane.
template <Space S>
INDEXSHARE_HD constexpr std::byte* place_of_rotary(
    CacheView<S, format::LatentE4m3, std::byte> const& cache, index_t slot, index_t lane) noexcept {
  index_t const latent = cache.format.latent;
  return cache.row(slot) + latent + scale_bytes_of_latent(cache.format) + (lane - latent) * 2;
}

/// What every back end asks of the arguments of `append_rows`.
template <Space S, class Row, class Cache>
Status check_append(Tensor<S, Row const, 2> const& rows, LengthView<S> const& positions,
                    LengthView<S> const& requests, PageTable<S> const& pages, Cache const& cache,
                    ScaleRecipe const& recipe = {}) noexcept {
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
       check_cache(names, cache, rows.extent(1), pages), check_distinct_rows(names, cache),
       check_scale_recipe(recipe)});
}

}  // namespace detail
}  // namespace v0
}  // namespace indexshare
