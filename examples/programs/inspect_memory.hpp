// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/indexshare.hpp>

#include <cstddef>
#include <string_view>
#include <vector>

/// @file What one call of a full layer takes beside the caches, planned before anything is
/// allocated: the selection, which lives for a forward, and scratch within what the budget leaves.

namespace programs {

/// The scratch of one back end and form of caches, or why it cannot be had.
struct ScratchPlan {
  std::string_view name;
  indexshare::Result<indexshare::WorkspaceSize> scratch;
};

struct MemoryReport {
  indexshare::Shape shape;
  std::size_t budget = 0;     ///< of selection and scratch together
  std::size_t selection = 0;  ///< indices, counts and slots
  std::vector<ScratchPlan> plans;
};

/// Of the smallest card: every other one has more shared memory.
inline constexpr indexshare::DeviceLimits smallest_card{86, 82, 99 * 1024};

template <class KeyFormat, class KvFormat, class X>
ScratchPlan planned_scratch(std::string_view name, X const& x, MemoryReport const& report) {
  using namespace indexshare;
  using Layer = SparseAttentionLayer<ReluDotIndexer<bf16, KeyFormat>, RadixTopK, EveryLayer,
                                     SparseMla<bf16, KvFormat>>;
  if (report.selection >= report.budget) {
    return {name, refuse(failure(Errc::workspace_too_small, "budget of selection and scratch",
                                 static_cast<std::int64_t>(report.selection + 1),
                                 static_cast<std::int64_t>(report.budget)))};
  }
  Layer const layer{.share = {1}, .shape = report.shape};
  return {name, layer.workspace(x, report.budget - report.selection)};
}

inline MemoryReport plan_memory(indexshare::ModelConfig const& model, indexshare::index_t rows,
                                indexshare::index_t keys, std::size_t budget) {
  using namespace indexshare;
  using Bf16 = format::Plain<bf16>;
  MemoryReport report{shape_of(model, Rows{rows}, Keys{keys}), budget, 0, {}};
  report.selection = SelectionState<Space::host>::size(Rows{rows}, TopK{report.shape.top_k}).bytes;
  CudaPlanner const cuda{smallest_card};
  report.plans = {
      planned_scratch<Bf16, Bf16>("host, bf16 caches", HostExec<>{}, report),
      planned_scratch<format::IndexKeyE4m3, format::LatentE4m3>("host, fp8 caches", HostExec<>{},
                                                                report),
      planned_scratch<Bf16, Bf16>("CUDA, bf16 caches", cuda, report),
      planned_scratch<format::IndexKeyE4m3, format::LatentE4m3>("CUDA, fp8 caches", cuda, report),
  };
  return report;
}

}  // namespace programs
