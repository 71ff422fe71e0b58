// SPDX-License-Identifier: Apache-2.0
//
// Draft steps of one multi-token-prediction layer (contracts 3.6).
#include "by_hand.hpp"
#include "session.hpp"

#include <array>
#include <numeric>

namespace {
using namespace layer_test;

constexpr std::int32_t mtp = 78;  // num_hidden_layers
constexpr MtpDraft sharing{mtp, true};
constexpr MtpDraft selecting{mtp, false};

/// A model with one layer, the MTP layer.
using Mtp = Model<>;
Mtp mtp_model(std::vector<position_t> tokens = {20, 12, 3}) {
  return Mtp(Schedule("F"), 1, small_shape, {}, {}, std::move(tokens));
}

template <class X>
using Draft = Session<X, Mtp, MtpDraft>;

/// Draft step `step` of the model over `rows`.
template <class X>
Draft<X> draft(X x, Mtp& model, std::int32_t step, RowList rows, ForwardId id,
               MtpDraft const& policy = sharing) {
  return Draft<X>(x, model, policy, std::move(rows), id, ample, mtp + step);
}

/// Runs a step that brings no indexer inputs.
template <class X>
Status run_shared(Draft<X>& session, SelectionState<space>& state) {
  auto in = session.inputs(0);
  in.indexer = cuda::std::nullopt;
  return session.run(0, in, state);
}

/// The draft's token: index key and KV of the model's numbers, or KV full of NaN.
template <class X>
void append_token(X const& x, Mtp& model, position_t request, position_t position,
                  bool poison_kv = false) {
  Shape const& shape = model.shape;
  append(x, model.index_keys(0), model.index_pages(), request, position,
         token_values(Part::index_key, 0, request, position, shape.index_dim));
  auto kv = token_values(Part::kv, 0, request, position, shape.key_dim);
  if (poison_kv) std::fill(kv.begin(), kv.end(), std::numeric_limits<float>::quiet_NaN());
  append(x, model.kv(0), model.kv_pages(), request, position, kv);
}

/// Step 0 of the round: 4, 1 and 2 verified rows of three requests.
RowList verified_rows() { return join({chunk(0, 20, 4), chunk(1, 12, 1), chunk(2, 3, 2)}); }
std::vector<position_t> const last_rows{3, 4, 6};

RowList step_rows(position_t step) {
  return join({chunk(0, 20 + step), chunk(1, 12 + step), chunk(2, 3 + step)});
}

TEMPLATE_LIST_TEST_CASE("MTP R110: step 0 computes, whatever the flag says", "[mtp]",
                        test::Executors) {
  Mtp model = mtp_model();
  auto step = draft(TestType{}, model, 0, verified_rows(), {1, 0});
  CHECK(step.layer(0).is_full());
  CHECK_THAT(run_shared(step, step.state()), refused(Errc::missing_input, "indexer").at(mtp));
  REQUIRE_THAT(step.run(0), succeeded());
  CHECK(step.calls.scores == 1);
  CHECK_FALSE(draft(TestType{}, model, 1, step_rows(1), {1, 0}).layer(0).is_full());
}

// The trunk favours positions 0 and 1, the MTP layer 5 and 6.
TEMPLATE_LIST_TEST_CASE("MTP R111: draft steps share the MTP layer's selection, not the trunk's",
                        "[mtp]", test::Executors) {
  TestType const x{};
  Shape shape = small_shape;
  shape.top_k = 2;
  Model<> model(Schedule("FF"), 2, shape, {}, {}, {9, 10});
  for (std::int32_t number : {0, 1}) {
    for (position_t s = 0; s < 9; ++s) {
      std::vector<float> key(to_size(shape.index_dim));
      key[0] = (number == 0 ? s < 2 : s == 5 || s == 6) ? 3.0f : 1.0f;
      model.index_keys(number).write(0, s, key);
    }
  }
  auto const favour = [&](auto& session, std::int32_t number) {
    auto& data = session.queries(number);
    for (std::size_t i = 0; i < data.index_q.size(); ++i) {
      data.index_q[i] = i % to_size(shape.index_dim) == 0 ? 1.0f : 0.0f;
    }
    for (std::size_t i = 0; i < data.weights.size(); ++i) data.weights[i] = 1.0f;
  };

  Session trunk(x, model, Schedule("FF"), chunk(0, 9, 2), {1, 0});
  favour(trunk, 0);
  trunk.run_all(0, 1);
  REQUIRE(trunk.selected(0).row(1) == std::vector<position_t>{0, 1});

  // The model's layer 1 is the MTP layer.
  Session step0(x, model, MtpDraft{mtp, true}, chunk(0, 9, 2), {1, 0}, ample, mtp - 1);
  favour(step0, 1);
  SECTION("the trunk's selection is refused") {
    Session step1(x, model, MtpDraft{mtp, true}, chunk(0, 9, 2), {1, 0}, ample, mtp);
    auto in = step1.inputs(1);
    in.indexer = cuda::std::nullopt;
    CHECK_THAT(step1.run(1, in, trunk.state()),
               refused(Errc::stale_selection, "source layer").at(mtp + 1).naming(mtp, 0));
  }
  SECTION("step 0 selects by its own scores, later steps reuse them") {
    REQUIRE_THAT(step0.run(1, step0.inputs(1), trunk.state()), succeeded());
    REQUIRE(step0.selected(1).row(1) == std::vector<position_t>{5, 6});
    OwnedState drafts(shape.rows, shape.top_k);
    Session step1(x, model, MtpDraft{mtp, true}, chunk(0, 9), {2, 0}, ample, mtp);
    auto const rows = test::guarded<position_t>({1});
    REQUIRE_THAT(compact_selection(x, trunk.state(), trunk.state().tag().id, numbers(rows), {2, 0},
                                   step1.batch(), drafts.get()),
                 succeeded());
    for (std::int32_t step = 1; step < 4; ++step) {
      step1.numbering = mtp - 1 + step;
      auto in = step1.inputs(1);
      in.indexer = cuda::std::nullopt;
      REQUIRE_THAT(step1.run(1, in, drafts.get()), succeeded());
      CHECK(step1.selected(1).row(0) == std::vector<position_t>{5, 6});
    }
  }
}

TEMPLATE_LIST_TEST_CASE(
    "MTP R112, R114: steps 1.. read the last accepted row of each request, with one indexer call "
    "in "
    "five steps",
    "[mtp]", test::Executors) {
  TestType const x{};
  Mtp model = mtp_model();
  auto step0 = draft(x, model, 0, verified_rows(), {1, 0});
  REQUIRE_THAT(step0.run(0), succeeded());
  OwnedState drafts(8, model.shape.top_k);
  auto const anchors = test::guarded(last_rows);
  auto const batch1 = draft(x, model, 1, step_rows(1), {2, 0});
  REQUIRE_THAT(compact_selection(x, step0.state(), step0.state().tag().id, numbers(anchors), {2, 0},
                                 batch1.batch(), drafts.get()),
               succeeded());
  CHECK(drafts.get().tag() == SelectionTag{{2, 0}, 3, mtp});

  int scores = step0.calls.scores;
  for (position_t s = 1; s < 5; ++s) {
    CAPTURE(s);
    RowList const rows = step_rows(s);
    for (Row const& row : rows) append_token(x, model, row.request, row.length - 1);
    auto step = draft(x, model, s, rows, {2, 0});
    REQUIRE_THAT(run_shared(step, drafts.get()), succeeded());
    scores += step.calls.scores;
    for (std::size_t i = 0; i < 3; ++i) {
      auto const selection = step0.selected(0).row(last_rows[i]);
      CHECK(step.selected(0).row(static_cast<index_t>(i)) == selection);
      // Request 2 stays below k and is not extended by the drafted positions either.
      CHECK(selection.size() == (i == 2 ? 3u : 6u));
      CHECK(close(row_of(step.out(0), model.shape, i),
                  attention_by_hand(model, 0, rows[i], selection)));
    }
    CHECK(step.intact());
  }
  CHECK(scores == 1);
  CHECK(drafts.intact());
  CHECK(copy_selection(step0.state().selection()) == step0.selected(0));

  // The index keys of all steps are there: the next round selects as if it had been a prefill.
  Mtp longer = mtp_model({24, 16, 7});
  RowList const next = join({chunk(0, 24, 2), chunk(1, 16), chunk(2, 7)});
  auto round2 = draft(x, model, 0, next, {3, 0});
  auto fresh = draft(x, longer, 0, next, {3, 0});
  REQUIRE_THAT(round2.run(0), succeeded());
  REQUIRE_THAT(fresh.run(0), succeeded());
  CHECK(round2.selected(0) == fresh.selected(0));
  CHECK(round2.result(0) == fresh.result(0));
  CHECK(fresh.selected(0).row(1) == selection_by_hand(longer, 0, {0, 24}));
}

TEMPLATE_LIST_TEST_CASE(
    "MTP R113: the anchor is the last accepted token, not the last verified one", "[mtp]",
    test::Executors) {
  TestType const x{};
  Mtp model = mtp_model({10, 12, 3});
  // Tokens 7, 8 and 9 of request 0 were verified, 8 was accepted.
  auto step0 = draft(x, model, 0, join({chunk(1, 12), chunk(0, 10, 3)}), {1, 0});
  REQUIRE_THAT(step0.run(0), succeeded());
  auto step1 = draft(x, model, 1, join({chunk(1, 12), chunk(0, 10)}), {2, 0});
  auto const accepted = test::guarded<position_t>({0, 2});
  REQUIRE_THAT(compact_selection(x, step0.state(), step0.state().tag().id, numbers(accepted),
                                 {2, 0}, step1.batch(), step1.state()),
               succeeded());
  REQUIRE_THAT(run_shared(step1, step1.state()), succeeded());
  auto const by_token_8 = selection_by_hand(model, 0, {0, 9});
  CHECK(step1.selected(0).row(1) == by_token_8);
  CHECK(by_token_8 != selection_by_hand(model, 0, {0, 8}));
  CHECK(by_token_8 != selection_by_hand(model, 0, {0, 10}));
}

TEMPLATE_LIST_TEST_CASE("MTP KVShare: what drafts write to the KV cache is never read", "[mtp]",
                        test::Executors) {
  TestType const x{};
  std::vector<std::vector<std::uint32_t>> results;
  for (bool const poison : {false, true}) {
    Mtp model = mtp_model();
    auto step0 = draft(x, model, 0, verified_rows(), {1, 0});
    REQUIRE_THAT(step0.run(0), succeeded());
    OwnedState drafts(3, model.shape.top_k);
    auto const anchors = test::guarded(last_rows);
    auto const batch1 = draft(x, model, 1, step_rows(1), {2, 0});
    REQUIRE_THAT(compact_selection(x, step0.state(), step0.state().tag().id, numbers(anchors),
                                   {2, 0}, batch1.batch(), drafts.get()),
                 succeeded());
    for (position_t s = 1; s < 5; ++s) {
      for (Row const& row : step_rows(s)) {
        append_token(x, model, row.request, row.length - 1, poison);
      }
      auto step = draft(x, model, s, step_rows(s), {2, 0});
      REQUIRE_THAT(run_shared(step, drafts.get()), succeeded());
      results.push_back(step.result(0));
    }
  }
  for (std::size_t s = 0; s < 4; ++s) CHECK(results[s] == results[s + 4]);
}

TEMPLATE_LIST_TEST_CASE("MTP R121: rejected drafts leave no trace in index keys and selections",
                        "[mtp]", test::Executors) {
  TestType const x{};
  Mtp model = mtp_model();
  // Three drafts that turn out wrong behind the first: their numbers are another request's.
  append_token(x, model, 0, 20);
  for (position_t const s : {21, 22}) {
    append(x, model.index_keys(0), model.index_pages(), 0, s,
           token_values(Part::index_key, 0, 50, s, model.shape.index_dim));
    append(x, model.kv(0), model.kv_pages(), 0, s,
           token_values(Part::kv, 0, 50, s, model.shape.key_dim));
  }
  Mtp fresh = mtp_model({24, 12, 3});
  auto const check = [&](RowList const& rows, std::int64_t forward) {
    auto session = draft(x, model, 0, rows, {forward, 0});
    auto expected = draft(x, fresh, 0, rows, {forward, 0});
    REQUIRE_THAT(session.run(0), succeeded());
    REQUIRE_THAT(expected.run(0), succeeded());
    CHECK(session.selected(0) == expected.selected(0));
    CHECK(session.result(0) == expected.result(0));
  };
  check(join({chunk(0, 21, 2), chunk(1, 12)}), 1);  // rolled back to the accepted one
  for (position_t const s : {21, 22, 23}) append_token(x, model, 0, s);
  check(join({chunk(0, 24, 4), chunk(2, 3)}), 2);
}

TEMPLATE_LIST_TEST_CASE("MTP: without the flag each step selects", "[mtp]", test::Executors) {
  TestType const x{};
  Mtp model = mtp_model();
  OwnedState state(8, model.shape.top_k);
  int scores = 0;
  for (position_t s = 0; s < 5; ++s) {
    RowList const rows = step_rows(s);
    for (Row const& row : rows) {
      if (s > 0) append_token(x, model, row.request, row.length - 1);
    }
    auto step = draft(x, model, s, rows, {s, 0}, selecting);
    CHECK(step.layer(0).is_full());
    CHECK_THAT(run_shared(step, state.get()), refused(Errc::missing_input, "indexer").at(mtp + s));
    REQUIRE_THAT(step.run(0, step.inputs(0), state.get()), succeeded());
    scores += step.calls.scores;
    Mtp fresh = mtp_model({20 + s, 12 + s, 3 + s});
    for (std::size_t i = 0; i < 3; ++i) {
      CHECK(step.selected(0).row(static_cast<index_t>(i)) == selection_by_hand(fresh, 0, rows[i]));
    }
  }
  CHECK(scores == 5);
}

TEMPLATE_LIST_TEST_CASE("MTP R116: after an error in step 2 the next round's step 0 recomputes",
                        "[mtp]", test::Executors) {
  TestType const x{};
  Mtp model = mtp_model();
  auto step0 = draft(x, model, 0, verified_rows(), {1, 0});
  OwnedState drafts(8, model.shape.top_k);
  auto const anchors = test::guarded(last_rows);
  REQUIRE_THAT(step0.run(0), succeeded());
  auto step1 = draft(x, model, 1, step_rows(1), {2, 0});
  REQUIRE_THAT(compact_selection(x, step0.state(), step0.state().tag().id, numbers(anchors), {2, 0},
                                 step1.batch(), drafts.get()),
               succeeded());
  REQUIRE_THAT(run_shared(step1, drafts.get()), succeeded());

  auto step2 = draft(x, model, 2, step_rows(2), {2, 0});
  auto broken = step2.inputs(0);
  broken.indexer = cuda::std::nullopt;
  broken.attention.kv.data = nullptr;
  CHECK_THAT(step2.run(0, broken, drafts.get()), refused(Errc::missing_input, "KV").at(mtp + 2));
  CHECK(step2.untouched_outputs(0));
  drafts.get().clear();  // what a caller does on an error path
  CHECK_THAT(run_shared(step2, drafts.get()),
             refused(Errc::stale_selection, "no selection").at(mtp + 2));

  auto next = draft(x, model, 0, verified_rows(), {3, 0});
  CHECK_THAT(run_shared(next, drafts.get()), refused(Errc::missing_input, "indexer").at(mtp));
  REQUIRE_THAT(next.run(0, next.inputs(0), drafts.get()), succeeded());
  CHECK(next.calls.scores == 1);
  CHECK(next.selected(0) == step0.selected(0));
}

TEMPLATE_LIST_TEST_CASE("MTP R115: with dense attention the flag is inactive", "[mtp]",
                        test::Executors) {
  Mtp model = mtp_model();
  Session<TestType, Mtp, MtpDraft, DensePolicies<Mtp>> step(TestType{}, model, sharing,
                                                            step_rows(0), {1, 0});
  for (std::int32_t s = 0; s < 3; ++s) {
    step.numbering = mtp + s;
    auto in = step.inputs(0);
    if (s > 0) in.indexer = cuda::std::nullopt;
    REQUIRE_THAT(step.run(0, in), succeeded());
    CHECK(close(row_of(step.out(0), model.shape, 1),
                attention_by_hand(model, 0, {1, 12}, all_below(12))));
  }
  CHECK(step.calls.scores + step.calls.checks == 0);
  CHECK(step.state().tag() == SelectionTag{});
}

}  // namespace
