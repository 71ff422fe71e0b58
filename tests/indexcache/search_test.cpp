// SPDX-License-Identifier: Apache-2.0
#include <indexshare/indexcache/search.hpp>

#include <catch2/catch_test_macros.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <numeric>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

using namespace indexshare;
using namespace indexshare::indexcache;

namespace {

/// A loss that depends on the whole pattern. @param values  how many different ones: few make ties
double loss_of(std::string const& pattern, std::uint64_t seed, std::uint64_t values) {
  std::uint64_t hash = seed * 0x9e3779b97f4a7c15u + 1;
  for (char const letter : pattern) {
    hash = (hash ^ static_cast<unsigned char>(letter)) * 0x100000001b3u;
    hash ^= hash >> 29;
  }
  return 2.0 + 0.25 * static_cast<double>(hash % values);
}

Evaluator hashed(std::uint64_t seed, std::uint64_t values) {
  return one_by_one([=](Candidate const& candidate) -> Loss {
    return loss_of(pattern_text(candidate.pattern), seed, values);
  });
}

/// The algorithm of the paper on letters, written without the library. Blocks as first layers.
struct GreedyOracle {
  std::string pattern;
  std::vector<std::pair<std::size_t, double>> flips;
  std::int64_t evaluations = 0;

  GreedyOracle(SearchProblem const& problem, std::uint64_t seed, std::uint64_t values)
      : pattern(static_cast<std::size_t>(problem.layers), 'F') {
    std::set<std::size_t> pinned{0};
    for (auto const layer : problem.pinned) pinned.insert(static_cast<std::size_t>(layer));
    std::vector<std::size_t> bounds;
    for (auto const layer : problem.blocks) bounds.push_back(static_cast<std::size_t>(layer));
    if (bounds.empty()) bounds.push_back(0);
    pinned.insert(bounds.begin(), bounds.end());
    bounds.push_back(pattern.size());
    auto const wanted = static_cast<std::size_t>(problem.shared);
    while (flips.size() < wanted) {
      for (std::size_t block = 0; block + 1 < bounds.size() && flips.size() < wanted; ++block) {
        std::size_t best = 0;
        double best_loss = std::numeric_limits<double>::infinity();
        for (std::size_t layer = bounds[block]; layer < bounds[block + 1]; ++layer) {
          if (pattern[layer] == 'S' || pinned.contains(layer)) continue;
          std::string changed = pattern;
          changed[layer] = 'S';
          ++evaluations;
          if (double const loss = loss_of(changed, seed, values); loss < best_loss) {
            best = layer;
            best_loss = loss;
          }
        }
        if (best == 0) continue;
        pattern[best] = 'S';
        flips.emplace_back(best, best_loss);
      }
    }
  }
};

void check_against_oracle(SearchProblem const& problem, std::uint64_t seed, std::uint64_t values) {
  CAPTURE(problem.layers, problem.shared, problem.pinned, problem.blocks, seed, values);
  auto const found = search(problem, hashed(seed, values));
  REQUIRE(found.has_value());
  GreedyOracle const oracle(problem, seed, values);
  CHECK(pattern_text(found->pattern) == oracle.pattern);
  CHECK(found->evaluations == oracle.evaluations);
  CHECK(evaluation_count(problem) == oracle.evaluations);
  REQUIRE(found->flips.size() == oracle.flips.size());
  for (std::size_t i = 0; i < oracle.flips.size(); ++i) {
    CHECK(found->flips[i].layer == static_cast<std::int32_t>(oracle.flips[i].first));
    CHECK(found->flips[i].loss == oracle.flips[i].second);
  }
}

std::string error_of(SearchProblem const& problem, Evaluator const& evaluator,
                     SearchHooks const& hooks = {}, SearchRecords const& records = {}) {
  auto const found = search(problem, evaluator, hooks, records);
  REQUIRE_FALSE(found.has_value());
  return found.error().message();
}

bool contains(std::string const& text, std::string const& part) {
  return text.find(part) != std::string::npos;
}

SearchHooks recording(SearchRecords& records) {
  SearchHooks hooks;
  hooks.record_evaluation = [&](Evaluation const& evaluation) -> std::optional<std::string> {
    records.evaluations.push_back(evaluation);
    return std::nullopt;
  };
  hooks.record_flip = [&](Flip const& flip) -> std::optional<std::string> {
    records.flips.push_back(flip);
    return std::nullopt;
  };
  return hooks;
}

}  // namespace

