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
/// takes 32 keys of a tile and scores them for its rows, 8 * Columns heads at a time. `Lanes` is
/// the number of lanes, or 0 where it is known at run time only.

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
template <class Query, class KeyFormat, int Lanes, int Columns>
class WarpScores {
 public:
  using Form = ScoreForm<Query, KeyFormat>;
  using Operand = typename Form::Operand;
  using Lines = ScoreLines<Form, Lanes>;

  __device__ WarpScores(TensorScoreCall<Query, KeyFormat> const& call, Lines const& lines,
                        std::byte const* shared)
      : lines_(lines),
        shared_(shared),
        tiles_(call.block.head_tiles),
        padding_(kept(call.block.padded_heads() - static_cast<int>(call.in.q.extent(1)))),
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
  __device__ RowPlace step(int rows) const {
    auto const heads = static_cast<unsigned>(rows * tiles_ * 8);
    return {heads * static_cast<unsigned>(lines_.query_line()), heads * 4};
  }
  __device__ RowPlace place(int row) const { return first_ + step(row); }

  /// The keys of the warp for all rows of a run: `lines` is where the first one's line is.
  __device__ void take_keys(std::uint32_t lines) {
    reader_.begin(lines);
    for_constants<held_steps>([&](auto step) { keys_[step] = reader_.read(step); });
  }

  /// The sum over all heads of a row of the block, for key group + 8 * member of the warp.
  __device__ float score(RowPlace row) {
    float sums[4];
    for (int i = 0; i < 4; ++i) sums[i] = held_steps > 0 ? nan_or_zero(i) : 0.0f;
    int left = tiles_;
    do {
      float dots[2][Columns][4];
      multiply_keys(row.queries, dots);
      left -= Columns;
      if (padding_ != 0 && left == 0) clear_padding(dots);
      add_heads(row.weights, dots, sums);
      row.queries += static_cast<unsigned>(8 * Columns * lines_.query_line());
      row.weights += 8 * Columns * 4;
    } while (left != 0);
    if constexpr (held_steps == 0) {
      for (int i = 0; i < 4; ++i) sums[i] += nan_or_zero(i);
    }
    return sum_of_members(sums, odd_ != 0, high_ != 0);
  }

 private:
  static constexpr int held_steps = Lines::held_steps;

  /// dots = keys * queries over all lanes, steps ascending.
  __device__ void multiply_keys(std::uint32_t queries, float (&dots)[2][Columns][4]) {
    if constexpr (Lines::known) {
      for_constants<held_steps / 2>([&](auto pair) {
        for_constants<Columns>([&](auto column) {
          constexpr int at = 64 * decltype(pair)::value;
          std::uint32_t b[4];
          load_matrices_at<8 * Lines::known_query_line* decltype(column)::value +
                           columns_before(at)>(b, column_within(queries, at));
          multiply_pair<decltype(pair)::value == 0>(keys_[2 * pair], keys_[2 * pair + 1], true, b,
                                                    column, dots);
        });
      });
    } else {
      multiply_read<true>(queries, 0, dots);
      for (int step = 2; step < lines_.steps(); step += 2) {
        multiply_read<false>(queries, step, dots);
      }
    }
  }

  /// Steps `step` and the next, if there is one, with keys that are read for them.
  template <bool First>
  __device__ void multiply_read(std::uint32_t queries, int step, float (&dots)[2][Columns][4]) {
    bool const both = step + 1 < lines_.steps();
    KeyStep const first = reader_.read(step);
    KeyStep second{};
    if (both) second = reader_.read(step + 1);
    int const at = 32 * step;
    for (int column = 0; column < Columns; ++column) {
      std::uint32_t b[4];
      load_matrices(
          b, column_within(queries, at) +
                 static_cast<unsigned>(8 * column * lines_.query_line() + columns_before(at)));
      multiply_pair<First>(first, second, both, b, column, dots);
    }
  }

  template <bool First>
  __device__ static void multiply_pair(KeyStep const& first, KeyStep const& second, bool both,
                                       std::uint32_t const (&b)[4], int column,
                                       float (&dots)[2][Columns][4]) {
    for (int half = 0; half < 2; ++half) {
      float(&sum)[4] = dots[half][column];
      if constexpr (First) {
        multiply<Operand>(sum, first.a[half], b[0], b[1]);
      } else {
        multiply_add<Operand>(sum, first.a[half], b[0], b[1]);
      }
      if (both) multiply_add<Operand>(sum, second.a[half], b[2], b[3]);
    }
  }

  /// Heads past the last have no dot: a key with an infinity would make theirs NaN.
  __device__ void clear_padding(float (&dots)[2][Columns][4]) const {
    for (int half = 0; half < 2; ++half) {
      for (int i = 0; i < 4; ++i) {
        if (static_cast<int>(2 * (odd_ + high_)) + i % 2 >= 8 - padding_)
          dots[half][Columns - 1][i] = 0.0f;
      }
    }
  }

  /// sums += weight * relu(dot), heads ascending; a thread holds dots of heads 2 * member and the
  /// next of each 8.
  __device__ void add_heads(unsigned weights, float const (&dots)[2][Columns][4],
                            float (&sums)[4]) const {
    auto const* const pairs = reinterpret_cast<float2 const*>(shared_ + weights);
    for (int column = 0; column < Columns; ++column) {
      float2 const weight = pairs[4 * column];
      for (int i = 0; i < 4; ++i) {
        float const* const pair = dots[i / 2][column] + i % 2 * 2;
        sums[i] = __fmaf_rn(weight.x, relu(pair[0]), sums[i]);
        sums[i] = __fmaf_rn(weight.y, relu(pair[1]), sums[i]);
      }
    }
  }

