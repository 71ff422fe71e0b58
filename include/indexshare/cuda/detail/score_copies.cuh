// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/cuda/detail/mma.cuh>
#include <indexshare/cuda/detail/score_fragments.cuh>
#include <indexshare/cuda/detail/score_rows.cuh>
#include <indexshare/cuda/detail/warp.cuh>
#include <indexshare/cuda/detail/words.cuh>
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

/// Copies 16 bytes to shared memory, asynchronously where the alignment allows it; zeros without
/// reading if not `valid`.
__device__ inline void copy_16(std::uint32_t target, std::byte const* source, bool valid,
                               int alignment) {
  if (alignment == 16) {
    copy_async_16(target, source, valid);
  } else if (alignment == 8) {
    for (unsigned i = 0; i < 16; i += 8) copy_async_small<8>(target + i, source + i, valid);
  } else if (alignment == 4) {
    for (unsigned i = 0; i < 16; i += 4) copy_async_small<4>(target + i, source + i, valid);
  } else {
    store_words4(target, valid ? load_16(source, alignment) : make_uint4(0, 0, 0, 0));
  }
}

// Eight threads copy a line; a thread has pieces `column + 8 * i` of its lines.
inline constexpr int copy_threads = 8;
__device__ inline int copy_column() { return static_cast<int>(threadIdx.x % copy_threads); }

/// Copies the `bytes` bytes of line number `number`, which begins at `line`, to its pieces from
/// `first` on; zeros up to `pieces` pieces. The thread's first piece comes from the global address
/// `from`.
__device__ inline void copy_line(std::uint32_t line, int number, int first, int pieces,
                                 std::size_t from, int bytes, int alignment) {
  auto const* const source = static_cast<std::byte const*>(__cvta_global_to_generic(from));
#pragma unroll 1
  for (int piece = copy_column(); piece < pieces; piece += copy_threads) {
    bool const valid = 16 * piece < bytes;
    copy_16(line + piece_at(number, first + piece),
            source + (valid ? 16 * (piece - copy_column()) : 0), valid, alignment);
  }
}

/// The same of whole lines of `Bytes` bytes, a multiple of 128, if they exist; all addresses are
/// multiples of 16. The thread's first piece goes `TargetOffset` bytes past `target`.
template <int TargetOffset, int Bytes>
__device__ inline void copy_full_line(std::uint32_t target, std::size_t from, bool exists) {
  for_constants<Bytes / 128>([&](auto part) {
    constexpr int at = 128 * part;
    copy_async_16_at<TargetOffset + at, at>(target, from, exists ? 16u : 0u);
  });
}

/// Queries and weights of the rows that need them, one bit each in `needed`. Padded heads and lanes
/// become zeros. All threads of a block call these functions.
template <class Query, class KeyFormat, int Lanes>
class QueryLoader {
 public:
  using Form = ScoreForm<Query, KeyFormat>;
  using Lines = ScoreLines<Form, Lanes>;

  __device__ QueryLoader(ScoreCall<Query, KeyFormat> const& call, ScoreBlock const& block,
                         Lines const& lines, int alignment, std::byte* shared, unsigned needed)
      : call_(call),
        block_(block),
        lines_(lines),
        alignment_(alignment),
        shared_(shared),
        needed_(needed) {}

  /// Starts the copies.
  __device__ void start() const {
    start_weights();
    int const heads = block_.padded_heads();
    std::size_t const queries =
        __cvta_generic_to_global(call_.in.q.data_handle() + first_row() * call_.in.q.stride(0));
    for (int head = static_cast<int>(threadIdx.x / copy_threads); head < heads;
         head += static_cast<int>(blockDim.x / copy_threads)) {
      bool const exists = head < static_cast<int>(call_.in.q.extent(1));
      std::size_t from = queries + bytes_of((exists ? head : 0) * call_.in.q.stride(1)) +
                         static_cast<std::size_t>(16 * copy_column());
      std::uint32_t target = line(head);
      for (unsigned left = needed_; left != 0; left >>= 1) {
        if ((left & 1) != 0) start_line(target, head, from, exists);
        from += bytes_of(call_.in.q.stride(0));
        target += static_cast<std::uint32_t>(heads * lines_.query_line());
      }
    }
  }

  /// Gives queries that have arrived the order in which KeyReader has widened keys, and turns codes
  /// into operands. A barrier of the block is needed before and after it.
  __device__ void finish() const {
    if constexpr (Form::widens) {
      constexpr int threads = 4;  // of a line: two lines' pieces 0, 2, 4, 6 are in different banks
      int const lines = block_.rows * block_.padded_heads();
      int const groups = pieces() / 2;
      for (int number = static_cast<int>(threadIdx.x / threads); number < lines;
           number += static_cast<int>(blockDim.x / threads)) {
        if ((needed_ >> number / block_.padded_heads() & 1) == 0) continue;
        for (int first = 0; first < groups; first += threads) {
          int const group = first + static_cast<int>(threadIdx.x % threads);
          finish_lanes(line(number), number, group, group < groups);
        }
      }
    }
  }

