// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/accounting/flops.hpp>
#include <indexshare/accounting/rows.hpp>
#include <indexshare/model_config.hpp>

#include <cuda/std/span>

#include <cmath>
#include <cstdint>

/// @file Ways to count that give different ratios for the same schedule. A ratio means something
/// only with the name of its accounting, and none of them is a speed-up.

namespace indexshare {
inline namespace v0 {

/// What a count of FLOPs takes in.
enum class Accounting : std::uint8_t {
  complete_absorbed,
  complete_absorbed_reduction,
  complete_expanded,
  no_core,
  active_parameters,
  active_parameters_core,
  no_head,
  no_core_no_head,
  attention_block,
  core_and_indexer,
  indexer_only,
  half_weight_indexer,
  half_context,
};

struct AccountingName {
  Accounting accounting;
  char const* name;  ///< as programs spell it
  char const* what;  ///< what is counted, in words
};

inline constexpr AccountingName accounting_names[] = {
    {Accounting::complete_absorbed, "complete-absorbed", "everything, absorbed core"},
    {Accounting::complete_absorbed_reduction, "complete-absorbed-reduction",
     "everything, absorbed core, ReLU, head weight and sum of the scores (3 per head and key)"},
    {Accounting::complete_expanded, "complete-expanded", "everything, expanded core"},
    {Accounting::no_core, "no-core",
     "all but the attention core: twice the active parameters, and index scores"},
    {Accounting::active_parameters, "active-parameters",
     "twice a given number of active parameters, and index scores"},
    {Accounting::active_parameters_core, "active-parameters-core",
     "twice a given number of active parameters, index scores and absorbed core"},
    {Accounting::no_head, "no-head", "all but the output head, absorbed core"},
    {Accounting::no_core_no_head, "no-core-no-head", "all but attention core and output head"},
    {Accounting::attention_block, "attention-block",
     "attention projections, absorbed core and indexer"},
    {Accounting::core_and_indexer, "core-and-indexer", "absorbed core and indexer"},
    {Accounting::indexer_only, "indexer-only", "the indexer alone"},
    {Accounting::half_weight_indexer, "half-weight-indexer",
     "everything, absorbed core, the indexer's fp8 FLOPs at half weight"},
    {Accounting::half_context, "half-context",
     "everything, absorbed core, index scores over half of the keys: about the mean row of a "
     "prefill"},
};

/// Whether the count needs a number of active parameters from the caller.
constexpr bool needs_active_parameters(Accounting accounting) noexcept {
  return accounting == Accounting::active_parameters ||
         accounting == Accounting::active_parameters_core;
}

/// A count as a function of the number of indexers.
struct FlopsByIndexers {
  double fixed = 0;           ///< whatever the schedule is
  double per_full_layer = 0;  ///< for each indexer

  constexpr double total(double full_layers) const noexcept {
    return fixed + full_layers * per_full_layer;
  }

  /// Of the count, the part that indexers do; 0 to 1.
  constexpr double indexer_share(double full_layers) const noexcept {
    return full_layers * per_full_layer / total(full_layers);
  }

  /// How many times fewer FLOPs `fewer` indexers need than `all`. Its bound for long contexts is
  /// all / fewer.
  constexpr double ratio(double all, double fewer) const noexcept {
    return total(all) / total(fewer);
  }

  /// The fixed part with which `ratio(all, fewer)` would be exactly `wanted`: below 0 if no fixed
  /// part does. Precondition: wanted > 1.
  constexpr double fixed_for_ratio(double all, double fewer, double wanted) const noexcept {
    return (all - wanted * fewer) / (wanted - 1) * per_full_layer;
  }
};

/// The count of `rows`. Half of the context is meant for a decoded row.
/// Precondition: can_count_complete(c).
/// @param active_parameters  for the accountings that need it; others do not read it
constexpr FlopsByIndexers accounted_flops(Accounting accounting, ModelConfig const& c,
                                          CountedRows const& rows,
                                          double active_parameters = 0) noexcept {
  CoreForm const form =
      accounting == Accounting::complete_expanded ? CoreForm::expanded : CoreForm::absorbed;
  // One indexer in the whole model: its terms are the terms per full layer.
  CompleteFlops const one = complete_flops(c, 1, rows, form);
  double const projections = one.attention_projections;
  double const core = one.attention_core;
  double const matrices = projections + one.feed_forward;
  double const head = one.output_head;
  double const indexer = one.indexer_projections + one.index_scoring;
  double const flat = detail::flops(active_parameters) * rows.rows;
  switch (accounting) {
    case Accounting::complete_absorbed:
    case Accounting::complete_expanded:
      return {matrices + head + core, indexer};
    case Accounting::complete_absorbed_reduction:
      return {matrices + head + core, indexer + detail::index_reduction(c, rows.visible_keys)};
    case Accounting::no_core:
      return {matrices + head, indexer};
    case Accounting::active_parameters:  // the indexers' matrices are among them
      return {flat, one.index_scoring};
    case Accounting::active_parameters_core:
      return {flat + core, one.index_scoring};
    case Accounting::no_head:
      return {matrices + core, indexer};
    case Accounting::no_core_no_head:
      return {matrices, indexer};
    case Accounting::attention_block:
      return {projections + core, indexer};
    case Accounting::core_and_indexer:
      return {core, indexer};
    case Accounting::indexer_only:
      return {0, indexer};
    case Accounting::half_weight_indexer:
      return {matrices + head + core, indexer / 2};
    case Accounting::half_context:
      return {matrices + head + core, one.indexer_projections + one.index_scoring / 2};
  }
  return {};
}

/// A ratio as somebody published it, with so many digits after the point.
struct PublishedRatio {
  double value = 0;
  int decimals = 0;
};

/// Whether `ratio`, rounded once to the digits of `published`, is it.
inline bool rounds_to(double ratio, PublishedRatio const& published) noexcept {
  double const units = std::pow(10.0, published.decimals);
  return std::floor(ratio * units + 0.5) == std::round(published.value * units);
}

/// Calls `found(accounting_name, full_layers, ratio)` for every named accounting and every number
/// of indexers in `full_layers` whose ratio to one indexer per layer rounds to `published`.
/// Accountings that need a number of active parameters are left out if it is 0.
/// Precondition: can_count_complete(c).
template <class Found>
void for_each_accounting_of(PublishedRatio const& published, ModelConfig const& c,
                            CountedRows const& rows, cuda::std::span<double const> full_layers,
                            double active_parameters, Found&& found) {
  for (AccountingName const& named : accounting_names) {
    if (needs_active_parameters(named.accounting) && active_parameters == 0) continue;
    FlopsByIndexers const flops = accounted_flops(named.accounting, c, rows, active_parameters);
    for (double const full : full_layers) {
      double const ratio = flops.ratio(detail::real(c.num_hidden_layers), full);
      if (rounds_to(ratio, published)) found(named, full, ratio);
    }
  }
}

}  // namespace v0
}  // namespace indexshare
