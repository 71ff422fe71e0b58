// SPDX-License-Identifier: Apache-2.0
#include "overlap.hpp"

#include <nlohmann/json.hpp>

#include <catch2/catch_approx.hpp>
#include <catch2/catch_test_macros.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>

#include "checkpoint_files.hpp"
#include "selections.hpp"

#include <algorithm>
#include <cstddef>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

using Catch::Approx;
using Catch::Matchers::ContainsSubstring;
using Catch::Matchers::EndsWith;
using Catch::Matchers::StartsWith;
using namespace programs;
using test::MadeSelections;
using test::TempDirectory;

namespace {

struct Outcome {
  int status;
  std::string out;
  std::string err;
};

Outcome run(std::vector<std::string> words) {
  words.insert(words.begin(), "indexshare-overlap");
  std::vector<char const*> pointers;
  for (std::string const& word : words) pointers.push_back(word.c_str());
  std::ostringstream out;
  std::ostringstream err;
  int const status = overlap(static_cast<int>(pointers.size()), pointers.data(), out, err);
  return {status, out.str(), err.str()};
}

/// The one line of an error.
std::string error(std::vector<std::string> words) {
  Outcome const failed = run(std::move(words));
  CHECK(failed.status == 2);
  CHECK(failed.out.empty());
  CHECK(std::count(failed.err.begin(), failed.err.end(), '\n') == 1);
  CHECK_THAT(failed.err, StartsWith("error: ") && EndsWith("\n"));
  return failed.err;
}

std::string content_of(std::string const& path) {
  std::ifstream stream(path, std::ios::binary);
  std::ostringstream text;
  text << stream.rdbuf();
  return text.str();
}

std::size_t occurrences(std::string const& text, std::string const& word) {
  std::size_t count = 0;
  for (std::size_t at = text.find(word); at != std::string::npos; at = text.find(word, at + 1))
    ++count;
  return count;
}

/// 4 layers, 2 rows of 4 picks: the first sees 8 keys, the second sees 4.
MadeSelections sample() {
  MadeSelections made{4, 2, 4, {}, {8, 4}};
  made.positions = {0, 1, 2, 3, 0, 1, 2, 3,   // layer 0
                    0, 1, 2, 4, 0, 1, 2, 3,   // 3 of layer 0's
                    0, 1, 5, 4, 0, 1, 2, 3,   // 3 of layer 1's, 2 of layer 0's
                    7, 6, 5, 4, 0, 1, 2, 3};  // 2 of layer 2's, 1 of layer 1's
  return made;
}

std::string written(TempDirectory const& directory, std::string const& name,
                    MadeSelections const& made) {
  REQUIRE(made.writer().write(directory.file(name)).has_value());
  return directory.file(name);
}

}  // namespace

TEST_CASE("Overlap program: the table has every layer, its source, and lags") {
  TempDirectory const directory;
  std::string const file = written(directory, "a.safetensors", sample());
  Outcome const plain = run({file, "--skip-short", "--threads", "2"});
  CHECK(plain.status == 0);
  CHECK(plain.err.empty());
  CHECK(plain.out ==
        "1 file, 4 of 4 layers, top_k 4; 1 rows counted, 1 left out; 1 select every key they see\n"
        "random selections of these sizes would overlap 0.500\n"
        "\n"
        "layer  with layer below\n"
        "    0                 -\n"
        "    1             0.750\n"
        "    2             0.750\n"
        "    3             0.500\n"
        "\n"
        "  lag   pairs    mean     min     max\n"
        "    1       3   0.667   0.500   0.750\n"
        "    2       2   0.375   0.250   0.500\n"
        "    3       1   0.000   0.000   0.000\n"
        "  all       6   0.458   0.000   0.750\n");
  Outcome const judged = run({"--pattern", "FFSS", "--skip-short", file});
  CHECK(judged.status == 0);
  CHECK_THAT(judged.out,
             ContainsSubstring("layer  role    source  with source  with layer below\n"
                               "    0  full         -            -                 -\n"
                               "    1  full         -            -             0.750\n"
                               "    2  shared       1        0.750             0.750\n"
                               "    3  shared       1        0.250             0.500\n") &&
                 EndsWith("mean overlap of 2 shared layers with their sources: 0.500\n"));
  CHECK_THAT(run({file}).out, ContainsSubstring("2 rows counted, 0 left out") &&
                                  ContainsSubstring("    3             0.750\n"));
}

