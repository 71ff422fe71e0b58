// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/cuda/detail/launch.cuh>
#include <indexshare/cuda/detail/lines.cuh>
#include <indexshare/cuda/detail/warp.cuh>
#include <indexshare/cuda/exec.cuh>
#include <indexshare/frontend/quantize.hpp>

namespace indexshare {
inline namespace v0 {
namespace detail {

/// A warp per head: its largest lane, then its codes.
INDEXSHARE_KERNEL void quantize_queries_kernel(
    __grid_constant__ Tensor<Space::device, float const, 3> const q,
    __grid_constant__ Tensor<Space::device, float, 2> const weights,
    __grid_constant__ Tensor<Space::device, e4m3, 3> const out, ScaleRecipe recipe) {
  constexpr unsigned warp_threads = LaneRange::warp_threads;
  LaneRange const lanes{threadIdx.x % warp_threads, q.extent(2)};
  index_t const heads = q.extent(0) * q.extent(1);
  for (index_t i = index_t{blockIdx.x} * line_warps + threadIdx.x / warp_threads; i < heads;
       i += index_t{gridDim.x} * line_warps) {
    index_t const row = i / q.extent(1);
    index_t const head = i % q.extent(1);
    float amax = 0;
    lanes.for_each([&](index_t lane) { amax = fmaxf(amax, finite_magnitude(q(row, head, lane))); });
    float const scale = scale_of_lanes(largest_of_warp(amax), recipe);
    lanes.for_each(
        [&](index_t lane) { out(row, head, lane) = quantized(q(row, head, lane), scale); });
    if (lanes.first == 0) weights(row, head) *= scale;
  }
}

}  // namespace detail

/// out(r, h, i) = q(r, h, i) / scale(r, h) in e4m3 and weights(r, h) *= scale(r, h): parameters,
/// errors and bits as on the host (host/quantize.hpp). Only enqueues; can be captured.
inline Status quantize_queries(CudaExec const& x, Tensor<Space::device, float const, 3> const& q,
                               Tensor<Space::device, float, 2> const& weights,
                               Tensor<Space::device, e4m3, 3> const& out,
                               ScaleRecipe const& recipe = {}) noexcept {
  if (Status const status = detail::check_quantize(q, weights, out, recipe); !status.ok()) {
    return status;
  }
  index_t const blocks = (q.extent(0) * q.extent(1) + detail::line_warps - 1) / detail::line_warps;
  return detail::launch(
      x, "quantize_queries", detail::quantize_queries_kernel,
      {dim3(detail::blocks_for(blocks)), detail::line_warps * detail::LaneRange::warp_threads, 0},
      q, weights, out, recipe);
}

}  // namespace v0
}  // namespace indexshare
