// SPDX-License-Identifier: Apache-2.0
//
// Attention of the host where its kernels have edges: panels and vectors of heads, tiles and splits
// of entries, the ways in which a call is cut into tasks.
#include <indexshare/attention/mla.hpp>
#include <indexshare/host/attention.hpp>

#include <catch2/catch_template_test_macros.hpp>
#include <catch2/catch_test_macros.hpp>

#include "attention_run.hpp"
#include "random.hpp"

#include <algorithm>
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
using Half = AttentionCase<bf16, format::Plain<bf16>>;

/// More workers than a row has splits, so that heads are divided, too. Ranges of three items go to
/// the workers in turn, backwards.
struct WideFor {
  static constexpr int concurrency() noexcept { return 40; }
  template <class F>
  void operator()(index_t count, F const& f) const {
    for (index_t i = (count + 2) / 3; i-- > 0;) {
      f(3 * i, std::min(3 * i + 3, count), static_cast<int>(i % concurrency()));
    }
  }
};
using Wide = HostExec<WideFor>;

/// The executor with the instruction set of another.
template <class X, class Y>
X like(Y const& other) {
  X x{};
  x.isa = other.isa;
  return x;
}

/// A random query for `count` of the tokens of request 0, in random order.
template <class Query, class Format>
void add_scattered(AttentionCase<Query, Format>& c, index_t count, std::uint64_t seed) {
  auto positions = Random(seed).permutation<position_t>(static_cast<std::size_t>(c.kv.keys()));
  positions.resize(static_cast<std::size_t>(count));
  c.add_positions(seed + 1, 0, static_cast<position_t>(count), positions);
}

template <class Query, class Format>
AttentionCase<Query, Format> scattered(index_t heads, index_t key_dim, index_t value_dim,
                                       std::vector<index_t> const& counts, Format format = {}) {
  index_t const most = *std::max_element(counts.begin(), counts.end());
  AttentionCase<Query, Format> c(heads, value_dim, most,
                                 {.requests = 1, .keys = most + 40, .lanes = key_dim}, format);
  c.kv.write_random(0, 0, most + 40, 5);
  for (index_t const count : counts) add_scattered(c, count, static_cast<std::uint64_t>(count));
  return c;
}

/// Runs the rows in passes, each with no more scratch than that many rows need.
template <class X, class Query, class Format>
auto run_passes(X const& x, AttentionCase<Query, Format> const& c, index_t rows) {
  SparseMla<Query, Format> const policy{};
  test::Scratch workspace(*attention_workspace(x, policy, c.shape().with_rows(rows)));
  test::AttentionMemory<Query, Format, float> memory(c);
  for (index_t first = 0; first < c.rows(); first += rows) {
    REQUIRE(attention_run(x, policy, memory.inputs(), memory.batch(),
                          {first, std::min(rows, c.rows() - first)}, memory.plan(),
                          memory.outputs(), c.shape(), workspace.get())
                .ok());
  }
  CHECK(workspace.intact());
  return memory.take();
}

/// Checks one way of cutting the call and demands the same bits of all others.
template <class X, class Query, class Format>
void check_all_ways(X const& x, AttentionCase<Query, Format> const& c, bool oracle = true) {
  auto const want = run_attention(x, c);
  if (oracle) check_attention(c, want);
  CHECK(same_bits(want, run_attention(like<test::Serial>(x), c)));
  CHECK(same_bits(want, run_attention(like<test::Backward>(x), c)));
  CHECK(same_bits(want, run_attention(like<Wide>(x), c)));
  CHECK(same_bits(want, run_attention(x, c, {.workspace_fill = std::byte{0}})));
  for (index_t const rows : {1, 2, 5}) {
    CHECK(same_bits(want, run_passes(x, c, rows)));
    CHECK(same_bits(want, run_passes(like<Wide>(x), c, rows)));
  }
}

constexpr auto tile = detail::attention_tile;
constexpr auto split = detail::AttentionSplits::least;

}  // namespace

