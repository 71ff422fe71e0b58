// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "use.hpp"

#include <indexshare/indexshare.hpp>

#include <vector>

namespace flags {
namespace {

using namespace indexshare;

/// Keys of one lane that are small integers, so that every instruction set computes the same.
double run(HostIsa isa) {
  using Plain = format::Plain<float>;
  using Layer = SparseAttentionLayer<ReluDotIndexer<float, Plain>, RadixTopK, EveryLayer,
                                     SparseMla<float, Plain>>;
  Shape const shape{.rows = 1,
                    .keys = 300,
                    .top_k = 40,
                    .index_heads = 1,
                    .index_dim = 1,
                    .heads = 1,
                    .key_dim = 1,
                    .value_dim = 1};
  Layer const layer{.share = EveryLayer{1}, .shape = shape};
  HostExec<> const exec{.isa = isa};

  std::vector<float> keys(300);
  for (std::size_t s = 0; s < keys.size(); ++s) keys[s] = static_cast<float>(s * 76 % 301);
  float const one = 1;
  float const zero = 0;
  float out = -1;
  position_t const length = 300;
  position_t const request = 0;
  auto const pages = make_contiguous_table<Space::host>(Keys{300});
  RowBatch<Space::host> const batch{make_lengths<Space::host>(&length, Rows{1}),
                                    make_lengths<Space::host>(&request, Rows{1}), pages, pages};
  auto const cache =
      make_contiguous_cache<Space::host>(keys.data(), Requests{1}, Keys{300}, HeadDim{1});
  Layer::inputs<Space::host> in{.batch = batch, .id = {.forward = 1}};
  in.indexer = {make_query<Space::host>(&one, Rows{1}, Heads{1}, HeadDim{1}),
                make_head_weights<Space::host>(&one, Rows{1}, Heads{1}), cache};
  in.attention = {make_query<Space::host>(&zero, Rows{1}, Heads{1}, HeadDim{1}), cache, 1.0F};

  HostMemory const scratch(layer.workspace(exec, std::size_t{1} << 20).value());
  HostMemory const memory(SelectionState<Space::host>::size(Rows{1}, TopK{40}));
  auto state = SelectionState<Space::host>::make(memory.view(), Rows{1}, TopK{40});
  if (!state) return -1;
  Status const status =
      layer.run(exec, in, *state, {make_output<Space::host>(&out, Rows{1}, Heads{1}, HeadDim{1})},
                scratch.view());
  return status.ok() ? static_cast<double>(out) : -2;
}

}  // namespace
}  // namespace flags
