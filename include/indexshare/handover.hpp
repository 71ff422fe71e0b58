// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/concepts.hpp>
#include <indexshare/detail/check.hpp>

#include <cstdint>

/// @file How a selection passes on: to the layers of its share group (as slots), to the next
/// pipeline stage, to a draft step. Back ends supply map_slots and gather_selection.

namespace indexshare {
inline namespace v0 {

namespace detail {

/// What the slots of a group are made from.
template <Space S>
Status check_plan_batch(RowBatch<S> const& batch, index_t rows) noexcept {
  return first_failure(
      {check_extent("rows of batch.lengths against the selection", rows, batch.count()),
       check_extent("rows of batch.requests", rows, batch.requests.extent(0)),
       check_readable("batch.requests", batch.requests),
       check_table(kv_table_names, batch.kv_pages)});
}

// The hook of back ends whose work can be replayed: write_tag(exec, state) and compare_tag(exec,
// state, expected, layer), found by ADL. Other executors compare on the host, in every call.

/// Enqueues that the tag of `state` is written into its memory, where it is to be checked there.
template <Executor X>
Status write_tag_on_device(X const& x, SelectionState<X::space> const& state) noexcept {
  if constexpr (requires { write_tag(x, state); }) {
    if (state.tag_mismatch() != nullptr) return write_tag(x, state);
  }
  return {};
}

/// Enqueues the comparison of that tag with the expected one. `layer` is who reads the state.
template <Executor X>
Status compare_tag_on_device(X const& x, SelectionState<X::space> const& state,
                             SelectionTag const& expected, std::int32_t layer) noexcept {
  if constexpr (requires { compare_tag(x, state, expected, layer); }) {
    if (state.tag_mismatch() != nullptr) return compare_tag(x, state, expected, layer);
  }
  return {};
}

}  // namespace detail

/// Maps the selection in `state` to slots of the batch's KV pages. A full layer does it itself;
/// call it again only for a layer whose KV lies in another page table than its group's.
///
/// Errors: bad_shape when the batch has another row count than the selection; bad_shape, bad_stride
/// or missing_input for its requests and page table.
template <Executor X>
Status plan_group(X const& x, RowBatch<X::space> const& batch,
                  SelectionState<X::space>& state) noexcept {
  index_t const rows = state.tag().rows;
  if (Status const status = detail::check_plan_batch(batch, rows); !status.ok()) {
    return status;
  }
  if (Status const status =
          map_slots(x, state.selection(), batch.requests, batch.kv_pages, state.slots(rows));
      !status.ok()) {
    return status;
  }
  state.set_plan_pages(batch.kv_pages);
  return {};
}

namespace detail {

/// Fills `to` with the rows of `from` named by `rows` (all of them in order when it is null),
/// tags it and plans it for `batch`.
template <Executor X>
Status take_selection(X const& x, SelectionView<X::space, position_t const> const& from,
                      LengthView<X::space> const& rows, index_t count, SelectionTag tag,
                      RowBatch<X::space> const& batch, SelectionState<X::space>& to) noexcept {
  if (Status const status = first_failure(
          {check_extent("top_k of the selection against the state's", to.top_k(),
                        from.indices.extent(1)),
           check_extent("rows of the selection's counts", from.indices.extent(0),
                        from.counts.extent(0)),
           check_at_least("rows of the selection", 0, count),
           check_at_most("rows for the state's capacity", to.rows(), count),
           check_value("forward of the id (it must be given)", 0, tag.id.forward),
           check_value("source layer of the selection", 0, tag.source_layer),
           check_plan_batch(batch, count), check_readable("indices of the selection", from.indices),
           check_readable("counts of the selection", from.counts)});
      !status.ok()) {
    return status;
  }
  to.clear();
  if (Status const status = gather_selection(x, from, rows, to.selection(count)); !status.ok()) {
    return status;
  }
  tag.rows = static_cast<std::int32_t>(count);
  to.set_tag(tag);
  Status status = write_tag_on_device(x, to);
  if (status.ok()) status = plan_group(x, batch, to);
  if (!status.ok()) to.clear();
  return status;
}

}  // namespace detail

/// Takes over a selection made elsewhere: by an earlier pipeline stage, from a recording. The
/// caller vouches that it belongs to forward `id` and was made by layer `source_layer`.
///
/// @param from   indices [rows, top_k] in the form of a selection row, counts [rows]
/// @param batch  rows of this forward; its requests and KV pages give the group plan
template <Executor X>
Status import_selection(X const& x, SelectionView<X::space, position_t const> const& from,
                        ForwardId id, std::int32_t source_layer, RowBatch<X::space> const& batch,
                        SelectionState<X::space>& state) noexcept {
  return detail::take_selection(x, from, {}, from.indices.extent(0), {id, 0, source_layer}, batch,
                                state);
}

/// Passes the selection of draft step 0 to the steps after it: row rows(i) of `from` (the last
/// accepted token of request i) becomes row i of `to`, unchanged, under a new forward id.
///
/// @param round  forward of draft step 0, whose selection `from` must hold
/// @param rows   [draft rows] row numbers in `from`
/// @param batch  one row per request; its requests and KV pages give the new group plan
/// Errors: bad_value when `from` and `to` share memory (rows would overwrite each other) or, on the
/// host, when a row number is outside the selection (on a device such a row becomes empty: count
/// 0); stale_selection when `from` is empty or holds the selection of another forward than `round`.
template <Executor X>
Status compact_selection(X const& x, SelectionState<X::space> const& from, ForwardId round,
                         LengthView<X::space> const& rows, ForwardId id,
                         RowBatch<X::space> const& batch, SelectionState<X::space>& to) noexcept {
  if (from.overlaps(to)) {
    return failure(Errc::bad_value, "compact_selection needs two states over memory of their own");
  }
  if (from.tag().source_layer == no_position) {
    return failure(Errc::stale_selection, "compact_selection from a state without a selection");
  }
  SelectionTag expected = from.tag();
  expected.id = round;
  if (Status const status = match_tag(expected, from.tag()); !status.ok()) return status;
  if (Status const status = detail::check_readable("rows of compact_selection", rows);
      !status.ok()) {
    return status;
  }
  Status const status = detail::take_selection(x, from.selection(), rows, rows.extent(0),
                                               {id, 0, from.tag().source_layer}, batch, to);
  return status.ok() ? detail::compare_tag_on_device(x, from, expected, -1) : status;
}

}  // namespace v0
}  // namespace indexshare
