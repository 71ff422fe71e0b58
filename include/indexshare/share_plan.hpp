// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/detail/filtered_range.hpp>
#include <indexshare/share/periodic.hpp>
#include <indexshare/share/schedule.hpp>
#include <indexshare/share/source.hpp>
#include <indexshare/share/stage_plan.hpp>
#include <indexshare/status.hpp>

#include <cuda/std/span>

#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace indexshare {
inline namespace v0 {

namespace detail {
class SharePlanBuilder;
}  // namespace detail

/// The schedule of a model: for each layer, the layer whose selection it reads. A share policy.
/// Made by `make_share_plan`; a default-constructed plan has no layers.
///
/// Layers 0 .. num_layers() - 1 are the trunk; num_layers() .. total_layers() - 1 are MTP layers,
/// which always own an indexer. Fixed size (about 1.5 KiB), trivially copyable, usable at compile
/// time.
class SharePlan {
  struct FullFilter {
    using value_type = std::int32_t;
    static constexpr bool keeps(SharePlan const& plan, std::int32_t layer) noexcept {
      return plan.is_full(layer);
    }
    static constexpr value_type value(SharePlan const&, std::int32_t layer) noexcept {
      return layer;
    }
  };

  // Diagnostics are kept as one bit per layer and loser; numbered layer * sources + loser here.
  struct DiagnosticFilter {
    using value_type = ScheduleDiagnostic;
    static constexpr std::int32_t losers = static_cast<std::int32_t>(ScheduleSource::all_full);
    static constexpr bool keeps(SharePlan const& plan, std::int32_t number) noexcept {
      return (plan.disagreements_[number / losers] >> (number % losers) & 1) != 0;
    }
    static constexpr value_type value(SharePlan const& plan, std::int32_t number) noexcept {
      std::int32_t const layer = number / losers;
      bool const ruled_out = plan.sources_[layer] == no_source;
      return {layer, ruled_out ? ScheduleSource::layer_types : plan.decided_by_,
              static_cast<ScheduleSource>(number % losers)};
    }
  };

 public:
  constexpr std::int32_t num_layers() const noexcept { return num_layers_; }
  constexpr std::int32_t mtp_layers() const noexcept { return total_layers_ - num_layers_; }
  constexpr std::int32_t total_layers() const noexcept { return total_layers_; }

  constexpr bool contains(std::int32_t layer) const noexcept {
    return 0 <= layer && layer < total_layers_;
  }

  /// Role of a layer; `none` for one that does not exist.
  constexpr LayerRole role(std::int32_t layer) const noexcept {
    if (!contains(layer) || sources_[layer] == no_source) return LayerRole::none;
    return sources_[layer] == layer ? LayerRole::full : LayerRole::shared;
  }

  constexpr bool is_full(std::int32_t layer) const noexcept {
    return role(layer) == LayerRole::full;
  }

  /// The layer whose selection `layer` reads: itself if full, `no_source` if it has no sparse
  /// attention. Errors: bad_value for a layer that does not exist.
  constexpr Result<std::int32_t> source(std::int32_t layer) const noexcept {
    if (!contains(layer)) return refuse(no_such_layer(layer));
    return sources_[layer];
  }

  /// Number of the share group of `layer`, counted from 0 in order of the groups' full layers;
  /// `no_source` for a layer without sparse attention. Errors: bad_value as for `source`.
  constexpr Result<std::int32_t> group_of(std::int32_t layer) const noexcept {
    if (!contains(layer)) return refuse(no_such_layer(layer));
    return sources_[layer] == no_source ? no_source : full_layers(0, sources_[layer]).count();
  }

  using FullLayers = detail::FilteredRange<SharePlan, FullFilter>;

  /// The full layers in [first, last), ascending. The plan must outlive the range.
  constexpr FullLayers full_layers(std::int32_t first, std::int32_t last) const& noexcept {
    return FullLayers(*this, first, last);
  }
  FullLayers full_layers(std::int32_t, std::int32_t) const&& = delete;

  /// The full layers of the trunk. MTP layers are not among them: see `total_layers`.
  constexpr FullLayers full_layers() const& noexcept { return full_layers(0, num_layers_); }
  FullLayers full_layers() const&& = delete;

  using Diagnostics = detail::FilteredRange<SharePlan, DiagnosticFilter>;

  /// Where present fields of the config disagree with the plan, by layer. The plan must outlive
  /// the range.
  constexpr Diagnostics diagnostics() const& noexcept {
    return Diagnostics(*this, 0, num_layers_ * DiagnosticFilter::losers);
  }
  Diagnostics diagnostics() const&& = delete;

  /// The field that told full layers from shared ones.
  constexpr ScheduleSource decided_by() const noexcept { return decided_by_; }

  /// The layer below `first` whose selection a stage [first, last) reads, or `no_source`.
  /// Preconditions: 0 <= first <= last <= total_layers().
  constexpr std::int32_t import_source(std::int32_t first, std::int32_t last) const noexcept {
    for (std::int32_t layer = first; layer < last; ++layer)
      if (sources_[layer] != no_source && sources_[layer] < first) return sources_[layer];
    return no_source;
  }

  /// Whether a cut of the model before layer `cut` tears a share group apart, so that the upper
  /// part needs the selection of the lower one. False for a plan that shares nothing: such a cut
  /// has nothing to carry. False for a `cut` that is not in [0, total_layers()].
  constexpr bool needs_import(std::int32_t cut) const noexcept {
    return contains(cut) && import_source(cut, total_layers_) != no_source;
  }

  /// Pipeline stage [first, last), half-open and not empty.
  /// Errors: bad_value for a range outside [0, total_layers()) or an empty one; bad_schedule if the
  /// stage reads a selection from below `first` and `start` does not say that it is handed over
  /// (such a layer has no weights to recompute it); Status::layer is then the reading layer and
  /// `expected` its source.
  constexpr Result<StagePlan> stage(std::int32_t first, std::int32_t last,
                                    StageStart start) const noexcept {
    if (first < 0 || last > total_layers_)
      return refuse(failure(Errc::bad_value, "pipeline stage reaches outside the model's layers",
                            total_layers_, first < 0 ? first : last));
    if (first >= last)
      return refuse(failure(Errc::bad_value,
                            "pipeline stage is empty or reversed: last must exceed first",
                            first + 1, last));
    std::int32_t const imported = import_source(first, last);
    if (imported != no_source && start == StageStart::own)
      return refuse(torn_group(first, imported));
    return numbered_stage(first, last, imported);
  }

  friend constexpr bool operator==(SharePlan const&, SharePlan const&) = default;

 private:
  friend class detail::SharePlanBuilder;

  constexpr Status no_such_layer(std::int32_t layer) const noexcept {
    return failure(Errc::bad_value, "layer is outside the schedule: expected one below",
                   total_layers_, layer)
        .at_layer(layer);
  }

  constexpr Status torn_group(std::int32_t first, std::int32_t imported) const noexcept {
    std::int32_t reader = first;
    while (sources_[reader] != imported) ++reader;
    return failure(Errc::bad_schedule,
                   "pipeline stage starts on a shared layer and imports no selection: expected its "
                   "source inside the stage",
                   imported, first)
        .at_layer(reader);
  }

  constexpr StagePlan numbered_stage(std::int32_t first, std::int32_t last,
                                     std::int32_t imported) const noexcept {
    StagePlan stage;
    stage.first_ = first;
    stage.last_ = last;
    stage.import_source_ = imported;
    for (std::int16_t& slot : stage.slots_) slot = -1;
    for (std::int32_t const layer : full_layers(first, last))
      stage.slots_[layer] = static_cast<std::int16_t>(stage.index_caches_++);
    return stage;
  }

  std::int32_t num_layers_ = 0;
  std::int32_t total_layers_ = 0;
  ScheduleSource decided_by_ = ScheduleSource::all_full;
  std::int16_t sources_[max_schedule_layers]{};
  std::uint8_t disagreements_[max_schedule_layers]{};  // bit = ScheduleSource of the loser
};
static_assert(std::is_trivially_copyable_v<SharePlan>);

/// SharePlan as a share policy: the layer whose selection `layer` reads, `no_source` if it reads
/// none or does not exist.
constexpr std::int32_t share_source(SharePlan const& plan, std::int32_t layer) noexcept {
  return plan.source(layer).value_or(no_source);
}

/// Checks a pipeline split: every range is a stage of `plan`, and each begins where the one before
/// it ends. The ranges need not cover the model, so that one rank can check its own part.
/// Errors: those of `SharePlan::stage`; bad_value for a gap or an overlap.
constexpr Status check_stages(SharePlan const& plan,
                              cuda::std::span<StageRange const> ranges) noexcept {
  for (std::size_t i = 0; i < ranges.size(); ++i) {
    StageRange const& range = ranges[i];
    if (i > 0 && range.first != ranges[i - 1].last)
      return failure(Errc::bad_value,
                     "pipeline stages must follow one another without gap or overlap",
                     ranges[i - 1].last, range.first);
    if (auto const stage = plan.stage(range.first, range.last, range.start); !stage)
      return stage.error();
  }
  return {};
}

namespace detail {

/// Turns ScheduleFields into a SharePlan: checks, decides, compares, links.
class SharePlanBuilder {
 public:
  explicit constexpr SharePlanBuilder(ScheduleFields const& fields) noexcept
      : fields_(fields), decided_by_(strongest()) {}

  constexpr ScheduleSource decided_by() const noexcept { return decided_by_; }

  constexpr Result<SharePlan> build() const noexcept {
    if (Status const status = check(); !status.ok()) return refuse(status);
    SharePlan plan;
    plan.num_layers_ = fields_.num_layers;
    plan.total_layers_ = fields_.num_layers + fields_.mtp_layers;
    plan.decided_by_ = decided_by_;
    if (Status const status = link_trunk(plan); !status.ok()) return refuse(status);
    for (std::int32_t layer = plan.num_layers_; layer < plan.total_layers_; ++layer)
      plan.sources_[layer] = static_cast<std::int16_t>(layer);
    return plan;
  }

 private:
  // The sources that give each layer a role, strongest first.
  static constexpr ScheduleSource role_sources[] = {
      ScheduleSource::indexer_types, ScheduleSource::pattern, ScheduleSource::freq_offset};

  constexpr bool states(ScheduleSource source) const noexcept {
    switch (source) {
      case ScheduleSource::indexer_types:
        return fields_.types.has_value();
      case ScheduleSource::pattern:
        return fields_.pattern.has_value();
      case ScheduleSource::freq_offset:
        return fields_.freq.has_value();
      default:
        return false;
    }
  }

  constexpr ScheduleSource strongest() const noexcept {
    for (ScheduleSource const source : role_sources)
      if (states(source)) return source;
    return ScheduleSource::all_full;
  }

  constexpr bool says_full(ScheduleSource source, std::int32_t layer) const noexcept {
    auto const at = static_cast<std::size_t>(layer);
    switch (source) {
      case ScheduleSource::indexer_types:
        return (*fields_.types)[at] == LayerRole::full;
      case ScheduleSource::pattern:
        return (*fields_.pattern)[at] == LayerRole::full;
      case ScheduleSource::freq_offset:
        return is_full_by_period(layer, *fields_.freq,
                                 fields_.offset.value_or(default_share_offset));
      default:
        return true;
    }
  }

  constexpr bool is_sparse(std::int32_t layer) const noexcept {
    return !fields_.sparse || (*fields_.sparse)[static_cast<std::size_t>(layer)];
  }

  constexpr Status check() const noexcept {
    if (Status const status = check_counts(); !status.ok()) return status;
    if (Status const status = check_lengths(); !status.ok()) return status;
    if (Status const status =
            check_roles(fields_.types, "indexer_types: only full and shared are known");
        !status.ok())
      return status;
    if (Status const status =
            check_roles(fields_.pattern, "index_topk_pattern: only full and shared are known");
        !status.ok())
      return status;
    return check_period();
  }

  constexpr Status check_counts() const noexcept {
    if (fields_.num_layers < 1 || fields_.num_layers > max_schedule_layers)
      return failure(Errc::bad_schedule, "num_layers must be from 1 to max_schedule_layers",
                     max_schedule_layers, fields_.num_layers);
    std::int32_t const room = max_schedule_layers - fields_.num_layers;
    if (fields_.mtp_layers < 0 || fields_.mtp_layers > room)
      return failure(Errc::bad_schedule,
                     "mtp_layers must be from 0 to what max_schedule_layers leaves", room,
                     fields_.mtp_layers);
    return {};
  }

  constexpr Status check_lengths() const noexcept {
    if (fields_.types && !fits(fields_.types->size()))
      return wrong_length("indexer_types: expected one entry per layer", fields_.types->size());
    if (fields_.pattern && !fits(fields_.pattern->size()))
      return wrong_length("index_topk_pattern: expected one entry per layer",
                          fields_.pattern->size());
    if (fields_.sparse && !fits(fields_.sparse->size()))
      return wrong_length("layer_types: expected one entry per layer", fields_.sparse->size());
    return {};
  }

  constexpr bool fits(std::size_t entries) const noexcept {
    return entries == static_cast<std::size_t>(fields_.num_layers);
  }

  constexpr Status wrong_length(char const* what, std::size_t entries) const noexcept {
    return failure(Errc::bad_schedule, what, fields_.num_layers,
                   static_cast<std::int64_t>(entries));
  }

  static constexpr Status check_roles(ScheduleFields::List<LayerRole> const& roles,
                                      char const* what) noexcept {
    if (!roles) return {};
    for (std::size_t i = 0; i < roles->size(); ++i)
      if ((*roles)[i] != LayerRole::full && (*roles)[i] != LayerRole::shared)
        return failure(Errc::bad_schedule, what).at_layer(static_cast<std::int32_t>(i));
    return {};
  }

  constexpr Status check_period() const noexcept {
    if (fields_.freq && *fields_.freq < 1)
      return failure(Errc::bad_schedule, "index_topk_freq must be at least 1", 1, *fields_.freq);
    if (fields_.offset && *fields_.offset < 1)
      return failure(Errc::bad_schedule, "index_skip_topk_offset must be at least 1", 1,
                     *fields_.offset);
    return {};
  }

  constexpr Status link_trunk(SharePlan& plan) const noexcept {
    std::int32_t nearest_full = no_source;
    for (std::int32_t layer = 0; layer < plan.num_layers_; ++layer) {
      plan.disagreements_[layer] = disagreements(layer);
      if (!is_sparse(layer)) {
        plan.sources_[layer] = no_source;
        continue;
      }
      if (says_full(decided_by_, layer)) nearest_full = layer;
      if (nearest_full == no_source)
        return failure(Errc::bad_schedule, "a shared layer has no full layer below it to read from")
            .at_layer(layer);
      plan.sources_[layer] = static_cast<std::int16_t>(nearest_full);
    }
    return {};
  }

  // On a layer without sparse attention, only a field that calls it full is contradicted: "shared"
  // asks nothing of the layer.
  constexpr std::uint8_t disagreements(std::int32_t layer) const noexcept {
    bool const used_as_full = is_sparse(layer) && says_full(decided_by_, layer);
    bool const shared_is_fine = !is_sparse(layer);
    std::uint8_t losers = 0;
    for (ScheduleSource const source : role_sources) {
      if (!states(source)) continue;
      bool const full = says_full(source, layer);
      if (full == used_as_full || (!full && shared_is_fine)) continue;
      losers = static_cast<std::uint8_t>(losers | 1u << static_cast<unsigned>(source));
    }
    return losers;
  }

  ScheduleFields const& fields_;
  ScheduleSource decided_by_;
};

}  // namespace detail

/// The schedule that a config states.
///
/// `indexer_types` decides if present, else `index_topk_pattern`, else `index_topk_freq` with
/// `index_skip_topk_offset` (2 if absent), else every layer is full. The weaker ones that are
/// present are compared; each layer they differ on is a diagnostic of the plan. An offset without a
/// freq states no schedule.
///
/// Errors, all bad_schedule: a list whose length is not exactly num_layers (no padding, no entry
/// for an MTP layer), a role other than full and shared, freq or offset below 1, a shared layer
/// with no full layer below it, more than `max_schedule_layers` layers.
/// Cost: one pass over the layers.
/// @source transformers GlmMoeDsaConfig for the order; the refusals are ours, after the HY-V4
/// loader of vLLM
constexpr Result<SharePlan> make_share_plan(ScheduleFields const& fields) noexcept {
  return detail::SharePlanBuilder(fields).build();
}

}  // namespace v0
}  // namespace indexshare
