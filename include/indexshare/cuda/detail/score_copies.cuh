// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/cuda/detail/mma.cuh>
#include <indexshare/cuda/detail/score_fragments.cuh>
#include <indexshare/cuda/detail/score_rows.cuh>
#include <indexshare/cuda/indexer_plan.hpp>

#include <cstddef>
#include <cstdint>

/// @file From global to shared memory for the tensor-core indexer. Any alignment works: the host
/// finds the widest copy that fits, and what arrives is the same.

namespace indexshare {
inline namespace v0 {
namespace detail {

/// Widest copy that pointers and strides allow, in bytes; narrower than any asynchronous copy: by
/// elements.
struct ScoreAlignment {
  int queries = 0;
  int keys = 0;
  bool scales = false;  ///< at multiples of four bytes
};

/// 16 bytes from anywhere, as elements of `Bytes` bytes.
template <int Bytes>
__device__ inline uint4 gather_16(std::byte const* source) {
  using Element =
      std::conditional_t<Bytes == 1, std::uint8_t,
                         std::conditional_t<Bytes == 2, std::uint16_t,
                                            std::conditional_t<Bytes == 4, std::uint32_t, uint2>>>;
  union {
    Element parts[16 / Bytes];
    uint4 whole;
  } piece;
  for (int i = 0; i < 16 / Bytes; ++i) {
    piece.parts[i] = reinterpret_cast<Element const*>(source)[i];
  }
  return piece.whole;
}

/// 16 bytes from an address with the given alignment.
__device__ inline uint4 load_16(std::byte const* source, int alignment) {
  if (alignment == 16) return *reinterpret_cast<uint4 const*>(source);
  if (alignment == 8) return gather_16<8>(source);
  if (alignment == 4) return gather_16<4>(source);
  return alignment == 2 ? gather_16<2>(source) : gather_16<1>(source);
}

__device__ inline void store_16(std::uint32_t target, uint4 value) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(target), "r"(value.x), "r"(value.y),
               "r"(value.z), "r"(value.w)
               : "memory");
}

/// Copies 16 bytes to shared memory, asynchronously where the alignment allows it; zeros without
/// reading if not `valid`.
template <bool Widest>
__device__ inline void copy_16(std::uint32_t target, std::byte const* source, bool valid,
                               int alignment) {
  if constexpr (Widest) {
    copy_async_16(target, source, valid);
  } else if (alignment == 8) {
    for (unsigned i = 0; i < 16; i += 8) copy_async_small<8>(target + i, source + i, valid);
  } else if (alignment == 4) {
    for (unsigned i = 0; i < 16; i += 4) copy_async_small<4>(target + i, source + i, valid);
  } else {
    store_16(target, valid ? load_16(source, alignment) : make_uint4(0, 0, 0, 0));
  }
}

// Eight threads copy a line, 32 lines at a time; a thread has pieces `column + 8 * i` of its lines.
inline constexpr int copy_threads = 8;
inline constexpr int copy_lines = score_threads / copy_threads;

/// Queries and weights of the rows that need them. Padded heads and lanes become zeros.
template <class Query, class KeyFormat, int Lanes>
class QueryLoader {
 public:
  using Form = ScoreForm<Query, KeyFormat>;
  using Lines = ScoreLines<Form, Lanes>;

  __device__ QueryLoader(ScoreCall<Query, KeyFormat> const& call, ScoreBlock const& block,
                         Lines const& lines, int alignment, std::byte* shared)
      : call_(call), block_(block), lines_(lines), alignment_(alignment), shared_(shared) {}

  __device__ void load(ScoreTiles const& tiles) const {
    auto* const weights = reinterpret_cast<float*>(shared_ + block_.weights_at);
    int const thread = static_cast<int>(threadIdx.x);
    int const heads = block_.padded_heads();
    for (int row = 0; row < block_.rows; ++row) {
      if (!tiles.needs(row)) continue;
      index_t const from = call_.request.rows.first + index_t{blockIdx.x} * block_.rows + row;
      if (alignment_ == 16) {
        load_heads<true>(from, row * heads);
      } else {
        load_heads<false>(from, row * heads);
      }
      if (thread < heads) {
        weights[row * heads + thread] = has(thread) ? call_.in.weights(from, thread) : 0.0f;
      }
    }
  }

 private:
  __device__ bool has(int head) const { return head < static_cast<int>(call_.in.q.extent(1)); }

  template <bool Widest>
  __device__ void load_heads(index_t row, int first_line) const {
    Query const* const queries = call_.in.q.data_handle() + row * call_.in.q.stride(0);
    std::uint32_t const target =
        shared_address(shared_) + static_cast<std::uint32_t>(first_line * lines_.query_line());
#pragma unroll 1
    for (int head = static_cast<int>(threadIdx.x / copy_threads); head < block_.padded_heads();
         head += copy_lines) {
      load_line<Widest>(queries + head * call_.in.q.stride(1), head,
                        target + static_cast<std::uint32_t>(head * lines_.query_line()));
    }
  }

