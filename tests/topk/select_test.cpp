// SPDX-License-Identifier: Apache-2.0
#include <indexshare/host/topk.hpp>
#include <indexshare/reference.hpp>

#include <catch2/catch_template_test_macros.hpp>
#include <catch2/catch_test_macros.hpp>

#include "random.hpp"
#include "topk_run.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string_view>
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

constexpr float infinity = std::numeric_limits<float>::infinity();

float from_bits(std::uint32_t bits) { return std::bit_cast<float>(bits); }

/// Scores of every kind: ordinary ones, plateaus, zeros of both signs, infinities, denormals, NaN.
std::vector<float> wild_scores(std::size_t n, std::uint64_t seed) {
  Random random(seed);
  std::vector<float> scores(n);
  for (float& score : scores) {
    switch (random.below(12)) {
      case 0:
        score = 0.0f;
        break;
      case 1:
        score = -0.0f;
        break;
      case 2:
        score = infinity;
        break;
      case 3:
        score = -infinity;
        break;
      case 4:
        score = from_bits(static_cast<std::uint32_t>(1 + random.below(0x7FFFFF)));
        break;
      case 5:
        score = -from_bits(static_cast<std::uint32_t>(1 + random.below(0x7FFFFF)));
        break;
      case 6:
        score = from_bits(0x7F800001u + static_cast<std::uint32_t>(random.below(0x7FFFFE)));
        break;
      case 7:
        score = from_bits(0xFF800001u + static_cast<std::uint32_t>(random.below(0x7FFFFE)));
        break;
      case 8:
        score = 1.0f;
        break;
      default:
        score = random.normal();
    }
  }
  return scores;
}

}  // namespace

TEMPLATE_LIST_TEST_CASE("top-k: every length around k and around block sizes", "[topk]",
                        test::AllExecutors) {
  for (index_t const k : {1, 2, 16, 31, 64}) {
    TopKCase c(k, 300);
    for (index_t const length : {index_t{0}, index_t{1}, k - 1, k, k + 1, 2 * k, index_t{63},
                                 index_t{64}, index_t{65}, index_t{127}, index_t{128}, index_t{129},
                                 index_t{255}, index_t{256}, index_t{257}, index_t{300}}) {
      c.add(Random(static_cast<std::uint64_t>(length)).normals(static_cast<std::size_t>(length)));
    }
    check_topk(TestType{}, c);
  }
}

TEMPLATE_LIST_TEST_CASE("top-k: scores of every kind", "[topk]", test::AllExecutors) {
  for (index_t const k : {1, 3, 50, 200, 299}) {
    TopKCase c(k, 300);
    for (std::uint64_t seed = 0; seed < 12; ++seed) c.add(wild_scores(300, seed));
    check_topk(TestType{}, c);
  }
}

TEMPLATE_LIST_TEST_CASE("top-k: scores of 16 and of 8 bits", "[topk]", test::AllExecutors) {
  for (index_t const k : {1, 40, 250}) {
    TopKCase c(k, 260);
    for (std::uint64_t seed = 20; seed < 26; ++seed) c.add(wild_scores(260, seed));
    for (std::uint64_t seed = 30; seed < 33; ++seed) c.add(Random(seed).normals(200));
    check_topk<indexshare::bf16>(TestType{}, c);
    check_topk<indexshare::fp16>(TestType{}, c);
    check_topk<indexshare::e4m3>(TestType{}, c);
  }
}

TEMPLATE_LIST_TEST_CASE("top-k: equal scores go to the lower position", "[topk]", test::Executors) {
  std::vector<float> const plateau(100, 0.25f);
  for (float const rest : {0.0f, 1.0f, -infinity, infinity, std::nanf("")}) {
    std::vector<float> scores(100, rest);
    for (std::size_t s = 10; s < 90; s += 2) scores[s] = 0.25f;
    TopKCase c(20, 100);
    c.add(scores);
    c.add(plateau);
    check_topk(TestType{}, c);
  }
  auto const row = run_topk(TestType{}, TopKCase::one_row(4, plateau))[0];
  CHECK(row == Row{{0, 1, 2, 3}, 4});
}

