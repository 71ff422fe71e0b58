// SPDX-License-Identifier: Apache-2.0
//
// The steps between the matrix products, each against its formula in double, and what holds for all
// of them: in place is out of place, strides are kept to, a row depends on its row alone.
#include <catch2/catch_template_test_macros.hpp>
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <catch2/generators/catch_generators_range.hpp>

#include "by_hand.hpp"
#include "executors.hpp"
#include "frontend_lanes.hpp"
#include "frontend_model.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <span>
#include <vector>

using namespace frontend_test;

namespace {

using In = Tensor<host, float const, 3>;
using Out = Tensor<host, float, 3>;

constexpr index_t width = 16;
constexpr double theta = 100;

Vector const& gain() {
  static Vector const vector = [] {
    test::Random random(1);
    return std::move(Vector(width).random(random, 1));
  }();
  return vector;
}
Vector const& bias() {
  static Vector const vector = [] {
    test::Random random(2);
    return std::move(Vector(width).random(random, 0));
  }();
  return vector;
}

RotaryFrequencies table() {
  ModelConfig config = tiny_model();
  config.qk_rope_head_dim = width;
  config.rope.theta = theta;
  return *rotary_frequencies(config);
}

enum class Step { rms_norm, layer_norm, interleaved, half_split, hadamard, scale, gate };
constexpr Step steps[] = {Step::rms_norm, Step::layer_norm, Step::interleaved, Step::half_split,
                          Step::hadamard, Step::scale,      Step::gate};

constexpr double eps = 0.25;  // large, so that a missing one shows
constexpr float factor = 0.375f;
constexpr position_t position_of(index_t row) { return static_cast<position_t>(3 * row + 1); }

RopeLayout layout_of(Step step) {
  return step == Step::interleaved ? RopeLayout::interleaved : RopeLayout::half_split;
}

/// Runs a step on rows `first_row`, `first_row + 1`, ...
template <class X>
Status run_step(X const& x, Step step, In const& in, Out const& out, index_t first_row = 0) {
  index_t const rows = in.extent(0), heads = in.extent(1);
  auto const each_head = [&](auto const& f) {
    for (index_t h = 0; h < heads; ++h) {
      if (Status const status = f(detail::head_of(in, h), detail::head_of(out, h)); !status.ok()) {
        return status;
      }
    }
    return Status{};
  };
  switch (step) {
    case Step::rms_norm:
      return each_head(
          [&](auto const& a, auto const& b) { return rms_norm(x, a, gain().view(), eps, b); });
    case Step::layer_norm:
      return each_head([&](auto const& a, auto const& b) {
        return layer_norm(x, a, gain().view(), bias().view(), eps, b);
      });
    case Step::interleaved:
    case Step::half_split: {
      std::vector<position_t> positions;
      for (index_t r = 0; r < rows; ++r) positions.push_back(position_of(first_row + r));
      return rotate(x, in, make_lengths<host>(positions.data(), Rows{rows}), table(),
                    layout_of(step), out);
    }
    case Step::hadamard: {
      Status const status = scale(x, in, 1.0f, out);
      return status.ok() ? hadamard(x, out) : status;
    }
    case Step::scale:
      return scale(x, in, factor, out);
    case Step::gate:
      return gate(x, in, Lanes(rows, heads, in.extent(2)).random(9, first_row).in(), out);
  }
  return {};
}

/// What a step must make of one head of one row; `gates` are its gates.
Doubles step_by_hand(Step step, Doubles lanes, std::span<double const> gates, index_t row) {
  switch (step) {
    case Step::rms_norm:
      return rms_norm_by_hand(lanes, gain().view(), eps);
    case Step::layer_norm:
      return layer_norm_by_hand(lanes, gain().view(), bias().view(), eps);
    case Step::interleaved:
    case Step::half_split:
      rotate_by_hand(lanes, position_of(row), theta, layout_of(step));
      return lanes;
    case Step::hadamard:
      return hadamard_by_hand(lanes);
    case Step::scale:
      for (double& lane : lanes) lane *= static_cast<double>(factor);
      return lanes;
    case Step::gate:
      for (std::size_t i = 0; i < lanes.size(); ++i) lanes[i] /= 1 + std::exp(-gates[i]);
      return lanes;
  }
  return {};
}

/// The result of a step on random rows, from memory of one layout to memory of another.
template <class X>
std::vector<float> result(X const& x, Step step, index_t rows, index_t heads, Layout from = {},
                          Layout to = {}, index_t first_row = 0) {
  Lanes in(rows, heads, width, from);
  Lanes out(rows, heads, width, to);
  in.random(5, first_row);
  REQUIRE(run_step(x, step, in.in(), out.view(), first_row).ok());
  auto const before = values(Lanes(rows, heads, width).random(5, first_row).view());
  CHECK(in.take() == before);
  return out.take();
}

auto any_step() {
  return GENERATE(Catch::Generators::from_range(std::begin(steps), std::end(steps)));
}

}  // namespace

