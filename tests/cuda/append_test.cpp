// SPDX-License-Identifier: Apache-2.0
//
// append_rows in device memory: what the host writes, and nothing for a position without a slot.
#include <indexshare/cuda/append.cuh>
#include <indexshare/host/append.hpp>

#include <catch2/catch_template_test_macros.hpp>
#include <catch2/catch_test_macros.hpp>

#include "executors.hpp"
#include "graph.hpp"
#include "huge.hpp"
#include "memory.hpp"
#include "random.hpp"

#include <algorithm>
#include <cstring>
#include <limits>
#include <string_view>
#include <type_traits>
#include <vector>

using namespace indexshare;

namespace {

constexpr auto device = Space::device;
constexpr auto host = Space::host;
constexpr std::size_t to_size(index_t n) { return static_cast<std::size_t>(n); }

/// A cache of two requests, three pages each in shuffled order, its rows and blocks apart, and
/// tokens to put there: all of request 0, then of request 1, in an order that jumps.
template <class Row, class T>
struct Setup {
  static constexpr index_t pad = 3;
  index_t lanes, page_size, tokens;
  test::Guarded<T> cache;
  test::Guarded<position_t> table, positions, requests;
  test::Guarded<Row> rows;

  Setup(index_t lanes_, index_t page)
      : lanes(lanes_),
        page_size(page),
        tokens(6 * page),
        cache(to_size(7 * block_stride()), test::unwritten),
        table(test::guarded<position_t>({4, 0, 6, 2, 5, 1})),
        positions(to_size(tokens)),
        requests(to_size(tokens)),
        rows(to_size(tokens * (lanes + pad))) {
    for (index_t i = 0; i < tokens; ++i) {
      index_t const token = i * 5 % tokens;  // 6 * page and 5 have no common factor here
      requests[to_size(i)] = static_cast<position_t>(token / (3 * page));
      positions[to_size(i)] = static_cast<position_t>(token % (3 * page));
    }
    fill(1);
  }
  void fill(std::uint64_t seed) {
    test::Random random(seed);
    for (std::size_t i = 0; i < rows.size(); ++i) {
      rows[i] = from_float<Row>(random.normal() * 100);
    }
  }

  index_t row_stride() const { return lanes + 1; }
  index_t block_stride() const { return page_size * row_stride() + 2; }

  template <Space S>
  MutableCacheView<S, format::Plain<T>> view() {
    return {cache.data(), 7, page_size, lanes, block_stride(), row_stride(), {}};
  }
  template <Space S, class X>
  Status append(X const& x) {
    return append_rows(
        x, make_strided<S, Row const, 2>(rows.data(), {tokens, lanes}, {lanes + pad, 1}),
        make_lengths<S>(positions.data(), Rows{tokens}),
        make_lengths<S>(requests.data(), Rows{tokens}),
        make_page_table<S>(table.data(), Requests{2}, Pages{3}, PageSize{page_size}), view<S>());
  }
  bool same_cache(Setup const& other) const {
    return std::memcmp(cache.data(), other.cache.data(), cache.bytes()) == 0;
  }
};

template <class Row_, class T_>
struct Types {
  using Row = Row_;
  using T = T_;
};

}  // namespace

TEMPLATE_TEST_CASE("CUDA append: the bytes that the host writes, and no others", "[cache]",
                   (Types<float, float>), (Types<float, bf16>), (Types<float, fp16>),
                   (Types<float, e4m3>), (Types<bf16, bf16>), (Types<fp16, fp16>),
                   (Types<e4m3, e4m3>)) {
  using S = Setup<typename TestType::Row, typename TestType::T>;
  test::Cuda const x;
  for (index_t const lanes : {1, 5, 128, 576}) {
    for (index_t const page : {1, 4, 16}) {
      CAPTURE(lanes, page);
      S got(lanes, page), want(lanes, page);
      REQUIRE(got.template append<device>(x).ok());
      REQUIRE(want.template append<host>(test::Serial{}).ok());
      test::finish(x);
      CHECK(got.same_cache(want));
    }
  }
}

TEST_CASE("CUDA append: a position without a slot writes nothing, the others are written",
          "[cache][fault]") {
  test::Cuda const x;
  constexpr position_t most = std::numeric_limits<position_t>::max();
  constexpr position_t least = std::numeric_limits<position_t>::min();
  struct Spoilt {
    position_t request, position;
  };
  for (Spoilt const bad :
       {Spoilt{0, -1}, {0, 12}, {0, most}, {1, least}, {2, 0}, {-1, 3}, {most, 0}}) {
    CAPTURE(bad.request, bad.position);
    Setup<float, float> got(5, 4), want(5, 4);
    for (index_t const i : {0, 7, 23}) {
      got.requests[to_size(i)] = bad.request;
      got.positions[to_size(i)] = bad.position;
    }
    REQUIRE(want.append<host>(test::Serial{}).ok());
    auto const pages = make_page_table<host>(want.table.data(), Requests{2}, Pages{3}, PageSize{4});
    for (index_t const i : {0, 7, 23}) {
      index_t const slot = pages.slot(want.requests[to_size(i)], want.positions[to_size(i)]);
      auto const row = want.view<host>().row(slot);
      std::memset(row, static_cast<int>(test::unwritten), 5 * sizeof(float));
    }
    REQUIRE(got.append<device>(x).ok());
    test::finish(x);
    CHECK(got.same_cache(want));
  }
}

