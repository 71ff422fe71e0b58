// SPDX-License-Identifier: Apache-2.0
#include <indexshare/element.hpp>

#include <catch2/catch_template_test_macros.hpp>
#include <catch2/catch_test_macros.hpp>

#include "random.hpp"

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

using indexshare::bf16;
using indexshare::e4m3;
using indexshare::fp16;
using indexshare::from_float;
using indexshare::to_float;

namespace {

/// A small binary float by its definition; independent of the library's bit tricks.
template <class T>
struct Definition;
template <>
struct Definition<bf16> {
  static constexpr int exponent_bits = 8, mantissa_bits = 7;
  static constexpr bool has_infinity = true;
};
template <>
struct Definition<fp16> {
  static constexpr int exponent_bits = 5, mantissa_bits = 10;
  static constexpr bool has_infinity = true;
};
template <>
struct Definition<e4m3> {
  static constexpr int exponent_bits = 4, mantissa_bits = 3;
  static constexpr bool has_infinity = false;
};

template <class T>
constexpr std::uint32_t code_count =
    2u << (Definition<T>::exponent_bits + Definition<T>::mantissa_bits);

template <class T>
T code(std::uint32_t bits) {
  return T{static_cast<decltype(T::bits)>(bits)};
}

template <class T>
bool is_nan_code(std::uint32_t bits) {
  using D = Definition<T>;
  std::uint32_t const magnitude = bits & (code_count<T> / 2 - 1);
  std::uint32_t const special = ((1u << D::exponent_bits) - 1) << D::mantissa_bits;
  if (D::has_infinity) return magnitude > special;
  return magnitude == (special | ((1u << D::mantissa_bits) - 1));
}

/// NaN for NaN codes.
template <class T>
double value_of(std::uint32_t bits) {
  using D = Definition<T>;
  if (is_nan_code<T>(bits)) return std::numeric_limits<double>::quiet_NaN();
  int const bias = (1 << (D::exponent_bits - 1)) - 1;
  std::uint32_t const mantissa = bits & ((1u << D::mantissa_bits) - 1);
  int const exponent =
      static_cast<int>((bits >> D::mantissa_bits) & ((1u << D::exponent_bits) - 1));
  double magnitude;
  if (D::has_infinity && exponent == (1 << D::exponent_bits) - 1) {
    magnitude = std::numeric_limits<double>::infinity();
  } else if (exponent == 0) {
    magnitude = std::ldexp(mantissa, 1 - bias - D::mantissa_bits);
  } else {
    magnitude = std::ldexp((1u << D::mantissa_bits) + mantissa, exponent - bias - D::mantissa_bits);
  }
  return bits >= code_count<T> / 2 ? -magnitude : magnitude;
}

/// The largest finite code, without sign.
template <class T>
std::uint32_t largest_code() {
  std::uint32_t bits = code_count<T> / 2 - 1;
  while (!std::isfinite(value_of<T>(bits))) --bits;
  return bits;
}

/// The code nearest to `value`, ties to the even code, by search among the positive codes.
template <class T>
std::uint32_t nearest(float value) {
  std::uint32_t const sign = std::signbit(value) ? code_count<T> / 2 : 0;
  double const magnitude = std::abs(static_cast<double>(value));
  std::uint32_t low = 0;
  std::uint32_t high = largest_code<T>();
  double const top = value_of<T>(high);
  if (magnitude >= top) {
    // half a step past the largest finite value is where infinity begins
    double const limit = top + (top - value_of<T>(high - 1)) / 2;
    bool const overflows = Definition<T>::has_infinity && magnitude >= limit;
    return sign | (overflows ? high + 1 : high);
  }
  while (high - low > 1) {
    std::uint32_t const middle = low + (high - low) / 2;
    (value_of<T>(middle) <= magnitude ? low : high) = middle;
  }
  double const below = magnitude - value_of<T>(low);
  double const above = value_of<T>(high) - magnitude;
  if (below != above) return sign | (below < above ? low : high);
  return sign | (low % 2 == 0 ? low : high);
}

/// Floats around every code: itself, the midpoint to the next one, and their neighbours.
template <class T>
std::vector<float> interesting_floats() {
  std::vector<float> values;
  auto const add = [&](float value) {
    float const up = std::nextafter(value, std::numeric_limits<float>::infinity());
    float const down = std::nextafter(value, -std::numeric_limits<float>::infinity());
    for (float const v : {value, up, down}) {
      values.push_back(v);
      values.push_back(-v);
    }
  };
  std::uint32_t const step = code_count<T> > 1000 ? 7 : 1;  // coprime to every period of two
  for (std::uint32_t bits = 0; bits < largest_code<T>(); bits += step) {
    double const here = value_of<T>(bits);
    add(static_cast<float>(here));
    add(static_cast<float>((here + value_of<T>(bits + 1)) / 2));  // exact: one bit more
  }
  double const top = value_of<T>(largest_code<T>());
  double const previous = value_of<T>(largest_code<T>() - 1);
  add(static_cast<float>(top));
  add(static_cast<float>(top + (top - previous) / 2));
  return values;
}

}  // namespace

