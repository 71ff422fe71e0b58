// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/cuda/detail/block_sum.cuh>
#include <indexshare/cuda/detail/warp.cuh>
#include <indexshare/cuda/topk_plan.hpp>
#include <indexshare/dims.hpp>

#include <cuda/std/bit>

#include <cstdint>

/// @file What the blocks of top-k do together: scans, the search for the k-th best key, and the
/// list of winners in position order. All threads of a block call these functions.

namespace indexshare {
inline namespace v0 {
namespace detail {

__device__ inline std::uint32_t lanes_before(std::uint32_t lane) { return (1u << lane) - 1; }

// ---- keys

/// A score with this key. A score below it (in floating point) has a smaller key; nothing is below
/// the NaN of key 0.
__device__ inline float key_score(std::uint32_t key) {
  if (key == 0) return cuda::std::bit_cast<float>(0x7FFFFFFFu);
  bool const negative = key < 0x80000000u;
  std::uint32_t const magnitude = negative ? 0x80000000u - key : key - 0x80000000u;
  return cuda::std::bit_cast<float>(magnitude | (negative ? 0x80000000u : 0u));
}

// ---- the k-th best key

/// The k best keys of a list: all above `key` and the first `ties` of those that equal it.
struct TopKCut {
  std::uint32_t key;
  std::uint32_t ties;
  bool takes_all;  ///< the ties are all there are
};

/// Finds the cut digit by digit from the top, with one histogram in shared memory; at most
/// ceil((32 - Zeros) / digit_bits) passes, fewer when the keys of a digit's bin are all wanted.
/// `each_key(f)` calls f(key) for every key, on whichever thread; 1 <= wanted <= number of keys.
/// The last `Zeros` bits of all keys are 0, and no digit has them. Lanes that meet in one bin are
/// joined by ATOMS.POPC.INC, which the compiler takes for an increment by one from sm_80 to sm_120;
/// so the histogram has no private copies.
template <int Zeros, class T, class EachKey>
__device__ TopKCut find_cut(TopKScratch<T>& scratch, std::uint32_t wanted,
                            EachKey const& each_key) {
  constexpr int bins = 1 << T::digit_bits;
  constexpr int own = bins / T::threads;
  constexpr int passes = (32 - Zeros + T::digit_bits - 1) / T::digit_bits;
  static_assert(own >= 1 && bins % T::threads == 0);
  int const first = bins - (static_cast<int>(threadIdx.x) + 1) * own;  // thread 0: the top bins
  for (int i = 0; i < own; ++i) scratch.bins[first + i] = 0;
  __syncthreads();

  TopKCut cut{0, wanted, false};
#pragma unroll
  for (int pass = 0; pass < passes; ++pass) {
    int const end = 32 - pass * T::digit_bits;  // the bits from here on are found
    int const shift = end - T::digit_bits > Zeros ? end - T::digit_bits : Zeros;
    std::uint32_t const digit_mask = (1u << (end - shift)) - 1;
    std::uint32_t const known = pass == 0 ? 0 : ~0u << end % 32;
    each_key([&](std::uint32_t key) {
      if ((key & known) == cut.key) atomicAdd(&scratch.bins[(key >> shift) & digit_mask], 1u);
    });
    __syncthreads();
    std::uint32_t counts[own];
    std::uint32_t sum = 0;
    for (int i = 0; i < own; ++i) {
      counts[i] = scratch.bins[first + i];
      scratch.bins[first + i] = 0;
      sum += counts[i];
    }
    std::uint32_t above = block_sum<T::threads / 32>(scratch.warps, sum).before;
    for (int i = own - 1; i >= 0; --i) {
      if (above < cut.ties && cut.ties <= above + counts[i]) {  // for one bin of one thread
        scratch.digit = static_cast<std::uint32_t>(first + i);
        scratch.ties = cut.ties - above;
        scratch.takes_all = counts[i] == cut.ties - above;
      }
      above += counts[i];
    }
    __syncthreads();
    cut = {cut.key | (scratch.digit << shift), scratch.ties, scratch.takes_all != 0};
    if (cut.takes_all) break;
  }
  return cut;
}

// ---- winners in position order

/// One bit per item of a list and the number of marked items before each word, in the memory of
/// the histogram.
template <class T>
struct TopKMarks {
  static constexpr std::uint32_t words = (1u << T::digit_bits) / 2;
  static constexpr std::uint32_t items = 32 * words;  ///< most that a list may have

  std::uint32_t const* bits;
  std::uint32_t const* before;
  std::uint32_t count;  ///< items of the list
  std::uint32_t total;  ///< marked ones

  __device__ bool has(std::uint32_t i) const { return (bits[i / 32] >> i % 32 & 1) != 0; }
  /// Marked items before item i <= count.
  __device__ std::uint32_t rank(std::uint32_t i) const {
    if (i == count) return total;
    return before[i / 32] + static_cast<std::uint32_t>(__popc(bits[i / 32] & lanes_before(i % 32)));
  }
};

/// Marks the items of a list for which `wanted(i)`. Begins after and ends with a barrier.
template <class T, class Wanted>
__device__ TopKMarks<T> mark(TopKScratch<T>& scratch, std::uint32_t count, Wanted const& wanted) {
  using Marks = TopKMarks<T>;
  constexpr std::uint32_t warps = T::threads / 32;
  std::uint32_t* const bits = scratch.bins;
  std::uint32_t* const before = scratch.bins + Marks::words;
  std::uint32_t const words = (count + 31) / 32;
  for (std::uint32_t word = warp_index(); word < words; word += warps) {
    std::uint32_t const i = 32 * word + warp_lane();
    std::uint32_t const set = __ballot_sync(full_warp, i < count && wanted(i));
    if (warp_lane() == 0) bits[word] = set;
  }
  std::uint32_t total = 0;
  for (std::uint32_t first = 0; first < words; first += T::threads) {
    __syncthreads();
    std::uint32_t const word = first + threadIdx.x;
    BlockSum const sum = block_sum<T::threads / 32>(
        scratch.warps, word < words ? static_cast<std::uint32_t>(__popc(bits[word])) : 0u);
    if (word < words) before[word] = total + sum.before;
    total += sum.total;
  }
  __syncthreads();
  return {bits, before, count, total};
}

/// What the two functions below work on: `count` items with `key(i)` and `position(i)`. A list of
/// up to TopKMarks::items need not lie in position order: after `arrange(marks)` the marked item i
/// is number marks.rank(i) + shift(position(i)) of the marked ones by position.
///
/// This one lies in order.
template <class Keys>
struct OrderedList {
  Keys keys;
  std::uint32_t count;

  __device__ std::uint32_t key(std::uint32_t i) const { return keys(i); }
  __device__ std::uint32_t position(std::uint32_t i) const { return i; }
  template <class Marks>
  __device__ void arrange(Marks const&) const {}
  __device__ std::uint32_t shift(std::uint32_t) const { return 0; }
};
template <class Keys>
OrderedList(Keys, std::uint32_t) -> OrderedList<Keys>;

/// Position of the last item of `cut` that equals its key; any position passes if all ties do.
template <class T, class List>
__device__ std::uint32_t last_tie(TopKScratch<T>& scratch, List const& list, TopKCut const& cut) {
  constexpr std::uint32_t part = TopKMarks<T>::items;
  if (cut.takes_all) return 0xFFFFFFFFu;
  std::uint32_t ties = cut.ties;
  for (std::uint32_t first = 0; ties > 0; first += part) {
    std::uint32_t const count = min(part, list.count - first);
    auto const marks =
        mark(scratch, count, [&](std::uint32_t i) { return list.key(first + i) == cut.key; });
    list.arrange(marks);
    if (ties <= marks.total) {
      for (std::uint32_t i = threadIdx.x; i < count; i += T::threads) {
        if (!marks.has(i)) continue;
        std::uint32_t const position = list.position(first + i);
        if (marks.rank(i) + list.shift(position) == ties - 1) scratch.word = position;
      }
    }
    __syncthreads();
    ties -= min(ties, marks.total);
  }
  return scratch.word;
}

/// Writes the positions of the items of `cut` in ascending order.
/// @param staged  a word per winner in shared memory; may be where the keys of a list of up to
///                TopKMarks::items are, since they are not read after the marks are set
template <class T, class List>
__device__ void write_winners(TopKScratch<T>& scratch, List const& list, TopKCut const& cut,
                              std::uint32_t* staged, position_t* out) {
  constexpr std::uint32_t part = TopKMarks<T>::items;
  constexpr std::uint32_t batch = 4;  // loads of positions under way
  std::uint32_t const last = last_tie(scratch, list, cut);
  std::uint32_t written = 0;
  for (std::uint32_t first = 0; first < list.count; first += part) {
    std::uint32_t const count = min(part, list.count - first);
    auto const marks = mark(scratch, count, [&](std::uint32_t i) {
      std::uint32_t const key = list.key(first + i);
      return key > cut.key || (key == cut.key && list.position(first + i) <= last);
    });
    list.arrange(marks);
    for (std::uint32_t begin = threadIdx.x; begin < count; begin += batch * T::threads) {
      bool marked[batch];
      std::uint32_t position[batch];
      for (std::uint32_t j = 0; j < batch; ++j) {
        std::uint32_t const i = begin + j * T::threads;
        marked[j] = i < count && marks.has(i);
        if (marked[j]) position[j] = list.position(first + i);
      }
      for (std::uint32_t j = 0; j < batch; ++j) {
        if (!marked[j]) continue;
        staged[marks.rank(begin + j * T::threads) + list.shift(position[j])] = position[j];
      }
    }
    __syncthreads();
    for (std::uint32_t i = threadIdx.x; i < marks.total; i += T::threads) {
      out[written + i] = static_cast<position_t>(staged[i]);
    }
    written += marks.total;
    __syncthreads();
  }
}

}  // namespace detail
}  // namespace v0
}  // namespace indexshare
