// SPDX-License-Identifier: Apache-2.0
//
// Index queries in e4m3: the scale against its definition, the fold into the head weights, and what
// is no number. The same cases on every executor; bits do not depend on which.
#if defined(INDEXSHARE_TEST_CUDA)
#include <indexshare/cuda/quantize.cuh>
#endif
#include <indexshare/host/quantize.hpp>

#include <catch2/catch_template_test_macros.hpp>
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>

#include "caches.hpp"
#include "executors.hpp"
#include "memory.hpp"
#include "random.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string_view>
#include <type_traits>
#include <vector>

using namespace indexshare;

namespace {

using test::space;
constexpr std::size_t to_size(index_t n) { return static_cast<std::size_t>(n); }
constexpr float infinite = std::numeric_limits<float>::infinity();
constexpr float nan_value = std::numeric_limits<float>::quiet_NaN();

struct Strides {
  index_t head_pad = 0, row_pad = 0;
};

/// Queries, weights and codes, all with room between heads and rows.
struct Memory {
  index_t rows, heads, lanes;
  Strides apart;
  test::Guarded<float> q;
  test::Guarded<float> weights;
  test::Guarded<e4m3> codes;

  Memory(index_t r, index_t h, index_t l, Strides s = {})
      : rows(r),
        heads(h),
        lanes(l),
        apart(s),
        q(to_size(r * row_step())),
        weights(to_size(r * (h + s.row_pad))),
        codes(to_size(r * row_step()), test::unwritten) {
    test::Random random(static_cast<std::uint64_t>(r * 100 + h * 10 + l));
    for (index_t row = 0; row < rows; ++row) {
      for (index_t head = 0; head < heads; ++head) {
        for (index_t i = 0; i < lanes; ++i) lane(row, head, i) = random.normal() * 3;
        weight(row, head) = random.normal();
      }
    }
  }
  index_t head_step() const { return lanes + apart.head_pad; }
  index_t row_step() const { return heads * head_step() + apart.row_pad; }
  float& lane(index_t r, index_t h, index_t i) {
    return q[to_size(r * row_step() + h * head_step() + i)];
  }
  float& weight(index_t r, index_t h) { return weights[to_size(r * (heads + apart.row_pad) + h)]; }
  std::uint8_t code(index_t r, index_t h, index_t i) const {
    return codes[to_size(r * row_step() + h * head_step() + i)].bits;
  }

  template <Space S>
  auto queries() const {
    return make_strided<S, float const, 3>(q.data(), {rows, heads, lanes},
                                           {row_step(), head_step(), 1});
  }
  template <Space S>
  auto head_weights() {
    return make_strided<S, float, 2>(weights.data(), {rows, heads}, {heads + apart.row_pad, 1});
  }
  template <Space S>
  auto out() {
    return make_strided<S, e4m3, 3>(codes.data(), {rows, heads, lanes},
                                    {row_step(), head_step(), 1});
  }
  template <class X>
  void run(X const& x, ScaleRecipe const& recipe = {}) {
    REQUIRE(
        quantize_queries(x, queries<X::space>(), head_weights<X::space>(), out<X::space>(), recipe)
            .ok());
    test::finish(x);
    CHECK((q.intact() && weights.intact() && codes.intact()));
  }
};

/// The scale by its definition, in double; powers of two by counting.
double scale_by_hand(double amax, ScaleRecipe const& recipe) {
  double const floored = std::max(amax, static_cast<double>(recipe.amax_floor));
  float const scale = static_cast<float>(floored) / 448.0f;
  if (!recipe.power_of_two) return static_cast<double>(scale);
  double power = 1;
  while (power < static_cast<double>(scale)) power *= 2;
  while (power / 2 >= static_cast<double>(scale)) power /= 2;
  return power;
}

}  // namespace

TEMPLATE_LIST_TEST_CASE(
    "quantize queries: codes times scale are the queries, weights take the "
    "scale",
    "[frontend]", test::Executors) {
  TestType const x{};
  ScaleRecipe const recipe{.amax_floor = GENERATE(1e-4f, 1e-10f),
                           .power_of_two = GENERATE(false, true)};
  for (index_t const rows : {0, 1, 17}) {
    for (index_t const heads : {1, 3}) {
      for (index_t const lanes : {1, 31, 32, 33, 128}) {
        for (Strides const apart : {Strides{}, Strides{3, 5}}) {
          CAPTURE(rows, heads, lanes, apart.head_pad);
          Memory got(rows, heads, lanes, apart), before(rows, heads, lanes, apart);
          got.run(x, recipe);
          index_t wrong = 0;
          for (index_t r = 0; r < rows; ++r) {
            for (index_t h = 0; h < heads; ++h) {
              double amax = 0;
              for (index_t i = 0; i < lanes; ++i) {
                amax = std::max(amax, std::abs(static_cast<double>(before.lane(r, h, i))));
              }
              double const scale = scale_by_hand(amax, recipe);
              float const folded = before.weight(r, h) * static_cast<float>(scale);
              wrong += got.weight(r, h) != folded ? 1 : 0;
              for (index_t i = 0; i < lanes; ++i) {
                double const value = static_cast<double>(before.lane(r, h, i));
                double const error = std::abs(test::e4m3_value(got.code(r, h, i)) * scale - value);
                // half of the last place of 4 bits, or of the smallest step
                double const allowed = std::max(std::abs(value) / 16, scale / 1024) * (1 + 1e-6);
                wrong += error <= allowed ? 0 : 1;
                wrong += got.lane(r, h, i) == before.lane(r, h, i) ? 0 : 1;
              }
            }
          }
          CHECK(wrong == 0);
        }
      }
    }
  }
}