TEMPLATE_TEST_CASE("element: every code widens to the value of its definition", "[element]", bf16,
                   fp16, e4m3) {
  std::uint32_t wrong = 0;
  for (std::uint32_t bits = 0; bits < code_count<TestType>; ++bits) {
    double const want = value_of<TestType>(bits);
    auto const got = static_cast<double>(to_float(code<TestType>(bits)));
    bool const same =
        std::isnan(want) ? std::isnan(got) : got == want && std::signbit(got) == std::signbit(want);
    wrong += same ? 0 : 1;
  }
  CHECK(wrong == 0);
}

TEMPLATE_TEST_CASE("element: every code survives the way to float and back", "[element]", bf16,
                   fp16, e4m3) {
  std::uint32_t wrong = 0;
  for (std::uint32_t bits = 0; bits < code_count<TestType>; ++bits) {
    auto const back = from_float<TestType>(to_float(code<TestType>(bits)));
    if (is_nan_code<TestType>(bits)) {
      wrong += is_nan_code<TestType>(back.bits) ? 0 : 1;
    } else {
      wrong += back.bits == bits ? 0 : 1;
    }
  }
  CHECK(wrong == 0);
}

TEMPLATE_TEST_CASE("element: rounds to the nearest code, ties to even", "[element]", bf16, fp16,
                   e4m3) {
  std::uint32_t wrong = 0;
  float first = 0;
  auto const check = [&](float value) {
    if (std::isnan(value) || from_float<TestType>(value).bits == nearest<TestType>(value)) return;
    if (wrong++ == 0) first = value;
  };
  for (float const value : interesting_floats<TestType>()) check(value);
  test::Random random(11);
  for (int i = 0; i < 20000; ++i) {
    check(std::bit_cast<float>(static_cast<std::uint32_t>(random.bits())));
    check(random.normal());
    check(std::ldexp(random.normal(), static_cast<int>(random.below(60)) - 40));
  }
  INFO("first " << first);
  CHECK(wrong == 0);
}

TEST_CASE("element: overflow goes to infinity, in e4m3 to the largest value", "[element]") {
  float const infinity = std::numeric_limits<float>::infinity();
  float const largest = std::numeric_limits<float>::max();
  CHECK(from_float<bf16>(largest).bits == 0x7F80);
  CHECK(from_float<bf16>(-infinity).bits == 0xFF80);
  CHECK(from_float<fp16>(65519.0f).bits == 0x7BFF);
  CHECK(from_float<fp16>(65520.0f).bits == 0x7C00);
  CHECK(from_float<fp16>(-infinity).bits == 0xFC00);
  CHECK(to_float(from_float<e4m3>(1e9f)) == 448.0f);
  CHECK(to_float(from_float<e4m3>(464.0f)) == 448.0f);  // the tie to what would be 480
  CHECK(to_float(from_float<e4m3>(infinity)) == 448.0f);
  CHECK(to_float(from_float<e4m3>(-infinity)) == -448.0f);
}

TEMPLATE_TEST_CASE("element: NaN stays NaN, whatever its payload and sign", "[element]", bf16, fp16,
                   e4m3) {
  for (std::uint32_t const bits :
       {0x7F800001u, 0x7FC00000u, 0x7FFFFFFFu, 0xFF800001u, 0xFFFFFFFFu, 0x7F80FFFFu}) {
    CHECK(std::isnan(to_float(from_float<TestType>(std::bit_cast<float>(bits)))));
  }
}

TEST_CASE("element: denormals are kept", "[element]") {
  CHECK(to_float(from_float<fp16>(0x1p-24f)) == 0x1p-24f);
  CHECK(from_float<fp16>(0x1p-25f).bits == 0);  // the tie to zero
  CHECK(from_float<fp16>(std::nextafter(0x1p-25f, 1.0f)).bits == 1);
  CHECK(to_float(from_float<e4m3>(0x1p-9f)) == 0x1p-9f);
  CHECK(from_float<e4m3>(0x1p-10f).bits == 0);
  CHECK(to_float(from_float<bf16>(0x1p-133f)) == 0x1p-133f);
  CHECK(from_float<e4m3>(-0.0f).bits == 0x80);
  CHECK(from_float<fp16>(-0x1p-140f).bits == 0x8000);
}

TEST_CASE("element: conversions are usable at compile time", "[element]") {
  static_assert(to_float(bf16{0x3FC0}) == 1.5f);
  static_assert(to_float(from_float<fp16>(1.5f)) == 1.5f);
  static_assert(to_float(from_float<e4m3>(-13.0f)) == -13.0f);
  static_assert(from_float<float>(0.1f) == 0.1f && to_float(0.1f) == 0.1f);
  SUCCEED();
}

namespace engine {
/// An engine's own 16-bit type.
struct Half {
  std::uint16_t raw;
};
constexpr float to_float(Half value) noexcept { return indexshare::to_float(fp16{value.raw}); }
}  // namespace engine
static_assert(indexshare::Element<engine::Half>, "a foreign type enters by its own to_float");
static_assert(!indexshare::Element<void*>);
