// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/cuda/device_limits.hpp>
#include <indexshare/dims.hpp>
#include <indexshare/status.hpp>
#include <indexshare/topk/radix.hpp>
#include <indexshare/workspace.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>

/// @file What CUDA top-k launches for a shape, as arithmetic: which kernels, how many blocks, how
/// much shared memory and scratch. Needs no toolkit and no device.

namespace indexshare {
inline namespace v0 {

/// Widest selection of RadixTopK on CUDA.
inline constexpr index_t max_cuda_top_k = 4096;

namespace detail {

/// Rows of at most `row_keys` scores: one small block per row.
struct TopKNarrow {
  static constexpr int threads = 128;
  static constexpr int digit_bits = 8;   ///< of one radix pass
  static constexpr int row_keys = 2048;  ///< longest row whose keys one block holds
};

/// Longer rows. One block per row still selects from up to `row_keys` scores; of a longer row it
/// samples scores for a threshold, and many blocks collect the candidates above it.
struct TopKWide {
  static constexpr index_t top_k = max_cuda_top_k;
  static constexpr int threads = 512;
  static constexpr int digit_bits = 11;
  static constexpr int row_keys = 16384;
  static constexpr int sample_rate = 32;  ///< one score in so many, within the bounds below
  static constexpr int least_sample = 2048;
  static constexpr int most_sample = 16384;
  static constexpr int scores_per_thread = 16;
  static constexpr int chunk = threads * scores_per_thread;  ///< scores of one block
  static constexpr int candidates = 10240;  ///< more than that, and the row is selected anew
};

/// What the blocks of a row need to know about it. Candidates lie above `key` in the order of
/// scores, or equal it at a position up to `position`.
struct alignas(16) TopKThreshold {
  std::uint32_t key;
  std::uint32_t position;
  std::uint32_t length;  ///< 0: the row is done
  std::uint32_t unused;
};

/// Shared memory of a block that selects. Whatever the block works on follows `bins`.
template <class T>
struct alignas(16) TopKScratch {
  TopKThreshold threshold;
  std::uint32_t word;  ///< what one thread found, for all
  std::uint32_t digit;
  std::uint32_t ties;
  std::uint32_t takes_all;
  std::uint32_t warps[32];                 ///< sums of the warps in a block-wide scan
  std::uint32_t bins[1 << T::digit_bits];  ///< histogram of a digit; later one bit per key
};

struct TopKCounters {
  std::uint32_t candidates;  ///< of all blocks of the row, whether they fit or not
  std::uint32_t arrived;     ///< blocks whose candidates are written
};
/// The candidates of one chunk of a row: [offset, offset + count) of the row's buffer.
struct TopKChunk {
  std::uint32_t offset;
  std::uint32_t count;
  std::uint32_t shift;  ///< see TopKCandidates; written only for rows of many chunks
};

/// Scratch of rows that are longer than TopKWide::row_keys.
struct TopKBuffers {
  TopKThreshold* thresholds;  ///< [rows]
  TopKCounters* counters;     ///< [rows]
  TopKChunk* chunks;          ///< [rows, chunks]
  std::uint32_t* keys;        ///< [rows, candidates]
  std::uint32_t* positions;   ///< [rows, candidates]
};
template <class Wide>
constexpr TopKBuffers carve_topk(WorkspaceCarver& carver, index_t rows, index_t chunks) noexcept {
  TopKBuffers buffers{};
  buffers.thresholds = carver.take<TopKThreshold>(saturating_area(rows, 1));
  buffers.counters = carver.take<TopKCounters>(saturating_area(rows, 1));
  buffers.chunks = carver.take<TopKChunk>(saturating_area(rows, chunks));
  buffers.keys = carver.take<std::uint32_t>(saturating_area(rows, Wide::candidates));
  buffers.positions = carver.take<std::uint32_t>(saturating_area(rows, Wide::candidates));
  return buffers;
}

/// Chunks begin at 128-byte lines, so that rows at any address are read in whole sectors. A row
/// begins up to this many elements into its first chunk.
inline constexpr index_t most_line_elements = 128;

/// Chunks of a row of `width` scores whose first chunk begins up to `slack` elements early.
template <class Wide>
constexpr index_t topk_chunks(index_t width, index_t slack) noexcept {
  return (width + slack + Wide::chunk - 1) / Wide::chunk;
}

constexpr int topk_row_bytes(int scratch, index_t keys) noexcept {
  return scratch + static_cast<int>((keys + 3) / 4 * 16);
}
/// Words from one warp's staged survivors to the next: equal numbers of a few survivors lie in
/// different banks.
template <class Wide>
inline constexpr int topk_staged_stride = 32 * Wide::scores_per_thread + 2;

/// The candidates' keys, or before that, from the bins on, the survivors of a chunk: a key and a
/// 16-bit place each.
template <class Wide>
constexpr int topk_chunk_bytes() noexcept {
  int const scratch = static_cast<int>(sizeof(TopKScratch<Wide>));
  int const bins = static_cast<int>(sizeof(TopKScratch<Wide>::bins));
  int const staged = (Wide::threads / 32) * topk_staged_stride<Wide>;
  return scratch + (std::max(4 * Wide::candidates, 6 * staged - bins) + 15) / 16 * 16;
}

}  // namespace detail

/// One kernel of a plan; no blocks: it is not launched.
struct TopKLaunch {
  char const* kernel = "";
  index_t blocks = 0;
  int threads = 0;
  int shared_bytes = 0;  ///< of one block, all of it dynamic
};

struct TopKPlan {
  TopKLaunch rows;         ///< one block per row
  TopKLaunch chunks;       ///< one block per chunk of a row, where rows may be long
  index_t row_chunks = 0;  ///< chunks of one row; a launch takes max_position / row_chunks rows
  WorkspaceSize workspace{};
};

namespace detail {

template <class Narrow, class Wide>
constexpr Result<TopKPlan> plan_topk(DeviceLimits const& limits, Shape const& shape,
                                     index_t slack) noexcept {
  if (Status const status =
          check_compute_capability("top-k: compute capability of the device, times 10", limits);
      !status.ok()) {
    return refuse(status);
  }
  static_assert(Wide::top_k <= Wide::candidates && Wide::top_k <= Wide::row_keys);
  if (shape.top_k > Wide::top_k) {
    return refuse(
        failure(Errc::unsupported, "top-k: widest selection on CUDA", Wide::top_k, shape.top_k));
  }
  if (shape.keys > max_position) {
    return refuse(
        failure(Errc::unsupported, "top-k: keys of a row on CUDA", max_position, shape.keys));
  }
  index_t const rows = std::max<index_t>(shape.rows, 0);
  index_t const keys = std::max<index_t>(shape.keys, 0);
  TopKPlan plan;
  if (keys <= Narrow::row_keys) {
    plan.rows = {"topk_row, narrow", rows, Narrow::threads,
                 topk_row_bytes(sizeof(TopKScratch<Narrow>), keys)};
  } else {
    plan.rows = {
        "topk_row, wide", rows, Wide::threads,
        topk_row_bytes(sizeof(TopKScratch<Wide>), std::min<index_t>(keys, Wide::row_keys))};
  }
  if (keys > Wide::row_keys) {
    plan.row_chunks = topk_chunks<Wide>(keys, slack);
    plan.chunks = {"topk_chunk", rows * plan.row_chunks, Wide::threads, topk_chunk_bytes<Wide>()};
    WorkspaceCarver carver;
    carve_topk<Wide>(carver, rows, plan.row_chunks);
    plan.workspace = carver.size();
  }
  if (rows > max_position) {
    return refuse(
        failure(Errc::unsupported, "top-k: rows of one call on CUDA", max_position, rows));
  }
  int const shared = std::max(plan.rows.shared_bytes, plan.chunks.shared_bytes);
  Status const fits = check_shared_memory(
      "top-k: shared memory that a block of the device may have, in bytes", limits, shared);
  return fits.ok() ? Result<TopKPlan>(plan) : refuse(fits);
}

}  // namespace detail

/// The launches of RadixTopK for rows, keys and top_k of `shape`, whatever the element type and
/// the addresses. Errors: unsupported with the limit and what the shape or the device has.
constexpr Result<TopKPlan> topk_plan(DeviceLimits const& limits, RadixTopK,
                                     Shape const& shape) noexcept {
  return detail::plan_topk<detail::TopKNarrow, detail::TopKWide>(limits, shape,
                                                                 detail::most_line_elements - 1);
}

/// Scratch for the candidates of rows of more than 16384 keys, about 80 KiB per row; none for
/// shorter ones. Errors: those of `topk_plan`.
template <detail::HasDeviceLimits X>
constexpr Result<WorkspaceSize> topk_workspace(X const& x, RadixTopK policy,
                                               Shape const& shape) noexcept {
  Result<TopKPlan> const plan = topk_plan(x.limits(), policy, shape);
  if (!plan) return refuse(plan.error());
  return plan->workspace;
}

}  // namespace v0
}  // namespace indexshare
