// SPDX-License-Identifier: Apache-2.0
//
// Rows appended as e4m3 codes with scales: every byte of the pool against a plain formula, which
// looks for the nearest code among all of them. All executors write the same bytes.
#if defined(INDEXSHARE_TEST_CUDA)
#include <indexshare/cuda/append.cuh>

#include "../cuda/graph.hpp"
#endif
#include <indexshare/host/append.hpp>

#include <catch2/catch_template_test_macros.hpp>
#include <catch2/catch_test_macros.hpp>

#include "cache_pool.hpp"
#include "caches.hpp"
#include "executors.hpp"
#include "memory.hpp"
#include "random.hpp"
#include "refusal.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <tuple>
#include <type_traits>
#include <vector>

using namespace indexshare;
using test::Bytes;
using test::Place;
using test::Pool;
using test::refused;
using test::space;
using test::succeeded;

namespace {

constexpr bool on_device = space == Space::device;
/// Executors of host memory share their append.
using X = std::tuple_element_t<0, test::Executors>;
using KeyFormat = format::IndexKeyE4m3;
using KvFormat = format::LatentE4m3;

constexpr std::size_t to_size(index_t n) { return static_cast<std::size_t>(n); }
constexpr float infinite = std::numeric_limits<float>::infinity();
constexpr float nan_value = std::numeric_limits<float>::quiet_NaN();

constexpr ScaleRecipe recipes[] = {
    {},
    scale_recipes::act_quant,
    scale_recipes::act_quant_ue8m0,
    scale_recipes::vllm_index_query,
    scale_recipes::vllm_index_key,
    scale_recipes::vllm_latent,
    scale_recipes::flashmla_latent,
    {2.5f, true},
};

// ---- the formula

/// The nearest of all codes, of two the even one; 448 for what is above.
std::uint8_t nearest_code(float value) {
  if (std::isnan(value)) return 0x7F;
  auto const magnitude = std::abs(static_cast<double>(value));
  std::uint8_t best = 0;
  for (std::uint8_t code = 1; code < 0x7F; ++code) {
    double const now = std::abs(test::e4m3_value(code) - magnitude);
    double const before = std::abs(test::e4m3_value(best) - magnitude);
    if (now < before || (now == before && code % 2 == 0)) best = code;
  }
  return static_cast<std::uint8_t>(best | (std::signbit(value) ? 0x80 : 0));
}

/// Codes and scale of some lanes. Powers of two are found by counting.
struct Coded {
  std::vector<std::uint8_t> codes;
  float scale;
};
Coded coded(std::vector<float> const& lanes, ScaleRecipe const& recipe) {
  float amax = 0;
  for (float const lane : lanes) {
    if (std::isfinite(lane)) amax = std::max(amax, std::abs(lane));
  }
  float scale = std::max(amax, recipe.amax_floor) / 448.0f;
  if (recipe.power_of_two) {
    float power = 1;
    while (power < scale) power *= 2;
    while (power / 2 >= scale) power /= 2;
    scale = power;
  }
  Coded result{{}, scale};
  for (float const lane : lanes) {
    result.codes.push_back(nearest_code(std::isfinite(lane) ? lane / scale : nan_value));
  }
  return result;
}

void put_float(Bytes& row, float value) {
  std::byte bytes[4];
  std::memcpy(bytes, &value, 4);
  row.insert(row.end(), bytes, bytes + 4);
}
void put_codes(Bytes& row, Coded const& c) {
  for (std::uint8_t const code : c.codes) row.push_back(std::byte{code});
}

/// One token's record.
Bytes record_of(KeyFormat, std::vector<float> const& lanes, ScaleRecipe const& recipe) {
  Bytes row;
  Coded const c = coded(lanes, recipe);
  put_codes(row, c);
  put_float(row, c.scale);
  return row;
}
Bytes record_of(KvFormat format, std::vector<float> const& lanes, ScaleRecipe const& recipe) {
  Bytes row, scales;
  for (index_t first = 0; first < format.latent; first += format.tile) {
    auto const begin = lanes.begin() + first;
    auto const end = lanes.begin() + std::min(first + format.tile, format.latent);
    Coded const c = coded(std::vector<float>(begin, end), recipe);
    put_codes(row, c);
    put_float(scales, c.scale);
  }
  row.insert(row.end(), scales.begin(), scales.end());
  for (auto lane = lanes.begin() + format.latent; lane != lanes.end(); ++lane) {
    bf16 const value = from_float<bf16>(*lane);
    row.push_back(std::byte(value.bits & 0xFF));
    row.push_back(std::byte(value.bits >> 8));
  }
  return row;
}

// ---- tokens

/// Rows of any element type with room between them, and where they go: two requests whose pages are
/// in the order of `table`, all positions from 0 on, in an order that jumps (no multiple of 5
/// tokens).
template <class Row>
struct Tokens {
  static constexpr index_t pad = 3;
  index_t count, lanes;
  test::Guarded<Row> rows;
  test::Guarded<position_t> positions, requests, table;

