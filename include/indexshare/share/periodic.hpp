// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/share/source.hpp>

#include <cstdint>

namespace indexshare {
inline namespace v0 {

/// `index_skip_topk_offset` of a config that states `index_topk_freq` alone.
/// @source transformers GlmMoeDsaConfig and vLLM; other readers default to 0 or 1 and get other
/// layers
inline constexpr std::int64_t default_share_offset = 2;

/// Whether layer `layer` (>= 0) computes its own selection when every `freq`-th layer does, counted
/// so that layers 0 .. offset - 1 all do. Preconditions: freq >= 1, offset >= 1.
///
/// The count is `layer - offset + 1`. Without the `+ 1` GLM-5.2's schedule would begin
/// 0,1,2,3,7 instead of 0,1,2,6,10: as plausible, and wrong.
/// @source transformers GlmMoeDsaConfig.__post_init__; vLLM and SGLang agree
constexpr bool is_full_by_period(std::int64_t layer, std::int64_t freq,
                                 std::int64_t offset) noexcept {
  std::int64_t const past_head = layer - offset + 1;
  return past_head <= 0 || past_head % freq == 0;
}

/// Share policy of `index_topk_freq` and `index_skip_topk_offset`: layers 0 .. offset - 1 are full,
/// then every `freq`-th one.
struct Periodic {
  std::int32_t layers = 0;  ///< layers 0 .. layers - 1 exist
  std::int32_t freq = 1;    ///< 1: no sharing
  std::int32_t offset = static_cast<std::int32_t>(default_share_offset);  ///< at least 1

  friend constexpr bool operator==(Periodic const&, Periodic const&) = default;
};

/// The layer whose selection `layer` reads; `no_source` for a layer that does not exist, and for
/// every layer of a policy with freq < 1 or offset < 1 (such a schedule has no meaning: an offset
/// of 0 would leave layer 0 without a source).
constexpr std::int32_t share_source(Periodic const& policy, std::int32_t layer) noexcept {
  bool const meaningful = policy.freq >= 1 && policy.offset >= 1;
  if (!meaningful || layer < 0 || layer >= policy.layers) return no_source;
  if (layer < policy.offset) return layer;
  return layer - (layer - policy.offset + 1) % policy.freq;
}

}  // namespace v0
}  // namespace indexshare
