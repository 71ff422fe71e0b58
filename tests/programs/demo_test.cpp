// SPDX-License-Identifier: Apache-2.0
#include "demo_run.hpp"
#include "glm52.hpp"

#include <catch2/catch_test_macros.hpp>

#include <string>

namespace {

using namespace programs;

/// GLM-5.2's schedule with widths that a test can afford.
indexshare::ModelConfig small_model() {
  indexshare::ModelConfig model = glm52_model();
  model.num_attention_heads = 5;
  model.kv_lora_rank = 24;
  model.qk_rope_head_dim = 8;
  model.index_n_heads = 3;
  model.index_head_dim = 16;
  model.index_topk = 8;
  return model;
}

DemoResult run_demo(indexshare::ModelConfig const& model, DemoSettings settings) {
  settings.first_layer = 2;
  settings.last_layer = 10;
  settings.context = 300;
  settings.decode_steps = 2;
  ThreadPool pool(settings.threads);
  HostMachine const machine{&pool};
  return Demo(model, glm52_plan(), settings, machine, [](std::string const&) {}).run();
}

std::int64_t indexer_calls(StackReport const& stack) {
  return stack.total(&LayerReport::selection).calls;
}

}  // namespace

TEST_CASE("SHARE-STALE R104: the demo's indexer calls are the schedule's, on every path") {
  DemoResult const result = run_demo(small_model(), {.draft_steps = 3, .threads = 2});
  // 3 trunk forwards (a prefill chunk, 2 decode steps) of 8 layers, 2 of them full; 3 draft steps
  CHECK(indexer_calls(result.off) == 3 * 8 + 3);
  CHECK(indexer_calls(result.on) == 3 * 2 + 1);
  for (auto const& [number, layer] : result.on.layers) {
    INFO(number);
    bool const full = number == 2 || number == 6;
    CHECK(layer.role == (number == 78 ? "mtp" : full ? "full" : "shared"));
    CHECK(layer.source == (number == 78 ? 78 : number < 6 ? 2 : 6));
    CHECK(layer.selection.calls == (number == 78 ? 1 : full ? 3 : 0));
    CHECK(layer.selected == layer.rows * 8);
  }
  CHECK(result.checker.passed());
  CHECK(result.checker.selections > 10);
  CHECK(result.checker.reused > 100);
  CHECK(result.checker.outputs > 100);
}

TEST_CASE("MTP R111: without the flag each draft step of the demo selects") {
  indexshare::ModelConfig model = small_model();
  model.index_share_for_mtp_iteration = false;
  DemoResult const result = run_demo(model, {.draft_steps = 4, .share_off = false});
  CHECK(result.on.layers.at(78).selection.calls == 4);
  CHECK(indexer_calls(result.off) == 0);
  CHECK(result.checker.passed());
}

TEST_CASE("Demo: a model with sinks and no MTP layer, other seeds, k >= length") {
  indexshare::ModelConfig model = small_model();
  model.learnable_sink = true;
  model.index_topk = 512;
  DemoResult const result = run_demo(model, {.draft_steps = 0, .threads = 3, .seed = 77});
  CHECK_FALSE(result.on.layers.contains(78));
  CHECK(result.on.layers.at(3).selected > result.on.layers.at(3).rows * 140);
  CHECK(result.checker.passed());
}
