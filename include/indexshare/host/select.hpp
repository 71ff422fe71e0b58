// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/host/candidates.hpp>
#include <indexshare/host/indexer.hpp>
#include <indexshare/host/score_run.hpp>
#include <indexshare/host/topk.hpp>
#include <indexshare/select.hpp>

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <numeric>
#include <type_traits>

/// @file Selection fused with scoring: a block of scores goes from the first-level cache into the
/// lists of candidates of its rows, so scratch holds no row of scores.

namespace indexshare {
inline namespace v0 {
namespace detail {

/// HostExec<PF>, or a type derived from it.
template <class X>
concept HostExecutor = HostSpaceExecutor<X> && requires(X const x) {
  requires std::derived_from<X, HostExec<std::remove_cvref_t<decltype(x.parallel_for)>>>;
};

/// How a fused selection uses its scratch. What it selects does not depend on this.
struct SelectPlan {
  index_t workers;
  index_t tile_rows;  ///< rows that share decoded keys, each with a list of candidates
  index_t capacity;   ///< of a list
  bool splits_tiles;  ///< parts may end inside a tile, and keep lists for both of their ends

  /// One per worker: parts are equal in work, and each costs a merge.
  index_t parts() const noexcept { return workers; }
};

/// Lists of the rows of a tile.
struct TileLists {
  Candidates rows[score_tile_rows];
};

inline TileLists carve_lists(WorkspaceCarver& carver, SelectPlan const& plan,
                             index_t top_k) noexcept {
  TileLists lists{};
  for (index_t i = 0; i < plan.tile_rows; ++i) {
    lists.rows[i] = carve_candidates(carver, top_k, plan.capacity);
  }
  return lists;
}

template <class Policy>
struct SelectWorker {
  typename HostScorer<Policy>::Scratch score;
  TileLists lists;
};

template <class Policy>
SelectWorker<Policy> carve_worker(WorkspaceCarver& carver, SelectPlan const& plan,
                                  Shape const& shape) noexcept {
  auto const score = HostScorer<Policy>::carve(carver, plan.tile_rows, shape);
  return {score, carve_lists(carver, plan, shape.top_k)};
}

/// What a part found of a tile that it shares with other parts, at most top_k per row.
struct PartialTile {
  TileLists lists;
  index_t* counts;  ///< [score_tile_rows] of the lists, which outlive the part
};

/// A part shares at most the tile that it begins in and the tile that it ends in.
struct PartEnds {
  PartialTile continued;  ///< begun by an earlier part
  PartialTile begun;      ///< later parts go on with it
};

inline PartEnds carve_ends(WorkspaceCarver& carver, SelectPlan const& plan,
                           index_t top_k) noexcept {
  auto const partial = [&]() noexcept -> PartialTile {
    TileLists const lists = carve_lists(carver, plan, top_k);
    return {lists, carver.take<index_t>(score_tile_rows)};
  };
  PartialTile const continued = partial();
  return {continued, partial()};
}

/// Finds the scratch of workers and parts; the walk of the size query.
template <class Policy>
class SelectScratch {
 public:
  SelectScratch(SelectPlan const& plan, Shape const& capacities, Workspace ws) noexcept
      : plan_(plan), shape_(capacities), ws_(ws) {}

  static WorkspaceSize size(SelectPlan const& plan, Shape const& shape) noexcept {
    WorkspaceCarver carver;
    for (index_t worker = 0; worker < plan.workers; ++worker)
      carve_worker<Policy>(carver, plan, shape);
    if (plan.splits_tiles) {
      for (index_t part = 0; part < plan.parts(); ++part) carve_ends(carver, plan, shape.top_k);
    }
    return carver.size();
  }

  SelectWorker<Policy> worker(index_t number) const noexcept {
    WorkspaceCarver carver(ws_);
    for (index_t before = 0; before < number; ++before) carve_worker<Policy>(carver, plan_, shape_);
    return carve_worker<Policy>(carver, plan_, shape_);
  }

  PartEnds ends(index_t part) const noexcept {
    WorkspaceCarver carver(ws_);
    for (index_t worker = 0; worker < plan_.workers; ++worker) {
      carve_worker<Policy>(carver, plan_, shape_);
    }
    for (index_t before = 0; before < part; ++before) carve_ends(carver, plan_, shape_.top_k);
    return carve_ends(carver, plan_, shape_.top_k);
  }

 private:
  SelectPlan plan_;
  Shape shape_;
  Workspace ws_;
};

/// The most comfortable plan within `bytes`: fewer rows share decoded keys, then lists are
/// compacted more often, then parts take whole tiles. Without memory for the least plan, that one.
template <class Policy>
SelectPlan select_plan(index_t workers, Shape const& shape, std::size_t bytes) noexcept {
  index_t const least = shape.top_k + least_candidate_room;
  index_t const ample = std::max(least, std::min(4 * shape.top_k, shape.keys));
  SelectPlan plan{workers, rows_of_tile(shape.rows), ample, workers > 1};
  auto const fits = [&]() noexcept {
    return SelectScratch<Policy>::size(plan, shape).bytes <= bytes;
  };
  while (plan.tile_rows > 1 && !fits()) --plan.tile_rows;
  if (!fits()) plan.capacity = least;
  if (!fits()) plan.splits_tiles = false;
  return plan;
}

/// One call.
template <class X, class Policy>
class FusedSelect {
 public:
  using Inputs = typename Policy::template inputs<Space::host>;

  FusedSelect(X const& x, Inputs const& inputs, RowBatch<Space::host> const& batch,
              Shape const& capacities, SelectionView<Space::host> const& selection,
              SelectPlan const& plan, Workspace ws) noexcept
      : x_(x),
        in_(inputs),
        batch_(batch),
        out_(selection),
        plan_(plan),
        scratch_(plan, capacities, ws),
        cut_(batch, {{0, batch.count()}, capacities.top_k}, capacities.keys, plan.tile_rows,
             plan.splits_tiles ? CutAt::blocks : CutAt::tiles) {}

  void run() const noexcept {
    each(plan_.parts(), [&, this](index_t part, int worker) noexcept { find(part, worker); });
    if (plan_.splits_tiles) {
      each(plan_.parts(), [&, this](index_t part, int) noexcept { merge(part); });
    }
  }

 private:
  template <class F>
  void each(index_t count, F const& f) const noexcept {
    x_.parallel_for(count, [&](index_t begin, index_t end, int worker) noexcept {
      for (index_t i = begin; i < end; ++i) f(i, worker);
    });
  }

  /// Scores a part, writes the rows of whole tiles and keeps the candidates of shared ones. An even
  /// share of all rows is looked through for those that select everything.
  void find(index_t part, int worker) const noexcept {
    index_t const last = batch_.count() * (part + 1) / plan_.parts();
    for (index_t row = batch_.count() * part / plan_.parts(); row < last; ++row) {
      if (cut_.length(row) == 0) emit_all(row);
    }
    SelectWorker<Policy> own = scratch_.worker(worker);
    PartEnds ends{};
    if (plan_.splits_tiles) ends = scratch_.ends(part);
    ScoreRun<Policy> const scoring(x_.isa, in_, batch_, cut_, own.score);
    cut_.for_each_piece(part, plan_.parts(), [&, this](TilePiece const& piece) noexcept {
      PartialTile& shared = piece.first == 0 ? ends.begun : ends.continued;
      TileLists lists = piece.whole() ? own.lists : shared.lists;
      scoring.score(piece, [&, this](index_t row, index_t first, index_t count,
                                     float const* scores) noexcept {
        lists_.append(lists.rows[row - piece.tile.rows.first], scores, first, count);
      });
      for (index_t i = 0; i < piece.tile.rows.count; ++i) {
        lists_.compact(lists.rows[i]);
        if (piece.whole()) {
          emit(piece.tile.rows.first + i, lists.rows[i]);
        } else {
          shared.counts[i] = lists.rows[i].count;
        }
      }
    });
  }

  /// Completes the tile that a part began and shares with later ones.
  void merge(index_t part) const noexcept {
    cut_.for_each_piece(part, plan_.parts(), [&, this](TilePiece const& piece) noexcept {
      if (piece.whole() || piece.first != 0) return;
      TileLists lists = candidates(scratch_.ends(part).begun);
      for (index_t later = part + 1; later < plan_.parts(); ++later) {
        cut_.for_each_piece(later, plan_.parts(), [&, this](TilePiece const& next) noexcept {
          if (next.tile.rows.first != piece.tile.rows.first) return;
          TileLists const more = candidates(scratch_.ends(later).continued);
          for (index_t i = 0; i < piece.tile.rows.count; ++i)
            lists_.merge(lists.rows[i], more.rows[i]);
        });
      }
      for (index_t i = 0; i < piece.tile.rows.count; ++i) {
        lists_.compact(lists.rows[i]);
        emit(piece.tile.rows.first + i, lists.rows[i]);
      }
    });
  }

  TileLists candidates(PartialTile const& partial) const noexcept {
    TileLists lists = partial.lists;
    for (index_t i = 0; i < plan_.tile_rows; ++i) lists.rows[i].count = partial.counts[i];
    return lists;
  }

  position_t* indices(index_t row) const noexcept {
    return out_.indices.data_handle() + row * out_.indices.stride(0);
  }
  /// A shorter row of the tile is not scored: emit_all writes it.
  void emit(index_t row, Candidates const& best) const noexcept {
    if (cut_.length(row) == 0) return;
    std::copy_n(best.positions, best.count, indices(row));
    out_.counts(row) = static_cast<position_t>(best.count);
  }
  void emit_all(index_t row) const noexcept {
    index_t const length = std::min(cut_.visible(row), out_.indices.extent(1));
    std::iota(indices(row), indices(row) + length, position_t{0});
    std::fill(indices(row) + length, indices(row) + out_.indices.extent(1), no_position);
    out_.counts(row) = static_cast<position_t>(length);
  }

  X const& x_;
  Inputs const& in_;
  RowBatch<Space::host> const& batch_;
  SelectionView<Space::host> const& out_;
  SelectPlan plan_;
  SelectScratch<Policy> scratch_;
  ScoreCut cut_;
  CandidateKernels const& lists_ = kernels<CandidateKernels>(x_.isa);
};

inline constexpr char const* fused_workspace_name = "workspace of the selection, in bytes";

template <HostExecutor X, class Policy>
Result<WorkspaceSize> least_select_size(X const& x, Policy const& indexer,
                                        Shape const& shape) noexcept {
  Status const status = first_failure({check_executor(x), check_shape(indexer, shape),
                                       check_at_least("shape.top_k", 1, shape.top_k),
                                       check_at_most("shape.top_k", max_position, shape.top_k)});
  if (!status.ok()) return refuse(status);
  Shape const one_row = shape.with_rows(1);
  SelectPlan const plan = select_plan<Policy>(x.parallel_for.concurrency(), one_row, 0);
  return SelectScratch<Policy>::size(plan, one_row);
}

}  // namespace detail

/// Scratch of the fused selection: per worker the packed queries of 8 rows and their candidates,
/// with several workers also the candidates of both ends of each worker's part. It grows with top_k
/// and not with the keys, nor with more rows.
template <detail::HostExecutor X, detail::HostScored Policy>
Result<WorkspaceSize> select_workspace(X const& x, Policy const& indexer, RadixTopK const&,
                                       Shape const& shape, std::size_t budget) noexcept {
  using namespace detail;
  Result<WorkspaceSize> const least = least_select_size(x, indexer, shape);
  if (!least) return least;
  if (least->bytes > budget) {
    return refuse(workspace_too_small(fused_workspace_name, least->bytes, budget));
  }
  SelectPlan const ample =
      select_plan<Policy>(x.parallel_for.concurrency(), shape, max_workspace_bytes);
  // the whole budget where it does not suffice: that is monotone in every capacity
  return WorkspaceSize{std::min(SelectScratch<Policy>::size(ample, shape).bytes, budget)};
}

/// Scoring and RadixTopK at once, in one pass over the keys, exact for data in any order: a score
/// leaves the first-level cache only while it can be among the best. The work is cut into parts of
/// equal size, across rows and inside long ones; the lists of parts are merged by the same order.
template <detail::HostExecutor X, detail::HostScored Policy>
Status select(X const& x, Policy const& indexer, RadixTopK const&,
              typename Policy::template inputs<Space::host> const& in,
              RowBatch<Space::host> const& batch, Shape const& shape,
              SelectionView<Space::host> const& out, Workspace ws) noexcept {
  using namespace detail;
  Result<WorkspaceSize> const least = least_select_size(x, indexer, shape);
  if (!least) return least.error();
  Status const status = first_failure({
      check_workspace(fused_workspace_name, ws, least->bytes),
      check_extent("rows of the selection", batch.count(), out.indices.extent(0)),
      check_extent("rows of the selection's counts", batch.count(), out.counts.extent(0)),
      check_extent("width of the selection", shape.top_k, out.indices.extent(1)),
      check_writable("indices of the selection", out.indices),
      check_writable("counts of the selection", out.counts),
  });
  if (!status.ok()) return status;
  SelectPlan const plan =
      select_plan<Policy>(x.parallel_for.concurrency(), shape.with_rows(batch.count()), ws.bytes);
  FusedSelect<X, Policy>(x, in, batch, shape, out, plan, ws).run();
  return {};
}

}  // namespace v0
}  // namespace indexshare
