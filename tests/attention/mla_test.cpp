// SPDX-License-Identifier: Apache-2.0
#include <indexshare/attention/mla.hpp>
#include <indexshare/host/attention.hpp>
#include <indexshare/reference.hpp>

#include <catch2/catch_template_test_macros.hpp>
#include <catch2/catch_test_macros.hpp>

#include "attention_run.hpp"
#include "random.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
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

template <class Query, class Format>
void write_all(AttentionCase<Query, Format>& c, index_t keys, std::uint64_t seed) {
  for (index_t r = 0; r < c.kv.requests(); ++r) c.kv.write_random(r, 0, keys, seed);
}

/// Rows of request 0 and 1 with scattered positions, 0 to 150 of them.
template <class Query, class Format>
AttentionCase<Query, Format> scattered(index_t heads, index_t key_dim, index_t value_dim,
                                       Format format = {}) {
  AttentionCase<Query, Format> c(
      heads, value_dim, 160,
      {.requests = 2, .keys = 200, .lanes = key_dim, .page_size = 16, .seed = 6}, format);
  write_all(c, 200, 21);
  Random random(22);
  for (index_t const count : {150, 1, 0, 64, 65, 63, 2}) {
    auto positions = random.permutation<position_t>(200);
    positions.resize(static_cast<std::size_t>(count));
    std::sort(positions.begin(), positions.end());
    c.add_positions(random.bits(), count % 2 == 0 ? 0 : 1, 200, positions);
  }
  return c;
}

template <class Out, class X, class Query, class Format>
void check_both(X const& x, AttentionCase<Query, Format> const& c) {
  check_attention(c, run_attention<Out>(x, c));
  check_attention<true>(c, run_attention<Out, true>(x, c));
}

}  // namespace

TEMPLATE_LIST_TEST_CASE("attention: every element type of queries, KV and output", "[attention]",
                        test::Executors) {
  TestType const x{};
  check_both<float>(x, scattered<float, format::Plain<float>>(3, 40, 32));
  check_both<bf16>(x, scattered<bf16, format::Plain<bf16>>(3, 40, 32));
  check_both<fp16>(x, scattered<fp16, format::Plain<fp16>>(3, 40, 32));
  check_both<float>(x, scattered<bf16, format::Plain<float>>(3, 40, 32));
  check_both<fp16>(x, scattered<float, format::Plain<bf16>>(3, 40, 32));
  check_both<bf16>(x, scattered<bf16, format::LatentE4m3>(3, 40, 32, {32, 16}));
  check_both<float>(x, scattered<fp16, format::LatentE4m3>(3, 40, 32, {32, 16}));
}

TEMPLATE_LIST_TEST_CASE("attention: the shape of GLM and DeepSeek, 512 + 64 lanes", "[attention]",
                        test::Executors) {
  AttentionCase<bf16, format::LatentE4m3> c(
      16, 512, 80, {.requests = 1, .keys = 96, .lanes = 576, .page_size = 64});
  c.scale = 0.0721687824f;  // 192^-0.5, not 576^-0.5
  c.kv.write_random(0, 0, 90, 3);
  c.add_positions(1, 0, 90, Random(1).permutation<position_t>(80));
  check_both<bf16>(TestType{}, c);
}

TEMPLATE_LIST_TEST_CASE("attention: dimensions that no vector width divides", "[attention]",
                        test::Executors) {
  struct Dims {
    index_t key, value;
  };
  for (auto const [key, value] : {Dims{1, 1}, Dims{5, 5}, Dims{7, 3}, Dims{17, 16}, Dims{33, 20},
                                  Dims{48, 48}, Dims{65, 1}}) {
    INFO("key_dim " << key << ", value_dim " << value);
    check_both<float>(TestType{}, scattered<float, format::Plain<float>>(2, key, value));
  }
}

TEMPLATE_LIST_TEST_CASE("attention: latent rows of odd sizes, without rope too", "[attention]",
                        test::Executors) {
  check_both<float>(TestType{},
                    scattered<bf16, format::LatentE4m3>(2, 32, 32, {32, 16}));  // rope 0
  check_both<float>(TestType{}, scattered<bf16, format::LatentE4m3>(2, 23, 20, {20, 8}));
  check_both<float>(TestType{}, scattered<bf16, format::LatentE4m3>(2, 40, 20, {32, 128}));
}

