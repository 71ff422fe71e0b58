// SPDX-License-Identifier: Apache-2.0
#include "weights_input.hpp"
#include "weights_run.hpp"

#include "checkpoint_files.hpp"
#include "compare_layers.hpp"

#include <catch2/catch_approx.hpp>
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <catch2/matchers/catch_matchers_exception.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

using namespace programs;
using Catch::Matchers::ContainsSubstring;
using Catch::Matchers::MessageMatches;
using test::CheckpointFiles;
using test::TempDirectory;

namespace {

/// Five layers F S S F S and an MTP layer; widths all different.
indexshare::io::LoadedConfig const& config() {
  static auto const parsed = indexshare::io::parse_config(R"({
    "model_type": "glm_moe_dsa", "num_hidden_layers": 5, "num_nextn_predict_layers": 1,
    "hidden_size": 36, "num_attention_heads": 3, "q_lora_rank": 24, "kv_lora_rank": 40,
    "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 16,
    "index_n_heads": 18, "index_head_dim": 32, "index_topk": 6,
    "indexer_types": ["full", "shared", "shared", "full", "shared"],
    "rms_norm_eps": 1e-5, "rope_theta": 10000})");
  return *parsed;
}

struct Outcome {
  WeightsResult result;
  std::string recording;
};

struct Options {
  std::vector<std::int32_t> layers{0, 1, 2, 3, 4, 5};
  bool share = true;
  int threads = 2;
  Recording const* input = nullptr;
  bool attend_recorded = false;
};

WeightsSettings settings_of(Options const& options, std::string const& directory) {
  WeightsSettings settings;
  settings.directory = directory;
  settings.layers = options.layers;
  settings.context = 33;
  settings.rows = 9;
  settings.share = options.share;
  settings.attend_recorded = options.attend_recorded;
  return settings;
}

Outcome run(std::string const& directory, Options const& options) {
  ThreadPool pool(options.threads);
  RecordingWriter writer;
  WeightsRun module(config(), settings_of(options, directory),
                    indexshare::io::Checkpoint::open(directory).value(),
                    indexshare::make_front_end(config().model).value(), pool, options.input,
                    &writer, [](std::string const&) {});
  WeightsResult result = module.run();
  return {std::move(result), writer.bytes().value()};
}
Outcome run(CheckpointFiles const& files, Options const& options = {}) {
  TempDirectory const directory;
  files.write_single(directory);
  return run(directory.string(), options);
}

Recording parsed(std::string const& content) {
  return Recording::parse("recording", content).value();
}

CheckpointFiles tiny(std::string const& dtype = "BF16") {
  return {config().model, config().plan, {.dtype = dtype}};
}

/// Of the last row's last head over the first `count` positions of its request, in the expanded
/// form, from the queries and keys of a recording of `tiny`.
double lse_by_hand(Recording const& recording, std::int32_t layer, std::size_t count) {
  auto const& model = config().model;
  auto const nope = static_cast<std::size_t>(model.qk_nope_head_dim);
  auto const rope = static_cast<std::size_t>(model.qk_rope_head_dim);
  auto const rank = static_cast<std::size_t>(model.kv_lora_rank);
  auto const per_head = nope + static_cast<std::size_t>(model.v_head_dim);
  CheckpointFiles const files = tiny();
  auto const& kv_b = files.values(files.module(layer) + "kv_b_proj.weight");
  auto const q = recording.tensor(layer, Quantity::q).values<double>();
  auto const q_rope = recording.tensor(layer, Quantity::q_rope).values<double>();
  auto const latent = recording.tensor(layer, Quantity::kv_latent).values<double>();
  auto const k_rope = recording.tensor(layer, Quantity::k_rope).values<double>();
  std::size_t const last = recording.rows() - 1;
  std::size_t const first = recording.token_of(last) + 1 - recording.visible_keys(last);
  std::size_t const w_uk = kv_b.size() - per_head * rank;  // of the last head
  double total = 0;
  for (std::size_t token = first; token < first + count; ++token) {
    double logit = 0;
    for (std::size_t n = 0; n < nope; ++n) {
      double key = 0;
      for (std::size_t i = 0; i < rank; ++i) {
        key += double{kv_b[w_uk + n * rank + i]} * latent[token * rank + i];
      }
      logit += q[q.size() - (nope + rope) + n] * key;
    }
    for (std::size_t i = 0; i < rope; ++i) {
      logit += q_rope[q_rope.size() - rope + i] * k_rope[token * rope + i];
    }
    total += std::exp(softmax_scale(model) * logit);
  }
  return std::log(total);
}

}  // namespace

