// SPDX-License-Identifier: Apache-2.0
#include "data.hpp"

#include <indexshare/indexcache/overlap_counts.hpp>

#include <algorithm>
#include <iterator>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <utility>
#include <vector>

/// @file Counting how many positions layers select in common: GLM-5.2's 78 layers without sharing.

namespace bench {
namespace {

constexpr index_t layers = 78;
constexpr index_t rows = 4;
constexpr index_t top_k = 2048;
constexpr index_t keys = 128 * 1024;

/// Layers that select from some candidates of each row and keep a part of what the layer below
/// selected, [layers, rows, top_k].
std::vector<position_t> selections(std::size_t candidates, unsigned kept_percent) {
  std::mt19937 random(1);
  std::vector<position_t> all(static_cast<std::size_t>(layers * rows * top_k));
  for (index_t row = 0; row < rows; ++row) {
    std::vector<position_t> order(static_cast<std::size_t>(keys));
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), random);
    for (index_t layer = 0; layer < layers; ++layer) {
      for (std::size_t i = 0; i < top_k; ++i) {
        if (random() % 100 < kept_percent) continue;
        std::swap(order[i], order[top_k + random() % (candidates - top_k)]);
      }
      position_t* const out = all.data() + (layer * rows + row) * top_k;
      std::copy_n(order.begin(), top_k, out);
      std::sort(out, out + top_k);
    }
  }
  return all;
}

Call overlap_call(Exec const& exec, std::size_t candidates, unsigned kept_percent) {
  using indexcache::OverlapCounter;
  struct Data {
    std::vector<position_t> positions;
    std::vector<OverlapCounter> counters;  // one per worker
  };
  auto const data = std::make_shared<Data>();
  data->positions = selections(candidates, kept_percent);
  data->counters.assign(static_cast<std::size_t>(exec.parallel_for.concurrency()),
                        OverlapCounter(layers));
  return {{},
          [=] {
            exec.parallel_for(rows, [&](index_t begin, index_t end, int worker) {
              indexcache::LayerSelections part;
              part.positions = make_strided<Space::host, position_t const, 3>(
                  data->positions.data() + begin * top_k, {layers, end - begin, top_k},
                  {rows * top_k, top_k, 1});
              require(data->counters[static_cast<std::size_t>(worker)].add(part));
            });
            return Status{};
          },
          [=] {
            // of two neighbours in row 0, by merging
            position_t const* const low = data->positions.data();
            position_t const* const high = low + rows * top_k;
            std::vector<position_t> both;
            std::set_intersection(low, low + top_k, high, high + top_k, std::back_inserter(both));
            OverlapCounter counter(2);
            indexcache::LayerSelections pair;
            pair.positions = make_strided<Space::host, position_t const, 3>(
                low, {2, 1, top_k}, {rows * top_k, top_k, 1});
            require(counter.add(pair));
            double const expected = static_cast<double>(both.size()) / top_k;
            require(counter.counts().overlap(0, 1) == expected, "overlap of two layers");
          }};
}

}  // namespace

std::vector<Case> overlap_cases() {
  auto const one = [](char const* name, std::size_t candidates, unsigned kept_percent) {
    return Case{std::string("overlap/") + name + "/layers:78/keys:128K/rows:4",
                [=](Exec const& exec) { return overlap_call(exec, candidates, kept_percent); }};
  };
  return {one("alike", 10240, 73), one("unrelated", static_cast<std::size_t>(keys), 0)};
}

}  // namespace bench
