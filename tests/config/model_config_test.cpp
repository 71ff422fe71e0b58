// SPDX-License-Identifier: Apache-2.0
#include <indexshare/model_config.hpp>

#include <catch2/catch_approx.hpp>
#include <catch2/catch_test_macros.hpp>

#include <cmath>
#include <concepts>

#include "config_cases.hpp"

using namespace indexshare;
using Catch::Approx;

static_assert(std::regular<ModelConfig>);

TEST_CASE("NORM R012: the three epsilons are recorded apart") {
  ModelConfig const model = accepted(glm_with("rms_norm_eps", 3e-4)).model;
  CHECK(model.norm_eps.layer == 3e-4);
  CHECK(model.norm_eps.latent == 3e-4);
  CHECK(model.norm_eps.index_key == 1e-6);
}

TEST_CASE("ROPE R022: the pairing comes from the flag, without one from the family") {
  auto const indexer_layout = [](Json config, Json flag) {
    config["indexer_rope_interleave"] = std::move(flag);
    return accepted(config).model.indexer_rope.layout;
  };
  CHECK(indexer_layout(small_glm(), true) == RopeLayout::interleaved);
  CHECK(indexer_layout(small_glm(), false) == RopeLayout::half_split);
  CHECK(indexer_layout(small_glm(), nullptr) == RopeLayout::interleaved);
  CHECK(indexer_layout(small_deepseek(), true) == RopeLayout::interleaved);
  CHECK(indexer_layout(small_deepseek(), nullptr) == RopeLayout::half_split);
  CHECK(indexer_layout(small_hy_v4(), nullptr) == RopeLayout::half_split);
  CHECK(accepted(small_deepseek()).model.rope.layout == RopeLayout::interleaved);
  CHECK(accepted(small_hy_v4()).model.rope.layout == RopeLayout::half_split);
  CHECK(accepted(glm_with("rope_interleave", false)).model.rope.layout == RopeLayout::half_split);
}

TEST_CASE("ROPE: Hy4 rotates the last lanes of an index head, the others the first") {
  ModelConfig const glm = accepted(small_glm()).model;
  CHECK(rope_begin(glm) == 0);
  CHECK(rope_end(glm) == 8);
  ModelConfig const hy = accepted(small_hy_v4()).model;
  CHECK(rope_begin(hy) == 6);
  CHECK(rope_end(hy) == 14);
}

TEST_CASE("ROPE R149: YaRN scales the attention logits and nothing else") {
  ModelConfig const model = accepted(small_deepseek()).model;
  CHECK(softmax_scale(model) == Approx(1.87385 / std::sqrt(20.0)).epsilon(1e-5));
  CHECK(rope_amplitude(model) == 1);
  CHECK(index_weight_scale(model) == Approx(1 / std::sqrt(3.0 * 14.0)));
  ModelConfig const plain = accepted(small_glm()).model;
  CHECK(softmax_scale(plain) == Approx(1 / std::sqrt(20.0)));
  CHECK(rope_amplitude(plain) == 1);
}

TEST_CASE("ROPE R149: mscale and mscale_all_dim are two fields") {
  auto const yarn = [](char const* mscale, char const* all_dim) {
    Json config = small_deepseek();
    config["rope_scaling"]["mscale"] = Json::parse(mscale);
    config["rope_scaling"]["mscale_all_dim"] = Json::parse(all_dim);
    return accepted(config).model;
  };
  double const log_factor = std::log(40.0);
  ModelConfig const differ = yarn("2.0", "0.5");
  CHECK(rope_amplitude(differ) == Approx((1 + 0.2 * log_factor) / (1 + 0.05 * log_factor)));
  CHECK(softmax_scale(differ) == Approx(std::pow(1 + 0.05 * log_factor, 2) / std::sqrt(20.0)));
  ModelConfig const rotation_only = yarn("1.0", "null");
  CHECK(rope_amplitude(rotation_only) == Approx(1 + 0.1 * log_factor));
  CHECK(softmax_scale(rotation_only) == Approx(1 / std::sqrt(20.0)));
  CHECK(yarn_magnitude(1, 1) == 1);
}

TEST_CASE("KSHAPE: a model's shape is the absorbed form's") {
  Shape const shape = shape_of(accepted(small_glm()).model, Rows{5}, Keys{77});
  CHECK(shape.rows == 5);
  CHECK(shape.keys == 77);
  CHECK(shape.top_k == 4);
  CHECK(shape.index_heads == 3);
  CHECK(shape.index_dim == 14);
  CHECK(shape.heads == 2);
  CHECK(shape.key_dim == 48);
  CHECK(shape.value_dim == 40);
}

TEST_CASE("CFG-OTHER: a model over pooled index keys is refused with the reason") {
  CHECK(can_run(accepted(small_glm()).model).ok());
  Status const status = can_run(accepted(small_glm5_next()).model);
  CHECK(status.code == Errc::unsupported);
  CHECK(std::string(status.what).find("index_kpool") != std::string::npos);
}
