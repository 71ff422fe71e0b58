// SPDX-License-Identifier: Apache-2.0
#include <catch2/catch_approx.hpp>
#include <catch2/catch_test_macros.hpp>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <sstream>
#include <string>
#include <vector>

#include "config_cases.hpp"
#include "inspect.hpp"

using Catch::Approx;

namespace {

struct Outcome {
  int status;
  std::string out;
  std::string err;
};

Outcome inspect(std::vector<std::string> words) {
  words.insert(words.begin(), "indexshare-inspect");
  std::vector<char const*> pointers;
  for (std::string const& word : words) pointers.push_back(word.c_str());
  std::ostringstream out;
  std::ostringstream err;
  int const status =
      programs::inspect(static_cast<int>(pointers.size()), pointers.data(), out, err);
  return {status, out.str(), err.str()};
}

Outcome inspect_file(std::string const& name, std::vector<std::string> more = {}) {
  more.insert(more.begin(), {"--config", data_file("configs/" + name)});
  return inspect(more);
}

Json report_of(std::string const& name, std::vector<std::string> more = {}) {
  more.push_back("--json");
  Outcome const outcome = inspect_file(name, more);
  CAPTURE(outcome.err);
  REQUIRE(outcome.status == 0);
  CHECK(outcome.err.empty());
  return Json::parse(outcome.out);
}

/// Exit status 2, nothing on stdout, one line on stderr.
std::string error_of(Outcome const& outcome) {
  CHECK(outcome.status == 2);
  CHECK(outcome.out.empty());
  CHECK(std::count(outcome.err.begin(), outcome.err.end(), '\n') == 1);
  CHECK(outcome.err.ends_with('\n'));
  CHECK(outcome.err.starts_with("error: "));
  return outcome.err;
}

bool mentions(std::string const& text, std::string const& part) {
  return text.find(part) != std::string::npos;
}

std::string const glm52 = "GLM-5.2.json";
std::string const flash = "GLM-5.3-Flash.glm5_next.from_test_fixture.json";

}  // namespace

TEST_CASE("CFG-SCHED R009: inspect shows GLM-5.2's schedule and costs") {
  Json const report = report_of(glm52);
  Json const vector = json_file("fault_vectors.json")["sched_glm52"];
  CHECK(report["model_type"] == "glm_moe_dsa");
  CHECK(report["layers"] == 78);
  CHECK(report["context"] == 1048576);
  CHECK(report["full_layers"] == vector["full"]);
  CHECK(report["sources"] == vector["source"]);
  CHECK(report["diagnostics"] == Json::array());
  CHECK(report["unsupported"] == Json::array());
  CHECK(report["rope_theta"] == 8000000);
  CHECK(report["indexer_rope"] == Json({{"layout", "interleaved"}, {"dims", {0, 64}}}));
  CHECK(report["flops"]["absorbed"]["ratio"].get<double>() == Approx(2.73).margin(0.005));
  CHECK(report["flops"]["expanded"]["ratio"].get<double>() == Approx(2.81).margin(0.005));
  CHECK(report["flops"]["absorbed"]["all_full"].get<double>() == Approx(773.9e9).epsilon(1e-4));
  CHECK(report["flops"]["absorbed"]["shared"].is_number_integer());
  CHECK(report["bytes"] ==
        Json({{"index_key_all_full", 10296}, {"index_key", 2772}, {"kv", 51168}}));
}

TEST_CASE("MTP R119: inspect numbers index-key caches per stage, the MTP layer last") {
  Json const whole = report_of(glm52)["index_cache_slots"];
  REQUIRE(whole.size() == 1);
  CHECK(whole[0].size() == 22);
  CHECK(whole[0]["0"] == 0);
  CHECK(whole[0]["74"] == 20);
  CHECK(whole[0]["78"] == 21);
  Json const halves = report_of(glm52, {"--stages", "0:39,39:79+import"})["index_cache_slots"];
  REQUIRE(halves.size() == 2);
  CHECK(halves[0]["38"] == 11);
  CHECK(halves[1]["42"] == 0);
  CHECK(halves[1]["78"] == 9);
  CHECK_FALSE(halves[1].contains("39"));
  CHECK(report_of(glm52, {"--stages", "38:42"})["index_cache_slots"] ==
        Json::parse(R"([{"38": 0}])"));
}

