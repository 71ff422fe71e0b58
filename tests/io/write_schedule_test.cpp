// SPDX-License-Identifier: Apache-2.0
#include <indexshare/io/pattern_text.hpp>
#include <indexshare/io/write_schedule.hpp>

#include <catch2/catch_test_macros.hpp>
#include <nlohmann/json.hpp>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "checkpoint_files.hpp"
#include "../config/config_cases.hpp"

using namespace indexshare;
using Ordered = nlohmann::ordered_json;

namespace {

indexcache::RolePattern pattern_of(std::string const& text) { return *io::parse_pattern(text); }

std::string content(std::string const& file) {
  std::ifstream stream(file, std::ios::binary);
  REQUIRE(stream);
  return {std::istreambuf_iterator<char>(stream), {}};
}

/// The config with the pattern; checks that it reads back as just that.
Ordered rewritten(std::string const& config, std::string const& pattern) {
  auto const text = io::with_schedule(config, pattern_of(pattern));
  CAPTURE(config, pattern);
  if (!text) FAIL(text.error().message());
  auto const loaded = io::parse_config(*text);
  if (!loaded) FAIL(loaded.error().message());
  CHECK(loaded->plan.decided_by() == ScheduleSource::indexer_types);
  CHECK(loaded->plan.diagnostics().empty());
  REQUIRE(loaded->plan.num_layers() == pattern_of(pattern).layers());
  for (std::int32_t layer = 0; layer < loaded->plan.num_layers(); ++layer)
    CHECK(*loaded->plan.source(layer) == pattern_of(pattern).source(layer));
  return Ordered::parse(*text);
}

std::vector<std::string> keys_of(Ordered const& object) {
  std::vector<std::string> keys;
  for (auto const& [key, value] : object.items()) keys.push_back(key);
  return keys;
}

}  // namespace

TEST_CASE("only the schedule changes", "[write_schedule]") {
  std::string const text = content(data_file("configs/GLM-5.2.json"));
  std::string const pattern = "FFSSFS" + std::string(70, 'S') + "FS";
  Ordered const before = Ordered::parse(text);
  Ordered const after = rewritten(text, pattern);
  CHECK(after["indexer_types"][5] == "shared");
  CHECK(after["indexer_types"][76] == "full");
  Ordered expected = before;
  expected["indexer_types"] = after["indexer_types"];
  for (auto const& [key, value] : before.items())  // a period that would give other layers is gone
    if (!value.is_null() && (key == "index_topk_freq" || key == "index_skip_topk_offset"))
      expected.erase(key);
  CHECK(after == expected);
  CHECK(keys_of(after) == keys_of(expected));

  // The same schedule again: the same text, where the file is laid out as it is written.
  auto const once = io::with_schedule(text, pattern_of(pattern));
  REQUIRE(once.has_value());
  auto const twice = io::with_schedule(*once, pattern_of(pattern));
  REQUIRE(twice.has_value());
  CHECK(*once == *twice);
}

TEST_CASE("weaker fields cannot contradict", "[write_schedule]") {
  Json config = small_glm();
  config["index_topk_pattern"] = "FFFSSS";
  Ordered after = rewritten(config.dump(), "FSSFSS");
  CHECK(after["index_topk_pattern"] == "FSSFSS");
  CHECK_FALSE(after.contains("index_topk_freq"));
  CHECK_FALSE(after.contains("index_skip_topk_offset"));

  config["index_topk_pattern"] = config["indexer_types"];
  after = rewritten(config.dump(), "FSSFSS");
  CHECK(after["index_topk_pattern"] == after["indexer_types"]);

  after = rewritten(config.dump(), "FFFSSS");  // offset 3, freq 4 give this: they stay
  CHECK(after["index_topk_freq"] == 4);
  CHECK(after["index_skip_topk_offset"] == 3);

  config.erase("index_skip_topk_offset");
  config.erase("indexer_types");
  config["index_topk_pattern"] = nullptr;
  after = rewritten(config.dump(), "FFSSSF");  // offset 2 is the default
  CHECK(after["index_topk_freq"] == 4);
  CHECK(after["index_topk_pattern"].is_null());
  after = rewritten(config.dump(), "FFSSFS");
  CHECK_FALSE(after.contains("index_topk_freq"));
}

