// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/model_config.hpp>
#include <indexshare/share_plan.hpp>

/// @file GLM-5.2 as published, so that the demo needs no file. A test holds it against the
/// config.json of the model. @source zai-org/GLM-5.2, config.json

namespace programs {

constexpr indexshare::ModelConfig glm52_model() {
  indexshare::ModelConfig model;
  model.family = indexshare::ModelFamily::glm_moe_dsa;
  model.num_hidden_layers = 78;
  model.num_nextn_predict_layers = 1;
  model.max_position_embeddings = 1048576;
  model.hidden_size = 6144;
  model.num_attention_heads = 64;
  model.q_lora_rank = 2048;
  model.kv_lora_rank = 512;
  model.qk_nope_head_dim = 192;
  model.qk_rope_head_dim = 64;
  model.v_head_dim = 256;
  model.index_n_heads = 32;
  model.index_head_dim = 128;
  model.index_topk = 2048;
  model.norm_eps = {1e-5, 1e-5, 1e-6};
  model.rope.theta = 8000000;
  model.rope.layout = indexshare::RopeLayout::interleaved;
  model.indexer_rope = {indexshare::RopeLayout::interleaved, indexshare::RopeLanes::first, 64};
  model.index_share_for_mtp_iteration = true;
  model.feed_forward = {154880, 3, 12288, 2048, 256, 1, 8};
  return model;
}

/// Full layers 0, 1, 2, 6, 10, .. 74 of 78, and the MTP layer.
constexpr indexshare::SharePlan glm52_plan() {
  indexshare::ScheduleFields fields;
  fields.num_layers = 78;
  fields.mtp_layers = 1;
  fields.freq = 4;
  fields.offset = 3;
  return indexshare::make_share_plan(fields).value();
}

}  // namespace programs
