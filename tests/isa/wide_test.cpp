// SPDX-License-Identifier: Apache-2.0
//
// Kernels called as they are, among them the 16-lane body on AVX2: the code of a processor with
// AVX-512, but for its instructions, where there is none.
#include <indexshare/host/simd/foreach.hpp>

#include <catch2/catch_test_macros.hpp>

#include "memory.hpp"
#include "oracle.hpp"
#include "random.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#if defined(__x86_64__)
#pragma GCC diagnostic ignored "-Wpsabi"  // to the end of the file, where functions are emitted
namespace indexshare {
inline namespace v0 {
namespace detail {
#define INDEXSHARE_ISA avx2_wide
#define INDEXSHARE_ISA_LANES 16
#define INDEXSHARE_ISA_REGISTERS 16
#define INDEXSHARE_ISA_TARGET __attribute__((target("avx2,fma,f16c,bmi,bmi2")))
#include <indexshare/host/simd/kernels.inl>
#undef INDEXSHARE_ISA
#undef INDEXSHARE_ISA_LANES
#undef INDEXSHARE_ISA_REGISTERS
#undef INDEXSHARE_ISA_TARGET
}  // namespace detail
}  // namespace v0
}  // namespace indexshare
#endif

namespace {

using namespace indexshare;
using namespace indexshare::detail;

template <class Table>
struct NamedTable {
  char const* name;
  Table const* kernels;
};

/// A stage's kernels for everything that runs here.
template <class Table>
std::vector<NamedTable<Table>> tables() {
  std::vector<NamedTable<Table>> all{{"portable", &kernels<Table>(HostIsa::portable)}};
#if defined(__x86_64__)
  if (runs_here(HostIsa::avx2)) {
    all.push_back({"avx2", &kernels<Table>(HostIsa::avx2)});
    all.push_back({"avx2_wide", &avx2_wide::table<Table>});
  }
  if (runs_here(HostIsa::avx512)) all.push_back({"avx512", &kernels<Table>(HostIsa::avx512)});
#endif
  return all;
}

// ---- lists of candidates

constexpr float infinity = std::numeric_limits<float>::infinity();
constexpr float not_a_number = std::numeric_limits<float>::quiet_NaN();

/// A list of the least capacity, or of the given one, full of NaN.
class List {
 public:
  explicit List(index_t wanted, index_t capacity = 0) : memory_(size(wanted, capacity)) {
    WorkspaceCarver carver(memory_.get());
    list = carve_candidates(carver, wanted, capacity);
  }
  Candidates list;
  bool intact() const { return memory_.intact(); }
  std::vector<position_t> positions() const {
    return {list.positions, list.positions + list.count};
  }

 private:
  static WorkspaceSize size(index_t wanted, index_t capacity) {
    WorkspaceCarver carver;
    carve_candidates(carver, wanted, capacity);
    return carver.size();
  }
  test::Scratch memory_;
};

std::vector<std::vector<float>> candidate_rows(index_t n) {
  test::Random random(11);
  std::vector<std::vector<float>> rows;
  auto const add = [&](auto const& score) {
    auto& row = rows.emplace_back();
    for (index_t s = 0; s < n; ++s) row.push_back(score(s));
  };
  add([&](index_t) { return random.normal(); });
  add([](index_t s) { return static_cast<float>(s); });
  add([](index_t s) { return static_cast<float>(-s); });
  add([](index_t) { return 0.0f; });
  add([](index_t) { return not_a_number; });
  add([](index_t) { return infinity; });
  add([&](index_t) { return static_cast<float>(random.below(5)); });
  add([&](index_t) { return random.below(2) == 0 ? 0.0f : -0.0f; });
  add([&](index_t) { return random.below(2) == 0 ? 1.0f : std::nextafter(1.0f, infinity); });
  add([&](index_t) { return random.below(9) == 0 ? random.normal() : not_a_number; });
  add([&](index_t) { return random.below(2) == 0 ? random.normal() : -infinity; });
  add([&](index_t) { return std::max(0.0f, random.normal() - 1); });
  add([&](index_t) { return std::bit_cast<float>(static_cast<std::uint32_t>(random.bits())); });
  return rows;
}

std::vector<position_t> best_of(std::vector<float> const& row, index_t wanted) {
  auto const n = static_cast<index_t>(row.size());
  auto chosen = test::select_by_sort(row, n, wanted);
  chosen.indices.resize(static_cast<std::size_t>(chosen.count));
  return chosen.indices;
}

}  // namespace

