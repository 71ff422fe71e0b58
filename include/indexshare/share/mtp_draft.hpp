// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/share/source.hpp>

#include <cstdint>

namespace indexshare {
inline namespace v0 {

/// Share policy of the draft steps of one speculative round. The steps run the same MTP layer; for
/// sharing, step s is numbered `first_layer + s`, so step 0 bears the MTP layer's own number.
struct MtpDraft {
  std::int32_t first_layer = 0;     ///< number of the MTP layer: num_hidden_layers for the first
  bool share_across_steps = false;  ///< index_share_for_mtp_iteration of the config

  friend constexpr bool operator==(MtpDraft const&, MtpDraft const&) = default;
};

/// The step whose selection the step numbered `layer` reads. Step 0 always selects for itself: the
/// flag shares among draft steps, never with a layer of the trunk. `no_source` below `first_layer`.
/// @source vLLM and SGLang draft loops; that the flag meant the trunk's selection is a published
/// misreading
constexpr std::int32_t share_source(MtpDraft const& policy, std::int32_t layer) noexcept {
  if (policy.first_layer < 0 || layer < policy.first_layer) return no_source;
  return policy.share_across_steps ? policy.first_layer : layer;
}

}  // namespace v0
}  // namespace indexshare
