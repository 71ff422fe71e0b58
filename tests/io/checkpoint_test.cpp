// SPDX-License-Identifier: Apache-2.0
#include <indexshare/io/checkpoint.hpp>
#include <indexshare/io/safetensors_writer.hpp>

#include <catch2/catch_test_macros.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>
#include <nlohmann/json.hpp>

#include "checkpoint_files.hpp"

#include <cstring>
#include <filesystem>
#include <string>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

using Catch::Matchers::ContainsSubstring;
using indexshare::io::Checkpoint;
using test::TempDirectory;

namespace {

std::string const index_name = "model.safetensors.index.json";

/// A file with the named tensors, each the one float 1, 2, ...
std::string file_with(std::vector<std::string> const& names) {
  indexshare::io::SafetensorsWriter writer;
  float value = 0;
  for (std::string const& name : names) writer.add(name, {1}, std::vector<float>{++value});
  return writer.bytes().value();
}

std::string index_of(std::vector<std::pair<std::string, std::string>> const& places) {
  nlohmann::json map = nlohmann::json::object();
  for (auto const& [tensor, file] : places) map[tensor] = file;
  return nlohmann::json{{"metadata", {{"total_size", 7}}}, {"weight_map", map}}.dump();
}

/// Two files: a and b in the first, c in the second.
void write_two_shards(TempDirectory const& directory) {
  directory.write("one.safetensors", file_with({"a", "b"}));
  directory.write("two.safetensors", file_with({"c"}));
  directory.write(
      index_name,
      index_of({{"a", "one.safetensors"}, {"b", "one.safetensors"}, {"c", "two.safetensors"}}));
}

float value_of(indexshare::io::CheckpointTensor const& tensor) {
  float value;
  REQUIRE(tensor.entry.bytes == sizeof value);
  std::memcpy(&value, tensor.entry.data, sizeof value);
  return value;
}

std::string refusal(TempDirectory const& directory) {
  auto const checkpoint = Checkpoint::open(directory.string());
  REQUIRE_FALSE(checkpoint.has_value());
  CHECK_THAT(checkpoint.error().message(), ContainsSubstring(directory.string()));
  return checkpoint.error().message();
}

/// Opens a directory whose only file is this index.
std::string refusal_of_index(std::string const& index) {
  TempDirectory const directory;
  directory.write(index_name, index);
  return refusal(directory);
}

}  // namespace

TEST_CASE("Checkpoint: an index opens only the files that are asked for") {
  TempDirectory const directory;
  write_two_shards(directory);
  auto const checkpoint = Checkpoint::open(directory.string()).value();
  CHECK(checkpoint.directory() == directory.string());
  CHECK(checkpoint.names() == std::vector<std::string>{"a", "b", "c"});
  CHECK(checkpoint.names("b") == std::vector<std::string>{"b"});
  CHECK(checkpoint.has("c"));
  CHECK_FALSE(checkpoint.has("d"));
  CHECK(checkpoint.has_any("c"));
  CHECK_FALSE(checkpoint.has_any("cc"));
  CHECK(checkpoint.open_files() == 0);
  auto const c = checkpoint.find("c").value();
  CHECK(value_of(c) == 1);
  CHECK(c.file == directory.file("two.safetensors"));
  CHECK(checkpoint.open_files() == 1);
  CHECK(value_of(checkpoint.find("b").value()) == 2);
  CHECK(checkpoint.open_files() == 2);
  CHECK_THAT(checkpoint.find("d").error().message(),
             ContainsSubstring("tensor d") && ContainsSubstring("no such tensor"));
}

TEST_CASE("Checkpoint: a file that is not needed may be missing, one that is needed may not") {
  TempDirectory const directory;
  write_two_shards(directory);
  std::filesystem::remove(directory.file("two.safetensors"));
  auto const checkpoint = Checkpoint::open(directory.string()).value();
  CHECK(value_of(checkpoint.find("a").value()) == 1);
  CHECK_THAT(checkpoint.find("c").error().message(),
             ContainsSubstring("two.safetensors: tensor c: got no readable file"));
  CHECK_THAT(checkpoint.open_all().error().message(), ContainsSubstring("two.safetensors"));
}

TEST_CASE("Checkpoint: index and files must agree") {
  TempDirectory const directory;
  write_two_shards(directory);
  directory.write("one.safetensors", file_with({"a"}));
  auto const lacking = Checkpoint::open(directory.string()).value();
  CHECK_THAT(lacking.find("a").error().message(), ContainsSubstring("one.safetensors") &&
                                                      ContainsSubstring("tensor b") &&
                                                      ContainsSubstring("no such tensor"));
  directory.write("one.safetensors", file_with({"a", "b", "stray"}));
  auto const more = Checkpoint::open(directory.string()).value();
  CHECK_THAT(more.find("a").error().message(),
             ContainsSubstring("one.safetensors") && ContainsSubstring("tensor stray"));
  directory.write("two.safetensors", file_with({"a", "c"}));
  CHECK_THAT(more.find("c").error().message(),
             ContainsSubstring("two.safetensors") && ContainsSubstring("tensor a"));
  directory.write("one.safetensors", "no tensors here");
  CHECK_THAT(more.find("b").error().message(), ContainsSubstring("one.safetensors"));
}

