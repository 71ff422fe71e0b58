// SPDX-License-Identifier: Apache-2.0
//
// Selections in device memory: the host's functions on the same memory are the oracle.
#include <indexshare/cuda/selection.cuh>
#include <indexshare/handover.hpp>
#include <indexshare/host/selection.hpp>

#include <catch2/catch_test_macros.hpp>

#include "executors.hpp"
#include "graph.hpp"
#include "huge.hpp"
#include "memory.hpp"
#include "random.hpp"
#include "status_text.hpp"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

using namespace indexshare;

namespace {

constexpr auto device = Space::device;
constexpr auto host = Space::host;
constexpr std::size_t to_size(index_t n) { return static_cast<std::size_t>(n); }
constexpr position_t largest = std::numeric_limits<position_t>::max();
constexpr position_t smallest = std::numeric_limits<position_t>::min();

/// Positions with strays: holes, numbers outside everything, int32 extremes.
position_t wild(test::Random& random, index_t below) {
  position_t const strays[]{-1, smallest, largest, static_cast<position_t>(below), -7};
  if (random.below(8) == 0) return strays[random.below(std::size(strays))];
  return static_cast<position_t>(random.below(to_size(below)));
}

/// A selection [rows, width] with room between its rows, counts from -1 to width + 1, and a table
/// [requests, pages] with holes.
struct Case {
  index_t rows, width, page_size;
  index_t pad = 3, requests = 4, pages = 5;
  test::Guarded<position_t> indices, counts, request_of_row, table;

  Case(index_t rows_, index_t width_, index_t page)
      : rows(rows_),
        width(width_),
        page_size(page),
        indices(to_size(rows * (width + pad))),
        counts(to_size(2 * rows)),
        request_of_row(to_size(2 * rows)),
        table(to_size(requests * (pages + pad))) {
    test::Random random(static_cast<std::uint64_t>(rows * 131 + width * 7 + page));
    for (std::size_t i = 0; i < indices.size(); ++i) indices[i] = wild(random, pages * page);
    for (std::size_t i = 0; i < counts.size(); ++i) {
      counts[i] = static_cast<position_t>(random.below(to_size(width + 3))) - 1;
      request_of_row[i] = wild(random, requests);
    }
    for (std::size_t i = 0; i < table.size(); ++i) table[i] = wild(random, 30);
  }

  template <Space S>
  SelectionView<S, position_t const> selection() const {
    return {make_strided<S, position_t const, 2>(indices.data(), {rows, width}, {width + pad, 1}),
            make_strided<S, position_t const, 1>(counts.data(), {rows}, {2})};
  }
  template <Space S>
  LengthView<S> row_requests() const {
    return make_strided<S, position_t const, 1>(request_of_row.data(), {rows}, {2});
  }
  template <Space S>
  PageTable<S> page_table(bool contiguous) const {
    if (contiguous) return make_contiguous_table<S>(Keys{page_size});
    return {make_strided<S, position_t const, 2>(table.data(), {requests, pages}, {pages + pad, 1}),
            page_size};
  }
};

/// A selection to be written, its rows apart.
struct Target {
  index_t rows, width, pad = 2;
  test::Guarded<position_t> indices, counts;

  Target(index_t rows_, index_t width_)
      : rows(rows_),
        width(width_),
        indices(to_size(rows * (width + pad)), test::unwritten),
        counts(to_size(2 * rows), test::unwritten) {}

  template <Space S>
  Tensor<S, position_t, 2> entries() {
    return make_strided<S, position_t, 2>(indices.data(), {rows, width}, {width + pad, 1});
  }
  template <Space S>
  SelectionView<S> view() {
    return {entries<S>(), make_strided<S, position_t, 1>(counts.data(), {rows}, {2})};
  }
  bool equals(Target const& other) const {
    return std::equal(indices.span().begin(), indices.span().end(), other.indices.span().begin()) &&
           std::equal(counts.span().begin(), counts.span().end(), other.counts.span().begin());
  }
};

/// Widths around a thread's, a warp's and a stretch's share.
constexpr index_t widths[]{1, 2, 31, 32, 33, 255, 256, 257, 2048};

}  // namespace