TEST_CASE("CFG-SCHED R004: inspect reports fields that disagree, by layer") {
  Json config = json_file("configs/" + glm52);
  config["index_skip_topk_offset"] = 2;
  std::string const file =
      (std::filesystem::temp_directory_path() / "indexshare_inspect_test.json").string();
  std::ofstream(file) << config.dump();
  Outcome const outcome = inspect({"--config", file, "--json"});
  std::remove(file.c_str());
  Json const diagnostics = Json::parse(outcome.out)["diagnostics"];
  REQUIRE(diagnostics.size() > 2);
  CHECK(diagnostics[0]["layer"] == 2);
  CHECK(diagnostics[0]["winner"] == "indexer_types");
  CHECK(diagnostics[0]["loser"] == "index_topk_freq");
  CHECK(mentions(diagnostics[0]["text"], "layer 2 "));
}

TEST_CASE("CFG-OTHER: inspect of the other published configs") {
  Json const glm51 = report_of("GLM-5.1.reconstructed.json");
  CHECK(glm51["full_layers"].size() == 78);
  CHECK(glm51["flops"]["absorbed"]["ratio"] == 1);
  CHECK(glm51["context"] == 202752);
  Json const deepseek = report_of("DeepSeek-V3.2.json");
  CHECK(deepseek["full_layers"].size() == 61);
  CHECK(deepseek["rope_theta"] == 10000);
  CHECK(deepseek["indexer_rope"] == Json({{"layout", "half_split"}, {"dims", {0, 64}}}));
  Json const hy = report_of("Hy4-preview.partial.json");
  CHECK(hy["full_layers"].size() == 21);
  CHECK(hy["full_layers"].back() == 77);
  CHECK(hy["indexer_rope"] == Json({{"layout", "half_split"}, {"dims", {64, 128}}}));
  CHECK(report_of("GLM-5.2-FP8.partial.json") == report_of(glm52));
}

TEST_CASE("CFG-OTHER: inspect of GLM-5.3-Flash counts nothing it has no formula for") {
  Json const report = report_of(flash);
  CHECK(report["full_layers"] == Json({3, 7, 11, 15, 19, 23, 27, 31, 35, 39, 43}));
  CHECK(report["sources"][0].is_null());
  CHECK(report["sources"][3] == 3);
  CHECK(report["diagnostics"].size() == 34);
  CHECK(report["rope_theta"].is_null());
  CHECK(report["indexer_rope"] == Json({{"layout", "none"}, {"dims", {0, 0}}}));
  CHECK(report["flops"]["absorbed"]["ratio"].is_null());
  CHECK(report["bytes"]["kv"].is_null());
  REQUIRE(report["unsupported"].size() == 3);
  CHECK(mentions(report["unsupported"][0], "layers 3, 7,"));
  CHECK(mentions(report["unsupported"][0], "index_kpool"));
  CHECK(mentions(report["unsupported"][1], "flops: "));
  CHECK(mentions(report["unsupported"][2], "bytes: "));
}

TEST_CASE("CFG-OTHER: inspect counts at the context it is given") {
  Json const report = report_of(glm52, {"--context", "128K"});
  CHECK(report["context"] == 131072);
  CHECK(report["flops"]["absorbed"]["ratio"].get<double>() == Approx(1.50).margin(0.005));
}

