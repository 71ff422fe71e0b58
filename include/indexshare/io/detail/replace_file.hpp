// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <filesystem>
#include <fstream>
#include <optional>
#include <string>
#include <system_error>

namespace indexshare {
inline namespace v0 {
namespace io::detail {

/// Why a file could not be replaced.
enum class ReplaceFailure { cannot_open, cannot_write };

/// Puts what `write(stream)` writes where the file is, at once: a reader and a crash see the old
/// content or the new one. A link stays a link, and the permissions stay. What is no regular file,
/// such as /dev/stdout, is written to as it is.
template <class Write>
std::optional<ReplaceFailure> replace_file(std::string const& path, Write const& write) {
  namespace fs = std::filesystem;
  std::error_code ignored;
  fs::path target = fs::weakly_canonical(path, ignored);
  if (target.empty()) target = path;
  fs::file_status const before = fs::status(target, ignored);
  bool const replaces = !fs::exists(before) || fs::is_regular_file(before);
  fs::path part = target;
  if (replaces) part += ".part";
  std::ofstream stream(part, std::ios::binary | std::ios::trunc);
  if (!stream) return ReplaceFailure::cannot_open;
  write(stream);
  stream.close();
  std::error_code failed;
  if (stream && replaces && fs::exists(before)) {
    fs::permissions(part, before.permissions(), failed);
  }
  if (stream && replaces && !failed) fs::rename(part, target, failed);
  if (stream && !failed) return std::nullopt;
  if (replaces) fs::remove(part, ignored);
  return ReplaceFailure::cannot_write;
}

}  // namespace io::detail
}  // namespace v0
}  // namespace indexshare
