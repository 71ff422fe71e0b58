// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/detail/append.hpp>
#include <indexshare/frontend/front_end.hpp>
#include <indexshare/frontend/keys.hpp>
#include <indexshare/frontend/steps.hpp>
#include <indexshare/scale_recipe.hpp>

/// @file From the raw projections of new tokens straight into the caches: `write_index_keys` and
/// `write_kv` normalise, rotate, change the basis, quantise and write in one step, without
/// activations in memory. Back ends: host/cache_writes.hpp, cuda/cache_writes.cuh.

namespace indexshare {
inline namespace v0 {

/// New tokens of any requests, in any order.
template <Space S>
struct NewTokens {
  PositionView<S> rotary{};   ///< [tokens] what the rotary lanes turn by
  LengthView<S> positions{};  ///< [tokens] token number in its request: the place in the cache
  LengthView<S> requests{};   ///< [tokens] line of the page table
};

namespace detail {

/// A row is made in memory of this size: on a thread's stack, or in a block's shared memory.
inline constexpr index_t most_lanes_to_write = 8192;

/// What a message calls the raw rows.
struct RawNames {
  char const* lanes;
  char const* most;
};
inline constexpr RawNames raw_index_key_names{
    "lanes of the raw index keys (index_head_dim)",
    "lanes of index keys that are normalised and written in one step"};
inline constexpr RawNames raw_kv_names{
    "lanes of the raw KV projection (kv_lora_rank + qk_rope_head_dim)",
    "lanes of KV rows that are normalised and written in one step"};

/// `norm` is the check of the norm's weights, `basis` what the rows are written in.
template <class Product, Space S, class Raw, class Cache>
Status check_write(RawNames const& names, FrontEnd<Product> const& front_end, Status const& norm,
                   index_t lanes, LaneBasis basis, Tensor<S, Raw const, 2> const& raw,
                   NewTokens<S> const& tokens, PageTable<S> const& pages, Cache const& cache,
                   ScaleRecipe const& recipe) noexcept {
  return first_failure(
      {check_recipe(front_end), norm, check_extent(names.lanes, lanes, raw.extent(1)),
       lanes <= most_lanes_to_write
           ? Status{}
           : failure(Errc::unsupported, names.most, most_lanes_to_write, lanes),
       check_extent("rotary positions of the new tokens", raw.extent(0), tokens.rotary.extent(0)),
       check_readable("rotary positions", tokens.rotary),
       check_append(raw, tokens.positions, tokens.requests, pages, cache, recipe),
       check_basis_of_cache(basis, cache.basis)});
}

template <class Product, Space S, class T, class Raw, class Cache>
Status check_write_index_keys(FrontEnd<Product> const& front_end,
                              IndexerWeights<S, T> const& weights,
                              Tensor<S, Raw const, 2> const& raw, NewTokens<S> const& tokens,
                              PageTable<S> const& pages, Cache const& cache,
                              ScaleRecipe const& recipe) noexcept {
  index_t const lanes = front_end.config.index_head_dim;
  Status const norm =
      first_failure({check_vector("indexer.k_norm.weight", weights.k_norm_weight, lanes),
                     check_vector("indexer.k_norm.bias", weights.k_norm_bias, lanes)});
  return check_write(raw_index_key_names, front_end, norm, lanes, front_end.index_basis, raw,
                     tokens, pages, cache, recipe);
}

template <class Product, Space S, class Raw, class Cache>
Status check_write_kv(FrontEnd<Product> const& front_end, VectorView<S> const& kv_a_layernorm,
                      Tensor<S, Raw const, 2> const& kv_a, NewTokens<S> const& tokens,
                      PageTable<S> const& pages, Cache const& cache,
                      ScaleRecipe const& recipe) noexcept {
  ModelConfig const& config = front_end.config;
  return check_write(raw_kv_names, front_end,
                     check_vector("kv_a_layernorm", kv_a_layernorm, config.kv_lora_rank),
                     config.kv_lora_rank + config.qk_rope_head_dim, LaneBasis::natural, kv_a,
                     tokens, pages, cache, recipe);
}

}  // namespace detail
}  // namespace v0
}  // namespace indexshare
