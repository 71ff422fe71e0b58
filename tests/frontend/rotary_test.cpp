// SPDX-License-Identifier: Apache-2.0
#include <catch2/catch_template_test_macros.hpp>
#include <catch2/catch_test_macros.hpp>

#include <indexshare/io/config.hpp>

#include "by_hand.hpp"
#include "executors.hpp"
#include "frontend_model.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>
#include <string>
#include <utility>
#include <vector>

using namespace frontend_test;

namespace {

ModelConfig published(std::string const& name) {
  auto const config =
      io::read_config_file(std::string(INDEXSHARE_TEST_DATA_DIR) + "/configs/" + name);
  REQUIRE(config.has_value());
  return config->model;
}

ModelConfig rotary_model(index_t dims, double theta) {
  ModelConfig config = tiny_model();
  config.qk_rope_head_dim = dims;
  config.rope.theta = theta;
  return config;
}

ModelConfig yarn_model(YarnScaling const& yarn, index_t dims = 64, double theta = 1e4) {
  ModelConfig config = rotary_model(dims, theta);
  config.rope.scaling = RopeScaling::yarn;
  config.rope.yarn = yarn;
  return config;
}

/// What DeepSeek-V3.2 publishes.
constexpr YarnScaling deepseek_yarn{40, 32, 1, 1, 1, 4096};

/// YaRN in the words of its paper: a pair that turns at least beta_fast times within the original
/// context keeps its frequency, one that turns at most beta_slow times is slowed down by the
/// factor, and between the two pair numbers the share goes linearly. As published code rounds them,
/// the two numbers are whole.
double yarn_frequency(ModelConfig const& config, index_t pair) {
  YarnScaling const& yarn = config.rope.yarn;
  auto const dims = static_cast<double>(config.qk_rope_head_dim);
  double const plain = std::pow(config.rope.theta, -2.0 * static_cast<double>(pair) / dims);
  auto const context = static_cast<double>(yarn.original_max_position_embeddings);
  auto const pair_that_turns = [&](double times) {  // context * theta^(-2p/dims) = 2 pi times
    return dims / 2 * std::log(context / (2 * std::numbers::pi * times)) /
           std::log(config.rope.theta);
  };
  double const first = std::max(std::floor(pair_that_turns(yarn.beta_fast)), 0.0);
  double const last = std::min(std::ceil(pair_that_turns(yarn.beta_slow)), dims - 1);
  double const slowed = std::clamp((static_cast<double>(pair) - first) / (last - first), 0.0, 1.0);
  return plain / yarn.factor * slowed + plain * (1 - slowed);
}

/// Lanes of one head, one row per position.
struct Turned {
  std::vector<float> in;
  std::vector<float> out;
};
template <class X>
Turned turn(X const& x, std::vector<position_t> const& positions, RotaryFrequencies const& table,
            RopeLayout layout, std::uint64_t seed = 1) {
  auto const rows = static_cast<index_t>(positions.size());
  Turned turned;
  turned.in = test::Random(seed).normals(to_size(rows * 2 * table.pairs));
  turned.out.resize(turned.in.size());
  auto const extents = cuda::std::array<index_t, 3>{rows, 1, 2 * table.pairs};
  REQUIRE(rotate(x, make_dense<host, float const, 3>(turned.in.data(), extents),
                 make_lengths<host>(positions.data(), Rows{rows}), table, layout,
                 make_dense<host, float, 3>(turned.out.data(), extents))
              .ok());
  return turned;
}

/// The pair (a, b) of a row.
struct Pair {
  double a;
  double b;
};
Pair pair_of(std::vector<float> const& lanes, RotaryFrequencies const& table, RopeLayout layout,
             index_t row, index_t i) {
  index_t const pairs = table.pairs, start = row * 2 * pairs;
  bool const interleaved = layout == RopeLayout::interleaved;
  return {static_cast<double>(lanes[to_size(start + (interleaved ? 2 * i : i))]),
          static_cast<double>(lanes[to_size(start + (interleaved ? 2 * i + 1 : i + pairs))])};
}

}  // namespace

TEST_CASE("front end rotary: frequencies without scaling", "[frontend]") {
  for (auto const& [dims, theta] :
       {std::pair<index_t, double>{64, 8e6}, {64, 1e4}, {8, 100.0}, {2, 1e7}, {512, 1e4}}) {
    auto const table = rotary_frequencies(rotary_model(dims, theta));
    REQUIRE(table.has_value());
    CHECK(table->pairs == dims / 2);
    CHECK(table->amplitude == 1);
    CHECK(table->inverse[0] == 1);
    std::vector<float> got;
    Doubles want;
    for (index_t i = 0; i < table->pairs; ++i) {
      double const exponent = 2.0 * static_cast<double>(i) / static_cast<double>(dims);
      want.push_back(1);
      got.push_back(
          static_cast<float>(static_cast<double>(table->inverse[i]) * std::pow(theta, exponent)));
    }
    check_close(got, want, 3e-7);
  }
  auto const none = rotary_frequencies(rotary_model(0, 0));
  REQUIRE(none.has_value());
  CHECK(none->pairs == 0);
}

