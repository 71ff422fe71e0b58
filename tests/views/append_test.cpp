// SPDX-License-Identifier: Apache-2.0
#if defined(INDEXSHARE_TEST_CUDA)
#include <indexshare/cuda/append.cuh>
#endif
#include <indexshare/host/append.hpp>

#include <catch2/catch_template_test_macros.hpp>
#include <catch2/catch_test_macros.hpp>

#include "executors.hpp"
#include "memory.hpp"
#include "random.hpp"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string_view>
#include <tuple>
#include <vector>

using namespace indexshare;

namespace {

using test::space;
/// Executors of host memory share their append.
using X = std::tuple_element_t<0, test::Executors>;

/// A cache of two requests, three pages each in shuffled order, and rows to put there.
template <class T>
struct Setup {
  static constexpr index_t lanes = 5;
  index_t page_size;
  test::Guarded<T> cache;
  test::Guarded<position_t> table = test::guarded<position_t>({4, 0, 6, 2, 5, 1});
  std::vector<T> rows;
  std::vector<position_t> positions;
  std::vector<position_t> requests;

  explicit Setup(index_t page)
      : page_size(page), cache(static_cast<std::size_t>(7 * page * lanes), test::unwritten) {}

  void add(position_t request, position_t position) {
    test::Random random(static_cast<std::uint64_t>(request * 1000 + position));
    for (float const value : random.normals(lanes)) rows.push_back(from_float<T>(value));
    positions.push_back(position);
    requests.push_back(request);
  }
  auto view() {
    return make_paged_cache<space>(cache.data(), Pages{7}, PageSize{page_size}, HeadDim{lanes});
  }
  auto pages() const {
    return make_page_table<space>(table.data(), Requests{2}, Pages{3}, PageSize{page_size});
  }
  Status append(index_t first, index_t count) {
    X const x{};
    auto const part = [&](auto const& all, index_t width) {
      auto const begin = all.begin() + first * width;
      return test::guarded(std::vector(begin, begin + count * width));
    };
    auto const new_rows = part(rows, lanes);
    auto const new_positions = part(positions, 1);
    auto const new_requests = part(requests, 1);
    Status const status =
        append_rows(x, make_dense<space, T const, 2>(new_rows.data(), {count, lanes}),
                    make_lengths<space>(new_positions.data(), Rows{count}),
                    make_lengths<space>(new_requests.data(), Rows{count}), pages(), view());
    test::finish(x);
    return status;
  }
  bool blank() const {
    auto const* const bytes = reinterpret_cast<std::byte const*>(cache.data());
    return std::all_of(bytes, bytes + cache.bytes(),
                       [](std::byte b) { return b == test::unwritten; });
  }
};

}  // namespace

TEMPLATE_TEST_CASE("ADDR R046: keys written in uneven appends are read back", "[cache][fault]",
                   float, bf16, fp16, e4m3) {
  for (index_t const page_size : {1, 16}) {
    Setup<TestType> s(page_size);
    auto const keys = static_cast<position_t>(3 * page_size);
    for (position_t request = 0; request < 2; ++request) {
      for (position_t p = 0; p < keys; ++p) s.add(request, p);
    }
    auto const total = static_cast<index_t>(s.positions.size());
    index_t const first = total / 7 + 1;
    index_t const second = total / 2 + 1;
    REQUIRE(s.append(0, first).ok());
    REQUIRE(s.append(first, second - first).ok());
    REQUIRE(s.append(second, total - second).ok());
    index_t wrong = 0;
    for (index_t i = 0; i < total; ++i) {
      auto const r = static_cast<std::size_t>(i);
      // by hand: page number of the table, then the token in it
      index_t const page =
          s.table[static_cast<std::size_t>(s.requests[r] * 3 + s.positions[r] / page_size)];
      auto const* const stored =
          s.cache.data() + (page * page_size + s.positions[r] % page_size) * s.lanes;
      wrong +=
          std::memcmp(stored, s.rows.data() + i * s.lanes, s.lanes * sizeof(TestType)) == 0 ? 0 : 1;
    }
    CHECK(wrong == 0);
    CHECK(s.cache.intact());
    // page 3 belongs to no request
    TestType const* const spare = s.cache.data() + 3 * page_size * s.lanes;
    auto const* const bytes = reinterpret_cast<std::byte const*>(spare);
    CHECK(std::all_of(bytes,
                      bytes + static_cast<std::size_t>(page_size * s.lanes) * sizeof(TestType),
                      [](std::byte b) { return b == test::unwritten; }));
  }
}

