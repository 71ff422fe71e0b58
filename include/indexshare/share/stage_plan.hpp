// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/share/schedule.hpp>
#include <indexshare/share/source.hpp>
#include <indexshare/status.hpp>

#include <cstdint>
#include <type_traits>

namespace indexshare {
inline namespace v0 {

class SharePlan;

/// Whether a pipeline stage gets a selection from the stage below it.
enum class StageStart : std::uint8_t {
  own,                ///< no: the stage must begin with a full layer
  imports_selection,  ///< yes: the caller hands over the selection that the cut tore off
};

/// A pipeline stage: layers first .. last - 1, MTP layers included in the numbering.
struct StageRange {
  std::int32_t first = 0;
  std::int32_t last = 0;
  StageStart start = StageStart::own;
};

/// One pipeline stage of a SharePlan and the numbering of its index-key caches. Made by
/// `SharePlan::stage`; a value of its own that does not refer to the plan.
///
/// Caches are numbered 0, 1, .. per stage over its full layers in order of their layer number, so
/// an MTP layer follows the last full trunk layer of its stage. They are looked up by layer: a rule
/// such as "layer modulo cache count" finds somebody else's keys.
class StagePlan {
 public:
  constexpr std::int32_t first() const noexcept { return first_; }
  constexpr std::int32_t last() const noexcept { return last_; }

  /// Index-key caches the stage must allocate.
  constexpr std::int32_t index_caches() const noexcept { return index_caches_; }

  /// The layer, below this stage, whose selection must be handed over before the stage runs;
  /// `no_source` if nothing is to be handed over, whatever the caller offered.
  constexpr std::int32_t import_source() const noexcept { return import_source_; }

  /// Number of the index-key cache of full layer `layer`.
  /// Errors: bad_value for a layer outside the stage, bad_schedule for one that owns no indexer.
  constexpr Result<std::int32_t> index_cache_slot(std::int32_t layer) const noexcept {
    if (layer < first_ || layer >= last_)
      return refuse(
          failure(Errc::bad_value, "layer is outside this pipeline stage").at_layer(layer));
    std::int32_t const slot = slots_[layer];
    if (slot < 0)
      return refuse(
          failure(Errc::bad_schedule, "only a full layer owns an index-key cache").at_layer(layer));
    return slot;
  }

  friend constexpr bool operator==(StagePlan const&, StagePlan const&) = default;

 private:
  friend class SharePlan;

  constexpr StagePlan() = default;

  std::int32_t first_ = 0;
  std::int32_t last_ = 0;
  std::int32_t index_caches_ = 0;
  std::int32_t import_source_ = no_source;
  std::int16_t slots_[max_schedule_layers]{};  // by layer number, -1: none
};
static_assert(std::is_trivially_copyable_v<StagePlan>);

}  // namespace v0
}  // namespace indexshare
