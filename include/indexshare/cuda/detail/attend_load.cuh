// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/attention/mla.hpp>
#include <indexshare/concepts.hpp>
#include <indexshare/cuda/attention_plan.hpp>
#include <indexshare/cuda/detail/mma.cuh>
#include <indexshare/cuda/detail/warp.cuh>
#include <indexshare/cuda/detail/words.cuh>

#include <cstddef>
#include <cstdint>
#include <type_traits>

/// @file Which KV rows a query row attends to, where they lie, and how they come to shared memory.

namespace indexshare {
inline namespace v0 {
namespace detail {

/// threadIdx.x, read anew: what is computed from it takes no registers before.
__device__ inline std::uint32_t thread_again() {
  std::uint32_t thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

/// The keys of all rows: lists of slots (a group plan), or with `dense` all positions below the
/// row's length, mapped by the page table.
struct AttendKeys {
  Tensor<Space::device, position_t const, 2> slots;
  Tensor<Space::device, position_t const, 1> counts;  ///< entries of a list, or lengths
  LengthView<Space::device> requests;
  PageTable<Space::device> pages;
  index_t capacity;  ///< counts are clamped to [0, capacity]
  bool dense;

  __device__ index_t count(index_t row) const { return clamp_length(counts(row), capacity); }
};

/// The keys of one row: entry -> slot. No entry is used as an address before it is checked.
struct AttendList {
  position_t const* entries = nullptr;  ///< slots, or the row's line of the page table
  position_t request = no_position;

  /// Of an entry below the row's count. May lie outside of the cache.
  __device__ position_t slot(AttendKeys const& keys, std::uint32_t entry) const {
    if (!keys.dense) return entries[entry];
    auto const page_size = static_cast<std::uint32_t>(keys.pages.page_size);
    std::uint32_t const page = entry / page_size;
    position_t block = no_position;
    if (keys.pages.contiguous()) {
      block = page == 0 ? request : no_position;
    } else if (entries != nullptr) {
      block = entries[page];
    }
    if (block < 0) return no_position;
    index_t const slot = index_t{block} * page_size + (entry - page * page_size);
    return slot <= max_position ? static_cast<position_t>(slot) : no_position;
  }
};

__device__ inline AttendList list_of_row(AttendKeys const& keys, index_t row) {
  AttendList list;
  if (!keys.dense) {
    list.entries = keys.slots.data_handle() + row * keys.slots.stride(0);
    return list;
  }
  list.request = keys.requests(row);
  auto const& pages = keys.pages.pages;
  if (!keys.pages.contiguous() && list.request >= 0 && list.request < pages.extent(0)) {
    list.entries = pages.data_handle() + list.request * pages.stride(0);
  }
  return list;
}

/// Where the rows of a cache lie, in bytes and in the integers that are cheapest to compute with:
/// slots are 31 bits, so their division takes 32.
struct AttendRows {
  std::byte const* data;
  index_t block_stride;
  index_t row_stride;
  std::uint32_t slots;
  std::uint32_t block_size;
  std::uint32_t flat_stride;  ///< if not 0: of all rows, whatever their blocks; no division

  __device__ bool has(position_t slot) const { return static_cast<std::uint32_t>(slot) < slots; }
  __device__ std::byte const* row(position_t slot) const {
    auto const place = static_cast<std::uint32_t>(slot);
    if (flat_stride != 0) return data + std::uint64_t{place} * flat_stride;
    std::uint32_t const block = place / block_size;
    return data + block * block_stride + (place - block * block_size) * row_stride;
  }
};

/// What the kernels of one call are given.
template <class Query, class KvFormat, class Out>
struct AttendCall {
  MlaInputs<Query, KvFormat, Space::device> in{};
  MlaOutputs<Out, Space::device> out{};
  AttendKeys keys{};
  AttendRows rows{};
  index_t first_row = 0;  ///< of the pass
  index_t keys_per_split = 0;
  // factors of the grid, so their product has 31 bits
  std::uint32_t splits = 0;  ///< above 1: results go to `partials`
  std::uint32_t head_groups = 0;
  std::uint32_t value_groups = 0;  ///< of the kernel for any types
  AttendPartials partials{};
  int query_alignment = 0;  ///< bytes that all query heads start at multiples of, at most 16
  int kv_alignment = 0;     ///< the same of KV rows
};

/// A block's share of the work: part of the keys of one row, for some heads.
struct AttendPlace {
  index_t row;  ///< of the batch
  index_t row_in_pass;
  int split;
  int first_head;
  std::uint32_t first_key;  ///< entry of the row's list; a tile past 2^31 does not wrap
  std::uint32_t last_key;   ///< past the last
  AttendList list;
};
static_assert(sizeof(AttendPlace) <= AttendMemory::place_bytes);

/// Blocks of the same keys are neighbours, so that the second finds them in L2.
template <class Call>
__device__ inline AttendPlace place_of_block(Call const& call, int heads_per_block,
                                             std::uint32_t block) {
  AttendPlace place;
  place.first_head = static_cast<int>(block % call.head_groups) * heads_per_block;
  block /= call.head_groups;
  place.split = static_cast<int>(block % call.splits);
  place.row_in_pass = block / call.splits;
  place.row = call.first_row + place.row_in_pass;
  index_t const count = call.keys.count(place.row);
  index_t const first = place.split * call.keys_per_split;
  place.first_key = static_cast<std::uint32_t>(min(first, count));
  place.last_key = static_cast<std::uint32_t>(min(first + call.keys_per_split, count));
  place.list = list_of_row(call.keys, place.row);
  return place;
}

/// copy_async_16_at with one distance, where `a` is not below `b`.
template <int Ahead>
__device__ inline void copy_async_16_if(std::uint32_t a, std::uint32_t b, std::uint32_t target,
                                        std::uint64_t source, std::uint32_t bytes) {
  asm volatile(
      "{ .reg .pred p; setp.ge.u32 p, %4, %5; "
      "@p cp.async.cg.shared.global [%0 + %3], [%1 + %3], 16, %2; }" ::"r"(target),
      "l"(source), "r"(bytes), "n"(Ahead), "r"(a), "r"(b)
      : "memory");
}

/// Copies a line of `Pieces` * 16 bytes by eight threads: thread i takes piece i, whose target it
/// names, and every eighth from there. `Odd` numbers of pieces: every other line begins in the
/// middle of a sector; there all pieces are taken one thread later, so that eight of them begin at
/// a whole sector.
template <int Pieces, bool Odd>
__device__ inline void copy_line(std::uint32_t target, std::byte const* source, bool exists) {
  std::uint32_t const bytes = exists ? 16 : 0;
  std::uint32_t const column = threadIdx.x % 8;
  std::uint64_t from = __cvta_generic_to_global(source);
  constexpr int whole = Pieces / 8;
  if constexpr (Odd) {
    std::uint32_t const half = static_cast<std::uint32_t>(from) & 16;
    target -= half;
    from &= ~std::uint64_t{16};
    from += 16 * column;
    copy_async_16_if<0>(16 * column, half, target, from, bytes);
    copy_async_16_if<128 * whole>(half, 16 * column, target, from, bytes);
  } else {
    static_assert(Pieces % 8 == 0);
    from += 16 * column;
    copy_async_16_at<0, 0>(target, from, bytes);
  }
  for_constants<whole - 1>([&](auto i) {
    constexpr int ahead = 128 * (i + 1);
    copy_async_16_at<ahead, ahead>(target, from, bytes);
  });
}

/// Four bytes from an address with the given alignment.
__device__ inline std::uint32_t load_unaligned_word(std::byte const* source, int alignment) {
  if (alignment >= 4) return *reinterpret_cast<std::uint32_t const*>(source);
  if (alignment == 2) {
    auto const* const halves = reinterpret_cast<std::uint16_t const*>(source);
    return halves[0] | static_cast<std::uint32_t>(halves[1]) << 16;
  }
  return load_unaligned<std::uint32_t>(source);
}

/// The same line from any address, word by word and not asynchronously.
template <int Pieces>
__device__ inline void copy_line_slowly(std::uint32_t target, std::byte const* source, bool exists,
                                        int alignment) {
  std::uint32_t const column = threadIdx.x % 8;
#pragma unroll 1
  for (std::uint32_t byte = 16 * column; byte < 16 * Pieces; byte += byte % 16 == 12 ? 116 : 4) {
    store_word(target + byte - 16 * column,
               exists ? load_unaligned_word(source + byte, alignment) : 0);
  }
}

/// Row of shared memory where a tile's key lies: rows r and 8 + (r ^ 4) of each 16 hold neighbours,
/// which are one thread's in a product; any 8 neighbours lie in 8 different rows modulo 8, which no
/// bank conflict can come from.
INDEXSHARE_HD constexpr std::uint32_t row_of_key(std::uint32_t key) {
  std::uint32_t const half = key % 16 / 2;
  return key - key % 16 + (key % 2 == 0 ? half : 8 + (half ^ 4));
}

/// Brings KV rows to shared memory, one tile ahead: 8 threads per row, 4 rows per warp.
template <class Call, bool E4m3>
class KvLoader {
 public:
  static constexpr std::uint32_t tile = AttendWarps<64>::tile;
  static constexpr AttendMemory at = attend_memory<64>(E4m3);  // of a stage: for all heads

  /// `base`: of stage 0.
  __device__ KvLoader(Call const& call, AttendPlace const& place, std::uint32_t base)
      : call_(call),
        place_(place),
        target_(kept(base + row_of_key(threadIdx.x / 8) * at.line + 16 * (threadIdx.x % 8))),
        mark_(kept(base + at.marks + 4 * (threadIdx.x / 8))) {
    look_up(place.first_key);
  }

  /// Starts the copies of the tile at `first`, and looks up the one after it: tiles come in order.
  /// Rows that do not exist become zeros and their mark -inf. `stage`: its offset.
  __device__ __forceinline__ void start(std::uint32_t first, std::uint32_t stage) {
    constexpr int pieces = (E4m3 ? at.line : at.line - 16) / 16;
    bool const exists = call_.rows.has(slot_);
    std::byte const* const source = call_.rows.row(exists ? slot_ : 0);
    if (call_.kv_alignment == 16) {
      copy_line<pieces, E4m3>(target_ + stage, source, exists);
    } else {
      copy_line_slowly<pieces>(target_ + stage, source, exists, call_.kv_alignment);
    }
    commit_copies();
    store_float(mark_ + stage, exists ? 0.0f : minus_infinity());  // all eight threads the same
    look_up(first + tile);
  }

 private:
  __device__ __forceinline__ void look_up(std::uint32_t first) {
    std::uint32_t const entry = first + threadIdx.x / 8;
    slot_ = entry < place_.last_key ? place_.list.slot(call_.keys, entry) : no_position;
  }

  Call const& call_;
  AttendPlace const& place_;
  std::uint32_t target_;  ///< of the thread's first piece
  std::uint32_t mark_;
  position_t slot_;
};

/// Brings the queries of a block's heads to shared memory; heads past the last become zeros.
template <int Heads, class Call>
__device__ inline void load_queries(Call const& call, AttendPlace const& place,
                                    std::uint32_t target) {
  constexpr int pieces = AttendWidths::lanes / 8;
  auto const& q = call.in.q;
#pragma unroll 1
  for (std::uint32_t head = threadIdx.x / 8; head < Heads; head += 32) {
    bool const exists = place.first_head + head < q.extent(1);
    auto const* source = reinterpret_cast<std::byte const*>(
        q.data_handle() +
        (exists ? place.row * q.stride(0) + (place.first_head + head) * q.stride(1) : 0));
    std::uint32_t const line = target + head * AttendMemory::query_line + 16 * (threadIdx.x % 8);
    if (call.query_alignment == 16) {
      copy_line<pieces, false>(line, source, exists);
    } else {
      copy_line_slowly<pieces>(line, source, exists, call.query_alignment);
    }
  }
  commit_copies();
}

}  // namespace detail
}  // namespace v0
}  // namespace indexshare
