// SPDX-License-Identifier: Apache-2.0
// Conversions to float. widen(source, factor, out) converts `at_once<T>` elements; a bf16 and an fp16
// take no factor.

template <class T>
inline constexpr int at_once = lanes;

INDEXSHARE_ISA_INLINE void widen(bf16 const* source, float, float* out) noexcept {
  store(out, bits_as<Floats>(__builtin_convertvector(load_as<Shorts>(source), Words) << 16));
}

/// The bits of halves that are 2^-8 times the value of e4m3 codes; the code of NaN gets the largest
/// exponent. This factor makes up for the exponent's other bias.
inline constexpr float e4m3_unit = 256;
template <class Halves>
INDEXSHARE_ISA_INLINE Halves halves_of_e4m3(Halves code) noexcept {
  Halves const magnitude = (code << 7) & 0x3F80;
  Halves const nan = bits_as<Halves>(magnitude == 0x3F80) & 0x4000;
  return magnitude | nan | ((code << 8) & 0x8000);
}

#if INDEXSHARE_ISA_LANES >= 8
// By the F16C instruction: eight halves, whatever the vectors of the instruction set.
using EightFloats = float __attribute__((vector_size(32)));
using SixteenBytes = std::uint8_t __attribute__((vector_size(16)));
using SixteenShorts = std::uint16_t __attribute__((vector_size(32)));
template <>
inline constexpr int at_once<fp16> = 8;
template <>
inline constexpr int at_once<e4m3> = 16;

template <class Halves>
INDEXSHARE_ISA_INLINE EightFloats widen_eight(Halves const* source) noexcept {
#if defined(__clang__)
  using EightHalves = __fp16 __attribute__((vector_size(16)));
  return __builtin_convertvector(load_as<EightHalves>(source), EightFloats);
#else
  using EightHalves = short __attribute__((vector_size(16)));
  return __builtin_ia32_vcvtph2ps256(load_as<EightHalves>(source));
#endif
}
INDEXSHARE_ISA_INLINE void widen(fp16 const* source, float, float* out) noexcept {
  EightFloats const values = widen_eight(source);
  __builtin_memcpy(out, &values, sizeof(values));
}
INDEXSHARE_ISA_INLINE SixteenShorts sixteen_shorts(SixteenBytes bytes) noexcept {
#if defined(__clang__)
  return __builtin_convertvector(bytes, SixteenShorts);
#else  // g++ takes five instructions for that
  using Signed = char __attribute__((vector_size(16)));
  return bits_as<SixteenShorts>(__builtin_ia32_pmovzxbw256(bits_as<Signed>(bytes)));
#endif
}
INDEXSHARE_ISA_INLINE void widen(e4m3 const* source, float factor, float* out) noexcept {
  SixteenShorts const halves = halves_of_e4m3(sixteen_shorts(load_as<SixteenBytes>(source)));
  std::uint16_t bits[16];
  __builtin_memcpy(bits, &halves, sizeof(bits));
#pragma GCC unroll 2
  for (int i = 0; i < 16; i += 8) {
    EightFloats const values = widen_eight(bits + i) * factor;
    __builtin_memcpy(out + i, &values, sizeof(values));
  }
}
#else
/// Exponent and mantissa are shifted to their places and the exponent's bias is made up for, twice
/// for infinity and NaN. A subnormal half gets an exponent whose implicit one is then subtracted:
/// a float is never subnormal on the way, so a mode that takes those for zeros changes nothing.
INDEXSHARE_ISA_INLINE Floats widen_halves(Shorts bits) noexcept {
  constexpr std::uint32_t bias = 112u << 23;
  constexpr std::uint32_t one = 1u << 23;
  Words const half = __builtin_convertvector(bits, Words);
  Words const magnitude = (half & 0x7FFFu) << 13;
  Words const special = bits_as<Words>(magnitude > 0x0F7FFFFFu) & bias;
  Words const below_one = bits_as<Words>(magnitude < one);
  Floats const subnormal =
      bits_as<Floats>(magnitude + (bias + one)) - broadcast(bits_as<float>(bias + one));
  Words const value = (bits_as<Words>(subnormal) & below_one) |
                      ((magnitude + bias + special) & ~below_one);
  return bits_as<Floats>(value | (half & 0x8000u) << 16);
}
INDEXSHARE_ISA_INLINE void widen(fp16 const* source, float, float* out) noexcept {
  store(out, widen_halves(load_as<Shorts>(source)));
}
INDEXSHARE_ISA_INLINE void widen(e4m3 const* source, float factor, float* out) noexcept {
  Shorts const codes = __builtin_convertvector(load_as<Bytes>(source), Shorts);
  store(out, widen_halves(halves_of_e4m3(codes)) * broadcast(factor));
}
#endif

/// Returns how many elements were converted: all but a rest shorter than `at_once`.
template <class T>
INDEXSHARE_ISA_INLINE index_t widen_most(T const* source, index_t n, float factor,
                                         float* out) noexcept {
  constexpr int step = at_once<T>;
  index_t i = 0;
  for (; i + 4 * step <= n; i += 4 * step) {
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) widen(source + i + j * step, factor, out + i + j * step);
  }
  for (; i + step <= n; i += step) widen(source + i, factor, out + i);
  return i;
}

INDEXSHARE_ISA_KERNEL void widen_bf16(bf16 const* source, index_t n, float* out) noexcept {
  for (index_t i = widen_most(source, n, 1, out); i < n; ++i) out[i] = to_float(source[i]);
}
INDEXSHARE_ISA_KERNEL void widen_fp16(fp16 const* source, index_t n, float* out) noexcept {
  for (index_t i = widen_most(source, n, 1, out); i < n; ++i) out[i] = to_float(source[i]);
}
/// One rounding: the unit is a power of two and joins the scale, unless that overflows.
INDEXSHARE_ISA_KERNEL void widen_e4m3(e4m3 const* source, index_t n, float scale,
                                      float* out) noexcept {
  bool const joined = scale > -0x1p119f && scale < 0x1p119f;
  index_t i = widen_most(source, n, joined ? e4m3_unit * scale : e4m3_unit, out);
  for (; i < n; ++i) out[i] = to_float(source[i]) * (joined ? scale : 1);
  for (i = 0; !joined && i < n; ++i) out[i] *= scale;
}

template <>
inline constexpr WidenKernels table<WidenKernels>{&widen_bf16, &widen_fp16, &widen_e4m3};
