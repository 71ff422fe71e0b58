// SPDX-License-Identifier: Apache-2.0
// Scores and logits of one query row by AVX512_BF16's dot product of pairs: beside avx512's
// kernels, which cannot inline what needs more than their own instructions. A vector holds a head
// in each place, with two lanes side by side.

namespace avx512_bf16 {
using namespace avx512;

/// sums[h] + the two products of queries[h] and keys[h], the later lane's first. Products are
/// exact, sums are rounded to nearest; subnormal inputs and sums count as zeros.
/// @source Intel, Intrinsics Guide, VDPBF16PS
INDEXSHARE_ISA_TARGET __attribute__((always_inline)) inline Floats add_products(
    Floats sums, Ints queries, Ints keys) noexcept {
#if (defined(__clang__) && __clang_major__ >= 16) || (!defined(__clang__) && __GNUC__ >= 13)
  using Pairs = __bf16 __attribute__((vector_size(4 * lanes)));
#elif defined(__clang__)
  using Pairs = Ints;
#else
  using Pairs = short __attribute__((vector_size(4 * lanes)));
#endif
#if defined(__clang__)
  return __builtin_ia32_dpbf16ps_512(sums, bits_as<Pairs>(queries), bits_as<Pairs>(keys));
#else
  return __builtin_ia32_dpbf16ps_v16sf(sums, bits_as<Pairs>(queries), bits_as<Pairs>(keys));
#endif
}

/// As avx512's `add_dots`, lanes two at a time.
template <int V, int J>
INDEXSHARE_ISA_TARGET __attribute__((always_inline)) inline void add_pair_dots(
    Bf16Pair const* heads, index_t vector_step, Bf16Pair const* rows, index_t row_step,
    index_t count, Floats (&sums)[V][J]) noexcept {
  for (index_t p = 0; p < count; ++p) {
    Ints head[V];
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) head[v] = load_as<Ints>(heads + v * vector_step + p * panel_width);
#pragma GCC unroll 16
    for (int j = 0; j < J; ++j) {
      Ints const x = broadcast_int(bits_as<std::int32_t>(rows[j * row_step + p]));
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) sums[v][j] = add_products(sums[v][j], head[v], x);
    }
  }
}

/// totals[j] += weights * relu(queries . keys[j]), heads of panels [v, v + V): a vector is a panel.
template <int V, int J>
INDEXSHARE_ISA_TARGET __attribute__((always_inline)) inline void add_pair_heads(
    PairKeyBlock const& block, index_t v, Bf16Pair const* keys, index_t pitch, RowFetch& fetch,
    Floats (&totals)[J]) noexcept {
  static_assert(lanes == panel_width);
  constexpr index_t at_once = RowFetch::every / 2;
  index_t const pairs = bf16_pairs(block.dim);
  index_t const vector_step = pairs * panel_width;
  Bf16Pair const* const queries = block.queries + v * vector_step;
  Floats dots[V][J];
#pragma GCC unroll 4
  for (int i = 0; i < V; ++i) {
#pragma GCC unroll 16
    for (int j = 0; j < J; ++j) dots[i][j] = Floats{};
  }
  for (index_t p = 0; p < pairs; p += at_once) {
    fetch.template step<J>();
    index_t const count = pairs - p < at_once ? pairs - p : at_once;
    add_pair_dots<V, J>(queries + p * panel_width, vector_step, keys + p, pitch, count, dots);
  }
#pragma GCC unroll 4
  for (int i = 0; i < V; ++i) {
    Floats const weight = load(block.weights + (v + i) * lanes);
    // an infinite key meets zeros past the last head: what comes of that is no number
    Words const heads = mask_of(block.heads - (v + i) * lanes);
#pragma GCC unroll 16
    for (int j = 0; j < J; ++j) totals[j] += masked(relu(dots[i][j]), heads) * weight;
  }
}

/// Keys [s, s + J) of a block.
template <int J>
INDEXSHARE_ISA_TARGET __attribute__((always_inline)) inline void score_pair_tile(
    PairKeyBlock const& block, index_t s, index_t pitch, float* out) noexcept {
  Bf16Pair const* const keys = block.keys + s * pitch;
  index_t const vectors = (block.heads + lanes - 1) / lanes;
  RowFetch fetch = fetch_beside<J>(block, s);
  Floats totals[J];
#pragma GCC unroll 16
  for (int j = 0; j < J; ++j) totals[j] = Floats{};
  index_t v = 0;
  for (; v + tile_vectors <= vectors; v += tile_vectors) {
    add_pair_heads<tile_vectors, J>(block, v, keys, pitch, fetch, totals);
  }
  for (; v < vectors; ++v) add_pair_heads<1, J>(block, v, keys, pitch, fetch, totals);
#pragma GCC unroll 16
  for (int j = 0; j < J; ++j) out[s + j] = sum(totals[j]);
}

