// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cuda_support.cuh"

#include <indexshare/indexshare.hpp>

/// @file A small model of two layers for the CUDA examples: its shape, its inputs, and a layer call
/// that runs on any executor.

namespace example {

using namespace indexshare;

// Capacities: four rows of two requests of up to 128 tokens in pages of 16.
constexpr Rows rows{4};
constexpr TopK top_k{32};
constexpr PageSize page_size{16};
constexpr Pages pages{16};  // of both requests
constexpr Heads heads{8}, index_heads{8};
constexpr HeadDim index_dim{128};
constexpr index_t slots = pages.n * page_size.n;
constexpr Shape shape{.rows = rows.n,
                      .keys = slots / 2,
                      .top_k = top_k.n,
                      .index_heads = index_heads.n,
                      .index_dim = index_dim.n,
                      .heads = heads.n,
                      .key_dim = 576,
                      .value_dim = 512};

/// The schedule: layer 0 is full, layer 1 shares its selection.
struct FullThenShared {};
constexpr std::int32_t share_source(FullThenShared, std::int32_t layer) noexcept {
  return layer == 0 || layer == 1 ? 0 : no_source;
}

/// What the layers read. Index keys belong to layer 0, which is full; each layer has its own KV.
struct Inputs {
  Array<position_t> lengths{rows.n}, requests{rows.n}, table{pages.n};
  Array<bf16> index_q{rows.n * shape.index_heads * shape.index_dim};
  Array<float> weights{rows.n * shape.index_heads};
  Array<bf16> q{rows.n * shape.heads * shape.key_dim};
  Array<bf16> index_keys{slots * shape.index_dim};
  Array<bf16> kv[2] = {Array<bf16>{slots * shape.key_dim}, Array<bf16>{slots * shape.key_dim}};

  Inputs() {
    next_forward(0);
    index_keys.fill(1, 3);
    kv[0].fill(2, 8);
    kv[1].fill(3, 8);
  }
  /// New data in the same memory. forward 0, 1, 2: the rows see from 1, 20 and 70 keys on.
  void next_forward(position_t forward) const {
    for (position_t row = 0; row < rows.n; ++row) {
      lengths[row] = std::max(50 * forward - 30, 1) + 3 * row;
      requests[row] = row % 2;
    }
    for (position_t page = 0; page < pages.n; ++page) table[page] = (5 * page + forward) % 16;
    index_q.fill(10 + forward, 3);
    weights.fill(20 + forward, 2);
    q.fill(30 + forward, 1);
  }
};

/// Both layers on one back end: state, outputs and scratch.
template <class X, class Layer>
struct Stack {
  static constexpr Space space = X::space;
  using State = SelectionState<space>;
  static constexpr index_t outputs = rows.n * shape.heads * shape.value_dim;

  X exec;
  Array<std::byte> memory{static_cast<index_t>(State::size(rows, top_k).bytes)};
  State state = State::make(memory.workspace(), rows, top_k).value();
  Array<float> out[2] = {Array<float>{outputs}, Array<float>{outputs}};
  // That of the full layer includes the shared one's.
  Array<std::byte> scratch{static_cast<index_t>(
      Layer{.shape = shape}.workspace(exec, std::size_t{1} << 20).value().bytes)};

  /// One forward: enqueued on CUDA, computed on the host.
  void run(Inputs const& from) {
    auto const table =
        make_page_table<space>(from.table.data(), Requests{2}, Pages{pages.n / 2}, page_size);
    auto const cache = [](Array<bf16> const& data, index_t lanes) {
      return make_paged_cache<space>(data.data(), pages, page_size, HeadDim{lanes});
    };
    for (std::int32_t number = 0; number < 2; ++number) {
      Layer const layer{.shape = shape, .layer = number};
      typename Layer::template inputs<space> in{};
      in.batch = {make_lengths<space>(from.lengths.data(), rows),
                  make_lengths<space>(from.requests.data(), rows), table, table};
      in.id = {.forward = 1};
      in.attention = {make_query<space>(from.q.data(), rows, heads, HeadDim{shape.key_dim}),
                      cache(from.kv[number], shape.key_dim), 1.0f / 64};
      if (layer.is_full()) {
        in.indexer = {make_query<space>(from.index_q.data(), rows, index_heads, index_dim),
                      make_head_weights<space>(from.weights.data(), rows, index_heads),
                      cache(from.index_keys, shape.index_dim)};
      }
      auto const output =
          make_output<space>(out[number].data(), rows, heads, HeadDim{shape.value_dim});
      require(layer.run(exec, in, state, {output}, scratch.workspace()));
    }
  }
};

}  // namespace example
