// SPDX-License-Identifier: Apache-2.0
#include <catch2/catch_template_test_macros.hpp>
#include <catch2/catch_test_macros.hpp>

#include "executors.hpp"
#include "frontend_model.hpp"
#include "oracle.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

using namespace frontend_test;

namespace engine {

/// An engine's own element: sixteenths in one byte. The library knows only how to read it.
struct Sixteenth {
  std::int8_t count;
};
constexpr float to_float(Sixteenth value) noexcept { return static_cast<float>(value.count) / 16; }

}  // namespace engine

namespace {

template <class T>
T stored(float value) {
  return from_float<T>(value);
}
template <>
engine::Sixteenth stored<engine::Sixteenth>(float value) {
  return {static_cast<std::int8_t>(std::clamp(std::lround(value * 16), -128l, 127l))};
}

struct Layout {
  index_t in_pad = 0;
  index_t w_pad = 0;
  index_t out_pad = 0;
  bool transposed = false;  ///< `w` lies in memory as [in, out]
};

/// Operands of one product, with NaN between and around them.
template <class T>
class Operands {
 public:
  Operands(index_t rows, index_t ins, index_t outs, Layout layout = {}, index_t first_row = 0)
      : rows_(rows),
        ins_(ins),
        outs_(outs),
        w_step_((layout.transposed ? outs : ins) + layout.w_pad),
        transposed_(layout.transposed),
        in_step_(std::max<index_t>(ins + layout.in_pad, 1)),
        out_step_(std::max<index_t>(outs + layout.out_pad, 1)),
        in_(to_size(rows * in_step_)),
        w_(to_size((transposed_ ? ins : outs) * w_step_)),
        out_(to_size(rows * out_step_), test::unwritten) {
    for (index_t r = 0; r < rows; ++r) {
      auto const row =
          test::Random(static_cast<std::uint64_t>(first_row + r)).normals(to_size(ins));
      std::copy(row.begin(), row.end(), in_.data() + r * in_step_);
    }
    for (index_t o = 0; o < outs; ++o) {
      auto const row = test::Random(static_cast<std::uint64_t>(5000 + o)).normals(to_size(ins));
      for (index_t i = 0; i < ins; ++i) {
        w_[to_size(transposed_ ? i * w_step_ + o : o * w_step_ + i)] = stored<T>(row[to_size(i)]);
      }
    }
  }

  Tensor<host, float const, 2> in() const {
    return make_strided<host, float const, 2>(in_.data(), {rows_, ins_}, {in_step_, 1});
  }
  MatrixView<host, T> w() const {
    index_t const step = std::max<index_t>(w_step_, 1);
    auto const as_stored = make_strided<host, T const, 2>(
        w_.data(), {transposed_ ? ins_ : outs_, transposed_ ? outs_ : ins_}, {step, 1});
    return transposed_ ? detail::transposed(as_stored) : as_stored;
  }
  Tensor<host, float, 2> out() {
    return make_strided<host, float, 2>(out_.data(), {rows_, outs_}, {out_step_, 1});
  }
  float& input(index_t r, index_t i) { return in_[to_size(r * in_step_ + i)]; }
  T& weight(index_t o, index_t i) { return w_[to_size(o * w_step_ + i)]; }

  template <class X>
  std::vector<float> run(X const& x) {
    REQUIRE(PlainProduct{}(x, in(), w(), out()).ok());
    CHECK((in_.intact() && w_.intact() && out_.intact()));
    index_t stray = 0;
    for (index_t at = 0; at < rows_ * out_step_; ++at) {
      bool const blank = std::bit_cast<std::uint32_t>(out_[to_size(at)]) == 0xA5A5A5A5u;
      stray += at % out_step_ < outs_ || blank ? 0 : 1;
    }
    CHECK(stray == 0);
    return values(out());
  }
  void check(std::vector<float> const& got, bool rounded_once) const {
    std::vector<double> in_row(to_size(ins_)), w_row(to_size(ins_));
    for (index_t o = 0; o < outs_; ++o) {
      for (index_t i = 0; i < ins_; ++i) {
        w_row[to_size(i)] = static_cast<double>(
            to_float(w_[to_size(transposed_ ? i * w_step_ + o : o * w_step_ + i)]));
      }
      for (index_t r = 0; r < rows_; ++r) {
        std::copy_n(in_.data() + r * in_step_, ins_, in_row.begin());
        double want = 0, magnitude = 0;
        for (std::size_t i = 0; i < in_row.size(); ++i) {
          want += w_row[i] * in_row[i];
          magnitude += std::abs(w_row[i] * in_row[i]);
        }
        auto const value = static_cast<double>(got[to_size(r * outs_ + o)]);
        double const bound = rounded_once ? test::fp32_epsilon * std::abs(want) + 1e-12
                                          : test::tolerance(ins_, magnitude);
        if (std::abs(value - want) <= bound) continue;
        INFO("row " << r << " of " << rows_ << ", output " << o << " of " << outs_ << ", inputs "
                    << ins_ << ": " << value << ", expected " << want);
        FAIL_CHECK();
        return;
      }
    }
  }

 private:
  index_t rows_, ins_, outs_, w_step_;
  bool transposed_;
  index_t in_step_, out_step_;
  test::Guarded<float> in_;
  test::Guarded<T> w_;
  test::Guarded<float> out_;
};

constexpr Layout layouts[]{{},
                           {.in_pad = 3, .w_pad = 5, .out_pad = 2},
                           {.w_pad = 1, .transposed = true},
                           {.in_pad = 7, .out_pad = 300, .transposed = true}};

}  // namespace

