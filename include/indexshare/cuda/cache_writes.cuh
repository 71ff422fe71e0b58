// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/cuda/append.cuh>
#include <indexshare/cuda/detail/launch.cuh>
#include <indexshare/cuda/detail/lines.cuh>
#include <indexshare/cuda/exec.cuh>
#include <indexshare/cuda/frontend.cuh>
#include <indexshare/frontend/cache_writes.hpp>

namespace indexshare {
inline namespace v0 {
namespace detail {

static_assert(most_lanes_to_write * sizeof(float) <= plain_shared_bytes);

// A row is made by a block of row_threads(width of the norm) threads, in shared memory.

/// Index keys: the norm over all lanes, in place from then on.
template <class Raw>
struct MakeIndexKey {
  Tensor<Space::device, Raw const, 2> raw;
  PositionView<Space::device> rotary;
  VectorView<Space::device> gain;
  VectorView<Space::device> bias;
  double eps;
  RotaryFrequencies frequencies;
  RopeLayout layout;
  index_t rope_first;
  LaneBasis basis;

  __device__ void operator()(index_t i, float* lanes) const {
    index_t const n = raw.extent(1);
    layer_norm_in_block(
        n, [&](index_t k) { return to_float(raw(i, k)); }, gain, bias, eps,
        [&](index_t k) -> float& { return lanes[k]; });
    __syncthreads();
    auto const rotated = [&](int k) -> float& { return lanes[rope_first + k]; };
    auto const pairs = static_cast<int>(frequencies.pairs);
    share_in_block(pairs, [&](int pair) {
      rotate_pair(PairPlaces(layout, pairs), pair, turn_of(rotary(i), frequencies, pair), rotated,
                  rotated);
    });
    if (basis != LaneBasis::hadamard) return;
    auto const width = static_cast<int>(n);
    butterflies(lanes, width, 1);
    __syncthreads();
    float const factor = hadamard_factor(width);
    share_in_block(width, [&](int k) { lanes[k] *= factor; });
  }
};

/// KV rows: the norm over the latent lanes, the others rotated.
template <class Raw>
struct MakeKvRow {
  Tensor<Space::device, Raw const, 2> raw;
  PositionView<Space::device> rotary;
  VectorView<Space::device> gain;
  double eps;
  RotaryFrequencies frequencies;
  RopeLayout layout;

  __device__ void operator()(index_t i, float* lanes) const {
    index_t const latent = gain.extent(0);
    rms_norm_in_block(
        latent, [&](index_t k) { return to_float(raw(i, k)); }, gain, eps,
        [&](index_t k) -> float& { return lanes[k]; });
    auto const pairs = static_cast<int>(frequencies.pairs);
    share_in_block(pairs, [&](int pair) {
      rotate_pair(
          PairPlaces(layout, pairs), pair, turn_of(rotary(i), frequencies, pair),
          [&](int k) { return to_float(raw(i, latent + k)); },
          [&](int k) -> float& { return lanes[latent + k]; });
    });
  }
};

/// A block per token; the parts of its row are shared out over the block's warps.
template <class Make, class Cache>
INDEXSHARE_KERNEL void write_rows_kernel(__grid_constant__ Make const make,
                                         __grid_constant__ NewTokens<Space::device> const tokens,
                                         __grid_constant__ PageTable<Space::device> const pages,
                                         __grid_constant__ Cache const cache, ScaleRecipe recipe) {
  extern __shared__ float made[];
  constexpr unsigned warp_threads = LaneRange::warp_threads;
  index_t const member = threadIdx.x % warp_threads;
  for (index_t i = blockIdx.x; i < tokens.positions.extent(0); i += gridDim.x) {
    index_t const slot = pages.slot(tokens.requests(i), tokens.positions(i));
    if (!cache.has(slot)) continue;  // the whole block
    make(i, made);                   // its sums have barriers, before it writes over the last row
    __syncthreads();
    for (index_t part = threadIdx.x / warp_threads; part < parts_of_row(cache);
         part += blockDim.x / warp_threads) {
      store_part(cache, slot, part, member, recipe, [&](index_t lane) { return made[lane]; });
    }
  }
}

/// `norm_width` lanes are summed by the norm.
template <class Make, class Cache>
Status write_rows(CudaExec const& x, char const* what, index_t norm_width, Make const& make,
                  NewTokens<Space::device> const& tokens, PageTable<Space::device> const& pages,
                  Cache const& cache, ScaleRecipe const& recipe) noexcept {
  return launch(x, what, write_rows_kernel<Make, Cache>,
                {dim3(blocks_for(tokens.positions.extent(0))), row_threads(norm_width),
                 static_cast<int>(cache.lanes * index_t{sizeof(float)})},
                make, tokens, pages, cache, recipe);
}

}  // namespace detail

/// Index keys of new tokens from their raw projection into a cache: parameters and errors as on the
/// host (host/cache_writes.hpp), into the formats that `append_rows` writes here, and the bytes
/// that the steps of this back end give one by one. A token without a slot is skipped. Only
/// enqueues, one kernel; can be captured.
template <class Product, class T, Element Raw, class Format>
Status write_index_keys(CudaExec const& x, FrontEnd<Product> const& front_end,
                        IndexerWeights<Space::device, T> const& weights,
                        Tensor<Space::device, Raw const, 2> const& raw,
                        NewTokens<Space::device> const& tokens,
                        PageTable<Space::device> const& pages,
                        CacheView<Space::device, Format, typename Format::storage> const& cache,
                        ScaleRecipe const& recipe = {}) noexcept {
  using namespace detail;
  if (Status const status =
          check_write_index_keys(front_end, weights, raw, tokens, pages, cache, recipe);
      !status.ok()) {
    return status;
  }
  ModelConfig const& config = front_end.config;
  return write_rows(
      x, "write_index_keys", config.index_head_dim,
      MakeIndexKey<Raw>{raw, tokens.rotary, weights.k_norm_weight, weights.k_norm_bias,
                        config.norm_eps.index_key, front_end.frequencies,
                        config.indexer_rope.layout, rope_begin(config), front_end.index_basis},
      tokens, pages, cache, recipe);
}

/// KV rows of new tokens from their raw projection into a cache: as `write_index_keys`.
template <class Product, Element Raw, class Format>
Status write_kv(CudaExec const& x, FrontEnd<Product> const& front_end,
                VectorView<Space::device> const& kv_a_layernorm,
                Tensor<Space::device, Raw const, 2> const& kv_a,
                NewTokens<Space::device> const& tokens, PageTable<Space::device> const& pages,
                CacheView<Space::device, Format, typename Format::storage> const& cache,
                ScaleRecipe const& recipe = {}) noexcept {
  using namespace detail;
  if (Status const status =
          check_write_kv(front_end, kv_a_layernorm, kv_a, tokens, pages, cache, recipe);
      !status.ok()) {
    return status;
  }
  ModelConfig const& config = front_end.config;
  return write_rows(x, "write_kv", config.kv_lora_rank,
                    MakeKvRow<Raw>{kv_a, tokens.rotary, kv_a_layernorm, config.norm_eps.latent,
                                   front_end.frequencies, config.rope.layout},
                    tokens, pages, cache, recipe);
}

}  // namespace v0
}  // namespace indexshare
