// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "model.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <span>
#include <utility>
#include <vector>

/// @file What a row must select and attend to, computed from the model's numbers without the
/// library. Scores of the integer models are exact.

namespace layer_test {

/// Positions of the min(k, length) best scores, ascending; the lower position wins a tie.
template <class M>
std::vector<position_t> selection_by_hand(M& model, std::int32_t layer, Row row) {
  Shape const& shape = model.shape;
  index_t const position = row.length - 1;
  auto const q = token_values(Part::index_query, layer, row.request, position,
                              shape.index_heads * shape.index_dim);
  auto const w = token_values(Part::head_weight, layer, row.request, position, shape.index_heads);
  std::vector<double> score(to_size(row.length));
  for (position_t s = 0; s < row.length; ++s) {
    auto const key = std::as_const(model.index_keys(layer)).value(row.request, s);
    for (std::size_t h = 0; h < w.size(); ++h) {
      auto const query = q.begin() + static_cast<index_t>(h) * shape.index_dim;
      double const dot = std::inner_product(key.begin(), key.end(), query, 0.0);
      score[to_size(s)] += w[h] * std::max(dot, 0.0);
    }
  }
  std::vector<position_t> best(to_size(row.length));
  std::iota(best.begin(), best.end(), 0);
  std::stable_sort(best.begin(), best.end(), [&](position_t a, position_t b) {
    return score[to_size(a)] > score[to_size(b)];
  });
  best.resize(to_size(std::min<index_t>(shape.top_k, row.length)));
  std::sort(best.begin(), best.end());
  return best;
}

/// Output [heads, value_dim] of softmax attention of a row over the given positions.
template <class M>
std::vector<float> attention_by_hand(M& model, std::int32_t layer, Row row,
                                     std::vector<position_t> const& positions,
                                     double scale = 0.125) {
  Shape const& shape = model.shape;
  auto const q =
      token_values(Part::query, layer, row.request, row.length - 1, shape.heads * shape.key_dim);
  std::vector<float> out;
  for (index_t h = 0; h < shape.heads; ++h) {
    std::vector<double> sums(to_size(shape.value_dim));
    double total = 0;
    for (position_t const s : positions) {
      auto const key = std::as_const(model.kv(layer)).value(row.request, s);
      double const logit =
          scale * std::inner_product(key.begin(), key.end(), q.begin() + h * shape.key_dim, 0.0);
      total += std::exp(logit);
      for (std::size_t v = 0; v < sums.size(); ++v) sums[v] += std::exp(logit) * key[v];
    }
    for (double const sum : sums) {
      out.push_back(positions.empty() ? 0.0f : static_cast<float>(sum / total));
    }
  }
  return out;
}

inline bool close(std::span<float const> a, std::span<float const> b, float tolerance = 1e-4f) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [&](float x, float y) {
    return std::abs(x - y) <= tolerance * std::max(1.0f, std::abs(y));
  });
}

/// Row r of an output of [rows, heads, value_dim].
inline std::vector<float> row_of(std::vector<float> const& out, Shape const& shape, std::size_t r) {
  auto const first = out.begin() + static_cast<index_t>(r) * shape.heads * shape.value_dim;
  return {first, first + shape.heads * shape.value_dim};
}

/// All positions below a length.
inline std::vector<position_t> all_below(position_t length) {
  std::vector<position_t> positions(to_size(length));
  std::iota(positions.begin(), positions.end(), 0);
  return positions;
}

}  // namespace layer_test