TEMPLATE_LIST_TEST_CASE("attention: every kind of cache gives the same bits", "[attention]",
                        test::Executors) {
  auto const build = [](index_t page_size, std::uint64_t seed) {
    AttentionCase<bf16, format::Plain<bf16>> c(
        5, 24, 100,
        {.requests = 3, .keys = 128, .lanes = 32, .page_size = page_size, .seed = seed});
    write_all(c, 120, 9);
    Random random(10);
    for (position_t request = 0; request < 3; ++request) {
      auto positions = random.permutation<position_t>(120);
      positions.resize(90);
      c.add_positions(static_cast<std::uint64_t>(request), request, 117 + request, positions);
    }
    return c;
  };
  auto const want = run_attention(TestType{}, build(0, 1));
  auto const want_dense = run_attention<float, true>(TestType{}, build(0, 1));
  for (index_t const page_size : {1, 4, 16, 64}) {
    CHECK(same_bits(want, run_attention(TestType{}, build(page_size, 7))));
    CHECK(same_bits(want_dense, run_attention<float, true>(TestType{}, build(page_size, 7))));
  }
}

TEMPLATE_LIST_TEST_CASE("attention: strided queries, plans, outputs and lse", "[attention]",
                        test::Executors) {
  auto const c = scattered<bf16, format::Plain<bf16>>(5, 40, 30);
  auto const want = run_attention<bf16>(TestType{}, c);
  check_attention(c, want);
  for (test::AttentionLayout const layout :
       {test::AttentionLayout{.query_pad = 3}, test::AttentionLayout{.out_pad = 7},
        test::AttentionLayout{.slot_pad = 5}, test::AttentionLayout{.lse_pad = 2},
        test::AttentionLayout{.head_major = true},
        test::AttentionLayout{.query_pad = 1, .out_pad = 1, .slot_pad = 1, .lse_pad = 1}}) {
    CHECK(same_bits(want, run_attention<bf16>(TestType{}, c, layout)));
  }
}

TEMPLATE_LIST_TEST_CASE("attention: a row's bits do not depend on its batch", "[attention]",
                        test::Executors) {
  auto const c = scattered<bf16, format::Plain<bf16>>(3, 24, 16);
  auto const together = run_attention<bf16>(TestType{}, c);
  auto const per_row = static_cast<std::size_t>(c.heads * c.value_dim);
  auto alone = c;
  for (index_t row = c.rows(); row-- > 0;) {  // also in another order
    auto const r = static_cast<std::size_t>(row);
    auto const n = static_cast<std::size_t>(c.heads * c.key_dim());
    alone.q.assign(c.q.begin() + static_cast<std::ptrdiff_t>(r * n),
                   c.q.begin() + static_cast<std::ptrdiff_t>((r + 1) * n));
    alone.slots = {c.slots[r]};
    alone.counts = {c.counts[r]};
    alone.lengths = {c.lengths[r]};
    alone.requests = {c.requests[r]};
    auto const one = run_attention<bf16>(TestType{}, alone);
    CHECK(same_bits(
        one.out,
        std::vector<bf16>(together.out.begin() + static_cast<std::ptrdiff_t>(r * per_row),
                          together.out.begin() + static_cast<std::ptrdiff_t>((r + 1) * per_row))));
  }
}

#if !defined(INDEXSHARE_TEST_CUDA)
TEST_CASE("attention: host bits do not depend on threads or their order", "[attention]") {
  auto const c = scattered<bf16, format::Plain<bf16>>(22, 40, 32);
  auto const want = run_attention(test::Serial{}, c);
  CHECK(same_bits(want, run_attention(test::Threads{}, c)));
  CHECK(same_bits(want, run_attention(test::Backward{}, c)));
  auto const dense = run_attention<float, true>(test::Serial{}, c);
  CHECK(same_bits(dense, run_attention<float, true>(test::Threads{}, c)));
  CHECK(same_bits(dense, run_attention<float, true>(test::Backward{}, c)));
}
#endif

TEMPLATE_LIST_TEST_CASE("attention: the workspace's contents mean nothing", "[attention]",
                        test::Executors) {
  auto const c = scattered<float, format::Plain<float>>(3, 20, 20);
  auto const want = run_attention(TestType{}, c);  // NaN
  for (std::byte const fill : {std::byte{0}, std::byte{0x7F}, std::byte{0x01}}) {
    CHECK(same_bits(want, run_attention(TestType{}, c, {.workspace_fill = fill})));
  }
}

TEMPLATE_LIST_TEST_CASE("attention: one workspace serves calls of any number of rows",
                        "[attention]", test::Executors) {
  using Policy = SparseMla<float, format::Plain<float>>;
  auto const c = scattered<float, format::Plain<float>>(18, 20, 20);
  TestType const x{};
  test::Scratch workspace(*attention_workspace(x, Policy{}, c.shape()));
  auto const want = run_attention(x, c);
  for (int repeat = 0; repeat < 2; ++repeat) {
    for (index_t const pass : {1, 3, 7}) {
      test::AttentionMemory<float, format::Plain<float>, float> memory(c);
      for (index_t first = 0; first < c.rows(); first += pass) {
        REQUIRE(attention_run(x, Policy{}, memory.inputs(), memory.batch(),
                              {first, std::min(pass, c.rows() - first)}, memory.plan(),
                              memory.outputs(), c.shape(), workspace.get())
                    .ok());
      }
      test::finish(x);
      CHECK(same_bits(want, memory.take()));
    }
  }
}