TEST_CASE("a nested text model is where the schedule goes", "[write_schedule]") {
  Json inner = small_glm();
  inner["model_type"] = "glm_moe_dsa_text";
  Json outer = {{"model_type", "glm_moe_dsa"}, {"text_config", inner}, {"vision", {{"width", 3}}}};
  Ordered after = rewritten(outer.dump(), "FSFSFS");
  CHECK_FALSE(after.contains("indexer_types"));
  CHECK(after["text_config"]["indexer_types"][1] == "shared");
  CHECK(after["vision"]["width"] == 3);

  // A copy outside must go along, or the config could not be read any more.
  outer["indexer_types"] = inner["indexer_types"];
  outer["index_topk_freq"] = inner["index_topk_freq"];
  after = rewritten(outer.dump(), "FSFSFS");
  CHECK(after["indexer_types"] == after["text_config"]["indexer_types"]);
  CHECK_FALSE(after.contains("index_topk_freq"));
}

TEST_CASE("the layout of the text stays", "[write_schedule]") {
  Json const config = small_glm();
  auto const changed = [&](std::string const& text) {
    auto const result = io::with_schedule(text, pattern_of("FSFSFS"));
    REQUIRE(result.has_value());
    return *result;
  };
  CHECK(changed(config.dump(4) + "\n").starts_with("{\n    \""));
  CHECK(changed(config.dump(4) + "\n").ends_with("}\n"));
  CHECK(changed(config.dump(2)).starts_with("{\n  \""));
  CHECK(changed(config.dump(2)).ends_with("}"));
  CHECK(changed(config.dump()).find('\n') == std::string::npos);
}

TEST_CASE("a config that cannot take the pattern is refused", "[write_schedule]") {
  auto const refused = [](Json const& config, std::string const& pattern) {
    auto const text = io::with_schedule(config.dump(), pattern_of(pattern));
    REQUIRE_FALSE(text.has_value());
    return text.error().message();
  };
  CHECK(refused(small_glm(), "FSFSF") ==
        "num_hidden_layers: got 6, expected 5, the layers of the pattern");
  Json broken = small_glm();
  broken["indexer_types"][2] = "Full";
  CHECK(refused(broken, "FSFSFS").starts_with("$.indexer_types[2]: "));
  Json const linear = json_file("configs/GLM-5.3-Flash.glm5_next.from_test_fixture.json");
  auto const layers = io::parse_config(linear.dump())->plan.num_layers();
  CHECK(refused(linear, std::string(static_cast<std::size_t>(layers), 'F'))
            .find("got a layer without sparse attention") != std::string::npos);
}

TEST_CASE("a config file is replaced as a whole or not at all", "[write_schedule]") {
  test::TempDirectory const directory;
  std::string const text = small_glm().dump(2) + "\n";
  directory.write("config.json", text);
  std::string const file = directory.file("config.json");
  std::filesystem::permissions(file, std::filesystem::perms(0640));
  std::filesystem::create_symlink("config.json", directory.file("link.json"));
  auto const loaded = io::write_schedule(directory.file("link.json"), pattern_of("FSFFSS"));
  REQUIRE(loaded.has_value());
  CHECK(share_source(loaded->plan, 5) == 3);
  CHECK(std::filesystem::is_symlink(directory.file("link.json")));
  CHECK(std::filesystem::status(file).permissions() == std::filesystem::perms(0640));
  CHECK(content(file) == *io::with_schedule(text, pattern_of("FSFFSS")));

  std::string const before = content(file);
  CHECK_FALSE(io::write_schedule(file, pattern_of("FS")).has_value());
  CHECK(content(file) == before);
  std::filesystem::create_directory(file + ".part");  // in the way of the new file
  auto const blocked = io::write_schedule(file, pattern_of("FFFFFF"));
  REQUIRE_FALSE(blocked.has_value());
  CHECK(blocked.error().path == file);
  CHECK(content(file) == before);
  auto const absent = io::write_schedule(directory.file("no.json"), pattern_of("FS"));
  REQUIRE_FALSE(absent.has_value());
  CHECK(absent.error().path == directory.file("no.json"));
}
