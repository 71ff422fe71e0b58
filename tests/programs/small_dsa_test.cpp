// SPDX-License-Identifier: Apache-2.0
#include "../small_dsa/check_file.hpp"
#include "../small_dsa/evaluator.hpp"
#include "../small_dsa/program.hpp"
#include "small_dsa_files.hpp"

#include <indexshare/io/selection_file.hpp>

#include <catch2/catch_approx.hpp>
#include <catch2/catch_test_macros.hpp>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <limits>
#include <map>
#include <optional>
#include <set>
#include <sstream>
#include <string>
#include <vector>

namespace {

using namespace small_dsa;

Choices choices(std::string const& text) { return parse_choices(text).value(); }

struct TinyModel {
  explicit TinyModel(index_t layers = 4) {
    test::SmallDsaFiles(layers).write(directory);
    auto loaded = Model::load(directory.string());
    INFO((loaded ? std::string() : loaded.error()));
    REQUIRE(loaded.has_value());
    model.emplace(std::move(*loaded));
  }
  test::TempDirectory directory;
  std::optional<Model> model;
};

std::vector<Sequence> some_sequences(std::int32_t count) {
  return make_sequences(test::SmallDsaFiles::task(), 3, count);
}

TEST_CASE("a query's answer is reached by following the records") {
  TaskSizes const sizes{20, 13, 40, 4};
  std::set<std::int32_t> hops_seen;
  for (Sequence const& sequence : make_sequences(sizes, 5, 4)) {
    REQUIRE(sequence.tokens() == 53);
    std::map<std::int32_t, std::int32_t> next;
    for (std::size_t token = 0; token < 13; ++token) {
      CHECK(sequence.hops[token] == 0);
      CHECK(sequence.target[token] == Sequence::no_target);
      next[sequence.key[token]] = sequence.value[token];
    }
    REQUIRE(next.size() == 13);
    for (std::size_t token = 13; token < sequence.tokens(); ++token) {
      CHECK(sequence.value[token] == sizes.keys);
      std::int32_t key = sequence.key[token];
      for (std::int32_t hop = 0; hop < sequence.hops[token]; ++hop) key = next.at(key);
      CHECK(sequence.target[token] == key);
      hops_seen.insert(sequence.hops[token]);
    }
  }
  CHECK(hops_seen == std::set<std::int32_t>{1, 2, 3, 4});
}

TEST_CASE("a record's value is the key of another record, in one cycle") {
  TaskSizes const sizes{20, 13, 1, 2};
  Sequence const sequence = make_sequence(sizes, 5, 2);
  std::map<std::int32_t, std::int32_t> next;
  for (std::size_t token = 0; token < 13; ++token)
    next[sequence.key[token]] = sequence.value[token];
  std::int32_t key = sequence.key[0];
  int steps = 0;
  do key = next.at(key);
  while (++steps < 20 && key != sequence.key[0]);
  CHECK(steps == 13);
}

TEST_CASE("sequences depend on seed and number alone, and differ") {
  TaskSizes const sizes{20, 13, 8, 4};
  auto const few = make_sequences(sizes, 5, 2);
  auto const many = make_sequences(sizes, 5, 6);
  CHECK(few[1] == many[1]);
  for (auto const& held_out : make_sequences(sizes, 6, 6)) {
    for (auto const& sequence : many) CHECK(held_out != sequence);
  }
  CHECK(many[0].key != many[1].key);
}

TEST_CASE("choices as text") {
  CHECK(text_of(choices("FSRSF")) == "FSRSF");
  CHECK_FALSE(parse_choices("SF"));
  CHECK_FALSE(parse_choices("FX"));
  CHECK_FALSE(parse_choices(""));
  CHECK(first_difference(choices("FFSS"), choices("FFFS")) == 2);
  CHECK(first_difference(choices("FFSS"), choices("FFSS")) == 4);
  auto const plan = share_plan(choices("FSRSF"));
  CHECK(share_source(plan, 1) == 0);
  CHECK(share_source(plan, 3) == 2);
  CHECK(share_source(plan, 4) == 4);
}

TEST_CASE("scores do not depend on threads, on neighbours or on what is kept") {
  TinyModel const tiny;
  programs::ThreadPool one(1), three(3);
  std::vector<Choices> candidates;
  for (char const* const text : {"FFFF", "FSFF", "FFSF", "FFFS", "FSSF", "FRSF", "FSSR", "FSSS"}) {
    candidates.push_back(choices(text));
  }
  std::vector<Score> alone;
  for (Choices const& candidate : candidates) {
    Evaluator evaluator(*tiny.model, some_sequences(5), one);
    auto const score = evaluator.evaluate(candidate);
    REQUIRE(score.has_value());
    CHECK(std::isfinite(score->loss));
    alone.push_back(*score);
  }
  std::set<double> losses;
  for (Score const& score : alone) losses.insert(score.loss);
  CHECK(losses.size() == alone.size());

  Evaluator evaluator(*tiny.model, some_sequences(5), three);
  for (char const* const base : {"", "FFFF", "FSFF", "FSFF", "FSSF", "FRSF", "FFFF"}) {
    INFO("kept " << base);
    if (*base != '\0') REQUIRE(evaluator.keep(choices(base)).has_value());
    auto const scores = evaluator.evaluate(candidates);
    REQUIRE(scores.has_value());
    CHECK(*scores == alone);
  }
}

TEST_CASE("random selections differ between layers, sequences and rows") {
  TinyModel const tiny;
  programs::ThreadPool pool(1);
  Evaluator evaluator(*tiny.model, some_sequences(2), pool);
  auto const selections = evaluator.selections(choices("RRSR"));
  REQUIRE(selections.has_value());
  constexpr std::size_t top_k = 3, tokens = 14;
  auto const layer = [&](std::size_t sequence, std::size_t number) {
    auto const begin =
        (*selections)[sequence].begin() + static_cast<std::ptrdiff_t>(number * tokens * top_k);
    return std::vector<position_t>(begin, begin + tokens * top_k);
  };
  CHECK(layer(0, 0) != layer(0, 1));
  CHECK(layer(0, 2) == layer(0, 1));
  CHECK(layer(0, 3) != layer(0, 1));
  CHECK(layer(0, 0) != layer(1, 0));
  std::set<std::vector<position_t>> rows;
  for (std::size_t row = top_k; row < tokens; ++row) {
    std::vector<position_t> picks;
    for (std::size_t i = 0; i < top_k; ++i) picks.push_back(layer(0, 0)[row * top_k + i]);
    CHECK(std::set(picks.begin(), picks.end()).size() == top_k);
    CHECK((picks.front() >= 0 && picks.back() <= static_cast<position_t>(row)));
    rows.insert(picks);
  }
  CHECK(rows.size() > 5);
}

TEST_CASE("layers that agree with what is kept are not run again") {
  TinyModel const tiny;
  programs::ThreadPool pool(1);
  Evaluator evaluator(*tiny.model, some_sequences(3), pool);
  auto const layers_of = [&](auto const& step) {
    std::int64_t const before = evaluator.layers_run();
    REQUIRE(step().has_value());
    return (evaluator.layers_run() - before) / 3;
  };
  CHECK(layers_of([&] { return evaluator.evaluate(choices("FFSF")); }) == 4);
  CHECK(layers_of([&] { return evaluator.keep(choices("FFFF")); }) == 4);
  CHECK(layers_of([&] { return evaluator.keep(choices("FFFF")); }) == 0);
  CHECK(layers_of([&] { return evaluator.evaluate(choices("FFSF")); }) == 2);
  CHECK(layers_of([&] { return evaluator.evaluate(choices("FFFF")); }) == 1);
  CHECK(layers_of([&] { return evaluator.keep(choices("FFSF")); }) == 2);
  CHECK(layers_of([&] { return evaluator.evaluate(choices("FFSS")); }) == 1);
}

/// Replaces the last element of a tensor of floats.
void write_last_element(std::string const& path, std::string const& tensor, float value) {
  std::fstream stream(path, std::ios::in | std::ios::out | std::ios::binary);
  std::uint64_t header_size = 0;
  stream.read(reinterpret_cast<char*>(&header_size), sizeof header_size);
  std::string header(header_size, ' ');
  stream.read(header.data(), static_cast<std::streamsize>(header_size));
  std::uint64_t const end = nlohmann::json::parse(header)[tensor]["data_offsets"][1];
  stream.seekp(static_cast<std::streamoff>(sizeof header_size + header_size + end - sizeof value));
  stream.write(reinterpret_cast<char const*>(&value), sizeof value);
  REQUIRE(stream.good());
}

TEST_CASE("a model's files are refused with file and field or tensor") {
  auto const refusal = [](auto const& spoil) {
    test::TempDirectory const directory;
    test::SmallDsaFiles files;
    spoil(files);
    files.write(directory);
    auto const model = Model::load(directory.string());
    REQUIRE_FALSE(model.has_value());
    CHECK(model.error().starts_with(directory.string()));
    return model.error().substr(directory.string().size());
  };
  CHECK(refusal([](auto& files) { files.config().erase("small_dsa"); }) ==
        "/config.json: $.small_dsa.keys: missing, expected the task that the model was trained on");
  CHECK(refusal([](auto& files) { files.config()["small_dsa"]["queries"] = 0; }) ==
        "/config.json: $.small_dsa.queries: got 0, expected a whole number from 1 to 65536");
  CHECK(refusal([](auto& files) { files.config()["small_dsa"]["records"] = 12; }) ==
        "/config.json: $.small_dsa.records: got 12, expected at most keys (11)");
  CHECK(refusal([](auto& files) {
          files.config()["indexer_types"][2] = "shared";
        }).starts_with("/config.json: $.indexer_types: got shared layers"));
  CHECK(refusal([](auto& files) {
          files.config()["index_topk"] = 0;
        }).starts_with("/config.json: $.index_topk: got 0"));
  CHECK(refusal([](auto& files) { files.config()["intermediate_size"] = 24; }) ==
        "/model.safetensors: tensor model.layers.0.mlp.gate_proj.weight: got shape [20, 16], "
        "expected [24, 16]");
  CHECK(refusal([](auto& files) { files.config()["v_head_dim"] = 4; })
            .starts_with("/model.safetensors: layer 0: tensor "
                         "model.layers.0.self_attn.kv_b_proj.weight: got "));
  for (char const* const name : {"model.layers.2.mlp.up_proj.weight", "lm_head.weight",
                                 "model.layers.1.self_attn.indexer.wk.weight"}) {
    for (float const value :
         {std::numeric_limits<float>::quiet_NaN(), -std::numeric_limits<float>::infinity()}) {
      test::TempDirectory const directory;
      test::SmallDsaFiles().write(directory);
      std::string const file = directory.file("model.safetensors");
      write_last_element(file, name, value);
      auto const model = Model::load(directory.string());
      REQUIRE_FALSE(model.has_value());
      CHECK(model.error() ==
            file + ": tensor " + name + ": got a NaN or an infinity, expected finite weights");
    }
  }
  auto const nowhere = Model::load("/nonexistent");
  REQUIRE_FALSE(nowhere.has_value());
  CHECK(nowhere.error().starts_with("/nonexistent/config.json: "));
}

std::string trained_model(int seed) {
  return std::string(INDEXSHARE_TEST_DATA_DIR) + "/../examples/small_dsa/seed" +
         std::to_string(seed);
}

/// Losses of all query rows, [sequences, queries].
std::vector<double> row_losses(Model const& model, std::vector<Sequence> const& sequences,
                               Choices const& pattern) {
  Forward forward(model);
  auto const plan = share_plan(pattern);
  std::vector<double> losses;
  for (Sequence const& sequence : sequences) {
    forward.begin(sequence);
    for (std::int32_t layer = 0; layer < model.layers(); ++layer) {
      REQUIRE(forward.layer(plan, layer, pattern[static_cast<std::size_t>(layer)], 0).ok());
    }
    Outcome outcome;
    REQUIRE(forward.outcome(sequence, outcome).ok());
    losses.insert(losses.end(), outcome.losses.begin(), outcome.losses.end());
  }
  return losses;
}

// The library's layers against PyTorch's: another implementation of the same modules. Where the
// scores of two keys are so close that rounding decides which of them is selected last, a row may
// go another way; few do, fewest where every layer selects for itself, as the model was trained.
TEST_CASE("trained models have the losses that their training program computed") {
  for (int const seed : {1, 2, 3}) {
    std::string const directory = trained_model(seed);
    INFO(directory);
    auto const model = Model::load(directory);
    REQUIRE(model.has_value());
    auto const check = read_check_file(*model, directory + "/check.safetensors");
    INFO((check ? std::string() : check.error()));
    REQUIRE(check.has_value());
    std::set<std::string> patterns;
    for (auto const& [pattern, expected] : check->losses) {
      patterns.insert(text_of(pattern));
      INFO(text_of(pattern));
      auto const losses = row_losses(*model, check->sequences, pattern);
      REQUIRE(losses.size() == expected.size());
      std::size_t other = 0;
      for (std::size_t row = 0; row < losses.size(); ++row) {
        double const torch = expected[row];
        if (std::abs(losses[row] - torch) > 2e-4 * std::max(1.0, torch)) ++other;
      }
      bool const all_full = text_of(pattern).find('S') == std::string::npos;
      CHECK(other <= (all_full ? losses.size() / 40 : losses.size() / 10));
    }
    CHECK(patterns.contains("FFFFFFFFFFFF"));
    CHECK(patterns.size() >= 4);
  }
}

TEST_CASE("random keys in place of a trained model's own cost much") {
  auto const model = Model::load(trained_model(1));
  REQUIRE(model.has_value());
  programs::ThreadPool pool(2);
  Evaluator evaluator(*model, make_sequences(model->task(), held_out_seed, 8), pool);
  auto const layers = static_cast<std::size_t>(model->layers());
  auto const own = evaluator.evaluate(Choices(layers, Choice::full));
  auto const random = evaluator.evaluate(Choices(layers, Choice::random));
  REQUIRE((own.has_value() && random.has_value()));
  CHECK(own->accuracy > 0.9);
  CHECK(random->accuracy < 0.2);
  CHECK(random->loss > own->loss + 1);
}

/// The program in this process. Words of `line` are separated by one space.
struct Ran {
  explicit Ran(std::string const& line, std::string const& input = "") {
    std::vector<std::string> words{"small_dsa"};
    std::istringstream stream(line);
    for (std::string word; stream >> word;) words.push_back(word);
    std::vector<char const*> argv;
    for (std::string const& word : words) argv.push_back(word.c_str());
    std::istringstream in(input);
    std::ostringstream out_stream, err_stream;
    status = run(static_cast<int>(argv.size()), argv.data(), in, out_stream, err_stream);
    out = out_stream.str();
    err = err_stream.str();
  }
  int status = 0;
  std::string out;
  std::string err;
};

std::string content(std::string const& file) {
  std::ifstream stream(file, std::ios::binary);
  return {std::istreambuf_iterator<char>(stream), {}};
}

TEST_CASE("small_dsa search goes on from the log of one that was killed") {
  TinyModel const tiny;
  std::string const base = "search --model " + tiny.directory.string() + " --sequences 3 --log ";
  std::string const whole = tiny.directory.file("whole.log");
  Ran const first(base + whole);
  REQUIRE(first.status == 0);
  CHECK(first.out.find("step  3: layer ") != std::string::npos);
  CHECK(first.err.find("step 3 of 3, loss 7 of 7: ") != std::string::npos);
  std::string const log = content(whole);
  for (std::size_t const cut : {log.size() / 3, log.size() / 2, log.size() - 1}) {
    tiny.directory.write("cut.log", log.substr(0, cut));
    Ran const second(base + tiny.directory.file("cut.log") + " --resume");
    CHECK(second.status == 0);
    CHECK(second.out == first.out);
    CHECK(content(tiny.directory.file("cut.log")) == log);
  }
  CHECK(Ran(base + whole).err.starts_with("error: --log: "));  // it is not overwritten
  CHECK(content(whole) == log);
  Ran const other("search --model " + tiny.directory.string() + " --sequences 4 --resume --log " +
                  whole);
  CHECK(other.err.find("the log is of another search: name") != std::string::npos);
}

TEST_CASE("small_dsa serve gives the losses that a search in the program sees") {
  TinyModel const tiny;
  std::string const model = " --model " + tiny.directory.string() + " --sequences 3";
  Ran const served(
      "serve" + model,
      "hello indexshare-search 1 4\nevaluate 0 FFFF 0\naccepted FFFF\n"
      "evaluate 1 FFSF 2\nevaluate 2 FFS 2\nevaluate 3 SFFF 2\nbye\nevaluate 3 FFFF 0\n");
  CHECK(served.status == 0);
  Ran const searched("search" + model + " --shared 1 --log " + tiny.directory.file("log"));
  REQUIRE(searched.status == 0);
  std::istringstream log(content(tiny.directory.file("log")));
  std::map<std::pair<int, int>, std::string> losses;  // by step and layer
  std::string line;
  std::getline(log, line);
  while (std::getline(log, line)) {
    auto const json = nlohmann::json::parse(line);
    losses[{json["step"], json.value("layer", 0)}] = json["loss"].dump();
  }
  CHECK(served.out ==
        "loss 0 " + losses.at({0, 0}) + "\nloss 1 " + losses.at({1, 2}) +
            "\nerror 2 got \"FFS\", expected 4 letters F, S or R, the first of them not S"
            "\nerror 3 got \"SFFF\", expected 4 letters F, S or R, the first of them not S\n");
  CHECK(Ran("serve" + model, "hello indexshare-search 1 12\n").err.starts_with("error: input: "));
}

TEST_CASE("small_dsa experiment compares patterns of equal numbers of full layers") {
  TinyModel const tiny(8);
  std::string const json_file = tiny.directory.file("result.json");
  std::string const words = "experiment --model " + tiny.directory.string() +
                            " --sequences 3 --held-out-sequences 4 --random-patterns 2 --json ";
  Ran const ran(words + json_file);
  INFO(ran.err);
  REQUIRE(ran.status == 0);
  auto const json = nlohmann::json::parse(content(json_file));
  REQUIRE(json["steps"].size() == 7);
  Evaluator held_out = [&] {
    static programs::ThreadPool pool(1);
    return Evaluator(*tiny.model, make_sequences(tiny.model->task(), held_out_seed, 4), pool);
  }();
  std::vector<std::size_t> full;
  auto const check_entry = [&](nlohmann::json const& entry) {
    std::string const pattern = entry["pattern"];
    INFO(entry.dump());
    CHECK(entry["held_out"]["loss"] == held_out.evaluate(choices(pattern))->loss);
    return pattern;
  };
  for (auto const& budget : json["budgets"]) {
    full.push_back(budget["full_layers"]);
    std::set<std::string> rules;
    std::string searched;
    for (auto const& entry : budget["rules"]) {
      std::string const rule = entry["rule"];
      rules.insert(rule);
      std::string const pattern = check_entry(entry);
      CHECK(std::count(pattern.begin(), pattern.end(), 'F') ==
            static_cast<std::ptrdiff_t>(full.back()));
      if (rule == "searched") {
        CHECK(pattern == json["steps"][7 - full.back()]["pattern"]);
        searched = pattern;
      }
      if (rule == "random_where_shared") {
        std::replace(searched.begin(), searched.end(), 'S', 'R');
        CHECK(pattern == searched);
      }
    }
    CHECK(rules.contains("searched"));
    CHECK(rules.contains("similarity"));
    CHECK(rules.contains("random_where_shared"));
    CHECK(rules.size() == 4);
    CHECK(budget["random_patterns"].size() == 2);
    for (auto const& entry : budget["random_patterns"]) check_entry(entry);
  }
  CHECK(full == std::vector<std::size_t>{5, 4, 3, 2});
  CHECK(json["budgets"][0]["rules"][1]["pattern"] == "FFSFSFSF");
  CHECK(json["budgets"][3]["rules"][1]["pattern"] == "FSSSFSSS");
  for (auto const& step : json["steps"]) check_entry(step);
  CHECK(check_entry(json["random_selection"]) == "RRRRRRRR");
  CHECK(json["overlap"][3][3] == 1);
  CHECK(json["overlap"][5][2] == json["overlap"][2][5]);

  std::string const again = tiny.directory.file("again.json");
  CHECK(Ran(words + again + " --threads 3").status == 0);
  CHECK(content(again) == content(json_file));

  std::string const svg = tiny.directory.file("plot.svg");
  CHECK(Ran("plot --json " + json_file + "," + again + " --svg " + svg).status == 0);
  CHECK(content(svg).find("shared layers of 8") != std::string::npos);
  Ran const no_result("plot --json " + tiny.directory.file("config.json") + " --svg " + svg);
  CHECK(no_result.err.find("config.json: no result of small_dsa experiment") != std::string::npos);
}

TEST_CASE("small_dsa record writes what layers select") {
  TinyModel const tiny;
  std::string const directory = tiny.directory.file("selections");
  REQUIRE(Ran("record --model " + tiny.directory.string() + " --sequences 2 --out " + directory)
              .status == 0);
  auto const file = indexshare::io::SelectionFile::open(directory + "/0001.safetensors");
  REQUIRE(file.has_value());
  CHECK(file->layers() == std::vector<std::int32_t>{0, 1, 2, 3});
  CHECK(file->rows() == 14);
  CHECK(file->has_lengths());
  indexshare::io::SelectionRows rows;
  CHECK(file->read_rows(0, file->rows(), rows).has_value());
  programs::ThreadPool pool(1);
  Evaluator evaluator(*tiny.model, make_sequences(tiny.model->task(), calibration_seed, 2), pool);
  auto const selections = evaluator.selections(choices("FFFF"));
  REQUIRE(selections.has_value());
  auto const recorded = rows.view().positions;
  CHECK(std::equal((*selections)[1].begin(), (*selections)[1].end(), &recorded(0, 0, 0)));

  Ran const again("record --model " + tiny.directory.string() + " --sequences 1 --out " +
                  directory);
  CHECK(again.status == 2);
  CHECK(again.err.starts_with("error: --out: got a directory that has \"" + directory + "/000"));
}

TEST_CASE("small_dsa evaluates held-out data on as many sequences as an experiment") {
  TinyModel const tiny;
  std::string const words = "evaluate --pattern FFSF --model " + tiny.directory.string();
  std::string const held_out = Ran(words + " --held-out").out;
  CHECK(held_out.starts_with("FFSF: loss "));
  CHECK(held_out == Ran(words + " --held-out --sequences 256").out);
  CHECK(held_out != Ran(words + " --held-out --sequences 128").out);
  CHECK(Ran(words).out == Ran(words + " --sequences 128").out);
  CHECK(Ran("evaluate --help").out.find("with --held-out 256") != std::string::npos);
}

TEST_CASE("small_dsa shows no standard error of one sequence") {
  TinyModel const tiny;
  std::string const model = " --model " + tiny.directory.string() + " --sequences 1";
  CHECK(Ran("evaluate --pattern FFSF" + model).out.find(" +- - nats") != std::string::npos);
  TinyModel const larger(8);
  std::string const file = larger.directory.file("o.json");
  Ran const ran("experiment --sequences 2 --held-out-sequences 1 --random-patterns 0 --model " +
                larger.directory.string() + " --json " + file);
  REQUIRE(ran.status == 0);
  CHECK(ran.out.find(" +- -      ") != std::string::npos);
  CHECK(nlohmann::json::parse(content(file))["all_full"]["held_out"]["loss_error"].is_null());
}

TEST_CASE("small_dsa refuses to write over its own files") {
  TinyModel const tiny(8);
  std::string const model = tiny.directory.string();
  std::string const config = content(model + "/config.json");
  std::string const both = tiny.directory.file("both");
  std::string const words = "experiment --model " + model + " --sequences 1 --json ";
  Ran const twice(words + both + " --log " + model + "/./both");
  CHECK(twice.status == 2);
  CHECK(twice.err ==
        "error: --json: got \"" + both + "\", the file of --log too, expected another file\n");
  CHECK_FALSE(std::filesystem::exists(both));
  CHECK(Ran(words + model + "/config.json").err.starts_with("error: --json: got "));
  CHECK(content(model + "/config.json") == config);

  std::string const result = tiny.directory.file("result.json");
  REQUIRE(Ran(words + result + " --held-out-sequences 1 --random-patterns 1").status == 0);
  std::string const before = content(result);
  Ran const plotted("plot --json " + result + " --svg " + result);
  CHECK(plotted.status == 2);
  CHECK(plotted.err.starts_with("error: --svg: got \"" + result + "\""));
  CHECK(content(result) == before);
}

TEST_CASE("small_dsa says what is wrong in one line") {
  TinyModel const tiny;
  std::string const model = " --model " + tiny.directory.string();
  auto const error = [](std::string const& words) {
    Ran const ran(words);
    CHECK(ran.status == 2);
    CHECK(ran.out.empty());
    CHECK(std::count(ran.err.begin(), ran.err.end(), '\n') == 1);
    return ran.err;
  };
  CHECK(error("walk") == "error: \"walk\": unknown command; --help lists them\n");
  CHECK(error("evaluate") == "error: --model: missing, expected the model's directory\n");
  CHECK(error("evaluate --pattern FFF" + model) ==
        "error: --pattern: got \"FFF\", expected 4 letters F, S or R, the first of them not S\n");
  CHECK(error("evaluate --pattern SFFF" + model).starts_with("error: --pattern: got \"SFFF\""));
  CHECK(error("search --shared 4" + model) ==
        "error: --shared: got \"4\", expected a whole number from 0 to 3\n");
  CHECK(error("search --resume" + model).starts_with("error: --resume: needs --log"));
  CHECK(error("search --held-out" + model).starts_with("error: \"--held-out\": unknown option"));
  CHECK(error("record" + model).starts_with("error: --out: missing"));
  CHECK(error("plot --json /nonexistent --svg x").starts_with("error: --json: \"/nonexistent\""));
  CHECK(Ran("search --help").out.find("--shared K") != std::string::npos);
  CHECK(Ran("--help").out.find("experiment") != std::string::npos);
}

}  // namespace
