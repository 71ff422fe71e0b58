// SPDX-License-Identifier: Apache-2.0
#include <indexshare/topk/order.hpp>

#include <catch2/catch_test_macros.hpp>

#include "random.hpp"

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

using indexshare::order_key;

namespace {
float from_bits(std::uint32_t bits) { return std::bit_cast<float>(bits); }
}  // namespace

TEST_CASE("order key: agrees with < and == of all numbers", "[topk]") {
  std::vector<float> values;
  for (std::uint32_t const bits : {0x00000000u, 0x00000001u, 0x007FFFFFu, 0x00800000u, 0x3F7FFFFFu,
                                   0x3F800000u, 0x3F800001u, 0x7F7FFFFFu, 0x7F800000u}) {
    values.push_back(from_bits(bits));
    values.push_back(-from_bits(bits));
  }
  test::Random random(3);
  while (values.size() < 600) {
    float const value = from_bits(static_cast<std::uint32_t>(random.bits()));
    if (!std::isnan(value)) values.push_back(value);
  }
  int wrong = 0;
  for (float const a : values) {
    for (float const b : values) {
      wrong += (a < b) != (order_key(a) < order_key(b)) ? 1 : 0;
      wrong += (a == b) != (order_key(a) == order_key(b)) ? 1 : 0;
    }
  }
  CHECK(wrong == 0);
}

TEST_CASE("order key: is strictly monotone from code to code", "[topk]") {
  int wrong = 0;
  for (std::uint32_t bits = 0; bits < 0x7F800000u; bits += 4099) {
    float const low = from_bits(bits);
    float const high = std::nextafter(low, std::numeric_limits<float>::infinity());
    wrong += order_key(low) < order_key(high) && order_key(-low) > order_key(-high) ? 0 : 1;
  }
  CHECK(wrong == 0);
}

TEST_CASE("order key: every NaN is one value below all numbers", "[topk]") {
  std::uint32_t const lowest = order_key(-std::numeric_limits<float>::infinity());
  for (std::uint32_t const bits :
       {0x7F800001u, 0x7FC00000u, 0x7FFFFFFFu, 0xFF800001u, 0xFFC00000u, 0xFFFFFFFFu}) {
    CHECK(order_key(from_bits(bits)) == order_key(from_bits(0x7FC00000u)));
    CHECK(order_key(from_bits(bits)) < lowest);
  }
}
