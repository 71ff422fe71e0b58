// SPDX-License-Identifier: Apache-2.0
//
// A model cut into pipeline stages (contracts 3.2): each stage has its own state, page table memory
// and workspace; the selection crosses the cut by import_selection.
#include "session.hpp"

#include <array>

namespace {
using namespace layer_test;

constexpr char const* glm_12 = "FFFSSSFSSSFS";

SharePlan glm_plan() {
  ScheduleFields fields{};
  fields.num_layers = 12;
  fields.freq = 4;
  fields.offset = 3;
  return make_share_plan(fields).value();
}

TEMPLATE_LIST_TEST_CASE("SHARE-PP R096: every cut of 12 layers equals the unsplit run",
                        "[pipeline]", test::Executors) {
  TestType const x{};
  SharePlan const plan = glm_plan();
  Model<> model(plan, 12);
  Session whole(x, model, plan, mixed_rows());
  whole.run_all();

  for (std::int32_t cut = 1; cut < 12; ++cut) {
    CAPTURE(cut);
    Session lower(x, model, plan, mixed_rows());
    lower.run_all(0, cut);
    // The upper rank's pages lie elsewhere.
    Model<> moved(plan, 12, small_shape, Layout{.index_page = 4, .kv_page = 8, .seed = 55});
    Session upper(x, moved, plan, mixed_rows());

    bool const shared = glm_12[cut] == 'S';
    REQUIRE(plan.needs_import(cut) == shared);
    CHECK(plan.stage(cut, 12, StageStart::own).has_value() == !shared);
    StagePlan const stage = plan.stage(cut, 12, StageStart::imports_selection).value();
    CHECK(stage.import_source() == (shared ? share_source(plan, cut) : no_source));
    if (shared) {
      CHECK_THAT(upper.run(cut), refused(Errc::stale_selection, "no selection").at(cut));
      REQUIRE_THAT(import_selection(x, lower.state().selection(), upper.id(), stage.import_source(),
                                    upper.batch(), upper.state()),
                   succeeded());
    }
    upper.run_all(cut, 12);
    for (std::int32_t number = cut; number < 12; ++number) {
      CHECK(upper.selected(number) == whole.selected(number));
      CHECK(upper.result(number) == whole.result(number));
    }
    CHECK(lower.calls.scores + upper.calls.scores == 5);
  }
}

TEMPLATE_LIST_TEST_CASE("SHARE-PP R097: an import under a wrong name is refused by the reader",
                        "[pipeline]", test::Executors) {
  TestType const x{};
  Schedule const share("FFSS");
  Model<> model(share, 4);
  Session lower(x, model, share, mixed_rows());
  lower.run_all(0, 3);
  Session upper(x, model, share, mixed_rows());
  auto const handed = lower.state().selection();

  SECTION("the stage below's last layer instead of the source") {
    REQUIRE_THAT(import_selection(x, handed, upper.id(), 2, upper.batch(), upper.state()),
                 succeeded());
    CHECK_THAT(upper.run(3), refused(Errc::stale_selection, "source layer").at(3).naming(1, 2));
  }
  SECTION("another forward") {
    REQUIRE_THAT(import_selection(x, handed, {6, 3}, 1, upper.batch(), upper.state()), succeeded());
    CHECK_THAT(upper.run(3), refused(Errc::stale_selection, "forward").at(3).naming(7, 6));
  }
  CHECK(upper.untouched_outputs(3));
}

TEMPLATE_LIST_TEST_CASE("SHARE-PP: an import that does not fit is refused and leaves no selection",
                        "[pipeline]", test::Executors) {
  TestType const x{};
  Schedule const share("FS");
  Model<> model(share, 2);
  Session lower(x, model, share, mixed_rows());
  lower.run_all(0, 1);
  Session upper(x, model, share, mixed_rows());
  auto from = lower.state().selection();
  auto batch = upper.batch();
  index_t const rows = upper.row_count();

  SECTION("width") {
    from.indices = make_strided<space, position_t const, 2>(
        from.indices.data_handle(), {rows, model.shape.top_k - 1}, {model.shape.top_k, 1});
    CHECK_THAT(import_selection(x, from, upper.id(), 0, batch, upper.state()),
               refused(Errc::bad_shape, "top_k").naming(6, 5));
  }
  SECTION("counts") {
    from.counts = rows_of(from.counts, 0, rows - 1);
    CHECK_THAT(import_selection(x, from, upper.id(), 0, batch, upper.state()),
               refused(Errc::bad_shape, "counts").naming(rows, rows - 1));
  }
  SECTION("rows of the batch") {
    batch.lengths = rows_of(batch.lengths, 0, rows - 2);
    batch.requests = rows_of(batch.requests, 0, rows - 2);
    CHECK_THAT(import_selection(x, from, upper.id(), 0, batch, upper.state()),
               refused(Errc::bad_shape, "batch").naming(rows, rows - 2));
  }
  SECTION("rows of the state") {
    OwnedState small(rows - 1, model.shape.top_k);
    CHECK_THAT(import_selection(x, from, upper.id(), 0, batch, small.get()),
               refused(Errc::bad_shape, "capacity").naming(rows - 1, rows));
    CHECK(small.intact());
  }
  SECTION("no indices") {
    from.indices = make_dense<space, position_t const, 2>(nullptr, {rows, model.shape.top_k});
    CHECK_THAT(import_selection(x, from, upper.id(), 0, batch, upper.state()),
               refused(Errc::missing_input, "indices"));
  }
  SECTION("no counts") {
    from.counts = make_lengths<space>(nullptr, Rows{rows});
    CHECK_THAT(import_selection(x, from, upper.id(), 0, batch, upper.state()),
               refused(Errc::missing_input, "counts"));
  }
  CHECK(upper.state().tag() == SelectionTag{});
  CHECK_THAT(upper.run(1), refused(Errc::stale_selection, "no selection").at(1));
}

TEMPLATE_LIST_TEST_CASE("SHARE-PP: a group plan without requests is refused before any work",
                        "[pipeline]", test::Executors) {
  TestType const x{};
  Schedule const share("FS");
  Model<> model(share, 2);
  Session session(x, model, share, mixed_rows());
  session.run_all(0, 1);
  auto batch = session.batch();
  batch.requests = make_lengths<space>(nullptr, Rows{session.row_count()});

  CHECK_THAT(plan_group(x, batch, session.state()), refused(Errc::missing_input, "requests"));
  OwnedState upper(session.row_count(), model.shape.top_k);
  CHECK_THAT(import_selection(x, session.state().selection(), {7, 3}, 0, batch, upper.get()),
             refused(Errc::missing_input, "requests"));
  CHECK(upper.get().tag() == SelectionTag{});

  REQUIRE_THAT(session.run(1), succeeded());
}

// What a stage receives may come from an engine that pads or damages; nothing of it becomes an
// address.
TEMPLATE_LIST_TEST_CASE(
    "CONTRACT: an imported selection with garbage behind its counts is harmless", "[pipeline]",
    test::Executors) {
  TestType const x{};
  Schedule const share("FS");
  Model<> model(share, 2);
  Session whole(x, model, share, mixed_rows());
  whole.run_all();

  Selected handed = whole.selected(0);
  index_t const rows = whole.row_count();
  for (index_t r = 0; r < rows; ++r) {
    for (index_t j = handed.counts[to_size(r)]; j < handed.top_k; ++j) {
      handed.indices[to_size(r * handed.top_k + j)] = 0x7FFFFFFF;
    }
  }
  auto const indices = test::guarded(handed.indices);
  auto const counts = test::guarded(handed.counts);
  SelectionView<space, position_t const> const from{
      make_dense<space, position_t const, 2>(indices.data(), {rows, handed.top_k}),
      numbers(counts)};
  Session upper(x, model, share, mixed_rows());
  REQUIRE_THAT(import_selection(x, from, upper.id(), 0, upper.batch(), upper.state()), succeeded());
  REQUIRE_THAT(upper.run(1), succeeded());
  CHECK(upper.selected(1) == whole.selected(1));
  CHECK(upper.result(1) == whole.result(1));
}

TEMPLATE_LIST_TEST_CASE("SHARE-PP R099: a model that shares nothing hands nothing over",
                        "[pipeline]", test::Executors) {
  TestType const x{};
  ScheduleFields fields{};
  fields.num_layers = 4;
  SharePlan const plan = make_share_plan(fields).value();
  Model<> model(plan, 4);
  Session whole(x, model, plan, mixed_rows());
  whole.run_all();
  for (std::int32_t cut = 1; cut < 4; ++cut) {
    CHECK_FALSE(plan.needs_import(cut));
    Session upper(x, model, plan, mixed_rows());
    upper.run_all(cut, 4);
    CHECK(upper.result(3) == whole.result(3));
  }
}

}  // namespace
