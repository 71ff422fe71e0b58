// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace indexshare {
inline namespace v0 {

/// Answer of a share policy's `share_source(policy, layer)` for a layer that reads no selection:
/// one without sparse attention, or one the policy does not know.
inline constexpr std::int32_t no_source = -1;

}  // namespace v0
}  // namespace indexshare
