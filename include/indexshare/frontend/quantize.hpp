// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/detail/check.hpp>
#include <indexshare/element.hpp>
#include <indexshare/macros.hpp>
#include <indexshare/status.hpp>
#include <indexshare/views.hpp>

#include <cuda/std/bit>

#include <cstdint>

/// @file Index queries in e4m3 with a scale per row and head, the form that an indexer with e4m3
/// queries reads. Back ends: host/quantize.hpp, cuda/quantize.cuh.

namespace indexshare {
inline namespace v0 {

/// How the scale of a head is made. Implementations differ in both, and near ties in a selection
/// with them; a positive factor itself changes no selection.
/// @source DeepSeek-V3.2-Exp inference/kernel.py, act_quant (1e-4; a power of two with scale_fmt
/// "ue8m0", else not); vLLM's index queries use 1e-10 and powers of two
struct QueryQuantization {
  float amax_floor = 1e-4f;   ///< the scale is that of a head whose largest lane is at least this
  bool power_of_two = false;  ///< round the scale up to a power of two
};

namespace detail {

inline constexpr float largest_e4m3 = 448.0f;

/// 0 for what is no number or infinite: such a lane takes no part in the scale.
INDEXSHARE_HD constexpr float finite_magnitude(float value) noexcept {
  std::uint32_t const magnitude = cuda::std::bit_cast<std::uint32_t>(value) & 0x7FFFFFFFu;
  return magnitude < 0x7F800000u ? cuda::std::bit_cast<float>(magnitude) : 0.0f;
}

/// By the exponent's bits: a logarithm rounds wrongly just above a power of two.
INDEXSHARE_HD constexpr float next_power_of_two(float value) noexcept {
  auto const bits = cuda::std::bit_cast<std::uint32_t>(value);
  std::uint32_t const up = (bits & 0x7FFFFFu) != 0 ? 1 : 0;
  return cuda::std::bit_cast<float>(((bits >> 23) + up) << 23);
}

INDEXSHARE_HD constexpr float query_scale(float amax, QueryQuantization const& options) noexcept {
  float const scale = (amax < options.amax_floor ? options.amax_floor : amax) / largest_e4m3;
  return options.power_of_two ? next_power_of_two(scale) : scale;
}

INDEXSHARE_HD constexpr e4m3 quantized(float value, float scale) noexcept {
  std::uint32_t const magnitude = cuda::std::bit_cast<std::uint32_t>(value) & 0x7FFFFFFFu;
  return magnitude < 0x7F800000u ? from_float<e4m3>(value / scale) : e4m3{0x7F};
}

/// What every back end asks of the arguments of `quantize_queries`.
template <Space S>
Status check_quantize(Tensor<S, float const, 3> const& q, Tensor<S, float, 2> const& weights,
                      Tensor<S, e4m3, 3> const& out, QueryQuantization const& options) noexcept {
  // a scale below the normal numbers would lose bits, and one of infinity everything
  bool const floor_fits = options.amax_floor >= 1e-30f && options.amax_floor <= 1e30f;
  return first_failure(
      {check_extent("rows of the head weights against the index queries", q.extent(0),
                    weights.extent(0)),
       check_extent("heads of the head weights against the index queries", q.extent(1),
                    weights.extent(1)),
       check_extent("rows of the e4m3 queries", q.extent(0), out.extent(0)),
       check_extent("heads of the e4m3 queries", q.extent(1), out.extent(1)),
       check_extent("lanes of the e4m3 queries", q.extent(2), out.extent(2)),
       check_readable("index queries", q), check_writable("head weights", weights),
       check_writable("e4m3 queries", out),
       floor_fits ? Status{}
                  : failure(Errc::bad_value, "amax_floor must be between 1e-30 and 1e30")});
}

}  // namespace detail
}  // namespace v0
}  // namespace indexshare
