// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/cuda/detail/launch.cuh>
#include <indexshare/cuda/detail/lines.cuh>
#include <indexshare/cuda/exec.cuh>
#include <indexshare/frontend/rotary.hpp>
#include <indexshare/frontend/weights.hpp>
#include <indexshare/status.hpp>
#include <indexshare/views.hpp>

#include <algorithm>
#include <cmath>

/// @file The front end's steps between its matrix products, on a CUDA stream: the same functions
/// as host/frontend.hpp. All compute in fp32, with sums in double, whose order depends on the width
/// of a row alone; inputs and outputs may be the same memory, and do not overlap otherwise. They
/// only enqueue and can be captured. Extents are checked by their callers (frontend/steps.hpp).

namespace indexshare {
inline namespace v0 {
namespace detail {

/// Threads of a block that sums a row of `lanes` lanes: one warp for short rows.
constexpr int row_threads(index_t lanes) noexcept {
  return static_cast<int>(std::clamp<index_t>((lanes + 31) / 32 * 32, 32, 256));
}

/// Sum over the block of one double per thread, the same on every thread.
__device__ inline double sum_of_block(double value) {
  __shared__ double of_warp[32];
  for (int apart = 16; apart > 0; apart /= 2) value += __shfl_xor_sync(~0u, value, apart);
  __syncthreads();  // the last sum has been read
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = value;
  __syncthreads();
  double sum = 0;
  for (unsigned warp = 0; warp < blockDim.x / 32; ++warp) sum += of_warp[warp];
  return sum;
}

/// f(i) for this thread's share of [0, count).
template <class Index, class F>
__device__ void share_in_block(Index count, F const& f) {
  for (auto i = static_cast<Index>(threadIdx.x); i < count; i += static_cast<Index>(blockDim.x)) {
    f(i);
  }
}

template <class F>
__device__ double sum_over_lanes(index_t lanes, F const& f) {
  double sum = 0;
  share_in_block(lanes, [&](index_t i) { sum = __dadd_rn(sum, f(i)); });
  return sum_of_block(sum);
}

// The arithmetic on one row, by all threads of a block of `row_threads(n)`: in(i) is a lane to
// read, out(i) the same lane to write. Roundings are spelled out, so that every kernel that has a
// step gives the same bits, however the compiler would fuse them there.

template <class In, class Out>
__device__ void rms_norm_in_block(index_t n, In const& in, VectorView<Space::device> const& gain,
                                  double eps, Out const& out) {
  double const squares =
      sum_over_lanes(n, [&](index_t i) { return __dmul_rn(double{in(i)}, double{in(i)}); });
  auto const factor =
      static_cast<float>(1 / sqrt(__dadd_rn(squares / static_cast<double>(n), eps)));
  share_in_block(n, [&](index_t i) { out(i) = __fmul_rn(__fmul_rn(in(i), factor), gain(i)); });
}

template <class In, class Out>
__device__ void layer_norm_in_block(index_t n, In const& in, VectorView<Space::device> const& gain,
                                    VectorView<Space::device> const& bias, double eps,
                                    Out const& out) {
  auto const width = static_cast<double>(n);
  double const mean = sum_over_lanes(n, [&](index_t i) { return double{in(i)}; }) / width;
  double const squares = sum_over_lanes(n, [&](index_t i) {
    double const deviation = double{in(i)} - mean;
    return __dmul_rn(deviation, deviation);
  });
  double const factor = 1 / sqrt(__dadd_rn(squares / width, eps));
  share_in_block(n, [&](index_t i) {
    double const normed = __dmul_rn(double{in(i)} - mean, factor);
    out(i) = static_cast<float>(__fma_rn(normed, double{gain(i)}, double{bias(i)}));
  });
}

INDEXSHARE_KERNEL void rms_norm_kernel(
    __grid_constant__ Tensor<Space::device, float const, 2> const in,
    __grid_constant__ VectorView<Space::device> const gain, double eps,
    __grid_constant__ Tensor<Space::device, float, 2> const out) {
  for (index_t row = blockIdx.x; row < in.extent(0); row += gridDim.x) {
    rms_norm_in_block(
        in.extent(1), [&](index_t i) { return in(row, i); }, gain, eps,
        [&](index_t i) -> float& { return out(row, i); });
  }
}

INDEXSHARE_KERNEL void layer_norm_kernel(
    __grid_constant__ Tensor<Space::device, float const, 2> const in,
    __grid_constant__ VectorView<Space::device> const gain,
    __grid_constant__ VectorView<Space::device> const bias, double eps,
    __grid_constant__ Tensor<Space::device, float, 2> const out) {
  for (index_t row = blockIdx.x; row < in.extent(0); row += gridDim.x) {
    layer_norm_in_block(
        in.extent(1), [&](index_t i) { return in(row, i); }, gain, bias, eps,
        [&](index_t i) -> float& { return out(row, i); });
  }
}

struct SineCosine {
  float sine;
  float cosine;
};

/// Of an angle in fp32 of any size. It is reduced to [-1, 1] half turns in double, which is off by
/// 2^-53 of itself: nothing at position 2^20, the last bit of a float at 2^31. (sinf and cosf
/// reduce with a table in local memory.)
__device__ inline SineCosine sine_and_cosine(float angle) {
  constexpr double inverse_pi = 0.3183098861837907;
  double const half_turns = double{angle} * inverse_pi;
  SineCosine result;
  sincospif(static_cast<float>(half_turns - 2 * rint(half_turns / 2)), &result.sine,
            &result.cosine);
  return result;
}

/// By which pair `pair` of a token turns, times the amplitude.
__device__ inline SineCosine turn_of(position_t position, RotaryFrequencies const& frequencies,
                                     int pair) {
  float const angle = static_cast<float>(position) * frequencies.inverse[pair];
  SineCosine const turn = sine_and_cosine(angle);
  return {turn.sine * frequencies.amplitude, turn.cosine * frequencies.amplitude};
}

/// Where the two lanes of a pair are.
struct PairPlaces {
  int step;   ///< from pair to pair
  int apart;  ///< within a pair

  __device__ PairPlaces(RopeLayout layout, int pairs)
      : step(layout == RopeLayout::interleaved ? 2 : 1),
        apart(layout == RopeLayout::interleaved ? 1 : pairs) {}
};

/// Turns one pair: in(i) is a lane to read, out(i) the same lane to write.
template <class In, class Out>
__device__ void rotate_pair(PairPlaces const& places, int pair, SineCosine const& turn,
                            In const& in, Out const& out) {
  float const a = in(pair * places.step);
  float const b = in(pair * places.step + places.apart);
  out(pair * places.step) = __fmaf_rn(a, turn.cosine, -__fmul_rn(b, turn.sine));
  out(pair * places.step + places.apart) = __fmaf_rn(a, turn.sine, __fmul_rn(b, turn.cosine));
}

/// A block makes the angles of a row once, for all of its heads.
struct RotateBlock {
  static constexpr int threads = 256;
  static constexpr index_t heads = 8;  ///< of a block; more where grid.y ends
};

INDEXSHARE_KERNEL void rotate_kernel(
    __grid_constant__ Tensor<Space::device, float const, 3> const in,
    __grid_constant__ PositionView<Space::device> const positions,
    __grid_constant__ RotaryFrequencies const frequencies, RopeLayout layout,
    __grid_constant__ Tensor<Space::device, float, 3> const out) {
  __shared__ SineCosine turns[RotaryFrequencies::max_pairs];
  auto const pairs = static_cast<int>(frequencies.pairs);
  PairPlaces const places(layout, pairs);
  // The heads of a row are shared out over grid.y.
  index_t const heads_of_block = (in.extent(1) + gridDim.y - 1) / gridDim.y;
  index_t const first = blockIdx.y * heads_of_block;
  index_t const last = min(first + heads_of_block, in.extent(1));
  for (index_t row = blockIdx.x; row < in.extent(0); row += gridDim.x) {
    __syncthreads();  // the last row's angles have been read
    share_in_block(pairs, [&](int i) { turns[i] = turn_of(positions(row), frequencies, i); });
    __syncthreads();
    share_in_block(static_cast<int>(last - first) * pairs, [&](int item) {
      index_t const head = first + item / pairs;
      int const pair = item % pairs;
      rotate_pair(
          places, pair, turns[pair], [&](int i) { return in(row, head, i); },
          [&](int i) -> float& { return out(row, head, i); });
    });
  }
}

/// A block transforms as many heads as fill `lanes` lanes of its shared memory, at least one.
struct HadamardBlock {
  static constexpr int threads = 128;
  static constexpr int lanes = 256;
  static constexpr int most_lanes = 8192;  ///< of a head
  static_assert(most_lanes * sizeof(float) <= plain_shared_bytes);

  static constexpr int heads(int width) noexcept { return std::max(lanes / width, 1); }
};

/// Sylvester's transform, without its factor, of `count` heads of `width` lanes that lie dense in
/// shared memory. Begins with a barrier at each stage and ends without one.
__device__ inline void butterflies(float* lanes, int width, int count) {
  for (int apart = 1; apart < width; apart *= 2) {
    __syncthreads();
    share_in_block(count * width / 2, [&](int pair) {
      int const i = pair / apart * 2 * apart + pair % apart;
      float const a = lanes[i];
      float const b = lanes[i + apart];
      lanes[i] = a + b;
      lanes[i + apart] = a - b;
    });
  }
}

__device__ inline float hadamard_factor(int width) {
  return static_cast<float>(1 / sqrt(static_cast<double>(width)));
}

INDEXSHARE_KERNEL void hadamard_kernel(
    __grid_constant__ Tensor<Space::device, float, 3> const lanes, int heads_of_block) {
  extern __shared__ float butterfly[];  // the lanes of the block's heads, one after the other
  auto const width = static_cast<int>(lanes.extent(2));
  float const factor = hadamard_factor(width);
  index_t const heads = lanes.extent(0) * lanes.extent(1);
  index_t const step = index_t{gridDim.x} * heads_of_block;
  for (index_t first = index_t{blockIdx.x} * heads_of_block; first < heads; first += step) {
    auto const count = static_cast<int>(min(index_t{heads_of_block}, heads - first));
    auto const each_lane = [&](auto const& f) {
      for (int h = 0; h < count; ++h) {
        index_t const row = (first + h) / lanes.extent(1);
        index_t const head = (first + h) % lanes.extent(1);
        share_in_block(width, [&](int i) { f(lanes(row, head, i), butterfly[h * width + i]); });
      }
    };
    each_lane([](float const& lane, float& copy) { copy = lane; });
    butterflies(butterfly, width, count);
    __syncthreads();
    each_lane([&](float& lane, float const& copy) { lane = copy * factor; });
    // The next heads need no barrier: a thread writes what it has just read itself.
  }
}

struct Scale {
  Tensor<Space::device, float const, 3> in;
  float factor;
  Tensor<Space::device, float, 3> out;

  __device__ void operator()(index_t row, index_t head, LaneRange lanes) const {
    lanes.for_each([&](index_t i) { out(row, head, i) = in(row, head, i) * factor; });
  }
};

struct Gate {
  Tensor<Space::device, float const, 3> values;
  Tensor<Space::device, float const, 3> gates;
  Tensor<Space::device, float, 3> out;

  __device__ void operator()(index_t row, index_t head, LaneRange lanes) const {
    lanes.for_each([&](index_t i) {
      out(row, head, i) = values(row, head, i) / (1.0f + expf(-gates(row, head, i)));
    });
  }
};

template <class View>
Lines lines_of(View const& view) noexcept {
  return {view.extent(0), view.extent(1), view.extent(2)};
}

}  // namespace detail

/// out = in * gain / sqrt(mean(in^2) + eps), row by row.
inline Status rms_norm(CudaExec const& x, Tensor<Space::device, float const, 2> const& in,
                       VectorView<Space::device> const& gain, double eps,
                       Tensor<Space::device, float, 2> const& out) noexcept {
  return detail::launch(
      x, "rms_norm", detail::rms_norm_kernel,
      {dim3(detail::blocks_for(in.extent(0))), detail::row_threads(in.extent(1)), 0}, in, gain, eps,
      out);
}

/// out = (in - mean) / sqrt(variance + eps) * gain + bias, row by row; the variance is that of the
/// row, divided by its width.
inline Status layer_norm(CudaExec const& x, Tensor<Space::device, float const, 2> const& in,
                         VectorView<Space::device> const& gain,
                         VectorView<Space::device> const& bias, double eps,
                         Tensor<Space::device, float, 2> const& out) noexcept {
  return detail::launch(
      x, "layer_norm", detail::layer_norm_kernel,
      {dim3(detail::blocks_for(in.extent(0))), detail::row_threads(in.extent(1)), 0}, in, gain,
      bias, eps, out);
}

/// Turns the lanes [rows, heads, 2 * pairs] of each row by its position's angles; a pair (a, b)
/// becomes (a cos - b sin, a sin + b cos) in the same two lanes.
inline Status rotate(CudaExec const& x, Tensor<Space::device, float const, 3> const& in,
                     PositionView<Space::device> const& positions,
                     RotaryFrequencies const& frequencies, RopeLayout layout,
                     Tensor<Space::device, float, 3> const& out) noexcept {
  using Block = detail::RotateBlock;
  if (frequencies.pairs == 0) return {};
  index_t const parts = (in.extent(1) + Block::heads - 1) / Block::heads;
  auto const grid_y = static_cast<unsigned>(std::min<index_t>(parts, 65535));
  return detail::launch(x, "rotate", detail::rotate_kernel,
                        {dim3(detail::blocks_for(in.extent(0)), grid_y), Block::threads, 0}, in,
                        positions, frequencies, layout, out);
}

/// Sylvester's Hadamard transform of the lanes of each head, times lanes^-0.5: orthogonal and its
/// own inverse; the same bits as on the host. Precondition: the number of lanes is a power of two.
/// Errors: unsupported above 8192 lanes, which do not fit shared memory.
/// @source DeepSeek-V3.2-Exp inference/model.py, rotate_activation, commit 3b99a53
inline Status hadamard(CudaExec const& x, Tensor<Space::device, float, 3> const& lanes) noexcept {
  using Block = detail::HadamardBlock;
  index_t const width = lanes.extent(2);
  if (width > Block::most_lanes) {
    return failure(Errc::unsupported, "lanes of a Hadamard transform in shared memory",
                   Block::most_lanes, width);
  }
  if (width == 0) return {};
  int const heads = Block::heads(static_cast<int>(width));
  index_t const blocks = (lanes.extent(0) * lanes.extent(1) + heads - 1) / heads;
  return detail::launch(x, "hadamard", detail::hadamard_kernel,
                        {dim3(detail::blocks_for(blocks)), Block::threads,
                         heads * static_cast<int>(width * sizeof(float))},
                        lanes, heads);
}

/// out = in * factor. Copies where the factor is 1 and the memory differs.
inline Status scale(CudaExec const& x, Tensor<Space::device, float const, 3> const& in,
                    float factor, Tensor<Space::device, float, 3> const& out) noexcept {
  return detail::for_each_line(x, "scale", detail::lines_of(in), detail::Scale{in, factor, out});
}

/// out = values * sigmoid(gates).
inline Status gate(CudaExec const& x, Tensor<Space::device, float const, 3> const& values,
                   Tensor<Space::device, float const, 3> const& gates,
                   Tensor<Space::device, float, 3> const& out) noexcept {
  return detail::for_each_line(x, "gate", detail::lines_of(values),
                               detail::Gate{values, gates, out});
}

}  // namespace v0
}  // namespace indexshare
