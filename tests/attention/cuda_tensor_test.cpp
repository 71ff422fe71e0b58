// SPDX-License-Identifier: Apache-2.0
//
// Attention over 512 latent and 64 rotary lanes: the tensor-core kernel, where it differs from the
// cases of mla_test.cpp.
#include <indexshare/attention/mla.hpp>
#include <indexshare/cuda/attention.cuh>

#include <catch2/catch_template_test_macros.hpp>
#include <catch2/catch_test_macros.hpp>

#include "attention_run.hpp"
#include "random.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <tuple>
#include <type_traits>
#include <vector>

using namespace indexshare;
using test::AttentionCase;
using test::check_attention;
using test::Cuda;
using test::Random;
using test::run_attention;
using test::same_bits;

namespace {

constexpr index_t lanes = 576;
constexpr float glm_scale = 0.0721687824f;  // 192^-0.5

template <class Query, class Format>
struct Pair {
  using query = Query;
  using format = Format;
};
using Pairs = std::tuple<Pair<bf16, format::Plain<bf16>>, Pair<fp16, format::Plain<fp16>>,
                         Pair<bf16, format::LatentE4m3>, Pair<fp16, format::LatentE4m3>>;
using E4m3Pairs = std::tuple<Pair<bf16, format::LatentE4m3>, Pair<fp16, format::LatentE4m3>>;

template <class P>
using CaseOf = AttentionCase<typename P::query, typename P::format>;

template <class P>
CaseOf<P> make_case(index_t heads, index_t width, index_t keys, index_t page_size = 16,
                    std::uint64_t seed = 6) {
  CaseOf<P> c(heads, 512, width,
              {.requests = 1, .keys = keys, .lanes = lanes, .page_size = page_size, .seed = seed});
  c.scale = glm_scale;
  c.kv.write_random(0, 0, keys - keys % 16 - 3, 21);  // the end of the last pages stays NaN
  return c;
}

/// `count` positions below `keys`, scattered and sorted.
std::vector<position_t> scattered(std::uint64_t seed, index_t count, index_t keys) {
  auto positions = Random(seed).permutation<position_t>(static_cast<std::size_t>(keys));
  positions.resize(static_cast<std::size_t>(count));
  std::sort(positions.begin(), positions.end());
  return positions;
}

template <class Out>
bool any_nan(std::vector<Out> const& values) {
  return std::any_of(values.begin(), values.end(), [](Out x) { return std::isnan(to_float(x)); });
}

}  // namespace

TEMPLATE_LIST_TEST_CASE("tensor attention: any number of heads, counts around the tile",
                        "[attention]", Pairs) {
  for (index_t const heads : {1, 8, 12, 16, 32, 40, 64, 72}) {
    INFO(heads << " heads");
    auto c = make_case<TestType>(heads, 68, 80);
    for (index_t const count : {0, 1, 31, 32, 33, 68}) {
      if (heads > 8 && heads != 64 && count < 32) continue;
      c.add_positions(static_cast<std::uint64_t>(100 + count), 0, static_cast<position_t>(count),
                      scattered(static_cast<std::uint64_t>(count), count, 77));
    }
    check_attention(c, run_attention<float>(Cuda{}, c));
    if (heads == 8 || heads == 64) {
      check_attention<true>(c, run_attention<bf16, true>(Cuda{}, c));
      check_attention(c, run_attention<fp16>(Cuda{}, c));
    }
  }
}

