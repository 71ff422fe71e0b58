// SPDX-License-Identifier: Apache-2.0
//
// Faults that were reported for other implementations, by kind and number of the fault log.
#include <indexshare/attention/mla.hpp>
#include <indexshare/host/attention.hpp>
#include <indexshare/reference.hpp>

#include <catch2/catch_template_test_macros.hpp>
#include <catch2/catch_test_macros.hpp>

#include "attention_run.hpp"
#include "huge.hpp"
#include "random.hpp"
#include "vectors.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

using namespace indexshare;
using test::AttentionCase;
using test::check_attention;
using test::Random;
using test::run_attention;
using test::same_bits;

namespace {

using Fp32 = AttentionCase<float, format::Plain<float>>;
constexpr float infinity = std::numeric_limits<float>::infinity();
constexpr position_t int_max = std::numeric_limits<position_t>::max();
constexpr position_t int_min = std::numeric_limits<position_t>::min();

/// A contiguous cache of one request; its slots are its positions.
Fp32 small_case(index_t heads, index_t width, index_t keys, std::uint64_t seed = 5) {
  Fp32 c(heads, 4, width, {.requests = 1, .keys = keys, .lanes = 6});
  c.kv.write_random(0, 0, keys, seed);
  return c;
}

bool all_zero(std::vector<float> const& values) {
  return std::all_of(values.begin(), values.end(), [](float v) { return v == 0; });
}

}  // namespace

TEMPLATE_LIST_TEST_CASE("LEN R081: vector V12, -1 in any place, with lse", "[attention][fault]",
                        test::Executors) {
  auto const v = test::fault_vector("V12_attention");
  auto const latent = v.at("latent").get<index_t>();
  auto const rope = v.at("rope").get<index_t>();
  for (auto const& [slots, expected] : v.at("cases").items()) {
    Fp32 c(1, latent, 4, {.requests = 1, .keys = 4, .lanes = latent + rope});
    c.scale = static_cast<float>(v.at("scale"));
    for (index_t s = 0; s < 4; ++s) {
      c.kv.write(0, s,
                 v.at("kv").at(static_cast<std::size_t>(s)).template get<std::vector<float>>());
    }
    c.add_row(v.at("q").get<std::vector<float>>(), nlohmann::json::parse(slots), 4);
    auto const got = run_attention(TestType{}, c);
    check_attention(c, got);
    for (std::size_t i = 0; i < 4; ++i) {
      CHECK(std::abs(static_cast<double>(got.out[i]) - static_cast<double>(expected.at(0).at(i))) <
            1e-6);
    }
    if (expected.at(1) == "-inf") {
      CHECK(got.lse[0] == -infinity);
    } else {
      CHECK(std::abs(static_cast<double>(got.lse[0]) - static_cast<double>(expected.at(1))) < 1e-6);
    }
  }
}

TEMPLATE_LIST_TEST_CASE("LEN R081: rows around the cache are NaN and never leak",
                        "[attention][fault]", test::Executors) {
  // selected tokens between NaN rows: unselected tokens, spare pages and guards are all NaN
  Fp32 c(3, 4, 8, {.requests = 1, .keys = 24, .lanes = 6, .page_size = 4, .spare_pages = 3});
  for (index_t const s : {1, 6, 13, 22}) c.kv.write_random(0, s, s + 1, 81);
  c.add_positions(1, 0, 24, {1, 6, 13, 22});
  c.slots.back() = {-1, c.slots[0][0], c.slots[0][1], -1, c.slots[0][2], c.slots[0][3], -1, -1};
  c.counts.back() = 8;
  c.add_random_row(2, {-1, -1, -1, -1});
  auto const got = run_attention(TestType{}, c);
  check_attention(c, got);
  CHECK(std::none_of(got.out.begin(), got.out.end(), [](float x) { return std::isnan(x); }));
  CHECK(got.lse[3] == -infinity);
}

TEMPLATE_LIST_TEST_CASE("MASKROW R082: a first tile without a valid entry", "[attention][fault]",
                        test::Executors) {
  for (index_t const masked : {1, 15, 16, 17, 63, 64, 65, 128, 200}) {
    auto c = small_case(2, masked + 1, 8);
    std::vector<position_t> row(static_cast<std::size_t>(masked), -1);
    row.push_back(3);
    c.add_random_row(1, row);
    auto const got = run_attention(TestType{}, c);
    check_attention(c, got);
    auto const value = c.kv.value(0, 3);
    for (std::size_t i = 0; i < 4; ++i) CHECK(got.out[i] == value[i]);
  }
  std::vector<position_t> order{-1, -1, 3, 5};
  auto c = small_case(2, 4, 8);
  do c.add_row(Random(4).normals(12), order, 4);
  while (std::next_permutation(order.begin(), order.end()));
  CHECK(c.rows() == 12);
  check_attention(c, run_attention(TestType{}, c));
}

