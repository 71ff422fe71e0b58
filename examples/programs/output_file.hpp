// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <filesystem>
#include <fstream>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

#include "arguments.hpp"

/// @file Files that a program writes because an option names them.

namespace programs {

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

/// Writes the option's file. @pre the option is given
inline Parsed<bool> write_output(Arguments const& arguments, std::string_view option,
                                 std::string const& content) {
  std::ofstream stream(arguments.text(option), std::ios::binary);
  if (stream << content << std::flush) return true;
  return reject(option, "cannot write " + programs::quoted(arguments.text(option)));
}

}  // namespace programs
