// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/cache.hpp>
#include <indexshare/cuda/detail/lines.cuh>
#include <indexshare/cuda/detail/warp.cuh>
#include <indexshare/cuda/exec.cuh>
#include <indexshare/detail/append.hpp>
#include <indexshare/element.hpp>
#include <indexshare/scale_recipe.hpp>

#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace indexshare {
inline namespace v0 {
namespace detail {

// A row is stored in parts, a warp each: parts_of_row(cache) of them, and store_part(cache, slot,
// part, member, recipe, get) on every thread of a warp, of which get(lane) gives any lane.

template <class T>
INDEXSHARE_HD constexpr index_t parts_of_row(
    MutableCacheView<Space::device, format::Plain<T>> const& cache) noexcept {
  return Lines{1, 1, cache.lanes}.stretches();
}
template <class T, class Get>
__device__ void store_part(MutableCacheView<Space::device, format::Plain<T>> const& cache,
                           index_t slot, index_t part, index_t member, ScaleRecipe const&,
                           Get const& get) {
  T* const row = cache.row(slot);
  index_t const begin = part * Lines::stretch;
  LaneRange const lanes{begin + member, min(begin + Lines::stretch, cache.lanes)};
  lanes.for_each([&](index_t lane) { row[lane] = stored_as<T>(get(lane)); });
}

/// In one piece where the place allows it, as in every published layout.
template <class T>
__device__ void store_at(std::byte* target, T const& value) {
  if (reinterpret_cast<std::uintptr_t>(target) % sizeof(T) == 0) {
    *reinterpret_cast<T*>(target) = value;
  } else {
    store_unaligned(target, value);
  }
}

template <class Get>
__device__ void store_codes(ScaledLanes const& lanes, index_t member, ScaleRecipe const& recipe,
                            Get const& get) {
  LaneRange const own{member, lanes.count};
  float amax = 0;
  own.for_each(
      [&](index_t i) { amax = fmaxf(amax, finite_magnitude(to_float(get(lanes.first + i)))); });
  float const scale = scale_of_lanes(largest_of_warp(amax), recipe);
  own.for_each([&](index_t i) {
    lanes.codes[i] = std::byte{quantized(to_float(get(lanes.first + i)), scale).bits};
  });
  if (member == 0) store_at(lanes.scale, scale);
}

INDEXSHARE_HD constexpr index_t parts_of_row(
    MutableCacheView<Space::device, format::IndexKeyE4m3> const&) noexcept {
  return 1;
}
template <class Get>
__device__ void store_part(MutableCacheView<Space::device, format::IndexKeyE4m3> const& cache,
                           index_t slot, index_t, index_t member, ScaleRecipe const& recipe,
                           Get const& get) {
  store_codes(scaled_lanes(cache, slot, 0), member, recipe, get);
}

/// The tiles, and then the rotary lanes.
INDEXSHARE_HD constexpr index_t parts_of_row(
    MutableCacheView<Space::device, format::LatentE4m3> const& cache) noexcept {
  return scales_of_a_row(cache.format) + 1;
}
template <class Get>
__device__ void store_part(MutableCacheView<Space::device, format::LatentE4m3> const& cache,
                           index_t slot, index_t part, index_t member, ScaleRecipe const& recipe,
                           Get const& get) {
  if (part < scales_of_a_row(cache.format)) {
    store_codes(scaled_lanes(cache, slot, part), member, recipe, get);
    return;
  }
  LaneRange const rotary{cache.format.latent + member, cache.lanes};
  rotary.for_each([&](index_t lane) {
    store_at(place_of_rotary(cache, slot, lane), stored_as<bf16>(get(lane)));
  });
}

template <class Row, class Cache>
struct AppendRows {
  Tensor<Space::device, Row const, 2> rows;
  LengthView<Space::device> positions;
  LengthView<Space::device> requests;
  PageTable<Space::device> pages;
  Cache cache;
  ScaleRecipe recipe;

  __device__ void operator()(index_t i, index_t part, LaneRange members) const {
    index_t const slot = pages.slot(requests(i), positions(i));
    if (!cache.has(slot)) return;
    store_part(cache, slot, part, members.first, recipe,
               [&](index_t lane) { return rows(i, lane); });
  }
};

template <class Row, class Cache>
Status append(CudaExec const& x, Tensor<Space::device, Row const, 2> const& rows,
              LengthView<Space::device> const& positions, LengthView<Space::device> const& requests,
              PageTable<Space::device> const& pages, Cache const& cache,
              ScaleRecipe const& recipe) noexcept {
  if (Status const status = check_append(rows, positions, requests, pages, cache, recipe);
      !status.ok()) {
    return status;
  }
  return for_each_line(x, "append_rows",
                       {rows.extent(0), parts_of_row(cache), LaneRange::warp_threads},
                       AppendRows<Row, Cache>{rows, positions, requests, pages, cache, recipe});
}

}  // namespace detail

/// Writes token rows into a plain cache: index keys, or latent | rope rows. Called before the
/// layer's `run`, on every layer that owns the cache, also where the selection will be reused or
/// everything is selected without scoring. Only enqueues; can be captured.
///
/// A position that `pages` maps to no slot of the cache cannot be refused here, since it is only
/// known on the device: its row is skipped and nothing is written for it. Of two rows with the same
/// slot either may remain.
///
/// @param rows       [tokens, lanes] in the cache's element type, or fp32: then rounded
///                   once by `from_float`, which a type of your own specialises
/// @param positions  [tokens] token number in its request
/// @param requests   [tokens] line of `pages`
/// Errors: bad_shape, bad_stride, missing_input.
template <Element Row, Element T>
requires(std::is_same_v<Row, T> || std::is_same_v<Row, float>) Status
    append_rows(CudaExec const& x, Tensor<Space::device, Row const, 2> const& rows,
                LengthView<Space::device> const& positions,
                LengthView<Space::device> const& requests, PageTable<Space::device> const& pages,
                MutableCacheView<Space::device, format::Plain<T>> const& cache)
noexcept { return detail::append(x, rows, positions, requests, pages, cache, {}); }

/// The same into a cache of e4m3 codes with scales, from rows of any element type: the bytes that
/// the host writes (host/append.hpp). Of two rows with the same slot a mixture may remain.
/// Errors: as above, and bad_value for the recipe's floor.
template <Element Row, class Format>
requires detail::has_e4m3_codes<Format> Status append_rows(
    CudaExec const& x, Tensor<Space::device, Row const, 2> const& rows,
    LengthView<Space::device> const& positions, LengthView<Space::device> const& requests,
    PageTable<Space::device> const& pages, CacheView<Space::device, Format, std::byte> const& cache,
    ScaleRecipe const& recipe = {})
noexcept { return detail::append(x, rows, positions, requests, pages, cache, recipe); }

}  // namespace v0
}  // namespace indexshare
