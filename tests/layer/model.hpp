// SPDX-License-Identifier: Apache-2.0
#pragma once

#if defined(INDEXSHARE_TEST_CUDA)
#include <indexshare/cuda/append.cuh>
#include <indexshare/cuda/attention.cuh>
#include <indexshare/cuda/indexer.cuh>
#include <indexshare/cuda/selection.cuh>
#include <indexshare/cuda/topk.cuh>
#endif
#include <indexshare/indexshare.hpp>

#include "caches.hpp"
#include "executors.hpp"
#include "memory.hpp"
#include "random.hpp"

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <utility>
#include <vector>

/// @file A small model: the caches of every layer in shuffled pages, and batches of query rows.
/// All numbers are small integers, so that scores are exact and full of ties on every executor.
/// They depend on (layer, request, position) alone: a row brings the same data in every batch.

namespace layer_test {

using namespace indexshare;

using test::space;

constexpr std::size_t to_size(index_t n) { return static_cast<std::size_t>(n); }

enum class Part : std::uint64_t { kv = 1, index_key, query, index_query, head_weight };

/// Integers in [-3, 3] that belong to a token of a layer. An index key starts with 3.5 or 7: its
/// e4m3 scale is then one of two powers of two, and every format holds it exactly.
inline std::vector<float> token_values(Part part, index_t layer, index_t request, index_t position,
                                       index_t count) {
  auto const owner = static_cast<std::uint64_t>(part) * 101u + static_cast<std::uint64_t>(layer);
  test::Random random(owner * 1000003u + static_cast<std::uint64_t>(request * 10007 + position));
  std::vector<float> values(to_size(count));
  for (float& value : values) value = static_cast<float>(random.below(7)) - 3.0f;
  if (part == Part::index_key) values[0] = position % 2 == 0 ? 3.5f : 7.0f;
  return values;
}

inline constexpr Shape small_shape{.rows = 16,
                                   .keys = 40,
                                   .top_k = 6,
                                   .index_heads = 3,
                                   .index_dim = 16,
                                   .heads = 3,
                                   .key_dim = 12,
                                   .value_dim = 8};

/// The widths of published models, which a GPU runs on other kernels than the rest.
inline constexpr Shape published_shape{.rows = 16,
                                       .keys = 40,
                                       .top_k = 6,
                                       .index_heads = 8,
                                       .index_dim = 128,
                                       .heads = 8,
                                       .key_dim = 576,
                                       .value_dim = 512};

// ---- query rows

struct Row {
  position_t request;
  position_t length;
};
using RowList = std::vector<Row>;

/// `count` rows of a request that end at `length`, each with its own causal bound.
inline RowList chunk(position_t request, position_t length, position_t count = 1) {
  RowList rows;
  for (position_t i = 0; i < count; ++i) rows.push_back({request, length - count + 1 + i});
  return rows;
}

inline RowList join(std::vector<RowList> const& parts) {
  RowList rows;
  for (RowList const& part : parts) rows.insert(rows.end(), part.begin(), part.end());
  return rows;
}

/// Tokens that each request of a model holds.
inline std::vector<position_t> const contexts{29, 37, 4, 40};

/// Prefill chunks that start inside their request, one of them below k, and decode rows; not in the
/// order of the requests.
inline RowList mixed_rows() {
  return join({chunk(0, 29, 5), chunk(2, 4, 3), chunk(3, 40), chunk(1, 37)});
}

// ---- the model

/// Page sizes of the caches; 0: contiguous. Unequal, so that a mix-up of the tables shows.
struct Layout {
  index_t index_page = 4;
  index_t kv_page = 8;
  std::uint64_t seed = 1;
};

template <class Query = float, class KeyFormat = format::Plain<float>,
          class KvFormat = format::Plain<float>>
class Model {
 public:
  using Element = Query;
  using Indexer = ReluDotIndexer<Query, KeyFormat>;
  using Sparse = SparseMla<Query, KvFormat>;
  using Dense = DenseMla<Query, KvFormat>;

  /// Index-key caches exist on the full layers of `share` only.
  template <class Share>
  Model(Share const& share, std::int32_t layers, Shape shape_ = small_shape, Layout layout = {},
        KvFormat kv_format = {}, std::vector<position_t> tokens = contexts)
      : shape(shape_), tokens_(std::move(tokens)) {
    for (std::int32_t layer = 0; layer < layers; ++layer) {
      kv_.emplace_back(cache_shape(shape.key_dim, layout.kv_page, layout.seed), kv_format);
      index_keys_.emplace_back();
      if (share_source(share, layer) == layer) {
        index_keys_.back().emplace(
            cache_shape(shape.index_dim, layout.index_page, layout.seed + 100));
      }
      for (index_t request = 0; request < requests(); ++request) {
        for (position_t s = 0; s < tokens_[to_size(request)]; ++s) write(layer, request, s);
      }
    }
  }

  std::int32_t layers() const { return static_cast<std::int32_t>(kv_.size()); }
  index_t requests() const { return static_cast<index_t>(tokens_.size()); }

  auto& kv(std::int32_t layer) { return kv_[to_size(layer)]; }
  bool has_index_keys(std::int32_t layer) const { return index_keys_[to_size(layer)].has_value(); }
  auto& index_keys(std::int32_t layer) { return index_keys_[to_size(layer)].value(); }

  /// The tables of layer 0, in force on all layers.
  PageTable<space> kv_pages() const { return kv_.front().pages(); }
  PageTable<space> index_pages() const {
    for (auto const& cache : index_keys_) {
      if (cache) return cache->pages();
    }
    return {};
  }

  Shape shape;

 private:
  test::CacheShape cache_shape(index_t lanes, index_t page, std::uint64_t seed) const {
    return {requests(), shape.keys, lanes, page, 3, seed};
  }

  void write(std::int32_t layer, index_t request, position_t position) {
    auto const values = [&](Part part, index_t lanes) {
      return token_values(part, layer, request, position, lanes);
    };
    kv(layer).write(request, position, values(Part::kv, shape.key_dim));
    if (has_index_keys(layer)) {
      index_keys(layer).write(request, position, values(Part::index_key, shape.index_dim));
    }
  }

  std::vector<position_t> tokens_;
  std::vector<test::PagedCache<KvFormat>> kv_;
  std::vector<std::optional<test::PagedCache<KeyFormat>>> index_keys_;
};

/// The queries of a batch in one layer.
template <class Query>
struct LayerQueries {
  test::Guarded<Query> q;
  test::Guarded<Query> index_q;
  test::Guarded<float> weights;

  LayerQueries(RowList const& rows, Shape const& shape, std::int32_t layer)
      : q(rows.size() * to_size(shape.heads * shape.key_dim)),
        index_q(rows.size() * to_size(shape.index_heads * shape.index_dim)),
        weights(rows.size() * to_size(shape.index_heads)) {
    for (std::size_t r = 0; r < rows.size(); ++r) {
      fill(q, Part::query, layer, rows, r);
      fill(index_q, Part::index_query, layer, rows, r);
      fill(weights, Part::head_weight, layer, rows, r);
    }
  }

 private:
  template <class T>
  static void fill(test::Guarded<T>& out, Part part, std::int32_t layer, RowList const& rows,
                   std::size_t r) {
    std::size_t const width = out.size() / rows.size();
    auto const values =
        token_values(part, layer, rows[r].request, rows[r].length - 1, static_cast<index_t>(width));
    for (std::size_t i = 0; i < width; ++i) out[r * width + i] = from_float<T>(values[i]);
  }
};

}  // namespace layer_test
