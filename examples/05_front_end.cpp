// SPDX-License-Identifier: Apache-2.0
//
// One self-attention module of a small model, from hidden states to its output: a prefill of ten
// tokens, then one decoded token, on a full layer. The matrix products are the program's own, as an
// engine's would be; everything between them is the library's.
#include <indexshare/frontend.hpp>
#include <indexshare/indexshare.hpp>

#include <cmath>
#include <cstdio>
#include <numeric>
#include <vector>

using namespace indexshare;

namespace {

constexpr Space host = Space::host;
constexpr index_t capacity = 16;  // tokens
using Cache = format::Plain<bf16>;

/// Where an engine calls its BLAS: out[r, o] = sum_i w[o, i] * in[r, i]. One stride of `w` is 1; if
/// it is the first, the matrix is used transposed.
struct EngineProduct {
  template <class T>
  Status operator()(HostExec<> const&, Tensor<host, float const, 2> const& in,
                    MatrixView<host, T> const& w,
                    Tensor<host, float, 2> const& out) const noexcept {
    for (index_t r = 0; r < in.extent(0); ++r) {
      for (index_t o = 0; o < w.extent(0); ++o) {
        float sum = 0;
        for (index_t i = 0; i < w.extent(1); ++i) sum += to_float(w(o, i)) * in(r, i);
        out(r, o) = sum;
      }
    }
    return {};
  }
};

/// A model as a config.json would state it, of the kind of GLM-5.2.
ModelConfig small_model() {
  ModelConfig config;
  config.hidden_size = 24;
  config.num_attention_heads = 2;
  config.q_lora_rank = 16;
  config.kv_lora_rank = 12;
  config.qk_nope_head_dim = 8;
  config.qk_rope_head_dim = 4;
  config.v_head_dim = 6;
  config.index_n_heads = 4;
  config.index_head_dim = 8;
  config.index_topk = 4;
  config.norm_eps = {1e-5, 1e-5, 1e-6};
  config.rope.theta = 10000;
  config.indexer_rope.dims = 4;
  return config;
}

/// Numbers that look like weights, the same in every run.
struct Numbers {
  unsigned state = 1;
  float next() {
    state = state * 1664525u + 1013904223u;
    return static_cast<float>(state >> 8) / 16777216.0f - 0.5f;
  }
};

/// Owns weights and hands out views, as a checkpoint loader does (io/layer_weights.hpp).
class OwnedWeights {
 public:
  explicit OwnedWeights(ModelConfig const& c) {
    index_t const heads = c.num_attention_heads;
    views.q_a_proj = matrix(c.q_lora_rank, c.hidden_size);
    views.q_a_layernorm = vector(c.q_lora_rank);
    views.q_b_proj = matrix(heads * qk_head_dim(c), c.q_lora_rank);
    views.kv_a_proj = matrix(c.kv_lora_rank + c.qk_rope_head_dim, c.hidden_size);
    views.kv_a_layernorm = vector(c.kv_lora_rank);
    views.kv_b_proj = matrix(heads * (c.qk_nope_head_dim + c.v_head_dim), c.kv_lora_rank);
    views.o_proj = matrix(c.hidden_size, heads * c.v_head_dim);
    auto& indexer = views.indexer.emplace();
    indexer.wq_b = matrix(c.index_n_heads * c.index_head_dim, c.q_lora_rank);
    indexer.wk = matrix(c.index_head_dim, c.hidden_size);
    indexer.k_norm_weight = vector(c.index_head_dim);
    indexer.k_norm_bias = vector(c.index_head_dim);
    indexer.weights_proj = matrix(c.index_n_heads, c.hidden_size);
  }
  AttentionWeights<host, float> views;

 private:
  float const* numbers(index_t count, float offset) {
    auto& values = memory_.emplace_back(static_cast<std::size_t>(count));
    for (float& value : values) value = offset + numbers_.next();
    return values.data();
  }
  MatrixView<host, float> matrix(index_t out, index_t in) {
    return make_dense<host, float const, 2>(numbers(out * in, 0), {out, in});
  }
  VectorView<host> vector(index_t n) {
    return make_dense<host, float const, 1>(numbers(n, 1), {n});
  }
  std::vector<std::vector<float>> memory_;
  Numbers numbers_;
};

/// The caches of one layer of one request.
struct Caches {
  std::vector<bf16> kv, index_keys;
  MutableCacheView<host, Cache> kv_view, index_view;

