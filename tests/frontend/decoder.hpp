// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "caches.hpp"
#include "frontend_model.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <optional>
#include <span>
#include <utility>
#include <vector>

/// @file One full layer of one request, from hidden states to the module's output: front end,
/// caches in shuffled pages, SparseAttentionLayer, and back.

namespace frontend_test {

/// Everything that one call brings, to be spoilt by a test before it runs.
struct Chunk {
  Tokens tokens;
  Activations sides;
  std::vector<position_t> positions{};  ///< in the request, not the rotary ones
  std::vector<position_t> requests{};
  std::vector<position_t> lengths{};

  Chunk(ModelConfig const& config, index_t first, index_t count, Keep keep = Keep::results)
      : tokens(config, first, count), sides(config, count, true, keep) {
    for (index_t t = 0; t < count; ++t) {
      positions.push_back(static_cast<position_t>(first + t));
      requests.push_back(0);
      lengths.push_back(static_cast<position_t>(first + t + 1));
    }
  }
  Rows rows() const { return {tokens.count()}; }
};

/// What a row came to.
struct RowResult {
  std::vector<position_t> selected;
  std::vector<float> latent;     ///< [heads, latent] output of the layer
  std::vector<float> attention;  ///< [heads, v], gated where the model gates
  std::vector<float> output;     ///< [hidden]
};
inline bool same_bits(std::vector<RowResult> const& a, std::vector<RowResult> const& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](auto const& x, auto const& y) {
    return x.selected == y.selected && bits_of(x.latent) == bits_of(y.latent) &&
           bits_of(x.attention) == bits_of(y.attention) && bits_of(x.output) == bits_of(y.output);
  });
}

/// @tparam Stored  element of both caches
template <class X, class Stored = float, class T = float, class Product = PlainProduct>
class Decoder {
 public:
  using Format = format::Plain<Stored>;
  using Indexer = ReluDotIndexer<float, Format>;
  using Layer = SparseAttentionLayer<Indexer, RadixTopK, EveryLayer, SparseMla<float, Format>>;

  Decoder(X exec, FrontEnd<Product> recipe, AttentionWeights<host, T> layer_weights, index_t keys)
      : x(std::move(exec)),
        front_end(std::move(recipe)),
        weights(layer_weights),
        shape(shape_of(front_end.config, Rows{keys}, Keys{keys})),
        index_cache_({1, keys, shape.index_dim, 4, 3, 11}),
        kv_cache_({1, keys, shape.key_dim, 8, 1, 12}),
        state_memory_(SelectionState<host>::size(Rows{keys}, TopK{shape.top_k})),
        state_(*SelectionState<host>::make(state_memory_.get(), Rows{keys}, TopK{shape.top_k})) {}

  /// Runs the next `count` tokens in one call of everything.
  void run(index_t count, Keep keep = Keep::results) {
    Chunk chunk(front_end.config, static_cast<index_t>(rows.size()), count, keep);
    require_ok(project(chunk));
    require_ok(append(chunk));
    test::Guarded<float> latent(to_size(count * shape.heads * shape.value_dim), test::unwritten);
    require_ok(attend(chunk, latent));
    auto const out = make_output<host>(latent.data(), chunk.rows(), Heads{shape.heads},
                                       HeadDim{shape.value_dim});
    require_ok(project_output(x, front_end, weights, chunk.tokens.hidden(), detail::read_only(out),
                              chunk.sides.outputs.side));
    CHECK((chunk.sides.intact() && latent.intact() && index_cache_.memory().intact() &&
           kv_cache_.memory().intact()));
    keep_results(chunk, out);
  }

