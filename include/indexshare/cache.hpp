// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/dims.hpp>
#include <indexshare/element.hpp>
#include <indexshare/macros.hpp>
#include <indexshare/views.hpp>

#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace indexshare {
inline namespace v0 {

/// How the rows of a cache lie in memory. Part of a cache view's type, because bytes carry none.
namespace format {

/// Rows of `lanes` elements of type T (float, bf16, fp16, ...).
template <class T>
struct Plain {
  using storage = T;
};

/// Index keys of 1 byte per lane and one fp32 scale: in each block first the codes of all its
/// tokens, then all their scales (for 128 lanes and 64 tokens: 8192 + 256 bytes). Not a sequence
/// of 132-byte records. @source DeepGEMM csrc/apis/attention.hpp, commit 54e2261
struct IndexKeyE4m3 {
  using storage = std::byte;
};

/// Index keys of 1 signed byte per lane and one fp32 scale, in the layout of IndexKeyE4m3. value =
/// code * scale, for all codes from -128 to 127.
struct IndexKeyInt8 {
  using storage = std::byte;
};

/// Latent rows of e4m3 codes, one fp32 scale per `tile` codes, then bf16 rotary lanes (512 + 16 +
/// 128 = 656 bytes). value = code * scale. @source FlashMLA README, commit 9241ae3
struct LatentE4m3 {
  using storage = std::byte;
  index_t latent = 512;
  index_t tile = 128;
};

}  // namespace format

/// The basis that index queries and keys are written in. A Hadamard transform of both sides leaves
/// every score as it is and of one side ruins them all, so queries and key views carry their basis
/// and the indexer compares them. Caches of attention keys are always natural.
enum class LaneBasis : std::uint8_t {
  natural,
  hadamard,  ///< Sylvester's matrix times lanes^-0.5, applied after the rotation
};

/// A cache of token rows in blocks: row `slot` lies in block slot / block_size. A contiguous cache
/// has one block per request; a paged one has pages. Strides are in elements of the storage type
/// and 64 bits wide. The `Storage` parameter is const for readers.
template <Space S, class Format, class Storage = typename Format::storage const>
struct CacheView {
  using format_type = Format;
  static constexpr Space space = S;

  Storage* data = nullptr;
  index_t blocks = 0;
  index_t block_size = 1;    ///< tokens per block
  index_t lanes = 0;         ///< values that a row decodes to
  index_t block_stride = 0;  ///< between blocks
  index_t row_stride = 0;    ///< between the rows (or codes) of tokens in a block
  [[no_unique_address]] Format format{};
  LaneBasis basis = LaneBasis::natural;  ///< of all rows: a cache is filled in one basis

  INDEXSHARE_HD constexpr index_t slots() const noexcept { return blocks * block_size; }

  INDEXSHARE_HD constexpr bool has(index_t slot) const noexcept {
    return slot >= 0 && slot < slots();
  }

  INDEXSHARE_HD constexpr Storage* block_of(index_t slot) const noexcept {
    return data + slot / block_size * block_stride;
  }

  INDEXSHARE_HD constexpr Storage* row(index_t slot) const noexcept {
    return block_of(slot) + slot % block_size * row_stride;
  }

  /// A reader's view of the same memory.
  template <class Reader>
  requires(std::is_same_v<Reader, Storage const> && !std::is_const_v<Storage>) constexpr
  operator CacheView<S, Format, Reader>() const noexcept {
    return {data, blocks, block_size, lanes, block_stride, row_stride, format, basis};
  }
};

/// A view that may be written to.
template <Space S, class Format>
using MutableCacheView = CacheView<S, Format, typename Format::storage>;

/// Dense plain cache [pages, page size, lanes].
template <Space S, class T>
constexpr auto make_paged_cache(T* data, Pages pages, PageSize page_size, HeadDim lanes) noexcept {
  using Format = format::Plain<std::remove_const_t<T>>;
  return CacheView<S, Format, T>{data,    pages.n, page_size.n, lanes.n, page_size.n * lanes.n,
                                 lanes.n, {}};
}

/// Dense plain cache [requests, keys, lanes] without pages: one block per request.
template <Space S, class T>
constexpr auto make_contiguous_cache(T* data, Requests requests, Keys keys,
                                     HeadDim lanes) noexcept {
  return make_paged_cache<S>(data, Pages{requests.n}, PageSize{keys.n}, lanes);
}

/// Index keys in e4m3 with scales, pages of page_size * (lanes + 4) bytes.
template <Space S, class Byte>
requires std::is_same_v<std::remove_const_t<Byte>, std::byte>
constexpr auto make_index_key_e4m3_cache(Byte* data, Pages pages, PageSize page_size,
                                         HeadDim lanes) noexcept {
  return CacheView<S, format::IndexKeyE4m3, Byte>{
      data, pages.n, page_size.n, lanes.n, page_size.n * (lanes.n + 4), lanes.n, {}};
}

/// Index keys in int8 with scales, pages of page_size * (lanes + 4) bytes.
template <Space S, class Byte>
requires std::is_same_v<std::remove_const_t<Byte>, std::byte>
constexpr auto make_index_key_int8_cache(Byte* data, Pages pages, PageSize page_size,
                                         HeadDim lanes) noexcept {
  return CacheView<S, format::IndexKeyInt8, Byte>{
      data, pages.n, page_size.n, lanes.n, page_size.n * (lanes.n + 4), lanes.n, {}};
}

namespace detail {

/// Whether a format keeps the scales of a block behind all of its codes, apart from the rows.
template <class Format>
inline constexpr bool scales_behind_codes =
    std::is_same_v<Format, format::IndexKeyE4m3> || std::is_same_v<Format, format::IndexKeyInt8>;

/// Bytes of the scales of a latent row; none where the format makes no sense.
INDEXSHARE_HD constexpr index_t scale_bytes_of_latent(format::LatentE4m3 const& layout) noexcept {
  return layout.tile < 1 ? 0 : (layout.latent + layout.tile - 1) / layout.tile * 4;
}

/// Elements of storage that a row of `lanes` lanes takes at its place (`CacheView::row`), without a
/// scale that lies apart.
template <class Format>
INDEXSHARE_HD constexpr index_t row_elements(Format const&, index_t lanes) noexcept {
  return lanes;
}
INDEXSHARE_HD constexpr index_t row_elements(format::LatentE4m3 const& layout,
                                             index_t lanes) noexcept {
  return layout.latent + scale_bytes_of_latent(layout) + (lanes - layout.latent) * 2;
}

}  // namespace detail

/// Latent rows in e4m3 with scales per `tile` and bf16 rotary lanes.
template <Space S, class Byte>
requires std::is_same_v<std::remove_const_t<Byte>, std::byte>
constexpr auto make_latent_e4m3_cache(Byte* data, Pages pages, PageSize page_size, index_t latent,
                                      index_t rope, index_t tile = 128) noexcept {
  index_t const row = detail::row_elements(format::LatentE4m3{latent, tile}, latent + rope);
  return CacheView<S, format::LatentE4m3, Byte>{
      data, pages.n, page_size.n, latent + rope, page_size.n * row, row, {latent, tile}};
}

namespace detail {

/// Reads a T that may lie unaligned among bytes.
template <class T>
INDEXSHARE_HD inline T load_unaligned(std::byte const* source) noexcept {
  T value;
  auto* target = reinterpret_cast<std::byte*>(&value);
  for (std::size_t i = 0; i < sizeof(T); ++i) target[i] = source[i];
  return value;
}

/// Writes a T that may lie unaligned among bytes.
template <class T>
INDEXSHARE_HD inline void store_unaligned(std::byte* target, T const& value) noexcept {
  auto const* source = reinterpret_cast<std::byte const*>(&value);
  for (std::size_t i = 0; i < sizeof(T); ++i) target[i] = source[i];
}

/// The scale of a token in a block of codes and then scales.
template <Space S, class Format, class Storage>
INDEXSHARE_HD constexpr Storage* scale_of(CacheView<S, Format, Storage> const& cache,
                                          index_t slot) noexcept {
  return cache.block_of(slot) + cache.block_size * cache.row_stride + slot % cache.block_size * 4;
}

}  // namespace detail

/// Writes the `cache.lanes` values of row `slot` to `out` as floats. `slot` must be in the cache.
template <Space S, Element T>
INDEXSHARE_HD inline void decode_row(CacheView<S, format::Plain<T>> const& cache, index_t slot,
                                     float* out) noexcept {
  T const* row = cache.row(slot);
  for (index_t i = 0; i < cache.lanes; ++i) out[i] = to_float(row[i]);
}

template <Space S>
INDEXSHARE_HD inline void decode_row(CacheView<S, format::IndexKeyE4m3> const& cache, index_t slot,
                                     float* out) noexcept {
  std::byte const* codes = cache.row(slot);
  auto const scale = detail::load_unaligned<float>(detail::scale_of(cache, slot));
  for (index_t i = 0; i < cache.lanes; ++i) {
    out[i] = to_float(e4m3{static_cast<std::uint8_t>(codes[i])}) * scale;
  }
}

template <Space S>
INDEXSHARE_HD inline void decode_row(CacheView<S, format::IndexKeyInt8> const& cache, index_t slot,
                                     float* out) noexcept {
  std::byte const* codes = cache.row(slot);
  auto const scale = detail::load_unaligned<float>(detail::scale_of(cache, slot));
  for (index_t i = 0; i < cache.lanes; ++i) {
    out[i] = static_cast<float>(static_cast<std::int8_t>(codes[i])) * scale;
  }
}

template <Space S>
INDEXSHARE_HD inline void decode_row(CacheView<S, format::LatentE4m3> const& cache, index_t slot,
                                     float* out) noexcept {
  index_t const latent = cache.format.latent;
  index_t const tile = cache.format.tile;
  std::byte const* codes = cache.row(slot);
  std::byte const* scales = codes + latent;
  std::byte const* rope = scales + detail::scale_bytes_of_latent(cache.format);
  for (index_t i = 0; i < latent; ++i) {
    auto const scale = detail::load_unaligned<float>(scales + i / tile * 4);
    out[i] = to_float(e4m3{static_cast<std::uint8_t>(codes[i])}) * scale;
  }
  for (index_t i = latent; i < cache.lanes; ++i) {
    out[i] = to_float(detail::load_unaligned<bf16>(rope + (i - latent) * 2));
  }
}

/// Where the tokens of each request lie: `pages` [requests, max pages] holds block numbers, as in
/// every paged engine. Without a table (`pages.data_handle()` null) request r owns block r alone,
/// which is the contiguous case.
template <Space S>
struct PageTable {
  Tensor<S, position_t const, 2> pages{};
  index_t page_size = 1;

  INDEXSHARE_HD constexpr bool contiguous() const noexcept {
    return pages.data_handle() == nullptr;
  }

  /// Tokens of one request that the table can address.
  INDEXSHARE_HD constexpr index_t keys() const noexcept {
    return contiguous() ? page_size : pages.extent(1) * page_size;
  }

  /// Place of a token in the cache, or `no_position` where the table has none. Never reads past
  /// the table, whatever the request and position.
  INDEXSHARE_HD constexpr position_t slot(index_t request, index_t position) const noexcept {
    if (request < 0 || position < 0 || position >= keys()) return no_position;
    index_t block = request;
    if (!contiguous()) {
      if (request >= pages.extent(0)) return no_position;
      block = pages(request, position / page_size);
      if (block < 0) return no_position;
    }
    index_t const slot = block * page_size + position % page_size;
    return slot <= max_position ? static_cast<position_t>(slot) : no_position;
  }
};

/// Whether two tables are the same memory, read the same way.
template <Space S>
constexpr bool same_pages(PageTable<S> const& a, PageTable<S> const& b) noexcept {
  if (a.page_size != b.page_size || a.contiguous() != b.contiguous()) return false;
  return a.contiguous() ||
         (a.pages.data_handle() == b.pages.data_handle() && a.pages.mapping() == b.pages.mapping());
}

template <Space S>
constexpr PageTable<S> make_page_table(position_t const* pages, Requests requests, Pages max_pages,
                                       PageSize page_size) noexcept {
  return {make_dense<S, position_t const, 2>(pages, {requests.n, max_pages.n}), page_size.n};
}

/// The table of a contiguous cache with room for `keys` tokens per request.
template <Space S>
constexpr PageTable<S> make_contiguous_table(Keys keys) noexcept {
  return {{}, keys.n};
}

/// A length as every back end uses it: clamped to [0, capacity].
INDEXSHARE_HD constexpr index_t clamp_length(index_t length, index_t capacity) noexcept {
  return length < 0 ? 0 : (length > capacity ? capacity : length);
}

}  // namespace v0
}  // namespace indexshare
