// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/attention/mla.hpp>
#include <indexshare/frontend/activations.hpp>
#include <indexshare/frontend/front_end.hpp>
#include <indexshare/frontend/steps.hpp>
#include <indexshare/indexer/relu_dot.hpp>

namespace indexshare {
inline namespace v0 {
namespace detail {

template <Space S>
constexpr Status check_index_queries(ModelConfig const& config, index_t rows,
                                     QuerySide<S> const& out) noexcept {
  index_t const heads = config.index_n_heads;
  return first_failure(
      {check_activation("index_q_raw", out.index_q_raw, rows, heads, config.index_head_dim),
       check_activation("index_q", out.index_q, rows, heads, config.index_head_dim),
       check_activation("head_weights_raw", out.head_weights_raw, rows, heads),
       check_activation("head_weights", out.head_weights, rows, heads)});
}

}  // namespace detail

/// Index queries and head weights of rows of a full layer.
///   index_q      = basis(rotate(wq_b q_resid))
///   head_weights = weights_proj hidden * index_heads^-0.5 * index_dim^-0.5, fp32
/// A positive factor on a query changes no selection, but the raw latent in place of q_resid does.
///
/// @param q_resid    [rows, q_lora_rank] the query latent after its norm
/// @param hidden     [rows, hidden] input of the module, after input_layernorm
/// @param positions  [rows] rotary positions
/// Errors: bad_shape, bad_stride, missing_input; whatever the product returns. Allocates nothing.
/// @source transformers GlmMoeDsaIndexer and DeepseekV32Indexer, release 5.24.0
template <class Product, Executor X, class T>
Status project_index_queries(X const& x, FrontEnd<Product> const& front_end,
                             IndexerWeights<X::space, T> const& weights,
                             Tensor<X::space, float const, 2> const& q_resid,
                             Tensor<X::space, float const, 2> const& hidden,
                             PositionView<X::space> const& positions,
                             QuerySide<X::space> const& out) noexcept {
  using namespace detail;
  static_assert(MatrixProduct<Product, X, T>, "see MatrixProduct in frontend/product.hpp");
  ModelConfig const& config = front_end.config;
  index_t const rows = hidden.extent(0);
  if (Status const status = first_failure(
          {check_tokens(config, hidden, positions), check_weights(config, weights),
           check_recipe(front_end), check_extent("rows of q_resid", rows, q_resid.extent(0)),
           check_extent("lanes of q_resid", config.q_lora_rank, q_resid.extent(1)),
           check_readable("q_resid", q_resid), check_index_queries(config, rows, out)});
      !status.ok()) {
    return status;
  }
  return run_steps(
      [&]() noexcept {
        return front_end.product(x, q_resid, weights.wq_b, flat_heads(out.index_q_raw));
      },
      [&]() noexcept {
        return finish_index_lanes(x, front_end, read_only(out.index_q_raw), positions, out.index_q);
      },
      [&]() noexcept {
        return front_end.product(x, hidden, weights.weights_proj, out.head_weights_raw);
      },
      [&]() noexcept {
        return scale(x, read_only(one_head(out.head_weights_raw)),
                     static_cast<float>(index_weight_scale(config)), one_head(out.head_weights));
      });
}

/// The query side of rows:
///   q_resid    = rms_norm(q_a_proj hidden),  q = q_b_proj q_resid, per head nope | rope
///   q_absorbed = W_UK^T q_nope | rotate(q_rope)
/// and, with indexer weights, `project_index_queries`. Other parameters and errors as there.
/// @source transformers GlmMoeDsaAttention, release 5.24.0; the absorbed form as in
/// DeepSeek-V3.2-Exp inference/model.py, MLA.forward, commit 3b99a53
template <class Product, Executor X, class T>
Status project_queries(X const& x, FrontEnd<Product> const& front_end,
                       AttentionWeights<X::space, T> const& weights,
                       Tensor<X::space, float const, 2> const& hidden,
                       PositionView<X::space> const& positions,
                       QuerySide<X::space> const& out) noexcept {
  using namespace detail;
  static_assert(MatrixProduct<Product, X, T>, "see MatrixProduct in frontend/product.hpp");
  ModelConfig const& config = front_end.config;
  index_t const rows = hidden.extent(0);
  index_t const heads = config.num_attention_heads;
  index_t const nope = config.qk_nope_head_dim;
  index_t const rope = config.qk_rope_head_dim;
  index_t const latent = config.kv_lora_rank;
  if (Status const status = first_failure(
          {check_tokens(config, hidden, positions), check_weights(config, weights),
           check_recipe(front_end), check_activation("q_a", out.q_a, rows, config.q_lora_rank),
           check_activation("q_resid", out.q_resid, rows, config.q_lora_rank),
           check_activation("q", out.q, rows, heads, nope + rope),
           check_activation("q_absorbed", out.q_absorbed, rows, heads, latent + rope),
           weights.indexer ? check_index_queries(config, rows, out) : Status{}});
      !status.ok()) {
    return status;
  }
  return run_steps(
      [&]() noexcept { return front_end.product(x, hidden, weights.q_a_proj, out.q_a); },
      [&]() noexcept {
        return rms_norm(x, read_only(out.q_a), weights.q_a_layernorm, config.norm_eps.latent,
                        out.q_resid);
      },
      [&]() noexcept {
        return front_end.product(x, read_only(out.q_resid), weights.q_b_proj, flat_heads(out.q));
      },
      [&]() noexcept {
        return rotate(x, read_only(lanes_of(out.q, nope, rope)), positions, front_end.frequencies,
                      config.rope.layout, out.q_rope(config));
      },
      [&]() noexcept {
        return for_each_head(heads, [&](index_t head) noexcept {
          return front_end.product(x, read_only(head_of(lanes_of(out.q, 0, nope), head)),
                                   transposed(w_uk(config, weights.kv_b_proj, head)),
                                   head_of(lanes_of(out.q_absorbed, 0, latent), head));
        });
      },
      [&]() noexcept {
        return weights.indexer
                   ? project_index_queries(x, front_end, *weights.indexer, read_only(out.q_resid),
                                           hidden, positions, out)
                   : Status{};
      });
}

/// Inputs of the indexer of a full layer.
template <class Product, Space S, class KeyFormat>
typename ReluDotIndexer<float, KeyFormat>::template inputs<S> indexer_inputs(
    FrontEnd<Product> const& front_end, QuerySide<S> const& side,
    CacheView<S, KeyFormat> const& keys) noexcept {
  return {detail::read_only(side.index_q), detail::read_only(side.head_weights), keys,
          front_end.index_basis};
}

/// Inputs of the attention: the absorbed queries, the model's softmax scale and its sinks.
template <class Product, Space S, class T, class KvFormat>
MlaInputs<float, KvFormat, S> attention_inputs(FrontEnd<Product> const& front_end,
                                               AttentionWeights<S, T> const& weights,
                                               QuerySide<S> const& side,
                                               CacheView<S, KvFormat> const& kv) noexcept {
  ModelConfig const& config = front_end.config;
  return {detail::read_only(side.q_absorbed), kv, static_cast<float>(softmax_scale(config)),
          config.learnable_sink ? weights.sinks : SinkView<S>{}};
}

}  // namespace v0
}  // namespace indexshare
