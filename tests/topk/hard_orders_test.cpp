// SPDX-License-Identifier: Apache-2.0
//
// Rows that are hard for a list of candidates with a running threshold, on every instruction set.
#include <indexshare/host/topk.hpp>

#include <catch2/catch_template_test_macros.hpp>
#include <catch2/catch_test_macros.hpp>

#include "random.hpp"
#include "topk_run.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

using test::check_rows;
using test::check_topk;
using test::index_t;
using test::position_t;
using test::Random;
using test::TopKCase;

namespace {

constexpr float infinity = std::numeric_limits<float>::infinity();
constexpr float not_a_number = std::numeric_limits<float>::quiet_NaN();

float from_bits(std::uint32_t bits) { return std::bit_cast<float>(bits); }

/// The row of scores f(position), drawn in order of positions.
template <class F>
std::vector<float> row_of(index_t n, F f) {
  std::vector<float> scores;
  for (index_t s = 0; s < n; ++s) scores.push_back(f(s));
  return scores;
}

template <class X>
void check_row(index_t k, std::vector<float> scores) {
  check_topk(X{}, TopKCase::one_row(k, std::move(scores)));
}

/// Whether the host's top-k samples position s of a row.
std::vector<bool> sampled_places(index_t n) {
  using namespace indexshare::detail;
  std::vector<bool> sampled(static_cast<std::size_t>(n), false);
  index_t const samples = topk_samples(n);
  for (index_t i = 0; i < samples; ++i) {
    sampled[static_cast<std::size_t>(topk_sample_place(i, n / samples))] = true;
  }
  REQUIRE(std::count(sampled.begin(), sampled.end(), true) == samples);
  return sampled;
}

}  // namespace

TEMPLATE_LIST_TEST_CASE("top-k: rows that fit into a list, and longer ones", "[topk]",
                        test::IsaExecutors) {
  Random random(1);
  for (index_t const k : {1, 9, 1023, 1024, 1025, 2048}) {
    index_t const list = std::max<index_t>(4 * k, 4096);
    for (index_t const n : {k + 1, list - 1, list, list + 1, list + 31, list + 32, list + 33,
                            2 * list - 1, 2 * list + 1}) {
      check_row<TestType>(k, random.normals(static_cast<std::size_t>(n)));
    }
  }
  check_row<TestType>(4096, random.normals(40000));
}

TEMPLATE_LIST_TEST_CASE("top-k: orders that a running threshold dislikes", "[topk]",
                        test::IsaExecutors) {
  constexpr index_t n = 20011;
  Random random(2);
  auto const upto = [&](std::size_t most) { return static_cast<float>(random.below(most)); };
  for (index_t const k : {1, 700, 4000}) {
    check_row<TestType>(k, row_of(n, [](index_t s) { return static_cast<float>(s); }));
    check_row<TestType>(k, row_of(n, [](index_t s) { return static_cast<float>(-s); }));
    check_row<TestType>(k, row_of(n, [](index_t s) {  // one code more at each position
                          return from_bits(0x3F800000u + static_cast<std::uint32_t>(s));
                        }));
    check_row<TestType>(k, row_of(n, [](index_t s) {
                          return from_bits(0xBF800000u + static_cast<std::uint32_t>(s));
                        }));
    check_row<TestType>(
        k, row_of(n, [&](index_t s) { return random.normal() + static_cast<float>(s) * 1e-4f; }));
    check_row<TestType>(k, row_of(n, [&](index_t) { return upto(17); }));
    check_row<TestType>(
        k, row_of(n, [&](index_t) {  // neighbours
          return from_bits(0xC0000000u + static_cast<std::uint32_t>(random.below(2)));
        }));
    check_row<TestType>(k, row_of(n, [&](index_t) {
                          return from_bits(static_cast<std::uint32_t>(random.below(1024)));
                        }));
  }
}

TEMPLATE_LIST_TEST_CASE("top-k: plateaus longer than a list", "[topk]", test::IsaExecutors) {
  constexpr index_t n = 30000;
  Random random(3);
  for (index_t const k : {1, 900, 4096}) {
    for (float const plateau : {0.0f, -0.0f, -1.5f, 1e-42f, infinity, -infinity, not_a_number}) {
      check_row<TestType>(k, std::vector<float>(n, plateau));
      // some better ones, fewer than are wanted, first, last and in between
      for (index_t const few : {index_t{1}, k / 2, k - 1}) {
        auto scores = row_of(n, [&](index_t s) { return s < few ? 2.0f : plateau; });
        check_row<TestType>(k, scores);
        std::reverse(scores.begin(), scores.end());
        check_row<TestType>(k, scores);
        random.shuffle(scores);
        check_row<TestType>(k, scores);
      }
    }
    check_row<TestType>(k, row_of(n, [&](index_t s) {  // the cut lies among zeros of both signs
                          return s % 40 == 0 ? 1.0f : (random.below(2) == 0 ? 0.0f : -0.0f);
                        }));
    check_row<TestType>(
        k, row_of(n, [&](index_t) { return random.below(2) == 0 ? -infinity : random.normal(); }));
  }
}