  Status project(Chunk& chunk) {
    auto const hidden = chunk.tokens.hidden();
    auto const positions = chunk.tokens.positions();
    Status const status =
        project_queries(x, front_end, weights, hidden, positions, chunk.sides.queries.side);
    return status.ok()
               ? project_keys(x, front_end, weights, hidden, positions, chunk.sides.keys.side)
               : status;
  }
  Status append(Chunk& chunk) {
    auto const positions = make_lengths<host>(chunk.positions.data(), chunk.rows());
    auto const requests = make_lengths<host>(chunk.requests.data(), chunk.rows());
    Status const status = append_index_keys(x, front_end, chunk.sides.keys.side, positions,
                                            requests, index_cache_.pages(), index_keys());
    return status.ok() ? append_kv(x, chunk.sides.keys.side, positions, requests, kv_cache_.pages(),
                                   writable(kv_cache_))
                       : status;
  }
  /// `spoil` changes the layer's inputs.
  template <class Spoil>
  Status attend(Chunk& chunk, test::Guarded<float>& latent, Spoil const& spoil) {
    Layer layer;
    layer.share = {1};
    layer.shape = shape;
    typename Layer::template inputs<host> in{
        indexer_inputs(front_end, chunk.sides.queries.side, reader(index_keys())),
        attention_inputs(front_end, weights, chunk.sides.queries.side, reader(writable(kv_cache_))),
        {make_lengths<host>(chunk.lengths.data(), chunk.rows()),
         make_lengths<host>(chunk.requests.data(), chunk.rows()), index_cache_.pages(),
         kv_cache_.pages()},
        {.forward = ++forwards_}};
    spoil(in);
    test::Scratch scratch(*layer.workspace(x, std::size_t{1} << 24));
    return layer.run(x, in, state_,
                     {make_output<host>(latent.data(), chunk.rows(), Heads{shape.heads},
                                        HeadDim{shape.value_dim})},
                     scratch.get());
  }
  Status attend(Chunk& chunk, test::Guarded<float>& latent) {
    return attend(chunk, latent, [](auto&) {});
  }

  /// The index-key cache, marked with the basis that it is filled in.
  MutableCacheView<host, Format> index_keys() {
    auto view = writable(index_cache_);
    view.basis = index_basis.value_or(front_end.index_basis);
    return view;
  }
  /// The stored rows of the first tokens, as a reader gets them: [tokens, lanes].
  std::vector<float> stored_kv() { return stored(kv_cache_); }
  std::vector<float> stored_index_keys() { return stored(index_cache_); }

  X x;
  FrontEnd<Product> front_end;
  AttentionWeights<host, T> weights;
  Shape shape;
  std::vector<RowResult> rows{};              ///< of all tokens so far
  std::vector<std::vector<float>> queries{};  ///< of all tokens so far, [heads, nope + rope]
  std::optional<LaneBasis> index_basis{};     ///< what the cache claims instead

 private:
  using Cache = test::PagedCache<Format>;

  static MutableCacheView<host, Format> writable(Cache& cache) {
    return make_paged_cache<host>(cache.memory().data(), Pages{cache.slots() / cache.page_size()},
                                  PageSize{cache.page_size()}, HeadDim{cache.lanes()});
  }
  static CacheView<host, Format> reader(MutableCacheView<host, Format> const& cache) {
    return cache;
  }
  std::vector<float> stored(Cache& cache) {
    std::vector<float> lanes(rows.size() * to_size(cache.lanes()));
    for (std::size_t t = 0; t < rows.size(); ++t) {
      decode_row(reader(writable(cache)), cache.slot(0, static_cast<index_t>(t)),
                 lanes.data() + t * to_size(cache.lanes()));
    }
    return lanes;
  }
  void keep_results(Chunk& chunk, OutputView<host, float> const& latent) {
    auto const selection = state_.selection();
    auto const& queries_side = chunk.sides.queries.side;
    auto const& outputs = chunk.sides.outputs.side;
    index_t const nope = front_end.config.qk_nope_head_dim;
    for (index_t r = 0; r < chunk.rows().n; ++r) {
      auto const row = [&](auto const& view) { return values(rows_of(view, r, 1)); };
      RowResult result;
      for (position_t j = 0; j < selection.counts(r); ++j) {
        result.selected.push_back(selection.indices(r, j));
      }
      result.latent = row(latent);
      result.attention = row(outputs.gated);
      result.output = row(outputs.output);
      rows.push_back(std::move(result));
      // as attention in the expanded form wants them: nope before absorption, rotated lanes
      auto query = row(queries_side.q);
      auto const rotated = row(queries_side.q_rope(front_end.config));
      index_t const rope = front_end.config.qk_rope_head_dim;
      for (index_t h = 0; h < shape.heads; ++h) {
        std::copy_n(rotated.begin() + h * rope, rope, query.begin() + h * (nope + rope) + nope);
      }
      queries.push_back(std::move(query));
    }
  }

  Cache index_cache_;
  Cache kv_cache_;
  test::Scratch state_memory_;
  SelectionState<host> state_;
  std::int64_t forwards_ = 0;
};

}  // namespace frontend_test
