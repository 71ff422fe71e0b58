// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/cuda/detail/attend_e4m3.cuh>
#include <indexshare/cuda/detail/attend_finish.cuh>
#include <indexshare/cuda/detail/attend_layout.cuh>
#include <indexshare/cuda/detail/attend_load.cuh>
#include <indexshare/cuda/detail/attend_queries.cuh>
#include <indexshare/cuda/detail/mma.cuh>

#include <cstddef>
#include <cstdint>

/// @file Attention on the tensor cores for 512 latent and 64 rotary lanes. A block takes the keys
/// of one split of a row in tiles of 32, for 8 to 64 heads.
///
/// Heads are the columns of every product, so that 8 heads are 8 heads:
///   logits^T [keys, heads] = K [keys, lanes] * Q^T,  out^T [lanes, heads] = V^T * weights^T.
/// Queries and sums of values stay in registers, cut among the warps as AttendWarps says; KV rows
/// and weights pass through shared memory. Three block barriers per tile: rows arrived, logits
/// written, weights written; e4m3 rows take a fourth for unpacking.

namespace indexshare {
inline namespace v0 {
namespace detail {

__device__ inline float power_of_two(float exponent) {
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(exponent));
  return power;
}

template <class Query, class KvFormat, class Out, int Heads>
class AttendBlock {
 public:
  using Call = AttendCall<Query, KvFormat, Out>;
  using Warps = AttendWarps<Heads>;
  using Form = AttendForm<Query, KvFormat>;
  using Queries = AttendQueries<Query, KvFormat, Heads>;
  using Unpacked = AttendUnpack<Heads>;
  using Addresses = AttendAddresses<Form, Heads>;
  static constexpr AttendMemory at = attend_memory<Heads>(Form::e4m3);

  __device__ __forceinline__ AttendBlock(Call const& call, AttendPlace const& place,
                                         std::uint32_t base)
      : call_(call),
        place_(place),
        base_(base),
        addresses_(base),
        loader_(call, place, base),
        unpack_(base) {
    for (float& reference : reference_) reference = lowest_reference;
  }

  __device__ __forceinline__ void run() {
    std::uint32_t next = place_.first_key;
    bool const any = next < place_.last_key;
    constexpr bool overlaps = at.queries != 0;  // the first rows do not wait for the queries
    if (overlaps && any) loader_.start(next, 0);
    if (any) take_queries();
    if (!overlaps && any) loader_.start(next, 0);
    clear();
    std::uint32_t tiles = 0;
#pragma unroll 1
    for (std::uint32_t stage = 0; next < place_.last_key; stage ^= at.stage) {
      wait_copies<0>();
      __syncthreads();  // the tile is there, and nobody reads the one before it any more
      next += Warps::tile;
      if (next < place_.last_key) loader_.start(next, stage ^ at.stage);
      if constexpr (Form::e4m3) {
        unpack_.run(stage);
        __syncthreads();  // the unpacked rows are there
      }
      logits(stage);
      __syncthreads();  // the parts of all logits are there
      weigh(stage, tiles == 0);
      gather(stage);
      ++tiles;
    }
    finish();
  }

 private:
  static constexpr int softmax_heads = (Heads + 31) / 32;  ///< of a thread
  /// Weights may grow to this before the sums are rescaled; fp16 weights times the rest of a scale
  /// must not overflow.
  static constexpr float most_weight = 8192;
  static constexpr float log2_e = 1.4426950408889634f;
  /// What sums of values must be multiplied by.
  static constexpr float unit = Form::e4m3 ? Unpacked::unit : 1.0f;

  __device__ __forceinline__ std::uint32_t factor_of(std::uint32_t head) const {
    return base_ + at.factors + 4 * head;
  }
  /// Eight threads share the logits of a head, four keys each.
  static __device__ __forceinline__ std::uint32_t softmax_head(int i) {
    return threadIdx.x / 8 + 32 * static_cast<std::uint32_t>(i);
  }
  static __device__ __forceinline__ std::uint32_t softmax_column() { return threadIdx.x % 8; }
  static __device__ __forceinline__ bool weighs() { return Heads >= 32 || threadIdx.x < 8 * Heads; }

  /// From a sum of lanes to a logit in powers of two.
  __device__ __forceinline__ float logit_scale() const { return call_.in.scale * log2_e; }

  /// Queries to registers.
  __device__ __forceinline__ void take_queries() {
    load_queries<Heads>(call_, place_, base_ + at.queries);
    wait_copies<0>();
    __syncthreads();  // the queries are there
    WarpLane const self;
    queries_.load(base_ + at.queries, Warps::head_group(self.warp), Warps::lane_group(self.warp));
    if constexpr (Form::scales_queries) convert_queries();
    __syncthreads();  // rows may take the place of the queries
  }

  /// Latents to fp16. A head whose largest is not in [1, 2^15) is brought there by a power of two,
  /// so that no lane overflows; lanes more than 2^14 times smaller than the largest lose bits.
  __device__ __forceinline__ void convert_queries() {
    WarpLane const self;
    std::uint32_t const largest = base_ + at.sums;
    std::uint32_t const first =
        Warps::head_group(self.warp) * (Warps::head_blocks * 8) + self.group;
    for (int block = 0; block < Warps::head_blocks; ++block) {
      std::uint32_t most = queries_.largest(block);
      most = max(most, __shfl_xor_sync(full_warp, most, 1));
      most = max(most, __shfl_xor_sync(full_warp, most, 2));
      if (self.member == 0 && Warps::key_group(self.warp) == 0) {
        store_word(largest + 4 * (Warps::lane_group(self.warp) * Heads + first + 8 * block), most);
      }
    }
    __syncthreads();  // the parts of each head's largest latent are there
    auto const factor_field = [&](std::uint32_t head) {  // the factor's exponent as a field of fp32
      std::uint32_t most = 0;
      for (int part = 0; part < Warps::lane_groups; ++part) {
        most = max(most, load_word(largest + 4 * (part * Heads + head)));
      }
      int const field = static_cast<int>(most >> 7);
      bool const fits = (field >= 127 && field < 127 + 15) || field == 0 || field == 255;
      return fits ? 127 : min(2 * 127 + 14 - field, 253);
    };
    int fields[Warps::head_blocks];
    bool moves = false;
    for (int block = 0; block < Warps::head_blocks; ++block) {
      fields[block] = factor_field(first + 8 * block);
      moves |= fields[block] != 127;
    }
    if (__any_sync(full_warp, moves)) {
      for (int block = 0; block < Warps::head_blocks; ++block) {
        queries_.scale(block, __int_as_float(fields[block] << 23));
      }
    }
    queries_.convert();
    if (!weighs()) return;
    for (int i = 0; i < softmax_heads; ++i) {
      scale_[i] = logit_scale() * __int_as_float((254 - factor_field(softmax_head(i))) << 23);
    }
  }

  // ---- logits

  /// The warp's part of the lanes of its keys and heads, to shared memory as [head][place].
  __device__ __forceinline__ void logits(std::uint32_t stage) const {
    std::uint32_t const latents = addresses_.latents + (Form::e4m3 ? 0 : stage);
    std::uint32_t const ropes = addresses_.ropes + stage;
    for_constants<Warps::key_blocks>([&](auto keys) {
      float sum[Warps::head_blocks][4];
      if constexpr (Form::e4m3) {
        e4m3_latents<keys>(latents, sum);
      } else {
        latent_steps<keys, 0, Queries::latent_steps>(latents, sum);
      }
      for_constants<Queries::rope_steps>([&](auto step) {
        std::uint32_t k[4];
        load_matrices_at<16 * at.line * keys + 32 * step>(k, ropes);
        for (auto const& part_of_query : queries_.rope[step]) {
          for (int h = 0; h < Warps::head_blocks; ++h) {
            multiply_add<typename Form::Rope>(sum[h], k, part_of_query[h][0], part_of_query[h][1]);
          }
        }
      });
      for_constants<Warps::head_blocks>([&](auto h) {
        constexpr int at_block = h * 8 * AttendMemory::sum_line + keys * 64;
        store_float2<at_block>(addresses_.sums, sum[h][0], sum[h][2]);
        store_float2<at_block + AttendMemory::sum_line>(addresses_.sums, sum[h][1], sum[h][3]);
      });
    });
  }

  /// sum = latents of steps [First, First + Count) of 16 keys.
  template <int Keys, int First, int Count>
  __device__ __forceinline__ void latent_steps(std::uint32_t latents,
                                               float (&sum)[Warps::head_blocks][4]) const {
    constexpr int line = Form::e4m3 ? AttendMemory::unpacked_line : at.line;
    for_constants<Count>([&](auto i) {
      constexpr int step = First + i;
      std::uint32_t k[4];
      load_matrices_at<16 * line * Keys + 32 * step>(k, latents);
      for (int h = 0; h < Warps::head_blocks; ++h) {
        auto const& q = queries_.latent[step][h];
        if constexpr (i == 0) {
          multiply<typename Form::Latent>(sum[h], k, q[0], q[1]);
        } else {
          multiply_add<typename Form::Latent>(sum[h], k, q[0], q[1]);
        }
      }
    });
  }

  /// The same of codes: each scale's lanes are summed up, then multiplied by it.
  template <int Keys>
  __device__ __forceinline__ void e4m3_latents(std::uint32_t latents,
                                               float (&sum)[Warps::head_blocks][4]) const {
    constexpr int steps = AttendWidths::scale_tile / 16;
    constexpr int tiles = Queries::latent_steps / steps;
    for_constants<tiles>([&](auto tile) {
      float2 const scale = load_float2<(Warps::tile * tile + 16 * Keys) * 4>(addresses_.scales);
      float part[Warps::head_blocks][4];
      latent_steps<Keys, steps * tile, steps>(latents, part);
      for (int h = 0; h < Warps::head_blocks; ++h) {
        for (int i = 0; i < 4; ++i) {
          float const scale_of_key = i < 2 ? scale.x : scale.y;
          if constexpr (tile == 0) {
            sum[h][i] = part[h][i] * scale_of_key;
          } else {
            sum[h][i] = fmaf(part[h][i], scale_of_key, sum[h][i]);
          }
        }
      }
    });
  }

  // ---- weights

  /// Logits in powers of two, with the marks of their keys: -inf where there is none.
  __device__ __forceinline__ void take_logits(std::uint32_t stage,
                                              float (&x)[softmax_heads][4]) const {
    float4 const mark = load_float4<at.marks>(base_ + 16 * softmax_column() + stage);
    for_constants<softmax_heads>([&](auto i) {
      constexpr int ahead = 32 * i * AttendMemory::sum_line;
      float4 sum = load_float4<ahead>(addresses_.logits);
      for_constants<Warps::lane_groups - 1>([&](auto part) {
        float4 const more =
            load_float4<ahead + (part + 1) * Heads * AttendMemory::sum_line>(addresses_.logits);
        sum.x += more.x;
        sum.y += more.y;
        sum.z += more.z;
        sum.w += more.w;
      });
      float const scale = Form::scales_queries ? scale_[i] : logit_scale();
      x[i][0] = fmaf(sum.x, scale, mark.x);
      x[i][1] = fmaf(sum.y, scale, mark.y);
      x[i][2] = fmaf(sum.z, scale, mark.z);
      x[i][3] = fmaf(sum.w, scale, mark.w);
    });
  }

  /// What a thread's four weights of a head come to.
  struct Weighed {
    float sum;    ///< without what the marks multiplied them by
    float bound;  ///< none of them is larger
  };

  /// Weights 2^(x - reference) of one head to shared memory.
  template <int I>
  __device__ __forceinline__ Weighed put_weights(float const (&x)[4],
                                                 [[maybe_unused]] float4 const& units) const {
    float w[4];
    for (int k = 0; k < 4; ++k) w[k] = power_of_two(x[k] - reference_[I]);
    store_words2<32 * 64 * I>(addresses_.new_weights, pack_pair<typename Form::Latent>(w[0], w[1]),
                              pack_pair<typename Form::Latent>(w[2], w[3]));
    if constexpr (Form::e4m3) {
      return {Unpacked::sum_of(w, units), largest_of(w)};
    } else {
      float const sum = (w[0] + w[1]) + (w[2] + w[3]);
      return {sum, sum};
    }
  }
  /// What the weights of a thread's keys are multiplied by in their sum.
  __device__ __forceinline__ float4 units_of_keys() const {
    if constexpr (Form::e4m3) return unpack_.units_of_keys(softmax_column());
    return {};
  }
  static __device__ __forceinline__ float largest_of(float const (&x)[4]) {
    return fmaxf(fmaxf(x[0], x[1]), fmaxf(x[2], x[3]));
  }

  /// Weights of the tile. A head's reference is the largest logit of the first tile; later weights
  /// are written with the reference as it is, and only if one could be too large are its head's
  /// sums rescaled and the weights written again.
  __device__ __forceinline__ void weigh(std::uint32_t stage, bool first) {
    float x[softmax_heads][4];
    Weighed weights[softmax_heads] = {};
    bool grows = false;
    if (weighs()) {
      take_logits(stage, x);
      if (first) {
        for (int i = 0; i < softmax_heads; ++i) {
          reference_[i] = fmaxf(largest_of_head(x[i]), lowest_reference);
        }
      }
      float4 const units = units_of_keys();
      for_constants<softmax_heads>([&](auto i) {
        weights[i] = put_weights<i>(x[i], units);
        grows |= weights[i].bound > most_weight;
      });
    }
    if (__syncthreads_or(grows)) {  // the weights are there
      if (weighs()) {
        for_constants<softmax_heads>([&](auto i) { raise<i>(x[i], weights[i]); });
      }
      __syncthreads();  // the factors and the new weights are there
      rescale();
    }
    for (int i = 0; i < softmax_heads; ++i) total_[i] += weights[i].sum;
  }

  /// Makes the largest logit a head's reference if a weight of the tile asks for it. All eight
  /// threads of a head do the same.
  template <int I>
  __device__ __forceinline__ void raise(float const (&x)[4], Weighed& weights) {
    bool const asked = any_of_head(weights.bound > most_weight);
    float const most = fmaxf(largest_of_head(x), reference_[I]);
    float const next = asked ? most : reference_[I];
    float const factor = power_of_two(reference_[I] - next);
    reference_[I] = next;
    total_[I] *= factor;
    store_float(factor_of(softmax_head(I)), factor);
    weights = put_weights<I>(x, units_of_keys());
  }

  /// Of what the eight threads of a head have.
  static __device__ __forceinline__ float largest_of_head(float const (&x)[4]) {
    float most = largest_of(x);
    for (int step = 1; step < 8; step *= 2) {
      most = fmaxf(most, __shfl_xor_sync(full_warp, most, step));
    }
    return most;
  }
  static __device__ __forceinline__ bool any_of_head(bool yes) {
    return (__ballot_sync(full_warp, yes) >> (threadIdx.x & 24) & 0xFF) != 0;
  }

  __device__ __forceinline__ void rescale() {
    std::uint32_t const factors = factor_of(2 * WarpLane{}.member);
    for_constants<Heads / 8>([&](auto h) {
      float2 const factor = load_float2<32 * h>(factors);
      for (auto& block : values_) {
        block[h][0] *= factor.x;
        block[h][1] *= factor.y;
        block[h][2] *= factor.x;
        block[h][3] *= factor.y;
      }
    });
  }

  // ---- values

  static constexpr int warp_lanes = Addresses::warp_lanes;
  static constexpr int lane_blocks = warp_lanes / 16;

  /// Two registers at a time, as the hardware clears them.
  __device__ __forceinline__ void clear() {
    for (auto& block : values_) {
      for (auto& heads : block) {
        for (int i = 0; i < 4; i += 2) {
          asm volatile("mov.b64 {%0, %1}, 0;" : "=f"(heads[i]), "=f"(heads[i + 1]));
        }
      }
    }
  }

  /// values += latents^T * weights^T, for the warp's lanes.
  __device__ __forceinline__ void gather(std::uint32_t stage) {
    constexpr int line = Addresses::line;
    std::uint32_t const rows = addresses_.values + (Form::e4m3 ? 0 : stage);
    WarpLane const self;
    for_constants<2>([&](auto step) {
      std::uint32_t v[lane_blocks][4];
      for_constants<lane_blocks>([&](auto block) {
        load_matrices_transposed_at<16 * line * step + 32 * block>(v[block], rows);
      });
      [[maybe_unused]] uint2 rests;
      if constexpr (Form::e4m3) {
        rests = unpack_.template rests_of_keys<16 * step>(
            self.warp / (AttendWidths::scale_tile / warp_lanes), self.member);
      }
      std::uint32_t const weights = addresses_.weights ^ (32 * step);
      for_constants<(Heads + 15) / 16>([&](auto pair) {
        std::uint32_t w[4];
        load_matrices_at<16 * 64 * pair>(w, weights);
        if constexpr (Form::e4m3) Unpacked::scale(w, rests);
        for (int i = 0; i < (Heads == 8 ? 1 : 2); ++i) {
          for (int block = 0; block < lane_blocks; ++block) {
            multiply_add<typename Form::Latent>(values_[block][2 * pair + i], v[block], w[2 * i],
                                                w[2 * i + 1]);
          }
        }
      });
    });
  }

  // ---- the end

  __device__ __forceinline__ void finish() {
    __syncthreads();  // the factors of the last rescaling have been read
    for (int i = 0; i < softmax_heads; ++i) {
      if (!weighs()) break;
      for (int step = 1; step < 8; step *= 2) {
        total_[i] += __shfl_xor_sync(full_warp, total_[i], step);
      }
    }
    WarpLane const self{thread_again()};
    if (call_.splits > 1) {
      put_partial(self);
    } else {
      put_output(self);
    }
  }

  /// Values in the order of PartialOrder::fragments. Heads past the last have a place, too.
  __device__ __forceinline__ void put_partial(WarpLane const& self) const {
    index_t const part = part_of(call_, place_);
    if (weighs() && self.thread % 8 == 0) {
      for (int i = 0; i < softmax_heads; ++i) {
        index_t const head = part + self.thread / 8 + 32 * i;
        call_.partials.references[head] = reference_[i];
        call_.partials.sums[head] = total_[i];
      }
    }
    if (place_.first_key >= place_.last_key) return;  // the merge reads no values
    float* const values = call_.partials.values + (part + 2 * self.member) * AttendWidths::latent +
                          self.warp * warp_lanes + 4 * self.group;
    for (int h = 0; h < Heads / 8; ++h) {
      for (int i = 0; i < 2; ++i) {
        for (int block = 0; block < lane_blocks; block += 2) {
          auto const& low = values_[block][h];
          auto const& high = values_[block + 1][h];
          float* const target = values + (8 * h + i) * AttendWidths::latent + 16 * block;
          __stcg(reinterpret_cast<float4*>(target),
                 make_float4(low[i] * unit, low[i + 2] * unit, high[i] * unit, high[i + 2] * unit));
        }
      }
    }
  }

  __device__ __forceinline__ void put_output(WarpLane const& self) const {
    auto const& out = call_.out.out;
    auto const heads = static_cast<std::uint32_t>(out.extent(1)) - place_.first_head;
    if (weighs() && self.thread % 8 == 0) {
      for (int i = 0; i < softmax_heads; ++i) {
        std::uint32_t const head = self.thread / 8 + 32 * static_cast<std::uint32_t>(i);
        if (head >= heads) break;
        float const factor = finish_head<Out>(call_.in.sink, call_.out.lse, place_.row,
                                              place_.first_head + head, reference_[i], total_[i]);
        store_float(factor_of(head), unit * factor);
      }
    }
    __syncthreads();  // the factors are there
    index_t const stride = out.stride(1);
    Out* const values = out.data_handle() + place_.row * out.stride(0) +
                        place_.first_head * stride + self.warp * warp_lanes + self.group;
    for (int h = 0; h < Heads / 8; ++h) {
      for (int i = 0; i < 2; ++i) {
        std::uint32_t const head = 2 * self.member + static_cast<std::uint32_t>(8 * h + i);
        if (heads < Heads && head >= heads) break;
        float const factor = load_float(factor_of(head));
        Out* const target = values + head * stride;
        for (int block = 0; block < lane_blocks; ++block) {
          round_two(values_[block][h][i] * factor, values_[block][h][i + 2] * factor,
                    target[16 * block], target[16 * block + 8]);
        }
      }
    }
  }

  Call const& call_;
  AttendPlace const& place_;
  std::uint32_t base_;  ///< of the shared memory
  Addresses addresses_;
  KvLoader<Call, Form::e4m3> loader_;
  Unpacked unpack_;
  Queries queries_;
  float scale_[softmax_heads];  ///< logit_scale over what the queries were multiplied by
  float reference_[softmax_heads];
  float total_[softmax_heads] = {};
  float values_[lane_blocks][Heads / 8][4];
};

template <class Query, class KvFormat, class Out, int Heads>
INDEXSHARE_KERNEL void __launch_bounds__(AttendWarps<Heads>::threads, 1)
    attend_tensor_kernel(__grid_constant__ AttendCall<Query, KvFormat, Out> const call) {
  extern __shared__ __align__(128) std::byte attend_shared[];
  // in shared memory, since registers are what a block has least of
  auto& place = *reinterpret_cast<AttendPlace*>(attend_shared +
                                                AttendBlock<Query, KvFormat, Out, Heads>::at.place);
  if (threadIdx.x == 0) place = place_of_block(call, Heads, blockIdx.x);
  __syncthreads();  // the place is there
  AttendBlock<Query, KvFormat, Out, Heads> block(call, place, shared_address(attend_shared));
  block.run();
}

}  // namespace detail
}  // namespace v0
}  // namespace indexshare
