// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include "compare_result.hpp"
#include "recording.hpp"

/// @file Compares a float quantity of two recordings.

namespace programs {

/// The same quantity of two files, slice by slice: a recording may be larger than memory.
class TensorPair {
 public:
  /// @pre the shapes fit, and a Hadamard transform is possible if the bases differ
  TensorPair(Recording const& a, Recording const& b, std::int32_t layer, Quantity id)
      : recording_(&a), id_(id), a_(a.tensor(layer, id)), b_(b.tensor(layer, id)) {
    if (id != Quantity::index_q && id != Quantity::index_k) return;
    if (a.index_basis() == b.index_basis()) return;
    (a.index_basis() == IndexBasis::natural ? transform_a_ : transform_b_) = true;
  }

  std::size_t slices() const { return a_.slices(); }
  std::size_t heads() const { return a_.heads(); }
  bool is_16_bit() const { return a_.is_16_bit() || b_.is_16_bit(); }

  /// Lanes that count: a row's scores end at its visible keys.
  std::size_t lanes(std::size_t slice) const {
    return id_ == Quantity::scores ? recording_->visible_keys(slice) : a_.lanes();
  }

  void read(std::size_t slice) {
    read(a_, transform_a_, slice, values_a_);
    read(b_, transform_b_, slice, values_b_);
  }
  double a(std::size_t head, std::size_t lane) const { return values_a_[head * a_.lanes() + lane]; }
  double b(std::size_t head, std::size_t lane) const { return values_b_[head * b_.lanes() + lane]; }

 private:
  static void read(RecordedTensor const& tensor, bool transform, std::size_t slice,
                   std::vector<double>& values) {
    values.resize(tensor.slice_size());
    tensor.read_slice(slice, values);
    for (std::size_t head = 0; transform && head < tensor.heads(); ++head)
      hadamard(std::span(values).subspan(head * tensor.lanes(), tensor.lanes()));
  }

  Recording const* recording_;
  Quantity id_;
  RecordedTensor a_;
  RecordedTensor b_;
  bool transform_a_ = false;
  bool transform_b_ = false;
  std::vector<double> values_a_;
  std::vector<double> values_b_;
};

/// Calls `visit(place, a, b)` for every element of the slices that are not left out.
/// @param left_out  per slice; empty: none
template <class Visit>
void for_each_element(TensorPair& pair, std::vector<bool> const& left_out, Visit visit) {
  for (std::size_t slice = 0; slice < pair.slices(); ++slice) {
    if (!left_out.empty() && left_out[slice]) continue;
    pair.read(slice);
    for (std::size_t head = 0; head < pair.heads(); ++head)
      for (std::size_t lane = 0; lane < pair.lanes(slice); ++lane)
        visit(ElementPlace{slice, head, lane}, pair.a(head, lane), pair.b(head, lane));
  }
}

/// 0 if two values are equal, both NaN, or the same infinity; infinite where NaN or infinity meets
/// anything else.
inline double distance_of(double a, double b) {
  if (a == b || (std::isnan(a) && std::isnan(b))) return 0;
  if (!std::isfinite(a) || !std::isfinite(b)) return std::numeric_limits<double>::infinity();
  return std::abs(a - b);
}

/// What errors are relative to: the largest magnitude of the slice in either file, but no less than
/// that of the median slice. A token with massive activations widens the tolerance of no other, and
/// a slice that is small by cancellation is not held to its own smallness.
struct ErrorScale {
  std::vector<double> largest;  ///< finite magnitude, per slice
  double median = 0;            ///< of these; the lower one of an even number

  bool by_median(std::size_t slice) const { return largest[slice] < median; }
  double of(std::size_t slice) const { return std::max(largest[slice], median); }
};

/// @param left_out  as in `for_each_element`; such slices have no part in the median
inline ErrorScale error_scale(TensorPair& pair, std::vector<bool> const& left_out) {
  ErrorScale scale;
  scale.largest.resize(pair.slices());
  for_each_element(pair, left_out, [&scale](ElementPlace place, double a, double b) {
    double& largest = scale.largest[place.slice];
    for (double const value : {std::abs(a), std::abs(b)})
      if (std::isfinite(value)) largest = std::max(largest, value);
  });
  std::vector<double> compared;
  for (std::size_t slice = 0; slice < pair.slices(); ++slice)
    if (left_out.empty() || !left_out[slice]) compared.push_back(scale.largest[slice]);
  if (compared.empty()) return scale;
  auto const middle = compared.begin() + static_cast<std::ptrdiff_t>((compared.size() - 1) / 2);
  std::nth_element(compared.begin(), middle, compared.end());
  scale.median = *middle;
  return scale;
}

inline QuantityResult compare_tensors(TensorPair& pair, Quantity id, double tolerance,
                                      std::vector<bool> const& left_out) {
  QuantityResult result;
  result.id = id;
  result.tolerance = tolerance;
  result.rows_left_out =
      static_cast<std::size_t>(std::count(left_out.begin(), left_out.end(), true));
  ErrorScale const scale = error_scale(pair, left_out);
  for_each_element(pair, left_out, [&](ElementPlace place, double a, double b) {
    double const distance = distance_of(a, b);
    double const error = distance > 0 ? distance / scale.of(place.slice) : 0;
    ++result.elements;
    if (std::isnan(a) && std::isnan(b)) ++result.both_nan;
    if (error > tolerance) ++result.off;
    result.distance = std::max(result.distance, distance);
    if (error <= result.error && result.elements > 1) return;
    result.error = error;
    result.magnitude = scale.of(place.slice);
    result.by_median = scale.by_median(place.slice);
    result.at = place;
    result.a = a;
    result.b = b;
  });
  if (result.off > 0)
    result.verdict = Verdict::differs;
  else if (result.both_nan == result.elements)
    result.verdict = Verdict::not_compared;
  return result;
}

}  // namespace programs
