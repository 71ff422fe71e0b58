// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

namespace indexshare {
inline namespace v0 {
namespace io {

/// Why a config was refused: where, what stands there, and what would have been right.
struct ConfigError {
  std::string path;      ///< JSON path, e.g. `$.text_config.indexer_types[5]`; else the file
  std::string value;     ///< what stands there, shortened; empty: nothing, or null
  std::string expected;  ///< what is accepted there

  /// One line, without a line break: `PATH: got VALUE, expected EXPECTED`.
  std::string message() const {
    std::string const found = value.empty() ? "missing" : "got " + value;
    return path + ": " + found + ", expected " + expected;
  }

  friend bool operator==(ConfigError const&, ConfigError const&) = default;
};

}  // namespace io
}  // namespace v0
}  // namespace indexshare
