// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/exec.hpp>
#include <indexshare/host/rows.hpp>
#include <indexshare/records.hpp>

#include <cstddef>
#include <cstring>

namespace indexshare {
inline namespace v0 {
namespace detail {

/// Row i of `to` = row i of `from`, where both exist.
template <HostSpaceExecutor X, class From, class To>
void move_rows(X const& x, index_t rows, RowParts const& parts, From const& from,
               To const& to) noexcept {
  for_each_row(x, rows, [&](index_t i) noexcept {
    auto const source = from(i);
    auto const target = to(i);
    if (source.row == nullptr || target.row == nullptr) return;
    std::memcpy(target.row, source.row, static_cast<std::size_t>(parts.row));
    if (parts.scale > 0) {
      std::memcpy(target.scale, source.scale, static_cast<std::size_t>(parts.scale));
    }
  });
}

enum class EmptySlots { refused, skipped };

/// All slots of a list lie in the cache, or are `no_position` where that is allowed.
template <class Cache>
Status check_slots(char const* what, Cache const& cache, SlotView<Space::host> const& slots,
                   EmptySlots empty) noexcept {
  if (slots.data_handle() == nullptr) return {};  // row i goes to slot i
  for (index_t i = 0; i < slots.extent(0); ++i) {
    bool const skipped = empty == EmptySlots::skipped && slots(i) == no_position;
    if (!skipped && !cache.has(slots(i))) {
      return failure(Errc::bad_value, what, cache.slots(), slots(i));
    }
  }
  return {};
}

}  // namespace detail

/// Writes the rows `slots` of a cache as records: packed bytes that do not depend on pages, to be
/// sent or kept, and read by `import_rows` into any cache of the same format and lanes. A
/// CacheInventory says where the records of a whole request lie.
///
/// @param slots  [n] rows of the cache, in any order
/// @param out    [n, record_bytes(cache)]; not memory of the cache
/// Errors: bad_shape, bad_stride, missing_input, bad_value (the cache's format; a slot outside the
/// cache, `no_position` among them). Nothing is written on error.
template <HostSpaceExecutor X, class Format, class Storage>
Status export_rows(X const& x, CacheView<Space::host, Format, Storage> const& cache,
                   SlotView<Space::host> const& slots,
                   Tensor<Space::host, std::byte, 2> const& out) noexcept {
  using namespace detail;
  if (Status const status = check_export(cache, slots, out); !status.ok()) return status;
  if (Status const status =
          check_slots("slot of a row to export", cache, slots, EmptySlots::refused);
      !status.ok()) {
    return status;
  }
  RowParts const parts = parts_of(cache);
  move_rows(x, slots.extent(0), parts, CacheRows{cache, slots},
            RecordRows<std::byte>{out.data_handle(), out.stride(0), parts.row});
  return {};
}

/// Writes records into the rows `slots` of a cache, which may have another page size and other
/// strides than the one that they came from. A record does not say what it holds: format and lanes
/// must be those of the cache that was exported, and so must its basis.
///
/// @param records  [n, record_bytes(cache)]; not memory of the cache
/// @param slots    [n] distinct rows of the cache: what two records leave in one slot is undefined
/// Errors: those of `export_rows`. Nothing is written on error.
template <HostSpaceExecutor X, class Format>
Status import_rows(X const& x, Tensor<Space::host, std::byte const, 2> const& records,
                   SlotView<Space::host> const& slots,
                   CacheView<Space::host, Format, typename Format::storage> const& cache) noexcept {
  using namespace detail;
  if (Status const status = check_import(records, slots, cache); !status.ok()) return status;
  if (Status const status =
          check_slots("slot of a row to import", cache, slots, EmptySlots::refused);
      !status.ok()) {
    return status;
  }
  RowParts const parts = parts_of(cache);
  move_rows(x, slots.extent(0), parts,
            RecordRows<std::byte const>{records.data_handle(), records.stride(0), parts.row},
            CacheRows{cache, slots});
  return {};
}

/// Row to_slots(i) of `to` = row from_slots(i) of `from`, as if all rows had been read before any
/// is written: inside one cache rows may move up, down and in circles. Entries where either slot is
/// `no_position` are skipped. The caches have one format and equal lanes and basis, and any page
/// sizes and strides.
///
/// @param from_slots  [n] rows of `from`, repeated or not
/// @param to_slots    [n] distinct rows of `to`; without memory: row i goes to slot i
/// @param ws          `copy_rows_workspace`, if the memory of the caches overlaps; else not needed
/// Errors: bad_shape, bad_stride, missing_input, workspace_too_small; bad_value for caches of other
/// formats or bases and for any other slot outside its cache. Nothing is written on error.
template <HostSpaceExecutor X, class Format, class Storage>
Status copy_rows(X const& x, CacheView<Space::host, Format, Storage> const& from,
                 SlotView<Space::host> const& from_slots,
                 CacheView<Space::host, Format, typename Format::storage> const& to,
                 SlotView<Space::host> const& to_slots, Workspace ws = {}) noexcept {
  using namespace detail;
  bool staged = false;
  if (Status const status = check_copy(from, from_slots, to, to_slots, ws, staged); !status.ok()) {
    return status;
  }
  if (Status const status = first_failure(
          {check_slots("slot of a row to copy from", from, from_slots, EmptySlots::skipped),
           check_slots("slot of a row to copy to", to, to_slots, EmptySlots::skipped)});
      !status.ok()) {
    return status;
  }
  index_t const rows = from_slots.extent(0);
  RowParts const parts = parts_of(from);
  CacheRows const source{from, from_slots};
  CacheRows const target{to, to_slots};
  if (!staged) {
    move_rows(x, rows, parts, source, target);
    return {};
  }
  RecordRows<std::byte> const records{static_cast<std::byte*>(ws.data), staged_stride(from),
                                      parts.row};
  move_rows(x, rows, parts, source, records);
  move_rows(x, rows, parts, StagedRows<decltype(source)>{records, source}, target);
  return {};
}

}  // namespace v0
}  // namespace indexshare