TEMPLATE_LIST_TEST_CASE("LEN R083: stale positive entries after the count are not read",
                        "[attention][fault]", test::Executors) {
  auto c = small_case(2, 8, 6);
  c.add_random_row(1, {0, 2, 3, 4, 5, 1 << 30, 1 << 30, 1 << 30});
  c.counts[0] = 5;
  c.add_random_row(2, {0, 2, 3, 4, 5, 1, 1, 1});  // stale but valid
  c.counts[1] = 5;
  auto const got = run_attention(TestType{}, c);
  check_attention(c, got);
  auto clean = small_case(2, 5, 6);
  clean.add_random_row(1, {0, 2, 3, 4, 5});
  clean.add_random_row(2, {0, 2, 3, 4, 5});
  CHECK(same_bits(got, run_attention(TestType{}, clean)));
}

TEMPLATE_LIST_TEST_CASE("CONTRACT R084: entries that are no slot contribute nothing",
                        "[attention][fault]", test::Executors) {
  auto c = small_case(3, 10, 6);
  c.add_random_row(1, {-1, 6, 7, int_max, int_min, 0, -2, 5, 1 << 24, 2});
  auto const got = run_attention(TestType{}, c);
  check_attention(c, got);
  auto clean = small_case(3, 3, 6);
  clean.add_random_row(1, {0, 5, 2});
  CHECK(same_bits(got, run_attention(TestType{}, clean)));
  auto none = small_case(3, 5, 6);
  none.add_random_row(1, {-1, 6, 7, int_max, int_min});
  auto const empty = run_attention(TestType{}, none);
  CHECK(all_zero(empty.out));
  CHECK(empty.lse == std::vector<float>(3, -infinity));
}

TEMPLATE_LIST_TEST_CASE("CONTRACT R085: counts of zero, below zero and above the width",
                        "[attention][fault]", test::Executors) {
  auto c = small_case(2, 3, 6);
  c.sink = {1.0f, -1.0f};
  for (position_t const count : {0, -1, int_min, 3, 4, int_max}) {
    c.add_row(Random(1).normals(12), {5, 1, 2}, count);
  }
  auto const got = run_attention(TestType{}, c);
  check_attention(c, got);
  for (std::size_t row = 0; row < 3; ++row) {
    for (std::size_t i = 0; i < 8; ++i) CHECK(got.out[row * 8 + i] == 0);
    CHECK((got.lse[row * 2] == -infinity && got.lse[row * 2 + 1] == -infinity));
  }
  for (std::size_t i = 0; i < 8; ++i) {
    CHECK(got.out[32 + i] == got.out[24 + i]);
    CHECK(got.out[40 + i] == got.out[24 + i]);
  }
}

TEMPLATE_LIST_TEST_CASE("MASKROW R086: scratch full of NaN, five of eight slots",
                        "[attention][fault]", test::Executors) {
  auto c = small_case(2, 8, 9);
  c.add_random_row(1, {0, -1, 4, 8, -1, -1, 2, 3});
  auto const got = run_attention(TestType{}, c);  // the scratch is NaN by default
  check_attention(c, got);
  CHECK(same_bits(got, run_attention(TestType{}, c, {.workspace_fill = std::byte{0}})));
}

