// SPDX-License-Identifier: Apache-2.0
#include <indexshare/host/indexer.hpp>
#include <indexshare/indexer/relu_dot.hpp>
#include <indexshare/reference.hpp>

#include <catch2/catch_template_test_macros.hpp>
#include <catch2/catch_test_macros.hpp>

#include "indexer_run.hpp"
#include "random.hpp"
#include "vectors.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

using namespace indexshare;
using test::check_scores;
using test::IndexerCase;
using test::one_hot;
using test::Row;
using test::run_scores;
using test::run_select;

namespace {

constexpr float infinity = std::numeric_limits<float>::infinity();

template <class Q, class F>
struct Types {
  using Query = Q;
  using Format = F;
};

/// Calls f(Types<Query, KeyFormat>) for every pair that a model may bring.
template <class F>
void for_each_format(F const& f) {
  f(Types<float, format::Plain<float>>{});
  f(Types<float, format::Plain<bf16>>{});
  f(Types<bf16, format::Plain<bf16>>{});
  f(Types<fp16, format::Plain<fp16>>{});
  f(Types<bf16, format::IndexKeyE4m3>{});
  f(Types<fp16, format::IndexKeyE4m3>{});
  f(Types<e4m3, format::IndexKeyE4m3>{});
}

using Fp32 = IndexerCase<float, format::Plain<float>>;

void append(std::vector<float>& to, std::vector<float> const& from) {
  to.insert(to.end(), from.begin(), from.end());
}

/// Key s is a one-hot of lane s, query heads are one-hots of scattered lanes: a score that takes a
/// wrong lane, head or key shows. All sums are exact in fp32 and every format holds the values.
template <class Query, class Format, class X>
void check_one_hots(X const& x, index_t lanes, index_t heads, index_t page_size) {
  IndexerCase<Query, Format> c(
      heads, {.requests = 1, .keys = lanes, .lanes = lanes, .page_size = page_size});
  for (index_t s = 0; s < lanes; ++s) c.keys.write(0, s, one_hot(lanes, s, 448));
  std::vector<float> query;
  std::vector<float> weights;
  for (index_t h = 0; h < heads; ++h) {
    append(query, one_hot(lanes, (7 * h + 3) % lanes, static_cast<float>(1 + h % 8)));
    weights.push_back(h % 3 == 2 ? -1.0f : static_cast<float>(1 << (h % 4)));
  }
  c.add_row(static_cast<position_t>(lanes), 0, query, weights);
  auto const scores = run_scores(x, c);
  index_t wrong = 0;
  for (index_t s = 0; s < lanes; ++s) {
    wrong += static_cast<double>(scores[0][static_cast<std::size_t>(s)]) == c.expected(0, s).value
                 ? 0
                 : 1;
  }
  INFO("lanes " << lanes << ", heads " << heads << ", page size " << page_size);
  CHECK(wrong == 0);
}

}  // namespace

TEMPLATE_LIST_TEST_CASE("SCORE R028: vector V03, ReLU per head, then the sum over heads",
                        "[indexer][fault]", test::Executors) {
  auto const v = test::fault_vector("V03_relu");
  Fp32 c(2, {.requests = 1, .keys = 2, .lanes = 2});
  for (index_t s = 0; s < 2; ++s) {
    c.keys.write(0, s, v.at("keys").at(static_cast<std::size_t>(s)).get<std::vector<float>>());
  }
  std::vector<float> query;
  for (auto const& head : v.at("q")) {
    append(query, std::vector<float>(head.begin(), head.end()));
  }
  c.add_row(2, 0, query, v.at("w").get<std::vector<float>>());
  CHECK(run_scores(TestType{}, c)[0] == v.at("scores").get<std::vector<float>>());
  auto const rows = run_select(TestType{}, c, 1);
  CHECK(rows[0].indices == v.at("index_k1").get<std::vector<position_t>>());
}

