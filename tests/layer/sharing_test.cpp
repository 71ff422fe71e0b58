// SPDX-License-Identifier: Apache-2.0
//
// A share group attends to one selection, each layer to its own KV.
#include "by_hand.hpp"
#include "session.hpp"

#include <array>

namespace {
using namespace layer_test;

TEMPLATE_LIST_TEST_CASE(
    "SHARE-STALE R002, R107: layers of a group have byte-identical selections, the ones computed "
    "by hand",
    "[share]", test::Executors) {
  Schedule const share("FSSSFS");
  Model<> model(share, 6);
  auto const rows = mixed_rows();
  Session session(TestType{}, model, share, rows);
  session.run_all();

  for (std::int32_t number = 0; number < 6; ++number) {
    CAPTURE(number);
    std::int32_t const source = share_source(share, number);
    CHECK(session.selected(number) == session.selected(source));
    for (std::size_t r = 0; r < rows.size(); ++r) {
      CAPTURE(r);
      auto const expected = selection_by_hand(model, source, rows[r]);
      CHECK(session.selected(number).row(static_cast<index_t>(r)) == expected);
      auto const attended = attention_by_hand(model, number, rows[r], expected);
      CHECK(close(row_of(session.out(number), model.shape, r), attended));
    }
  }
  CHECK(session.selected(0) != session.selected(4));
}

TEMPLATE_LIST_TEST_CASE(
    "SHARE-STALE R107: a middle layer's output may die before the last layer runs", "[share]",
    test::Executors) {
  Schedule const share("FSSS");
  Model<> model(share, 4);
  Session session(TestType{}, model, share, mixed_rows());
  session.run_all(0, 2);
  auto const first = session.outputs(1).out;
  std::fill_n(first.data_handle(), first.size(), std::numeric_limits<float>::quiet_NaN());
  session.run_all(2, 4);

  Session whole(TestType{}, model, share, mixed_rows());
  whole.run_all();
  for (std::int32_t const number : {2, 3}) {
    CHECK(session.selected(number) == whole.selected(number));
    CHECK(session.result(number) == whole.result(number));
  }
}

// contracts 3.5
TEMPLATE_LIST_TEST_CASE("SHARE-STALE: a shared layer attends to its own KV", "[share]",
                        test::Executors) {
  Schedule const share("FSSF");
  auto const rows = mixed_rows();
  Model<> model(share, 4);
  Session before(TestType{}, model, share, rows);
  before.run_all();

  std::int32_t const changed = GENERATE(0, 1, 2);
  CAPTURE(changed);
  for (position_t s = 0; s < contexts[3]; ++s) {
    auto const values = token_values(Part::kv, 50, 3, s, model.shape.key_dim);
    model.kv(changed).write(3, s, values);
  }
  Session after(TestType{}, model, share, rows);
  after.run_all();
  for (std::int32_t number = 0; number < 4; ++number) {
    CAPTURE(number);
    CHECK(after.selected(number) == before.selected(number));
    CHECK((after.result(number) == before.result(number)) == (number != changed));
  }
}

TEMPLATE_LIST_TEST_CASE("SHARE-STALE: index keys of a full layer decide for its group only",
                        "[share]", test::Executors) {
  Schedule const share("FSFS");
  Model<> model(share, 4);
  Session before(TestType{}, model, share, mixed_rows());
  before.run_all();
  for (position_t s = 0; s < contexts[1]; ++s) {
    model.index_keys(2).write(1, s, token_values(Part::index_key, 50, 1, s, model.shape.index_dim));
  }
  Session after(TestType{}, model, share, mixed_rows());
  after.run_all();
  for (std::int32_t const number : {0, 1}) {
    CHECK(after.selected(number) == before.selected(number));
    CHECK(after.result(number) == before.result(number));
  }
  for (std::int32_t const number : {2, 3}) {
    CHECK(after.selected(number) != before.selected(number));
    CHECK(after.selected(number) == after.selected(2));
  }
}

TEMPLATE_LIST_TEST_CASE("SHARE-STALE R104: F S S F runs two indexers, in every kind of batch",
                        "[share]", test::Executors) {
  auto const [name, rows] = GENERATE(Catch::Generators::table<char const*, RowList>({
      {"prefill from the start", chunk(0, 12, 12)},
      {"prefill chunk", chunk(1, 30, 9)},
      {"decode", join({chunk(3, 40), chunk(0, 29), chunk(1, 37)})},
      {"draft rows", join({chunk(1, 37, 4), chunk(3, 40, 4)})},
      {"mixed", mixed_rows()},
  }));
  CAPTURE(name);
  Schedule const share("FSSF");
  Model<> model(share, 4);
  Session session(TestType{}, model, share, rows);
  session.run_all();
  CHECK(session.calls.scores == 2);
  CHECK(session.calls.checks == 2);
  CHECK(session.calls.rows == 2 * session.row_count());
}

// R109: what a shared layer would write lies in no cache.
TEMPLATE_LIST_TEST_CASE("SHARE-CACHE R106, R109: shared layers own no index-key cache", "[share]",
                        test::Executors) {
  Schedule const share("FFFSSSFSSSFS");
  Model<> model(share, 12);
  int caches = 0;
  for (std::int32_t number = 0; number < 12; ++number) caches += model.has_index_keys(number);
  CHECK(caches == 5);
  Session session(TestType{}, model, share, mixed_rows());
  session.run_all();
  CHECK(session.calls.scores == 5);
}

template <class X, class Share>
void check_same_as_by_hand(X const& x, Share const& share, Schedule const& by_hand) {
  for (std::int32_t number = 0; number < 8; ++number) {
    REQUIRE(share_source(share, number) == share_source(by_hand, number));
  }
  Model<> model(by_hand, 8);
  Session expected(x, model, by_hand, mixed_rows());
  expected.run_all();
  Session session(x, model, share, mixed_rows());
  session.run_all();
  for (std::int32_t number = 0; number < 8; ++number) {
    CHECK(session.selected(number) == expected.selected(number));
    CHECK(session.result(number) == expected.result(number));
    CHECK(session.layer(number).is_full() == (share_source(by_hand, number) == number));
  }
  CHECK(session.calls.scores == expected.calls.scores);
}

TEMPLATE_LIST_TEST_CASE("CFG-SCHED: every share policy runs as its schedule written by hand",
                        "[share]", test::Executors) {
  TestType const x{};
  Schedule const glm("FFFSSSFS");
  SECTION("Periodic, freq 4, offset 3") {
    check_same_as_by_hand(x, Periodic{.layers = 8, .freq = 4, .offset = 3}, glm);
  }
  SECTION("Pattern") { check_same_as_by_hand(x, Pattern<"FFFSSSFS">{}, glm); }
  SECTION("SharePlan") {
    constexpr auto F = LayerRole::full;
    constexpr auto S = LayerRole::shared;
    std::array<LayerRole, 8> const types{F, F, F, S, S, S, F, S};
    ScheduleFields fields{};
    fields.num_layers = 8;
    fields.types = cuda::std::span<LayerRole const>(types.data(), types.size());
    check_same_as_by_hand(x, make_share_plan(fields).value(), glm);
  }
  SECTION("EveryLayer") { check_same_as_by_hand(x, EveryLayer{8}, Schedule("FFFFFFFF")); }
  SECTION("Periodic with the default offset") {
    check_same_as_by_hand(x, Periodic{.layers = 8, .freq = 4}, Schedule("FFSSSFSS"));
  }
}

TEMPLATE_LIST_TEST_CASE("CFG-SCHED R020: the full layers before the offset attend sparsely",
                        "[share]", test::Executors) {
  Shape shape = small_shape;
  shape.keys = 64;
  shape.top_k = 8;
  Schedule const share("FFFS");
  Model<> model(share, 4, shape, {}, {}, {10, 64, 64});
  RowList const rows = join({chunk(1, 64), chunk(2, 64, 3)});
  Session session(TestType{}, model, share, rows);
  session.run_all();
  for (std::int32_t number = 0; number < 3; ++number) {
    CAPTURE(number);
    for (std::size_t r = 0; r < rows.size(); ++r) {
      CAPTURE(r);
      auto const selection = selection_by_hand(model, number, rows[r]);
      CHECK(session.selected(number).row(static_cast<index_t>(r)) == selection);
      REQUIRE(selection.size() == 8);
      auto const got = row_of(session.out(number), shape, r);
      CHECK(close(got, attention_by_hand(model, number, rows[r], selection)));
      CHECK_FALSE(close(got, attention_by_hand(model, number, rows[r], all_below(rows[r].length))));
    }
  }
}

}  // namespace
