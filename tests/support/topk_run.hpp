// SPDX-License-Identifier: Apache-2.0
#pragma once

#if defined(INDEXSHARE_TEST_CUDA)
#include <indexshare/cuda/topk.cuh>
#endif
#include <indexshare/host/topk.hpp>
#include <indexshare/reference.hpp>
#include <indexshare/topk/radix.hpp>

#include <catch2/catch_test_macros.hpp>

#include "executors.hpp"
#include "memory.hpp"
#include "oracle.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <vector>

/// @file Top-k cases that run on any executor.

namespace test {

/// Rows of scores. A row may hold fewer scores than the matrix is wide: what follows is poison.
struct TopKCase {
  index_t k = 1;
  index_t width = 0;
  std::vector<std::vector<float>> rows;
  std::vector<position_t> lengths;

  TopKCase(index_t top_k, index_t keys) : k(top_k), width(keys) {}

  /// One row whose length is the number of its scores.
  static TopKCase one_row(index_t top_k, std::vector<float> scores) {
    TopKCase c(top_k, static_cast<index_t>(scores.size()));
    c.add(std::move(scores));
    return c;
  }
  void add(std::vector<float> scores) {
    auto const length = static_cast<position_t>(scores.size());
    add(std::move(scores), length);
  }
  void add(std::vector<float> scores, position_t length) {
    rows.push_back(std::move(scores));
    lengths.push_back(length);
  }
};

/// How the views of a run lie in memory.
struct TopKLayout {
  index_t score_pad = 0;   ///< elements between score rows
  index_t index_pad = 0;   ///< entries between selection rows
  index_t count_step = 1;  ///< stride of counts and lengths
};

/// Runs the case and returns its rows. Checks that nothing outside the outputs was written; under
/// the address sanitizer also that no score was read that the contract calls unread.
template <class Score = float, class X>
std::vector<Row> run_topk(X const& x, TopKCase const& c, TopKLayout layout = {}) {
  using indexshare::make_strided;
  constexpr auto on = X::space;
  auto const size = [](index_t n) { return static_cast<std::size_t>(n); };
  auto const rows = static_cast<index_t>(c.rows.size());
  index_t const score_stride = c.width + layout.score_pad;
  index_t const index_stride = c.k + layout.index_pad;

  Guarded<Score> scores(size(rows * score_stride));
  Guarded<position_t> indices(size(rows * index_stride), unwritten);
  Guarded<position_t> counts(size(rows * layout.count_step), unwritten);
  Guarded<position_t> lengths(size(rows * layout.count_step), unwritten);
  for (index_t r = 0; r < rows; ++r) {
    auto const& row = c.rows[size(r)];
    index_t const given = static_cast<index_t>(row.size());
    lengths[size(r * layout.count_step)] = c.lengths[size(r)];
    Score* const out = scores.data() + r * score_stride;
    for (index_t s = 0; s < score_stride; ++s) {  // unread columns alternate: huge, NaN
      float const poison = s % 2 == 0 ? 1e30f : std::numeric_limits<float>::quiet_NaN();
      out[s] = indexshare::from_float<Score>(s < given ? row[size(s)] : poison);
    }
    index_t const length = std::clamp<index_t>(c.lengths[size(r)], 0, c.width);
    index_t const readable = length <= c.k ? 0 : length;
    forbid(out + readable, size(score_stride - readable) * sizeof(Score));
  }

  indexshare::Shape shape;
  shape.rows = rows;
  shape.keys = c.width;
  shape.top_k = c.k;
  auto const need = topk_workspace(x, indexshare::RadixTopK{}, shape);
  REQUIRE(need.has_value());
  Scratch workspace(*need);
  indexshare::SelectionView<on> const out{
      make_strided<on, position_t, 2>(indices.data(), {rows, c.k}, {index_stride, 1}),
      make_strided<on, position_t, 1>(counts.data(), {rows}, {layout.count_step})};
  auto const status = topk_select(
      x, indexshare::RadixTopK{},
      make_strided<on, Score const, 2>(scores.data(), {rows, c.width}, {score_stride, 1}),
      make_strided<on, position_t const, 1>(lengths.data(), {rows}, {layout.count_step}), out,
      workspace.get());
  allow(scores.data(), scores.bytes());
  INFO(status.what);
  REQUIRE(status.ok());
  finish(x);
  CHECK(workspace.intact());
  CHECK((indices.intact() && counts.intact() && scores.intact()));

  std::vector<Row> result(size(rows));
  auto const blank = unwritten_value<position_t>();
  index_t stray = 0;
  for (index_t r = 0; r < rows; ++r) {
    result[size(r)].count = counts[size(r * layout.count_step)];
    for (index_t i = 0; i < index_stride; ++i) {
      position_t const entry = indices[size(r * index_stride + i)];
      if (i < c.k) {
        result[size(r)].indices.push_back(entry);
      } else {
        stray += entry != blank ? 1 : 0;
      }
    }
    for (index_t i = 1; i < layout.count_step; ++i) {
      stray += counts[size(r * layout.count_step + i)] != blank ? 1 : 0;
    }
  }
  CHECK(stray == 0);  // canaries between rows
  return result;
}

/// What the case must give; scores rounded to the element type first.
template <class Score = float>
std::vector<Row> expected_topk(TopKCase const& c) {
  using indexshare::to_float;
  std::vector<Row> result;
  for (std::size_t r = 0; r < c.rows.size(); ++r) {
    std::vector<float> scores = c.rows[r];
    for (float& score : scores) {
      score = to_float(indexshare::from_float<Score>(score));
    }
    index_t const length = std::clamp<index_t>(c.lengths[r], 0, c.width);
    if (length <= c.k) scores.assign(static_cast<std::size_t>(length), 0.0f);
    result.push_back(select_by_sort(scores, length, c.k));
  }
  return result;
}

inline void check_rows(std::vector<Row> const& expected, std::vector<Row> const& got) {
  REQUIRE(expected.size() == got.size());
  for (std::size_t r = 0; r < got.size(); ++r) {
    if (expected[r] == got[r]) continue;
    INFO("row " << r << ": " << difference(expected[r], got[r]));
    FAIL_CHECK();
  }
  SUCCEED();
}

/// Runs and compares with the sort.
template <class Score = float, class X>
void check_topk(X const& x, TopKCase const& c, TopKLayout layout = {}) {
  INFO("k " << c.k << ", width " << c.width << ", rows " << c.rows.size() << ", first length "
            << (c.lengths.empty() ? -1 : c.lengths[0]));
  check_rows(expected_topk<Score>(c), run_topk<Score>(x, c, layout));
}

}  // namespace test
