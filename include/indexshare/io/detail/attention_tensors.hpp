// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/frontend/weights.hpp>
#include <indexshare/io/checkpoint_error.hpp>
#include <indexshare/model_config.hpp>
#include <indexshare/share_plan.hpp>

#include <cuda/std/array>

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace indexshare {
inline namespace v0 {
namespace io::detail {

/// Name of a tensor below its self-attention module. Some have two, of which a file uses one.
struct TensorName {
  std::string_view name;
  std::string_view other{};
};

/// Calls `visit(name, extents, view)` for each tensor of an indexer.
/// @source transformers GlmMoeDsaIndexer
template <class Weights, class Visit>
void visit_indexer_tensors(ModelConfig const& c, Weights& weights, Visit&& visit) {
  using Matrix = cuda::std::array<index_t, 2>;
  using Vector = cuda::std::array<index_t, 1>;
  visit(TensorName{"indexer.wq_b.weight"},
        Matrix{c.index_n_heads * c.index_head_dim, c.q_lora_rank}, weights.wq_b);
  visit(TensorName{"indexer.wk.weight"}, Matrix{c.index_head_dim, c.hidden_size}, weights.wk);
  visit(TensorName{"indexer.k_norm.weight"}, Vector{c.index_head_dim}, weights.k_norm_weight);
  visit(TensorName{"indexer.k_norm.bias"}, Vector{c.index_head_dim}, weights.k_norm_bias);
  visit(TensorName{"indexer.weights_proj.weight"}, Matrix{c.index_n_heads, c.hidden_size},
        weights.weights_proj);
}

/// The same for the tensors that a self-attention module has with or without an indexer.
/// @source transformers GlmMoeDsaAttention; HYV4Attention for gate and sinks, whose second names
/// are those of the published checkpoint
template <class Weights, class Visit>
void visit_attention_tensors(ModelConfig const& c, Weights& weights, Visit&& visit) {
  using Matrix = cuda::std::array<index_t, 2>;
  using Vector = cuda::std::array<index_t, 1>;
  index_t const heads = c.num_attention_heads;
  visit(TensorName{"q_a_proj.weight"}, Matrix{c.q_lora_rank, c.hidden_size}, weights.q_a_proj);
  visit(TensorName{"q_a_layernorm.weight"}, Vector{c.q_lora_rank}, weights.q_a_layernorm);
  visit(TensorName{"q_b_proj.weight"}, Matrix{heads * qk_head_dim(c), c.q_lora_rank},
        weights.q_b_proj);
  visit(TensorName{"kv_a_proj_with_mqa.weight"},
        Matrix{c.kv_lora_rank + c.qk_rope_head_dim, c.hidden_size}, weights.kv_a_proj);
  visit(TensorName{"kv_a_layernorm.weight"}, Vector{c.kv_lora_rank}, weights.kv_a_layernorm);
  visit(TensorName{"kv_b_proj.weight"},
        Matrix{heads * (c.qk_nope_head_dim + c.v_head_dim), c.kv_lora_rank}, weights.kv_b_proj);
  visit(TensorName{"o_proj.weight"}, Matrix{c.hidden_size, heads * c.v_head_dim}, weights.o_proj);
  if (c.gated_output) {
    visit(TensorName{"gate_proj.weight", "linear_gate.weight"},
          Matrix{heads * c.v_head_dim, c.hidden_size}, weights.gate_proj);
  }
  if (c.learnable_sink) {
    visit(TensorName{"sinks", "learnable_sink_param"}, Vector{heads}, weights.sinks);
  }
}

/// Name of the block scales of a tensor in fp8.
inline std::string scale_name(std::string_view tensor) {
  return std::string(tensor) + "_scale_inv";
}

/// The names that may stand below a self-attention module, scales included.
struct KnownNames {
  std::vector<std::string> attention;
  std::vector<std::string> indexer;

  explicit KnownNames(ModelConfig const& config) {
    auto const collect_into = [](std::vector<std::string>& names) {
      return [&names](TensorName tensor, auto const&, auto&) {
        for (std::string_view const name : {tensor.name, tensor.other}) {
          if (name.empty()) continue;
          names.emplace_back(name);
          names.push_back(scale_name(name));
        }
      };
    };
    AttentionWeights<Space::host, float> layer;
    IndexerWeights<Space::host, float> own;
    visit_attention_tensors(config, layer, collect_into(attention));
    visit_indexer_tensors(config, own, collect_into(indexer));
  }
};

// What a checkpoint's tensors begin with: the model as saved with its head, without it, and inside
// a multimodal one.
inline constexpr std::string_view model_prefixes[] = {"model.", "", "model.language_model."};
inline constexpr std::string_view trunk_list = "layers.";
inline constexpr std::string_view mtp_list = "mtp_layers.";
inline constexpr std::string_view attention_module = ".self_attn.";

/// What the names of a layer's self-attention tensors may begin with; a file uses one. MTP layers
/// continue the list of the trunk (GLM, DeepSeek) or have a list of their own (Hy4).
inline std::vector<std::string> attention_prefixes(SharePlan const& plan, std::int32_t layer) {
  std::vector<std::string> prefixes;
  auto const add = [&](std::string_view list, std::int32_t number) {
    for (std::string_view const model : model_prefixes) {
      prefixes.push_back(std::string(model) + std::string(list) + std::to_string(number) +
                         std::string(attention_module));
    }
  };
  add(trunk_list, layer);
  if (layer >= plan.num_layers()) add(mtp_list, layer - plan.num_layers());
  return prefixes;
}

/// Extents that a shape cannot overflow with, and a plan of the same model.
inline CheckpointResult<void> check_model(ModelConfig const& config, SharePlan const& plan) {
  using Field = std::pair<char const*, index_t>;
  for (auto const& [name, value] :
       std::initializer_list<Field>{{"hidden_size", config.hidden_size},
                                    {"num_attention_heads", config.num_attention_heads},
                                    {"q_lora_rank", config.q_lora_rank},
                                    {"kv_lora_rank", config.kv_lora_rank},
                                    {"qk_nope_head_dim", config.qk_nope_head_dim},
                                    {"qk_rope_head_dim", config.qk_rope_head_dim},
                                    {"v_head_dim", config.v_head_dim},
                                    {"index_n_heads", config.index_n_heads},
                                    {"index_head_dim", config.index_head_dim}}) {
    if (value < 0 || value > max_width) {
      return refuse({"", -1, "", std::string(name) + " " + std::to_string(value),
                     "a width from 0 to " + std::to_string(max_width)});
    }
  }
  if (plan.num_layers() != config.num_hidden_layers ||
      plan.mtp_layers() != config.num_nextn_predict_layers) {
    return refuse({"", -1, "",
                   "a plan of " + std::to_string(plan.num_layers()) + " + " +
                       std::to_string(plan.mtp_layers()) + " layers",
                   "one of the config's " + std::to_string(config.num_hidden_layers) + " + " +
                       std::to_string(config.num_nextn_predict_layers)});
  }
  if (Status const status = can_run(config); !status.ok()) {
    return refuse({"", -1, "", status.what, "a model whose layers this library computes"});
  }
  return {};
}

}  // namespace io::detail
}  // namespace v0
}  // namespace indexshare
