// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/detail/check.hpp>
#include <indexshare/element.hpp>
#include <indexshare/macros.hpp>
#include <indexshare/status.hpp>

#include <cuda/std/bit>

#include <cstdint>

/// @file How lanes that share a scale become e4m3 codes: index queries, index keys, latents.

namespace indexshare {
inline namespace v0 {

/// How the scale of some lanes is made: max(largest magnitude, amax_floor) / 448, in fp32. A lane
/// that is NaN or infinite takes no part in it. Implementations differ in both fields, and near
/// ties in a selection with them; readers take any scale.
struct ScaleRecipe {
  float amax_floor = 1e-4f;   ///< from 448 * 2^-126 to 1e30: the scale is a normal number
  bool power_of_two = false;  ///< round the scale up to a power of two
};

/// What known writers do.
namespace scale_recipes {

/// @source DeepSeek-V3.2-Exp inference/kernel.py, act_quant, commit 3b99a53. It multiplies by 1/448
/// where this library divides, so without powers of two a last bit of a scale may differ.
inline constexpr ScaleRecipe act_quant{1e-4f, false};
/// The same with scale_fmt "ue8m0"; scales from 2^-22.
inline constexpr ScaleRecipe act_quant_ue8m0{1e-4f, true};
/// Index queries; scales from 2^-42. @source vLLM, fused index-query quantisation
inline constexpr ScaleRecipe vllm_index_query{1e-10f, true};
/// Index keys, from rows in fp32; scales from 2^-22.
/// @source vLLM csrc/cache_kernels.cu, indexer_k_quant_and_cache
inline constexpr ScaleRecipe vllm_index_key{1e-4f, true};
/// Latents of the 656-byte format; the floor is FLT_MIN on the scale.
/// @source vLLM csrc/cache_kernels.cu, concat_and_cache_ds_mla
inline constexpr ScaleRecipe vllm_latent{448 * 0x1p-126f, false};
/// Latents of the 656-byte format; the floor is 1e-4 on the scale, so scales begin at 2^-13.
/// @source FlashMLA tests/quant.py, commit 9241ae3
inline constexpr ScaleRecipe flashmla_latent{448 * 1e-4f, true};

}  // namespace scale_recipes

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

/// The scale of lanes whose largest finite magnitude is `amax`.
INDEXSHARE_HD constexpr float scale_of_lanes(float amax, ScaleRecipe const& recipe) noexcept {
  float const scale = (amax < recipe.amax_floor ? recipe.amax_floor : amax) / largest_e4m3;
  return recipe.power_of_two ? next_power_of_two(scale) : scale;
}

INDEXSHARE_HD constexpr e4m3 quantized(float value, float scale) noexcept {
  std::uint32_t const magnitude = cuda::std::bit_cast<std::uint32_t>(value) & 0x7FFFFFFFu;
  return magnitude < 0x7F800000u ? from_float<e4m3>(value / scale) : e4m3{0x7F};
}

/// A scale below the normal numbers would lose bits, and one of infinity everything.
constexpr Status check_scale_recipe(ScaleRecipe const& recipe) noexcept {
  constexpr float least = largest_e4m3 * 0x1p-126f;
  return recipe.amax_floor >= least && recipe.amax_floor <= 1e30f
             ? Status{}
             : failure(Errc::bad_value, "amax_floor must be between 448 * 2^-126 and 1e30");
}

}  // namespace detail
}  // namespace v0
}  // namespace indexshare
