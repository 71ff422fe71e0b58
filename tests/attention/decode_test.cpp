// SPDX-License-Identifier: Apache-2.0
//
// Rows of queries, caches and outputs through the kernels of each instruction set: the values of
// to_float, decode_row and from_float, to the bit.
#include <indexshare/cache.hpp>
#include <indexshare/host/decode.hpp>

#include <catch2/catch_template_test_macros.hpp>
#include <catch2/catch_test_macros.hpp>

#include "caches.hpp"
#include "executors.hpp"
#include "random.hpp"

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <utility>
#include <vector>

namespace own {

/// An engine's 16-bit type and a format that is nobody's.
struct Fixed {
  std::int16_t sixteenths;
};
constexpr float to_float(Fixed x) noexcept { return static_cast<float>(x.sixteenths) / 16; }

struct Doubled {
  using storage = float;
};
void decode_row(indexshare::CacheView<indexshare::Space::host, Doubled> const& cache,
                indexshare::index_t slot, float* out) noexcept {
  for (indexshare::index_t i = 0; i < cache.lanes; ++i) out[i] = 2 * cache.row(slot)[i];
}

}  // namespace own

using namespace indexshare;
using test::Random;

namespace {

constexpr auto host = Space::host;

bool same_value(float a, float b) {
  return std::isnan(a) ? std::isnan(b)
                       : std::bit_cast<std::uint32_t>(a) == std::bit_cast<std::uint32_t>(b);
}

/// Fills as a row of `n` values should be, with a guard behind.
class Row {
 public:
  explicit Row(index_t n) : values_(static_cast<std::size_t>(n) + 1, guard) {}
  float* data() { return values_.data(); }
  float operator[](index_t i) const { return values_[static_cast<std::size_t>(i)]; }
  bool intact() const { return values_.back() == guard; }

 private:
  static constexpr float guard = 123456.0f;
  std::vector<float> values_;
};

/// All lengths from 0 to 40 at all places of `source` within a vector.
template <class T>
int wrong_rows(detail::WidenKernels const& widen, std::vector<T> const& source) {
  int wrong = 0;
  auto const all = static_cast<index_t>(source.size());
  auto const check = [&](index_t first, index_t n) {
    Row row(n);
    detail::widen_row(widen, source.data() + first, n, row.data());
    wrong += row.intact() ? 0 : 1;
    for (index_t i = 0; i < n; ++i) {
      wrong += same_value(row[i], to_float(source[static_cast<std::size_t>(first + i)])) ? 0 : 1;
    }
  };
  check(0, all);
  for (index_t n = 0; n <= 40; ++n) check((7 * n) % 33, n);
  return wrong;
}

template <class T>
std::vector<T> all_codes() {
  std::vector<T> codes;
  for (std::uint32_t bits = 0; bits < (1u << (8 * sizeof(T))); ++bits) {
    codes.push_back({static_cast<decltype(T::bits)>(bits)});
  }
  return codes;
}

template <class View>
int wrong_lanes(detail::WidenKernels const& widen, View const& cache) {
  int wrong = 0;
  for (index_t slot = 0; slot < cache.slots(); ++slot) {
    Row want(cache.lanes);
    Row got(cache.lanes);
    decode_row(cache, slot, want.data());
    detail::decode_row(widen, cache, slot, got.data());
    wrong += got.intact() ? 0 : 1;
    for (index_t i = 0; i < cache.lanes; ++i) wrong += same_value(got[i], want[i]) ? 0 : 1;
  }
  return wrong;
}

/// Bytes of every value; scales are sensible ones.
std::vector<std::byte> random_bytes(std::size_t count, std::uint64_t seed) {
  Random random(seed);
  std::vector<std::byte> bytes(count);
  for (std::byte& b : bytes) b = static_cast<std::byte>(random.below(256));
  return bytes;
}
void put_scale(std::byte* at, Random& random) {
  float const scale = random.uniform(-3, 3);
  std::memcpy(at, &scale, sizeof(scale));
}

template <class T>
int wrong_codes(detail::NarrowKernels const& narrow, std::vector<float> const& values,
                float factor) {
  std::vector<T> out(values.size(), T{0x1234});
  auto const n = static_cast<index_t>(values.size()) - 1;  // the last one is the guard
  detail::narrow_row(narrow, values.data(), n, factor, out.data());
  int wrong = out.back().bits == 0x1234 ? 0 : 1;
  for (std::size_t i = 0; i + 1 < values.size(); ++i) {
    wrong += out[i].bits == from_float<T>(values[i] * factor).bits ? 0 : 1;
  }
  return wrong;
}

}  // namespace

TEMPLATE_LIST_TEST_CASE("host rows: every code of every element type", "[attention]",
                        test::IsaExecutors) {
  auto const& widen = detail::kernels<detail::WidenKernels>(TestType{}.isa);
  CHECK(wrong_rows(widen, all_codes<bf16>()) == 0);
  CHECK(wrong_rows(widen, all_codes<fp16>()) == 0);
  CHECK(wrong_rows(widen, all_codes<e4m3>()) == 0);
  CHECK(wrong_rows(widen, Random(1).normals(1000)) == 0);
  std::vector<own::Fixed> fixed;
  for (int i = -500; i < 500; ++i) fixed.push_back({static_cast<std::int16_t>(i)});
  CHECK(wrong_rows(widen, fixed) == 0);
}

