// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/cache.hpp>
#include <indexshare/element.hpp>
#include <indexshare/host/simd/foreach.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <type_traits>

/// @file Rows of queries and caches to floats, and floats to rows of outputs, with the kernels of
/// an instruction set. Values are those of `to_float`, of cache.hpp's `decode_row` and of
/// `from_float`, to the bit; NaN is some NaN.

namespace indexshare {
inline namespace v0 {
namespace detail {

/// out[i] = to_float(source[i]) for i < n.
template <Element T>
void widen_row(WidenKernels const& widen, T const* source, index_t n, float* out) noexcept {
  if constexpr (std::is_same_v<T, float>) {
    std::copy_n(source, n, out);
  } else if constexpr (std::is_same_v<T, bf16>) {
    widen.from_bf16(source, n, out);
  } else if constexpr (std::is_same_v<T, fp16>) {
    widen.from_fp16(source, n, out);
  } else if constexpr (std::is_same_v<T, e4m3>) {
    widen.from_e4m3(source, n, 1.0f, out);
  } else {
    for (index_t i = 0; i < n; ++i) out[i] = to_float(source[i]);
  }
}

/// out[i] = from_float<T>(source[i] * factor) for i < n.
template <class T>
void narrow_row(NarrowKernels const& narrow, float const* source, index_t n, float factor,
                T* out) noexcept {
  if constexpr (std::is_same_v<T, bf16>) {
    narrow.to_bf16(source, n, factor, out);
  } else if constexpr (std::is_same_v<T, fp16>) {
    narrow.to_fp16(source, n, factor, out);
  } else {
    for (index_t i = 0; i < n; ++i) out[i] = from_float<T>(source[i] * factor);
  }
}

/// Writes the `cache.lanes` values of row `slot`, which must be in the cache, to `out`. This one is
/// for the formats of a caller: their own `decode_row`, found by ADL.
template <class Format>
void decode_row(WidenKernels const&, CacheView<Space::host, Format> const& cache, index_t slot,
                float* out) noexcept {
  decode_row(cache, slot, out);
}

template <Element T>
void decode_row(WidenKernels const& widen, CacheView<Space::host, format::Plain<T>> const& cache,
                index_t slot, float* out) noexcept {
  widen_row(widen, cache.row(slot), cache.lanes, out);
}

inline void decode_row(WidenKernels const& widen,
                       CacheView<Space::host, format::IndexKeyE4m3> const& cache, index_t slot,
                       float* out) noexcept {
  widen.from_e4m3(reinterpret_cast<e4m3 const*>(cache.row(slot)), cache.lanes,
                  load_unaligned<float>(scale_of(cache, slot)), out);
}

inline void decode_row(WidenKernels const& widen,
                       CacheView<Space::host, format::LatentE4m3> const& cache, index_t slot,
                       float* out) noexcept {
  index_t const latent = cache.format.latent;
  index_t const tile = cache.format.tile;
  std::byte const* const row = cache.row(slot);
  std::byte const* scale = row + latent;
  for (index_t first = 0; first < latent; first += tile, scale += 4) {
    widen.from_e4m3(reinterpret_cast<e4m3 const*>(row + first), std::min(tile, latent - first),
                    load_unaligned<float>(scale), out + first);
  }
  // rotary lanes follow the last scale; a row of an odd number of bytes puts them at odd addresses
  if (reinterpret_cast<std::uintptr_t>(scale) % alignof(bf16) == 0) {
    widen.from_bf16(reinterpret_cast<bf16 const*>(scale), cache.lanes - latent, out + latent);
  } else {
    for (index_t i = 0; i < cache.lanes - latent; ++i) {
      out[latent + i] = to_float(load_unaligned<bf16>(scale + i * 2));
    }
  }
}

/// Heads of bf16 to panels of pairs: out[h / panel_width][d / 2][h % panel_width].lanes[d % 2] =
/// head(h)[d], zero past the last head and the last lane.
template <class HeadAt>
void pack_pairs(index_t heads, index_t dim, HeadAt const& head, Bf16Pair* out) noexcept {
  index_t const panel = bf16_pairs(dim) * panel_width;
  std::fill_n(out, padded_to_panel(heads) / panel_width * panel, Bf16Pair{});
  for (index_t h = 0; h < heads; ++h) {
    bf16 const* const source = head(h);
    Bf16Pair* const column = out + h / panel_width * panel + h % panel_width;
    for (index_t d = 0; d < dim; ++d) column[d / 2 * panel_width].lanes[d % 2] = source[d];
  }
}

/// Bytes of memory that a row of a cache lies in, for fetching it ahead of time. A guess for the
/// formats of a caller.
template <class Format>
constexpr index_t row_bytes(CacheView<Space::host, Format> const& cache) noexcept {
  return cache.row_stride * static_cast<index_t>(sizeof(*cache.data));
}
template <class T>
constexpr index_t row_bytes(CacheView<Space::host, format::Plain<T>> const& cache) noexcept {
  return cache.lanes * static_cast<index_t>(sizeof(T));
}
constexpr index_t row_bytes(CacheView<Space::host, format::LatentE4m3> const& cache) noexcept {
  index_t const latent = cache.format.latent;
  return latent + (latent + cache.format.tile - 1) / cache.format.tile * 4 +
         (cache.lanes - latent) * 2;
}

}  // namespace detail
}  // namespace v0
}  // namespace indexshare