  Tokens(index_t tokens, index_t width, index_t pages, std::uint64_t seed)
      : count(tokens),
        lanes(width),
        rows(to_size(tokens * (width + pad))),
        positions(to_size(tokens)),
        requests(to_size(tokens)),
        table(test::guarded(test::Random(seed).permutation<position_t>(to_size(pages)))) {
    test::Random random(seed);
    for (index_t i = 0; i < tokens; ++i) {
      index_t const token = i * 5 % tokens;
      positions[to_size(i)] = static_cast<position_t>(token / 2);
      requests[to_size(i)] = static_cast<position_t>(token % 2);
      float const size = std::ldexp(1.0f, static_cast<int>(random.below(40)) - 20);
      for (index_t lane = 0; lane < width; ++lane)
        at(i, lane) = from_float<Row>(random.normal() * size);
    }
  }
  Row& at(index_t token, index_t lane) { return rows[to_size(token * (lanes + pad) + lane)]; }
  /// All lanes of a token.
  void set(index_t token, std::vector<float> const& values) {
    for (index_t lane = 0; lane < lanes; ++lane) {
      at(token, lane) = from_float<Row>(values[to_size(lane) % values.size()]);
    }
  }
  std::vector<float> row(index_t token) {
    std::vector<float> values;
    for (index_t lane = 0; lane < lanes; ++lane) values.push_back(to_float(at(token, lane)));
    return values;
  }
  PageTable<space> pages(index_t page) const {
    auto const width = static_cast<index_t>(table.size()) / 2;
    return make_page_table<space>(table.data(), Requests{2}, Pages{width}, PageSize{page});
  }
  auto view() const {
    return make_strided<space, Row const, 2>(rows.data(), {count, lanes}, {lanes + pad, 1});
  }
  index_t slot(index_t token, index_t page) const {
    auto const p = positions[to_size(token)];
    auto const width = static_cast<index_t>(table.size()) / 2;
    return table[to_size(requests[to_size(token)] * width + p / page)] * page + p % page;
  }
};

template <class Row, class Format>
Status append(Tokens<Row> const& tokens, Pool<Format>& pool, ScaleRecipe const& recipe) {
  X const x{};
  Status const status = append_rows(
      x, tokens.view(), make_lengths<space>(tokens.positions.data(), Rows{tokens.count}),
      make_lengths<space>(tokens.requests.data(), Rows{tokens.count}),
      tokens.pages(pool.place.page), pool.view(), recipe);
  test::finish(x);
  return status;
}

/// The pool after the append, by the formula.
template <class Row, class Format>
Bytes expected(Tokens<Row>& tokens, Pool<Format>& pool, ScaleRecipe const& recipe) {
  Bytes all = pool.all();
  for (index_t i = 0; i < tokens.count; ++i) {
    Pool<Format>::write(all, pool.parts(tokens.slot(i, pool.place.page)),
                        record_of(pool.format, tokens.row(i), recipe));
  }
  return all;
}

template <class Row, class Format>
void check_append(Tokens<Row>& tokens, Pool<Format>& pool, ScaleRecipe const& recipe) {
  CAPTURE(pool.place.page, pool.place.lanes, pool.place.row_gap, recipe.amax_floor,
          recipe.power_of_two);
  Bytes const want = expected(tokens, pool, recipe);
  REQUIRE_THAT(append(tokens, pool, recipe), succeeded());
  CHECK((pool.all() == want));
  CHECK((pool.memory.intact() && tokens.rows.intact()));
}

/// Whether each lane reads back within half a unit of its code.
template <class Format>
bool reads_back(Pool<Format>& pool, index_t slot, std::vector<float> const& lanes) {
  CacheView<Space::host, Format> const reader = pool.template view<Space::host>();
  std::vector<float> values(lanes.size());
  decode_row(reader, slot, values.data());
  auto const all = pool.all();
  Bytes const record = Pool<Format>::read(all, pool.parts(slot));
  for (std::size_t i = 0; i < lanes.size(); ++i) {
    double unit = std::abs(static_cast<double>(values[i])) / 128;  // of bf16, at least
    index_t scale_at = pool.place.lanes;
    if constexpr (std::is_same_v<Format, KvFormat>) {
      auto const lane = static_cast<index_t>(i);
      scale_at = lane < pool.format.latent ? pool.format.latent + lane / pool.format.tile * 4 : -1;
    }
    if (scale_at >= 0) {
      float scale = 0;
      std::memcpy(&scale, record.data() + scale_at, 4);
      int const exponent = std::max((static_cast<int>(record[i]) >> 3) & 15, 1);
      unit = std::ldexp(static_cast<double>(scale), exponent - 10);
    }
    double const off = std::abs(static_cast<double>(values[i]) - static_cast<double>(lanes[i]));
    if (!(off <= unit * (0.5 + 1e-5))) return false;
  }
  return true;
}

}  // namespace

