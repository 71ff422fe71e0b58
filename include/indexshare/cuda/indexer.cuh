// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/concepts.hpp>
#include <indexshare/cuda/detail/launch.cuh>
#include <indexshare/cuda/detail/score_scalar.cuh>
#include <indexshare/cuda/detail/score_tensor.cuh>
#include <indexshare/cuda/exec.cuh>
#include <indexshare/cuda/indexer_plan.hpp>
#include <indexshare/indexer/relu_dot.hpp>

#include <cstddef>
#include <cstdint>

/// @file The indexer on CUDA, sm_80 and later. What it launches: cuda/indexer_plan.hpp.

namespace indexshare {
inline namespace v0 {
namespace detail {

/// The widest copy, in bytes, whose sources all are multiples of it.
inline int copy_width(std::uintptr_t a, std::uintptr_t b, std::uintptr_t c) noexcept {
  std::uintptr_t const bits = a | b | c | 16;
  return static_cast<int>(bits & (~bits + 1));
}

template <class Query, class KeyFormat>
ScoreAlignment score_alignment(
    typename ReluDotIndexer<Query, KeyFormat>::template inputs<Space::device> const& in) noexcept {
  auto const number = [](auto stride, std::size_t size) {
    return static_cast<std::uintptr_t>(stride) * size;
  };
  auto const address = [](auto const* data) { return reinterpret_cast<std::uintptr_t>(data); };
  auto const& keys = in.keys;
  constexpr std::size_t element = sizeof(typename KeyFormat::storage);
  std::uintptr_t const block = number(keys.block_stride, element);
  std::uintptr_t const codes = number(keys.block_size * keys.row_stride, element);
  return {copy_width(address(in.q.data_handle()), number(in.q.stride(0), sizeof(Query)),
                     number(in.q.stride(1), sizeof(Query))),
          copy_width(address(keys.data), block, number(keys.row_stride, element)),
          copy_width(address(keys.data), block, codes) >= 4};
}

template <class Query, class KeyFormat>
Status launch_scores(CudaExec const& x, IndexerPlan const& plan,
                     ScoreCall<Query, KeyFormat> const& call) noexcept {
  LaunchShape const shape{
      dim3(static_cast<unsigned>(plan.row_groups), static_cast<unsigned>(plan.key_chunks)),
      plan.threads, plan.shared_bytes};
  if constexpr (score_dots<Query, KeyFormat>() != ScoreDots::scalar) {
    if (plan.tensor) {
      TensorScoreCall<Query, KeyFormat> const tensor{call, plan.block,
                                                     score_alignment<Query, KeyFormat>(call.in)};
      auto const with = [&](auto lanes, auto heads) noexcept {
        return launch(x, plan.kernel, score_tensor_kernel<Query, KeyFormat, lanes, heads>, shape,
                      tensor);
      };
      constexpr std::integral_constant<int, 0> any{};
      constexpr std::integral_constant<int, 128> lanes{};
      if (call.in.q.extent(2) != lanes) return with(any, any);
      switch (call.in.q.extent(1)) {
        case 8:
          return with(lanes, std::integral_constant<int, 8>{});
        case 16:
          return with(lanes, std::integral_constant<int, 16>{});
        case 32:
          return with(lanes, std::integral_constant<int, 32>{});
        case 64:
          return with(lanes, std::integral_constant<int, 64>{});
        default:
          return with(lanes, any);
      }
    }
  }
  return launch(x, plan.kernel, score_scalar_kernel<Query, KeyFormat>, shape,
                ScalarScoreCall<Query, KeyFormat>{call, plan.scalar});
}

}  // namespace detail

/// Any alignment and any strides of queries, weights and keys run, and give the same bits; 16-byte
/// aligned rows are fastest. Errors: those of `check_inputs`; unsupported.
template <Element Query, class KeyFormat>
Status indexer_check(
    CudaExec const& x, ReluDotIndexer<Query, KeyFormat> policy,
    typename ReluDotIndexer<Query, KeyFormat>::template inputs<Space::device> const& in,
    RowBatch<Space::device> const& batch, Shape const& shape) noexcept {
  if (Status const status = check_inputs(policy, in, batch, shape); !status.ok()) return status;
  Result<IndexerPlan> const plan = indexer_plan(x.limits(), policy, shape);
  return plan ? Status{} : plan.error();
}

/// Enqueues one kernel that scores rows request.rows of `batch`; keys at or past a row's length are
/// not read, scores there are not written. Reads lengths, requests and pages on the device, so a
/// graph can be replayed with new ones.
///
/// Two ways to sum, chosen by types, heads and lanes alone:
/// - Tensor cores: bf16 or fp16 queries with keys of their type or e4m3 keys, e4m3 queries with
///   e4m3 keys; lanes a multiple of 16 up to 256, up to 128 heads. Products are exact, a dot is
///   accumulated in fp32 by mma.sync over steps of 16 lanes ascending (32 where both sides are e4m3
///   in code for sm_89 or sm_120; the hardware orders and truncates within a step). Then
///   weight * relu(dot) is added by fused multiply-adds, heads 8j + 2m and 8j + 2m + 1 for
///   ascending j into four sums m, and (0 + 1) + (2 + 3) is the score. The scale of an e4m3 key
///   multiplies this sum: it must be positive, as every quantiser's is.
/// - fp32 multiply-adds for everything else, lanes and then heads ascending; keys are decoded with
///   their scale first.
/// A NaN among a row's queries or a key's lanes gives NaN in every score that it enters.
///
/// Cost: each block of `indexer_plan(...).rows` rows reads the keys that it scores once.
/// Errors: unsupported, bad_stride (scores), backend_error.
/// @param scores  [request.rows.count, keys], lanes next to each other
template <Element Query, class KeyFormat>
Status indexer_score(
    CudaExec const& x, ReluDotIndexer<Query, KeyFormat> policy,
    typename ReluDotIndexer<Query, KeyFormat>::template inputs<Space::device> const& in,
    RowBatch<Space::device> const& batch, ScoreRequest const& request,
    ScoreView<Space::device> const& scores, Workspace) noexcept {
  if (request.rows.count <= 0 || scores.extent(1) <= 0) return {};
  Shape shape;
  shape.rows = request.rows.count;
  shape.keys = scores.extent(1);
  shape.index_heads = in.q.extent(1);
  shape.index_dim = in.q.extent(2);
  Result<IndexerPlan> const plan = indexer_plan(x.limits(), policy, shape);
  if (!plan) return plan.error();
  if (Status const status = detail::check_readable("scores", scores); !status.ok()) return status;
  return detail::launch_scores<Query, KeyFormat>(
      x, *plan,
      {in, batch.lengths, batch.requests, batch.index_pages, scores, request, plan->chunk});
}

static_assert(IndexerPolicy<ReluDotIndexer<float, format::Plain<float>>, CudaExec> &&
              IndexerPolicy<ReluDotIndexer<bf16, format::Plain<bf16>>, CudaExec> &&
              IndexerPolicy<ReluDotIndexer<bf16, format::IndexKeyE4m3>, CudaExec> &&
              IndexerPolicy<ReluDotIndexer<e4m3, format::IndexKeyE4m3>, CudaExec>);

}  // namespace v0
}  // namespace indexshare