 private:
  __device__ index_t first_row() const {
    return call_.request.rows.first + index_t{blockIdx.x} * block_.rows;
  }
  __device__ static std::size_t bytes_of(index_t queries) {
    return static_cast<std::size_t>(queries) * sizeof(Query);
  }
  __device__ std::uint32_t line(int number) const {
    return shared_address(shared_) + static_cast<std::uint32_t>(number * lines_.query_line());
  }
  /// Pieces of a line: operands are read two steps at a time.
  __device__ int pieces() const { return (lines_.query_bytes() + 63) / 64 * 4; }
  /// Pieces that are copied, and the first piece to copy to: codes come to the end of the line.
  __device__ int copied_pieces() const { return pieces() / Form::operand_bytes_per_byte; }
  __device__ int first_copied() const { return pieces() - copied_pieces(); }

  __device__ void start_weights() const {
    auto* const weights = reinterpret_cast<float*>(shared_ + block_.weights_at);
    int const heads = block_.padded_heads();
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x); i < block_.rows * heads;
         i += static_cast<int>(blockDim.x)) {
      int const row = i / heads;
      int const head = i - row * heads;
      if ((needed_ >> row & 1) == 0) continue;
      if (head < static_cast<int>(call_.in.q.extent(1))) {
        copy_async_small<4>(shared_address(weights + i),
                            &call_.in.weights(first_row() + row, head));
      } else {
        weights[i] = 0.0f;
      }
    }
  }

  /// Heads are padded to 8, so the swizzle of a line is that of the head's number.
  __device__ void start_line(std::uint32_t line, int head, std::size_t from, bool exists) const {
    constexpr int bytes = Lanes * static_cast<int>(sizeof(Query));
    if (Lines::full_queries && bytes % 128 == 0 && alignment_ == 16) {
      copy_full_line<Lines::known_query_line - bytes, bytes>(line + piece_at(head, copy_column()),
                                                             from, exists);
    } else {
      copy_line(line, head, first_copied(), copied_pieces(), from,
                exists ? lines_.lanes() * static_cast<int>(sizeof(Query)) : 0, alignment_);
    }
  }

  /// Of 16 lanes, the even pairs to one piece, the odd ones to the next. Codes are read by the
  /// whole warp before what they become is written over other codes.
  __device__ void finish_lanes(std::uint32_t line, int number, int group, bool exists) const {
    std::uint32_t const at = line + piece_at(number, 2 * group);
    uint4 even{};
    uint4 odd{};
    if constexpr (sizeof(Query) == 2) {
      if (!exists) return;
      uint4 const low = load_words4(at);
      uint4 const high = load_words4(at ^ 16);
      even = make_uint4(low.x, low.z, high.x, high.z);
      odd = make_uint4(low.y, low.w, high.y, high.w);
    } else {
      uint4 codes{};
      if (exists) codes = load_words4(line + piece_at(number, first_copied() + group));
      widen_queries(codes.x, even.x, odd.x);
      widen_queries(codes.y, even.y, odd.y);
      widen_queries(codes.z, even.z, odd.z);
      widen_queries(codes.w, even.w, odd.w);
      __syncwarp();
      if (!exists) return;
    }
    store_words4(at, even);
    store_words4(at ^ 16, odd);
  }

  ScoreCall<Query, KeyFormat> const& call_;
  ScoreBlock const& block_;
  Lines const& lines_;
  int alignment_;
  std::byte* shared_;
  unsigned needed_;
};

/// Brings the keys of one warp, 32 at a time, to its buffers. Lane i looks up key i of a tile, a
/// tile ahead of its copies, which hides the latency of the page table.
template <class Query, class KeyFormat, int Lanes>
class KeyStream {
 public:
  using Form = ScoreForm<Query, KeyFormat>;
  using Lines = ScoreLines<Form, Lanes>;

  /// `tiles`: the warp's own.
  __device__ KeyStream(ScoreCall<Query, KeyFormat> const& call, ScoreBlock const& block,
                       Lines const& lines, ScoreAlignment const& alignment, std::byte* shared,
                       ScoreTiles const& tiles)
      : call_(call),
        lines_(lines),
        alignment_(alignment),
        next_(tiles),
        shared_(shared),
        own_(kept(block.keys_at + warp_of_thread() * block.stages * buffer_bytes())),
        target_(kept(static_cast<std::uint32_t>(own_line() * lines.key_line()) +
                     piece_at(own_line(), copy_column()))),
        cache_(kept(static_cast<index_t>(__cvta_generic_to_global(call.in.keys.data)) +
                    16 * copy_column())) {
    look_up();
  }

