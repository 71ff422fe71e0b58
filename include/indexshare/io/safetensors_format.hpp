// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/dims.hpp>
#include <indexshare/element.hpp>

#include <bit>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

/// @file What a safetensors file consists of, for whoever reads or writes one.
/// @source the format's description in huggingface/safetensors README

namespace indexshare {
inline namespace v0 {
namespace io {

/// Why a file could not be read or written: where, what was there, what was expected.
struct SafetensorsError {
  std::string file;
  std::string tensor;  ///< empty: the file or its header
  std::string value;
  std::string expected;

  /// One line: `FILE: tensor TENSOR: got VALUE, expected EXPECTED`.
  std::string message() const {
    std::string text = file;
    if (!tensor.empty()) text += ": tensor " + tensor;
    return text + ": got " + value + ", expected " + expected;
  }
};

/// One tensor as the header describes it. `data` belongs to the file object and may lie at any
/// address, aligned or not.
struct SafetensorsEntry {
  std::string dtype;
  std::vector<index_t> shape;
  std::byte const* data = nullptr;
  std::size_t bytes = 0;
};

static_assert(std::endian::native == std::endian::little,
              "safetensors data are little-endian and are used as they lie");

/// The name that the format gives to an element type; null for a type that has none.
template <class T>
inline constexpr char const* safetensors_dtype = nullptr;
template <>
inline constexpr char const* safetensors_dtype<float> = "F32";
template <>
inline constexpr char const* safetensors_dtype<double> = "F64";
template <>
inline constexpr char const* safetensors_dtype<bf16> = "BF16";
template <>
inline constexpr char const* safetensors_dtype<fp16> = "F16";
template <>
inline constexpr char const* safetensors_dtype<e4m3> = "F8_E4M3";
template <>
inline constexpr char const* safetensors_dtype<std::int32_t> = "I32";
template <>
inline constexpr char const* safetensors_dtype<std::int64_t> = "I64";

/// Bits per element of a dtype, 0 for a name that the format does not know.
/// @source huggingface/safetensors, enum Dtype, release 0.8
inline std::size_t safetensors_bits(std::string_view dtype) {
  static constexpr std::pair<std::string_view, std::size_t> bits[] = {
      {"BOOL", 8},        {"U8", 8},      {"I8", 8},          {"F8_E4M3", 8}, {"F8_E5M2", 8},
      {"F8_E4M3FNUZ", 8}, {"F8_E8M0", 8}, {"F8_E5M2FNUZ", 8}, {"F4", 4},      {"F6_E2M3", 6},
      {"F6_E3M2", 6},     {"I16", 16},    {"U16", 16},        {"F16", 16},    {"BF16", 16},
      {"I32", 32},        {"U32", 32},    {"F32", 32},        {"F64", 64},    {"C64", 64},
      {"I64", 64},        {"U64", 64}};
  for (auto const& [name, width] : bits) {
    if (name == dtype) return width;
  }
  return 0;
}

/// Bytes that a tensor takes; nothing if the dtype is unknown, an extent is negative, the elements
/// do not fill whole bytes, or the number overflows.
inline std::optional<std::size_t> safetensors_bytes(std::string_view dtype,
                                                    std::vector<index_t> const& shape) {
  std::size_t bits = safetensors_bits(dtype);
  if (bits == 0) return std::nullopt;
  bool empty = false;
  for (index_t const extent : shape) {
    if (extent < 0) return std::nullopt;
    empty = empty || extent == 0;
  }
  if (empty) return 0;
  for (index_t const extent : shape) {
    auto const factor = static_cast<std::size_t>(extent);
    if (bits > std::numeric_limits<std::size_t>::max() / factor) return std::nullopt;
    bits *= factor;
  }
  if (bits % 8 != 0) return std::nullopt;
  return bits / 8;
}

/// `[2, 3]`, for messages.
inline std::string shape_text(std::vector<index_t> const& shape) {
  std::string text = "[";
  for (std::size_t i = 0; i < shape.size(); ++i) {
    text += (i > 0 ? ", " : "") + std::to_string(shape[i]);
  }
  return text + "]";
}

}  // namespace io
}  // namespace v0
}  // namespace indexshare
