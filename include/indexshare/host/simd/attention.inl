// SPDX-License-Identifier: Apache-2.0
// Attention of some heads of one query row over one tile of keys.

/// exp(x) for x <= 0 to about 1e-7, relative; 0 where the result is below the smallest normal
/// number; NaN stays NaN. 2^n * exp(r) with n = round(x / ln 2): adding 1.5 * 2^23 rounds, and n
/// stands in the low bits of the sum.
INDEXSHARE_ISA_INLINE Floats exp_negative(Floats x) noexcept {
  Floats const magic = broadcast(0x1.8p23f);
  Floats const shifted = x * broadcast(1.44269504f) + magic;
  Floats const n = shifted - magic;
  // ln 2 in two parts; n times the first is exact
  Floats const r = x - n * broadcast(0.693359375f) - n * broadcast(-2.12194440e-4f);
  // interpolates (exp(r) - 1 - r) / r^2 at the Chebyshev nodes of |r| <= ln(2) / 2
  Floats p = broadcast(1.3926213e-3f);
  p = p * r + broadcast(8.3632031e-3f);
  p = p * r + broadcast(4.1666556e-2f);
  p = p * r + broadcast(1.6666576e-1f);
  p = p * r + broadcast(0.5f);
  p = p * r * r + r + broadcast(1.0f);
  Words const power = (bits_as<Words>(shifted) << 23) + 0x3F800000u;
  return x < broadcast(-87.0f) ? Floats{} : p * bits_as<Floats>(power);
}

/// What exponents are taken against: no finite number is far from it, and -inf minus it is -inf.
INDEXSHARE_ISA_INLINE Floats reference_of(Floats largest) noexcept {
  return largest < broadcast(-__FLT_MAX__) ? Floats{} : largest;
}

INDEXSHARE_ISA_INLINE Floats larger(Floats a, Floats b) noexcept { return b > a ? b : a; }

/// Lanes of queries and keys whose products are summed at a time: the queries of a register tile
/// stay in the first-level cache while the keys of the tile pass.
inline constexpr index_t dot_lanes = 192;

/// logits[s][h] (+)= queries . keys over `count` lanes from `lane` on, heads of vectors [v, v + V).
template <int V>
INDEXSHARE_ISA_INLINE void add_logits(AttentionBlock const& block, index_t v, index_t lane,
                                      index_t count) noexcept {
  index_t const first = vector_offset(v, block.dim);
  index_t const step = padded_to_panel(block.heads);
  for (index_t s = 0; s < block.count; s += tile_rows) {
    float* const logits = block.weights + s * step + v * lanes;
    Floats sums[V][tile_rows];
#pragma GCC unroll 4
    for (int i = 0; i < V; ++i) {
#pragma GCC unroll 16
      for (int j = 0; j < tile_rows; ++j) {
        sums[i][j] = lane == 0 ? Floats{} : load(logits + j * step + i * lanes);
      }
    }
    add_dots<V, tile_rows>(block.queries + first + lane * panel_width,
                           vector_offset(v + 1, block.dim) - first,
                           block.keys + s * block.key_step + lane, block.key_step, count, sums);
#pragma GCC unroll 4
    for (int i = 0; i < V; ++i) {
#pragma GCC unroll 16
      for (int j = 0; j < tile_rows; ++j) store(logits + j * step + i * lanes, sums[i][j]);
    }
  }
}

/// The running softmax of one vector of heads.
INDEXSHARE_ISA_INLINE void weigh_vector(AttentionBlock const& block, RunningSoftmax const& softmax,
                                        index_t v) noexcept {
  index_t const step = padded_to_panel(block.heads);
  float* const weights = block.weights + v * lanes;
  Floats const scale = broadcast(block.scale);
  Floats const none = broadcast(-__builtin_inff());
  Floats const before = block.first ? none : load(softmax.largest + v * lanes);
  Floats largest = before;
  for (index_t s = 0; s < block.count; ++s) {
    Floats const logit = load(weights + s * step) * scale;
    store(weights + s * step, logit);
    largest = larger(largest, logit);
  }
  Floats const reference = reference_of(largest);
  Floats const factor = exp_negative(before - reference);
  Floats total = block.first ? Floats{} : load(softmax.total + v * lanes) * factor;
  for (index_t s = 0; s < block.count; ++s) {
    Floats const weight = exp_negative(load(weights + s * step) - reference);
    store(weights + s * step, weight);
    total += weight;
  }
  store(softmax.largest + v * lanes, largest);
  store(softmax.total + v * lanes, total);
  store(block.factors + v * lanes, factor);
}

INDEXSHARE_ISA_KERNEL void weigh(AttentionBlock const& block,
                                 RunningSoftmax const& softmax) noexcept {
  index_t const vectors = (block.heads + lanes - 1) / lanes;
  for (index_t lane = 0; lane < block.dim; lane += dot_lanes) {
    index_t const count = block.dim - lane < dot_lanes ? block.dim - lane : dot_lanes;
    index_t v = 0;
    for (; v + tile_vectors <= vectors; v += tile_vectors) {
      add_logits<tile_vectors>(block, v, lane, count);
    }
    for (; v < vectors; ++v) add_logits<1>(block, v, lane, count);
  }
  for (index_t v = 0; v < vectors; ++v) weigh_vector(block, softmax, v);
}