TEMPLATE_LIST_TEST_CASE("tensor attention: rows cut into splits, with sink and holes",
                        "[attention]", Pairs) {
  for (index_t const heads : {8, 12, 64}) {
    auto c = make_case<TestType>(heads, 700, 720);
    c.sink.assign(static_cast<std::size_t>(heads), 0.5f);
    c.sink[0] = -std::numeric_limits<float>::infinity();
    // all splits, the first only, and one key in the last
    for (index_t const count : {700, 60}) {
      auto const seed = static_cast<std::uint64_t>(count);
      c.add_positions(seed, 0, 717, scattered(seed, count, 717));
    }
    c.slots[0][0] = -1;
    c.slots[0][333] = std::numeric_limits<position_t>::max();
    std::vector<position_t> lonely(700, -1);
    lonely[699] = c.slots[0][5];
    c.add_random_row(3, lonely);
    REQUIRE(attention_plan(test::cuda_limits(),
                           SparseMla<typename TestType::query, typename TestType::format>{},
                           c.shape())
                ->splits > 1);
    auto const got = run_attention<float>(Cuda{}, c);
    check_attention(c, got);
    CHECK_FALSE(any_nan(got.out));
    CHECK(same_bits(got, run_attention<float>(Cuda{}, c, {.workspace_fill = std::byte{0}})));
    auto const plain_lse = got.lse;
    c.sink.clear();
    CHECK(same_bits(plain_lse, run_attention<float>(Cuda{}, c).lse));
  }
}

TEMPLATE_LIST_TEST_CASE("tensor attention: k >= len gives the bits of dense attention",
                        "[attention]", Pairs) {
  auto c = make_case<TestType>(16, 320, 320);
  for (position_t const length : {317, 64, 1}) {
    std::vector<position_t> all(static_cast<std::size_t>(length));
    for (position_t s = 0; s < length; ++s) all[static_cast<std::size_t>(s)] = s;
    c.add_positions(static_cast<std::uint64_t>(length), 0, length, all);
  }
  auto const sparse = run_attention<bf16>(Cuda{}, c);
  CHECK(same_bits(sparse, run_attention<bf16, true>(Cuda{}, c)));
}

TEMPLATE_LIST_TEST_CASE("tensor attention: pages, strides and alignment leave the bits alone",
                        "[attention]", Pairs) {
  auto const build = [](index_t page_size, std::uint64_t seed) {
    auto c = make_case<TestType>(16, 50, 64, page_size, seed);
    c.add_positions(1, 0, 50, scattered(4, 50, 61));
    c.add_positions(2, 0, 41, scattered(5, 41, 61));
    return c;
  };
  auto const c = build(0, 1);
  auto const want = run_attention<bf16>(Cuda{}, c);
  check_attention(c, want);
  for (index_t const page_size : {1, 4, 64}) {
    CHECK(same_bits(want, run_attention<bf16>(Cuda{}, build(page_size, 7))));
  }
  for (test::AttentionLayout const layout :
       {test::AttentionLayout{.query_pad = 1}, test::AttentionLayout{.query_pad = 4},
        test::AttentionLayout{.out_pad = 3, .slot_pad = 5, .lse_pad = 2},
        test::AttentionLayout{.head_major = true}}) {
    CHECK(same_bits(want, run_attention<bf16>(Cuda{}, c, layout)));
  }

  // the cache moved and spread: each row begins at another distance from 16 bytes
  using Policy = SparseMla<typename TestType::query, typename TestType::format, bf16>;
  using Storage = typename TestType::format::storage;
  index_t const row = c.kv.view().row_stride;
  for (index_t const shift : {index_t{8}, index_t{4}, index_t{2}, index_t{1}}) {
    if (shift < static_cast<index_t>(sizeof(Storage))) continue;
    index_t const step = row + shift / static_cast<index_t>(sizeof(Storage));
    test::Guarded<Storage> moved(static_cast<std::size_t>(64 * step + step - row));
    test::AttentionMemory<typename TestType::query, typename TestType::format, bf16> memory(c);
    auto in = memory.inputs();
    Storage* const first = moved.data() + (step - row);
    for (index_t s = 0; s < 64; ++s) {
      std::memcpy(first + s * step, in.kv.data + s * row,
                  static_cast<std::size_t>(row) * sizeof(Storage));
    }
    in.kv.data = first;
    in.kv.row_stride = step;
    in.kv.block_stride = 64 * step;
    test::Scratch workspace(*attention_workspace(Cuda{}, Policy{}, c.shape()));
    REQUIRE(attention_run(Cuda{}, Policy{}, in, memory.batch(), {0, c.rows()}, memory.plan(),
                          memory.outputs(), c.shape(), workspace.get())
                .ok());
    finish(Cuda{});
    INFO("rows " << shift << " bytes further apart");
    CHECK(same_bits(want, memory.take()));
  }
}

