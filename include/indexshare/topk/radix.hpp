// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace indexshare {
inline namespace v0 {

/// Exact top-k by radix selection: finds the k-th best score digit by digit, then collects in
/// position order, so the output is ascending without a sort. Deterministic; ties go to the lower
/// position; no candidate buffer that a plateau could overflow.
struct RadixTopK {};

}  // namespace v0
}  // namespace indexshare