TEMPLATE_LIST_TEST_CASE("SCALE R030: scores are returned as defined, without a constant",
                        "[indexer][fault]", test::Executors) {
  // q.k = 8, d^-0.5 = 0.5 and one head fold into the weight: 8 * 0.5 * 2 = 8, applied once
  Fp32 c(1, {.requests = 1, .keys = 2, .lanes = 4});
  c.keys.write(0, 0, std::vector<float>{2, 2, 0, 0});
  c.keys.write(0, 1, std::vector<float>{1, 0, 0, 1});
  c.add_row(2, 0, {2, 2, 0, 0}, {2 * 0.5f * 1});
  CHECK(run_scores(TestType{}, c)[0] == std::vector<float>{8, 2});
}

TEMPLATE_LIST_TEST_CASE("SCALE R031: an e4m3 query's scale goes with its head", "[indexer][fault]",
                        test::Executors) {
  // integer codes; q scales 0.5 and 4 in the weights (1 and 3), key scale 0.25
  IndexerCase<e4m3, format::IndexKeyE4m3> c(2, {.requests = 1, .keys = 2, .lanes = 2});
  c.keys.write(0, 0, std::vector<float>{448 * 0.25f, -2 * 0.25f});   // codes 448, -2
  c.keys.write(0, 1, std::vector<float>{-64 * 0.25f, 448 * 0.25f});  // codes -64, 448
  c.add_row(2, 0, {3, 1, -1, 2}, {1 * 0.5f, 3 * 4.0f});
  // head 0: 3*112 - 0.5 = 335.5 and -48 + 112 = 64; head 1: -112 - 1 -> 0 and 16 + 224 = 240
  CHECK(run_scores(TestType{}, c)[0] == std::vector<float>{335.5f * 0.5f, 64 * 0.5f + 240 * 12});
}

TEMPLATE_LIST_TEST_CASE("SCALE R032: head weights are fp32, near-ties keep their order",
                        "[indexer][fault]", test::Executors) {
  Fp32 c(2, {.requests = 1, .keys = 2, .lanes = 2});
  c.keys.write(0, 0, std::vector<float>{1.0f, 0});
  c.keys.write(0, 1, std::vector<float>{0, 1.002f});
  c.add_row(2, 0, {1, 0, 0, 1}, {1 + 0x1p-8f, 1});  // bf16 would make the first weight 1
  CHECK(run_select(TestType{}, c, 1)[0] == Row{{0}, 1});
}

TEMPLATE_LIST_TEST_CASE("HAD R036: vector V05, a rotation of both sides changes nothing",
                        "[indexer][fault]", test::Executors) {
  auto const v = test::fault_vector("V05_hadamard");
  auto const rotate = [](std::vector<float> x) {
    return std::vector<float>{
        0.5f * (x[0] + x[1] + x[2] + x[3]), 0.5f * (x[0] - x[1] + x[2] - x[3]),
        0.5f * (x[0] + x[1] - x[2] - x[3]), 0.5f * (x[0] - x[1] - x[2] + x[3])};
  };
  std::vector<float> const query{1, 0, 0, 0};
  std::vector<float> const keys[] = {{1, 0, 0, 0}, {0.5f, 0.5f, 0.5f, 0.5f}};
  auto const scores = [&](bool rotate_query, bool rotate_keys) {
    Fp32 c(1, {.requests = 1, .keys = 2, .lanes = 4});
    for (index_t s = 0; s < 2; ++s) c.keys.write(0, s, rotate_keys ? rotate(keys[s]) : keys[s]);
    c.add_row(2, 0, rotate_query ? rotate(query) : query, {1});
    return run_scores(TestType{}, c)[0];
  };
  CHECK(scores(false, false) == v.at("true").get<std::vector<float>>());
  CHECK(scores(true, true) == v.at("both").get<std::vector<float>>());
  CHECK(scores(true, false) == v.at("q_only").get<std::vector<float>>());
}

