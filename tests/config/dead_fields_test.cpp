// SPDX-License-Identifier: Apache-2.0
// A field that a reader knows and does not use is worse than one it does not know: it was the cause
// of a wrong rotation in three public implementations. So every field in the reader's own list must
// matter.
#include <indexshare/io/config.hpp>
#include <indexshare/io/detail/field_names.hpp>

#include <catch2/catch_test_macros.hpp>

#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "config_cases.hpp"

using namespace indexshare;

namespace {

/// A change of one field, by JSON pointer.
struct Change {
  Json base;
  std::string place;
  Json value;
};

Json::json_pointer pointer(std::string const& place) { return Json::json_pointer(place); }

// Each field of the list, in a model where it decides something.
std::vector<Change> changes() {
  Json const glm = small_glm();
  Json const by_freq = small_glm_by_freq();
  Json const deepseek = small_deepseek();
  Json const hy = small_hy_v4();
  Json const next = small_glm5_next();
  Json free_widths = glm;  // without the fields that only repeat others
  for (char const* repeated : {"qk_head_dim", "num_key_value_heads", "first_k_dense_replace"})
    free_widths.erase(repeated);
  Json by_first_dense = glm;
  by_first_dense.erase("mlp_layer_types");
  Json no_scaling = deepseek;
  no_scaling.erase("rope_scaling");
  return {
      {glm, "/attention_bias", true},
      {glm, "/attn_logit_softcapping", 30.0},
      {glm, "/compress_ratios", {0, 4}},
      {by_first_dense, "/first_k_dense_replace", 3},
      {glm, "/first_k_dense_replace", 3},
      {hy, "/gated_mla", false},
      {hy, "/gating_type", "headwise"},
      {glm, "/hidden_size", 64},
      {glm, "/index_head_dim", 16},
      {glm, "/index_init_tokens", 1},
      {glm, "/index_k_norm_type", "rms"},
      {next, "/text_config/index_kpool", 4},
      {glm, "/index_kpool", 4},
      {next, "/text_config/index_kpool_always_select_tail", false},
      {next, "/text_config/index_kpool_compress", false},
      {glm, "/index_local_tokens", 1},
      {glm, "/index_n_heads", 4},
      {glm, "/index_share_for_mtp_iteration", false},
      {by_freq, "/index_skip_topk_offset", 1},
      {glm, "/index_skip_topk_offset", 1},  // loses, and is reported
      {glm, "/index_topk", 5},
      {by_freq, "/index_topk_freq", 2},
      {glm, "/index_topk_freq", 2},
      {by_freq, "/index_topk_pattern", "FSFSFS"},
      {glm, "/index_topk_pattern", "FSFSFS"},
      {glm, "/indexer_rope_interleave", false},
      {glm, "/indexer_types/1", "shared"},
      {glm, "/intermediate_size", 64},
      {free_widths, "/kv_lora_rank", 64},
      {glm, "/kv_source_layer_ids", {0}},
      {next, "/text_config/layer_types/5", "deepseek_sparse_attention"},
      {hy, "/learnable_sink", false},
      {next, "/text_config/linear_attn_config/kda_layers", {0, 2}},
      {next, "/text_config/linear_attn_config/full_attn_layers", {1, 3}},
      {next, "/text_config/linear_attn_config", 3},
      {glm, "/max_position_embeddings", 8192},
      {free_widths, "/mlp_layer_types/2", "dense"},
      {glm, "/model_type", "deepseek_v32"},
      {glm, "/moe_intermediate_size", 24},
      {glm, "/moe_layer_freq", 2},
      {glm, "/n_routed_experts", 16},
      {glm, "/n_shared_experts", 0},
      {free_widths, "/num_attention_heads", 4},
      {glm, "/num_experts_per_tok", 4},
      {glm, "/num_hidden_layers", 7},
      {glm, "/num_key_value_heads", 1},
      {glm, "/num_nextn_predict_layers", 0},
      {glm, "/partial_rotary_factor", 0.5},
      {glm, "/q_lora_rank", 48},
      {glm, "/qk_head_dim", 12},
      {free_widths, "/qk_nope_head_dim", 16},
      {free_widths, "/qk_rope_head_dim", 4},
      {glm, "/rms_norm_eps", 1e-6},
      {glm, "/rope_interleave", false},
      {glm, "/rope_parameters/rope_theta", 10000},
      {glm, "/rope_parameters", nullptr},
      {deepseek, "/rope_scaling", nullptr},
      {no_scaling, "/rope_theta", 20000},
      {glm, "/sliding_window", 128},
      {glm, "/use_index_cache", false},
      {glm, "/use_sliding_window", true},
      {glm, "/v_head_dim", 24},
      {glm, "/vocab_size", 200},
      // inside the rotary objects
      {deepseek, "/rope_scaling/attention_factor", 1.0},
      {deepseek, "/rope_scaling/beta_fast", 16},
      {deepseek, "/rope_scaling/beta_slow", 2},
      {deepseek, "/rope_scaling/factor", 20},
      {deepseek, "/rope_scaling/mscale", 0.7},
      {deepseek, "/rope_scaling/mscale_all_dim", 0.7},
      {deepseek, "/rope_scaling/original_max_position_embeddings", 2048},
      {deepseek, "/rope_scaling/partial_rotary_factor", 0.5},
      {deepseek, "/rope_scaling/truncate", false},
      {deepseek, "/rope_scaling/type", "default"},
      {glm, "/rope_parameters/rope_type", "yarn"},
  };
}

}  // namespace

TEST_CASE("ROPE R023: no dead fields, each change changes the result or is refused") {
  for (Change const& change : changes()) {
    CAPTURE(change.place, change.value.dump());
    auto const before = accepted(change.base);
    Json changed = change.base;
    changed[pointer(change.place)] = change.value;
    REQUIRE(changed != change.base);
    auto const after = read(changed);
    CHECK((!after || after->model != before.model || after->plan != before.plan));
  }
}

TEST_CASE("ROPE R023: the changes cover every field that the reader knows") {
  std::set<std::string, std::less<>> covered;
  for (Change const& change : changes()) {
    auto place = pointer(change.place);
    while (!place.empty()) {
      covered.insert(place.back());
      place.pop_back();
    }
  }
  auto const check = [&](auto const& names) {
    for (std::string_view const name : names) {
      CAPTURE(name);
      CHECK(covered.find(name) != covered.end());
    }
  };
  check(io::detail::config_fields);
  check(io::detail::rope_fields);
  check(io::detail::linear_attention_fields);
}
