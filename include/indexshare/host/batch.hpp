// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/batch.hpp>
#include <indexshare/exec.hpp>

namespace indexshare {
inline namespace v0 {
namespace detail {

/// Chunks lie behind each other, from row 0 on.
inline Status check_order(LengthView<Space::host> const& starts) noexcept {
  if (starts(0) != 0) return failure(Errc::bad_value, "start of the first chunk", 0, starts(0));
  for (index_t r = 1; r < starts.extent(0); ++r) {
    if (starts(r) < starts(r - 1)) {
      return failure(Errc::bad_value, "start of a chunk (they must ascend)", starts(r - 1),
                     starts(r));
    }
  }
  return {};
}

}  // namespace detail

/// Numbers the rows of a call from the chunks of its requests. Rows behind the last chunk are
/// padding: position and request `no_position`, length 0, so that they append nothing, see nothing
/// and give 0.
///
/// @param chunks  starts [requests + 1], lengths [requests]; requests with no row are legal
/// @param out     [rows], as many as the call has
/// Errors: bad_shape, bad_stride, missing_input; bad_value where starts do not ascend from 0 to at
/// most `rows`, or a chunk is longer than its request. Nothing is written on error.
template <HostSpaceExecutor X>
Status number_rows(X const&, Chunks<Space::host> const& chunks,
                   RowNumbers<Space::host> const& out) noexcept {
  if (Status const status = detail::check_number_rows(chunks, out); !status.ok()) return status;
  index_t const requests = chunks.requests();
  index_t const rows = out.lengths.extent(0);
  if (Status const status = detail::check_order(chunks.starts); !status.ok()) return status;
  for (index_t r = 0; r < requests; ++r) {
    index_t const chunk = index_t{chunks.starts(r + 1)} - chunks.starts(r);
    if (chunks.lengths(r) < chunk) {
      return failure(Errc::bad_value, "length of a request (its chunk is longer)", chunk,
                     chunks.lengths(r));
    }
  }
  if (chunks.starts(requests) > rows) {
    return failure(Errc::bad_value, "end of the last chunk against the rows to number", rows,
                   chunks.starts(requests));
  }
  for (index_t row = 0; row < rows; ++row) detail::number_row(chunks, row, out);
  return {};
}

/// The rows that draft steps go on from (compact_selection): of each request the row of its last
/// accepted token.
///
/// @param starts    [requests + 1] as in Chunks
/// @param accepted  [requests] tokens of the request's chunk that were accepted, from 1 to its size
/// @param rows      [requests]
/// Errors: bad_shape, bad_stride, missing_input; bad_value for starts that do not ascend
/// from 0, or a number outside that range.
/// Nothing is written on error.
template <HostSpaceExecutor X>
Status last_accepted_rows(X const&, LengthView<Space::host> const& starts,
                          LengthView<Space::host> const& accepted,
                          Tensor<Space::host, position_t, 1> const& rows) noexcept {
  if (Status const status = detail::check_last_accepted(starts, accepted, rows); !status.ok()) {
    return status;
  }
  if (Status const status = detail::check_order(starts); !status.ok()) return status;
  for (index_t r = 0; r < rows.extent(0); ++r) {
    if (detail::last_accepted(starts, accepted, r) == no_position) {
      return failure(Errc::bad_value, "accepted tokens of a request (from 1 to its chunk's size)",
                     index_t{starts(r + 1)} - starts(r), accepted(r));
    }
  }
  for (index_t r = 0; r < rows.extent(0); ++r) {
    rows(r) = detail::last_accepted(starts, accepted, r);
  }
  return {};
}

}  // namespace v0
}  // namespace indexshare