TEMPLATE_LIST_TEST_CASE("host attention: heads and widths around panels and vectors", "[attention]",
                        test::IsaExecutors) {
  TestType const x{};
  std::vector<index_t> const counts{0, 1, tile - 1, tile, tile + 1, 2 * tile + 5};
  for (index_t const heads : {1, 5, 8, 16, 17, 64, 100, 128}) {
    INFO(heads << " heads");
    auto const bf = scattered<bf16, format::Plain<bf16>>(heads, 72, 64, counts);
    check_attention(bf, run_attention<bf16>(x, bf));
    auto const fp = scattered<fp16, format::Plain<fp16>>(heads, 20, 20, counts);
    check_attention(fp, run_attention<fp16>(x, fp));
    auto const plain = scattered<float, format::Plain<float>>(heads, 50, 33, counts);
    check_attention(plain, run_attention<float>(x, plain));
    auto const latent =
        scattered<bf16, format::LatentE4m3>(heads, 43, 37, counts, format::LatentE4m3{37, 16});
    check_attention(latent, run_attention<float>(x, latent));
  }
}

TEMPLATE_LIST_TEST_CASE("host attention: 512 + 64 lanes, counts around splits", "[attention]",
                        test::IsaExecutors) {
  TestType const x{};
  std::vector<index_t> const counts{split - 1, split, split + 1, 2048};
  auto const plain = scattered<bf16, format::Plain<bf16>>(18, 576, 512, counts);
  check_attention(plain, run_attention<bf16>(x, plain));
  auto const latent = scattered<bf16, format::LatentE4m3>(6, 576, 512, {2049});
  check_attention(latent, run_attention<bf16>(x, latent));
}

TEMPLATE_LIST_TEST_CASE("host attention: bf16 rows of any width, multiplied in pairs or not",
                        "[attention]", test::IsaExecutors) {
  TestType const x{};
  for (index_t const lanes : {1, 2, 7, 33, 287, 288, 289, 578}) {
    INFO(lanes << " lanes");
    auto const c = scattered<bf16, format::Plain<bf16>>(17, lanes, (lanes + 2) / 3, {tile + 1});
    check_attention(c, run_attention<float>(x, c));
  }
}

TEMPLATE_LIST_TEST_CASE("host attention: bits do not depend on how a call is cut", "[attention]",
                        test::IsaExecutors) {
  TestType const x{};
  // rows alone, rows enough for every worker, and one that outweighs the others
  check_all_ways(x, scattered<bf16, format::Plain<bf16>>(18, 40, 32, {2049}));
  check_all_ways(x, scattered<bf16, format::Plain<bf16>>(100, 40, 32, {300}));
  check_all_ways(x, scattered<bf16, format::Plain<bf16>>(
                        100, 24, 20, {700, 0, 3, 513, 512, 1024, 1025, 1, 96, 600, 511, 97, 650}));
  check_all_ways(x,
                 scattered<bf16, format::Plain<bf16>>(5, 24, 20, {1, 0, 2, 1, 1, 3, 1600, 1, 2}));
}

TEMPLATE_LIST_TEST_CASE("host attention: more entries than splits of the usual size hold",
                        "[attention]", test::IsaExecutors) {
  using Splits = detail::AttentionSplits;
  index_t const entries = Splits::most * Splits::least + 1;
  CHECK(Splits::size(entries - 1) == Splits::least);
  CHECK(Splits::size(entries) > Splits::least);
  AttentionCase<float, format::Plain<float>> c(
      2, 4, entries, {.requests = 1, .keys = 40, .lanes = 6, .page_size = 0});
  c.kv.write_random(0, 0, 40, 3);
  std::vector<position_t> row;
  for (index_t i = 0; i < entries; ++i) row.push_back(static_cast<position_t>(i % 40));
  c.add_random_row(1, row);
  check_all_ways(TestType{}, c);
}

TEST_CASE("host attention: splits cover the entries, are few and need no more than their bound",
          "[attention]") {
  using Splits = detail::AttentionSplits;
  index_t most = 0;
  for (index_t entries = 0; entries < 300000; entries += entries < 3000 ? 1 : 97) {
    index_t const count = Splits::count(entries);
    most = std::max(most, count);
    CHECK(count * Splits::size(entries) >= entries);
    CHECK((count - 1) * Splits::size(entries) < std::max<index_t>(entries, 1));
    CHECK(most <= Splits::at_most(entries));
  }
  CHECK(Splits::count(max_position) <= Splits::most);
}

