// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <string>
#include <vector>

#include <cuda_runtime_api.h>

/// @file What waits for what in a captured graph.

namespace example {

/// The nodes of a graph by the step that enqueued them, filled while the graph is captured.
class GraphPaths {
 public:
  /// Runs `work`, which enqueues on streams that are being captured; `stream` is one of them. Where
  /// nothing is captured it only runs `work`.
  template <class Work>
  void step(std::string const& name, cudaStream_t stream, Work const& work) {
    Nodes const before = nodes_of(stream);
    work();
    Nodes const after = nodes_of(stream);
    std::copy_if(after.begin(), after.end(), std::back_inserter(steps_[name]),
                 [&](cudaGraphNode_t node) {
                   return std::find(before.begin(), before.end(), node) == before.end();
                 });
  }

  /// Whether some node of step `later` waits for some node of step `earlier` in `graph`.
  bool waits(cudaGraph_t graph, std::string const& later, std::string const& earlier) const {
    std::size_t count = 0;
    check(cudaGraphGetEdges(graph, nullptr, nullptr, nullptr, &count));
    Nodes from(count), to(count);
    if (count > 0) check(cudaGraphGetEdges(graph, from.data(), to.data(), nullptr, &count));
    Nodes reached = steps_.at(earlier);
    Nodes const& wanted = steps_.at(later);
    for (std::size_t i = 0; i < reached.size(); ++i) {
      if (contains(wanted, reached[i])) return true;
      for (std::size_t edge = 0; edge < count; ++edge) {
        if (from[edge] == reached[i] && !contains(reached, to[edge])) reached.push_back(to[edge]);
      }
    }
    return false;
  }
  /// Whether the two may run at the same time.
  bool apart(cudaGraph_t graph, std::string const& a, std::string const& b) const {
    return !waits(graph, a, b) && !waits(graph, b, a);
  }

 private:
  using Nodes = std::vector<cudaGraphNode_t>;

  static void check(cudaError_t error) {
    if (error == cudaSuccess) return;
    std::fprintf(stderr, "graph: %s\n", cudaGetErrorString(error));
    std::exit(1);
  }
  static bool contains(Nodes const& nodes, cudaGraphNode_t node) {
    return std::find(nodes.begin(), nodes.end(), node) != nodes.end();
  }
  /// Of the graph that is being captured.
  static Nodes nodes_of(cudaStream_t stream) {
    cudaStreamCaptureStatus status{};
    cudaGraph_t graph = nullptr;
    check(cudaStreamGetCaptureInfo(stream, &status, nullptr, &graph));
    if (status != cudaStreamCaptureStatusActive) return {};
    std::size_t count = 0;
    check(cudaGraphGetNodes(graph, nullptr, &count));
    Nodes nodes(count);
    if (count > 0) check(cudaGraphGetNodes(graph, nodes.data(), &count));
    return nodes;
  }

  std::map<std::string, Nodes> steps_;
};

}  // namespace example
