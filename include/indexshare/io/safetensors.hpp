// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/element.hpp>
#include <indexshare/io/detail/strict_json.hpp>
#include <indexshare/views.hpp>

#include <cuda/std/expected>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>
#include <map>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

/// @file Reads a safetensors file: 8 bytes of header length, a JSON header, data.
/// @source the format's description in huggingface/safetensors README

namespace indexshare {
inline namespace v0 {
namespace io {

/// Why a file could not be read: where, what was there, what was expected.
struct SafetensorsError {
  std::string file;
  std::string tensor;  ///< empty: the file or its header
  std::string value;
  std::string expected;

  std::string message() const {
    std::string text = file;
    if (!tensor.empty()) text += ": tensor " + tensor;
    return text + ": got " + value + ", expected " + expected;
  }
};

/// One tensor as the header describes it. `data` belongs to the file object and is unaligned.
struct SafetensorsEntry {
  std::string dtype;
  std::vector<index_t> shape;
  std::byte const* data = nullptr;
  std::size_t bytes = 0;
};

namespace detail {

/// The names that the format gives to element types.
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

/// Bytes per element, 0 for a name that the format does not know.
inline std::size_t safetensors_width(std::string_view dtype) {
  static constexpr std::pair<std::string_view, std::size_t> widths[] = {
      {"BOOL", 1}, {"U8", 1},  {"I8", 1},  {"F8_E4M3", 1}, {"F8_E5M2", 1},
      {"I16", 2},  {"U16", 2}, {"F16", 2}, {"BF16", 2},    {"I32", 4},
      {"U32", 4},  {"F32", 4}, {"F64", 8}, {"I64", 8},     {"U64", 8}};
  for (auto const& [name, width] : widths) {
    if (name == dtype) return width;
  }
  return 0;
}

}  // namespace detail

/// A safetensors file held in memory. Every offset and extent of the header is checked before a
/// tensor can be had: the tensors' data follow each other without overlap or gap, as the format
/// asks. Moves, but does not copy: entries point into the content.
class SafetensorsFile {
 public:
  SafetensorsFile(SafetensorsFile&&) = default;
  SafetensorsFile& operator=(SafetensorsFile&&) = default;

  using Error = SafetensorsError;
  template <class T>
  using Expected = cuda::std::expected<T, Error>;

  static Expected<SafetensorsFile> open(std::string const& path) {
    std::error_code ignored;
    std::ifstream stream(path, std::ios::binary);
    if (!stream || std::filesystem::is_directory(path, ignored)) {
      return fail({path, "", "no readable file", "a safetensors file"});
    }
    std::string content;
    char block[1 << 16];
    while (stream.read(block, sizeof block), stream.gcount() > 0) {
      content.append(block, static_cast<std::size_t>(stream.gcount()));
    }
    if (stream.bad()) return fail({path, "", "a read error", "a safetensors file"});
    return parse(path, std::move(content));
  }

  /// @param name  what errors call the content
  static Expected<SafetensorsFile> parse(std::string name, std::string content) {
    SafetensorsFile file;
    file.name_ = std::move(name);
    file.content_.resize(content.size());
    if (!content.empty()) std::memcpy(file.content_.data(), content.data(), content.size());
    if (auto parsed = file.parse_header(); !parsed) return fail(std::move(parsed.error()));
    return file;
  }

  std::map<std::string, SafetensorsEntry> const& tensors() const { return tensors_; }
  std::map<std::string, std::string> const& metadata() const { return metadata_; }
  bool has(std::string const& tensor) const { return tensors_.contains(tensor); }

  /// The elements of a tensor. Errors: no such tensor; another element type; another shape where
  /// one is given.
  template <class T>
  Expected<std::vector<T>> read(std::string const& tensor,
                                std::vector<index_t> const& shape = {}) const {
    static_assert(detail::safetensors_dtype<T> != nullptr, "no safetensors name for this type");
    auto const found = tensors_.find(tensor);
    if (found == tensors_.end()) return fail({name_, tensor, "no such tensor", "it in the file"});
    SafetensorsEntry const& entry = found->second;
    if (entry.dtype != detail::safetensors_dtype<T>) {
      return fail({name_, tensor, "dtype " + entry.dtype, detail::safetensors_dtype<T>});
    }
    if (!shape.empty() && entry.shape != shape) {
      return fail({name_, tensor, "shape " + text_of(entry.shape), text_of(shape)});
    }
    std::vector<T> elements(entry.bytes / sizeof(T));
    if (entry.bytes > 0) std::memcpy(elements.data(), entry.data, entry.bytes);
    return elements;
  }

 private:
  SafetensorsFile() = default;

  static cuda::std::unexpected<Error> fail(Error error) {
    return cuda::std::unexpected<Error>(std::move(error));
  }

  static std::string text_of(std::vector<index_t> const& shape) {
    std::string text = "[";
    for (std::size_t i = 0; i < shape.size(); ++i) {
      text += (i > 0 ? ", " : "") + std::to_string(shape[i]);
    }
    return text + "]";
  }

  Expected<void> parse_header() {
    constexpr std::size_t prefix = 8;
    if (content_.size() < prefix) {
      return fail(
          {name_, "", std::to_string(content_.size()) + " bytes", "8 bytes of header length"});
    }
    std::uint64_t length = 0;
    for (std::size_t i = 0; i < prefix; ++i) {
      length |= std::to_integer<std::uint64_t>(content_[i]) << (8 * i);
    }
    if (length > content_.size() - prefix) {
      return fail({name_, "", "a header of " + std::to_string(length) + " bytes",
                   "at most " + std::to_string(content_.size() - prefix)});
    }
    auto const* const text = reinterpret_cast<char const*>(content_.data()) + prefix;
    auto const header = detail::parse_object({text, static_cast<std::size_t>(length)});
    if (!header) {
      return fail({name_, "", "in the header at " + header.error().message(), "a JSON object"});
    }
    data_start_ = prefix + static_cast<std::size_t>(length);
    for (auto const& [tensor, fields] : header->items()) {
      auto const parsed =
          tensor == "__metadata__" ? parse_metadata(fields) : parse_entry(tensor, fields);
      if (!parsed) return parsed;
    }
    return check_cover();
  }

  /// The tensors' data lie one after the other and fill the file.
  Expected<void> check_cover() const {
    std::vector<std::pair<std::size_t, std::string>> order;
    for (auto const& [tensor, entry] : tensors_) {
      if (entry.bytes > 0) {
        order.emplace_back(static_cast<std::size_t>(entry.data - content_.data()), tensor);
      }
    }
    std::sort(order.begin(), order.end());
    std::size_t end = data_start_;
    for (auto const& [begin, tensor] : order) {
      if (begin != end) {
        return fail(
            {name_, tensor, "data_offsets from " + std::to_string(begin - data_start_),
             "from " + std::to_string(end - data_start_) + ", where the data before it ends"});
      }
      end += tensors_.at(tensor).bytes;
    }
    if (end != content_.size()) {
      return fail(
          {name_, "", std::to_string(content_.size() - end) + " bytes behind the tensors", "none"});
    }
    return {};
  }

  Expected<void> parse_metadata(nlohmann::json const& fields) {
    if (!fields.is_object()) return fail({name_, "__metadata__", fields.dump(), "an object"});
    for (auto const& [key, value] : fields.items()) {
      if (!value.is_string()) {
        return fail({name_, "__metadata__", key + ": " + value.dump(), "a string"});
      }
      metadata_.emplace(key, value.get<std::string>());
    }
    return {};
  }

  /// A list of non-negative integers under `key`.
  Expected<std::vector<index_t>> parse_numbers(std::string const& tensor,
                                               nlohmann::json const& fields,
                                               char const* key) const {
    Error const wrong{name_, tensor, std::string(key) + " is missing or no list of sizes",
                      "a list of non-negative integers"};
    auto const list = fields.find(key);
    if (list == fields.end() || !list->is_array()) return fail(wrong);
    std::vector<index_t> numbers;
    for (auto const& number : *list) {
      if (!number.is_number_unsigned() ||
          number.get<std::uint64_t>() > std::uint64_t{std::numeric_limits<index_t>::max()}) {
        return fail(wrong);
      }
      numbers.push_back(number.get<index_t>());
    }
    return numbers;
  }

  Expected<void> parse_entry(std::string const& tensor, nlohmann::json const& fields) {
    if (!fields.is_object()) return fail({name_, tensor, fields.dump(), "an object"});
    auto const dtype = fields.find("dtype");
    if (dtype == fields.end() || !dtype->is_string()) {
      return fail({name_, tensor, "no dtype", "a string dtype"});
    }
    SafetensorsEntry entry;
    entry.dtype = dtype->get<std::string>();
    std::size_t const width = detail::safetensors_width(entry.dtype);
    if (width == 0) return fail({name_, tensor, "dtype " + entry.dtype, "a known dtype"});

    auto shape = parse_numbers(tensor, fields, "shape");
    if (!shape) return fail(std::move(shape.error()));
    auto offsets = parse_numbers(tensor, fields, "data_offsets");
    if (!offsets) return fail(std::move(offsets.error()));
    entry.shape = std::move(*shape);

    std::size_t const available = content_.size() - data_start_;
    if (offsets->size() != 2 || (*offsets)[0] > (*offsets)[1] ||
        static_cast<std::size_t>((*offsets)[1]) > available) {
      return fail({name_, tensor, "data_offsets " + text_of(*offsets),
                   "[begin, end] within " + std::to_string(available) + " bytes of data"});
    }
    entry.bytes = static_cast<std::size_t>((*offsets)[1] - (*offsets)[0]);
    if (!spans(entry.shape, width, entry.bytes)) {
      return fail({name_, tensor, std::to_string(entry.bytes) + " bytes of data",
                   "what shape " + text_of(entry.shape) + " of " + entry.dtype + " takes"});
    }
    entry.data = content_.data() + data_start_ + static_cast<std::size_t>((*offsets)[0]);
    tensors_.emplace(tensor, std::move(entry));
    return {};
  }

  /// Whether a tensor of this shape takes exactly `bytes`; a product that overflows does not.
  static bool spans(std::vector<index_t> const& shape, std::size_t width, std::size_t bytes) {
    std::size_t product = width;
    for (index_t const extent : shape) {
      if (extent == 0) return bytes == 0;
      if (product > std::numeric_limits<std::size_t>::max() / static_cast<std::size_t>(extent)) {
        return false;
      }
      product *= static_cast<std::size_t>(extent);
    }
    return product == bytes;
  }

  std::string name_;
  std::vector<std::byte> content_;
  std::size_t data_start_ = 0;
  std::map<std::string, SafetensorsEntry> tensors_;
  std::map<std::string, std::string> metadata_;
};

}  // namespace io
}  // namespace v0
}  // namespace indexshare
