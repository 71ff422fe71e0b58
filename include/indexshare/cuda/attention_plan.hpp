// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/attention/mla.hpp>
#include <indexshare/cuda/device_limits.hpp>
#include <indexshare/detail/check.hpp>
#include <indexshare/dims.hpp>
#include <indexshare/element.hpp>
#include <indexshare/macros.hpp>
#include <indexshare/status.hpp>
#include <indexshare/workspace.hpp>

#include <algorithm>
#include <cstddef>
#include <type_traits>

/// @file What CUDA attention launches for a shape, as arithmetic: which kernel, how many heads and
/// keys a block takes, how a row's keys are cut, how much shared memory and scratch. Needs no
/// toolkit and no device.

namespace indexshare {
inline namespace v0 {

/// How a pair of query and KV types is multiplied.
enum class AttentionOperands {
  any,   ///< converted to fp32: any types and widths
  half,  ///< both bf16 or both fp16, on the tensor cores
  e4m3,  ///< bf16 or fp16 queries and rows of format::LatentE4m3, on the tensor cores
};

template <class Query, class KvFormat>
constexpr AttentionOperands attention_operands() noexcept {
  constexpr bool short_query = std::is_same_v<Query, bf16> || std::is_same_v<Query, fp16>;
  if (short_query && std::is_same_v<KvFormat, format::Plain<Query>>) return AttentionOperands::half;
  if (short_query && std::is_same_v<KvFormat, format::LatentE4m3>) return AttentionOperands::e4m3;
  return AttentionOperands::any;
}

/// What a call launches. `splits` blocks share the keys of a row and a group of heads; above one
/// they leave partial results, which a second kernel merges in the order of the keys.
struct AttentionPlan {
  char const* kernel = "";
  char const* merge_kernel = "attention, merge of splits";  ///< runs where there are splits
  int heads_per_block = 0;
  index_t head_groups = 0;
  int keys_per_tile = 0;
  index_t keys_per_split = 0;
  index_t splits = 0;
  index_t value_groups = 1;  ///< blocks that share the value lanes, each with all logits
  int threads = 0;
  int shared_bytes = 0;
};

namespace detail {

// ---- how a row's keys are cut

/// Blocks that fill any GPU. Rows above that are not split.
inline constexpr index_t attend_target_blocks = 128;
inline constexpr index_t attend_most_splits = 32;

/// Blocks take whole groups of eight heads.
constexpr index_t attend_padded_heads(index_t heads) noexcept { return (heads + 7) / 8 * 8; }

/// Keys of a split at least. Its start, its end and its part of the merge cost a block of 64 heads
/// the instructions of 70 keys; and it leaves 4 * (512 + 2) bytes of partial results per head,
/// which e4m3 rows of 656 bytes outweigh from 3.2 keys per head on.
constexpr index_t attend_least_keys(index_t heads, bool tensor_cores) noexcept {
  index_t const padded = attend_padded_heads(heads);
  index_t const of_block = tensor_cores ? std::clamp<index_t>(5 * padded, 64, 320) : 256;
  return std::max(of_block, 4 * padded);
}

/// Keys of a split and the number of splits, from capacities alone.
struct AttendSplits {
  index_t keys;
  index_t count;
};
constexpr AttendSplits attend_splits(index_t rows, index_t width, index_t least_keys,
                                     index_t tile) noexcept {
  index_t const most = std::min(attend_target_blocks / rows, attend_most_splits);
  index_t const wanted = std::max<index_t>(std::min(most, width / least_keys), 1);
  index_t const share = (width + wanted - 1) / wanted;
  index_t const keys = (share + tile - 1) / tile * tile;
  return {keys, (width + keys - 1) / keys};
}

// ---- scratch

/// Results of a split before the merge. With M the reference of the softmax in powers of two:
/// `values` [rows, splits, heads, value_dim] = sum 2^(logit - M) * v, `sums` [rows, splits, heads]
/// the weights.
struct AttendPartials {
  index_t heads = 0;  ///< padded
  float* values = nullptr;
  float* references = nullptr;
  float* sums = nullptr;
};
/// `splits`: of all rows.
constexpr AttendPartials carve_attend(WorkspaceCarver& carver, index_t splits, index_t heads,
                                      index_t value_dim) noexcept {
  AttendPartials partials;
  partials.heads = attend_padded_heads(heads);
  std::size_t const parts = saturating_area(splits, partials.heads);
  partials.values =
      carver.take<float>(saturating_bytes(parts, static_cast<std::size_t>(value_dim)));
  partials.references = carver.take<float>(parts);
  partials.sums = carver.take<float>(parts);
  return partials;
}

// ---- the tensor-core kernel

/// The widths that the tensor-core kernel is made for.
struct AttendWidths {
  static constexpr int latent = 512;
  static constexpr int rope = 64;
  static constexpr int lanes = latent + rope;
  static constexpr int scale_tile = 128;  ///< codes per scale of e4m3 rows
  static constexpr int scales = latent / scale_tile;
};

constexpr bool on_tensor_cores(AttentionOperands operands, Shape const& shape) noexcept {
  return operands != AttentionOperands::any && shape.key_dim == AttendWidths::lanes &&
         shape.value_dim == AttendWidths::latent;
}

/// How the warps of a block share its work. Logits: each warp takes `head_blocks` * 8 heads,
/// `key_blocks` * 16 keys and one of `lane_groups` parts of the lanes, whose sums are added up.
/// Values: each warp takes latent / warps lanes of all heads and keys.
template <int Heads>
struct AttendWarps {
  static_assert(Heads == 8 || Heads == 16 || Heads == 32 || Heads == 64);
  static constexpr int heads = Heads;
  static constexpr int warps = 8;
  static constexpr int threads = 32 * warps;
  static constexpr int tile = 32;  ///< keys at a time
  static constexpr int lane_groups = Heads == 64 ? 2 : 4;
  static constexpr int head_groups = Heads == 64 ? 4 : (Heads == 32 ? 2 : 1);
  static constexpr int key_groups = warps / (lane_groups * head_groups);
  static constexpr int head_blocks = Heads / head_groups / 8;
  static constexpr int key_blocks = tile / key_groups / 16;

  INDEXSHARE_HD static constexpr unsigned lane_group(unsigned warp) { return warp % lane_groups; }
  INDEXSHARE_HD static constexpr unsigned head_group(unsigned warp) {
    return warp / lane_groups % head_groups;
  }
  INDEXSHARE_HD static constexpr unsigned key_group(unsigned warp) {
    return warp / (lane_groups * head_groups);
  }
};

/// Shared memory of a block of the tensor-core kernel: offsets in bytes. Two stages of KV rows as
/// they come, for e4m3 one tile of the latents as fp16, then what the warps tell each other. The
/// queries pass through the rows' memory before the first tile is needed.
struct AttendMemory {
  int line;      ///< of a KV row in a stage: an odd multiple of 16, so 8 rows fill all banks
  int rope;      ///< offset of the rotary lanes in a row
  int marks;     ///< of a stage: [tile] floats, log2 of what a key's weight is multiplied by
  int stage;     ///< bytes of a stage
  int unpacked;  ///< [tile][unpacked_line], e4m3 only
  int queries;   ///< [heads][query_line]
  int sums;      ///< [lane groups][heads][sum_line] floats: logits of a part of the lanes
  int weights;   ///< [heads][tile], 16 bits each, swizzled
  int units;     ///< e4m3: [tile] floats, powers of two split off a key's scales
  int rests;     ///< e4m3: [scales][tile] fp16, what is left of the scales
  int scales;    ///< e4m3: [scales][tile] floats
  int factors;   ///< [heads] floats
  int place;     ///< AttendPlace
  int total;

  static constexpr int unpacked_line = AttendWidths::latent * 2 + 16;
  static constexpr int query_line = AttendWidths::lanes * 2 + 16;
  static constexpr int sum_line = (32 + 4) * 4;
  static constexpr int place_bytes = 64;
};
template <int Heads>
constexpr AttendMemory attend_memory(bool e4m3) noexcept {
  using Warps = AttendWarps<Heads>;
  AttendMemory at{};
  at.line = e4m3 ? AttendWidths::latent + 4 * AttendWidths::scales + 2 * AttendWidths::rope
                 : AttendWidths::lanes * 2 + 16;
  at.rope = e4m3 ? AttendWidths::latent + 4 * AttendWidths::scales : AttendWidths::latent * 2;
  at.marks = Warps::tile * at.line;
  at.stage = at.marks + Warps::tile * 4;
  at.unpacked = 2 * at.stage;
  at.sums = at.unpacked + (e4m3 ? Warps::tile * AttendMemory::unpacked_line : 0);
  at.queries = Heads > 32 ? 0 : at.stage;  // beside the first tile where there is room
  at.weights = at.sums + Warps::lane_groups * Heads * AttendMemory::sum_line;
  at.units = at.weights + Heads * Warps::tile * 2;
  at.rests = at.units + (e4m3 ? Warps::tile * 4 : 0);
  at.scales = at.rests + (e4m3 ? AttendWidths::scales * Warps::tile * 2 : 0);
  at.factors = at.scales + (e4m3 ? AttendWidths::scales * Warps::tile * 4 : 0);
  at.place = at.factors + Heads * 4;
  at.total = at.place + AttendMemory::place_bytes;
  return at;
}
static_assert(attend_memory<64>(false).queries + 64 * AttendMemory::query_line <=
              attend_memory<64>(false).sums);
static_assert(attend_memory<64>(true).queries + 64 * AttendMemory::query_line <=
              attend_memory<64>(true).sums);
static_assert(attend_memory<32>(false).queries + 32 * AttendMemory::query_line <=
              attend_memory<32>(false).sums);
static_assert(attend_memory<32>(true).queries + 32 * AttendMemory::query_line <=
              attend_memory<32>(true).sums);

/// The largest size of a block that leaves no head of a multiple of 8 idle.
constexpr int attend_heads_per_block(index_t heads) noexcept {
  index_t const padded = (heads + 7) / 8 * 8;
  for (int size = 64; size > 8; size /= 2) {
    if (padded % size == 0) return size;
  }
  return 8;
}

constexpr int attend_shared_bytes(int heads, bool e4m3) noexcept {
  switch (heads) {
    case 64:
      return attend_memory<64>(e4m3).total;
    case 32:
      return attend_memory<32>(e4m3).total;
    case 16:
      return attend_memory<16>(e4m3).total;
    default:
      return attend_memory<8>(e4m3).total;
  }
}

// ---- the kernel for everything else

/// A block takes 8 heads, 16 keys at a time and 512 value lanes. Rows up to `resident_lanes` are
/// decoded once per block; longer ones come in chunks of that size, once for the logits and once
/// for the values.
struct AttendAny {
  static constexpr int heads = 8;
  static constexpr int tile = 16;
  static constexpr int threads = 256;
  static constexpr int values_per_block = 512;
  static constexpr int resident_lanes = 960;
  static constexpr int padding = 4;  ///< floats between rows: vectors of 8 rows fill all banks

  INDEXSHARE_HD static constexpr int chunk_lanes(index_t key_dim) noexcept {
    return key_dim < resident_lanes ? static_cast<int>(key_dim) : resident_lanes;
  }
  /// Floats from one row of a chunk to the next.
  INDEXSHARE_HD static constexpr int line(index_t key_dim) noexcept {
    return (chunk_lanes(key_dim) + 31) / 32 * 32 + padding;
  }
  static constexpr int shared_bytes(index_t key_dim) noexcept {
    return ((heads + tile) * line(key_dim) + heads * tile + 2 * heads + tile) * 4;
  }
};

constexpr Status check_attention_device(DeviceLimits const& limits, int shared_bytes) noexcept {
  return first_failure(
      {check_compute_capability("compute capability of the device (10 * major + minor)", limits),
       check_shared_memory("shared memory of a block of attention, in bytes", limits,
                           shared_bytes)});
}

/// The plan of a call whose rows have `width` keys at most.
constexpr Result<AttentionPlan> plan_attention(DeviceLimits const& limits,
                                               AttentionOperands operands, Shape const& shape,
                                               index_t width) noexcept {
  if (Status const status = check_shape(SparseMla<float, format::Plain<float>>{}, shape);
      !status.ok()) {
    return refuse(status);
  }
  bool const tensor_cores = on_tensor_cores(operands, shape);
  AttentionPlan plan;
  if (tensor_cores) {
    bool const e4m3 = operands == AttentionOperands::e4m3;
    plan.kernel = e4m3 ? "attention, tensor cores, e4m3 rows" : "attention, tensor cores";
    plan.heads_per_block = attend_heads_per_block(shape.heads);
    plan.keys_per_tile = AttendWarps<64>::tile;
    plan.threads = AttendWarps<64>::threads;
    plan.shared_bytes = attend_shared_bytes(plan.heads_per_block, e4m3);
  } else {
    plan.kernel = "attention, any types";
    plan.heads_per_block = AttendAny::heads;
    plan.keys_per_tile = AttendAny::tile;
    plan.threads = AttendAny::threads;
    plan.shared_bytes = AttendAny::shared_bytes(shape.key_dim);
    plan.value_groups =
        (shape.value_dim + AttendAny::values_per_block - 1) / AttendAny::values_per_block;
  }
  if (Status const status = check_attention_device(limits, plan.shared_bytes); !status.ok()) {
    return refuse(status);
  }
  plan.head_groups = (shape.heads + plan.heads_per_block - 1) / plan.heads_per_block;
  AttendSplits const splits =
      attend_splits(std::max<index_t>(shape.rows, 1), std::max<index_t>(width, 1),
                    attend_least_keys(shape.heads, tensor_cores), plan.keys_per_tile);
  plan.keys_per_split = splits.keys;
  plan.splits = splits.count;
  return plan;
}

template <class Query, class KvFormat, class Out>
constexpr AttentionOperands operands_of(SparseMla<Query, KvFormat, Out> const&) noexcept {
  return attention_operands<Query, KvFormat>();
}
template <class Query, class KvFormat, class Out>
constexpr AttentionOperands operands_of(DenseMla<Query, KvFormat, Out> const&) noexcept {
  return attention_operands<Query, KvFormat>();
}

}  // namespace detail

/// What SparseMla or DenseMla launches for shape.rows rows with at most top_k keys each, or
/// shape.keys where it is dense. A function of the types and the shape; of the device it only asks
/// whether they fit. e4m3 rows are taken to have the published tiles, 512 latent lanes with a scale
/// for each 128; a cache view with others runs in fp32. Errors: bad_shape; unsupported with what
/// the device lacks.
template <class Policy>
requires detail::is_mla<Policy>
constexpr Result<AttentionPlan> attention_plan(DeviceLimits const& limits, Policy const& policy,
                                               Shape const& shape) noexcept {
  return detail::plan_attention(limits, detail::operands_of(policy), shape,
                                Policy::reads_selection ? shape.top_k : shape.keys);
}

/// Scratch of a pass of shape.rows rows of any call with at least as many. Does not depend on the
/// keys; monotone in every extent.
constexpr WorkspaceSize attention_scratch(Shape const& shape) noexcept {
  using namespace detail;
  constexpr index_t filling = attend_target_blocks / attend_most_splits;
  index_t const splits = std::min(shape.rows, filling) * attend_most_splits;
  WorkspaceCarver carver;
  carve_attend(carver, splits, shape.heads, shape.value_dim);
  return carver.size();
}

/// Scratch for partial results of split rows. Errors: those of `attention_plan`.
template <detail::HasDeviceLimits X, class Policy>
requires detail::is_mla<Policy>
constexpr Result<WorkspaceSize> attention_workspace(X const& x, Policy const& policy,
                                                    Shape const& shape) noexcept {
  Result<AttentionPlan> const plan = attention_plan(x.limits(), policy, shape);
  if (!plan) return refuse(plan.error());
  return attention_scratch(shape);
}

}  // namespace v0
}  // namespace indexshare