TEST_CASE("CUDA map_slots: the host's slots, whatever stands in the table", "[selection]") {
  test::Cuda const x;
  for (index_t const rows : {0, 1, 2, 9}) {
    for (index_t const width : widths) {
      for (index_t const page : {1, 3, 64}) {
        CAPTURE(rows, width, page);
        Case const c(rows, width, page);
        for (bool const contiguous : {false, true}) {
          Target got(rows, width), want(rows, width);
          REQUIRE(map_slots(x, c.selection<device>(), c.row_requests<device>(),
                            c.page_table<device>(contiguous), got.entries<device>())
                      .ok());
          REQUIRE(map_slots(test::Serial{}, c.selection<host>(), c.row_requests<host>(),
                            c.page_table<host>(contiguous), want.entries<host>())
                      .ok());
          test::finish(x);
          CHECK(got.equals(want));
        }
      }
    }
  }
}

TEST_CASE("CUDA selections: more rows than a grid has blocks", "[selection]") {
  test::Cuda const x;
  constexpr index_t rows = 8 * 4096 + 5;
  Case const c(rows, 2, 3);
  Target got(rows, 2), want(rows, 2);
  REQUIRE(map_slots(x, c.selection<device>(), c.row_requests<device>(), c.page_table<device>(false),
                    got.entries<device>())
              .ok());
  REQUIRE(map_slots(test::Serial{}, c.selection<host>(), c.row_requests<host>(),
                    c.page_table<host>(false), want.entries<host>())
              .ok());
  test::Guarded<SelectionReport> report(1);
  auto const on_device = c.selection<device>();
  auto const on_host = c.selection<host>();
  Shape shape;
  shape.keys = 2;
  REQUIRE(validate(x, {on_device.indices, on_device.counts}, 5, c.row_requests<device>(), shape,
                   report.data())
              .ok());
  test::finish(x);
  CHECK(got.equals(want));
  CHECK(report[0] == validate(test::Serial{}, {on_host.indices, on_host.counts}, 5,
                              c.row_requests<host>(), shape));
}

TEST_CASE("CUDA map_slots: a slot past int32 is none", "[selection]") {
  test::Cuda const x;
  auto const indices = test::guarded<position_t>({0, 1, largest, largest - 1});
  auto const counts = test::guarded<position_t>({4});
  auto const requests = test::guarded<position_t>({0});
  auto const table = test::guarded<position_t>({largest, 0});
  test::Guarded<position_t> slots(4, test::unwritten);
  REQUIRE(map_slots(x,
                    {make_dense<device, position_t const, 2>(indices.data(), {1, 4}),
                     make_lengths<device>(counts.data(), Rows{1})},
                    make_lengths<device>(requests.data(), Rows{1}),
                    make_page_table<device>(table.data(), Requests{1}, Pages{2},
                                            PageSize{index_t{1} << 30}),
                    make_dense<device, position_t, 2>(slots.data(), {1, 4}))
              .ok());
  test::finish(x);
  CHECK(std::vector<position_t>(slots.span().begin(), slots.span().end()) ==
        std::vector<position_t>{-1, -1, (1 << 30) - 1, (1 << 30) - 2});
}

TEST_CASE("CUDA gather_selection: rows in any order, and one that does not exist is empty",
          "[selection]") {
  test::Cuda const x;
  for (index_t const rows : {1, 2, 9}) {
    for (index_t const width : widths) {
      CAPTURE(rows, width);
      Case const c(rows, width, 4);
      test::Random random(5);
      index_t const taken = 7;
      test::Guarded<position_t> good(to_size(taken)), bad(to_size(taken));
      for (index_t i = 0; i < taken; ++i) {
        good[to_size(i)] = static_cast<position_t>(random.below(to_size(rows)));
        position_t const strays[]{static_cast<position_t>(rows), -1, largest, smallest};
        bad[to_size(i)] = i % 2 == 0 ? strays[i / 2] : good[to_size(i)];
      }
      auto const gather = [&](auto const& exec, auto space_of, test::Guarded<position_t> const& of,
                              Target& to) {
        constexpr Space s = decltype(space_of)::value;
        return gather_selection(exec, c.selection<s>(), make_lengths<s>(of.data(), Rows{taken}),
                                to.view<s>());
      };
      using OnDevice = std::integral_constant<Space, device>;
      using OnHost = std::integral_constant<Space, host>;
      Target got(taken, width), want(taken, width);
      REQUIRE(gather(x, OnDevice{}, good, got).ok());
      REQUIRE(gather(test::Serial{}, OnHost{}, good, want).ok());
      test::finish(x);
      CHECK(got.equals(want));

      Target wild_rows(taken, width);
      REQUIRE(gather(x, OnDevice{}, bad, wild_rows).ok());
      test::finish(x);
      for (index_t i = 0; i < taken; ++i) {
        bool const exists = bad[to_size(i)] >= 0 && bad[to_size(i)] < rows;
        auto const view = wild_rows.view<host>();
        index_t const count =
            exists ? clamp_length(c.selection<host>().counts(bad[to_size(i)]), width) : 0;
        CHECK(view.counts(i) == count);
        index_t wrong = 0;
        for (index_t j = 0; j < width; ++j) {
          position_t const entry =
              j < count ? c.selection<host>().indices(bad[to_size(i)], j) : no_position;
          wrong += view.indices(i, j) != entry ? 1 : 0;
        }
        CHECK(wrong == 0);
      }
    }
  }
}

