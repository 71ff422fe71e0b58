// SPDX-License-Identifier: Apache-2.0
#include "data.hpp"
#include "owned_state.hpp"

#include <indexshare/indexshare.hpp>

#include <memory>

/// @file A whole layer, bf16: one that selects and attends, and one that attends to its selection.

namespace bench {
namespace {

using Indexer = ReluDotIndexer<bf16, format::Plain<bf16>>;
using Attention = SparseMla<bf16, format::Plain<bf16>>;
using Layer = SparseAttentionLayer<Indexer, RadixTopK, Pattern<"FS">, Attention>;
enum Role : std::int32_t { full, shared };  // layers of the pattern

struct LayerData {
  Batch batch;
  Shape shape;
  Array<bf16> index_q;
  Array<float> weights;
  Cache<format::Plain<bf16>> index_keys;
  Array<bf16> q;
  Cache<format::Plain<bf16>> kv;
  Array<float> out;
  programs::OwnedState state;
  HostMemory memory;

  LayerData(Exec const& exec, Layout const& layout)
      : batch(layout),
        shape(layout.shape()),
        index_q(uniform_array<bf16>(shape.rows * shape.index_heads * shape.index_dim, 2)),
        weights(uniform_array<float>(shape.rows * shape.index_heads, 3)),
        index_keys(batch, shape.index_dim, 4),
        q(uniform_array<bf16>(shape.rows * shape.heads * shape.key_dim, 6)),
        kv(batch, shape.key_dim, 7),
        out(poisoned(shape.rows * shape.heads * shape.value_dim)),
        state(Rows{shape.rows}, TopK{shape.top_k}),
        memory(required(layer(full).workspace(exec, scratch_budget))) {}

  Layer layer(Role role) const { return {.shape = shape, .layer = role}; }

  Status run(Exec const& exec, Role role) {
    Rows const rows{shape.rows};
    Heads const index_heads{shape.index_heads};
    Layer::inputs<Space::host> in;
    if (role == full) {
      in.indexer = Indexer::inputs<Space::host>{
          make_query<Space::host>(index_q.data(), rows, index_heads, HeadDim{shape.index_dim}),
          make_head_weights<Space::host>(weights.data(), rows, index_heads), index_keys.view()};
    }
    in.attention = {
        make_query<Space::host>(q.data(), rows, Heads{shape.heads}, HeadDim{shape.key_dim}),
        kv.view(),
        0.0625f,
        {}};
    in.batch = batch.view();
    in.id = {.forward = 0};
    return layer(role).run(
        exec, in, *state,
        {make_output<Space::host>(out.data(), rows, Heads{shape.heads}, HeadDim{shape.value_dim}),
         {}},
        memory.view());
  }
};

Call layer_call(Exec const& exec, Layout const& layout, Role role) {
  auto const data = std::make_shared<LayerData>(exec, layout);
  double flops = data->batch.attention_flops();
  if (role == full) {
    flops += data->batch.score_flops();
  } else {
    require(data->run(exec, full));
  }
  return {{.flops = flops},
          [=] { return data->run(exec, role); },
          [=] {
            check_selection(std::as_const(*data->state).selection(), data->batch);
            check_means(data->out);
          }};
}

}  // namespace

std::vector<Case> layer_cases() {
  std::vector<Layout> layouts = decode_layouts();
  for (Layout const& layout : prefill_layouts()) layouts.push_back(layout);
  layouts.push_back({.rows_per_request = 2048, .keys = 262144});  // whose peak memory is shown
  std::vector<Case> cases;
  for (Role const role : {full, shared}) {
    for (Layout const& layout : layouts) {
      cases.push_back({(role == full ? "layer_full/bf16/" : "layer_shared/bf16/") + layout.name(),
                       [=](Exec const& exec) { return layer_call(exec, layout, role); }});
    }
  }
  return cases;
}

}  // namespace bench