TEMPLATE_TEST_CASE("append codes: index keys of any rows and recipe, in pages of any size",
                   "[cache]", float, bf16, fp16) {
  for (index_t const lanes : {1, 5, 33, 128}) {
    for (Place const& place : {Place{1, 26, lanes}, Place{16, 4, lanes, 0, 3}, Place{32, 2, lanes},
                               Place{64, 2, lanes}, Place{3, 10, lanes, 2, 5}}) {
      for (ScaleRecipe const& recipe : {recipes[0], recipes[2], recipes[5]}) {
        Pool<KeyFormat> pool(place, 1);
        Tokens<TestType> tokens(26, lanes, place.blocks, 2);
        check_append(tokens, pool, recipe);
      }
    }
  }
}

TEMPLATE_TEST_CASE("append codes: latents of any rows and recipe, in pages of any size", "[cache]",
                   float, bf16, fp16) {
  struct Widths {
    KvFormat format;
    index_t lanes;
  };
  for (Widths const& w :
       {Widths{{512, 128}, 576}, Widths{{40, 16}, 46}, Widths{{7, 3}, 7}, Widths{{0, 128}, 4}}) {
    for (Place const& place :
         {Place{1, 14, w.lanes}, Place{16, 2, w.lanes, 0, 3}, Place{32, 2, w.lanes},
          Place{64, 2, w.lanes}, Place{3, 6, w.lanes, 2, 5}}) {
      Pool<KvFormat> pool(place, 3, w.format);
      Tokens<TestType> tokens(14, w.lanes, place.blocks, 4);
      check_append(tokens, pool, scale_recipes::vllm_latent);
      check_append(tokens, pool, scale_recipes::flashmla_latent);
    }
  }
}

