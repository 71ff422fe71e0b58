// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/cuda/batch.cuh>
#include <indexshare/cuda/detail/block_sum.cuh>
#include <indexshare/cuda/detail/launch.cuh>
#include <indexshare/cuda/detail/lines.cuh>
#include <indexshare/cuda/detail/warp.cuh>
#include <indexshare/cuda/exec.cuh>
#include <indexshare/prefetch.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>

/// @file plan_prefetch on CUDA: a bit for each slot of the cache is set by whoever selects it, the
/// bits are counted, and each entry of the plan becomes the number of bits before its own. One fill
/// and four kernels, in this order on the stream; nothing is exchanged between the blocks of one
/// but the bits, which are set by atomic operations. Integer work: results are the host's, byte for
/// byte.
///
/// Bytes at least: each entry of the plan is read to be listed, read again to be replaced, since
/// its row depends on all others, and written: 12 a piece; the list is written: 4 per row of its
/// capacity; the words of 32 slots are cleared, read to be counted, read and written: 8, 4, 8 and 4
/// bytes, three quarters of a byte per slot of the cache.

namespace indexshare {
inline namespace v0 {
namespace detail {

inline constexpr int prefetch_threads = 256;
inline constexpr int prefetch_warps = prefetch_threads / 32;

/// The words of a cache in equal parts, one per block: as many as there are blocks to fill a GPU
/// with, and few enough that each block adds up the counts of all.
struct PrefetchParts {
  index_t words;  ///< of a part, a multiple of prefetch_threads
  index_t parts;

  static constexpr PrefetchParts of(index_t word_count) noexcept {
    index_t const smallest = prefetch_threads;
    index_t const even =
        (word_count + PrefetchScratch::most_parts - 1) / PrefetchScratch::most_parts;
    index_t const words = std::max<index_t>((even + smallest - 1) / smallest, 1) * smallest;
    return {words, std::max<index_t>((word_count + words - 1) / words, 1)};
  }
};

struct ListSlot {
  Tensor<Space::device, position_t, 2> slots;
  index_t cache_slots;
  PrefetchWord* words;

  __device__ void operator()(index_t row, index_t, LaneRange lanes) const {
    lanes.for_each([&](index_t j) {
      position_t const slot = slots(row, j);
      if (slot < 0 || slot >= cache_slots) return;
      std::uint32_t* const listed = &words[slot / PrefetchWord::slots].listed;
      std::uint32_t const bit = std::uint32_t{1} << slot % PrefetchWord::slots;
      // Rows next to each other select much the same: most bits are set already. Nobody clears one.
      if ((*static_cast<std::uint32_t const volatile*>(listed) & bit) == 0) atomicOr(listed, bit);
    });
  }
};

struct StageSlot {
  Tensor<Space::device, position_t, 2> slots;
  index_t cache_slots;
  PrefetchWord const* words;

  __device__ void operator()(index_t row, index_t, LaneRange lanes) const {
    lanes.for_each([&](index_t j) {
      position_t const slot = slots(row, j);
      slots(row, j) = slot < 0 || slot >= cache_slots
                          ? no_position
                          : words[slot / PrefetchWord::slots].row(slot % PrefetchWord::slots);
    });
  }
};

INDEXSHARE_KERNEL void count_listed_kernel(__grid_constant__ PrefetchScratch const scratch,
                                           __grid_constant__ PrefetchParts const cut) {
  __shared__ std::uint32_t sums[prefetch_warps];
  index_t const begin = index_t{blockIdx.x} * cut.words;
  index_t const end = clamp_length(begin + cut.words, scratch.word_count);
  std::uint32_t count = 0;
  for (index_t w = begin + threadIdx.x; w < end; w += prefetch_threads) {
    count += static_cast<std::uint32_t>(__popc(scratch.words[w].listed));
  }
  BlockSum const sum = block_sum<prefetch_warps>(sums, count);
  if (threadIdx.x == 0) scratch.parts[blockIdx.x] = sum.total;
}

/// Numbers the listed slots of a part and writes them to the list, and a share of the list's end.
INDEXSHARE_KERNEL void number_listed_kernel(
    __grid_constant__ PrefetchScratch const scratch, __grid_constant__ PrefetchParts const cut,
    __grid_constant__ PrefetchList<Space::device> const list) {
  __shared__ std::uint32_t sums[prefetch_warps];
  std::uint32_t before_part = 0;
  std::uint32_t count = 0;
  for (index_t part = threadIdx.x; part < cut.parts; part += prefetch_threads) {
    count += scratch.parts[part];
    before_part += part < blockIdx.x ? scratch.parts[part] : 0;
  }
  count = block_sum<prefetch_warps>(sums, count).total;
  __syncthreads();
  std::uint32_t before = block_sum<prefetch_warps>(sums, before_part).total;

  index_t const begin = index_t{blockIdx.x} * cut.words;
  for (index_t first = begin; first < begin + cut.words; first += prefetch_threads) {
    index_t const w = first + threadIdx.x;
    std::uint32_t const listed = w < scratch.word_count ? scratch.words[w].listed : 0;
    auto const bits = static_cast<std::uint32_t>(__popc(listed));
    __syncthreads();  // the last sums are done with
    BlockSum const sum = block_sum<prefetch_warps>(sums, bits);
    std::uint32_t const before_word = before + sum.before;
    if (w < scratch.word_count) scratch.words[w].before = before_word;
    // A warp writes the slots of one of its words after the other, each lane its bit's.
    for (int lane = 0; lane < 32; ++lane) {
      PrefetchWord const word{of_lane(listed, lane), of_lane(before_word, lane)};
      if ((word.listed >> lane_of_thread() & 1) == 0) continue;
      index_t const slot = (w - lane_of_thread() + lane) * PrefetchWord::slots + lane_of_thread();
      list.slots(word.row(lane_of_thread())) = static_cast<position_t>(slot);
    }
    before += sum.total;
  }

  index_t const stride = index_t{gridDim.x} * prefetch_threads;
  for (index_t i = count + index_t{blockIdx.x} * prefetch_threads + threadIdx.x;
       i < list.capacity(); i += stride) {
    list.slots(i) = no_position;
  }
  if (blockIdx.x == 0 && threadIdx.x == 0) list.count(0) = static_cast<position_t>(count);
}

struct FindAppended {
  PrefetchList<Space::device> list;
  LengthView<Space::device> positions;
  LengthView<Space::device> requests;
  PageTable<Space::device> kv_pages;
  Tensor<Space::device, position_t, 1> slots;
  Tensor<Space::device, position_t, 1> rows;

  __device__ void operator()(index_t i) const {
    find_appended(list, positions, requests, kv_pages, i, slots, rows);
  }
};

}  // namespace detail

/// Back end of plan_prefetch: fills `list` with the distinct slots in `slots` [rows, top_k] and
/// replaces these by their rows of the list. Only enqueues; can be captured.
inline Status stage_slots(CudaExec const& x, index_t cache_slots,
                          Tensor<Space::device, position_t, 2> const& slots,
                          PrefetchList<Space::device> const& list,
                          detail::PrefetchScratch const& scratch) noexcept {
  using namespace detail;
  if (scratch.word_count > 0) {
    cudaError_t const error = cudaMemsetAsync(
        scratch.words, 0, static_cast<std::size_t>(scratch.word_count) * sizeof(PrefetchWord),
        x.stream());
    if (error != cudaSuccess) return cuda_failure(error, "plan_prefetch");
  }
  Lines const lines{slots.extent(0), 1, slots.extent(1)};
  PrefetchParts const cut = PrefetchParts::of(scratch.word_count);
  LaunchShape const parts{dim3(static_cast<unsigned>(cut.parts)), prefetch_threads, 0};
  Status status = for_each_line(x, "plan_prefetch, listing", lines,
                                ListSlot{slots, cache_slots, scratch.words});
  if (status.ok())
    status = launch(x, "plan_prefetch, counting", count_listed_kernel, parts, scratch, cut);
  if (status.ok()) {
    status = launch(x, "plan_prefetch, numbering", number_listed_kernel, parts, scratch, cut, list);
  }
  if (status.ok()) {
    status = for_each_line(x, "plan_prefetch, staging", lines,
                           StageSlot{slots, cache_slots, scratch.words});
  }
  return status;
}

/// Where tokens lie that are appended to a layer's KV cache after its rows were copied: as on the
/// host (host/prefetch.hpp). Only enqueues; can be captured.
inline Status appended_rows(CudaExec const& x, PrefetchList<Space::device> const& list,
                            LengthView<Space::device> const& positions,
                            LengthView<Space::device> const& requests,
                            PageTable<Space::device> const& kv_pages,
                            Tensor<Space::device, position_t, 1> const& slots,
                            Tensor<Space::device, position_t, 1> const& rows) noexcept {
  if (Status const status =
          detail::check_appended_rows(list, positions, requests, kv_pages, slots, rows);
      !status.ok()) {
    return status;
  }
  return detail::for_each_item(
      x, "appended_rows", positions.extent(0),
      detail::FindAppended{list, positions, requests, kv_pages, slots, rows});
}

}  // namespace v0
}  // namespace indexshare
