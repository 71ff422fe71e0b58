// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/dims.hpp>

#include <cuda/std/bit>

#include <algorithm>
#include <cstdint>
#include <limits>

/// @file Lanes that share a scale as signed bytes: lane = code * scale, up to half a scale.

namespace indexshare {
inline namespace v0 {
namespace detail {

/// Largest code of an index key.
inline constexpr float largest_key_code = 127;
/// Of a query: two products with unsigned keys, 2 * 255 * 64, fit 16 signed bits.
inline constexpr float largest_query_code = 64;
static_assert(2 * 255 * largest_query_code <= std::numeric_limits<std::int16_t>::max());

/// Bits that are ordered as magnitudes are, infinity and then NaN above all numbers.
constexpr std::int32_t magnitude_bits(float value) noexcept {
  return cuda::std::bit_cast<std::int32_t>(value) & 0x7FFFFFFF;
}
inline constexpr std::int32_t infinity_bits = 0x7F800000;

/// Lanes all below this share its scale, so that no division loses bits: their codes are 0.
inline constexpr float least_largest_lane = 0x1p-100f;

/// The scale that gives the largest of all lanes the code `top`; NaN if that is NaN or infinite.
constexpr float int8_scale(std::int32_t largest_bits, float top) noexcept {
  if (largest_bits >= infinity_bits) return std::numeric_limits<float>::quiet_NaN();
  float const largest = cuda::std::bit_cast<float>(largest_bits);
  return (largest < least_largest_lane ? least_largest_lane : largest) / top;
}

/// A sum with this number is rounded to nearest, ties to even, and its low bits are the integer.
inline constexpr float rounding_unit = 0x1.8p23f;

/// value / scale, rounded, for a number of at most 2^22 scales.
constexpr std::int32_t int8_code(float value, float scale) noexcept {
  float const shifted = value / scale + rounding_unit;
  return cuda::std::bit_cast<std::int32_t>(shifted) -
         cuda::std::bit_cast<std::int32_t>(rounding_unit);
}

/// Calls put(i, code) for each of the lanes get(0 .. count) and returns their scale, by which the
/// largest magnitude becomes `top`. If a lane is NaN or infinite the scale is NaN, all codes 0.
template <class Get, class Put>
constexpr float quantize_int8(index_t count, float top, Get const& get, Put const& put) noexcept {
  std::int32_t largest = 0;
  for (index_t i = 0; i < count; ++i) largest = std::max(largest, magnitude_bits(get(i)));
  float const scale = int8_scale(largest, top);
  bool const finite = largest < infinity_bits;
  for (index_t i = 0; i < count; ++i) {
    put(i, static_cast<std::int8_t>(finite ? int8_code(get(i), scale) : 0));
  }
  return scale;
}

}  // namespace detail
}  // namespace v0
}  // namespace indexshare