TEST_CASE("Checkpoint: names of files may not leave the directory") {
  for (char const* const name : {"", ".", "..", "../one.safetensors", "/one.safetensors",
                                 "sub/one.safetensors", "a\\b", "C:x", "a..b"}) {
    INFO(name);
    CHECK_THAT(refusal_of_index(index_of({{"t", name}})),
               ContainsSubstring("tensor t") && ContainsSubstring("own directory"));
  }
  CHECK_THAT(refusal_of_index(R"({"weight_map": {"t": "a\u0000b"}})"),
             ContainsSubstring("tensor t"));
  CHECK_THAT(refusal_of_index(R"({"weight_map": {"t": 7}})"), ContainsSubstring("got 7"));
}

TEST_CASE("Checkpoint: an index that is none is refused") {
  CHECK_THAT(refusal_of_index(""), ContainsSubstring(index_name));
  CHECK_THAT(refusal_of_index("[]"), ContainsSubstring("JSON object"));
  CHECK_THAT(refusal_of_index("{"), ContainsSubstring("invalid JSON"));
  CHECK_THAT(refusal_of_index("{}"), ContainsSubstring("no weight_map"));
  CHECK_THAT(refusal_of_index(R"({"weight_map": {}})"), ContainsSubstring("got {}"));
  CHECK_THAT(refusal_of_index(R"({"weight_map": ["a"]})"), ContainsSubstring("[\"a\"]"));
  CHECK_THAT(refusal_of_index(R"({"weight_map": {"t": "x", "t": "y"}})"),
             ContainsSubstring("weight_map.t") && ContainsSubstring("each key once"));
  TempDirectory const directory;
  std::filesystem::create_directory(directory.file(index_name));
  CHECK_THAT(refusal(directory), ContainsSubstring("directory"));
}

TEST_CASE("Checkpoint: a single file needs no index") {
  TempDirectory const directory;
  CHECK_THAT(refusal(directory), ContainsSubstring("no safetensors file"));
  directory.write("other.safetensors", file_with({"x"}));
  directory.write("config.json", "{}");
  auto const only = Checkpoint::open(directory.string()).value();
  CHECK(only.open_files() == 1);
  CHECK(only.find("x").value().file == directory.file("other.safetensors"));
  directory.write("second.safetensors", file_with({"y"}));
  CHECK_THAT(refusal(directory),
             ContainsSubstring("2 safetensors files") && ContainsSubstring(index_name));
  directory.write("model.safetensors", file_with({"z"}));
  auto const named = Checkpoint::open(directory.string()).value();
  CHECK(named.names() == std::vector<std::string>{"z"});
  directory.write("model.safetensors", "no tensors here");
  CHECK_THAT(refusal(directory), ContainsSubstring("model.safetensors"));
}

TEST_CASE("Checkpoint: an index beside a model.safetensors that it does not name is refused") {
  TempDirectory const directory;
  write_two_shards(directory);
  directory.write("model.safetensors", file_with({"a", "b", "c"}));
  CHECK_THAT(refusal(directory), ContainsSubstring("two checkpoints"));
  directory.write(index_name, index_of({{"a", "model.safetensors"},
                                        {"b", "model.safetensors"},
                                        {"c", "model.safetensors"}}));
  auto const checkpoint = Checkpoint::open(directory.string()).value();
  CHECK(value_of(checkpoint.find("c").value()) == 3);
}

TEST_CASE("Checkpoint: an index that is a link into nothing is not passed over") {
  TempDirectory const directory;
  directory.write("model.safetensors", file_with({"a"}));
  std::filesystem::create_symlink("nowhere", directory.file(index_name));
  CHECK_THAT(refusal(directory), ContainsSubstring(index_name));
}

TEST_CASE("Checkpoint: what is no directory is refused") {
  TempDirectory const directory;
  directory.write("file", "");
  CHECK_THAT(Checkpoint::open(directory.file("file")).error().message(),
             ContainsSubstring("no directory"));
  CHECK_THAT(Checkpoint::open(directory.file("missing")).error().message(),
             ContainsSubstring("missing") && ContainsSubstring("no directory"));
}

TEST_CASE("Checkpoint: tensors stay where they are when it moves, and it is not copied") {
  static_assert(!std::is_copy_constructible_v<Checkpoint>);
  TempDirectory const directory;
  write_two_shards(directory);
  auto first = Checkpoint::open(directory.string()).value();
  auto const before = first.find("a").value();
  Checkpoint const second = std::move(first);
  CHECK(second.find("a").value().entry.data == before.entry.data);
  CHECK(value_of(before) == 1);
}

TEST_CASE("Checkpoint: threads may look tensors up at the same time") {
  TempDirectory const directory;
  write_two_shards(directory);
  auto const checkpoint = Checkpoint::open(directory.string()).value();
  std::vector<std::byte const*> seen(8);
  std::vector<std::thread> threads;
  for (std::byte const*& data : seen) {
    threads.emplace_back([&] { data = checkpoint.find("b").value().entry.data; });
  }
  for (std::thread& thread : threads) thread.join();
  for (std::byte const* const data : seen) CHECK(data == seen.front());
}

TEST_CASE("Checkpoint: an error is one line that names file, layer and tensor") {
  indexshare::io::CheckpointError const error{"file", 3, "a\nb", "this", "that"};
  CHECK(error.message() == "file: layer 3: tensor a?b: got this, expected that");
  CHECK(indexshare::io::CheckpointError{"", -1, "", "x", "y"}.message() == "got x, expected y");
}
