// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/exec.hpp>
#include <indexshare/prefetch.hpp>

#include <algorithm>
#include <bit>

namespace indexshare {
inline namespace v0 {

/// Back end of plan_prefetch: fills `list` with the distinct slots in `slots` [rows, top_k] and
/// replaces these by their rows of the list. Integer work, the same for every executor of host
/// memory.
template <HostSpaceExecutor X>
Status stage_slots(X const&, index_t cache_slots, Tensor<Space::host, position_t, 2> const& slots,
                   PrefetchList<Space::host> const& list,
                   detail::PrefetchScratch const& scratch) noexcept {
  using detail::PrefetchWord;
  auto const for_each_slot = [&](auto const& f) noexcept {
    for (index_t row = 0; row < slots.extent(0); ++row) {
      for (index_t j = 0; j < slots.extent(1); ++j) {
        position_t& slot = slots(row, j);
        if (slot < 0 || slot >= cache_slots) {
          slot = no_position;
        } else {
          f(slot, scratch.words[slot / PrefetchWord::slots], slot % PrefetchWord::slots);
        }
      }
    }
  };
  std::fill_n(scratch.words, scratch.word_count, PrefetchWord{});
  for_each_slot([](position_t, PrefetchWord& word, index_t place) noexcept {
    word.listed |= std::uint32_t{1} << place;
  });
  std::uint32_t count = 0;
  for (index_t w = 0; w < scratch.word_count; ++w) {
    scratch.words[w].before = count;
    for (std::uint32_t listed = scratch.words[w].listed; listed != 0; listed &= listed - 1) {
      list.slots(count++) =
          static_cast<position_t>(w * PrefetchWord::slots + std::countr_zero(listed));
    }
  }
  for (index_t i = count; i < list.capacity(); ++i) list.slots(i) = no_position;
  list.count(0) = static_cast<position_t>(count);
  for_each_slot([](position_t& slot, PrefetchWord const& word, index_t place) noexcept {
    slot = word.row(static_cast<int>(place));
  });
  return {};
}

/// Where tokens lie that are appended to a layer's KV cache after its rows were copied (those of
/// this forward, which their own rows nearly always select): slots(i) in the cache, and rows(i) in
/// the staging caches, `no_position` where the token is not listed. After appending,
///   copy_rows(x, KV cache, slots, staging cache, rows, {})
/// brings the staging cache up to date. The copy of the whole list must have ended before the
/// append, since it may read the same rows.
///
/// @param positions  [tokens] and requests [tokens], as append_rows takes them
/// @param kv_pages   the table of the KV caches
/// @param slots      [tokens], rows [tokens]: written
/// Errors: bad_shape, bad_stride, missing_input; bad_value for a staging table.
template <HostSpaceExecutor X>
Status appended_rows(X const&, PrefetchList<Space::host> const& list,
                     LengthView<Space::host> const& positions,
                     LengthView<Space::host> const& requests,
                     PageTable<Space::host> const& kv_pages,
                     Tensor<Space::host, position_t, 1> const& slots,
                     Tensor<Space::host, position_t, 1> const& rows) noexcept {
  if (Status const status =
          detail::check_appended_rows(list, positions, requests, kv_pages, slots, rows);
      !status.ok()) {
    return status;
  }
  for (index_t i = 0; i < positions.extent(0); ++i)
    detail::find_appended(list, positions, requests, kv_pages, i, slots, rows);
  return {};
}

}  // namespace v0
}  // namespace indexshare