TEMPLATE_LIST_TEST_CASE("quantize queries: the largest lane of a head has the largest code",
                        "[frontend]", test::Executors) {
  Memory m(1, 2, 4);
  float const lanes[2][4]{{448, -224, 1, 0}, {-0.875f, 0.25f, 0.001f, 0}};
  for (index_t h = 0; h < 2; ++h) {
    for (index_t i = 0; i < 4; ++i) m.lane(0, h, i) = lanes[h][i];
    m.weight(0, h) = 2;
  }
  m.run(TestType{});
  CHECK(m.code(0, 0, 0) == 0x7E);  // 448
  CHECK(m.code(0, 0, 1) == 0xF6);  // -224
  CHECK(m.code(0, 0, 2) == 0x38);  // 1
  CHECK(m.weight(0, 0) == 2.0f);
  CHECK(m.code(0, 1, 0) == 0xFE);
  CHECK(m.code(0, 1, 1) == 0x70);  // 128
  CHECK(m.weight(0, 1) == 2 * (0.875f / 448));
}

// FP8: a logarithm in fp32 takes the wrong power just above one.
TEMPLATE_LIST_TEST_CASE("quantize queries: powers of two at their edges", "[frontend]",
                        test::Executors) {
  TestType const x{};
  struct Edge {
    float amax, scale;
  };
  float const one_up = std::nextafter(448.0f, infinite);
  float const two_up = std::nextafter(896.0f, infinite);
  for (Edge const edge : {Edge{448, 1},
                          {one_up, 2},
                          {896, 2},
                          {two_up, 4},
                          {447, 1},
                          {224, 0.5f},
                          {std::nextafter(224.0f, infinite), 1},
                          {7, 0.015625f}}) {
    CAPTURE(edge.amax);
    Memory m(1, 1, 2);
    m.lane(0, 0, 0) = edge.amax;
    m.lane(0, 0, 1) = 0;
    m.weight(0, 0) = 1;
    m.run(x, {.power_of_two = true});
    CHECK(m.weight(0, 0) == edge.scale);
  }
}

TEMPLATE_LIST_TEST_CASE("quantize queries: zeros stay zeros, and the floor bounds their scale",
                        "[frontend]", test::Executors) {
  TestType const x{};
  for (float const tiny : {0.0f, -0.0f, 1e-42f, 1e-20f}) {
    CAPTURE(tiny);
    Memory m(2, 1, 33);
    for (index_t i = 0; i < 33; ++i) m.lane(1, 0, i) = tiny;
    m.weight(1, 0) = 3;
    m.run(x, {.amax_floor = 1e-4f});
    for (index_t i = 0; i < 33; ++i) CHECK((m.code(1, 0, i) & 0x7F) == 0);
    CHECK(m.weight(1, 0) == 3 * (1e-4f / 448));
  }
  // just below the floor it is not a zero
  Memory m(1, 1, 1);
  m.lane(0, 0, 0) = 0.5e-4f;
  m.weight(0, 0) = 1;
  m.run(x, {.amax_floor = 1e-4f});
  CHECK(test::e4m3_value(m.code(0, 0, 0)) == 224);
}

TEMPLATE_LIST_TEST_CASE("quantize queries: what is no number becomes NaN and disturbs nobody",
                        "[frontend][fault]", test::Executors) {
  TestType const x{};
  for (bool const power : {false, true}) {
    for (float const bad : {nan_value, -nan_value, infinite, -infinite}) {
      CAPTURE(bad, power);
      Memory got(3, 3, 40), want(3, 3, 40);
      want.lane(1, 1, 39) = 0;
      want.run(x, {.power_of_two = power});
      got.lane(1, 1, 39) = bad;
      got.run(x, {.power_of_two = power});
      CHECK((got.code(1, 1, 39) & 0x7F) == 0x7F);
      index_t different = 0;
      for (index_t r = 0; r < 3; ++r) {
        for (index_t h = 0; h < 3; ++h) {
          different += got.weight(r, h) != want.weight(r, h) ? 1 : 0;
          for (index_t i = 0; i < 40; ++i) different += got.code(r, h, i) != want.code(r, h, i);
        }
      }
      CHECK(different == 1);
    }
  }
  Memory all(1, 1, 3);
  for (index_t i = 0; i < 3; ++i) all.lane(0, 0, i) = nan_value;
  all.weight(0, 0) = 1;
  all.run(x);
  for (index_t i = 0; i < 3; ++i) CHECK((all.code(0, 0, i) & 0x7F) == 0x7F);
  CHECK(std::isfinite(all.weight(0, 0)));
}

