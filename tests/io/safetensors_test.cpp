// SPDX-License-Identifier: Apache-2.0
#include <indexshare/io/safetensors.hpp>

#include <catch2/catch_test_macros.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>

#include "checkpoint_files.hpp"

#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

using Catch::Matchers::ContainsSubstring;
using indexshare::bf16;
using indexshare::index_t;
using indexshare::io::SafetensorsFile;

namespace {

std::string file_of(std::string const& header, std::string const& data) {
  std::string content(8, '\0');
  for (std::size_t i = 0; i < 8; ++i) {
    content[i] = static_cast<char>(static_cast<std::uint64_t>(header.size()) >> (8 * i) & 0xFF);
  }
  return content + header + data;
}

std::string bytes_of(std::vector<float> const& values) {
  std::string bytes(values.size() * sizeof(float), '\0');
  std::memcpy(bytes.data(), values.data(), bytes.size());
  return bytes;
}

std::string const good_header = R"({"a":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},)"
                                R"("b":{"dtype":"BF16","shape":[2],"data_offsets":[24,28]},)"
                                R"("none":{"dtype":"I64","shape":[0,7],"data_offsets":[28,28]},)"
                                R"("__metadata__":{"case":"tiny"}})";
std::string const good_data = bytes_of({1, 2, 3, 4, 5, 6}) + std::string("\x80\x3f\x00\xc0", 4);

/// The message of the error that reading such a file gives; fails the test if there is none.
std::string refusal(std::string const& header, std::string const& data = good_data) {
  auto const file = SafetensorsFile::parse("file", file_of(header, data));
  REQUIRE_FALSE(file.has_value());
  return file.error().message();
}

std::string entry(std::string const& fields) { return R"({"t":{)" + fields + "}}"; }

}  // namespace

TEST_CASE("Safetensors: tensors, shapes and metadata are read") {
  auto const file = SafetensorsFile::parse("file", file_of(good_header, good_data));
  REQUIRE(file.has_value());
  CHECK(file->metadata().at("case") == "tiny");
  CHECK(file->read<float>("a").value() == std::vector<float>{1, 2, 3, 4, 5, 6});
  CHECK(file->read<float>("a", {2, 3}).has_value());
  auto const b = file->read<bf16>("b").value();
  REQUIRE(b.size() == 2);
  CHECK(to_float(b[0]) == 1.0f);
  CHECK(to_float(b[1]) == -2.0f);
  CHECK(file->read<std::int64_t>("none").value().empty());
}

TEST_CASE("Safetensors: a wrong request names file, tensor and expectation") {
  auto const file = SafetensorsFile::parse("file", file_of(good_header, good_data));
  REQUIRE(file.has_value());
  CHECK_THAT(file->read<float>("missing").error().message(), ContainsSubstring("missing"));
  CHECK_THAT(file->read<bf16>("a").error().message(), ContainsSubstring("tensor a") &&
                                                          ContainsSubstring("F32") &&
                                                          ContainsSubstring("BF16"));
  CHECK_THAT(file->read<float>("a", {3, 2}).error().message(),
             ContainsSubstring("[2, 3]") && ContainsSubstring("[3, 2]"));
  CHECK_THAT(SafetensorsFile::open("/no/such/file").error().message(),
             ContainsSubstring("/no/such/file"));
}

TEST_CASE("Safetensors: what does not fit is refused") {
  CHECK_THAT(refusal("[1]"), ContainsSubstring("JSON object"));
  CHECK_THAT(refusal("{"), ContainsSubstring("invalid JSON"));
  CHECK_THAT(refusal(" {}"), ContainsSubstring("does not begin with {"));
  CHECK_THAT(refusal(""), ContainsSubstring("does not begin with {"));
  CHECK_THAT(refusal(R"({"t":7})"), ContainsSubstring("tensor t"));
  CHECK_THAT(refusal(R"({"__metadata__":[]})"), ContainsSubstring("__metadata__"));
  CHECK_THAT(refusal(R"({"__metadata__":{"k":1}})"), ContainsSubstring("k: 1"));
  CHECK_THAT(refusal(entry(R"("shape":[6],"data_offsets":[0,24])")), ContainsSubstring("dtype"));
  CHECK_THAT(refusal(entry(R"("dtype":"F33","shape":[6],"data_offsets":[0,24])")),
             ContainsSubstring("F33"));
  CHECK_THAT(refusal(entry(R"("dtype":"F32","shape":[-6],"data_offsets":[0,24])")),
             ContainsSubstring("shape"));
  CHECK_THAT(refusal(entry(R"("dtype":"F32","shape":[6.5],"data_offsets":[0,24])")),
             ContainsSubstring("shape"));
  CHECK_THAT(refusal(entry(R"("dtype":"F32","shape":[6])")), ContainsSubstring("data_offsets"));
  CHECK_THAT(refusal(entry(R"("dtype":"F32","shape":[6],"data_offsets":[24,0])")),
             ContainsSubstring("[24, 0]"));
  CHECK_THAT(refusal(entry(R"("dtype":"F32","shape":[8],"data_offsets":[0,32])")),
             ContainsSubstring("within 28 bytes"));
  CHECK_THAT(refusal(entry(R"("dtype":"F32","shape":[5],"data_offsets":[0,24])")),
             ContainsSubstring("24 bytes"));
  // 2^62 * 4 * 4 wraps to 0 in 64 bits
  CHECK_THAT(
      refusal(entry(R"("dtype":"F32","shape":[4611686018427387904,4],"data_offsets":[0,0])")),
      ContainsSubstring("4611686018427387904"));
}

