// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/cuda/attention_plan.hpp>
#include <indexshare/cuda/detail/attend_load.cuh>
#include <indexshare/cuda/detail/warp.cuh>
#include <indexshare/element.hpp>

#include <cstdint>
#include <type_traits>

/// @file What the threads of the tensor-core kernel multiply, and where in shared memory each of
/// them finds it.

namespace indexshare {
inline namespace v0 {
namespace detail {

/// What the tensor cores multiply.
template <class Query, class KvFormat>
struct AttendForm {
  static constexpr bool e4m3 = std::is_same_v<KvFormat, format::LatentE4m3>;
  using Latent = std::conditional_t<e4m3, fp16, Query>;
  using Rope = std::conditional_t<e4m3, bf16, Query>;
  /// fp16 queries times bf16 rotary lanes: the query is the sum of two bf16.
  static constexpr int rope_parts = e4m3 && std::is_same_v<Query, fp16> ? 2 : 1;
  /// bf16 queries become fp16, scaled by a power of two per head.
  static constexpr bool scales_queries = e4m3 && std::is_same_v<Query, bf16>;
};

/// A thread's place in its warp: fragments are made of eight groups of four members.
struct WarpLane {
  std::uint32_t thread = threadIdx.x;
  std::uint32_t warp = thread / 32;
  std::uint32_t lane = thread % 32;
  std::uint32_t group = lane / 4;
  std::uint32_t member = lane % 4;
};

/// Where in shared memory a thread reads and writes in every tile, for stage 0.
template <class Form, int Heads>
struct AttendAddresses {
  using Warps = AttendWarps<Heads>;
  static constexpr bool e4m3 = Form::e4m3;
  static constexpr AttendMemory at = attend_memory<Heads>(e4m3);
  static constexpr int line = e4m3 ? AttendMemory::unpacked_line : at.line;  ///< of latents
  static constexpr int warp_lanes = AttendWidths::latent / Warps::warps;
  /// Bytes of a row that a warp sums up.
  static constexpr int latent_bytes = AttendWidths::latent * 2 / Warps::lane_groups;
  static constexpr int rope_bytes = AttendWidths::rope * 2 / Warps::lane_groups;

  std::uint32_t latents;  ///< of the logits' first operands
  std::uint32_t ropes;
  std::uint32_t scales;       ///< of the two keys whose logits the thread gets
  std::uint32_t sums;         ///< logits of the warp's lanes, to be written
  std::uint32_t logits;       ///< the same of a thread's heads and keys, to be read
  std::uint32_t new_weights;  ///< to be written
  std::uint32_t values;       ///< of the products with weights
  std::uint32_t weights;      ///< to be read, of the first 16 keys

  __device__ explicit AttendAddresses(std::uint32_t base) {
    WarpLane const self;
    std::uint32_t const matrix = self.lane / 8;
    std::uint32_t const r = self.lane % 8;

    std::uint32_t const first_key = Warps::key_group(self.warp) * (Warps::key_blocks * 16);
    std::uint32_t const row = first_key + (matrix % 2 == 0 ? r : 8 + (r ^ 4));
    std::uint32_t const half = matrix / 2 * 16;
    std::uint32_t const part = Warps::lane_group(self.warp);
    latents = kept(base + (e4m3 ? at.unpacked : 0) + row * line + part * latent_bytes + half);
    ropes = e4m3 ? kept(base + row * at.line + at.rope + part * rope_bytes + half)
                 : latents + at.rope - part * (latent_bytes - rope_bytes);
    if constexpr (e4m3) {
      scales = base + at.scales + (first_key + 2 * self.group) * 4 +
               part * (AttendWidths::scales / Warps::lane_groups * Warps::tile * 4);
      // queries of two parts leave no register for it
      if constexpr (Form::rope_parts == 1) scales = kept(scales);
    }
    std::uint32_t const head =
        Warps::head_group(self.warp) * (Warps::head_blocks * 8) + 2 * self.member;
    sums = kept(base + at.sums + (part * Heads + head) * AttendMemory::sum_line +
                (first_key + 2 * self.group) * 4);

    std::uint32_t const softmax_head = threadIdx.x / 8;
    std::uint32_t const column = threadIdx.x % 8;
    logits = base + at.sums + softmax_head * AttendMemory::sum_line + 16 * column;
    if constexpr (Form::rope_parts == 1) logits = kept(logits);
    new_weights = kept(base + at.weights + softmax_head * 64 +
                       16 * (column / 2 ^ swizzle(softmax_head)) + column % 2 * 8);

    values = kept(base + (e4m3 ? at.unpacked : 0) + row_of_key(matrix / 2 * 8 + r) * line +
                  self.warp * (warp_lanes * 2) + matrix % 2 * 16);
    // two pieces of a step, of two blocks of heads
    std::uint32_t const weight_head = Heads == 8 ? r : matrix / 2 * 8 + r;
    weights = kept(base + at.weights + weight_head * 64 + 16 * (matrix % 2 ^ swizzle(weight_head)));
  }

  /// A head's four pieces of weights are swapped like this.
  static __device__ std::uint32_t swizzle(std::uint32_t head) { return head / 2 % 4; }
};

}  // namespace detail
}  // namespace v0
}  // namespace indexshare
