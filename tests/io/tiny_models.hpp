// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/model_config.hpp>
#include <indexshare/share_plan.hpp>

#include <cuda/std/span>

#include <cstdint>
#include <string_view>

/// @file Models small enough for a checkpoint per test.

/// Widths differ from each other, so that a swap is seen. `kv_b` has rows of 12 + 16 lanes per
/// head.
inline indexshare::ModelConfig tiny_model(std::int32_t layers, std::int32_t mtp_layers = 0) {
  indexshare::ModelConfig config;
  config.num_hidden_layers = layers;
  config.num_nextn_predict_layers = mtp_layers;
  config.hidden_size = 36;
  config.num_attention_heads = 2;
  config.q_lora_rank = 24;
  config.kv_lora_rank = 40;
  config.qk_nope_head_dim = 12;
  config.qk_rope_head_dim = 8;
  config.v_head_dim = 16;
  config.index_n_heads = 3;
  config.index_head_dim = 14;
  config.index_topk = 4;
  return config;
}

/// A schedule written as F and S, one letter per trunk layer; a dot is a layer without sparse
/// attention.
inline indexshare::SharePlan plan_of(std::string_view letters, std::int32_t mtp_layers = 0) {
  indexshare::LayerRole roles[indexshare::max_schedule_layers];
  bool sparse[indexshare::max_schedule_layers];
  for (std::size_t i = 0; i < letters.size(); ++i) {
    roles[i] = letters[i] == 'S' ? indexshare::LayerRole::shared : indexshare::LayerRole::full;
    sparse[i] = letters[i] != '.';
  }
  indexshare::ScheduleFields fields;
  fields.num_layers = static_cast<std::int32_t>(letters.size());
  fields.mtp_layers = mtp_layers;
  fields.types = cuda::std::span<indexshare::LayerRole const>(roles, letters.size());
  fields.sparse = cuda::std::span<bool const>(sparse, letters.size());
  return make_share_plan(fields).value();
}
