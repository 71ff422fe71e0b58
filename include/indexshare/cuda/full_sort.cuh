// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/concepts.hpp>
#include <indexshare/cuda/detail/launch.cuh>
#include <indexshare/cuda/detail/topk_rows.cuh>
#include <indexshare/cuda/exec.cuh>
#include <indexshare/cuda/full_sort_plan.hpp>
#include <indexshare/macros.hpp>
#include <indexshare/select.hpp>
#include <indexshare/topk/full_sort.hpp>

#include <cub/device/device_segmented_radix_sort.cuh>
#include <cuda/std/bit>

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace indexshare {
inline namespace v0 {
namespace detail {

/// Keys and positions of a batch of rows, and where each row's segments end.
template <class Score>
INDEXSHARE_KERNEL void __launch_bounds__(full_sort_threads)
    full_sort_keys(TopKRows<Score> rows, FullSortBuffers buffers, std::uint32_t row_blocks) {
  index_t const row = blockIdx.x / row_blocks;
  std::uint32_t const part = blockIdx.x % row_blocks;
  std::uint32_t const length = rows.length(row);
  bool const sorted = length > rows.top_k;
  if (part == 0 && threadIdx.x == 0) {
    auto const begin = static_cast<std::int32_t>(row * rows.width);
    buffers.begins[row] = begin;
    buffers.key_ends[row] = begin + (sorted ? static_cast<std::int32_t>(length) : 0);
    buffers.winner_ends[row] = begin + (sorted ? static_cast<std::int32_t>(rows.top_k) : 0);
  }
  if (!sorted) return;
  for (std::uint32_t i = threadIdx.x; i < full_sort_block; i += full_sort_threads) {
    std::uint32_t const s = part * full_sort_block + i;
    if (s >= length) break;
    buffers.keys[0][row * rows.width + s] = score_key(rows.row(row)[s]);
    buffers.positions[0][row * rows.width + s] = s;
  }
}

/// The sorted positions as selections.
template <class Score>
INDEXSHARE_KERNEL void __launch_bounds__(full_sort_threads)
    full_sort_write(TopKRows<Score> rows, std::uint32_t const* positions) {
  index_t const row = blockIdx.x;
  std::uint32_t const length = rows.length(row);
  auto const top_k = static_cast<std::uint32_t>(rows.top_k);
  position_t* const out = rows.selection(row);
  if (threadIdx.x == 0) {
    rows.counts[row * rows.count_stride] = static_cast<position_t>(min(length, top_k));
  }
  if (length <= top_k) {
    write_whole_row(length, top_k, full_sort_threads, out);
    return;
  }
  for (std::uint32_t j = threadIdx.x; j < top_k; j += full_sort_threads) {
    out[j] = static_cast<position_t>(positions[row * rows.width + j]);
  }
}

/// What CUB asks for and runs: sorts each row by descending key, stably, so that ties stay in
/// position order; then its first winners by ascending position, which are `position_bits` long.
/// Without `library` only `bytes` is set. `positions` ends where the result is.
inline cudaError_t sort_segments(CudaExec const& x, FullSortBuffers const& buffers, int rows,
                                 int scores, int position_bits, void* library, std::size_t& bytes,
                                 std::uint32_t const*& result) noexcept {
  cub::DoubleBuffer<std::uint32_t> keys(buffers.keys[0], buffers.keys[1]);
  cub::DoubleBuffer<std::uint32_t> positions(buffers.positions[0], buffers.positions[1]);
  std::size_t by_key = bytes;
  std::size_t by_position = bytes;
  cudaError_t error = cub::DeviceSegmentedRadixSort::SortPairsDescending(
      library, by_key, keys, positions, scores, rows, buffers.begins, buffers.key_ends, 0, 32,
      x.stream());
  if (error != cudaSuccess) return error;
  error = cub::DeviceSegmentedRadixSort::SortKeys(library, by_position, positions, scores, rows,
                                                  buffers.begins, buffers.winner_ends, 0,
                                                  position_bits, x.stream());
  bytes = std::max(by_key, by_position);
  result = positions.Current();
  return error;
}

constexpr int bits_of(index_t count) noexcept {
  return std::max(1, static_cast<int>(cuda::std::bit_width(static_cast<std::uint64_t>(count))));
}

/// Rows [first, first + count) of a call.
template <class Score>
TopKRows<Score> rows_from(TopKRows<Score> rows, index_t first) noexcept {
  rows.scores += first * rows.score_stride;
  rows.lengths += first * rows.length_stride;
  rows.indices += first * rows.index_stride;
  rows.counts += first * rows.count_stride;
  return rows;
}

template <class Score>
Status full_sort_pass(CudaExec const& x, TopKRows<Score> const& rows, index_t count,
                      FullSortBuffers const& buffers, FullSortPlan const& plan) noexcept {
  Status status = launch(x, plan.kernels[0], full_sort_keys<Score>,
                         {dim3(static_cast<unsigned>(count * plan.row_blocks)), plan.threads, 0},
                         rows, buffers, static_cast<std::uint32_t>(plan.row_blocks));
  if (!status.ok()) return status;
  std::uint32_t const* positions = nullptr;
  std::size_t library_bytes = full_sort_library_bytes;
  cudaError_t error =
      sort_segments(x, buffers, static_cast<int>(count), static_cast<int>(count * rows.width),
                    bits_of(rows.width), buffers.library, library_bytes, positions);
  if (error == cudaSuccess && x.checks_each_kernel()) error = cudaStreamSynchronize(x.stream());
  if (error != cudaSuccess) return cuda_failure(error, plan.kernels[1]);
  return launch(x, plan.kernels[2], full_sort_write<Score>,
                {dim3(static_cast<unsigned>(count)), plan.threads, 0}, rows, positions);
}

}  // namespace detail

/// By CUB's segmented radix sort, one block of its kernels per row: some ten passes over the
/// scores' keys and positions. Reads each score once. Lengths stay on the device. Any k. Errors:
/// bad_shape, bad_stride, missing_input as RadixTopK; workspace_too_small; those of `topk_plan`;
/// backend_error. Only enqueues.
template <Element Score>
Status topk_select(CudaExec const& x, FullSortTopK policy,
                   ScoreView<Space::device, Score const> const& scores,
                   LengthView<Space::device> const& lengths,
                   SelectionView<Space::device> const& out, Workspace ws) noexcept {
  using namespace detail;
  if (Status const status = check_inputs(policy, scores, lengths, out); !status.ok()) return status;
  Shape const shape = topk_shape<Score>(scores, out);
  auto const plan = topk_plan(x.limits(), policy, shape);
  if (!plan) return plan.error();
  if (Status const status =
          check_workspace("workspace of the full sort, in bytes", ws, plan->workspace.bytes);
      !status.ok()) {
    return status;
  }
  WorkspaceCarver carver(ws);
  FullSortBuffers const buffers = carve_full_sort(carver, shape);
  TopKRows<Score> const rows = topk_rows<Score>(scores, lengths, out);
  return for_each_pass(shape.rows, plan->rows_per_pass, [&](RowRange pass) noexcept {
    return full_sort_pass(x, rows_from(rows, pass.first), pass.count, buffers, *plan);
  });
}

static_assert(TopKPolicy<FullSortTopK, CudaExec, float> &&
              TopKPolicy<FullSortTopK, CudaExec, bf16> && TopKPolicy<FullSortTopK, CudaExec, fp16>);

}  // namespace v0
}  // namespace indexshare
