// SPDX-License-Identifier: Apache-2.0
#include <indexshare/element.hpp>
#include <indexshare/io/safetensors.hpp>
#include <indexshare/io/safetensors_writer.hpp>

#include <catch2/catch_test_macros.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>

#include "checkpoint_files.hpp"

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <vector>

using Catch::Matchers::ContainsSubstring;
using indexshare::bf16;
using indexshare::io::SafetensorsFile;
using indexshare::io::SafetensorsWriter;

TEST_CASE("Safetensors writer: what it writes is read back, aligned and the same in any order") {
  std::vector<float> const wide{1, 2, 3};
  std::vector<bf16> const narrow{{0x3F80}, {0x4000}, {0x4040}};
  std::vector<indexshare::e4m3> const codes{{1}, {2}, {3}};
  SafetensorsWriter writer;
  writer.add("codes", {3}, codes);
  writer.add("narrow", {3, 1}, narrow);
  writer.add("wide", {1, 3}, wide);
  writer.add("none", {0, 2}, std::vector<double>{});
  writer.metadata("who", "first");
  writer.metadata("who", "a \"test\" \xFF");  // not UTF-8
  SafetensorsWriter other;
  other.metadata("who", "a \"test\" \xFF");
  other.add("none", {0, 2}, std::vector<double>{});
  other.add("wide", {1, 3}, wide);
  other.add("narrow", {3, 1}, narrow);
  other.add("codes", "F8_E4M3", {3}, std::as_bytes(std::span(codes)));
  CHECK(writer.bytes().value() == other.bytes().value());

  test::TempDirectory const directory;
  REQUIRE(writer.write(directory.file("t.safetensors")).has_value());
  auto const file = SafetensorsFile::open(directory.file("t.safetensors")).value();
  CHECK(file.read<float>("wide", {1, 3}).value() == wide);
  CHECK(file.read<bf16>("narrow", {3, 1}).value()[2].bits == 0x4040);
  CHECK(file.read<indexshare::e4m3>("codes").value()[1].bits == 2);
  CHECK(file.read<double>("none", {0, 2}).has_value());
  CHECK(file.metadata().at("who").starts_with("a \"test\" "));
  for (auto const& [name, entry] : file.tensors()) {
    INFO(name);
    std::size_t const alignment = indexshare::io::safetensors_bits(entry.dtype) / 8;
    CHECK(reinterpret_cast<std::uintptr_t>(entry.data) % alignment == 0);
  }
}

TEST_CASE("Safetensors writer: the first wrong call is reported") {
  SafetensorsWriter writer;
  writer.add("t", {2}, std::vector<float>{1});
  writer.add("t", {1}, std::vector<float>{1});
  CHECK_THAT(writer.bytes("file").error().message(),
             ContainsSubstring("file: tensor t: got 4 bytes") && ContainsSubstring("[2] of F32"));
  SafetensorsWriter twice;
  twice.add("t", {1}, std::vector<float>{1});
  twice.add("t", {1}, std::vector<float>{1});
  test::TempDirectory const directory;
  CHECK_THAT(twice.write(directory.file("t.safetensors")).error().message(),
             ContainsSubstring("tensor t: got the tensor twice"));
  CHECK_FALSE(std::filesystem::exists(directory.file("t.safetensors")));
  SafetensorsWriter good;
  CHECK_THAT(good.write(directory.file("no/such/t.safetensors")).error().message(),
             ContainsSubstring("no writable file"));
}

TEST_CASE("Safetensors writer: a view is written as it is when the file is") {
  std::vector<float> values{1, 2, 3};
  SafetensorsWriter viewed;
  viewed.add_view("t", {3}, std::span<float const>(values));
  values[1] = 5;
  SafetensorsWriter copied;
  copied.add("t", {3}, values);
  CHECK(viewed.bytes().value() == copied.bytes().value());
  test::TempDirectory const directory;
  REQUIRE(viewed.write(directory.file("t.safetensors")).has_value());
  auto const file = SafetensorsFile::open(directory.file("t.safetensors")).value();
  CHECK(file.read<float>("t", {3}).value() == std::vector<float>{1, 5, 3});
}

TEST_CASE("Safetensors writer: a view that does not fill its shape is refused") {
  std::vector<float> const values{1, 2, 3};
  SafetensorsWriter writer;
  writer.add_view("t", {2, 2}, std::span<float const>(values));
  CHECK_THAT(writer.bytes("file").error().message(), ContainsSubstring("tensor t: got 12 bytes"));
}
