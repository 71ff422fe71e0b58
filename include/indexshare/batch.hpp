// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/cache.hpp>
#include <indexshare/detail/check.hpp>
#include <indexshare/dims.hpp>
#include <indexshare/macros.hpp>
#include <indexshare/status.hpp>
#include <indexshare/views.hpp>

/// @file The query rows of one call, and how they come from what an engine keeps per request. Back
/// ends: host/batch.hpp, cuda/batch.cuh.

namespace indexshare {
inline namespace v0 {

/// The query rows of one call: any mix of prefill chunks and decode rows of any requests.
template <Space S>
struct RowBatch {
  LengthView<S> lengths{};   ///< [rows] keys that the row sees: its causal bound in its own request
  LengthView<S> requests{};  ///< [rows] request of the row: its line of the page tables
  PageTable<S> index_pages{};  ///< of the index-key cache; unused by shared layers
  PageTable<S> kv_pages{};     ///< of the KV cache; the same for all layers of a share group

  constexpr index_t count() const noexcept { return lengths.extent(0); }
};

/// The new tokens of a batch by request, as engines keep them: a prefill chunk, one decoded token,
/// a token and its drafts, or nothing.
template <Space S>
struct Chunks {
  /// [requests + 1] ascending: request r has the rows [starts(r), starts(r + 1)) of the call.
  LengthView<S> starts{};
  /// [requests] tokens of the request up to and with its chunk. Its last row sees all of them, the
  /// row before one less.
  LengthView<S> lengths{};

  INDEXSHARE_HD constexpr index_t requests() const noexcept { return lengths.extent(0); }
};

/// What a call needs of each row. `lengths` and `requests` go into a RowBatch, `positions` and
/// `requests` into the append calls.
template <Space S>
struct RowNumbers {
  Tensor<S, position_t, 1> positions{};  ///< [rows] token number in the row's request
  Tensor<S, position_t, 1> lengths{};    ///< [rows] position + 1
  Tensor<S, position_t, 1> requests{};   ///< [rows] number of the request in the chunks
};

namespace detail {

/// The request of a row: the last that starts at or before it. Never outside [0, requests),
/// whatever stands in `starts`.
template <Space S>
INDEXSHARE_HD constexpr index_t request_of_row(LengthView<S> const& starts, index_t requests,
                                               index_t row) noexcept {
  index_t begin = 0;
  index_t end = requests;
  while (end - begin > 1) {
    index_t const middle = begin + (end - begin) / 2;
    if (starts(middle) <= row) {
      begin = middle;
    } else {
      end = middle;
    }
  }
  return begin;
}

/// Numbers of one row; those of padding where it lies in no chunk, or in one that is longer than
/// its request.
template <Space S>
INDEXSHARE_HD constexpr void number_row(Chunks<S> const& chunks, index_t row,
                                        RowNumbers<S> const& out) noexcept {
  index_t const requests = chunks.requests();
  out.positions(row) = no_position;
  out.lengths(row) = 0;
  out.requests(row) = no_position;
  if (requests < 1 || row >= chunks.starts(requests)) return;
  index_t const request = request_of_row(chunks.starts, requests, row);
  index_t const begin = chunks.starts(request);
  index_t const end = chunks.starts(request + 1);
  index_t const before = chunks.lengths(request) - (end - begin);  // tokens, of the chunk
  if (begin < 0 || row < begin || row >= end || before < 0) return;
  index_t const position = before + row - begin;
  out.positions(row) = static_cast<position_t>(position);
  out.lengths(row) = static_cast<position_t>(position + 1);
  out.requests(row) = static_cast<position_t>(request);
}

/// The row of a request's last accepted token, `no_position` if it accepted none or more than its
/// chunk has.
template <Space S>
INDEXSHARE_HD constexpr position_t last_accepted(LengthView<S> const& starts,
                                                 LengthView<S> const& accepted,
                                                 index_t request) noexcept {
  index_t const count = accepted(request);
  index_t const begin = starts(request);
  index_t const chunk = starts(request + 1) - begin;
  return begin < 0 || count < 1 || count > chunk ? no_position
                                                 : static_cast<position_t>(begin + count - 1);
}

template <Space S>
Status check_starts(LengthView<S> const& starts, index_t requests) noexcept {
  return first_failure({check_extent("starts of the chunks (one more than requests)", requests + 1,
                                     starts.extent(0)),
                        check_readable("starts of the chunks", starts)});
}

template <Space S>
Status check_number_rows(Chunks<S> const& chunks, RowNumbers<S> const& out) noexcept {
  index_t const rows = out.lengths.extent(0);
  return first_failure(
      {check_starts(chunks.starts, chunks.requests()),
       check_readable("lengths of the chunks", chunks.lengths),
       check_at_most("rows to number", max_position, rows),
       check_extent("positions of the rows to number", rows, out.positions.extent(0)),
       check_extent("requests of the rows to number", rows, out.requests.extent(0)),
       check_writable("lengths of the rows to number", out.lengths),
       check_writable("positions of the rows to number", out.positions),
       check_writable("requests of the rows to number", out.requests)});
}

template <Space S>
Status check_last_accepted(LengthView<S> const& starts, LengthView<S> const& accepted,
                           Tensor<S, position_t, 1> const& rows) noexcept {
  return first_failure(
      {check_starts(starts, accepted.extent(0)),
       check_readable("accepted tokens of the requests", accepted),
       check_extent("rows of the last accepted tokens", accepted.extent(0), rows.extent(0)),
       check_writable("rows of the last accepted tokens", rows)});
}

}  // namespace detail
}  // namespace v0
}  // namespace indexshare
