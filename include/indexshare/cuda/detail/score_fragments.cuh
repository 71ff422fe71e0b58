// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/cuda/detail/codes.cuh>
#include <indexshare/cuda/detail/mma.cuh>
#include <indexshare/cuda/detail/score_rows.cuh>
#include <indexshare/cuda/indexer_plan.hpp>
#include <indexshare/dims.hpp>
#include <indexshare/element.hpp>

#include <cstdint>
#include <type_traits>

/// @file From lines of shared memory to the operands of the tensor cores.

namespace indexshare {
inline namespace v0 {
namespace detail {

/// Whether mma.sync multiplies e4m3 in hardware. Between sm_90 and sm_103 ptxas turns it into fp16
/// products and converts both operands before each of them (in machine code of nvcc 13.0: HMMA and
/// 128 F2FP where sm_89 and sm_120 have QMMA), so there operands are converted once, here.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890 && (__CUDA_ARCH__ < 900 || __CUDA_ARCH__ >= 1200)
inline constexpr bool image_multiplies_e4m3 = true;
#else
inline constexpr bool image_multiplies_e4m3 = false;
#endif

/// How an image computes the dots of a pair of types.
template <class Query, class KeyFormat>
struct ScoreForm {
  static constexpr ScoreDots dots = score_dots<Query, KeyFormat>();
  /// What the tensor cores multiply; queries lie in shared memory as this.
  using Operand =
      std::conditional_t<dots == ScoreDots::e4m3 && !image_multiplies_e4m3, fp16, Query>;
  /// Keys lie in shared memory in one byte per lane and operands take two.
  static constexpr bool widens = dots != ScoreDots::half && sizeof(Operand) == 2;
  static constexpr bool scaled = dots != ScoreDots::half;
  static constexpr int key_bytes = dots == ScoreDots::half ? 2 : 1;
  static constexpr int query_bytes = sizeof(Operand);
  static constexpr int operand_bytes_per_byte = sizeof(Operand) / sizeof(Query);
  /// Lanes of one step of the tensor cores: 32 bytes of query.
  static constexpr int step_lanes = 32 / query_bytes;

  /// Without the conversion instruction, which keeps NaN, the bits of a code are moved into place.
  /// That makes numbers of NaN codes, which are marked apart, and leaves an fp16 2^8 too small: the
  /// score takes that factor, exactly.
  static constexpr bool marks_nan = widens && !image_knows_e4m3;
  static constexpr float unit = marks_nan && std::is_same_v<Operand, fp16> ? 256.0f : 1.0f;
};

/// Byte offset of a 16-byte piece within its line.
__device__ inline std::uint32_t piece_at(int line, int piece) {
  return static_cast<std::uint32_t>((piece ^ (line & 7)) << 4);
}

/// Lines of shared memory (ScoreBlock) for a number of lanes that is known when compiling, or 0.
template <class Form, int Lanes>
class ScoreLines {
 public:
  static constexpr bool known = Lanes > 0;
  /// Steps whose keys a warp holds in registers for all rows; 0: it reads them for every row.
  static constexpr int held_steps = Lanes / Form::step_lanes;
  static_assert(held_steps % 2 == 0);
  /// Whether all pieces of a line are filled.
  static constexpr bool full_keys = known && Lanes * Form::key_bytes % 128 == 0;
  static constexpr bool full_queries = known && Lanes * Form::query_bytes % 128 == 0;

  __device__ explicit ScoreLines(index_t lanes) : lanes_(static_cast<int>(lanes)) {}

  __device__ int lanes() const { return known ? Lanes : lanes_; }
  __device__ int steps() const { return (lanes() + Form::step_lanes - 1) / Form::step_lanes; }
  __device__ int key_bytes() const { return lanes() * Form::key_bytes; }
  __device__ int query_bytes() const { return lanes() * Form::query_bytes; }
  static constexpr int known_key_line = (Lanes * Form::key_bytes + 127) & -128;
  static constexpr int known_query_line = (Lanes * Form::query_bytes + 127) & -128;
  __device__ int key_line() const { return known ? known_key_line : (key_bytes() + 127) & -128; }
  __device__ int query_line() const {
    return known ? known_query_line : (query_bytes() + 127) & -128;
  }

 private:
  int lanes_;
};

/// Four e4m3 queries in fp16, NaN kept and not to be multiplied by a unit.
__device__ inline void widen_queries(std::uint32_t codes, std::uint32_t& low, std::uint32_t& high) {
  widen_codes<fp16>(codes, low, high);
  if constexpr (!image_knows_e4m3) {
    auto const finish = [](std::uint32_t& pair, std::uint32_t nan_bytes) {
      asm("mul.rn.f16x2 %0, %0, %1;" : "+r"(pair) : "r"(0x5C005C00u));  // 256
      pair |= nan_bytes;                                                // all bits: NaN
    };
    std::uint32_t const nan = nan_codes(codes);
    finish(low, sign_bytes<0x9988>(nan));
    finish(high, sign_bytes<0xBBAA>(nan));
  }
}

// ---- operands

/// One step of the keys of a warp, 32 keys by `step_lanes` lanes: matrix A of two products, for
/// keys 0-15 and 16-31.
struct KeyStep {
  std::uint32_t a[2][4];
};

/// Where a thread reads its column of a line, and the columns of later steps, `at` bytes further.
/// The swizzle permutes the 128-byte parts of lines in themselves, and lines begin at multiples of
/// 128 bytes of shared memory.
__device__ constexpr std::uint32_t column_within(std::uint32_t column, int at) {
  return column ^ static_cast<std::uint32_t>(at & 127);
}
__device__ constexpr int columns_before(int at) { return at & ~127; }

/// Reads the keys of a warp from lines of shared memory. A member of a group holds, of keys
/// `group + 8 * i`, i in 0..3, the lanes that the instruction asks for. Where keys are widened,
/// member m holds codes 4m .. 4m + 3 of a step; they enter as lanes 2m, 2m + 1, 2m + 8, 2m + 9, and
/// the queries lie permuted to match: of the pairs of 16 lanes first the even ones, then
/// the odd.
template <class Form, int Lanes>
class KeyReader {
 public:
  using Lines = ScoreLines<Form, Lanes>;

  __device__ explicit KeyReader(Lines const& lines) : line_bytes_(lines.key_line()) {
    unsigned const lane = threadIdx.x % 32;
    unsigned const line = Form::widens ? lane : lane % 16;
    unsigned const piece = Form::widens ? 0 : lane / 16;
    own_ = kept(line * static_cast<unsigned>(lines.key_line()) + ((piece ^ (line & 7)) << 4));
  }

  /// From now on reads the keys whose first line is at `lines`; the lines before it are a multiple
  /// of 8.
  __device__ void begin(std::uint32_t lines) {
    column_ = lines + own_;
    for (std::uint32_t& word : nan_) word = 0;
  }

  /// `Step` is a constant or a number.
  template <class Step>
  __device__ KeyStep read(Step step) {
    KeyStep keys;
    if constexpr (Form::widens) {
      std::uint32_t codes[4];
      read_matrices<0>(codes, step);
      for (int i = 0; i < 4; ++i) {
        std::uint32_t low;
        std::uint32_t high;
        widen_codes<typename Form::Operand>(codes[i], low, high);
        keys.a[i / 2][i % 2] = kept(low);
        keys.a[i / 2][2 + i % 2] = kept(high);
        if constexpr (Form::marks_nan) nan_[i] |= nan_codes(codes[i]);
      }
    } else {
      read_matrices<0>(keys.a[0], step);
      read_matrices<16>(keys.a[1], step);
    }
    return keys;
  }

  /// NaN if this thread has read a code of NaN of key group + 8 * i; the products of such a key
  /// are numbers.
  __device__ float nan_or_zero(int i) const {
    if constexpr (!Form::marks_nan) return 0.0f;
    return (nan_[i] & 0x80808080u) != 0 ? __int_as_float(0x7FFFFFFF) : 0.0f;
  }

 private:
  static constexpr int step_bytes = Form::step_lanes * Form::key_bytes;

  template <int Line, class Step>
  __device__ void read_matrices(std::uint32_t (&out)[4], Step step) const {
    if constexpr (Lines::known) {
      constexpr int at = Step::value * step_bytes;
      load_matrices_at<Line * Lines::known_key_line + columns_before(at)>(
          out, column_within(column_, at));
    } else {
      int const at = step * step_bytes;
      load_matrices(out, column_within(column_, at) +
                             static_cast<std::uint32_t>(Line * line_bytes_ + columns_before(at)));
    }
  }

  int line_bytes_;
  std::uint32_t own_;
  std::uint32_t column_ = 0;
  std::uint32_t nan_[4];
};

}  // namespace detail
}  // namespace v0
}  // namespace indexshare
