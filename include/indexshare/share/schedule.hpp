// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda/std/optional>
#include <cuda/std/span>

#include <cstdint>
#include <type_traits>

namespace indexshare {
inline namespace v0 {

/// Layers a schedule holds at most, trunk and MTP together. Published models have 79 or fewer.
inline constexpr std::int32_t max_schedule_layers = 512;

/// What a layer does about selections.
enum class LayerRole : std::uint8_t {
  full,    ///< owns an indexer and an index-key cache, computes a selection
  shared,  ///< owns neither, reads the selection of the nearest full layer below it
  none,    ///< has no sparse attention at all, e.g. linear attention
};

/// The config fields that can say which layers are full, strongest first within a layer:
/// `layer_types` rules out layers without sparse attention, the first present one of the rest
/// decides.
enum class ScheduleSource : std::uint8_t {
  layer_types,    ///< which layers have sparse attention at all
  indexer_types,  ///< the list of roles
  pattern,        ///< index_topk_pattern
  freq_offset,    ///< index_topk_freq with index_skip_topk_offset
  all_full,       ///< nothing stated: every layer selects for itself
};

/// A layer on which a present but weaker field disagrees with the one that was used.
struct ScheduleDiagnostic {
  std::int32_t layer = 0;
  ScheduleSource winner = ScheduleSource::all_full;
  ScheduleSource loser = ScheduleSource::all_full;

  friend constexpr bool operator==(ScheduleDiagnostic const&, ScheduleDiagnostic const&) = default;
};

/// A model's schedule as its config states it. An absent optional is a field that is missing or
/// null. The spans are read by `make_share_plan` and not kept.
struct ScheduleFields {
  template <class T>
  using List = cuda::std::optional<cuda::std::span<T const>>;

  std::int32_t num_layers = 0;  ///< trunk layers, numbered 0 .. num_layers - 1
  std::int32_t mtp_layers = 0;  ///< MTP layers, numbered from num_layers on

  List<LayerRole> types{};                   ///< indexer_types, one full or shared per trunk layer
  List<LayerRole> pattern{};                 ///< index_topk_pattern, the same
  cuda::std::optional<std::int64_t> freq{};  ///< index_topk_freq, at least 1
  cuda::std::optional<std::int64_t> offset{};  ///< index_skip_topk_offset, at least 1
  List<bool> sparse{};  ///< per trunk layer: it has sparse attention; absent: all have
};
static_assert(std::is_trivially_copyable_v<ScheduleFields>);

}  // namespace v0
}  // namespace indexshare