TEMPLATE_LIST_TEST_CASE("PARTITION R087: two shards merged by lse equal one run",
                        "[attention][fault]", test::Executors) {
  auto const whole = [](std::vector<position_t> const& positions) {
    auto c = small_case(2, 8, 8, 87);
    c.add_random_row(1, positions);
    return c;
  };
  struct Merged {
    std::vector<double> out;
    std::vector<double> lse;
  };
  for (std::vector<position_t> const& positions :
       {std::vector<position_t>{0, 2, 4}, std::vector<position_t>{0, 1, 2, 3, 4, 5, 6, 7},
        std::vector<position_t>{5}, std::vector<position_t>{}}) {
    auto const single = whole(positions);
    for (position_t const interleave : {1, 2}) {
      Merged merged{std::vector<double>(8, 0.0), std::vector<double>(2, 0.0)};
      std::vector<double> weight(2, 0.0);
      for (position_t rank = 0; rank < 2; ++rank) {
        // each rank holds its tokens packed; positions of the other rank are holes
        Fp32 shard(2, 4, 8, {.requests = 1, .keys = 4, .lanes = 6});
        std::vector<position_t> local;
        auto const owner = [&](position_t s) { return s / interleave % 2; };
        auto const place = [&](position_t s) {
          return s / (2 * interleave) * interleave + s % interleave;
        };
        for (position_t s = 0; s < 8; ++s) {
          if (owner(s) == rank) shard.kv.write(0, place(s), single.kv.value(0, s));
        }
        for (position_t const s : positions) local.push_back(owner(s) == rank ? place(s) : -1);
        shard.add_random_row(1, local);
        auto const part = run_attention(TestType{}, shard);
        check_attention(shard, part);
        for (std::size_t h = 0; h < 2; ++h) {
          double const w = std::exp(static_cast<double>(part.lse[h]));
          weight[h] += w;
          for (std::size_t i = 0; i < 4; ++i) {
            merged.out[h * 4 + i] += w * static_cast<double>(part.out[h * 4 + i]);
          }
        }
      }
      auto const got = run_attention(TestType{}, single);
      for (std::size_t h = 0; h < 2; ++h) {
        if (positions.empty()) {
          CHECK((weight[h] == 0 && got.lse[h] == -infinity));
          continue;
        }
        CHECK(std::abs(std::log(weight[h]) - static_cast<double>(got.lse[h])) < 1e-6);
        for (std::size_t i = 0; i < 4; ++i) {
          CHECK(std::abs(merged.out[h * 4 + i] / weight[h] -
                         static_cast<double>(got.out[h * 4 + i])) < 1e-6);
        }
      }
    }
  }
}

TEMPLATE_LIST_TEST_CASE("CAUSAL R088: the order of slots carries no position", "[attention][fault]",
                        test::Executors) {
  // the query sees 4 tokens, the last of them at slot 20
  auto c = small_case(2, 8, 24);
  c.add_row(Random(3).normals(12), {9, 2, 0, 20}, 4, 4);
  c.add_row(Random(3).normals(12), {20, 0, 2, 9}, 4, 4);
  auto const got = run_attention(TestType{}, c);
  check_attention(c, got);
  for (std::size_t i = 0; i < 8; ++i) CHECK(std::abs(got.out[i] - got.out[8 + i]) < 1e-6f);
  c.slots = {{9, 2, 0}, {20, 0, 2}};
  c.counts = {3, 3};
  auto const without = run_attention(TestType{}, c);
  CHECK(without.lse[0] != got.lse[0]);
}

TEMPLATE_LIST_TEST_CASE("MASKROW R089: rows without keys among full ones", "[attention][fault]",
                        test::Executors) {
  auto c = small_case(17, 130, 140);
  for (index_t row = 0; row < 7; ++row) {
    auto slots = Random(static_cast<std::uint64_t>(row)).permutation<position_t>(130);
    auto const count = static_cast<position_t>(row % 2 == 0 ? 0 : 130 - row);
    c.add_row(Random(9).normals(17 * 6), std::move(slots), count);
  }
  auto const got = run_attention(TestType{}, c);
  check_attention(c, got);
  CHECK(std::none_of(got.out.begin(), got.out.end(), [](float x) { return std::isnan(x); }));
}

TEMPLATE_LIST_TEST_CASE("KSHAPE R090: any number of heads equals the same heads of a larger run",
                        "[attention][fault]", test::Executors) {
  auto const build = [](index_t heads) {
    AttentionCase<bf16, format::Plain<bf16>> c(
        heads, 16, 70, {.requests = 1, .keys = 80, .lanes = 24, .page_size = 16});
    c.kv.write_random(0, 0, 80, 90);
    for (std::uint64_t row = 0; row < 2; ++row) {
      auto slots = Random(row).permutation<position_t>(70);
      c.add_positions(1, 0, 80, slots);
    }
    c.q.clear();  // each head's query depends on its number only
    for (std::uint64_t row = 0; row < 2; ++row) {
      for (index_t h = 0; h < heads; ++h) {
        for (float const x : Random(1000 * row + static_cast<std::uint64_t>(h)).normals(24)) {
          c.q.push_back(to_float(from_float<bf16>(x)));
        }
        if (row == 0) c.sink.push_back(static_cast<float>(h % 5) - 2);
      }
    }
    return c;
  };
  auto const all = run_attention<bf16>(TestType{}, build(128));
  check_attention(build(128), all);
  for (index_t const heads : {1, 2, 3, 4, 6, 8, 16, 22, 64}) {
    auto const some = run_attention<bf16>(TestType{}, build(heads));
    auto const h = static_cast<std::size_t>(heads);
    bool same = true;
    for (std::size_t row = 0; row < 2; ++row) {
      same = same && std::memcmp(some.out.data() + row * h * 16, all.out.data() + row * 128 * 16,
                                 h * 16 * sizeof(bf16)) == 0;
      same = same && std::memcmp(some.lse.data() + row * h, all.lse.data() + row * 128,
                                 h * sizeof(float)) == 0;
    }
    INFO("heads " << heads);
    CHECK(same);
  }
}

