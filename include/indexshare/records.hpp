// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/cache.hpp>
#include <indexshare/detail/check.hpp>
#include <indexshare/dims.hpp>
#include <indexshare/exec.hpp>
#include <indexshare/macros.hpp>
#include <indexshare/select.hpp>
#include <indexshare/status.hpp>
#include <indexshare/views.hpp>
#include <indexshare/workspace.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <type_traits>

/// @file Token rows of a cache as bytes: records to save, send and restore, and copies from slot to
/// slot. No value is decoded, so every format goes through unchanged. Back ends: host/records.hpp,
/// cuda/records.cuh.

namespace indexshare {
inline namespace v0 {

/// Places of token rows in a cache, for example what PageTable::slot gives.
template <Space S>
using SlotView = Tensor<S, position_t const, 1>;  ///< [n]

namespace detail {

/// What a token's row consists of, in bytes: what lies at CacheView::row, and the scale, where the
/// format keeps it apart. A record is the one and then the other.
struct RowParts {
  index_t row = 0;
  index_t scale = 0;

  INDEXSHARE_HD constexpr index_t record() const noexcept { return row + scale; }
};

template <Space S, class Format, class Storage>
constexpr RowParts parts_of(CacheView<S, Format, Storage> const& cache) noexcept {
  return {row_elements(cache.format, cache.lanes) * static_cast<index_t>(sizeof(Storage)),
          scales_behind_codes<Format> ? 4 : 0};
}

}  // namespace detail

/// Bytes of one token's row as a record, whatever the page size: its elements (`Plain`), its codes
/// and then its scale (`IndexKeyE4m3`, `IndexKeyInt8`: lanes + 4), or its row (`LatentE4m3`: codes,
/// scales and rotary lanes, 656 for 512 + 64).
template <Space S, class Format, class Storage>
constexpr index_t record_bytes(CacheView<S, Format, Storage> const& cache) noexcept {
  return detail::parts_of(cache).record();
}

namespace detail {

/// Where the parts of one row lie; nowhere, if `row` is null.
template <class Byte>
struct PlaceOfRow {
  Byte* row = nullptr;
  Byte* scale = nullptr;
};

/// Row i of a list: the cache's row slots(i), or its row i where there are no slots.
template <Space S, class Format, class Storage>
struct CacheRows {
  using Byte = std::conditional_t<std::is_const_v<Storage>, std::byte const, std::byte>;

  CacheView<S, Format, Storage> cache;
  SlotView<S> slots;

  INDEXSHARE_HD PlaceOfRow<Byte> operator()(index_t i) const noexcept {
    index_t const slot = slots.data_handle() == nullptr ? i : slots(i);
    if (!cache.has(slot)) return {};
    auto* const row = reinterpret_cast<Byte*>(cache.row(slot));
    if constexpr (scales_behind_codes<Format>) {
      return {row, scale_of(cache, slot)};
    } else {
      return {row, nullptr};
    }
  }
};
template <Space S, class Format, class Storage>
CacheRows(CacheView<S, Format, Storage>, SlotView<S>) -> CacheRows<S, Format, Storage>;

/// Records one after the other, `stride` bytes apart.
template <class Byte>
struct RecordRows {
  Byte* data;
  index_t stride;
  index_t row_bytes;  ///< before the scale

  INDEXSHARE_HD PlaceOfRow<Byte> operator()(index_t i) const noexcept {
    Byte* const row = data + i * stride;
    return {row, row + row_bytes};
  }
};

/// Records in a workspace that came from `source`: of a row that it lacks, nothing is there.
template <class Source>
struct StagedRows {
  RecordRows<std::byte> records;
  Source source;

  INDEXSHARE_HD PlaceOfRow<std::byte> operator()(index_t i) const noexcept {
    return source(i).row == nullptr ? PlaceOfRow<std::byte>{} : records(i);
  }
};

/// Bytes from one staged record to the next: whole words of 16 bytes.
template <class Cache>
constexpr index_t staged_stride(Cache const& cache) noexcept {
  return (record_bytes(cache) + 15) / 16 * 16;
}

/// Whether two caches share memory, from the first byte to the last of each.
template <class A, class B>
bool share_memory(A const& a, B const& b) noexcept {
  struct Range {
    std::uintptr_t begin, end;
  };
  auto const range = [](auto const& cache) noexcept -> Range {
    auto const begin = reinterpret_cast<std::uintptr_t>(cache.data);
    if (cache.slots() == 0) return {begin, begin};
    RowParts const parts = parts_of(cache);
    index_t const last_row =
        (cache.block_size - 1) * cache.row_stride + row_elements(cache.format, cache.lanes);
    index_t const last_scale = cache.block_size * (cache.row_stride + parts.scale);
    index_t const elements = (cache.blocks - 1) * cache.block_stride +
                             (parts.scale > 0 ? std::max(last_row, last_scale) : last_row);
    return {begin, begin + static_cast<std::uintptr_t>(elements) * sizeof(*cache.data)};
  };
  Range const of_a = range(a);
  Range const of_b = range(b);
  return of_a.begin < of_b.end && of_b.begin < of_a.end;
}

constexpr bool same_format(format::LatentE4m3 const& a, format::LatentE4m3 const& b) noexcept {
  return a.latent == b.latent && a.tile == b.tile;
}
template <class Format>
constexpr bool same_format(Format const&, Format const&) noexcept {
  return true;
}

inline constexpr CacheNames record_cache_names{
    "memory of the cache of the records",
    "lanes of the cache of the records",
    "block size of the cache of the records",
    "blocks of the cache of the records (slots are int32)",
    "strides of the cache of the records",
    "format of the cache of the records"};

template <class Cache, class Byte>
Status check_records(Cache const& cache, SlotView<Cache::space> const& slots,
                     Tensor<Cache::space, Byte, 2> const& records) noexcept {
  Status const status = check_cache_memory(record_cache_names, cache);
  if (!status.ok()) return status;
  return first_failure(
      {check_at_least(record_cache_names.lanes, 0, cache.lanes),
       check_extent("records against their slots", slots.extent(0), records.extent(0)),
       check_extent("bytes of a record against record_bytes(cache)", record_bytes(cache),
                    records.extent(1)),
       check_readable("slots of the records", slots)});
}

template <class Cache>
Status check_export(Cache const& cache, SlotView<Cache::space> const& slots,
                    Tensor<Cache::space, std::byte, 2> const& out) noexcept {
  return first_failure({check_records(cache, slots, out), check_writable("records to write", out)});
}

template <class Cache>
Status check_import(Tensor<Cache::space, std::byte const, 2> const& records,
                    SlotView<Cache::space> const& slots, Cache const& cache) noexcept {
  return first_failure({check_records(cache, slots, records),
                        check_readable("records to read", records),
                        check_distinct_rows(record_cache_names, cache)});
}

/// `staged` is set to whether the rows have to go through the workspace.
template <class From, class To>
Status check_copy(From const& from, SlotView<From::space> const& from_slots, To const& to,
                  SlotView<To::space> const& to_slots, Workspace ws, bool& staged) noexcept {
  constexpr CacheNames from_names{
      "memory of the cache to copy from",     "lanes of the cache to copy from",
      "block size of the cache to copy from", "blocks of the cache to copy from (slots are int32)",
      "strides of the cache to copy from",    "format of the cache to copy from"};
  constexpr CacheNames to_names{"memory of the cache to copy to",
                                "lanes of the cache to copy to against those of the source",
                                "block size of the cache to copy to",
                                "blocks of the cache to copy to (slots are int32)",
                                "strides of the cache to copy to",
                                "format of the cache to copy to"};
  if (Status const status =
          first_failure({check_cache_memory(from_names, from), check_cache_memory(to_names, to)});
      !status.ok()) {
    return status;
  }
  index_t const rows = from_slots.extent(0);
  bool const listed = to_slots.data_handle() != nullptr;
  if (Status const status = first_failure(
          {check_at_least(from_names.lanes, 0, from.lanes),
           check_extent(to_names.lanes, from.lanes, to.lanes),
           same_format(from.format, to.format) ? Status{}
                                               : failure(Errc::bad_value, to_names.format),
           from.basis == to.basis
               ? Status{}
               : failure(Errc::bad_value, "basis of the cache to copy to (0 natural, 1 hadamard)",
                         static_cast<std::int64_t>(from.basis),
                         static_cast<std::int64_t>(to.basis)),
           check_distinct_rows(to_names, to), check_readable("slots to copy from", from_slots),
           listed ? first_failure(
                        {check_extent("slots to copy to, one per row", rows, to_slots.extent(0)),
                         check_readable("slots to copy to", to_slots)})
                  : check_at_most("rows to copy, without slots, against the cache to copy to",
                                  to.slots(), rows)});
      !status.ok()) {
    return status;
  }
  staged = rows > 0 && share_memory(from, to);
  std::size_t const bytes = saturating_area(rows, staged_stride(from));
  return check_workspace("workspace of copy_rows in shared memory, in bytes", ws,
                         staged ? align_up(bytes) : 0);
}

}  // namespace detail

/// Scratch of `copy_rows` for at most `rows` rows inside one cache, or between caches whose memory
/// overlaps; others need none. Monotone in `rows`.
template <Executor X, Space S, class Format, class Storage>
constexpr WorkspaceSize copy_rows_workspace(X const&, Rows rows,
                                            CacheView<S, Format, Storage> const& cache) noexcept {
  static_assert(X::space == S, "the cache lies in another memory space than the executor's");
  return {align_up(saturating_area(rows.n, detail::staged_stride(cache)))};
}

}  // namespace v0
}  // namespace indexshare
