// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/dims.hpp>
#include <indexshare/io/detail/replace_file.hpp>
#include <indexshare/io/safetensors_format.hpp>

#include <cuda/std/expected>
#include <nlohmann/json.hpp>

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <ostream>
#include <ranges>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

/// @file Writes safetensors files.

namespace indexshare {
inline namespace v0 {
namespace io {

/// Collects tensors and writes them as one safetensors file. The same content gives the same bytes,
/// in whatever order it was added: wide element types come first, then the order is by name. So
/// every tensor is aligned to its element type, and the data as a whole to 8 bytes.
///
/// A wrong call (a name twice, an unknown dtype, elements that do not fill the shape) is remembered
/// and reported by `bytes` and `write`; the first one counts.
class SafetensorsWriter {
 public:
  using Error = SafetensorsError;
  template <class T>
  using Expected = cuda::std::expected<T, Error>;
  using Shape = std::vector<index_t>;

  /// Sets a text of the file's `__metadata__`; the last one of a key counts.
  void metadata(std::string const& key, std::string value) { metadata_[key] = std::move(value); }

  /// A tensor given as bytes, row-major. Copies them.
  void add(std::string const& name, std::string const& dtype, Shape shape,
           std::span<std::byte const> bytes) {
    place(name, dtype, std::move(shape), bytes, std::string(text_of(bytes)));
  }

  /// A tensor given as elements, row-major. Copies them.
  /// @param elements  contiguous, of a type that the format has a name for
  template <std::ranges::contiguous_range Elements>
  void add(std::string const& name, Shape shape, Elements const& elements) {
    using T = std::remove_cv_t<std::ranges::range_value_t<Elements>>;
    static_assert(safetensors_dtype<T> != nullptr, "no safetensors name for this element type");
    std::span<T const> const view(std::ranges::data(elements), std::ranges::size(elements));
    add(name, safetensors_dtype<T>, std::move(shape), std::as_bytes(view));
  }

  /// As `add`, without a copy: for tensors that fill the memory.
  /// @param elements  stay as they are until the file is written
  template <class T>
  void add_view(std::string const& name, Shape shape, std::span<T const> elements) {
    static_assert(safetensors_dtype<T> != nullptr, "no safetensors name for this element type");
    place(name, safetensors_dtype<T>, std::move(shape), std::as_bytes(elements), std::nullopt);
  }

  bool has(std::string const& name) const { return names_.contains(name); }

  /// The file's content. @param file  what errors call it
  Expected<std::string> bytes(std::string const& file = "safetensors") const {
    if (error_) return refusal(file);
    std::string content = head();
    for (auto const& [order, tensor] : tensors_) content += tensor.data();
    return content;
  }

  /// Writes the file, replacing one of that name once all is written: what goes wrong leaves the
  /// old one, and a link stays a link. Errors: a wrong call before; a file that cannot be written.
  [[nodiscard]] Expected<void> write(std::string const& path) const {
    if (error_) return refusal(path);
    auto const failed = detail::replace_file(path, [&, this](std::ostream& stream) {
      stream << head();
      for (auto const& [order, tensor] : tensors_) stream << tensor.data();
    });
    if (!failed) return {};
    bool const opened = *failed == detail::ReplaceFailure::cannot_write;
    return cuda::std::unexpected<Error>(Error{path, "",
                                              opened ? "a write error" : "no writable file",
                                              opened ? "room for the file" : "one"});
  }

 private:
  static constexpr char const* metadata_key = "__metadata__";
  using Order = std::pair<int, std::string>;  // minus the bits of an element, name
  struct Tensor {
    std::string dtype;
    Shape shape;
    std::string_view view;            // of a tensor without a copy
    std::optional<std::string> copy;  // of the rest

    std::string_view data() const { return copy ? std::string_view(*copy) : view; }
  };

  void place(std::string const& name, std::string const& dtype, Shape shape,
             std::span<std::byte const> bytes, std::optional<std::string> copy) {
    auto const needed = safetensors_bytes(dtype, shape);
    if (needed != bytes.size()) {
      refuse({"", name, std::to_string(bytes.size()) + " bytes",
              "what shape " + shape_text(shape) + " of " + dtype + " takes"});
    }
    if (name == metadata_key || !names_.insert(name).second) {
      refuse({"", name, "the tensor twice", "each name once"});
    }
    auto const bits = static_cast<int>(safetensors_bits(dtype));
    std::string_view const view = copy ? std::string_view() : text_of(bytes);
    tensors_.emplace(Order{-bits, name}, Tensor{dtype, std::move(shape), view, std::move(copy)});
  }

  void refuse(Error error) {
    if (!error_) error_ = std::move(error);
  }

  cuda::std::unexpected<Error> refusal(std::string const& file) const {
    return cuda::std::unexpected<Error>(
        Error{file, error_->tensor, error_->value, error_->expected});
  }

  static std::string_view text_of(std::span<std::byte const> bytes) {
    return {reinterpret_cast<char const*>(bytes.data()), bytes.size()};
  }

  /// Everything in front of the data: 8 bytes of length, then JSON filled up with spaces.
  std::string head() const {
    nlohmann::json header = nlohmann::json::object();
    if (!metadata_.empty()) header[metadata_key] = metadata_;
    std::size_t end = 0;
    for (auto const& [order, tensor] : tensors_) {
      std::size_t const begin = end;
      end += tensor.data().size();
      header[order.second] = {
          {"dtype", tensor.dtype}, {"shape", tensor.shape}, {"data_offsets", {begin, end}}};
    }
    // A text that is not UTF-8, such as a path in the metadata, must not throw.
    std::string json = header.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
    json.append((8 - json.size() % 8) % 8, ' ');
    std::string prefix(8, '\0');
    for (std::size_t i = 0; i < prefix.size(); ++i) {
      prefix[i] = static_cast<char>(static_cast<std::uint64_t>(json.size()) >> (8 * i) & 0xFF);
    }
    return prefix + json;
  }

  std::set<std::string> names_;
  std::map<Order, Tensor> tensors_;
  std::map<std::string, std::string> metadata_;
  std::optional<Error> error_;
};

}  // namespace io
}  // namespace v0
}  // namespace indexshare
