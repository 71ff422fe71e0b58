// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/io/config_error.hpp>

#include <cuda/std/expected>

#include <cstddef>
#include <filesystem>
#include <fstream>
#include <string>
#include <system_error>

namespace indexshare {
inline namespace v0 {
namespace io::detail {

/// A config of a real model has a few KiB; one with a long list of quantised modules, some hundred.
inline constexpr std::size_t longest_text_file = std::size_t{16} << 20;

/// The whole of a small text file, which may be a pipe.
inline cuda::std::expected<std::string, ConfigError> read_text_file(std::string const& file) {
  auto const refuse = [&](char const* found) {
    return cuda::std::unexpected<ConfigError>(
        ConfigError{file, found, "a readable file of at most 16 MiB"});
  };
  std::error_code ignored;
  if (std::filesystem::is_directory(file, ignored)) return refuse("a directory");
  std::ifstream stream(file, std::ios::binary);
  if (!stream) return refuse("a file that does not exist or cannot be opened");
  std::string text;
  char block[1 << 16];
  while (stream.read(block, sizeof block), stream.gcount() > 0) {
    text.append(block, static_cast<std::size_t>(stream.gcount()));
    if (text.size() > longest_text_file) return refuse("a larger file");
  }
  if (stream.bad()) return refuse("a read error");
  return text;
}

}  // namespace io::detail
}  // namespace v0
}  // namespace indexshare
