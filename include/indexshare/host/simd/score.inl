// SPDX-License-Identifier: Apache-2.0
// Scores of one query row.

/// sums[v][j] += sum over d < count, ascending, of heads[v][d] * rows[j][d]. `heads` points to the
/// first of V neighbouring vectors of a panel layout, `vector_step` apart; `rows` are `row_step`
/// apart.
template <int V, int J>
INDEXSHARE_ISA_INLINE void add_dots(float const* heads, index_t vector_step, float const* rows,
                                    index_t row_step, index_t count,
                                    Floats (&sums)[V][J]) noexcept {
  for (index_t d = 0; d < count; ++d) {
    Floats head[V];
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) head[v] = load(heads + v * vector_step + d * panel_width);
#pragma GCC unroll 16
    for (int j = 0; j < J; ++j) {
      Floats const x = broadcast(rows[j * row_step + d]);
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) sums[v][j] += x * head[v];
    }
  }
}

/// Where vector v of a panel layout begins, for panels of `dim` lanes.
INDEXSHARE_ISA_INLINE index_t vector_offset(index_t v, index_t dim) noexcept {
  constexpr index_t per_panel = panel_width / lanes;
  return v / per_panel * dim * panel_width + v % per_panel * lanes;
}

/// totals[j] += weights * relu(queries . keys[j]), heads of vectors [v, v + V).
template <int V, int J>
INDEXSHARE_ISA_INLINE void add_heads(ScoreBlock const& block, index_t v, float const* keys,
                                     Floats (&totals)[J]) noexcept {
  Floats dots[V][J];
#pragma GCC unroll 4
  for (int i = 0; i < V; ++i) {
#pragma GCC unroll 16
    for (int j = 0; j < J; ++j) dots[i][j] = Floats{};
  }
  index_t const first = vector_offset(v, block.dim);
  add_dots<V, J>(block.queries + first, vector_offset(v + 1, block.dim) - first, keys, block.dim,
                 block.dim, dots);
#pragma GCC unroll 4
  for (int i = 0; i < V; ++i) {
    Floats const weight = load(block.weights + (v + i) * lanes);
#pragma GCC unroll 16
    for (int j = 0; j < J; ++j) totals[j] += relu(dots[i][j]) * weight;
  }
}

template <int J>
INDEXSHARE_ISA_INLINE void score_tile(ScoreBlock const& block, float const* keys,
                                      float* out) noexcept {
  index_t const vectors = (block.heads + lanes - 1) / lanes;
  Floats totals[J];
#pragma GCC unroll 16
  for (int j = 0; j < J; ++j) totals[j] = Floats{};
  index_t v = 0;
  for (; v + tile_vectors <= vectors; v += tile_vectors) {
    add_heads<tile_vectors, J>(block, v, keys, totals);
  }
  for (; v < vectors; ++v) add_heads<1, J>(block, v, keys, totals);
#pragma GCC unroll 16
  for (int j = 0; j < J; ++j) out[j] = sum(totals[j]);
}

/// Whole tiles, then single keys: what a key scores does not depend on where it lies.
INDEXSHARE_ISA_KERNEL void score(ScoreBlock const& block, float* out) noexcept {
  index_t s = 0;
  for (; s + tile_rows <= block.count; s += tile_rows) {
    score_tile<tile_rows>(block, block.keys + s * block.dim, out + s);
  }
  for (; s < block.count; ++s) score_tile<1>(block, block.keys + s * block.dim, out + s);
}

template <>
inline constexpr ScoreKernels table<ScoreKernels>{&score};