TEMPLATE_LIST_TEST_CASE("top-k: zeros of both signs are one value", "[topk]", test::Executors) {
  auto const row = run_topk(TestType{}, TopKCase::one_row(3, {-0.0f, -1.0f, 0.0f, -0.0f, 0.0f}))[0];
  CHECK(row == Row{{0, 2, 3}, 3});
}

TEMPLATE_LIST_TEST_CASE("top-k: -inf is an ordinary score above NaN", "[topk]", test::Executors) {
  float const nan = std::nanf("");
  auto const row =
      run_topk(TestType{}, TopKCase::one_row(3, {nan, -infinity, nan, 7, -infinity}))[0];
  CHECK(row == Row{{1, 3, 4}, 3});
  auto const last =
      run_topk(TestType{}, TopKCase::one_row(4, {nan, -infinity, nan, 7, -infinity}))[0];
  CHECK(last == Row{{0, 1, 3, 4}, 4});
}

TEMPLATE_LIST_TEST_CASE("top-k: denormals keep their order", "[topk]", test::Executors) {
  std::vector<float> scores;
  for (std::uint32_t i = 0; i < 64; ++i) scores.push_back(from_bits((i * 37) % 64));
  check_topk(TestType{}, TopKCase::one_row(9, scores));
}

TEMPLATE_LIST_TEST_CASE("top-k: strided scores, selections, counts and lengths", "[topk]",
                        test::Executors) {
  TopKCase c(7, 40);
  for (std::uint64_t seed = 0; seed < 5; ++seed) {
    c.add(wild_scores(40, seed), static_cast<position_t>(9 * seed));
  }
  for (test::TopKLayout const layout :
       {test::TopKLayout{.score_pad = 13}, test::TopKLayout{.index_pad = 5},
        test::TopKLayout{.count_step = 3},
        test::TopKLayout{.score_pad = 1, .index_pad = 2, .count_step = 2}}) {
    check_topk(TestType{}, c, layout);
  }
}

TEMPLATE_LIST_TEST_CASE("top-k: rows that select everything never read a score", "[topk]",
                        test::Executors) {
  // the rows hold no scores at all: run_topk fills them with poison, forbidden under asan
  TopKCase c(16, 24);
  for (position_t const length : {0, 1, 7, 15, 16}) c.add({}, length);
  auto const rows = run_topk(TestType{}, c);
  for (std::size_t r = 0; r < rows.size(); ++r) {
    Row want;
    want.count = c.lengths[r];
    for (position_t j = 0; j < 16; ++j) want.indices.push_back(j < want.count ? j : -1);
    CHECK(rows[r] == want);
  }
  test::TopKCase narrow(16, 9);  // the matrix is narrower than the selection
  narrow.add({}, 9);
  narrow.add({}, 12);
  narrow.add({}, 4);
  check_topk(TestType{}, narrow);
}

TEMPLATE_LIST_TEST_CASE("top-k: no rows is a legal call", "[topk]", test::Executors) {
  static_assert(indexshare::TopKPolicy<indexshare::RadixTopK, TestType, float>);
  static_assert(indexshare::TopKPolicy<indexshare::RadixTopK, TestType, indexshare::bf16>);
  CHECK(run_topk(TestType{}, TopKCase(4, 10)).empty());
}

TEMPLATE_LIST_TEST_CASE("top-k: permuting a row's distinct scores permutes its selection", "[topk]",
                        test::Executors) {
  Random random(77);
  std::vector<float> scores;
  for (int i = 0; i < 500; ++i) scores.push_back(static_cast<float>(i) * 0.37f - 90.0f);
  auto const chosen_values = [&](std::vector<float> const& row) {
    auto const selected = run_topk(TestType{}, TopKCase::one_row(37, row))[0];
    std::vector<float> values;
    for (position_t const s : selected.indices) values.push_back(row[static_cast<std::size_t>(s)]);
    std::sort(values.begin(), values.end());
    return values;
  };
  auto const want = chosen_values(scores);
  for (int repeat = 0; repeat < 10; ++repeat) {
    random.shuffle(scores);
    CHECK(chosen_values(scores) == want);
  }
}

