// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/frontend/activations.hpp>
#include <indexshare/frontend/front_end.hpp>
#include <indexshare/frontend/steps.hpp>

namespace indexshare {
inline namespace v0 {

/// The output of the self-attention module:
///   attention = W_UV latent output, per head;  gated = attention * sigmoid(gate_proj hidden);
///   output    = o_proj gated
/// @param hidden  [rows, hidden] input of the module; read only by a gated model
/// @param latent  [rows, heads, latent] output of the layer's attention
/// Errors: bad_shape, bad_stride, missing_input; whatever the product returns. Allocates nothing.
/// @source transformers GlmMoeDsaAttention and HYV4Attention (gate), release 5.24.0
template <class Product, Executor X, class T>
Status project_output(X const& x, FrontEnd<Product> const& front_end,
                      AttentionWeights<X::space, T> const& weights,
                      Tensor<X::space, float const, 2> const& hidden,
                      Tensor<X::space, float const, 3> const& latent,
                      OutputSide<X::space> const& out) noexcept {
  using namespace detail;
  static_assert(MatrixProduct<Product, X, T>, "see MatrixProduct in frontend/product.hpp");
  ModelConfig const& config = front_end.config;
  index_t const rows = latent.extent(0);
  index_t const heads = config.num_attention_heads;
  bool const gates = config.gated_output;
  if (Status const status = first_failure(
          {check_weights(config, weights), gates ? check_hidden(config, hidden) : Status{},
           gates ? check_extent("rows of the hidden states against the attention output", rows,
                                hidden.extent(0))
                 : Status{},
           check_extent("heads of the attention output", heads, latent.extent(1)),
           check_extent("lanes of the attention output", config.kv_lora_rank, latent.extent(2)),
           check_readable("attention output", latent),
           check_activation("attention", out.attention, rows, heads, config.v_head_dim),
           gates ? check_activation("gate", out.gate, rows, heads, config.v_head_dim) : Status{},
           gates ? check_activation("gated", out.gated, rows, heads, config.v_head_dim) : Status{},
           check_activation("output", out.output, rows, config.hidden_size)});
      !status.ok()) {
    return status;
  }
  return run_steps(
      [&]() noexcept {
        return for_each_head(heads, [&](index_t head) noexcept {
          return front_end.product(x, head_of(latent, head), w_uv(config, weights.kv_b_proj, head),
                                   head_of(out.attention, head));
        });
      },
      [&]() noexcept {
        if (!gates) return Status{};
        Status const status = front_end.product(x, hidden, weights.gate_proj, flat_heads(out.gate));
        return status.ok() ? gate(x, read_only(out.attention), read_only(out.gate), out.gated)
                           : status;
      },
      [&]() noexcept {
        auto const& projected = gates ? out.gated : out.attention;
        return front_end.product(x, read_only(flat_heads(projected)), weights.o_proj, out.output);
      });
}

}  // namespace v0
}  // namespace indexshare
