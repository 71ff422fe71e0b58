// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/cache.hpp>
#include <indexshare/detail/append.hpp>
#include <indexshare/frontend/activations.hpp>
#include <indexshare/frontend/front_end.hpp>
#include <indexshare/frontend/steps.hpp>
#include <indexshare/scale_recipe.hpp>

#include <cstdint>

namespace indexshare {
inline namespace v0 {

/// The key side of tokens:
///   kv_row  = rms_norm(latent lanes of kv_a_proj hidden) | rotate(its last lanes)
///   index_k = basis(rotate(layer_norm(wk hidden)))      with indexer weights only
/// `append_kv` and `append_index_keys` write them to the caches. Parameters and errors as for
/// `project_queries`.
/// @source transformers GlmMoeDsaAttention and GlmMoeDsaIndexer, release 5.24.0
template <class Product, Executor X, class T>
Status project_keys(X const& x, FrontEnd<Product> const& front_end,
                    AttentionWeights<X::space, T> const& weights,
                    Tensor<X::space, float const, 2> const& hidden,
                    PositionView<X::space> const& positions,
                    KeySide<X::space> const& out) noexcept {
  using namespace detail;
  static_assert(MatrixProduct<Product, X, T>, "see MatrixProduct in frontend/product.hpp");
  ModelConfig const& config = front_end.config;
  index_t const tokens = hidden.extent(0);
  index_t const rope = config.qk_rope_head_dim;
  index_t const latent = config.kv_lora_rank;
  index_t const index_dim = weights.indexer ? config.index_head_dim : 0;
  if (Status const status = first_failure(
          {check_tokens(config, hidden, positions), check_weights(config, weights),
           check_recipe(front_end), check_activation("kv_a", out.kv_a, tokens, latent + rope),
           check_activation("kv_row", out.kv_row, tokens, latent + rope),
           weights.indexer
               ? first_failure(
                     {check_activation("index_k_raw", out.index_k_raw, tokens, index_dim),
                      check_activation("index_k_norm", out.index_k_norm, tokens, index_dim),
                      check_activation("index_k", out.index_k, tokens, index_dim)})
               : Status{}});
      !status.ok()) {
    return status;
  }
  return run_steps(
      [&]() noexcept { return front_end.product(x, hidden, weights.kv_a_proj, out.kv_a); },
      [&]() noexcept {
        return rms_norm(x, read_only(lanes_of(out.kv_a, 0, latent)), weights.kv_a_layernorm,
                        config.norm_eps.latent, lanes_of(out.kv_row, 0, latent));
      },
      [&]() noexcept {
        return rotate(x, read_only(one_head(lanes_of(out.kv_a, latent, rope))), positions,
                      front_end.frequencies, config.rope.layout,
                      one_head(lanes_of(out.kv_row, latent, rope)));
      },
      [&]() noexcept {
        if (!weights.indexer) return Status{};
        auto const& indexer = *weights.indexer;
        return run_steps(
            [&]() noexcept { return front_end.product(x, hidden, indexer.wk, out.index_k_raw); },
            [&]() noexcept {
              return layer_norm(x, read_only(out.index_k_raw), indexer.k_norm_weight,
                                indexer.k_norm_bias, config.norm_eps.index_key, out.index_k_norm);
            },
            [&]() noexcept {
              return finish_index_lanes(x, front_end, read_only(one_head(out.index_k_norm)),
                                        positions, one_head(out.index_k));
            });
      });
}

namespace detail {

constexpr Status check_basis_of_cache(LaneBasis expected, LaneBasis got) noexcept {
  return expected == got
             ? Status{}
             : failure(Errc::bad_value, "basis of the cache to append to (0 natural, 1 hadamard)",
                       static_cast<std::int64_t>(expected), static_cast<std::int64_t>(got));
}

/// append_rows, with the recipe where the cache's format has codes by one.
template <Executor X, class Cache>
Status append_rows_by(X const& x, ScaleRecipe const& recipe,
                      Tensor<X::space, float const, 2> const& rows,
                      PositionView<X::space> const& positions, LengthView<X::space> const& requests,
                      PageTable<X::space> const& pages, Cache const& cache) noexcept {
  if constexpr (has_e4m3_codes<typename Cache::format_type>) {
    return append_rows(x, rows, positions, requests, pages, cache, recipe);
  } else {
    return append_rows(x, rows, positions, requests, pages, cache);
  }
}

}  // namespace detail

/// Writes a key side into its caches, one call per cache. Do it on every layer, for every token,
/// before rows that see the token run; also where a selection will be reused or everything is
/// selected. The index-key cache must be marked with the front end's index basis, a KV cache is
/// natural. `write_index_keys` and `write_kv` do the same from raw projections, in one step.
///
/// @param positions  [tokens] positions within the request, not the rotary ones
/// @param requests   [tokens] line of the page table
/// @param recipe     of the scales of a cache of e4m3 codes; other formats have no use for it
/// Errors: those of `append_rows`; bad_value if the cache has another basis.
template <class Product, Executor X, class Cache>
Status append_index_keys(X const& x, FrontEnd<Product> const& front_end,
                         KeySide<X::space> const& side, PositionView<X::space> const& positions,
                         LengthView<X::space> const& requests, PageTable<X::space> const& pages,
                         Cache const& cache, ScaleRecipe const& recipe = {}) noexcept {
  Status const status = detail::check_basis_of_cache(front_end.index_basis, cache.basis);
  if (!status.ok()) return status;
  return detail::append_rows_by(x, recipe, detail::read_only(side.index_k), positions, requests,
                                pages, cache);
}
template <Executor X, class Cache>
Status append_kv(X const& x, KeySide<X::space> const& side, PositionView<X::space> const& positions,
                 LengthView<X::space> const& requests, PageTable<X::space> const& pages,
                 Cache const& cache, ScaleRecipe const& recipe = {}) noexcept {
  Status const status = detail::check_basis_of_cache(LaneBasis::natural, cache.basis);
  if (!status.ok()) return status;
  return detail::append_rows_by(x, recipe, detail::read_only(side.kv_row), positions, requests,
                                pages, cache);
}

/// The expanded form of KV rows, for engines that prefill with it and for checks:
///   keys[s, h] = W_UK[h] latent | rope,  values[s, h] = W_UV[h] latent.
/// q . keys equals q_absorbed . kv_row, up to rounding.
/// @param kv_rows  [tokens, latent + rope] as in the KV cache
/// @param keys     [tokens, heads, nope + rope];  values [tokens, heads, v]
/// Errors: bad_shape, bad_stride, missing_input; whatever the product returns.
template <class Product, Executor X, class T>
Status expand_keys(X const& x, FrontEnd<Product> const& front_end,
                   AttentionWeights<X::space, T> const& weights,
                   Tensor<X::space, float const, 2> const& kv_rows,
                   Tensor<X::space, float, 3> const& keys,
                   Tensor<X::space, float, 3> const& values) noexcept {
  using namespace detail;
  static_assert(MatrixProduct<Product, X, T>, "see MatrixProduct in frontend/product.hpp");
  ModelConfig const& config = front_end.config;
  index_t const tokens = kv_rows.extent(0);
  index_t const heads = config.num_attention_heads;
  index_t const nope = config.qk_nope_head_dim;
  index_t const rope = config.qk_rope_head_dim;
  index_t const latent = config.kv_lora_rank;
  if (Status const status = first_failure(
          {check_weights(config, weights),
           check_extent("lanes of the KV rows", latent + rope, kv_rows.extent(1)),
           check_readable("KV rows", kv_rows),
           check_activation("expanded keys", keys, tokens, heads, nope + rope),
           check_activation("expanded values", values, tokens, heads, config.v_head_dim)});
      !status.ok()) {
    return status;
  }
  auto const latents = lanes_of(kv_rows, 0, latent);
  auto const rotated = one_head(lanes_of(kv_rows, latent, rope));
  return for_each_head(heads, [&](index_t head) noexcept {
    return run_steps(
        [&]() noexcept {
          return front_end.product(x, latents, w_uk(config, weights.kv_b_proj, head),
                                   head_of(lanes_of(keys, 0, nope), head));
        },
        [&]() noexcept {
          return scale(x, rotated, 1.0f, one_head(head_of(lanes_of(keys, nope, rope), head)));
        },
        [&]() noexcept {
          return front_end.product(x, latents, w_uv(config, weights.kv_b_proj, head),
                                   head_of(values, head));
        });
  });
}

}  // namespace v0
}  // namespace indexshare
