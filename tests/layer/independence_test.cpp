// SPDX-License-Identifier: Apache-2.0
//
// Within a back end a row's bits depend only on its own data, its length and the capacities
// (contracts 2.3).
#include "by_hand.hpp"
#include "session.hpp"

#include <limits>
#include <thread>
#include <tuple>
#include <type_traits>

namespace {
using namespace layer_test;

template <class X, class M>
struct On {
  using Exec = X;
  using Model = M;
};
#if defined(INDEXSHARE_TEST_CUDA)
/// What runs on the tensor cores, and what does not.
using Tensor16 = Model<bf16, format::Plain<bf16>, format::Plain<bf16>>;
using Setups = std::tuple<On<test::Cuda, Model<>>, On<test::Cuda, Tensor16>>;
#else
using Setups =
    std::tuple<On<ReferenceExec, Model<>>, On<test::Serial, Model<>>, On<test::Threads, Model<>>>;
#endif

/// More than one block of keys when scoring, more than one tile of keys and one panel of heads when
/// attending.
template <class M>
Shape wide_shape() {
  Shape shape{.rows = 32,
              .keys = 160,
              .top_k = 70,
              .index_heads = 18,
              .index_dim = 10,
              .heads = space == Space::device ? 10 : 18,  // a device takes 8 or 16 at once
              .key_dim = 12,
              .value_dim = 9};
  if (!std::is_same_v<typename M::Element, float>) {  // the widths that tensor cores run
    shape.index_dim = 48;
    shape.key_dim = 576;
    shape.value_dim = 512;
  }
  return shape;
}
std::vector<position_t> const wide_contexts{160, 101, 90, 151};
/// More than one tile of them; no more than that where a device may be emulated.
RowList wide_rows() {
  position_t const drafts = space == Space::device ? 2 : 9;
  return join({chunk(3, 151, 9), chunk(0, 160), chunk(1, 75, drafts), chunk(2, 4), chunk(2, 90)});
}
template <class M = Model<>>
M wide_model(Layout layout = {}, index_t rows = 32) {
  Shape shape = wide_shape<M>();
  shape.rows = rows;
  return M(Schedule("FS"), 2, shape, layout, {}, wide_contexts);
}
constexpr std::int32_t layers[] = {0, 1};

#if !defined(INDEXSHARE_TEST_CUDA)
TEMPLATE_LIST_TEST_CASE("RACE: the same bits on any number of threads", "[independence]",
                        test::HostExecutors) {
  Model<> model = wide_model();
  Session expected(test::Serial{}, model, Schedule("FS"), wide_rows());
  expected.run_all();
  Session session(TestType{}, model, Schedule("FS"), wide_rows());
  for (int run = 0; run < 3; ++run) {
    session.run_all();
    for (std::int32_t const number : layers) {
      CHECK(session.selected(number) == expected.selected(number));
      CHECK(session.result(number) == expected.result(number));
    }
  }
}

TEMPLATE_LIST_TEST_CASE("TIE: the reference and the host executors select the same bytes",
                        "[independence]", test::HostExecutors) {
  Model<> model = wide_model();
  Session expected(ReferenceExec{}, model, Schedule("FS"), wide_rows());
  expected.run_all();
  Session session(TestType{}, model, Schedule("FS"), wide_rows());
  session.run_all();
  for (std::int32_t const number : layers) {
    CHECK(session.selected(number) == expected.selected(number));
    CHECK(close(session.out(number), expected.out(number)));
  }
}
#endif

TEMPLATE_LIST_TEST_CASE("SHARE-STALE: a row alone has the bits that it has in a batch",
                        "[independence]", Setups) {
  typename TestType::Exec const x{};
  auto model = wide_model<typename TestType::Model>();
  RowList const rows = wide_rows();
  Session whole(x, model, Schedule("FS"), rows);
  whole.run_all();
  SECTION("one by one") {
    for (std::size_t r = 0; r < rows.size(); ++r) {
      CAPTURE(r);
      Session single(x, model, Schedule("FS"), {rows[r]});
      single.run_all();
      for (std::int32_t const number : layers) {
        CHECK(single.selected(number).row(0) ==
              whole.selected(number).row(static_cast<index_t>(r)));
        CHECK(single.row_result(number, 0) == whole.row_result(number, r));
      }
    }
  }
  SECTION("in another order") {
    RowList shuffled = rows;
    auto const order = test::Random(5).permutation<std::size_t>(rows.size());
    for (std::size_t r = 0; r < rows.size(); ++r) shuffled[r] = rows[order[r]];
    Session session(x, model, Schedule("FS"), shuffled);
    session.run_all();
    for (std::size_t r = 0; r < rows.size(); ++r) {
      for (std::int32_t const number : layers) {
        CHECK(session.selected(number).row(static_cast<index_t>(r)) ==
              whole.selected(number).row(static_cast<index_t>(order[r])));
        CHECK(session.row_result(number, r) == whole.row_result(number, order[r]));
      }
    }
  }
}

// Where a device cuts a row's keys may depend on the rows that a call can bring, not on its own.
TEMPLATE_LIST_TEST_CASE("SHARE-STALE: a row alone has the bits that it has among seventy",
                        "[independence]", Setups) {
  typename TestType::Exec const x{};
  auto model = wide_model<typename TestType::Model>({}, 80);
  RowList const rows = chunk(0, 160, 70);
  Session whole(x, model, Schedule("FS"), rows);
  whole.run_all();
  for (std::size_t const r : {0u, 37u, 69u}) {
    CAPTURE(r);
    Session single(x, model, Schedule("FS"), {rows[r]});
    single.run_all();
    for (std::int32_t const number : layers) {
      CHECK(single.selected(number).row(0) == whole.selected(number).row(static_cast<index_t>(r)));
      CHECK(single.row_result(number, 0) == whole.row_result(number, r));
    }
  }
}

TEMPLATE_LIST_TEST_CASE("MEM R138: the smallest workspace gives the bits of an ample one",
                        "[independence]", Setups) {
  typename TestType::Exec const x{};
  auto model = wide_model<typename TestType::Model>();
  Session expected(x, model, Schedule("FS"), wide_rows());
  expected.run_all();
  Session session(x, model, Schedule("FS"), wide_rows(), {7, 3}, minimum);
  CHECK(session.workspace().bytes < expected.workspace().bytes);
  session.run_all();
  for (std::int32_t const number : layers) {
    CHECK(session.selected(number) == expected.selected(number));
    CHECK(session.result(number) == expected.result(number));
  }
}

TEMPLATE_LIST_TEST_CASE("ADDR, PAGE R127: results do not depend on the page layout",
                        "[independence]", Setups) {
  typename TestType::Exec const x{};
  auto model = wide_model<typename TestType::Model>();
  Session expected(x, model, Schedule("FS"), wide_rows());
  expected.run_all();
  auto const layout = GENERATE(Layout{4, 8, 99}, Layout{16, 2, 3}, Layout{1, 1, 4}, Layout{0, 8, 5},
                               Layout{8, 0, 6}, Layout{0, 0, 7});
  CAPTURE(layout.index_page, layout.kv_page, layout.seed);
  auto moved = wide_model<typename TestType::Model>(layout);
  Session session(x, moved, Schedule("FS"), wide_rows());
  session.run_all();
  for (std::int32_t const number : layers) {
    CHECK(session.selected(number) == expected.selected(number));
    CHECK(session.result(number) == expected.result(number));
  }
}

/// A copy of a dense view's data with gaps, and the view over it.
template <class View>
class Gapped {
  using T = typename View::element_type;
  static constexpr std::size_t N = View::rank();