TEST_CASE("as many evaluations as the paper counts", "[search]") {
  auto const count = [](std::int32_t layers, std::int32_t shared) {
    SearchProblem problem;
    problem.layers = layers;
    problem.shared = shared;
    return evaluation_count(problem);
  };
  CHECK(count(47, 23) == 805);
  CHECK(count(47, 35) == 1015);
  CHECK(count(47, 46) == 1081);
  CHECK(count(78, 38) == 2223);
  CHECK(count(78, 56) == 2772);
  CHECK(count(78, 77) == 3003);
  CHECK(count(1, 0) == 0);
  // Four stages: 11, 11, 11 and 10 candidates at first.
  SearchProblem staged{47, 43, {}, {0, 12, 24, 36}};
  CHECK(evaluation_count(staged) == 3 * 66 + 55);
}

TEST_CASE("the search agrees with a plain greedy loop", "[search]") {
  for (std::uint64_t seed = 0; seed < 8; ++seed) {
    // 3 values: ties at every step. Many: none.
    for (std::uint64_t const values : {3ull, 1000003ull}) {
      check_against_oracle({9, 8, {}, {}}, seed, values);
      check_against_oracle({9, 3, {}, {}}, seed, values);
      check_against_oracle({12, 6, {5, 11, 5}, {}}, seed, values);
      check_against_oracle({12, 9, {}, {0, 5, 7}}, seed, values);
      check_against_oracle({12, 7, {4, 6}, {0, 5, 7}}, seed, values);
      check_against_oracle({12, 4, {}, {0, 1, 2, 7}}, seed, values);  // two stages of one layer
    }
  }
  check_against_oracle({47, 35, {}, {}}, 1, 1000003);
}

TEST_CASE("of equal losses the lowest layer's wins", "[search]") {
  auto const found =
      search({6, 3, {2}, {}}, one_by_one([](Candidate const&) -> Loss { return 1.5; }));
  REQUIRE(found.has_value());
  CHECK(pattern_text(found->pattern) == "FSFSSF");
}

TEST_CASE("what a search finds for fewer full layers is nested", "[search]") {
  auto const all = search({16, 15, {}, {}}, hashed(3, 50));
  REQUIRE(all.has_value());
  for (std::int32_t shared = 0; shared <= 15; ++shared) {
    CAPTURE(shared);
    auto const fewer = search({16, shared, {}, {}}, hashed(3, 50));
    REQUIRE(fewer.has_value());
    CHECK(fewer->pattern == all->pattern_at(shared));
    CHECK(fewer->pattern.shared_count() == shared);
    CHECK(nested_in(all->pattern, fewer->pattern));
    CHECK(all->all_full_loss == fewer->all_full_loss);
  }
}

TEST_CASE("a batch in any order finds the same as candidates one by one", "[search]") {
  SearchProblem const problem{11, 7, {3}, {0, 6}};
  Evaluator batch;
  std::vector<std::size_t> sizes;
  batch.evaluate = [&](std::span<Candidate const> candidates,
                       ReportLoss const& report) -> std::optional<std::string> {
    sizes.push_back(candidates.size());
    for (std::size_t i = candidates.size(); i-- > 0;)
      report(i, loss_of(pattern_text(candidates[i].pattern), 7, 4));
    return std::nullopt;
  };
  auto const a = search(problem, batch);
  auto const b = search(problem, hashed(7, 4));
  REQUIRE(a.has_value());
  REQUIRE(b.has_value());
  CHECK(a->pattern == b->pattern);
  CHECK(a->flips == b->flips);
  CHECK(sizes == std::vector<std::size_t>{1, 4, 4, 3, 3, 2, 2, 1});
}

TEST_CASE("layers below first_changed are as in the accepted pattern", "[search]") {
  RolePattern accepted;
  std::vector<std::string> announced;
  int candidates = 0;
  Evaluator evaluator = one_by_one([&](Candidate const& candidate) -> Loss {
    ++candidates;
    if (accepted.layers() == 0) {
      CHECK(candidate.flipped == no_layer);
      CHECK(candidate.first_changed == 0);
    } else {
      CHECK(first_difference(candidate.pattern, accepted) == candidate.first_changed);
      CHECK(candidate.pattern == accepted.with_shared(candidate.flipped));
    }
    return loss_of(pattern_text(candidate.pattern), 5, 100);
  });
  evaluator.accepted = [&](RolePattern const& pattern) {
    accepted = pattern;
    announced.push_back(pattern_text(pattern));
  };
  SearchRecords records;
  auto const found = search({7, 4, {}, {}}, evaluator, recording(records));
  REQUIRE(found.has_value());
  CHECK(candidates == 1 + 6 + 5 + 4 + 3);
  std::vector<std::string> expected;
  for (std::int32_t shared = 0; shared < 4; ++shared)
    expected.push_back(pattern_text(found->pattern_at(shared)));
  CHECK(announced == expected);

  // Resumed in the middle of step 3: what the records decide is not announced.
  announced.clear();
  accepted = RolePattern();
  records.evaluations.resize(1 + 6 + 5 + 2);
  records.flips.resize(2);
  auto const resumed = search({7, 4, {}, {}}, evaluator, {}, records);
  REQUIRE(resumed.has_value());
  CHECK(announced == std::vector<std::string>{expected[2], expected[3]});
}

