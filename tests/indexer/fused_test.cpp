// SPDX-License-Identifier: Apache-2.0
//
// The host's selection fused with scoring: exactly the top-k of the scores that indexer_score
// gives, for scores in any order, lengths of any sizes and any scratch.
#include <indexshare/host/indexer.hpp>
#include <indexshare/indexer/relu_dot.hpp>

#include <catch2/catch_template_test_macros.hpp>
#include <catch2/catch_test_macros.hpp>

#include "indexer_run.hpp"
#include "random.hpp"

#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <string_view>
#include <tuple>
#include <vector>

using namespace indexshare;
using test::IndexerCase;
using test::Random;
using test::run_scores;
using test::run_select;

namespace {

using Fp32 = IndexerCase<float, format::Plain<float>>;
using AllHosts =
    std::tuple<test::Serial, test::Threads, test::Backward, test::On<HostIsa::portable>,
               test::On<HostIsa::avx2>, test::On<HostIsa::avx512>, test::On<HostIsa::avx512_bf16>>;

/// A request whose key s scores value(s), whatever its sign: two heads of opposite weights take one
/// lane each.
Fp32 scored_by(index_t keys, std::function<float(index_t)> const& value, index_t page_size = 16) {
  Fp32 c(2, {.requests = 1, .keys = keys, .lanes = 2, .page_size = page_size});
  for (index_t s = 0; s < keys; ++s) {
    float const v = value(s);
    c.keys.write(0, s,
                 std::isnan(v) ? std::vector<float>{v, 0.0f}
                               : std::vector<float>{v > 0 ? v : 0.0f, v < 0 ? -v : 0.0f});
  }
  return c;
}
void add_rows(Fp32& c, std::vector<position_t> const& lengths) {
  for (position_t const length : lengths) c.add_row(length, 0, {1, 0, 0, 1}, {1, -1});
}

/// Selects with ample and with the least scratch, and holds both against the sorted scores.
template <class X, class Query, class Format>
void check_selection(X const& x, IndexerCase<Query, Format> const& c, index_t top_k) {
  auto const scores = run_scores(x, c);
  auto const ample = run_select(x, c, top_k);
  index_t wrong = 0;
  for (std::size_t r = 0; r < ample.size(); ++r) {
    wrong += ample[r] == test::select_by_sort(scores[r], c.lengths[r], top_k) ? 0 : 1;
  }
  INFO("top-k " << top_k);
  CHECK(wrong == 0);
  CHECK(run_select(x, c, top_k, 0) == ample);
}

struct Order {
  char const* name;
  std::function<float(index_t)> value;
};

std::vector<Order> orders(index_t keys) {
  auto const random = [](index_t s) {
    return static_cast<float>(Random(static_cast<std::uint64_t>(s)).below(2000)) - 1000.0f;
  };
  constexpr float inf = std::numeric_limits<float>::infinity();
  constexpr float nan = std::numeric_limits<float>::quiet_NaN();
  return {{"random", random},
          {"ascending", [](index_t s) { return static_cast<float>(s); }},
          {"descending", [=](index_t s) { return static_cast<float>(keys - s); }},
          {"negative ascending", [=](index_t s) { return static_cast<float>(s - keys); }},
          {"drift", [=](index_t s) { return random(s) + static_cast<float>(s); }},
          {"all equal", [](index_t) { return 7.0f; }},
          {"three levels", [=](index_t s) { return std::fmod(std::abs(random(s)), 3.0f); }},
          {"a long plateau below a few", [](index_t s) { return s % 97 == 3 ? 5.0f : 1.0f; }},
          {"mostly NaN", [=](index_t s) { return s % 50 == 7 ? random(s) : nan; }},
          {"some NaN", [=](index_t s) { return s % 5 == 2 ? nan : random(s); }},
          {"infinite", [=](index_t s) { return s % 3 == 0 ? inf : -inf; }}};
}

}  // namespace

