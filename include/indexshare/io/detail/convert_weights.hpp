// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/dims.hpp>
#include <indexshare/element.hpp>

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>

namespace indexshare {
inline namespace v0 {
namespace io::detail {

/// Rows and columns of a weight matrix that share a scale.
/// @source weight_block_size of GLM-5.2-FP8's config; DeepSeek-V3 `weight_dequant`
inline constexpr index_t scale_block = 128;

constexpr index_t scale_blocks(index_t n) noexcept { return (n + scale_block - 1) / scale_block; }

inline bool is_finite(float value) noexcept {
  return (std::bit_cast<std::uint32_t>(value) & 0x7F800000u) != 0x7F800000u;
}

/// Element `i` of values that may lie at any address.
template <class T>
T load_unaligned(std::byte const* data, std::size_t i) noexcept {
  T value;
  std::memcpy(&value, data + i * sizeof(T), sizeof(T));
  return value;
}

/// Converts `count` elements, each rounded once. Returns the number of the first finite one that
/// does not fit `To`; what is not finite stays what it is.
template <class From, class To>
std::optional<std::size_t> convert(std::byte const* from, std::size_t count, To* to) noexcept {
  for (std::size_t i = 0; i < count; ++i) {
    float const value = to_float(load_unaligned<From>(from, i));
    to[i] = from_float<To>(value);
    if (!is_finite(to_float(to[i])) && is_finite(value)) return i;
  }
  return std::nullopt;
}

inline constexpr std::array<float, 256> e4m3_values = [] {
  std::array<float, 256> values{};
  for (std::size_t code = 0; code < values.size(); ++code) {
    values[code] = to_float(e4m3{static_cast<std::uint8_t>(code)});
  }
  return values;
}();

/// value[o, i] = code[o, i] * scale[o / 128, i / 128], multiplied in fp32 and rounded once to `To`.
/// The last block of a row or column may be narrower.
/// @param scales [scale_blocks(out), scale_blocks(in)], positive and finite
/// Returns the number of the first element that is NaN or does not fit `To`.
template <class To>
std::optional<std::size_t> dequantise(std::byte const* codes, std::span<float const> scales,
                                      index_t out, index_t in, To* to) noexcept {
  auto const columns = static_cast<std::size_t>(in);
  auto const block = static_cast<std::size_t>(scale_block);
  auto const blocks = static_cast<std::size_t>(scale_blocks(in));
  for (std::size_t o = 0; o < static_cast<std::size_t>(out); ++o) {
    for (std::size_t b = 0; b < blocks; ++b) {
      float const scale = scales[o / block * blocks + b];
      std::size_t const last = o * columns + std::min(columns, (b + 1) * block);
      for (std::size_t i = o * columns + b * block; i < last; ++i) {
        to[i] = from_float<To>(e4m3_values[std::to_integer<std::size_t>(codes[i])] * scale);
        if (!is_finite(to_float(to[i]))) return i;
      }
    }
  }
  return std::nullopt;
}

}  // namespace io::detail
}  // namespace v0
}  // namespace indexshare