TEST_CASE("ROPE R026: the table for people names the rotary layout in use") {
  Outcome const glm = inspect_file(glm52);
  CHECK(glm.status == 0);
  CHECK(mentions(glm.out, "indexer interleaved on lanes 0..63"));
  CHECK(mentions(glm.out, "complete count"));
  CHECK(mentions(glm.out, "2.73"));
  CHECK(mentions(glm.out, "later draft steps"));
  CHECK(mentions(inspect_file("DeepSeek-V3.2.json").out, "indexer half_split on lanes 0..63"));
  CHECK(mentions(inspect_file("Hy4-preview.partial.json").out, "lanes 64..127"));
  CHECK(mentions(inspect_file(flash).out, "34 without sparse attention"));
  CHECK(mentions(inspect({"--help"}).out, "+import"));
}

TEST_CASE("CFG-OTHER: inspect refuses with one line that names the place") {
  std::string const line = error_of(inspect_file("DeepSeek-V4-Pro.partial.json"));
  CHECK(line.starts_with("error: $.model_type: missing"));
  CHECK(mentions(line, "DeepSeek-V4-Pro.partial.json"));
  CHECK(error_of(inspect({})).starts_with("error: --config: "));
  CHECK(mentions(error_of(inspect({"--config", "no/such\nfile"})), "no/such?file: "));
  CHECK(error_of(inspect({"--what"})).starts_with("error: \"--what\": "));
  for (char const* context : {"0", "-5", "12x", "", "3000M"})
    CHECK(error_of(inspect_file(glm52, {"--context", context})).starts_with("error: --context: "));
}

TEST_CASE("SHARE-PP R096: inspect refuses stages that are wrong or tear a group apart") {
  for (char const* stages :
       {"", "0:80", "-1:5", "5:5", "6:5", "0:38,", "0:38,40:79", "0:42,38:79", "a:b", "0-38",
        "0:38 ,38:79", "0:38,38:79+export", "39:79", "0:39,39:79"}) {
    CAPTURE(stages);
    CHECK(error_of(inspect_file(glm52, {"--stages", stages})).starts_with("error: --stages: "));
  }
  std::string const torn = error_of(inspect_file(glm52, {"--stages", "0:39,39:79"}));
  CHECK(mentions(torn, "layer 38"));
  CHECK(mentions(torn, "39:79+import"));
}

TEST_CASE("CFG-OTHER: output that cannot be written is an error") {
  std::ostringstream out;
  std::ostringstream err;
  out.setstate(std::ios::badbit);
  std::string const file = data_file("configs/" + glm52);
  char const* const words[] = {"indexshare-inspect", "--config", file.c_str()};
  CHECK(programs::inspect(3, words, out, err) == 2);
  CHECK(err.str() == "error: output: could not be written\n");
}

TEST_CASE("SHARE-PP R099: an import that nothing needs is refused") {
  CHECK(mentions(error_of(inspect_file(glm52, {"--stages", "0:79+import"})),
                 "reads no selection from below"));
  CHECK(mentions(error_of(inspect_file(glm52, {"--stages", "0:38,38:79+import"})), "layer 38"));
}

TEST_CASE("CFG-OTHER: text behind a NUL byte is not ignored") {
  std::ifstream stream(data_file("configs/" + std::string(glm52)));
  std::ostringstream text;
  text << stream.rdbuf();
  auto const config = indexshare::io::parse_config(text.str() + std::string(1, '\0') + "garbage");
  REQUIRE_FALSE(config.has_value());
  CHECK(mentions(config.error().message(), "NUL"));
}

TEST_CASE("MEM R138: inspect plans 8192 rows at 1 M keys within 256 MB, selection and scratch") {
  constexpr std::int64_t budget = 256'000'000;
  Json const memory =
      report_of(glm52, {"--rows", "8192", "--budget", std::to_string(budget)})["memory"];
  CHECK(memory["rows"] == 8192);
  CHECK(memory["keys"] == 1048576);
  CHECK(memory["selection"] >= 2 * 8192 * 2048 * 4);
  REQUIRE(memory["scratch"].size() == 4);
  for (auto const& [name, scratch] : memory["scratch"].items()) {
    CAPTURE(name);
    REQUIRE(scratch.is_number());
    CHECK(scratch > 0);
    CHECK(memory["selection"].get<std::int64_t>() + scratch.get<std::int64_t>() <= budget);
  }
  Outcome const table = inspect_file(glm52, {"--rows", "8192"});
  CHECK(mentions(table.out,
                 "memory of a call of 8192 rows at 1048576 keys, in bytes, within "
                 "268435456"));
  CHECK(mentions(table.out, "CUDA, fp8 caches"));
}