TEST_CASE("a search goes on from any of its records", "[search]") {
  SearchProblem const problem{9, 6, {}, {0, 4}};
  SearchRecords records;
  auto const whole = search(problem, hashed(11, 5), recording(records));
  REQUIRE(whole.has_value());
  CHECK(whole->from_records == 0);
  CHECK(static_cast<std::int64_t>(records.evaluations.size()) == 1 + evaluation_count(problem));
  for (std::size_t kept = 0; kept <= records.evaluations.size(); ++kept) {
    CAPTURE(kept);
    SearchRecords part;
    part.evaluations.assign(records.evaluations.begin(),
                            records.evaluations.begin() + static_cast<std::ptrdiff_t>(kept));
    std::int32_t const reached = kept == 0 ? 0 : part.evaluations.back().step;
    for (Flip const& flip : records.flips)
      if (flip.step < reached) part.flips.push_back(flip);
    SearchRecords added;
    auto const resumed = search(problem, hashed(11, 5), recording(added), part);
    REQUIRE(resumed.has_value());
    CHECK(resumed->flips == whole->flips);
    CHECK(resumed->evaluations == whole->evaluations);
    CHECK(resumed->from_records == static_cast<std::int64_t>(kept));
    CHECK(part.evaluations.size() + added.evaluations.size() == records.evaluations.size());
    CHECK(part.flips.size() + added.flips.size() == records.flips.size());
  }
}

TEST_CASE("records that contradict themselves are refused", "[search]") {
  SearchRecords records;
  REQUIRE(search({5, 2, {}, {}}, hashed(1, 1000), recording(records)).has_value());
  SearchRecords other = records;
  other.flips[1].layer = other.flips[1].layer == 4 ? 3 : 4;
  CHECK(contains(error_of({5, 2, {}, {}}, hashed(1, 1000), {}, other), "records: step 2 chose"));
  other = records;
  other.evaluations[2].loss = std::numeric_limits<double>::quiet_NaN();
  CHECK(contains(error_of({5, 2, {}, {}}, hashed(1, 1000), {}, other), "the loss is NaN"));
}

TEST_CASE("a loss that is no number names its candidate", "[search]") {
  for (double const bad :
       {std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity()}) {
    SearchRecords records;
    auto const evaluator = one_by_one([&](Candidate const& candidate) -> Loss {
      return pattern_text(candidate.pattern) == "FFSFF" ? bad : 1.0;
    });
    std::string const error = error_of({5, 2, {}, {}}, evaluator, recording(records));
    CHECK(contains(error, "candidate FFSFF (layer 2 made shared): the loss is "));
    CHECK(records.evaluations.size() == 2);  // all full and layer 1; the evaluator was stopped
  }
  auto const at_once =
      one_by_one([](Candidate const&) -> Loss { return std::numeric_limits<double>::quiet_NaN(); });
  CHECK(contains(error_of({3, 0, {}, {}}, at_once), "candidate FFF (all layers full)"));
}

TEST_CASE("an evaluator that does not do its part is named", "[search]") {
  CHECK(error_of({4, 2, {}, {}}, one_by_one([](Candidate const&) -> Loss {
                   return cuda::std::unexpected<std::string>("out of memory");
                 })) == "evaluator: FFFF: out of memory");
  Evaluator lazy;
  lazy.evaluate = [](std::span<Candidate const> candidates,
                     ReportLoss const& report) -> std::optional<std::string> {
    for (std::size_t i = 0; i < candidates.size(); ++i)
      if (i != 1) report(i, 1);
    return std::nullopt;
  };
  CHECK(error_of({4, 2, {}, {}}, lazy) ==
        "candidate FFSF (layer 2 made shared): the evaluator reported no loss");
  Evaluator twice;
  twice.evaluate = [](std::span<Candidate const>, ReportLoss const& report) {
    CHECK(report(0, 1));
    CHECK_FALSE(report(0, 1));
    return std::optional<std::string>();
  };
  CHECK(contains(error_of({4, 2, {}, {}}, twice), "reported its loss twice"));
  Evaluator beyond;
  beyond.evaluate = [](std::span<Candidate const>, ReportLoss const& report) {
    report(1, 1);
    return std::optional<std::string>();
  };
  CHECK(contains(error_of({4, 2, {}, {}}, beyond), "candidate 1 of a batch of 1"));
}

