// SPDX-License-Identifier: Apache-2.0
#include <indexshare/indexcache/overlap_counts.hpp>
#include <indexshare/indexcache/overlap_matrix.hpp>
#include <indexshare/share/pattern.hpp>
#include <indexshare/share/periodic.hpp>

#include <nlohmann/json.hpp>

#include <catch2/catch_approx.hpp>
#include <catch2/catch_test_macros.hpp>

#include "selections.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <fstream>
#include <set>
#include <string>
#include <vector>

using Catch::Approx;
using namespace indexshare;
using namespace indexshare::indexcache;
using test::MadeSelections;

namespace {

OverlapCounts counts_of(MadeSelections const& made, OverlapOptions options = {}) {
  OverlapCounter counter(made.layers, options);
  Status const status = counter.add(made.view());
  INFO(status.what);
  REQUIRE(status.ok());
  return counter.counts();
}

std::set<position_t> set_of(MadeSelections const& made, index_t layer, index_t row) {
  std::set<position_t> picks;
  for (index_t i = 0; i < made.top_k; ++i) picks.insert(made.at(layer, row, i));
  picks.erase(no_position);
  return picks;
}

/// The definition, set by set.
struct Expected {
  std::int64_t rows = 0;
  std::int64_t short_rows = 0;
  double random = 0;
  std::vector<double> overlap;  // [layers, layers]
};
Expected by_sets(MadeSelections const& made, bool skip_short) {
  Expected expected;
  expected.overlap.resize(static_cast<std::size_t>(made.layers * made.layers));
  for (index_t row = 0; row < made.rows; ++row) {
    std::vector<std::set<position_t>> sets;
    std::size_t largest = 0;
    for (index_t layer = 0; layer < made.layers; ++layer) {
      sets.push_back(set_of(made, layer, row));
      largest = std::max(largest, sets.back().size());
    }
    bool const is_short = made.lengths.empty()
                              ? largest < static_cast<std::size_t>(made.top_k)
                              : made.lengths[static_cast<std::size_t>(row)] <= made.top_k;
    if (is_short) ++expected.short_rows;
    if (largest == 0 || (skip_short && is_short)) continue;
    ++expected.rows;
    if (!made.lengths.empty()) {
      expected.random += static_cast<double>(largest) / made.lengths[static_cast<std::size_t>(row)];
    }
    for (std::size_t i = 0; i < sets.size(); ++i) {
      for (std::size_t j = 0; j < sets.size(); ++j) {
        std::size_t both = 0;
        for (position_t const position : sets[i]) both += sets[j].count(position);
        std::size_t const larger = std::max<std::size_t>({sets[i].size(), sets[j].size(), 1});
        expected.overlap[i * sets.size() + j] +=
            static_cast<double>(both) / static_cast<double>(larger);
      }
    }
  }
  double const rows = std::max<double>(static_cast<double>(expected.rows), 1);
  for (double& value : expected.overlap) value /= rows;
  expected.random /= rows;
  return expected;
}

void check_by_sets(MadeSelections const& made, bool skip_short) {
  CAPTURE(made.layers, made.rows, made.top_k, skip_short);
  Expected const expected = by_sets(made, skip_short);
  OverlapCounts const counts = counts_of(made, {skip_short});
  CHECK(counts.rows() == expected.rows);
  CHECK(counts.rows_left_out() == made.rows - expected.rows);
  CHECK(counts.short_rows() == expected.short_rows);
  REQUIRE(counts.random_overlap().has_value() == (!made.lengths.empty() && expected.rows > 0));
  if (counts.random_overlap()) {
    CHECK(*counts.random_overlap() == Approx(expected.random).margin(1e-9));
  }
  double furthest = 0;
  for (index_t i = 0; i < made.layers; ++i) {
    for (index_t j = 0; j < made.layers; ++j) {
      double const difference =
          counts.overlap(i, j) - expected.overlap[static_cast<std::size_t>(i * made.layers + j)];
      furthest = std::max(furthest, std::abs(difference));
    }
  }
  CHECK(furthest < 1e-9);
}

/// Layers numbered from 0.
OverlapMatrix matrix_of(std::vector<double> values) {
  std::vector<std::int32_t> layers;
  while (layers.size() * layers.size() < values.size()) {
    layers.push_back(static_cast<std::int32_t>(layers.size()));
  }
  auto matrix = OverlapMatrix::make(layers, values);
  REQUIRE(matrix.has_value());
  return *matrix;
}

/// The heat map of the paper, digitised: 47 layers.
OverlapMatrix published() {
  std::ifstream stream(std::string(INDEXSHARE_TEST_DATA_DIR) + "/indexcache/overlap_30b.json");
  auto const rows = nlohmann::json::parse(stream).get<std::vector<std::vector<double>>>();
  std::vector<double> values;
  for (auto const& row : rows) values.insert(values.end(), row.begin(), row.end());
  return matrix_of(values);
}

std::string const greedy_quarter = "FSFSFSSSSFSSSFSSFFSSFSSFSSSSFSSSFSSSSFSSSSSSSSS";

/// A policy whose full layers are listed.
struct Listed {
  std::vector<std::int32_t> full;

