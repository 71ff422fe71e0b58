// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/cuda/detail/attend_finish.cuh>
#include <indexshare/cuda/detail/attend_load.cuh>

#include <cstddef>
#include <cstdint>

/// @file Attention in fp32 for all types and widths. A block takes the keys of one split of a row
/// in tiles of 16, for 8 heads and 512 value lanes. Each tile is decoded into shared memory for all
/// heads; rows above AttendAny::resident_lanes lanes are decoded in chunks.
///
/// Logits: 8 threads per pair of key and head sum every eighth group of four lanes, then add up in
/// pairs. Values and weights: keys in the order of the list, so that entries without a slot, whose
/// weight is 0, leave no trace.

namespace indexshare {
inline namespace v0 {
namespace detail {

/// One lane of a row as fp32.
template <class T>
__device__ inline float decode_lane(CacheView<Space::device, format::Plain<T>> const&, T const* row,
                                    int lane) {
  return to_float(row[lane]);
}
__device__ inline float decode_lane(CacheView<Space::device, format::LatentE4m3> const& cache,
                                    std::byte const* row, int lane) {
  auto const latent = static_cast<int>(cache.format.latent);
  auto const tile = static_cast<std::uint32_t>(cache.format.tile);
  std::byte const* const scales = row + latent;
  if (lane < latent) {
    auto const scale = load_unaligned<float>(scales + lane / tile * 4);
    return to_float(e4m3{static_cast<std::uint8_t>(row[lane])}) * scale;
  }
  std::byte const* const rope = scales + (latent + tile - 1) / tile * 4;
  return to_float(load_unaligned<bf16>(rope + (lane - latent) * 2));
}

template <class Query, class KvFormat, class Out>
class AttendAnyBlock {
 public:
  using Call = AttendCall<Query, KvFormat, Out>;
  using B = AttendAny;

  __device__ AttendAnyBlock(Call const& call, AttendPlace const& place, std::uint32_t value_group,
                            float* shared)
      : call_(call),
        place_(place),
        key_dim_(static_cast<int>(call.in.q.extent(2))),
        chunk_(B::chunk_lanes(key_dim_)),
        line_(B::line(key_dim_)),
        first_value_(static_cast<int>(value_group) * B::values_per_block),
        queries_(shared),
        keys_(queries_ + B::heads * line_),
        weights_(keys_ + B::tile * line_),
        factors_(weights_ + B::tile * B::heads),
        slots_(reinterpret_cast<position_t*>(factors_ + 2 * B::heads)) {}

  __device__ void run() {
    if (resident()) load_queries(0);
    for (std::uint32_t first = place_.first_key; first < place_.last_key; first += B::tile) {
      __syncthreads();  // nobody reads the tile before it any more
      look_up(first);
      __syncthreads();  // the slots are there
      logits();
      __syncthreads();  // the logits are there
      weigh();
      if (!resident()) load_keys(first_value_, B::values_per_block);
      __syncthreads();  // the weights and factors, and the values of longer rows, are there
      gather();
    }
    finish();
  }

 private:
  static constexpr int columns = B::values_per_block / B::threads;  ///< value lanes of a thread
  static constexpr float log2_e = 1.4426950408889634f;

  __device__ static int thread() { return static_cast<int>(threadIdx.x); }
  __device__ bool resident() const { return chunk_ == key_dim_; }
  /// Sixteen threads share the softmax of a head.
  __device__ static bool weighs() { return thread() < B::heads * B::tile; }
  __device__ static int softmax_head() { return thread() / B::tile; }
  __device__ static int softmax_key() { return thread() % B::tile; }
  __device__ int heads() const {
    return static_cast<int>(call_.out.out.extent(1)) - place_.first_head;
  }

  __device__ void look_up(std::uint32_t first) {
    if (thread() >= B::tile) return;
    std::uint32_t const entry = first + threadIdx.x;
    position_t const slot =
        entry < place_.last_key ? place_.list.slot(call_.keys, entry) : no_position;
    slots_[thread()] = call_.rows.has(slot) ? slot : no_position;
  }

  /// Lanes [first, first + chunk) of the queries, zeros up to the end of the line.
  __device__ void load_queries(int first) {
    auto const& q = call_.in.q;
    int const lane = thread() % 32;
    for (int head = thread() / 32; head < B::heads; head += B::threads / 32) {
      bool const exists = head < heads();
      Query const* const row =
          q.data_handle() +
          (exists ? place_.row * q.stride(0) + (place_.first_head + head) * q.stride(1) : 0);
      for (int i = lane; i < line_; i += 32) {
        bool const inside = exists && i < chunk_ && first + i < key_dim_;
        queries_[head * line_ + i] = inside ? to_float(row[first + i]) : 0.0f;
      }
    }
  }
  /// Lanes [first, first + count) of the tile's keys, zeros up to the end of the line and for keys
  /// without a slot.
  __device__ void load_keys(int first, int count) {
    int const lane = thread() % 32;
    for (int key = thread() / 32; key < B::tile; key += B::threads / 32) {
      position_t const slot = slots_[key];
      auto const* row = call_.in.kv.data;
      if (slot >= 0) row = reinterpret_cast<decltype(row)>(call_.rows.row(slot));
      for (int i = lane; i < line_; i += 32) {
        bool const inside = slot >= 0 && i < count && first + i < key_dim_;
        keys_[key * line_ + i] = inside ? decode_lane(call_.in.kv, row, first + i) : 0.0f;
      }
    }
  }

  __device__ void logits() {
    constexpr int heads_per_thread = 4;
    int const slice = thread() % 8;
    int const key = thread() / 8 % B::tile;
    int const first_head = thread() / (8 * B::tile) * heads_per_thread;
    float sums[heads_per_thread] = {};
    for (int first = 0; first < key_dim_; first += chunk_) {
      if (first > 0) __syncthreads();  // nobody reads the chunk before it any more
      if (!resident()) load_queries(first);
      load_keys(first, chunk_);
      __syncthreads();  // the chunk is there
      for (int lane = 4 * slice; lane < chunk_; lane += 32) {
        float4 const k = *reinterpret_cast<float4 const*>(keys_ + key * line_ + lane);
        for (int h = 0; h < heads_per_thread; ++h) {
          float4 const q =
              *reinterpret_cast<float4 const*>(queries_ + (first_head + h) * line_ + lane);
          sums[h] = fmaf(q.x, k.x, sums[h]);
          sums[h] = fmaf(q.y, k.y, sums[h]);
          sums[h] = fmaf(q.z, k.z, sums[h]);
          sums[h] = fmaf(q.w, k.w, sums[h]);
        }
      }
    }
    for (int h = 0; h < heads_per_thread; ++h) {
      for (int step = 1; step < 8; step *= 2) {
        sums[h] += __shfl_xor_sync(full_warp, sums[h], step);
      }
      if (slice == 0) weights_[key * B::heads + first_head + h] = sums[h];
    }
    if (!resident()) __syncthreads();  // the values may take the place of the keys
  }

  __device__ void weigh() {
    if (!weighs()) return;
    float& weight = weights_[softmax_key() * B::heads + softmax_head()];
    float const x =
        slots_[softmax_key()] < 0 ? minus_infinity() : weight * (call_.in.scale * log2_e);
    float most = x;
    for (int step = 1; step < B::tile; step *= 2) {
      most = fmaxf(most, __shfl_xor_sync(full_warp, most, step));
    }
    float const next = fmaxf(reference_, most);
    float const factor = exp2f(reference_ - next);
    reference_ = next;
    float const w = exp2f(x - next);
    weight = w;
    total_ *= factor;
    for (int key = 0; key < B::tile; ++key) total_ += __shfl_sync(full_warp, w, key, B::tile);
    if (softmax_key() == 0) factors_[softmax_head()] = factor;
  }

  __device__ void gather() {
    int const first = resident() ? first_value_ : 0;
    for (int i = 0; i < columns; ++i) {
      int const lane = thread() + i * B::threads;
      if (first_value_ + lane >= call_.out.out.extent(2)) continue;
      for (int h = 0; h < B::heads; ++h) values_[i][h] *= factors_[h];
      for (int key = 0; key < B::tile; ++key) {
        float const v = keys_[key * line_ + first + lane];
        for (int h = 0; h < B::heads; ++h) {
          values_[i][h] = fmaf(weights_[key * B::heads + h], v, values_[i][h]);
        }
      }
    }
  }

  __device__ void finish() {
    float* const finals = factors_ + B::heads;  // apart from the factors of the last tile
    if (weighs() && softmax_key() == 0) {
      int const head = softmax_head();
      finals[head] = 1.0f;
      if (head < heads() && call_.splits > 1) {
        // every group of values writes the same
        call_.partials.references[part_of(call_, place_) + head] = reference_;
        call_.partials.sums[part_of(call_, place_) + head] = total_;
      } else if (head < heads()) {
        finals[head] = finish_head<Out>(call_.in.sink, call_.out.lse, place_.row,
                                        place_.first_head + head, reference_, total_);
      }
    }
    __syncthreads();  // the factors are there
    auto const& out = call_.out.out;
    for (int i = 0; i < columns; ++i) {
      index_t const lane = index_t{first_value_} + thread() + i * B::threads;
      if (lane >= out.extent(2)) continue;
      for (int h = 0; h < B::heads; ++h) {
        if (h >= heads()) break;
        if (call_.splits > 1) {
          call_.partials.values[(part_of(call_, place_) + h) * out.extent(2) + lane] =
              values_[i][h];
        } else {
          out(place_.row, place_.first_head + h, lane) = from_float<Out>(values_[i][h] * finals[h]);
        }
      }
    }
  }

  Call const& call_;
  AttendPlace const& place_;
  int key_dim_;
  int chunk_;
  int line_;
  int first_value_;
  float* queries_;     ///< [heads][line]
  float* keys_;        ///< [tile][line]
  float* weights_;     ///< [tile][heads]: sums of lanes, then weights
  float* factors_;     ///< [heads] of a tile, then [heads] of the end
  position_t* slots_;  ///< [tile], no_position where there is no row
  float reference_ = lowest_reference;
  float total_ = 0;
  float values_[columns][B::heads] = {};
};

template <class Query, class KvFormat, class Out>
INDEXSHARE_KERNEL void __launch_bounds__(AttendAny::threads)
    attend_any_kernel(__grid_constant__ AttendCall<Query, KvFormat, Out> const call) {
  extern __shared__ __align__(128) std::byte attend_shared[];
  std::uint32_t const groups = call.value_groups;
  AttendPlace const place = place_of_block(call, AttendAny::heads, blockIdx.x / groups);
  AttendAnyBlock<Query, KvFormat, Out>(call, place, blockIdx.x % groups,
                                       reinterpret_cast<float*>(attend_shared))
      .run();
}

}  // namespace detail
}  // namespace v0
}  // namespace indexshare
