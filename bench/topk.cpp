// SPDX-License-Identifier: Apache-2.0
#include "data.hpp"

#include <indexshare/host/topk.hpp>

#include <memory>

/// @file The best of given scores, in orders that are easy and hard for a running threshold.

namespace bench {
namespace {

struct Order {
  char const* name;
  float (*score)(std::uint32_t seed, index_t place, index_t keys);
};

float progress(index_t place, index_t keys) {
  return static_cast<float>(place) / static_cast<float>(keys);
}

constexpr Order orders[] = {
    {"random", [](std::uint32_t seed, index_t i, index_t) { return uniform(seed, i); }},
    {"ascending", [](std::uint32_t seed, index_t i,
                     index_t n) { return progress(i, n) + static_cast<float>(seed); }},
    {"descending", [](std::uint32_t seed, index_t i,
                      index_t n) { return static_cast<float>(seed) - progress(i, n); }},
    {"drift",  // later keys tend to score higher
     [](std::uint32_t seed, index_t i, index_t n) {
       return uniform(seed, i) + 2 * progress(i, n);
     }},
    {"levels",  // 17 values
     [](std::uint32_t seed, index_t i, index_t) { return std::floor(8.5f * uniform(seed, i)); }},
    {"zero", [](std::uint32_t, index_t, index_t) { return 0.0f; }},
};

/// No score left out is above one that was chosen.
void check_best(float const* scores, index_t keys, position_t const* chosen, index_t top_k) {
  float lowest_in = std::numeric_limits<float>::infinity();
  float highest_out = -lowest_in;
  index_t next = 0;
  for (index_t s = 0; s < keys; ++s) {
    if (next < top_k && chosen[next] == s) {
      lowest_in = std::min(lowest_in, scores[s]);
      ++next;
    } else {
      highest_out = std::max(highest_out, scores[s]);
    }
  }
  require(next == top_k && highest_out <= lowest_in, "selection of a row");
}

Call topk_call(Exec const& exec, Order const& order, index_t keys) {
  // One array over and over flatters branch predictors.
  constexpr index_t arrays = 16;
  struct Data {
    Shape shape;
    position_t length;
    Array<float> scores;
    Array<position_t> indices;
    position_t count;
    index_t calls;
    HostMemory memory;
  };
  Shape const shape = glm52(1, keys);
  auto const data =
      std::make_shared<Data>(Data{shape, static_cast<position_t>(keys),
                                  Array<float>(arrays * keys,
                                               [&](index_t i) {
                                                 auto const seed =
                                                     static_cast<std::uint32_t>(i / keys);
                                                 return order.score(seed, i % keys, keys);
                                               }),
                                  Array<position_t>(shape.top_k), 0, 0,
                                  HostMemory(required(topk_workspace(exec, RadixTopK{}, shape)))});
  auto const row = [=] { return data->scores.data() + data->calls % arrays * keys; };
  return {{.bytes = static_cast<double>(keys) * sizeof(float)},
          [=] {
            ++data->calls;
            return topk_select(exec, RadixTopK{},
                               make_scores<Space::host, float const>(row(), Rows{1}, Keys{keys}),
                               make_lengths<Space::host>(&data->length, Rows{1}),
                               make_selection<Space::host>(data->indices.data(), &data->count,
                                                           Rows{1}, TopK{shape.top_k}),
                               data->memory.view());
          },
          [=] {
            require(data->count == shape.top_k, "count of a selection");
            check_best(row(), keys, data->indices.data(), shape.top_k);
          }};
}

}  // namespace

std::vector<Case> topk_cases() {
  std::vector<Case> cases;
  for (Order const& order : orders) {
    for (Layout const& layout : decode_layouts()) {
      cases.push_back({std::string("topk/") + order.name + "/keys:" + short_number(layout.keys),
                       [&order, keys = layout.keys](Exec const& exec) {
                         return topk_call(exec, order, keys);
                       }});
    }
  }
  return cases;
}

}  // namespace bench