TEST_CASE("append codes: zeros, tiny rows, rows just above a power of two, and what is no number",
          "[cache]") {
  std::vector<std::vector<float>> rows{
      {0.0f, -0.0f},
      {1e-45f, 0.0f, -1e-40f},
      {std::numeric_limits<float>::max(), 1.0f, -std::numeric_limits<float>::max()},
      {infinite, 1.0f, -2.0f, 0.5f},
      {nan_value, -infinite},
      {nan_value, 3e-5f, 448.0f},
      {1e-4f, -1e-4f},
      {448.0f, 447.9999f, 432.0f, 416.0f, 240.0f, 8.5f, 0.0087f},
  };
  for (int const exponent : {-30, -22, -14, -13, -1, 0, 5, 100}) {
    float const edge = std::ldexp(448.0f, exponent);
    for (float const amax : {edge, std::nextafter(edge, infinite), std::nextafter(edge, 0.0f)}) {
      rows.push_back({amax, -amax / 3, amax / 1000, 0.0f});
    }
  }
  auto const count = static_cast<index_t>(rows.size());
  auto const run = [&](auto format, index_t lanes) {
    for (ScaleRecipe const& recipe : recipes) {
      Pool<decltype(format)> pool({16, 4, lanes, 0, 7}, 5, format);
      Tokens<float> tokens(count, lanes, 4, 6);
      for (index_t i = 0; i < count; ++i) tokens.set(i, rows[to_size(i)]);
      check_append(tokens, pool, recipe);
    }
  };
  run(KeyFormat{}, 128);
  run(KvFormat{64, 32}, 72);
}

TEST_CASE("append codes: the recipes' floors are the smallest scales that they write", "[cache]") {
  auto const smallest = [](ScaleRecipe const& recipe) {
    Pool<KeyFormat> pool({1, 2, 4}, 1);
    Tokens<float> tokens(1, 4, 2, 2);
    tokens.set(0, {0.0f});
    REQUIRE_THAT(append(tokens, pool, recipe), succeeded());
    Bytes const record = Pool<KeyFormat>::read(pool.all(), pool.parts(tokens.slot(0, 1)));
    float scale = 0;
    std::memcpy(&scale, record.data() + 4, 4);
    return scale;
  };
  CHECK(smallest(scale_recipes::act_quant) == 1e-4f / 448);
  CHECK(smallest(scale_recipes::act_quant_ue8m0) == 0x1p-22f);
  CHECK(smallest(scale_recipes::vllm_index_query) == 0x1p-42f);
  CHECK(smallest(scale_recipes::vllm_index_key) == 0x1p-22f);
  CHECK(smallest(scale_recipes::vllm_latent) == std::numeric_limits<float>::min());
  CHECK(smallest(scale_recipes::flashmla_latent) == 0x1p-13f);
}

TEST_CASE("append codes: a row reads back within half a unit of its codes", "[cache]") {
  for (ScaleRecipe const& recipe : recipes) {
    CAPTURE(recipe.amax_floor, recipe.power_of_two);
    Pool<KeyFormat> keys({16, 6, 128}, 7);
    Pool<KvFormat> kv({16, 6, 576}, 8);
    Tokens<float> of_keys(57, 128, 6, 9), of_kv(57, 576, 6, 10);
    REQUIRE_THAT(append(of_keys, keys, recipe), succeeded());
    REQUIRE_THAT(append(of_kv, kv, recipe), succeeded());
    bool close = true;
    for (index_t i = 0; i < 57; ++i) {
      close = close && reads_back(keys, of_keys.slot(i, 16), of_keys.row(i));
      close = close && reads_back(kv, of_kv.slot(i, 16), of_kv.row(i));
    }
    CHECK(close);
  }
}

TEST_CASE("append codes: a position without a slot is refused by the host and skipped by a device",
          "[cache]") {
  for (position_t const bad : {-1, 100, 1 << 30}) {
    Pool<KvFormat> pool({4, 4, 576}, 1);
    Tokens<bf16> tokens(6, 576, 4, 2);
    Bytes want = pool.all();
    Bytes const written = expected(tokens, pool, {});
    if (on_device) {
      want = written;
      auto const parts = pool.parts(tokens.slot(3, 4));
      Bytes const before = pool.all();
      Pool<KvFormat>::write(want, parts, Pool<KvFormat>::read(before, parts));
    }
    tokens.positions[3] = bad;
    Status const status = append(tokens, pool, {});
    if (on_device) {
      CHECK_THAT(status, succeeded());
    } else {
      CHECK_THAT(status, refused(Errc::bad_value, "position without a slot"));
    }
    CHECK((pool.all() == want));
  }
}