TEST_CASE("Weights: modules of every dtype run by the schedule, MTP layer included") {
  std::string const dtype = GENERATE("BF16", "F16", "F32", "F8_E4M3");  // R016
  Outcome const outcome = run(tiny(dtype));
  CHECK(outcome.result.passed());
  CHECK(outcome.result.unused_layers.empty());
  std::vector<std::int32_t> sources;
  for (ModuleReport const& module : outcome.result.modules) {
    sources.push_back(module.source);
    CHECK(module.full == (module.source == module.layer));
    CHECK(module.ignored.empty());
    CHECK(module.keys_per_row > 5);
  }
  CHECK(sources == std::vector<std::int32_t>{0, 0, 0, 3, 3, 5});
  Recording const recording = parsed(outcome.recording);
  for (std::int32_t layer = 0; layer < 6; ++layer) {
    CHECK(recording.has(layer, Quantity::scores) == (layer == 0 || layer == 3 || layer == 5));
    // R003: nothing unfilled
    for (double const value : recording.tensor(layer, Quantity::output).values<double>()) {
      REQUIRE(std::isfinite(value));
    }
  }
}

TEST_CASE("R002: indexer tensors on shared layers change no byte of a run, and are reported") {
  CheckpointFiles const lean = tiny();
  CheckpointFiles rich = lean;
  for (std::int32_t const layer : {1, 2, 4}) rich.add_indexer(layer);
  Outcome const a = run(lean);
  Outcome const b = run(rich);
  CHECK(a.recording == b.recording);
  for (ModuleReport const& module : b.result.modules) {
    CHECK(module.ignored.size() == (module.full ? 0u : 5u));
  }
}

TEST_CASE("Weights: without sharing every layer runs its own indexer, if it has one") {
  CheckpointFiles rich = tiny();
  for (std::int32_t const layer : {1, 2, 4}) rich.add_indexer(layer);
  Outcome const on = run(rich);
  Outcome const off = run(rich, {.share = false});
  CHECK(off.result.passed());
  for (ModuleReport const& module : off.result.modules) CHECK(module.full);
  Recording const with = parsed(on.recording);
  Recording const without = parsed(off.recording);
  CHECK(with.selection(0, 8) == without.selection(0, 8));
  CHECK(with.selection(1, 8) == with.selection(0, 8));
  CHECK(without.selection(1, 8) != without.selection(0, 8));
  CHECK_THROWS_MATCHES(run(tiny(), {.share = false}), std::runtime_error,
                       MessageMatches(ContainsSubstring("layer 1: tensor model.layers.1") &&
                                      ContainsSubstring("indexer")));
}

TEST_CASE("Weights: a missing tensor of the last layer is found before the first runs") {
  CheckpointFiles files = tiny();
  files.drop(files.module(5) + "indexer.k_norm.bias");
  TempDirectory const directory;
  files.write_shards(directory, 3);
  ThreadPool pool(1);
  bool ran = false;
  WeightsRun const module(config(), settings_of({}, directory.string()),
                          indexshare::io::Checkpoint::open(directory.string()).value(),
                          indexshare::make_front_end(config().model).value(), pool, nullptr,
                          nullptr, [&ran](std::string const&) { ran = true; });
  auto const missing = module.missing();
  REQUIRE(missing);
  CHECK(!ran);
  CHECK(missing->layer == 5);
  CHECK_THAT(missing->message(), ContainsSubstring("k_norm.bias"));
}

TEST_CASE("R013: layers that the config does not count are reported") {
  CheckpointFiles files = tiny();
  std::string const module = files.module(5);
  std::vector<std::string> names;
  for (auto const& [name, tensor] : files.tensors()) {
    if (name.starts_with(module)) names.push_back(name);
  }
  for (std::string const& name : names) {
    files.rename(name, "model.layers.7.self_attn." + name.substr(module.size()));
  }
  CHECK(run(files, {.layers = {0, 1, 2, 3, 4}}).result.unused_layers ==
        std::vector<std::int32_t>{7});
}