TEMPLATE_LIST_TEST_CASE("front end steps: each is its formula", "[frontend]", test::Executors) {
  Step const step = any_step();
  CAPTURE(static_cast<int>(step));
  for (index_t const rows : {0, 1, 17, 33}) {
    for (index_t const heads : {1, 3}) {
      auto const got = result(TestType{}, step, rows, heads);
      auto const in = values(Lanes(rows, heads, width).random(5).view());
      auto const gates = values(Lanes(rows, heads, width).random(9).view());
      Doubles want;
      for (std::size_t first = 0; first < in.size(); first += width) {
        auto const head = in.begin() + static_cast<index_t>(first);
        auto const its_gates = gates.begin() + static_cast<index_t>(first);
        auto const lanes =
            step_by_hand(step, {head, head + width}, Doubles(its_gates, its_gates + width),
                         static_cast<index_t>(first) / (heads * width));
        want.insert(want.end(), lanes.begin(), lanes.end());
      }
      // 97 times the rounding of a frequency, at the last position
      bool const turns = step == Step::interleaved || step == Step::half_split;
      check_close(got, want, turns ? 2e-5 : 1e-6);
    }
  }
}

TEST_CASE("front end steps: in place, strided and out of place give the same bits", "[frontend]") {
  Step const step = any_step();
  CAPTURE(static_cast<int>(step));
  test::Serial const x{};
  auto const want = bits_of(result(x, step, 17, 3));
  CHECK(bits_of(result(x, step, 17, 3, {.head_pad = 5, .row_pad = 2}, {})) == want);
  CHECK(bits_of(result(x, step, 17, 3, {}, {.head_pad = 1, .row_pad = 7})) == want);
  Lanes memory(17, 3, width, {.head_pad = 3, .row_pad = 1});
  memory.random(5);
  REQUIRE(run_step(x, step, memory.in(), memory.view()).ok());
  CHECK(bits_of(memory.take()) == want);
}

TEMPLATE_LIST_TEST_CASE("front end steps: a row's bits depend on the row alone", "[frontend]",
                        test::HostExecutors) {
  Step const step = any_step();
  CAPTURE(static_cast<int>(step));
  auto const want = bits_of(result(test::Serial{}, step, 33, 3));
  CHECK(bits_of(result(TestType{}, step, 33, 3)) == want);
  for (index_t const row : {0, 16, 32}) {
    auto const alone = bits_of(result(TestType{}, step, 1, 3, {}, {}, row));
    CHECK(std::equal(alone.begin(), alone.end(), want.begin() + row * 3 * width));
  }
  Lanes in(33, 3, width);
  Lanes out(33, 3, width);
  in.random(5);
  for (index_t i = 0; i < width; ++i) in.view()(5, 1, i) = std::nanf("");
  REQUIRE(run_step(TestType{}, step, in.in(), out.view()).ok());
  auto const got = out.take();
  for (std::size_t i = 0; i < got.size(); ++i) {
    bool const poisoned = i / width == 5 * 3 + 1;
    if (poisoned ? std::isnan(got[i]) : std::bit_cast<std::uint32_t>(got[i]) == want[i]) continue;
    INFO("value " << i);
    FAIL_CHECK();
    break;
  }
}