TEST_CASE("append codes: recipes and caches that make no sense are refused by name", "[cache]") {
  X const x{};
  Pool<KeyFormat> pool({4, 4, 128, 0, 9}, 1);
  Tokens<float> tokens(6, 128, 4, 2);
  Bytes const before = pool.all();
  for (float const floor : {0.0f, -1.0f, nan_value, infinite, 1e-37f, 1e31f}) {
    CHECK_THAT(append(tokens, pool, {.amax_floor = floor}), refused(Errc::bad_value, "amax_floor"));
  }
  auto const refuses = [&](auto const& cache, Errc code, char const* part) {
    CHECK_THAT(
        append_rows(x, tokens.view(), make_lengths<space>(tokens.positions.data(), Rows{6}),
                    make_lengths<space>(tokens.requests.data(), Rows{6}), tokens.pages(4), cache),
        refused(code, part));
  };
  auto cache = pool.view();
  cache.block_stride = 4 * 132 - 1;
  refuses(cache, Errc::bad_stride, "strides");
  cache = pool.view();
  cache.row_stride = 127;
  refuses(cache, Errc::bad_stride, "strides");
  cache = pool.view();
  cache.lanes = 127;
  refuses(cache, Errc::bad_shape, "lanes");
  Pool<KvFormat> kv({4, 4, 128}, 1, {100, 50});
  auto latents = kv.view();
  latents.row_stride -= 1;
  refuses(latents, Errc::bad_stride, "strides");
  latents = kv.view();
  latents.format.tile = 0;
  refuses(latents, Errc::bad_value, "format");
  latents = kv.view();
  latents.format.latent = 129;
  refuses(latents, Errc::bad_value, "format");
  test::finish(x);
  CHECK((pool.all() == before));
}

#if defined(INDEXSHARE_TEST_CUDA)

TEST_CASE("CUDA append codes: captured once, replayed with new rows, positions and pages",
          "[cache][graph]") {
  X const x{};
  Pool<KeyFormat> keys({16, 4, 128, 0, 3}, 1);
  Pool<KvFormat> kv({4, 16, 576}, 2);
  Tokens<float> of_keys(26, 128, 4, 3);
  Tokens<bf16> of_kv(26, 576, 16, 4);
  auto const enqueue = [&](auto const& tokens, auto& pool) {
    REQUIRE_THAT(
        append_rows(x, tokens.view(), make_lengths<space>(tokens.positions.data(), Rows{26}),
                    make_lengths<space>(tokens.requests.data(), Rows{26}),
                    tokens.pages(pool.place.page), pool.view(), scale_recipes::act_quant_ue8m0),
        succeeded());
  };
  cuda_test::Graph const graph(x, [&] {
    enqueue(of_keys, keys);
    enqueue(of_kv, kv);
  });
  CHECK(graph.only_device_work());
  for (std::uint64_t replay = 0; replay < 3; ++replay) {
    auto const renew = [&](auto& tokens, auto& fresh) {
      std::copy_n(fresh.rows.data(), fresh.rows.size(), tokens.rows.data());
      std::copy_n(fresh.table.data(), fresh.table.size(), tokens.table.data());
      std::rotate(tokens.positions.data(), tokens.positions.data() + 2,
                  tokens.positions.data() + 26);
      std::rotate(tokens.requests.data(), tokens.requests.data() + 2, tokens.requests.data() + 26);
    };
    Tokens<float> new_keys(26, 128, 4, 30 + replay);
    Tokens<bf16> new_kv(26, 576, 16, 40 + replay);
    renew(of_keys, new_keys);
    renew(of_kv, new_kv);
    Bytes const want_keys = expected(of_keys, keys, scale_recipes::act_quant_ue8m0);
    Bytes const want_kv = expected(of_kv, kv, scale_recipes::act_quant_ue8m0);
    graph.replay();
    CHECK((keys.all() == want_keys));
    CHECK((kv.all() == want_kv));
  }
}

#endif