TEMPLATE_LIST_TEST_CASE("fused selection: scores in any order", "[indexer][select]", AllHosts) {
  TestType const x{};
  constexpr index_t keys = 2500;
  for (Order const& order : orders(keys)) {
    INFO(order.name);
    Fp32 c = scored_by(keys, order.value);
    add_rows(c, {2500, 2499, 1201, 300, 17, 2403, 1, 0, 2500, 2401});
    for (index_t const top_k : {1, 16, 299, 300, 301, 2048, 2499}) check_selection(x, c, top_k);
  }
}

TEMPLATE_LIST_TEST_CASE("fused selection: wider than 4096", "[indexer][select]", AllHosts) {
  TestType const x{};
  Fp32 c = scored_by(12000, [](index_t s) {
    return static_cast<float>(Random(static_cast<std::uint64_t>(s)).below(5000));
  });
  add_rows(c, {11999, 4097, 12000});
  for (index_t const top_k : {4096, 5001}) check_selection(x, c, top_k);
}

TEMPLATE_LIST_TEST_CASE("fused selection: lengths around blocks, parts and tiles",
                        "[indexer][select]", AllHosts) {
  TestType const x{};
  IndexerCase<bf16, format::IndexKeyE4m3> c(
      5, {.requests = 4, .keys = 700, .lanes = 24, .page_size = 64});
  for (index_t r = 0; r < 4; ++r) c.keys.write_random(r, 0, 700, 3);
  std::uint64_t seed = 0;
  for (position_t const length : {11, 12, 13, 95, 96, 97, 191, 192, 193, 287, 288, 289, 700}) {
    c.add_random_row(length, static_cast<position_t>(seed % 4), seed);
    ++seed;
  }
  for (position_t row = 0; row < 19; ++row)
    c.add_random_row(600 + row, 2, seed++);                                       // a prefill chunk
  for (position_t row = 0; row < 9; ++row) c.add_random_row(3 * row, 1, seed++);  // a short one
  c.add_random_row(700, 3, seed++);
  for (index_t const top_k : {3, 12, 100}) check_selection(x, c, top_k);
}

TEMPLATE_LIST_TEST_CASE("fused selection: one long row among short ones", "[indexer][select]",
                        AllHosts) {
  TestType const x{};
  Fp32 c = scored_by(
      30000, [](index_t s) { return static_cast<float>(s * 7919 % 30011); }, 0);
  add_rows(c, {40, 7, 30000, 33, 100, 64, 29999, 2});
  for (index_t const top_k : {32, 1000}) check_selection(x, c, top_k);
}

TEMPLATE_LIST_TEST_CASE("fused selection: positions without a slot are the worst",
                        "[indexer][select]", AllHosts) {
  TestType const x{};
  Fp32 c = scored_by(
      400, [](index_t s) { return static_cast<float>(s % 37) - 18.0f; }, 8);
  add_rows(c, {400, 399, 250});
  for (index_t const page : {0, 3, 4, 30, 49}) c.keys.unmap(0, page);
  for (index_t const top_k : {20, 365, 390}) check_selection(x, c, top_k);
}

TEMPLATE_LIST_TEST_CASE(
    "fused selection: equal bits of scores on one instruction set select equally",
    "[indexer][select]", test::IsaExecutors) {
  TestType const x{};
  // small integers: every instruction set computes these scores exactly
  IndexerCase<bf16, format::Plain<bf16>> c(
      33, {.requests = 1, .keys = 900, .lanes = 130, .page_size = 16});
  Random random(5);
  auto const integers = [&](std::size_t n) {
    std::vector<float> values(n);
    for (float& v : values) v = static_cast<float>(random.below(7)) - 3.0f;
    return values;
  };
  for (index_t s = 0; s < 900; ++s) c.keys.write(0, s, integers(130));
  for (position_t row = 0; row < 10; ++row)
    c.add_row(891 + row, 0, integers(33 * 130), integers(33));
  CHECK(run_scores(x, c) == run_scores(ReferenceExec{}, c));
  CHECK(run_select(x, c, 100) == run_select(ReferenceExec{}, c, 100));
}