TEST_CASE("CUDA append: pages that are missing or past the cache write nothing", "[cache][fault]") {
  test::Cuda const x;
  for (position_t const page : {-1, 7, std::numeric_limits<position_t>::max()}) {
    Setup<float, bf16> s(5, 4);
    std::fill_n(s.table.data(), s.table.size(), page);
    REQUIRE(s.append<device>(x).ok());
    test::finish(x);
    auto const bytes = std::as_bytes(s.cache.span());
    CHECK(
        std::all_of(bytes.begin(), bytes.end(), [](std::byte b) { return b == test::unwritten; }));
  }
}

TEST_CASE("CUDA append: captured once, replayed with new rows, positions and pages",
          "[cache][graph]") {
  test::Cuda const x;
  Setup<float, bf16> s(33, 4);
  std::fill_n(s.positions.data(), s.positions.size(), -1);  // at capture nothing has a slot
  cuda_test::Graph const graph(x, [&] { REQUIRE(s.append<device>(x).ok()); });
  CHECK(graph.only_device_work());
  for (std::uint64_t replay = 2; replay < 5; ++replay) {
    Setup<float, bf16> want(33, 4);
    for (auto* const setup : {&s, &want}) {
      setup->cache.fill(test::unwritten);
      std::rotate(setup->table.data(), setup->table.data() + replay, setup->table.data() + 6);
      setup->fill(replay);
    }
    std::copy_n(s.table.data(), 6, want.table.data());
    std::copy_n(want.positions.data(), want.positions.size(), s.positions.data());
    graph.replay();
    REQUIRE(want.append<host>(test::Serial{}).ok());
    CHECK(s.same_cache(want));
  }
}

TEST_CASE("CUDA append: shapes are refused by name, before any work", "[cache]") {
  test::Cuda const x;
  Setup<float, float> s(5, 4);
  auto const rows = make_dense<device, float const, 2>(s.rows.data(), {2, 5});
  auto const numbers = [&](index_t n) { return make_lengths<device>(s.positions.data(), Rows{n}); };
  auto const pages = make_page_table<device>(s.table.data(), Requests{2}, Pages{3}, PageSize{4});
  auto const refuses = [&](auto const& of_rows, index_t positions, index_t requests,
                           auto const& table, auto const& cache, Errc code, std::string_view part) {
    Status status;
    CHECK(cuda_test::enqueued_by(x, [&] {
            status = append_rows(x, of_rows, numbers(positions), numbers(requests), table, cache);
          }) == 0);
    INFO(status.what);
    CHECK(status.code == code);
    CHECK(std::string_view(status.what).find(part) != std::string_view::npos);
  };
  auto const cache = s.view<device>();
  refuses(rows, 1, 2, pages, cache, Errc::bad_shape, "positions");
  refuses(rows, 2, 1, pages, cache, Errc::bad_shape, "requests");
  auto narrow = cache;
  narrow.lanes = 4;
  refuses(rows, 2, 2, pages, narrow, Errc::bad_shape, "lanes");
  auto overlapping = cache;
  overlapping.row_stride = 4;
  refuses(rows, 2, 2, pages, overlapping, Errc::bad_stride, "strides");
  auto other = pages;
  other.page_size = 2;
  refuses(rows, 2, 2, other, cache, Errc::bad_shape, "page_size");
  refuses(make_dense<device, float const, 2>(nullptr, {2, 5}), 2, 2, pages, cache,
          Errc::missing_input, "rows to append");
}

TEST_CASE("CUDA INT32 R142: rows appended to blocks more than 2^31 elements apart",
          "[cache][fault]") {
  test::Cuda const x;
  constexpr index_t stride = (index_t{1} << 31) + 640;
  test::HugeMemory const memory(to_size(2 * stride + 640));
  auto* const cache = memory.as<e4m3>();
  if (cache == nullptr) SKIP("no 4 GiB of addresses");
  auto const rows = test::guarded<e4m3>({{1}, {2}, {3}, {4}, {5}, {6}, {7}, {8}, {9}});
  auto const positions = test::guarded<position_t>({0, 1, 4});  // blocks 0, 0 and 2
  auto const requests = test::guarded<position_t>({0, 0, 0});
  auto const table = test::guarded<position_t>({0, 1, 2});
  REQUIRE(
      append_rows(x, make_dense<device, e4m3 const, 2>(rows.data(), {3, 3}),
                  make_lengths<device>(positions.data(), Rows{3}),
                  make_lengths<device>(requests.data(), Rows{3}),
                  make_page_table<device>(table.data(), Requests{1}, Pages{3}, PageSize{2}),
                  MutableCacheView<device, format::Plain<e4m3>>{cache, 3, 2, 3, stride, 300, {}})
          .ok());
  test::finish(x);
  for (index_t i = 0; i < 3; ++i) {
    CHECK(cache[i].bits == 1 + i);
    CHECK(cache[300 + i].bits == 4 + i);
    CHECK(cache[2 * stride + i].bits == 7 + i);
  }
}
