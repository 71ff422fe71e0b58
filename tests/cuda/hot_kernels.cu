// SPDX-License-Identifier: Apache-2.0
//
// Every kernel that a serving engine's step runs, for scripts/ptxas.sh: compiled to machine code
// for each GPU generation, where spilled registers and local memory are errors. Nothing here is
// run.
#include <indexshare/cuda/attention.cuh>
#include <indexshare/cuda/indexer.cuh>
#include <indexshare/cuda/selection.cuh>
#include <indexshare/cuda/topk.cuh>

namespace {

using namespace indexshare;
constexpr Space device = Space::device;

template <class Query, class Format>
Status score(CudaExec const& x, RowBatch<device> const& batch, Workspace ws) {
  typename ReluDotIndexer<Query, Format>::template inputs<device> const in{};
  return indexer_score(x, ReluDotIndexer<Query, Format>{}, in, batch, {}, ScoreView<device>{}, ws);
}

template <class Score>
Status choose(CudaExec const& x, SelectionView<device> const& out, Workspace ws) {
  return topk_select(x, RadixTopK{}, ScoreView<device, Score const>{}, LengthView<device>{}, out,
                     ws);
}

template <class Policy>
Status attend(CudaExec const& x, RowBatch<device> const& batch, Workspace ws) {
  typename Policy::template inputs<device> const in{};
  return attention_run(x, Policy{}, in, batch, {}, GroupPlan<device>{},
                       typename Policy::template outputs<device>{}, Shape{}, ws);
}

}  // namespace

Status hot_kernels(CudaExec const& x, RowBatch<device> const& batch,
                   SelectionView<device> const& selection,
                   Tensor<device, position_t, 2> const& slots, Workspace ws) {
  using Latent = format::LatentE4m3;
  using Keys = format::IndexKeyE4m3;
  Status status;
  ((status = score<bf16, format::Plain<bf16>>(x, batch, ws)).ok()) &&
      ((status = score<fp16, format::Plain<fp16>>(x, batch, ws)).ok()) &&
      ((status = score<bf16, Keys>(x, batch, ws)).ok()) &&
      ((status = score<e4m3, Keys>(x, batch, ws)).ok()) &&
      ((status = choose<float>(x, selection, ws)).ok()) &&
      ((status = choose<bf16>(x, selection, ws)).ok()) &&
      ((status = map_slots(x, {selection.indices, selection.counts}, batch.requests, batch.kv_pages,
                           slots))
           .ok()) &&
      ((status = attend<SparseMla<bf16, format::Plain<bf16>, bf16>>(x, batch, ws)).ok()) &&
      ((status = attend<SparseMla<fp16, format::Plain<fp16>, fp16>>(x, batch, ws)).ok()) &&
      ((status = attend<SparseMla<bf16, Latent, bf16>>(x, batch, ws)).ok()) &&
      ((status = attend<DenseMla<bf16, format::Plain<bf16>, bf16>>(x, batch, ws)).ok());
  return status;
}