TEST_CASE("MEM: what does not fit the budget is refused with the minimum") {
  Json const none = report_of(glm52, {"--rows", "8192", "--budget", "1M"})["memory"];
  for (auto const& [name, scratch] : none["scratch"].items()) {
    CHECK(mentions(scratch["refused"], "budget of selection and scratch"));
    CHECK(scratch["expected"] == none["selection"].get<std::int64_t>() + 1);
  }
  Json const tight = report_of(glm52, {"--rows", "1", "--budget", "64K"})["memory"];
  CHECK(tight["scratch"]["CUDA, bf16 caches"]["expected"] > 1048576 * 4);
  CHECK(mentions(error_of(inspect_file(glm52, {"--budget", "1M"})), "--rows"));
  CHECK(mentions(error_of(inspect_file(glm52, {"--rows", "0"})), "--rows"));
}

TEST_CASE("MEM: inspect shows cache bytes per token and of a whole context") {
  std::string const out = inspect_file(glm52, {"--context", "128K"}).out;
  CHECK(mentions(out, "per token    at 131072 tokens"));
  CHECK(mentions(out, "index keys, all full      10296       1349517312"));
  CHECK(mentions(out, "index keys                 2772        363331584"));
  CHECK(mentions(out, "KV (sharing or not)       51168       6706692096"));
}

TEST_CASE("CFG-OTHER: inspect counts the bytes that a decoded token moves, in the forms given") {
  Json const moved = report_of(glm52)["moved_bytes"];
  CHECK(moved["all_full"]["index_keys"] == 10796138496);
  CHECK(moved["shared"]["index_keys"] == 2906652672);
  CHECK(moved["shared"]["scores"] == 21 * 8 * 1048576LL);
  CHECK(moved["shared"]["kv"] == 78 * 2048 * 656LL);
  CHECK(moved["ratio"].get<double>() == Approx(3.63).margin(0.005));
  Json const plain = report_of(glm52, {"--kv", "fp8-576"});
  CHECK(plain["bytes"]["kv"] == 44928);
  CHECK(plain["cache_forms"] == Json({{"index_key", "fp8"}, {"kv", "fp8-576"}}));
  Json const wide = report_of(glm52, {"--kv=bf16", "--index-key=f16", "--context=128K"});
  CHECK(wide["bytes"]["kv"] == 89856);
  CHECK(wide["moved_bytes"]["shared"]["index_keys"] == 672 * 1048576);
  Outcome const table = inspect_file(glm52, {"--kv", "bf16"});
  CHECK(mentions(table.out, "cache bytes, fp8 index keys, bf16 KV"));
  CHECK(mentions(table.out, "  index keys       10796.1         2906.7    3.71"));
  CHECK(mentions(error_of(inspect_file(glm52, {"--kv", "fp8"})), "--kv: got \"fp8\""));
  CHECK(mentions(error_of(inspect_file(glm52, {"--kv", "fp8"})), "fp8-656, fp8-576, bf16"));
  CHECK(error_of(inspect_file(glm52, {"--index-key", "e4m3"})).starts_with("error: --index-key: "));
}

