// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/cuda/detail/topk_block.cuh>
#include <indexshare/cuda/detail/topk_rows.cuh>
#include <indexshare/cuda/detail/topk_sample.cuh>
#include <indexshare/macros.hpp>

#include <cstdint>

namespace indexshare {
inline namespace v0 {
namespace detail {

/// Elements between the last multiple of `bytes` and the address.
template <class Score>
__device__ std::uint32_t elements_past(Score const* address, std::uint32_t bytes) {
  return static_cast<std::uint32_t>(reinterpret_cast<std::uintptr_t>(address) % bytes /
                                    sizeof(Score));
}
/// Elements of a 128-byte line.
template <class Score>
inline constexpr std::uint32_t line_elements = 4 * sector_elements<Score>;

/// A row's keys into shared memory. Warps read whole lines whatever the row's address.
template <class T, class Score>
__device__ void load_keys(Score const* row, std::uint32_t length, std::uint32_t* keys) {
  constexpr std::uint32_t batch = 8;  // loads of a thread under way
  std::uint32_t const skew = elements_past(row, 128) % line_elements<Score>;
  for (std::uint32_t begin = 0; begin < length + skew; begin += batch * T::threads) {
    std::uint32_t const first = begin + threadIdx.x - skew;  // wraps around before the row
    Score scores[batch];
    if (begin >= skew && begin - skew + batch * T::threads <= length) {
#pragma unroll
      for (std::uint32_t j = 0; j < batch; ++j) scores[j] = row[first + j * T::threads];
#pragma unroll
      for (std::uint32_t j = 0; j < batch; ++j) keys[first + j * T::threads] = score_key(scores[j]);
      continue;
    }
#pragma unroll
    for (std::uint32_t j = 0; j < batch; ++j) {
      std::uint32_t const s = first + j * T::threads;
      if (s < length) scores[j] = row[s];
    }
#pragma unroll
    for (std::uint32_t j = 0; j < batch; ++j) {
      std::uint32_t const s = first + j * T::threads;
      if (s < length) keys[s] = score_key(scores[j]);
    }
  }
}

/// Calls f(key) for this thread's part of a list in shared memory, four keys per load.
template <class T, class F>
__device__ void each_key(std::uint32_t const* keys, std::uint32_t count, F const& f) {
  std::uint32_t const whole = count / 4;
#pragma unroll 2
  for (std::uint32_t i = threadIdx.x; i < whole; i += T::threads) {
    uint4 const four = reinterpret_cast<uint4 const*>(keys)[i];
    f(four.x);
    f(four.y);
    f(four.z);
    f(four.w);
  }
  std::uint32_t const last = 4 * whole + threadIdx.x;
  if (last < count) f(keys[last]);
}

/// Selects the k best of a list of scores whose keys lie in shared memory.
template <class Score, class T, class List>
__device__ void select_from(TopKScratch<T>& scratch, List const& list, std::uint32_t* keys,
                            std::uint32_t top_k, position_t* out) {
  TopKCut const cut = find_cut<key_zeros<Score>>(
      scratch, top_k, [&](auto const& f) { each_key<T>(keys, list.count, f); });
  write_winners(scratch, list, cut, keys, out);
}

/// The threshold of a long row from a sample of its scores.
template <class T, class Score>
__device__ TopKThreshold sample_threshold(TopKScratch<T>& scratch, Score const* row,
                                          std::uint32_t length, std::uint32_t top_k,
                                          std::uint32_t* keys) {
  constexpr std::uint32_t batch = 8;
  auto const sample =
      make_topk_sample<T, Score>(length, elements_past(row, 32) % sector_elements<Score>);
  std::uint32_t const size = sample.size();
  for (std::uint32_t begin = threadIdx.x; begin < size; begin += batch * T::threads) {
    Score scores[batch];
#pragma unroll
    for (std::uint32_t j = 0; j < batch; ++j) {
      std::uint32_t const i = begin + j * T::threads;
      if (i < size) scores[j] = row[sample.position(i)];
    }
#pragma unroll
    for (std::uint32_t j = 0; j < batch; ++j) {
      std::uint32_t const i = begin + j * T::threads;
      if (i < size) keys[i] = score_key(scores[j]);
    }
  }
  __syncthreads();
  TopKCut const cut =
      find_cut<key_zeros<Score>>(scratch, topk_sample_rank<T>(size, length, top_k),
                                 [&](auto const& f) { each_key<T>(keys, size, f); });
  OrderedList const list{[=](std::uint32_t i) { return keys[i]; }, size};
  std::uint32_t const last = last_tie(scratch, list, cut);
  return {cut.key, cut.takes_all ? last : sample.position(last), length, 0};
}

/// One block per row. Rows of at most T::row_keys scores are done afterwards; of longer ones the
/// threshold is written and the counters are zero, for topk_chunk.
///
/// A short row's scores are read once; a row that selects all it sees reads none.
template <class T, class Score>
INDEXSHARE_KERNEL void __launch_bounds__(T::threads)
    topk_row(TopKRows<Score> rows, TopKBuffers buffers) {
  constexpr bool may_be_long = requires { T::chunk; };
  extern __shared__ uint4 topk_memory[];
  auto& scratch = *reinterpret_cast<TopKScratch<T>*>(topk_memory);
  auto* const keys = reinterpret_cast<std::uint32_t*>(&scratch + 1);

  index_t const row = blockIdx.x;
  std::uint32_t const length = rows.length(row);
  auto const top_k = static_cast<std::uint32_t>(rows.top_k);
  Score const* const scores = rows.row(row);
  position_t* const out = rows.selection(row);
  if (threadIdx.x == 0) {
    rows.counts[row * rows.count_stride] = static_cast<position_t>(min(length, top_k));
    if (may_be_long && length <= T::row_keys && buffers.thresholds != nullptr) {
      buffers.thresholds[row] = {};
    }
  }
  if (length <= top_k) {
    write_whole_row(length, top_k, T::threads, out);
    return;
  }
  if (length <= T::row_keys) {
    load_keys<T>(scores, length, keys);
    __syncthreads();
    select_from<Score>(scratch, OrderedList{[=](std::uint32_t i) { return keys[i]; }, length}, keys,
                       top_k, out);
    return;
  }
  if constexpr (may_be_long) {
    TopKThreshold const threshold = sample_threshold(scratch, scores, length, top_k, keys);
    if (threadIdx.x == 0) {
      buffers.thresholds[row] = threshold;
      buffers.counters[row] = {0, 0};
    }
  }
}

/// The candidates of a row, as they lie in its buffer: chunk after chunk in the order in which
/// the blocks came, each in position order.
template <class T>
struct TopKCandidates {
  /// Chunks whose shifts lie behind the marks in shared memory; the others' lie in their records.
  static constexpr std::uint32_t near_chunks = TopKMarks<T>::words - (T::candidates + 31) / 32;
  static_assert(T::candidates < TopKMarks<T>::items);

  TopKScratch<T>& scratch;
  std::uint32_t const* keys;       ///< in shared memory
  std::uint32_t const* positions;  ///< in global memory
  TopKChunk* chunks;
  std::uint32_t chunk_count;
  std::uint32_t skew;  ///< elements of the first chunk that lie before the row
  std::uint32_t count;

  __device__ std::uint32_t key(std::uint32_t i) const { return keys[i]; }
  __device__ std::uint32_t position(std::uint32_t i) const { return positions[i]; }

  /// A marked candidate's number by position is that of its place in the buffer, less the marked
  /// ones before its chunk there, plus those of the chunks before it in the row. The sum of the
  /// last two is the chunk's shift.
  __device__ void arrange(TopKMarks<T> const& marks) const {
    std::uint32_t total = 0;
    for (std::uint32_t first = 0; first < chunk_count; first += T::threads) {
      std::uint32_t const c = first + threadIdx.x;
      std::uint32_t before = 0;
      std::uint32_t marked = 0;
      if (c < chunk_count) {
        before = marks.rank(chunks[c].offset);
        marked = marks.rank(chunks[c].offset + chunks[c].count) - before;
      }
      BlockSum const sum = block_sum<T::threads / 32>(scratch.warps, marked);
      if (c < chunk_count) shift_of(c) = total + sum.before - before;
      total += sum.total;
      __syncthreads();
    }
  }
  __device__ std::uint32_t shift(std::uint32_t position) const {
    return shift_of((position + skew) / T::chunk);
  }

 private:
  __device__ std::uint32_t& shift_of(std::uint32_t chunk) const {
    return chunk < near_chunks ? scratch.bins[TopKMarks<T>::words - 1 - chunk]
                               : chunks[chunk].shift;
  }
};

/// The row's threshold for all threads of the block, read once. Passes one barrier.
template <class T>
__device__ TopKThreshold load_threshold(TopKScratch<T>& scratch, TopKThreshold const* threshold) {
  if (threadIdx.x == 0) scratch.threshold = *threshold;
  __syncthreads();
  return scratch.threshold;
}

/// From the scores themselves, by one block: for a threshold that let too few or too many pass.
/// Reads each score four times, or five where ties are cut.
template <class T, class Score>
__device__ void select_from_scores(TopKScratch<T>& scratch, Score const* row, std::uint32_t length,
                                   std::uint32_t top_k, std::uint32_t* staged, position_t* out) {
  TopKCut const cut = find_cut<key_zeros<Score>>(scratch, top_k, [&](auto const& f) {
#pragma unroll 8
    for (std::uint32_t s = threadIdx.x; s < length; s += T::threads) f(score_key(row[s]));
  });
  OrderedList const list{[=](std::uint32_t s) { return score_key(row[s]); }, length};
  write_winners(scratch, list, cut, staged, out);
}

/// Where the warps of a block keep the survivors of their scores, in shared memory: warp w from
/// entry w * stride on, in position order.
template <class T>
struct TopKStaged {
  static constexpr std::uint32_t warps = T::threads / 32;
  static constexpr std::uint32_t warp_scores = 32 * T::scores_per_thread;
  static constexpr std::uint32_t stride = topk_staged_stride<T>;
  static_assert(T::chunk <= 65536, "places have 16 bits");
  static_assert((warps & (warps - 1)) == 0, "for the search in `find`");

  std::uint32_t* keys;
  std::uint16_t* places;  ///< in the chunk

  __device__ explicit TopKStaged(TopKScratch<T>& scratch)
      : keys(scratch.bins), places(reinterpret_cast<std::uint16_t*>(keys + warps * stride)) {}

  /// The entry of the block's i-th survivor, one per lane; `sums` counts those of the warps.
  __device__ static std::uint32_t find(WarpSums const& sums, std::uint32_t i) {
    std::uint32_t warp = 0;
    for (std::uint32_t half = warps / 2; half > 0; half /= 2) {
      if (sums.through(warp + half - 1) <= i) warp += half;
    }
    std::uint32_t const before = sums.through((warp + 31) % 32);
    return i - (warp > 0 ? before : 0) + warp * stride;
  }
};

/// This thread's scores of a chunk: `start` + 32 i for each step i. Columns outside the row are
/// not read.
template <std::uint32_t Steps, class Score>
__device__ void load_scores(Score const* row, std::uint32_t length, std::uint32_t start,
                            bool inside, Score (&scores)[Steps]) {
  if (inside) {
    Score const* const first = row + start;
#pragma unroll
    for (std::uint32_t i = 0; i < Steps; ++i) scores[i] = first[32 * i];
    return;
  }
#pragma unroll
  for (std::uint32_t i = 0; i < Steps; ++i) {
    std::uint32_t const s = start + 32 * i;
    scores[i] = s < length ? row[s] : Score{};
  }
}

/// Keeps this warp's scores that pass the threshold; returns their number. Most steps have none
/// that passes, which one comparison of scores finds out; the exact test follows where needed.
template <class T, std::uint32_t Steps, class Score>
__device__ std::uint32_t stage_survivors(Score const (&scores)[Steps], std::uint32_t start,
                                         TopKThreshold const& threshold,
                                         TopKStaged<T> const& staged) {
  float const least = key_score(threshold.key);
  std::uint32_t const place = warp_index() * staged.warp_scores + warp_lane();
  std::uint32_t found = 0;
#pragma unroll
  for (std::uint32_t i = 0; i < Steps; ++i) {
    bool survives = !(score_value(scores[i]) < least);
    if (!__any_sync(full_warp, survives)) continue;
    std::uint32_t const s = start + 32 * i;
    std::uint32_t const key = score_key(scores[i]);
    survives = s < threshold.length &&
               (key > threshold.key || (key == threshold.key && s <= threshold.position));
    std::uint32_t const survivors = __ballot_sync(full_warp, survives);
    if (survives) {
      std::uint32_t const at =
          warp_index() * staged.stride + found +
          static_cast<std::uint32_t>(__popc(survivors & lanes_before(warp_lane())));
      staged.keys[at] = key;
      staged.places[at] = static_cast<std::uint16_t>(place + 32 * i);
    }
    found += static_cast<std::uint32_t>(__popc(survivors));
  }
  return found;
}

/// One row's part of the buffers.
struct TopKRowBuffers {
  TopKCounters& counters;
  TopKChunk* chunks;
  std::uint32_t* keys;
  std::uint32_t* positions;
};
template <class T>
__device__ TopKRowBuffers row_buffers(TopKBuffers const& buffers, index_t row,
                                      std::uint32_t row_chunks) {
  return {buffers.counters[row], buffers.chunks + row * row_chunks,
          buffers.keys + row * T::candidates, buffers.positions + row * T::candidates};
}

/// Moves the block's survivors, `found` of this warp, to the row's candidates, if there is room.
/// Place 0 of the chunk is position `origin`.
template <class T>
__device__ void append_candidates(TopKScratch<T>& scratch, TopKStaged<T> const& staged,
                                  std::uint32_t found, std::uint32_t origin,
                                  TopKRowBuffers const& row, TopKChunk& record) {
  WarpSums const sums = sum_of_warps<T::threads / 32>(scratch.warps, found);
  std::uint32_t const total = sums.through(staged.warps - 1);
  if (threadIdx.x == 0) {
    scratch.word = total == 0 ? 0 : atomicAdd(&row.counters.candidates, total);
    record = {scratch.word, total, 0};
  }
  __syncthreads();
  std::uint32_t const offset = scratch.word;
  if (offset + total > T::candidates) return;
  for (std::uint32_t begin = 32 * warp_index(); begin < total; begin += T::threads) {
    std::uint32_t const i = begin + warp_lane();
    std::uint32_t const at = staged.find(sums, i);
    if (i >= total) continue;
    row.keys[offset + i] = staged.keys[at];
    row.positions[offset + i] = origin + staged.places[at];
  }
}

/// Whether this block is the last of `blocks` to come here; it then sees what the others wrote.
///
/// The first barrier puts the writes of all threads of the block before thread 0's fence, and the
/// fence puts them before its arrival. The last arrival has seen the counts of the others; its
/// fence and the second barrier put their writes before whatever this block reads next.
template <class T>
__device__ bool arrives_last(TopKScratch<T>& scratch, std::uint32_t& arrived,
                             std::uint32_t blocks) {
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    scratch.word = atomicAdd(&arrived, 1u);
    __threadfence();
  }
  __syncthreads();
  return scratch.word == blocks - 1;
}

/// One block per chunk of a row, from `first_row` on, for rows of more than T::row_keys scores.
/// Each block reads its chunk once and appends the scores that pass the row's threshold to the
/// row's candidates; the last block of a row selects from them.
///
/// In a chunk, warp w has T::scores_per_thread groups of 32 neighbouring scores, lane by lane, so
/// that ballots give the order of positions. Chunks begin at 128-byte lines.
template <class T, class Score>
INDEXSHARE_KERNEL void __launch_bounds__(T::threads, 2)
    topk_chunk(TopKRows<Score> rows, TopKBuffers buffers, std::uint32_t row_chunks,
               index_t first_row) {
  extern __shared__ uint4 topk_memory[];
  auto& scratch = *reinterpret_cast<TopKScratch<T>*>(topk_memory);

  index_t const number = first_row + blockIdx.x / row_chunks;
  std::uint32_t const chunk = blockIdx.x % row_chunks;
  TopKThreshold const threshold = load_threshold(scratch, buffers.thresholds + number);
  std::uint32_t const length = threshold.length;
  Score const* const scores = rows.row(number);
  std::uint32_t const skew = elements_past(scores, 128) % line_elements<Score>;
  std::uint32_t const chunks = (length + skew + T::chunk - 1) / T::chunk;
  if (length == 0 || chunk >= chunks) return;

  std::uint32_t const origin = chunk * T::chunk - skew;  // wraps around before the row
  bool const inside = origin < length && length - origin >= T::chunk;
  TopKStaged<T> const staged(scratch);
  std::uint32_t const start = origin + warp_index() * staged.warp_scores + warp_lane();
  Score own[T::scores_per_thread];
  load_scores(scores, length, start, inside, own);
  std::uint32_t const found = stage_survivors(own, start, threshold, staged);
  TopKRowBuffers const row = row_buffers<T>(buffers, number, row_chunks);
  append_candidates(scratch, staged, found, origin, row, row.chunks[chunk]);
  if (!arrives_last(scratch, row.counters.arrived, chunks)) return;

  auto const top_k = static_cast<std::uint32_t>(rows.top_k);
  std::uint32_t const count = row.counters.candidates;
  auto* const keys = reinterpret_cast<std::uint32_t*>(&scratch + 1);
  position_t* const out = rows.selection(number);
  if (count < top_k || count > T::candidates) {
    select_from_scores(scratch, scores, length, top_k, keys, out);
    return;
  }
#pragma unroll 4
  for (std::uint32_t i = threadIdx.x; i < count; i += T::threads) keys[i] = row.keys[i];
  __syncthreads();
  select_from<Score>(
      scratch, TopKCandidates<T>{scratch, keys, row.positions, row.chunks, chunks, skew, count},
      keys, top_k, out);
}

}  // namespace detail
}  // namespace v0
}  // namespace indexshare
