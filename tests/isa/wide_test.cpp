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
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wpsabi"
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
#pragma GCC diagnostic pop
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
