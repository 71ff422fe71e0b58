// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/exec.hpp>
#include <indexshare/frontend/cache_writes.hpp>
#include <indexshare/host/append.hpp>
#include <indexshare/host/frontend_rows.hpp>
#include <indexshare/host/rows.hpp>

namespace indexshare {
inline namespace v0 {
namespace detail {

/// make(i, lanes) makes token i's row, which goes into the cache.
template <HostSpaceExecutor X, class Cache, class Make>
Status write_rows(X const& x, NewTokens<Space::host> const& tokens,
                  PageTable<Space::host> const& pages, Cache const& cache,
                  ScaleRecipe const& recipe, Make const& make) noexcept {
  Status const status = check_slots_of_tokens(tokens.positions, tokens.requests, pages, cache);
  if (!status.ok()) return status;
  for_each_row(x, tokens.positions.extent(0), [&](index_t i) noexcept {
    float lanes[most_lanes_to_write];
    make(i, lanes);
    store_row(cache, pages.slot(tokens.requests(i), tokens.positions(i)), recipe,
              [&](index_t lane) noexcept { return lanes[lane]; });
  });
  return {};
}

}  // namespace detail

/// Index keys of new tokens from their raw projection, into a cache of any format that
/// `append_rows` writes: basis(rotate(layer_norm(raw))), as `project_keys` and `append_index_keys`
/// make them, with the same bytes on each back end. Each full layer does it for every token, before
/// rows that see the token run.
///
/// @param weights  k_norm_weight and k_norm_bias [index_head_dim]; the matrices are not read
/// @param raw      [tokens, index_head_dim] wk * hidden, in any element type
/// @param tokens   distinct: what two tokens leave in one slot is undefined
/// @param cache    marked with the front end's index basis
/// @param recipe   of the scales of a cache of e4m3 codes; other formats have no use for it
/// Errors: those of `append_rows`; unsupported above 8192 lanes; bad_value if the cache has another
/// basis. Nothing is written on error. Allocates nothing; 32 KB of stack per worker.
template <HostSpaceExecutor X, class Product, class T, Element Raw, class Format>
Status write_index_keys(X const& x, FrontEnd<Product> const& front_end,
                        IndexerWeights<Space::host, T> const& weights,
                        Tensor<Space::host, Raw const, 2> const& raw,
                        NewTokens<Space::host> const& tokens, PageTable<Space::host> const& pages,
                        CacheView<Space::host, Format, typename Format::storage> const& cache,
                        ScaleRecipe const& recipe = {}) noexcept {
  using namespace detail;
  if (Status const status =
          check_write_index_keys(front_end, weights, raw, tokens, pages, cache, recipe);
      !status.ok()) {
    return status;
  }
  ModelConfig const& config = front_end.config;
  index_t const n = config.index_head_dim;
  return write_rows(x, tokens, pages, cache, recipe, [&](index_t i, float* lanes) noexcept {
    auto const lane = [&](index_t k) noexcept -> float& { return lanes[k]; };
    layer_norm_row(
        n, [&](index_t k) noexcept { return to_float(raw(i, k)); }, weights.k_norm_weight,
        weights.k_norm_bias, config.norm_eps.index_key, lane);
    auto const rotated = [&](index_t, index_t k) noexcept -> float& {
      return lanes[rope_begin(config) + k];
    };
    rotate_row(1, tokens.rotary(i), front_end.frequencies, config.indexer_rope.layout, rotated,
               rotated);
    if (front_end.index_basis == LaneBasis::hadamard) hadamard_row(n, lane);
  });
}

/// KV rows of new tokens from their raw projection, into a cache of any format that `append_rows`
/// writes: rms_norm(latent lanes) | rotate(the others), as `project_keys` and `append_kv` make
/// them, with the same bytes on each back end. Each layer does it for every token, before rows that
/// see the token run.
///
/// @param kv_a_layernorm  [kv_lora_rank]
/// @param kv_a            [tokens, kv_lora_rank + qk_rope_head_dim] kv_a_proj * hidden, in any
///                        element type
/// Others and errors: as for `write_index_keys`; a KV cache is natural.
template <HostSpaceExecutor X, class Product, Element Raw, class Format>
Status write_kv(X const& x, FrontEnd<Product> const& front_end,
                VectorView<Space::host> const& kv_a_layernorm,
                Tensor<Space::host, Raw const, 2> const& kv_a, NewTokens<Space::host> const& tokens,
                PageTable<Space::host> const& pages,
                CacheView<Space::host, Format, typename Format::storage> const& cache,
                ScaleRecipe const& recipe = {}) noexcept {
  using namespace detail;
  if (Status const status =
          check_write_kv(front_end, kv_a_layernorm, kv_a, tokens, pages, cache, recipe);
      !status.ok()) {
    return status;
  }
  ModelConfig const& config = front_end.config;
  index_t const latent = config.kv_lora_rank;
  return write_rows(x, tokens, pages, cache, recipe, [&](index_t i, float* lanes) noexcept {
    rms_norm_row(
        latent, [&](index_t k) noexcept { return to_float(kv_a(i, k)); }, kv_a_layernorm,
        config.norm_eps.latent, [&](index_t k) noexcept -> float& { return lanes[k]; });
    rotate_row(
        1, tokens.rotary(i), front_end.frequencies, config.rope.layout,
        [&](index_t, index_t k) noexcept { return to_float(kv_a(i, latent + k)); },
        [&](index_t, index_t k) noexcept -> float& { return lanes[latent + k]; });
  });
}

}  // namespace v0
}  // namespace indexshare
