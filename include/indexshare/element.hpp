// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/macros.hpp>

#include <cuda/std/bit>

#include <concepts>
#include <cstdint>

namespace indexshare {
inline namespace v0 {

/// Storage types, bit-compatible with CUDA's __nv_bfloat16, __half and __nv_fp8_e4m3, for machines
/// without the toolkit. They hold bits; arithmetic is done on `to_float` of them.
/// An engine's own 16-bit type enters by an overload of `to_float` in the type's namespace.
struct bf16 {
  std::uint16_t bits;
};
struct fp16 {
  std::uint16_t bits;
};
/// e4m3fn: no infinity, largest 448, NaN 0x7F and 0xFF.
struct e4m3 {
  std::uint8_t bits;
};

INDEXSHARE_HD constexpr float to_float(float value) noexcept { return value; }

INDEXSHARE_HD constexpr float to_float(bf16 value) noexcept {
  return cuda::std::bit_cast<float>(static_cast<std::uint32_t>(value.bits) << 16);
}

namespace detail {

/// Value of a small binary float whose exponent field is not the special one.
INDEXSHARE_HD constexpr float small_float(std::uint32_t sign, std::uint32_t exponent,
                                          std::uint32_t mantissa, int mantissa_bits,
                                          int bias) noexcept {
  if (exponent == 0) {
    // mantissa * 2^(1 - bias - mantissa_bits), exact in fp32
    float const unit = cuda::std::bit_cast<float>(
        static_cast<std::uint32_t>(127 + 1 - bias - mantissa_bits) << 23);
    float const magnitude = static_cast<float>(mantissa) * unit;
    return sign != 0 ? -magnitude : magnitude;
  }
  std::uint32_t const widened = (exponent + static_cast<std::uint32_t>(127 - bias)) << 23;
  return cuda::std::bit_cast<float>((sign << 31) | widened | (mantissa << (23 - mantissa_bits)));
}

/// Shifts right by `count` >= 1, rounding to nearest, ties to even.
INDEXSHARE_HD constexpr std::uint32_t shift_round_even(std::uint32_t value, int count) noexcept {
  std::uint32_t const kept = value >> count;
  std::uint32_t const half = std::uint32_t{1} << (count - 1);
  std::uint32_t const rest = value & ((std::uint32_t{1} << count) - 1);
  return kept + ((rest > half || (rest == half && (kept & 1u) != 0)) ? 1u : 0u);
}

/// Bits (without sign) of |value| rounded to a small float; values past the range give whatever
/// follows the largest finite code, which the caller turns into infinity or saturation.
INDEXSHARE_HD constexpr std::uint32_t round_to_small(std::uint32_t magnitude, int mantissa_bits,
                                                     int bias) noexcept {
  int const exponent = static_cast<int>(magnitude >> 23) - 127 + bias;
  std::uint32_t const mantissa = magnitude & 0x7FFFFFu;
  int const drop = 23 - mantissa_bits;
  if (exponent > 0) {
    std::uint32_t const joined = (static_cast<std::uint32_t>(exponent) << 23) | mantissa;
    return shift_round_even(joined, drop);
  }
  int const shift = drop + 1 - exponent;
  return shift > 31 ? 0u : shift_round_even(mantissa | 0x800000u, shift);
}

}  // namespace detail

INDEXSHARE_HD constexpr float to_float(fp16 value) noexcept {
  std::uint32_t const sign = value.bits >> 15;
  std::uint32_t const exponent = (value.bits >> 10) & 0x1Fu;
  std::uint32_t const mantissa = value.bits & 0x3FFu;
  if (exponent == 0x1F) {
    return cuda::std::bit_cast<float>((sign << 31) | 0x7F800000u | (mantissa << 13));
  }
  return detail::small_float(sign, exponent, mantissa, 10, 15);
}

INDEXSHARE_HD constexpr float to_float(e4m3 value) noexcept {
  std::uint32_t const sign = value.bits >> 7;
  std::uint32_t const magnitude = value.bits & 0x7Fu;
  if (magnitude == 0x7F) return cuda::std::bit_cast<float>((sign << 31) | 0x7FC00000u);
  return detail::small_float(sign, magnitude >> 3, magnitude & 7u, 3, 7);
}

/// Rounds to nearest, ties to even. bf16 and fp16 overflow to infinity, e4m3 saturates at 448;
/// NaN stays NaN.
template <class T>
INDEXSHARE_HD constexpr T from_float(float value) noexcept;

template <>
INDEXSHARE_HD constexpr float from_float<float>(float value) noexcept {
  return value;
}

template <>
INDEXSHARE_HD constexpr bf16 from_float<bf16>(float value) noexcept {
  auto const bits = cuda::std::bit_cast<std::uint32_t>(value);
  if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return {0x7FFF};
  return {static_cast<std::uint16_t>(detail::shift_round_even(bits, 16))};
}

template <>
INDEXSHARE_HD constexpr fp16 from_float<fp16>(float value) noexcept {
  auto const bits = cuda::std::bit_cast<std::uint32_t>(value);
  std::uint32_t const sign = (bits >> 31) << 15;
  std::uint32_t const magnitude = bits & 0x7FFFFFFFu;
  if (magnitude > 0x7F800000u) return {0x7FFF};
  std::uint32_t const rounded = detail::round_to_small(magnitude, 10, 15);
  return {static_cast<std::uint16_t>(sign | (rounded < 0x7C00u ? rounded : 0x7C00u))};
}

template <>
INDEXSHARE_HD constexpr e4m3 from_float<e4m3>(float value) noexcept {
  auto const bits = cuda::std::bit_cast<std::uint32_t>(value);
  std::uint32_t const sign = (bits >> 31) << 7;
  std::uint32_t const magnitude = bits & 0x7FFFFFFFu;
  if (magnitude > 0x7F800000u) return {static_cast<std::uint8_t>(sign | 0x7Fu)};
  std::uint32_t const rounded = detail::round_to_small(magnitude, 3, 7);
  return {static_cast<std::uint8_t>(sign | (rounded < 0x7Eu ? rounded : 0x7Eu))};
}

/// What queries, keys, KV rows and scores may be made of.
template <class T>
concept Element = std::is_trivially_copyable_v<T> && requires(T const value) {
  { to_float(value) } -> std::same_as<float>;
};
static_assert(Element<float> && Element<bf16> && Element<fp16> && Element<e4m3>);

}  // namespace v0
}  // namespace indexshare
