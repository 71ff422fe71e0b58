// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/attention/mla.hpp>
#include <indexshare/cuda/attention_plan.hpp>
#include <indexshare/cuda/detail/attend_load.cuh>

#include <cstdint>
#include <type_traits>

/// @file From running sums to outputs, at the end of a row or of the merge of its splits.

namespace indexshare {
inline namespace v0 {
namespace detail {

/// A reference below every logit: no key was seen. Finite, so that it can be subtracted.
inline constexpr float lowest_reference = -3.4028235e38f;

/// Rounds two values to nearest even, in hardware where the type is known.
template <class Out>
__device__ inline void round_two(float a, float b, Out& out_a, Out& out_b) {
  if constexpr (std::is_same_v<Out, bf16> || std::is_same_v<Out, fp16>) {
    std::uint32_t const pair = pack_pair<Out>(a, b);
    out_a = {static_cast<std::uint16_t>(pair)};
    out_b = {static_cast<std::uint16_t>(pair >> 16)};
  } else {
    out_a = from_float<Out>(a);
    out_b = from_float<Out>(b);
  }
}

/// From a head's softmax, sum 2^(logit - reference) = total, to its lse and to what its sums of
/// values are multiplied by. The sink enters here, once.
template <class Out>
__device__ inline float finish_head(SinkView<Space::device> const& sink,
                                    LseView<Space::device> const& lse_of, index_t row, index_t head,
                                    float reference, float total) {
  constexpr float ln_2 = 0.6931471805599453f;
  bool const empty = total == 0;
  float const lse = empty ? minus_infinity() : (reference + log2f(total)) * ln_2;
  float factor = empty ? 0.0f : 1.0f / total;
  if (sink.data_handle() != nullptr && !empty) {
    // exp(lse) / (exp(lse) + exp(sink)) without overflow
    factor /= 1.0f + expf(sink(head) - lse);
  }
  if (lse_of.data_handle() != nullptr) lse_of(row, head) = lse;
  return factor;
}

/// Number of the partial result of a block's first head; those of the next heads follow.
template <class Call>
__device__ inline index_t part_of(Call const& call, AttendPlace const& place) {
  return (place.row_in_pass * call.splits + place.split) * call.partials.heads + place.first_head;
}

/// How the value lanes of partial results lie.
enum class PartialOrder {
  lanes,      ///< one after the other
  fragments,  ///< of each 32: 0, 8, 16, 24, 1, 9, ... as a thread has them after two products
};

/// What the merge is given.
template <class Out>
struct AttendMerge {
  MlaOutputs<Out, Space::device> out;
  SinkView<Space::device> sink;
  index_t first_row;
  int splits;
  PartialOrder order;
  AttendPartials partials;

  static constexpr int heads = 8;  ///< of a block: a warp each
  static constexpr int threads = 32 * heads;
};

/// Lanes of a thread at a time: groups of four, 128 apart.
inline constexpr int merge_lanes = 16;

/// sums += w * values. `Whole`: all lanes exist, groups begin at multiples of 16 bytes; else the
/// first one does.
template <bool Whole>
__device__ __forceinline__ void add_lanes(float const* values, index_t rest, float w,
                                          float (&sums)[merge_lanes]) {
  for (int i = 0; i < merge_lanes; i += 4) {
    if constexpr (Whole) {
      float4 const v = *reinterpret_cast<float4 const*>(values + 32 * i);
      sums[i] = fmaf(w, v.x, sums[i]);
      sums[i + 1] = fmaf(w, v.y, sums[i + 1]);
      sums[i + 2] = fmaf(w, v.z, sums[i + 2]);
      sums[i + 3] = fmaf(w, v.w, sums[i + 3]);
    } else {
      for (int k = 0; k < 4; ++k) {
        // a lane that does not exist adds the first once more, which nobody reads: 16 conditions
        // that stay the same for all splits would not fit the predicate registers
        index_t const at = 32 * i + k < rest ? 32 * i + k : 0;
        sums[i + k] = fmaf(w, values[at], sums[i + k]);
      }
    }
  }
}

/// How the splits of one head are put together.
struct MergeHead {
  float weights[attend_most_splits];
  int splits;    ///< those past a row's last key come last; they wrote no values
  float factor;  ///< of the weighted sums

  /// `part`: the number of the first split's result.
  template <class Out>
  __device__ void prepare(AttendMerge<Out> const& merge, index_t part, index_t row, index_t head) {
    float const* const references = merge.partials.references + part;
    float const* const sums = merge.partials.sums + part;
    index_t const step = merge.partials.heads;  // from split to split
    float largest = lowest_reference;
    for (int split = 0; split < merge.splits; ++split) {
      largest = fmaxf(largest, references[split * step]);
    }
    float total = 0;
    splits = 0;
    for (int split = 0; split < merge.splits; ++split) {
      float const sum = sums[split * step];
      weights[split] = exp2f(references[split * step] - largest);
      total = fmaf(sum, weights[split], total);
      if (sum != 0) splits = split + 1;
    }
    factor = finish_head<Out>(merge.sink, merge.out.lse, row, head, largest, total);
  }
};

/// Sums of a thread's lanes over the splits, in their order. `next`: from split to split.
template <bool Whole>
__device__ __forceinline__ void merge_splits(MergeHead const& head, float const* values,
                                             index_t next, index_t rest,
                                             float (&sums)[merge_lanes]) {
  constexpr int at_once = Whole ? 4 : 1;  // so many loads are under way together
#pragma unroll at_once
  for (int split = 0; split < head.splits; ++split, values += next) {
    add_lanes<Whole>(values, rest, head.weights[split], sums);
  }
}

template <class Out>
__device__ __forceinline__ void put_merged(float const (&sums)[merge_lanes], float factor,
                                           index_t rest, PartialOrder order, Out* target) {
  if (order == PartialOrder::fragments) {  // 512 lanes; `target` is that of lane 4 * thread
    target -= 3 * (threadIdx.x % 8);
    for (int i = 0; i < merge_lanes; i += 4) {
      Out* const here = target + 32 * i;
      round_two(sums[i] * factor, sums[i + 1] * factor, here[0], here[8]);
      round_two(sums[i + 2] * factor, sums[i + 3] * factor, here[16], here[24]);
    }
    return;
  }
  for (int i = 0; i < merge_lanes; ++i) {
    int const lane = 32 * (i / 4 * 4) + i % 4;
    if (lane < rest) target[lane] = from_float<Out>(sums[i] * factor);
  }
}

/// Adds up the splits of eight heads of one row, in the order of the keys. The partial results were
/// written by the kernel before this one on the stream: its end orders them.
template <class Out>
INDEXSHARE_KERNEL void __launch_bounds__(AttendMerge<Out>::threads)
    attend_merge_kernel(__grid_constant__ AttendMerge<Out> const merge) {
  constexpr int heads_per_block = AttendMerge<Out>::heads;
  __shared__ MergeHead prepared[heads_per_block];
  auto const& out = merge.out.out;
  auto const heads = static_cast<std::uint32_t>(out.extent(1));
  auto const padded_heads = static_cast<std::uint32_t>(merge.partials.heads);
  std::uint32_t const groups = padded_heads / heads_per_block;
  std::uint32_t const row_in_pass = blockIdx.x / groups;
  std::uint32_t const first_head = (blockIdx.x - row_in_pass * groups) * heads_per_block;
  index_t const row = merge.first_row + row_in_pass;
  index_t const first_part = index_t{row_in_pass} * merge.splits * padded_heads + first_head;
  if (threadIdx.x < heads_per_block && first_head + threadIdx.x < heads) {
    prepared[threadIdx.x].prepare(merge, first_part + threadIdx.x, row, first_head + threadIdx.x);
  }
  __syncthreads();  // the heads are prepared

  std::uint32_t const warp = threadIdx.x / 32;
  std::uint32_t const head = first_head + warp;
  if (head >= heads) return;
  MergeHead const& mine = prepared[warp];
  index_t const value_dim = out.extent(2);
  Out* const target = out.data_handle() + row * out.stride(0) + head * out.stride(1);
  float const* const values = merge.partials.values + (first_part + warp) * value_dim;
  index_t const next = padded_heads * value_dim;
  for (index_t first = 0; first < value_dim; first += 32 * merge_lanes) {
    index_t const lane = first + 4 * (threadIdx.x % 32);
    index_t const rest = value_dim - lane;
    if (rest <= 0) return;
    float sums[merge_lanes] = {};
    if (value_dim % (32 * merge_lanes) == 0) {
      merge_splits<true>(mine, values + lane, next, rest, sums);
    } else {
      merge_splits<false>(mine, values + lane, next, rest, sums);
    }
    put_merged(sums, mine.factor, rest, merge.order, target + lane);
  }
}

}  // namespace detail
}  // namespace v0
}  // namespace indexshare