TEMPLATE_LIST_TEST_CASE("LEN R053: negative scores are selected, padding is not",
                        "[indexer][fault]", test::Executors) {
  Fp32 c(1, {.requests = 1, .keys = 8, .lanes = 1});
  for (index_t s = 0; s < 3; ++s) {
    c.keys.write(0, s,
                 std::vector<float>{std::vector<float>{5, 3, 4}[static_cast<std::size_t>(s)]});
  }
  c.add_row(3, 0, {1}, {-1});
  CHECK(run_scores(TestType{}, c)[0] == std::vector<float>{-5, -3, -4});
  CHECK(run_select(TestType{}, c, 2)[0] == Row{{1, 2}, 2});
  CHECK(run_select(TestType{}, c, 4)[0] == Row{{0, 1, 2, -1}, 3});
}

TEMPLATE_LIST_TEST_CASE("KSHAPE R042, ADDR R045: every lane, head and key by one-hots",
                        "[indexer][fault]", test::Executors) {
  for (index_t const lanes : {16, 32, 64, 96, 128, 192, 256}) {
    for (index_t const heads : {1, 2, 3, 16, 17, 64}) {
      check_one_hots<bf16, format::Plain<bf16>>(TestType{}, lanes, heads, 4);
    }
  }
}

TEMPLATE_LIST_TEST_CASE("indexer: one-hots in every format and page size", "[indexer]",
                        test::Executors) {
  for_each_format([](auto types) {
    using T = decltype(types);
    for (index_t const page_size : {0, 1, 4, 64}) {
      check_one_hots<typename T::Query, typename T::Format>(TestType{}, 32, 17, page_size);
      check_one_hots<typename T::Query, typename T::Format>(TestType{}, 130, 3, page_size);
    }
  });
}

TEMPLATE_LIST_TEST_CASE("indexer: scores are within fp32 rounding of the definition", "[indexer]",
                        test::Executors) {
  for_each_format([](auto types) {
    using T = decltype(types);
    for (index_t const heads : {1, 5, 32}) {
      IndexerCase<typename T::Query, typename T::Format> c(
          heads, {.requests = 2, .keys = 150, .lanes = 48, .page_size = 16});
      c.keys.write_random(0, 0, 150, 1);
      c.keys.write_random(1, 0, 131, 1);
      for (std::uint64_t seed = 0; seed < 11; ++seed) {  // one more row tile than a block of rows
        c.add_random_row(static_cast<position_t>(120 + seed), seed % 4 == 3 ? 1 : 0, seed);
      }
      check_scores(c, run_scores(TestType{}, c));
    }
  });
}

TEMPLATE_LIST_TEST_CASE("indexer: dimensions that no vector width divides", "[indexer]",
                        test::Executors) {
  for (index_t const lanes : {1, 7, 33, 100}) {
    Fp32 c(3, {.requests = 1, .keys = 70, .lanes = lanes, .page_size = 4});
    c.keys.write_random(0, 0, 70, 2);
    for (std::uint64_t seed = 0; seed < 3; ++seed) {
      c.add_random_row(static_cast<position_t>(66 + seed), 0, seed);
    }
    check_scores(c, run_scores(TestType{}, c));
  }
}

TEMPLATE_LIST_TEST_CASE("indexer: bf16 with bf16, the same bits in pages of any size", "[indexer]",
                        test::IsaExecutors) {
  TestType const x{};
  for (index_t const lanes : {1, 7, 33, 127, 128, 130}) {  // 128: keys that the host need not copy
    for (index_t const heads : {1, 5, 17, 64}) {
      INFO("lanes " << lanes << ", heads " << heads);
      std::vector<std::vector<float>> want;
      for (index_t const page_size : {0, 1, 12, 64}) {
        IndexerCase<bf16, format::Plain<bf16>> c(
            heads, {.requests = 1, .keys = 101, .lanes = lanes, .page_size = page_size});
        c.keys.write_random(0, 0, 101, 2);
        for (std::uint64_t seed = 0; seed < 3; ++seed) {
          c.add_random_row(static_cast<position_t>(99 + seed), 0, seed);
        }
        auto const got = run_scores(x, c);
        if (want.empty()) check_scores(c, want = got);
        CHECK(got == want);
      }
    }
  }
}