TEMPLATE_LIST_TEST_CASE("attention: no rows is a legal call", "[attention]", test::Executors) {
  Fp32 const c(2, 4, 3, {.requests = 1, .keys = 8, .lanes = 4});
  CHECK(run_attention(TestType{}, c).out.empty());
  CHECK(run_attention<float, true>(TestType{}, c).lse.empty());
}

TEMPLATE_LIST_TEST_CASE("attention: fits the concept on every executor", "[attention]",
                        test::Executors) {
  using Latent = format::LatentE4m3;
  static_assert(AttentionPolicy<SparseMla<float, format::Plain<float>>, TestType>);
  static_assert(AttentionPolicy<SparseMla<bf16, Latent, bf16>, TestType>);
  static_assert(AttentionPolicy<DenseMla<fp16, format::Plain<fp16>, fp16>, TestType>);
  SUCCEED();
}

TEMPLATE_LIST_TEST_CASE("attention: a pass writes its rows only", "[attention]", test::Executors) {
  using Policy = SparseMla<float, format::Plain<float>>;
  auto const c = scattered<float, format::Plain<float>>(2, 20, 20);
  TestType const x{};
  test::Scratch workspace(*attention_workspace(x, Policy{}, c.shape()));
  test::AttentionMemory<float, format::Plain<float>, float> memory(c);
  REQUIRE(attention_run(x, Policy{}, memory.inputs(), memory.batch(), {0, 0}, memory.plan(),
                        memory.outputs(), c.shape(), workspace.get())
              .ok());
  test::finish(x);
  CHECK(memory.untouched());
  REQUIRE(attention_run(x, Policy{}, memory.inputs(), memory.batch(), {2, 3}, memory.plan(),
                        memory.outputs(), c.shape(), workspace.get())
              .ok());
  test::finish(x);
  auto const got = memory.take();
  auto const want = run_attention(x, c);
  std::uint32_t constexpr blank = 0xA5A5A5A5u;
  index_t wrong = 0;
  for (std::size_t i = 0; i < got.out.size(); ++i) {
    bool const inside = i >= 2 * 40 && i < 5 * 40;
    wrong += std::bit_cast<std::uint32_t>(got.out[i]) ==
                     (inside ? std::bit_cast<std::uint32_t>(want.out[i]) : blank)
                 ? 0
                 : 1;
  }
  for (std::size_t i = 0; i < got.lse.size(); ++i) {
    bool const inside = i >= 2 * 2 && i < 5 * 2;
    wrong += std::bit_cast<std::uint32_t>(got.lse[i]) ==
                     (inside ? std::bit_cast<std::uint32_t>(want.lse[i]) : blank)
                 ? 0
                 : 1;
  }
  CHECK(wrong == 0);
}

// ---- sink and lse

TEMPLATE_LIST_TEST_CASE("attention: lse is the natural log, without the sink", "[attention]",
                        test::Executors) {
  auto c = scattered<float, format::Plain<float>>(3, 24, 16);
  auto const plain = run_attention(TestType{}, c);
  auto const no_lse = run_attention(TestType{}, c, {.lse = false});
  CHECK(no_lse.lse.empty());
  CHECK(same_bits(plain.out, no_lse.out));
  c.sink = {0.5f, -3.0f, 7.0f};
  auto const sunk = run_attention(TestType{}, c);
  check_attention(c, sunk);
  CHECK(same_bits(plain.lse, sunk.lse));
  CHECK_FALSE(same_bits(plain.out, sunk.out));
  auto const sunk_no_lse = run_attention(TestType{}, c, {.lse = false});
  CHECK(same_bits(sunk.out, sunk_no_lse.out));
  check_attention<true>(c, run_attention<float, true>(TestType{}, c));
}

