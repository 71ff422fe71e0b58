// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/cuda/detail/launch.cuh>
#include <indexshare/cuda/detail/lines.cuh>
#include <indexshare/cuda/exec.cuh>
#include <indexshare/records.hpp>

#include <bit>
#include <cstddef>
#include <cstdint>
#include <type_traits>

/// @file Records and copies of token rows in device memory (records.hpp). The calls only enqueue
/// and can be captured, and replayed with new slots. Pinned memory of the host counts as device
/// memory under its device address: that is how rows move between the two.

namespace indexshare {
inline namespace v0 {
namespace detail {

/// What becomes of a row whose source has no place.
enum class MissingRows { skipped, zeros };

/// Copies `bytes` bytes in words; `member` is one of a team of threads. Two words are on their way
/// at once: the second load must not wait for the first store, which might be to the same place.
template <class Word>
__device__ void copy_words(std::byte const* from, std::byte* to, index_t bytes, int member,
                           int team) {
  auto const count = static_cast<int>(bytes / index_t{sizeof(Word)});
  auto const* const source = reinterpret_cast<Word const*>(from);
  auto* const target = reinterpret_cast<Word*>(to);
  for (int i = member; i < count; i += 2 * team) {
    bool const second = i + team < count;
    Word words[2]{};
    if (from != nullptr) {
      words[0] = source[i];
      if (second) words[1] = source[i + team];
    }
    target[i] = words[0];
    if (second) target[i + team] = words[1];
  }
}

template <class Word, class From, class To>
struct MoveRow {
  using ScaleWord = std::conditional_t<(sizeof(Word) > 4), std::uint32_t, Word>;

  RowParts parts;
  From from;
  To to;
  MissingRows missing;

  __device__ void operator()(index_t row, int member, int team) const {
    auto const source = from(row);
    auto const target = to(row);
    if (target.row == nullptr) return;
    if (source.row == nullptr && missing == MissingRows::skipped) return;
    copy_words<Word>(source.row, target.row, parts.row, member, team);
    copy_words<ScaleWord>(source.scale, target.scale, parts.scale, member, team);
  }
};

inline constexpr int team_block_threads = 256;

/// f(row, member, team) for each row by a team of threads, a power of two of at most a warp.
template <class F>
INDEXSHARE_KERNEL void each_team_kernel(index_t rows, int team, __grid_constant__ F const f) {
  int const teams = team_block_threads / team;
  int const member = static_cast<int>(threadIdx.x) % team;
  index_t const step = index_t{gridDim.x} * teams;
  for (index_t row = index_t{blockIdx.x} * teams + static_cast<int>(threadIdx.x) / team; row < rows;
       row += step) {
    f(row, member, team);
  }
}

template <class Word, class From, class To>
Status move_words(CudaExec const& x, char const* what, index_t rows,
                  MoveRow<Word, From, To> const& move) noexcept {
  auto const words = static_cast<std::size_t>(move.parts.row) / sizeof(Word);
  int const team = words >= 32 ? 32 : static_cast<int>(std::bit_ceil(words));
  index_t const teams = team_block_threads / team;
  return launch(x, what, each_team_kernel<MoveRow<Word, From, To>>,
                {dim3(blocks_for((rows + teams - 1) / teams)), team_block_threads, 0}, rows, team,
                move);
}

/// Numbers whose common divisors are the words that rows can be copied in.
template <class Cache>
std::uint64_t divisible_by_words(Cache const& cache) noexcept {
  auto const bytes = [](index_t elements) noexcept {
    return static_cast<std::uint64_t>(elements) * sizeof(*Cache{}.data);
  };
  return reinterpret_cast<std::uintptr_t>(cache.data) | bytes(cache.block_stride) |
         bytes(cache.row_stride);
}
template <class Byte>
std::uint64_t divisible_by_words(Tensor<Space::device, Byte, 2> const& records) noexcept {
  return reinterpret_cast<std::uintptr_t>(records.data_handle()) |
         static_cast<std::uint64_t>(records.stride(0));
}

/// Row i of `to` = row i of `from`. `sizes` holds `divisible_by_words` of both sides.
template <class From, class To>
Status move_rows(CudaExec const& x, char const* what, index_t rows, RowParts const& parts,
                 std::uint64_t sizes, From const& from, To const& to,
                 MissingRows missing) noexcept {
  std::uint64_t const all = sizes | static_cast<std::uint64_t>(parts.row);
  if (all % 16 == 0) {
    return move_words(x, what, rows, MoveRow<uint4, From, To>{parts, from, to, missing});
  }
  if (all % 4 == 0) {
    return move_words(x, what, rows, MoveRow<std::uint32_t, From, To>{parts, from, to, missing});
  }
  return move_words(x, what, rows, MoveRow<std::uint8_t, From, To>{parts, from, to, missing});
}

}  // namespace detail

/// Writes the rows `slots` of a cache as records: parameters and bytes as on the host
/// (host/records.hpp). A slot that is `no_position` or outside the cache cannot be refused here:
/// its record becomes zeros. Only enqueues; can be captured.
/// Errors: bad_shape, bad_stride, missing_input, bad_value (the cache's format), backend_error.
template <class Format, class Storage>
Status export_rows(CudaExec const& x, CacheView<Space::device, Format, Storage> const& cache,
                   SlotView<Space::device> const& slots,
                   Tensor<Space::device, std::byte, 2> const& out) noexcept {
  using namespace detail;
  if (Status const status = check_export(cache, slots, out); !status.ok()) return status;
  RowParts const parts = parts_of(cache);
  return move_rows(x, "export_rows", slots.extent(0), parts,
                   divisible_by_words(cache) | divisible_by_words(out), CacheRows{cache, slots},
                   RecordRows<std::byte>{out.data_handle(), out.stride(0), parts.row},
                   MissingRows::zeros);
}

/// Writes records into the rows `slots` of a cache: as on the host, but a slot that is
/// `no_position` or outside the cache is skipped. Only enqueues; can be captured. Errors:
/// bad_shape, bad_stride, missing_input, bad_value (the cache's format), backend_error.
template <class Format>
Status import_rows(
    CudaExec const& x, Tensor<Space::device, std::byte const, 2> const& records,
    SlotView<Space::device> const& slots,
    CacheView<Space::device, Format, typename Format::storage> const& cache) noexcept {
  using namespace detail;
  if (Status const status = check_import(records, slots, cache); !status.ok()) return status;
  RowParts const parts = parts_of(cache);
  return move_rows(x, "import_rows", slots.extent(0), parts,
                   divisible_by_words(cache) | divisible_by_words(records),
                   RecordRows<std::byte const>{records.data_handle(), records.stride(0), parts.row},
                   CacheRows{cache, slots}, MissingRows::skipped);
}

/// Row to_slots(i) of `to` = row from_slots(i) of `from`, as if all rows had been read before any
/// is written: as on the host, but every entry with a slot outside its cache is skipped, so that a
/// list whose length is known on the device alone is padded with `no_position`. One kernel, two
/// where the memory of the caches overlaps. Only enqueues; can be captured. Errors: bad_shape,
/// bad_stride, missing_input, workspace_too_small, bad_value (caches of other formats or bases),
/// backend_error.
template <class Format, class Storage>
Status copy_rows(CudaExec const& x, CacheView<Space::device, Format, Storage> const& from,
                 SlotView<Space::device> const& from_slots,
                 CacheView<Space::device, Format, typename Format::storage> const& to,
                 SlotView<Space::device> const& to_slots, Workspace ws = {}) noexcept {
  using namespace detail;
  bool staged = false;
  if (Status const status = check_copy(from, from_slots, to, to_slots, ws, staged); !status.ok()) {
    return status;
  }
  index_t const rows = from_slots.extent(0);
  RowParts const parts = parts_of(from);
  CacheRows const source{from, from_slots};
  CacheRows const target{to, to_slots};
  std::uint64_t const of_source = divisible_by_words(from);
  std::uint64_t const of_target = divisible_by_words(to);
  if (!staged) {
    return move_rows(x, "copy_rows", rows, parts, of_source | of_target, source, target,
                     MissingRows::skipped);
  }
  RecordRows<std::byte> const records{static_cast<std::byte*>(ws.data), staged_stride(from),
                                      parts.row};
  Status const status = move_rows(x, "copy_rows, reading", rows, parts, of_source, source, records,
                                  MissingRows::skipped);
  if (!status.ok()) return status;
  return move_rows(x, "copy_rows, writing", rows, parts, of_target,
                   StagedRows<decltype(source)>{records, source}, target, MissingRows::skipped);
}

}  // namespace v0
}  // namespace indexshare
