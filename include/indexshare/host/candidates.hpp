// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/dims.hpp>
#include <indexshare/topk/order.hpp>
#include <indexshare/workspace.hpp>

#include <cuda/std/bit>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>

/// @file The list that a selection goes through on the host: scores that can still be among the
/// best of a row. Scores come in by ascending position (`CandidateKernels`); when the list is full
/// it is cut down to the best, whose last one is the floor of what enters from then on.

namespace indexshare {
inline namespace v0 {
namespace detail {

/// Candidates of one row, in ascending order of positions.
struct Candidates {
  float* scores;
  position_t* positions;
  index_t capacity;
  index_t wanted;  ///< how many of the best are looked for, at least 1
  index_t count = 0;
  float floor = 0;   ///< what is below it, or NaN, does not enter any more,
  bool open = true;  ///< but before the first cut everything does
};

/// Scores that are looked at together: a list has room for so many beside the wanted ones.
inline constexpr index_t least_candidate_room = 32;

/// The widest vector that is read or written at the end of a list, whatever part of it is used.
inline constexpr int candidate_vector = 8;

/// Memory for a list of `capacity` candidates, but at least of what is wanted and that room; and
/// for a vector past its end.
inline Candidates carve_candidates(WorkspaceCarver& carver, index_t wanted,
                                   index_t capacity) noexcept {
  index_t const held = std::max(capacity, wanted + least_candidate_room);
  auto const places = static_cast<std::size_t>(held + candidate_vector);
  auto* const scores = carver.take<float>(places);
  auto* const positions = carver.take<position_t>(places);
  return {scores, positions, held, wanted};
}

/// The lowest score above all of order key `key`, which may be a NaN that nothing reaches: +inf is
/// the best score. Above NaN lies -inf.
constexpr float lowest_above(std::uint32_t key) noexcept {
  std::uint32_t const next = std::max(key + 1, 0x00800000u);
  std::uint32_t const bits =
      next >= 0x80000000u ? next - 0x80000000u : 0x80000000u | (0x80000000u - next);
  return cuda::std::bit_cast<float>(bits);
}
static_assert(lowest_above(0) == -cuda::std::bit_cast<float>(0x7F800000u));
static_assert(lowest_above(order_key(0.0f)) == cuda::std::bit_cast<float>(1u));
static_assert(order_key(lowest_above(order_key(-1.5f))) == order_key(-1.5f) + 1);

/// For each set of places of a vector, as bits: their numbers, ascending, four bits each.
struct PackingOrder {
  std::uint32_t of[1 << candidate_vector] = {};
  constexpr PackingOrder() noexcept {
    for (std::uint32_t places = 0; places < 1u << candidate_vector; ++places) {
      int at = 0;
      for (std::uint32_t place = 0; place < candidate_vector; ++place) {
        of[places] |= (places >> place & 1) * place << at;
        at += 4 * (places >> place & 1);
      }
    }
  }
};
inline constexpr PackingOrder packing_order;

}  // namespace detail
}  // namespace v0
}  // namespace indexshare