  /// Heads are padded to 8, so the swizzle of a head's line is that of the head's number.
  template <bool Widest>
  __device__ void load_line(Query const* query, int head, std::uint32_t target) const {
    auto const* const source = reinterpret_cast<std::byte const*>(query);
    int const column = static_cast<int>(threadIdx.x % copy_threads);
    // operands are read two steps at a time, so a line is whole pairs of them
    int const pieces =
        Lines::full_queries ? lines_.query_line() / 16 : (lines_.query_bytes() + 63) / 64 * 4;
#pragma unroll
    for (int first = 0; first < pieces; first += copy_threads) {
      int const piece = first + column;
      bool const valid = has(head) && (Lines::full_queries || 16 * piece < lines_.query_bytes());
      std::uint32_t const at = target + static_cast<std::uint32_t>(Lines::piece_at(head, piece));
      if constexpr (Form::widens) {
        uint4 const value = permuted(source, piece, valid);
        if (Lines::full_queries || piece < pieces) store_16(at, value);
      } else if (Lines::full_queries || piece < pieces) {
        copy_16<Widest>(at, source + (valid ? 16 * piece : 0), valid, alignment_);
      }
    }
  }

  /// The order of KeyReader: piece 2i holds the even pairs of 16 lanes, piece 2i + 1 the odd ones.
  /// A thread and its neighbour, who both call this, have the pieces of one 16 lanes.
  __device__ uint4 permuted(std::byte const* source, int piece, bool valid) const {
    bool const odd = piece % 2 != 0;
    if constexpr (sizeof(Query) == 2) {
      uint4 const own = valid ? load_16(source + 16 * piece, alignment_) : make_uint4(0, 0, 0, 0);
      unsigned const first = __shfl_xor_sync(full_warp, odd ? own.x : own.y, 1);
      unsigned const second = __shfl_xor_sync(full_warp, odd ? own.z : own.w, 1);
      return odd ? make_uint4(first, second, own.y, own.w)
                 : make_uint4(own.x, own.z, first, second);
    } else {
      if (!valid) return make_uint4(0, 0, 0, 0);
      uint4 const codes = load_16(source + 16 * (piece / 2), alignment_);
      return make_uint4(fp16_queries(codes.x, odd), fp16_queries(codes.y, odd),
                        fp16_queries(codes.z, odd), fp16_queries(codes.w, odd));
    }
  }

  ScoreCall<Query, KeyFormat> const& call_;
  ScoreBlock const& block_;
  Lines const& lines_;
  int alignment_;
  std::byte* shared_;
};

/// Brings key tiles in three steps, each for a later tile: `look_up` reads the page table,
/// `place` tells all threads where the keys lie, `copy` starts the copies. Thread i < tile looks up
/// key i. Tiles are numbered; `place` and `copy` of one tile have a block barrier between them.
template <class Query, class KeyFormat, int Lanes>
class KeyLoader {
 public:
  using Form = ScoreForm<Query, KeyFormat>;
  using Lines = ScoreLines<Form, Lanes>;

  __device__ KeyLoader(ScoreCall<Query, KeyFormat> const& call, ScoreBlock const& block,
                       Lines const& lines, ScoreAlignment const& alignment, std::byte* shared)
      : call_(call),
        block_(block),
        lines_(lines),
        alignment_(alignment),
        shared_(shared),
        source_(reinterpret_cast<std::byte const*>(call.in.keys.data) + 16 * column()),
        target_(kept(stage(0) + static_cast<std::uint32_t>(line() * lines.key_line() +
                                                           Lines::piece_at(line(), column())))) {}

  __device__ void look_up(ScoreTiles const& tile) {
    found_ = {};
    looked_up_ = tile.valid();
    std::uint32_t const position = tile.first() + threadIdx.x;
    if (thread() < block_.tile && looked_up_ && position < tile.end()) {
      found_ = find_key(call_.pages, call_.in.keys, tile.request(), position);
    }
  }

  __device__ void place(unsigned number) {
    placed_ = looked_up_;
    if (!placed_ || thread() >= block_.tile) return;
    auto const& keys = call_.in.keys;
    bool const exists = found_.block >= 0;
    index_t const block = index_t{found_.block} * keys.block_stride;
    places(number)[thread()] =
        exists ? (block + index_t{found_.place} * keys.row_stride) * element : no_place;
    if constexpr (Form::scaled) {
      scale_ = exists ? block + keys.block_size * keys.row_stride + index_t{found_.place} * 4 : -1;
    }
    unsigned const missing = __ballot_sync(full_warp, !exists);
    if (threadIdx.x % 32 == 0) absent(number)[threadIdx.x / 32] = missing;
  }

