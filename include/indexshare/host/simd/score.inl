// SPDX-License-Identifier: Apache-2.0
// Scores of one query row.

/// Rows of a later block on their way to the cache, a few lines at a time.
struct RowFetch {
  static constexpr index_t line = 64;
  static constexpr index_t every = 16;  ///< lanes of a dot product

  char const* const* rows;  ///< or null
  index_t count;            ///< lines of all rows
  index_t at_once;
  index_t next = 0;

  template <int J>
  INDEXSHARE_ISA_INLINE void step() noexcept {
    index_t const last = next + at_once < count ? next + at_once : count;
    for (; next < last; ++next) __builtin_prefetch(rows[next % J] + next / J * line);
  }
};

/// The fetch of rows [s, s + J) beside a tile's products, or none.
template <int J, class Block>
INDEXSHARE_ISA_INLINE RowFetch fetch_beside(Block const& block, index_t s) noexcept {
  if (block.ahead == nullptr) return {nullptr, 0, 0};
  index_t const lines = J * ((block.ahead_bytes + RowFetch::line - 1) / RowFetch::line);
  index_t const groups = (block.heads + tile_vectors * lanes - 1) / (tile_vectors * lanes);
  index_t const steps = groups * ((block.dim + RowFetch::every - 1) / RowFetch::every);
  return {block.ahead + s, lines, (lines + steps - 1) / steps};
}

/// totals[j] += weights * relu(queries . keys[j]), heads of vectors [v, v + V).
template <int V, int J>
INDEXSHARE_ISA_INLINE void add_heads(KeyBlock const& block, index_t v, float const* keys,
                                     index_t pitch, RowFetch& fetch,
                                     Floats (&totals)[J]) noexcept {
  Floats dots[V][J];
#pragma GCC unroll 4
  for (int i = 0; i < V; ++i) {
#pragma GCC unroll 16
    for (int j = 0; j < J; ++j) dots[i][j] = Floats{};
  }
  float const* const queries = block.queries + vector_offset(v, block.dim);
  index_t const vector_step = vector_offset(v + 1, block.dim) - vector_offset(v, block.dim);
  for (index_t d = 0; d < block.dim; d += RowFetch::every) {
    fetch.step<J>();
    index_t const count = block.dim - d < RowFetch::every ? block.dim - d : RowFetch::every;
    add_dots<V, J>(queries + d * panel_width, vector_step, keys + d, pitch, count, dots);
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
INDEXSHARE_ISA_INLINE void score_tile(KeyBlock const& block, index_t s, index_t pitch,
                                      float* out) noexcept {
  float const* const keys = block.keys + s * pitch;
  index_t const vectors = (block.heads + lanes - 1) / lanes;
  RowFetch fetch = fetch_beside<J>(block, s);
  Floats totals[J];
#pragma GCC unroll 16
  for (int j = 0; j < J; ++j) totals[j] = Floats{};
  index_t v = 0;
  for (; v + tile_vectors <= vectors; v += tile_vectors) {
    add_heads<tile_vectors, J>(block, v, keys, pitch, fetch, totals);
  }
  for (; v < vectors; ++v) add_heads<1, J>(block, v, keys, pitch, fetch, totals);
#pragma GCC unroll 16
  for (int j = 0; j < J; ++j) out[s + j] = sum(totals[j]);
}

/// Whole tiles, then single keys: what a key scores does not depend on where it lies.
INDEXSHARE_ISA_INLINE void score_keys(KeyBlock const& block, index_t pitch, float* out) noexcept {
  index_t s = 0;
  for (; s + tile_rows <= block.count; s += tile_rows) {
    score_tile<tile_rows>(block, s, pitch, out);
  }
  for (; s < block.count; ++s) score_tile<1>(block, s, pitch, out);
}

INDEXSHARE_ISA_KERNEL void score(KeyBlock const& block, float* out) noexcept {
  if (block.dim <= usual_key_pitch) {
    score_keys(block, usual_key_pitch, out);
  } else {
    score_keys(block, block.dim, out);
  }
}

template <>
inline constexpr ScoreKernels table<ScoreKernels>{&score};