TEMPLATE_LIST_TEST_CASE("DIAG R092: duplicates count each time", "[attention][fault]",
                        test::Executors) {
  auto c = small_case(2, 6, 6);
  c.add_random_row(1, {2, 2, 4, 2, 4, 1});
  auto const got = run_attention(TestType{}, c);
  check_attention(c, got);  // the oracle gathers
  auto once = small_case(2, 3, 6);
  once.add_random_row(1, {2, 4, 1});
  CHECK_FALSE(same_bits(got, run_attention(TestType{}, once)));
  auto all_same = small_case(2, 6, 6);
  all_same.add_random_row(1, {3, 3, 3, 3, 3, 3});
  auto const six = run_attention(TestType{}, all_same);
  all_same.slots = {{3}};
  all_same.counts = {1};
  auto const one = run_attention(TestType{}, all_same);
  for (std::size_t h = 0; h < 2; ++h)
    CHECK(std::abs(six.lse[h] - one.lse[h] - std::log(6.0f)) < 1e-6f);
}

TEMPLATE_LIST_TEST_CASE("MEM R093: scratch does not grow with the context", "[attention][fault]",
                        test::Executors) {
  using Policy = SparseMla<bf16, format::Plain<bf16>>;
  using Dense = DenseMla<bf16, format::Plain<bf16>>;
  Shape shape{.rows = 16, .keys = 4096, .top_k = 32, .heads = 64, .key_dim = 576, .value_dim = 512};
  TestType const x{};
  auto const sparse = attention_workspace(x, Policy{}, shape)->bytes;
  auto const dense = attention_workspace(x, Dense{}, shape)->bytes;
  shape.keys = 1 << 20;
  CHECK(attention_workspace(x, Policy{}, shape)->bytes == sparse);
  CHECK(attention_workspace(x, Dense{}, shape)->bytes == dense);
  for (auto const grow : {&Shape::rows, &Shape::top_k, &Shape::heads, &Shape::key_dim}) {
    Shape larger = shape;
    larger.*grow += 8;
    CHECK(attention_workspace(x, Policy{}, larger)->bytes >= sparse);
  }
}

TEMPLATE_LIST_TEST_CASE("RACE R043: twenty runs give the same bits of attention",
                        "[attention][fault]", test::Executors) {
  auto c = small_case(22, 130, 140);
  for (std::uint64_t row = 0; row < 6; ++row) {
    c.add_random_row(row, Random(row).permutation<position_t>(130));
  }
  auto const want = run_attention(TestType{}, c);
  int wrong = 0;
  for (int run = 0; run < 20; ++run) wrong += same_bits(want, run_attention(TestType{}, c)) ? 0 : 1;
  CHECK(wrong == 0);
}

TEMPLATE_LIST_TEST_CASE("INT32 R142: KV blocks more than 2^31 bytes apart", "[attention][fault]",
                        test::Executors) {
  using Case = AttentionCase<bf16, format::LatentE4m3>;
  using Policy = SparseMla<bf16, format::LatentE4m3>;
  constexpr index_t stride = (index_t{1} << 31) + 64;
  test::HugeMemory const memory(static_cast<std::size_t>(2 * stride + 4096));
  auto* const bytes = memory.template as<std::byte>();
  if (bytes == nullptr) SKIP("no 4 GiB of addresses here");
  Case c(2, 16, 6, {.requests = 1, .keys = 12, .lanes = 20, .page_size = 4, .spare_pages = 0},
         {16, 8});
  c.kv.write_random(0, 0, 12, 42);
  c.add_random_row(1, {0, 3, 5, 8, 11, 4});
  test::AttentionMemory<bf16, format::LatentE4m3, float> run(c);
  auto in = run.inputs();
  for (index_t block = 0; block < 3; ++block) {
    std::memcpy(bytes + block * stride, in.kv.data + block * in.kv.block_stride,
                static_cast<std::size_t>(in.kv.block_stride));
  }
  in.kv.data = bytes;
  in.kv.block_stride = stride;
  TestType const x{};
  test::Scratch workspace(*attention_workspace(x, Policy{}, c.shape()));
  REQUIRE(attention_run(x, Policy{}, in, run.batch(), {0, 1}, run.plan(), run.outputs(), c.shape(),
                        workspace.get())
              .ok());
  test::finish(x);
  CHECK(same_bits(run.take(), run_attention(x, c)));
}
