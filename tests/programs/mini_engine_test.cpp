// SPDX-License-Identifier: Apache-2.0
//
// Parts of the mini engine; as a whole it checks itself (examples/CMakeLists.txt).
#include <catch2/catch_test_macros.hpp>

#include "../mini_engine/check.hpp"

#include <numeric>
#include <utility>
#include <vector>

namespace {

using namespace mini;

std::vector<int> tokens_from(int first, int count) {
  std::vector<int> tokens(static_cast<std::size_t>(count));
  std::iota(tokens.begin(), tokens.end(), first);
  return tokens;
}

TEST_CASE("pages are taken all or none, each by one request", "[mini_engine]") {
  PagePool pool(3, 4);
  std::vector<int> a, b;
  REQUIRE(pool.take(2, a));
  CHECK_FALSE(pool.take(2, b));
  CHECK(b.empty());
  REQUIRE(pool.take(1, b));
  std::vector<int> all = a;
  all.push_back(b[0]);
  std::sort(all.begin(), all.end());
  CHECK(all == std::vector<int>{0, 1, 2});
  pool.release(a);
  CHECK(pool.free_pages() == 2);
}

TEST_CASE("a page is found by all tokens before its end and the one after it", "[mini_engine]") {
  PagePool pool(4, 4);
  std::vector<int> pages;
  REQUIRE(pool.take(3, pages));
  auto const tokens = tokens_from(0, 10);
  pool.publish(pages, tokens, 9);
  CHECK(pool.reuse(tokens) == std::vector<int>{pages[0], pages[1]});

  auto const found = [&](std::vector<int> const& other) { return pool.reuse(other).size(); };
  CHECK(found(tokens_from(0, 9)) == 2);
  CHECK(found(tokens_from(0, 8)) == 1);  // at least one token is left to compute
  CHECK(found(tokens_from(0, 4)) == 0);
  CHECK(found(tokens_from(1, 10)) == 0);
  auto changed = tokens;
  changed[8] = 77;  // the token after the second page
  CHECK(found(changed) == 1);
  changed = tokens;
  changed[0] = 77;
  CHECK(found(changed) == 0);
}

TEST_CASE("only tokens whose rows are computed are published", "[mini_engine]") {
  PagePool pool(4, 4);
  std::vector<int> pages;
  REQUIRE(pool.take(3, pages));
  pool.publish(pages, tokens_from(0, 10), 7);
  CHECK(pool.reuse(tokens_from(0, 10)).size() == 1);
}

TEST_CASE("a reused page is not given away while in use, and the longest unused one goes first",
          "[mini_engine]") {
  PagePool pool(4, 4);
  std::vector<int> a, b, c;
  auto const tokens = tokens_from(0, 9);
  REQUIRE(pool.take(3, a));
  pool.publish(a, tokens, 8);
  pool.release(a);
  auto const reused = pool.reuse(tokens);
  REQUIRE(reused.size() == 2);
  CHECK(pool.free_pages() == 2);
  REQUIRE(pool.take(2, b));
  for (int const page : reused) CHECK(std::count(b.begin(), b.end(), page) == 0);

  pool.release(reused);
  pool.release(b);
  REQUIRE(pool.take(2, c));  // those of b were never published
  CHECK(pool.reuse(tokens).size() == 2);
  pool.release(reused);
  REQUIRE(pool.take(1, c));
  CHECK(pool.reuse(tokens).empty());  // its first page is somebody else's now
}

TEST_CASE("a check that finds a difference does not pass", "[mini_engine]") {
  Request alone;
  alone.id = 5;
  alone.prompt = 1;
  alone.tokens = {3, 4};
  alone.records = {RowRecord{0, {{1, 2}, {3, 4}}}};
  Request got = alone;
  got.draft_records = {{0, 3}};
  auto const passes = [&](Request const& request) {
    Checker checker;
    checker.compare(request, alone);
    return checker.result().all_equal();
  };
  CHECK(passes(got));
  Request other = got;
  other.tokens[1] = 5;
  CHECK_FALSE(passes(other));
  other = got;
  other.records[0].layers[1].selection = 7;
  CHECK_FALSE(passes(other));
  other = got;
  other.records[0].layers[0].output = 7;
  CHECK_FALSE(passes(other));
  other = got;
  other.draft_records[0].selection = 7;
  CHECK_FALSE(passes(other));
  other = got;
  other.tokens.pop_back();
  CHECK_FALSE(passes(other));
}

}  // namespace
