// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/io/detail/replace_file.hpp>

#include <unistd.h>

#include <filesystem>
#include <ostream>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

#include "arguments.hpp"

/// @file Files that a program writes because an option names them.

namespace programs {

/// Whether two names are those of one file, which need not exist yet.
inline bool same_file(std::string const& a, std::string const& b) {
  namespace fs = std::filesystem;
  std::error_code none;  // what cannot be resolved counts as it is written
  if (fs::equivalent(a, b, none)) return true;
  auto const resolved = [&](std::string const& name) {
    fs::path const path = fs::weakly_canonical(fs::absolute(name, none), none);
    return path.empty() ? fs::path(name) : path;
  };
  return a == b || resolved(a) == resolved(b);
}

/// Refuses an option whose file is one of the program's inputs, under whatever name.
/// @param what  the inputs, in words
inline Parsed<bool> check_output(Arguments const& arguments, std::string_view option,
                                 std::vector<std::string> const& inputs, std::string_view what) {
  std::string const output = arguments.text(option);
  for (std::string const& input : inputs) {
    std::error_code none;  // a file that is not there is no input
    if (!output.empty() && std::filesystem::equivalent(output, input, none))
      return reject(option, "got " + programs::quoted(output) + ", which is one of the " +
                                std::string(what) + ", expected another file");
  }
  return true;
}

/// Refuses an option whose file could not be written at the end, as far as that shows before: its
/// directory must exist, and it must be no directory itself.
inline Parsed<bool> check_place(std::string_view option, std::string const& path) {
  namespace fs = std::filesystem;
  std::error_code none;
  auto const refuse = [&](char const* why) {
    return reject(option, "cannot write " + programs::quoted(path) + ": " + why);
  };
  if (path.empty()) return refuse("got no name");
  if (fs::is_directory(path, none)) return refuse("it is a directory");
  fs::path target = fs::weakly_canonical(fs::absolute(path, none), none);
  if (target.empty()) target = path;
  fs::path const directory = target.parent_path();
  if (!fs::is_directory(directory, none)) return refuse("its directory does not exist");
  bool const replaces =
      fs::is_regular_file(path, none) || !fs::exists(path, none);  // by a new file
  if (access(replaces ? directory.c_str() : path.c_str(), W_OK) != 0)
    return refuse(replaces ? "its directory cannot be written to" : "it cannot be written to");
  return true;
}

/// Writes a text to the file that `option` names, replacing one of that name once all is written:
/// what goes wrong leaves the old one. A name such as /dev/stdout is written to as it is.
inline Parsed<bool> write_output(std::string_view option, std::string const& path,
                                 std::string_view text) {
  using indexshare::io::detail::ReplaceFailure;
  auto const failed =
      indexshare::io::detail::replace_file(path, [&](std::ostream& stream) { stream << text; });
  if (!failed) return true;
  bool const begun = *failed == ReplaceFailure::cannot_write;
  return reject(option, "cannot write " + programs::quoted(path) + (begun ? " to the end" : ""));
}

/// Refuses an option whose file is that of another option too, under whatever name: the program
/// would write over its own output.
inline Parsed<bool> check_outputs_differ(Arguments const& arguments, std::string_view option,
                                         std::string_view other) {
  namespace fs = std::filesystem;
  if (!arguments.has(option) || !arguments.has(other)) return true;
  std::string const path = arguments.text(option);
  std::string const taken = arguments.text(other);
  std::error_code none;  // neither need be there yet
  auto const place = [&](std::string const& name) {
    return fs::weakly_canonical(fs::absolute(name, none), none);
  };
  bool const same = path == taken || fs::equivalent(path, taken, none) ||
                    (!place(path).empty() && place(path) == place(taken));
  if (!same) return true;
  return reject(option, "got " + programs::quoted(path) + ", the file of " + std::string(other) +
                            " too, expected another file");
}

}  // namespace programs