TEMPLATE_LIST_TEST_CASE("attention: the sink is applied once, whatever the number of keys",
                        "[attention]", test::Executors) {
  // 150 equal keys of logit 0: out = v * 150 / (150 + exp(sink))
  Fp32 c(2, 2, 160, {.requests = 1, .keys = 160, .lanes = 2, .page_size = 16});
  for (index_t s = 0; s < 160; ++s) c.kv.write(0, s, std::vector<float>{3, -5});
  c.sink = {std::log(150.0f), std::log(50.0f)};
  std::vector<position_t> positions(150);
  for (position_t s = 0; s < 150; ++s) positions[static_cast<std::size_t>(s)] = s;
  c.add_positions(1, 0, 150, positions);
  std::fill(c.q.begin(), c.q.end(), 0.0f);
  auto const got = run_attention(TestType{}, c);
  CHECK(std::abs(got.out[0] - 1.5f) < 1e-5f);
  CHECK(std::abs(got.out[1] + 2.5f) < 1e-5f);
  CHECK(std::abs(got.out[2] - 2.25f) < 1e-5f);
  CHECK(std::abs(got.lse[0] - std::log(150.0f)) < 1e-5f);
}

TEMPLATE_LIST_TEST_CASE("attention: extreme sinks and rows without keys", "[attention]",
                        test::Executors) {
  auto c = scattered<float, format::Plain<float>>(4, 24, 16);
  auto const plain = run_attention(TestType{}, c);
  c.sink = {-infinity, infinity, -1e30f, 1e30f};
  auto const got = run_attention(TestType{}, c);
  CHECK(same_bits(plain.lse, got.lse));
  index_t wrong = 0;
  for (std::size_t i = 0; i < got.out.size(); ++i) {
    bool const swallowed = i / 16 % 2 == 1;
    wrong += got.out[i] == (swallowed ? 0.0f : plain.out[i]) ? 0 : 1;
  }
  CHECK(wrong == 0);
  for (std::size_t i = 0; i < 64; ++i) CHECK(got.out[2 * 64 + i] == 0.0f);  // the row without keys
}

TEMPLATE_LIST_TEST_CASE("attention: large logits do not overflow", "[attention]", test::Executors) {
  for (float const size : {1e4f, 1e9f, -1e9f}) {
    Fp32 c(1, 1, 130, {.requests = 1, .keys = 130, .lanes = 2});
    for (index_t s = 0; s < 130; ++s) {
      c.kv.write(0, s, std::vector<float>{static_cast<float>(s), s == 70 ? 2.0f : 1.0f});
    }
    std::vector<position_t> all(130);
    for (position_t s = 0; s < 130; ++s) all[static_cast<std::size_t>(s)] = s;
    c.add_positions(1, 0, 130, all);
    c.q = {0, size};
    auto const got = run_attention(TestType{}, c);
    check_attention(c, got);
    CHECK(std::isfinite(got.lse[0]));
    if (size > 0) CHECK(got.out[0] == 70.0f);
  }
}

// ---- sparse and dense

TEMPLATE_LIST_TEST_CASE("DIAG R026, R148: with k >= len sparse equals dense in every format",
                        "[attention][fault]", test::Executors) {
  auto const check = [](auto c) {
    write_all(c, 150, 26);
    for (position_t const length : {0, 1, 64, 65, 149, 150}) {
      std::vector<position_t> all(static_cast<std::size_t>(length));
      for (position_t s = 0; s < length; ++s) all[static_cast<std::size_t>(s)] = s;
      c.add_positions(static_cast<std::uint64_t>(length), length % 2, length, all);
    }
    auto const sparse = run_attention(TestType{}, c);
    CHECK(same_bits(sparse, run_attention<float, true>(TestType{}, c)));
    check_attention<true>(c, sparse);
  };
  test::CacheShape const shape{.requests = 2, .keys = 150, .lanes = 40, .page_size = 16};
  check(AttentionCase<float, format::Plain<float>>(17, 32, 150, shape));
  check(AttentionCase<bf16, format::Plain<bf16>>(2, 32, 150, shape));
  check(AttentionCase<fp16, format::Plain<fp16>>(2, 32, 150, shape));
  check(AttentionCase<bf16, format::LatentE4m3>(2, 32, 150, shape, {32, 16}));
}

TEMPLATE_LIST_TEST_CASE("attention: dense lengths are clamped to the capacity", "[attention]",
                        test::Executors) {
  Fp32 c(2, 8, 4, {.requests = 1, .keys = 20, .lanes = 8, .page_size = 4});
  write_all(c, 20, 2);
  for (position_t const length : {20, 21, std::numeric_limits<position_t>::max(), 0, -1,
                                  std::numeric_limits<position_t>::min()}) {
    c.add_row(Random(1).normals(16), {}, 0, length);
  }
  auto const got = run_attention<float, true>(TestType{}, c);
  check_attention<true>(c, got);
  for (std::size_t i = 0; i < 16; ++i) {
    CHECK(got.out[16 + i] == got.out[i]);
    CHECK(got.out[32 + i] == got.out[i]);
    CHECK((got.out[48 + i] == 0 && got.out[64 + i] == 0 && got.out[80 + i] == 0));
  }
}
