// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/dims.hpp>
#include <indexshare/io/detail/json_path.hpp>
#include <indexshare/io/detail/strict_json.hpp>
#include <indexshare/io/safetensors_format.hpp>

#include <cuda/std/expected>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <map>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace indexshare {
inline namespace v0 {
namespace io::detail {

/// The format's own limit, in bytes.
inline constexpr std::uint64_t longest_safetensors_header = 100'000'000;

/// What a header says. The entries point into the content that it was read from.
struct SafetensorsHeader {
  std::map<std::string, SafetensorsEntry> tensors;
  std::map<std::string, std::string> metadata;
};

/// Reads the header of a file's content and checks it against the content: every tensor lies inside
/// the data and is as long as its shape takes, and the tensors' data follow each other without
/// overlap or gap to the end of the file, as the format asks.
class SafetensorsHeaderReader {
 public:
  using Error = SafetensorsError;
  template <class T>
  using Expected = cuda::std::expected<T, Error>;

  /// @param name  what errors call the content
  SafetensorsHeaderReader(std::string const& name, std::span<std::byte const> content)
      : name_(name), content_(content) {}

  Expected<SafetensorsHeader> read() {
    auto const length = header_length();
    if (!length) return fail(length.error());
    auto const* const text = reinterpret_cast<char const*>(content_.data()) + prefix;
    if (*length == 0 || text[0] != '{') {
      return fail({name_, "", "a header that does not begin with {", "a JSON object"});
    }
    auto const header = parse_object({text, *length});
    if (!header) {
      ConfigError const& error = header.error();
      return fail(
          {name_, "", "in the header, at " + error.path + ", " + error.value, error.expected});
    }
    data_ = content_.subspan(prefix + *length);
    for (auto const& [tensor, fields] : header->items()) {
      auto const parsed =
          tensor == "__metadata__" ? parse_metadata(fields) : parse_entry(tensor, fields);
      if (!parsed) return fail(parsed.error());
    }
    if (auto const covered = check_cover(); !covered) return fail(covered.error());
    return std::move(header_);
  }

 private:
  static constexpr std::size_t prefix = 8;  // bytes of header length

  static cuda::std::unexpected<Error> fail(Error error) {
    return cuda::std::unexpected<Error>(std::move(error));
  }

  Expected<std::size_t> header_length() const {
    if (content_.size() < prefix) {
      return fail(
          {name_, "", std::to_string(content_.size()) + " bytes", "8 bytes of header length"});
    }
    std::uint64_t length = 0;
    for (std::size_t i = 0; i < prefix; ++i) {
      length |= std::to_integer<std::uint64_t>(content_[i]) << (8 * i);
    }
    std::uint64_t const most =
        std::min(longest_safetensors_header, std::uint64_t{content_.size() - prefix});
    if (length > most) {
      return fail({name_, "", "a header of " + std::to_string(length) + " bytes",
                   "at most " + std::to_string(most)});
    }
    return static_cast<std::size_t>(length);
  }

  Expected<void> parse_metadata(nlohmann::json const& fields) {
    if (!fields.is_object()) return fail({name_, "__metadata__", shown(fields), "an object"});
    for (auto const& [key, value] : fields.items()) {
      if (!value.is_string()) {
        return fail({name_, "__metadata__", key + ": " + shown(value), "a string"});
      }
      header_.metadata.emplace(key, value.get<std::string>());
    }
    return {};
  }

  Expected<void> parse_entry(std::string const& tensor, nlohmann::json const& fields) {
    if (!fields.is_object()) return fail({name_, tensor, shown(fields), "an object"});
    auto const dtype = fields.find("dtype");
    if (dtype == fields.end() || !dtype->is_string()) {
      return fail({name_, tensor, "no dtype", "a string dtype"});
    }
    SafetensorsEntry entry;
    entry.dtype = dtype->get<std::string>();
    if (safetensors_bits(entry.dtype) == 0) {
      return fail({name_, tensor, "dtype " + entry.dtype, "a known dtype"});
    }
    auto shape = parse_numbers(tensor, fields, "shape");
    if (!shape) return fail(std::move(shape.error()));
    entry.shape = std::move(*shape);
    auto const offsets = parse_numbers(tensor, fields, "data_offsets");
    if (!offsets) return fail(offsets.error());
    if (auto const placed = place(tensor, *offsets, entry); !placed) return placed;
    header_.tensors.emplace(tensor, std::move(entry));
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

  /// Points the entry at its data.
  Expected<void> place(std::string const& tensor, std::vector<index_t> const& offsets,
                       SafetensorsEntry& entry) const {
    if (offsets.size() != 2 || offsets[0] > offsets[1] ||
        static_cast<std::uint64_t>(offsets[1]) > data_.size()) {
      return fail({name_, tensor, "data_offsets " + shape_text(offsets),
                   "[begin, end] within " + std::to_string(data_.size()) + " bytes of data"});
    }
    entry.data = data_.data() + offsets[0];
    entry.bytes = static_cast<std::size_t>(offsets[1] - offsets[0]);
    if (safetensors_bytes(entry.dtype, entry.shape) != entry.bytes) {
      return fail({name_, tensor, std::to_string(entry.bytes) + " bytes of data",
                   "what shape " + shape_text(entry.shape) + " of " + entry.dtype + " takes"});
    }
    return {};
  }

  Expected<void> check_cover() const {
    std::vector<std::pair<std::byte const*, std::string>> order;
    for (auto const& [tensor, entry] : header_.tensors) {
      if (entry.bytes > 0) order.emplace_back(entry.data, tensor);
    }
    std::sort(order.begin(), order.end());
    std::byte const* end = data_.data();
    for (auto const& [begin, tensor] : order) {
      if (begin != end) {
        return fail(
            {name_, tensor, "data_offsets from " + std::to_string(begin - data_.data()),
             "from " + std::to_string(end - data_.data()) + ", where the data before it ends"});
      }
      end += header_.tensors.at(tensor).bytes;
    }
    std::byte const* const last = data_.data() + data_.size();
    if (end != last) {
      return fail({name_, "", std::to_string(last - end) + " bytes behind the tensors", "none"});
    }
    return {};
  }

  std::string const& name_;
  std::span<std::byte const> content_;
  std::span<std::byte const> data_;  // behind the header
  SafetensorsHeader header_;
};

}  // namespace io::detail
}  // namespace v0
}  // namespace indexshare
