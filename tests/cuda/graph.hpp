// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/cuda/exec.cuh>

#include <catch2/catch_test_macros.hpp>

#include "executors.hpp"

#include <algorithm>
#include <cstddef>
#include <vector>

#include <cuda_runtime_api.h>

namespace cuda_test {

/// Work of an executor's stream, captured once, to be replayed.
class Graph {
 public:
  /// `work()` enqueues. A call in it that waits ends the capture with an error.
  template <class Work>
  Graph(indexshare::CudaExec const& x, Work const& work,
        cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal)
      : x_(x) {
    test::require(cudaStreamBeginCapture(x.stream(), mode));
    work();
    test::require(cudaStreamEndCapture(x.stream(), &graph_));
    test::require(cudaGraphInstantiate(&executable_, graph_, 0));
  }
  Graph(Graph const&) = delete;
  Graph& operator=(Graph const&) = delete;
  ~Graph() {
    cudaGraphExecDestroy(executable_);
    cudaGraphDestroy(graph_);
  }

  cudaGraph_t get() const { return graph_; }

  void launch() const { test::require(cudaGraphLaunch(executable_, x_.stream())); }
  void replay() const {
    launch();
    test::finish(x_);
  }

  std::vector<cudaGraphNodeType> nodes() const {
    std::vector<cudaGraphNodeType> types;
    for (cudaGraphNode_t const node : handles()) {
      test::require(cudaGraphNodeGetType(node, &types.emplace_back()));
    }
    return types;
  }
  /// Dynamic shared memory of each kernel, ascending.
  std::vector<int> shared_bytes() const {
    std::vector<int> bytes;
    for (cudaGraphNode_t const node : handles()) {
      cudaGraphNodeType type{};
      test::require(cudaGraphNodeGetType(node, &type));
      if (type != cudaGraphNodeTypeKernel) continue;
      cudaKernelNodeParams kernel{};
      test::require(cudaGraphKernelNodeGetParams(node, &kernel));
      bytes.push_back(static_cast<int>(kernel.sharedMemBytes));
    }
    std::sort(bytes.begin(), bytes.end());
    return bytes;
  }
  /// Kernels and fills only: nothing allocated, nothing copied, nothing run on the host.
  bool only_device_work() const {
    auto const types = nodes();
    return std::all_of(types.begin(), types.end(), [](cudaGraphNodeType type) {
      return type == cudaGraphNodeTypeKernel || type == cudaGraphNodeTypeMemset;
    });
  }

 private:
  std::vector<cudaGraphNode_t> handles() const {
    std::size_t count = 0;
    test::require(cudaGraphGetNodes(graph_, nullptr, &count));
    std::vector<cudaGraphNode_t> nodes(count);
    if (count > 0) test::require(cudaGraphGetNodes(graph_, nodes.data(), &count));
    return nodes;
  }

  indexshare::CudaExec x_;
  cudaGraph_t graph_ = nullptr;
  cudaGraphExec_t executable_ = nullptr;
};

/// How many nodes `work` enqueues; nothing of it runs.
template <class Work>
std::size_t enqueued_by(indexshare::CudaExec const& x, Work const& work) {
  return Graph(x, work).nodes().size();
}

}  // namespace cuda_test
