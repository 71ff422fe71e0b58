// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/dims.hpp>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <span>
#include <string>
#include <utility>
#include <vector>

/// @file What the results must be, written from docs and not from the library's code: top-k by a
/// stable sort, scores and attention by gathering the keys, in double.

namespace test {

using indexshare::index_t;
using indexshare::position_t;

inline constexpr double fp32_epsilon = 0x1p-24;

/// Error of a sum of n terms whose magnitudes add up to `magnitude`, with fp32 arithmetic.
inline double tolerance(index_t n, double magnitude) {
  return fp32_epsilon * (4 * std::sqrt(static_cast<double>(n)) + 4) * magnitude + 1e-37;
}

struct Row {
  std::vector<position_t> indices;
  position_t count = 0;

  friend bool operator==(Row const&, Row const&) = default;
};

/// One sentence about the first place where two rows differ; empty if they are equal.
inline std::string difference(Row const& expected, Row const& got) {
  auto const number = [](auto n) { return std::to_string(n); };
  if (expected.count != got.count) {
    return "count " + number(got.count) + ", expected " + number(expected.count);
  }
  if (expected.indices.size() != got.indices.size()) return "width " + number(got.indices.size());
  for (std::size_t j = 0; j < got.indices.size(); ++j) {
    if (expected.indices[j] != got.indices[j]) {
      return "entry " + number(j) + " is " + number(got.indices[j]) + ", expected " +
             number(expected.indices[j]);
    }
  }
  return {};
}

/// The selection of one row: the first `length` scores, width k.
inline Row select_by_sort(std::span<float const> scores, index_t length, index_t k) {
  length = std::clamp<index_t>(length, 0, static_cast<index_t>(scores.size()));
  std::vector<std::pair<float, position_t>> pairs;
  for (index_t s = 0; s < length; ++s) {
    pairs.emplace_back(scores[static_cast<std::size_t>(s)], static_cast<position_t>(s));
  }
  std::stable_sort(pairs.begin(), pairs.end(), [](auto const& a, auto const& b) {
    if (std::isnan(a.first) || std::isnan(b.first)) {
      return !std::isnan(a.first) && std::isnan(b.first);
    }
    return a.first > b.first;
  });
  Row row;
  row.count = static_cast<position_t>(std::min(k, length));
  for (index_t j = 0; j < row.count; ++j) {
    row.indices.push_back(pairs[static_cast<std::size_t>(j)].second);
  }
  std::sort(row.indices.begin(), row.indices.end());
  row.indices.resize(static_cast<std::size_t>(k), -1);
  return row;
}

/// A value and the sum of the magnitudes it was added up from.
struct Sum {
  double value = 0;
  double magnitude = 0;
};

inline Sum dot(std::span<float const> a, std::span<float const> b) {
  Sum sum;
  for (std::size_t i = 0; i < a.size(); ++i) {
    double const product = static_cast<double>(a[i]) * static_cast<double>(b[i]);
    sum.value += product;
    sum.magnitude += std::abs(product);
  }
  return sum;
}

/// Index score of one key; q holds the heads one after the other.
inline Sum index_score(std::span<float const> q, std::span<float const> weights,
                       std::span<float const> key) {
  Sum score;
  for (std::size_t h = 0; h < weights.size(); ++h) {
    Sum const head = dot(q.subspan(h * key.size(), key.size()), key);
    double const weight = static_cast<double>(weights[h]);
    score.value += weight * std::max(head.value, 0.0);
    score.magnitude += std::abs(weight) * head.magnitude;
  }
  return score;
}

/// Attention of one head of one row.
struct Attended {
  std::vector<double> out;
  std::vector<double> magnitudes;  ///< of the terms of `out`, added up
  double lse = -std::numeric_limits<double>::infinity();
  std::vector<double> out_tolerance;  ///< before rounding to the output type
  double lse_tolerance = 0;
};

/// Softmax over exactly `keys`, as often as each occurs. `sink` null: none.
inline Attended attend(std::span<float const> q, std::vector<std::span<float const>> const& keys,
                       index_t value_dim, double scale, float const* sink = nullptr) {
  Attended result;
  result.out.assign(static_cast<std::size_t>(value_dim), 0.0);
  result.magnitudes = result.out_tolerance = result.out;
  if (keys.empty()) return result;
  std::vector<double> logits;
  double largest = -std::numeric_limits<double>::infinity();
  double logit_error = 0;
  double largest_value = 0;
  for (auto const key : keys) {
    Sum const sum = dot(q, key);
    logits.push_back(scale * sum.value);
    largest = std::max(largest, logits.back());
    logit_error =
        std::max(logit_error, tolerance(static_cast<index_t>(q.size()), scale * sum.magnitude));
    for (index_t v = 0; v < value_dim; ++v) {
      largest_value =
          std::max(largest_value, std::abs(static_cast<double>(key[static_cast<std::size_t>(v)])));
    }
  }
  double total = 0;
  for (std::size_t s = 0; s < keys.size(); ++s) {
    double const weight = std::exp(logits[s] - largest);
    total += weight;
    for (std::size_t v = 0; v < result.out.size(); ++v) {
      result.out[v] += weight * static_cast<double>(keys[s][v]);
      result.magnitudes[v] += weight * std::abs(static_cast<double>(keys[s][v]));
    }
  }
  result.lse = largest + std::log(total);
  double factor = 1 / total;
  if (sink != nullptr) factor /= 1 + std::exp(static_cast<double>(*sink) - result.lse);
  for (double& out : result.out) out *= factor;
  for (double& magnitude : result.magnitudes) magnitude *= factor;
  // A logit that is off by e moves each weight by a factor exp(e), and so does its total.
  auto const n = static_cast<index_t>(keys.size());
  for (std::size_t v = 0; v < result.out.size(); ++v) {
    double const magnitude = result.magnitudes[v];
    // a weight too small for fp32 may be lost, whatever value it belongs to
    result.out_tolerance[v] =
        2 * logit_error * magnitude + tolerance(n, magnitude) + largest_value * 0x1p-120;
  }
  result.lse_tolerance = logit_error + tolerance(n, 1) + tolerance(1, std::abs(result.lse));
  return result;
}

}  // namespace test
