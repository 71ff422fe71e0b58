// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/io/config_error.hpp>

#include <string>

namespace programs {

/// An error of `read_config_file`, with the file where the error names only a place in it.
inline std::string config_error_text(indexshare::io::ConfigError const& error,
                                     std::string const& file) {
  return error.message() + (error.path.starts_with('$') ? " (in " + file + ")" : "");
}

}  // namespace programs
