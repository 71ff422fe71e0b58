// SPDX-License-Identifier: Apache-2.0
//
// Index keys in int8: as the exact indexer reads them, as append_rows writes them, and the
// approximate indexer, whose scores are those of the codes up to fp32 rounding, on every executor.
#include <indexshare/host/append.hpp>
#include <indexshare/host/approximate_int8.hpp>
#include <indexshare/indexer/approximate_int8.hpp>
#include <indexshare/reference.hpp>

#include <catch2/catch_template_test_macros.hpp>
#include <catch2/catch_test_macros.hpp>

#include "indexer_run.hpp"
#include "random.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <limits>
#include <string_view>
#include <vector>

using namespace indexshare;
using test::one_hot;
using test::Random;
using test::run_scores;
using test::run_select;

namespace {

constexpr auto host = Space::host;
constexpr float infinity = std::numeric_limits<float>::infinity();
constexpr float not_a_number = std::numeric_limits<float>::quiet_NaN();

template <class Query>
using Int8Case = test::IndexerCase<Query, format::IndexKeyInt8, ApproximateInt8Indexer<Query>>;
using Scores = std::vector<std::vector<float>>;

/// Puts codes and a scale where the format says they are. Only for a cache without pages.
template <class Case>
void write_codes(Case& c, index_t position, std::vector<int> const& codes, float scale) {
  std::byte* const block = c.keys.memory().data();
  for (index_t d = 0; d < c.lanes; ++d) {
    block[position * c.lanes + d] = static_cast<std::byte>(codes[static_cast<std::size_t>(d)]);
  }
  std::memcpy(block + c.keys.keys() * c.lanes + 4 * position, &scale, 4);
}

/// A score as the documentation defines it, from the stored bytes, in double.
template <class Query>
test::Sum expected(Int8Case<Query> const& c, index_t row, index_t position) {
  auto const cache = c.keys.view();
  index_t const slot = c.keys.slot(c.requests[static_cast<std::size_t>(row)], position);
  auto const* const block = cache.data + slot / cache.block_size * cache.block_stride;
  auto const* const key = block + slot % cache.block_size * c.lanes;
  float key_scale;
  std::memcpy(&key_scale, block + cache.block_size * c.lanes + 4 * (slot % cache.block_size), 4);
  test::Sum score;
  for (index_t h = 0; h < c.heads; ++h) {
    auto const head = c.query(row).subspan(static_cast<std::size_t>(h * c.lanes),
                                           static_cast<std::size_t>(c.lanes));
    float largest = 0;
    for (float const lane : head) largest = std::max(largest, std::abs(lane));
    float const scale = std::max(largest, 0x1p-100f) / 64;
    double dot = 0;
    for (index_t d = 0; d < c.lanes; ++d) {
      dot += std::nearbyint(static_cast<double>(head[static_cast<std::size_t>(d)]) /
                            static_cast<double>(scale)) *
             static_cast<double>(static_cast<signed char>(key[d]));
    }
    double const weight = static_cast<double>(c.weights(row)[static_cast<std::size_t>(h)]) *
                          static_cast<double>(scale) * static_cast<double>(key_scale);
    score.value += weight * std::max(dot, 0.0);
    score.magnitude += std::abs(weight) * std::max(dot, 0.0);
  }
  return score;
}

template <class Query>
void check_approximate(Int8Case<Query> const& c, Scores const& scores) {
  index_t wrong = 0;
  for (index_t row = 0; row < c.rows(); ++row) {
    auto const& got = scores[static_cast<std::size_t>(row)];
    for (std::size_t s = 0; s < got.size(); ++s) {
      test::Sum const want = expected(c, row, static_cast<index_t>(s));
      double const error = std::abs(static_cast<double>(got[s]) - want.value);
      wrong += error <= test::tolerance(c.heads, want.magnitude) ? 0 : 1;
    }
  }
  INFO("heads " << c.heads << ", lanes " << c.lanes);
  CHECK(wrong == 0);
}

/// Two requests of random keys, rows of both.
template <class Query>
Int8Case<Query> random_case(index_t heads, index_t lanes, index_t keys, index_t page_size,
                            index_t rows) {
  Int8Case<Query> c(heads, {.requests = 2, .keys = keys, .lanes = lanes, .page_size = page_size});
  for (index_t r = 0; r < 2; ++r) c.keys.write_random(r, 0, keys, 5);
  for (index_t row = 0; row < rows; ++row) {
    c.add_random_row(static_cast<position_t>(keys - row % 13), row % 4 == 3 ? 1 : 0,
                     static_cast<std::uint64_t>(row));
  }
  return c;
}

std::vector<float> spread(index_t n, std::uint64_t seed, bool heavy) {
  auto values = Random(seed).normals(static_cast<std::size_t>(n));
  if (heavy) {
    for (float& v : values) v *= std::abs(v);
  }
  return values;
}

}  // namespace