TEST_CASE("CUDA gather_selection: without row numbers all rows in order", "[selection]") {
  test::Cuda const x;
  Case const c(9, 33, 4);
  Target got(9, 33), want(9, 33);
  REQUIRE(gather_selection(x, c.selection<device>(), {}, got.view<device>()).ok());
  REQUIRE(gather_selection(test::Serial{}, c.selection<host>(), {}, want.view<host>()).ok());
  test::finish(x);
  CHECK(got.equals(want));
}

TEST_CASE("CUDA validate: the host's numbers, at every width", "[selection]") {
  test::Cuda const x;
  test::Guarded<SelectionReport> report(1);
  // around the tile in which repetitions are looked for
  for (index_t const width : {1, 2, 3, 33, 256, 2047, 2048, 2049, 4500}) {
    for (index_t const rows : {0, 1, 3}) {
      // few slots: nearly everything repeats; many: nearly nothing
      for (index_t const slots : {3, 1000, 1 << 20}) {
        CAPTURE(width, rows, slots);
        Case c(rows, width, 1);
        test::Random random(7);
        for (std::size_t i = 0; i < c.indices.size(); ++i) c.indices[i] = wild(random, slots);
        if (rows > 0) c.counts[0] = static_cast<position_t>(width + 1);
        Shape shape;
        shape.keys = 3;
        auto const on_device = c.selection<device>();
        auto const on_host = c.selection<host>();
        REQUIRE(validate(x, {on_device.indices, on_device.counts}, slots, c.row_requests<device>(),
                         shape, report.data())
                    .ok());
        test::finish(x);
        CHECK(report[0] == validate(test::Serial{}, {on_host.indices, on_host.counts}, slots,
                                    c.row_requests<host>(), shape));
      }
    }
  }
}

TEST_CASE("CUDA validate: repetitions that lie far apart are found", "[selection]") {
  test::Cuda const x;
  constexpr index_t width = 6000;
  test::Guarded<position_t> slots(width);
  for (index_t j = 0; j < width; ++j) slots[to_size(j)] = static_cast<position_t>(width - j);
  slots[5999] = slots[0];     // two tiles apart
  slots[4096] = slots[2047];  // from the end of one tile to the start of another
  slots[4097] = slots[2047];
  slots[10] = slots[9];
  auto const counts = test::guarded<position_t>({width});
  auto const lengths = test::guarded<position_t>({1});
  test::Guarded<SelectionReport> report(1);
  Shape shape;
  shape.keys = 1;
  REQUIRE(validate(x,
                   {make_dense<device, position_t const, 2>(slots.data(), {1, width}),
                    make_lengths<device>(counts.data(), Rows{1})},
                   width + 1, make_lengths<device>(lengths.data(), Rows{1}), shape, report.data())
              .ok());
  test::finish(x);
  CHECK(report[0] == SelectionReport{0, 4, 0, 0});
}

TEST_CASE("CUDA validate: refuses what it cannot read or write, before any work", "[selection]") {
  test::Cuda const x;
  Case const c(2, 4, 1);
  test::Guarded<SelectionReport> report(1);
  auto const selection = c.selection<device>();
  auto const lengths = c.row_requests<device>();
  auto const refusal = [&](GroupPlan<device> const& plan, LengthView<device> const& of_rows,
                           SelectionReport* to) {
    Status status;
    CHECK(cuda_test::enqueued_by(
              x, [&] { status = validate(x, plan, 10, of_rows, Shape{}, to); }) == 0);
    return status.code;
  };
  GroupPlan<device> const plan{selection.indices, selection.counts};
  CHECK(refusal(plan, lengths, nullptr) == Errc::missing_input);
  CHECK(refusal(plan, rows_of(lengths, 0, 1), report.data()) == Errc::bad_shape);
  CHECK(refusal({plan.slots, rows_of(plan.counts, 0, 1)}, lengths, report.data()) ==
        Errc::bad_shape);
  CHECK(refusal({make_dense<device, position_t const, 2>(nullptr, {2, 4}), plan.counts}, lengths,
                report.data()) == Errc::missing_input);
}

