// SPDX-License-Identifier: Apache-2.0
//
// From the text of a config.json to the schedule: roles, sources, disagreements between fields,
// pipeline stages, FLOPs. Needs indexshare::io (nlohmann_json); io::read_config_file does the same
// with a file.
#include <indexshare/indexshare.hpp>
#include <indexshare/io/config.hpp>
#include <indexshare/io/diagnostic_text.hpp>

#include <cstdio>
#include <string>

using namespace indexshare;

namespace {

/// A small model in the form of GLM-5.2's config.json. Its list of roles and its period disagree on
/// layers 6 and 7: the list wins.
constexpr char const* config_text = R"({
  "model_type": "glm_moe_dsa",
  "num_hidden_layers": 8, "num_nextn_predict_layers": 1,
  "hidden_size": 256, "num_attention_heads": 8, "q_lora_rank": 96, "kv_lora_rank": 64,
  "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 48,
  "index_n_heads": 4, "index_head_dim": 32, "index_topk": 128,
  "indexer_types": ["full", "full", "full", "shared", "shared", "shared", "shared", "full"],
  "index_topk_freq": 4, "index_skip_topk_offset": 3, "index_share_for_mtp_iteration": true,
  "rms_norm_eps": 1e-5, "rope_theta": 8000000,
  "vocab_size": 1000, "first_k_dense_replace": 3, "intermediate_size": 512,
  "moe_intermediate_size": 128, "n_routed_experts": 16, "n_shared_experts": 1,
  "num_experts_per_tok": 2
})";

char const* name_of(LayerRole role) {
  return role == LayerRole::full ? "full" : role == LayerRole::shared ? "shared" : "none";
}

}  // namespace

int main() {
  auto const config = io::parse_config(config_text);
  if (!config) {
    std::fprintf(stderr, "error: %s\n", config.error().message().c_str());
    return 2;
  }
  ModelConfig const& model = config->model;
  SharePlan const& plan = config->plan;

  std::printf("schedule by %s\n", io::field_name(plan.decided_by()));
  for (std::int32_t layer = 0; layer < plan.total_layers(); ++layer) {
    std::printf("  layer %d: %s, selection of layer %d%s\n", layer, name_of(plan.role(layer)),
                share_source(plan, layer), layer < plan.num_layers() ? "" : " (MTP)");
  }
  for (ScheduleDiagnostic const diagnostic : plan.diagnostics()) {
    std::printf("  note: %s\n", io::diagnostic_text(plan, diagnostic).c_str());
  }

  // Two pipeline stages. The cut tears a share group, so the second one must import a selection.
  auto const refused = plan.stage(4, 9, StageStart::own);
  if (!refused) {
    std::printf("stage 4:9 alone: %s (layer %d reads layer %lld)\n", refused.error().what,
                refused.error().layer, static_cast<long long>(refused.error().expected));
  }
  auto const stage = plan.stage(4, 9, StageStart::imports_selection).value();
  std::printf("stage 4:9 imports the selection of layer %d and allocates %d index-key caches:",
              stage.import_source(), stage.index_caches());
  for (std::int32_t const layer : plan.full_layers(4, 9)) {
    std::printf(" slot %d for layer %d", stage.index_cache_slot(layer).value(), layer);
  }
  std::printf("\n");

  // What a layer call needs to know, and what sharing saves by count.
  Shape const shape = shape_of(model, Rows{64}, Keys{4096});
  std::printf("shape: top_k %lld, key_dim %lld, value_dim %lld, scale %.4f\n",
              static_cast<long long>(shape.top_k), static_cast<long long>(shape.key_dim),
              static_cast<long long>(shape.value_dim), softmax_scale(model));
  auto const flops = complete_sharing_flops(model, plan, 4096, CoreForm::absorbed);
  std::printf(
      "FLOPs of a token decoded at 4096 keys, complete count, absorbed core: %.1f M with "
      "every layer full, %.1f M as scheduled\n",
      flops.all_full.total() * 1e-6, flops.shared.total() * 1e-6);

  // A mistake is named by JSON path, value and what was expected.
  std::string broken = config_text;
  broken.replace(broken.find("\"shared\""), 8, "\"Shared\"");
  std::printf("error: %s\n", io::parse_config(broken).error().message().c_str());
}
