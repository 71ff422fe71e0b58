// SPDX-License-Identifier: Apache-2.0
//
// Every wrong extent, stride, pointer and number of a call is refused by name and layer number,
// before any work (contracts 5.5).
#include "session.hpp"

#include <array>
#include <functional>
#include <limits>
#include <type_traits>

namespace {
using namespace layer_test;

static_assert(std::is_trivially_copyable_v<Status>);
static_assert(std::is_nothrow_default_constructible_v<Status>);

template <class X>
struct Call {
  using S = Session<X, Model<>, Schedule>;
  typename S::Inputs in;
  typename S::Outputs out;
  typename S::Layer layer;
};

template <class X>
struct Case {
  char const* name;
  std::function<void(Call<X>&)> spoil;
  test::Refused refusal;
};

/// The same view with another extent; its strides are kept.
template <class View>
View resized(View const& view, std::size_t dimension, index_t change) {
  cuda::std::array<index_t, View::rank()> extents{};
  cuda::std::array<index_t, View::rank()> strides{};
  for (std::size_t i = 0; i < View::rank(); ++i) {
    extents[i] = view.extent(i) + (i == dimension ? change : 0);
    strides[i] = view.stride(i);
  }
  return make_strided<space, typename View::element_type, View::rank()>(view.data_handle(), extents,
                                                                        strides);
}
/// The same view with another stride, also one that mdspan's own assertions would stop: in a
/// caller's build they are off, and a Status must say it.
template <class View>
View restrided(View const& view, std::size_t dimension, index_t stride) {
  static_assert(std::is_trivially_copyable_v<View> && sizeof(View) % sizeof(index_t) == 0);
  using Words = std::array<index_t, sizeof(View) / sizeof(index_t)>;
  auto const with_stride = [&](index_t n) {
    cuda::std::array<index_t, View::rank()> extents{};
    cuda::std::array<index_t, View::rank()> strides{};
    extents.fill(1);
    strides.fill(1);
    strides[dimension] = n;
    return std::bit_cast<Words>(
        make_strided<space, typename View::element_type, View::rank()>(nullptr, extents, strides));
  };
  Words const probe = with_stride(1);
  Words const other = with_stride(2);
  auto words = std::bit_cast<Words>(view);
  for (std::size_t i = 0; i < words.size(); ++i) {
    if (probe[i] != other[i]) words[i] = stride;
  }
  View const forged = std::bit_cast<View>(words);
  REQUIRE(forged.stride(dimension) == stride);
  return forged;
}
/// The same view over no memory.
template <class View>
View without_memory(View const& view) {
  return View(nullptr, view.mapping());
}

constexpr index_t rows = 10;  // of mixed_rows()

/// For every layer.
template <class X>
std::vector<Case<X>> common_cases() {
  using C = Call<X>&;
  auto const shape_error = [](char const* what) { return refused(Errc::bad_shape, what); };
  return {
      // the batch
      {"fewer lengths", [](C c) { c.in.batch.lengths = resized(c.in.batch.lengths, 0, -1); },
       shape_error("batch.requests").naming(9, 10)},
      {"fewer requests", [](C c) { c.in.batch.requests = resized(c.in.batch.requests, 0, -1); },
       shape_error("batch.requests").naming(10, 9)},
      {"more rows than planned", [](C c) { c.layer.shape.rows = 9; },
       shape_error("shape.rows").naming(9, 10)},
      {"no lengths", [](C c) { c.in.batch.lengths = without_memory(c.in.batch.lengths); },
       refused(Errc::missing_input, "batch.lengths")},
      {"no requests", [](C c) { c.in.batch.requests = without_memory(c.in.batch.requests); },
       refused(Errc::missing_input, "batch.requests")},
      {"lengths backwards", [](C c) { c.in.batch.lengths = restrided(c.in.batch.lengths, 0, -1); },
       refused(Errc::bad_stride, "batch.lengths").naming(0, -1)},
      {"KV page size 0", [](C c) { c.in.batch.kv_pages.page_size = 0; },
       shape_error("kv_pages.page_size").naming(1, 0)},
      {"KV pages for fewer keys than planned",
       [](C c) { c.in.batch.kv_pages.pages = resized(c.in.batch.kv_pages.pages, 1, -1); },
       shape_error("batch.kv_pages").naming(40, 32)},
      {"KV page table with gaps between its entries",
       [](C c) { c.in.batch.kv_pages.pages = restrided(c.in.batch.kv_pages.pages, 1, 2); },
       refused(Errc::bad_stride, "batch.kv_pages").naming(1, 2)},
      // the shape
      {"no top_k", [](C c) { c.layer.shape.top_k = 0; }, shape_error("shape.top_k").naming(1, 0)},
      {"no keys", [](C c) { c.layer.shape.keys = 0; }, shape_error("shape.keys").naming(1, 0)},
      {"negative rows", [](C c) { c.layer.shape.rows = -1; },
       shape_error("shape.rows").naming(0, -1)},
      {"no heads", [](C c) { c.layer.shape.heads = 0; }, shape_error("shape.heads").naming(1, 0)},
      {"no value lanes", [](C c) { c.layer.shape.value_dim = 0; },
       shape_error("shape.value_dim").naming(1, 0)},
      {"a value wider than the key", [](C c) { c.layer.shape.value_dim = 13; },
       shape_error("shape.value_dim").naming(12, 13)},
      // the state
      {"another top_k than the state's", [](C c) { c.layer.shape.top_k = 5; },
       shape_error("top_k of the state").naming(5, 6)},
      // attention inputs
      {"fewer query rows", [](C c) { c.in.attention.q = resized(c.in.attention.q, 0, -1); },
       shape_error("rows of the attention queries").naming(10, 9)},
      {"another head count", [](C c) { c.in.attention.q = resized(c.in.attention.q, 1, -1); },
       shape_error("heads of the attention queries").naming(3, 2)},
      {"fewer query lanes", [](C c) { c.in.attention.q = resized(c.in.attention.q, 2, -4); },
       shape_error("lanes of the attention queries").naming(12, 8)},
      {"query lanes apart", [](C c) { c.in.attention.q = restrided(c.in.attention.q, 2, 2); },
       refused(Errc::bad_stride, "attention queries").naming(1, 2)},
      {"query heads backwards", [](C c) { c.in.attention.q = restrided(c.in.attention.q, 1, -12); },
       refused(Errc::bad_stride, "attention queries").naming(0, -12)},
      {"no queries", [](C c) { c.in.attention.q = without_memory(c.in.attention.q); },
       refused(Errc::missing_input, "attention queries")},
      {"KV lanes", [](C c) { c.in.attention.kv.lanes = 11; },
       shape_error("lanes of the KV cache").naming(12, 11)},
      {"KV block size", [](C c) { c.in.attention.kv.block_size = 4; },
       shape_error("KV cache against kv_pages.page_size").naming(8, 4)},
      {"KV block count", [](C c) { c.in.attention.kv.blocks = -1; },
       shape_error("blocks of the KV cache").naming(0, -1)},
      {"KV slots beyond 32 bits", [](C c) { c.in.attention.kv.blocks = index_t{1} << 28; },
       shape_error("blocks of the KV cache").naming((index_t{1} << 28) - 1, index_t{1} << 28)},
      {"no KV memory", [](C c) { c.in.attention.kv.data = nullptr; },
       refused(Errc::missing_input, "KV cache")},
      {"KV row stride", [](C c) { c.in.attention.kv.row_stride = 0; },
       refused(Errc::bad_stride, "KV cache")},
      {"KV block stride", [](C c) { c.in.attention.kv.block_stride = -96; },
       refused(Errc::bad_stride, "KV cache")},
      {"no scale", [](C c) { c.in.attention.scale = 0; }, refused(Errc::bad_value, "scale")},
      {"negative scale", [](C c) { c.in.attention.scale = -0.1f; },
       refused(Errc::bad_value, "scale")},
      {"infinite scale", [](C c) { c.in.attention.scale = std::numeric_limits<float>::infinity(); },
       refused(Errc::bad_value, "scale")},
      {"NaN scale", [](C c) { c.in.attention.scale = std::numeric_limits<float>::quiet_NaN(); },
       refused(Errc::bad_value, "scale")},
      {"sink of another head count",
       [](C c) {
         static float const sink[2] = {};
         c.in.attention.sink = make_sink<space>(sink, Heads{2});
       },
       shape_error("sink").naming(3, 2)},
      // outputs
      {"fewer output rows", [](C c) { c.out.out = resized(c.out.out, 0, -1); },
       shape_error("rows of the attention output").naming(10, 9)},
      {"fewer output heads", [](C c) { c.out.out = resized(c.out.out, 1, -1); },
       shape_error("heads of the attention output").naming(3, 2)},
      {"fewer output lanes", [](C c) { c.out.out = resized(c.out.out, 2, -1); },
       shape_error("lanes of the attention output").naming(8, 7)},
      {"no output", [](C c) { c.out.out = without_memory(c.out.out); },
       refused(Errc::missing_input, "attention output")},
      {"output rows on top of each other", [](C c) { c.out.out = restrided(c.out.out, 0, 23); },
       refused(Errc::bad_stride, "attention output").naming(24, 23)},
      {"output as a broadcast", [](C c) { c.out.out = restrided(c.out.out, 1, 0); },
       refused(Errc::bad_stride, "attention output")},
      {"output lanes apart", [](C c) { c.out.out = restrided(c.out.out, 2, 2); },
       refused(Errc::bad_stride, "attention output").naming(1, 2)},
      {"fewer rows of lse", [](C c) { c.out.lse = resized(c.out.lse, 0, -1); },
       shape_error("rows of lse").naming(10, 9)},
      {"fewer heads of lse", [](C c) { c.out.lse = resized(c.out.lse, 1, -1); },
       shape_error("heads of lse").naming(3, 2)},
      {"rows of lse on top of each other", [](C c) { c.out.lse = restrided(c.out.lse, 0, 2); },
       refused(Errc::bad_stride, "lse").naming(3, 2)},
  };
}

/// For full layers.
template <class X>
std::vector<Case<X>> indexer_cases() {
  using C = Call<X>&;
  auto const shape_error = [](char const* what) { return refused(Errc::bad_shape, what); };
  return {
      {"index page size 0", [](C c) { c.in.batch.index_pages.page_size = 0; },
       shape_error("index_pages.page_size").naming(1, 0)},
      {"index pages for fewer keys than planned",
       [](C c) { c.in.batch.index_pages.pages = resized(c.in.batch.index_pages.pages, 1, -1); },
       shape_error("batch.index_pages").naming(40, 36)},
      {"index page table with gaps between its entries",
       [](C c) { c.in.batch.index_pages.pages = restrided(c.in.batch.index_pages.pages, 1, 2); },
       refused(Errc::bad_stride, "batch.index_pages").naming(1, 2)},
      {"fewer rows of index queries",
       [](C c) { c.in.indexer->q = resized(c.in.indexer->q, 0, -1); },
       shape_error("rows of the index queries").naming(10, 9)},
      {"fewer index heads", [](C c) { c.in.indexer->q = resized(c.in.indexer->q, 1, -1); },
       shape_error("heads of the index queries").naming(3, 2)},
      {"fewer lanes of index queries",
       [](C c) { c.in.indexer->q = resized(c.in.indexer->q, 2, -1); },
       shape_error("lanes of the index queries").naming(16, 15)},
      {"index query lanes apart", [](C c) { c.in.indexer->q = restrided(c.in.indexer->q, 2, 3); },
       refused(Errc::bad_stride, "index queries").naming(1, 3)},
      {"no index queries", [](C c) { c.in.indexer->q = without_memory(c.in.indexer->q); },
       refused(Errc::missing_input, "index queries")},
      {"fewer rows of head weights",
       [](C c) { c.in.indexer->weights = resized(c.in.indexer->weights, 0, -1); },
       shape_error("rows of the head weights").naming(10, 9)},
      {"fewer head weights",
       [](C c) { c.in.indexer->weights = resized(c.in.indexer->weights, 1, -1); },
       shape_error("heads of the head weights").naming(3, 2)},
      {"head weights apart",
       [](C c) { c.in.indexer->weights = restrided(c.in.indexer->weights, 1, 2); },
       refused(Errc::bad_stride, "head weights").naming(1, 2)},
      {"no head weights",
       [](C c) { c.in.indexer->weights = without_memory(c.in.indexer->weights); },
       refused(Errc::missing_input, "head weights")},
      {"lanes of the index keys", [](C c) { c.in.indexer->keys.lanes = 15; },
       shape_error("lanes of the index-key cache").naming(16, 15)},
      {"block size of the index keys", [](C c) { c.in.indexer->keys.block_size = 8; },
       shape_error("index-key cache against index_pages.page_size").naming(4, 8)},
      {"slots of the index keys beyond 32 bits",
       [](C c) { c.in.indexer->keys.blocks = index_t{1} << 30; },
       shape_error("blocks of the index-key cache")},
      {"no index keys", [](C c) { c.in.indexer->keys.data = nullptr; },
       refused(Errc::missing_input, "index-key cache")},
      {"row stride of the index keys", [](C c) { c.in.indexer->keys.row_stride = -16; },
       refused(Errc::bad_stride, "index-key cache")},
      {"index heads of the shape", [](C c) { c.layer.shape.index_heads = 4; },
       shape_error("heads of the index queries").naming(4, 3)},
      {"index lanes of the shape", [](C c) { c.layer.shape.index_dim = 32; },
       shape_error("lanes of the index queries").naming(32, 16)},
  };
}

template <class X>
void check_refusals(std::int32_t number, std::vector<Case<X>> const& cases) {
  Schedule const share("FS");
  Model<> model(share, 2);
  for (Case<X> const& spoiled : cases) {
    CAPTURE(spoiled.name);
    Session session(X{}, model, share, mixed_rows());
    if (number == 1) REQUIRE_THAT(session.run(0), succeeded());
    int const scores = session.calls.scores;
    auto const tag = session.state().tag();
    auto const all = session.state().rows();
    auto const held = copy_selection(session.state().selection(all));

    Call<X> call{session.inputs(number), session.outputs(number), session.layer(number)};
    spoiled.spoil(call);
    auto refusal = spoiled.refusal;
    CHECK_THAT(call.layer.run(X{}, call.in, session.state(), call.out, session.workspace()),
               std::move(refusal).at(number));
    CHECK(session.untouched_outputs(number));
    CHECK(session.calls.scores == scores);
    CHECK(session.state().tag() == tag);
    CHECK(copy_selection(session.state().selection(all)) == held);
    CHECK(session.intact());
  }
}

TEMPLATE_LIST_TEST_CASE("DIAG: a full layer refuses each wrong input by name", "[refusals]",
                        test::Executors) {
  check_refusals<TestType>(0, common_cases<TestType>());
  check_refusals<TestType>(0, indexer_cases<TestType>());
}

TEMPLATE_LIST_TEST_CASE("DIAG: a shared layer refuses each wrong input by name", "[refusals]",
                        test::Executors) {
  check_refusals<TestType>(1, common_cases<TestType>());
}

TEMPLATE_LIST_TEST_CASE("DIAG: a state with fewer rows than the batch is refused", "[refusals]",
                        test::Executors) {
  Schedule const share("F");
  Model<> model(share, 1);
  Session session(TestType{}, model, share, mixed_rows());
  OwnedState small(rows - 1, model.shape.top_k);
  CHECK_THAT(session.run(0, session.inputs(0), small.get()),
             refused(Errc::bad_shape, "state").at(0).naming(9, 10));
  CHECK(session.untouched_outputs(0));
  CHECK(small.intact());
  SelectionState<space> none;
  CHECK_THAT(session.run(0, session.inputs(0), none),
             refused(Errc::bad_shape, "state").at(0).naming(6, 0));
}

TEST_CASE("DIAG: memory that does not do for a state is refused", "[refusals]") {
  std::size_t const bytes = SelectionState<space>::size(Rows{10}, TopK{6}).bytes;
  test::Guarded<std::byte> memory(bytes);
  auto const make = [](Workspace ws, index_t count, index_t top_k) {
    auto const state = SelectionState<space>::make(ws, Rows{count}, TopK{top_k});
    return state ? Status{} : state.error();
  };
  CHECK_THAT(make({memory.data(), bytes}, 10, 6), succeeded());
  CHECK_THAT(make({memory.data(), bytes - 1}, 10, 6),
             refused(Errc::workspace_too_small, "SelectionState")
                 .naming(static_cast<std::int64_t>(bytes), static_cast<std::int64_t>(bytes) - 1));
  CHECK_THAT(make({nullptr, bytes}, 10, 6), refused(Errc::missing_input, "SelectionState"));
  CHECK_THAT(make({}, 10, 6), refused(Errc::workspace_too_small, "SelectionState"));
  CHECK_THAT(make({memory.data() + 4, bytes}, 9, 6), refused(Errc::bad_value, "alignment"));
  CHECK_THAT(make({memory.data(), bytes}, -1, 6),
             refused(Errc::bad_value, "rows of a SelectionState").naming(0, -1));
  CHECK_THAT(make({memory.data(), bytes}, 10, 0),
             refused(Errc::bad_value, "top_k of a SelectionState").naming(1, 0));
  for (index_t n = 1; n < 200; n += 7) {
    auto const size = [](index_t r, index_t k) {
      return SelectionState<space>::size(Rows{r}, TopK{k}).bytes;
    };
    CHECK(size(n + 1, 6) >= size(n, 6));
    CHECK(size(10, n + 1) >= size(10, n));
  }
}

TEMPLATE_LIST_TEST_CASE("DIAG: optional outputs may be absent", "[refusals]", test::Executors) {
  Schedule const share("F");
  Model<> model(share, 1);
  Session expected(TestType{}, model, share, mixed_rows());
  expected.run_all();
  Session session(TestType{}, model, share, mixed_rows());
  auto out = session.outputs(0);
  out.lse = {};
  REQUIRE_THAT(session.layer(0).run(TestType{}, session.inputs(0), session.state(), out,
                                    session.workspace()),
               succeeded());
  CHECK(session.out(0) == expected.out(0));
}

}  // namespace