TEMPLATE_LIST_TEST_CASE("int8 keys: the exact indexer scores what the codes decode to",
                        "[indexer][int8]", test::Executors) {
  for (index_t const page_size : {0, 1, 16}) {
    test::IndexerCase<bf16, format::IndexKeyInt8> c(
        5, {.requests = 2, .keys = 90, .lanes = 48, .page_size = page_size});
    for (index_t r = 0; r < 2; ++r) c.keys.write_random(r, 0, 90, 1);
    for (std::uint64_t seed = 0; seed < 9; ++seed) {
      c.add_random_row(static_cast<position_t>(80 + seed), seed % 4 == 3 ? 1 : 0, seed);
    }
    test::check_scores(c, run_scores(TestType{}, c));
  }
}

TEMPLATE_LIST_TEST_CASE("approximate int8: scores of the codes in every type and shape",
                        "[indexer][int8]", test::AllExecutors) {
  TestType const x{};
  auto const check = [&](auto const& c) { check_approximate(c, run_scores(x, c)); };
  for (index_t const lanes : {1, 3, 4, 7, 16, 30, 32, 33, 64, 127, 128, 130, 200}) {
    check(random_case<bf16>(9, lanes, 40, 16, 3));
  }
  for (index_t const heads : {1, 2, 4, 5, 8, 15, 16, 17, 24, 32, 33, 48, 64, 65, 128}) {
    check(random_case<bf16>(heads, 36, 30, 8, 2));
  }
  for (index_t const page_size : {0, 1, 5, 64}) {
    check(random_case<float>(17, 64, 150, page_size, 20));
    check(random_case<fp16>(17, 64, 150, page_size, 20));
    check(random_case<e4m3>(17, 64, 150, page_size, 20));
  }
}

TEMPLATE_LIST_TEST_CASE("approximate int8: every lane, head and code by one-hots",
                        "[indexer][int8]", test::AllExecutors) {
  TestType const x{};
  for (index_t const lanes : {1, 6, 32, 64, 128, 131}) {
    for (index_t const heads : {1, 3, 16, 17, 64}) {
      // codes of keys -128 .. 127 in all lanes in turn; heads see lanes of their own with the
      // codes -64 .. 64
      Int8Case<float> c(heads, {.requests = 1, .keys = 256 + lanes, .lanes = lanes});
      for (index_t s = 0; s < c.keys.keys(); ++s) {
        std::vector<int> codes(static_cast<std::size_t>(lanes), 0);
        codes[static_cast<std::size_t>(s % lanes)] = s < 256 ? static_cast<int>(s) - 128 : 127;
        write_codes(c, s, codes, s % 3 == 0 ? 0.5f : 1.0f);
      }
      std::vector<float> query;
      std::vector<float> weights;
      for (index_t h = 0; h < heads; ++h) {
        auto const lane = (7 * h + 3) % lanes;
        auto head = one_hot(lanes, lane, static_cast<float>(h * 5 % 129 - 64));
        if (lanes > 1) head[static_cast<std::size_t>((lane + 1) % lanes)] = 64;  // scale 1
        query.insert(query.end(), head.begin(), head.end());
        weights.push_back(h % 3 == 2 ? -1.0f : static_cast<float>(1 << (h % 4)));
      }
      c.add_row(static_cast<position_t>(c.keys.keys()), 0, query, weights);
      auto const scores = run_scores(x, c)[0];
      index_t wrong = 0;
      for (std::size_t s = 0; s < scores.size(); ++s) {
        wrong +=
            static_cast<double>(scores[s]) == expected(c, 0, static_cast<index_t>(s)).value ? 0 : 1;
      }
      INFO("lanes " << lanes << ", heads " << heads);
      CHECK(wrong == 0);
    }
  }
}

