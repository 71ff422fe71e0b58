// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/macros.hpp>

#include <cuda/std/bit>

#include <cstdint>

namespace indexshare {
inline namespace v0 {

/// The order of scores as an unsigned number, larger is better: -0.0 and +0.0 are one value, -inf
/// is an ordinary score, every NaN is the same and lies below all numbers. Ties between equal keys
/// go to the lower position; that is the caller's second criterion.
INDEXSHARE_HD constexpr std::uint32_t order_key(float score) noexcept {
  auto const bits = cuda::std::bit_cast<std::uint32_t>(score);
  std::uint32_t const magnitude = bits & 0x7FFFFFFFu;
  if (magnitude > 0x7F800000u) return 0;
  std::uint32_t const negative = 0u - (bits >> 31);  // no branch: signs are unpredictable
  return 0x80000000u + ((magnitude ^ negative) - negative);
}
static_assert(order_key(-0.0f) == order_key(0.0f));
static_assert(order_key(-cuda::std::bit_cast<float>(0x7F800000u)) > 0, "-inf is above NaN");

}  // namespace v0
}  // namespace indexshare