TEST_CASE("CUDA INT32 R142: rows of slots and selections more than 2^31 elements apart",
          "[selection][fault]") {
  test::Cuda const x;
  constexpr index_t stride = (index_t{1} << 31) + 64;
  test::HugeMemory const memory(to_size(2 * stride) * sizeof(position_t));
  auto* const entries = memory.as<position_t>();
  if (entries == nullptr) SKIP("no 16 GiB of addresses");
  auto const wide = [&](index_t first) {
    return make_strided<device, position_t, 2>(entries + first, {2, 3}, {stride, 1});
  };
  auto const indices = test::guarded<position_t>({0, 2, 5, 1, 3, 4});
  auto const counts = test::guarded<position_t>({3, 2});
  test::Guarded<position_t> got_counts(2);
  auto const requests = test::guarded<position_t>({0, 0});
  REQUIRE(gather_selection(x,
                           {make_dense<device, position_t const, 2>(indices.data(), {2, 3}),
                            make_lengths<device>(counts.data(), Rows{2})},
                           {}, {wide(0), make_dense<device, position_t, 1>(got_counts.data(), {2})})
              .ok());
  REQUIRE(map_slots(x, {wide(0), make_lengths<device>(counts.data(), Rows{2})},
                    make_lengths<device>(requests.data(), Rows{2}),
                    make_contiguous_table<device>(Keys{5}), wide(8))
              .ok());
  test::finish(x);
  CHECK(std::vector<position_t>(entries, entries + 3) == std::vector<position_t>{0, 2, 5});
  CHECK(std::vector<position_t>(entries + stride, entries + stride + 3) ==
        std::vector<position_t>{1, 3, -1});
  CHECK(std::vector<position_t>(entries + 8, entries + 11) == std::vector<position_t>{0, 2, -1});
  CHECK(std::vector<position_t>(entries + stride + 8, entries + stride + 11) ==
        std::vector<position_t>{1, 3, -1});
}

TEST_CASE("CUDA selections: captured once, replayed with new numbers", "[selection][graph]") {
  test::Cuda const x;
  Case c(9, 257, 3);
  std::fill_n(c.counts.data(), c.counts.size(), 0);
  test::Guarded<position_t> rows(9);
  std::fill_n(rows.data(), rows.size(), 0);
  Target gathered(9, 257), mapped(9, 257);
  test::Guarded<SelectionReport> report(1);
  Shape shape;
  shape.keys = 3;
  cuda_test::Graph const graph(x, [&] {
    auto const selection = c.selection<device>();
    REQUIRE(gather_selection(x, selection, make_lengths<device>(rows.data(), Rows{9}),
                             gathered.view<device>())
                .ok());
    REQUIRE(map_slots(x, selection, c.row_requests<device>(), c.page_table<device>(false),
                      mapped.entries<device>())
                .ok());
    REQUIRE(validate(x, {selection.indices, selection.counts}, 10, c.row_requests<device>(), shape,
                     report.data())
                .ok());
  });
  CHECK(graph.only_device_work());
  test::Random random(3);
  for (int replay = 0; replay < 3; ++replay) {
    for (std::size_t i = 0; i < c.indices.size(); ++i) c.indices[i] = wild(random, 12);
    for (std::size_t i = 0; i < c.table.size(); ++i) c.table[i] = wild(random, 20);
    for (std::size_t i = 0; i < c.counts.size(); ++i) c.counts[i] = wild(random, 258);
    for (std::size_t i = 0; i < rows.size(); ++i) {
      rows[i] = static_cast<position_t>(random.below(9));
    }
    graph.replay();
    Target want_gathered(9, 257), want_mapped(9, 257);
    auto const selection = c.selection<host>();
    REQUIRE(gather_selection(test::Serial{}, selection, make_lengths<host>(rows.data(), Rows{9}),
                             want_gathered.view<host>())
                .ok());
    REQUIRE(map_slots(test::Serial{}, selection, c.row_requests<host>(), c.page_table<host>(false),
                      want_mapped.entries<host>())
                .ok());
    CHECK(gathered.equals(want_gathered));
    CHECK(std::equal(mapped.indices.span().begin(), mapped.indices.span().end(),
                     want_mapped.indices.span().begin()));
    CHECK(report[0] == validate(test::Serial{}, {selection.indices, selection.counts}, 10,
                                c.row_requests<host>(), shape));
  }
}
