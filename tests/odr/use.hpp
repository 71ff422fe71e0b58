// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/indexshare.hpp>

#include <array>
#include <cstddef>

namespace odr {

using namespace indexshare;

/// One layer over 4 keys of one lane, of which the best 2 are selected; every translation unit that
/// calls it instantiates the indexer, the top-k, the attention and the layer. Returns the
/// output, 1.5 or -1 on an error.
template <class Exec>
float run_layer(Exec const& exec) {
  using Plain = format::Plain<float>;
  using Layer = SparseAttentionLayer<ReluDotIndexer<float, Plain>, RadixTopK, EveryLayer,
                                     SparseMla<float, Plain>>;
  Shape const shape{1, 4, 2, 1, 1, 1, 1, 1};
  Layer const layer{.share = EveryLayer{1}, .shape = shape};

  std::array<float, 1> const one{1};
  std::array<float, 1> const zero{0};
  std::array<float, 4> const keys{1, 4, 2, 3};
  std::array<float, 4> const kv{0, 1, 0, 2};
  std::array<position_t, 1> const length{4};
  std::array<position_t, 1> const request{0};
  std::array<float, 1> out{-1};
  alignas(workspace_alignment) std::array<std::byte, 4096> state_memory{};
  alignas(workspace_alignment) std::array<std::byte, 65536> scratch{};

  auto const pages = make_contiguous_table<Space::host>(Keys{4});
  RowBatch<Space::host> const batch{make_lengths<Space::host>(length.data(), Rows{1}),
                                    make_lengths<Space::host>(request.data(), Rows{1}), pages,
                                    pages};
  typename Layer::template inputs<Space::host> in{.batch = batch, .id = {.forward = 1}};
  in.indexer = {make_query<Space::host>(one.data(), Rows{1}, Heads{1}, HeadDim{1}),
                make_head_weights<Space::host>(one.data(), Rows{1}, Heads{1}),
                make_contiguous_cache<Space::host>(keys.data(), Requests{1}, Keys{4}, HeadDim{1})};
  in.attention = {make_query<Space::host>(zero.data(), Rows{1}, Heads{1}, HeadDim{1}),
                  make_contiguous_cache<Space::host>(kv.data(), Requests{1}, Keys{4}, HeadDim{1}),
                  1.0F};
  auto state = SelectionState<Space::host>::make({state_memory.data(), state_memory.size()},
                                                 Rows{1}, TopK{2});
  if (!state) return -1;
  Status const status = layer.run(
      exec, in, *state, {make_output<Space::host>(out.data(), Rows{1}, Heads{1}, HeadDim{1})},
      {scratch.data(), scratch.size()});
  return status.ok() ? out[0] : -1;
}

}  // namespace odr