TEMPLATE_LIST_TEST_CASE("approximate int8: the largest codes do not saturate", "[indexer][int8]",
                        test::AllExecutors) {
  TestType const x{};
  for (index_t const lanes : {2, 128, 2048}) {  // 2048 * 128 * 64 = 2^24, exact in fp32
    Int8Case<float> c(4, {.requests = 1, .keys = 40, .lanes = lanes});
    for (index_t s = 0; s < 40; ++s) {
      std::vector<int> codes;
      for (index_t d = 0; d < lanes; ++d) codes.push_back((d + s) % 40 < 20 ? 127 : -128);
      std::array<int, 4> const constant{127, -128, -127, 0};
      if (s < 4) std::fill(codes.begin(), codes.end(), constant[static_cast<std::size_t>(s)]);
      write_codes(c, s, codes, 1);
    }
    std::vector<float> query;
    for (float const value : {64.0f, -64.0f}) {
      query.insert(query.end(), static_cast<std::size_t>(lanes), value);
    }
    for (index_t d = 0; d < lanes; ++d) query.push_back(d % 2 == 0 ? 64.0f : -64.0f);
    for (index_t d = 0; d < lanes; ++d) query.push_back(d % 4 < 2 ? -64.0f : 64.0f);
    for (std::size_t h = 0; h < 4; ++h) {
      std::vector<float> weights(4, 0.0f);
      weights[h] = 1;
      c.add_row(40, 0, query, weights);
    }
    auto const scores = run_scores(x, c);
    index_t wrong = 0;
    for (index_t row = 0; row < 4; ++row) {
      for (index_t s = 0; s < 40; ++s) {
        double const got =
            static_cast<double>(scores[static_cast<std::size_t>(row)][static_cast<std::size_t>(s)]);
        wrong += got == expected(c, row, s).value ? 0 : 1;
      }
    }
    INFO("lanes " << lanes);
    CHECK(wrong == 0);
    CHECK(scores[0][0] == static_cast<float>(lanes * 127 * 64));
    CHECK(scores[1][1] == static_cast<float>(lanes * 128 * 64));
  }
}

TEMPLATE_LIST_TEST_CASE("approximate int8: query codes round to nearest, ties to even",
                        "[indexer][int8]", test::AllExecutors) {
  TestType const x{};
  // one key per lane, 1 in that lane, so scores are the codes of the lanes; the largest is 64
  std::vector<float> const lanes{64, 0.5f, 1.5f, 2.5f, 62.5f, 63.5f, 0.49999997f, 0.50000006f, 1};
  std::vector<float> const codes{64, 0, 2, 2, 62, 64, 0, 1, 1};
  auto const n = static_cast<index_t>(lanes.size());
  Int8Case<float> c(2, {.requests = 1, .keys = n, .lanes = n});
  for (index_t s = 0; s < n; ++s) {
    std::vector<int> key(lanes.size(), 0);
    key[static_cast<std::size_t>(s)] = 1;
    write_codes(c, s, key, 1);
  }
  auto query = lanes;
  for (float const lane : lanes) query.push_back(-lane);
  c.add_row(static_cast<position_t>(n), 0, query, {1, 1});
  CHECK(run_scores(x, c)[0] == codes);
  for (index_t s = 0; s < n; ++s) {
    std::vector<int> key(lanes.size(), 0);
    key[static_cast<std::size_t>(s)] = -1;
    write_codes(c, s, key, 1);
  }
  CHECK(run_scores(x, c)[0] == codes);  // by the negative head
}

