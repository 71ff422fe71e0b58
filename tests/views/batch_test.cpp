// SPDX-License-Identifier: Apache-2.0
//
// Rows of ragged batches from what engines keep per request.
#include <indexshare/host/batch.hpp>

#include <catch2/catch_template_test_macros.hpp>
#include <catch2/catch_test_macros.hpp>

#include "executors.hpp"
#include "memory.hpp"
#include "refusal.hpp"

#include <algorithm>
#include <vector>

#if defined(INDEXSHARE_TEST_CUDA)
#include <indexshare/cuda/batch.cuh>
#endif

using namespace indexshare;
using test::refused;
using test::space;
using test::succeeded;

namespace {

using Numbers = std::vector<position_t>;

/// A batch's chunks and the numbers of its rows, as an executor reads and writes them.
struct Batch {
  test::Guarded<position_t> starts, lengths;
  test::Guarded<position_t> positions, row_lengths, requests;

  Batch(Numbers const& starts_, Numbers const& lengths_, std::size_t rows)
      : starts(test::guarded(starts_)),
        lengths(test::guarded(lengths_)),
        positions(rows, test::unwritten),
        row_lengths(rows, test::unwritten),
        requests(rows, test::unwritten) {}

  Chunks<space> chunks() const {
    return {make_lengths<space>(starts.data(), Rows{static_cast<index_t>(starts.size())}),
            make_lengths<space>(lengths.data(), Rows{static_cast<index_t>(lengths.size())})};
  }
  RowNumbers<space> rows() { return {view(positions), view(row_lengths), view(requests)}; }

  template <class X>
  Status number(X const& x) {
    Status const status = number_rows(x, chunks(), rows());
    test::finish(x);
    return status;
  }
  bool intact() const { return positions.intact() && row_lengths.intact() && requests.intact(); }
  bool untouched() const {
    Numbers const none(positions.size(), test::unwritten_value<position_t>());
    return values(positions) == none && values(row_lengths) == none && values(requests) == none;
  }

  static Numbers values(test::Guarded<position_t> const& numbers) {
    return {numbers.data(), numbers.data() + numbers.size()};
  }

 private:
  static Tensor<space, position_t, 1> view(test::Guarded<position_t>& numbers) {
    return make_dense<space, position_t, 1>(numbers.data(), {static_cast<index_t>(numbers.size())});
  }
};

constexpr position_t none = no_position;
constexpr bool on_device = space == Space::device;

}  // namespace

TEMPLATE_LIST_TEST_CASE("batch: chunks, decode rows, drafts and empty requests become rows",
                        "[batch]", test::Executors) {
  TestType const x{};
  // A second prefill chunk, nothing, one decoded token, a whole prompt, nothing, a token and its
  // two drafts; then padding.
  Batch batch({0, 3, 3, 4, 8, 8, 11}, {10, 7, 21, 4, 0, 33}, 13);
  REQUIRE_THAT(batch.number(x), succeeded());
  CHECK(Batch::values(batch.positions) == Numbers{7, 8, 9, 20, 0, 1, 2, 3, 30, 31, 32, none, none});
  CHECK(Batch::values(batch.row_lengths) == Numbers{8, 9, 10, 21, 1, 2, 3, 4, 31, 32, 33, 0, 0});
  CHECK(Batch::values(batch.requests) == Numbers{0, 0, 0, 2, 3, 3, 3, 3, 5, 5, 5, none, none});
  CHECK(batch.intact());
}

TEMPLATE_LIST_TEST_CASE("batch: one request, no request, no row", "[batch]", test::Executors) {
  TestType const x{};
  Batch one({0, 2}, {5}, 2);
  REQUIRE_THAT(one.number(x), succeeded());
  CHECK(Batch::values(one.row_lengths) == Numbers{4, 5});
  Batch nobody({0}, {}, 3);
  REQUIRE_THAT(nobody.number(x), succeeded());
  CHECK(Batch::values(nobody.row_lengths) == Numbers{0, 0, 0});
  CHECK(Batch::values(nobody.requests) == Numbers{none, none, none});
  Batch idle({0, 0, 0}, {9, 4}, 0);
  CHECK_THAT(idle.number(x), succeeded());
}

TEMPLATE_LIST_TEST_CASE("batch: more rows than a grid has threads, many requests", "[batch]",
                        test::Executors) {
  TestType const x{};
  constexpr position_t requests = 3000;
  Numbers starts{0}, lengths, positions, owners;
  for (position_t r = 0; r < requests; ++r) {
    position_t const chunk = r % 7 == 3 ? 0 : r % 501;
    starts.push_back(starts.back() + chunk);
    lengths.push_back(chunk + r);
    for (position_t i = 0; i < chunk; ++i) {
      positions.push_back(r + i);
      owners.push_back(r);
    }
  }
  Batch batch(starts, lengths, positions.size());
  REQUIRE_THAT(batch.number(x), succeeded());
  CHECK(Batch::values(batch.positions) == positions);
  CHECK(Batch::values(batch.requests) == owners);
}

