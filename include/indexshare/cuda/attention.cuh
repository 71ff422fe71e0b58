// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/attention/mla.hpp>
#include <indexshare/concepts.hpp>
#include <indexshare/cuda/attention_plan.hpp>
#include <indexshare/cuda/detail/attend_any.cuh>
#include <indexshare/cuda/detail/attend_finish.cuh>
#include <indexshare/cuda/detail/attend_tensor.cuh>
#include <indexshare/cuda/detail/launch.cuh>
#include <indexshare/cuda/exec.cuh>
#include <indexshare/select.hpp>

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <type_traits>

/// @file SparseMla and DenseMla on CUDA, from sm_80 on.
///
/// 512 latent and 64 rotary lanes with queries in bf16 or fp16, and KV rows of the same type or of
/// format::LatentE4m3 {512, 128}, run on the tensor cores (attend_tensor.cuh); everything else runs
/// in fp32 (attend_any.cuh). Which one, and every bit of a row, follows from the types and the
/// Shape, not from the device. Blocks take up to 64 heads: multiples of 8 heads do no idle
/// arithmetic, 8, 16, 32, 64 and 128 are tuned.
///
/// How it sums. Logits in fp32. On the tensor cores the lanes are summed in 2 (64 heads) or 4 parts
/// by rows of 16, in the order of the hardware, then the parts in order. Weights 2^(logit - M) are
/// rounded to the type that multiplies them, the sum of the weights is not. M is a head's largest
/// logit or up to a factor of 2^13 below it. Error of a value, beyond fp32's, relative to
/// sum |w v|: bf16 2^-9 and fp16 2^-12 (rounded weights), e4m3 rows 3 * 2^-12 (see
/// attend_e4m3.cuh); fp16 weights below 2^-14 of the largest lose bits, at most 2^-25 of the
/// largest each. Logits have the error of fp32 sums only: e4m3 codes and scales enter exactly.
///
/// Few rows are cut into splits of keys, from capacities alone, and merged by a second kernel in
/// the order of the keys. Two launches at most; no counters, no memset, no order between blocks.