TEST_CASE("ROPE R149: YaRN's frequencies for DeepSeek-V3.2 as published, amplitude 1",
          "[frontend][fault]") {
  ModelConfig const config = published("DeepSeek-V3.2.json");
  REQUIRE(config.rope.yarn == deepseek_yarn);
  auto const table = rotary_frequencies(config);
  REQUIRE(table.has_value());
  CHECK(table->pairs == 32);
  CHECK(table->amplitude == 1);
  for (index_t i = 0; i < 32; ++i) {
    double const ratio = static_cast<double>(table->inverse[i]) / yarn_frequency(config, i);
    INFO("pair " << i);
    CHECK(std::abs(ratio - 1) < 5e-7);
    // in numbers: pairs up to 10 turn 32 times in 4096 tokens, pairs from 23 on less than once
    double const plain = std::pow(1e4, -static_cast<double>(i) / 32);
    double const kept = static_cast<double>(table->inverse[i]) / plain;
    double const by_hand = i <= 10   ? 1
                           : i >= 23 ? 1.0 / 40
                                     : 1 - static_cast<double>(i - 10) / 13 * 39 / 40;
    CHECK(std::abs(kept - by_hand) < 1e-6);
  }
}

TEST_CASE("ROPE R149: YaRN's corners stay finite", "[frontend][fault]") {
  struct Corner {
    YarnScaling yarn;
    index_t dims;
  };
  for (Corner const& corner :
       {Corner{{40, 32, 1, 1, 1, 4096}, 2}, Corner{{4, 32, 1, 0, 0, 8}, 8},
        Corner{{1, 32, 1, 1, 1, 4096}, 64}, Corner{{40, 1.0001, 1, 1, 1, 1 << 30}, 8}}) {
    auto const table = rotary_frequencies(yarn_model(corner.yarn, corner.dims));
    REQUIRE(table.has_value());
    for (index_t i = 0; i < table->pairs; ++i) {
      double const plain =
          std::pow(1e4, -2.0 * static_cast<double>(i) / static_cast<double>(corner.dims));
      double const ratio = static_cast<double>(table->inverse[i]) / plain;
      CHECK(ratio < 1 + 1e-6);
      CHECK(ratio > 1 / corner.yarn.factor - 1e-6);
    }
  }
}

TEST_CASE("ROPE R149: the amplitude is the ratio of the two magnitudes", "[frontend][fault]") {
  double const log_factor = std::log(40.0);
  auto const amplitude = [](double mscale, double all_dim) {
    YarnScaling yarn = deepseek_yarn;
    yarn.mscale = mscale;
    yarn.mscale_all_dim = all_dim;
    return static_cast<double>(rotary_frequencies(yarn_model(yarn)).value().amplitude);
  };
  CHECK(amplitude(1, 1) == 1);
  CHECK(std::abs(amplitude(2, 0.5) - (1 + 0.2 * log_factor) / (1 + 0.05 * log_factor)) < 1e-6);
  CHECK(std::abs(amplitude(0, 0) - (1 + 0.1 * log_factor)) < 1e-6);
  // it multiplies what is rotated, cosine and sine alike
  YarnScaling yarn = deepseek_yarn;
  yarn.mscale_all_dim = 0;
  auto table = rotary_frequencies(yarn_model(yarn)).value();
  auto const scaled = turn(test::Serial{}, {0, 5, 900}, table, RopeLayout::interleaved);
  table.amplitude = 1;
  auto const plain = turn(test::Serial{}, {0, 5, 900}, table, RopeLayout::interleaved);
  Doubles want;
  for (float const lane : plain.out) {
    want.push_back(static_cast<double>(lane) * (1 + 0.1 * log_factor));
  }
  check_close(scaled.out, want, 1e-6);
}

TEST_CASE("front end rotary: what has no table is refused", "[frontend]") {
  auto const refused = [](ModelConfig const& config, Errc code, std::string const& part,
                          std::int64_t expected, std::int64_t got) {
    auto const table = rotary_frequencies(config);
    REQUIRE_FALSE(table.has_value());
    CAPTURE(table.error(), part);
    CHECK(table.error().code == code);
    CHECK(std::string(table.error().what).find(part) != std::string::npos);
    CHECK((table.error().expected == expected && table.error().got == got));
    auto const recipe = make_front_end(config);
    REQUIRE_FALSE(recipe.has_value());
    CHECK(recipe.error().code == code);
  };
  refused(rotary_model(514, 1e4), Errc::unsupported, "qk_rope_head_dim", 512, 514);
  refused(rotary_model(7, 1e4), Errc::bad_shape, "qk_rope_head_dim", 8, 7);
  for (double const theta : {0.0, 1.0, -3.0, std::nan(""), HUGE_VAL}) {
    refused(rotary_model(8, theta), Errc::bad_value, "rope.theta", 1, 0);
  }
  YarnScaling yarn = deepseek_yarn;
  yarn.original_max_position_embeddings = 0;
  refused(yarn_model(yarn), Errc::bad_value, "original_max_position_embeddings", 1, 0);
  for (double const factor : {0.0, 0.5, HUGE_VAL, std::nan("")}) {
    yarn = deepseek_yarn;
    yarn.factor = factor;
    refused(yarn_model(yarn), Errc::bad_value, "rope.yarn.factor", 1, 0);
  }
  for (auto const& [fast, slow] :
       {std::pair{1.0, 1.0}, {0.5, 1.0}, {32.0, 0.0}, {32.0, -1.0}, {HUGE_VAL, 1.0}}) {
    yarn = deepseek_yarn;
    yarn.beta_fast = fast;
    yarn.beta_slow = slow;
    refused(yarn_model(yarn), Errc::bad_value, "beta_fast", 0, 0);
  }
  for (double const mscale : {-1.0, HUGE_VAL, std::nan("")}) {
    yarn = deepseek_yarn;
    yarn.mscale_all_dim = mscale;
    refused(yarn_model(yarn), Errc::bad_value, "mscale", 0, 0);
  }
}

