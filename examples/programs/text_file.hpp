// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <filesystem>
#include <fstream>
#include <string>
#include <string_view>
#include <system_error>

#include "arguments.hpp"

namespace programs {

/// Writes a text to the file that `option` names, replacing one of that name once all is written:
/// what goes wrong leaves the old one. A name such as /dev/stdout is written to as it is.
inline Parsed<bool> write_text_file(std::string_view option, std::string const& path,
                                    std::string_view text) {
  std::error_code ignored;
  std::filesystem::path target = std::filesystem::weakly_canonical(path, ignored);
  if (target.empty()) target = path;
  bool const replaces = !std::filesystem::exists(target, ignored) ||
                        std::filesystem::is_regular_file(target, ignored);
  std::filesystem::path part = target;
  if (replaces) part += ".part";
  std::ofstream stream(part, std::ios::binary | std::ios::trunc);
  if (!stream) return reject(option, programs::quoted(path) + " cannot be written");
  stream << text;
  stream.close();
  std::error_code failed;
  if (stream && replaces) std::filesystem::rename(part, target, failed);
  if (stream && !failed) return true;
  if (replaces) std::filesystem::remove(part, ignored);
  return reject(option, programs::quoted(path) + " could not be written to the end");
}

}  // namespace programs
