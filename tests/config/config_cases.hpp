// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file Configs that the tests start from, and reading them.

#include <indexshare/io/config.hpp>

#include <catch2/catch_test_macros.hpp>
#include <nlohmann/json.hpp>

#include <cstdint>
#include <fstream>
#include <string>
#include <vector>

using Json = nlohmann::json;

inline std::string data_file(std::string const& name) {
  return std::string(INDEXSHARE_TEST_DATA_DIR) + "/" + name;
}

inline Json json_file(std::string const& name) {
  std::ifstream stream(data_file(name));
  REQUIRE(stream);
  return Json::parse(stream);
}

/// A model of six layers and one MTP layer whose config states everything the reader knows for
/// GLM-5.2, its schedule twice. Widths differ from each other, so that a swap is seen.
inline Json small_glm() {
  return Json::parse(R"({
    "model_type": "glm_moe_dsa", "num_hidden_layers": 6, "num_nextn_predict_layers": 1,
    "max_position_embeddings": 4096, "hidden_size": 32, "num_attention_heads": 2,
    "num_key_value_heads": 2, "q_lora_rank": 24, "kv_lora_rank": 40, "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8, "qk_head_dim": 20, "v_head_dim": 16, "head_dim": 12,
    "index_n_heads": 3, "index_head_dim": 14, "index_topk": 4,
    "index_topk_freq": 4, "index_skip_topk_offset": 3, "index_topk_pattern": null,
    "indexer_types": ["full", "full", "full", "shared", "shared", "shared"],
    "index_share_for_mtp_iteration": true, "indexer_rope_interleave": true,
    "rope_interleave": true, "attention_bias": false, "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 8000000},
    "vocab_size": 100, "intermediate_size": 48, "moe_intermediate_size": 20,
    "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2,
    "first_k_dense_replace": 2, "moe_layer_freq": 1,
    "mlp_layer_types": ["dense", "dense", "sparse", "sparse", "sparse", "sparse"]})");
}

/// The same model with a schedule that only freq and offset state.
inline Json small_glm_by_freq() {
  Json config = small_glm();
  config.erase("indexer_types");
  return config;
}

/// YaRN in the older form.
inline Json small_deepseek() {
  Json config = small_glm();
  for (char const* absent : {"index_topk_freq", "index_skip_topk_offset", "index_topk_pattern",
                             "indexer_types", "index_share_for_mtp_iteration",
                             "indexer_rope_interleave", "rope_interleave", "rope_parameters"})
    config.erase(absent);
  config["model_type"] = "deepseek_v32";
  config["rope_theta"] = 10000;
  config["rope_scaling"] = Json::parse(R"({"type": "yarn", "factor": 40, "beta_fast": 32,
    "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096})");
  return config;
}

inline Json small_hy_v4() {
  Json config = small_glm_by_freq();
  for (char const* absent : {"indexer_rope_interleave", "rope_interleave", "rope_parameters"})
    config.erase(absent);
  config["model_type"] = "hy_v4";
  config["rope_theta"] = 1e7;
  config["learnable_sink"] = true;
  config["gated_mla"] = true;
  config["gating_type"] = "elementwise";
  return config;
}

/// Nested, as multimodal models are.
inline Json small_glm5_next() {
  Json text = small_glm();
  for (char const* absent : {"rope_parameters", "index_topk_freq", "index_skip_topk_offset"})
    text.erase(absent);
  text["model_type"] = "glm5_next_text";
  text["qk_rope_head_dim"] = 0;
  text["qk_head_dim"] = 12;
  text["index_kpool"] = 2;
  text["index_kpool_compress"] = true;
  text["index_kpool_always_select_tail"] = true;
  text["layer_types"] = {"linear_attention",          "deepseek_sparse_attention",
                         "linear_attention",          "deepseek_sparse_attention",
                         "deepseek_sparse_attention", "linear_attention"};
  text["linear_attn_config"] = {{"kda_layers", {0, 2, 5}}, {"full_attn_layers", {1, 3, 4}}};
  return {{"model_type", "glm5_next"}, {"text_config", text}};
}

inline indexshare::io::ConfigResult<indexshare::io::LoadedConfig> read(Json const& config) {
  return indexshare::io::parse_config(config.dump());
}

inline indexshare::io::LoadedConfig accepted(Json const& config) {
  auto const result = read(config);
  INFO((result ? std::string("accepted") : result.error().message()));
  REQUIRE(result.has_value());
  return *result;
}

inline indexshare::io::ConfigError refused(Json const& config) {
  auto const result = read(config);
  REQUIRE_FALSE(result.has_value());
  return result.error();
}

/// `small_glm` with one field replaced.
inline Json glm_with(char const* field, Json value) {
  Json config = small_glm();
  config[field] = std::move(value);
  return config;
}

inline Json glm_without(char const* field) {
  Json config = small_glm();
  config.erase(field);
  return config;
}

template <class Range>
std::vector<typename Range::Iterator::value_type> listed(Range const& range) {
  return {range.begin(), range.end()};
}

inline std::vector<std::int32_t> trunk_sources(indexshare::SharePlan const& plan) {
  std::vector<std::int32_t> sources;
  for (std::int32_t layer = 0; layer < plan.num_layers(); ++layer)
    sources.push_back(share_source(plan, layer));
  return sources;
}
