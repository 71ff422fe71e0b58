// SPDX-License-Identifier: Apache-2.0
// Conversions to float, all exact.

INDEXSHARE_ISA_INLINE Floats widen(bf16 const* source) noexcept {
  return bits_as<Floats>(__builtin_convertvector(load_as<Shorts>(source), Words) << 16);
}

#if INDEXSHARE_ISA_LANES >= 8
/// The F16C instruction, eight at a time.
INDEXSHARE_ISA_INLINE Floats widen_halves(Shorts bits) noexcept {
  using EightFloats = float __attribute__((vector_size(32)));
#if defined(__clang__)
  using EightHalves = __fp16 __attribute__((vector_size(16)));
#else
  using EightHalves = short __attribute__((vector_size(16)));
#endif
  EightHalves halves[lanes / 8];
  EightFloats floats[lanes / 8];
  __builtin_memcpy(halves, &bits, sizeof(bits));
  for (int i = 0; i < lanes / 8; ++i) {
#if defined(__clang__)
    floats[i] = __builtin_convertvector(halves[i], EightFloats);
#else
    floats[i] = __builtin_ia32_vcvtph2ps256(halves[i]);
#endif
  }
  return load_as<Floats>(floats);
}
#else
/// Exponent and mantissa are shifted to their places and scaled by 2^112, which is exact for
/// subnormals too; the largest exponent stands for infinity and NaN, and stays the largest.
INDEXSHARE_ISA_INLINE Floats widen_halves(Shorts bits) noexcept {
  Words const half = __builtin_convertvector(bits, Words);
  Words const magnitude = (half & 0x7FFFu) << 13;
  Floats const scaled = bits_as<Floats>(magnitude) * broadcast(0x1p112f);
  Words const special = bits_as<Words>(magnitude > 0x0F7FFFFFu) & 0x7F800000u;
  return bits_as<Floats>(bits_as<Words>(scaled) | special | (half & 0x8000u) << 16);
}
#endif

INDEXSHARE_ISA_INLINE Floats widen(fp16 const* source) noexcept {
  return widen_halves(load_as<Shorts>(source));
}

/// As the bits of a half that is 2^-8 times the value; the code of NaN gets the largest exponent.
INDEXSHARE_ISA_INLINE Floats widen(e4m3 const* source) noexcept {
  Shorts const code = __builtin_convertvector(load_as<Bytes>(source), Shorts);
  Shorts const magnitude = (code << 7) & 0x3F80;
  Shorts const nan = bits_as<Shorts>(magnitude == 0x3F80) & 0x4000;
  return widen_halves(magnitude | nan | ((code << 8) & 0x8000)) * broadcast(256.0f);
}

INDEXSHARE_ISA_KERNEL void widen_bf16(bf16 const* source, index_t n, float* out) noexcept {
  index_t i = 0;
  for (; i + lanes <= n; i += lanes) store(out + i, widen(source + i));
  for (; i < n; ++i) out[i] = to_float(source[i]);
}
INDEXSHARE_ISA_KERNEL void widen_fp16(fp16 const* source, index_t n, float* out) noexcept {
  index_t i = 0;
  for (; i + lanes <= n; i += lanes) store(out + i, widen(source + i));
  for (; i < n; ++i) out[i] = to_float(source[i]);
}
INDEXSHARE_ISA_KERNEL void widen_e4m3(e4m3 const* source, index_t n, float scale,
                                      float* out) noexcept {
  index_t i = 0;
  for (; i + lanes <= n; i += lanes) store(out + i, widen(source + i) * broadcast(scale));
  for (; i < n; ++i) out[i] = to_float(source[i]) * scale;
}

template <>
inline constexpr WidenKernels table<WidenKernels>{&widen_bf16, &widen_fp16, &widen_e4m3};