TEMPLATE_LIST_TEST_CASE("top-k: a monotone map of the scores changes nothing", "[topk]",
                        test::Executors) {
  auto const scores = Random(5).normals(400);
  auto const want = run_topk(TestType{}, TopKCase::one_row(50, scores));
  for (int kind = 0; kind < 4; ++kind) {
    auto mapped = scores;
    for (float& score : mapped) {
      if (kind == 0) score *= 0x1p-100f;
      if (kind == 1) score *= 0x1p+100f;
      if (kind == 2) score = std::ldexp(score, -140);  // denormals; rounding makes new ties
      if (kind == 3) score = score > 0 ? score * 2 : score;
    }
    if (kind == 2) {
      check_topk(TestType{}, TopKCase::one_row(50, mapped));
    } else {
      check_rows(want, run_topk(TestType{}, TopKCase::one_row(50, mapped)));
    }
  }
}

TEMPLATE_LIST_TEST_CASE("top-k: widths up to 4096", "[topk]", test::Executors) {
  for (index_t const k : {2048, 4095, 4096}) {
    TopKCase c(k, 5000);
    c.add(wild_scores(5000, 9));
    c.add(Random(4).normals(static_cast<std::size_t>(k + 1)));
    c.add(std::vector<float>(static_cast<std::size_t>(k), 1.0f));
    check_topk(TestType{}, c);
  }
}

TEMPLATE_LIST_TEST_CASE("top-k: a row of 1,048,576 keys", "[topk]", test::Executors) {
  constexpr std::size_t n = 1048576;
  std::vector<float> scores(n);
  Random random(1);
  for (float& score : scores) {
    auto const raw = random.normal();
    score = raw < 1.5f ? 0.0f : raw;  // a plateau of zeros, as after ReLU, and some 70 000 others
  }
  scores[n - 1] = 1e9f;
  check_topk(TestType{}, TopKCase::one_row(2048, scores));
  for (float& score : scores)
    score = score > 4.5f ? score : 0.0f;  // fewer than k above the plateau
  check_topk(TestType{}, TopKCase::one_row(2048, scores));
}

TEMPLATE_LIST_TEST_CASE("top-k: a row does not depend on its batch", "[topk]", test::Executors) {
  TopKCase c(24, 200);
  for (std::uint64_t seed = 0; seed < 19; ++seed) {
    c.add(wild_scores(200, seed), static_cast<position_t>(40 + 11 * seed));
  }
  auto const together = run_topk(TestType{}, c);
  for (std::size_t r = 0; r < c.rows.size(); ++r) {
    TopKCase alone(24, 200);
    alone.add(c.rows[r], c.lengths[r]);
    check_rows({together[r]}, run_topk(TestType{}, alone));
  }
  auto const order = Random(8).permutation<std::size_t>(c.rows.size());
  TopKCase shuffled(24, 200);
  std::vector<Row> want;
  for (std::size_t const r : order) {
    shuffled.add(c.rows[r], c.lengths[r]);
    want.push_back(together[r]);
  }
  check_rows(want, run_topk(TestType{}, shuffled));
}

#if !defined(INDEXSHARE_TEST_CUDA)
TEST_CASE("top-k: the same bytes on every back end and number of threads", "[topk]") {
  TopKCase c(64, 1000);
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    c.add(wild_scores(1000, seed), static_cast<position_t>(seed * 53));
  }
  auto const want = run_topk(indexshare::ReferenceExec{}, c);
  check_rows(want, run_topk(test::Serial{}, c));
  check_rows(want, run_topk(test::Threads{}, c));
  check_rows(want, run_topk(test::Backward{}, c));
}
#endif