TEST_CASE("a recorder that fails ends the search", "[search]") {
  SearchHooks hooks;
  hooks.record_flip = [](Flip const&) { return std::optional<std::string>("disk full"); };
  CHECK(error_of({4, 2, {}, {}}, hashed(1, 9), hooks) == "log: disk full");
  hooks = {};
  hooks.record_evaluation = [](Evaluation const&) { return std::optional<std::string>("full"); };
  CHECK(error_of({4, 2, {}, {}}, hashed(1, 9), hooks) == "log: full");
}

TEST_CASE("a problem without a meaning is refused by field", "[search]") {
  auto const refused = [](SearchProblem const& problem) {
    int asked = 0;
    auto const evaluator = one_by_one([&](Candidate const&) -> Loss { return ++asked; });
    std::string const error = error_of(problem, evaluator);
    CHECK(asked == 0);
    return error;
  };
  CHECK(contains(refused({0, 0, {}, {}}), "layers: got 0"));
  CHECK(contains(refused({max_schedule_layers + 1, 0, {}, {}}), "layers: got 513"));
  CHECK(contains(refused({6, 6, {}, {}}), "shared layers: got 6, expected 0 to 5"));
  CHECK(contains(refused({6, -1, {}, {}}), "shared layers: got -1"));
  CHECK(contains(refused({6, 4, {2, 2, 5}, {}}), "expected 0 to 3, since 3 of 6"));
  CHECK(contains(refused({6, 1, {6}, {}}), "pinned layer: got 6"));
  CHECK(contains(refused({6, 1, {-1}, {}}), "pinned layer: got -1"));
  CHECK(contains(refused({6, 1, {}, {1, 3}}), "blocks: the first begins at layer 1"));
  CHECK(contains(refused({6, 1, {}, {0, 3, 3}}), "blocks: got layer 3 after layer 3"));
  CHECK(contains(refused({6, 1, {}, {0, 6}}), "first layer of a block: got 6"));
  CHECK_FALSE(check_problem({6, 3, {5}, {0, 3}}).has_value());
  CHECK(check_problem({6, 4, {5}, {0, 3}}).has_value());
}

TEST_CASE("a ratio is rounded up to whole full layers", "[search]") {
  CHECK(shared_for_ratio(47, 0.5) == 23);
  CHECK(shared_for_ratio(47, 0.25) == 35);
  CHECK(shared_for_ratio(47, 0.125) == 41);
  CHECK(shared_for_ratio(78, 0.25) == 58);  // 19.5 full layers
  CHECK(shared_for_ratio(78, 1.0 / 3) == 52);
  CHECK(shared_for_ratio(30, 0.1) == 27);  // 0.1 * 30 > 3 in floating point
  CHECK(shared_for_ratio(10, 1) == 0);
  CHECK(shared_for_ratio(10, 1e-6) == 9);
}

TEST_CASE("progress tells what is left", "[search]") {
  SearchRecords records;
  records.evaluations = {{0, no_layer, 2.0}, {1, 1, 3.0}};
  std::vector<SearchProgress> seen;
  SearchHooks hooks;
  double now = 100;
  hooks.clock_s = [&] { return now; };
  hooks.progress = [&](SearchProgress const& progress) { seen.push_back(progress); };
  auto const evaluator = one_by_one([&](Candidate const& candidate) -> Loss {
    now += 2;
    return candidate.flipped;
  });
  REQUIRE(search({4, 2, {}, {}}, evaluator, hooks, records).has_value());
  REQUIRE(seen.size() == 4);  // 1 + 3 + 2 losses, of which two were known
  CHECK(seen[0].step == 1);
  CHECK(seen[0].steps == 2);
  CHECK(seen[0].evaluations == 3);
  CHECK(seen[0].evaluations_total == 6);
  CHECK(seen[0].loss == 2);
  CHECK(seen[0].elapsed_s == 2);
  CHECK(seen[0].remaining_s == 6);
  CHECK(seen[2].step == 2);
  CHECK(seen[2].elapsed_s == 6);
  CHECK(seen[3].evaluations == 6);
  CHECK(seen[3].remaining_s == 0);
}