TEMPLATE_LIST_TEST_CASE("tensor attention: a head's bits do not depend on the others",
                        "[attention]", Pairs) {
  // 16, 24 and 40 heads run in blocks of 16 and 8, which sum in one order
  auto const build = [](index_t heads) {
    auto c = make_case<TestType>(heads, 40, 48);
    c.add_positions(1, 0, 40, scattered(1, 40, 45));
    c.q.clear();
    for (index_t h = 0; h < heads; ++h) {
      for (float const x : Random(static_cast<std::uint64_t>(h)).normals(lanes)) {
        using Query = typename TestType::query;
        c.q.push_back(to_float(from_float<Query>(h % 7 == 3 ? 50 * x : x)));
      }
    }
    return c;
  };
  auto const all = run_attention<float>(Cuda{}, build(16));
  check_attention(build(16), all);
  for (index_t const heads : {1, 8, 24, 40}) {
    auto const some = run_attention<float>(Cuda{}, build(heads));
    auto const common = static_cast<std::size_t>(std::min<index_t>(heads, 16));
    INFO("heads " << heads);
    CHECK(std::memcmp(some.out.data(), all.out.data(), common * 512 * sizeof(float)) == 0);
    CHECK(std::memcmp(some.lse.data(), all.lse.data(), common * sizeof(float)) == 0);
  }
}

TEMPLATE_LIST_TEST_CASE("tensor attention: logits that climb, fall and overflow exp", "[attention]",
                        Pairs) {
  using Query = typename TestType::query;
  constexpr index_t heads = 8;
  constexpr index_t keys = 90;  // three tiles, one split
  CaseOf<TestType> c(heads, 512, keys, {.requests = 1, .keys = keys, .lanes = lanes});
  // one rotary lane makes the logit: head 0 climbs, head 1 falls, others are level; with the
  // steps, references change in no tile, in the last, in each
  for (index_t s = 0; s < keys; ++s) {
    auto values = Random(static_cast<std::uint64_t>(s)).normals(lanes);
    std::fill(values.begin() + 512, values.end(), 0.0f);
    values[512] = static_cast<float>(s);
    c.kv.write(0, s, values);
  }
  std::vector<position_t> all(static_cast<std::size_t>(keys));
  for (position_t s = 0; s < keys; ++s) all[static_cast<std::size_t>(s)] = s;
  for (float const step : {0.0078125f, 0.25f, 1.0f, 60000.0f}) {
    std::vector<float> q(static_cast<std::size_t>(heads * lanes), 0.0f);
    q[512] = step;
    q[lanes + 512] = -step;
    c.add_row(q, all, keys, keys);
  }
  c.scale = 1.0f;
  REQUIRE(
      attention_plan(test::cuda_limits(), SparseMla<Query, typename TestType::format>{}, c.shape())
          ->splits == 1);
  auto const got = run_attention<float>(Cuda{}, c);
  check_attention(c, got);
  CHECK_FALSE(any_nan(got.out));
  auto const last = c.kv.value(0, keys - 1);
  auto const first = c.kv.value(0, 0);
  for (std::size_t v = 0; v < 512; v += 37) {  // a softmax of one key
    CHECK(std::abs(got.out[3 * heads * 512 + v] - last[v]) <= 0x1p-9f * std::abs(last[v]));
    CHECK(std::abs(got.out[(3 * heads + 1) * 512 + v] - first[v]) <= 0x1p-9f * std::abs(first[v]));
  }
  static_assert(Element<Query>);
}

