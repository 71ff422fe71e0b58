// SPDX-License-Identifier: Apache-2.0
// Conversions from float, as from_float rounds: to nearest, ties to even; NaN becomes 0x7FFF.

/// The upper bits of `bits` that are left when the lower `count` are rounded away.
INDEXSHARE_ISA_INLINE Words rounded(Words bits, int count) noexcept {
  return (bits + ((1u << (count - 1)) - 1) + (bits >> count & 1)) >> count;
}

/// The float of bits 0x7FFF. (A constant vector of integers would crash nvcc's front end.)
inline constexpr float narrow_nan = 0x7FFFp-149f;

INDEXSHARE_ISA_INLINE Words narrow_bits(Floats x, bf16) noexcept {
  Floats const code = bits_as<Floats>(rounded(bits_as<Words>(x), 16));
  return bits_as<Words>(x == x ? code : broadcast(narrow_nan));
}

/// Adding 1/2, whose last bit is worth the smallest half, rounds what becomes a subnormal half.
INDEXSHARE_ISA_INLINE Words narrow_bits(Floats x, fp16) noexcept {
  Words const bits = bits_as<Words>(x);
  Words const sign = bits >> 16 & 0x8000u;
  Words const magnitude = bits & 0x7FFFFFFFu;
  Floats const size = bits_as<Floats>(magnitude);
  Words const normal = rounded(magnitude - (112u << 23), 13) | sign;
  Words const subnormal = (bits_as<Words>(size + broadcast(0.5f)) - 0x3F000000u) | sign;
  Floats half = size < broadcast(0x1p-14f) ? bits_as<Floats>(subnormal) : bits_as<Floats>(normal);
  half = size >= broadcast(65520.0f) ? bits_as<Floats>(sign | 0x7C00u) : half;
  return bits_as<Words>(size == size ? half : broadcast(narrow_nan));
}

template <class T>
INDEXSHARE_ISA_INLINE void narrow_all(float const* source, index_t n, float factor,
                                      T* out) noexcept {
  index_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    Shorts const bits =
        __builtin_convertvector(narrow_bits(load(source + i) * broadcast(factor), T{}), Shorts);
    __builtin_memcpy(out + i, &bits, sizeof(bits));
  }
  for (; i < n; ++i) out[i] = from_float<T>(source[i] * factor);
}
INDEXSHARE_ISA_KERNEL void narrow_to_bf16(float const* source, index_t n, float factor,
                                          bf16* out) noexcept {
  narrow_all(source, n, factor, out);
}
INDEXSHARE_ISA_KERNEL void narrow_to_fp16(float const* source, index_t n, float factor,
                                          fp16* out) noexcept {
  narrow_all(source, n, factor, out);
}

template <>
inline constexpr NarrowKernels table<NarrowKernels>{&narrow_to_bf16, &narrow_to_fp16};
