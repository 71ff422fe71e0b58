// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/cuda/attention_plan.hpp>
#include <indexshare/cuda/device_limits.hpp>
#include <indexshare/cuda/full_sort_plan.hpp>
#include <indexshare/cuda/indexer_plan.hpp>
#include <indexshare/cuda/topk_plan.hpp>
#include <indexshare/dims.hpp>
#include <indexshare/layer.hpp>
#include <indexshare/select.hpp>
#include <indexshare/status.hpp>
#include <indexshare/workspace.hpp>

#include <cstddef>

/// @file The capability query: what a layer runs on a CUDA device, or why it cannot, as arithmetic.
/// Needs no toolkit and no device.

namespace indexshare {
inline namespace v0 {

/// One kernel of a layer call.
struct KernelUse {
  char const* name = "";
  int shared_bytes = 0;  ///< dynamic shared memory of a block
};

/// One stage of a layer call: a range of its kernels, in order. Without kernels it does not run.
struct StageUse {
  KernelUse kernels[3]{};
  int count = 0;            ///< of the kernels
  index_t rows = 0;         ///< query rows of a pass, at most
  WorkspaceSize scratch{};  ///< of a pass; scores are not in it

  constexpr KernelUse const* begin() const noexcept { return kernels; }
  constexpr KernelUse const* end() const noexcept { return kernels + count; }
};

/// What a layer call runs. Shared and dense layers have no indexer and no top-k.
struct Capability {
  StageUse indexer{};
  StageUse topk{};
  StageUse attention{};
  WorkspaceSize workspace{};  ///< of the call: scores, and the stages' scratch in turn
};

namespace detail {

// The kernels of each kind of plan. A StageUse is itself, so that a policy outside the library can
// have a plan function that returns one.

constexpr StageUse stage_use(StageUse const& stage) noexcept { return stage; }
constexpr StageUse stage_use(IndexerPlan const& plan) noexcept {
  return {{{plan.kernel, plan.shared_bytes}}, 1};
}
constexpr StageUse stage_use(TopKPlan const& plan) noexcept {
  return {
      {{plan.rows.kernel, plan.rows.shared_bytes}, {plan.chunks.kernel, plan.chunks.shared_bytes}},
      plan.row_chunks > 0 ? 2 : 1};
}
constexpr StageUse stage_use(FullSortPlan const& plan) noexcept {
  return {{{plan.kernels[0]}, {plan.kernels[1]}, {plan.kernels[2]}}, 3};
}
constexpr StageUse stage_use(AttentionPlan const& plan) noexcept {
  return {{{plan.kernel, plan.shared_bytes}, {plan.merge_kernel}}, plan.splits > 1 ? 2 : 1};
}

/// The stage of a plan and a size query that are both made for passes of `rows` rows.
template <class Plan>
Result<StageUse> stage_of(Result<Plan> const& plan, Result<WorkspaceSize> const& scratch,
                          index_t rows) noexcept {
  if (!plan) return refuse(plan.error());
  if (!scratch) return refuse(scratch.error());
  StageUse stage = stage_use(*plan);
  stage.rows = rows;
  stage.scratch = *scratch;
  return stage;
}

/// Adds a full layer's indexer and top-k to a capability that has its workspace.
template <class Indexer, class TopK>
Status add_selection(CudaPlanner const& device, Indexer const& indexer, TopK const& topk,
                     Shape const& shape, Capability& capability) noexcept {
  Result<index_t> const rows = rows_that_fit(
      select_workspace_name, shape.rows, capability.workspace.bytes, [&](index_t count) noexcept {
        return select_pass_size(device, indexer, topk, shape, count);
      });
  if (!rows) return rows.error();
  Shape const pass = shape.with_rows(*rows);
  Result<StageUse> const score = stage_of(indexer_plan(device.limits(), indexer, pass),
                                          indexer_workspace(device, indexer, pass), *rows);
  if (!score) return score.error();
  Result<StageUse> const choose =
      stage_of(topk_plan(device.limits(), topk, pass), topk_workspace(device, topk, pass), *rows);
  if (!choose) return choose.error();
  capability.indexer = *score;
  capability.topk = *choose;
  return {};
}

/// Adds the attention. Its kernels are chosen by the capacities, its scratch by the pass.
template <class Attention>
Status add_attention(CudaPlanner const& device, Attention const& attention, Shape const& shape,
                     Capability& capability) noexcept {
  auto const scratch = [&](index_t count) noexcept {
    return attention_workspace(device, attention, shape.with_rows(count));
  };
  Result<index_t> const rows =
      rows_that_fit(attention_workspace_name, shape.rows, capability.workspace.bytes, scratch);
  if (!rows) return rows.error();
  Result<StageUse> const attend =
      stage_of(attention_plan(device.limits(), attention, shape), scratch(*rows), *rows);
  if (!attend) return attend.error();
  capability.attention = *attend;
  return {};
}

}  // namespace detail

/// What `layer.run` launches for a batch of `layer.shape.rows` rows on a device with these limits,
/// in a workspace of at most `budget` bytes (smaller batches may take other blocks, which fit,
/// too); or the Status with which `layer.workspace` of a CudaExec refuses the layer, and
/// `layer.run` too. It is made of the same plans. Kernels that only hand a selection on (slots,
/// tags) run on every device and are not listed. Of the schedule it only asks
/// whether the layer is full: one without a source is refused by `layer.run` alone.
///
/// Policies outside the library need a size function that takes a CudaPlanner and a plan function,
/// `topk_plan(limits, policy, shape) -> Result<StageUse>` and so on.
/// Errors: those of `layer.workspace`.
template <class Indexer, class TopK, class Share, class Attention>
Result<Capability> capability(DeviceLimits const& limits,
                              SparseAttentionLayer<Indexer, TopK, Share, Attention> const& layer,
                              std::size_t budget) noexcept {
  CudaPlanner const device{limits};
  Result<WorkspaceSize> const workspace = layer.workspace(device, budget);
  if (!workspace) return refuse(workspace.error());
  Capability capability;
  capability.workspace = *workspace;
  Status status = detail::add_attention(device, layer.attention, layer.shape, capability);
  if (status.ok() && Attention::reads_selection && layer.is_full()) {
    status = detail::add_selection(device, layer.indexer, layer.topk, layer.shape, capability);
  }
  return status.ok() ? Result<Capability>(capability) : refuse(status.at_layer(layer.layer));
}

}  // namespace v0
}  // namespace indexshare
