// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/cuda/detail/mma.cuh>
#include <indexshare/cuda/detail/score_copies.cuh>
#include <indexshare/cuda/detail/score_fragments.cuh>
#include <indexshare/cuda/detail/score_rows.cuh>
#include <indexshare/cuda/indexer_plan.hpp>

#include <cstddef>
#include <cstdint>

/// @file The indexer on tensor cores. Keys are rows of the product and heads its columns; a warp
/// takes 32 keys and scores them for the rows of its block, up to 32 heads at a time. `Lanes` and
/// `Heads` are the numbers of them, or 0 where they are known at run time only.

namespace indexshare {
inline namespace v0 {
namespace detail {

/// What the tensor-core kernel is given.
template <class Query, class KeyFormat>
struct TensorScoreCall : ScoreCall<Query, KeyFormat> {
  ScoreBlock block;
  ScoreAlignment alignment;
};

/// The value of the thread whose number differs in bit `Bit`.
template <int Bit>
__device__ inline float exchange(float value) {
  float other;
  asm volatile("shfl.sync.bfly.b32 %0, %1, %2, 31, 0xFFFFFFFF;"
               : "=f"(other)
               : "f"(value), "n"(Bit));
  return other;
}

/// Adds up what the four members of a group hold of keys group + 8 * i: (0 + 1) + (2 + 3) of each.
/// A thread hands over half of it at each step and ends with key group + 8 * member.
__device__ inline float sum_of_members(float const (&sums)[4], bool odd, bool high) {
  float pair[2];
  for (int i = 0; i < 2; ++i) {
    float const a = sums[2 * i];
    float const b = sums[2 * i + 1];
    pair[i] = (odd ? b : a) + exchange<1>(odd ? a : b);
  }
  return (high ? pair[1] : pair[0]) + exchange<2>(high ? pair[0] : pair[1]);
}

/// Where a thread finds the queries and weights of a row in shared memory.
struct RowPlace {
  std::uint32_t queries;  ///< shared address: head (lane % 8), piece (lane / 8) of a line
  unsigned weights;       ///< offset of head 2 * member

  __device__ RowPlace operator+(RowPlace step) const {
    return {queries + step.queries, weights + step.weights};
  }
};

/// The arithmetic of one warp.
template <class Query, class KeyFormat, int Lanes, int Heads>
class WarpScores {
 public:
  using Form = ScoreForm<Query, KeyFormat>;
  using Operand = typename Form::Operand;
  using Lines = ScoreLines<Form, Lanes>;
  /// Whether the warp's keys stay in registers for all rows; else it reads them for each.
  static constexpr bool holds_keys = Lines::held_steps > 0;

  __device__ WarpScores(TensorScoreCall<Query, KeyFormat> const& call, Lines const& lines,
                        std::byte const* shared)
      : lines_(lines),
        shared_(shared),
        tiles_(Heads > 0 ? Heads / 8 : call.block.head_tiles),
        padding_(call.block.padded_heads() - static_cast<int>(call.in.q.extent(1))),
        odd_(kept(threadIdx.x % 2)),
        high_(kept(threadIdx.x & 2)),
        reader_(lines) {
    unsigned const line = threadIdx.x % 8;
    first_.queries =
        kept(shared_address(shared) + line * static_cast<unsigned>(lines.query_line()) +
             ((threadIdx.x % 32 / 8 ^ line) << 4));
    first_.weights = kept(static_cast<unsigned>(call.block.weights_at) + threadIdx.x % 4 * 8);
  }

  /// From a row to the one `rows` further.
  __device__ RowPlace step(int rows) const { return heads_further(rows * tiles_ * 8); }
  __device__ RowPlace place(int row) const { return first_ + step(row); }

  /// The keys of the warp for all rows of a run: `lines` is where the first one's line is.
  __device__ void take_keys(std::uint32_t lines) {
    reader_.begin(lines);
    for_constants<Lines::held_steps>([&](auto step) { keys_[step] = reader_.read(step); });
    for (int i = 0; i < 4; ++i) start_[i] = holds_keys ? reader_.nan_or_zero(i) : 0.0f;
  }

  /// The sum over all heads of a row of the block, for key group + 8 * member of the warp.
  __device__ float score(RowPlace row) {
    float sums[4] = {start_[0], start_[1], start_[2], start_[3]};
    if constexpr (Heads > 0) {
      for_constants<Heads / 8 / columns>(
          [&](auto pass) { add_columns(row + heads_further(8 * columns * pass), columns, sums); });
    } else {
      for (int left = tiles_; left > 0; left -= columns) {
        add_columns(row, left, sums);
        row = row + heads_further(8 * columns);
      }
    }
    if constexpr (!holds_keys) {
      for (int i = 0; i < 4; ++i) sums[i] += reader_.nan_or_zero(i);
    }
    return sum_of_members(sums, odd_ != 0, high_ != 0);
  }

 private:
  static constexpr int columns = Heads > 0 && Heads < 32 ? Heads / 8 : 4;  ///< tiles of 8 heads
  static_assert(Heads % (8 * columns) == 0);
  using Dots = float[2][columns][4];

  __device__ RowPlace heads_further(int heads) const {
    return {static_cast<unsigned>(heads * lines_.query_line()), static_cast<unsigned>(4 * heads)};
  }

  /// Adds the next `left` tiles of heads, `columns` at most.
  __device__ void add_columns(RowPlace heads, int left, float (&sums)[4]) {
    Dots dots;
    if constexpr (holds_keys) {
      for_constants<Lines::held_steps / 2>([&](auto pair) {
        constexpr cuda::std::integral_constant<int, 2 * pair> step{};
        multiply_pair<step == 0>(keys_[step], keys_[step + 1], true, heads.queries, step, left,
                                 dots);
      });
    } else {
      multiply_read<true>(heads.queries, 0, left, dots);
      for (int step = 2; step < lines_.steps(); step += 2) {
        multiply_read<false>(heads.queries, step, left, dots);
      }
    }
    if (Heads == 0 && padding_ != 0 && left <= columns) clear_padding(left - 1, dots);
    add_heads(heads.weights, left, dots, sums);
  }

  /// dots = keys * queries of a pair of steps, or more of it; keys are read for it.
  template <bool First>
  __device__ void multiply_read(std::uint32_t queries, int step, int left, Dots& dots) {
    bool const both = step + 1 < lines_.steps();
    KeyStep const first = reader_.read(step);
    KeyStep second{};
    if (both) second = reader_.read(step + 1);
    multiply_pair<First>(first, second, both, queries, step, left, dots);
  }

  /// Steps `step`, which is a constant or a number, and the next, if there are `both`.
  template <bool First, class Step>
  __device__ void multiply_pair(KeyStep const& first, KeyStep const& second, bool both,
                                std::uint32_t queries, Step step, int left, Dots& dots) const {
    for_constants<columns>([&](auto column) {
      if (Heads == 0 && column >= left) return;
      std::uint32_t b[4];
      load_heads<column>(b, queries, step);
      for (int half = 0; half < 2; ++half) {
        float(&sum)[4] = dots[half][column];
        if constexpr (First) {
          multiply<Operand>(sum, first.a[half], b[0], b[1]);
        } else {
          multiply_add<Operand>(sum, first.a[half], b[0], b[1]);
        }
        if (both) multiply_add<Operand>(sum, second.a[half], b[2], b[3]);
      }
    });
  }

  /// Two steps of the queries of a tile of heads.
  template <int Column, class Step>
  __device__ void load_heads(std::uint32_t (&b)[4], std::uint32_t queries, Step step) const {
    if constexpr (Lines::known) {
      constexpr int at = 32 * Step::value;
      load_matrices_at<8 * Column * Lines::known_query_line + columns_before(at)>(
          b, column_within(queries, at));
    } else {
      int const at = 32 * step;
      load_matrices(
          b, column_within(queries, at) +
                 static_cast<std::uint32_t>(8 * Column * lines_.query_line() + columns_before(at)));
    }
  }

  /// Heads past the last have no dot: a key with an infinity would make theirs NaN.
  __device__ void clear_padding(int last, Dots& dots) const {
    for_constants<columns>([&](auto column) {
      for (int half = 0; half < 2; ++half) {
        for (int i = 0; i < 4; ++i) {
          bool const none = static_cast<int>(2 * (odd_ + high_)) + i % 2 >= 8 - padding_;
          if (column == last && none) dots[half][column][i] = 0.0f;
        }
      }
    });
  }

  /// sums += weight * relu(dot), heads ascending; a thread holds dots of heads 2 * member and the
  /// next of each 8.
  __device__ void add_heads(unsigned weights, int left, Dots const& dots, float (&sums)[4]) const {
    auto const* const pairs = reinterpret_cast<float2 const*>(shared_ + weights);
    for_constants<columns>([&](auto column) {
      if (Heads == 0 && column >= left) return;
      float2 const weight = pairs[4 * column];
      for (int i = 0; i < 4; ++i) {
        float const* const pair = dots[i / 2][column] + i % 2 * 2;
        sums[i] = __fmaf_rn(weight.x, relu(pair[0]), sums[i]);
        sums[i] = __fmaf_rn(weight.y, relu(pair[1]), sums[i]);
      }
    });
  }

  Lines const& lines_;
  std::byte const* shared_;
  int tiles_;     ///< of 8 heads
  int padding_;   ///< heads that the last tile has too many
  unsigned odd_;  ///< bits of the member
  unsigned high_;
  RowPlace first_;
  KeyReader<Form, Lanes> reader_;
  KeyStep keys_[holds_keys ? Lines::held_steps : 1];
  float start_[4];
};

/// Waits until at most `pending` of this thread's latest groups of copies are under way.
__device__ inline void wait_copies_but(int pending) {
  static_assert(ScoreBlock::most_stages <= 4);
  if (pending == 0) {
    wait_copies<0>();
  } else if (pending == 1) {
    wait_copies<1>();
  } else if (pending == 2) {
    wait_copies<2>();
  } else if (pending == 3) {
    wait_copies<3>();
  } else {
    wait_copies<4>();
  }
}

/// grid: x groups of rows, y chunks of keys. The warps of a block share its queries: each thread
/// has waited for its copies of them before a barrier that makes them visible to all, a second one
/// does so for what `finish` writes. From then on each warp streams keys of its own through its own
/// buffers. Its lanes wait for their copies and then for each other before they read a buffer, and
/// for each other before it is filled again: as soon as the keys are in registers, so that copies
/// overlap with the arithmetic even where a warp has one buffer. Blocks share nothing.
template <class Query, class KeyFormat, int Lanes, int Heads>
INDEXSHARE_KERNEL void __launch_bounds__(32 * most_score_warps, 1)
    score_tensor_kernel(__grid_constant__ TensorScoreCall<Query, KeyFormat> const call) {
  using Form = ScoreForm<Query, KeyFormat>;
  using Keys = KeyStream<Query, KeyFormat, Lanes>;
  using Scores = WarpScores<Query, KeyFormat, Lanes, Heads>;
  extern __shared__ __align__(128) std::byte shared[];
  ScoreBlock const& block = call.block;
  int const stages = block.stages;

  ScoreTiles tile(call, block.rows, ScoreBlock::warp_keys * warp_of_thread(), block.tile());
  if (tile.needed() == 0) return;
  ScoreLines<Form, Lanes> const lines(call.in.q.extent(2));
  Keys keys(call, block, lines, call.alignment, shared, tile);
  QueryLoader<Query, KeyFormat, Lanes> const queries(call, block, lines, call.alignment.queries,
                                                     shared, tile.needed());
  queries.start();
  commit_copies();
  for (int stage = 0; stage < stages; ++stage) keys.copy_next(stage);
  wait_copies_but(stages);  // the queries are older
  if constexpr (Form::widens) {
    __syncthreads();
    queries.finish();
  }
  __syncthreads();

  Scores scores(call, lines, shared);
  RowPlace const row_step = scores.step(1);
  unsigned const own_key = kept(threadIdx.x % 32 / 4 + threadIdx.x % 4 * 8);
  index_t const row_stride = call.scores.stride(0);
  index_t const own_place = kept(index_t{blockIdx.x} * block.rows * row_stride + own_key);
  for (int stage = 0; tile.valid(); tile.advance()) {
    wait_copies_but(stages - 1);
    __syncwarp();
    scores.take_keys(keys.lines(stage));
    float const scale = keys.scales(stage)[own_key];
    if constexpr (Scores::holds_keys) {
      __syncwarp();
      keys.copy_next(stage);
    }
    std::uint32_t const position = tile.first() + own_key;
    int row = tile.first_row();
    RowPlace place = scores.place(row);
    float* out = call.scores.data_handle() + (own_place + row * row_stride + tile.first());
    for (; row < tile.last_row(); ++row, place = place + row_step, out += row_stride) {
      std::uint32_t const length = tile.length(row);
      if (length <= tile.first()) continue;
      float score = scores.score(place);
      if constexpr (Form::scaled) score *= scale * Form::unit;
      if (scale == Keys::absent()) score = Keys::absent();
      if (position < length) *out = score;
    }
    if constexpr (!Scores::holds_keys) {
      __syncwarp();
      keys.copy_next(stage);
    }
    stage = stage + 1 == stages ? 0 : stage + 1;
  }
}

}  // namespace detail
}  // namespace v0
}  // namespace indexshare