TEMPLATE_LIST_TEST_CASE("top-k: NaN here and there, and nearly everywhere", "[topk]",
                        test::IsaExecutors) {
  constexpr index_t n = 20000;
  Random random(4);
  for (index_t const k : {1, 500, 3000}) {
    for (index_t const numbers : {index_t{0}, index_t{1}, k - 1, k, k + 1, n / 2, n - 7}) {
      auto scores =
          row_of(n, [&](index_t s) { return s < numbers ? random.normal() : not_a_number; });
      check_row<TestType>(k, scores);
      std::reverse(scores.begin(), scores.end());
      check_row<TestType>(k, scores);
      random.shuffle(scores);
      check_row<TestType>(k, scores);
    }
  }
}

TEMPLATE_LIST_TEST_CASE("top-k: a sample that misleads", "[topk]", test::IsaExecutors) {
  for (index_t const n : {17000, 140000}) {
    auto const sampled = sampled_places(n);
    Random random(5);
    for (index_t const k : {40, 4000}) {
      for (float const seen : {5.0f, -5.0f, not_a_number, infinity, -infinity}) {
        auto const hides = [&](auto const& hidden) {
          check_row<TestType>(k, row_of(n, [&](index_t s) {
                                return sampled[static_cast<std::size_t>(s)] ? seen : hidden(s);
                              }));
        };
        hides([&](index_t) { return random.normal(); });
        hides([](index_t s) { return static_cast<float>(s) * 1e-5f; });
        hides([](index_t) { return 0.0f; });
      }
    }
  }
}

TEMPLATE_LIST_TEST_CASE("top-k: long rows of different lengths, in strides", "[topk]",
                        test::IsaExecutors) {
  for (index_t const k : {33, 1500}) {
    TopKCase c(k, 9001);
    Random random(6);
    for (index_t const length : {index_t{9001}, k, k + 1, index_t{5}, index_t{8000}, index_t{0}}) {
      c.add(random.normals(static_cast<std::size_t>(length)));
    }
    check_topk(TestType{}, c);
    check_topk(TestType{}, c, {.score_pad = 3, .index_pad = 5, .count_step = 2});
    check_topk<indexshare::bf16>(TestType{}, c, {.score_pad = 1});
    check_topk<indexshare::fp16>(TestType{}, c, {.score_pad = 1});
    check_topk<indexshare::e4m3>(TestType{}, c, {.score_pad = 1});
  }
}

#if !defined(INDEXSHARE_TEST_CUDA)

namespace engine {

/// Sign, six bits of exponent, nine of mantissa: a type that the library does not know.
struct half_ish {
  std::uint16_t bits;
};
constexpr float to_float(half_ish value) noexcept {
  std::uint32_t const sign = static_cast<std::uint32_t>(value.bits & 0x8000u) << 16;
  return std::bit_cast<float>(sign | (value.bits & 0x7FFFu) << 14) * 0x1p+95f;
}

}  // namespace engine

template <>
constexpr engine::half_ish indexshare::from_float<engine::half_ish>(float value) noexcept {
  auto const bits = std::bit_cast<std::uint32_t>(value * 0x1p-95f);
  return {static_cast<std::uint16_t>((bits >> 16 & 0x8000u) | (bits >> 14 & 0x7FFFu))};
}

TEMPLATE_LIST_TEST_CASE("top-k: scores of an engine's own type", "[topk]", test::IsaExecutors) {
  Random random(7);
  for (index_t const k : {3, 1100}) {
    for (index_t const n : {1200, 10000}) {
      check_topk<engine::half_ish>(
          TestType{}, TopKCase::one_row(k, random.normals(static_cast<std::size_t>(n))));
    }
  }
}

#if defined(__x86_64__)

namespace {

/// Denormals are treated as zeros and results flushed to zero, as engines that call us may have it.
class FlushedDenormals {
 public:
  FlushedDenormals() : before_(__builtin_ia32_stmxcsr()) {
    __builtin_ia32_ldmxcsr(before_ | 0x8040u);
  }
  FlushedDenormals(FlushedDenormals const&) = delete;
  FlushedDenormals& operator=(FlushedDenormals const&) = delete;
  ~FlushedDenormals() { __builtin_ia32_ldmxcsr(before_); }

 private:
  unsigned before_;
};

}  // namespace

