// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/batch.hpp>
#include <indexshare/cuda/detail/launch.cuh>
#include <indexshare/cuda/detail/lines.cuh>
#include <indexshare/cuda/exec.cuh>

namespace indexshare {
inline namespace v0 {
namespace detail {

struct NumberRow {
  Chunks<Space::device> chunks;
  RowNumbers<Space::device> out;

  __device__ void operator()(index_t row) const { number_row(chunks, row, out); }
};

struct LastAcceptedRow {
  LengthView<Space::device> starts;
  LengthView<Space::device> accepted;
  Tensor<Space::device, position_t, 1> rows;

  __device__ void operator()(index_t request) const {
    rows(request) = last_accepted(starts, accepted, request);
  }
};

inline constexpr int item_threads = 128;

/// f(i) for each i in [0, count), a thread each.
template <class F>
INDEXSHARE_KERNEL void each_item_kernel(index_t count, __grid_constant__ F const f) {
  for (index_t i = index_t{blockIdx.x} * item_threads + threadIdx.x; i < count;
       i += index_t{gridDim.x} * item_threads) {
    f(i);
  }
}

template <class F>
Status for_each_item(CudaExec const& x, char const* what, index_t count, F const& f) noexcept {
  return launch(x, what, each_item_kernel<F>,
                {dim3(blocks_for((count + item_threads - 1) / item_threads)), item_threads, 0},
                count, f);
}

}  // namespace detail

/// Numbers the rows of a call from the chunks of its requests: as on the host (host/batch.hpp), but
/// what is wrong in device memory cannot be refused here: a row without a place in a chunk, or
/// whose chunk is longer than its request, is numbered as padding. Only enqueues; can be captured
/// and replayed with new chunks.
inline Status number_rows(CudaExec const& x, Chunks<Space::device> const& chunks,
                          RowNumbers<Space::device> const& out) noexcept {
  if (Status const status = detail::check_number_rows(chunks, out); !status.ok()) return status;
  return detail::for_each_item(x, "number_rows", out.lengths.extent(0),
                               detail::NumberRow{chunks, out});
}

/// The row of each request's last accepted token: as on the host, but a request with a number of
/// accepted tokens outside its range gets `no_position`, of which compact_selection makes an empty
/// row. Only enqueues; can be captured.
inline Status last_accepted_rows(CudaExec const& x, LengthView<Space::device> const& starts,
                                 LengthView<Space::device> const& accepted,
                                 Tensor<Space::device, position_t, 1> const& rows) noexcept {
  if (Status const status = detail::check_last_accepted(starts, accepted, rows); !status.ok()) {
    return status;
  }
  return detail::for_each_item(x, "last_accepted_rows", rows.extent(0),
                               detail::LastAcceptedRow{starts, accepted, rows});
}

}  // namespace v0
}  // namespace indexshare
