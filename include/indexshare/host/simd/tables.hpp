// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/detail/int8.hpp>
#include <indexshare/dims.hpp>
#include <indexshare/element.hpp>
#include <indexshare/host/candidates.hpp>

#include <cstddef>
#include <cstdint>

/// @file What the kernels of every instruction set take: a table of function pointers per stage.
/// Layouts do not depend on the instruction set.

namespace indexshare {
inline namespace v0 {
namespace detail {

/// Heads lie side by side in panels of this many floats, whatever the width of a vector.
inline constexpr index_t panel_width = 16;

constexpr index_t padded_to_panel(index_t n) noexcept {
  return (n + panel_width - 1) / panel_width * panel_width;
}

/// All ones, then zeros: read from `panel_width - n` on, a mask of the first n places of a vector.
inline constexpr std::uint32_t place_masks[2 * panel_width] = {
    ~0u, ~0u, ~0u, ~0u, ~0u, ~0u, ~0u, ~0u, ~0u, ~0u, ~0u, ~0u, ~0u, ~0u, ~0u, ~0u};

struct PanelKernels {
  /// panels[h / panel_width][d][h % panel_width] = rows[h][d] for h < heads, zero past the last.
  void (*pack)(float const* rows, index_t row_step, index_t heads, index_t dim,
               float* panels) noexcept;
  /// sums[j][h] += sum over d < count, ascending, of panel[d][h] * rows[j][d], for j < n and the
  /// panel_width heads of a panel.
  void (*multiply)(float const* panel, float const* rows, index_t row_step, index_t n,
                   index_t count, float* sums) noexcept;
};

/// Exact conversions of `n` elements to float, NaN to NaN.
struct WidenKernels {
  void (*from_bf16)(bf16 const* source, index_t n, float* out) noexcept;
  void (*from_fp16)(fp16 const* source, index_t n, float* out) noexcept;
  /// times `scale`, rounded once
  void (*from_e4m3)(e4m3 const* source, index_t n, float scale, float* out) noexcept;
};

/// Keys that are scored at a time: they lie decoded in the first-level cache beside the queries.
inline constexpr index_t score_block_keys = 12;

/// Floats between decoded keys: a constant for all usual widths, so that an address needs no
/// register per key.
inline constexpr index_t usual_key_pitch = 128;
constexpr index_t key_pitch(index_t dim) noexcept {
  return dim > usual_key_pitch ? dim : usual_key_pitch;
}

/// One query row against one block of keys.
struct KeyBlock {
  float const* queries = nullptr;  ///< [panels][dim][panel_width], zero past the last head
  float const* weights = nullptr;  ///< [panels][panel_width], zero past the last head
  index_t heads = 0;
  index_t dim = 0;
  float const* keys = nullptr;  ///< [score_block_keys][key_pitch(dim)]; past `count`: anything
  index_t count = 0;
  /// Rows to be decoded later, fetched while this block is computed: asked for all at once they
  /// would wait for each other. [score_block_keys], or null.
  char const* const* ahead = nullptr;
  index_t ahead_bytes = 0;  ///< of each of them
};

struct ScoreKernels {
  /// out[s] = sum_h weights[h] * max(0, sum_d queries[h][d] * keys[s][d]) for s < count, in floats:
  /// lanes ascending, fused where the instruction set has it; then the heads that share a place in
  /// a vector ascending; then the places of a vector in a fixed tree. NaN stays NaN.
  void (*score)(KeyBlock const& block, float* out) noexcept;
};

/// Neighbouring lanes that are multiplied at a time; zero past the last one.
struct Bf16Pair {
  bf16 lanes[2];
};
constexpr index_t bf16_pairs(index_t dim) noexcept { return (dim + 1) / 2; }

/// Pairs between the keys of a block, as `key_pitch`.
inline constexpr index_t usual_pair_pitch = usual_key_pitch / 2;
constexpr index_t pair_pitch(index_t dim) noexcept { return bf16_pairs(key_pitch(dim)); }

/// One query row of bf16 against one block of keys of bf16.
struct PairKeyBlock {
  Bf16Pair const* queries = nullptr;  ///< [panels][pairs][panel_width], zero past the last head
  float const* weights = nullptr;     ///< [panels][panel_width], zero past the last head
  index_t heads = 0;
  index_t dim = 0;
  Bf16Pair const* keys = nullptr;  ///< [score_block_keys][pair_pitch(dim)]; past `count`: anything
  index_t count = 0;
  char const* const* ahead = nullptr;  ///< as in KeyBlock
  index_t ahead_bytes = 0;
};

/// Lanes of a key or a query that are multiplied at a time.
inline constexpr index_t int8_group = 4;
constexpr index_t int8_groups(index_t dim) noexcept { return (dim + int8_group - 1) / int8_group; }

/// Bytes between the keys of a block, as `key_pitch`.
constexpr index_t int8_key_pitch(index_t dim) noexcept {
  return key_pitch(int8_groups(dim) * int8_group);
}

/// One query row in codes against one block of keys in codes.
struct Int8KeyBlock {
  std::int8_t const* queries = nullptr;  ///< [panels][groups][panel_width][int8_group], zero past
                                         ///< the last head and the last lane
  std::int32_t const* offsets =
      nullptr;                     ///< [panels][panel_width] -128 * the sum of a head's codes
  float const* weights = nullptr;  ///< [panels][panel_width], zero past the last head
  index_t heads = 0;
  index_t dim = 0;
  std::uint8_t const* keys = nullptr;  ///< [score_block_keys][int8_key_pitch(dim)] codes + 128
  float const* scales = nullptr;       ///< [score_block_keys]
  index_t count = 0;                   ///< of the keys; past it: anything
  char const* const* ahead = nullptr;  ///< as in KeyBlock
  index_t ahead_bytes = 0;
};

struct Int8ScoreKernels {
  /// The codes of one head, codes[group * panel_width * int8_group + lane in the group], zero past
  /// the last lane, and their sum; returns the scale. All are those of `quantize_int8`.
  float (*quantize)(float const* head, index_t dim, std::int8_t* codes, std::int32_t& sum) noexcept;
  /// out[d] = codes[d] + 128, and anything up to the end of the last group.
  void (*take)(std::byte const* codes, index_t dim, std::uint8_t* out) noexcept;
  /// out[s] = scales[s] * sum_h weights[h] * max(0, dot of the codes) for s < count. Dots are exact
  /// integers, rounded to float where they are above 2^24; then as ScoreKernels.
  void (*score)(Int8KeyBlock const& block, float* out) noexcept;
};

/// Lists of candidates (candidates.hpp).
struct CandidateKernels {
  /// Adds what can be among the best of scores[0..n), the scores of positions `first_position` on,
  /// which ascend from call to call. A list without room is compacted.
  void (*append)(Candidates& list, float const* scores, index_t first_position, index_t n) noexcept;
  /// Adds the candidates of a later part of the row, whose positions are all above the list's.
  void (*merge)(Candidates& list, Candidates const& later) noexcept;
  /// Leaves the `wanted` best (score descending, position ascending; every NaN below all numbers)
  /// in ascending order of positions, and raises the floor above the last of them: later positions
  /// lose ties. Radix selection in digits of 11, 11 and 10 bits; what is below a digit's cut leaves
  /// the list at once. Exact for any scores.
  void (*compact)(Candidates& list) noexcept;
};

/// out[i] = from_float(source[i] * factor) for i < n.
struct NarrowKernels {
  void (*to_bf16)(float const* source, index_t n, float factor, bf16* out) noexcept;
  void (*to_fp16)(float const* source, index_t n, float factor, fp16* out) noexcept;
};

/// Keys that attention decodes at a time. Part of the arithmetic: the running softmax is rescaled
/// once per tile, so a row's bits depend on it. A multiple of every register tile.
inline constexpr index_t attention_tile = 96;

/// Softmax over the keys so far, for some heads. It may hold anything while there were none.
struct RunningSoftmax {
  float* largest;  ///< [padded heads] logit
  float* total;    ///< [padded heads] sum of exp(logit - largest)
  float* sums;     ///< [heads][width] keys weighted by exp(logit - largest)
};

/// Some heads of one query row against one tile of keys.
struct AttentionBlock {
  float const* queries = nullptr;  ///< [panels][dim][panel_width], zero past the last head
  index_t heads = 0;
  index_t dim = 0;
  float const* keys = nullptr;  ///< [attention_tile][key_step]; past `count`: anything
  index_t key_step = 0;         ///< at least `width`
  index_t count = 0;
  float scale = 0;
  float* weights = nullptr;  ///< [attention_tile][padded heads]
  float* factors = nullptr;  ///< [padded heads] that earlier sums are to be multiplied by
  index_t width = 0;         ///< lanes of a value, padded to panel_width
  bool first = true;         ///< there are no earlier sums
  /// Rows of the next tile, fetched while this one is computed: asked for all at once they would
  /// wait for each other. [ahead_count]
  char const* const* ahead = nullptr;
  index_t ahead_count = 0;
  index_t ahead_bytes = 0;  ///< of each of them
};

struct AttentionKernels {
  /// Logits of the tile, then weights exp(logit - largest); earlier totals are rescaled and the
  /// factors say what they were rescaled by. A dot product sums lanes ascending.
  void (*weigh)(AttentionBlock const& block, RunningSoftmax const& softmax) noexcept;
  /// sums[h][v] = factors[h] * sums[h][v] + sum over keys, ascending, of
  /// weights[s][h] * keys[s][v].
  void (*add_values)(AttentionBlock const& block, RunningSoftmax const& softmax) noexcept;
  /// The softmax over the keys of both, into the first.
  void (*merge)(RunningSoftmax const& into, RunningSoftmax const& from, index_t heads,
                index_t width) noexcept;
};

/// An AttentionBlock's queries and keys of bf16, for logits.
struct PairLogits {
  Bf16Pair const* queries = nullptr;  ///< [panels][pairs][panel_width], zero past the last head
  Bf16Pair const* keys = nullptr;     ///< [attention_tile][pairs]; past `count`: anything
};

/// Only some instruction sets have these. In dots two exact products at a time are added, the later
/// lane's first; subnormal lanes and sums count as zeros.
struct PairKernels {
  /// The pairs of a row.
  void (*take)(bf16 const* row, index_t dim, Bf16Pair* out) noexcept;
  /// As ScoreKernels, but for the dots.
  void (*score)(PairKeyBlock const& block, float* out) noexcept;
  /// As AttentionKernels, but for the dots; reads no query or key of the block.
  void (*weigh)(AttentionBlock const& block, PairLogits const& logits,
                RunningSoftmax const& softmax) noexcept;
};

}  // namespace detail
}  // namespace v0
}  // namespace indexshare