TEMPLATE_LIST_TEST_CASE("quantize queries: huge lanes keep their proportions", "[frontend]",
                        test::Executors) {
  float const most = std::numeric_limits<float>::max();
  for (bool const power : {false, true}) {
    Memory m(1, 1, 3);
    m.lane(0, 0, 0) = most;
    m.lane(0, 0, 1) = -most / 2;
    m.lane(0, 0, 2) = most / 448;
    m.weight(0, 0) = 1e-30f;
    m.run(TestType{}, {.power_of_two = power});
    double const scale = static_cast<double>(m.weight(0, 0)) * 1e30;
    CHECK(std::isfinite(m.weight(0, 0)));
    for (index_t i = 0; i < 3; ++i) {
      double const value = static_cast<double>(m.lane(0, 0, i));
      CHECK(std::abs(test::e4m3_value(m.code(0, 0, i)) * scale / value - 1) < 0.07);
    }
  }
}

TEMPLATE_LIST_TEST_CASE(
    "quantize queries: the same bits as the host, and a row alone as in a batch", "[frontend]",
    test::Executors) {
  bool const power = GENERATE(false, true);
  Memory got(9, 3, 70, {2, 1}), want(9, 3, 70), alone(1, 3, 70);
  for (index_t r = 0; r < 9; ++r) {
    for (index_t h = 0; h < 3; ++h) {
      for (index_t i = 0; i < 70; ++i) got.lane(r, h, i) = want.lane(r, h, i);
      got.weight(r, h) = want.weight(r, h);
    }
  }
  for (index_t h = 0; h < 3; ++h) {
    for (index_t i = 0; i < 70; ++i) alone.lane(0, h, i) = want.lane(5, h, i);
    alone.weight(0, h) = want.weight(5, h);
  }
  got.run(TestType{}, {.power_of_two = power});
  alone.run(TestType{}, {.power_of_two = power});
  want.run(test::Serial{}, {.power_of_two = power});
  index_t different = 0;
  for (index_t h = 0; h < 3; ++h) {
    for (index_t r = 0; r < 9; ++r) {
      different += got.weight(r, h) != want.weight(r, h);
      for (index_t i = 0; i < 70; ++i) different += got.code(r, h, i) != want.code(r, h, i);
    }
    different += alone.weight(0, h) != want.weight(5, h);
    for (index_t i = 0; i < 70; ++i) different += alone.code(0, h, i) != want.code(5, h, i);
  }
  CHECK(different == 0);
}

TEMPLATE_LIST_TEST_CASE("quantize queries: shapes are refused by name and nothing is written",
                        "[frontend]", test::Executors) {
  TestType const x{};
  Memory m(2, 3, 4), before(2, 3, 4);
  auto const q = m.queries<space>();
  auto const w = m.head_weights<space>();
  auto const out = m.out<space>();
  auto const refuses = [&](auto const& queries, auto const& weights, auto const& codes,
                           ScaleRecipe const& recipe, Errc code, std::string_view part) {
    Status const status = quantize_queries(x, queries, weights, codes, recipe);
    INFO(status.what);
    CHECK(status.code == code);
    CHECK(std::string_view(status.what).find(part) != std::string_view::npos);
  };
  refuses(q, rows_of(w, 0, 1), out, {}, Errc::bad_shape, "rows of the head weights");
  refuses(q, make_dense<space, float, 2>(m.weights.data(), {2, 2}), out, {}, Errc::bad_shape,
          "heads of the head weights");
  refuses(q, w, rows_of(out, 0, 1), {}, Errc::bad_shape, "rows of the e4m3");
  refuses(q, w, make_dense<space, e4m3, 3>(m.codes.data(), {2, 2, 4}), {}, Errc::bad_shape,
          "heads of the e4m3");
  refuses(q, w, make_dense<space, e4m3, 3>(m.codes.data(), {2, 3, 3}), {}, Errc::bad_shape,
          "lanes of the e4m3");
  refuses(make_dense<space, float const, 3>(nullptr, {2, 3, 4}), w, out, {}, Errc::missing_input,
          "index queries");
  refuses(q, w, make_strided<space, e4m3, 3>(m.codes.data(), {2, 3, 4}, {24, 8, 2}), {},
          Errc::bad_stride, "e4m3");
  for (float const floor : {0.0f, -1.0f, nan_value, infinite, 1e-40f}) {
    refuses(q, w, out, {.amax_floor = floor}, Errc::bad_value, "amax_floor");
  }
  test::finish(x);
  CHECK(
      std::equal(m.weights.span().begin(), m.weights.span().end(), before.weights.span().begin()));
  CHECK(std::all_of(m.codes.span().begin(), m.codes.span().end(),
                    [](e4m3 code) { return std::byte{code.bits} == test::unwritten; }));
}
