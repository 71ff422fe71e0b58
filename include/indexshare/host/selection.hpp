// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/cache.hpp>
#include <indexshare/concepts.hpp>
#include <indexshare/detail/check.hpp>
#include <indexshare/selection.hpp>

#include <cstdint>

/// @file Selections in host memory: mapping to slots, handing over, validating. Integer work that
/// is the same for every executor of host memory.

namespace indexshare {
inline namespace v0 {

/// slots(r, j) = place of indices(r, j) in the pages of the row's request, `no_position` for empty
/// entries and for positions that the table does not map.
template <HostSpaceExecutor X>
Status map_slots(X const&, SelectionView<Space::host, position_t const> const& selection,
                 LengthView<Space::host> const& requests, PageTable<Space::host> const& pages,
                 Tensor<Space::host, position_t, 2> const& slots) noexcept {
  for (index_t row = 0; row < slots.extent(0); ++row) {
    index_t const count = clamp_length(selection.counts(row), slots.extent(1));
    for (index_t j = 0; j < slots.extent(1); ++j) {
      slots(row, j) =
          j < count ? pages.slot(requests(row), selection.indices(row, j)) : no_position;
    }
  }
  return {};
}

/// Row i of `to` = row rows(i) of `from`, or row i where `rows` is null. Entries at or past a
/// row's count become `no_position`. Errors: bad_value for a row number outside `from`; then
/// nothing is written.
template <HostSpaceExecutor X>
Status gather_selection(X const&, SelectionView<Space::host, position_t const> const& from,
                        LengthView<Space::host> const& rows,
                        SelectionView<Space::host> const& to) noexcept {
  index_t const width = to.indices.extent(1);
  auto const source = [&](index_t i) noexcept -> index_t {
    return rows.data_handle() == nullptr ? i : rows(i);
  };
  for (index_t i = 0; i < to.indices.extent(0); ++i) {
    if (source(i) < 0 || source(i) >= from.indices.extent(0)) {
      return failure(Errc::bad_value, "row number of a selection", from.indices.extent(0),
                     source(i));
    }
  }
  for (index_t i = 0; i < to.indices.extent(0); ++i) {
    index_t const count = clamp_length(from.counts(source(i)), width);
    for (index_t j = 0; j < width; ++j) {
      to.indices(i, j) = j < count ? from.indices(source(i), j) : no_position;
    }
    to.counts(i) = static_cast<position_t>(count);
  }
  return {};
}

/// Reports what the kernels tolerate by their rules (entries outside contribute nothing, duplicates
/// count each time, lengths are clamped) but what a correct caller never passes. Quadratic in k; a
/// debugging aid.
///
/// @param cache_slots  slots of the KV cache that the plan points into
template <HostSpaceExecutor X>
SelectionReport validate(X const&, GroupPlan<Space::host> const& plan, index_t cache_slots,
                         LengthView<Space::host> const& lengths, Shape const& shape) noexcept {
  SelectionReport report;
  index_t const width = plan.slots.extent(1);
  for (index_t row = 0; row < plan.slots.extent(0); ++row) {
    index_t const count = clamp_length(plan.counts(row), width);
    report.bad_counts += plan.counts(row) != count ? 1 : 0;
    report.bad_lengths += lengths(row) != clamp_length(lengths(row), shape.keys) ? 1 : 0;
    for (index_t j = 0; j < count; ++j) {
      position_t const slot = plan.slots(row, j);
      if (slot < 0 || slot >= cache_slots) {
        ++report.outside;
        continue;
      }
      for (index_t before = 0; before < j; ++before) {
        if (plan.slots(row, before) == slot) {
          ++report.duplicates;
          break;
        }
      }
    }
  }
  return report;
}

}  // namespace v0
}  // namespace indexshare
