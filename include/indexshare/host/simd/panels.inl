// SPDX-License-Identifier: Apache-2.0
// Heads (or rows of a matrix) side by side in panels, and their products with other rows: the inner
// loop of scores, logits and matrix products.

/// Where vector v of a panel layout begins, for panels of `dim` lanes.
INDEXSHARE_ISA_INLINE index_t vector_offset(index_t v, index_t dim) noexcept {
  constexpr index_t per_panel = panel_width / lanes;
  return v / per_panel * dim * panel_width + v % per_panel * lanes;
}

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

INDEXSHARE_ISA_KERNEL void pack_panels(float const* rows, index_t row_step, index_t heads,
                                       index_t dim, float* panels) noexcept {
  for (index_t first = 0; first < heads; first += panel_width) {
    index_t const count = heads - first < panel_width ? heads - first : panel_width;
    float const* const source = rows + first * row_step;
    float* out = panels + first * dim;
    for (index_t d = 0; d < dim; ++d, out += panel_width) {
      for (index_t h = 0; h < count; ++h) out[h] = source[h * row_step + d];
      for (index_t h = count; h < panel_width; ++h) out[h] = 0;
    }
  }
}

/// Rows [j, j + J) times vectors [v, v + V) of the panel.
template <int V, int J>
INDEXSHARE_ISA_INLINE void multiply_tile(float const* panel, index_t v, float const* rows,
                                         index_t row_step, index_t count, float* sums) noexcept {
  Floats tile[V][J];
#pragma GCC unroll 4
  for (int i = 0; i < V; ++i) {
#pragma GCC unroll 16
    for (int j = 0; j < J; ++j) tile[i][j] = load(sums + j * panel_width + (v + i) * lanes);
  }
  add_dots<V, J>(panel + v * lanes, lanes, rows, row_step, count, tile);
#pragma GCC unroll 4
  for (int i = 0; i < V; ++i) {
#pragma GCC unroll 16
    for (int j = 0; j < J; ++j) store(sums + j * panel_width + (v + i) * lanes, tile[i][j]);
  }
}
INDEXSHARE_ISA_KERNEL void multiply_panel(float const* panel, float const* rows, index_t row_step,
                                          index_t n, index_t count, float* sums) noexcept {
  constexpr int vectors = static_cast<int>(panel_width) / lanes;
  constexpr int together = vectors < tile_vectors ? vectors : tile_vectors;
  for (index_t v = 0; v < vectors; v += together) {
    index_t j = 0;
    for (; j + tile_rows <= n; j += tile_rows) {
      multiply_tile<together, tile_rows>(panel, v, rows + j * row_step, row_step, count,
                                         sums + j * panel_width);
    }
    for (; j < n; ++j) {
      multiply_tile<together, 1>(panel, v, rows + j * row_step, row_step, count,
                                 sums + j * panel_width);
    }
  }
}

template <>
inline constexpr PanelKernels table<PanelKernels>{&pack_panels, &multiply_panel};
