// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/concepts.hpp>
#include <indexshare/detail/check.hpp>
#include <indexshare/host/decode.hpp>
#include <indexshare/host/score_run.hpp>
#include <indexshare/host/simd/foreach.hpp>
#include <indexshare/indexer/relu_dot.hpp>
#include <indexshare/select.hpp>

#include <algorithm>
#include <cstddef>

namespace indexshare {
inline namespace v0 {
namespace detail {

/// A row's weights, zero past the last head of its last panel.
template <class Inputs>
void pack_weights(Inputs const& in, index_t row, float* weights) noexcept {
  index_t const heads = in.weights.extent(1);
  for (index_t h = 0; h < heads; ++h) weights[h] = in.weights(row, h);
  std::fill(weights + heads, weights + padded_to_panel(heads), 0.0f);
}

/// Queries and keys become floats: queries once per row of a tile, keys once per block for all rows
/// of the tile.
template <class Query, class KeyFormat>
struct FloatScorer {
  using Inputs = typename ReluDotIndexer<Query, KeyFormat>::template inputs<Space::host>;

  struct Scratch {
    float* keys;     ///< [score_block_keys][key_pitch(dim)]
    float* heads;    ///< [panel_width][dim], on their way into a panel
    float* queries;  ///< [tile rows][panels][dim][panel_width]
    float* weights;  ///< [tile rows][panels][panel_width]
  };
  static Scratch carve(WorkspaceCarver& carver, index_t tile_rows, Shape const& shape) noexcept {
    index_t const heads = padded_to_panel(shape.index_heads);
    index_t const dim = shape.index_dim;
    auto* const keys = carver.take<float>(saturating_area(score_block_keys, key_pitch(dim)));
    auto* const panel = carver.take<float>(saturating_area(panel_width, dim));
    auto* const queries = carver.take<float>(saturating_area(tile_rows * heads, dim));
    return {keys, panel, queries, carver.take<float>(saturating_area(tile_rows, heads))};
  }

  FloatScorer(HostIsa isa, Inputs const& inputs, Scratch const& memory) noexcept
      : score_table(kernels<ScoreKernels>(isa)),
        panels(kernels<PanelKernels>(isa)),
        widen(kernels<WidenKernels>(isa)),
        in(inputs),
        scratch(memory) {}

  void pack(index_t i, index_t row) const noexcept {
    for (index_t first = 0; first < heads(); first += panel_width) {
      index_t const count = std::min(panel_width, heads() - first);
      for (index_t h = 0; h < count; ++h) {
        widen_row(widen, &in.q(row, first + h, 0), dim(), scratch.heads + h * dim());
      }
      panels.pack(scratch.heads, dim(), count, dim(), queries(i) + first * dim());
    }
    pack_weights(in, row, weights(i));
  }
  void take(index_t s, position_t slot, index_t n) const noexcept {
    for (index_t i = 0; i < n; ++i) decode_row(widen, in.keys, slot + i, key(s + i));
  }
  void blank(index_t s) const noexcept { std::fill_n(key(s), dim(), 0.0f); }

  void score(index_t i, index_t count, char const* const* ahead, float* out) const noexcept {
    KeyBlock const block{.queries = queries(i),
                         .weights = weights(i),
                         .heads = heads(),
                         .dim = dim(),
                         .keys = scratch.keys,
                         .count = count,
                         .ahead = ahead,
                         .ahead_bytes = row_bytes(in.keys)};
    score_table.score(block, out);
  }

 private:
  index_t heads() const noexcept { return in.q.extent(1); }
  index_t dim() const noexcept { return in.q.extent(2); }
  float* key(index_t s) const noexcept { return scratch.keys + s * key_pitch(dim()); }
  float* queries(index_t i) const noexcept {
    return scratch.queries + i * padded_to_panel(heads()) * dim();
  }
  float* weights(index_t i) const noexcept {
    return scratch.weights + i * padded_to_panel(heads());
  }

  ScoreKernels const& score_table;
  PanelKernels const& panels;
  WidenKernels const& widen;
  Inputs const& in;
  Scratch scratch;
};

template <class Query, class KeyFormat>
struct HostScorer<ReluDotIndexer<Query, KeyFormat>> : FloatScorer<Query, KeyFormat> {
  using FloatScorer<Query, KeyFormat>::FloatScorer;
};

/// Queries and keys of bf16 stay what they are: their lanes are multiplied in pairs.
struct PairScorer {
  using Inputs = ReluDotIndexer<bf16, format::Plain<bf16>>::inputs<Space::host>;

  struct Scratch {
    Bf16Pair* keys;     ///< [score_block_keys][pair_pitch(dim)], copied
    Bf16Pair* queries;  ///< [tile rows][panels][pairs][panel_width]
    float* weights;     ///< [tile rows][panels][panel_width]
  };
  static Scratch carve(WorkspaceCarver& carver, index_t tile_rows, Shape const& shape) noexcept {
    index_t const heads = padded_to_panel(shape.index_heads);
    index_t const dim = shape.index_dim;
    auto* const keys = carver.take<Bf16Pair>(saturating_area(score_block_keys, pair_pitch(dim)));
    auto* const queries =
        carver.take<Bf16Pair>(saturating_area(tile_rows * heads, bf16_pairs(dim)));
    return {keys, queries, carver.take<float>(saturating_area(tile_rows, heads))};
  }

  PairScorer(HostIsa isa, Inputs const& inputs, Scratch const& memory) noexcept
      : table(pair_kernels(isa)), in(inputs), scratch(memory) {}

  bool usable() const noexcept { return table != nullptr; }

  void pack(index_t i, index_t row) const noexcept {
    pack_pairs(
        heads(), dim(), [&, this](index_t h) noexcept { return &in.q(row, h, 0); }, queries(i));
    pack_weights(in, row, weights(i));
  }
  void take(index_t s, position_t slot, index_t n) const noexcept {
    bf16 const* const first = in.keys.row(slot);
    if (n == score_block_keys && in_place()) {
      block = reinterpret_cast<Bf16Pair const*>(first);
      return;
    }
    block = scratch.keys;
    for (index_t i = 0; i < n; ++i) table->take(first + i * in.keys.row_stride, dim(), key(s + i));
  }
  void blank(index_t s) const noexcept {
    block = scratch.keys;
    std::fill_n(key(s), bf16_pairs(dim()), Bf16Pair{});
  }

  void score(index_t i, index_t count, char const* const* ahead, float* out) const noexcept {
    PairKeyBlock const keys{.queries = queries(i),
                            .weights = weights(i),
                            .heads = heads(),
                            .dim = dim(),
                            .keys = block,
                            .count = count,
                            .ahead = ahead,
                            .ahead_bytes = row_bytes(in.keys)};
    table->score(keys, out);
  }

 private:
  index_t heads() const noexcept { return in.q.extent(1); }
  index_t dim() const noexcept { return in.q.extent(2); }
  /// Whether rows of the cache lie as the rows of a copied block do.
  bool in_place() const noexcept {
    return dim() % 2 == 0 && in.keys.row_stride == 2 * pair_pitch(dim());
  }
  Bf16Pair* key(index_t s) const noexcept { return scratch.keys + s * pair_pitch(dim()); }
  Bf16Pair* queries(index_t i) const noexcept {
    return scratch.queries + i * padded_to_panel(heads()) * bf16_pairs(dim());
  }
  float* weights(index_t i) const noexcept {
    return scratch.weights + i * padded_to_panel(heads());
  }

  PairKernels const* table;
  Inputs const& in;
  Scratch scratch;
  mutable Bf16Pair const* block = nullptr;  ///< of keys: copied ones, or those of the cache
};

/// In pairs where the instruction set multiplies them, else in floats.
template <>
struct HostScorer<ReluDotIndexer<bf16, format::Plain<bf16>>> {
  using Floats = FloatScorer<bf16, format::Plain<bf16>>;
  using Inputs = Floats::Inputs;

  struct Scratch {
    Floats::Scratch floats;
    PairScorer::Scratch pairs;
  };
  /// One of the two is used, and floats need more.
  static Scratch carve(WorkspaceCarver& carver, index_t tile_rows, Shape const& shape) noexcept {
    WorkspaceCarver same = carver;
    return {Floats::carve(carver, tile_rows, shape), PairScorer::carve(same, tile_rows, shape)};
  }

  HostScorer(HostIsa isa, Inputs const& inputs, Scratch const& memory) noexcept
      : floats(isa, inputs, memory.floats), pairs(isa, inputs, memory.pairs) {}

  void pack(index_t i, index_t row) const noexcept {
    pairs.usable() ? pairs.pack(i, row) : floats.pack(i, row);
  }
  void take(index_t s, position_t slot, index_t n) const noexcept {
    pairs.usable() ? pairs.take(s, slot, n) : floats.take(s, slot, n);
  }
  void blank(index_t s) const noexcept { pairs.usable() ? pairs.blank(s) : floats.blank(s); }
  void score(index_t i, index_t count, char const* const* ahead, float* out) const noexcept {
    pairs.usable() ? pairs.score(i, count, ahead, out) : floats.score(i, count, ahead, out);
  }

 private:
  Floats floats;
  PairScorer pairs;
};

/// Parts that scoring is cut into, for threads that run at different speeds.
inline constexpr index_t score_parts_per_worker = 4;

/// Scratch of workers one after the other; returns that of worker `last`.
template <class Policy>
typename HostScorer<Policy>::Scratch carve_scorers(WorkspaceCarver& carver, index_t tile_rows,
                                                   Shape const& shape, int last) noexcept {
  auto scratch = HostScorer<Policy>::carve(carver, tile_rows, shape);
  for (int worker = 0; worker < last; ++worker) {
    scratch = HostScorer<Policy>::carve(carver, tile_rows, shape);
  }
  return scratch;
}

}  // namespace detail

/// Scratch of every worker, for up to 8 rows that share keys. For every policy that the host
/// scores.
template <class PF, detail::HostScored Policy>
Result<WorkspaceSize> indexer_workspace(HostExec<PF> const& x, Policy const& policy,
                                        Shape const& shape) noexcept {
  using namespace detail;
  Status const status = first_failure({check_executor(x), check_shape(policy, shape)});
  if (!status.ok()) return refuse(status);
  WorkspaceCarver carver;
  carve_scorers<Policy>(carver, rows_of_tile(shape.rows), shape, x.parallel_for.concurrency() - 1);
  return carver.size();
}

template <class PF, detail::HostScored Policy>
Status indexer_check(HostExec<PF> const& x, Policy const& policy,
                     typename Policy::template inputs<Space::host> const& in,
                     RowBatch<Space::host> const& batch, Shape const& shape) noexcept {
  return detail::first_failure({detail::check_executor(x), check_inputs(policy, in, batch, shape)});
}

/// Scores in fp32; `detail::ScoreKernels` says in which order ReluDotIndexer's are summed, and
/// `detail::PairKernels` for bf16 with bf16 where the instruction set has them. Rows of one request
/// that follow each other share decoded keys. The work is cut into parts of equal size, whatever
/// the lengths.
template <class PF, detail::HostScored Policy>
Status indexer_score(HostExec<PF> const& x, Policy const&,
                     typename Policy::template inputs<Space::host> const& in,
                     RowBatch<Space::host> const& batch, ScoreRequest const& request,
                     ScoreView<Space::host> const& scores, Workspace ws) noexcept {
  using namespace detail;
  Shape const widths{.index_heads = in.q.extent(1), .index_dim = in.q.extent(2)};
  WorkspaceCarver need;
  index_t const tile_rows = rows_of_tile(request.rows.count);
  carve_scorers<Policy>(need, tile_rows, widths, x.parallel_for.concurrency() - 1);
  Status const status =
      check_workspace("workspace of the indexer, in bytes", ws, need.size().bytes);
  if (!status.ok()) return status;
  ScoreCut const cut(batch, request, scores.extent(1), tile_rows, CutAt::blocks);
  index_t const parts = score_parts_per_worker * x.parallel_for.concurrency();
  x.parallel_for(parts, [&](index_t begin, index_t end, int worker) noexcept {
    WorkspaceCarver carver(ws);
    ScoreRun<Policy> const run(x.isa, in, batch, cut,
                               carve_scorers<Policy>(carver, tile_rows, widths, worker));
    for (index_t part = begin; part < end; ++part) {
      cut.for_each_piece(part, parts, [&](TilePiece const& piece) noexcept {
        run.score(piece,
                  [&](index_t row, index_t first, index_t count, float const* block) noexcept {
                    std::copy_n(block, count, &scores(row - request.rows.first, first));
                  });
      });
    }
  });
  return {};
}

}  // namespace v0
}  // namespace indexshare

// Whoever scores on the host selects in the same way, whichever headers it includes.
#include <indexshare/host/select.hpp>
