// SPDX-License-Identifier: Apache-2.0
#include <indexshare/views.hpp>

#include <indexshare/detail/check.hpp>
#include <indexshare/element.hpp>

#include <catch2/catch_test_macros.hpp>

#include <cstddef>
#include <cstdint>
#include <numeric>
#include <string_view>
#include <type_traits>
#include <vector>

using namespace indexshare;

namespace {
constexpr auto host = Space::host;

std::vector<float> counting(std::size_t n) {
  std::vector<float> values(n);
  std::iota(values.begin(), values.end(), 0.0f);
  return values;
}
}  // namespace

TEST_CASE("views: dense factories are row-major in the order of the role's extents", "[views]") {
  auto values = counting(2 * 3 * 5);
  auto const q = make_query<host>(values.data(), Rows{2}, Heads{3}, HeadDim{5});
  CHECK((q.extent(0) == 2 && q.extent(1) == 3 && q.extent(2) == 5));
  CHECK((q.stride(0) == 15 && q.stride(1) == 5 && q.stride(2) == 1));
  CHECK(q(1, 2, 4) == 29.0f);

  auto const out = make_output<host>(values.data(), Rows{2}, Heads{3}, HeadDim{5});
  out(1, 0, 2) = -1.0f;
  CHECK(values[17] == -1.0f);
  auto const w = make_head_weights<host>(values.data(), Rows{6}, Heads{5});
  CHECK((w.stride(0) == 5 && w(2, 3) == 13.0f));
  auto const scores = make_scores<host>(values.data(), Rows{5}, Keys{6});
  CHECK((scores.stride(0) == 6 && scores(4, 5) == 29.0f));
  auto const lse = make_lse<host>(values.data(), Rows{10}, Heads{3});
  CHECK((lse.extent(0) == 10 && lse.stride(0) == 3));
  auto const sink = make_sink<host>(values.data(), Heads{7});
  CHECK((sink.extent(0) == 7 && sink(3) == 3.0f));
}

TEST_CASE("views: a selection has width top_k and one count per row", "[views]") {
  std::vector<position_t> indices(12);
  std::vector<position_t> counts(3);
  auto const s = make_selection<host>(indices.data(), counts.data(), Rows{3}, TopK{4});
  CHECK((s.indices.extent(0) == 3 && s.indices.extent(1) == 4 && s.indices.stride(0) == 4));
  CHECK((s.counts.extent(0) == 3 && s.counts.stride(0) == 1));
  s.indices(2, 3) = 7;
  CHECK(indices[11] == 7);
}

TEST_CASE("views: strides are in elements and independent of the extents", "[views]") {
  auto values = counting(100);
  auto const view = make_strided<host, float, 2>(values.data() + 1, {3, 4}, {30, 2});
  CHECK(view(2, 3) == 1.0f + 60 + 6);
  auto const transposed = make_strided<host, float, 2>(values.data(), {4, 3}, {1, 4});
  CHECK(transposed(1, 2) == 9.0f);
}

TEST_CASE("INT32 R142: offsets are 64 bits wide", "[views]") {
  // rows x row bytes of R142; address arithmetic only, nothing is read
  struct Product {
    index_t a, b;
  };
  for (auto const [a, b] : {Product{2048, 1048576}, Product{51151, 41984}, Product{254201, 8448},
                            Product{46341, 46341}}) {
    auto const view = make_strided<host, std::byte, 2>(nullptr, {a + 1, 1}, {b, 1});
    index_t const offset = view.mapping()(a, index_t{0});
    CHECK(offset == a * b);
    CHECK(offset > 2147480000);
  }
  static_assert(std::is_same_v<Tensor<host, float, 2>::index_type, std::int64_t>);
}

TEST_CASE("views: rows_of cuts the first dimension and keeps every stride", "[views]") {
  auto values = counting(200);
  auto const view = make_strided<host, float, 3>(values.data(), {6, 3, 4}, {30, 8, 1});
  auto const part = rows_of(view, 2, 3);
  CHECK((part.extent(0) == 3 && part.extent(1) == 3 && part.extent(2) == 4));
  CHECK((part.stride(0) == 30 && part.stride(1) == 8 && part.stride(2) == 1));
  CHECK(&part(0, 1, 2) == &view(2, 1, 2));
  CHECK(&part(2, 2, 3) == &view(4, 2, 3));
  CHECK(rows_of(view, 6, 0).extent(0) == 0);
  auto const of_part = rows_of(part, 1, 1);
  CHECK(&of_part(0, 0, 0) == &view(3, 0, 0));

  auto const lengths = make_strided<host, float const, 1>(values.data(), {5}, {3});
  CHECK(rows_of(lengths, 2, 2)(1) == 9.0f);
}

