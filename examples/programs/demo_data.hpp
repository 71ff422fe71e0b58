// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/indexshare.hpp>

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

/// @file Synthetic data of the demo, all from one seed, and the caches it goes into.

namespace programs {

using indexshare::bf16;
using indexshare::index_t;
using indexshare::position_t;
using indexshare::Space;

inline std::size_t at(index_t i) { return static_cast<std::size_t>(i); }

/// A token of a request. The query row of a token sees itself and everything before it.
struct Token {
  position_t request;
  position_t position;
};

/// Numbers that depend only on the seed and on what they are for, so that runs with and without
/// sharing, and rows in any batch, see the same data. The generator is splitmix64.
class RandomStream {
 public:
  enum class Use : std::uint64_t {
    index_key = 1,
    kv,
    index_query,
    head_weight,
    query,
    sink,
    pages,
    hidden,
    task,              // a sequence of examples/small_dsa
    random_selection,  // its control without an indexer
  };

  RandomStream(std::uint64_t seed, Use use, std::int32_t layer, Token token) : state_(seed) {
    for (std::uint64_t const part :
         {static_cast<std::uint64_t>(use), static_cast<std::uint64_t>(layer),
          static_cast<std::uint64_t>(token.request), static_cast<std::uint64_t>(token.position)}) {
      state_ = next() ^ (part * 0xD6E8FEB86659FD93u);
    }
  }

  std::uint64_t next() {
    std::uint64_t z = (state_ += 0x9E3779B97F4A7C15u);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
  }
  /// An integer in [-limit, limit].
  int integer(int limit) {
    auto const span = static_cast<std::uint64_t>(2 * limit + 1);
    return static_cast<int>((next() >> 32) * span >> 32) - limit;
  }
  /// A number in [-1, 1).
  float uniform() { return static_cast<float>(next() >> 40) * 0x1p-23f - 1.0f; }

 private:
  std::uint64_t state_;
};

/// The values. Index queries, index keys and head weights are small integers (weights in 64ths), so
/// every score is exact in fp32 whatever the order of its sums: two back ends must then agree on
/// selections byte for byte, ties included. Attention data are plain random numbers.
class DemoData {
 public:
  DemoData(std::uint64_t seed, indexshare::Shape const& shape) : seed_(seed), shape_(shape) {
    // |score| * 64 <= heads * lanes * limit^2 * 64 must stay below 2^24
    while (limit_ > 1 && shape.index_heads * shape.index_dim * limit_ * limit_ * 64 >= (1 << 24)) {
      --limit_;
    }
  }

  void index_key(std::int32_t layer, Token token, bf16* out) const {
    fill_integers(RandomStream::Use::index_key, layer, token, shape_.index_dim, out);
  }
  void index_query(std::int32_t layer, Token token, bf16* out) const {
    fill_integers(RandomStream::Use::index_query, layer, token,
                  shape_.index_heads * shape_.index_dim, out);
  }
  void head_weights(std::int32_t layer, Token token, float* out) const {
    RandomStream random(seed_, RandomStream::Use::head_weight, layer, token);
    // mostly positive, as in trained models; negative ones make negative scores
    for (index_t h = 0; h < shape_.index_heads; ++h) {
      out[h] = static_cast<float>(random.integer(40) + 24) / 64.0f;
    }
  }
  void kv(std::int32_t layer, Token token, bf16* out) const {
    fill_uniform(RandomStream::Use::kv, layer, token, shape_.key_dim, 1.0f, out);
  }
  void query(std::int32_t layer, Token token, bf16* out) const {
    fill_uniform(RandomStream::Use::query, layer, token, shape_.heads * shape_.key_dim, 4.0f, out);
  }
  std::vector<float> sink(std::int32_t layer) const {
    RandomStream random(seed_, RandomStream::Use::sink, layer, {});
    std::vector<float> values(at(shape_.heads));
    for (float& value : values) value = 4.0f + random.uniform();
    return values;
  }

 private:
  void fill_integers(RandomStream::Use use, std::int32_t layer, Token token, index_t count,
                     bf16* out) const {
    RandomStream random(seed_, use, layer, token);
    for (index_t i = 0; i < count; ++i) {
      out[i] = indexshare::from_float<bf16>(static_cast<float>(random.integer(limit_)));
    }
  }
  void fill_uniform(RandomStream::Use use, std::int32_t layer, Token token, index_t count,
                    float range, bf16* out) const {
    RandomStream random(seed_, use, layer, token);
    for (index_t i = 0; i < count; ++i) {
      out[i] = indexshare::from_float<bf16>(range * random.uniform());
    }
  }

  std::uint64_t seed_;
  indexshare::Shape shape_;
  int limit_ = 3;
};

/// Page table of all requests: pages of 64 tokens, handed out in shuffled order.
template <class Machine>
class Pages {
 public:
  static constexpr index_t page_size = 64;

  Pages(std::uint64_t seed, index_t requests, index_t keys)
      : requests_(requests),
        per_request_((keys + page_size - 1) / page_size),
        table_(at(requests * per_request_)) {
    for (std::size_t i = 0; i < table_.size(); ++i) table_[i] = static_cast<position_t>(i);
    RandomStream random(seed, RandomStream::Use::pages, 0, {});
    for (std::size_t i = table_.size(); i > 1; --i) {
      std::swap(table_[i - 1], table_[random.next() % i]);
    }
  }