TEST_CASE("candidates: any portions of a row in any capacity", "[isa]") {
  constexpr index_t n = 3000;
  auto const rows = candidate_rows(n);
  for (auto const& [name, table] : tables<CandidateKernels>()) {
    for (index_t const wanted : {1, 7, 8, 96, 1000}) {
      for (index_t const capacity : {index_t{0}, 2 * wanted, index_t{4000}}) {
        for (index_t const portion : {index_t{1}, index_t{12}, index_t{33}, index_t{500}, n}) {
          for (std::size_t r = 0; r < rows.size(); ++r) {
            CAPTURE(name, wanted, capacity, portion, r);
            List best(wanted, capacity);
            for (index_t first = 0; first < n; first += portion) {
              table->append(best.list, rows[r].data() + first, first, std::min(portion, n - first));
            }
            CHECK(best.list.count <= best.list.capacity);
            table->compact(best.list);
            if (best.positions() != best_of(rows[r], wanted)) FAIL("other positions");
            for (index_t i = 0; i < best.list.count; ++i) {
              auto const at = static_cast<std::size_t>(best.list.positions[i]);
              if (std::bit_cast<std::uint32_t>(best.list.scores[i]) !=
                  std::bit_cast<std::uint32_t>(rows[r][at])) {
                FAIL("another score at " << i);
              }
            }
            if (!best.intact()) FAIL("memory around the list");
          }
        }
      }
    }
  }
}

TEST_CASE("candidates: lists of a row's parts are merged", "[isa]") {
  constexpr index_t n = 2500;
  auto const rows = candidate_rows(n);
  for (auto const& [name, table] : tables<CandidateKernels>()) {
    for (index_t const wanted : {1, 90, 700}) {
      for (index_t const cut : {1, 50, 1251, 2490}) {
        for (bool const compacted : {false, true}) {
          for (std::size_t r = 0; r < rows.size(); ++r) {
            CAPTURE(name, wanted, cut, compacted, r);
            List first(wanted), second(wanted, n);
            table->append(first.list, rows[r].data(), 0, cut);
            table->append(second.list, rows[r].data() + cut, cut, n - cut);
            if (compacted) {
              table->compact(first.list);
              table->compact(second.list);
            }
            table->merge(first.list, second.list);
            table->compact(first.list);
            if (first.positions() != best_of(rows[r], wanted)) FAIL("other positions");
            if (!first.intact() || !second.intact()) FAIL("memory around the lists");
          }
        }
      }
    }
  }
}

TEST_CASE("candidates: the floor is the next score above the last of the best", "[isa]") {
  auto const floor_of = [](CandidateKernels const& table, std::vector<float> const& row) {
    List best(2);
    CHECK(best.list.open);
    table.append(best.list, row.data(), 0, static_cast<index_t>(row.size()));
    table.compact(best.list);
    CHECK(best.list.open == (row.size() <= 2));  // nothing was cut
    return best.list.floor;
  };
  for (auto const& [name, table] : tables<CandidateKernels>()) {
    CAPTURE(name);
    CHECK(floor_of(*table, {3, 1, 2}) == std::nextafter(2.0f, infinity));
    CHECK(floor_of(*table, {-3, -1, -2}) == std::nextafter(-2.0f, infinity));
    CHECK(floor_of(*table, {0, -0.0f, 0}) == std::numeric_limits<float>::denorm_min());
    CHECK(floor_of(*table, {-1, -infinity, -infinity}) == std::numeric_limits<float>::lowest());
    CHECK(floor_of(*table, {1, not_a_number, not_a_number}) == -infinity);
    CHECK(std::isnan(floor_of(*table, {infinity, infinity, infinity})));  // nothing reaches it
    floor_of(*table, {1, 2});
  }
}

// ---- scores of bf16 pairs

namespace {

/// A block of keys and a row of queries for PairKernels.
struct PairCase {
  index_t heads, dim;
  std::vector<float> queries;  ///< one head after the other; like the keys rounded to bf16
  std::vector<std::vector<float>> keys;
  std::vector<float> weights;

  PairCase(index_t head_count, index_t lane_count, auto const& value)
      : heads(head_count), dim(lane_count) {
    auto const values = [&](index_t count) {
      std::vector<float> all;
      for (index_t i = 0; i < count; ++i) all.push_back(to_float(from_float<bf16>(value())));
      return all;
    };
    queries = values(heads * dim);
    for (index_t s = 0; s < score_block_keys; ++s) keys.push_back(values(dim));
    for (index_t h = 0; h < heads; ++h) weights.push_back(h % 3 == 2 ? -0.5f : 2.0f);
  }