TEST_CASE("Weights: hidden states of a recording give that recording again") {
  TempDirectory const directory;
  tiny().write_single(directory);
  Outcome const first = run(directory.string(), {});
  Recording const input = parsed(first.recording);
  Outcome const second = run(directory.string(), {.threads = 1, .input = &input});
  CHECK(first.recording == second.recording);  // bit by bit, whatever the number of threads

  // layers from the middle
  Outcome const part = run(directory.string(), {.layers = {3, 4}, .input = &input});
  auto const report = compare_recordings(input, parsed(part.recording), {.tolerance = 0.0});
  REQUIRE(report);
  CHECK(report->layers.size() == 2);
  CHECK(report->first_difference() == nullptr);
}

TEST_CASE("Weights: an input that layers cannot be run on is refused by tensor") {
  auto const refusal = [](auto const& fill, std::vector<std::int32_t> const& layers,
                          bool selections) {
    RecordingWriter writer;
    writer.add("positions", {8}, std::vector<std::int32_t>(8, 0));
    std::vector<float> hidden(8 * 36, 0.5f);
    fill(writer, hidden);
    return check_input(parsed(writer.bytes().value()), config().model, layers, selections)
        .value_or("");
  };
  auto const good = [](RecordingWriter& writer, std::vector<float>& hidden) {
    writer.add(0, Quantity::hidden, {8, 36}, hidden);
    std::vector<std::int32_t> chosen(8 * 7, -1);
    for (std::size_t i = 0; i < 7; ++i) chosen[7 * 7 + i] = static_cast<std::int32_t>(i);
    writer.add(0, Quantity::selection, {8, 7}, chosen);
  };
  CHECK(refusal(good, {0}, false).empty());
  CHECK_THAT(refusal(good, {0, 1}, false), ContainsSubstring("layer1.hidden: got no such tensor"));
  CHECK_THAT(refusal(good, {0}, true),  // the model's index_topk is 6
             ContainsSubstring("layer0.selection: got 7 positions in row 7"));
  auto const narrow = [](RecordingWriter& writer, std::vector<float>&) {
    writer.add(0, Quantity::hidden, {8, 35}, std::vector<float>(8 * 35));
  };
  CHECK_THAT(refusal(narrow, {0}, false),
             ContainsSubstring("layer0.hidden: got 35 lanes, expected 36"));
  auto const spoilt = [](RecordingWriter& writer, std::vector<float>& hidden) {
    hidden[5 * 36 + 3] = std::nanf("");
    writer.add(0, Quantity::hidden, {8, 36}, hidden);
  };
  CHECK_THAT(refusal(spoilt, {0}, false), ContainsSubstring("in token 5"));
  auto const unselected = [](RecordingWriter& writer, std::vector<float>& hidden) {
    writer.add(0, Quantity::hidden, {8, 36}, hidden);
  };
  CHECK_THAT(refusal(unselected, {0}, true), ContainsSubstring("layer0.selection: got no such"));
  auto const too_large = [](RecordingWriter& writer, std::vector<float>&) {
    std::vector<double> doubles(8 * 36, 0.5);
    doubles[2 * 36] = 1e39;  // a number in fp64, none in fp32
    writer.add(0, Quantity::hidden, {8, 36}, doubles);
  };
  CHECK_THAT(refusal(too_large, {0}, false), ContainsSubstring("in token 2"));
  auto const of_others = [&good](RecordingWriter& writer, std::vector<float>& hidden) {
    good(writer, hidden);
    writer.metadata("attention_selection", "recorded");
  };
  CHECK_THAT(refusal(of_others, {0}, true), ContainsSubstring("of another recording"));
  CHECK(refusal(of_others, {0}, false).empty());
}

