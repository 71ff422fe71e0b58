// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/indexshare.cuh>
#include <indexshare/topk/order.hpp>

/// @file Kernels of one's own as policies, for 07_own_cuda_policy.cu. They mean what the library's
/// mean, in the plainest way: correct for any lengths, not fast.

namespace mine {

using namespace indexshare;

constexpr Space device = Space::device;
using Cached = format::Plain<bf16>;
using LibraryIndexer = ReluDotIndexer<bf16, Cached>;
using LibraryAttention = SparseMla<bf16, Cached>;

inline Status launched(char const* kernel) noexcept {
  cudaError_t const error = cudaGetLastError();
  return error == cudaSuccess ? Status{} : cuda_failure(error, kernel);
}

__device__ inline float sum_of_warp(float value) {
  for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(~0u, value, step);
  return value;
}

// ---- an indexer: a block per row, a warp per key, a lane per lane of the key

struct WarpIndexer {
  using score_type = float;
  template <Space S>
  using inputs = LibraryIndexer::inputs<S>;
};

INDEXSHARE_KERNEL void score(WarpIndexer::inputs<device> in, RowBatch<device> batch,
                             ScoreRequest request, ScoreView<device> scores) {
  index_t const row = request.rows.first + blockIdx.x;
  index_t const length = clamp_length(batch.lengths(row), scores.extent(1));
  for (index_t s = threadIdx.y; s < length; s += blockDim.y) {
    position_t const slot = batch.index_pages.slot(batch.requests(row), s);
    float score = in.keys.has(slot) ? 0.0f : -INFINITY;
    for (index_t h = 0; h < in.q.extent(1) && in.keys.has(slot); ++h) {
      float dot = 0;
      for (index_t d = threadIdx.x; d < in.q.extent(2); d += 32) {
        dot += to_float(in.q(row, h, d)) * to_float(in.keys.row(slot)[d]);
      }
      dot = sum_of_warp(dot);
      score += in.weights(row, h) * (dot < 0 ? 0.0f : dot);
    }
    if (threadIdx.x == 0) scores(blockIdx.x, s) = score;
  }
}

inline Result<WorkspaceSize> indexer_workspace(CudaExec const&, WarpIndexer,
                                               Shape const&) noexcept {
  return WorkspaceSize{0};
}
inline Status indexer_check(CudaExec const&, WarpIndexer, WarpIndexer::inputs<device> const& in,
                            RowBatch<device> const& batch, Shape const& shape) noexcept {
  return check_inputs(LibraryIndexer{}, in, batch, shape);
}
inline Status indexer_score(CudaExec const& x, WarpIndexer, WarpIndexer::inputs<device> const& in,
                            RowBatch<device> const& batch, ScoreRequest const& request,
                            ScoreView<device> const& scores, Workspace) noexcept {
  score<<<static_cast<unsigned>(request.rows.count), dim3(32, 8), 0, x.stream()>>>(in, batch,
                                                                                   request, scores);
  return launched("score");
}

// ---- a top-k: a warp per row; a key is chosen if fewer than k are better

struct RankTopK {};

INDEXSHARE_KERNEL void choose(ScoreView<device, float const> scores, LengthView<device> lengths,
                              SelectionView<device> out) {
  index_t const row = blockIdx.x, k = out.indices.extent(1);
  index_t const length = clamp_length(lengths(row), scores.extent(1));
  position_t count = 0;
  for (index_t begin = 0; begin < length; begin += 32) {
    index_t const s = begin + threadIdx.x;
    bool chosen = s < length;
    if (chosen && length > k) {  // else all are chosen, and their scores were not written
      auto const own = order_key(scores(row, s));
      index_t better = 0;
      for (index_t t = 0; t < length; ++t) {
        auto const other = order_key(scores(row, t));
        better += other > own || (other == own && t < s) ? 1 : 0;
      }
      chosen = better < k;
    }
    unsigned const votes = __ballot_sync(~0u, chosen);
    int const before = __popc(votes & ((1u << threadIdx.x) - 1));
    if (chosen) out.indices(row, count + before) = static_cast<position_t>(s);
    count += __popc(votes);
  }
  for (index_t j = count + threadIdx.x; j < k; j += 32) out.indices(row, j) = no_position;
  if (threadIdx.x == 0) out.counts(row) = count;
}

inline Result<WorkspaceSize> topk_workspace(CudaExec const&, RankTopK, Shape const&) noexcept {
  return WorkspaceSize{0};
}
inline Status topk_select(CudaExec const& x, RankTopK, ScoreView<device, float const> const& scores,
                          LengthView<device> const& lengths, SelectionView<device> const& out,
                          Workspace) noexcept {
  choose<<<static_cast<unsigned>(scores.extent(0)), 32, 0, x.stream()>>>(scores, lengths, out);
  return launched("choose");
}

// ---- an attention: a block per row, a warp per head, which keeps 16 value lanes per thread

struct WarpAttention {
  static constexpr bool reads_selection = true;
  template <Space S>
  using inputs = LibraryAttention::inputs<S>;
  template <Space S>
  using outputs = LibraryAttention::outputs<S>;
};

INDEXSHARE_KERNEL void attend(WarpAttention::inputs<device> in, index_t first,
                              GroupPlan<device> plan, WarpAttention::outputs<device> out) {
  index_t const row = first + blockIdx.x, h = threadIdx.y;
  float largest = -INFINITY, total = 0, sums[16] = {};
  for (index_t j = 0; j < clamp_length(plan.counts(row), plan.slots.extent(1)); ++j) {
    if (!in.kv.has(plan.slots(row, j))) continue;  // contributes nothing
    bf16 const* const key = in.kv.row(plan.slots(row, j));
    float dot = 0;
    for (index_t d = threadIdx.x; d < in.q.extent(2); d += 32) {
      dot += to_float(in.q(row, h, d)) * to_float(key[d]);
    }
    float const logit = in.scale * sum_of_warp(dot);
    float const next = fmaxf(largest, logit), keep = expf(largest - next);
    float const weight = expf(logit - next);
    largest = next;
    total = total * keep + weight;
    for (int i = 0; i < 16; ++i) {
      sums[i] = sums[i] * keep + weight * to_float(key[32 * i + threadIdx.x]);
    }
  }
  for (int i = 0; i < 16; ++i) {
    out.out(row, h, 32 * i + threadIdx.x) = total > 0 ? sums[i] / total : 0;
  }
}

inline Result<WorkspaceSize> attention_workspace(CudaExec const&, WarpAttention,
                                                 Shape const&) noexcept {
  return WorkspaceSize{0};
}
inline Status attention_check(CudaExec const&, WarpAttention,
                              WarpAttention::inputs<device> const& in,
                              WarpAttention::outputs<device> const& out,
                              RowBatch<device> const& batch, Shape const& shape) noexcept {
  if (shape.value_dim != 512 || shape.heads > 32 || in.sink.extent(0) + out.lse.extent(0) > 0) {
    return failure(Errc::unsupported, "WarpAttention: 512 value lanes, 32 heads, no sink, no lse");
  }
  return check_inputs(in, out, batch, shape);
}
inline Status attention_run(CudaExec const& x, WarpAttention,
                            WarpAttention::inputs<device> const& in, RowBatch<device> const&,
                            RowRange rows, GroupPlan<device> const& plan,
                            WarpAttention::outputs<device> const& out, Shape const& shape,
                            Workspace) noexcept {
  dim3 const block(32, static_cast<unsigned>(shape.heads));
  attend<<<static_cast<unsigned>(rows.count), block, 0, x.stream()>>>(in, rows.first, plan, out);
  return launched("attend");
}

static_assert(IndexerPolicy<WarpIndexer, CudaExec> && TopKPolicy<RankTopK, CudaExec, float> &&
              AttentionPolicy<WarpAttention, CudaExec>);

}  // namespace mine
