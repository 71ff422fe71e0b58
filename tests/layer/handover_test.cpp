// SPDX-License-Identifier: Apache-2.0
//
// compact_selection and what it refuses; draft rows, their padding and their rollback.
#include "by_hand.hpp"
#include "session.hpp"

#include <limits>

namespace {
using namespace layer_test;

TEMPLATE_LIST_TEST_CASE("MTP R112: compact_selection refuses what it cannot compact", "[handover]",
                        test::Executors) {
  TestType const x{};
  Schedule const share("F");
  Model<> model(share, 1);
  Session step0(x, model, share, mixed_rows(), {1, 0});
  step0.run_all();
  Session step1(x, model, share, join({chunk(0, 29), chunk(3, 40)}), {2, 0});
  auto const before = copy_selection(step0.state().selection());
  auto const rows = test::guarded<position_t>({4, 8});

  SECTION("from an empty state") {
    OwnedState empty(4, model.shape.top_k);
    CHECK_THAT(compact_selection(x, empty.get(), empty.get().tag().id, numbers(rows), {2, 0},
                                 step1.batch(), step1.state()),
               refused(Errc::stale_selection, "without a selection"));
  }
  SECTION("into the same state") {
    CHECK_THAT(compact_selection(x, step0.state(), step0.state().tag().id, numbers(rows), {2, 0},
                                 step1.batch(), step0.state()),
               refused(Errc::bad_value, "two states"));
    CHECK(step0.state().tag() == SelectionTag{{1, 0}, 10, 0});
  }
  SECTION("no row numbers") {
    CHECK_THAT(compact_selection(x, step0.state(), step0.state().tag().id,
                                 make_lengths<space>(nullptr, Rows{2}), {2, 0}, step1.batch(),
                                 step1.state()),
               refused(Errc::missing_input, "rows"));
  }
  SECTION("another number of rows than the batch has") {
    auto const three = test::guarded<position_t>({4, 8, 1});
    CHECK_THAT(compact_selection(x, step0.state(), step0.state().tag().id, numbers(three), {2, 0},
                                 step1.batch(), step1.state()),
               refused(Errc::bad_shape, "rows of").naming(3, 2));
  }
  SECTION("a state of another width") {
    OwnedState narrow(4, model.shape.top_k - 1);
    CHECK_THAT(compact_selection(x, step0.state(), step0.state().tag().id, numbers(rows), {2, 0},
                                 step1.batch(), narrow.get()),
               refused(Errc::bad_shape, "top_k").naming(5, 6));
    CHECK(narrow.get().tag() == SelectionTag{});
  }
  SECTION("a state with too few rows") {
    OwnedState small(1, model.shape.top_k);
    CHECK_THAT(compact_selection(x, step0.state(), step0.state().tag().id, numbers(rows), {2, 0},
                                 step1.batch(), small.get()),
               refused(Errc::bad_shape, "capacity").naming(1, 2));
    CHECK(small.intact());
  }
  CHECK(step1.state().tag() == SelectionTag{});
  CHECK(copy_selection(step0.state().selection()) == before);
}

// The host reads row numbers and refuses; on a device nobody does before the work.
TEMPLATE_LIST_TEST_CASE("MTP R112: a row number outside the selection hands over nothing",
                        "[handover]", test::Executors) {
  TestType const x{};
  Schedule const share("F");
  Model<> model(share, 1);
  Session step0(x, model, share, mixed_rows(), {1, 0});
  step0.run_all();
  Session step1(x, model, MtpDraft{0, true}, join({chunk(0, 29), chunk(3, 40)}), {2, 0}, ample, 1);
  auto const before = copy_selection(step0.state().selection());
  position_t const bad = GENERATE(10, -1, std::numeric_limits<position_t>::max());
  CAPTURE(bad);
  auto const rows = test::guarded<position_t>({8, bad});
  Status const status = compact_selection(x, step0.state(), step0.state().tag().id, numbers(rows),
                                          {2, 0}, step1.batch(), step1.state());
  if constexpr (space == Space::device) {
    REQUIRE_THAT(status, succeeded());
    auto in = step1.inputs(0);
    in.indexer = cuda::std::nullopt;
    REQUIRE_THAT(step1.run(0, in), succeeded());
    CHECK(step1.selected(0).row(0) == step0.selected(0).row(8));
    CHECK(step1.selected(0).row(1).empty());
    for (float const v : row_of(step1.out(0), model.shape, 1)) CHECK(v == 0.0f);
  } else {
    CHECK_THAT(status, refused(Errc::bad_value, "row number").naming(10, bad));
    CHECK(step1.state().tag() == SelectionTag{});
  }
  CHECK(copy_selection(step0.state().selection()) == before);
}

// A state is a value: two of them may lie over the same memory.
TEMPLATE_LIST_TEST_CASE("MTP R112: compact_selection refuses two states over the same memory",
                        "[handover]", test::Executors) {
  TestType const x{};
  Schedule const share("F");
  Model<> model(share, 1);
  Session step0(x, model, share, mixed_rows(), {1, 0});
  step0.run_all();
  Session step1(x, model, share, join({chunk(0, 29), chunk(3, 40), chunk(2, 4)}), {2, 0});
  auto const rows =
      test::guarded<position_t>({8, 0, 1});  // in place, row 0 would be gone when it is read
  SelectionState<space> twin = step0.state();
  CHECK_THAT(compact_selection(x, step0.state(), step0.state().tag().id, numbers(rows), {2, 0},
                               step1.batch(), twin),
             refused(Errc::bad_value, "two states"));
  CHECK(copy_selection(step0.state().selection()) == step0.selected(0));
}

TEMPLATE_LIST_TEST_CASE("MTP R112: rows may be taken in any order, and more than once",
                        "[handover]", test::Executors) {
  TestType const x{};
  Schedule const share("F");
  Model<> model(share, 1);
  Session step0(x, model, share, mixed_rows(), {1, 0});
  step0.run_all();
  RowList const drafts = join({chunk(1, 37), chunk(3, 40), chunk(0, 29), chunk(3, 40)});
  Session step1(x, model, MtpDraft{0, true}, drafts, {2, 0}, ample, 1);
  auto const rows = test::guarded<position_t>({9, 8, 4, 8});
  REQUIRE_THAT(compact_selection(x, step0.state(), step0.state().tag().id, numbers(rows), {2, 0},
                                 step1.batch(), step1.state()),
               succeeded());
  auto in = step1.inputs(0);
  in.indexer = cuda::std::nullopt;
  REQUIRE_THAT(step1.run(0, in), succeeded());
  for (std::size_t i = 0; i < rows.size(); ++i) {
    CHECK(step1.selected(0).row(static_cast<index_t>(i)) == step0.selected(0).row(rows[i]));
    CHECK(step1.row_result(0, i) == step0.row_result(0, to_size(rows[i])));
  }
}

TEMPLATE_LIST_TEST_CASE("KSHAPE R118: next_n draft rows equal single rows with their own bound",
                        "[handover]", test::Executors) {
  TestType const x{};
  Schedule const share("F");
  Model<> model(share, 1);
  for (position_t next_n = 1; next_n <= 8; ++next_n) {
    CAPTURE(next_n);
    RowList const rows = join({chunk(3, 40, next_n), chunk(0, 10, next_n)});
    Session session(x, model, share, rows);
    session.run_all();
    for (std::size_t r = 0; r < rows.size(); ++r) {
      auto const j = static_cast<position_t>(r) % next_n;
      position_t const context = r < to_size(next_n) ? 40 : 10;
      REQUIRE(rows[r].length == context - next_n + 1 + j);
      Session single(x, model, share, {rows[r]});
      single.run_all();
      CHECK(single.selected(0).row(0) == session.selected(0).row(static_cast<index_t>(r)));
      CHECK(single.selected(0).row(0) == selection_by_hand(model, 0, rows[r]));
      CHECK(single.row_result(0, 0) == session.row_result(0, r));
    }
  }
}

TEMPLATE_LIST_TEST_CASE("LEN R120: padding rows of a draft batch give zero and disturb nobody",
                        "[handover]", test::Executors) {
  TestType const x{};
  Schedule const share("FS");
  Model<> model(share, 2);
  RowList const real = join({chunk(0, 29, 4), chunk(3, 40, 4), chunk(1, 37, 4)});
  RowList const padded = join({real, {{-1, 0}, {-1, 0}, {0, 0}, {99, 0}}});
  Session session(x, model, share, padded);
  for (std::int32_t const number : {0, 1}) {
    auto& data = session.queries(number);
    float const nan = std::numeric_limits<float>::quiet_NaN();
    std::fill_n(data.q.data() + data.q.size() / 4 * 3, data.q.size() / 4, nan);
    std::fill_n(data.index_q.data() + data.index_q.size() / 4 * 3, data.index_q.size() / 4, nan);
    std::fill_n(data.weights.data() + data.weights.size() / 4 * 3, data.weights.size() / 4, nan);
  }
  session.run_all();
  Session expected(x, model, share, real);
  expected.run_all();
  for (std::int32_t const number : {0, 1}) {
    for (std::size_t r = 0; r < real.size(); ++r) {
      CHECK(session.selected(number).row(static_cast<index_t>(r)) ==
            expected.selected(number).row(static_cast<index_t>(r)));
      CHECK(session.row_result(number, r) == expected.row_result(number, r));
    }
    auto const lse = session.outputs(number).lse;
    for (std::size_t r = real.size(); r < padded.size(); ++r) {
      CHECK(session.selected(number).row(static_cast<index_t>(r)).empty());
      for (float const v : row_of(session.out(number), model.shape, r)) CHECK(v == 0.0f);
      for (index_t h = 0; h < model.shape.heads; ++h) {
        CHECK(lse(static_cast<index_t>(r), h) == -std::numeric_limits<float>::infinity());
      }
    }
  }
}

}  // namespace
