// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/indexshare.hpp>

#include <cstddef>
#include <cstdint>

/// A back end that does nothing, for four policies that do nothing, on an executor whose memory is
/// a device's. With -DLEFT_OUT_<function> one function of it is missing; CONTROL brings it back.
namespace mock {

using namespace indexshare;

struct DeviceExec {
  static constexpr Space space = Space::device;
};

struct Indexer {
  using score_type = float;
  template <Space S>
  struct inputs {
    QueryView<S, float> q;
  };
};
struct Select {};
struct Share {};
struct Attention {
  static constexpr bool reads_selection = true;
  template <Space S>
  struct inputs {
    QueryView<S, float> q;
  };
  template <Space S>
  struct outputs {
    OutputView<S, float> o;
  };
};

// The library's own hooks for a back end: slots of a selection.
inline Status map_slots(DeviceExec, SelectionView<Space::device, position_t const> const&,
                        LengthView<Space::device> const&, PageTable<Space::device> const&,
                        Tensor<Space::device, position_t, 2> const&) noexcept {
  return {};
}

#if defined(CONTROL) || !defined(LEFT_OUT_indexer_workspace)
inline Result<WorkspaceSize> indexer_workspace(DeviceExec, Indexer, Shape const&) noexcept {
  return WorkspaceSize{};
}
#endif
#if defined(CONTROL) || !defined(LEFT_OUT_indexer_check)
inline Status indexer_check(DeviceExec, Indexer, Indexer::inputs<Space::device> const&,
                            RowBatch<Space::device> const&, Shape const&) noexcept {
  return {};
}
#endif
#if defined(CONTROL) || !defined(LEFT_OUT_indexer_score)
inline Status indexer_score(DeviceExec, Indexer, Indexer::inputs<Space::device> const&,
                            RowBatch<Space::device> const&, ScoreRequest const&,
                            ScoreView<Space::device> const&, Workspace) noexcept {
  return {};
}
#endif

#if defined(CONTROL) || !defined(LEFT_OUT_topk_workspace)
inline Result<WorkspaceSize> topk_workspace(DeviceExec, Select, Shape const&) noexcept {
  return WorkspaceSize{};
}
#endif
#if defined(CONTROL) || !defined(LEFT_OUT_topk_select)
inline Status topk_select(DeviceExec, Select, ScoreView<Space::device, float const> const&,
                          LengthView<Space::device> const&, SelectionView<Space::device> const&,
                          Workspace) noexcept {
  return {};
}
#endif

#if defined(CONTROL) || !defined(LEFT_OUT_share_source)
constexpr std::int32_t share_source(Share, std::int32_t layer) noexcept { return layer; }
#endif

#if defined(CONTROL) || !defined(LEFT_OUT_attention_workspace)
inline Result<WorkspaceSize> attention_workspace(DeviceExec, Attention, Shape const&) noexcept {
  return WorkspaceSize{};
}
#endif
#if defined(CONTROL) || !defined(LEFT_OUT_attention_check)
inline Status attention_check(DeviceExec, Attention, Attention::inputs<Space::device> const&,
                              Attention::outputs<Space::device> const&,
                              RowBatch<Space::device> const&, Shape const&) noexcept {
  return {};
}
#endif
#if defined(CONTROL) || !defined(LEFT_OUT_attention_run)
inline Status attention_run(DeviceExec, Attention, Attention::inputs<Space::device> const&,
                            RowBatch<Space::device> const&, RowRange,
                            GroupPlan<Space::device> const&,
                            Attention::outputs<Space::device> const&, Shape const&,
                            Workspace) noexcept {
  return {};
}
#endif

using Layer = SparseAttentionLayer<Indexer, Select, Share, Attention>;

}  // namespace mock
