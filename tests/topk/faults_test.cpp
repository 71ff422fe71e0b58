// SPDX-License-Identifier: Apache-2.0
//
// Faults that were reported for other implementations, by kind and number of the fault log.
#if defined(INDEXSHARE_TEST_CUDA)
#include <indexshare/cuda/selection.cuh>
#endif
#include <indexshare/host/selection.hpp>
#include <indexshare/host/topk.hpp>
#include <indexshare/reference.hpp>

#include <catch2/catch_template_test_macros.hpp>
#include <catch2/catch_test_macros.hpp>

#include "huge.hpp"
#include "random.hpp"
#include "topk_run.hpp"
#include "vectors.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <thread>
#include <vector>

using test::check_rows;
using test::check_topk;
using test::index_t;
using test::position_t;
using test::Random;
using test::Row;
using test::run_topk;
using test::TopKCase;

namespace {

using test::space;
constexpr float infinity = std::numeric_limits<float>::infinity();

/// A row from a list in any order, -1 for empty entries.
Row row_of(std::vector<position_t> list) {
  auto const end = std::remove(list.begin(), list.end(), -1);
  Row row;
  row.count = static_cast<position_t>(end - list.begin());
  std::sort(list.begin(), end);
  std::fill(end, list.end(), -1);
  row.indices = std::move(list);
  return row;
}

/// `positive` random scores, the rest exact zeros, in random places.
std::vector<float> relu_row(std::size_t n, std::size_t positive, std::uint64_t seed) {
  Random random(seed);
  std::vector<float> scores(n, 0.0f);
  for (std::size_t i = 0; i < positive; ++i) scores[i] = random.uniform(0.1f, 2.0f);
  random.shuffle(scores);
  return scores;
}

}  // namespace

TEMPLATE_LIST_TEST_CASE("LEN R053: vector V06, negative scores beat padding", "[topk][fault]",
                        test::Executors) {
  auto const v = test::fault_vector("V06_negative_scores");
  auto const scores = v.at("scores").get<std::vector<float>>();
  auto const length = v.at("len").get<position_t>();
  TopKCase two(v.at("k"), static_cast<index_t>(scores.size()));
  two.add(scores, length);
  check_rows({row_of(v.at("expect"))}, run_topk(TestType{}, two));
  TopKCase four(4, static_cast<index_t>(scores.size()));
  four.add(scores, length);
  check_rows({row_of(v.at("k4"))}, run_topk(TestType{}, four));
}

TEMPLATE_LIST_TEST_CASE("LEN R074: vector V08, a stale tail never wins", "[topk][fault]",
                        test::Executors) {
  auto const v = test::fault_vector("V08_stale_tail");
  auto const scores = v.at("scores").get<std::vector<float>>();
  TopKCase c(v.at("k"), static_cast<index_t>(scores.size()));
  c.add(scores, v.at("len"));
  Row const want = row_of(v.at("expect").at(0));
  CHECK(want.count == v.at("expect").at(1));
  check_rows({want}, run_topk(TestType{}, c));

  for (position_t length = 0; length <= 16; ++length) {  // one token more per step
    TopKCase step(8, 16);
    step.add(scores, length);
    check_topk(TestType{}, step);
  }
}

TEMPLATE_LIST_TEST_CASE("LEN R073: vector V08b, lengths below zero and above the row",
                        "[topk][fault]", test::Executors) {
  auto const v = test::fault_vector("V08b_lengths");
  TopKCase c(2, 3);
  std::vector<Row> want;
  for (auto const& [length, expected] : v.items()) {
    c.add({3.0f, 1.0f, 2.0f}, static_cast<position_t>(std::stoi(length)));
    want.push_back(row_of(expected.at(0)));
    CHECK(want.back().count == expected.at(1));
  }
  check_rows(want, run_topk(TestType{}, c));

  TopKCase extremes(4, 9);
  for (position_t const length : {-1, 0, 1, 9, 14, std::numeric_limits<position_t>::max(),
                                  std::numeric_limits<position_t>::min()}) {
    extremes.add(Random(6).normals(9), length);
  }
  check_topk(TestType{}, extremes);
  CHECK(run_topk(TestType{}, extremes).back().count == 0);
}