  explicit Caches(ModelConfig const& c)
      : kv(static_cast<std::size_t>(capacity * (c.kv_lora_rank + c.qk_rope_head_dim))),
        index_keys(static_cast<std::size_t>(capacity * c.index_head_dim)),
        kv_view(make_contiguous_cache<host>(kv.data(), Requests{1}, Keys{capacity},
                                            HeadDim{c.kv_lora_rank + c.qk_rope_head_dim})),
        index_view(make_contiguous_cache<host>(index_keys.data(), Requests{1}, Keys{capacity},
                                               HeadDim{c.index_head_dim})) {}
};

/// All rows of a call see themselves and what is before them. Here their rotary positions and their
/// positions in the request are the same.
Status forward(FrontEnd<EngineProduct> const& front_end, OwnedWeights const& weights,
               Caches& caches, std::vector<float> const& hidden,
               std::vector<position_t> const& positions) {
  HostExec<> const exec;
  ModelConfig const& config = front_end.config;
  Rows const rows{static_cast<index_t>(positions.size())};
  auto const x = make_dense<host, float const, 2>(hidden.data(), {rows.n, config.hidden_size});
  auto const at = make_lengths<host>(positions.data(), rows);

  // memory: one walk to measure, one to carve
  QuerySide<host> queries;
  KeySide<host> keys;
  OutputSide<host> output;
  auto const carve = [&](WorkspaceCarver carver) {
    queries = carve_query_side<host>(carver, config, rows, true, Keep::results);
    keys = carve_key_side<host>(carver, config, rows, true, Keep::results);
    output = carve_output_side<host>(carver, config, rows, Keep::results);
    return carver.size();
  };
  HostMemory const activations(carve(WorkspaceCarver{}));
  carve(WorkspaceCarver(activations.view()));

  // the tokens' keys go to the caches before the rows look at them
  std::vector<position_t> const requests(positions.size(), 0);
  auto const of_request = make_lengths<host>(requests.data(), rows);
  auto const table = make_contiguous_table<host>(Keys{capacity});
  Status status = project_keys(exec, front_end, weights.views, x, at, keys);
  if (status.ok()) status = append_kv(exec, keys, at, of_request, table, caches.kv_view);
  if (status.ok()) {
    status = append_index_keys(exec, front_end, keys, at, of_request, table, caches.index_view);
  }
  if (status.ok()) status = project_queries(exec, front_end, weights.views, x, at, queries);
  if (!status.ok()) return status;

  // the layer
  using Layer = SparseAttentionLayer<ReluDotIndexer<float, Cache>, RadixTopK, EveryLayer,
                                     SparseMla<float, Cache>>;
  Layer const layer{.share = {1}, .shape = shape_of(config, rows, Keys{capacity}), .layer = 0};
  std::vector<position_t> lengths(positions);
  for (position_t& length : lengths) ++length;
  CacheView<host, Cache> const kv = caches.kv_view;
  CacheView<host, Cache> const index_keys = caches.index_view;
  Layer::inputs<host> const in{
      .indexer = indexer_inputs(front_end, queries, index_keys),
      .attention = attention_inputs(front_end, weights.views, queries, kv),
      .batch = {make_lengths<host>(lengths.data(), rows), of_request, table, table},
      .id = {.forward = 1}};
  TopK const top_k{config.index_topk};
  HostMemory const state_memory(SelectionState<host>::size(rows, top_k));
  HostMemory const scratch(*layer.workspace(exec, std::size_t{1} << 20));
  auto state = *SelectionState<host>::make(state_memory.view(), rows, top_k);
  std::vector<float> latent(
      static_cast<std::size_t>(rows.n * config.num_attention_heads * config.kv_lora_rank));
  auto const u = make_output<host>(latent.data(), rows, Heads{config.num_attention_heads},
                                   HeadDim{config.kv_lora_rank});
  status = layer.run(exec, in, state, {u}, scratch.view());
  if (!status.ok()) return status;

  // and out of the module
  auto const latent_view = make_dense<host, float const, 3>(
      latent.data(), {rows.n, config.num_attention_heads, config.kv_lora_rank});
  status = project_output(exec, front_end, weights.views, x, latent_view, output);
  for (index_t row = 0; row < rows.n && status.ok(); ++row) {
    if (positions[static_cast<std::size_t>(row)] < 8) continue;
    std::printf("token %2d attends to", positions[static_cast<std::size_t>(row)]);
    for (index_t j = 0; j < state.selection().counts(row); ++j) {
      std::printf(" %d", state.selection().indices(row, j));
    }
    std::printf(", output %.3f %.3f ..\n", output.output(row, 0), output.output(row, 1));
  }
  return status;
}

std::vector<float> hidden_states(index_t first, index_t count, index_t width) {
  std::vector<float> hidden;
  for (index_t token = first; token < first + count; ++token) {
    Numbers numbers{static_cast<unsigned>(1000 + 77 * token)};
    for (index_t i = 0; i < width; ++i) hidden.push_back(3 * numbers.next());
  }
  return hidden;
}

}  // namespace

int main() {
  auto const front_end = make_front_end(small_model(), LaneBasis::natural, EngineProduct{});
  if (!front_end) return std::printf("refused: %s\n", front_end.error().what), 1;
  ModelConfig const& config = front_end->config;
  OwnedWeights const weights(config);
  Caches caches(config);

  std::vector<position_t> positions(10);
  std::iota(positions.begin(), positions.end(), position_t{0});
  std::printf("prefill\n");
  Status status =
      forward(*front_end, weights, caches, hidden_states(0, 10, config.hidden_size), positions);
  std::printf("decode\n");
  if (status.ok()) {
    status = forward(*front_end, weights, caches, hidden_states(10, 1, config.hidden_size), {10});
  }

  // a cache that another program filled in another basis is refused, not read
  caches.index_view.basis = LaneBasis::hadamard;
  Status const refused =
      forward(*front_end, weights, caches, hidden_states(11, 1, config.hidden_size), {11});
  std::printf("%s: %s\n", name(refused.code), refused.what);
  return status.ok() ? 0 : 1;
}