TEMPLATE_LIST_TEST_CASE("tensor attention: NaN in rows that are not selected stays there",
                        "[attention]", Pairs) {
  CaseOf<TestType> c(16, 512, 96,
                     {.requests = 1, .keys = 96, .lanes = lanes, .page_size = 4, .spare_pages = 3});
  c.scale = glm_scale;
  std::vector<position_t> const positions{1, 6, 13, 40, 41, 90};
  for (position_t const s : positions) c.kv.write_random(0, s, s + 1, 81);
  c.add_positions(1, 0, 96, positions);
  std::vector<position_t> spread(96, -1);  // every kind of hole, in every tile
  for (std::size_t i = 0; i < positions.size(); ++i) {
    spread[16 * i + 3] = c.slots[0][i];
    spread[16 * i + 4] = std::numeric_limits<position_t>::min();
    spread[16 * i + 5] = static_cast<position_t>(c.kv.slots());
  }
  c.add_random_row(1, spread);
  c.add_random_row(2, std::vector<position_t>(96, -1));
  auto const got = run_attention<float>(Cuda{}, c);
  check_attention(c, got);
  CHECK_FALSE(any_nan(got.out));
  for (std::size_t i = 0; i < 16 * 512; ++i) CHECK(got.out[2 * 16 * 512 + i] == 0);
  CHECK(got.lse[32] == -std::numeric_limits<float>::infinity());
}

TEMPLATE_LIST_TEST_CASE("tensor attention: a NaN code in a selected e4m3 row is seen",
                        "[attention]", E4m3Pairs) {
  for (index_t const lane : {0, 127, 130, 389, 511}) {
    auto c = make_case<TestType>(8, 40, 48, 0);
    c.add_positions(1, 0, 40, scattered(1, 40, 45));
    c.add_positions(2, 0, 40, scattered(1, 40, 45));
    c.slots[1][7] = c.slots[1][8];  // without the row
    auto const clean = run_attention<float>(Cuda{}, c);
    REQUIRE_FALSE(any_nan(clean.out));
    index_t const at = c.slots[0][7] * c.kv.view().row_stride + lane;
    c.kv.memory()[static_cast<std::size_t>(at)] = std::byte{0xFF};
    auto const got = run_attention<float>(Cuda{}, c);
    INFO("lane " << lane);
    CHECK(std::all_of(got.out.begin(), got.out.begin() + 8 * 512,
                      [](float x) { return std::isnan(x); }));
    CHECK(std::memcmp(got.out.data() + 8 * 512, clean.out.data() + 8 * 512, 8 * 512 * 4) == 0);
  }
}

TEMPLATE_LIST_TEST_CASE("tensor attention: e4m3 scales over twenty orders of two", "[attention]",
                        E4m3Pairs) {
  auto c = make_case<TestType>(8, 90, 96);
  for (index_t s = 0; s < 90; ++s) {
    auto values = Random(static_cast<std::uint64_t>(s)).normals(lanes);
    // rows differ, scales of a row differ, and one row of little weight is far above all others
    auto const power = static_cast<float>(std::ldexp(1.0, static_cast<int>(s % 21) - 10));
    for (std::size_t i = 0; i < values.size(); ++i) {
      values[i] *=
          i < 512 ? power * (i / 128 == static_cast<std::size_t>(s) % 4 ? 0.01f : 1.0f) : 1;
      if (s == 50 && i < 512) values[i] = std::ldexp(values[i], 30);
    }
    values[512] = s == 50 ? -400.0f : 0.0f;
    c.kv.write(0, s, values);
  }
  for (std::uint64_t row = 0; row < 2; ++row) {
    auto q = Random(row).normals(static_cast<std::size_t>(8 * lanes));
    for (std::size_t i = 0; i < q.size(); ++i) {
      if (i % lanes < 512) q[i] *= 0x1p-12f;  // logits of the latents near 1
      if (i % lanes == 512) q[i] = 1.0f;
    }
    for (std::size_t i = 0; i < 512; ++i) q[i] = 0;  // head 0: by the rotary lanes alone
    c.add_row(q, scattered(row, 90, 90), 90, 90);
    for (auto& slot : c.slots.back()) slot = c.kv.slot(0, slot);
  }
  c.scale = 1.0f;
  auto const got = run_attention<float>(Cuda{}, c);
  check_attention(c, got);
  CHECK_FALSE(any_nan(got.out));
}

