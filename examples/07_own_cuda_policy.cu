// SPDX-License-Identifier: Apache-2.0
//
// Kernels of your own as policies (own_cuda_policies.cuh): an indexer, a top-k and an attention,
// each mixed with the library's. All mean the same, so one run of the reference back end checks
// every mixture.
#include "cuda_small_model.cuh"
#include "cuda_support.cuh"
#include "own_cuda_policies.cuh"

#include <indexshare/indexshare.cuh>

using namespace indexshare;

using Indexer = mine::LibraryIndexer;
using Attention = mine::LibraryAttention;
template <class I, class T, class A>
using Layer = SparseAttentionLayer<I, T, example::FullThenShared, A>;
using Reference = example::Stack<ReferenceExec, Layer<Indexer, RadixTopK, Attention>>;

template <class I, class T, class A>
bool check(char const* mixture, example::Stream const& stream, example::Inputs const& inputs,
           Reference const& reference) {
  example::Stack<CudaExec, Layer<I, T, A>> cuda{{stream, device_limits(0).value()}};
  cuda.run(inputs);
  stream.wait();
  bool const same = example::same_entries(cuda.state, reference.state);
  bool const agrees = example::agree(cuda.out[0], reference.out[0]) &&
                      example::agree(cuda.out[1], reference.out[1]);
  std::printf("%-28s selections %s, outputs %s\n", mixture, same ? "equal" : "differ",
              agrees ? "agree" : "are off");
  return same && agrees;
}

int main() {
  example::Stream const stream;
  example::Inputs const inputs;
  inputs.next_forward(2);
  Reference reference{{}};
  reference.run(inputs);
  bool const passed[] = {
      check<mine::WarpIndexer, RadixTopK, Attention>("own indexer", stream, inputs, reference),
      check<Indexer, mine::RankTopK, Attention>("own top-k", stream, inputs, reference),
      check<Indexer, RadixTopK, mine::WarpAttention>("own attention", stream, inputs, reference),
      check<mine::WarpIndexer, mine::RankTopK, mine::WarpAttention>("all three", stream, inputs,
                                                                    reference)};
  return std::all_of(std::begin(passed), std::end(passed), [](bool ok) { return ok; }) ? 0 : 1;
}