  index_t count() const { return requests_ * per_request_; }
  index_t keys() const { return per_request_ * page_size; }
  template <Space S>
  indexshare::PageTable<S> table() const {
    return indexshare::make_page_table<S>(table_.data(), indexshare::Requests{requests_},
                                          indexshare::Pages{per_request_},
                                          indexshare::PageSize{page_size});
  }

 private:
  index_t requests_;
  index_t per_request_;
  typename Machine::template Vector<position_t> table_;
};

/// The caches of one layer.
template <class Machine>
class LayerCaches {
  template <class T>
  using Vector = typename Machine::template Vector<T>;

 public:
  LayerCaches(Machine const& machine, Pages<Machine> const& pages, indexshare::Shape const& shape)
      : machine_(machine),
        pages_(&pages),
        shape_(shape),
        keys_(at(pages.count() * pages.page_size * shape.index_dim)),
        kv_(at(pages.count() * pages.page_size * shape.key_dim)) {}

  template <Space S>
  auto keys() const {
    return view<S>(keys_.data(), shape_.index_dim);
  }
  template <Space S>
  auto kv() const {
    return view<S>(kv_.data(), shape_.key_dim);
  }

  /// Appends the index keys and KV rows of `tokens`, as an engine does before it runs the layer.
  indexshare::Status append(DemoData const& data, std::int32_t layer,
                            std::vector<Token> const& tokens) {
    index_t const count = static_cast<index_t>(tokens.size());
    Vector<position_t> positions, requests;
    Vector<bf16> key_rows(at(count * shape_.index_dim));
    Vector<bf16> kv_rows(at(count * shape_.key_dim));
    for (index_t i = 0; i < count; ++i) {
      positions.push_back(tokens[at(i)].position);
      requests.push_back(tokens[at(i)].request);
      data.index_key(layer, tokens[at(i)], key_rows.data() + i * shape_.index_dim);
      data.kv(layer, tokens[at(i)], kv_rows.data() + i * shape_.key_dim);
    }
    constexpr Space space = Machine::space;
    auto const append = [&](Vector<bf16> const& rows, index_t lanes, Vector<bf16>& cache) {
      indexshare::Status const status =
          append_rows(machine_.exec(),
                      indexshare::make_dense<space, bf16 const, 2>(rows.data(), {count, lanes}),
                      indexshare::make_lengths<space>(positions.data(), {count}),
                      indexshare::make_lengths<space>(requests.data(), {count}),
                      pages_->template table<space>(), view<space>(cache.data(), lanes));
      machine_.finish();  // before the rows go
      return status;
    };
    indexshare::Status const status = append(key_rows, shape_.index_dim, keys_);
    return status.ok() ? append(kv_rows, shape_.key_dim, kv_) : status;
  }

 private:
  template <Space S, class T>
  auto view(T* data, index_t lanes) const {
    return indexshare::make_paged_cache<S>(data, indexshare::Pages{pages_->count()},
                                           indexshare::PageSize{pages_->page_size},
                                           indexshare::HeadDim{lanes});
  }

  Machine machine_;
  Pages<Machine> const* pages_;
  indexshare::Shape shape_;
  Vector<bf16> keys_;
  Vector<bf16> kv_;
};

/// One forward: what it is called and its query rows.
struct Phase {
  std::string name;
  std::vector<Token> rows;
  /// On a draft step that reuses: the row of the round's first step behind each row.
  std::vector<position_t> source_rows{};
};

/// Lengths, requests and pages of a phase's rows.
template <class Machine>
class BatchRows {
 public:
  BatchRows(std::vector<Token> const& rows, Pages<Machine> const& pages) : pages_(&pages) {
    for (Token const& row : rows) {
      lengths_.push_back(row.position + 1);
      requests_.push_back(row.request);
    }
  }

  template <Space S>
  indexshare::RowBatch<S> view() const {
    indexshare::Rows const rows{static_cast<index_t>(lengths_.size())};
    auto const table = pages_->template table<S>();
    return {indexshare::make_lengths<S>(lengths_.data(), rows),
            indexshare::make_lengths<S>(requests_.data(), rows), table, table};
  }

 private:
  Pages<Machine> const* pages_;
  typename Machine::template Vector<position_t> lengths_;
  typename Machine::template Vector<position_t> requests_;
};

/// The query side of one layer and phase.
template <class Machine>
struct RowInputs {
  typename Machine::template Vector<bf16> index_queries;
  typename Machine::template Vector<float> head_weights;
  typename Machine::template Vector<bf16> queries;
  typename Machine::template Vector<float> sink;  ///< empty: none

  RowInputs(DemoData const& data, indexshare::Shape const& shape, std::int32_t layer,
            std::vector<Token> const& rows, bool with_sink)
      : index_queries(rows.size() * at(shape.index_heads * shape.index_dim)),
        head_weights(rows.size() * at(shape.index_heads)),
        queries(rows.size() * at(shape.heads * shape.key_dim)) {
    for (std::size_t i = 0; i < rows.size(); ++i) {
      data.index_query(layer, rows[i],
                       index_queries.data() + i * at(shape.index_heads * shape.index_dim));
      data.head_weights(layer, rows[i], head_weights.data() + i * at(shape.index_heads));
      data.query(layer, rows[i], queries.data() + i * at(shape.heads * shape.key_dim));
    }
    if (!with_sink) return;
    std::vector<float> const logits = data.sink(layer);
    sink.assign(logits.begin(), logits.end());
  }
};

}  // namespace programs