TEST_CASE("CFG-OTHER: inspect counts a prefill row by row") {
  Json const whole = report_of(glm52, {"--prefill", "0:1M"})["prefill"];
  CHECK(whole["visible_keys"] == 549756338176);
  CHECK(whole["flops"]["absorbed"]["ratio"].get<double>() == Approx(2.274).margin(0.0005));
  Json const chunk = report_of(glm52, {"--prefill", "1000:3000"})["prefill"];
  CHECK(chunk["first"] == 1000);
  CHECK(chunk["last"] == 3000);
  CHECK(chunk["visible_keys"] == 2000 * 4001 / 2);
  CHECK(chunk["attended_keys"] == 1048 * (1001 + 2048) / 2 + 952 * 2048);
  CHECK(chunk["moved_bytes"]["shared"]["index_keys"] == 21 * 132 * 4001000LL);
  std::string const out = inspect_file(glm52, {"--prefill", "0:1M"}).out;
  CHECK(mentions(out, "GFLOP per token of a prefill of tokens 0..1048575"));
  CHECK(mentions(out, "absorbed           438.9          193.0    2.27"));
  for (char const* range : {"5", "5:5", "7:5", "-1:5", "0:3000M", "a:b", ""})
    CHECK(error_of(inspect_file(glm52, {"--prefill", range})).starts_with("error: --prefill: "));
}

TEST_CASE("CFG-OTHER: inspect shows layers and share groups") {
  Json const report = report_of(glm52, {"--layers"});
  REQUIRE(report["by_layer"].size() == 78);
  REQUIRE(report["by_group"].size() == 21);
  Json const& full = report["by_layer"][6];
  CHECK(full["source"] == 6);
  CHECK(full["flops"]["index_scoring"] == 8192 * 1048576LL);
  CHECK(full["cache_bytes"] == Json({{"index_key", 132}, {"kv", 656}}));
  Json const& shared = report["by_layer"][9];
  CHECK(shared["source"] == 6);
  CHECK(shared["flops"]["index_scoring"] == 0);
  CHECK(shared["cache_bytes"] == Json({{"index_key", 0}, {"kv", 656}}));
  Json const& group = report["by_group"][3];
  CHECK(group["layer"] == 6);
  CHECK(group["layers"] == 4);
  CHECK(group["cache_bytes"] == Json({{"index_key", 132}, {"kv", 4 * 656}}));
  CHECK(group["moved_bytes"]["kv"] == 4 * 2048 * 656);
  double total = report["flops"]["absorbed"]["shared"].get<double>() - 2.0 * 154880 * 6144;
  for (Json const& one : report["by_group"]) total -= one["flops"]["total"].get<double>();
  CHECK(std::abs(total) < 1);
  Json const prefill = report_of(glm52, {"--layers", "--prefill", "0:10"});
  CHECK(prefill["by_layer"][6]["flops"]["index_scoring"] == 8192 * 55);
  CHECK(mentions(inspect_file(glm52, {"--layers"}).out, "by layer, absorbed core"));
  CHECK_FALSE(report_of(glm52).contains("by_layer"));
}

TEST_CASE("CFG-OTHER: inspect lists accountings, and those that give a published ratio") {
  std::vector<std::string> const words{
      "--accounting",        "all",  "--indexers",  "21,19.5,20,22",
      "--active-parameters", "40e9", "--published", "2.9"};
  Json const report = report_of(glm52, words);
  REQUIRE(report["accountings"].size() == 13);
  CHECK(report["accountings"][3]["name"] == "no-core");
  CHECK(report["accountings"][3]["indexers"][0]["ratio"].get<double>() ==
        Approx(2.880).margin(0.0005));
  Json const& matches = report["published"]["given_by"];
  CHECK(report["published"]["decimals"] == 1);
  std::vector<std::string> found;
  for (Json const& match : matches)
    found.push_back(match["name"].get<std::string>() + " " + match["full_layers"].dump());
  for (char const* expected : {"no-core 21.0", "complete-absorbed 19.5", "complete-expanded 20.0",
                               "active-parameters 21.0"})
    CHECK(std::count(found.begin(), found.end(), expected) == 1);
  for (char const* other : {"complete-absorbed 21.0", "complete-expanded 21.0"})
    CHECK(std::count(found.begin(), found.end(), other) == 0);
  std::string const out = inspect_file(glm52, words).out;
  CHECK(mentions(out, "that give 2.9, rounded once\n"));
  CHECK(mentions(out, "  78 : 21      2.880  no-core: "));

  Json const one = report_of(glm52, {"--accounting", "no-head"});
  REQUIRE(one["accountings"].size() == 1);
  REQUIRE(one["accountings"][0]["indexers"].size() == 3);  // 21, 19.5, 20
  CHECK(one["accountings"][0]["indexers"][1]["full_layers"] == 19.5);
  CHECK_FALSE(one.contains("published"));
  CHECK(report_of(glm52, {"--accounting", "all"})["accountings"].size() == 11);
  CHECK(mentions(inspect_file(glm52, {"--published", "9.9"}).out, "rounded once: none\n"));
}

