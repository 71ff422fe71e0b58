// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <nlohmann/json.hpp>

#include <indexshare/io/safetensors_writer.hpp>
#include "../small_dsa/task.hpp"
#include "checkpoint_files.hpp"
#include "random.hpp"

#include <cstdint>
#include <string>
#include <vector>

namespace test {

/// The files of a model of examples/small_dsa with random weights, small enough to run hundreds of
/// forwards in a test.
class SmallDsaFiles {
 public:
  using index_t = indexshare::index_t;

  explicit SmallDsaFiles(index_t layers = 4) {
    config_ = nlohmann::json{
        {"model_type", "glm_moe_dsa"},
        {"num_hidden_layers", layers},
        {"hidden_size", width},
        {"num_attention_heads", 2},
        {"num_key_value_heads", 2},
        {"q_lora_rank", 12},
        {"kv_lora_rank", 10},
        {"qk_nope_head_dim", 6},
        {"qk_rope_head_dim", 4},
        {"v_head_dim", 5},
        {"index_n_heads", 2},
        {"index_head_dim", 8},
        {"index_topk", 3},
        {"intermediate_size", 20},
        {"vocab_size", task().keys},
        {"first_k_dense_replace", layers},
        {"rms_norm_eps", 1e-5},
        {"max_position_embeddings", task().tokens()},
        {"rope_parameters", {{"rope_theta", 10000.0}, {"rope_type", "default"}}},
        {"indexer_types", std::vector<std::string>(static_cast<std::size_t>(layers), "full")},
        {"small_dsa",
         {{"keys", task().keys},
          {"records", task().records},
          {"queries", task().queries},
          {"max_hops", task().max_hops}}}};
    add("model.embed_key.weight", {task().keys, width});
    add("model.embed_value.weight", {task().keys + 1, width});
    add("model.embed_hops.weight", {task().max_hops + 1, width});
    for (index_t layer = 0; layer < layers; ++layer) add_layer(layer);
    add("model.norm.weight", {width}, 1);
    add("lm_head.weight", {task().keys, width});
  }

  static small_dsa::TaskSizes task() { return {11, 9, 5, 3}; }

  nlohmann::json& config() { return config_; }

  void write(TempDirectory const& directory) const {
    directory.write("config.json", config_.dump());
    if (!tensors_.write(directory.file("model.safetensors"))) throw std::runtime_error("no file");
  }

 private:
  static constexpr index_t width = 16;

  void add(std::string const& name, std::vector<index_t> const& shape, float offset = 0) {
    std::size_t count = 1;
    for (index_t const extent : shape) count *= static_cast<std::size_t>(extent);
    std::vector<float> values(count);
    for (float& value : values) value = offset + 0.6f * random_.uniform();
    tensors_.add(name, shape, values);
  }

  void add_layer(index_t layer) {
    std::string const prefix = "model.layers." + std::to_string(layer) + ".";
    std::string const module = prefix + "self_attn.";
    add(prefix + "input_layernorm.weight", {width}, 1);
    add(prefix + "post_attention_layernorm.weight", {width}, 1);
    add(module + "q_a_proj.weight", {12, width});
    add(module + "q_a_layernorm.weight", {12}, 1);
    add(module + "q_b_proj.weight", {2 * (6 + 4), 12});
    add(module + "kv_a_proj_with_mqa.weight", {10 + 4, width});
    add(module + "kv_a_layernorm.weight", {10}, 1);
    add(module + "kv_b_proj.weight", {2 * (6 + 5), 10});
    add(module + "o_proj.weight", {width, 2 * 5});
    add(module + "indexer.wq_b.weight", {2 * 8, 12});
    add(module + "indexer.wk.weight", {8, width});
    add(module + "indexer.k_norm.weight", {8}, 1);
    add(module + "indexer.k_norm.bias", {8});
    add(module + "indexer.weights_proj.weight", {2, width});
    add(prefix + "mlp.gate_proj.weight", {20, width});
    add(prefix + "mlp.up_proj.weight", {20, width});
    add(prefix + "mlp.down_proj.weight", {width, 20});
  }

  nlohmann::json config_;
  indexshare::io::SafetensorsWriter tensors_;
  programs::RandomStream random_{7, programs::RandomStream::Use::hidden, 0, {0, 0}};
};

}  // namespace test