  __device__ float nan_or_zero(int i) const {
    if constexpr (Form::marks_nan) {
      return reader_.nan_or_zero(i);
    } else {
      return 0.0f;
    }
  }

  Lines const& lines_;
  std::byte const* shared_;
  int tiles_;     ///< of 8 heads
  int padding_;   ///< heads that the last tile has too many
  unsigned odd_;  ///< bits of the member
  unsigned high_;
  RowPlace first_;
  KeyReader<Form, Lanes> reader_;
  KeyStep keys_[held_steps > 0 ? held_steps : 1];
};

__device__ inline void wait_for_tile(int stages) {
  if (stages == 2) {
    wait_copies<0>();
  } else if (stages == 3) {
    wait_copies<1>();
  } else {
    wait_copies<2>();
  }
}

/// grid: x groups of rows, y chunks of keys. A tile's copies are started `stages - 1` tiles before
/// its turn and its places are written one tile before that. The one barrier of a turn makes the
/// copies of all threads visible (each has waited for its own before, the queries among the first),
/// the places of the tile to be copied next, and says that the tile whose stage it takes has been
/// used. Places alternate between two buffers: those written at the end of a turn are not read
/// before the next barrier, and what they replace was read before the last. Blocks share nothing.
template <class Query, class KeyFormat, int Lanes, int Columns>
INDEXSHARE_KERNEL void __launch_bounds__(score_threads, 1)
    score_tensor_kernel(__grid_constant__ TensorScoreCall<Query, KeyFormat> const call) {
  using Form = ScoreForm<Query, KeyFormat>;
  extern __shared__ __align__(128) std::byte shared[];
  ScoreBlock const& block = call.block;
  int const stages = block.stages;

  ScoreTiles tile(call, block.rows, block.tile);
  if (!tile.valid()) return;
  ScoreTiles ahead = tile;
  ScoreLines<Form, Lanes> const lines(call.in.q.extent(2));
  QueryLoader<Query, KeyFormat, Lanes>(call, block, lines, call.alignment.queries, shared)
      .load(tile);
  KeyLoader<Query, KeyFormat, Lanes> keys(call, block, lines, call.alignment, shared);
  auto const place_next = [&](unsigned number) {
    keys.place(number);
    if (ahead.valid()) ahead.advance();
  };
  for (int number = 0; number < stages - 1; ++number) {
    keys.look_up(ahead);
    place_next(static_cast<unsigned>(number));
    __syncthreads();
    keys.copy(static_cast<unsigned>(number), number);
    commit_copies();
  }
  keys.look_up(ahead);
  place_next(static_cast<unsigned>(stages - 1));

  unsigned const key_groups = static_cast<unsigned>(block.tile) / 32;
  int const row_groups = static_cast<int>(score_warps / key_groups);
  int const row_group = static_cast<int>(threadIdx.x / 32 / key_groups);
  unsigned const key_group = kept(threadIdx.x / 32 % key_groups);
  unsigned const own_bit = kept(threadIdx.x % 32 / 4 + threadIdx.x % 4 * 8);
  WarpScores<Query, KeyFormat, Lanes, Columns> scores(call, lines, shared);
  RowPlace const row_step = scores.step(row_groups);
  index_t const row_stride = call.scores.stride(0);
  index_t const out_step = kept(row_groups * row_stride);
  float* const own_scores =
      call.scores.data_handle() + index_t{blockIdx.x} * block.rows * row_stride + own_bit;
  int stage = 0;
  int free_stage = stages - 1;
  for (unsigned number = 0; tile.valid(); ++number, tile.advance()) {
    wait_for_tile(stages);
    __syncthreads();
    keys.copy(number + static_cast<unsigned>(stages - 1), free_stage);
    commit_copies();
    keys.look_up(ahead);

    std::uint32_t const first = kept(tile.first() + 32 * key_group);
    int row = tile.first_row() + row_group;
    if (row < tile.last_row() && first < tile.end()) {
      scores.take_keys(keys.stage(stage) +
                       32 * key_group * static_cast<unsigned>(lines.key_line()));
      bool const exists = (keys.absent(number)[key_group] >> own_bit & 1) == 0;
      float scale = Form::unit;
      if constexpr (Form::scaled) scale *= keys.scales(stage)[32 * key_group + own_bit];
      float* out = own_scores + row * row_stride + first;
      RowPlace place = scores.place(row);
      do {
        std::uint32_t const length = tile.length(row);
        if (length > first) {
          float score = scores.score(place);
          if constexpr (Form::scaled) score *= scale;
          if (!exists) score = -__int_as_float(0x7F800000);
          if (own_bit < length - first) *out = score;
        }
        row += row_groups;
        out += out_step;
        place = place + row_step;
      } while (row < tile.last_row());
    }

    place_next(number + static_cast<unsigned>(stages));
    free_stage = stage;
    stage = stage + 1 == stages ? 0 : stage + 1;
  }
}

}  // namespace detail
}  // namespace v0
}  // namespace indexshare