TEMPLATE_LIST_TEST_CASE("host attention: dense rows are cut as sparse ones are", "[attention]",
                        test::IsaExecutors) {
  TestType const x{};
  Half c(7, 16, 1100, {.requests = 1, .keys = 1100, .lanes = 24});
  c.kv.write_random(0, 0, 1100, 26);
  for (position_t const length : {1100, 513, 1024}) {
    std::vector<position_t> all(static_cast<std::size_t>(length));
    for (position_t s = 0; s < length; ++s) all[static_cast<std::size_t>(s)] = s;
    c.add_positions(static_cast<std::uint64_t>(length), 0, length, all);
  }
  auto const sparse = run_attention(x, c);
  check_attention(c, sparse);
  CHECK(same_bits(sparse, run_attention<float, true>(x, c)));
  CHECK(same_bits(sparse, run_attention<float, true>(like<test::Serial>(x), c)));
  CHECK(same_bits(sparse, run_attention<float, true>(like<Wide>(x), c)));
}

TEMPLATE_LIST_TEST_CASE("host attention: splits without a key leave no trace", "[attention]",
                        test::IsaExecutors) {
  TestType const x{};
  for (index_t const empty : {0, 1, 2}) {
    auto c = scattered<float, format::Plain<float>>(18, 24, 20, {3 * split});
    auto& row = c.slots[0];
    std::fill_n(row.begin() + empty * split, split, position_t{-1});
    check_all_ways(x, c);
    auto lonely = c;  // one key in one split
    std::fill(lonely.slots[0].begin(), lonely.slots[0].end(),
              std::numeric_limits<position_t>::max());
    lonely.slots[0][static_cast<std::size_t>(empty * split + 300)] = 7;
    check_all_ways(x, lonely);
  }
  auto none = scattered<float, format::Plain<float>>(3, 8, 8, {2 * split});
  std::fill(none.slots[0].begin(), none.slots[0].end(), position_t{-1});
  check_all_ways(x, none);
}

TEMPLATE_LIST_TEST_CASE("host attention: sink and lse over splits", "[attention]",
                        test::IsaExecutors) {
  auto c = scattered<bf16, format::LatentE4m3>(20, 40, 32, {1300, 5, 0}, {32, 16});
  auto const plain = run_attention(TestType{}, c);
  for (index_t h = 0; h < 20; ++h) c.sink.push_back(static_cast<float>(h % 7) - 1);
  check_all_ways(TestType{}, c);
  CHECK(same_bits(plain.lse, run_attention(TestType{}, c).lse));
}

TEMPLATE_LIST_TEST_CASE("host attention: the largest logit in any split or tile", "[attention]",
                        test::IsaExecutors) {
  constexpr index_t count = 3 * split;
  for (index_t const at : {index_t{0}, tile, split - 1, split, 2 * split + tile, count - 1}) {
    for (float const size : {40.0f, 1e4f, 1e9f}) {
      Fp32 c(17, 1, count, {.requests = 1, .keys = count, .lanes = 2});
      std::vector<position_t> all(count);
      for (position_t s = 0; s < count; ++s) {
        all[static_cast<std::size_t>(s)] = s;
        c.kv.write(0, s, std::vector<float>{static_cast<float>(s % 50), s == at ? 2.0f : 1.0f});
      }
      c.add_positions(1, 0, count, all);
      for (std::size_t h = 0; h < 17; ++h) {
        c.q[2 * h] = 0;
        c.q[2 * h + 1] = size;
      }
      check_all_ways(TestType{}, c);
      auto const got = run_attention(TestType{}, c);
      CHECK(std::isfinite(got.lse[16]));
      if (size > 1000) CHECK(got.out[16] == static_cast<float>(at % 50));
    }
  }
}

TEMPLATE_LIST_TEST_CASE("host attention: logits of -inf weigh nothing", "[attention]",
                        test::IsaExecutors) {
  // rows of the first tile, of the second split and single ones; the oracle's doubles do not
  // overflow, so the same rows without a slot are the standard
  TestType const x{};
  constexpr index_t count = 3 * split;
  auto const build = [](bool mapped) {
    Fp32 c(17, 4, count, {.requests = 1, .keys = count, .lanes = 6});
    std::vector<position_t> row(count);
    for (position_t s = 0; s < count; ++s) {
      Random random(static_cast<std::uint64_t>(s) + 9);
      auto values = random.normals(6);
      bool const endless = s < tile || (s >= split && s < 2 * split);
      values[5] = endless ? -3e38f : 0.0f;
      c.kv.write(0, s, values);
      row[static_cast<std::size_t>(s)] = endless && !mapped ? -1 : s;
    }
    c.add_random_row(1, row);
    for (std::size_t h = 0; h < 17; ++h) c.q[h * 6 + 5] = 1e3f;
    return c;
  };
  auto const want = run_attention(x, build(false));
  auto const got = run_attention(x, build(true));
  check_all_ways(x, build(true), false);
  CHECK(want.out == got.out);
  CHECK(want.lse == got.lse);
  CHECK(std::all_of(got.lse.begin(), got.lse.end(), [](float v) { return std::isfinite(v); }));
}

