// SPDX-License-Identifier: Apache-2.0
#pragma once

#if defined(INDEXSHARE_TEST_CUDA)
#include <indexshare/cuda/indexer.cuh>
#include <indexshare/cuda/topk.cuh>
#endif
#include <indexshare/host/indexer.hpp>
#include <indexshare/host/topk.hpp>
#include <indexshare/indexer/relu_dot.hpp>
#include <indexshare/reference.hpp>
#include <indexshare/select.hpp>

#include <catch2/catch_test_macros.hpp>

#include "caches.hpp"
#include "executors.hpp"
#include "memory.hpp"
#include "oracle.hpp"
#include "random.hpp"

#include <algorithm>
#include <cstddef>
#include <limits>
#include <span>
#include <vector>

/// @file Indexer cases that run on any executor.

namespace test {

inline std::vector<float> one_hot(index_t n, index_t at, float value = 1) {
  std::vector<float> lanes(static_cast<std::size_t>(n), 0.0f);
  lanes[static_cast<std::size_t>(at)] = value;
  return lanes;
}

/// Rounds the values to what an element type holds.
template <class Element>
void round_to(std::vector<float>& values) {
  for (float& value : values) {
    value = indexshare::to_float(indexshare::from_float<Element>(value));
  }
}

/// Query rows against a cache. `q` [rows][heads][lanes] and `w` [rows][heads] as floats; q is
/// rounded to the element type when it is set.
template <class Query, class Format, class Indexer = indexshare::ReluDotIndexer<Query, Format>>
struct IndexerCase {
  using Policy = Indexer;

  index_t heads;
  index_t lanes;
  PagedCache<Format> keys;
  std::vector<float> q{};
  std::vector<float> w{};
  std::vector<position_t> lengths{};
  std::vector<position_t> requests{};

  IndexerCase(index_t head_count, CacheShape shape)
      : heads(head_count), lanes(shape.lanes), keys(shape) {}

  index_t rows() const { return static_cast<index_t>(lengths.size()); }

  void add_row(position_t length, position_t request, std::vector<float> query,
               std::vector<float> weights) {
    REQUIRE(query.size() == static_cast<std::size_t>(heads * lanes));
    REQUIRE(weights.size() == static_cast<std::size_t>(heads));
    round_to<Query>(query);
    q.insert(q.end(), query.begin(), query.end());
    w.insert(w.end(), weights.begin(), weights.end());
    lengths.push_back(length);
    requests.push_back(request);
  }
  void add_random_row(position_t length, position_t request, std::uint64_t seed) {
    Random random(seed);
    auto query = random.normals(static_cast<std::size_t>(heads * lanes));
    add_row(length, request, std::move(query), random.normals(static_cast<std::size_t>(heads)));
  }

  std::span<float const> query(index_t row) const {
    return std::span<float const>(q).subspan(static_cast<std::size_t>(row * heads * lanes),
                                             static_cast<std::size_t>(heads * lanes));
  }
  std::span<float const> weights(index_t row) const {
    return std::span<float const>(w).subspan(static_cast<std::size_t>(row * heads),
                                             static_cast<std::size_t>(heads));
  }
  Sum expected(index_t row, index_t position) const {
    return index_score(query(row), weights(row),
                       keys.value(requests[static_cast<std::size_t>(row)], position));
  }

  indexshare::Shape shape(index_t top_k) const {
    indexshare::Shape shape;
    shape.rows = rows();
    shape.keys = keys.keys();
    shape.top_k = top_k;
    shape.index_heads = heads;
    shape.index_dim = lanes;
    return shape;
  }
};

/// How the inputs of an indexer run lie in memory, in elements.
struct IndexerLayout {
  index_t head_pad = 0;
  index_t row_pad = 0;
  index_t weight_pad = 0;
  index_t length_step = 1;  ///< stride of lengths and requests
  bool head_major = false;  ///< [heads][rows][lanes] in memory
};

/// The memory of an indexer run.
template <class Query, class Format, class Indexer = indexshare::ReluDotIndexer<Query, Format>>
class IndexerInputs {
 public:
  using Case = IndexerCase<Query, Format, Indexer>;

