// SPDX-License-Identifier: Apache-2.0
#include <indexshare/io/pattern_text.hpp>

#include <catch2/catch_test_macros.hpp>

#include <string>

using namespace indexshare;

namespace {

std::string error_of(std::string const& text) {
  auto const pattern = io::parse_pattern(text, "--pattern");
  REQUIRE_FALSE(pattern.has_value());
  return pattern.error().message();
}

}  // namespace

TEST_CASE("a pattern comes back from its text", "[pattern_text]") {
  for (std::string const text : {"F", "FS", "FFSSFSSSF", "FSFSFSSSSFSSSFSSFFSSFSSFSSSSFSS"}) {
    auto const pattern = io::parse_pattern(text);
    REQUIRE(pattern.has_value());
    CHECK(pattern_text(*pattern) == text);
  }
  CHECK(io::parse_pattern(std::string(max_schedule_layers, 'F')).has_value());
}

TEST_CASE("what is wrong with a pattern is said by layer", "[pattern_text]") {
  CHECK(error_of("") == "--pattern: got 0 letters, expected 1 to 512 letters, one for each layer");
  CHECK(error_of(std::string(max_schedule_layers + 1, 'F')).find("got 513 letters") !=
        std::string::npos);
  CHECK(error_of("FFsS") ==
        "--pattern: got 's' for layer 2, expected only F (full) and S (shared)");
  CHECK(error_of("FF\n") ==
        "--pattern: got another character for layer 2, expected only F (full) and S (shared)");
  CHECK(error_of("SFF").find("got 'S' for layer 0, expected F: ") != std::string::npos);
}
