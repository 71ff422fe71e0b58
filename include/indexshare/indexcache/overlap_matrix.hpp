// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/dims.hpp>
#include <indexshare/indexcache/overlap_counts.hpp>
#include <indexshare/share/source.hpp>
#include <indexshare/status.hpp>

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

/// @file What can be said about the overlaps of all pairs of layers.

namespace indexshare {
inline namespace v0 {
namespace indexcache {

/// Overlaps of pairs of layers, each in [0, 1]. Rows and columns are *places*: 0 .. size() - 1 in
/// the order of `layers`, whose numbers need not follow each other.
class OverlapMatrix {
 public:
  /// @param layers  numbers of the layers, ascending
  /// @param values  [layers, layers], row-major
  /// Errors: bad_shape for another number of values; bad_value for numbers that do not ascend and
  /// for a value outside [0, 1] (`layer` is then the row's).
  static Result<OverlapMatrix> make(std::vector<std::int32_t> layers, std::vector<double> values) {
    if (values.size() != layers.size() * layers.size()) {
      return refuse(failure(Errc::bad_shape, "values of an overlap matrix",
                            static_cast<std::int64_t>(layers.size() * layers.size()),
                            static_cast<std::int64_t>(values.size())));
    }
    for (std::size_t i = 0; i < layers.size(); ++i) {
      std::int32_t const least = i == 0 ? 0 : layers[i - 1] + 1;
      if (layers[i] < least) {
        return refuse(failure(Errc::bad_value, "layer numbers of an overlap matrix must ascend",
                              least, layers[i]));
      }
    }
    for (std::size_t i = 0; i < values.size(); ++i) {
      if (!(values[i] >= 0 && values[i] <= 1)) {
        return refuse(failure(Errc::bad_value, "value of an overlap matrix is outside [0, 1]")
                          .at_layer(layers[i / layers.size()]));
      }
    }
    return OverlapMatrix(std::move(layers), std::move(values));
  }

  index_t size() const noexcept { return static_cast<index_t>(layers_.size()); }
  std::vector<std::int32_t> const& layers() const noexcept { return layers_; }

  /// Preconditions: i and j in [0, size()).
  double at(index_t i, index_t j) const noexcept {
    return values_[static_cast<std::size_t>(i * size() + j)];
  }

  /// Place of a layer, if it has one.
  std::optional<index_t> place_of(std::int32_t layer) const noexcept {
    auto const found = std::lower_bound(layers_.begin(), layers_.end(), layer);
    if (found == layers_.end() || *found != layer) return std::nullopt;
    return found - layers_.begin();
  }

 private:
  OverlapMatrix(std::vector<std::int32_t> layers, std::vector<double> values)
      : layers_(std::move(layers)), values_(std::move(values)) {}

  std::vector<std::int32_t> layers_;
  std::vector<double> values_;
};

/// The means of counted rows. @param layers  numbers of the counted layers, ascending
/// Errors: bad_shape for another number of layers; bad_value for numbers that do not ascend.
inline Result<OverlapMatrix> overlap_matrix(OverlapCounts const& counts,
                                            std::vector<std::int32_t> layers) {
  if (static_cast<index_t>(layers.size()) != counts.layers()) {
    return refuse(failure(Errc::bad_shape, "layers of the counts", counts.layers(),
                          static_cast<std::int64_t>(layers.size())));
  }
  std::vector<double> values;
  values.reserve(layers.size() * layers.size());
  for (index_t i = 0; i < counts.layers(); ++i) {
    for (index_t j = 0; j < counts.layers(); ++j) values.push_back(counts.overlap(i, j));
  }
  return OverlapMatrix::make(std::move(layers), std::move(values));
}

/// Overlaps of several pairs of layers.
struct OverlapSummary {
  index_t pairs = 0;
  double mean = 0;
  double low = 0;
  double high = 0;
};

namespace detail {

/// Over the pairs (i, j) of places, j < i, that `keeps`.
template <std::predicate<index_t, index_t> Keeps>
std::optional<OverlapSummary> summarize_pairs(OverlapMatrix const& matrix, Keeps const& keeps) {
  OverlapSummary summary{0, 0, 1, 0};
  for (index_t i = 0; i < matrix.size(); ++i) {
    for (index_t j = 0; j < i; ++j) {
      if (!keeps(i, j)) continue;
      double const value = matrix.at(i, j);
      ++summary.pairs;
      summary.mean += value;
      summary.low = std::min(summary.low, value);
      summary.high = std::max(summary.high, value);
    }
  }
  if (summary.pairs == 0) return std::nullopt;
  summary.mean /= static_cast<double>(summary.pairs);
  return summary;
}

}  // namespace detail

/// All pairs of two different layers; nothing if there are none.
inline std::optional<OverlapSummary> summarize_pairs(OverlapMatrix const& matrix) {
  return detail::summarize_pairs(matrix, [](index_t, index_t) { return true; });
}

/// Pairs of layers whose numbers differ by `lag`; nothing if there are none.
inline std::optional<OverlapSummary> summarize_lag(OverlapMatrix const& matrix, std::int32_t lag) {
  auto const& layers = matrix.layers();
  return detail::summarize_pairs(matrix, [&](index_t i, index_t j) {
    return layers[static_cast<std::size_t>(i)] - layers[static_cast<std::size_t>(j)] == lag;
  });
}

/// A shared layer against the layer whose selection it reads.
struct SourceOverlap {
  std::int32_t layer = 0;
  std::int32_t source = 0;
  double overlap = 0;
};

/// The shared layers of a policy, as far as they and their sources are in the matrix: which part of
/// its own picks a layer gets when it reads those of its source. The matrix must be one of a model
/// that shares nothing: a shared layer that was recorded while it shared has an overlap of 1.
/// @param policy  a share policy such as SharePlan, Pattern or Periodic
template <class Policy>
requires requires(Policy const& policy) {
  { share_source(policy, std::int32_t{}) } -> std::convertible_to<std::int32_t>;
}
std::vector<SourceOverlap> source_overlaps(OverlapMatrix const& matrix, Policy const& policy) {
  std::vector<SourceOverlap> overlaps;
  for (index_t place = 0; place < matrix.size(); ++place) {
    std::int32_t const layer = matrix.layers()[static_cast<std::size_t>(place)];
    std::int32_t const source = share_source(policy, layer);
    if (source == no_source || source == layer) continue;
    if (auto const at = matrix.place_of(source)) {
      overlaps.push_back({layer, source, matrix.at(place, *at)});
    }
  }
  return overlaps;
}

/// Mean over shared layers; nothing if there are none.
inline std::optional<double> mean_of(std::vector<SourceOverlap> const& overlaps) {
  if (overlaps.empty()) return std::nullopt;
  double sum = 0;
  for (SourceOverlap const& each : overlaps) sum += each.overlap;
  return sum / static_cast<double>(overlaps.size());
}

}  // namespace indexcache
}  // namespace v0
}  // namespace indexshare