  /// Rows are read at odd addresses, the last of them at the end of its memory.
  std::vector<float> scores(PairKernels const& table, index_t count) const {
    index_t const padded = padded_to_panel(heads), pairs = bf16_pairs(dim);
    test::Guarded<Bf16Pair> packed(static_cast<std::size_t>(padded * pairs), std::byte{0});
    test::Guarded<float> all_weights(static_cast<std::size_t>(padded), std::byte{0});
    for (std::size_t h = 0; h < weights.size(); ++h) {
      auto const head = static_cast<index_t>(h);
      all_weights[h] = weights[h];
      for (index_t d = 0; d < dim; ++d) {
        index_t const place = head / panel_width * panel_width * pairs + d / 2 * panel_width;
        packed[static_cast<std::size_t>(place + head % panel_width)].lanes[d % 2] =
            from_float<bf16>(queries[static_cast<std::size_t>(head * dim + d)]);
      }
    }
    test::Guarded<Bf16Pair> block(static_cast<std::size_t>(score_block_keys * pair_pitch(dim)));
    for (std::size_t s = 0; s < keys.size(); ++s) {
      test::Guarded<bf16> row(static_cast<std::size_t>(dim + 1));
      for (index_t d = 0; d < dim; ++d) {
        row[static_cast<std::size_t>(d + 1)] =
            from_float<bf16>(keys[s][static_cast<std::size_t>(d)]);
      }
      table.take(row.data() + 1, dim, block.data() + static_cast<index_t>(s) * pair_pitch(dim));
    }
    test::Guarded<float> out(score_block_keys, test::unwritten);
    table.score({.queries = packed.data(),
                 .weights = all_weights.data(),
                 .heads = heads,
                 .dim = dim,
                 .keys = block.data(),
                 .count = count},
                out.data());
    CHECK((packed.intact() && all_weights.intact() && block.intact() && out.intact()));
    for (index_t s = count; s < score_block_keys; ++s) {
      if (out[static_cast<std::size_t>(s)] != test::unwritten_value<float>()) {
        FAIL("key " << s << " was written");
      }
    }
    return {out.data(), out.data() + count};
  }
};

}  // namespace

TEST_CASE("bf16 pairs: integers are exact, for any heads, lanes and place in a block", "[isa]") {
  PairKernels const* const table = pair_kernels(HostIsa::automatic);
  if (table == nullptr) SKIP("this processor does not multiply bf16 in pairs");
  test::Random random(31);
  for (index_t const heads : {1, 5, 16, 17, 33, 64}) {
    for (index_t const dim : {1, 2, 7, 16, 33, 64, 127, 128, 130, 133}) {
      CAPTURE(heads, dim);
      PairCase const c(heads, dim, [&] { return static_cast<float>(random.below(33)) - 16.0f; });
      auto const whole = c.scores(*table, score_block_keys);
      for (std::size_t s = 0; s < whole.size(); ++s) {
        double const want = test::index_score(c.queries, c.weights, c.keys[s]).value;
        if (static_cast<double>(whole[s]) != want) FAIL("score of key " << s);
      }
      PairCase const any(heads, dim, [&] { return random.normal(); });
      auto const expected = any.scores(*table, score_block_keys);
      for (index_t const count : {1, 7}) {  // keys outside of a whole tile
        auto const got = any.scores(*table, count);
        CHECK(std::equal(got.begin(), got.end(), expected.begin()));
      }
    }
  }
}

TEST_CASE("bf16 pairs: what is not finite, and subnormal numbers", "[isa]") {
  PairKernels const* const table = pair_kernels(HostIsa::automatic);
  if (table == nullptr) SKIP("this processor does not multiply bf16 in pairs");
  PairCase c(panel_width, 5, [] { return 1.0f; });
  std::ranges::fill(c.weights, 1.0f);
  c.keys[0][4] = not_a_number;  // the odd last lane
  c.keys[1][2] = infinity;
  c.keys[2][3] = -infinity;
  c.keys[3][0] = -infinity;
  c.keys[3][1] = infinity;
  c.keys[4] = {0x1p-127f, -2, 0x1p-130f, 1, 1};
  c.keys[5] = {0x1p-100f, 0, 0, 0, 0};
  for (std::size_t h = 0; h < c.weights.size(); ++h) {
    std::ranges::copy(std::vector{0x1p-20f, 1.0f, 0x1p126f, 1.0f, 1.0f}, &c.queries[5 * h]);
  }
  c.keys[6][4] = infinity;  // beside it a zero
  auto const scores = c.scores(*table, 7);
  CHECK(std::isnan(scores[0]));
  CHECK(scores[1] == infinity);
  CHECK(scores[2] == 0);
  CHECK(std::isnan(scores[3]));
  CHECK(scores[4] == 0);  // as it is without the subnormal lanes; 2^-130 * 2^126 would count
  CHECK(scores[5] == panel_width * 0x1p-120f);
  CHECK(scores[6] == infinity);
}

// ---- scores of int8 codes