  /// Starts the copies of the next tile, if there is one, to a buffer that no lane reads any more.
  /// They are one group of each lane.
  __device__ void copy_next(int stage) {
    if (next_.valid()) {
      auto const& cache = call_.in.keys;
      index_t const block = index_t{max(found_.block, 0)} * cache.block_stride;
      LaneNumbers const places((block + index_t{found_.place} * cache.row_stride) * element);
      copy_keys(stage, places, __ballot_sync(full_warp, found_.block >= 0));
      put_scale(stage, block + cache.block_size * cache.row_stride + index_t{found_.place} * 4);
      next_.advance();
      look_up();
    }
    commit_copies();
  }

  /// Shared address of the first line of a buffer.
  __device__ std::uint32_t lines(int stage) const { return shared_address(buffer(stage)); }
  /// The scale of each of its keys, or `absent` if it has no slot. Formats without scales have 1.
  __device__ float* scales(int stage) const {
    return reinterpret_cast<float*>(buffer(stage) + keys * lines_.key_line());
  }
  __device__ static float absent() { return minus_infinity(); }

 private:
  static constexpr int keys = ScoreBlock::warp_keys;
  static constexpr int element = sizeof(typename KeyFormat::storage);
  static constexpr int lines_at_once = 32 / copy_threads;

  /// The first line that the lane copies to.
  __device__ static int own_line() { return lane_of_thread() / copy_threads; }
  __device__ std::size_t global_address(index_t place) const {
    return static_cast<std::size_t>(cache_ + place);
  }
  __device__ int buffer_bytes() const { return keys * (lines_.key_line() + 4); }
  __device__ std::byte* buffer(int stage) const { return shared_ + own_ + stage * buffer_bytes(); }

  __device__ void look_up() {
    std::uint32_t const position = next_.first() + static_cast<std::uint32_t>(lane_of_thread());
    found_ = {};
    if (next_.valid() && position < next_.end()) {
      found_ = find_key(call_.pages, call_.in.keys, next_.request(), position);
    }
  }

  /// Byte offsets of the keys, and one bit for each that exists.
  __device__ void copy_keys(int stage, LaneNumbers const& places, unsigned present) const {
    present >>= own_line();
    if (Lines::full_keys && alignment_.keys == 16) {
      copy_full_lines(lines(stage) + target_, places, present);
      return;
    }
    // whole steps of e4m3 operands
    int const pieces = (lines_.key_bytes() + 31) / 32 * 2;
#pragma unroll 1
    for (int first = 0; first < keys; first += lines_at_once) {
      int const line = first + own_line();
      copy_line(lines(stage) + static_cast<std::uint32_t>(line * lines_.key_line()), line, 0,
                pieces, global_address(places.of(line)),
                (present >> first & 1) != 0 ? lines_.key_bytes() : 0, alignment_.keys);
    }
  }

  /// Bit i of `present` is for line i + own_line(), i being a multiple of 4. Such lines' swizzles
  /// differ in bit 2 of a piece.
  __device__ void copy_full_lines(std::uint32_t target, LaneNumbers const& places,
                                  unsigned present) const {
    for_constants<keys / lines_at_once>([&](auto turn) {
      constexpr int first = turn * lines_at_once;
      copy_full_line<first * Lines::known_key_line, Lines::known_key_line>(
          target ^ (first % 8 * 16), global_address(places.of(first + own_line())),
          (present >> first & 1) != 0);
    });
  }

  /// `place`: byte offset of the scale of the lane's key.
  __device__ void put_scale(int stage, index_t place) const {
    float* const target = scales(stage) + lane_of_thread();
    if (found_.block < 0) {
      *target = absent();
    } else if constexpr (!Form::scaled) {
      *target = 1.0f;
    } else if (alignment_.scales) {
      copy_async_small<4>(shared_address(target), call_.in.keys.data + place);
    } else {
      *target = load_unaligned<float>(call_.in.keys.data + place);
    }
  }

  ScoreCall<Query, KeyFormat> const& call_;
  Lines const& lines_;
  ScoreAlignment const& alignment_;
  ScoreTiles next_;
  KeyPlace found_;
  std::byte* shared_;
  int own_;               ///< offset of the warp's first buffer
  std::uint32_t target_;  ///< where the lane's first piece lies in a buffer
  index_t cache_;         ///< global address of the cache's first byte, and the lane's piece
};

}  // namespace detail
}  // namespace v0
}  // namespace indexshare