TEMPLATE_LIST_TEST_CASE("TIE R058: vector V09, zeros fill up by the smallest index",
                        "[topk][fault]", test::Executors) {
  auto const v = test::fault_vector("V09_plateau");
  std::vector<float> scores(v.at("len"), 0.0f);
  for (auto const& [position, score] : v.at("positive").items()) {
    scores[std::stoul(position)] = static_cast<float>(score);
  }
  check_rows({row_of(v.at("expect_score_order"))},
             run_topk(TestType{}, TopKCase::one_row(v.at("k"), scores)));

  // the report's size: 100 positive scores, 8220 zeros
  check_topk(TestType{}, TopKCase::one_row(2048, relu_row(8320, 100, 58)));

  std::vector<float> infinite(40, 1.0f);
  infinite[21] = infinite[33] = infinity;
  check_rows({row_of({21, 33})}, run_topk(TestType{}, TopKCase::one_row(2, infinite)));
  check_topk(TestType{}, TopKCase::one_row(16, infinite));
}

TEMPLATE_LIST_TEST_CASE("NANINF R063: vector V10, NaN is below every number", "[topk][fault]",
                        test::Executors) {
  auto const v = test::fault_vector("V10_nan");
  index_t const k = v.at("k");
  for (std::uint32_t const bits : {0x7FC00000u, 0xFFC00000u, 0x7F800001u, 0xFFFFFFFFu}) {
    std::vector<float> scores(8, std::bit_cast<float>(bits));
    TopKCase all_nan = TopKCase::one_row(k, scores);
    check_rows({row_of({0, 1, 2, 3})}, run_topk(TestType{}, all_nan));
    scores[6] = 1;
    scores[7] = 2;
    check_rows({row_of(v.at("expect_if_nan_lowest"))},
               run_topk(TestType{}, TopKCase::one_row(k, scores)));
  }
}

TEMPLATE_LIST_TEST_CASE("TOPK-OVERFLOW R054: thousands of candidates in one coarse bucket",
                        "[topk][fault]", test::Executors) {
  for (std::size_t const n : {4097u, 8192u, 16385u}) {
    auto const place = Random(n).permutation<std::uint32_t>(n);
    std::vector<float> scores(n);
    std::vector<position_t> largest;
    for (std::size_t s = 0; s < n; ++s) {
      scores[s] = 1.0f + static_cast<float>(place[s]) * 0x1p-23f;
      if (place[s] >= n - 64) largest.push_back(static_cast<position_t>(s));
    }
    check_rows({row_of(largest)}, run_topk(TestType{}, TopKCase::one_row(64, scores)));
  }
}

TEMPLATE_LIST_TEST_CASE("TOPK-OVERFLOW R055: around 16384 candidates, values compared exactly",
                        "[topk][fault]", test::Executors) {
  for (std::size_t const n : {16383u, 16384u, 16385u}) {
    Random random(n);
    std::vector<float> scores(n);
    for (float& score : scores) score = random.uniform(1.0f, 1.245f);
    auto const row = run_topk(TestType{}, TopKCase::one_row(2048, scores))[0];
    std::vector<float> chosen;
    for (position_t const s : row.indices) chosen.push_back(scores[static_cast<std::size_t>(s)]);
    std::sort(chosen.begin(), chosen.end(), std::greater<>());
    std::sort(scores.begin(), scores.end(), std::greater<>());
    scores.resize(2048);
    CHECK(chosen == scores);
  }
}

TEMPLATE_LIST_TEST_CASE("TOPK-OVERFLOW R056: monotone rows, up and down", "[topk][fault]",
                        test::Executors) {
  for (std::size_t const n : {16384u, 16448u, 20000u}) {
    std::vector<float> up(n);
    for (std::size_t s = 0; s < n; ++s) up[s] = static_cast<float>(s);
    std::vector<float> const down(up.rbegin(), up.rend());
    TopKCase c(16, static_cast<index_t>(n));
    c.add(up);
    c.add(down);
    auto const rows = run_topk(TestType{}, c);
    for (position_t j = 0; j < 16; ++j) {
      CHECK(rows[0].indices[static_cast<std::size_t>(j)] == static_cast<position_t>(n) - 16 + j);
      CHECK(rows[1].indices[static_cast<std::size_t>(j)] == j);
    }
  }
}

TEMPLATE_LIST_TEST_CASE("TOPK-OVERFLOW R067: scores that differ in the last ten bits only",
                        "[topk][fault]", test::Executors) {
  Random random(67);
  std::vector<float> scores(5000);
  for (float& score : scores) {
    score = std::bit_cast<float>(0x3F900000u | static_cast<std::uint32_t>(random.below(1024)));
  }
  check_topk(TestType{}, TopKCase::one_row(2048, scores));
  for (float& score : scores) score = -score;
  check_topk(TestType{}, TopKCase::one_row(2048, scores));
}