TEMPLATE_LIST_TEST_CASE("top-k: bad views are refused by name, outputs untouched", "[topk]",
                        test::Executors) {
  using namespace indexshare;
  using test::space;
  constexpr index_t rows = 3;
  constexpr index_t keys = 10;
  constexpr index_t k = 4;
  TestType const x{};
  test::Guarded<float> scores(2 * rows * keys, std::byte{0});
  test::Guarded<position_t> lengths(rows + 1, std::byte{0});
  test::Guarded<position_t> indices(2 * (rows + 1) * k, test::unwritten);
  test::Guarded<position_t> counts(rows + 1, test::unwritten);
  test::Scratch workspace(
      *topk_workspace(x, RadixTopK{}, {.rows = rows, .keys = keys, .top_k = k}));
  struct Views {
    ScoreView<space, float const> scores;
    LengthView<space> lengths;
    SelectionView<space> out;
  };
  Views const good{make_scores<space, float const>(scores.data(), Rows{rows}, Keys{keys}),
                   make_lengths<space>(lengths.data(), Rows{rows}),
                   make_selection<space>(indices.data(), counts.data(), Rows{rows}, TopK{k})};
  auto const call = [&](Views const& v) {
    return topk_select(x, RadixTopK{}, v.scores, v.lengths, v.out, workspace.get());
  };
  auto const refuses = [&](auto change, Errc code, std::string_view part, std::int64_t expected,
                           std::int64_t got) {
    Views views = good;
    change(views);
    Status const status = call(views);
    INFO(part << " / " << status.what << " " << status.expected << " " << status.got);
    CHECK(status.code == code);
    CHECK(std::string_view(status.what).find(part) != std::string_view::npos);
    CHECK((status.expected == expected && status.got == got));
  };
  refuses([&](Views& v) { v.lengths = make_lengths<space>(lengths.data(), Rows{4}); },
          Errc::bad_shape, "rows of the lengths", 3, 4);
  refuses([&](Views& v) { v.lengths = make_lengths<space>(nullptr, Rows{3}); }, Errc::missing_input,
          "lengths", 0, 0);
  refuses([&](Views& v) { v.scores = make_scores<space, float const>(nullptr, Rows{3}, Keys{10}); },
          Errc::missing_input, "scores", 0, 0);
  refuses(
      [&](Views& v) {
        v.scores = make_strided<space, float const, 2>(scores.data(), {3, 10}, {20, 2});
      },
      Errc::bad_stride, "scores", 1, 2);
  refuses(
      [&](Views& v) {
        v.out.indices = make_dense<space, position_t, 2>(indices.data(), {4, k});
      },
      Errc::bad_shape, "rows of the selection", 3, 4);
  refuses(
      [&](Views& v) {
        v.out.indices = make_strided<space, position_t, 2>(indices.data(), {3, k}, {2 * k, 2});
      },
      Errc::bad_stride, "indices of the selection", 1, 2);
  refuses(
      [&](Views& v) {
        v.out.indices = make_dense<space, position_t, 2>(indices.data(), {3, 0});
      },
      Errc::bad_shape, "width of the selection", 1, 0);
  refuses(
      [&](Views& v) {
        v.out.indices = make_dense<space, position_t, 2>(nullptr, {3, k});
      },
      Errc::missing_input, "indices of the selection", 0, 0);
  refuses([&](Views& v) { v.out.counts = make_dense<space, position_t, 1>(counts.data(), {2}); },
          Errc::bad_shape, "rows of the selection's counts", 3, 2);
  refuses([&](Views& v) { v.out.counts = make_dense<space, position_t, 1>(nullptr, {3}); },
          Errc::missing_input, "counts of the selection", 0, 0);
  test::Guarded<position_t> const blank(1, test::unwritten);
  CHECK(std::count(indices.data(), indices.data() + indices.size(), blank[0]) ==
        static_cast<std::ptrdiff_t>(indices.size()));
  CHECK(std::count(counts.data(), counts.data() + counts.size(), blank[0]) == rows + 1);
  CHECK(call(good).ok());
}
