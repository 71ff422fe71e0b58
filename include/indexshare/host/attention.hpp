// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/attention/mla.hpp>
#include <indexshare/concepts.hpp>
#include <indexshare/host/decode.hpp>
#include <indexshare/host/isa.hpp>
#include <indexshare/host/simd/foreach.hpp>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>

namespace indexshare {
inline namespace v0 {
namespace detail {

/// The entries of a row are cut into splits, whose results are merged in order. Where they are cut
/// depends on their number alone, so a row's bits are the same whether one task computes all its
/// splits or each has its own.
struct AttentionSplits {
  static constexpr index_t least = 512;  ///< entries
  static constexpr index_t most = 64;    ///< of a row

  /// Entries of each split but the last.
  static constexpr index_t size(index_t entries) noexcept {
    index_t const share = (entries + most - 1) / most;
    return std::max(least, (share + least - 1) / least * least);
  }
  static constexpr index_t count(index_t entries) noexcept {
    return (entries + size(entries) - 1) / size(entries);
  }
  /// Splits of any number of entries up to `entries`.
  static constexpr index_t at_most(index_t entries) noexcept {
    return std::min(most, (entries + least - 1) / least);
  }
};

/// Widths of the tiles of one call.
struct AttentionDims {
  index_t heads;     ///< padded to panel_width
  index_t key_dim;   ///< not padded
  index_t key_step;  ///< between decoded rows
  index_t width;     ///< value_dim padded to panel_width
  index_t pairs;  ///< of a key, where keys and queries of bf16 may be multiplied in pairs, else 0

  AttentionDims(Shape const& shape, bool in_pairs) noexcept
      : heads(padded_to_panel(shape.heads)),
        key_dim(shape.key_dim),
        key_step(padded_to_panel(shape.key_dim) + panel_width),
        width(padded_to_panel(shape.value_dim)),
        pairs(in_pairs ? bf16_pairs(shape.key_dim) : 0) {}
};

inline float* take_floats(WorkspaceCarver& carver, index_t rows, index_t columns) noexcept {
  return carver.take<float>(saturating_area(rows, columns));
}

inline RunningSoftmax carve_softmax(WorkspaceCarver& carver, AttentionDims const& dims,
                                    index_t count) noexcept {
  float* const largest = take_floats(carver, count, dims.heads);
  float* const total = take_floats(carver, count, dims.heads);
  return {largest, total,
          carver.take<float>(saturating_bytes(saturating_area(count, dims.heads),
                                              static_cast<std::size_t>(dims.width)))};
}

/// Scratch of one worker.
struct AttentionScratch {
  float* keys;     ///< [attention_tile][key_step]
  float* queries;  ///< [panels][key_dim][panel_width]
  float* weights;  ///< [attention_tile][heads]
  float* factors;  ///< [heads]
  RunningSoftmax row;
  RunningSoftmax split;
  Bf16Pair* pair_keys;     ///< [attention_tile][pairs]
  Bf16Pair* pair_queries;  ///< [panels][pairs][panel_width], in the memory of `queries`
};

inline AttentionScratch carve_scratch(WorkspaceCarver& carver, AttentionDims const& dims) noexcept {
  float* const keys = take_floats(carver, attention_tile, dims.key_step);
  WorkspaceCarver same = carver;
  auto* const pair_queries = same.take<Bf16Pair>(saturating_area(dims.heads, dims.pairs));
  float* const queries = take_floats(carver, dims.heads, dims.key_dim);
  float* const weights = take_floats(carver, attention_tile, dims.heads);
  float* const factors = take_floats(carver, 1, dims.heads);
  RunningSoftmax const row = carve_softmax(carver, dims, 1);
  RunningSoftmax const split = carve_softmax(carver, dims, 1);
  auto* const pair_keys = carver.take<Bf16Pair>(saturating_area(attention_tile, dims.pairs));
  return {keys, queries, weights, factors, row, split, pair_keys, pair_queries};
}

/// Results of splits, each computed by a task of its own.
struct AttentionPartials {
  index_t capacity;      ///< splits
  RunningSoftmax first;  ///< then one after the other
  bool* empty;           ///< [capacity] there was no key
};

/// Splits in flight at a time: several for each worker. With one worker rows are computed whole.
inline AttentionPartials carve_partials(WorkspaceCarver& carver, AttentionDims const& dims,
                                        index_t rows, index_t splits, index_t workers) noexcept {
  if (workers == 1) return {};
  index_t const capacity = std::min(rows * splits, std::max(8 * workers, splits));
  RunningSoftmax const first = carve_softmax(carver, dims, capacity);
  return {capacity, first, carver.take<bool>(static_cast<std::size_t>(capacity))};
}

/// Some heads of a row: whole panels, but for the last.
struct HeadRange {
  index_t first;
  index_t count;
};

/// Whether keys of a cache and such queries are both bf16.
template <class Query, class Cache>
inline constexpr bool multiplies_bf16 = false;
template <>
inline constexpr bool multiplies_bf16<bf16, CacheView<Space::host, format::Plain<bf16>>> = true;

/// Whose queries a worker's scratch holds.
struct QueryTile {
  index_t row = -1;
  index_t head = 0;
};

/// One `attention_run`.
template <class PF, class Policy>
class MlaRun {
 public:
  using Inputs = typename Policy::template inputs<Space::host>;
  using Outputs = typename Policy::template outputs<Space::host>;
  static constexpr bool in_pairs =
      multiplies_bf16<typename decltype(Inputs::q)::value_type, decltype(Inputs::kv)>;

  MlaRun(HostExec<PF> const& x, Inputs const& inputs, RowBatch<Space::host> const& batch,
         RowRange rows, GroupPlan<Space::host> const& plan, Outputs const& outputs,
         Shape const& capacities, Workspace ws) noexcept
      : parallel_for_(x.parallel_for),
        workers_(x.parallel_for.concurrency()),
        attend_(kernels<AttentionKernels>(x.isa)),
        panels_(kernels<PanelKernels>(x.isa)),
        widen_(kernels<WidenKernels>(x.isa)),
        narrow_(kernels<NarrowKernels>(x.isa)),
        pairs_(in_pairs ? pair_kernels(x.isa) : nullptr),
        in_(inputs),
        batch_(batch),
        rows_(rows),
        plan_(plan),
        out_(outputs),
        keys_(capacities.keys),
        dims_(dims(capacities)),
        ws_(ws) {
    WorkspaceCarver carver(ws);
    partials_ = carve(carver, dims_, capacities.with_rows(rows.count), workers_);
  }

  static AttentionDims dims(Shape const& shape) noexcept { return {shape, in_pairs}; }

  /// All scratch of a call: that of the workers, then that of the splits.
  static AttentionPartials carve(WorkspaceCarver& carver, AttentionDims const& dims,
                                 Shape const& shape, index_t workers) noexcept {
    for (index_t worker = 0; worker < workers; ++worker) carve_scratch(carver, dims);
    index_t const splits =
        Policy::reads_selection ? AttentionSplits::at_most(shape.top_k) : AttentionSplits::most;
    return carve_partials(carver, dims, shape.rows, splits, workers);
  }

  void operator()() const noexcept {
    index_t total = 0;
    index_t largest = 0;
    index_t most_splits = 0;
    for (index_t row = rows_.first; row < rows_.first + rows_.count; ++row) {
      total += cost(row);
      largest = std::max(largest, cost(row));
      most_splits = std::max(most_splits, splits(row));
    }
    bool const balanced = rows_.count >= 2 * workers_ && largest <= total / workers_;
    if (balanced || most_splits > partials_.capacity) {
      run_whole_rows(total);
      return;
    }
    for (RowRange rows{rows_.first, 0}; rows.first < rows_.first + rows_.count;
         rows.first += rows.count) {
      rows.count = rows_in_flight(rows.first);
      run_splits(rows);
    }
  }

 private:
  index_t entries(index_t row) const noexcept {
    if constexpr (Policy::reads_selection) {
      return clamp_length(plan_.counts(row), plan_.slots.extent(1));
    } else {
      return clamp_length(batch_.lengths(row), keys_);
    }
  }
  position_t slot(index_t row, index_t entry) const noexcept {
    if constexpr (Policy::reads_selection) {
      return plan_.slots(row, entry);
    } else {
      return batch_.kv_pages.slot(batch_.requests(row), entry);
    }
  }
  /// Time of a row, in entries: queries and outputs cost about as much as a few.
  index_t cost(index_t row) const noexcept { return entries(row) + 32; }
  index_t splits(index_t row) const noexcept { return AttentionSplits::count(entries(row)); }

  AttentionScratch scratch_of(int worker) const noexcept {
    WorkspaceCarver carver(ws_);
    AttentionScratch scratch{};
    for (int w = 0; w <= worker; ++w) scratch = carve_scratch(carver, dims_);
    return scratch;
  }

  /// Runs of rows of about equal cost, each a task.
  void run_whole_rows(index_t total) const noexcept {
    index_t const tasks = std::min<index_t>(rows_.count, 8 * workers_);
    index_t const share = total / std::max<index_t>(tasks, 1) + 1;
    parallel_for_(tasks, [&, this](index_t begin, index_t end, int worker) noexcept {
      AttentionScratch const scratch = scratch_of(worker);
      index_t before = 0;
      for (index_t row = rows_.first; row < rows_.first + rows_.count; ++row) {
        index_t const task = before / share;
        before += cost(row);
        if (task >= begin && task < end) attend_row(row, scratch);
      }
    });
  }

  void attend_row(index_t row, AttentionScratch const& scratch) const noexcept {
    HeadRange const heads{0, in_.q.extent(1)};
    pack_queries(row, heads, scratch);
    bool empty = true;
    for (index_t split = 0; split < splits(row); ++split) {
      RunningSoftmax const& target = empty ? scratch.row : scratch.split;
      if (!attend_split(row, split, heads, scratch, target)) continue;
      if (!empty) attend_.merge(scratch.row, scratch.split, heads.count, dims_.width);
      empty = false;
    }
    finish(row, heads, scratch.row, empty);
  }

  /// Rows from `first` on whose splits fit into the scratch; those of any one row do.
  index_t rows_in_flight(index_t first) const noexcept {
    index_t count = 0;
    index_t row = first;
    for (; row < rows_.first + rows_.count; ++row) {
      count += splits(row);
      if (count > partials_.capacity) break;
    }
    return row - first;
  }

  /// A task for each split (and for some of the heads, where splits are fewer than workers), then
  /// one for each panel of heads of a row to merge its splits.
  void run_splits(RowRange rows) const noexcept {
    index_t count = 0;
    for (index_t row = rows.first; row < rows.first + rows.count; ++row) count += splits(row);
    index_t const panels = dims_.heads / panel_width;
    index_t const wanted = count == 0 ? 1 : std::min(panels, (workers_ + count - 1) / count);
    index_t const group = (panels + wanted - 1) / wanted;
    index_t const groups = (panels + group - 1) / group;
    parallel_for_(count * groups, [&, this](index_t begin, index_t end, int worker) noexcept {
      AttentionScratch const scratch = scratch_of(worker);
      QueryTile packed{};
      for (index_t task = begin; task < end; ++task) {
        attend_one_split(rows, task / groups, heads_of(task % groups * group, group), scratch,
                         packed);
      }
    });
    parallel_for_(rows.count * panels, [&, this](index_t begin, index_t end, int) noexcept {
      for (index_t task = begin; task < end; ++task) {
        merge_splits(rows, task / panels, heads_of(task % panels, 1));
      }
    });
  }

  HeadRange heads_of(index_t panel, index_t panels) const noexcept {
    index_t const first = panel * panel_width;
    return {first, std::min(panels * panel_width, in_.q.extent(1) - first)};
  }

  /// Partial result `index` of those in flight, from a head on.
  RunningSoftmax partial(index_t index, index_t head) const noexcept {
    index_t const first = index * dims_.heads + head;
    return {partials_.first.largest + first, partials_.first.total + first,
            partials_.first.sums + first * dims_.width};
  }

  void attend_one_split(RowRange rows, index_t index, HeadRange heads,
                        AttentionScratch const& scratch, QueryTile& packed) const noexcept {
    index_t row = rows.first;
    index_t split = index;
    for (; split >= splits(row); ++row) split -= splits(row);
    if (packed.row != row || packed.head != heads.first) pack_queries(row, heads, scratch);
    packed = {row, heads.first};
    bool const any = attend_split(row, split, heads, scratch, partial(index, heads.first));
    if (heads.first == 0) partials_.empty[index] = !any;
  }

  void merge_splits(RowRange rows, index_t which, HeadRange heads) const noexcept {
    index_t first = 0;
    for (index_t i = 0; i < which; ++i) first += splits(rows.first + i);
    index_t const row = rows.first + which;
    RunningSoftmax merged{};
    bool empty = true;
    for (index_t index = first; index < first + splits(row); ++index) {
      if (partials_.empty[index]) continue;
      RunningSoftmax const part = partial(index, heads.first);
      if (empty) {
        merged = part;
      } else {
        attend_.merge(merged, part, heads.count, dims_.width);
      }
      empty = false;
    }
    finish(row, heads, merged, empty);
  }

  /// The keys' scratch holds the rows of a panel before they are turned.
  void pack_queries(index_t row, HeadRange heads, AttentionScratch const& scratch) const noexcept {
    if constexpr (in_pairs) {
      if (pairs_ != nullptr) {
        pack_pairs(
            heads.count, dims_.key_dim,
            [&, this](index_t h) noexcept { return &in_.q(row, heads.first + h, 0); },
            scratch.pair_queries);
        return;
      }
    }
    for (index_t first = 0; first < heads.count; first += panel_width) {
      index_t const count = std::min(panel_width, heads.count - first);
      for (index_t h = 0; h < count; ++h) {
        widen_row(widen_, &in_.q(row, heads.first + first + h, 0), dims_.key_dim,
                  scratch.keys + h * dims_.key_step);
      }
      panels_.pack(scratch.keys, dims_.key_step, count, dims_.key_dim,
                   scratch.queries + first * dims_.key_dim);
    }
  }

  /// Returns whether there was a key at all; if not, `softmax` was not written.
  bool attend_split(index_t row, index_t split, HeadRange heads, AttentionScratch const& scratch,
                    RunningSoftmax const& softmax) const noexcept {
    index_t const size = AttentionSplits::size(entries(row));
    index_t next = split * size;
    index_t const last = std::min(next + size, entries(row));
    char const* ahead[attention_tile];
    AttentionBlock block{.queries = scratch.queries,
                         .heads = heads.count,
                         .dim = dims_.key_dim,
                         .keys = scratch.keys,
                         .key_step = dims_.key_step,
                         .scale = in_.scale,
                         .weights = scratch.weights,
                         .factors = scratch.factors,
                         .width = dims_.width,
                         .ahead = ahead,
                         .ahead_bytes = row_bytes(in_.kv)};
    while (next < last) {
      block.count = decode_tile(row, next, last, scratch);
      if (block.count == 0) break;
      if (pairs_ != nullptr) {
        pairs_->weigh(block, {scratch.pair_queries, scratch.pair_keys}, softmax);
      } else {
        attend_.weigh(block, softmax);
      }
      block.ahead_count = rows_ahead(row, next, ahead);
      attend_.add_values(block, softmax);
      block.first = false;
    }
    return !block.first;
  }

  /// Decodes up to a tile of the entries from `next` on that lie in the cache; entries elsewhere
  /// leave no trace. Returns how many were decoded and moves `next`.
  index_t decode_tile(index_t row, index_t& next, index_t last,
                      AttentionScratch const& scratch) const noexcept {
    index_t count = 0;
    for (; next < last && count < attention_tile; ++next) {
      position_t const place = slot(row, next);
      if (!in_.kv.has(place)) continue;
      decode_key(place, count, scratch);
      ++count;
    }
    return count;
  }

  /// With pairs only the values are decoded, and the row beside them is for its logits.
  void decode_key(position_t place, index_t i, AttentionScratch const& scratch) const noexcept {
    float* const key = scratch.keys + i * dims_.key_step;
    if constexpr (in_pairs) {
      if (pairs_ != nullptr) {
        bf16 const* const row = in_.kv.row(place);
        pairs_->take(row, dims_.key_dim, scratch.pair_keys + i * dims_.pairs);
        widen_row(widen_, row, std::min(dims_.width, dims_.key_dim), key);
        return;
      }
    }
    decode_row(widen_, in_.kv, place, key);
  }

  /// Where the rows of the next tile lie, whether or not they belong to the same split.
  index_t rows_ahead(index_t row, index_t first, char const** ahead) const noexcept {
    index_t const last = std::min(first + attention_tile, entries(row));
    index_t count = 0;
    for (index_t next = first; next < last; ++next) {
      position_t const place = slot(row, next);
      if (in_.kv.has(place)) {
        ahead[count++] = reinterpret_cast<char const*>(in_.kv.row(place));
      }
    }
    return count;
  }

  void finish(index_t row, HeadRange heads, RunningSoftmax const& softmax,
              bool empty) const noexcept {
    using Out = typename decltype(out_.out)::value_type;
    index_t const value_dim = out_.out.extent(2);
    for (index_t h = 0; h < heads.count; ++h) {
      index_t const head = heads.first + h;
      float const lse = empty ? -std::numeric_limits<float>::infinity()
                              : softmax.largest[h] + std::log(softmax.total[h]);
      float factor = empty ? 0.0f : 1.0f / softmax.total[h];
      if (in_.sink.data_handle() != nullptr && !empty) {
        // exp(lse) / (exp(lse) + exp(sink)) without overflow
        factor /= 1.0f + std::exp(in_.sink(head) - lse);
      }
      Out* const target = &out_.out(row, head, 0);
      if (empty) {
        std::fill_n(target, value_dim, from_float<Out>(0.0f));
      } else {
        narrow_row(narrow_, softmax.sums + h * dims_.width, value_dim, factor, target);
      }
      if (out_.lse.data_handle() != nullptr) out_.lse(row, head) = lse;
    }
  }

  PF const& parallel_for_;
  index_t workers_;
  AttentionKernels const& attend_;
  PanelKernels const& panels_;
  WidenKernels const& widen_;
  NarrowKernels const& narrow_;
  PairKernels const* pairs_;  ///< or null: logits of floats
  Inputs const& in_;
  RowBatch<Space::host> const& batch_;
  RowRange rows_;
  GroupPlan<Space::host> const& plan_;
  Outputs const& out_;
  index_t keys_;
  AttentionDims dims_;
  Workspace ws_;
  AttentionPartials partials_{};
};

}  // namespace detail

/// Scratch of every worker, and with several workers room for the splits of a few rows. Does not
/// grow with the keys.
template <class PF, class Policy>
requires detail::is_mla<Policy> Result<WorkspaceSize> attention_workspace(HostExec<PF> const& x,
                                                                          Policy policy,
                                                                          Shape const& shape)
noexcept {
  if (Status const status =
          detail::first_failure({detail::check_executor(x), check_shape(policy, shape),
                                 detail::check_at_most("shape.top_k", max_position, shape.top_k)});
      !status.ok()) {
    return refuse(status);
  }
  WorkspaceCarver carver;
  using Run = detail::MlaRun<PF, Policy>;
  Run::carve(carver, Run::dims(shape), shape, x.parallel_for.concurrency());
  return carver.size();
}

template <class PF, class Policy>
requires detail::is_mla<Policy> Status attention_check(
    HostExec<PF> const& x, Policy, typename Policy::template inputs<Space::host> const& in,
    typename Policy::template outputs<Space::host> const& out, RowBatch<Space::host> const& batch,
    Shape const& shape)
noexcept {
  return detail::first_failure({detail::check_executor(x), check_inputs(in, out, batch, shape)});
}

/// fp32 throughout: logits sum lanes in ascending order (those of bf16 rows as
/// `detail::PairKernels` where the instruction set has them), values sum keys in the order of the
/// plan, tile by tile within a split of it; splits are merged in that order.
template <class PF, class Policy>
requires detail::is_mla<Policy> Status attention_run(
    HostExec<PF> const& x, Policy, typename Policy::template inputs<Space::host> const& in,
    RowBatch<Space::host> const& batch, RowRange rows, GroupPlan<Space::host> const& plan,
    typename Policy::template outputs<Space::host> const& out, Shape const& shape, Workspace ws)
noexcept {
  detail::MlaRun<PF, Policy>(x, in, batch, rows, plan, out, shape, ws)();
  return {};
}

}  // namespace v0
}  // namespace indexshare