TEMPLATE_PRODUCT_TEST_CASE("front end product: every element type, shape and stride", "[frontend]",
                           Operands, (float, bf16, fp16, e4m3, engine::Sixteenth)) {
  for (Layout const& layout : layouts) {
    for (index_t const rows : {0, 1, 15, 16, 17, 33}) {
      for (auto const& [ins, outs] : {std::pair<index_t, index_t>{0, 3},
                                      {1, 1},
                                      {3, 0},
                                      {7, 2},
                                      {64, 63},
                                      {255, 5},
                                      {256, 3},
                                      {257, 65},
                                      {513, 2},
                                      {5, 129}}) {
        TestType operands(rows, ins, outs, layout);
        operands.check(operands.run(test::Serial{}), false);
        operands.check(operands.run(ReferenceExec{}), true);
      }
    }
  }
}

TEMPLATE_LIST_TEST_CASE("front end product: a row's bits depend on the row alone", "[frontend]",
                        test::HostExecutors) {
  index_t const ins = 300, outs = 130;
  auto const want = bits_of(Operands<bf16>(35, ins, outs).run(test::Serial{}));
  CHECK(bits_of(Operands<bf16>(35, ins, outs).run(TestType{})) == want);
  for (Layout const& layout : layouts) {
    CHECK(bits_of(Operands<bf16>(35, ins, outs, layout).run(TestType{})) == want);
  }
  for (auto const& [first, rows] : {std::pair<index_t, index_t>{0, 1}, {34, 1}, {5, 17}, {3, 16}}) {
    auto const got = bits_of(Operands<bf16>(rows, ins, outs, {}, first).run(TestType{}));
    CHECK(std::equal(got.begin(), got.end(), want.begin() + first * outs));
  }
  Operands<bf16> poisoned(35, ins, outs);
  poisoned.input(20, 299) = std::nanf("");
  auto const got = poisoned.run(TestType{});
  index_t wrong = 0;
  for (std::size_t i = 0; i < got.size(); ++i) {
    bool const same = std::bit_cast<std::uint32_t>(got[i]) == want[i];
    wrong += (static_cast<index_t>(i) / outs == 20 ? std::isnan(got[i]) : same) ? 0 : 1;
  }
  CHECK(wrong == 0);
}

TEST_CASE("front end product: inputs are summed in the documented order", "[frontend]") {
  // with weights of 1 the products are exact, so that only the order of the sum rounds
  index_t const ins = 600;
  Operands<float> operands(18, ins, 3);
  for (index_t o = 0; o < 3; ++o) {
    for (index_t i = 0; i < ins; ++i) operands.weight(o, i) = 1;
  }
  auto const got = operands.run(test::Serial{});
  std::vector<float> want;
  bool order_matters = false;
  for (index_t r = 0; r < 18; ++r) {
    float total = 0, plain = 0;
    for (index_t first = 0; first < ins; first += 256) {
      float chunk = 0;
      for (index_t i = first; i < std::min(first + 256, ins); ++i) chunk += operands.input(r, i);
      total += chunk;
    }
    for (index_t i = 0; i < ins; ++i) plain += operands.input(r, i);
    order_matters = order_matters || plain != total;
    want.insert(want.end(), 3, total);
  }
  CHECK(got == want);
  CHECK(order_matters);
}

TEST_CASE("SCALE R018: dequantised weights with two scales, in each type that holds them",
          "[frontend][fault]") {
  // wk in e4m3 with one scale per 128 inputs: 0.5 and 2; a missing scale would show
  ModelConfig config = tiny_model();
  config.hidden_size = 256;
  auto const code = [](index_t o, index_t i) {
    test::Random random(static_cast<std::uint64_t>(o * 256 + i));
    return to_float(from_float<e4m3>(random.normal()));
  };
  auto const dequantised = [&](index_t o, index_t i) {
    return code(o, i) * (i < 128 ? 0.5f : 2.0f);
  };
  Tokens const tokens(config, 0, 5);
  auto const index_keys = [&](auto element, auto const& value) {
    OwnedWeights<decltype(element)> weights(config);
    weights.random(1);
    weights.indexer->wk.fill(value);
    Activations side(config, 5, true, Keep::intermediates);
    REQUIRE(project_keys(test::Serial{}, make_front_end(config).value(), weights.view(),
                         tokens.hidden(), tokens.positions(), side.keys.side)
                .ok());
    return values(side.keys.side.index_k_raw);
  };
  auto const got = index_keys(float{}, dequantised);
  for (index_t t = 0; t < 5; ++t) {
    for (index_t o = 0; o < 16; ++o) {
      double want = 0, magnitude = 0;
      for (index_t i = 0; i < 256; ++i) {
        double const term =
            static_cast<double>(dequantised(o, i)) * static_cast<double>(tokens.hidden()(t, i));
        want += term;
        magnitude += std::abs(term);
      }
      CHECK(std::abs(static_cast<double>(got[to_size(t * 16 + o)]) - want) <=
            test::tolerance(256, magnitude));
    }
  }
  CHECK(index_keys(bf16{}, dequantised) == got);  // 4 bits and a power of two fit each type
  CHECK(index_keys(fp16{}, dequantised) == got);
  CHECK(index_keys(float{}, code) != got);
}