/// J heads from `head` on, V vectors of lanes from `lane` on.
template <int J, int V>
INDEXSHARE_ISA_INLINE void add_value_tile(AttentionBlock const& block,
                                          RunningSoftmax const& softmax, index_t head,
                                          index_t lane) noexcept {
  index_t const step = padded_to_panel(block.heads);
  float* const target = softmax.sums + head * block.width + lane;
  Floats sums[J][V];
#pragma GCC unroll 16
  for (int j = 0; j < J; ++j) {
    Floats const factor = broadcast(block.factors[head + j]);
#pragma GCC unroll 4
    for (int i = 0; i < V; ++i) {
      sums[j][i] = block.first ? Floats{} : load(target + j * block.width + i * lanes) * factor;
    }
  }
  for (index_t s = 0; s < block.count; ++s) {
    float const* const key = block.keys + s * block.key_step + lane;
    float const* const weights = block.weights + s * step + head;
    Floats value[V];
#pragma GCC unroll 4
    for (int i = 0; i < V; ++i) value[i] = load(key + i * lanes);
#pragma GCC unroll 16
    for (int j = 0; j < J; ++j) {
      Floats const weight = broadcast(weights[j]);
#pragma GCC unroll 4
      for (int i = 0; i < V; ++i) sums[j][i] += weight * value[i];
    }
  }
#pragma GCC unroll 16
  for (int j = 0; j < J; ++j) {
#pragma GCC unroll 4
    for (int i = 0; i < V; ++i) store(target + j * block.width + i * lanes, sums[j][i]);
  }
}

/// Fetches the rows of the next tile, part by part over the work on this one: asked for all at once
/// they would wait for each other.
struct Fetch {
  AttentionBlock const& block;
  index_t fetched = 0;

  /// `done` of `all` parts of the work are done.
  INDEXSHARE_ISA_INLINE void operator()(index_t done, index_t all) noexcept {
    index_t const due = block.ahead_count * done / all;
    for (; fetched < due; ++fetched) {
      for (index_t i = 0; i < block.ahead_bytes; i += 64) {
        __builtin_prefetch(block.ahead[fetched] + i, 0, 2);
      }
    }
  }
};

/// All heads, V vectors of lanes.
template <int V>
INDEXSHARE_ISA_INLINE void add_value_lanes(AttentionBlock const& block,
                                           RunningSoftmax const& softmax, index_t lane,
                                           Fetch& fetch) noexcept {
  index_t const all = block.width * block.heads;
  index_t h = 0;
  for (; h + tile_rows <= block.heads; h += tile_rows) {
    fetch(lane * block.heads + (h + tile_rows) * V * lanes, all);
    add_value_tile<tile_rows, V>(block, softmax, h, lane);
  }
  if constexpr (tile_rows > 4) {
    for (; h + 4 <= block.heads; h += 4) add_value_tile<4, V>(block, softmax, h, lane);
  }
  for (; h < block.heads; ++h) add_value_tile<1, V>(block, softmax, h, lane);
  fetch((lane + V * lanes) * block.heads, all);
}

INDEXSHARE_ISA_KERNEL void add_values(AttentionBlock const& block,
                                      RunningSoftmax const& softmax) noexcept {
  Fetch fetch{block};
  index_t lane = 0;
  for (; lane + tile_vectors * lanes <= block.width; lane += tile_vectors * lanes) {
    add_value_lanes<tile_vectors>(block, softmax, lane, fetch);
  }
  for (; lane < block.width; lane += lanes) add_value_lanes<1>(block, softmax, lane, fetch);
}

INDEXSHARE_ISA_KERNEL void merge(RunningSoftmax const& into, RunningSoftmax const& from,
                                 index_t heads, index_t width) noexcept {
  for (index_t first = 0; first < heads; first += lanes) {
    Floats const a = load(into.largest + first);
    Floats const b = load(from.largest + first);
    Floats const largest = larger(a, b);
    Floats const reference = reference_of(largest);
    float into_factors[lanes];
    float from_factors[lanes];
    Floats const into_factor = exp_negative(a - reference);
    Floats const from_factor = exp_negative(b - reference);
    store(into_factors, into_factor);
    store(from_factors, from_factor);
    store(into.largest + first, largest);
    store(into.total + first,
          load(into.total + first) * into_factor + load(from.total + first) * from_factor);
    index_t const count = heads - first < lanes ? heads - first : lanes;
    for (index_t h = 0; h < count; ++h) {
      float* const sums = into.sums + (first + h) * width;
      float const* const others = from.sums + (first + h) * width;
      Floats const keep = broadcast(into_factors[h]);
      Floats const add = broadcast(from_factors[h]);
      for (index_t v = 0; v < width; v += lanes) {
        store(sums + v, load(sums + v) * keep + load(others + v) * add);
      }
    }
  }
}

template <>
inline constexpr AttentionKernels table<AttentionKernels>{&weigh, &add_values, &merge};