TEST_CASE("fused selection: bits and positions do not depend on threads", "[indexer][select]") {
  IndexerCase<fp16, format::Plain<fp16>> c(
      32, {.requests = 2, .keys = 3000, .lanes = 64, .page_size = 64});
  for (index_t r = 0; r < 2; ++r) c.keys.write_random(r, 0, 3000, 6);
  for (std::uint64_t seed = 0; seed < 12; ++seed) {
    c.add_random_row(static_cast<position_t>(2989 + seed), seed < 9 ? 0 : 1, seed);
  }
  auto const want = run_select(test::Serial{}, c, 500);
  CHECK(run_select(test::Threads{}, c, 500) == want);
  CHECK(run_select(test::Backward{}, c, 500) == want);
  CHECK(run_select(test::Threads{}, c, 500, 0) == want);
  CHECK(run_select(test::Backward{}, c, 500, 0) == want);
}

TEST_CASE("MEM R138, R139: scratch of the fused selection knows neither keys nor heads times rows",
          "[indexer][select][fault]") {
  using Policy = ReluDotIndexer<bf16, format::Plain<bf16>>;
  auto const bytes = [](Shape const& shape, auto const& x) {
    return select_workspace(x, Policy{}, RadixTopK{}, shape, std::size_t{1} << 40)->bytes;
  };
  Shape const shape{
      .rows = 2048, .keys = 1 << 18, .top_k = 2048, .index_heads = 32, .index_dim = 128};
  Shape longer = shape;
  longer.keys = 1 << 20;
  CHECK(bytes(longer, test::Serial{}) == bytes(shape, test::Serial{}));
  CHECK(bytes(shape.with_rows(100), test::Serial{}) == bytes(shape, test::Serial{}));
  CHECK(bytes(shape, test::Serial{}) < std::size_t{1} << 20);  // 2048 rows of 256K keys
  CHECK(bytes(longer, test::Threads{}) == bytes(shape, test::Threads{}));
  CHECK(bytes(shape, test::Threads{}) < std::size_t{8} << 20);
}

namespace {

struct NoWorkers {
  static constexpr int concurrency() noexcept { return 0; }
  template <class F>
  void operator()(index_t, F const&) const {}
};

}  // namespace

TEST_CASE("fused selection: what no executor or capacity can be is refused by name",
          "[indexer][select]") {
  using Policy = ReluDotIndexer<bf16, format::Plain<bf16>>;
  Shape shape{.rows = 1, .keys = 64, .top_k = 8, .index_heads = 1, .index_dim = 8};
  auto const nobody =
      select_workspace(HostExec<NoWorkers>{}, Policy{}, RadixTopK{}, shape, 1 << 20);
  REQUIRE_FALSE(nobody.has_value());
  CHECK(nobody.error().code == Errc::bad_value);
  CHECK(std::string_view(nobody.error().what).find("concurrency") != std::string_view::npos);
  CHECK_FALSE(indexer_workspace(HostExec<NoWorkers>{}, Policy{}, shape).has_value());
  CHECK_FALSE(topk_workspace(HostExec<NoWorkers>{}, RadixTopK{}, shape).has_value());
  for (index_t const wide :
       {index_t{1} << 31, index_t{1} << 62, std::numeric_limits<index_t>::max()}) {
    shape.top_k = wide;
    auto const size =
        select_workspace(test::Serial{}, Policy{}, RadixTopK{}, shape, std::size_t{1} << 60);
    REQUIRE_FALSE(size.has_value());
    CHECK(size.error().code == Errc::bad_shape);
    CHECK_FALSE(topk_workspace(test::Serial{}, RadixTopK{}, shape).has_value());
  }
}
