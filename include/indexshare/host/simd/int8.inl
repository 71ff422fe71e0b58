// SPDX-License-Identifier: Apache-2.0
// Scores of one query row from codes of one byte. A vector holds a head in each place, with four
// lanes side by side. Keys are unsigned and queries signed, as the instruction wants them that adds
// two such products into 16 bits; what the keys' offset adds to a dot is subtracted at its start.

using Ints = std::int32_t __attribute__((vector_size(4 * lanes)));

/// Keys of a register tile, beside `tile_vectors` of heads: fewer load more, and with six of them
/// the products have too few of 16 registers left.
inline constexpr int int8_tile_rows = 4;

template <int... I>
INDEXSHARE_ISA_INLINE Ints broadcast_int(std::int32_t x,
                                         std::integer_sequence<int, I...>) noexcept {
  return Ints{(static_cast<void>(I), x)...};
}
INDEXSHARE_ISA_INLINE Ints broadcast_int(std::int32_t x) noexcept {
  return broadcast_int(x, std::make_integer_sequence<int, lanes>{});
}

/// sums[h] + the four products of queries[h] and keys[h]. No pair of products leaves 16 bits.
INDEXSHARE_ISA_INLINE Ints add_products(Ints sums, Ints keys, Ints queries) noexcept {
  using Pairs = std::int16_t __attribute__((vector_size(4 * lanes)));
#if defined(__x86_64__) && INDEXSHARE_ISA_LANES == 8
  using Codes = char __attribute__((vector_size(32)));
  Pairs const pairs = __builtin_ia32_pmaddubsw256(bits_as<Codes>(keys), bits_as<Codes>(queries));
  return sums + __builtin_ia32_pmaddwd256(pairs, bits_as<Pairs>(broadcast_int(0x00010001)));
#elif defined(__x86_64__) && INDEXSHARE_ISA_LANES == 16 && INDEXSHARE_ISA_REGISTERS == 32
  using Codes = char __attribute__((vector_size(64)));
  Pairs const ones = bits_as<Pairs>(broadcast_int(0x00010001));
#if defined(__clang__)
  Pairs const pairs = __builtin_ia32_pmaddubsw512(bits_as<Codes>(keys), bits_as<Codes>(queries));
  return sums + __builtin_ia32_pmaddwd512(pairs, ones);
#else
  Pairs const pairs = __builtin_ia32_pmaddubsw512_mask(
      bits_as<Codes>(keys), bits_as<Codes>(queries), Pairs{}, 0xFFFFFFFFu);
  return sums + __builtin_ia32_pmaddwd512_mask(pairs, ones, Ints{}, 0xFFFFu);
#endif
#else
  Pairs const q = bits_as<Pairs>(queries);
  Pairs const k = bits_as<Pairs>(keys);
  Pairs const pairs = ((q << 8) >> 8) * (k & 0xFF) + (q >> 8) * ((k >> 8) & 0xFF);
  Ints const both = bits_as<Ints>(pairs);
  return sums + ((both << 16) >> 16) + (both >> 16);
#endif
}

/// Where the codes of head h begin.
INDEXSHARE_ISA_INLINE index_t int8_offset(index_t h, index_t groups) noexcept {
  return (h / panel_width * groups * panel_width + h % panel_width) * int8_group;
}

/// totals[j] += weights * max(0, queries . keys[j]), heads of V vectors from head h on.
template <int V, int J>
INDEXSHARE_ISA_INLINE void add_int8_heads(Int8KeyBlock const& block, index_t h,
                                          std::uint8_t const* keys, index_t pitch, RowFetch& fetch,
                                          Floats (&totals)[J]) noexcept {
  constexpr index_t groups_at_once = RowFetch::every / int8_group;
  index_t const groups = int8_groups(block.dim);
  std::int8_t const* const queries = block.queries + int8_offset(h, groups);
  index_t const vector_step = int8_offset(h + lanes, groups) - int8_offset(h, groups);

  Ints dots[V][J];
#pragma GCC unroll 4
  for (int v = 0; v < V; ++v) {
    Ints const offset = load_as<Ints>(block.offsets + h + v * lanes);
#pragma GCC unroll 16
    for (int j = 0; j < J; ++j) dots[v][j] = offset;
  }
  for (index_t first = 0; first < groups; first += groups_at_once) {
    fetch.step<J>();
    index_t const last = groups - first < groups_at_once ? groups : first + groups_at_once;
    for (index_t g = first; g < last; ++g) {
      Ints query[V];
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) {
        query[v] = load_as<Ints>(queries + g * panel_width * int8_group + v * vector_step);
      }
#pragma GCC unroll 16
      for (int j = 0; j < J; ++j) {
        std::int32_t group;
        __builtin_memcpy(&group, keys + j * pitch + g * int8_group, sizeof(group));
        Ints const key = broadcast_int(group);
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) dots[v][j] = add_products(dots[v][j], key, query[v]);
      }
    }
  }