TEMPLATE_LIST_TEST_CASE("approximate int8: NaN and infinity", "[indexer][int8]",
                        test::AllExecutors) {
  TestType const x{};
  index_t const keys = 30;
  auto const with = [&](auto change) {
    auto c = random_case<float>(3, 20, keys, 0, 0);
    std::vector<float> query = spread(60, 3, false);
    std::vector<float> weights{1, -2, 0.5f};
    change(query, weights);
    c.add_row(static_cast<position_t>(keys), 0, query, weights);
    return run_scores(x, c)[0];
  };
  auto const all_nan = [](std::vector<float> const& scores) {
    return std::all_of(scores.begin(), scores.end(), [](float v) { return std::isnan(v); });
  };
  for (float const bad : {not_a_number, -not_a_number, infinity, -infinity}) {
    for (std::size_t const lane : {0u, 19u, 20u, 39u, 59u}) {
      CHECK(all_nan(with([&](auto& query, auto&) { query[lane] = bad; })));
    }
  }
  CHECK(all_nan(with([](auto&, auto& weights) { weights[1] = not_a_number; })));

  // heads of zeros, and of lanes too small for a scale of their own, score 0
  for (float const small : {0.0f, -0.0f, 0x1p-149f, -0x1p-126f, 0x1p-108f}) {
    auto const scores =
        with([&](auto& query, auto&) { std::fill(query.begin(), query.end(), small); });
    CHECK(scores == std::vector<float>(static_cast<std::size_t>(keys), 0.0f));
  }
  auto const tiny = with([](auto& query, auto&) {
    for (float& lane : query) lane *= 0x1p-90f;
  });
  auto const usual = with([](auto&, auto&) {});
  for (std::size_t s = 0; s < usual.size(); ++s) CHECK(tiny[s] == usual[s] * 0x1p-90f);

  // a scale of NaN makes its key's score NaN and no other
  Int8Case<float> c(1, {.requests = 1, .keys = keys, .lanes = 4});
  c.add_row(static_cast<position_t>(keys), 0, {1, 0, 0, 0}, {1});
  for (index_t s = 0; s < keys; ++s) {
    write_codes(c, s, {64, 1, 1, 1}, s == 7 ? not_a_number : (s == 9 ? infinity : 0.5f));
  }
  auto const scores = run_scores(x, c)[0];
  for (std::size_t s = 0; s < scores.size(); ++s) {
    if (s == 7) {
      CHECK(std::isnan(scores[s]));
    } else {
      CHECK(scores[s] == (s == 9 ? infinity : 32.0f));
    }
  }
  auto const row = run_select(x, c, keys - 1)[0];
  CHECK(std::find(row.indices.begin(), row.indices.end(), 7) == row.indices.end());
}

TEMPLATE_LIST_TEST_CASE("approximate int8: a position without a slot scores -inf",
                        "[indexer][int8]", test::AllExecutors) {
  TestType const x{};
  auto c = random_case<bf16>(5, 40, 160, 8, 11);
  auto whole = run_scores(x, c);
  for (index_t r = 0; r < 2; ++r) {
    for (index_t const page : {0, 3, 4, 19}) c.keys.unmap(r, page);
    c.keys.entry(r, 9) = static_cast<position_t>(c.keys.slots() / 8);  // one past the cache
    c.keys.entry(r, 10) = std::numeric_limits<position_t>::max();
  }
  for (auto& row : whole) {
    for (std::size_t s = 0; s < row.size(); ++s) {
      std::size_t const page = s / 8;
      if (page == 0 || page == 3 || page == 4 || page == 9 || page == 10 || page == 19) {
        row[s] = -infinity;
      }
    }
  }
  CHECK(run_scores(x, c) == whole);
}

TEMPLATE_LIST_TEST_CASE("approximate int8: lengths, and rows that select everything",
                        "[indexer][int8]", test::AllExecutors) {
  TestType const x{};
  Int8Case<bf16> c(3, {.requests = 1, .keys = 32, .lanes = 24, .page_size = 4});
  c.keys.write_random(0, 0, 32, 2);
  for (position_t const length : {std::numeric_limits<position_t>::min(), -1, 0, 1, 12, 13, 31, 32,
                                  33, std::numeric_limits<position_t>::max()}) {
    c.add_random_row(length, 0, 4);
  }
  auto const scores = run_scores(x, c);
  check_approximate(c, scores);
  CHECK(scores.back() == scores[7]);
  auto const rows = run_select(x, c, 12);
  for (std::size_t r = 0; r < rows.size(); ++r) {
    CHECK(rows[r] == test::select_by_sort(scores[r], c.lengths[r], 12));
  }
}

TEMPLATE_LIST_TEST_CASE("approximate int8: the selection is the top-k of the scores",
                        "[indexer][int8]", test::AllExecutors) {
  TestType const x{};
  for (bool const equal : {false, true}) {
    auto c = random_case<bf16>(8, 64, 1500, 64, 20);
    if (equal) {
      for (index_t s = 0; s < 1500; s += 2) {
        c.keys.write(0, s, spread(64, static_cast<std::uint64_t>(s % 6 + 1), false));
      }
    }
    auto const scores = run_scores(x, c);
    for (index_t const top_k : {1, 100, 1493}) {
      auto const rows = run_select(x, c, top_k);
      index_t wrong = 0;
      for (std::size_t r = 0; r < rows.size(); ++r) {
        wrong += rows[r] == test::select_by_sort(scores[r], c.lengths[r], top_k) ? 0 : 1;
      }
      INFO("top-k " << top_k);
      CHECK(wrong == 0);
      CHECK(run_select(x, c, top_k, 0) == rows);
    }
  }
}

