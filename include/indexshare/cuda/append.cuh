// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/cache.hpp>
#include <indexshare/cuda/detail/lines.cuh>
#include <indexshare/cuda/exec.cuh>
#include <indexshare/detail/append.hpp>
#include <indexshare/element.hpp>

#include <type_traits>

namespace indexshare {
inline namespace v0 {
namespace detail {

template <class Row, class T>
struct AppendRows {
  Tensor<Space::device, Row const, 2> rows;
  LengthView<Space::device> positions;
  LengthView<Space::device> requests;
  PageTable<Space::device> pages;
  MutableCacheView<Space::device, format::Plain<T>> cache;

  __device__ void operator()(index_t i, index_t, LaneRange lanes) const {
    index_t const slot = pages.slot(requests(i), positions(i));
    if (!cache.has(slot)) return;
    T* const row = cache.row(slot);
    lanes.for_each([&](index_t lane) { row[lane] = stored_as<T>(rows(i, lane)); });
  }
};

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
noexcept {
  if (Status const status = detail::check_append(rows, positions, requests, pages, cache);
      !status.ok()) {
    return status;
  }
  return detail::for_each_line(x, "append_rows", {rows.extent(0), 1, rows.extent(1)},
                               detail::AppendRows<Row, T>{rows, positions, requests, pages, cache});
}

}  // namespace v0
}  // namespace indexshare