TEMPLATE_LIST_TEST_CASE("top-k: denormals keep their order where arithmetic flushes them", "[topk]",
                        test::IsaExecutors) {
  Random random(8);
  auto const denormal = [&] {
    auto const bits = static_cast<std::uint32_t>(random.below(0x7FFFFF));
    return from_bits(bits | (random.below(2) == 0 ? 0x80000000u : 0u));
  };
  for (index_t const k : {30, 2500}) {
    std::vector<std::vector<float>> rows;
    rows.push_back(row_of(3000, [&](index_t) { return denormal(); }));
    rows.push_back(row_of(20000, [&](index_t) { return denormal(); }));
    rows.push_back(row_of(20000, [](index_t s) {
      return from_bits(static_cast<std::uint32_t>(s));  // ascending
    }));
    rows.push_back(row_of(20000, [&](index_t) {
      return random.below(8) == 0 ? random.normal() : (random.below(2) == 0 ? 0.0f : denormal());
    }));
    for (auto const& row : rows) {
      auto const c = TopKCase::one_row(k, row);
      auto const want = test::expected_topk(c);
      FlushedDenormals const flushed;
      check_rows(want, run_topk(TestType{}, c));
    }
  }
}

#endif

TEST_CASE("top-k: scratch grows with each capacity and not with the rows", "[topk]") {
  auto const bytes = [](index_t rows, index_t keys, index_t k) {
    return topk_workspace(test::Threads{}, indexshare::RadixTopK{},
                          {.rows = rows, .keys = keys, .top_k = k})
        .value()
        .bytes;
  };
  constexpr index_t most = indexshare::max_position;  // more is refused
  index_t const extents[] = {0, 1, 2, 100, 1024, 2048, 4095, 4096, 4097, 100000, 1 << 20, most};
  std::size_t by_keys = 0;
  for (index_t const keys : extents) {
    std::size_t by_k = 0;
    for (index_t const k : extents) {
      CAPTURE(keys, k);
      CHECK(bytes(1, keys, k) >= by_k);
      by_k = bytes(1, keys, k);
    }
    CHECK(by_k >= by_keys);
    by_keys = by_k;
  }
  CHECK(bytes(4096, 1 << 20, 2048) == bytes(1, 1 << 20, 2048));
  CHECK(bytes(1, 1 << 20, 2048) < std::size_t{3} * 65 * 1024);
}

TEST_CASE("top-k: too little scratch is refused with what is needed, outputs untouched",
          "[topk][fault]") {
  using namespace indexshare;
  constexpr index_t keys = 6000, k = 500;
  test::Threads const x;
  test::Guarded<float> const scores(keys, std::byte{0});
  auto const lengths = test::guarded<position_t>({keys});
  test::Guarded<position_t> indices(keys, test::unwritten);
  test::Guarded<position_t> counts(1, test::unwritten);
  auto const need = topk_workspace(x, RadixTopK{}, {.rows = 1, .keys = keys, .top_k = k}).value();
  test::Scratch scratch(need);
  auto const call = [&](index_t width, Workspace ws, auto const& exec) {
    return topk_select(
        exec, RadixTopK{}, make_scores<Space::host>(scores.data(), Rows{1}, Keys{keys}),
        make_lengths<Space::host>(lengths.data(), Rows{1}),
        make_selection<Space::host>(indices.data(), counts.data(), Rows{1}, TopK{width}), ws);
  };
  auto const refuses = [&](Status const& status, Errc code) {
    INFO(status.what);
    CHECK(status.code == code);
    CHECK(counts[0] == test::unwritten_value<position_t>());
    CHECK(indices[0] == test::unwritten_value<position_t>());
  };
  for (std::size_t const bytes : {std::size_t{0}, need.bytes - 1}) {
    Status const status = call(k, {scratch.get().data, bytes}, x);
    refuses(status, Errc::workspace_too_small);
    CHECK(status.expected == static_cast<std::int64_t>(need.bytes));
    CHECK(status.got == static_cast<std::int64_t>(bytes));
  }
  refuses(call(4 * k, scratch.get(), x), Errc::workspace_too_small);  // sized for k
  refuses(call(k, {static_cast<std::byte*>(scratch.get().data) + 8, need.bytes}, x),
          Errc::bad_value);
  refuses(call(k, {nullptr, need.bytes}, x), Errc::missing_input);

  HostExec<test::ThreadFor> unknown;
  unknown.isa = static_cast<HostIsa>(0x7F);
  refuses(call(k, scratch.get(), unknown), Errc::unsupported);
  CHECK(topk_workspace(unknown, RadixTopK{}, {.rows = 1, .keys = keys, .top_k = k}).error().code ==
        Errc::unsupported);

  CHECK(call(k, scratch.get(), x).ok());
  CHECK(call(keys, {}, x).ok());  // selects everything: no scratch
}

#endif