TEMPLATE_LIST_TEST_CASE("indexer: strided queries, weights, lengths and requests", "[indexer]",
                        test::Executors) {
  IndexerCase<bf16, format::Plain<bf16>> c(
      5, {.requests = 2, .keys = 80, .lanes = 16, .page_size = 16});
  for (index_t r = 0; r < 2; ++r) c.keys.write_random(r, 0, 80, 3);
  for (std::uint64_t seed = 0; seed < 6; ++seed) {
    c.add_random_row(static_cast<position_t>(75 + seed % 5), static_cast<position_t>(seed % 2),
                     seed);
  }
  auto const want = run_scores(TestType{}, c);
  check_scores(c, want);
  CHECK(run_scores(TestType{}, c, {.head_pad = 7}) == want);
  CHECK(run_scores(TestType{}, c, {.row_pad = 33}) == want);
  CHECK(run_scores(TestType{}, c, {.weight_pad = 3}) == want);
  CHECK(run_scores(TestType{}, c, {.length_step = 3}) == want);
  CHECK(run_scores(TestType{}, c, {.head_major = true}) == want);
  CHECK(run_scores(TestType{}, c,
                   {.head_pad = 1, .row_pad = 2, .weight_pad = 5, .length_step = 2}) == want);
}

TEMPLATE_LIST_TEST_CASE("indexer: a NaN key gives a NaN score and harms no other key", "[indexer]",
                        test::Executors) {
  Fp32 c(2, {.requests = 1, .keys = 100, .lanes = 8, .page_size = 4});
  c.keys.write_random(0, 0, 100, 4);
  c.add_random_row(100, 0, 9);
  auto want = run_scores(TestType{}, c)[0];
  for (index_t const bad : {0, 17, 63, 64, 99}) {
    auto lanes = one_hot(8, 3, std::nanf(""));
    c.keys.write(0, bad, lanes);
    want[static_cast<std::size_t>(bad)] = std::nanf("");
  }
  auto const got = run_scores(TestType{}, c)[0];
  for (std::size_t s = 0; s < want.size(); ++s) {
    CHECK((std::isnan(want[s]) ? std::isnan(got[s]) : got[s] == want[s]));
  }
  // five NaN keys are the five that are left out
  auto const row = run_select(TestType{}, c, 95)[0];
  for (position_t const bad : {0, 17, 63, 64, 99}) {
    CHECK(std::find(row.indices.begin(), row.indices.end(), bad) == row.indices.end());
  }
}

TEMPLATE_LIST_TEST_CASE("indexer: an infinite key does not meet padded heads", "[indexer]",
                        test::AllExecutors) {
  TestType const x{};
  auto const run = [&](auto c) {
    auto const lanes = static_cast<std::size_t>(c.lanes);
    auto key = one_hot(c.lanes, 3, infinity);
    std::fill(key.begin() + 4, key.end(), 1.0f);
    for (index_t s = 0; s < 40; ++s) c.keys.write(0, s, key);
    std::vector<float> query(static_cast<std::size_t>(c.heads) * lanes, 1.0f);
    c.add_row(40, 0, query, std::vector<float>(static_cast<std::size_t>(c.heads), 1.0f));
    for (float& q : query) q = -1;
    c.add_row(40, 0, query, std::vector<float>(static_cast<std::size_t>(c.heads), 1.0f));
    auto const scores = run_scores(x, c);
    CHECK(scores[0] == std::vector<float>(40, infinity));
    CHECK(scores[1] == std::vector<float>(40, 0.0f));
  };
  for (index_t const heads : {1, 5, 12, 31, 33}) {
    for (index_t const lanes : {128, 32}) {
      test::CacheShape const shape{.requests = 1, .keys = 40, .lanes = lanes};
      run(IndexerCase<bf16, format::Plain<bf16>>(heads, shape));
      run(IndexerCase<fp16, format::Plain<fp16>>(heads, shape));
      run(IndexerCase<float, format::Plain<float>>(heads, shape));
    }
  }
}