TEST_CASE("Safetensors: a name twice, deep nesting, gaps, overlaps and directories are refused") {
  CHECK_THAT(refusal(R"({"t":{"dtype":"F32","shape":[7],"data_offsets":[0,28]},)"
                     R"("t":{"dtype":"F32","shape":[7],"data_offsets":[0,28]}})"),
             ContainsSubstring("each key once"));
  CHECK_THAT(refusal(R"({"t":)" + std::string(1000000, '[')), ContainsSubstring("nesting"));
  CHECK_THAT(refusal(good_header + std::string(1, '\0')), ContainsSubstring("NUL"));
  CHECK_THAT(refusal(R"({"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]},)"
                     R"("b":{"dtype":"F32","shape":[4],"data_offsets":[12,28]}})"),
             ContainsSubstring("tensor b") && ContainsSubstring("from 16"));
  CHECK_THAT(refusal(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},)"
                     R"("b":{"dtype":"F32","shape":[4],"data_offsets":[12,28]}})"),
             ContainsSubstring("tensor b") && ContainsSubstring("from 8"));
  CHECK_THAT(refusal(entry(R"("dtype":"F32","shape":[6],"data_offsets":[0,24])")),
             ContainsSubstring("4 bytes behind"));
  CHECK_THAT(SafetensorsFile::open("/").error().message(), ContainsSubstring("no readable file"));
}

TEST_CASE("Safetensors: a moved file keeps its tensors, and files are not copied") {
  static_assert(!std::is_copy_constructible_v<SafetensorsFile>);
  std::vector<SafetensorsFile> kept;
  kept.push_back(SafetensorsFile::parse("file", file_of(good_header, good_data)).value());
  kept.push_back(SafetensorsFile::parse("file", file_of(good_header, good_data)).value());
  CHECK(kept[0].read<float>("a").value() == std::vector<float>{1, 2, 3, 4, 5, 6});
}

TEST_CASE("Safetensors: no truncation is accepted or read past") {
  std::string const whole = file_of(good_header, good_data);
  for (std::size_t length = 0; length < whole.size(); ++length) {
    INFO(length);
    CHECK_FALSE(SafetensorsFile::parse("file", whole.substr(0, length)).has_value());
  }
}

TEST_CASE("Safetensors: a mapped file gives what the same content in memory gives") {
  test::TempDirectory const directory;
  directory.write("t.safetensors", file_of(good_header, good_data));
  std::vector<SafetensorsFile> kept;
  for (int i = 0; i < 2; ++i) {
    kept.push_back(SafetensorsFile::open(directory.file("t.safetensors")).value());
  }
  std::filesystem::remove(directory.file("t.safetensors"));  // the mapping stays
  for (SafetensorsFile const& file : kept) {
    CHECK(file.metadata().at("case") == "tiny");
    CHECK(file.read<float>("a", {2, 3}).value() == std::vector<float>{1, 2, 3, 4, 5, 6});
    CHECK(file.read<bf16>("b").value()[1].bits == 0xC000);
    CHECK(file.read<std::int64_t>("none").value().empty());
  }
}

TEST_CASE("Safetensors: no truncation of a file on disk is accepted") {
  test::TempDirectory const directory;
  std::string const whole = file_of(good_header, good_data);
  for (std::size_t length = 0; length < whole.size(); length += 13) {
    directory.write("t.safetensors", whole.substr(0, length));
    auto const file = SafetensorsFile::open(directory.file("t.safetensors"));
    REQUIRE_FALSE(file.has_value());
    CHECK_THAT(file.error().message(), ContainsSubstring(directory.file("t.safetensors")));
  }
  directory.write("t.safetensors", "");
  CHECK_THAT(SafetensorsFile::open(directory.file("t.safetensors")).error().message(),
             ContainsSubstring("got 0 bytes"));
}

TEST_CASE("Safetensors: a header has at most 100 MB, as the format says") {
  test::TempDirectory const directory;
  std::uint64_t const length = 100'000'001;
  directory.write("t.safetensors", std::string(reinterpret_cast<char const*>(&length), 8) + "{}");
  std::filesystem::resize_file(directory.file("t.safetensors"), length + 8);  // zeros, not on disk
  CHECK_THAT(
      SafetensorsFile::open(directory.file("t.safetensors")).error().message(),
      ContainsSubstring("a header of 100000001 bytes") && ContainsSubstring("at most 100000000"));
}

TEST_CASE("Safetensors: elements of fewer bits than a byte take as many bytes as they fill") {
  CHECK(SafetensorsFile::parse("file", file_of(R"({"t":{"dtype":"F4","shape":[3,2],)"
                                               R"("data_offsets":[0,3]}})",
                                               "abc"))
            .has_value());
  CHECK(SafetensorsFile::parse("file", file_of(R"({"t":{"dtype":"F6_E2M3","shape":[4],)"
                                               R"("data_offsets":[0,3]}})",
                                               "abc"))
            .has_value());
  CHECK_THAT(refusal(R"({"t":{"dtype":"F4","shape":[7],"data_offsets":[0,4]}})", "abcd"),
             ContainsSubstring("4 bytes"));
  CHECK_THAT(refusal(R"({"t":{"dtype":"F4","shape":[7],"data_offsets":[0,3]}})", "abc"),
             ContainsSubstring("3 bytes"));
  CHECK_THAT(refusal(R"({"t":{"dtype":"F8_E8M0","shape":[7],"data_offsets":[0,4]}})", "abcd"),
             ContainsSubstring("4 bytes"));
}