TEST_CASE("Weights: attention over recorded selections is that of whoever selected so") {
  TempDirectory const directory;
  tiny().write_single(directory);
  Outcome const first = run(directory.string(), {});
  Recording const input = parsed(first.recording);
  // over its own selections nothing changes
  Recording const same =
      parsed(run(directory.string(), {.input = &input, .attend_recorded = true}).recording);
  CHECK(compare_recordings(input, same, {.tolerance = 0.0})->first_difference() == nullptr);

  // a recording in which layer 0 and its readers chose the first positions, whatever the scores
  RecordingWriter writer;
  std::vector<std::int32_t> positions, requests;
  for (std::size_t token = 0; token < input.tokens(); ++token) {
    positions.push_back(input.place(token).rotary);
    requests.push_back(input.place(token).request);
  }
  writer.add("positions", {static_cast<index_t>(positions.size())}, positions);
  writer.add("requests", {static_cast<index_t>(requests.size())}, requests);
  writer.add("rows", {static_cast<index_t>(input.rows())}, input.row_tokens());
  std::vector<std::int32_t> chosen;
  for (std::size_t row = 0; row < input.rows(); ++row) {
    for (std::int32_t i = 0; i < 6; ++i) {
      chosen.push_back(static_cast<std::size_t>(i) < input.visible_keys(row) ? i : -1);
    }
  }
  for (std::int32_t const layer : {0, 1}) {
    auto const hidden = input.tensor(layer, Quantity::hidden);
    writer.add(layer, Quantity::hidden, hidden.shape(), hidden.values<float>());
    writer.add(layer, Quantity::selection, {static_cast<index_t>(input.rows()), 6}, chosen);
  }
  Recording const other = parsed(writer.bytes().value());
  Options options{.layers = {0, 1}, .input = &other, .attend_recorded = true};
  Outcome const outcome = run(directory.string(), options);
  CHECK(outcome.result.passed());
  Recording const over = parsed(outcome.recording);
  CHECK(over.metadata().at("attention_selection") == "recorded");
  // it can be held against whoever has those selections, itself, and nobody else
  CHECK(compare_recordings(over, other, {}).has_value());
  CHECK(compare_recordings(over, over, {})->first_difference() == nullptr);
  CHECK_THAT(compare_recordings(input, over, {}).error().message(),
             ContainsSubstring("B attends over selections of a file that the other one is not"));
  CHECK_THAT(compare_recordings(same, over, {}).error().message(),
             ContainsSubstring("both files attend over selections of others"));
  for (std::int32_t const layer : {0, 1}) {
    CHECK(over.selection(layer, 8) == input.selection(layer, 8));  // its own, as before
    auto const lse = over.tensor(layer, Quantity::lse).values<double>();
    CHECK(lse != input.tensor(layer, Quantity::lse).values<double>());
    CHECK(lse.back() == Catch::Approx(lse_by_hand(over, layer, 6)).epsilon(1e-5));
  }
}

TEST_CASE("Weights: fp8 with block scales is the checkpoint that it dequantises to") {
  CheckpointFiles const fp8 = tiny("F8_E4M3");
  // the same values in fp32: what a loader that forgets a scale, or rounds, would miss
  CheckpointFiles dequantised = fp8;
  for (auto const& [name, tensor] : fp8.tensors()) {
    if (name.ends_with("_scale_inv")) dequantised.drop(name);
    if (tensor.dtype != "F8_E4M3") continue;
    dequantised.at(name) = {"F32", tensor.shape, test::bytes_of(tensor.values)};
  }
  CHECK(run(fp8).recording == run(dequantised).recording);
}

TEST_CASE("Weights: fp32 weights are not rounded") {
  CheckpointFiles const exact = tiny("F32");
  CheckpointFiles rounded = exact;
  for (auto const& [name, tensor] : exact.tensors()) {
    std::vector<float> values;
    for (float const value : tensor.values) {
      values.push_back(to_float(indexshare::from_float<indexshare::bf16>(value)));
    }
    rounded.at(name) = {"F32", tensor.shape, test::bytes_of(values)};
  }
  auto const report =
      compare_recordings(parsed(run(exact).recording), parsed(run(rounded).recording), {});
  REQUIRE(report);
  REQUIRE(report->first_difference() != nullptr);
  CHECK(report->first_difference()->first_difference()->id == Quantity::q_a);
}

TEST_CASE("Weights: synthetic tokens are two requests with rows up to their ends") {
  TokenBatch const batch = synthetic_tokens(30, 8);
  CHECK(batch.tokens() == 50);
  CHECK(batch.request_count == 2);
  CHECK(batch.longest == 30);
  CHECK(batch.rows() == 8);
  CHECK(batch.row_tokens.back() == 49);
  CHECK(batch.lengths.back() == 20);
  CHECK(std::is_sorted(batch.row_tokens.begin(), batch.row_tokens.end()));
  CHECK(synthetic_tokens(2, 100).rows() == 3);
}
