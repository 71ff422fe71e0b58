// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/status.hpp>

#include <catch2/catch_tostring.hpp>

#include <string>

/// How a failing check shows a Status.
template <>
struct Catch::StringMaker<indexshare::Status> {
  static std::string convert(indexshare::Status const& s) {
    return std::string("{") + name(s.code) + ", \"" + s.what + "\", layer " +
           std::to_string(s.layer) + ", expected " + std::to_string(s.expected) + ", got " +
           std::to_string(s.got) + "}";
  }
};