/// Whole tiles, then single keys: what a key scores does not depend on where it lies.
INDEXSHARE_ISA_TARGET __attribute__((always_inline)) inline void score_pair_keys(
    PairKeyBlock const& block, index_t pitch, float* out) noexcept {
  index_t s = 0;
  for (; s + tile_rows <= block.count; s += tile_rows) {
    score_pair_tile<tile_rows>(block, s, pitch, out);
  }
  for (; s < block.count; ++s) score_pair_tile<1>(block, s, pitch, out);
}

INDEXSHARE_ISA_TARGET __attribute__((noinline)) inline void score_pairs(PairKeyBlock const& block,
                                                                        float* out) noexcept {
  if (block.dim <= 2 * usual_pair_pitch) {
    score_pair_keys(block, usual_pair_pitch, out);
  } else {
    score_pair_keys(block, pair_pitch(block.dim), out);
  }
}

INDEXSHARE_ISA_TARGET __attribute__((noinline)) inline void take_pairs(bf16 const* row, index_t dim,
                                                                       Bf16Pair* out) noexcept {
  index_t d = 0;
  for (; d + 2 * lanes <= dim; d += 2 * lanes) {
    Ints const v = load_as<Ints>(row + d);
    __builtin_memcpy(out + d / 2, &v, sizeof(v));
  }
  for (; d + 1 < dim; d += 2) out[d / 2] = {row[d], row[d + 1]};
  if (d < dim) out[d / 2] = {row[d], bf16{}};
}

/// Pairs that are summed at a time, as `dot_lanes`.
inline constexpr index_t dot_pairs = 144;

/// As avx512's `add_logits`, over `count` pairs from `pair` on.
template <int V>
INDEXSHARE_ISA_TARGET __attribute__((always_inline)) inline void add_pair_logits(
    AttentionBlock const& block, PairLogits const& dots, index_t v, index_t pair,
    index_t count) noexcept {
  index_t const pairs = bf16_pairs(block.dim);
  index_t const step = padded_to_panel(block.heads);
  Bf16Pair const* const queries = dots.queries + (v * pairs + pair) * panel_width;
  for (index_t s = 0; s < block.count; s += tile_rows) {
    float* const logits = block.weights + s * step + v * lanes;
    Floats sums[V][tile_rows];
#pragma GCC unroll 4
    for (int i = 0; i < V; ++i) {
#pragma GCC unroll 16
      for (int j = 0; j < tile_rows; ++j) {
        sums[i][j] = pair == 0 ? Floats{} : load(logits + j * step + i * lanes);
      }
    }
    add_pair_dots<V, tile_rows>(queries, pairs * panel_width, dots.keys + s * pairs + pair, pairs,
                                count, sums);
#pragma GCC unroll 4
    for (int i = 0; i < V; ++i) {
#pragma GCC unroll 16
      for (int j = 0; j < tile_rows; ++j) store(logits + j * step + i * lanes, sums[i][j]);
    }
  }
}

INDEXSHARE_ISA_TARGET __attribute__((noinline)) inline void weigh_pairs(
    AttentionBlock const& block, PairLogits const& dots, RunningSoftmax const& softmax) noexcept {
  index_t const vectors = (block.heads + lanes - 1) / lanes;
  index_t const pairs = bf16_pairs(block.dim);
  for (index_t pair = 0; pair < pairs; pair += dot_pairs) {
    index_t const count = pairs - pair < dot_pairs ? pairs - pair : dot_pairs;
    index_t v = 0;
    for (; v + tile_vectors <= vectors; v += tile_vectors) {
      add_pair_logits<tile_vectors>(block, dots, v, pair, count);
    }
    for (; v < vectors; ++v) add_pair_logits<1>(block, dots, v, pair, count);
  }
  for (index_t v = 0; v < vectors; ++v) weigh_vector(block, softmax, v);
}

inline constexpr PairKernels pair_table{&take_pairs, &score_pairs, &weigh_pairs};

}  // namespace avx512_bf16