TEST_CASE("views: empty extents give views without elements", "[views]") {
  auto const none = make_query<host, float>(nullptr, Rows{0}, Heads{4}, HeadDim{8});
  CHECK(none.extent(0) == 0);
  CHECK(none.size() == 0);
  CHECK(make_scores<host, float>(nullptr, Rows{3}, Keys{0}).size() == 0);
}

namespace engine {

/// A tensor class that knows nothing of the library.
struct Matrix {
  float* data;
  long rows, columns, leading;
};
auto indexshare_tensor(Matrix const& m) noexcept {
  return make_strided<host, float, 2>(m.data, {m.rows, m.columns}, {m.leading, 1});
}

struct Opaque {};

}  // namespace engine

TEST_CASE("views: a foreign tensor class enters through as_view", "[views]") {
  static_assert(TensorLike<engine::Matrix>);
  static_assert(!TensorLike<engine::Opaque>);
  static_assert(TensorLike<ScoreView<host>>);
  auto values = counting(40);
  engine::Matrix const matrix{values.data(), 3, 5, 10};
  ScoreView<host> const view = as_view(matrix);
  CHECK(&view(2, 4) == values.data() + 24);
  CHECK(as_view(view).data_handle() == values.data());  // own views pass through
  CHECK(as_view(view).stride(0) == 10);
}

TEST_CASE("views: memory spaces do not mix", "[views]") {
  using Host = Tensor<Space::host, float, 2>;
  using Device = Tensor<Space::device, float, 2>;
  static_assert(!std::is_convertible_v<Host, Device> && !std::is_constructible_v<Host, Device>);
  using Reader = Tensor<Space::host, float const, 2>;
  static_assert(std::is_convertible_v<Host, Reader> && !std::is_convertible_v<Reader, Host>);
  SUCCEED();
}

namespace {
/// What the checks look at. An mdspan with such strides asserts in builds that check.
struct Layout {
  float* data;
  cuda::std::array<index_t, 3> extents;
  cuda::std::array<index_t, 3> strides;

  static constexpr std::size_t rank() { return 3; }
  index_t extent(std::size_t i) const { return extents[i]; }
  index_t stride(std::size_t i) const { return strides[i]; }
  float* data_handle() const { return data; }
};
}  // namespace

TEST_CASE("views: checks name what they refuse", "[views]") {
  float value = 0;
  auto const readable = [](Layout const& v) { return detail::check_readable("thing", v); };
  auto const writable = [](Layout const& v) { return detail::check_writable("thing", v); };

  CHECK(readable({&value, {2, 4, 5}, {20, 5, 1}}).ok());
  CHECK(readable({&value, {2, 4, 5}, {99, 7, 1}}).ok());
  CHECK(readable({nullptr, {2, 0, 5}, {20, 5, 1}}).ok());
  CHECK(readable({nullptr, {0, 4, 5}, {20, 5, 1}}).ok());
  CHECK(readable({&value, {2, 4, 1}, {20, 5, 9}}).ok());  // one lane: its stride is never used

  Status const null = readable({nullptr, {2, 4, 5}, {20, 5, 1}});
  CHECK((null.code == Errc::missing_input && std::string_view(null.what) == "thing"));
  Status const inner = readable({&value, {2, 4, 5}, {40, 10, 2}});
  CHECK((inner.code == Errc::bad_stride && inner.expected == 1 && inner.got == 2));
  Status const negative = readable({&value, {2, 4, 5}, {20, -5, 1}});
  CHECK((negative.code == Errc::bad_stride && negative.got == -5));

  CHECK(writable({&value, {2, 4, 5}, {20, 5, 1}}).ok());
  CHECK(writable({&value, {2, 4, 5}, {99, 7, 1}}).ok());
  CHECK(writable({&value, {3, 4, 5}, {5, 15, 1}}).ok());  // permuted
  CHECK(writable({&value, {1, 4, 5}, {0, 5, 1}}).ok());   // one row cannot overlap itself
  Status const overlap = writable({&value, {2, 4, 5}, {20, 4, 1}});
  CHECK((overlap.code == Errc::bad_stride && overlap.expected == 5 && overlap.got == 4));
  CHECK(writable({&value, {2, 4, 5}, {19, 5, 1}}).code == Errc::bad_stride);
  CHECK(writable({&value, {3, 4, 5}, {5, 14, 1}}).code == Errc::bad_stride);
  CHECK(writable({&value, {2, 4, 5}, {0, 5, 1}}).code == Errc::bad_stride);
  CHECK(writable({&value, {2, 2, 5}, {5, 5, 1}}).code == Errc::bad_stride);
  CHECK(writable({nullptr, {2, 4, 5}, {20, 5, 1}}).code == Errc::missing_input);
}