  explicit IndexerInputs(Case const& c, IndexerLayout layout = {})
      : case_(c),
        length_step_(layout.length_step),
        head_stride_(layout.head_major ? c.rows() * c.lanes : c.lanes + layout.head_pad),
        row_stride_(layout.head_major ? c.lanes : c.heads * head_stride_ + layout.row_pad),
        weight_stride_(c.heads + layout.weight_pad),
        q_(static_cast<std::size_t>(std::max(c.rows() * row_stride_, c.heads * head_stride_))),
        w_(static_cast<std::size_t>(c.rows() * weight_stride_)),
        lengths_(static_cast<std::size_t>(c.rows() * length_step_)),
        requests_(static_cast<std::size_t>(c.rows() * length_step_)) {
    for (index_t row = 0; row < c.rows(); ++row) {
      auto const r = static_cast<std::size_t>(row);
      lengths_[static_cast<std::size_t>(row * length_step_)] = c.lengths[r];
      requests_[static_cast<std::size_t>(row * length_step_)] = c.requests[r];
      for (index_t head = 0; head < c.heads; ++head) {
        w_[static_cast<std::size_t>(row * weight_stride_ + head)] =
            c.weights(row)[static_cast<std::size_t>(head)];
        for (index_t lane = 0; lane < c.lanes; ++lane) {
          q_[static_cast<std::size_t>(row * row_stride_ + head * head_stride_ + lane)] =
              indexshare::from_float<Query>(
                  c.query(row)[static_cast<std::size_t>(head * c.lanes + lane)]);
        }
      }
    }
  }

  template <indexshare::Space S = space>
  auto inputs() const {
    using Inputs = typename Case::Policy::template inputs<S>;
    return Inputs{
        indexshare::make_strided<S, Query const, 3>(
            q_.data(), {case_.rows(), case_.heads, case_.lanes}, {row_stride_, head_stride_, 1}),
        indexshare::make_strided<S, float const, 2>(w_.data(), {case_.rows(), case_.heads},
                                                    {weight_stride_, 1}),
        case_.keys.template view<S>()};
  }
  template <indexshare::Space S = space>
  indexshare::RowBatch<S> batch() const {
    auto const rows = [&](Guarded<position_t> const& numbers) {
      return indexshare::make_strided<S, position_t const, 1>(numbers.data(), {case_.rows()},
                                                              {length_step_});
    };
    return {rows(lengths_), rows(requests_), case_.keys.template pages<S>(), {}};
  }