TEST_CASE("CFG-OTHER: options for costs that are wrong are named") {
  auto const refused = [](std::vector<std::string> const& words, std::string const& option,
                          std::string const& reason = "") {
    CAPTURE(words);
    std::string const line = error_of(inspect_file(glm52, words));
    CHECK(line.starts_with("error: " + option + ": "));
    CHECK(mentions(line, reason));
  };
  refused({"--accounting", "everything"}, "--accounting", "no-core-no-head");
  refused({"--accounting", "active-parameters"}, "--active-parameters", "missing");
  refused({"--indexers", "21"}, "--indexers", "--accounting");
  refused({"--active-parameters", "40e9"}, "--active-parameters", "--accounting");
  for (char const* counts : {"", "0", "0.5", "79", "21,", "a", "21;20"})
    refused({"--published", "2.9", "--indexers", counts}, "--indexers", "from 1 to 78");
  for (char const* ratio : {"", "0.5", "2,9", "2.9x", "1e1", "nan", "2.9.1", "2.1234567"})
    refused({"--published", ratio}, "--published", "such as 2.9");
  refused({"--accounting", "all", "--active-parameters", "40B"}, "--active-parameters");
  refused({"--context", "8K", "--svg", "x.svg"}, "--svg", "16K");
  refused({"--svg", data_file("configs/" + glm52)}, "--svg", "one of the inputs");
  refused({"--svg", "/nonexistent/x.svg"}, "--svg", "\"/nonexistent/x.svg\"");
  for (char const* option : {"--layers", "--prefill=0:5", "--accounting=all", "--published=2.9",
                             "--svg=/nonexistent/x.svg"})
    CHECK(mentions(error_of(inspect_file(flash, {option})), "linear-attention"));
  Json config = json_file("configs/" + glm52);
  config.erase("max_position_embeddings");
  std::string const file =
      (std::filesystem::temp_directory_path() / "indexshare_inspect_length.json").string();
  std::ofstream(file) << config.dump();
  CHECK(error_of(inspect({"--config", file, "--layers"})).starts_with("error: --context: missing"));
  CHECK(inspect({"--config", file, "--layers", "--prefill", "0:5"}).status == 0);
  std::remove(file.c_str());
}

TEST_CASE("CFG-OTHER: inspect draws costs against the context") {
  auto const directory = std::filesystem::temp_directory_path() / "indexshare_inspect_svg";
  std::filesystem::create_directories(directory);
  std::string const file = (directory / "costs.svg").string();
  std::ofstream(file) << "an older drawing";
  Outcome const outcome = inspect_file(glm52, {"--svg", file});
  CHECK(outcome.status == 0);
  std::ostringstream text;
  text << std::ifstream(file).rdbuf();
  std::string const drawing = text.str();
  CHECK(drawing.starts_with("<svg "));
  CHECK(drawing.ends_with("</svg>\n"));
  for (char const* words : {">8K<", ">1M<", "visible keys", "GFLOP", "GB: fp8 index keys",
                            ">2.73x less<", ">3.63x less<", "21 of 78 layers"})
    CHECK(mentions(drawing, words));
  CHECK(std::distance(std::filesystem::directory_iterator(directory), {}) == 1);  // nothing beside
  std::ostringstream committed;
  committed << std::ifstream(data_file("../docs/accounting.svg")).rdbuf();
  CHECK(committed.str() == drawing);
  std::filesystem::remove_all(directory);
}