TEST_CASE("Overlap program: several files, a directory and JSON") {
  TempDirectory const directory;
  std::filesystem::create_directory(directory.file("set"));
  auto const made = test::random_selections(5, 30, 6, 40, false, 1);
  written(directory, "set/a.safetensors", made.rows_from(0, 11));
  written(directory, "set/b.safetensors", made.rows_from(11, 19));
  directory.write("set/notes.txt", "not one of the files");
  std::string const json = directory.file("o.json");
  std::string const whole = written(directory, "whole.safetensors", made);
  Outcome const outcome =
      run({directory.file("set"), "--json", json, "--pattern=FSFSS", "--threads", "3"});
  INFO(outcome.err);
  REQUIRE(outcome.status == 0);
  auto const report = nlohmann::json::parse(content_of(json));
  CHECK(report["format"] == "indexshare-overlap-1");
  CHECK(report["files"].size() == 2);
  CHECK(report["layers"] == 5);
  CHECK(report["layer_numbers"] == std::vector<int>{0, 1, 2, 3, 4});
  CHECK(report["top_k"] == 6);
  CHECK(report["rows"].get<int>() + report["rows_skipped"].get<int>() == 30);
  CHECK(report["rows_short"].get<int>() > 0);
  REQUIRE(report["overlap"].size() == 5);
  indexshare::indexcache::OverlapCounter counter(5);
  REQUIRE(counter.add(made.view()).ok());
  CHECK(report["overlap"][3][1] == counter.counts().overlap(3, 1));
  CHECK(report["overlap"][1][3] == counter.counts().overlap(3, 1));
  CHECK(report["random_overlap"].get<double>() == *counter.counts().random_overlap());
  REQUIRE(report["sources"].size() == 3);
  CHECK(report["sources"][2]["layer"] == 4);
  CHECK(report["sources"][2]["source"] == 2);
  CHECK(report["sources"][2]["overlap"] == counter.counts().overlap(4, 2));
  auto const overlap_of = [&](int i, int j) { return counter.counts().overlap(i, j); };
  CHECK(report["mean_source_overlap"].get<double>() ==
        Approx((overlap_of(1, 0) + overlap_of(3, 2) + overlap_of(4, 2)) / 3));
  REQUIRE(report["lags"].size() == 4);
  CHECK(report["lags"][1]["pairs"] == 3);

  // one file of all rows says the same
  std::string const other = directory.file("w.json");
  REQUIRE(run({whole, "--json", other, "--pattern=FSFSS"}).status == 0);
  CHECK(nlohmann::json::parse(content_of(other))["overlap"] == report["overlap"]);
}

TEST_CASE("Overlap program: a model that shared while it was recorded is pointed out") {
  TempDirectory const directory;
  auto made = sample();
  for (indexshare::index_t row = 0; row < 2; ++row) {
    for (indexshare::index_t i = 0; i < 4; ++i) made.at(1, row, i) = made.at(0, row, i);
  }
  std::string const file = written(directory, "a.safetensors", made);
  CHECK_THAT(run({file, "--pattern", "FSFF"}).out, ContainsSubstring("recorded while they shared"));
  CHECK_THAT(run({file, "--pattern", "FSFS"}).out, !ContainsSubstring("while they shared"));
}

TEST_CASE("Overlap program: the heat map has cells, axes, boxes and a colour bar") {
  TempDirectory const directory;
  std::string const file = written(directory, "a.safetensors", sample());
  std::string const svg = directory.file("o.svg");
  REQUIRE(run({file, "--skip-short", "--svg", svg, "--pattern", "FFSS"}).status == 0);
  std::string const small = content_of(svg);
  CHECK_THAT(small, StartsWith("<svg ") && EndsWith("</svg>\n"));
  CHECK(occurrences(small, ">75</text>") == 4);  // two pairs, above and below the diagonal
  CHECK(occurrences(small, ">layer</text>") == 2);
  CHECK(occurrences(small, ">overlap</text>") == 1);
  CHECK(occurrences(small, ">75: 0.75</text>") == 1);    // the largest
  CHECK(occurrences(small, "stroke=\"#e6550d\"") == 2);  // layer 0, layers 1 to 3
  CHECK_THAT(small, ContainsSubstring("a layer with its source, mean 0.500"));

  // Cells of many layers are too small for digits; every other layer's number is there.
  auto const made = test::random_selections(78, 3, 4, 40, false, 2);
  std::string const many = written(directory, "b.safetensors", made);
  REQUIRE(run({many, "--svg", svg}).status == 0);
  std::string const large = content_of(svg);
  CHECK(occurrences(large, ">76</text>") == 2);
  CHECK(occurrences(large, ">77</text>") == 0);
  CHECK(occurrences(large, "<rect ") > 78 * 78);
  CHECK(occurrences(large, "stroke=\"#e6550d\"") == 0);
}