TEST_CASE("tensor attention: bf16 queries beyond the range of fp16, over e4m3 rows",
          "[attention]") {
  using P = Pair<bf16, format::LatentE4m3>;
  for (float const size : {1e-30f, 1e-6f, 1e6f, 1e30f}) {
    auto c = make_case<P>(16, 40, 48);
    auto q = Random(3).normals(static_cast<std::size_t>(16 * lanes));
    for (std::size_t i = 0; i < q.size(); ++i) {
      if (i / lanes % 2 == 0) q[i] *= size;  // every other head
    }
    std::vector<position_t> slots;
    for (position_t const s : scattered(1, 40, 45)) slots.push_back(c.kv.slot(0, s));
    c.add_row(q, slots, 40);
    INFO("size " << size);
    c.scale = size > 1 ? 1 / size : 1;
    auto const got = run_attention<float>(Cuda{}, c);
    check_attention(c, got);
    CHECK_FALSE(any_nan(got.out));
  }
}

TEST_CASE("tensor attention: e4m3 rows of another tile go the general way", "[attention]") {
  AttentionCase<bf16, format::LatentE4m3> c(
      4, 512, 20, {.requests = 1, .keys = 24, .lanes = lanes, .page_size = 4}, {512, 64});
  c.scale = glm_scale;
  c.kv.write_random(0, 0, 24, 3);
  c.add_positions(1, 0, 20, scattered(1, 20, 24));
  check_attention(c, run_attention<float>(Cuda{}, c));
}

TEST_CASE("attention: rows of more lanes than shared memory holds, in chunks", "[attention]") {
  struct Dims {
    index_t key, value;
  };
  for (auto const [key, value] : {Dims{960, 960}, Dims{961, 513}, Dims{2000, 1100}}) {
    AttentionCase<float, format::Plain<float>> c(
        3, value, 40, {.requests = 1, .keys = 44, .lanes = key, .page_size = 4});
    c.kv.write_random(0, 0, 44, 3);
    c.scale = 0.05f;
    c.add_positions(1, 0, 40, scattered(1, 40, 44));
    c.add_positions(2, 0, 3, {5, 9, 33});
    INFO("key_dim " << key << ", value_dim " << value);
    check_attention(c, run_attention<float>(Cuda{}, c));
    check_attention<true>(c, run_attention<float, true>(Cuda{}, c));
  }
}

TEST_CASE("attention: rows cut into splits, any types", "[attention]") {
  AttentionCase<float, format::Plain<bf16>> c(
      11, 30, 900, {.requests = 1, .keys = 900, .lanes = 33, .page_size = 4});
  c.kv.write_random(0, 0, 900, 3);
  c.scale = 0.2f;
  for (index_t const count : {900, 256, 257, 5, 0}) {
    c.add_positions(static_cast<std::uint64_t>(count), 0, static_cast<position_t>(count),
                    scattered(1, count, 900));
  }
  c.sink.assign(11, 1.0f);
  REQUIRE(attention_plan(test::cuda_limits(), SparseMla<float, format::Plain<bf16>>{}, c.shape())
              ->splits > 1);
  check_attention(c, run_attention<float>(Cuda{}, c));
  check_attention<true>(c, run_attention<bf16, true>(Cuda{}, c));
}
