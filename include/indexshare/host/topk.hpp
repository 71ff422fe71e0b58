// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/concepts.hpp>
#include <indexshare/host/candidates.hpp>
#include <indexshare/host/decode.hpp>
#include <indexshare/host/isa.hpp>
#include <indexshare/host/simd/foreach.hpp>
#include <indexshare/select.hpp>
#include <indexshare/topk/radix.hpp>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <type_traits>

namespace indexshare {
inline namespace v0 {
namespace detail {

/// Scores of a long row that are looked at first.
inline constexpr index_t topk_sample_most = 4096;

constexpr index_t topk_samples(index_t length) noexcept {
  return length < 131072 ? topk_sample_most / 2 : topk_sample_most;
}

/// Where sample i lies: one in each interval, at a place that no regular order knows.
constexpr index_t topk_sample_place(index_t i, index_t interval) noexcept {
  std::uint32_t const scattered = static_cast<std::uint32_t>(i) * 0x9E3779B9u;
  return i * interval + (static_cast<index_t>(scattered) * interval >> 32);
}

/// A worker's list: of a whole short row, or of four times what is wanted, so that a compaction
/// makes room for three times that many; the sample goes in as well.
inline Candidates carve_topk_list(WorkspaceCarver& carver, index_t top_k, index_t keys) noexcept {
  index_t const longest = std::clamp<index_t>(keys, 1, max_position);
  index_t const wanted = std::clamp<index_t>(top_k, 0, longest - 1);
  index_t const held = std::min(longest, std::max(4 * wanted, topk_sample_most));
  return carve_candidates(carver, wanted, held + least_candidate_room);
}

inline WorkspaceSize topk_scratch(int workers, index_t top_k, index_t keys) noexcept {
  WorkspaceCarver carver;
  for (int worker = 0; worker < workers; ++worker) carve_topk_list(carver, top_k, keys);
  return carver.size();
}

/// Rows that are longer than the selection is wide.
template <Element Score>
class TopKSearch {
 public:
  TopKSearch(HostIsa isa, Candidates const& empty) noexcept
      : list_(kernels<CandidateKernels>(isa)), widen_(kernels<WidenKernels>(isa)), empty_(empty) {}

  /// Writes the positions of the best of `length` scores in ascending order.
  void select(Score const* scores, index_t length, position_t* out) const noexcept {
    bool const holds_all = length <= empty_.capacity - least_candidate_room;
    Candidates list = holds_all ? empty_ : above_sample(scores, length);
    append(scores, length, list);
    if (list.count < list.wanted) {  // the sample misled, or most scores are NaN
      list = empty_;
      append(scores, length, list);
    }
    list_.compact(list);
    std::copy_n(list.positions, list.count, out);
  }

 private:
  /// The empty list with a floor that a few more than the wanted scores reach, if the sample tells
  /// the truth: it has four standard deviations to spare. Any floor that enough scores reach is
  /// right; NaN, which a sample with NaN may give, is reached by none.
  Candidates above_sample(Score const* scores, index_t length) const noexcept {
    index_t const samples = topk_samples(length);
    index_t const interval = length / samples;
    double const expected = static_cast<double>(empty_.wanted) * static_cast<double>(samples) /
                            static_cast<double>(length);
    Candidates sample = empty_;
    sample.wanted = static_cast<index_t>(expected + 4 * std::sqrt(expected) + 4);
    for (; sample.count < samples; ++sample.count) {
      sample.scores[sample.count] = to_float(scores[topk_sample_place(sample.count, interval)]);
    }
    list_.compact(sample);  // its positions are never looked at
    Candidates list = empty_;
    list.open = false;
    list.floor = *std::min_element(sample.scores, sample.scores + sample.count);
    return list;
  }

  void append(Score const* scores, index_t length, Candidates& list) const noexcept {
    if constexpr (std::is_same_v<Score, float>) {
      list_.append(list, scores, 0, length);
    } else {
      constexpr index_t block = 512;
      float widened[block];
      for (index_t first = 0; first < length; first += block) {
        index_t const n = std::min(block, length - first);
        widen_row(widen_, scores + first, n, widened);
        list_.append(list, widened, first, n);
      }
    }
  }

  CandidateKernels const& list_;
  WidenKernels const& widen_;
  Candidates empty_;
};

}  // namespace detail

/// Lists of candidates: for each worker up to 32 KiB, or 32 bytes for each of top_k if that is
/// more. Does not grow with the rows. Errors: unsupported (instruction set), bad_value
/// (concurrency), bad_shape.
template <class PF>
Result<WorkspaceSize> topk_workspace(HostExec<PF> const& x, RadixTopK,
                                     Shape const& shape) noexcept {
  Status const status = detail::first_failure(
      {detail::check_executor(x), detail::check_at_most("shape.top_k", max_position, shape.top_k)});
  if (!status.ok()) return refuse(status);
  return detail::topk_scratch(x.parallel_for.concurrency(), shape.top_k, shape.keys);
}

/// Reads each score of a long row once, and 2048 or 4096 of them before: a threshold that these
/// give lets through little more than the best, among which a radix selection decides. Exact for
/// any scores in any order; where the threshold keeps fewer than k, the row is read again without.
/// Rows run in parallel, each on one thread (the fused `select` also splits rows). Selections do
/// not depend on the instruction set.
/// Workspace: `topk_workspace` of these extents; none if no row can be longer than k.
/// Errors: bad_shape, bad_stride, missing_input for `scores` [rows, keys], `lengths` [rows] and
/// `out` [rows, k], whose innermost strides are 1; workspace_too_small; bad_value (alignment of the
/// workspace); unsupported (instruction set).
template <class PF, Element Score>
Status topk_select(HostExec<PF> const& x, RadixTopK policy,
                   ScoreView<Space::host, Score const> const& scores,
                   LengthView<Space::host> const& lengths, SelectionView<Space::host> const& out,
                   Workspace ws) noexcept {
  index_t const width = out.indices.extent(1);
  index_t const keys = scores.extent(1);
  std::size_t const scratch =
      keys <= width ? 0 : detail::topk_scratch(x.parallel_for.concurrency(), width, keys).bytes;
  Status const status =
      detail::first_failure({detail::check_executor(x), check_inputs(policy, scores, lengths, out),
                             detail::check_workspace("workspace of top-k, in bytes", ws, scratch)});
  if (!status.ok()) return status;

  x.parallel_for(scores.extent(0), [&](index_t begin, index_t end, int worker) noexcept {
    WorkspaceCarver carver(ws);
    detail::Candidates list{};
    for (int w = 0; w <= worker; ++w) list = detail::carve_topk_list(carver, width, keys);
    detail::TopKSearch<Score> const rows(x.isa, list);
    for (index_t row = begin; row < end; ++row) {
      index_t const length = clamp_length(lengths(row), keys);
      index_t const chosen = std::min(width, length);
      position_t* const indices = out.indices.data_handle() + row * out.indices.stride(0);
      if (length <= width) {
        std::iota(indices, indices + length, position_t{0});
      } else {
        rows.select(scores.data_handle() + row * scores.stride(0), length, indices);
      }
      std::fill(indices + chosen, indices + width, no_position);
      out.counts(row) = static_cast<position_t>(chosen);
    }
  });
  return {};
}

static_assert(TopKPolicy<RadixTopK, HostExec<>, float> && TopKPolicy<RadixTopK, HostExec<>, bf16>);

}  // namespace v0
}  // namespace indexshare
