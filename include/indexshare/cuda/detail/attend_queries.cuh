// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/cuda/attention_plan.hpp>
#include <indexshare/cuda/detail/attend_layout.cuh>
#include <indexshare/cuda/detail/attend_load.cuh>
#include <indexshare/cuda/detail/mma.cuh>
#include <indexshare/element.hpp>

#include <cstdint>

/// @file The queries of the tensor-core kernel: in registers from the first tile to the last.

namespace indexshare {
inline namespace v0 {
namespace detail {

/// The larger magnitudes of two pairs of bf16, with signs that mean nothing.
__device__ inline std::uint32_t larger_magnitudes(std::uint32_t a, std::uint32_t b) {
  std::uint32_t most;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 860
  asm("max.NaN.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(most) : "r"(a), "r"(b));
#else
  asm("{ .reg .b32 x, y; abs.bf16x2 x, %1; abs.bf16x2 y, %2; max.NaN.bf16x2 %0, x, y; }"
      : "=r"(most)
      : "r"(a), "r"(b));
#endif
  return most;
}

/// Two bf16 as fp16.
__device__ inline std::uint32_t fp16_of_bf16(std::uint32_t pair) {
  std::uint32_t converted;
  asm("{ .reg .b32 low, high; shl.b32 low, %1, 16; and.b32 high, %1, 0xFFFF0000; "
      "cvt.rn.f16x2.f32 %0, high, low; }"
      : "=r"(converted)
      : "r"(pair));
  return converted;
}

/// Two fp16 as the sums of two bf16 each, exactly.
__device__ inline void split_fp16(std::uint32_t pair, std::uint32_t& high, std::uint32_t& low) {
  float const a = to_float(fp16{static_cast<std::uint16_t>(pair)});
  float const b = to_float(fp16{static_cast<std::uint16_t>(pair >> 16)});
  high = pack_pair<bf16>(a, b);
  low = pack_pair<bf16>(a - __uint_as_float(high << 16), b - __uint_as_float(high & 0xFFFF0000u));
}

/// A warp's queries as second operands: [step of 16 lanes][8 heads].
template <class Query, class KvFormat, int Heads>
struct AttendQueries {
  using Warps = AttendWarps<Heads>;
  using Form = AttendForm<Query, KvFormat>;
  static constexpr int latent_steps = AttendWidths::latent / 16 / Warps::lane_groups;
  static constexpr int rope_steps = AttendWidths::rope / 16 / Warps::lane_groups;

  std::uint32_t latent[latent_steps][Warps::head_blocks][2];
  std::uint32_t rope[rope_steps][Form::rope_parts][Warps::head_blocks][2];

  /// From [heads][query_line] in shared memory.
  __device__ __forceinline__ void load(std::uint32_t lines, std::uint32_t head_group,
                                       std::uint32_t lane_group) {
    std::uint32_t const lane = WarpLane{}.lane;
    std::uint32_t const matrix = lane / 8;
    std::uint32_t const block = Warps::head_blocks == 2 ? matrix / 2 : 0;  // two at a time
    std::uint32_t const head = (head_group * Warps::head_blocks + block) * 8 + lane % 8;
    std::uint32_t const line = lines + head * AttendMemory::query_line + matrix % 2 * 16;
    std::uint32_t const latents = line + lane_group * (latent_steps * 32);
    std::uint32_t const ropes = line + AttendWidths::latent * 2 + lane_group * (rope_steps * 32);
    for_constants<latent_steps>([&](auto step) {
      std::uint32_t parts[4];
      load_matrices_at<32 * step>(parts, latents);
      for (int i = 0; i < 2 * Warps::head_blocks; ++i) latent[step][i / 2][i % 2] = parts[i];
    });
    for_constants<rope_steps>([&](auto step) {
      std::uint32_t parts[4];
      load_matrices_at<32 * step>(parts, ropes);
      for (int i = 0; i < 2 * Warps::head_blocks; ++i) {
        if constexpr (Form::rope_parts == 2) {
          split_fp16(parts[i], rope[step][0][i / 2][i % 2], rope[step][1][i / 2][i % 2]);
        } else {
          rope[step][0][i / 2][i % 2] = parts[i];
        }
      }
    });
  }

  /// The largest magnitude of the latents that this thread holds of head `group` of a block, as
  /// bits of bf16.
  __device__ __forceinline__ std::uint32_t largest(int block) const {
    std::uint32_t most = 0;
    for_constants<latent_steps>([&](auto step) {
      for (int i = 0; i < 2; ++i) most = larger_magnitudes(most, latent[step][block][i]);
    });
    return max(most & 0x7FFFu, most >> 16 & 0x7FFFu);
  }
  /// Multiplies bf16 by a power of two.
  __device__ __forceinline__ void scale(int block, float factor) {
    std::uint32_t const pair = pack_pair<bf16>(factor, factor);
    auto const times = [pair](std::uint32_t& q) {
      asm("fma.rn.bf16x2 %0, %0, %1, %2;" : "+r"(q) : "r"(pair), "r"(0x80008000u));
    };
    for (auto& step : latent) {
      for (std::uint32_t& q : step[block]) times(q);
    }
    for (auto& step : rope) {
      for (std::uint32_t& q : step[0][block]) times(q);
    }
  }
  /// Latents from bf16 to fp16.
  __device__ __forceinline__ void convert() {
    for (auto& step : latent) {
      for (auto& block : step) {
        for (std::uint32_t& q : block) q = fp16_of_bf16(q);
      }
    }
  }
};

}  // namespace detail
}  // namespace v0
}  // namespace indexshare