  friend std::int32_t share_source(Listed const& policy, std::int32_t layer) {
    auto const above = std::upper_bound(policy.full.begin(), policy.full.end(), layer);
    return above == policy.full.begin() ? no_source : *(above - 1);
  }
};

/// To three digits, as the paper's numbers are given.
double rounded(double value) { return std::round(value * 1000) / 1000; }

}  // namespace

TEST_CASE("Overlap: counts are those of the sets, for any number of layers") {
  for (bool const skip_short : {false, true}) {
    check_by_sets(test::random_selections(2, 40, 3, 9, false, 1), skip_short);
    check_by_sets(test::random_selections(5, 30, 7, 40, true, 2), skip_short);
    check_by_sets(test::random_selections(65, 9, 24, 300, false, 3), skip_short);
    check_by_sets(test::random_selections(130, 5, 33, 70, true, 4), skip_short);
    check_by_sets(test::random_selections(1, 12, 4, 20, true, 5), skip_short);
  }
}

TEST_CASE("Overlap: a row with more positions than one block of bit sets has") {
  // 1024 bits are a block, 31 blocks a byte of counts: 3 layers of 20000 from 60000 pass both.
  check_by_sets(test::random_selections(3, 2, 20000, 60000, false, 6), false);
  MadeSelections same{2, 1, 70000, {}, {140000}};
  for (int layer = 0; layer < 2; ++layer) {
    for (position_t i = 0; i < 70000; ++i) same.positions.push_back(2 * i);
  }
  CHECK(counts_of(same).overlap(1, 0) == 1);
  CHECK(counts_of(same).random_overlap() == 0.5);
}

TEST_CASE("Overlap: lengths that are not known") {
  for (bool const skip_short : {false, true}) {
    auto made = test::random_selections(4, 40, 5, 12, false, 7);
    made.lengths.clear();
    check_by_sets(made, skip_short);
  }
}

TEST_CASE("Overlap: unequal sizes divide by the larger, an empty row is left out") {
  MadeSelections made{3, 3, 4, {}, {9, 9, 0}};
  made.positions = {-1, 1, -1, 2,  0,  1,  2,  3,  -1, -1, -1, -1,   // layer 0
                    2,  3, 4,  -1, 8,  3,  -1, -1, -1, -1, -1, -1,   // layer 1
                    -1, 8, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1};  // layer 2
  OverlapCounts const counts = counts_of(made);
  CHECK(counts.rows() == 2);
  CHECK(counts.rows_left_out() == 1);
  CHECK(counts.short_rows() == 1);
  CHECK(counts.overlap(0, 1) == Approx((1.0 / 3 + 1.0 / 4) / 2));
  CHECK(counts.overlap(1, 0) == counts.overlap(0, 1));
  CHECK(counts.overlap(0, 2) == 0);
  CHECK(counts.overlap(0, 0) == 1);
  CHECK(counts.overlap(2, 2) == 0.5);  // nothing in the second row
  CHECK(counts.random_overlap() == Approx((3.0 / 9 + 4.0 / 9) / 2));
}

TEST_CASE("Overlap: rows in another order and in several counters give the same numbers") {
  auto const made = test::random_selections(6, 50, 7, 60, true, 8);
  OverlapCounts const whole = counts_of(made);
  OverlapCounts total = counts_of(made.rows_from(33, 17));
  REQUIRE(total.merge(counts_of(made.rows_from(0, 20))).ok());
  REQUIRE(total.merge(counts_of(made.rows_from(20, 13))).ok());
  CHECK(total == whole);
  CHECK(total.rows() > 40);

  OverlapCounts other(5);
  Status const refused = total.merge(other);
  CHECK(refused.code == Errc::bad_shape);
  CHECK(refused.expected == 6);
  CHECK(refused.got == 5);
  CHECK(total == whole);
}

TEST_CASE("Overlap: selections that do not fit are refused") {
  auto const made = test::random_selections(3, 4, 5, 30, false, 9);
  CHECK(OverlapCounter(2).add(made.view()).code == Errc::bad_shape);
  OverlapCounter counter(3);
  LayerSelections wrong = made.view();
  wrong.lengths = make_lengths<Space::host>(made.lengths.data(), Rows{3});
  CHECK(counter.add(wrong).code == Errc::bad_shape);
  wrong = made.view();
  wrong.positions =
      make_strided<Space::host, position_t const, 3>(made.positions.data(), {3, 2, 5}, {20, 10, 2});
  CHECK(counter.add(wrong).code == Errc::bad_stride);

  auto broken = made;
  broken.at(1, 2, 3) = static_cast<position_t>(overlap_context_limit);
  broken.lengths.clear();
  Status const far = counter.add(broken.view());
  CHECK(far.code == Errc::bad_value);
  CHECK(far.layer == 1);
  CHECK(far.got == overlap_context_limit);
  broken = made;
  broken.lengths[0] = -1;
  CHECK(OverlapCounter(3).add(broken.view()).code == Errc::bad_value);

  // A refused row leaves nothing behind that later rows would meet.
  OverlapCounter after(3);
  broken = made;
  broken.at(0, 0, 0) = static_cast<position_t>(overlap_context_limit);
  REQUIRE_FALSE(after.add(broken.view()).ok());
  REQUIRE(after.add(made.view()).ok());
  CHECK(after.counts() == counts_of(made));
}