  /// Starts the copies of the tile placed last, whose number this is, to a stage.
  __device__ void copy(unsigned number, int to) const {
    if (!placed_) return;
    index_t const* const from = places(number) + line();
    auto const target = target_ + static_cast<std::uint32_t>(to * stage_bytes());
    if (alignment_.keys == 16) {
      copy_tile<true>(from, target);
    } else {
      copy_tile<false>(from, target);
    }
    if constexpr (Form::scaled) copy_scale(to);
  }

  /// Shared address of the first line of a stage.
  __device__ std::uint32_t stage(int i) const {
    return shared_address(shared_ + block_.keys_at) + static_cast<std::uint32_t>(i * stage_bytes());
  }
  __device__ float* scales(int of_stage) const {
    return reinterpret_cast<float*>(shared_ + block_.scales_at) + of_stage * block_.tile;
  }
  /// One bit per key of a tile that has no slot or is past its run.
  __device__ unsigned* absent(unsigned number) const {
    return reinterpret_cast<unsigned*>(shared_ + block_.absent_at) +
           number % ScoreBlock::absent_slots * (static_cast<unsigned>(block_.tile) / 32);
  }

 private:
  static constexpr int element = sizeof(typename KeyFormat::storage);
  static constexpr index_t no_place = -1;

  __device__ static int thread() { return static_cast<int>(threadIdx.x); }
  __device__ static int line() { return static_cast<int>(threadIdx.x / copy_threads); }
  __device__ static int column() { return static_cast<int>(threadIdx.x % copy_threads); }
  __device__ int stage_bytes() const { return block_.tile * lines_.key_line(); }
  __device__ index_t* places(unsigned number) const {
    return reinterpret_cast<index_t*>(shared_ + block_.places_at) +
           number % 2 * static_cast<unsigned>(block_.tile);
  }

  template <bool Widest>
  __device__ void copy_tile(index_t const* from, std::uint32_t target) const {
    if (block_.tile == 256) {
      copy_some<Widest, 8>(from, target);
    } else if (block_.tile == 128) {
      copy_some<Widest, 4>(from, target);
    } else if (block_.tile == 64) {
      copy_some<Widest, 2>(from, target);
    } else {
      copy_some<Widest, 1>(from, target);
    }
  }

  /// A thread's lines are a multiple of 8 apart, so the swizzle is the same for all of them.
  template <bool Widest, int Count>
  __device__ void copy_some(index_t const* from, std::uint32_t target) const {
    constexpr int unrolled = Widest ? Count : 1;
#pragma unroll unrolled
    for (int i = 0; i < Count; ++i) {
      copy_line<Widest>(from[i * copy_lines],
                        target + static_cast<std::uint32_t>(i * copy_lines * lines_.key_line()));
    }
  }

  template <bool Widest>
  __device__ void copy_line(index_t place, std::uint32_t target) const {
    bool const exists = place != no_place;
    std::byte const* const source = source_ + (exists ? place : 0);
    // whole steps of e4m3 operands
    int const pieces =
        Lines::full_keys ? lines_.key_line() / 16 : (lines_.key_bytes() + 31) / 32 * 2;
#pragma unroll
    for (int first = 0; first < pieces; first += copy_threads) {
      if (!Lines::full_keys && first + column() >= pieces) break;
      bool const valid =
          exists && (Lines::full_keys || 16 * (first + column()) < lines_.key_bytes());
      copy_16<Widest>(target + static_cast<std::uint32_t>(16 * first),
                      source + (Lines::full_keys || valid ? 16 * first : 0), valid,
                      alignment_.keys);
    }
  }

  __device__ void copy_scale(int to) const {
    if (thread() >= block_.tile) return;
    float* const target = scales(to) + thread();
    if (scale_ < 0) {
      *target = 0.0f;
    } else if (alignment_.scales) {
      copy_async_small<4>(shared_address(target), call_.in.keys.data + scale_);
    } else {
      *target = load_unaligned<float>(call_.in.keys.data + scale_);
    }
  }

  ScoreCall<Query, KeyFormat> const& call_;
  ScoreBlock const& block_;
  Lines const& lines_;
  ScoreAlignment const& alignment_;
  std::byte* shared_;
  std::byte const* source_;
  std::uint32_t target_;

  KeyPlace found_{};
  index_t scale_ = -1;
  bool looked_up_ = false;
  bool placed_ = false;
};

}  // namespace detail
}  // namespace v0
}  // namespace indexshare