TEMPLATE_LIST_TEST_CASE("indexer: a position without a slot scores -inf", "[indexer]",
                        test::Executors) {
  for_each_format([](auto types) {
    using T = decltype(types);
    IndexerCase<typename T::Query, typename T::Format> c(
        3, {.requests = 2, .keys = 96, .lanes = 16, .page_size = 8});
    for (index_t r = 0; r < 2; ++r) c.keys.write_random(r, 0, 96, 5);
    for (std::uint64_t seed = 0; seed < 3; ++seed) {
      c.add_random_row(static_cast<position_t>(94 + seed), 1, seed);
    }
    auto const whole = run_scores(TestType{}, c);
    c.keys.unmap(1, 2);
    c.keys.entry(1, 8) = static_cast<position_t>(c.keys.slots() / 8);  // one past the cache
    c.keys.entry(1, 11) = std::numeric_limits<position_t>::max();
    c.keys.entry(1, 5) = std::numeric_limits<position_t>::min();
    auto const got = run_scores(TestType{}, c);
    index_t wrong = 0;
    for (std::size_t r = 0; r < got.size(); ++r) {
      for (std::size_t s = 0; s < got[r].size(); ++s) {
        std::size_t const page = s / 8;
        bool const hole = page == 2 || page == 5 || page == 8 || page == 11;
        wrong += got[r][s] == (hole ? -infinity : whole[r][s]) ? 0 : 1;
      }
    }
    CHECK(wrong == 0);
  });
}

TEMPLATE_LIST_TEST_CASE("indexer: a request without pages scores -inf everywhere", "[indexer]",
                        test::Executors) {
  Fp32 c(1, {.requests = 2, .keys = 8, .lanes = 4, .page_size = 4});
  for (index_t r = 0; r < 2; ++r) c.keys.write_random(r, 0, 8, 5);
  for (position_t const request : {-1, 2, std::numeric_limits<position_t>::max()}) {
    c.add_random_row(8, request, 1);
  }
  for (auto const& row : run_scores(TestType{}, c)) {
    CHECK(row == std::vector<float>(8, -infinity));
  }
  CHECK(run_select(TestType{}, c, 3)[0] == Row{{0, 1, 2}, 3});  // -inf is an ordinary score
}

TEMPLATE_LIST_TEST_CASE("indexer: rows that select everything are not scored", "[indexer]",
                        test::Executors) {
  Fp32 c(2, {.requests = 1, .keys = 40, .lanes = 8, .page_size = 4});  // all keys are NaN
  std::vector<float> const nan_query(16, std::nanf(""));
  for (position_t const length : {0, 1, 9, 10}) c.add_row(length, 0, nan_query, {1, 1});
  test::forbid(c.keys.memory().data(), c.keys.memory().bytes());
  auto const rows = run_select(TestType{}, c, 10);
  run_scores(TestType{}, c, {}, 10);
  test::allow(c.keys.memory().data(), c.keys.memory().bytes());
  for (std::size_t r = 0; r < rows.size(); ++r) {
    CHECK(rows[r].count == c.lengths[r]);
    for (position_t j = 0; j < 10; ++j) {
      CHECK(rows[r].indices[static_cast<std::size_t>(j)] == (j < c.lengths[r] ? j : -1));
    }
  }
}

