// SPDX-License-Identifier: Apache-2.0
#include <indexshare/indexcache/baselines.hpp>

#include <catch2/catch_approx.hpp>
#include <catch2/catch_test_macros.hpp>
#include <nlohmann/json.hpp>

#include <cstddef>
#include <cstdint>
#include <fstream>
#include <limits>
#include <map>
#include <random>
#include <string>
#include <vector>

using namespace indexshare;
using namespace indexshare::indexcache;

namespace {

std::string text_of(Result<RolePattern> const& pattern) {
  REQUIRE(pattern.has_value());
  return pattern_text(*pattern);
}

/// All patterns of `layers` layers with `full` full ones, tried one by one: the list of full layers
/// of the best, the first in order among equals. Sources by a loop of its own.
std::vector<std::int32_t> exhaustive(std::vector<double> const& similarity, std::int32_t layers,
                                     std::int32_t full) {
  std::vector<std::int32_t> best;
  double best_sum = 0;
  for (unsigned bits = 1; bits < 1u << layers; bits += 2) {
    std::vector<std::int32_t> list;
    double sum = 0;
    for (std::int32_t layer = 0; layer < layers; ++layer) {
      if ((bits >> layer & 1u) != 0)
        list.push_back(layer);
      else
        sum += similarity[static_cast<std::size_t>(layer * layers + list.back())];
    }
    if (list.size() != static_cast<std::size_t>(full)) continue;
    if (best.empty() || sum > best_sum || (sum == best_sum && list < best)) {
      best = list;
      best_sum = sum;
    }
  }
  return best;
}

}  // namespace

TEST_CASE("both uniform rules", "[baselines]") {
  CHECK(text_of(uniform_paper(9, 4)) == "FSSSFSSSF");
  CHECK(text_of(uniform_patches(9, 4)) == "FFSSSFSSS");
  CHECK(text_of(uniform_paper(5, 1)) == "FFFFF");
  CHECK(text_of(uniform_patches(5, 1)) == "FFFFF");
  CHECK(text_of(uniform_patches(1, 7)) == "F");
  auto const counts = [](std::int32_t layers, std::int32_t freq) {
    return std::pair{uniform_patches(layers, freq)->full_count(),
                     uniform_paper(layers, freq)->full_count()};
  };
  CHECK(counts(47, 4) == std::pair{13, 12});
  CHECK(counts(61, 4) == std::pair{16, 16});
  CHECK(counts(78, 2) == std::pair{40, 39});
  CHECK(counts(78, 4) == std::pair{21, 20});
  for (std::int32_t const freq : {2, 3, 4, 7}) {
    RolePattern const paper = *uniform_paper(30, freq);
    RolePattern const patches = *uniform_patches(30, freq);
    for (std::int32_t layer = 0; layer < 30; ++layer) {
      CHECK(paper.is_full(layer) == (layer % freq == 0));
      CHECK(patches.is_full(layer) == ((layer > 0 ? layer - 1 : 0) % freq == 0));
    }
  }
  CHECK_FALSE(uniform_paper(9, 0).has_value());
  CHECK_FALSE(uniform_patches(0, 4).has_value());
  CHECK_FALSE(uniform_patches(max_schedule_layers + 1, 4).has_value());
}

TEST_CASE("the similarity program is as good as trying all patterns", "[baselines]") {
  std::mt19937 bits(42);
  for (std::int32_t layers = 1; layers <= 10; ++layers) {
    for (unsigned const steps : {3u, 4096u}) {  // 3: many equal sums, all of them exact
      auto const size = static_cast<std::size_t>(layers);
      std::vector<double> similarity(size * size);
      for (double& value : similarity) value = static_cast<double>(bits() % steps) / 4096;
      // What a layer has to do with itself and with those above it does not count.
      for (std::size_t row = 0; row < size; ++row)
        for (std::size_t column = row; column < size; ++column)
          similarity[row * size + column] = std::numeric_limits<double>::quiet_NaN();
      for (std::int32_t full = 1; full <= layers; ++full) {
        CAPTURE(layers, full, steps);
        auto const found = similarity_pattern(similarity, layers, full);
        REQUIRE(found.has_value());
        CHECK(found->full_layers() == exhaustive(similarity, layers, full));
      }
    }
  }
}

TEST_CASE("the optimum on the published heat map", "[baselines]") {
  auto const rows =
      nlohmann::json::parse(std::ifstream(INDEXSHARE_TEST_DATA_DIR "/indexcache/overlap_30b.json"));
  std::vector<double> overlap;
  for (auto const& row : rows)
    for (auto const& value : row) overlap.push_back(value.get<double>());
  auto const best = similarity_pattern(overlap, 47, 12);
  REQUIRE(best.has_value());
  CHECK(best->full_layers() ==
        std::vector<std::int32_t>{0, 2, 3, 7, 10, 16, 18, 22, 27, 31, 37, 44});
  // Means over the 35 shared layers, as the reading of the paper's figure gave them.
  CHECK(similarity_sum(*best, overlap) / 35 == Catch::Approx(0.742).margin(5e-4));
  CHECK(similarity_sum(*uniform_paper(47, 4), overlap) / 35 == Catch::Approx(0.712).margin(5e-4));
}

TEST_CASE("a similarity without a meaning is refused", "[baselines]") {
  std::vector<double> similarity(16, 0.5);
  CHECK_FALSE(similarity_pattern(similarity, 4, 0).has_value());
  CHECK_FALSE(similarity_pattern(similarity, 4, 5).has_value());
  CHECK_FALSE(similarity_pattern(similarity, 0, 0).has_value());
  auto const size = similarity_pattern(similarity, 5, 2);
  REQUIRE_FALSE(size.has_value());
  CHECK(size.error().code == Errc::bad_shape);
  CHECK(size.error().expected == 25);
  similarity[3 * 4 + 1] = std::numeric_limits<double>::infinity();
  auto const infinite = similarity_pattern(similarity, 4, 2);
  REQUIRE_FALSE(infinite.has_value());
  CHECK(infinite.error().layer == 3);
  CHECK(infinite.error().got == 1);
}

TEST_CASE("random patterns have their count and depend on the seed alone", "[baselines]") {
  for (std::int32_t full = 1; full <= 12; ++full) {
    auto const pattern = random_pattern(12, full, 5);
    REQUIRE(pattern.has_value());
    CHECK(pattern->full_count() == full);
    CHECK(*pattern == *random_pattern(12, full, 5));
  }
  // mt19937_64 is the same everywhere: this pattern is too.
  CHECK(text_of(random_pattern(16, 5, 1)) == "FSFSSSFSFSSSSFSS");
  CHECK_FALSE(random_pattern(12, 0, 1).has_value());
  CHECK_FALSE(random_pattern(12, 13, 1).has_value());

  // 4 layers, 2 full: three patterns, each equally likely. 3000 draws: 1000 +- 5 standard
  // deviations.
  std::map<std::string, int> seen;
  for (std::uint64_t seed = 0; seed < 3000; ++seed) ++seen[text_of(random_pattern(4, 2, seed))];
  REQUIRE(seen.size() == 3);
  for (auto const& [pattern, count] : seen) {
    CAPTURE(pattern);
    CHECK(count > 870);
    CHECK(count < 1130);
  }
}