 public:
  Gapped(View const& from, index_t gap) {
    cuda::std::array<index_t, N> extents{};
    cuda::std::array<index_t, N> strides{};
    index_t step = 1;
    for (std::size_t i = N; i-- > 0;) {
      extents[i] = from.extent(i);
      strides[i] = step;
      step = step * extents[i] + gap;
    }
    memory_.emplace(to_size(step), test::nan_poison);
    view_ = make_strided<space, T, N>(memory_->data(), extents, strides);
    copy(from, view_);
  }
  View const& view() const { return view_; }

  static void copy(View const& from, View const& to) {
    if constexpr (N == 1) {
      for (index_t i = 0; i < from.extent(0); ++i) write(to(i), from(i));
    } else if constexpr (N == 2) {
      for (index_t i = 0; i < from.extent(0); ++i) {
        for (index_t j = 0; j < from.extent(1); ++j) write(to(i, j), from(i, j));
      }
    } else {
      for (index_t i = 0; i < from.extent(0); ++i) {
        for (index_t j = 0; j < from.extent(1); ++j) {
          for (index_t l = 0; l < from.extent(2); ++l) write(to(i, j, l), from(i, j, l));
        }
      }
    }
  }

 private:
  static void write(T& to, T const& from) { const_cast<std::remove_const_t<T>&>(to) = from; }

