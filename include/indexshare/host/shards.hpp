// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/cache.hpp>
#include <indexshare/detail/check.hpp>
#include <indexshare/element.hpp>
#include <indexshare/exec.hpp>
#include <indexshare/host/rows.hpp>
#include <indexshare/select.hpp>
#include <indexshare/topk/order.hpp>
#include <indexshare/views.hpp>
#include <indexshare/workspace.hpp>

#include <cuda/std/span>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

/// @file Context parallelism: the keys of a request are shared out over ranks, each selects among
/// its own and attends to its own; what they found is merged here, on the host, exactly.

namespace indexshare {
inline namespace v0 {

/// The best keys of one shard. Position p of the shard is the request's `first + step * p`: a
/// contiguous shard has its first position and step 1, of keys dealt out in turn rank r has first r
/// and the number of ranks as step.
struct ShardSelection {
  /// indices [rows, top_k] in the shard, best top_k of its visible keys; counts [rows]
  SelectionView<Space::host, position_t const> selection{};
  Tensor<Space::host, float const, 2> scores{};  ///< [rows, top_k] of the entries
  position_t first = 0;
  position_t step = 1;
};

/// Attention over the selected keys of one shard, without the sink.
template <Element Part>
struct ShardAttention {
  Tensor<Space::host, Part const, 3> out{};   ///< [rows, heads, value_dim]
  Tensor<Space::host, float const, 2> lse{};  ///< [rows, heads], natural log; -inf: no key
};

namespace detail {

/// A candidate as one number, better ones larger.
inline std::uint64_t candidate(float score, index_t position) noexcept {
  return std::uint64_t{order_key(score)} << 32 |
         (0xFFFFFFFFu - static_cast<std::uint32_t>(position));
}
inline position_t position_of(std::uint64_t candidate) noexcept {
  return static_cast<position_t>(0xFFFFFFFFu - static_cast<std::uint32_t>(candidate));
}

inline Status check_shard(ShardSelection const& shard, index_t rows, index_t top_k) noexcept {
  return first_failure(
      {check_extent("rows of a shard's selection", rows, shard.selection.indices.extent(0)),
       check_extent("top_k of a shard's selection", top_k, shard.selection.indices.extent(1)),
       check_extent("rows of a shard's counts", rows, shard.selection.counts.extent(0)),
       check_extent("rows of a shard's scores", rows, shard.scores.extent(0)),
       check_extent("top_k of a shard's scores", top_k, shard.scores.extent(1)),
       check_readable("indices of a shard's selection", shard.selection.indices),
       check_readable("counts of a shard's selection", shard.selection.counts),
       check_readable("scores of a shard's selection", shard.scores),
       check_value("first position of a shard", 0, shard.first),
       check_value("step of a shard", 1, shard.step)});
}

/// The candidates of one row in `keys`, and how many they are.
inline index_t gather_candidates(cuda::std::span<ShardSelection const> shards, index_t row,
                                 std::uint64_t* keys) noexcept {
  index_t count = 0;
  for (ShardSelection const& shard : shards) {
    index_t const entries =
        clamp_length(shard.selection.counts(row), shard.selection.indices.extent(1));
    for (index_t j = 0; j < entries; ++j) {
      index_t const local = shard.selection.indices(row, j);
      index_t const position = shard.first + shard.step * local;
      if (local < 0 || position > max_position) continue;
      keys[count++] = candidate(shard.scores(row, j), position);
    }
  }
  return count;
}

/// The best of `candidates` as row `row` of `out`.
inline void emit_best(std::uint64_t* candidates, index_t count,
                      SelectionView<Space::host> const& out, index_t row) noexcept {
  index_t const width = out.indices.extent(1);
  index_t const best = std::min(count, width);
  if (best < count) {
    std::nth_element(candidates, candidates + best, candidates + count,
                     [](std::uint64_t a, std::uint64_t b) noexcept { return a > b; });
  }
  std::sort(candidates, candidates + best, [](std::uint64_t a, std::uint64_t b) noexcept {
    return position_of(a) < position_of(b);
  });
  for (index_t j = 0; j < width; ++j) {
    out.indices(row, j) = j < best ? position_of(candidates[j]) : no_position;
  }
  out.counts(row) = static_cast<position_t>(best);
}

}  // namespace detail

/// Scratch of `merge_selections`: each worker keeps the candidates of one row.
template <HostSpaceExecutor X>
WorkspaceSize merge_selections_workspace(X const& x, index_t shards, TopK top_k) noexcept {
  WorkspaceCarver carver;
  for (index_t worker = 0; worker < detail::workers_of(x); ++worker) {
    carver.take<std::uint64_t>(saturating_area(shards, top_k.n));
  }
  return carver.size();
}

/// The selection over the keys of all shards: of each row the best top_k under (score descending,
/// position ascending), as one selection over all keys with the same scores would be, byte for
/// byte. Shards hold different positions. Entries that are no position are left out.
///
/// @param shards  their selections, with the scores of the entries
/// @param out     indices [rows, top_k] logical positions, counts [rows]
/// @param ws      merge_selections_workspace(x, shards.size(), top_k)
/// Errors: bad_shape, bad_stride, missing_input, bad_value; workspace_too_small.
template <HostSpaceExecutor X>
Status merge_selections(X const& x, cuda::std::span<ShardSelection const> shards,
                        SelectionView<Space::host> const& out, Workspace ws) noexcept {
  index_t const rows = out.indices.extent(0);
  index_t const top_k = out.indices.extent(1);
  if (Status const status = detail::first_failure(
          {detail::check_extent("rows of the merged counts", rows, out.counts.extent(0)),
           detail::check_writable("indices of the merged selection", out.indices),
           detail::check_writable("counts of the merged selection", out.counts)});
      !status.ok()) {
    return status;
  }
  for (ShardSelection const& shard : shards) {
    if (Status const status = detail::check_shard(shard, rows, top_k); !status.ok()) return status;
  }
  auto const count = static_cast<index_t>(shards.size());
  WorkspaceSize const need = merge_selections_workspace(x, count, TopK{top_k});
  if (Status const status =
          detail::check_workspace("workspace of merge_selections, in bytes", ws, need.bytes);
      !status.ok()) {
    return status;
  }
  detail::for_each_row(x, rows, [&](index_t row, int worker) noexcept {
    WorkspaceCarver carver(ws);
    std::uint64_t* candidates = nullptr;
    for (int w = 0; w <= worker; ++w) {
      candidates = carver.take<std::uint64_t>(saturating_area(count, top_k));
    }
    detail::emit_best(candidates, detail::gather_candidates(shards, row, candidates), out, row);
  });
  return {};
}

namespace detail {

/// Weights of the shards' results in one row and head: e^(lse - reference).
struct ShardWeights {
  float reference = -std::numeric_limits<float>::infinity();  ///< the largest lse
  double sum = 0;

  template <class Shards>
  ShardWeights(Shards const& shards, index_t row, index_t head) noexcept {
    for (auto const& shard : shards) {
      float const lse = shard.lse(row, head);
      if (std::isnan(lse) || lse > reference) reference = lse;  // nothing is above NaN
    }
    for (auto const& shard : shards) sum += of(shard.lse(row, head));
  }
  double of(float lse) const noexcept {
    return lse == reference ? 1.0 : std::exp(double{lse} - double{reference});
  }
  /// Without any key there is nothing to weigh.
  bool empty() const noexcept { return reference == -std::numeric_limits<float>::infinity(); }
  float lse() const noexcept {
    return empty() ? reference : static_cast<float>(double{reference} + std::log(sum));
  }
  /// What the sink leaves.
  double kept(float sink) const noexcept {
    return 1 / (1 + std::exp(double{sink} - double{lse()}));
  }
};

}  // namespace detail

/// Attention over the keys of all shards, from theirs: out = sum_i e^(lse_i - lse) out_i, with
/// lse = log sum_i e^lse_i, in double, in the order of the shards. The sink is applied here, once.
/// Rows without a key in any shard: out 0, lse -inf. Parts with a lse of -inf are not read. A lse
/// of NaN makes the head's results NaN.
///
/// @param sink  [heads] or empty
/// @param lse   [rows, heads] or empty; natural log, without the sink
/// Errors: bad_shape, bad_stride, missing_input.
template <HostSpaceExecutor X, Element Part, Element Out>
Status merge_attention(X const& x, cuda::std::span<ShardAttention<Part> const> shards,
                       SinkView<Space::host> const& sink, OutputView<Space::host, Out> const& out,
                       LseView<Space::host> const& lse) noexcept {
  using namespace detail;
  bool const has_sink = sink.data_handle() != nullptr || sink.extent(0) > 0;
  bool const has_lse = lse.data_handle() != nullptr || lse.extent(0) > 0;
  index_t const rows = out.extent(0);
  index_t const heads = out.extent(1);
  if (Status const status = first_failure(
          {has_sink ? check_extent("heads of the sink", heads, sink.extent(0)) : Status{},
           has_sink ? check_readable("sink", sink) : Status{},
           has_lse ? check_extent("rows of the merged lse", rows, lse.extent(0)) : Status{},
           has_lse ? check_extent("heads of the merged lse", heads, lse.extent(1)) : Status{},
           has_lse ? check_writable("merged lse", lse) : Status{},
           check_writable("merged attention", out)});
      !status.ok()) {
    return status;
  }
  for (auto const& shard : shards) {
    if (Status const status = first_failure(
            {check_extent("rows of a shard's attention", rows, shard.out.extent(0)),
             check_extent("heads of a shard's attention", heads, shard.out.extent(1)),
             check_extent("lanes of a shard's attention", out.extent(2), shard.out.extent(2)),
             check_extent("rows of a shard's lse", rows, shard.lse.extent(0)),
             check_extent("heads of a shard's lse", heads, shard.lse.extent(1)),
             check_readable("attention of a shard", shard.out),
             check_readable("lse of a shard", shard.lse)});
        !status.ok()) {
      return status;
    }
  }
  for_each_row(x, rows, [&](index_t row) noexcept {
    for (index_t head = 0; head < heads; ++head) {
      ShardWeights const weights(shards, row, head);
      double const kept = weights.empty() || !has_sink ? 1.0 : weights.kept(sink(head));
      for (index_t i = 0; i < out.extent(2); ++i) {
        double value = 0;
        for (auto const& shard : shards) {
          float const part = shard.lse(row, head);
          if (part == -std::numeric_limits<float>::infinity()) continue;
          value += weights.of(part) * double{to_float(shard.out(row, head, i))};
        }
        out(row, head, i) = from_float<Out>(
            weights.empty() ? 0.0f : static_cast<float>(value / weights.sum * kept));
      }
      if (has_lse) lse(row, head) = weights.lse();
    }
  });
  return {};
}

}  // namespace v0
}  // namespace indexshare