TEST_CASE("Overlap matrix: values and layer numbers are checked") {
  CHECK(OverlapMatrix::make({0, 1}, {1, 0.5, 0.5}).error().code == Errc::bad_shape);
  CHECK(OverlapMatrix::make({1, 1}, {1, 0.5, 0.5, 1}).error().code == Errc::bad_value);
  Status const value = OverlapMatrix::make({3, 7}, {1, 0.5, 1.5, 1}).error();
  CHECK(value.code == Errc::bad_value);
  CHECK(value.layer == 7);
  CHECK_FALSE(OverlapMatrix::make({0}, {std::nan("")}).has_value());

  OverlapCounts const counts = counts_of(test::random_selections(3, 20, 4, 30, false, 10));
  CHECK(overlap_matrix(counts, {0, 1}).error().code == Errc::bad_shape);
  auto const matrix = overlap_matrix(counts, {2, 5, 6});
  REQUIRE(matrix.has_value());
  CHECK(matrix->at(2, 1) == counts.overlap(2, 1));
  CHECK(matrix->place_of(5) == 1);
  CHECK_FALSE(matrix->place_of(4).has_value());
}

TEST_CASE("Overlap matrix: lags and sources go by layer numbers, gaps included") {
  auto const made = OverlapMatrix::make({0, 2, 3, 6}, {1, 0.1, 0.2, 0.3,  //
                                                       0.1, 1, 0.4, 0.5,  //
                                                       0.2, 0.4, 1, 0.6,  //
                                                       0.3, 0.5, 0.6, 1});
  REQUIRE(made.has_value());
  CHECK_FALSE(summarize_lag(*made, 5).has_value());
  auto const three = summarize_lag(*made, 3);
  REQUIRE(three.has_value());
  CHECK(three->pairs == 2);  // 3 - 0 and 6 - 3
  CHECK(three->mean == Approx(0.4));
  CHECK(three->low == 0.2);
  CHECK(three->high == 0.6);

  // Layer 3 reads from layer 2, layer 6 from layer 5, which was not recorded.
  auto const overlaps = source_overlaps(*made, Pattern<"FSFSSFS">{});
  REQUIRE(overlaps.size() == 1);
  CHECK(overlaps[0].layer == 3);
  CHECK(overlaps[0].source == 2);
  CHECK(overlaps[0].overlap == 0.4);
  CHECK(mean_of(overlaps) == 0.4);
  CHECK_FALSE(mean_of(source_overlaps(*made, Pattern<"FFFFFFF">{})).has_value());
  CHECK_FALSE(summarize_pairs(matrix_of({1})).has_value());
}

TEST_CASE("Overlap matrix: the published heat map") {
  OverlapMatrix const matrix = published();
  REQUIRE(matrix.size() == 47);
  auto const all = summarize_pairs(matrix);
  REQUIRE(all.has_value());
  CHECK(all->pairs == 47 * 46 / 2);
  CHECK(rounded(all->mean) == 0.622);
  CHECK(rounded(all->low) == 0.453);
  CHECK(rounded(all->high) == 0.833);

  struct Lag {
    std::int32_t lag;
    double mean;
  };
  for (Lag const& row :
       {Lag{1, .733}, Lag{2, .716}, Lag{3, .698}, Lag{4, .692}, Lag{5, .669}, Lag{8, .651},
        Lag{12, .626}, Lag{16, .597}, Lag{24, .582}, Lag{32, .581}, Lag{40, .545}, Lag{46, .539}}) {
    CAPTURE(row.lag);
    auto const found = summarize_lag(matrix, row.lag);
    REQUIRE(found.has_value());
    CHECK(rounded(found->mean) == row.mean);
    CHECK(found->pairs == 47 - row.lag);
  }
}

TEST_CASE("Overlap matrix: sources in the published heat map") {
  OverlapMatrix const matrix = published();
  Listed greedy;
  for (std::size_t i = 0; i < greedy_quarter.size(); ++i) {
    if (greedy_quarter[i] == 'F') greedy.full.push_back(static_cast<std::int32_t>(i));
  }
  Listed const best{{0, 2, 3, 7, 10, 16, 18, 22, 27, 31, 37, 44}};
  Periodic const uniform{47, 4, 1};  // full where the layer's number is a multiple of 4
  CHECK(source_overlaps(matrix, greedy).size() == 35);
  CHECK(rounded(mean_of(source_overlaps(matrix, greedy)).value()) == 0.724);
  CHECK(rounded(mean_of(source_overlaps(matrix, uniform)).value()) == 0.712);
  CHECK(rounded(mean_of(source_overlaps(matrix, best)).value()) == 0.742);
}
