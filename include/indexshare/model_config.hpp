// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/dims.hpp>
#include <indexshare/status.hpp>

#include <cmath>
#include <cstdint>
#include <type_traits>

namespace indexshare {
inline namespace v0 {

/// Model families whose config this library understands, by their `model_type`.
enum class ModelFamily : std::uint8_t {
  glm_moe_dsa,   ///< GLM-5, 5.1, 5.2, 5.3
  deepseek_v32,  ///< DeepSeek-V3.2
  hy_v4,         ///< Hy4
  glm5_next,     ///< GLM-5.3-Flash: linear attention, and sparse layers over pooled index keys
};

/// Which lanes a rotation pairs. Both are rotations of the same angles; mixing them up leaves short
/// contexts right and breaks the selection of long ones.
enum class RopeLayout : std::uint8_t {
  interleaved,  ///< lanes (2i, 2i + 1)
  half_split,   ///< lanes (i, i + half)
};

enum class RopeScaling : std::uint8_t {
  none,  ///< `default` in a config
  yarn,
};

/// YaRN's constants. `mscale` and `mscale_all_dim` are 0 where the config states none.
struct YarnScaling {
  double factor = 1;
  double beta_fast = 32;
  double beta_slow = 1;
  double mscale = 0;
  double mscale_all_dim = 0;
  index_t original_max_position_embeddings = 0;

  friend constexpr bool operator==(YarnScaling const&, YarnScaling const&) = default;
};

/// Rotary embedding of the model: angles for the attention and for the indexer, and the pairing of
/// the attention's rotary lanes.
struct Rope {
  double theta = 0;  ///< base of the frequencies; 0: the model rotates nothing
  RopeScaling scaling = RopeScaling::none;
  YarnScaling yarn{};  ///< meaningful if `scaling` is yarn
  RopeLayout layout = RopeLayout::interleaved;

  friend constexpr bool operator==(Rope const&, Rope const&) = default;
};

/// Where in an index query or key the rotated lanes are.
enum class RopeLanes : std::uint8_t { first, last };

/// Rotary embedding inside an index head, which need not be laid out like the attention's.
struct IndexerRope {
  RopeLayout layout = RopeLayout::interleaved;
  RopeLanes lanes = RopeLanes::first;
  index_t dims =
      0;  ///< rotated lanes: qk_rope_head_dim, in every family; 0: a model without rotation

  friend constexpr bool operator==(IndexerRope const&, IndexerRope const&) = default;
};

/// Epsilons of the three kinds of norm around the attention, kept apart because implementations
/// have confused them.
struct NormEps {
  double layer = 0;  ///< rms_norm_eps: the RMS norms between blocks
  /// The RMS norms of the query and KV latents. Engines and this library take rms_norm_eps;
  /// transformers takes 1e-6 whatever the config says.
  double latent = 0;
  /// The indexer's LayerNorm (with bias), never rms_norm_eps. For Hy4, vLLM has this value and
  /// transformers rms_norm_eps; undecided without a checkpoint.
  double index_key = 1e-6;

  friend constexpr bool operator==(NormEps const&, NormEps const&) = default;
};

/// glm5_next: index keys stand for blocks of tokens.
struct KeyPooling {
  index_t tokens_per_key = 1;       ///< index_kpool; 1: an index key per token, as everywhere else
  bool compress = false;            ///< index_kpool_compress: gated pooling
  bool always_select_tail = false;  ///< the incomplete last block is always selected

  friend constexpr bool operator==(KeyPooling const&, KeyPooling const&) = default;
};

/// What lies around the attention. Only the FLOP accounting reads it, so every field may be
/// `not_stated`.
struct FeedForward {
  static constexpr index_t not_stated = -1;

  index_t vocab_size = not_stated;
  index_t dense_layers = not_stated;  ///< layers with a dense feed-forward; the rest have experts
  index_t intermediate_size = not_stated;
  index_t moe_intermediate_size = not_stated;
  index_t routed_experts = not_stated;
  index_t shared_experts = not_stated;
  index_t experts_per_token = not_stated;

  friend constexpr bool operator==(FeedForward const&, FeedForward const&) = default;
};

/// The numbers of a model that decide what its sparse attention computes, under the names of the
/// config.json they come from. Plain data; `io/config.hpp` reads it from JSON, and other programs
/// may fill it by hand. Which layers are full, shared or not sparse at all is in SharePlan.
///
/// `head_dim` of a config is not here on purpose: published files and loaders give it three
/// different meanings.
struct ModelConfig {
  ModelFamily family = ModelFamily::glm_moe_dsa;
  std::int32_t num_hidden_layers = 0;
  std::int32_t num_nextn_predict_layers = 0;  ///< MTP layers
  index_t max_position_embeddings = 0;        ///< in tokens; 0: not stated

  index_t hidden_size = 0;
  index_t num_attention_heads = 0;
  index_t q_lora_rank = 0;
  index_t kv_lora_rank = 0;
  index_t qk_nope_head_dim = 0;
  index_t qk_rope_head_dim = 0;
  index_t v_head_dim = 0;

  index_t index_n_heads = 0;
  index_t index_head_dim = 0;
  index_t index_topk = 0;

  NormEps norm_eps{};
  Rope rope{};
  IndexerRope indexer_rope{};
  KeyPooling key_pooling{};
  bool index_share_for_mtp_iteration = false;
  bool learnable_sink = false;  ///< Hy4: one learned logit per head joins the softmax
  bool gated_output = false;    ///< Hy4: the attention output is gated before its projection

  FeedForward feed_forward{};

  friend constexpr bool operator==(ModelConfig const&, ModelConfig const&) = default;
};
static_assert(std::is_trivially_copyable_v<ModelConfig>);

/// Lanes of one attention head's query in the expanded form.
constexpr index_t qk_head_dim(ModelConfig const& config) noexcept {
  return config.qk_nope_head_dim + config.qk_rope_head_dim;
}

/// First rotated lane of an index head; the rotated lanes end at `rope_end`.
constexpr index_t rope_begin(ModelConfig const& config) noexcept {
  return config.indexer_rope.lanes == RopeLanes::first
             ? 0
             : config.index_head_dim - config.indexer_rope.dims;
}
constexpr index_t rope_end(ModelConfig const& config) noexcept {
  return rope_begin(config) + config.indexer_rope.dims;
}

/// YaRN's magnitude for a context stretched by `factor`: 1 + 0.1 * mscale * ln(factor), and 1 if
/// nothing is stretched.
/// @source YaRN paper, section 3.4; transformers `yarn_get_mscale`
inline double yarn_magnitude(double factor, double mscale) noexcept {
  return factor > 1 ? 1 + 0.1 * mscale * std::log(factor) : 1;
}

/// Scale of the attention logits: qk_head_dim^-0.5, times the square of YaRN's magnitude for
/// `mscale_all_dim` where stated. Never derived from the width of the absorbed key row.
/// @source DeepSeek-V3.2 inference/model.py, class MLA; transformers DeepseekV3Attention. Both
/// apply it whatever the length of the sequence; the former only in a run set up for more than
/// `original_max_position_embeddings` tokens
inline double softmax_scale(ModelConfig const& config) noexcept {
  double const scale = 1 / std::sqrt(static_cast<double>(qk_head_dim(config)));
  Rope const& rope = config.rope;
  if (rope.scaling != RopeScaling::yarn || rope.yarn.mscale_all_dim == 0) return scale;
  double const magnitude = yarn_magnitude(rope.yarn.factor, rope.yarn.mscale_all_dim);
  return scale * magnitude * magnitude;
}

/// Factor on every cosine and sine, of the attention and of the indexer alike: the *ratio* of
/// YaRN's two magnitudes, so 1 where `mscale` equals `mscale_all_dim`. If either is not stated, the
/// plain magnitude.
/// @source transformers `_compute_yarn_parameters`
inline double rope_amplitude(ModelConfig const& config) noexcept {
  Rope const& rope = config.rope;
  if (rope.scaling != RopeScaling::yarn) return 1;
  YarnScaling const& yarn = rope.yarn;
  if (yarn.mscale == 0 || yarn.mscale_all_dim == 0) return yarn_magnitude(yarn.factor, 1);
  return yarn_magnitude(yarn.factor, yarn.mscale) /
         yarn_magnitude(yarn.factor, yarn.mscale_all_dim);
}

/// The constant that the front end folds into the head weights: (index heads * index dim)^-0.5.
/// YaRN leaves it alone.
inline double index_weight_scale(ModelConfig const& config) noexcept {
  return 1 / std::sqrt(static_cast<double>(config.index_n_heads * config.index_head_dim));
}

/// Capacities of one layer call for this model, in the absorbed form: a key row is the latent
/// followed by the rotary lanes, its value is the latent.
/// @param rows query rows of one call, at most
/// @param keys visible keys of one row, at most
constexpr Shape shape_of(ModelConfig const& config, Rows rows, Keys keys) noexcept {
  Shape shape;
  shape.rows = rows.n;
  shape.keys = keys.n;
  shape.top_k = config.index_topk;
  shape.index_heads = config.index_n_heads;
  shape.index_dim = config.index_head_dim;
  shape.heads = config.num_attention_heads;
  shape.key_dim = config.kv_lora_rank + config.qk_rope_head_dim;
  shape.value_dim = config.kv_lora_rank;
  return shape;
}

/// Whether this library computes the sparse layers of such a model; if not, `what` is the reason.
/// Errors: unsupported.
constexpr Status can_run(ModelConfig const& config) noexcept {
  if (config.key_pooling.tokens_per_key != 1)
    return failure(Errc::unsupported,
                   "index keys pooled over several tokens (index_kpool) are not implemented", 1,
                   config.key_pooling.tokens_per_key);
  return {};
}

}  // namespace v0
}  // namespace indexshare
