// SPDX-License-Identifier: Apache-2.0
#include "../small_dsa/check_file.hpp"
#include "../small_dsa/evaluator.hpp"
#include "../small_dsa/experiment.hpp"
#include "small_dsa_files.hpp"

#include <catch2/catch_approx.hpp>
#include <catch2/catch_test_macros.hpp>

#include <map>
#include <set>
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

}  // namespace