TEMPLATE_LIST_TEST_CASE("host attention: a NaN that a row gathers is NaN in all its heads only",
                        "[attention]", test::IsaExecutors) {
  TestType const x{};
  constexpr index_t heads = 17;
  for (index_t const lane : {0, 19, 23}) {  // value, its last lane, rope
    auto c = scattered<float, format::Plain<float>>(heads, 24, 20, {1100, 1100, 1100});
    for (position_t const place : {0, 700, 1099}) {
      auto with = c;
      position_t const bad = c.slots[1][static_cast<std::size_t>(place)];
      auto values = std::vector<float>(c.kv.value(0, bad).begin(), c.kv.value(0, bad).end());
      values[static_cast<std::size_t>(lane)] = std::nanf("");
      with.kv.write(0, bad, values);
      for (std::size_t row : {std::size_t{0}, std::size_t{2}}) {
        std::replace(with.slots[row].begin(), with.slots[row].end(), bad, position_t{-1});
      }
      auto const got = run_attention(x, with);
      check_all_ways(x, with, false);
      bool right = true;
      for (std::size_t i = 0; i < got.out.size(); ++i) {
        right = right && std::isnan(got.out[i]) == (i / (heads * 20) == 1);
      }
      for (std::size_t i = 0; i < got.lse.size(); ++i) {
        right = right && std::isnan(got.lse[i]) == (i / heads == 1);
      }
      CHECK(right);
    }
  }
}

TEST_CASE("MEM R140: scratch of attention on the host is monotone and knows no keys",
          "[attention][fault]") {
  Random random(8);
  auto const upto = [&](std::size_t most) { return 1 + static_cast<index_t>(random.below(most)); };
  auto const check = [&](auto const& x) {
    for (int i = 0; i < 1000; ++i) {
      Shape shape;
      shape.rows = upto(300);
      shape.keys = upto(1 << 20);
      shape.top_k = upto(i % 2 == 0 ? 40000 : 4096);
      shape.heads = upto(130);
      shape.key_dim = upto(700);
      shape.value_dim = upto(static_cast<std::size_t>(shape.key_dim));
      auto const bytes = [&](Shape const& s, auto policy) {
        return attention_workspace(x, policy, s)->bytes;
      };
      SparseMla<bf16, format::LatentE4m3> const sparse{};
      DenseMla<bf16, format::LatentE4m3> const dense{};
      for (auto const grow :
           {&Shape::rows, &Shape::heads, &Shape::key_dim, &Shape::top_k, &Shape::keys}) {
        Shape larger = shape;
        larger.*grow += upto(3000);
        CHECK(bytes(larger, sparse) >= bytes(shape, sparse));
        CHECK(bytes(larger, dense) >= bytes(shape, dense));
        if (grow == &Shape::keys) CHECK(bytes(larger, dense) == bytes(shape, dense));
      }
    }
  };
  check(test::Serial{});
  check(test::Threads{});
  check(Wide{});
}

TEST_CASE("host attention: an absurd shape asks for more than anyone has", "[attention]") {
  Shape shape{};
  shape.rows = shape.keys = shape.top_k = max_position;
  shape.heads = shape.key_dim = shape.value_dim = max_width;
  auto const bytes = attention_workspace(Wide{}, SparseMla<bf16, format::LatentE4m3>{}, shape);
  CHECK(bytes->bytes >= std::size_t{1} << 40);
  CHECK(bytes->bytes <= max_workspace_bytes);
}

TEST_CASE("host attention: an instruction set that is not here is refused", "[attention]") {
  test::Serial x{};
  x.isa = static_cast<HostIsa>(99);
  auto const c = scattered<float, format::Plain<float>>(1, 4, 4, {3});
  SparseMla<float, format::Plain<float>> const policy{};
  CHECK(attention_workspace(x, policy, c.shape()).error().code == Errc::unsupported);
  test::AttentionMemory<float, format::Plain<float>, float> memory(c);
  CHECK(attention_check(x, policy, memory.inputs(), memory.outputs(), memory.batch(), c.shape())
            .code == Errc::unsupported);
}