TEMPLATE_LIST_TEST_CASE("RACE R057: tie-heavy rows, repeated", "[topk][fault]", test::Executors) {
  TopKCase c(100, 700);
  for (std::uint64_t seed = 0; seed < 4; ++seed) c.add(relu_row(700, 30 * seed, seed));
  auto const want = test::expected_topk(c);
  for (int repeat = 0; repeat < 100; ++repeat) {
    if (run_topk(TestType{}, c) != want) FAIL("repeat " << repeat);
  }
}

TEMPLATE_LIST_TEST_CASE("TIE R059: a plateau of zeros is cut the same way in every replay",
                        "[topk][fault]", test::Executors) {
  TopKCase c(32, 300);
  for (std::uint64_t seed = 0; seed < 64; ++seed) c.add(relu_row(300, 10, seed));
  auto const want = test::expected_topk(c);
  for (int replay = 0; replay < 25; ++replay) {
    auto const order =
        Random(static_cast<std::uint64_t>(replay)).permutation<std::size_t>(c.rows.size());
    TopKCase shuffled(32, 300);
    std::vector<Row> moved;
    for (std::size_t const r : order) {
      shuffled.add(c.rows[r]);
      moved.push_back(want[r]);
    }
    check_rows(moved, run_topk(TestType{}, shuffled));
    auto const one = static_cast<std::size_t>(replay);
    check_rows({want[one]}, run_topk(TestType{}, TopKCase::one_row(32, c.rows[one])));
  }
}