TEST_CASE("approximate int8: bits do not depend on batch, threads, pages or strides",
          "[indexer][int8]") {
  auto const paged = [](index_t page_size) {
    return random_case<bf16>(33, 72, 400, page_size, 20);
  };
  auto const c = paged(16);
  auto const want = run_scores(test::Serial{}, c);
  CHECK(run_scores(test::Threads{}, c) == want);
  CHECK(run_scores(test::Backward{}, c) == want);
  for (index_t const page_size : {0, 1, 50, 400}) {
    CHECK(run_scores(test::Threads{}, paged(page_size)) == want);
  }
  for (index_t row = 0; row < c.rows(); ++row) {
    CHECK(run_scores(test::Serial{}, c, {}, 0, {row, 1})[0] == want[static_cast<std::size_t>(row)]);
  }
  CHECK(run_scores(test::Serial{}, c, {.head_pad = 7, .row_pad = 3, .weight_pad = 2}) == want);
  CHECK(run_scores(test::Serial{}, c, {.head_major = true}) == want);
  auto const selected = run_select(test::Serial{}, c, 50);
  CHECK(run_select(test::Threads{}, c, 50) == selected);
  CHECK(run_select(test::Backward{}, c, 50, 0) == selected);
}

TEMPLATE_LIST_TEST_CASE("approximate int8: exact sums give every executor the same bits",
                        "[indexer][int8]", test::AllExecutors) {
  TestType const x{};
  Int8Case<float> c(20, {.requests = 1, .keys = 300, .lanes = 65});
  Random random(3);
  auto const integers = [&](std::size_t n, int most) {
    std::vector<float> values(n);
    for (float& v : values) {
      v = static_cast<float>(random.below(static_cast<std::size_t>(2 * most + 1))) -
          static_cast<float>(most);
    }
    return values;
  };
  for (index_t s = 0; s < 300; ++s) {
    auto const codes = integers(65, 9);
    write_codes(c, s, {codes.begin(), codes.end()}, 0.25f);
  }
  for (position_t row = 0; row < 10; ++row) {
    auto query = integers(20 * 65, 20);
    for (std::size_t h = 0; h < 20; ++h) query[65 * h] = 64;
    c.add_row(291 + row, 0, query, integers(20, 3));
  }
  CHECK(run_scores(x, c) == run_scores(ReferenceExec{}, c));
  CHECK(run_select(x, c, 40) == run_select(ReferenceExec{}, c, 40));
}

TEST_CASE("approximate int8: finds what the exact bf16 indexer selects", "[indexer][int8]") {
  constexpr index_t heads = 16, lanes = 128, keys = 4096, top_k = 512;
  for (bool const heavy : {false, true}) {
    test::IndexerCase<bf16, format::Plain<bf16>> exact(
        heads, {.requests = 1, .keys = keys, .lanes = lanes, .page_size = 64});
    Int8Case<bf16> coded(heads, {.requests = 1, .keys = keys, .lanes = lanes, .page_size = 64});
    for (index_t s = 0; s < keys; ++s) {
      auto const key = spread(lanes, static_cast<std::uint64_t>(s + 1), heavy);
      exact.keys.write(0, s, key);
      coded.keys.write(0, s, key);
    }
    for (std::uint64_t row = 0; row < 4; ++row) {
      auto const query = spread(heads * lanes, 100000 + row, heavy);
      auto const weights = spread(heads, 200000 + row, false);
      exact.add_row(keys, 0, query, weights);
      coded.add_row(keys, 0, query, weights);
    }
    auto const want = run_select(test::Serial{}, exact, top_k);
    auto const got = run_select(test::Serial{}, coded, top_k);
    std::size_t found = 0;
    for (std::size_t r = 0; r < want.size(); ++r) {
      std::vector<position_t> both;
      std::set_intersection(want[r].indices.begin(), want[r].indices.end(), got[r].indices.begin(),
                            got[r].indices.end(), std::back_inserter(both));
      found += both.size();
    }
    double const recall = static_cast<double>(found) / static_cast<double>(4 * top_k);
    INFO((heavy ? "heavy-tailed" : "normal") << " lanes, recall " << recall);
    CHECK(recall >= (heavy ? 0.97 : 0.98));
    CHECK(recall < 1);  // or the name would be wrong
  }
}

