// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/io/detail/mapped_file.hpp>
#include <indexshare/io/detail/safetensors_header.hpp>
#include <indexshare/io/safetensors_format.hpp>

#include <cuda/std/expected>

#include <cstring>
#include <map>
#include <string>
#include <utility>
#include <vector>

/// @file Reads a safetensors file: 8 bytes of header length, a JSON header, data.

namespace indexshare {
inline namespace v0 {
namespace io {

/// A safetensors file. Every offset and extent of the header is checked before a tensor can be had.
/// Moves, but does not copy: entries point into the content.
///
/// The content is mapped where the system can, so that only the tensors that are used take memory.
/// The file must then stay as it is while this object lives: truncating it makes a later access
/// raise SIGBUS. Replacing the file by another of its name is fine.
class SafetensorsFile {
 public:
  SafetensorsFile(SafetensorsFile&&) = default;
  SafetensorsFile& operator=(SafetensorsFile&&) = default;

  using Error = SafetensorsError;
  template <class T>
  using Expected = cuda::std::expected<T, Error>;

  /// Errors: no regular file that can be read; a header longer than 100 MB; a header that is no
  /// JSON or does not fit the data.
  static Expected<SafetensorsFile> open(std::string const& path) {
    auto content = detail::MappedFile::open(path);
    if (!content) return fail({path, "", content.error(), "a safetensors file"});
    return make(path, std::move(*content));
  }

  /// The same for a content in memory, which is copied.
  /// @param name  what errors call the content
  static Expected<SafetensorsFile> parse(std::string name, std::string const& content) {
    return make(std::move(name), detail::MappedFile::of(content));
  }

  std::map<std::string, SafetensorsEntry> const& tensors() const { return header_.tensors; }
  std::map<std::string, std::string> const& metadata() const { return header_.metadata; }
  bool has(std::string const& tensor) const { return header_.tensors.contains(tensor); }

  /// The elements of a tensor, copied. Errors: no such tensor; another element type; another shape
  /// where one is given.
  template <class T>
  Expected<std::vector<T>> read(std::string const& tensor,
                                std::vector<index_t> const& shape = {}) const {
    static_assert(safetensors_dtype<T> != nullptr, "no safetensors name for this type");
    auto const found = header_.tensors.find(tensor);
    if (found == header_.tensors.end()) {
      return fail({name_, tensor, "no such tensor", "it in the file"});
    }
    SafetensorsEntry const& entry = found->second;
    if (entry.dtype != safetensors_dtype<T>) {
      return fail({name_, tensor, "dtype " + entry.dtype, safetensors_dtype<T>});
    }
    if (!shape.empty() && entry.shape != shape) {
      return fail({name_, tensor, "shape " + shape_text(entry.shape), shape_text(shape)});
    }
    std::vector<T> elements(entry.bytes / sizeof(T));
    if (entry.bytes > 0) std::memcpy(elements.data(), entry.data, entry.bytes);
    return elements;
  }

 private:
  SafetensorsFile(std::string name, detail::MappedFile content, detail::SafetensorsHeader header)
      : name_(std::move(name)), content_(std::move(content)), header_(std::move(header)) {}

  static cuda::std::unexpected<Error> fail(Error error) {
    return cuda::std::unexpected<Error>(std::move(error));
  }

  static Expected<SafetensorsFile> make(std::string name, detail::MappedFile content) {
    auto header = detail::SafetensorsHeaderReader(name, content.bytes()).read();
    if (!header) return fail(std::move(header.error()));
    return SafetensorsFile(std::move(name), std::move(content), std::move(*header));
  }

  std::string name_;
  detail::MappedFile content_;
  detail::SafetensorsHeader header_;
};

}  // namespace io
}  // namespace v0
}  // namespace indexshare
