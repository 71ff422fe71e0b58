// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/status.hpp>

#include <cuda/std/span>

#include <cmath>
#include <cstdint>

/// @file What measured times say about the indexer: Amdahl's law with the number of full layers as
/// the part that changes. All times are in the caller's unit.

namespace indexshare {
inline namespace v0 {
namespace indexcache {

/// A time measured with so many full layers, everything else being the same.
struct MeasuredTime {
  double full_layers = 0;
  double time = 0;
};

/// time = fixed + full_layers * per_full_layer.
struct IndexerTime {
  double fixed = 0;
  double per_full_layer = 0;

  /// Predicted time. Where the fit is bad this need not be above 0.
  constexpr double at(double full_layers) const noexcept {
    return fixed + full_layers * per_full_layer;
  }

  /// Of the predicted time, the part that the indexers take.
  constexpr double indexer_share(double full_layers) const noexcept {
    return full_layers * per_full_layer / at(full_layers);
  }

  /// Predicted time with `all` full layers over that with `fewer`.
  constexpr double speedup(double all, double fewer) const noexcept { return at(all) / at(fewer); }
};

/// The least-squares line through measured times.
/// Errors: bad_value if a number is not finite, a time is not above 0, or fewer than two different
/// numbers of full layers are there; `got` is the index of the entry, or the number of entries.
inline Result<IndexerTime> fit_indexer_time(cuda::std::span<MeasuredTime const> measured) noexcept {
  auto const count = static_cast<double>(measured.size());
  double mean_layers = 0;
  double mean_time = 0;
  std::int64_t entry = 0;
  for (MeasuredTime const& one : measured) {
    if (!std::isfinite(one.full_layers) || one.full_layers < 0)
      return refuse(failure(Errc::bad_value, "full_layers of a measured time", 0, entry));
    if (!std::isfinite(one.time) || one.time <= 0)
      return refuse(failure(Errc::bad_value, "time of a measured time", 0, entry));
    mean_layers += one.full_layers / count;
    mean_time += one.time / count;
    ++entry;
  }
  double layers_squared = 0;
  double layers_by_time = 0;
  bool differ = false;
  for (MeasuredTime const& one : measured) {
    differ = differ || one.full_layers != measured[0].full_layers;
    layers_squared += (one.full_layers - mean_layers) * (one.full_layers - mean_layers);
    layers_by_time += (one.full_layers - mean_layers) * (one.time - mean_time);
  }
  if (!differ)
    return refuse(failure(Errc::bad_value, "measured times at two different numbers of full layers",
                          2, entry));
  double const slope = layers_by_time / layers_squared;
  return IndexerTime{mean_time - slope * mean_layers, slope};
}

/// The speed-up that a profile promises: indexers take `share` of the time with `all` full layers,
/// and their time falls with their number. Preconditions: 0 <= share < 1, 0 <= fewer <= all.
constexpr double speedup_from_share(double share, double all, double fewer) noexcept {
  return 1 / (1 - share * (all - fewer) / all);
}

}  // namespace indexcache
}  // namespace v0
}  // namespace indexshare
