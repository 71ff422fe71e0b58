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
  alone.new_tokens = 2;
  alone.tokens = {3, 4, 5};
  alone.records = {RowRecord{0, {{1, 2}, {3, 4}}}, RowRecord{1, {{5, 6}, {7, 8}}}};
  alone.draft_records = {{0, 0, 4, {}}, {0, 1, 6, {3, 9}}, {1, 0, 5, {}}, {1, 1, 6, {7, 9}}};
  auto const passes = [&](Request const& request) {
    Checker checker(2);
    checker.compare(request, alone);
    return checker.result().all_equal();
  };
  REQUIRE(passes(alone));
  Request other = alone;

  SECTION("tokens") {
    SECTION("another") { other.tokens[1] = 5; }
    SECTION("one less") { other.tokens.pop_back(); }
    SECTION("one more") { other.tokens.push_back(6); }
    SECTION("one more in both") {
      alone.tokens.push_back(6);
      other = alone;
    }
  }
  SECTION("rows") {
    SECTION("selection") { other.records[0].layers[1].selection = 7; }
    SECTION("output") { other.records[0].layers[0].output = 7; }
    SECTION("the last is missing") {
      other.records.pop_back();
      alone.records.pop_back();
    }
    SECTION("one is missing") { other.records[0] = {}; }
    SECTION("a layer is missing") {
      other.records[1].layers.pop_back();
      alone.records[1].layers.pop_back();
    }
  }
  SECTION("drafts") {
    SECTION("selection") { other.draft_records[1].layer.selection = 7; }
    SECTION("output") { other.draft_records[1].layer.output = 7; }
    SECTION("token") { other.draft_records[2].token = 0; }
    SECTION("anchor out of range") { other.draft_records[3].anchor = 1000000; }
    SECTION("anchor before the first") { other.draft_records[0].anchor = -1; }
    SECTION("one is missing") { other.draft_records.erase(other.draft_records.begin()); }
    SECTION("one more") { other.draft_records.push_back({9, 0, 0, {}}); }
    SECTION("none") { other.draft_records.clear(); }
  }
  CHECK_FALSE(passes(other));
}

TEST_CASE("a check compares what the engine computed, and drafts where it drafted",
          "[mini_engine]") {
  Request alone;
  alone.prompt = 2;
  alone.new_tokens = 3;
  alone.tokens = {1, 2, 3, 4, 5};
  for (int i = 0; i < 4; ++i) alone.records.push_back({i, {{1, 2}}});
  alone.draft_records = {{1, 0, 3, {}}, {2, 0, 4, {}}, {3, 0, 5, {}}};
  Request got = alone;
  got.reused = 1;
  got.records[0] = {};
  got.records[2].step = got.records[3].step = 7;  // an accepted draft
  got.draft_records = {{1, 0, 3, {}}, {3, 0, 5, {}}};
  Checker checker(1);
  checker.compare(got, alone);
  CHECK(checker.result().all_equal());
  CHECK(checker.result().selections == 3);
  CHECK(checker.result().drafts == 2);
}

}  // namespace
