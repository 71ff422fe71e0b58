// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/cache.hpp>
#include <indexshare/dims.hpp>
#include <indexshare/status.hpp>
#include <indexshare/views.hpp>
#include <indexshare/workspace.hpp>

#include <cstddef>
#include <cstdint>

namespace indexshare {
inline namespace v0 {

/// Names one forward of one batch; the caller gives the numbers. Two forwards that may be in
/// flight or follow each other on one state must differ in `forward` or `batch`.
struct ForwardId {
  std::int64_t forward =
      -1;  ///< 0 or more; the default is nobody's, so that it cannot be forgotten
  std::int32_t batch = 0;

  friend constexpr bool operator==(ForwardId const&, ForwardId const&) noexcept = default;
};

/// Whose selection a state holds. Compared on the host when a shared layer is enqueued.
struct SelectionTag {
  ForwardId id{};
  std::int32_t rows = 0;
  std::int32_t source_layer = no_position;  ///< no_position: the state holds no selection

  friend constexpr bool operator==(SelectionTag const&, SelectionTag const&) noexcept = default;
};

/// Refuses a tag that is not the expected one, naming the first part that differs and both values.
constexpr Status match_tag(SelectionTag const& expected, SelectionTag const& got) noexcept {
  if (got.source_layer == no_position) {
    return failure(Errc::stale_selection, "the state holds no selection; expected one of the layer",
                   expected.source_layer, got.source_layer);
  }
  if (got.id.forward != expected.id.forward) {
    return failure(Errc::stale_selection, "the selection belongs to another forward",
                   expected.id.forward, got.id.forward);
  }
  if (got.id.batch != expected.id.batch) {
    return failure(Errc::stale_selection, "the selection belongs to another batch",
                   expected.id.batch, got.id.batch);
  }
  if (got.source_layer != expected.source_layer) {
    return failure(Errc::stale_selection, "the selection belongs to another source layer",
                   expected.source_layer, got.source_layer);
  }
  if (got.rows != expected.rows) {
    return failure(Errc::stale_selection, "the selection has another row count", expected.rows,
                   got.rows);
  }
  return {};
}

/// What `validate` found, in numbers of entries and rows.
struct SelectionReport {
  std::int64_t outside = 0;      ///< entries below a row's count without a place in the cache
  std::int64_t duplicates = 0;   ///< entries below a row's count that repeat an earlier one
  std::int64_t bad_counts = 0;   ///< rows whose count is not in [0, top_k]
  std::int64_t bad_lengths = 0;  ///< rows whose length is not in [0, shape.keys]

  friend constexpr bool operator==(SelectionReport const&,
                                   SelectionReport const&) noexcept = default;
};

/// What went wrong where nobody on the host could look: work that is replayed from a graph read a
/// state which held another selection than its call asked for. Lies where the executor can write;
/// the caller sets it to `{}` before and reads it after the work.
struct TagMismatch {
  std::uint32_t found = 0;  ///< how often; the rest describes the first
  std::int32_t layer = -1;  ///< that read the state; -1: compact_selection
  SelectionTag expected{};
  SelectionTag got{};
};

/// The mismatch as the error that the same call would have met on the host.
constexpr Status status_of(TagMismatch const& mismatch) noexcept {
  return mismatch.found == 0 ? Status{}
                             : match_tag(mismatch.expected, mismatch.got).at_layer(mismatch.layer);
}

/// What attention reads: the slots of a share group in one forward, computed once by its full
/// layer. `slots` [rows, top_k], `counts` [rows]; entries at or past a row's count are not read,
/// entries without a slot are `no_position`.
template <Space S>
struct GroupPlan {
  Tensor<S, position_t const, 2> slots;
  Tensor<S, position_t const, 1> counts;
};

/// Memory for one forward's selection, owned by the caller, apart from the workspace: indices and
/// counts [rows, top_k] + [rows], the group plan's slots [rows, top_k], and the tag. Filled by a
/// full layer, read by its shared layers and by recorders. Two micro-batches in flight need two.
///
/// The tag is compared on the host when work is enqueued. A replayed graph enqueues nothing: there
/// `check_tags_on_device` finds a wrong order of graphs.
template <Space S>
class SelectionState {
 public:
  /// Bytes for `rows` rows at most; monotone in both.
  static constexpr WorkspaceSize size(Rows rows, TopK top_k) noexcept {
    return carve(WorkspaceCarver{}, rows.n, top_k.n).size;
  }

  /// Lays a state out over `memory`, which stays the caller's and is not touched here.
  static Result<SelectionState> make(Workspace memory, Rows rows, TopK top_k) noexcept {
    if (rows.n < 0) return refuse(failure(Errc::bad_value, "rows of a SelectionState", 0, rows.n));
    if (rows.n > max_position) {
      return refuse(failure(Errc::bad_value, "rows of a SelectionState", max_position, rows.n));
    }
    if (top_k.n > max_position) {
      return refuse(failure(Errc::bad_value, "top_k of a SelectionState", max_position, top_k.n));
    }
    if (top_k.n < 1)
      return refuse(failure(Errc::bad_value, "top_k of a SelectionState", 1, top_k.n));
    if (memory.data == nullptr && memory.bytes > 0) {
      return refuse(failure(Errc::missing_input, "memory of a SelectionState"));
    }
    WorkspaceSize const need = size(rows, top_k);
    if (memory.bytes < need.bytes) {
      return refuse(failure(Errc::workspace_too_small, "memory of a SelectionState, in bytes",
                            static_cast<std::int64_t>(need.bytes),
                            static_cast<std::int64_t>(memory.bytes)));
    }
    if (std::size_t const past = misalignment(memory.data); past != 0) {
      return refuse(failure(
          Errc::bad_value, "alignment of a SelectionState's memory (got: bytes past a multiple)",
          static_cast<std::int64_t>(workspace_alignment), static_cast<std::int64_t>(past)));
    }
    SelectionState state;
    state.blocks_ = carve(WorkspaceCarver{memory}, rows.n, top_k.n).blocks;
    state.rows_ = rows.n;
    state.top_k_ = top_k.n;
    state.begin_ = reinterpret_cast<std::uintptr_t>(memory.data);
    state.end_ = state.begin_ + need.bytes;
    return state;
  }

  /// Whether the two share memory; copies of a state do.
  constexpr bool overlaps(SelectionState const& other) const noexcept {
    return begin_ < other.end_ && other.begin_ < end_;
  }

  constexpr index_t rows() const noexcept { return rows_; }
  constexpr index_t top_k() const noexcept { return top_k_; }

  /// Whose selection it is; `source_layer` is `no_position` while there is none.
  constexpr SelectionTag const& tag() const noexcept { return tag_; }
  constexpr void set_tag(SelectionTag const& tag) noexcept { tag_ = tag; }
  /// The page table that the group plan was made with; shared layers must bring the same one.
  constexpr PageTable<S> const& plan_pages() const noexcept { return plan_pages_; }
  constexpr void set_plan_pages(PageTable<S> const& pages) noexcept { plan_pages_ = pages; }
  /// Forgets the selection, for example on an error path: no shared layer can read it any more.
  constexpr void clear() noexcept { tag_ = SelectionTag{}; }

  /// For debugging graphs: from now on whoever fills the state writes its tag into the state's
  /// memory too, as part of the enqueued work, and whoever reads it compares that tag and reports
  /// a difference to `mismatch`; nullptr, as at the beginning, turns it off. Costs a kernel of one
  /// thread per call. Turn it on before the state is filled. Executors whose calls are not replayed
  /// (those of host memory) have nothing to add to the comparison above and ignore it.
  constexpr void check_tags_on_device(TagMismatch* mismatch) noexcept { mismatch_ = mismatch; }
  constexpr TagMismatch* tag_mismatch() const noexcept { return mismatch_; }
  /// Where the enqueued work keeps the tag, in the executor's space; for back ends.
  constexpr SelectionTag* stored_tag() const noexcept { return blocks_.tag; }

  /// The first `count` rows, for the layer that fills them.
  constexpr SelectionView<S> selection(index_t count) const noexcept {
    return make_selection<S>(blocks_.indices, blocks_.counts, Rows{count}, TopK{top_k_});
  }
  constexpr Tensor<S, position_t, 2> slots(index_t count) const noexcept {
    return make_dense<S, position_t, 2>(blocks_.slots, {count, top_k_});
  }

  /// The selection that the state holds, for recorders: logical positions.
  constexpr SelectionView<S, position_t const> selection() const noexcept {
    auto const view = selection(tag_.rows);
    return {view.indices, view.counts};
  }
  /// The group plan of the selection that the state holds.
  constexpr GroupPlan<S> plan() const noexcept {
    return {slots(tag_.rows), selection(tag_.rows).counts};
  }

 private:
  struct Blocks {
    position_t* indices = nullptr;
    position_t* counts = nullptr;
    position_t* slots = nullptr;
    SelectionTag* tag = nullptr;
  };
  struct Carved {
    Blocks blocks;
    WorkspaceSize size;
  };
  static constexpr Carved carve(WorkspaceCarver carver, index_t rows, index_t top_k) noexcept {
    std::size_t const entries = saturating_area(rows, top_k);
    Blocks blocks;
    blocks.indices = carver.take<position_t>(entries);
    blocks.counts = carver.take<position_t>(saturating_area(rows, 1));
    blocks.slots = carver.take<position_t>(entries);
    blocks.tag = carver.take<SelectionTag>(1);
    return {blocks, carver.size()};
  }

  Blocks blocks_{};
  index_t rows_ = 0;
  index_t top_k_ = 0;
  std::uintptr_t begin_ = 0;  // of the memory, for comparison only
  std::uintptr_t end_ = 0;
  SelectionTag tag_{};
  PageTable<S> plan_pages_{};
  TagMismatch* mismatch_ = nullptr;
};

}  // namespace v0
}  // namespace indexshare