TEMPLATE_LIST_TEST_CASE("batch: wrong chunks are refused, or padding where only a device knows",
                        "[batch]", test::Executors) {
  TestType const x{};
  struct Case {
    Numbers starts, lengths;
    char const* what;
    std::int64_t expected, got;
    Numbers on_device;  // lengths of rows
  };
  for (Case const& wrong : {
           Case{{0, 3, 2}, {4, 9}, "ascend", 3, 2, {2, 3, 0, 0}},
           Case{{0, 2, 4}, {1, 9}, "chunk is longer", 2, 1, {0, 0, 8, 9}},
           Case{{0, 2, 5}, {2, 9}, "end of the last chunk", 4, 5, {1, 2, 7, 8}},
           Case{{1, 2, 4}, {2, 9}, "start of the first chunk", 0, 1, {0, 2, 8, 9}},
           Case{{2, 4, 4}, {10, 9}, "start of the first chunk", 0, 2, {0, 0, 9, 10}},
           Case{{-2, 2, 4}, {9, 9}, "start of the first chunk", 0, -2, {0, 0, 8, 9}},
           Case{{5}, {}, "start of the first chunk", 0, 5, {0, 0, 0, 0}},
       }) {
    CAPTURE(wrong.what);
    Batch batch(wrong.starts, wrong.lengths, 4);
    Status const status = batch.number(x);
    if (on_device) {
      REQUIRE_THAT(status, succeeded());
      CHECK(Batch::values(batch.row_lengths) == wrong.on_device);
    } else {
      CHECK_THAT(status, refused(Errc::bad_value, wrong.what).naming(wrong.expected, wrong.got));
      CHECK(batch.untouched());
    }
  }
}

TEMPLATE_LIST_TEST_CASE("batch: extents and memory are refused by name", "[batch]",
                        test::Executors) {
  TestType const x{};
  Batch batch({0, 2}, {5}, 2);
  auto chunks = batch.chunks();
  auto rows = batch.rows();
  chunks.starts = make_lengths<space>(batch.starts.data(), Rows{1});
  CHECK_THAT(number_rows(x, chunks, rows), refused(Errc::bad_shape, "starts"));
  chunks = batch.chunks();
  chunks.lengths = make_lengths<space>(nullptr, Rows{1});
  CHECK_THAT(number_rows(x, chunks, rows), refused(Errc::missing_input, "lengths of the chunks"));
  chunks = batch.chunks();
  rows.positions = make_dense<space, position_t, 1>(batch.positions.data(), {1});
  CHECK_THAT(number_rows(x, chunks, rows), refused(Errc::bad_shape, "positions"));
  rows = batch.rows();
  rows.requests = make_dense<space, position_t, 1>(nullptr, {2});
  CHECK_THAT(number_rows(x, chunks, rows), refused(Errc::missing_input, "requests"));
  CHECK(batch.untouched());
}

TEMPLATE_LIST_TEST_CASE("batch: accepted rows of chunks that do not lie behind each other",
                        "[batch]", test::Executors) {
  TestType const x{};
  struct Case {
    Numbers starts;
    char const* what;
    position_t on_device;  // of the second request
  };
  for (Case const& wrong :
       {Case{{-7, -2, 0}, "start of the first chunk", none},
        Case{{5, 9, 12}, "start of the first chunk", 9}, Case{{0, 9, 4}, "ascend", none}}) {
    CAPTURE(wrong.starts[1]);
    auto const starts = test::guarded(wrong.starts);
    auto const accepted = test::guarded<position_t>({1, 1});
    test::Guarded<position_t> rows(2, test::unwritten);
    Status const status = last_accepted_rows(x, make_lengths<space>(starts.data(), Rows{3}),
                                             make_lengths<space>(accepted.data(), Rows{2}),
                                             make_dense<space, position_t, 1>(rows.data(), {2}));
    test::finish(x);
    if (on_device) {
      REQUIRE_THAT(status, succeeded());
      CHECK(rows[1] == wrong.on_device);
    } else {
      CHECK_THAT(status, refused(Errc::bad_value, wrong.what));
      CHECK(rows[1] == test::unwritten_value<position_t>());
    }
  }
}

TEMPLATE_LIST_TEST_CASE("MTP R113: the rows of the last accepted tokens", "[batch][mtp]",
                        test::Executors) {
  TestType const x{};
  auto const starts = test::guarded<position_t>({0, 4, 5, 7});
  auto const run = [&](Numbers const& accepted_, test::Guarded<position_t>& rows) {
    auto const accepted = test::guarded(accepted_);
    Status const status = last_accepted_rows(x, make_lengths<space>(starts.data(), Rows{4}),
                                             make_lengths<space>(accepted.data(), Rows{3}),
                                             make_dense<space, position_t, 1>(rows.data(), {3}));
    test::finish(x);
    return status;
  };
  test::Guarded<position_t> rows(3, test::unwritten);
  REQUIRE_THAT(run({2, 1, 2}, rows), succeeded());
  CHECK(Batch::values(rows) == Numbers{1, 4, 6});
  for (Numbers const& wrong : {Numbers{2, 0, 2}, Numbers{2, 1, 3}, Numbers{-1, 1, 2}}) {
    test::Guarded<position_t> out(3, test::unwritten);
    Status const status = run(wrong, out);
    if (on_device) {
      REQUIRE_THAT(status, succeeded());
      CHECK(std::count(out.data(), out.data() + 3, no_position) == 1);
    } else {
      CHECK_THAT(status, refused(Errc::bad_value, "accepted"));
      CHECK(out[0] == test::unwritten_value<position_t>());
    }
  }
}
