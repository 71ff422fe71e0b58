// SPDX-License-Identifier: Apache-2.0
//
// A full layer and a layer that shares its selection, on the caller's stream inside a CUDA graph:
// captured once, then replayed for two forwards with other lengths, pages and queries in the same
// buffers. The reference back end runs each forward too, and both must agree.
#include "cuda_small_model.cuh"
#include "cuda_support.cuh"

#include <indexshare/indexshare.cuh>

using namespace indexshare;
using example::Array;
using example::require;

using Cached = format::Plain<bf16>;
using Layer = SparseAttentionLayer<ReluDotIndexer<bf16, Cached>, RadixTopK, example::FullThenShared,
                                   SparseMla<bf16, Cached>>;

int main() {
  example::Stream const stream;
  example::Inputs const inputs;
  example::Stack<CudaExec, Layer> cuda{{stream, device_limits(0).value()}};
  example::Stack<ReferenceExec, Layer> reference{{}};

  // A replay repeats no check of the host. For debugging, the layers can watch on the device that
  // a shared one reads the selection which its full one wrote.
  Array<TagMismatch> mismatch{1};
  mismatch[0] = {};
  cuda.state.check_tags_on_device(mismatch.data());

  cudaGraph_t graph = nullptr;
  cudaGraphExec_t replay = nullptr;
  require(cudaStreamBeginCapture(stream.get(), cudaStreamCaptureModeThreadLocal));
  cuda.run(inputs);
  require(cudaStreamEndCapture(stream.get(), &graph));
  require(cudaGraphInstantiate(&replay, graph, 0));

  bool passed = true;
  for (position_t forward = 1; forward <= 2; ++forward) {
    inputs.next_forward(forward);  // the graph holds addresses and capacities, no lengths
    require(cudaGraphLaunch(replay, stream.get()));
    stream.wait();
    reference.run(inputs);
    bool const same = example::same_entries(cuda.state, reference.state);
    std::printf("replay %d, rows of %d to %d keys: selections %s", forward, inputs.lengths[0],
                inputs.lengths[example::rows.n - 1], same ? "equal" : "differ");
    passed = passed && same;
    for (int layer = 0; layer < 2; ++layer) {
      bool const agrees = example::agree(cuda.out[layer], reference.out[layer]);
      std::printf(", layer %d %s", layer, agrees ? "agrees" : "is off");
      passed = passed && agrees;
    }
    std::printf("\n");
  }
  std::printf("tags that did not match: %u\n", mismatch[0].found);
  require(cudaGraphExecDestroy(replay));
  require(cudaGraphDestroy(graph));
  return passed && mismatch[0].found == 0 ? 0 : 1;
}