#if !defined(INDEXSHARE_TEST_CUDA)
TEST_CASE("TIE R060: replicated indexers agree byte for byte", "[topk][fault]") {
  TopKCase c(48, 400);
  for (std::uint64_t seed = 0; seed < 16; ++seed) c.add(relu_row(400, 3 * seed, seed));
  auto const want = test::expected_topk(c);
  check_rows(want, run_topk(indexshare::ReferenceExec{}, c));
  check_rows(want, run_topk(test::Serial{}, c));
  check_rows(want, run_topk(test::Threads{}, c));

  // two ranks at the same time, each with its own memory; no Catch2 assertions on threads
  index_t const rows = static_cast<index_t>(c.rows.size());
  test::Guarded<float> scores(static_cast<std::size_t>(rows * c.width));
  test::Guarded<position_t> const lengths{std::span<position_t const>(c.lengths)};
  for (std::size_t r = 0; r < c.rows.size(); ++r) {
    std::copy(c.rows[r].begin(), c.rows[r].end(),
              scores.data() + static_cast<index_t>(r) * c.width);
  }
  struct Rank {
    test::Guarded<position_t> indices;
    test::Guarded<position_t> counts;
    test::Scratch workspace;
    bool ok = true;
  };
  indexshare::Shape shape;
  shape.rows = rows;
  shape.keys = c.width;
  shape.top_k = c.k;
  std::vector<Rank> ranks;
  for (int i = 0; i < 2; ++i) {
    ranks.push_back(
        {test::Guarded<position_t>(static_cast<std::size_t>(rows * c.k)),
         test::Guarded<position_t>(static_cast<std::size_t>(rows)),
         test::Scratch(*topk_workspace(test::Threads{}, indexshare::RadixTopK{}, shape))});
  }
  std::vector<std::thread> threads;
  for (Rank& rank : ranks) {
    threads.emplace_back([&] {
      for (int repeat = 0; repeat < 20; ++repeat) {
        auto const status = topk_select(
            test::Threads{}, indexshare::RadixTopK{},
            indexshare::make_scores<space>(std::as_const(scores).data(), indexshare::Rows{rows},
                                           indexshare::Keys{c.width}),
            indexshare::make_lengths<space>(lengths.data(), indexshare::Rows{rows}),
            indexshare::make_selection<space>(rank.indices.data(), rank.counts.data(),
                                              indexshare::Rows{rows}, indexshare::TopK{c.k}),
            rank.workspace.get());
        rank.ok = rank.ok && status.ok();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK((ranks[0].ok && ranks[1].ok));
  for (Rank const& rank : ranks) {
    std::vector<Row> got;
    for (index_t r = 0; r < rows; ++r) {
      position_t const* const first = rank.indices.data() + r * c.k;
      got.push_back({{first, first + c.k}, rank.counts[static_cast<std::size_t>(r)]});
    }
    check_rows(want, got);
  }
}
#endif

TEMPLATE_LIST_TEST_CASE("TIE R061: plateaus in fp32, bf16 and fp16", "[topk][fault]",
                        test::Executors) {
  TopKCase c(32, 300);
  for (std::uint64_t seed = 0; seed < 8; ++seed) c.add(relu_row(300, 10, seed));
  check_topk<float>(TestType{}, c);
  check_topk<indexshare::bf16>(TestType{}, c);
  check_topk<indexshare::fp16>(TestType{}, c);
}

TEMPLATE_LIST_TEST_CASE("TIE R062: the order inside a row is part of the result", "[topk][fault]",
                        test::Executors) {
  auto const rows = run_topk(TestType{}, TopKCase::one_row(80, relu_row(500, 40, 62)));
  CHECK(std::is_sorted(rows[0].indices.begin(), rows[0].indices.end()));
  CHECK(std::adjacent_find(rows[0].indices.begin(), rows[0].indices.end()) ==
        rows[0].indices.end());
}

TEMPLATE_LIST_TEST_CASE("NANINF R064: entries are distinct whatever the scores are",
                        "[topk][fault]", test::Executors) {
  for (float const score : {std::nanf(""), -std::nanf(""), infinity, -infinity}) {
    std::vector<float> scores(389, score);
    scores[200] = 1;
    for (index_t const k : {1, 2, 128, 388}) {
      auto const row = run_topk(TestType{}, TopKCase::one_row(k, scores))[0];
      CHECK(row.count == k);
      CHECK((row.indices.front() >= 0 && row.indices.back() < 389));
      CHECK(std::adjacent_find(row.indices.begin(), row.indices.end(),
                               [](position_t a, position_t b) { return a >= b; }) ==
            row.indices.end());
    }
  }
}

TEMPLATE_LIST_TEST_CASE("NANINF R065: a NaN row among hundreds harms no other", "[topk][fault]",
                        test::Executors) {
  for (std::size_t const rows : {511u, 512u, 513u}) {
    TopKCase c(4, 12);
    for (std::size_t r = 0; r < rows; ++r) c.add(Random(r).normals(12));
    c.rows[rows / 2].assign(12, std::nanf(""));
    check_topk(TestType{}, c);
  }
}

TEMPLATE_LIST_TEST_CASE("NANINF R066: triangular -inf masks at odd widths", "[topk][fault]",
                        test::Executors) {
  for (index_t width = 1; width <= 17; ++width) {
    TopKCase c(3, width);
    for (index_t r = 0; r < width; ++r) {
      auto scores = Random(static_cast<std::uint64_t>(r)).normals(static_cast<std::size_t>(width));
      std::fill(scores.begin() + r + 1, scores.end(), -infinity);
      c.add(scores);
    }
    check_topk(TestType{}, c);
  }
  for (index_t width = 8191; width <= 8194; ++width) {
    TopKCase c(65, width);
    for (index_t const visible :
         {index_t{1}, index_t{64}, index_t{66}, width / 2, width - 1, width}) {
      auto scores = Random(66).normals(static_cast<std::size_t>(width));
      std::fill(scores.begin() + visible, scores.end(), -infinity);
      c.add(scores);
    }
    check_topk(TestType{}, c);
  }
}

TEMPLATE_LIST_TEST_CASE("KSHAPE R068: k that no block size divides", "[topk][fault]",
                        test::Executors) {
  for (index_t const k : {1,   2,   3,   7,   31,  33,   63,   65,   127,  129,
                          255, 257, 511, 513, 705, 1023, 1025, 2047, 2048, 2051}) {
    TopKCase c(k, k + 1);
    c.add(Random(static_cast<std::uint64_t>(k)).normals(static_cast<std::size_t>(k)));
    c.add(Random(static_cast<std::uint64_t>(k)).normals(static_cast<std::size_t>(k + 1)));
    c.add(std::vector<float>(static_cast<std::size_t>(k + 1), 0.0f));
    check_topk(TestType{}, c);
  }
}

TEMPLATE_LIST_TEST_CASE("KSHAPE R069: the width of the output decides, not a constant",
                        "[topk][fault]", test::Executors) {
  for (index_t const k : {192, 256, 512, 1152}) {  // run_topk checks the canaries
    check_topk(TestType{}, TopKCase::one_row(k, relu_row(3000, 700, 69)));
  }
}

TEMPLATE_LIST_TEST_CASE("KSHAPE R070, ADDR R071: positions past the page table have no slot",
                        "[topk][fault]", test::Executors) {
  // 19 entries, a table of 16 columns; and one of 32 columns under 128 score columns
  for (index_t const columns : {16, 32}) {
    std::vector<position_t> numbers(static_cast<std::size_t>(columns));
    for (index_t i = 0; i < columns; ++i) {
      numbers[static_cast<std::size_t>(i)] = static_cast<position_t>(100 + i);
    }
    test::Guarded<position_t> const table{std::span<position_t const>(numbers)};
    auto const requests = test::guarded<position_t>({0});
    auto indices = test::guarded<position_t>(
        {0, 3, 15, 16, 31, 32, 127, 1000000, std::numeric_limits<position_t>::max(), -1, -5});
    auto counts = test::guarded({static_cast<position_t>(indices.size())});
    auto const width = static_cast<index_t>(indices.size());
    test::Guarded<position_t> slots(indices.size(), test::unwritten);
    auto const selection = indexshare::make_selection<space>(
        indices.data(), counts.data(), indexshare::Rows{1}, indexshare::TopK{width});
    auto const status = map_slots(
        TestType{}, {selection.indices, selection.counts},
        indexshare::make_lengths<space>(requests.data(), indexshare::Rows{1}),
        indexshare::make_page_table<space>(table.data(), indexshare::Requests{1},
                                           indexshare::Pages{columns}, indexshare::PageSize{1}),
        indexshare::make_dense<space, position_t, 2>(slots.data(), {1, width}));
    CHECK(status.ok());
    test::finish(TestType{});
    for (std::size_t j = 0; j < indices.size(); ++j) {
      bool const inside = indices[j] >= 0 && indices[j] < columns;
      CHECK(slots[j] == (inside ? 100 + indices[j] : -1));
    }
    CHECK(slots.intact());
  }
}

TEMPLATE_LIST_TEST_CASE("ADDR R072: a row's positions are looked up in its own request's pages",
                        "[topk][fault]", test::Executors) {
  auto const table =
      test::guarded<position_t>({10, 11, 12, 13, 14, 15, 16, 17, 20, 21, 22, 23, 24, 25, 26, 27});
  auto const requests = test::guarded<position_t>({1, 0, 1});
  auto indices = test::guarded<position_t>({6, 2, 0, 3, 1, -1, 5, 7, 7});
  auto counts = test::guarded<position_t>({2, 2, 1});
  test::Guarded<position_t> slots(9, test::unwritten);
  auto const selection = indexshare::make_selection<space>(
      indices.data(), counts.data(), indexshare::Rows{3}, indexshare::TopK{3});
  CHECK(map_slots(TestType{}, {selection.indices, selection.counts},
                  indexshare::make_lengths<space>(requests.data(), indexshare::Rows{3}),
                  indexshare::make_page_table<space>(table.data(), indexshare::Requests{2},
                                                     indexshare::Pages{8}, indexshare::PageSize{1}),
                  indexshare::make_dense<space, position_t, 2>(slots.data(), {3, 3}))
            .ok());
  test::finish(TestType{});
  std::vector<position_t> const want{26, 22, -1, 13, 11, -1, 25, -1, -1};
  CHECK(std::equal(want.begin(), want.end(), slots.data()));
}

TEMPLATE_LIST_TEST_CASE("KSHAPE R075: every k with every number of rows", "[topk][fault]",
                        test::Executors) {
  for (index_t const k : {1, 64, 192, 256, 300}) {
    for (std::size_t const rows : {1u, 5u, 63u, 64u, 65u}) {
      TopKCase c(k, 301);
      for (std::size_t r = 0; r < rows; ++r) {
        c.add(relu_row(301, 150, r), static_cast<position_t>(301 - r));
      }
      check_topk(TestType{}, c);
    }
  }
}

TEMPLATE_LIST_TEST_CASE("RACE R077: one workspace, a thousand calls with changing rows",
                        "[topk][fault]", test::Executors) {
  TopKCase c(5, 50);
  for (std::uint64_t seed = 0; seed < 8; ++seed) c.add(relu_row(50, 3, seed));
  auto const want = test::expected_topk(c);
  indexshare::Shape shape;
  shape.rows = 8;
  shape.keys = 50;
  shape.top_k = 5;
  TestType const x{};
  test::Scratch workspace(*topk_workspace(x, indexshare::RadixTopK{}, shape));
  test::Guarded<float> scores(8 * 50);
  for (std::size_t r = 0; r < 8; ++r) {
    std::copy(c.rows[r].begin(), c.rows[r].end(), scores.data() + r * 50);
  }
  test::Guarded<position_t> indices(8 * 5);
  test::Guarded<position_t> counts(8);
  test::Guarded<position_t> const lengths{std::span<position_t const>(c.lengths)};
  int wrong = 0;
  for (int call = 0; call < 1000; ++call) {
    index_t const rows = call % 3 == 1 ? 8 : 1;
    indices.fill(test::unwritten);
    auto const status =
        topk_select(x, indexshare::RadixTopK{},
                    indexshare::make_scores<space>(std::as_const(scores).data(),
                                                   indexshare::Rows{rows}, indexshare::Keys{50}),
                    indexshare::make_lengths<space>(lengths.data(), indexshare::Rows{rows}),
                    indexshare::make_selection<space>(indices.data(), counts.data(),
                                                      indexshare::Rows{rows}, indexshare::TopK{5}),
                    workspace.get());
    wrong += status.ok() ? 0 : 1;
    test::finish(x);
    for (index_t r = 0; r < rows; ++r) {
      auto const& row = want[static_cast<std::size_t>(r)];
      wrong += std::equal(row.indices.begin(), row.indices.end(), indices.data() + r * 5) ? 0 : 1;
    }
  }
  CHECK(wrong == 0);
}

TEMPLATE_LIST_TEST_CASE("KSHAPE R079: 32768 rows of four keys", "[topk][fault]", test::Executors) {
  for (std::size_t const rows : {1u, 255u, 256u, 257u, 32768u}) {
    TopKCase c(2, 4);
    for (std::size_t r = 0; r < rows; ++r) {
      c.add(
          {static_cast<float>(r % 3), static_cast<float>(r % 5), 1.0f, static_cast<float>(r % 2)});
    }
    check_topk(TestType{}, c);
  }
}

TEMPLATE_LIST_TEST_CASE("INT32 R142: score and selection rows more than 2^31 elements apart",
                        "[topk][fault]", test::Executors) {
  constexpr index_t stride = (index_t{1} << 31) + 64;
  test::HugeMemory const score_memory(static_cast<std::size_t>(2 * stride + 64) * sizeof(float));
  test::HugeMemory const index_memory(static_cast<std::size_t>(2 * stride + 64) *
                                      sizeof(position_t));
  auto* const scores = score_memory.template as<float>();
  auto* const indices = index_memory.template as<position_t>();
  if (scores == nullptr || indices == nullptr) SKIP("no 16 GiB of addresses here");
  TopKCase c(8, 60);
  for (std::uint64_t seed = 0; seed < 3; ++seed) c.add(Random(seed).normals(60));
  for (std::size_t r = 0; r < 3; ++r) {
    std::copy(c.rows[r].begin(), c.rows[r].end(), scores + static_cast<index_t>(r) * stride);
  }
  test::Guarded<position_t> counts(3);
  test::Guarded<position_t> const lengths{std::span<position_t const>(c.lengths)};
  indexshare::Shape shape;
  shape.rows = 3;
  shape.keys = 60;
  shape.top_k = 8;
  TestType const x{};
  test::Scratch workspace(*topk_workspace(x, indexshare::RadixTopK{}, shape));
  CHECK(topk_select(x, indexshare::RadixTopK{},
                    indexshare::make_strided<space, float const, 2>(scores, {3, 60}, {stride, 1}),
                    indexshare::make_lengths<space>(lengths.data(), indexshare::Rows{3}),
                    {indexshare::make_strided<space, position_t, 2>(indices, {3, 8}, {stride, 1}),
                     indexshare::make_dense<space, position_t, 1>(counts.data(), {3})},
                    workspace.get())
            .ok());
  test::finish(x);
  std::vector<Row> got;
  for (std::size_t r = 0; r < 3; ++r) {
    position_t const* const first = indices + static_cast<index_t>(r) * stride;
    got.push_back({{first, first + 8}, counts[r]});
  }
  check_rows(test::expected_topk(c), got);
}

TEMPLATE_LIST_TEST_CASE("DIAG R027: early keys have no privilege", "[topk][fault]",
                        test::Executors) {
  auto const row = run_topk(TestType{}, TopKCase::one_row(4, {-2, -1, 5, 0.5f, 3, 0.25f, 4, 0}))[0];
  CHECK(row == Row{{2, 3, 4, 6}, 4});
}