  std::optional<test::Guarded<std::remove_const_t<T>>> memory_;
  View view_;
};

TEMPLATE_LIST_TEST_CASE("ADDR R117: strided inputs and outputs give the same bits",
                        "[independence]", Setups) {
  typename TestType::Exec const x{};
  auto model = wide_model<typename TestType::Model>();
  Session session(x, model, Schedule("FS"), wide_rows());
  session.run_all();
  Session again(x, model, Schedule("FS"), wide_rows());
  auto in = again.inputs(0);
  Gapped q(in.attention.q, 3);
  Gapped index_q(in.indexer->q, 5);
  Gapped weights(in.indexer->weights, 7);
  in.attention.q = q.view();
  in.indexer->q = index_q.view();
  in.indexer->weights = weights.view();
  // Every second length, every third request number.
  auto const count = again.row_count();
  auto const huge = std::numeric_limits<position_t>::max();
  auto lengths = test::guarded(std::vector<position_t>(to_size(2 * count), huge));
  auto requests = test::guarded(std::vector<position_t>(to_size(3 * count), huge));
  for (index_t r = 0; r < count; ++r) {
    lengths[to_size(2 * r)] = in.batch.lengths(r);
    requests[to_size(3 * r)] = in.batch.requests(r);
  }
  in.batch.lengths = make_strided<space, position_t const, 1>(lengths.data(), {count}, {2});
  in.batch.requests = make_strided<space, position_t const, 1>(requests.data(), {count}, {3});

  auto const dense = again.outputs(0);
  Gapped out(dense.out, 4);
  Gapped lse(dense.lse, 6);
  REQUIRE_THAT(
      again.layer(0).run(x, in, again.state(), {out.view(), lse.view()}, again.workspace()),
      succeeded());
  test::finish(x);
  CHECK(copy_selection(again.state().selection()) == session.selected(0));
  out.copy(out.view(), dense.out);
  lse.copy(lse.view(), dense.lse);
  CHECK(again.result(0) == session.result(0));
}

#if defined(INDEXSHARE_TEST_CUDA)
/// An executor whose work does not wait for that of x.
CudaExec beside(CudaExec const& x) {
  static cudaStream_t const stream = [] {
    cudaStream_t made = nullptr;
    test::require(cudaStreamCreateWithFlags(&made, cudaStreamNonBlocking));
    return made;
  }();
  return {stream, x.limits()};
}
/// Both layers of both sessions, none of which waits for the other session's.
template <class A, class B>
void run_together(A& a, B& b) {
  for (std::int32_t const number : layers) {
    REQUIRE_THAT(a.enqueue(number), succeeded());
    REQUIRE_THAT(b.enqueue(number), succeeded());
  }
  test::finish(a.x);
  test::finish(b.x);
}
#else
template <class X>
X beside(X const& x) {
  return x;
}
template <class A, class B>
void run_together(A& a, B& b) {
  Status status_a[2];
  Status status_b[2];
  std::thread other([&] {  // no Catch2 assertions in here
    for (std::int32_t const number : layers) status_b[number] = b.enqueue(number);
  });
  for (std::int32_t const number : layers) status_a[number] = a.enqueue(number);
  other.join();
  for (std::int32_t const number : layers) {
    REQUIRE_THAT(status_a[number], succeeded());
    REQUIRE_THAT(status_b[number], succeeded());
  }
}
#endif

TEMPLATE_LIST_TEST_CASE("RACE: two calls in flight with two workspaces do not touch each other",
                        "[independence]", Setups) {
  typename TestType::Exec const x{};
  auto model = wide_model<typename TestType::Model>();
  RowList const rows_a = chunk(3, 151, 9);
  RowList const rows_b = join({chunk(0, 160, 3), chunk(1, 101, 5)});
  Session alone_a(x, model, Schedule("FS"), rows_a, {1, 0});
  Session alone_b(x, model, Schedule("FS"), rows_b, {1, 1});
  alone_a.run_all();
  alone_b.run_all();
  Session a(x, model, Schedule("FS"), rows_a, {1, 0}, minimum);
  Session b(beside(x), model, Schedule("FS"), rows_b, {1, 1}, minimum);
  run_together(a, b);
  CHECK(copy_selection(a.state().selection()) == alone_a.selected(0));
  CHECK(copy_selection(b.state().selection()) == alone_b.selected(0));
  for (std::int32_t const number : layers) {
    CHECK(a.result(number) == alone_a.result(number));
    CHECK(b.result(number) == alone_b.result(number));
  }
  CHECK(a.intact());
  CHECK(b.intact());
}

}  // namespace
