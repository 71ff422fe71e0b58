// SPDX-License-Identifier: Apache-2.0
//
// Scratch of a layer: its size, and that results do not depend on it (contracts 5.2, R138-R140).
#include "by_hand.hpp"
#include "session.hpp"

#include <limits>

namespace {
using namespace layer_test;

using Counted = Counting<Model<>::Indexer>;
template <class Attention = Model<>::Sparse>
using PlainLayer = SparseAttentionLayer<Counted, RadixTopK, Schedule, Attention>;

template <class Attention = Model<>::Sparse>
PlainLayer<Attention> layer_of(Shape const& shape, char const* schedule = "FFF",
                               std::int32_t number = 2) {
  PlainLayer<Attention> layer;
  layer.share = Schedule(schedule);
  layer.shape = shape;
  layer.layer = number;
  return layer;
}

Shape random_shape(test::Random& random) {
  auto const upto = [&](std::size_t most) { return 1 + static_cast<index_t>(random.below(most)); };
  Shape shape;
  shape.rows = upto(300) - 1;
  shape.keys = upto(5000);
  shape.top_k = upto(200);
  shape.index_heads = upto(70);
  shape.index_dim = upto(130);
  shape.heads = upto(130);
  shape.key_dim = upto(600);
  shape.value_dim = upto(static_cast<std::size_t>(shape.key_dim));
  return shape;
}

using Extent = index_t Shape::*;
constexpr Extent extents[] = {&Shape::rows,        &Shape::keys,      &Shape::top_k,
                              &Shape::index_heads, &Shape::index_dim, &Shape::heads,
                              &Shape::key_dim,     &Shape::value_dim};

TEMPLATE_LIST_TEST_CASE("MEM: a workspace is within its budget, or the error names the minimum",
                        "[workspace]", test::Executors) {
  TestType const x{};
  test::Random random(11);
  for (int i = 0; i < 300; ++i) {
    auto const layer = layer_of(random_shape(random));
    CAPTURE(i, layer.shape.rows, layer.shape.keys, layer.shape.key_dim, layer.shape.index_dim);
    auto const none = layer.workspace(x, 0);
    REQUIRE_FALSE(none.has_value());
    CHECK_THAT(none.error(), refused(Errc::workspace_too_small, "workspace").at(2));
    CHECK(none.error().got == 0);

    // Whoever allocates what the error names must be able to go on.
    auto const least = static_cast<std::size_t>(none.error().expected);
    auto const size = layer.workspace(x, least);
    REQUIRE(size.has_value());
    CHECK(size->bytes <= least);
    CHECK_FALSE(layer.workspace(x, least - 1).has_value());

    std::size_t const budget = least + random.below(4 * least);
    auto const within = layer.workspace(x, budget);
    REQUIRE(within.has_value());
    CHECK(within->bytes <= budget);
    CHECK(within->bytes >= least);
  }
}

TEMPLATE_LIST_TEST_CASE("MEM R140: a workspace is monotone in every capacity and in the budget",
                        "[workspace]", test::Executors) {
  TestType const x{};
  test::Random random(12);
  for (int i = 0; i < 300; ++i) {
    auto const layer = layer_of(random_shape(random));
    std::size_t const least = minimum_budget(layer, x);
    std::size_t const budget = least + random.below(4 * least);
    std::size_t const bytes = layer.workspace(x, budget)->bytes;
    std::size_t const all = layer.workspace(x, std::size_t{1} << 40)->bytes;
    CHECK(bytes <= all);
    for (Extent const extent : extents) {
      auto larger = layer;
      larger.shape.*extent += 1 + static_cast<index_t>(random.below(100));
      if (extent == &Shape::value_dim)
        larger.shape.key_dim = std::max(larger.shape.key_dim, larger.shape.value_dim);
      CHECK(minimum_budget(larger, x) >= least);
      CHECK(larger.workspace(x, std::size_t{1} << 40)->bytes >= all);
      auto const size = larger.workspace(x, budget);
      if (size) CHECK(size->bytes >= bytes);
    }
  }
}

TEMPLATE_LIST_TEST_CASE("MEM R140: the minimum does not depend on the rows", "[workspace]",
                        test::Executors) {
  TestType const x{};
  Shape shape = small_shape;
  shape.keys = 65536;
  std::size_t const least = minimum_budget(layer_of(shape.with_rows(1)), x);
  for (index_t const rows : {0, 2, 64, 8192, 1 << 20}) {
    CHECK(minimum_budget(layer_of(shape.with_rows(rows)), x) == least);
    CHECK(layer_of(shape.with_rows(rows)).workspace(x, 1 << 20)->bytes <= 1 << 20);
  }
}

// R139: the scores of a row have no factor of heads.
TEMPLATE_LIST_TEST_CASE("MEM R139: scratch grows by one score per row and key, whatever the heads",
                        "[workspace]", test::Executors) {
  TestType const x{};
  for (index_t const heads : {1, 32, 64}) {
    Shape shape = small_shape;
    shape.index_heads = heads;
    shape.keys = 4096;
    auto const bytes = [&](index_t rows) {
      return layer_of(shape.with_rows(rows)).workspace(x, std::size_t{1} << 40)->bytes;
    };
    CHECK(bytes(201) - bytes(101) == 100 * 4096 * sizeof(float));
  }
}

TEMPLATE_LIST_TEST_CASE("MEM: dense layers and shared layers need no room for scores",
                        "[workspace]", test::Executors) {
  TestType const x{};
  Shape longest = small_shape;
  longest.keys = 1 << 20;
  Shape long_enough = small_shape;  // to be cut into as many splits as there ever are
  long_enough.keys = 1 << 16;
  CHECK(minimum_budget(layer_of<Model<>::Dense>(longest), x) ==
        minimum_budget(layer_of<Model<>::Dense>(long_enough), x));
  CHECK(minimum_budget(layer_of(longest, "FSS", 2), x) ==
        minimum_budget(layer_of(small_shape, "FSS", 2), x));
}

TEMPLATE_LIST_TEST_CASE("INT32 R142: no size wraps around, up to the largest positions",
                        "[workspace]", test::Executors) {
  TestType const x{};
  Shape shape = small_shape;
  shape.keys = std::numeric_limits<position_t>::max();
  std::size_t const least = minimum_budget(layer_of(shape.with_rows(1)), x);
  CHECK(least > std::size_t{4} * static_cast<std::size_t>(shape.keys));
  for (index_t const rows : {index_t{3}, index_t{1} << 20, index_t{1} << 30, shape.keys}) {
    CAPTURE(rows);
    auto const size = layer_of(shape.with_rows(rows)).workspace(x, 2 * least);
    if (!size) CHECK_THAT(size.error(), succeeded());
    REQUIRE(size.has_value());
    CHECK(size->bytes == 2 * least);
  }
}

TEMPLATE_LIST_TEST_CASE("KSHAPE: a shape without meaning has no workspace", "[workspace]",
                        test::Executors) {
  TestType const x{};
  auto const size_of = [&](Extent extent, index_t value) {
    Shape shape = small_shape;
    shape.*extent = value;
    return layer_of(shape).workspace(x, ample);
  };
  constexpr index_t beyond = index_t{std::numeric_limits<position_t>::max()} + 1;
  auto const check = [&](Extent extent, index_t value, char const* name) {
    CAPTURE(name, value);
    auto const size = size_of(extent, value);
    REQUIRE_FALSE(size.has_value());
    CHECK_THAT(size.error(), refused(Errc::bad_shape, name).at(2));
    CHECK(size.error().got == value);
  };
  check(&Shape::rows, -1, "shape.rows");
  check(&Shape::rows, beyond, "shape.rows");
  check(&Shape::keys, 0, "shape.keys");
  check(&Shape::keys, -5, "shape.keys");
  check(&Shape::keys, beyond, "shape.keys");
  check(&Shape::top_k, 0, "shape.top_k");
  check(&Shape::top_k, -1, "shape.top_k");
}

TEMPLATE_LIST_TEST_CASE("KSHAPE: a negative model size has no workspace", "[workspace]",
                        test::Executors) {
  auto const [extent, name] = GENERATE(Catch::Generators::table<Extent, char const*>({
      {&Shape::index_heads, "index_heads"},
      {&Shape::index_dim, "index_dim"},
      {&Shape::heads, "heads"},
      {&Shape::key_dim, "key_dim"},
      {&Shape::value_dim, "value_dim"},
  }));
  CAPTURE(name);
  Shape shape = small_shape;
  shape.*extent = -1;
  auto const size = layer_of(shape).workspace(TestType{}, ample);
  REQUIRE_FALSE(size.has_value());
  CHECK_THAT(size.error(), refused(Errc::bad_shape, name).at(2));
}

// ---- results

/// A shape whose scores do not fit at once into the smallest workspace.
Shape long_shape() {
  Shape shape = small_shape;
  shape.keys = 4000;
  return shape;
}

TEMPLATE_LIST_TEST_CASE("MEM R138: results do not depend on the budget", "[workspace]",
                        test::Executors) {
  TestType const x{};
  Schedule const share("FS");
  Model<> model(share, 2, long_shape());
  Session expected(x, model, share, mixed_rows());
  expected.run_all();
  REQUIRE(expected.calls.scores == 1);

  std::size_t const least = minimum_budget(expected.layer(0), x);
  int most_passes = 0;
  for (std::size_t budget = least; budget < 12 * least; budget += budget / 3) {
    CAPTURE(budget);
    Session session(x, model, share, mixed_rows(), {7, 3}, budget);
    CHECK(session.workspace().bytes <= budget);
    session.run_all();
    most_passes = std::max(most_passes, session.calls.scores);
    CHECK(session.calls.rows == session.row_count());
    for (std::int32_t const number : {0, 1}) {
      CHECK(session.selected(number) == expected.selected(number));
      CHECK(session.result(number) == expected.result(number));
    }
  }
  CHECK(most_passes > 2);
}

TEMPLATE_LIST_TEST_CASE("MEM R052, R138: 64 rows against 65536 keys run within 1 MiB",
                        "[workspace]", test::Executors) {
  TestType const x{};
  // A full sort of 65536 keys for each row takes the reference its time, and an emulated device
  // too.
  bool const slow = std::is_same_v<TestType, ReferenceExec> || space == Space::device;
  position_t const count = slow ? 12 : 64;
  Shape const shape{.rows = count,
                    .keys = 65536,
                    .top_k = 5,
                    .index_heads = 2,
                    .index_dim = 2,  // a long plateau of equal scores at the cut
                    .heads = 1,
                    .key_dim = 4,
                    .value_dim = 4};
  Schedule const share("F");
  Model<> model(share, 1, shape, {}, {}, {3, 65536});
  RowList const rows = chunk(1, 65536, count);
  constexpr std::size_t mib = std::size_t{1} << 20;
  Session split(x, model, share, rows, {7, 3}, mib);
  CHECK(split.workspace().bytes <= mib);
  split.run_all();
  CHECK(split.calls.scores > 3);

  Session whole(x, model, share, rows, {7, 3}, 32 * mib);
  whole.run_all();
  CHECK(whole.calls.scores == 1);
  CHECK(split.selected(0) == whole.selected(0));
  CHECK(split.result(0) == whole.result(0));
  CHECK(split.selected(0).row(count - 1) == selection_by_hand(model, 0, rows.back()));
}

TEMPLATE_LIST_TEST_CASE("RACE: what an earlier call left in the workspace does not matter",
                        "[workspace]", test::Executors) {
  TestType const x{};
  Schedule const share("FS");
  Model<> model(share, 2, long_shape());
  Session session(x, model, share, mixed_rows(), {7, 3}, minimum);
  session.run_all();
  auto const first = session.result(0);
  auto const second = session.result(1);
  for (int const poison : {-1, 0x00, 0x7F, 0xFF}) {
    if (poison >= 0) overwrite(session.workspace(), poison);
    session.run_all();
    CHECK(session.result(0) == first);
    CHECK(session.result(1) == second);
  }
}

// ---- refusals

TEMPLATE_LIST_TEST_CASE("MEM: a workspace that does not do is refused before any work",
                        "[workspace]", test::Executors) {
  TestType const x{};
  Schedule const share("FS");
  // The larger part of the minimum is the scores' in the one, the attention's in the other.
  Shape const shape = GENERATE(long_shape(), small_shape);
  Model<> model(share, 2, shape);
  Session session(x, model, share, mixed_rows());
  std::int32_t const number = GENERATE(0, 1);
  CAPTURE(number, shape.keys);
  if (number == 1) REQUIRE_THAT(session.run(0), succeeded());
  auto const tag = session.state().tag();
  auto const held = copy_selection(session.state().selection(session.state().rows()));
  auto const before = session.calls.scores;

  auto const layer = session.layer(number);
  std::size_t const least = minimum_budget(layer, x);
  test::Guarded<std::byte> memory(ample + 256);
  auto const run = [&](Workspace ws) {
    return layer.run(x, session.inputs(number), session.state(), session.outputs(number), ws);
  };
  SECTION("too small") {
    CHECK_THAT(run({memory.data(), least - 1}),
               refused(Errc::workspace_too_small, "workspace")
                   .at(number)
                   .naming(static_cast<std::int64_t>(least), static_cast<std::int64_t>(least - 1)));
    CHECK_THAT(run({memory.data(), 0}), refused(Errc::workspace_too_small, "workspace")
                                            .at(number)
                                            .naming(static_cast<std::int64_t>(least), 0));
  }
  SECTION("absent") {
    CHECK_THAT(run({}), refused(Errc::workspace_too_small, "workspace").at(number));
    CHECK_THAT(run({nullptr, ample}), refused(Errc::missing_input, "workspace").at(number));
  }
  SECTION("misaligned") {
    for (std::size_t const shift : {1u, 64u, 128u}) {
      CHECK_THAT(run({memory.data() + shift, ample}),
                 refused(Errc::bad_value, "alignment").at(number));
    }
  }
  CHECK(session.untouched_outputs(number));
  CHECK(session.state().tag() == tag);
  CHECK(copy_selection(session.state().selection(session.state().rows())) == held);
  CHECK(session.calls.scores == before);
  auto const bytes = memory.span();
  CHECK(std::all_of(bytes.begin(), bytes.end(), [](std::byte b) { return b == test::nan_poison; }));
}

}  // namespace
