// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/cuda/attention_plan.hpp>
#include <indexshare/cuda/detail/attend_load.cuh>
#include <indexshare/cuda/detail/codes.cuh>

#include <cstddef>
#include <cstdint>

/// @file Rows of format::LatentE4m3 (512 codes, 4 scales, 64 bf16) on fp16 tensor cores.
///
/// Codes become fp16 exactly, once per block. The scales, which fp16 cannot hold, stay outside:
/// logits multiply each scale's 128 lanes by it in fp32, so they are as exact as with fp32 rows.
/// For values a key's largest scale is split off as a power of two, 2^E, which joins the key's
/// weight: 2^(logit + E - M), where the reference M follows logit + E; the rest of each scale, in
/// (0, 2), multiplies the weight in fp16. So no weight overflows and none that matters is lost,
/// whatever the scales are. Each product weight * value has three roundings to fp16: 3 * 2^-12.

namespace indexshare {
inline namespace v0 {
namespace detail {

/// Two fp16 products.
__device__ inline std::uint32_t multiply_pairs(std::uint32_t a, std::uint32_t b) {
  std::uint32_t product;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
  return product;
}

template <int Heads>
class AttendUnpack {
 public:
  using Warps = AttendWarps<Heads>;
  static constexpr AttendMemory at = attend_memory<Heads>(true);
  /// What fp16 rows must be multiplied by: images without the conversion move bits.
  static constexpr float unit = image_knows_e4m3 ? 1.0f : 256.0f;

  /// `base`: of the block's shared memory.
  __device__ explicit AttendUnpack(std::uint32_t base)
      : base_(base),
        codes_(kept(base + threadIdx.x / 32 * (rows_per_warp * at.line) + 8 * (threadIdx.x % 32))),
        unpacked_(kept(base + at.unpacked +
                       threadIdx.x / 32 * (rows_per_warp * AttendMemory::unpacked_line) +
                       16 * (threadIdx.x % 32))) {}

  /// Unpacks the stage at an offset and turns each key's mark from 0 to E.
  __device__ __forceinline__ void run(std::uint32_t stage) const {
    unpack_codes(stage);
    if (threadIdx.x < Warps::tile) split_scales(base_ + stage);
  }

  /// 2^-E of four keys.
  __device__ __forceinline__ float4 units_of_keys(std::uint32_t column) const {
    return load_float4<at.units>(base_ + 16 * column);
  }
  /// Sum of the weights of four keys, without their 2^E.
  static __device__ __forceinline__ float sum_of(float const (&w)[4], float4 const& units) {
    return fmaf(w[3], units.w, fmaf(w[2], units.z, fmaf(w[1], units.y, w[0] * units.x)));
  }

  /// The rests of scale `scale` as this member of a group multiplies them with its weights of
  /// 16 keys.
  template <int FirstKey>
  __device__ __forceinline__ uint2 rests_of_keys(std::uint32_t scale, std::uint32_t member) const {
    return load_words2<at.rests + 2 * FirstKey>(base_ + scale * (Warps::tile * 2) + 8 * member);
  }
  static __device__ __forceinline__ void scale(std::uint32_t (&w)[4], uint2 const& rests) {
    for (int i = 0; i < 4; ++i) w[i] = multiply_pairs(w[i], i % 2 == 0 ? rests.x : rests.y);
  }

 private:
  /// Rows whose largest scale is beyond these powers of two lose range: weights are fp32.
  static constexpr int most_exponent = 56;
  static constexpr int rows_per_warp = Warps::tile / Warps::warps;

  /// Each warp unpacks four rows, eight codes per thread at a time.
  __device__ __forceinline__ void unpack_codes(std::uint32_t stage) const {
    std::uint32_t const from = codes_ + stage;
    for_constants<2 * rows_per_warp>([&](auto i) {
      constexpr int row = i / 2;
      constexpr int half = i % 2;
      uint4 const latents = unpack_8<row * at.line + half * 256>(from);
      store_words4<row * AttendMemory::unpacked_line + half * 512>(unpacked_, latents);
    });
  }

  /// Eight codes as fp16, to be multiplied by `unit`.
  template <int Ahead>
  static __device__ __forceinline__ uint4 unpack_8(std::uint32_t codes) {
    uint4 latents;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    asm volatile(
        "{ .reg .b16 a, b, c, d; ld.shared.v4.b16 {a, b, c, d}, [%4 + %5]; "
        "cvt.rn.f16x2.e4m3x2 %0, a; cvt.rn.f16x2.e4m3x2 %1, b; "
        "cvt.rn.f16x2.e4m3x2 %2, c; cvt.rn.f16x2.e4m3x2 %3, d; }"
        : "=r"(latents.x), "=r"(latents.y), "=r"(latents.z), "=r"(latents.w)
        : "r"(codes), "n"(Ahead)
        : "memory");
#else
    uint2 const words = load_words2<Ahead>(codes);
    widen_keeping_nan(words.x, latents.x, latents.y);
    widen_keeping_nan(words.y, latents.z, latents.w);
#endif
    return latents;
  }
  static __device__ __forceinline__ void widen_keeping_nan(std::uint32_t codes, std::uint32_t& low,
                                                           std::uint32_t& high) {
    widen_codes<fp16>(codes, low, high);
    std::uint32_t const nan = nan_codes(codes) & 0x80808080u;
    if (nan != 0) {
      std::uint32_t const bytes = (nan >> 7) * 0xFFu;  // all bits of each code that is NaN
      low |= __byte_perm(bytes, 0, 0x1100);
      high |= __byte_perm(bytes, 0, 0x3322);
    }
  }

  /// One thread per key.
  __device__ __forceinline__ void split_scales(std::uint32_t rows) const {
    std::uint32_t const key = thread_again();
    float4 const scales = load_float4<AttendWidths::latent>(rows + row_of_key(key) * at.line);
    float const most =
        fmaxf(fmaxf(fabsf(scales.x), fabsf(scales.y)), fmaxf(fabsf(scales.z), fabsf(scales.w)));
    int const exponent = max(
        -most_exponent, min(static_cast<int>(__float_as_uint(most) >> 23) - 127, most_exponent));
    float const unit_of_key = __int_as_float((127 - exponent) << 23);
    std::uint32_t const low = pack_pair<fp16>(scales.x * unit_of_key, scales.y * unit_of_key);
    std::uint32_t const high = pack_pair<fp16>(scales.z * unit_of_key, scales.w * unit_of_key);
    // of each 16 keys 0, 1, 8, 9, 2, ...: what a member multiplies in one product comes together
    std::uint32_t const place = key - key % 16 + key % 8 / 2 * 4 + key / 8 % 2 * 2 + key % 2;
    std::uint32_t const rest = base_ + 2 * place;
    store_half<at.rests>(rest, low);
    store_half<at.rests + 2 * Warps::tile>(rest, low >> 16);
    store_half<at.rests + 4 * Warps::tile>(rest, high);
    store_half<at.rests + 6 * Warps::tile>(rest, high >> 16);
    std::uint32_t const of_key = base_ + 4 * key;
    store_float<at.scales>(of_key, scales.x * unit);
    store_float<at.scales + 4 * Warps::tile>(of_key, scales.y * unit);
    store_float<at.scales + 8 * Warps::tile>(of_key, scales.z * unit);
    store_float<at.scales + 12 * Warps::tile>(of_key, scales.w * unit);
    store_float<at.units>(of_key, unit_of_key);
    std::uint32_t const mark = rows + at.marks + 4 * key;
    store_float(mark, load_float(mark) + static_cast<float>(exponent));
  }

  std::uint32_t base_;
  std::uint32_t codes_;     ///< of the thread in stage 0
  std::uint32_t unpacked_;  ///< where they go
};

}  // namespace detail
}  // namespace v0
}  // namespace indexshare
