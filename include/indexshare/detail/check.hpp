// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/cache.hpp>
#include <indexshare/dims.hpp>
#include <indexshare/status.hpp>
#include <indexshare/views.hpp>

#include <cstddef>
#include <initializer_list>

namespace indexshare {
inline namespace v0 {
namespace detail {

/// Runs checks in order and keeps the first refusal.
constexpr Status first_failure(std::initializer_list<Status> checks) noexcept {
  for (Status const& check : checks) {
    if (!check.ok()) return check;
  }
  return {};
}

constexpr Status check_extent(char const* what, index_t expected, index_t got) noexcept {
  return expected == got ? Status{} : failure(Errc::bad_shape, what, expected, got);
}

constexpr Status check_at_most(char const* what, index_t limit, index_t got) noexcept {
  return got <= limit ? Status{} : failure(Errc::bad_shape, what, limit, got);
}

constexpr Status check_at_least(char const* what, index_t minimum, index_t got) noexcept {
  return got >= minimum ? Status{} : failure(Errc::bad_shape, what, minimum, got);
}

/// A scalar that is not an extent.
constexpr Status check_value(char const* what, std::int64_t minimum, std::int64_t got) noexcept {
  return got >= minimum ? Status{} : failure(Errc::bad_value, what, minimum, got);
}

/// A view that will be read: data where it has elements, lanes next to each other, and no stride
/// below zero.
template <class View>
constexpr Status check_readable(char const* what, View const& view) noexcept {
  constexpr std::size_t rank = View::rank();
  for (std::size_t i = 0; i < rank; ++i) {
    if (view.extent(i) == 0) return {};  // nothing to read
  }
  if (view.data_handle() == nullptr) return failure(Errc::missing_input, what);
  if (rank > 1 && view.extent(rank - 1) > 1 && view.stride(rank - 1) != 1) {
    return failure(Errc::bad_stride, what, 1, view.stride(rank - 1));
  }
  for (std::size_t i = 0; i < rank; ++i) {
    if (view.stride(i) < 0) return failure(Errc::bad_stride, what, 0, view.stride(i));
  }
  return {};
}

/// A view that will be written: readable, and no two elements in one place. Dimensions may be
/// permuted, so each stride is held against the span of all dimensions with smaller strides.
template <class View>
constexpr Status check_writable(char const* what, View const& view) noexcept {
  if (Status const status = check_readable(what, view); !status.ok()) return status;
  for (std::size_t i = 0; i < View::rank(); ++i) {
    if (view.extent(i) <= 1) continue;
    index_t span = 1;
    for (std::size_t j = 0; j < View::rank(); ++j) {
      if (j != i && view.extent(j) > 1 &&
          (view.stride(j) < view.stride(i) || (view.stride(j) == view.stride(i) && j > i))) {
        span += (view.extent(j) - 1) * view.stride(j);
      }
    }
    if (view.stride(i) < span) return failure(Errc::bad_stride, what, span, view.stride(i));
  }
  return {};
}

/// What a message calls the parts of a page table.
struct TableNames {
  char const* page_size;
  char const* width;
  char const* memory;
  char const* keys = "keys that the page table addresses";
};
inline constexpr TableNames kv_table_names{"batch.kv_pages.page_size", "pages of batch.kv_pages",
                                           "batch.kv_pages",
                                           "keys that batch.kv_pages address, against shape.keys"};
inline constexpr TableNames index_table_names{
    "batch.index_pages.page_size", "pages of batch.index_pages", "batch.index_pages",
    "keys that batch.index_pages address, against shape.keys"};

/// A readable table of a size for which slots can be computed without overflow.
template <Space S>
constexpr Status check_table(TableNames const& names, PageTable<S> const& table) noexcept {
  return first_failure({check_at_least(names.page_size, 1, table.page_size),
                        check_at_most(names.page_size, max_position, table.page_size),
                        check_at_most(names.width, max_position, table.pages.extent(1)),
                        check_readable(names.memory, table.pages)});
}

/// The same of a table that addresses at least `keys` tokens of each request.
template <Space S>
constexpr Status check_covering_table(TableNames const& names, PageTable<S> const& table,
                                      index_t keys) noexcept {
  Status const status = check_table(names, table);
  return status.ok() ? check_at_least(names.keys, keys, table.keys()) : status;
}

/// What a message calls the parts of a cache.
struct CacheNames {
  char const* memory;
  char const* lanes;
  char const* page_size;
  char const* blocks;
  char const* strides;
  char const* format;
};
inline constexpr CacheNames index_key_cache_names{
    "memory of the index-key cache",
    "lanes of the index-key cache",
    "block size of the index-key cache against index_pages.page_size",
    "blocks of the index-key cache (slots are int32)",
    "strides of the index-key cache",
    "format of the index-key cache"};
inline constexpr CacheNames kv_cache_names{"memory of the KV cache",
                                           "lanes of the KV cache",
                                           "block size of the KV cache against kv_pages.page_size",
                                           "blocks of the KV cache (slots are int32)",
                                           "strides of the KV cache",
                                           "latent or tile of the KV cache's format"};

template <class Format>
constexpr bool format_fits(Format const&, index_t) noexcept {
  return true;
}
constexpr bool format_fits(format::LatentE4m3 const& layout, index_t lanes) noexcept {
  return layout.latent >= 0 && layout.latent <= lanes && layout.tile >= 1;
}

/// Strides of a cache that is written: no two rows in one place, blocks of rows or rows of blocks.
template <class Cache>
constexpr Status check_distinct_rows(CacheNames const& names, Cache const& cache) noexcept {
  index_t const row = row_elements(cache.format, cache.lanes);
  bool const rows_inside =
      cache.row_stride >= row &&
      (cache.blocks <= 1 || cache.block_stride >= cache.block_size * cache.row_stride);
  bool const blocks_inside =
      cache.block_stride >= row &&
      (cache.block_size <= 1 || cache.row_stride >= cache.blocks * cache.block_stride);
  return rows_inside || blocks_inside
             ? Status{}
             : failure(Errc::bad_stride, names.strides, row, cache.row_stride);
}

/// The same of codes with their scales behind them: codes do not overlap, and a block ends behind
/// its scales.
template <Space S, class Format, class Storage>
requires scales_behind_codes<Format>
constexpr Status check_distinct_rows(CacheNames const& names,
                                     CacheView<S, Format, Storage> const& cache) noexcept {
  if (cache.row_stride < cache.lanes) {
    return failure(Errc::bad_stride, names.strides, cache.lanes, cache.row_stride);
  }
  index_t const block = cache.block_size * (cache.row_stride + 4);
  return cache.blocks <= 1 || cache.block_stride >= block
             ? Status{}
             : failure(Errc::bad_stride, names.strides, block, cache.block_stride);
}

/// A cache whose slots can be addressed, and whose format fits its lanes.
template <class Cache>
constexpr Status check_cache_memory(CacheNames const& names, Cache const& cache) noexcept {
  if (Status const status = first_failure({check_at_least(names.page_size, 1, cache.block_size),
                                           check_at_least(names.blocks, 0, cache.blocks)});
      !status.ok()) {
    return status;
  }
  if (cache.blocks > max_position / cache.block_size) {
    return failure(Errc::bad_shape, names.blocks, max_position / cache.block_size, cache.blocks);
  }
  if (cache.blocks > 0 && cache.data == nullptr) return failure(Errc::missing_input, names.memory);
  if (cache.row_stride < 1 || cache.block_stride < 0) {
    return failure(Errc::bad_stride, names.strides, 1, cache.row_stride);
  }
  if (!format_fits(cache.format, cache.lanes)) return failure(Errc::bad_value, names.format);
  return {};
}

/// A cache of rows with `lanes` lanes that a page table of the same page size points into.
template <class Cache>
constexpr Status check_cache(CacheNames const& names, Cache const& cache, index_t lanes,
                             PageTable<Cache::space> const& table) noexcept {
  if (Status const status =
          first_failure({check_extent(names.lanes, lanes, cache.lanes),
                         check_at_least(names.page_size, 1, cache.block_size),
                         check_extent(names.page_size, table.page_size, cache.block_size)});
      !status.ok()) {
    return status;
  }
  return check_cache_memory(names, cache);
}

}  // namespace detail
}  // namespace v0
}  // namespace indexshare