TEMPLATE_LIST_TEST_CASE("host rows: plain caches and formats of one's own", "[attention]",
                        test::IsaExecutors) {
  auto const& widen = detail::kernels<detail::WidenKernels>(TestType{}.isa);
  for (index_t const lanes : {1, 7, 16, 33, 128, 576}) {
    std::vector<bf16> halves;
    for (float const x : Random(2).normals(static_cast<std::size_t>(12 * lanes))) {
      halves.push_back(from_float<bf16>(x));
    }
    CHECK(wrong_lanes(widen, make_paged_cache<host>(std::as_const(halves).data(), Pages{3},
                                                    PageSize{4}, HeadDim{lanes})) == 0);
    auto const floats = Random(3).normals(static_cast<std::size_t>(12 * lanes));
    CHECK(wrong_lanes(widen, make_paged_cache<host>(floats.data(), Pages{3}, PageSize{4},
                                                    HeadDim{lanes})) == 0);
    CacheView<host, own::Doubled> const doubled{floats.data(), 3, 4, lanes, 4 * lanes, lanes, {}};
    CHECK(wrong_lanes(widen, doubled) == 0);
  }
}

TEMPLATE_LIST_TEST_CASE("host rows: index keys of 1 byte and a scale", "[attention]",
                        test::IsaExecutors) {
  auto const& widen = detail::kernels<detail::WidenKernels>(TestType{}.isa);
  for (index_t const lanes : {1, 15, 20, 128, 129}) {
    auto bytes = random_bytes(static_cast<std::size_t>(3 * 5 * (lanes + 4)), 4);
    Random random(5);
    for (index_t page = 0; page < 3; ++page) {
      for (index_t i = 0; i < 5; ++i) {
        put_scale(bytes.data() + page * 5 * (lanes + 4) + 5 * lanes + 4 * i, random);
      }
    }
    CHECK(wrong_lanes(widen, make_index_key_e4m3_cache<host>(std::as_const(bytes).data(), Pages{3},
                                                             PageSize{5}, HeadDim{lanes})) == 0);
  }
}

TEMPLATE_LIST_TEST_CASE("host rows: latents of whole and of broken tiles, rope at odd addresses",
                        "[attention]", test::IsaExecutors) {
  auto const& widen = detail::kernels<detail::WidenKernels>(TestType{}.isa);
  struct Widths {
    index_t latent, tile, rope;
  };
  for (auto const [latent, tile, rope] :
       {Widths{512, 128, 64}, Widths{20, 8, 3}, Widths{23, 8, 5}, Widths{7, 16, 0},
        Widths{33, 32, 40}, Widths{0, 16, 9}, Widths{64, 1, 17}}) {
    INFO(latent << " in tiles of " << tile << ", rope " << rope);
    index_t const tiles = (latent + tile - 1) / tile;
    index_t const row = latent + 4 * tiles + 2 * rope;
    auto bytes = random_bytes(static_cast<std::size_t>(20 * row), 6);
    Random random(7);
    for (index_t slot = 0; slot < 20; ++slot) {
      for (index_t t = 0; t < tiles; ++t) {
        put_scale(bytes.data() + slot * row + latent + 4 * t, random);
      }
    }
    auto const cache = make_latent_e4m3_cache<host>(std::as_const(bytes).data(), Pages{4},
                                                    PageSize{5}, latent, rope, tile);
    CHECK(wrong_lanes(widen, cache) == 0);
    CHECK(detail::row_bytes(cache) == row);
  }
}

TEMPLATE_LIST_TEST_CASE("host rows: outputs are rounded as from_float rounds", "[attention]",
                        test::IsaExecutors) {
  auto const& narrow = detail::kernels<detail::NarrowKernels>(TestType{}.isa);
  std::vector<float> values;
  // around every half: itself, the halfway point to the next one, and the floats beside them
  for (fp16 const code : all_codes<fp16>()) {
    float const x = to_float(code);
    float const next = to_float(fp16{static_cast<std::uint16_t>(code.bits + 1)});
    for (float const y : {x, (x + next) / 2}) {
      values.push_back(y);
      values.push_back(std::nextafter(y, std::numeric_limits<float>::infinity()));
      values.push_back(std::nextafter(y, -std::numeric_limits<float>::infinity()));
    }
  }
  Random random(8);
  for (int i = 0; i < 100001; ++i) {
    values.push_back(std::bit_cast<float>(static_cast<std::uint32_t>(random.bits())));
  }
  for (float const x :
       {0.0f, -0.0f, 65519.0f, 65520.0f, -65520.0f, 3.4e38f, std::numeric_limits<float>::infinity(),
        std::nanf(""), std::numeric_limits<float>::denorm_min()}) {
    values.push_back(x);
  }
  CHECK(wrong_codes<bf16>(narrow, values, 1.0f) == 0);
  CHECK(wrong_codes<fp16>(narrow, values, 1.0f) == 0);
  CHECK(wrong_codes<bf16>(narrow, values, 0.37f) == 0);
  CHECK(wrong_codes<fp16>(narrow, values, 0.37f) == 0);
}