TEST_CASE("approximate int8: size queries and checks", "[indexer][int8]") {
  ApproximateInt8Indexer<bf16> const policy;
  static_assert(IndexerPolicy<ApproximateInt8Indexer<bf16>, test::Threads>);
  static_assert(IndexerPolicy<ApproximateInt8Indexer<float>, ReferenceExec>);
  Shape const shape{.rows = 3, .keys = 100, .top_k = 8, .index_heads = 5, .index_dim = 20};
  auto const bytes = [&](Shape const& s) {
    return indexer_workspace(test::Threads{}, policy, s)->bytes;
  };
  Shape wider = shape;
  for (auto* const extent : {&wider.rows, &wider.index_heads, &wider.index_dim}) {
    index_t const kept = *extent;
    for (index_t more = kept; more < kept + 40; ++more) {
      std::size_t const before = bytes(wider);
      *extent = more + 1;
      CHECK(bytes(wider) >= before);
    }
    *extent = kept;
  }
  auto const refuses = [&](Status const& status, Errc code, std::string_view part) {
    INFO(status.what);
    CHECK(status.code == code);
    CHECK(std::string_view(status.what).find(part) != std::string_view::npos);
  };
  wider.index_dim = max_int8_index_dim;
  CHECK(indexer_workspace(test::Serial{}, policy, wider).has_value());
  wider.index_dim = max_int8_index_dim + 1;
  refuses(indexer_workspace(test::Serial{}, policy, wider).error(), Errc::bad_shape, "index_dim");
  refuses(indexer_workspace(ReferenceExec{}, policy, wider).error(), Errc::bad_shape, "index_dim");
  wider.index_dim = 0;
  refuses(indexer_workspace(test::Serial{}, policy, wider).error(), Errc::bad_shape, "index_dim");

  auto const c = random_case<bf16>(5, 20, 100, 4, 3);
  test::IndexerInputs<bf16, format::IndexKeyInt8, ApproximateInt8Indexer<bf16>> const memory(c);
  auto in = memory.inputs();
  Shape const right = c.shape(8);
  CHECK(indexer_check(test::Serial{}, policy, in, memory.batch(), right).ok());
  in.keys.lanes = 19;
  refuses(indexer_check(test::Serial{}, policy, in, memory.batch(), right), Errc::bad_shape,
          "lanes of the index-key cache");
  in = memory.inputs();
  in.q_basis = LaneBasis::hadamard;
  refuses(indexer_check(ReferenceExec{}, policy, in, memory.batch(), right), Errc::bad_value,
          "basis");
}

// ---- append_rows