TEMPLATE_LIST_TEST_CASE("indexer: lengths below zero and above the capacity", "[indexer]",
                        test::Executors) {
  Fp32 c(2, {.requests = 1, .keys = 20, .lanes = 8, .page_size = 4});
  c.keys.write_random(0, 0, 20, 6);
  for (position_t const length : {std::numeric_limits<position_t>::min(), -1, 0, 1, 20, 21,
                                  std::numeric_limits<position_t>::max()}) {
    c.add_random_row(length, 0, 1);
  }
  auto const scores = run_scores(TestType{}, c);
  check_scores(c, scores);
  CHECK(scores.back() == scores[4]);
  auto const rows = run_select(TestType{}, c, 3);
  CHECK(rows[0] == Row{{-1, -1, -1}, 0});
  CHECK(rows[6] == rows[4]);
  auto const wider = run_select(TestType{}, c, 30);  // a row ends at the capacity, not at top_k
  CHECK(wider[4].count == 20);
  CHECK(wider[5] == wider[4]);
  CHECK(wider[6] == wider[4]);
}

TEMPLATE_LIST_TEST_CASE("indexer: the selection is the top-k of the scores", "[indexer]",
                        test::Executors) {
  for_each_format([](auto types) {
    using T = decltype(types);
    IndexerCase<typename T::Query, typename T::Format> c(
        4, {.requests = 2, .keys = 200, .lanes = 32, .page_size = 16});
    for (index_t r = 0; r < 2; ++r) c.keys.write_random(r, 0, 200, 7);
    for (std::uint64_t seed = 0; seed < 9; ++seed) {
      c.add_random_row(static_cast<position_t>(20 * seed + 30), seed % 2 == 0 ? 0 : 1, seed);
    }
    auto const scores = run_scores(TestType{}, c);
    auto const rows = run_select(TestType{}, c, 60);
    for (std::size_t r = 0; r < rows.size(); ++r) {
      CHECK(rows[r] == test::select_by_sort(scores[r], c.lengths[r], 60));
    }
  });
}

TEMPLATE_LIST_TEST_CASE("indexer: no rows is a legal call", "[indexer]", test::Executors) {
  Fp32 const c(2, {.requests = 1, .keys = 8, .lanes = 4});
  CHECK(run_scores(TestType{}, c).empty());
  CHECK(run_select(TestType{}, c, 3).empty());
}

TEMPLATE_LIST_TEST_CASE("indexer: fits the concept on every executor", "[indexer]",
                        test::Executors) {
  for_each_format([](auto types) {
    using T = decltype(types);
    static_assert(IndexerPolicy<ReluDotIndexer<typename T::Query, typename T::Format>, TestType>);
  });
  SUCCEED();
}

#if !defined(INDEXSHARE_TEST_CUDA)
TEST_CASE("indexer: host and reference differ by no more than fp32 rounding", "[indexer]") {
  IndexerCase<bf16, format::IndexKeyE4m3> c(
      64, {.requests = 1, .keys = 256, .lanes = 128, .page_size = 64});
  c.keys.write_random(0, 0, 256, 8);
  for (std::uint64_t seed = 0; seed < 4; ++seed) c.add_random_row(256, 0, seed);
  auto const reference = run_scores(ReferenceExec{}, c);
  auto const host = run_scores(test::Serial{}, c);
  index_t wrong = 0;
  for (std::size_t r = 0; r < host.size(); ++r) {
    for (std::size_t s = 0; s < host[r].size(); ++s) {
      test::Sum const want = c.expected(static_cast<index_t>(r), static_cast<index_t>(s));
      double const error =
          std::abs(static_cast<double>(host[r][s]) - static_cast<double>(reference[r][s]));
      wrong += error <= test::tolerance(c.lanes + c.heads, want.magnitude) ? 0 : 1;
      // the reference is the definition, rounded once
      wrong += reference[r][s] == static_cast<float>(want.value) ? 0 : 1;
    }
  }
  CHECK(wrong == 0);
}
#endif