TEST_CASE("Overlap program: errors name the option, the file and the place in it") {
  TempDirectory const directory;
  std::string const file = written(directory, "a.safetensors", sample());
  CHECK_THAT(error({}), ContainsSubstring("files: got none"));
  CHECK_THAT(error({directory.file("none")}), ContainsSubstring("none: got no readable file"));
  std::filesystem::create_directory(directory.file("empty"));
  CHECK_THAT(error({directory.file("empty")}), ContainsSubstring("no *.safetensors in"));
  CHECK_THAT(error({file, "--thread", "2"}), ContainsSubstring("unknown option"));
  CHECK_THAT(error({file, "--threads", "0"}), ContainsSubstring("--threads"));
  CHECK_THAT(error({file, "--pattern", "FFXS"}), ContainsSubstring("--pattern: got 'X' for layer"));
  CHECK_THAT(error({file, "--pattern", "FFS"}),
             ContainsSubstring("--pattern: got a schedule of 3 layers, expected 4 as in"));
  CHECK_THAT(error({file, "--pattern", "FFSS", "--config", "x"}), ContainsSubstring("--pattern"));
  CHECK_THAT(error({file, "--config", directory.file("none")}), ContainsSubstring("--config"));
  std::string const other = INDEXSHARE_TEST_DATA_DIR "/configs/GLM-5.2.json";
  CHECK_THAT(error({file, "--config", other}), ContainsSubstring("of 78 layers, expected 4"));

  auto wide = sample();
  wide.top_k = 8;
  wide.rows = 1;
  wide.lengths = {9};
  CHECK_THAT(error({file, written(directory, "b.safetensors", wide)}),
             ContainsSubstring("b.safetensors: got top_k 8, expected top_k 4, as in") &&
                 ContainsSubstring("a.safetensors"));
  auto broken = sample();
  broken.at(2, 1, 3) = 4;
  CHECK_THAT(error({file, written(directory, "c.safetensors", broken)}),
             ContainsSubstring("c.safetensors: tensor selection.layer.2: got entry 4 in row 1"));
}

TEST_CASE("Overlap program: a file of selections is not written over") {
  TempDirectory const directory;
  std::string const file = written(directory, "a.safetensors", sample());
  std::string const before = content_of(file);
  for (std::string const option : {"--json", "--svg"}) {
    CHECK_THAT(error({file, option, file}), ContainsSubstring(option + ": got ") &&
                                                ContainsSubstring("one of the files to read"));
    CHECK_THAT(error({directory.string(), option, file}), ContainsSubstring(option));
    Outcome const unwritable = run({file, option, directory.file("no/such")});
    CHECK(unwritable.status == 2);
    CHECK_THAT(unwritable.err, ContainsSubstring(option + ": cannot write"));
  }
  CHECK(content_of(file) == before);
}

TEST_CASE("Overlap program: two outputs in one file are refused, under whatever name") {
  TempDirectory const directory;
  std::string const file = written(directory, "a.safetensors", sample());
  std::string const same = directory.file("same");
  for (std::string const& other : {same, directory.file("./same")}) {
    CHECK_THAT(error({file, "--json", same, "--svg", other}),
               ContainsSubstring("--svg: got ") && ContainsSubstring("the file of --json too"));
    CHECK_FALSE(std::filesystem::exists(same));
  }
  directory.write("same", "kept");
  std::filesystem::create_hard_link(same, directory.file("link"));
  CHECK_THAT(error({file, "--json", same, "--svg", directory.file("link")}),
             ContainsSubstring("--svg: got "));
  CHECK(content_of(same) == "kept");
  CHECK(run({file, "--json", same, "--svg", directory.file("other")}).status == 0);
}

TEST_CASE("Overlap program: no counted row is an error that says why") {
  TempDirectory const directory;
  auto made = sample();
  made.lengths = {4, 4};
  for (indexshare::index_t layer = 0; layer < 4; ++layer) {
    for (indexshare::index_t i = 0; i < 4; ++i) {
      made.at(layer, 0, i) = static_cast<indexshare::position_t>(i);
    }
  }
  std::string const file = written(directory, "a.safetensors", made);
  std::string const svg = directory.file("o.svg");
  CHECK_THAT(error({file, "--skip-short", "--svg", svg}),
             ContainsSubstring("--skip-short: no row was counted: 2 rows left out since they "
                               "select every key they see"));
  CHECK_FALSE(std::filesystem::exists(svg));
  CHECK(run({file}).status == 0);
  MadeSelections const none{4, 0, 4, {}, {}};
  CHECK_THAT(error({written(directory, "b.safetensors", none)}),
             ContainsSubstring("files: no row was counted: the files have none"));
}