 private:
  Case const& case_;
  index_t length_step_;
  index_t head_stride_;
  index_t row_stride_;
  index_t weight_stride_;
  Guarded<Query> q_;
  Guarded<float> w_;
  Guarded<position_t> lengths_;
  Guarded<position_t> requests_;
};

/// Scores of the rows, as many as each row's length (none for rows that select everything). Checks
/// that nothing at or past a length was written.
template <class X, class Query, class Format, class Policy>
std::vector<std::vector<float>> run_scores(X const& x, IndexerCase<Query, Format, Policy> const& c,
                                           IndexerLayout layout = {}, index_t top_k = 0,
                                           indexshare::RowRange range = {0, -1}) {
  constexpr auto on = X::space;
  if (range.count < 0) range.count = c.rows() - range.first;
  IndexerInputs<Query, Format, Policy> const memory(c, layout);
  indexshare::Shape const shape = c.shape(std::max<index_t>(top_k, 1));
  REQUIRE(
      indexer_check(x, Policy{}, memory.template inputs<on>(), memory.template batch<on>(), shape)
          .ok());
  auto const need = indexer_workspace(x, Policy{}, shape.with_rows(range.count));
  REQUIRE(need.has_value());
  Scratch workspace(*need);
  index_t const stride = shape.keys + 3;
  Guarded<float> scores(static_cast<std::size_t>(range.count * stride), unwritten);
  auto const status = indexer_score(
      x, Policy{}, memory.template inputs<on>(), memory.template batch<on>(), {range, top_k},
      indexshare::make_strided<on, float, 2>(scores.data(), {range.count, shape.keys}, {stride, 1}),
      workspace.get());
  INFO(status.what);
  REQUIRE(status.ok());
  finish(x);
  CHECK((workspace.intact() && scores.intact()));

  auto const blank = unwritten_value<float>();
  std::vector<std::vector<float>> result;
  index_t stray = 0;
  for (index_t i = 0; i < range.count; ++i) {
    index_t const length =
        std::clamp<index_t>(c.lengths[static_cast<std::size_t>(range.first + i)], 0, shape.keys);
    float const* const row = scores.data() + i * stride;
    result.emplace_back(row, row + (length <= top_k ? 0 : length));
    for (index_t s = length; s < stride; ++s) stray += row[s] != blank ? 1 : 0;
  }
  CHECK(stray == 0);  // columns at or past the length
  return result;
}

/// Compares scores with the oracle within the error of fp32 sums.
template <class Query, class Format>
void check_scores(IndexerCase<Query, Format> const& c,
                  std::vector<std::vector<float>> const& scores) {
  REQUIRE(static_cast<index_t>(scores.size()) == c.rows());
  for (index_t row = 0; row < c.rows(); ++row) {
    auto const& got = scores[static_cast<std::size_t>(row)];
    for (std::size_t s = 0; s < got.size(); ++s) {
      Sum const want = c.expected(row, static_cast<index_t>(s));
      double const error = std::abs(static_cast<double>(got[s]) - want.value);
      if (error <= tolerance(c.lanes + c.heads, want.magnitude)) continue;
      INFO("row " << row << ", key " << s << ": " << got[s] << ", expected " << want.value);
      FAIL_CHECK();
      return;
    }
  }
  SUCCEED();
}

/// The whole selection: scores and top-k within `budget` bytes (0: the smallest possible).
template <class X, class Query, class Format, class Policy>
std::vector<Row> run_select(X const& x, IndexerCase<Query, Format, Policy> const& c, index_t top_k,
                            std::size_t budget = std::size_t{1} << 30) {
  constexpr auto on = X::space;
  indexshare::RadixTopK const topk{};
  indexshare::Shape const shape = c.shape(top_k);
  if (budget == 0) {
    auto const refused = select_workspace(x, Policy{}, topk, shape, 0);
    REQUIRE_FALSE(refused.has_value());
    REQUIRE(refused.error().code == indexshare::Errc::workspace_too_small);
    budget = static_cast<std::size_t>(refused.error().expected);
  }
  auto const need = select_workspace(x, Policy{}, topk, shape, budget);
  REQUIRE(need.has_value());
  REQUIRE(need->bytes <= budget);
  Scratch workspace(*need);
  IndexerInputs<Query, Format, Policy> const memory(c);
  Guarded<position_t> indices(static_cast<std::size_t>(c.rows() * top_k), unwritten);
  Guarded<position_t> counts(static_cast<std::size_t>(c.rows()), unwritten);
  auto const out = indexshare::make_selection<on>(
      indices.data(), counts.data(), indexshare::Rows{c.rows()}, indexshare::TopK{top_k});
  REQUIRE(select(x, Policy{}, topk, memory.template inputs<on>(), memory.template batch<on>(),
                 shape, out, workspace.get())
              .ok());
  finish(x);
  CHECK((workspace.intact() && indices.intact() && counts.intact()));
  std::vector<Row> result;
  for (index_t row = 0; row < c.rows(); ++row) {
    position_t const* const first = indices.data() + row * top_k;
    result.push_back({{first, first + top_k}, counts[static_cast<std::size_t>(row)]});
  }
  return result;
}

}  // namespace test
