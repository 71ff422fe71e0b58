// SPDX-License-Identifier: Apache-2.0
#include <catch2/catch_test_macros.hpp>

#include <cstdint>
#include <string>
#include <vector>

#include "arguments.hpp"

using namespace programs;

namespace {

constexpr OptionSpec options[] = {
    {"--size", "N", "a size"}, {"--layers", "A:B", "layers"}, {"--fast", "", "a flag"}};

Parsed<Arguments> parse(std::vector<char const*> words) {
  words.insert(words.begin(), "program");
  return Arguments::parse(options, static_cast<int>(words.size()), words.data());
}

std::string error_of(std::vector<char const*> const& words) {
  auto const arguments = parse(words);
  REQUIRE_FALSE(arguments.has_value());
  return arguments.error().message();
}

}  // namespace

TEST_CASE("CFG-OTHER: options, values and flags") {
  auto const arguments = parse({"--size", "16K", "--fast"});
  REQUIRE(arguments.has_value());
  CHECK(arguments->has("--fast"));
  CHECK_FALSE(arguments->has("--layers"));
  CHECK(arguments->integer("--size", 1, 0, 1 << 20).value() == 16384);
  CHECK(arguments->range("--layers", {2, 9}, 10)->last == 9);
  CHECK(arguments->text("--layers", "none") == "none");
  CHECK(parse({"--size=7"})->integer("--size", 1, 0, 9).value() == 7);
  CHECK(parse({"--size", "-3"})->integer("--size", 1, -9, 9).value() == -3);
  CHECK(parse({})->integer("--size", 5, 0, 9).value() == 5);
}

TEST_CASE("CFG-OTHER: a wrong command line is refused by the option's name") {
  CHECK(error_of({"--sise", "3"}) == "\"--sise\": unknown option; --help lists them");
  CHECK(error_of({"stray"}) == "\"stray\": unknown option; --help lists them");
  CHECK(error_of({"--size"}) == "--size: expected a value: N");
  CHECK(error_of({"--size", "--fast"}) == "--size: expected a value: N");
  CHECK(error_of({"--fast=1"}) == "--fast: takes no value");
  CHECK(error_of({"--fast", "--fast"}) == "--fast: given twice");
  CHECK(error_of({"--a\nb"}) == "\"--a?b\": unknown option; --help lists them");
}

TEST_CASE("INT32: numbers are whole, in range and do not wrap") {
  auto const ok = [](char const* text) {
    return parse_integer("--n", text, 0, INT64_MAX).has_value();
  };
  CHECK(parse_integer("--n", "1M", 0, INT64_MAX).value() == 1048576);
  for (char const* text : {"", "K", "1.5", "1e6", "0x10", " 1", "1 ", "1KK", "12x", "+1", "--1",
                           "-1", "9223372036854775808", "9223372036854775807K"}) {
    CAPTURE(text);
    CHECK_FALSE(ok(text));
  }
  CHECK(ok("9223372036854775807"));
  CHECK_FALSE(parse_integer("--n", "-9223372036854775808M", INT64_MIN, 0).has_value());
}

TEST_CASE("CFG-OTHER: ranges are half-open, not empty and inside") {
  CHECK(parse_range("--r", "0:78", 78)->last == 78);
  for (char const* text :
       {"", ":", "3", "3:", ":3", "3:3", "4:3", "0:79", "-1:3", "1:2:3", "a:b"}) {
    CAPTURE(text);
    CHECK_FALSE(parse_range("--r", text, 78).has_value());
  }
}

TEST_CASE("CFG-OTHER: the help lists every option") {
  std::string const text = help_text("program", "Does something.", options);
  for (OptionSpec const& option : options)
    CHECK(text.find("  " + std::string(option.name)) != std::string::npos);
}

TEST_CASE("CFG-OTHER: plain words are kept where a program takes some") {
  std::vector<char const*> const line{"program", "a=1", "--size", "3", "b", "--fast", "c"};
  auto const arguments =
      Arguments::parse(options, static_cast<int>(line.size()), line.data(), PlainWords::kept);
  REQUIRE(arguments.has_value());
  CHECK(arguments->words() == std::vector<std::string>{"a=1", "b", "c"});
  CHECK(arguments->text("--size") == "3");
  CHECK(arguments->has("--fast"));
  CHECK_FALSE(parse({"--fast", "c"}).has_value());
}