TEST_CASE("front end steps: norms of odd widths and extreme rows", "[frontend]") {
  test::Serial const x{};
  for (index_t const lanes : {1, 2, 7, 257}) {
    Lanes in(3, 1, lanes);
    in.random(1);
    for (index_t i = 0; i < lanes; ++i) in.view()(1, 0, i) = 0;
    for (index_t i = 0; i < lanes; ++i) in.view()(2, 0, i) *= 1e25f;  // squares pass fp32
    Vector ones(lanes), zeros(lanes);
    ones.constant(1);
    zeros.constant(0);
    Lanes rms(3, 1, lanes), layer(3, 1, lanes);
    auto const from = detail::head_of(in.in(), 0);
    REQUIRE(rms_norm(x, from, ones.view(), 1e-6, detail::head_of(rms.view(), 0)).ok());
    REQUIRE(layer_norm(x, from, ones.view(), zeros.view(), 1e-6, detail::head_of(layer.view(), 0))
                .ok());
    for (index_t r = 0; r < 3; ++r) {
      auto const row = in.in();
      Doubles want;
      for (index_t i = 0; i < lanes; ++i) want.push_back(static_cast<double>(row(r, 0, i)));
      auto const part = [&](Lanes& out) {
        return values(rows_of(detail::head_of(out.view(), 0), r, 1));
      };
      check_close(part(rms), rms_norm_by_hand(want, ones.view(), 1e-6), 1e-6);
      check_close(part(layer), layer_norm_by_hand(want, ones.view(), zeros.view(), 1e-6), 1e-6);
    }
  }
}

TEST_CASE("front end steps: the Hadamard transform is orthogonal and its own inverse",
          "[frontend]") {
  test::Serial const x{};
  for (index_t lanes = 1; lanes <= 128; lanes *= 2) {
    Lanes memory(lanes, 1, lanes);  // the unit matrix becomes the transform's
    for (index_t r = 0; r < lanes; ++r) {
      for (index_t i = 0; i < lanes; ++i) memory.view()(r, 0, i) = r == i ? 1 : 0;
    }
    REQUIRE(hadamard(x, memory.view()).ok());
    auto const matrix = values(memory.view());
    for (index_t r = 0; r < lanes; ++r) {
      Doubles unit(to_size(lanes));
      unit[to_size(r)] = 1;
      check_close(std::span(matrix).subspan(to_size(r * lanes), to_size(lanes)),
                  hadamard_by_hand(unit), 1e-7);
    }
    Doubles products;  // of all pairs of rows
    for (index_t a = 0; a < lanes; ++a) {
      for (index_t b = 0; b < lanes; ++b) {
        double sum = 0;
        for (index_t i = 0; i < lanes; ++i) {
          sum += static_cast<double>(matrix[to_size(a * lanes + i)]) *
                 static_cast<double>(matrix[to_size(b * lanes + i)]);
        }
        products.push_back(sum - (a == b ? 1 : 0));
      }
    }
    CHECK(
        std::all_of(products.begin(), products.end(), [](double p) { return std::abs(p) < 1e-6; }));
    memory.random(3);
    auto const before = values(memory.view());
    REQUIRE(hadamard(x, memory.view()).ok());
    if (lanes > 1) CHECK(values(memory.view()) != before);
    REQUIRE(hadamard(x, memory.view()).ok());
    check_close(memory.take(), Doubles(before.begin(), before.end()), 1e-6);
  }
}

TEST_CASE("front end steps: gates at their ends", "[frontend]") {
  float const infinite = std::numeric_limits<float>::infinity();
  float const values_in[]{3, 3, 3, 3, 3}, gates[]{0, 200, -200, infinite, -infinite};
  float out[5];
  auto const view = [](auto* p) {
    return make_dense<host, std::remove_pointer_t<decltype(p)>, 3>(p, {1, 1, 5});
  };
  REQUIRE(gate(test::Serial{}, view(values_in), view(gates), view(out)).ok());
  CHECK(std::vector<float>(out, out + 5) == std::vector<float>{1.5f, 3, 0, 3, 0});
}
