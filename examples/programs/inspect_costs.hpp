// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/accounting.hpp>
#include <indexshare/dims.hpp>
#include <indexshare/io/config.hpp>
#include <indexshare/model_config.hpp>
#include <indexshare/share_plan.hpp>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

/// @file Costs that `indexshare-inspect` counts beyond one decoded token: prefill, layer by layer,
/// and by other accountings.

namespace programs {

/// The two forms of the attention core, counted side by side.
struct FlopsByForm {
  indexshare::SharingFlops absorbed;
  indexshare::SharingFlops expanded;
};

inline FlopsByForm flops_by_form(indexshare::io::LoadedConfig const& config,
                                 indexshare::CountedRows const& rows) {
  auto const in_form = [&](indexshare::CoreForm form) {
    return indexshare::complete_sharing_flops(config.model, config.plan, rows, form);
  };
  return {in_form(indexshare::CoreForm::absorbed), in_form(indexshare::CoreForm::expanded)};
}

/// How the caches are stored that bytes are counted of.
struct CacheForms {
  indexshare::KvForm kv = indexshare::KvForm::latent_e4m3;
  indexshare::IndexKeyForm index_key = indexshare::IndexKeyForm::e4m3;
};

struct PrefillReport {
  indexshare::TokenRange range;
  indexshare::CountedRows rows;
  FlopsByForm flops;
  indexshare::SharingBytes moved;
};

inline PrefillReport count_prefill(indexshare::io::LoadedConfig const& config,
                                   CacheForms const& forms, indexshare::TokenRange range) {
  indexshare::CountedRows const rows = indexshare::prefilled_rows(config.model, range);
  return {range, rows, flops_by_form(config, rows),
          indexshare::sharing_bytes(config.model, config.plan, rows, forms.kv, forms.index_key)};
}

/// A layer, or a share group under the number of its full layer.
struct LayerCost {
  std::int32_t layer = 0;
  std::int32_t source = 0;
  std::int32_t layers = 1;
  indexshare::CompleteFlops flops{};  ///< absorbed core
  indexshare::MovedBytes moved{};
  indexshare::index_t index_key_bytes = 0;  ///< of the caches, per token
  indexshare::index_t kv_bytes = 0;
};

struct LayerReport {
  std::vector<LayerCost> layers;
  std::vector<LayerCost> groups;
};

inline LayerCost layer_cost(indexshare::io::LoadedConfig const& config, CacheForms const& forms,
                            indexshare::CountedRows const& rows, std::int32_t layer) {
  auto const& [model, plan] = config;
  LayerCost cost;
  cost.layer = layer;
  cost.source = share_source(plan, layer);
  cost.flops = indexshare::layer_flops(model, plan, layer, rows, indexshare::CoreForm::absorbed);
  cost.moved = indexshare::layer_moved_bytes(model, plan, layer, rows, forms.kv, forms.index_key);
  if (plan.is_full(layer)) cost.index_key_bytes = index_key_bytes(model, forms.index_key);
  cost.kv_bytes = kv_entry_bytes(model, forms.kv);
  return cost;
}

inline LayerReport count_layers(indexshare::io::LoadedConfig const& config, CacheForms const& forms,
                                indexshare::CountedRows const& rows) {
  LayerReport report;
  for (std::int32_t layer = 0; layer < config.plan.num_layers(); ++layer) {
    LayerCost const cost = layer_cost(config, forms, rows, layer);
    report.layers.push_back(cost);
    if (cost.source == layer) {
      report.groups.push_back(cost);
      continue;
    }
    LayerCost& group = report.groups.back();  // readers follow their full layer
    group.layers += 1;
    group.flops += cost.flops;
    group.moved += cost.moved;
    group.kv_bytes += cost.kv_bytes;
  }
  return report;
}

/// What the user asked about accountings.
struct AccountingRequest {
  std::vector<indexshare::Accounting> accountings;  ///< to be shown
  std::optional<indexshare::PublishedRatio> published;
  std::vector<double> indexers;  ///< numbers of full layers to compare with one per layer
  double active_parameters = 0;  ///< 0: not given
};

struct AccountedRow {
  indexshare::AccountingName named;
  indexshare::FlopsByIndexers flops;
};

/// An accounting and a number of full layers whose ratio rounds to the published one.
struct PublishedMatch {
  indexshare::AccountingName named;
  double full_layers;
  double ratio;
};

struct AccountingReport {
  AccountingRequest request;
  std::vector<AccountedRow> rows;
  std::vector<PublishedMatch> matches;
};

/// Numbers of full layers that a ratio may have been published for: those of the plan, a quarter
/// of the layers, and a quarter rounded up.
inline std::vector<double> usual_indexers(indexshare::SharePlan const& plan) {
  double const real = plan.full_layers().count();
  double const quarter = plan.num_layers() / 4.0;
  double const rounded_up = (plan.num_layers() + 3) / 4;
  std::vector<double> counts{real};
  for (double const other : {quarter, rounded_up})
    if (other >= 1 && other != counts.front() && other != counts.back()) counts.push_back(other);
  return counts;
}

inline AccountingReport count_accountings(indexshare::io::LoadedConfig const& config,
                                          indexshare::CountedRows const& rows,
                                          AccountingRequest const& request) {
  AccountingReport report{request, {}, {}};
  for (indexshare::Accounting const accounting : request.accountings)
    report.rows.push_back(
        {indexshare::accounting_names[static_cast<std::size_t>(accounting)],
         accounted_flops(accounting, config.model, rows, request.active_parameters)});
  if (request.published)
    indexshare::for_each_accounting_of(
        *request.published, config.model, rows, request.indexers, request.active_parameters,
        [&](indexshare::AccountingName const& named, double full_layers, double ratio) {
          report.matches.push_back({named, full_layers, ratio});
        });
  return report;
}

}  // namespace programs
