// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/cuda/device_limits.hpp>
#include <indexshare/dims.hpp>
#include <indexshare/status.hpp>
#include <indexshare/topk/full_sort.hpp>
#include <indexshare/workspace.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>

/// @file What FullSortTopK launches on CUDA, as arithmetic: passes and scratch. Needs no toolkit
/// and no device.

namespace indexshare {
inline namespace v0 {

/// What a call of FullSortTopK runs for each pass of rows: a kernel that writes keys and positions,
/// CUB's sorts, and a kernel that writes the selections.
struct FullSortPlan {
  static constexpr char const* kernels[] = {"full_sort_keys", "CUB, segmented radix sort",
                                            "full_sort_write"};

  index_t rows_per_pass = 0;
  index_t row_blocks = 0;  ///< blocks of the first kernel for one row
  int threads = 0;         ///< of our two kernels; none has dynamic shared memory
  WorkspaceSize workspace{};
};

namespace detail {

inline constexpr int full_sort_threads = 256;
inline constexpr int full_sort_block = 1024;  ///< scores per block
/// What CUB's sorts are given for themselves. They sort between our buffers and ask for less than
/// 1 KiB; a test compares.
inline constexpr std::size_t full_sort_library_bytes = 64 * 1024;

/// Scratch of a full sort. CUB sorts from one half of a pair to the other and back.
struct FullSortBuffers {
  std::uint32_t* keys[2];       ///< [rows, width] each
  std::uint32_t* positions[2];  ///< [rows, width] each
  std::int32_t* begins;         ///< [rows], of the rows in the buffers
  std::int32_t* key_ends;       ///< [rows], of what is sorted by score: nothing of a short row
  std::int32_t* winner_ends;    ///< [rows], of what is then sorted by position
  std::byte* library;
};

/// Scratch of one pass; monotone in rows and keys, though a pass of longer rows has fewer.
constexpr FullSortBuffers carve_full_sort(WorkspaceCarver& carver, Shape const& shape) noexcept {
  constexpr auto most = static_cast<std::size_t>(max_position);
  std::size_t const scores = std::min(saturating_area(shape.rows, shape.keys), most);
  std::size_t const rows = std::min(saturating_area(shape.rows, 1), most / full_sort_block);
  FullSortBuffers buffers{};
  for (auto& keys : buffers.keys) keys = carver.take<std::uint32_t>(scores);
  for (auto& positions : buffers.positions) positions = carver.take<std::uint32_t>(scores);
  buffers.begins = carver.take<std::int32_t>(rows);
  buffers.key_ends = carver.take<std::int32_t>(rows);
  buffers.winner_ends = carver.take<std::int32_t>(rows);
  buffers.library = carver.take<std::byte>(full_sort_library_bytes);
  return buffers;
}

}  // namespace detail

/// The passes of FullSortTopK for rows and keys of `shape`; any k. Errors: unsupported before sm_80
/// and for rows of 2^31 keys or more.
constexpr Result<FullSortPlan> topk_plan(DeviceLimits const& limits, FullSortTopK,
                                         Shape const& shape) noexcept {
  using namespace detail;
  if (Status const status =
          check_compute_capability("full sort: compute capability of the device, times 10", limits);
      !status.ok()) {
    return refuse(status);
  }
  if (shape.keys > max_position) {
    return refuse(
        failure(Errc::unsupported, "full sort: keys of a row on CUDA", max_position, shape.keys));
  }
  FullSortPlan plan;
  // CUB counts with int
  plan.rows_per_pass =
      std::clamp<index_t>(max_position / std::max<index_t>(shape.keys, full_sort_block), 1,
                          std::max<index_t>(shape.rows, 1));
  plan.row_blocks = std::max<index_t>(1, (shape.keys + full_sort_block - 1) / full_sort_block);
  plan.threads = full_sort_threads;
  WorkspaceCarver carver;
  carve_full_sort(carver, shape);
  plan.workspace = carver.size();
  return plan;
}

/// 16 bytes per score of a pass, and 64 KiB for CUB. Errors: those of `topk_plan`.
template <detail::HasDeviceLimits X>
constexpr Result<WorkspaceSize> topk_workspace(X const& x, FullSortTopK policy,
                                               Shape const& shape) noexcept {
  Result<FullSortPlan> const plan = topk_plan(x.limits(), policy, shape);
  if (!plan) return refuse(plan.error());
  return plan->workspace;
}

}  // namespace v0
}  // namespace indexshare
