// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/batch.hpp>
#include <indexshare/cache.hpp>
#include <indexshare/detail/check.hpp>
#include <indexshare/dims.hpp>
#include <indexshare/exec.hpp>
#include <indexshare/macros.hpp>
#include <indexshare/select.hpp>
#include <indexshare/selection.hpp>
#include <indexshare/status.hpp>
#include <indexshare/views.hpp>
#include <indexshare/workspace.hpp>

#include <cuda/std/bit>

#include <algorithm>
#include <cstddef>
#include <cstdint>

/// @file Prefetch lists: which rows of their KV caches the shared layers of a group will read is
/// known as soon as their full layer has selected. docs/prefetch.md. Back ends: host/prefetch.hpp,
/// cuda/prefetch.cuh.
/// @source the idea of fetching for shared layers while others compute: sgl-project/sglang, pull
/// request 28523

namespace indexshare {
inline namespace v0 {

/// The rows that the shared layers of a group will read, each once, and so the contents of their
/// staging caches: row i of a staging cache is row slots(i) of the layer's KV cache. A staging
/// cache has the format of the KV cache and `blocks()` blocks of `page_size` rows, whatever the
/// page size of the KV cache.
template <Space S>
struct PrefetchList {
  Tensor<S, position_t, 1> slots{};  ///< [capacity] ascending, then `no_position`
  Tensor<S, position_t, 1> count{};  ///< [1] how many
  index_t page_size = 1;             ///< rows in a block of a staging cache

  INDEXSHARE_HD constexpr index_t capacity() const noexcept { return slots.extent(0); }
  constexpr index_t blocks() const noexcept { return (capacity() + page_size - 1) / page_size; }

  /// What a shared layer that attends to its staging cache brings as batch.kv_pages, instead of
  /// `kv_pages`. It maps no position; the layer compares it with the group plan, so that neither a
  /// plan of slots meets a staging cache nor a staged plan a whole KV cache. A cache of the size of
  /// the staging caches that holds other rows is not noticed.
  constexpr PageTable<S> pages(PageTable<S> const& kv_pages) const noexcept {
    index_t const width = (kv_pages.keys() + page_size - 1) / page_size;
    return {make_dense<S, position_t const, 2>(slots.data_handle(), {0, width}), page_size,
            blocks() * page_size};
  }
};

/// A list of `capacity` rows over memory of the caller.
///
/// @param slots  [capacity]
/// @param count  [1]
template <Space S>
constexpr PrefetchList<S> make_prefetch_list(position_t* slots, position_t* count, Rows capacity,
                                             PageSize page_size) noexcept {
  return {make_dense<S, position_t, 1>(slots, {capacity.n}),
          make_dense<S, position_t, 1>(count, {1}), page_size.n};
}

/// Rows that a list needs room for: as many as `rows` rows can select at most, or the whole cache.
constexpr index_t prefetch_capacity(Rows rows, TopK top_k, index_t cache_slots) noexcept {
  return std::max<index_t>(1, std::min(rows.n * top_k.n, cache_slots));
}

namespace detail {

/// 32 slots of a cache, which of them are listed, and how many listed ones lie before them.
struct alignas(8) PrefetchWord {
  std::uint32_t listed;
  std::uint32_t before;

  static constexpr index_t slots = 32;

  /// The row of slot `place` of the word among all that are listed; it is listed itself.
  INDEXSHARE_HD constexpr position_t row(int place) const noexcept {
    std::uint32_t const lower = listed & ((std::uint32_t{1} << place) - 1);
    return static_cast<position_t>(before + static_cast<std::uint32_t>(cuda::std::popcount(lower)));
  }
};

struct PrefetchScratch {
  PrefetchWord* words = nullptr;  ///< [word_count]
  index_t word_count = 0;
  std::uint32_t* parts =
      nullptr;  ///< [most_parts] listed slots in each of equal parts of the words

  static constexpr index_t most_parts = 1024;
};

struct CarvedPrefetch {
  PrefetchScratch scratch;
  WorkspaceSize size;
};
constexpr CarvedPrefetch carve_prefetch(WorkspaceCarver carver, index_t cache_slots) noexcept {
  PrefetchScratch scratch;
  scratch.word_count =
      (std::max<index_t>(cache_slots, 0) + PrefetchWord::slots - 1) / PrefetchWord::slots;
  scratch.words = carver.take<PrefetchWord>(static_cast<std::size_t>(scratch.word_count));
  scratch.parts = carver.take<std::uint32_t>(PrefetchScratch::most_parts);
  return {scratch, carver.size()};
}

/// The row of `slot` among `count` ascending ones, or `no_position`.
template <Space S>
INDEXSHARE_HD constexpr position_t row_of_slot(Tensor<S, position_t, 1> const& slots, index_t count,
                                               position_t slot) noexcept {
  index_t first = 0;
  index_t last = count;
  while (first < last) {
    index_t const middle = first + (last - first) / 2;
    if (slots(middle) < slot) {
      first = middle + 1;
    } else {
      last = middle;
    }
  }
  return first < count && slots(first) == slot ? static_cast<position_t>(first) : no_position;
}

/// Where token i lies in the cache and among the listed rows.
template <Space S>
INDEXSHARE_HD constexpr void find_appended(PrefetchList<S> const& list,
                                           LengthView<S> const& positions,
                                           LengthView<S> const& requests,
                                           PageTable<S> const& kv_pages, index_t i,
                                           Tensor<S, position_t, 1> const& slots,
                                           Tensor<S, position_t, 1> const& rows) noexcept {
  position_t const slot = kv_pages.slot(requests(i), positions(i));
  slots(i) = slot;
  rows(i) = slot == no_position
                ? no_position
                : row_of_slot(list.slots, clamp_length(list.count(0), list.capacity()), slot);
}

template <Space S>
Status check_list(PrefetchList<S> const& list) noexcept {
  if (Status const status = first_failure(
          {check_at_least("page size of the staging caches", 1, list.page_size),
           check_at_most("page size of the staging caches", max_position, list.page_size),
           check_at_most("capacity of the prefetch list (rows are int32)", max_position,
                         list.capacity()),
           check_extent("counts of the prefetch list", 1, list.count.extent(0)),
           check_writable("slots of the prefetch list", list.slots),
           check_writable("count of the prefetch list", list.count)});
      !status.ok()) {
    return status;
  }
  return check_at_most("rows of the staging caches (they are int32)", max_position,
                       list.blocks() * list.page_size);
}

template <Space S>
Status check_plan_prefetch(index_t cache_slots, SelectionState<S> const& state,
                           PrefetchList<S> const& list, Workspace ws) noexcept {
  if (state.tag().source_layer == no_position) {
    return failure(Errc::stale_selection, "plan_prefetch of a state without a selection");
  }
  if (index_t const staged = state.plan_pages().staging_slots; staged != 0) {
    return failure(Errc::stale_selection,
                   "the group plan points into staging caches already; call plan_group first", 0,
                   staged);
  }
  if (Status const status =
          first_failure({check_at_least("slots of the KV caches to prefetch from", 0, cache_slots),
                         check_at_most("slots of the KV caches to prefetch from (they are int32)",
                                       max_position, cache_slots),
                         check_list(list)});
      !status.ok()) {
    return status;
  }
  index_t const need = prefetch_capacity(Rows{state.tag().rows}, TopK{state.top_k()}, cache_slots);
  if (Status const status =
          check_at_least("capacity of the prefetch list, against rows * top_k or the cache's slots",
                         need, list.capacity());
      !status.ok()) {
    return status;
  }
  return check_workspace("workspace of plan_prefetch, in bytes", ws,
                         carve_prefetch({}, cache_slots).size.bytes);
}

template <Space S>
Status check_appended_rows(PrefetchList<S> const& list, LengthView<S> const& positions,
                           LengthView<S> const& requests, PageTable<S> const& kv_pages,
                           Tensor<S, position_t, 1> const& slots,
                           Tensor<S, position_t, 1> const& rows) noexcept {
  index_t const tokens = positions.extent(0);
  return first_failure({check_list(list), check_table(kv_table_names, kv_pages),
                        check_extent("requests of the appended tokens", tokens, requests.extent(0)),
                        check_extent("slots of the appended tokens", tokens, slots.extent(0)),
                        check_extent("staging rows of the appended tokens", tokens, rows.extent(0)),
                        check_readable("positions of the appended tokens", positions),
                        check_readable("requests of the appended tokens", requests),
                        check_writable("slots of the appended tokens", slots),
                        check_writable("staging rows of the appended tokens", rows)});
}

}  // namespace detail

/// Scratch of plan_prefetch for caches of `cache_slots` slots; monotone, and whatever the rows are.
/// A quarter of a byte per slot.
template <Executor X>
constexpr WorkspaceSize prefetch_workspace(X const&, index_t cache_slots) noexcept {
  return detail::carve_prefetch({}, cache_slots).size;
}

/// Lists the distinct slots of the group plan in `state` and makes the plan point into staging
/// caches instead: where it held list.slots(i) it holds i afterwards. Called once per share group
/// and forward, after the full layer's `run`, which still attends by slots. Then, for each shared
/// layer,
///   copy_rows(x, its KV cache, list.slots, its staging cache, {}, {}), anywhere, at any time;
///   run, with attention.kv = the staging cache and batch.kv_pages = list.pages(batch.kv_pages),
/// which gives bit for bit what `run` gives on the KV cache itself. Rows that are appended to a
/// layer's KV after its copy need appended_rows. plan_group brings the slots of the KV caches back.
/// The copies read the list: the next plan_prefetch that fills it must come after them.
///
/// Entries of the plan outside [0, cache_slots) become `no_position`, contributing nothing as
/// before.
///
/// @param cache_slots  slots of the group's KV caches (CacheView::slots)
/// @param list         capacity at least prefetch_capacity(rows, top_k, cache_slots) for the rows
///                     of the selection; the selection's tag stays as it is
/// @param ws           prefetch_workspace(x, cache_slots)
/// Errors: stale_selection when the state holds no selection, or a plan that is staged already;
/// bad_shape, bad_stride, missing_input for the list, by name; workspace_too_small; backend_error.
/// Deterministic. On CUDA only enqueues and can be captured.
template <Executor X>
Status plan_prefetch(X const& x, index_t cache_slots, SelectionState<X::space>& state,
                     PrefetchList<X::space> const& list, Workspace ws) noexcept {
  if (Status const status = detail::check_plan_prefetch(cache_slots, state, list, ws);
      !status.ok()) {
    return status;
  }
  auto const scratch = detail::carve_prefetch(WorkspaceCarver{ws}, cache_slots).scratch;
  Status const status = stage_slots(x, cache_slots, state.slots(state.tag().rows), list, scratch);
  if (status.ok()) {
    state.set_plan_pages(list.pages(state.plan_pages()));
  } else {
    state.clear();  // half of the plan may be rewritten
  }
  return status;
}

}  // namespace v0
}  // namespace indexshare