TEMPLATE_LIST_TEST_CASE("front end rotary: each layout turns its pairs by p * inverse",
                        "[frontend]", test::Executors) {
  std::vector<position_t> const positions{0, 1, 2, 7, 100, 4095};
  auto const table = rotary_frequencies(rotary_model(64, 8e6)).value();
  for (RopeLayout const layout : {RopeLayout::interleaved, RopeLayout::half_split}) {
    auto const got = turn(TestType{}, positions, table, layout);
    for (std::size_t r = 0; r < positions.size(); ++r) {
      Doubles want(got.in.begin() + static_cast<index_t>(r) * 64,
                   got.in.begin() + static_cast<index_t>(r + 1) * 64);
      rotate_by_hand(want, positions[r], 8e6, layout);
      INFO("position " << positions[r]);
      // the frequency and the angle are rounded
      check_close(std::span(got.out).subspan(r * 64, 64), want, 1e-6 + positions[r] * 3e-7);
    }
  }
}

TEMPLATE_LIST_TEST_CASE("ROPE R047: position 0 turns nothing", "[frontend][fault]",
                        test::Executors) {
  for (RopeLayout const layout : {RopeLayout::interleaved, RopeLayout::half_split}) {
    auto const table = rotary_frequencies(published("DeepSeek-V3.2.json")).value();
    auto const got = turn(TestType{}, {0, 0, 0}, table, layout);
    CHECK(got.out == got.in);
  }
}

TEST_CASE("front end rotary: far positions use the product in fp32", "[frontend]") {
  auto const table = rotary_frequencies(rotary_model(64, 8e6)).value();
  for (RopeLayout const layout : {RopeLayout::interleaved, RopeLayout::half_split}) {
    std::vector<position_t> const positions{1000003, 999983, 777777, 16777217};
    auto const got = turn(test::Serial{}, positions, table, layout);
    double worst = 0;  // against the exact product of the same numbers
    for (std::size_t r = 0; r < positions.size(); ++r) {
      auto const row = static_cast<index_t>(r);
      for (index_t i = 0; i < table.pairs; ++i) {
        float const in_fp32 = static_cast<float>(positions[r]) * table.inverse[i];
        double const exact = positions[r] * static_cast<double>(table.inverse[i]);
        worst = std::max(worst, std::abs(static_cast<double>(in_fp32) - exact));
        Pair const in = pair_of(got.in, table, layout, row, i);
        Pair const out = pair_of(got.out, table, layout, row, i);
        double const c = std::cos(static_cast<double>(in_fp32));
        double const s = std::sin(static_cast<double>(in_fp32));
        if (std::abs(out.a - (in.a * c - in.b * s)) < 2e-6 &&
            std::abs(out.b - (in.a * s + in.b * c)) < 2e-6) {
          continue;
        }
        INFO("position " << positions[r] << ", pair " << i);
        FAIL_CHECK();
      }
    }
    CHECK(worst > 0.02);  // so that a table in double would have failed above
  }
}

TEST_CASE("front end rotary: the caller's table is the one that is used", "[frontend]") {
  RotaryFrequencies table;  // another implementation's
  table.pairs = 2;
  table.inverse[0] = static_cast<float>(std::numbers::pi / 2);
  table.inverse[1] = static_cast<float>(std::numbers::pi);
  float const in[]{1, 2, 3, 4};
  position_t const position = 1;
  float out[4];
  auto const turned = [&](RopeLayout layout) {
    REQUIRE(rotate(test::Serial{}, make_dense<host, float const, 3>(in, {1, 1, 4}),
                   make_lengths<host>(&position, Rows{1}), table, layout,
                   make_dense<host, float, 3>(out, {1, 1, 4}))
                .ok());
    return std::vector<float>(out, out + 4);
  };
  check_close(turned(RopeLayout::interleaved), Doubles{-2, 1, -3, -4}, 1e-6);
  check_close(turned(RopeLayout::half_split), Doubles{-3, -2, 1, -4}, 1e-6);
}