TEST_CASE("int8 keys: append_rows quantises rows where the page table says", "[cache][int8]") {
  constexpr index_t lanes = 6, page_size = 3;
  test::Guarded<std::byte> memory(4 * page_size * (lanes + 4), test::unwritten);
  auto const cache =
      make_index_key_int8_cache<host>(memory.data(), Pages{4}, PageSize{page_size}, HeadDim{lanes});
  CHECK((cache.block_stride == 30 && cache.row_stride == lanes));
  auto const table = test::guarded<position_t>({2, 0, 3, -1});
  auto const pages =
      make_page_table<host>(table.data(), Requests{2}, Pages{2}, PageSize{page_size});
  auto const append = [&](std::vector<float> const& rows, std::vector<position_t> const& positions,
                          std::vector<position_t> const& requests, auto const& to) {
    auto const n = static_cast<index_t>(positions.size());
    return append_rows(HostExec<>{}, make_dense<host, float const, 2>(rows.data(), {n, lanes}),
                       make_lengths<host>(positions.data(), Rows{n}),
                       make_lengths<host>(requests.data(), Rows{n}), pages, to);
  };
  struct Token {
    std::vector<float> lanes;
    std::vector<int> codes;
    float scale;
  };
  std::vector<Token> const tokens{
      {{127, -127, 0.5f, 1.5f, -2.5f, 3}, {127, -127, 0, 2, -2, 3}, 1.0f},
      {{-254, 1, 2, 3, 100, 127}, {-127, 0, 1, 2, 50, 64}, 2.0f},
      {{0, -0.0f, 0, 0, 0, 0}, {0, 0, 0, 0, 0, 0}, 0x1p-100f / 127},
      {{0x1p-149f, 0, 0, 0, 0, -0x1p-120f}, {0, 0, 0, 0, 0, 0}, 0x1p-100f / 127},
      {{1, not_a_number, 2, 3, 4, 5}, {0, 0, 0, 0, 0, 0}, not_a_number},
      {{1, 2, 3, 4, 5, -infinity}, {0, 0, 0, 0, 0, 0}, not_a_number},
      {{3e38f, -3e38f, 1e38f, 0, 0, 1}, {127, -127, 42, 0, 0, 0}, 3e38f / 127}};
  std::vector<float> rows;
  std::vector<position_t> positions{5, 0, 1, 2, 4, 2, 3};
  std::vector<position_t> requests{0, 0, 1, 1, 0, 0, 0};
  std::vector<index_t> const slots{2, 6, 10, 11, 1, 8, 0};
  for (Token const& token : tokens) rows.insert(rows.end(), token.lanes.begin(), token.lanes.end());

  // one position without a page: nothing is written
  positions.push_back(3);
  requests.push_back(1);
  rows.insert(rows.end(), lanes, 1.0f);
  Status const refused = append(rows, positions, requests, cache);
  CHECK((refused.code == Errc::bad_value && refused.got == no_position));
  CHECK(std::all_of(memory.data(), memory.data() + memory.size(),
                    [](std::byte b) { return b == test::unwritten; }));
  positions.pop_back();
  requests.pop_back();
  rows.resize(rows.size() - lanes);
  REQUIRE(append(rows, positions, requests, cache).ok());

  index_t wrong = 0;
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    std::byte const* const block = memory.data() + slots[i] / page_size * 30;
    std::byte const* const codes = block + slots[i] % page_size * lanes;
    for (std::size_t d = 0; d < lanes; ++d) {
      wrong += static_cast<signed char>(codes[d]) == tokens[i].codes[d] ? 0 : 1;
    }
    float scale;
    std::memcpy(&scale, block + page_size * lanes + 4 * (slots[i] % page_size), 4);
    wrong += scale == tokens[i].scale || (std::isnan(scale) && std::isnan(tokens[i].scale)) ? 0 : 1;
  }
  CHECK(wrong == 0);
  CHECK(memory.intact());
  for (index_t const slot : {3, 4, 5, 7, 9}) {  // nobody's
    CHECK(memory[static_cast<std::size_t>(slot / page_size * 30 + slot % page_size * lanes)] ==
          test::unwritten);
  }

  auto overlapping = cache;
  overlapping.block_stride = 29;
  CHECK(append(rows, positions, requests, overlapping).code == Errc::bad_stride);
  overlapping = cache;
  overlapping.row_stride = 5;
  CHECK(append(rows, positions, requests, overlapping).code == Errc::bad_stride);
}

TEST_CASE("int8 keys: a value is off by no more than half a scale", "[cache][int8]") {
  constexpr index_t lanes = 33, n = 200;
  test::Guarded<std::byte> memory(n * (lanes + 4));
  auto const cache =
      make_index_key_int8_cache<host>(memory.data(), Pages{1}, PageSize{n}, HeadDim{lanes});
  auto const rows = spread(n * lanes, 8, true);
  std::vector<position_t> positions(n), requests(n, 0);
  for (position_t i = 0; i < n; ++i) positions[static_cast<std::size_t>(i)] = i;
  REQUIRE(append_rows(HostExec<>{}, make_dense<host, float const, 2>(rows.data(), {n, lanes}),
                      make_lengths<host>(positions.data(), Rows{n}),
                      make_lengths<host>(requests.data(), Rows{n}),
                      make_contiguous_table<host>(Keys{n}), cache)
              .ok());
  CacheView<host, format::IndexKeyInt8> const reader = cache;
  std::vector<float> row(lanes);
  index_t wrong = 0;
  for (index_t s = 0; s < n; ++s) {
    decode_row(reader, s, row.data());
    float const* const want = rows.data() + s * lanes;
    float largest = 0;
    for (index_t d = 0; d < lanes; ++d) largest = std::max(largest, std::abs(want[d]));
    for (index_t d = 0; d < lanes; ++d) {
      wrong += std::abs(row[static_cast<std::size_t>(d)] - want[d]) <= largest / 253.9f ? 0 : 1;
    }
  }
  CHECK(wrong == 0);
}