#pragma GCC unroll 4
  for (int v = 0; v < V; ++v) {
    Floats const weight = load(block.weights + h + v * lanes);
#pragma GCC unroll 16
    for (int j = 0; j < J; ++j) {
      totals[j] += relu(__builtin_convertvector(dots[v][j], Floats)) * weight;
    }
  }
}

/// Keys [s, s + J) of a block.
template <int J>
INDEXSHARE_ISA_INLINE void score_int8_tile(Int8KeyBlock const& block, index_t s, index_t pitch,
                                           float* out) noexcept {
  std::uint8_t const* const keys = block.keys + s * pitch;
  constexpr index_t at_once = tile_vectors * lanes;
  RowFetch fetch = fetch_beside<J>(block, s);
  Floats totals[J];
#pragma GCC unroll 16
  for (int j = 0; j < J; ++j) totals[j] = Floats{};
  index_t h = 0;
  for (; h + at_once - lanes < block.heads; h += at_once) {
    add_int8_heads<tile_vectors, J>(block, h, keys, pitch, fetch, totals);
  }
  for (; h < block.heads; h += lanes) add_int8_heads<1, J>(block, h, keys, pitch, fetch, totals);
#pragma GCC unroll 16
  for (int j = 0; j < J; ++j) out[s + j] = block.scales[s + j] * sum(totals[j]);
}

INDEXSHARE_ISA_INLINE void score_int8_keys(Int8KeyBlock const& block, index_t pitch,
                                           float* out) noexcept {
  index_t s = 0;
  for (; s + int8_tile_rows <= block.count; s += int8_tile_rows) {
    score_int8_tile<int8_tile_rows>(block, s, pitch, out);
  }
  for (; s < block.count; ++s) score_int8_tile<1>(block, s, pitch, out);
}

INDEXSHARE_ISA_KERNEL void score_int8(Int8KeyBlock const& block, float* out) noexcept {
  if (block.dim <= usual_key_pitch) {
    score_int8_keys(block, usual_key_pitch, out);
  } else {
    score_int8_keys(block, int8_key_pitch(block.dim), out);
  }
}

INDEXSHARE_ISA_KERNEL void take_int8(std::byte const* codes, index_t dim,
                                     std::uint8_t* out) noexcept {
  index_t d = 0;
  for (; d + 4 * lanes <= dim; d += 4 * lanes) {
    Words const biased = load_as<Words>(codes + d) ^ 0x80808080u;
    __builtin_memcpy(out + d, &biased, sizeof(biased));
  }
  for (; d < dim; ++d) out[d] = static_cast<std::uint8_t>(static_cast<unsigned>(codes[d]) ^ 0x80u);
}

using FourFloats = float __attribute__((vector_size(16)));
using FourInts = std::int32_t __attribute__((vector_size(16)));

/// Lanes of group g of a head, zero past the last.
INDEXSHARE_ISA_INLINE FourFloats int8_group_of(float const* head, index_t dim, index_t g) noexcept {
  index_t const first = g * int8_group;
  if (dim - first >= int8_group) return load_as<FourFloats>(head + first);
  FourFloats values{};
  for (index_t d = first; d < dim; ++d) values[d - first] = head[d];
  return values;
}

INDEXSHARE_ISA_KERNEL float quantize_int8_head(float const* head, index_t dim, std::int8_t* codes,
                                               std::int32_t& sum_of_codes) noexcept {
  FourInts most{};
  for (index_t g = 0; g < int8_groups(dim); ++g) {
    FourInts const magnitude = bits_as<FourInts>(int8_group_of(head, dim, g)) & 0x7FFFFFFF;
    most = magnitude > most ? magnitude : most;
  }
  std::int32_t largest = 0;
  for (int i = 0; i < int8_group; ++i) largest = most[i] > largest ? most[i] : largest;
  float const scale = int8_scale(largest, largest_query_code);

  FourFloats const divisor = {scale, scale, scale, scale};
  FourFloats const unit = {rounding_unit, rounding_unit, rounding_unit, rounding_unit};
  FourInts sums{};
  for (index_t g = 0; g < int8_groups(dim); ++g) {
    FourInts code =
        bits_as<FourInts>(int8_group_of(head, dim, g) / divisor + unit) - bits_as<FourInts>(unit);
    if (largest >= infinity_bits) code = FourInts{};
    sums += code;
    std::int8_t* const group = codes + g * panel_width * int8_group;
    for (int i = 0; i < int8_group; ++i) group[i] = static_cast<std::int8_t>(code[i]);
  }
  sum_of_codes = sums[0] + sums[1] + sums[2] + sums[3];
  return scale;
}

template <>
inline constexpr Int8ScoreKernels table<Int8ScoreKernels>{&quantize_int8_head, &take_int8,
                                                          &score_int8};
