// SPDX-License-Identifier: Apache-2.0
// Vectors of one instruction set, by the compilers' vector extensions: a product and a sum in one
// expression become one fused operation where there is one.

inline constexpr int lanes = INDEXSHARE_ISA_LANES;

using Floats = float __attribute__((vector_size(4 * INDEXSHARE_ISA_LANES)));
using Words = std::uint32_t __attribute__((vector_size(4 * INDEXSHARE_ISA_LANES)));
using Shorts = std::uint16_t __attribute__((vector_size(2 * INDEXSHARE_ISA_LANES)));
using Bytes = std::uint8_t __attribute__((vector_size(INDEXSHARE_ISA_LANES)));

/// Keys (or rows) of a register tile beside two vectors of heads: as many as leave room for the
/// two vectors and for what is multiplied.
inline constexpr int tile_rows =
    INDEXSHARE_ISA_REGISTERS == 32 ? 12 : (INDEXSHARE_ISA_LANES == 8 ? 6 : 4);
inline constexpr int tile_vectors = 2;

/// Any memory, aligned or not, as a vector.
template <class V, class T>
INDEXSHARE_ISA_INLINE V load_as(T const* source) noexcept {
  V v;
  __builtin_memcpy(&v, source, sizeof(V));
  return v;
}
template <class V, class T>
INDEXSHARE_ISA_INLINE V bits_as(T value) noexcept {
  static_assert(sizeof(V) == sizeof(T));
  V v;
  __builtin_memcpy(&v, &value, sizeof(V));
  return v;
}
INDEXSHARE_ISA_INLINE Floats load(float const* source) noexcept { return load_as<Floats>(source); }
INDEXSHARE_ISA_INLINE void store(float* target, Floats v) noexcept {
  __builtin_memcpy(target, &v, sizeof(v));
}

template <int... I>
INDEXSHARE_ISA_INLINE Floats broadcast(float x, std::integer_sequence<int, I...>) noexcept {
  return Floats{(static_cast<void>(I), x)...};  // Floats{} + x would be an addition
}
INDEXSHARE_ISA_INLINE Floats broadcast(float x) noexcept {
  return broadcast(x, std::make_integer_sequence<int, lanes>{});
}

/// All places of a vector added in a fixed tree: halves to halves.
INDEXSHARE_ISA_INLINE float sum(Floats v) noexcept {
  using Quad = float __attribute__((vector_size(16)));
  Quad quads[lanes / 4];
  __builtin_memcpy(quads, &v, sizeof(v));
#pragma GCC unroll 2
  for (int half = lanes / 8; half > 0; half /= 2) {
#pragma GCC unroll 2
    for (int i = 0; i < half; ++i) quads[i] += quads[i + half];
  }
  return (quads[0][0] + quads[0][2]) + (quads[0][1] + quads[0][3]);
}

/// max(0, x), but NaN stays NaN.
INDEXSHARE_ISA_INLINE Floats relu(Floats x) noexcept { return x < Floats{} ? Floats{} : x; }

/// The first n places of a vector, all from `lanes` on; zeros in the others.
INDEXSHARE_ISA_INLINE Words mask_of(index_t n) noexcept {
  return load_as<Words>(place_masks + panel_width - (n < lanes ? n : lanes));
}
INDEXSHARE_ISA_INLINE Floats masked(Floats v, Words mask) noexcept {
  return bits_as<Floats>(bits_as<Words>(v) & mask);
}
