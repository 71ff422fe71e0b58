// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/cache.hpp>
#include <indexshare/concepts.hpp>
#include <indexshare/cuda/detail/launch.cuh>
#include <indexshare/cuda/detail/lines.cuh>
#include <indexshare/cuda/exec.cuh>
#include <indexshare/detail/check.hpp>
#include <indexshare/selection.hpp>

#include <cstdint>

/// @file Selections in device memory: mapping to slots, handing over, validating, tags of graphs.
/// All calls only enqueue on the executor's stream and can be captured. Integer work: results are
/// the host's, byte for byte.

namespace indexshare {
inline namespace v0 {
namespace detail {

struct MapSlots {
  SelectionView<Space::device, position_t const> selection;
  LengthView<Space::device> requests;
  PageTable<Space::device> pages;
  Tensor<Space::device, position_t, 2> slots;

  __device__ void operator()(index_t row, index_t, LaneRange lanes) const {
    index_t const count = selection.counts(row);
    index_t const request = requests(row);
    lanes.for_each([&](index_t j) {
      slots(row, j) = j < count ? pages.slot(request, selection.indices(row, j)) : no_position;
    });
  }
};

struct GatherSelection {
  SelectionView<Space::device, position_t const> from;
  LengthView<Space::device> rows;
  SelectionView<Space::device> to;

  __device__ void operator()(index_t row, index_t, LaneRange lanes) const {
    index_t const source = rows.data_handle() == nullptr ? row : rows(row);
    bool const exists = source >= 0 && source < from.indices.extent(0);
    index_t const count = exists ? clamp_length(from.counts(source), to.indices.extent(1)) : 0;
    lanes.for_each(
        [&](index_t j) { to.indices(row, j) = j < count ? from.indices(source, j) : no_position; });
    if (lanes.first == 0) to.counts(row) = static_cast<position_t>(count);
  }
};

}  // namespace detail

/// slots(r, j) = place of indices(r, j) in the pages of the row's request, `no_position` for empty
/// entries and for positions that the table does not map.
inline Status map_slots(CudaExec const& x,
                        SelectionView<Space::device, position_t const> const& selection,
                        LengthView<Space::device> const& requests,
                        PageTable<Space::device> const& pages,
                        Tensor<Space::device, position_t, 2> const& slots) noexcept {
  return detail::for_each_line(x, "map_slots", {slots.extent(0), 1, slots.extent(1)},
                               detail::MapSlots{selection, requests, pages, slots});
}

/// Row i of `to` = row rows(i) of `from`, or row i where `rows` is null. Entries at or past a
/// row's count become `no_position`. A row number outside `from` cannot be refused here, since it
/// is only known on the device: such a row of `to` becomes empty, with count 0.
inline Status gather_selection(CudaExec const& x,
                               SelectionView<Space::device, position_t const> const& from,
                               LengthView<Space::device> const& rows,
                               SelectionView<Space::device> const& to) noexcept {
  return detail::for_each_line(x, "gather_selection",
                               {to.indices.extent(0), 1, to.indices.extent(1)},
                               detail::GatherSelection{from, rows, to});
}

// ---- tags, for graphs (SelectionState::check_tags_on_device)

namespace detail {

/// Member by member: the bytes between them are never written.
__device__ inline void copy_tag(SelectionTag const& tag, SelectionTag& target) {
  target.id.forward = tag.id.forward;
  target.id.batch = tag.id.batch;
  target.rows = tag.rows;
  target.source_layer = tag.source_layer;
}

INDEXSHARE_KERNEL void write_tag_kernel(SelectionTag tag, SelectionTag* stored) {
  copy_tag(tag, *stored);
}

INDEXSHARE_KERNEL void compare_tag_kernel(SelectionTag expected, std::int32_t layer,
                                          SelectionTag const* stored, TagMismatch* mismatch) {
  if (*stored == expected) return;
  if (atomicAdd(&mismatch->found, 1u) != 0) return;  // whoever counts first describes its own
  mismatch->layer = layer;
  copy_tag(expected, mismatch->expected);
  copy_tag(*stored, mismatch->got);
}

}  // namespace detail

/// Enqueues: the tag of `state`, as it is now, goes into its memory.
inline Status write_tag(CudaExec const& x, SelectionState<Space::device> const& state) noexcept {
  return detail::launch(x, "write_tag", detail::write_tag_kernel, {dim3(1), 1, 0}, state.tag(),
                        state.stored_tag());
}

/// Enqueues: where the tag in the state's memory is not `expected`, `state.tag_mismatch()` gets
/// one more finding, and its description if it is the first.
inline Status compare_tag(CudaExec const& x, SelectionState<Space::device> const& state,
                          SelectionTag const& expected, std::int32_t layer) noexcept {
  return detail::launch(x, "compare_tag", detail::compare_tag_kernel, {dim3(1), 1, 0}, expected,
                        layer, state.stored_tag(), state.tag_mismatch());
}

// ---- validation

namespace detail {

/// One block per row. Repetitions are found a tile of entries at a time: the tile is sorted, and
/// earlier entries of the row are looked up in it. An entry is new if it is the first of its equals
/// in the tile and none lies before the tile; the others repeat one.
struct ValidateTile {
  static constexpr int entries = 2048;
  static constexpr int threads = 256;
  /// Sorts behind every slot.
  static constexpr std::uint32_t none = 0xFFFFFFFFu;
};

/// Ascending bitonic sort of `count` values, a power of two, by a block.
__device__ inline void sort_in_block(std::uint32_t* values, int count) {
  for (int run = 2; run <= count; run *= 2) {
    for (int apart = run / 2; apart > 0; apart /= 2) {
      __syncthreads();
      for (int pair = static_cast<int>(threadIdx.x); pair < count / 2; pair += blockDim.x) {
        int const low = pair / apart * 2 * apart + pair % apart;
        bool const ascending = (low & run) == 0;
        std::uint32_t const a = values[low];
        std::uint32_t const b = values[low + apart];
        if ((a > b) != ascending) continue;
        values[low] = b;
        values[low + apart] = a;
      }
    }
  }
  __syncthreads();
}

/// Place of the first of `count` ascending values that is not below `value`.
__device__ inline int lower_bound_of(std::uint32_t const* values, int count, std::uint32_t value) {
  int first = 0;
  while (count > 0) {
    int const half = count / 2;
    bool const below = values[first + half] < value;
    first = below ? first + half + 1 : first;
    count = below ? count - half - 1 : half;
  }
  return first;
}

struct ValidateInputs {
  GroupPlan<Space::device> plan;
  index_t cache_slots;
  LengthView<Space::device> lengths;
  index_t keys;

  __device__ bool has_place(position_t slot) const { return slot >= 0 && slot < cache_slots; }
};

__device__ inline void add(std::int64_t& counter, std::int64_t count) {
  if (count == 0) return;
  atomicAdd(reinterpret_cast<unsigned long long*>(&counter),
            static_cast<unsigned long long>(count));
}

INDEXSHARE_KERNEL void validate_kernel(__grid_constant__ ValidateInputs const in,
                                       SelectionReport* report) {
  using Tile = ValidateTile;
  __shared__ std::uint32_t sorted[Tile::entries];
  __shared__ int seen_before[Tile::entries];
  auto const thread = static_cast<int>(threadIdx.x);
  index_t const width = in.plan.slots.extent(1);
  for (index_t row = blockIdx.x; row < in.plan.slots.extent(0); row += gridDim.x) {
    index_t const count = clamp_length(in.plan.counts(row), width);
    if (thread == 0) {
      add(report->bad_counts, in.plan.counts(row) != count ? 1 : 0);
      add(report->bad_lengths, in.lengths(row) != clamp_length(in.lengths(row), in.keys) ? 1 : 0);
    }
    std::int64_t outside = 0;
    std::int64_t repeated = 0;
    for (index_t begin = 0; begin < count; begin += Tile::entries) {
      auto const filled =
          static_cast<int>(count - begin < Tile::entries ? count - begin : Tile::entries);
      int size = 1;
      while (size < filled) size *= 2;
      __syncthreads();  // the last tile is done with
      for (int i = thread; i < size; i += Tile::threads) {
        position_t const slot = i < filled ? in.plan.slots(row, begin + i) : no_position;
        bool const has_place = in.has_place(slot);
        sorted[i] = has_place ? static_cast<std::uint32_t>(slot) : Tile::none;
        seen_before[i] = 0;
        outside += i < filled && !has_place ? 1 : 0;
      }
      sort_in_block(sorted, size);
      for (index_t j = thread; j < begin; j += Tile::threads) {
        position_t const slot = in.plan.slots(row, j);
        if (!in.has_place(slot)) continue;
        int const place = lower_bound_of(sorted, size, static_cast<std::uint32_t>(slot));
        if (place < size && sorted[place] == static_cast<std::uint32_t>(slot)) {
          atomicExch(&seen_before[place], 1);
        }
      }
      __syncthreads();
      for (int i = thread; i < size; i += Tile::threads) {
        if (sorted[i] == Tile::none) continue;
        bool const first_of_equals = i == 0 || sorted[i - 1] != sorted[i];
        repeated += first_of_equals && seen_before[i] == 0 ? 0 : 1;
      }
    }
    add(report->outside, outside);
    add(report->duplicates, repeated);
  }
}

}  // namespace detail

/// Reports what the kernels tolerate by their rules (entries outside contribute nothing, duplicates
/// count each time, lengths are clamped) but what a correct caller never passes. A debugging aid:
/// about k^2 / 2048 look-ups a row. The numbers are those of the host's `validate`.
///
/// @param cache_slots  slots of the KV cache that the plan points into
/// @param report       in device memory, aligned to 8 bytes; overwritten by the enqueued work
/// Errors: bad_shape, bad_stride, missing_input.
inline Status validate(CudaExec const& x, GroupPlan<Space::device> const& plan, index_t cache_slots,
                       LengthView<Space::device> const& lengths, Shape const& shape,
                       SelectionReport* report) noexcept {
  using namespace detail;
  if (Status const status = first_failure(
          {check_extent("rows of the plan's counts", plan.slots.extent(0), plan.counts.extent(0)),
           check_extent("rows of the lengths against the plan", plan.slots.extent(0),
                        lengths.extent(0)),
           check_readable("slots of the plan", plan.slots),
           check_readable("counts of the plan", plan.counts), check_readable("lengths", lengths),
           report != nullptr ? Status{} : failure(Errc::missing_input, "memory of the report")});
      !status.ok()) {
    return status;
  }
  if (cudaError_t const error = cudaMemsetAsync(report, 0, sizeof(*report), x.stream());
      error != cudaSuccess) {
    return cuda_failure(error, "validate");
  }
  return launch(x, "validate", validate_kernel,
                {dim3(blocks_for(plan.slots.extent(0))), ValidateTile::threads, 0},
                ValidateInputs{plan, cache_slots, lengths, shape.keys}, report);
}

}  // namespace v0
}  // namespace indexshare
