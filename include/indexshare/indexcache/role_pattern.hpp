// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/share/schedule.hpp>
#include <indexshare/share_plan.hpp>
#include <indexshare/status.hpp>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace indexshare {
inline namespace v0 {
namespace indexcache {

/// Which layers of a model compute a selection and which reuse one: the value that a search for a
/// schedule works on. Layer 0 is always full, so that every layer has a source. A
/// default-constructed pattern has no layers.
class RolePattern {
 public:
  RolePattern() = default;

  /// Preconditions: 1 <= layers <= max_schedule_layers.
  static RolePattern all_full(std::int32_t layers) {
    return RolePattern(std::vector<LayerRole>(static_cast<std::size_t>(layers), LayerRole::full));
  }

  /// Errors: bad_schedule for no layers or more than `max_schedule_layers`, for a role other than
  /// full and shared, and for a layer 0 that is shared; `layer` is then the layer at fault.
  static Result<RolePattern> from_roles(std::span<LayerRole const> roles) {
    auto const layers = static_cast<std::int64_t>(roles.size());
    if (layers < 1 || layers > max_schedule_layers)
      return refuse(failure(Errc::bad_schedule, "layers must be from 1 to max_schedule_layers",
                            max_schedule_layers, layers));
    for (std::size_t layer = 0; layer < roles.size(); ++layer)
      if (roles[layer] != LayerRole::full && roles[layer] != LayerRole::shared)
        return refuse(failure(Errc::bad_schedule, "a pattern knows only full and shared layers")
                          .at_layer(static_cast<std::int32_t>(layer)));
    if (roles[0] == LayerRole::shared)
      return refuse(
          failure(Errc::bad_schedule, "layer 0 has no layer below it to read from").at_layer(0));
    return RolePattern(std::vector<LayerRole>(roles.begin(), roles.end()));
  }

  std::int32_t layers() const noexcept { return static_cast<std::int32_t>(roles_.size()); }

  /// Role of a layer, full or shared. Precondition here and below: 0 <= layer < layers().
  LayerRole role(std::int32_t layer) const noexcept {
    return roles_[static_cast<std::size_t>(layer)];
  }

  bool is_full(std::int32_t layer) const noexcept { return role(layer) == LayerRole::full; }

  /// All roles, as `ScheduleFields::types` takes them. Lives as long as the pattern.
  std::span<LayerRole const> roles() const noexcept { return roles_; }

  /// The layer whose selection `layer` reads: the nearest full one at or below it.
  std::int32_t source(std::int32_t layer) const noexcept {
    while (!is_full(layer)) --layer;
    return layer;
  }

  std::int32_t full_count() const noexcept {
    std::int32_t count = 0;
    for (LayerRole const role : roles_) count += role == LayerRole::full ? 1 : 0;
    return count;
  }

  std::int32_t shared_count() const noexcept { return layers() - full_count(); }

  std::vector<std::int32_t> full_layers() const {
    std::vector<std::int32_t> list;
    for (std::int32_t layer = 0; layer < layers(); ++layer)
      if (is_full(layer)) list.push_back(layer);
    return list;
  }

  /// The same pattern with `layer` shared. Layers behind it that read from it then read from the
  /// full layer below it. Precondition: layer > 0.
  RolePattern with_shared(std::int32_t layer) const {
    RolePattern changed = *this;
    changed.roles_[static_cast<std::size_t>(layer)] = LayerRole::shared;
    return changed;
  }

  friend bool operator==(RolePattern const&, RolePattern const&) = default;

 private:
  explicit RolePattern(std::vector<LayerRole> roles) : roles_(std::move(roles)) {}

  std::vector<LayerRole> roles_;
};

/// Whether every full layer of `inner` is full in `outer` too; false for unequal layer counts.
/// What a greedy search finds for a small number of full layers is nested in what it found before.
inline bool nested_in(RolePattern const& inner, RolePattern const& outer) noexcept {
  if (inner.layers() != outer.layers()) return false;
  for (std::int32_t layer = 0; layer < inner.layers(); ++layer)
    if (inner.is_full(layer) && !outer.is_full(layer)) return false;
  return true;
}

/// The lowest layer whose selection differs between two patterns of the same model; `layers()` if
/// they are equal. Everything below it computes the same.
inline std::int32_t first_difference(RolePattern const& a, RolePattern const& b) noexcept {
  std::int32_t layer = 0;
  while (layer < a.layers() && a.role(layer) == b.role(layer)) ++layer;
  return layer;
}

/// The pattern as letters, `F` full and `S` shared, layer 0 first: the form of
/// `index_topk_pattern`. `io::parse_pattern` reads it.
inline std::string pattern_text(RolePattern const& pattern) {
  std::string letters;
  for (LayerRole const role : pattern.roles()) letters += role == LayerRole::full ? 'F' : 'S';
  return letters;
}

/// The pattern as the schedule that layer calls take.
/// @param mtp_layers  MTP layers behind the pattern's layers; each owns an indexer
/// Errors: bad_schedule for a pattern without layers, or with more than `max_schedule_layers`
/// together with the MTP layers.
inline Result<SharePlan> share_plan_of(RolePattern const& pattern, std::int32_t mtp_layers = 0) {
  ScheduleFields fields;
  fields.num_layers = pattern.layers();
  fields.mtp_layers = mtp_layers;
  fields.types = cuda::std::span<LayerRole const>(pattern.roles().data(), pattern.roles().size());
  return make_share_plan(fields);
}

}  // namespace indexcache
}  // namespace v0
}  // namespace indexshare
