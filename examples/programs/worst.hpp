// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cmath>

namespace programs {

/// The larger of the worst error so far and the magnitude of another one. Once NaN, always NaN: a
/// maximum would forget it at the next number.
inline double worst(double so_far, double difference) {
  double const magnitude = std::fabs(difference);
  return std::isnan(so_far) || magnitude <= so_far ? so_far : magnitude;
}

/// `error` as a part of `largest`; no error is none, of whatever.
inline double relative(double error, double largest) { return error == 0 ? 0 : error / largest; }

}  // namespace programs
