// SPDX-License-Identifier: Apache-2.0
#include <indexshare/io/config.hpp>
#include <indexshare/io/diagnostic_text.hpp>

#include <catch2/catch_approx.hpp>
#include <catch2/catch_test_macros.hpp>

#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "config_cases.hpp"

using namespace indexshare;
using Catch::Approx;

namespace {

io::LoadedConfig published(std::string const& name) {
  auto const config = io::read_config_file(data_file("configs/" + name));
  INFO((config ? std::string("read") : config.error().message()));
  REQUIRE(config.has_value());
  return *config;
}

std::vector<std::int32_t> every_fourth(std::vector<std::int32_t> head, std::int32_t from,
                                       std::int32_t to) {
  for (std::int32_t layer = from; layer <= to; layer += 4) head.push_back(layer);
  return head;
}

std::vector<std::int32_t> all_of(std::int32_t layers) {
  std::vector<std::int32_t> list;
  for (std::int32_t layer = 0; layer < layers; ++layer) list.push_back(layer);
  return list;
}

}  // namespace

TEST_CASE("CFG-SCHED R009: GLM-5.2 as published, both files") {
  for (char const* name : {"GLM-5.2.json", "GLM-5.2-FP8.partial.json"}) {
    CAPTURE(name);
    auto const [model, plan] = published(name);
    CHECK(model.family == ModelFamily::glm_moe_dsa);
    CHECK(plan.num_layers() == 78);
    CHECK(plan.mtp_layers() == 1);
    CHECK(listed(plan.full_layers()) == every_fourth({0, 1}, 2, 74));
    CHECK(
        trunk_sources(plan) ==
        json_file("fault_vectors.json")["sched_glm52"]["source"].get<std::vector<std::int32_t>>());
    CHECK(plan.decided_by() == ScheduleSource::indexer_types);
    CHECK(plan.diagnostics().empty());  // freq 4 and offset 3 say the same
    CHECK(model.hidden_size == 6144);
    CHECK(model.num_attention_heads == 64);
    CHECK(model.q_lora_rank == 2048);
    CHECK(model.kv_lora_rank == 512);
    CHECK(model.qk_nope_head_dim == 192);
    CHECK(model.qk_rope_head_dim == 64);
    CHECK(model.v_head_dim == 256);
    CHECK(model.index_n_heads == 32);
    CHECK(model.index_head_dim == 128);
    CHECK(model.index_topk == 2048);
    CHECK(model.max_position_embeddings == 1048576);
    CHECK(model.norm_eps.layer == 1e-5);
    CHECK(model.norm_eps.index_key == 1e-6);
    CHECK(model.rope.theta == 8e6);
    CHECK(model.rope.scaling == RopeScaling::none);
    CHECK(model.rope.layout == RopeLayout::interleaved);
    CHECK(model.indexer_rope == IndexerRope{RopeLayout::interleaved, RopeLanes::first, 64});
    CHECK(model.index_share_for_mtp_iteration);
    CHECK(softmax_scale(model) == 0.0625);
    CHECK(model.feed_forward.dense_layers == 3);
    CHECK(can_run(model).ok());
  }
}

TEST_CASE("CFG-SCHED: GLM-5.1 states no schedule and shares nothing") {
  auto const [model, plan] = published("GLM-5.1.reconstructed.json");
  CHECK(listed(plan.full_layers()) == all_of(78));
  CHECK(plan.mtp_layers() == 1);
  CHECK(model.rope.theta == 1e6);
  CHECK(model.max_position_embeddings == 202752);
  CHECK_FALSE(model.index_share_for_mtp_iteration);
  CHECK(model.indexer_rope.layout == RopeLayout::interleaved);
}

TEST_CASE("ROPE R149: DeepSeek-V3.2 as published") {
  auto const [model, plan] = published("DeepSeek-V3.2.json");
  CHECK(model.family == ModelFamily::deepseek_v32);
  CHECK(listed(plan.full_layers()) == all_of(61));
  CHECK(model.rope.theta == 1e4);
  CHECK(model.rope.scaling == RopeScaling::yarn);
  CHECK(model.rope.yarn == YarnScaling{40, 32, 1, 1, 1, 4096});
  CHECK(model.rope.layout == RopeLayout::interleaved);
  CHECK(model.indexer_rope == IndexerRope{RopeLayout::half_split, RopeLanes::first, 64});
  CHECK(softmax_scale(model) == Approx(1.87385 / std::sqrt(192.0)).epsilon(1e-5));
  CHECK(model.index_n_heads == 64);
  CHECK(model.num_attention_heads == 128);
  CHECK(model.norm_eps.layer == 1e-6);
}

TEST_CASE("CFG-SCHED: Hy4 as published") {
  auto const [model, plan] = published("Hy4-preview.partial.json");
  CHECK(model.family == ModelFamily::hy_v4);
  CHECK(listed(plan.full_layers()) == every_fourth({0}, 1, 77));
  CHECK(plan.full_layers().count() == 21);
  CHECK(plan.mtp_layers() == 1);
  CHECK(model.rope.theta == 1e7);
  CHECK(model.rope.layout == RopeLayout::half_split);
  CHECK(model.indexer_rope == IndexerRope{RopeLayout::half_split, RopeLanes::last, 64});
  CHECK(rope_begin(model) == 64);
  CHECK(rope_end(model) == 128);
  CHECK(model.learnable_sink);
  CHECK(model.gated_output);
  CHECK(model.feed_forward.dense_layers == 1);
}

TEST_CASE("CFG-SCHED: GLM-5.3-Flash as published, its linear layers without an indexer") {
  auto const [model, plan] = published("GLM-5.3-Flash.glm5_next.from_test_fixture.json");
  CHECK(model.family == ModelFamily::glm5_next);
  CHECK(plan.num_layers() == 45);
  CHECK(plan.mtp_layers() == 0);
  CHECK(listed(plan.full_layers()) == every_fourth({}, 3, 43));
  CHECK(plan.source(0).value() == no_source);
  CHECK(plan.role(44) == LayerRole::none);
  std::vector<ScheduleDiagnostic> const diagnostics = listed(plan.diagnostics());
  REQUIRE(diagnostics.size() == 34);
  CHECK(diagnostics[0] ==
        ScheduleDiagnostic{0, ScheduleSource::layer_types, ScheduleSource::indexer_types});
  CHECK(io::diagnostic_text(plan, diagnostics[3]).starts_with("layer 4 "));
  CHECK(model.key_pooling == KeyPooling{4, true, true});
  CHECK(model.rope.theta == 0);
  CHECK(model.indexer_rope.dims == 0);
  CHECK(model.index_share_for_mtp_iteration);
  CHECK(can_run(model).code == Errc::unsupported);
}

TEST_CASE("CFG-OTHER: files that are no config of a known family say so") {
  for (char const* name : {"DeepSeek-V3.2-Exp.inference.json", "DeepSeek-V4-Flash.partial.json",
                           "DeepSeek-V4-Pro.partial.json"}) {
    CAPTURE(name);
    auto const config = io::read_config_file(data_file(std::string("configs/") + name));
    REQUIRE_FALSE(config.has_value());
    CHECK(config.error().path == "$.model_type");
    CHECK(config.error().value.empty());
    CHECK(config.error().expected == "one of glm_moe_dsa, deepseek_v32, hy_v4, glm5_next");
  }
}
