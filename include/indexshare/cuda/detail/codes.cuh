// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/element.hpp>

#include <cstdint>

/// @file e4m3 codes to 16-bit operands of the tensor cores, exactly.

namespace indexshare {
inline namespace v0 {
namespace detail {

// The image, not the device, decides: code for sm_80 also runs on later parts.

/// Whether there are instructions that convert e4m3.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
inline constexpr bool image_knows_e4m3 = true;
#else
inline constexpr bool image_knows_e4m3 = false;
#endif

/// Operands of four codes: the first two, the last two; to be multiplied by ScoreForm::unit.
template <class Operand>
__device__ void widen_codes(std::uint32_t codes, std::uint32_t& low, std::uint32_t& high);

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890

template <>
__device__ inline void widen_codes<fp16>(std::uint32_t codes, std::uint32_t& low,
                                         std::uint32_t& high) {
  asm("{ .reg .b16 a, b; mov.b32 {a, b}, %2; cvt.rn.f16x2.e4m3x2 %0, a; "
      "cvt.rn.f16x2.e4m3x2 %1, b; }"
      : "=r"(low), "=r"(high)
      : "r"(codes));
}

template <>
__device__ inline void widen_codes<bf16>(std::uint32_t codes, std::uint32_t& low,
                                         std::uint32_t& high) {
  auto const convert = [](std::uint32_t pair) {
    std::uint32_t bits;
    asm("{ .reg .b16 a, b; .reg .f32 x, y; mov.b32 {a, b}, %1; cvt.f32.f16 x, a; "
        "cvt.f32.f16 y, b; cvt.rn.bf16x2.f32 %0, y, x; }"
        : "=r"(bits)
        : "r"(pair));
    return bits;
  };
  widen_codes<fp16>(codes, low, high);
  low = convert(low);
  high = convert(high);
}

#else

/// Each code in the high byte of 16 bits, all but its sign moved `Shift` bits down: code * 2^-8 in
/// fp16 (Shift 1), code * 2^-120 in bf16 (Shift 4). Codes of NaN become +-480 times that. The upper
/// and lower bytes are made four at a time, then interleaved.
template <int Shift>
__device__ inline void spread_codes(std::uint32_t codes, std::uint32_t& low, std::uint32_t& high) {
  constexpr std::uint32_t each = 0x01010101u;
  std::uint32_t const upper = (codes & 0x80u * each) | (codes >> Shift & (0x7Fu >> Shift) * each);
  std::uint32_t const lower = codes << (8 - Shift) & (0xFFu << (8 - Shift) & 0xFFu) * each;
  low = __byte_perm(lower, upper, 0x5140);
  high = __byte_perm(lower, upper, 0x7362);
}

template <>
__device__ inline void widen_codes<fp16>(std::uint32_t codes, std::uint32_t& low,
                                         std::uint32_t& high) {
  spread_codes<1>(codes, low, high);
}

template <>
__device__ inline void widen_codes<bf16>(std::uint32_t codes, std::uint32_t& low,
                                         std::uint32_t& high) {
  spread_codes<4>(codes, low, high);
  // times 2^120 plus -0, which keeps the sign of a zero: exact, subnormal codes included
  asm("fma.rn.bf16x2 %0, %0, %1, %2;" : "+r"(low) : "r"(0x7B807B80u), "r"(0x80008000u));
  asm("fma.rn.bf16x2 %0, %0, %1, %2;" : "+r"(high) : "r"(0x7B807B80u), "r"(0x80008000u));
}

#endif

/// The bytes of `codes` that are NaN, as the highest bit of each byte; the other bits are noise.
__device__ inline std::uint32_t nan_codes(std::uint32_t codes) {
  return (codes & 0x7F7F7F7Fu) + 0x01010101u;
}

/// Bytes that are the highest bits of bytes of `word`, repeated: digit 8 + i of `Bytes` asks for
/// byte i.
template <unsigned Bytes>
__device__ inline std::uint32_t sign_bytes(std::uint32_t word) {
  std::uint32_t result;
  asm("prmt.b32 %0, %1, 0, %2;" : "=r"(result) : "r"(word), "n"(Bytes));
  return result;
}

}  // namespace detail
}  // namespace v0
}  // namespace indexshare
