// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/attention/mla.hpp>
#include <indexshare/concepts.hpp>
#include <indexshare/host/panel.hpp>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>

namespace indexshare {
inline namespace v0 {
namespace detail {

/// Keys that attention decodes at a time. Part of the arithmetic: the running softmax is rescaled
/// once per tile, so a row's bits depend on it.
inline constexpr index_t attention_tile = 64;

/// Scratch of one worker, for one panel of heads of one row. `width` is value_dim padded.
struct AttentionScratch {
  float* keys;     ///< [tile][key_dim]
  float* values;   ///< [tile][width], zero past value_dim
  float* queries;  ///< [key_dim][panel_width]
  float* weights;  ///< [tile][panel_width]: logits, then exp(logit - largest)
  float* sums;     ///< [panel_width][width]: weighted values so far
};

inline AttentionScratch carve_attention(WorkspaceCarver& carver, index_t key_dim,
                                        index_t value_dim) noexcept {
  auto const take = [&](index_t n) noexcept {
    return carver.take<float>(static_cast<std::size_t>(n));
  };
  index_t const width = padded_to_panel(value_dim);
  return {take(attention_tile * key_dim), take(attention_tile * width), take(key_dim * panel_width),
          take(attention_tile * panel_width), take(panel_width * width)};
}

/// Softmax over what was seen so far, one entry per head of the panel.
struct RunningSoftmax {
  float largest[panel_width];
  float total[panel_width];

  RunningSoftmax() noexcept {
    std::fill_n(largest, panel_width, -std::numeric_limits<float>::infinity());
    std::fill_n(total, panel_width, 0.0f);
  }
};

/// Decodes up to a tile of the entries from `next` on that lie in the cache; entries elsewhere
/// leave no trace. Returns how many were decoded and moves `next`.
template <class KvFormat, class SlotOf>
index_t decode_tile(CacheView<Space::host, KvFormat> const& kv, index_t entries,
                    SlotOf const& slot_of, index_t value_dim, index_t& next,
                    AttentionScratch const& scratch) noexcept {
  index_t const width = padded_to_panel(value_dim);
  index_t count = 0;
  for (; next < entries && count < attention_tile; ++next) {
    position_t const slot = slot_of(next);
    if (!kv.has(slot)) continue;
    float* const key = scratch.keys + count * kv.lanes;
    float* const value = scratch.values + count * width;
    decode_row(kv, slot, key);
    std::copy_n(key, value_dim, value);
    std::fill(value + value_dim, value + width, 0.0f);
    ++count;
  }
  if (count % 2 != 0) std::fill_n(scratch.keys + count * kv.lanes, kv.lanes, 0.0f);
  return count;
}

/// Logits of the tile, then their exponentials against the new largest; earlier sums are rescaled.
inline void fold_logits(AttentionScratch const& scratch, index_t count, index_t key_dim,
                        index_t width, float scale, RunningSoftmax& softmax) noexcept {
  float largest[panel_width];
  std::copy_n(softmax.largest, panel_width, largest);
  for (index_t s = 0; s < count; s += 2) {
    PanelPair dots;
    dot_pair(scratch.queries, scratch.keys + s * key_dim, key_dim, dots);
    for (index_t which = 0; which < std::min<index_t>(2, count - s); ++which) {
      for (index_t h = 0; h < panel_width; ++h) {
        float const logit = scale * dots.of[which][h];
        scratch.weights[(s + which) * panel_width + h] = logit;
        largest[h] = std::max(largest[h], logit);
      }
    }
  }
  for (index_t h = 0; h < panel_width; ++h) {
    float const factor = std::exp(softmax.largest[h] - largest[h]);  // 0 for the first tile
    softmax.total[h] *= factor;
    softmax.largest[h] = largest[h];
    float* const sums = scratch.sums + h * width;
    for (index_t v = 0; v < width; ++v) sums[v] *= factor;
  }
  for (index_t s = 0; s < count; ++s) {
    float* const weights = scratch.weights + s * panel_width;
    for (index_t h = 0; h < panel_width; ++h) {
      weights[h] = std::exp(weights[h] - largest[h]);
      softmax.total[h] += weights[h];
    }
  }
}

/// sums[h] += sum over the tile, ascending, of weights[s][h] * values[s]; four keys per pass over
/// the sums.
inline void fold_values(AttentionScratch const& scratch, index_t count, index_t width) noexcept {
  constexpr index_t keys = 4;
  for (index_t s = 0; s < count; s += keys) {
    index_t const n = std::min(keys, count - s);
    for (index_t h = 0; h < panel_width; ++h) {
      float weight[keys] = {};
      float const* value[keys];
      for (index_t i = 0; i < keys; ++i) {
        index_t const key = s + std::min(i, n - 1);
        value[i] = scratch.values + key * width;
        weight[i] = i < n ? scratch.weights[key * panel_width + h] : 0.0f;
      }
      float* const sums = scratch.sums + h * width;
      for (index_t first = 0; first < width; first += panel_width) {
        for (index_t v = first; v < first + panel_width; ++v) {
          float sum = sums[v];
          for (index_t i = 0; i < keys; ++i) sum += weight[i] * value[i][v];
          sums[v] = sum;
        }
      }
    }
  }
}

/// One panel of heads of one row.
template <class Query, class KvFormat, class Out, class SlotOf>
void attend_panel(MlaInputs<Query, KvFormat, Space::host> const& in,
                  MlaOutputs<Out, Space::host> const& out, index_t row, index_t first_head,
                  index_t entries, SlotOf const& slot_of,
                  AttentionScratch const& scratch) noexcept {
  index_t const key_dim = in.q.extent(2);
  index_t const value_dim = out.out.extent(2);
  index_t const width = padded_to_panel(value_dim);
  index_t const heads = std::min(panel_width, in.q.extent(1) - first_head);

  pack_panels(heads, key_dim, scratch.queries, [&](index_t h, index_t lane) noexcept {
    return to_float(in.q(row, first_head + h, lane));
  });
  std::fill_n(scratch.sums, panel_width * width, 0.0f);
  RunningSoftmax softmax;
  bool empty = true;
  for (index_t next = 0; next < entries;) {
    index_t const count = decode_tile(in.kv, entries, slot_of, value_dim, next, scratch);
    if (count == 0) break;
    empty = false;
    fold_logits(scratch, count, key_dim, width, in.scale, softmax);
    fold_values(scratch, count, width);
  }

  for (index_t h = 0; h < heads; ++h) {
    float const lse = empty ? -std::numeric_limits<float>::infinity()
                            : softmax.largest[h] + std::log(softmax.total[h]);
    float factor = empty ? 0.0f : 1.0f / softmax.total[h];
    if (in.sink.data_handle() != nullptr && !empty) {
      // exp(lse) / (exp(lse) + exp(sink)) without overflow
      factor /= 1.0f + std::exp(in.sink(first_head + h) - lse);
    }
    for (index_t v = 0; v < value_dim; ++v) {
      out.out(row, first_head + h, v) = from_float<Out>(scratch.sums[h * width + v] * factor);
    }
    if (out.lse.data_handle() != nullptr) out.lse(row, first_head + h) = lse;
  }
}

/// Heads panels of rows in parallel; `attend` gets (row, first head, scratch).
template <class PF, class Attend>
void for_each_panel(HostExec<PF> const& x, RowRange rows, Shape const& shape, Workspace ws,
                    Attend const& attend) noexcept {
  index_t const panels = padded_to_panel(shape.heads) / panel_width;
  x.parallel_for(rows.count * panels, [&](index_t begin, index_t end, int worker) noexcept {
    WorkspaceCarver carver(ws);
    AttentionScratch scratch{};
    for (int w = 0; w <= worker; ++w) {
      scratch = carve_attention(carver, shape.key_dim, shape.value_dim);
    }
    for (index_t task = begin; task < end; ++task) {
      attend(rows.first + task / panels, task % panels * panel_width, scratch);
    }
  });
}

}  // namespace detail

/// Scratch of every worker; does not grow with the rows or the keys.
template <class PF, class Policy>
requires detail::is_mla<Policy> Result<WorkspaceSize> attention_workspace(HostExec<PF> const& x,
                                                                          Policy policy,
                                                                          Shape const& shape)
noexcept {
  if (Status const status = check_shape(policy, shape); !status.ok()) return refuse(status);
  WorkspaceCarver carver;
  for (int worker = 0; worker < x.parallel_for.concurrency(); ++worker) {
    detail::carve_attention(carver, shape.key_dim, shape.value_dim);
  }
  return carver.size();
}

template <class PF, class Policy>
requires detail::is_mla<Policy> Status attention_check(
    HostExec<PF> const&, Policy, typename Policy::template inputs<Space::host> const& in,
    typename Policy::template outputs<Space::host> const& out, RowBatch<Space::host> const& batch,
    Shape const& shape)
noexcept { return check_inputs(in, out, batch, shape); }

/// fp32 throughout: logits sum lanes in ascending order, values sum keys in the order of the plan.
template <class PF, class Policy>
requires detail::is_mla<Policy> Status attention_run(
    HostExec<PF> const& x, Policy, typename Policy::template inputs<Space::host> const& in,
    RowBatch<Space::host> const& batch, RowRange rows, GroupPlan<Space::host> const& plan,
    typename Policy::template outputs<Space::host> const& out, Shape const& shape, Workspace ws)
noexcept {
  detail::for_each_panel(
      x, rows, shape, ws,
      [&](index_t row, index_t first_head, detail::AttentionScratch const& scratch) noexcept {
        if constexpr (Policy::reads_selection) {
          detail::attend_panel(
              in, out, row, first_head, clamp_length(plan.counts(row), plan.slots.extent(1)),
              [&](index_t j) noexcept { return plan.slots(row, j); }, scratch);
        } else {
          detail::attend_panel(
              in, out, row, first_head, clamp_length(batch.lengths(row), shape.keys),
              [&](index_t j) noexcept { return batch.kv_pages.slot(batch.requests(row), j); },
              scratch);
        }
      });
  return {};
}

}  // namespace v0
}  // namespace indexshare