TEST_CASE("append: a row of padding writes nothing, the others are written", "[cache]") {
  Setup<float> s(4), good(4);
  for (position_t const request : {1, -1}) {
    s.add(1, 5);
    s.add(request, no_position);
    s.add(0, 7);
  }
  good.add(1, 5);
  good.add(0, 7);
  REQUIRE(s.append(0, 3).ok());
  REQUIRE(good.append(0, 2).ok());
  CHECK(std::equal(good.cache.data(), good.cache.data() + good.cache.size(), s.cache.data()));
  REQUIRE(s.append(3, 3).ok());
  CHECK(std::equal(good.cache.data(), good.cache.data() + good.cache.size(), s.cache.data()));
}

// The host looks first and refuses; on a device nobody does before the work: such a row is skipped.
TEST_CASE("append: a position without a slot writes nowhere", "[cache]") {
  auto const check = [](Setup<float>& s, std::string_view what, std::int64_t expected,
                        std::int64_t got) {
    Status const status = s.append(0, static_cast<index_t>(s.positions.size()));
    if constexpr (space == Space::device) {
      REQUIRE(status.ok());
    } else {
      CHECK(status.code == Errc::bad_value);
      CHECK(std::string_view(status.what).find(what) != std::string_view::npos);
      CHECK(status.expected == expected);
      CHECK(status.got == got);
    }
    CHECK(s.blank());
  };
  for (position_t const bad : {-2, 12, 100000}) {
    Setup<float> s(4);
    s.add(1, bad);
    check(s, "position without a slot in the cache", 12, bad);
  }
  Setup<float> hole(4);
  hole.table[4] = no_position;
  hole.add(1, 5);
  check(hole, "without a slot: its page", 7, -1);
  hole.table[4] = 7;  // past the cache
  check(hole, "without a slot: its page", 7, 7);
  for (position_t const request : {2, -1}) {
    Setup<float> stranger(4);
    stranger.add(request, 0);
    check(stranger, "request of a token", 2, request);
    CHECK(stranger.append(0, 0).ok());
  }
}

TEST_CASE("append: among good positions, one without a slot is refused or skipped", "[cache]") {
  Setup<float> s(4);
  s.add(0, 0);
  s.add(1, 12);
  s.add(1, 0);
  Status const status = s.append(0, 3);
  if constexpr (space == Space::device) {
    REQUIRE(status.ok());
    Setup<float> good(4);
    good.add(0, 0);
    good.add(1, 0);
    REQUIRE(good.append(0, 2).ok());
    CHECK(std::equal(good.cache.data(), good.cache.data() + good.cache.size(), s.cache.data()));
  } else {
    CHECK(status.code == Errc::bad_value);
    CHECK(status.got == 12);
    CHECK(s.blank());
  }
}

TEST_CASE("append: shapes are refused by name", "[cache]") {
  Setup<float> s(4);
  s.add(0, 0);
  s.add(0, 1);
  auto const rows =
      make_dense<space, float const, 2>(s.rows.data(), {2, Setup<float>::lanes});  // never read
  auto const numbers = [&](index_t n) { return make_lengths<space>(s.positions.data(), Rows{n}); };
  auto const refuses = [&](Status const& status, Errc code, std::string_view part) {
    INFO(status.what);
    CHECK(status.code == code);
    CHECK(std::string_view(status.what).find(part) != std::string_view::npos);
  };
  X const x{};
  refuses(append_rows(x, rows, numbers(1), numbers(2), s.pages(), s.view()), Errc::bad_shape,
          "positions");
  refuses(append_rows(x, rows, numbers(2), numbers(1), s.pages(), s.view()), Errc::bad_shape,
          "requests");
  auto narrow = s.view();
  narrow.lanes = 4;
  Status const lanes = append_rows(x, rows, numbers(2), numbers(2), s.pages(), narrow);
  refuses(lanes, Errc::bad_shape, "lanes of the cache");
  CHECK(lanes.expected == Setup<float>::lanes);
  CHECK(lanes.got == 4);
  auto pages = s.pages();
  pages.page_size = 2;
  refuses(append_rows(x, rows, numbers(2), numbers(2), pages, s.view()), Errc::bad_shape,
          "page_size");
  refuses(append_rows(x, make_dense<space, float const, 2>(nullptr, {2, Setup<float>::lanes}),
                      numbers(2), numbers(2), s.pages(), s.view()),
          Errc::missing_input, "rows to append");
  CHECK(s.blank());
}