TEST_CASE("int8 scores: every body, any heads and lanes", "[isa]") {
  test::Random random(21);
  for (auto const& [name, table] : tables<Int8ScoreKernels>()) {
    for (index_t const heads : {1, 4, 9, 16, 17, 32, 48, 65}) {
      for (index_t const dim : {1, 4, 15, 64, 126, 128, 133}) {
        CAPTURE(name, heads, dim);
        index_t const padded = padded_to_panel(heads);
        auto const step = static_cast<std::size_t>(int8_groups(dim) * int8_group);
        test::Guarded<std::int8_t> queries(static_cast<std::size_t>(padded) * step, std::byte{0});
        test::Guarded<std::int32_t> offsets(static_cast<std::size_t>(padded), std::byte{0});
        test::Guarded<float> weights(static_cast<std::size_t>(padded), std::byte{0});
        test::Guarded<std::uint8_t> keys(
            static_cast<std::size_t>(score_block_keys * int8_key_pitch(dim)));
        test::Guarded<float> scales(score_block_keys), out(score_block_keys, test::unwritten);
        std::vector<std::vector<int>> query_codes, key_codes;
        for (index_t h = 0; h < heads; ++h) {
          auto head = test::guarded(random.normals(static_cast<std::size_t>(dim)));
          if (h == 2) head.fill(std::byte{0});
          if (h == 5) head[head.size() - 1] = not_a_number;
          if (h == 6) head[0] = -infinity;
          std::int8_t* const codes =
              queries.data() + (h / panel_width * static_cast<index_t>(step) * panel_width +
                                h % panel_width * int8_group);
          std::int32_t sum = 0;
          float const scale = table->quantize(head.data(), dim, codes, sum);
          auto& expected = query_codes.emplace_back();
          float const expected_scale = quantize_int8(
              dim, largest_query_code, [&](index_t d) { return head[static_cast<std::size_t>(d)]; },
              [&](index_t, std::int8_t code) { expected.push_back(code); });
          int expected_sum = 0;
          for (index_t d = 0; d < dim; ++d) {
            int const code = expected[static_cast<std::size_t>(d)];
            expected_sum += code;
            if (codes[d / int8_group * panel_width * int8_group + d % int8_group] != code) {
              FAIL("code of lane " << d);
            }
          }
          bool const same_scale =
              scale == expected_scale || (std::isnan(scale) && std::isnan(expected_scale));
          if (!same_scale || sum != expected_sum) FAIL("scale or sum");
          offsets[static_cast<std::size_t>(h)] = -128 * sum;
          weights[static_cast<std::size_t>(h)] =
              (h % 4 == 3 ? -1.0f : 1.0f) * (std::isnan(scale) ? 1.0f : scale);
        }
        for (index_t s = 0; s < score_block_keys; ++s) {
          test::Guarded<std::byte> row(static_cast<std::size_t>(dim));
          auto& codes = key_codes.emplace_back();
          for (index_t d = 0; d < dim; ++d) {
            codes.push_back(static_cast<int>(random.below(256)) - 128);
            row[static_cast<std::size_t>(d)] = static_cast<std::byte>(codes.back());
          }
          table->take(row.data(), dim, keys.data() + s * int8_key_pitch(dim));
          scales[static_cast<std::size_t>(s)] = 0.5f + static_cast<float>(s);
        }
        for (index_t const count : {index_t{1}, index_t{7}, score_block_keys}) {
          out.fill(test::unwritten);
          table->score({.queries = queries.data(),
                        .offsets = offsets.data(),
                        .weights = weights.data(),
                        .heads = heads,
                        .dim = dim,
                        .keys = keys.data(),
                        .scales = scales.data(),
                        .count = count},
                       out.data());
          for (std::size_t s = 0; s < static_cast<std::size_t>(score_block_keys); ++s) {
            if (static_cast<index_t>(s) >= count) {
              if (out[s] != test::unwritten_value<float>()) FAIL("key " << s << " was written");
              continue;
            }
            test::Sum want;
            for (std::size_t h = 0; h < query_codes.size(); ++h) {
              int dot = 0;
              for (std::size_t d = 0; d < query_codes[h].size(); ++d) {
                dot += query_codes[h][d] * key_codes[s][d];
              }
              double const term = static_cast<double>(scales[s]) * std::max(dot, 0) *
                                  static_cast<double>(weights[h]);
              want.value += term;
              want.magnitude += std::abs(term);
            }
            double const error = std::abs(static_cast<double>(out[s]) - want.value);
            if (error > test::tolerance(heads, want.magnitude)) FAIL("score of key " << s);
          }
        }
        CHECK((queries.intact() && keys.intact() && out.intact()));
      }
    }
  }
}
