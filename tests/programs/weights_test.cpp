// SPDX-License-Identifier: Apache-2.0
#include "weights_run.hpp"

#include "checkpoint_files.hpp"
#include "compare_layers.hpp"

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
  std::int32_t first = 0;
  std::int32_t last = 6;
  bool share = true;
  int threads = 2;
  Recording const* input = nullptr;
};

Outcome run(std::string const& directory, Options const& options) {
  WeightsSettings settings;
  settings.directory = directory;
  settings.first_layer = options.first;
  settings.last_layer = options.last;
  settings.context = 33;
  settings.rows = 9;
  settings.share = options.share;
  ThreadPool pool(options.threads);
  RecordingWriter writer;
  WeightsRun module(config(), settings, pool, options.input, &writer, [](std::string const&) {});
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
  WeightsSettings settings;
  settings.directory = directory.string();
  settings.last_layer = 6;
  ThreadPool pool(1);
  bool ran = false;
  WeightsRun module(config(), settings, pool, nullptr, nullptr,
                    [&ran](std::string const&) { ran = true; });
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
  CHECK(run(files, {.last = 5}).result.unused_layers == std::vector<std::int32_t>{7});
}

TEST_CASE("Weights: hidden states of a recording give that recording again") {
  TempDirectory const directory;
  tiny().write_single(directory);
  Outcome const first = run(directory.string(), {});
  Recording const input = parsed(first.recording);
  Outcome const second = run(directory.string(), {.threads = 1, .input = &input});
  CHECK(first.recording == second.recording);  // bit by bit, whatever the number of threads

  // a range of layers that begins in the middle
  Outcome const part = run(directory.string(), {.first = 3, .last = 5, .input = &input});
  auto const report = compare_recordings(input, parsed(part.recording), {.tolerance = 0.0});
  REQUIRE(report);
  CHECK(report->layers.size() == 2);
  CHECK(report->first_difference() == nullptr);
}

TEST_CASE("Weights: an input without a layer's hidden states, or of another width, is refused") {
  RecordingWriter writer;
  writer.add("positions", {8}, std::vector<std::int32_t>(8, 0));
  writer.add(0, Quantity::hidden, {8, 36}, std::vector<float>(8 * 36, 0.5f));
  writer.add(1, Quantity::hidden, {8, 35}, std::vector<float>(8 * 35, 0.5f));
  Recording const input = parsed(writer.bytes().value());
  CHECK_THROWS_MATCHES(
      run(tiny(), {.last = 2, .input = &input}), std::runtime_error,
      MessageMatches(ContainsSubstring("layer1.hidden: got 35 lanes, expected 36")));
  CHECK_THROWS_MATCHES(run(tiny(), {.first = 3, .last = 5, .input = &input}), std::runtime_error,
                       MessageMatches(ContainsSubstring("layer3.hidden: got no such tensor")));
}

TEST_CASE("Weights: fp8 with block scales is the checkpoint that it dequantises to") {
  CheckpointFiles const fp8 = tiny("F8_E4M3");
  // the same values in bf16: what a loader that forgets a scale would miss
  CheckpointFiles dequantised = fp8;
  for (auto const& [name, tensor] : fp8.tensors()) {
    if (name.ends_with("_scale_inv")) dequantised.drop(name);
    if (tensor.dtype != "F8_E4M3") continue;
    std::vector<indexshare::bf16> values;
    for (float const value : tensor.values) {
      values.push_back(indexshare::from_float<indexshare::bf16>(value));
    }
    dequantised.at(name) = {"BF16", tensor.shape, test::bytes_of(values)};
  }
  CHECK(run(fp8).recording == run(dequantised).recording);
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
