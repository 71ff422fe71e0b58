// SPDX-License-Identifier: Apache-2.0
//
// A selection belongs to one forward of one set of rows (contracts 3.4).
#include "by_hand.hpp"
#include "session.hpp"

namespace {
using namespace layer_test;

TEMPLATE_LIST_TEST_CASE(
    "SHARE-STALE R094: a shared layer refuses the selection of an earlier forward", "[stale]",
    test::Executors) {
  Schedule const share("FSSF");
  Model<> model(share, 4);
  Session earlier(TestType{}, model, share, mixed_rows(), {7, 3});
  earlier.run_all(0, 3);
  Session fresh(TestType{}, model, share, mixed_rows(), {8, 3});
  auto const before = copy_selection(earlier.state().selection());
  CHECK_THAT(fresh.run(1, fresh.inputs(1), earlier.state()),
             refused(Errc::stale_selection, "another forward").at(1).naming(8, 7));
  CHECK(fresh.untouched_outputs(1));
  CHECK(copy_selection(earlier.state().selection()) == before);
}

TEMPLATE_LIST_TEST_CASE("SHARE-STALE R095: nothing leaks from forward A with 6 rows to B with 4",
                        "[stale]", test::Executors) {
  Schedule const share("FSSF");
  Model<> model(share, 4);
  Session a(TestType{}, model, share, chunk(1, 37, 6), {1, 0});
  a.run_all();
  Session b(TestType{}, model, share, chunk(3, 40, 4), {2, 0});
  CHECK_THAT(b.run(1, b.inputs(1), a.state()),
             refused(Errc::stale_selection, "forward").at(1).naming(2, 1));

  // Layer 3 was the last to select; a forgotten new number still does not pass.
  auto mistaken = b.inputs(1);
  mistaken.id = a.id();
  CHECK_THAT(b.run(1, mistaken, a.state()),
             refused(Errc::stale_selection, "source layer").at(1).naming(0, 3));

  REQUIRE_THAT(b.run(0, b.inputs(0), a.state()), succeeded());
  REQUIRE_THAT(b.run(1, b.inputs(1), a.state()), succeeded());
  CHECK(b.selected(1).row(3) == selection_by_hand(model, 0, {3, 40}));
}

TEMPLATE_LIST_TEST_CASE("SHARE-STALE: every part of the tag is compared, and both sides are named",
                        "[stale]", test::Executors) {
  Schedule const share("FSFS");
  Model<> model(share, 4);
  Session session(TestType{}, model, share, mixed_rows(), {7, 3});
  REQUIRE_THAT(session.run(0), succeeded());
  auto in = session.inputs(1);

  SECTION("forward") {
    in.id = {9, 3};
    CHECK_THAT(session.run(1, in),
               refused(Errc::stale_selection, "another forward").at(1).naming(9, 7));
  }
  SECTION("a forward number beyond 32 bits") {
    in.id = {(std::int64_t{1} << 32) + 7, 3};
    CHECK_THAT(session.run(1, in), refused(Errc::stale_selection, "another forward")
                                       .at(1)
                                       .naming((std::int64_t{1} << 32) + 7, 7));
  }
  SECTION("batch") {
    in.id = {7, 4};
    CHECK_THAT(session.run(1, in),
               refused(Errc::stale_selection, "another batch").at(1).naming(4, 3));
  }
  SECTION("row count") {
    Session smaller(TestType{}, model, share, chunk(1, 37, 9), {7, 3});
    CHECK_THAT(smaller.run(1, smaller.inputs(1), session.state()),
               refused(Errc::stale_selection, "row count").at(1).naming(9, 10));
    CHECK(smaller.untouched_outputs(1));
  }
  SECTION("source layer") {
    CHECK_THAT(session.run(3, session.inputs(3)),
               refused(Errc::stale_selection, "source layer").at(3).naming(2, 0));
    CHECK(session.untouched_outputs(3));
  }
  CHECK(session.untouched_outputs(1));
}

TEMPLATE_LIST_TEST_CASE("SHARE-STALE R102: a shared layer without a source is refused", "[stale]",
                        test::Executors) {
  SECTION("the schedule begins with a shared layer") {
    Schedule const share("SFSF");
    Model<> model(share, 4);
    Session session(TestType{}, model, share, mixed_rows());
    CHECK_THAT(session.run(0), refused(Errc::bad_schedule, "no source").at(0));
    CHECK(session.untouched_outputs(0));
  }
  SECTION("the schedule ends before the layer") {
    Schedule const share("FS");
    Model<> model(Schedule("FSS"), 3);
    Session session(TestType{}, model, share, mixed_rows());
    session.run_all(0, 2);
    CHECK_THAT(session.run(2), refused(Errc::bad_schedule, "no source").at(2));
    CHECK(session.untouched_outputs(2));
  }
  SECTION("the source lies above the layer") {
    Schedule share("FSF");
    share.sources[1] = 2;
    Model<> model(share, 3);
    Session session(TestType{}, model, share, mixed_rows());
    REQUIRE_THAT(session.run(0), succeeded());
    CHECK_THAT(session.run(1), refused(Errc::bad_schedule, "above").at(1).naming(1, 2));
  }
  SECTION("the state is empty") {
    Schedule const share("FS");
    Model<> model(share, 2);
    Session session(TestType{}, model, share, mixed_rows(), {0, 0});
    CHECK_THAT(session.run(1), refused(Errc::stale_selection, "no selection").at(1).naming(0, -1));
    CHECK(session.untouched_outputs(1));
  }
}

TEMPLATE_LIST_TEST_CASE("SHARE-STALE R103: a shared layer runs alone on an imported selection",
                        "[stale]", test::Executors) {
  TestType const x{};
  Schedule const share("FSSS");
  Model<> model(share, 4);
  Session whole(x, model, share, mixed_rows());
  whole.run_all();

  // Only what a recorder holds: plain arrays.
  auto const indices = test::guarded(whole.selected(0).indices);
  auto const counts = test::guarded(whole.selected(0).counts);
  SelectionView<space, position_t const> const from{
      make_dense<space, position_t const, 2>(indices.data(),
                                             {whole.row_count(), model.shape.top_k}),
      numbers(counts)};
  for (std::int32_t number = 1; number < 4; ++number) {
    Session alone(x, model, share, mixed_rows(), {99, 1});
    REQUIRE_THAT(import_selection(x, from, {99, 1}, 0, alone.batch(), alone.state()), succeeded());
    REQUIRE_THAT(alone.run(number), succeeded());
    CHECK(alone.selected(number) == whole.selected(number));
    CHECK(alone.result(number) == whole.result(number));
    CHECK(alone.calls.scores == 0);
    CHECK(alone.intact());
  }
}

TEMPLATE_LIST_TEST_CASE("SHARE-STALE R105: two micro-batches in turn have two states", "[stale]",
                        test::Executors) {
  TestType const x{};
  Schedule const share("FSSF");
  Model<> model(share, 4);
  RowList const rows_a = chunk(0, 29, 2);
  RowList const rows_b = join({chunk(3, 40), chunk(1, 37, 2)});
  Session alone_a(x, model, share, rows_a, {7, 0});
  Session alone_b(x, model, share, rows_b, {7, 1});
  alone_a.run_all();
  alone_b.run_all();

  Session a(x, model, share, rows_a, {7, 0});
  Session b(x, model, share, rows_b, {7, 1});
  SECTION("with two states they do not meet") {
    for (std::int32_t number = 0; number < 4; ++number) {
      REQUIRE_THAT(a.run(number), succeeded());
      REQUIRE_THAT(b.run(number), succeeded());
      CHECK(a.selected(number) == alone_a.selected(number));
      CHECK(b.selected(number) == alone_b.selected(number));
      CHECK(a.result(number) == alone_a.result(number));
      CHECK(b.result(number) == alone_b.result(number));
    }
    CHECK(a.calls.scores + b.calls.scores == 4);
  }
  SECTION("with one state the second batch's selection is not taken for the first's") {
    REQUIRE_THAT(a.run(0, a.inputs(0), a.state()), succeeded());
    REQUIRE_THAT(b.run(0, b.inputs(0), a.state()), succeeded());
    CHECK_THAT(a.run(1, a.inputs(1), a.state()),
               refused(Errc::stale_selection, "another batch").at(1).naming(0, 1));
    CHECK(a.untouched_outputs(1));
    CHECK_THAT(b.run(1, b.inputs(1), a.state()), succeeded());
  }
  SECTION("a dropped selection is an error, not an empty one") {
    REQUIRE_THAT(a.run(0), succeeded());
    a.state().clear();
    CHECK_THAT(a.run(1), refused(Errc::stale_selection, "no selection").at(1));
    CHECK(a.untouched_outputs(1));
  }
}

TEMPLATE_LIST_TEST_CASE("SHARE-NULL R100: indexer inputs belong to full layers, and only to them",
                        "[stale]", test::Executors) {
  // Caches and queries on every layer, as in a file with duplicated indexers (R002).
  Schedule const share("FSSF");
  Model<> model(Schedule("FFFF"), 4);
  Session session(TestType{}, model, share, mixed_rows());

  auto bare = session.inputs(0);
  bare.indexer = cuda::std::nullopt;
  CHECK_THAT(session.run(0, bare), refused(Errc::missing_input, "indexer").at(0));
  CHECK(session.untouched_outputs(0));
  CHECK(session.state().tag() == SelectionTag{});

  REQUIRE_THAT(session.run(0), succeeded());
  CHECK_THAT(session.run(1, session.inputs(1)), refused(Errc::bad_value, "indexer").at(1));
  CHECK(session.untouched_outputs(1));

  auto absent = session.inputs(1);
  absent.indexer = cuda::std::nullopt;
  REQUIRE_THAT(session.run(1, absent), succeeded());
  CHECK(session.selected(1) == session.selected(0));
}

TEMPLATE_LIST_TEST_CASE("SHARE-STALE R116: a policy that fails midway leaves no selection behind",
                        "[stale]", test::Executors) {
  TestType const x{};
  Schedule const share("FSFS");
  Shape shape = small_shape;
  shape.keys = 4000;  // at the minimum, the scores of a few rows fill the workspace
  Model<> model(share, 4, shape);
  SECTION("the indexer, in the second pass of several") {
    Session session(x, model, share, mixed_rows(), {7, 3}, minimum);
    session.run_all(0, 2);
    REQUIRE(session.calls.scores > 1);
    session.calls.fail_score = session.calls.scores + 2;
    CHECK_THAT(session.run(2), refused(Errc::backend_error, "gives up").at(2));
    CHECK(session.untouched_outputs(2));
    CHECK(session.state().tag() == SelectionTag{});
    CHECK_THAT(session.run(3), refused(Errc::stale_selection, "no selection").at(3));
    CHECK_THAT(session.run(1), refused(Errc::stale_selection, "no selection").at(1));

    session.calls.fail_score = 0;
    session.run_all(2, 4);
    Session expected(x, model, share, mixed_rows());
    expected.run_all();
    CHECK(session.result(3) == expected.result(3));
  }
  SECTION("the top-k") {
    Session<TestType, Model<>, Schedule, FailingPolicies<Model<>>> failing(x, model, share,
                                                                           mixed_rows());
    Session session(x, model, share, mixed_rows());
    session.run_all(0, 2);
    CHECK_THAT(failing.run(2, failing.inputs(2), session.state()),
               refused(Errc::backend_error, "gives up").at(2));
    CHECK(failing.untouched_outputs(2));
    CHECK_THAT(session.run(1), refused(Errc::stale_selection, "no selection").at(1));
  }
}

TEMPLATE_LIST_TEST_CASE("SHARE-STALE: a refused full layer does not revive an older selection",
                        "[stale]", test::Executors) {
  Schedule const share("FS");
  Model<> model(share, 2);
  Session first(TestType{}, model, share, mixed_rows(), {7, 3});
  first.run_all();
  Session second(TestType{}, model, share, mixed_rows(), {8, 3});
  auto bare = second.inputs(0);
  bare.indexer = cuda::std::nullopt;
  REQUIRE_FALSE(second.run(0, bare, first.state()).ok());
  CHECK_THAT(second.run(1, second.inputs(1), first.state()), refused(Errc::stale_selection).at(1));
}

TEMPLATE_LIST_TEST_CASE("PAGE: KV in another page table than the group's needs plan_group",
                        "[stale]", test::Executors) {
  TestType const x{};
  Schedule const share("FSS");
  Model<> model(share, 3);
  Layout const elsewhere{.index_page = 4, .kv_page = 8, .seed = 77};
  Model<> other(share, 3, small_shape, elsewhere);
  auto const rows = mixed_rows();
  Session session(x, model, share, rows);
  session.run_all(0, 1);

  auto in = session.inputs(1);
  in.batch.kv_pages = other.kv_pages();
  in.attention.kv = other.kv(1).view();
  CHECK_THAT(session.run(1, in), refused(Errc::stale_selection, "kv_pages").at(1));
  CHECK(session.untouched_outputs(1));

  REQUIRE_THAT(plan_group(x, in.batch, session.state()), succeeded());
  REQUIRE_THAT(session.run(1, in), succeeded());
  CHECK(session.selected(1) == session.selected(0));
  for (std::size_t r = 0; r < rows.size(); ++r) {
    auto const selection = selection_by_hand(model, 0, rows[r]);
    CHECK(close(row_of(session.out(1), model.shape, r),
                attention_by_hand(other, 1, rows[r], selection)));
  }

  // Now the group's own table is the foreign one.
  CHECK_THAT(session.run(2), refused(Errc::stale_selection, "kv_pages").at(2));
  REQUIRE_THAT(plan_group(x, session.batch(), session.state()), succeeded());
  REQUIRE_THAT(session.run(2), succeeded());
  Session expected(x, model, share, rows);
  expected.run_all();
  CHECK(session.result(2) == expected.result(2));
}

TEMPLATE_LIST_TEST_CASE("PAGE: the same table read with another page size is another table",
                        "[stale]", test::Executors) {
  Schedule const share("FS");
  Model<> model(share, 2);
  Session session(TestType{}, model, share, mixed_rows());
  session.run_all(0, 1);
  auto in = session.inputs(1);
  in.batch.kv_pages.page_size *= 2;
  in.attention.kv.block_size *= 2;
  in.attention.kv.blocks /= 2;
  CHECK_THAT(session.run(1, in), refused(Errc::stale_selection, "kv_pages").at(1).naming(8, 16));
  CHECK(session.untouched_outputs(1));
}

TEMPLATE_LIST_TEST_CASE("GRAPH R129: a batch of 4 rows, then none, then 2", "[stale]",
                        test::Executors) {
  TestType const x{};
  Schedule const share("FS");
  Model<> model(share, 2);
  Session four(x, model, share, chunk(1, 37, 4), {1, 0});
  four.run_all();
  Session none(x, model, share, {}, {2, 0});
  for (std::int32_t const number : {0, 1}) {
    REQUIRE_THAT(none.run(number, none.inputs(number), four.state()), succeeded());
  }
  CHECK(four.state().tag() == SelectionTag{{2, 0}, 0, 0});
  Session two(x, model, share, chunk(3, 40, 2), {3, 0});
  CHECK_THAT(two.run(1, two.inputs(1), four.state()), refused(Errc::stale_selection));
  for (std::int32_t const number : {0, 1}) {
    REQUIRE_THAT(two.run(number, two.inputs(number), four.state()), succeeded());
  }
  CHECK(two.selected(1).row(1) == selection_by_hand(model, 0, {3, 40}));
}

}  // namespace
