// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/share/source.hpp>

#include <cstdint>

namespace indexshare {
inline namespace v0 {

/// Share policy of standard DeepSeek Sparse Attention: every layer selects for itself.
struct EveryLayer {
  std::int32_t layers = 0;  ///< layers 0 .. layers - 1 exist

  friend constexpr bool operator==(EveryLayer const&, EveryLayer const&) = default;
};

/// The layer whose selection `layer` reads: itself, or `no_source` for a layer that does not exist.
/// @source DeepSeek-V3.2 report, section 2.1: one indexer per layer
constexpr std::int32_t share_source(EveryLayer const& policy, std::int32_t layer) noexcept {
  return 0 <= layer && layer < policy.layers ? layer : no_source;
}

}  // namespace v0
}  // namespace indexshare
