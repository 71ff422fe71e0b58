// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "evaluator.hpp"

#include <indexshare/indexcache/overlap_counts.hpp>
#include <indexshare/indexcache/role_pattern.hpp>
#include <indexshare/indexcache/search.hpp>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <numeric>
#include <optional>
#include <span>
#include <string>
#include <vector>

/// @file The small model as what the library's search asks for.

namespace small_dsa {

inline Choices choices_of(indexshare::indexcache::RolePattern const& pattern) {
  Choices choices;
  for (indexshare::LayerRole const role : pattern.roles()) {
    choices.push_back(role == indexshare::LayerRole::full ? Choice::full : Choice::shared);
  }
  return choices;
}

/// The loss on the evaluator's sequences. Candidates are evaluated one after the other, so that
/// each loss is in the log as soon as it is known; a candidate's sequences run side by side.
/// @param evaluator  outlives the object
inline indexshare::indexcache::Evaluator search_evaluator(Evaluator& evaluator) {
  using indexshare::indexcache::Candidate;
  using indexshare::indexcache::ReportLoss;
  using indexshare::indexcache::RolePattern;
  auto const base = std::make_shared<RolePattern>();
  indexshare::indexcache::Evaluator functions;
  functions.accepted = [base](RolePattern const& pattern) { *base = pattern; };
  functions.evaluate = [&evaluator, base](std::span<Candidate const> candidates,
                                          ReportLoss const& report) -> std::optional<std::string> {
    if (base->layers() > 0) {
      if (auto const kept = evaluator.keep(choices_of(*base)); !kept) return kept.error();
    }
    for (std::size_t i = 0; i < candidates.size(); ++i) {
      auto const score = evaluator.evaluate(choices_of(candidates[i].pattern));
      if (!score) return score.error();
      if (!report(i, score->loss)) break;
    }
    return std::nullopt;
  };
  return functions;
}

/// A search for up to all layers but the first.
inline indexshare::indexcache::SearchProblem search_problem(Model const& model,
                                                            std::int32_t shared) {
  indexshare::indexcache::SearchProblem problem;
  problem.layers = model.layers();
  problem.shared = shared;
  return problem;
}

/// Mean overlap of what two layers select, [layers, layers] row-major, over the rows that see more
/// keys than they can select.
/// @param selections  per sequence [layers, tokens, index_topk]
inline Expected<std::vector<double>> selection_overlap(
    Model const& model, std::vector<std::vector<position_t>> const& selections) {
  index_t const tokens = model.task().tokens();
  std::vector<position_t> lengths(static_cast<std::size_t>(tokens));
  std::iota(lengths.begin(), lengths.end(), position_t{1});
  indexshare::indexcache::OverlapCounter counter(model.layers(), {.skip_short = true});
  for (auto const& positions : selections) {
    indexshare::Status const status =
        counter.add({indexshare::make_dense<host, position_t const, 3>(
                         positions.data(), {model.layers(), tokens, model.config().index_topk}),
                     indexshare::make_lengths<host>(lengths.data(), indexshare::Rows{tokens})});
    if (!status.ok()) return refuse(std::string("overlap: ") + status.what);
  }
  std::vector<double> overlap;
  for (index_t a = 0; a < model.layers(); ++a) {
    for (index_t b = 0; b < model.layers(); ++b) overlap.push_back(counter.counts().overlap(a, b));
  }
  return overlap;
}

}  // namespace small_dsa