namespace indexshare {
inline namespace v0 {
namespace detail {

/// Operands of a call: e4m3 rows with other tiles than the kernel is made for go the general way.
template <class Policy, class Inputs>
AttentionOperands operands_of_call(Inputs const& in) noexcept {
  constexpr AttentionOperands operands = operands_of(Policy{});
  if constexpr (operands == AttentionOperands::e4m3) {
    bool const fits = in.kv.format.latent == AttendWidths::latent &&
                      in.kv.format.tile == AttendWidths::scale_tile;
    return fits ? operands : AttentionOperands::any;
  }
  return operands;
}

/// The largest power of two up to 16 that the address and all byte strides are multiples of.
inline int common_alignment(void const* data, std::initializer_list<index_t> strides) noexcept {
  std::uint64_t bits = reinterpret_cast<std::uintptr_t>(data) | 16;
  for (index_t const stride : strides) bits |= static_cast<std::uint64_t>(stride);
  return 1 << std::countr_zero(bits);
}

template <class Query, class KvFormat, class Out>
AttendCall<Query, KvFormat, Out> make_attend_call(
    MlaInputs<Query, KvFormat, Space::device> const& in, MlaOutputs<Out, Space::device> const& out,
    AttentionPlan const& plan, AttendKeys const& keys, AttendPartials const& partials) noexcept {
  constexpr index_t query = sizeof(Query);
  constexpr index_t kv = sizeof(typename KvFormat::storage);
  AttendCall<Query, KvFormat, Out> call;
  call.in = in;
  call.out = out;
  call.keys = keys;
  call.keys_per_split = plan.keys_per_split;
  call.splits = static_cast<std::uint32_t>(plan.splits);
  call.head_groups = static_cast<std::uint32_t>(plan.head_groups);
  call.value_groups = static_cast<std::uint32_t>(plan.value_groups);
  call.partials = partials;
  bool const flat = in.kv.blocks <= 1 || in.kv.block_stride == in.kv.block_size * in.kv.row_stride;
  index_t const row_stride = in.kv.row_stride * kv;
  bool const short_stride = row_stride <= std::numeric_limits<std::uint32_t>::max();
  call.rows = {reinterpret_cast<std::byte const*>(in.kv.data),
               in.kv.block_stride * kv,
               row_stride,
               static_cast<std::uint32_t>(in.kv.slots()),
               static_cast<std::uint32_t>(in.kv.block_size),
               flat && short_stride ? static_cast<std::uint32_t>(row_stride) : 0};
  call.query_alignment =
      common_alignment(in.q.data_handle(), {in.q.stride(0) * query, in.q.stride(1) * query});
  call.kv_alignment =
      common_alignment(in.kv.data, {in.kv.block_stride * kv, in.kv.row_stride * kv});
  return call;
}

template <int Heads, class Query, class KvFormat, class Out>
Status launch_tensor(CudaExec const& x, AttentionPlan const& plan, unsigned blocks,
                     AttendCall<Query, KvFormat, Out> const& call) noexcept {
  return launch(x, plan.kernel, attend_tensor_kernel<Query, KvFormat, Out, Heads>,
                {dim3(blocks), plan.threads, plan.shared_bytes}, call);
}

template <class Query, class KvFormat, class Out>
Status launch_attend(CudaExec const& x, AttentionPlan const& plan, bool tensor_cores,
                     unsigned blocks, AttendCall<Query, KvFormat, Out> const& call) noexcept {
  if constexpr (attention_operands<Query, KvFormat>() != AttentionOperands::any) {
    if (tensor_cores) {
      switch (plan.heads_per_block) {
        case 64:
          return launch_tensor<64>(x, plan, blocks, call);
        case 32:
          return launch_tensor<32>(x, plan, blocks, call);
        case 16:
          return launch_tensor<16>(x, plan, blocks, call);
        default:
          return launch_tensor<8>(x, plan, blocks, call);
      }
    }
  }
  return launch(x, plan.kernel, attend_any_kernel<Query, KvFormat, Out>,
                {dim3(blocks), plan.threads, plan.shared_bytes}, call);
}

/// Rows of one launch, for grids of fewer than 2^31 blocks.
constexpr index_t rows_per_launch(AttentionPlan const& plan) noexcept {
  index_t const per_row = plan.splits * plan.head_groups * plan.value_groups;
  return std::max<index_t>(max_position / per_row, 1);
}

template <class Query, class KvFormat, class Out>
Status attend_rows(CudaExec const& x, AttentionPlan const& plan, bool tensor_cores,
                   AttendCall<Query, KvFormat, Out> call, RowRange rows) noexcept {
  return for_each_pass(rows.count, rows_per_launch(plan), [&](RowRange part) noexcept {
    part.first += rows.first;
    call.first_row = part.first;
    auto const blocks =
        static_cast<unsigned>(part.count * plan.splits * plan.head_groups * plan.value_groups);
    Status const status = launch_attend(x, plan, tensor_cores, blocks, call);
    if (!status.ok() || plan.splits == 1) return status;
    AttendMerge<Out> const merge{call.out,
                                 call.in.sink,
                                 part.first,
                                 static_cast<int>(plan.splits),
                                 tensor_cores ? PartialOrder::fragments : PartialOrder::lanes,
                                 call.partials};
    auto const merges = static_cast<unsigned>(part.count * call.partials.heads / merge.heads);
    return launch(x, plan.merge_kernel, attend_merge_kernel<Out>, {dim3(merges), merge.threads, 0},
                  merge);
  });
}

}  // namespace detail

/// Errors: those of check_inputs; unsupported with what the device lacks.
template <class Policy>
requires detail::is_mla<Policy> Status attention_check(
    CudaExec const& x, Policy, typename Policy::template inputs<Space::device> const& in,
    typename Policy::template outputs<Space::device> const& out,
    RowBatch<Space::device> const& batch, Shape const& shape)
noexcept {
  if (Status const status = check_inputs(in, out, batch, shape); !status.ok()) return status;
  Result<AttentionPlan> const plan =
      detail::plan_attention(x.limits(), detail::operands_of_call<Policy>(in), shape, 1);
  return plan ? Status{} : plan.error();
}

/// Enqueues one or two kernels on the executor's stream; can be captured. Takes inputs that
/// attention_check has passed. Any strides and alignment give the same bits; KV rows and query
/// heads at multiples of 16 bytes are copied asynchronously. Errors: unsupported,
/// workspace_too_small, backend_error of a launch.
template <class Policy>
requires detail::is_mla<Policy> Status attention_run(
    CudaExec const& x, Policy, typename Policy::template inputs<Space::device> const& in,
    RowBatch<Space::device> const& batch, RowRange rows, GroupPlan<Space::device> const& group,
    typename Policy::template outputs<Space::device> const& out, Shape const& shape, Workspace ws)
noexcept {
  using namespace detail;
  AttendKeys keys{group.slots,    group.counts,          batch.requests,
                  batch.kv_pages, group.slots.extent(1), false};
  if constexpr (!Policy::reads_selection) {
    keys.counts = batch.lengths;
    keys.capacity = std::min(shape.keys, batch.kv_pages.keys());
    keys.dense = true;
  }
  AttentionOperands const operands = operands_of_call<Policy>(in);
  Result<AttentionPlan> const plan = plan_attention(x.limits(), operands, shape, keys.capacity);
  if (!plan) return plan.error();
  AttendPartials partials;
  if (plan->splits > 1) {
    WorkspaceCarver carver(ws);
    partials = carve_attend(carver, rows.count * plan->splits, shape.heads, shape.value_dim);
    if (Status const status = check_workspace(attention_workspace_name, ws, carver.size().bytes);
        !status.ok()) {
      return status;
    }
  }
  return attend_rows(x, *plan, on_tensor_cores(operands, shape),
                     make_attend_call(in, out, *plan, keys, partials), rows);
}

static_assert(AttentionPolicy<SparseMla<bf16, format::Plain<bf16>, bf16>, CudaExec>);
static_assert(AttentionPolicy<SparseMla<bf16, format::LatentE4m3, bf16>, CudaExec>);
static_assert(AttentionPolicy<DenseMla<float, format::Plain<float>>, CudaExec>);

}  // namespace v0
}  // namespace indexshare
