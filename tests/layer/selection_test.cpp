// SPDX-License-Identifier: Apache-2.0
//
// The selection contract (contracts 2) and dense attention (4.5), seen through the layer.
#include "by_hand.hpp"
#include "session.hpp"

#include <atomic>
#include <limits>

#if !defined(INDEXSHARE_TEST_CUDA)
namespace engine {
/// An engine's own element type, which counts how often it is read.
struct Watched {
  float value;
};
std::atomic<long> reads{0};
float to_float(Watched element) noexcept {
  ++reads;
  return element.value;
}
}  // namespace engine

template <>
struct test::Codec<indexshare::format::Plain<engine::Watched>> {
  using Format = indexshare::format::Plain<engine::Watched>;
  static index_t block_elements(Format, index_t page_size, index_t lanes) {
    return page_size * lanes;
  }
  static void encode(Format, engine::Watched* block, index_t, index_t place,
                     std::span<float> values) {
    for (std::size_t i = 0; i < values.size(); ++i) {
      block[static_cast<std::size_t>(place) * values.size() + i] = {values[i]};
    }
  }
};
#endif

namespace {
using namespace layer_test;

constexpr float nan_value = std::numeric_limits<float>::quiet_NaN();

/// Makes the index keys of a layer unusable: NaN, and under the address sanitizer no access at all.
template <class Cache>
void forbid_keys(Cache& cache) {
  cache.memory().fill(test::nan_poison);
  test::forbid(cache.memory().data(), cache.memory().bytes());
}

TEMPLATE_LIST_TEST_CASE("SHORTCUT R137: len <= k selects everything without reading index keys",
                        "[selection]", test::Executors) {
  Schedule const share("FS");
  Model<> model(share, 2);
  RowList const rows = join({chunk(2, 4, 3), chunk(0, 6, 2), chunk(1, 1), chunk(3, 0)});
  forbid_keys(model.index_keys(0));
  Session session(TestType{}, model, share, rows);
  auto& data = session.queries(0);
  std::fill_n(data.index_q.data(), data.index_q.size(), nan_value);
  std::fill_n(data.weights.data(), data.weights.size(), nan_value);
  session.run_all();
  for (std::size_t r = 0; r < rows.size(); ++r) {
    CAPTURE(r);
    CHECK(session.selected(1).row(static_cast<index_t>(r)) == all_below(rows[r].length));
    CHECK(close(row_of(session.out(1), model.shape, r),
                attention_by_hand(model, 1, rows[r], all_below(rows[r].length))));
  }
}

#if !defined(INDEXSHARE_TEST_CUDA)
TEMPLATE_LIST_TEST_CASE("SHORTCUT R137: short rows of a mixed batch cost no index key",
                        "[selection]", test::Executors) {
  using M = Model<float, format::Plain<engine::Watched>>;
  Schedule const share("F");
  M model(share, 1);
  auto const reads_of = [&](RowList const& rows) {
    Session session(TestType{}, model, share, rows);
    engine::reads = 0;
    REQUIRE_THAT(session.run(0), succeeded());
    long const reads = engine::reads;
    for (std::size_t r = 0; r < rows.size(); ++r) {
      CHECK(session.selected(0).row(static_cast<index_t>(r)) ==
            selection_by_hand(model, 0, rows[r]));
    }
    return reads;
  };
  RowList const short_rows = join({chunk(2, 4, 3), chunk(0, 6, 2), chunk(1, 5)});
  CHECK(reads_of(short_rows) == 0);
  long const one = reads_of(chunk(3, 40));
  CHECK(one == 40 * model.shape.index_dim);
  CHECK(reads_of(join({short_rows, chunk(3, 40)})) == one);
}
#endif

TEMPLATE_LIST_TEST_CASE(
    "SHORTCUT R137: from 3 to 5 keys with k = 4, the keys written while short decide",
    "[selection]", test::Executors) {
  TestType const x{};
  Shape shape = small_shape;
  shape.top_k = 4;
  Schedule const share("FS");
  // Request 0 is short and grows; request 1 is beyond k from the start.
  Model<> full(share, 2, shape, {}, {}, {5, 7});
  Model<> model(share, 2, shape, {}, {}, {0, 7});
  for (position_t length = 1; length <= 5; ++length) {
    CAPTURE(length);
    position_t const position = length - 1;
    auto const append_token = [&](auto& cache, std::int32_t number, auto const& pages, Part part) {
      append(x, cache, pages, 0, position, token_values(part, number, 0, position, cache.lanes()));
    };
    for (std::int32_t const number : {0, 1}) {
      append_token(model.kv(number), number, model.kv_pages(), Part::kv);
    }
    append_token(model.index_keys(0), 0, model.index_pages(), Part::index_key);
    RowList const rows = join({chunk(0, length), chunk(1, 7)});
    Session session(x, model, share, rows, {length, 0});
    session.run_all();
    for (std::size_t r = 0; r < 2; ++r) {
      auto const expected = selection_by_hand(full, 0, rows[r]);
      CHECK(session.selected(1).row(static_cast<index_t>(r)) == expected);
      CHECK(expected.size() == std::min<std::size_t>(4, to_size(rows[r].length)));
      CHECK(close(row_of(session.out(1), shape, r), attention_by_hand(full, 1, rows[r], expected)));
    }
  }
}

TEMPLATE_LIST_TEST_CASE("LEN: what lies at or past a row's length is never read", "[selection]",
                        test::Executors) {
  TestType const x{};
  Schedule const share("FS");
  // Rows end before the tokens that the caches hold.
  RowList const rows = join({chunk(0, 20, 4), chunk(2, 2), chunk(3, 33), chunk(1, 9, 2)});
  Model<> model(share, 2);
  Session expected(x, model, share, rows);
  expected.run_all();
  float const tail = GENERATE(nan_value, 1e30f, -1e30f, std::numeric_limits<float>::infinity());
  CAPTURE(tail);
  Model<> other(share, 2);
  position_t const ends[] = {20, 9, 2, 33};
  for (std::int32_t const number : {0, 1}) {
    for (position_t request = 0; request < 4; ++request) {
      for (position_t s = ends[request]; s < 40; ++s) {
        other.kv(number).write(request, s, std::vector<float>(to_size(model.shape.key_dim), tail));
        if (number == 0) {
          other.index_keys(0).write(request, s,
                                    std::vector<float>(to_size(model.shape.index_dim), tail));
        }
      }
    }
  }
  Session session(x, other, share, rows);
  session.run_all();
  for (std::int32_t const number : {0, 1}) {
    CHECK(session.selected(number) == expected.selected(number));
    CHECK(session.result(number) == expected.result(number));
  }
}

TEMPLATE_LIST_TEST_CASE("DIAG R027: the first tokens are not forced into the selection",
                        "[selection]", test::Executors) {
  Shape shape = small_shape;
  shape.top_k = 4;
  Schedule const share("F");
  Model<> model(share, 1, shape, {}, {}, {3, 8});
  for (position_t s = 0; s < 8; ++s) {
    std::vector<float> key(to_size(shape.index_dim));
    key[0] = s < 2 ? 1.0f : 3.0f + static_cast<float>(s % 3);
    model.index_keys(0).write(1, s, key);
  }
  Session session(TestType{}, model, share, chunk(1, 8, 3));
  auto& data = session.queries(0);
  std::fill_n(data.index_q.data(), data.index_q.size(), 1.0f);
  std::fill_n(data.weights.data(), data.weights.size(), 1.0f);
  session.run_all();
  // Scores 1 1 5 3 4 5 3 4.
  CHECK(session.selected(0).row(2) == std::vector<position_t>{2, 4, 5, 7});
}

TEMPLATE_LIST_TEST_CASE("LEN: lengths are clamped to [0, capacity]", "[selection]",
                        test::Executors) {
  Schedule const share("FS");
  Model<> model(share, 2);
  RowList const rows = join({chunk(3, 40), chunk(0, 20), chunk(1, 12)});
  Session session(TestType{}, model, share, rows);
  auto const lengths = test::guarded<position_t>({std::numeric_limits<position_t>::max(), 20, -5});
  for (std::int32_t const number : {0, 1}) {
    auto in = session.inputs(number);
    in.batch.lengths = numbers(lengths);
    REQUIRE_THAT(session.run(number, in), succeeded());
    for (std::size_t r : {0u, 1u}) {
      auto const selection = selection_by_hand(model, 0, rows[r]);
      CHECK(session.selected(number).row(static_cast<index_t>(r)) == selection);
      CHECK(close(row_of(session.out(number), model.shape, r),
                  attention_by_hand(model, number, rows[r], selection)));
    }
    CHECK(session.selected(number).row(2).empty());
    for (float const v : row_of(session.out(number), model.shape, 2)) CHECK(v == 0.0f);
    CHECK(session.outputs(number).lse(2, 1) == -std::numeric_limits<float>::infinity());
  }
  CHECK(session.intact());
}

TEMPLATE_LIST_TEST_CASE("PAGE R126: a position without a page is not taken for slot 0",
                        "[selection]", test::Executors) {
  Schedule const share("F");
  Model<> model(share, 1);
  RowList const rows = join({chunk(3, 40), chunk(1, 37)});
  Session expected(TestType{}, model, share, rows);
  expected.run_all();
  // Whoever owns slot 0 in either cache, its row is huge.
  auto const canary = [](auto& cache) { std::fill_n(cache.memory().data(), cache.lanes(), 1e30f); };
  SECTION("index keys: such a position scores -inf") {
    canary(model.index_keys(0));
    model.index_keys(0).unmap(3, 2);  // positions 8 .. 11
    Session session(TestType{}, model, share, chunk(3, 40));
    auto& data = session.queries(0);  // all other scores are below zero
    for (std::size_t i = 0; i < data.index_q.size(); ++i) {
      data.index_q[i] = i % to_size(model.shape.index_dim) == 0 ? 1.0f : 0.0f;
    }
    std::fill_n(data.weights.data(), data.weights.size(), -1.0f);
    session.run_all();
    for (position_t const s : session.selected(0).row(0)) CHECK((s < 8 || s >= 12));
  }
  SECTION("KV: such a position contributes nothing") {
    auto const selection = selection_by_hand(model, 0, rows[0]);
    model.kv(0).unmap(3, selection[2] / 8);
    canary(model.kv(0));
    Session session(TestType{}, model, share, chunk(3, 40));
    session.run_all();
    CHECK(session.selected(0).row(0) == selection);
    std::vector<position_t> mapped;
    for (position_t const s : selection) {
      if (s / 8 != selection[2] / 8) mapped.push_back(s);
    }
    CHECK(close(session.out(0), attention_by_hand(model, 0, rows[0], mapped)));
  }
}

TEMPLATE_LIST_TEST_CASE("ROPE R026: with k >= len the sparse layer equals the dense one",
                        "[selection]", test::Executors) {
  TestType const x{};
  index_t const top_k = GENERATE(29, 40, 64);
  Shape shape = small_shape;
  shape.top_k = top_k;
  Schedule const share("FS");
  Model<> model(share, 2, shape);
  RowList const rows = join({chunk(0, 29, 5), chunk(2, 4, 3), chunk(1, 27)});
  Session sparse(x, model, share, rows);
  Session<TestType, Model<>, Schedule, DensePolicies<Model<>>> dense(x, model, share, rows);
  sparse.run_all();
  dense.run_all();
  for (std::int32_t const number : {0, 1}) CHECK(sparse.result(number) == dense.result(number));
}

TEMPLATE_LIST_TEST_CASE("DIAG R010: dense attention touches neither the indexer nor the state",
                        "[selection]", test::Executors) {
  TestType const x{};
  Schedule const share("FSSF");
  Model<> model(share, 4);
  Session sparse(x, model, share, mixed_rows());
  sparse.run_all(0, 1);
  auto const tag = sparse.state().tag();
  auto const held = copy_selection(sparse.state().selection());
  forbid_keys(model.index_keys(0));

  RowList const rows = mixed_rows();
  Session<TestType, Model<>, Schedule, DensePolicies<Model<>>> dense(x, model, share, rows, {8, 3});
  for (std::int32_t number = 0; number < 4; ++number) {
    auto in = dense.inputs(number);
    if (number == 3) in.indexer = cuda::std::nullopt;
    REQUIRE_THAT(dense.run(number, in, sparse.state()), succeeded());
    for (std::size_t r = 0; r < rows.size(); ++r) {
      CHECK(close(row_of(dense.out(number), model.shape, r),
                  attention_by_hand(model, number, rows[r], all_below(rows[r].length))));
    }
  }
  CHECK(dense.calls.checks + dense.calls.scores == 0);
  CHECK(sparse.state().tag() == tag);
  CHECK(copy_selection(sparse.state().selection()) == held);

  // The state may even have no memory.
  SelectionState<space> none;
  CHECK_THAT(dense.run(1, dense.inputs(1), none), succeeded());
}

}  // namespace
