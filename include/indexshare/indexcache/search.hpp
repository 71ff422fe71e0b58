// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/indexcache/role_pattern.hpp>

#include <cuda/std/expected>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

/// @file Training-free search for the layers that may share: the greedy algorithm of IndexCache.
///
/// From the pattern whose layers are all full, each step makes one layer shared: the one with which
/// the model's loss on fixed calibration data is lowest. What was made shared stays so; every
/// pattern on the way is nested in the one before it, and the order of the layers is their order of
/// importance, least important first. The model is a function of the caller.
/// @source IndexCache, arXiv 2603.12201, section 3.1 and Appendix B. The paper states no tie rule:
/// here the lowest layer wins.

namespace indexshare {
inline namespace v0 {
namespace indexcache {

/// Stands for a layer where there is none.
inline constexpr std::int32_t no_layer = -1;

/// What a search is about.
struct SearchProblem {
  std::int32_t layers = 0;  ///< layers of the model, all with sparse attention
  std::int32_t shared = 0;  ///< how many of them are to be shared: the number of steps
  /// Layers that stay full, in any order. Layer 0 and the first layer of each block always do.
  std::vector<std::int32_t> pinned{};
  /// First layers of the pipeline stages, ascending, beginning with 0; empty: no stages. With
  /// stages, steps take them in turn: a step makes one layer of its stage shared, the next step
  /// one of the next stage, until `shared` is reached; stages without a layer left are passed over.
  /// About as many times fewer evaluations as there are stages, and no selection ever crosses from
  /// one stage to the next.
  std::vector<std::int32_t> blocks{};

  friend bool operator==(SearchProblem const&, SearchProblem const&) = default;
};

/// Why a search stopped: what is at fault (a field of the problem, a candidate, the log), and what
/// is wrong with it.
struct SearchError {
  std::string subject;
  std::string problem;

  /// One line: `SUBJECT: PROBLEM`.
  std::string message() const { return subject + ": " + problem; }

  friend bool operator==(SearchError const&, SearchError const&) = default;
};

template <class T>
using SearchResult = cuda::std::expected<T, SearchError>;

/// A pattern whose loss the search asks for.
struct Candidate {
  RolePattern pattern;
  /// The layer that is shared here and full in the accepted pattern; `no_layer` if the pattern is
  /// not one flip away from it (the all-full pattern at the beginning).
  std::int32_t flipped = no_layer;
  /// Layers below it compute what they compute under the accepted pattern, the one of the latest
  /// `Evaluator::accepted`. 0: everything may differ.
  std::int32_t first_changed = 0;
};

/// Takes the loss of candidate number `index` of a batch, once for each, in any order. Called from
/// the thread that called the evaluator, best as soon as a loss is known: it is then in the log.
/// Any finite number is a loss; NaN or an infinite one ends the search. Returns whether to go on:
/// after false the evaluator may return at once.
using ReportLoss = std::function<bool(std::size_t index, double loss)>;

/// The model, its calibration data and its loss, as functions of the caller. The data must be the
/// same for every candidate, so that losses differ by the pattern only.
struct Evaluator {
  /// Reports the loss of each candidate (all those of a step whose loss is not known yet), one
  /// after the other, side by side or as one batch. Returns nothing, or why a loss is missing.
  std::function<std::optional<std::string>(std::span<Candidate const>, ReportLoss const&)> evaluate;
  /// Optional. The pattern that the candidates of the following batches differ from; called before
  /// the first of these batches. An evaluator may keep, under this pattern, what enters each layer,
  /// and begin every candidate at its `first_changed`: about half of the work.
  std::function<void(RolePattern const&)> accepted{};
};

/// A loss, or why there is none.
using Loss = cuda::std::expected<double, std::string>;

/// An evaluator that takes candidates one by one.
inline Evaluator one_by_one(std::function<Loss(Candidate const&)> loss_of) {
  Evaluator evaluator;
  evaluator.evaluate = [loss_of = std::move(loss_of)](
                           std::span<Candidate const> candidates,
                           ReportLoss const& report) -> std::optional<std::string> {
    for (std::size_t i = 0; i < candidates.size(); ++i) {
      Loss const loss = loss_of(candidates[i]);
      if (!loss) return pattern_text(candidates[i].pattern) + ": " + loss.error();
      if (!report(i, *loss)) break;
    }
    return std::nullopt;
  };
  return evaluator;
}

/// A candidate's loss. Step 0 is the all-full pattern, whose layer is `no_layer`; step s, counted
/// from 1, compares the patterns with s shared layers.
struct Evaluation {
  std::int32_t step = 0;
  std::int32_t layer = no_layer;  ///< made shared by this candidate
  double loss = 0;

  friend bool operator==(Evaluation const&, Evaluation const&) = default;
};

/// The outcome of a step: the layer that is shared from it on, and the loss with it.
struct Flip {
  std::int32_t step = 0;  ///< counted from 1; so many layers are shared now
  std::int32_t layer = no_layer;
  double loss = 0;

  friend bool operator==(Flip const&, Flip const&) = default;
};

/// What an earlier run of the same search found out.
struct SearchRecords {
  std::vector<Evaluation> evaluations{};
  std::vector<Flip> flips{};  ///< from step 1 on, without gaps
};

/// How far a search is.
struct SearchProgress {
  std::int32_t step = 0;               ///< 0 while the all-full pattern is evaluated
  std::int32_t steps = 0;              ///< in all
  std::int64_t evaluations = 0;        ///< losses known, those of records included
  std::int64_t evaluations_total = 0;  ///< `evaluation_count` and one for the all-full pattern
  double loss = 0;                     ///< the latest
  double elapsed_s = 0;                ///< since the search began
  /// Elapsed time per evaluation of this run, times the evaluations that are left.
  double remaining_s = 0;
};

/// What a search tells while it runs. All are optional. A recorder returns nothing, or why it could
/// not record: the search then ends.
struct SearchHooks {
  /// A new loss, before it is used.
  std::function<std::optional<std::string>(Evaluation const&)> record_evaluation{};
  /// A new outcome of a step.
  std::function<std::optional<std::string>(Flip const&)> record_flip{};
  /// After each new loss.
  std::function<void(SearchProgress const&)> progress{};
  /// Seconds since any fixed moment; absent: std::chrono::steady_clock.
  std::function<double()> clock_s{};
};

/// What a search found.
struct SearchOutcome {
  RolePattern pattern;  ///< with `SearchProblem::shared` shared layers
  /// In order: the least important layer first.
  std::vector<Flip> flips{};
  double all_full_loss = 0;
  std::int64_t evaluations = 0;   ///< `evaluation_count` of the problem; without the all-full one
  std::int64_t from_records = 0;  ///< losses, the all-full one included, that records gave

  /// The pattern after the first `shared` flips: what a search for so many layers would have found.
  /// Precondition: 0 <= shared <= flips.size().
  RolePattern pattern_at(std::int32_t shared) const {
    RolePattern result = RolePattern::all_full(pattern.layers());
    for (Flip const& flip : std::span(flips).first(static_cast<std::size_t>(shared)))
      result = result.with_shared(flip.layer);
    return result;
  }
};

/// The number of shared layers that leaves ceil(ratio * layers) full ones. A product that exceeds a
/// whole number by rounding alone (0.1 * 30) counts as that number.
///
/// Published patterns state their counts: GLM-5's "1/2" and "1/4" have 40 and 22 of 78 full layers,
/// that is 38 and 56 shared ones, where this gives 39 and 58.
/// Preconditions: 0 < ratio <= 1, layers >= 1.
inline std::int32_t shared_for_ratio(std::int32_t layers, double ratio) {
  constexpr double rounding = 1e-9;
  double const full = std::ceil(ratio * layers - rounding);
  return layers - std::clamp(static_cast<std::int32_t>(full), 1, layers);
}

namespace detail {

/// Per layer, whether it stays full.
inline std::vector<bool> pinned_layers(SearchProblem const& problem) {
  std::vector<bool> pinned(static_cast<std::size_t>(problem.layers), false);
  pinned[0] = true;
  for (std::int32_t const layer : problem.pinned) pinned[static_cast<std::size_t>(layer)] = true;
  for (std::int32_t const layer : problem.blocks) pinned[static_cast<std::size_t>(layer)] = true;
  return pinned;
}

inline SearchError out_of_range(char const* field, std::int64_t got, std::int64_t low,
                                std::int64_t high) {
  return {field, "got " + std::to_string(got) + ", expected a number from " + std::to_string(low) +
                     " to " + std::to_string(high)};
}

}  // namespace detail

/// Why a problem has no meaning, by field; nothing if it has one.
inline std::optional<SearchError> check_problem(SearchProblem const& problem) {
  if (problem.layers < 1 || problem.layers > max_schedule_layers)
    return detail::out_of_range("layers", problem.layers, 1, max_schedule_layers);
  for (std::int32_t const layer : problem.pinned)
    if (layer < 0 || layer >= problem.layers)
      return detail::out_of_range("pinned layer", layer, 0, problem.layers - 1);
  for (std::size_t i = 0; i < problem.blocks.size(); ++i) {
    std::int32_t const first = problem.blocks[i];
    if (first < 0 || first >= problem.layers)
      return detail::out_of_range("first layer of a block", first, 0, problem.layers - 1);
    if (i == 0 && first != 0)
      return SearchError{
          "blocks", "the first begins at layer " + std::to_string(first) + ", expected layer 0"};
    if (i > 0 && first <= problem.blocks[i - 1])
      return SearchError{"blocks", "got layer " + std::to_string(first) + " after layer " +
                                       std::to_string(problem.blocks[i - 1]) +
                                       ", expected ascending first layers"};
  }
  auto const pinned = detail::pinned_layers(problem);
  auto const free = static_cast<std::int32_t>(std::count(pinned.begin(), pinned.end(), false));
  if (problem.shared < 0 || problem.shared > free)
    return SearchError{"shared layers", "got " + std::to_string(problem.shared) +
                                            ", expected 0 to " + std::to_string(free) + ", since " +
                                            std::to_string(problem.layers - free) + " of " +
                                            std::to_string(problem.layers) + " layers stay full"};
  return std::nullopt;
}

/// The steps of a search: which layers each compares, given what the steps before it chose.
/// Precondition: `check_problem` finds nothing.
class SearchSteps {
 public:
  explicit SearchSteps(SearchProblem const& problem)
      : steps_(problem.shared),
        block_ends_(problem.blocks),
        pinned_(detail::pinned_layers(problem)),
        pattern_(RolePattern::all_full(problem.layers)) {
    if (!block_ends_.empty()) block_ends_.erase(block_ends_.begin());
    block_ends_.push_back(problem.layers);
    find_block();
  }

  bool finished() const noexcept { return step_ > steps_; }

  /// The next step, counted from 1.
  std::int32_t step() const noexcept { return step_; }

  /// The accepted pattern, with step() - 1 shared layers.
  RolePattern const& pattern() const noexcept { return pattern_; }

  /// Layers that the step compares, ascending; at least one unless the search is finished.
  std::vector<std::int32_t> candidates() const {
    return finished() ? std::vector<std::int32_t>{} : candidates_of(block_);
  }

  /// Ends the step with one of its candidates.
  void accept(std::int32_t layer) {
    pattern_ = pattern_.with_shared(layer);
    ++step_;
    block_ = (block_ + 1) % block_ends_.size();
    find_block();
  }

 private:
  std::vector<std::int32_t> candidates_of(std::size_t block) const {
    std::vector<std::int32_t> layers;
    std::int32_t const first = block == 0 ? 0 : block_ends_[block - 1];
    for (std::int32_t layer = first; layer < block_ends_[block]; ++layer)
      if (pattern_.is_full(layer) && !pinned_[static_cast<std::size_t>(layer)])
        layers.push_back(layer);
    return layers;
  }

  void find_block() {
    if (finished()) return;
    while (candidates_of(block_).empty()) block_ = (block_ + 1) % block_ends_.size();
  }

  std::int32_t steps_;
  std::int32_t step_ = 1;
  std::size_t block_ = 0;
  std::vector<std::int32_t> block_ends_;
  std::vector<bool> pinned_;
  RolePattern pattern_;
};

/// Candidates that a search compares, as the paper counts them (the all-full pattern, evaluated
/// once for comparison, is not among them): 805 and 1015 for 23 and 35 shared layers of 47, 2223
/// and 2772 for 38 and 56 of 78. Precondition: `check_problem` finds nothing.
inline std::int64_t evaluation_count(SearchProblem const& problem) {
  std::int64_t count = 0;
  // How many candidates a step has does not depend on which layers were chosen before it.
  for (SearchSteps steps(problem); !steps.finished(); steps.accept(steps.candidates().front()))
    count += static_cast<std::int64_t>(steps.candidates().size());
  return count;
}

/// Of candidates in ascending order of layers, the one with the lowest loss; of equal ones the
/// lowest layer. Precondition: not empty, no NaN.
inline Evaluation best_of(std::span<Evaluation const> candidates) {
  return *std::min_element(
      candidates.begin(), candidates.end(),
      [](Evaluation const& a, Evaluation const& b) { return a.loss < b.loss; });
}

namespace detail {

/// Runs one search.
class GreedySearch {
 public:
  GreedySearch(SearchProblem const& problem, Evaluator const& evaluator, SearchHooks const& hooks,
               SearchRecords const& records)
      : evaluator_(evaluator), hooks_(hooks), records_(records), steps_(problem) {
    for (Evaluation const& known : records.evaluations)
      known_[{known.step, known.layer}] = known.loss;
    progress_.steps = problem.shared;
    progress_.evaluations_total = evaluation_count(problem) + 1;
    began_s_ = now_s();
  }

  SearchResult<SearchOutcome> run() {
    SearchOutcome outcome;
    auto const all_full = evaluate(0, {Candidate{steps_.pattern()}});
    if (!all_full) return cuda::std::unexpected(all_full.error());
    outcome.all_full_loss = all_full->front().loss;
    while (!steps_.finished()) {
      auto const losses = evaluate(steps_.step(), candidates());
      if (!losses) return cuda::std::unexpected(losses.error());
      outcome.evaluations += static_cast<std::int64_t>(losses->size());
      Evaluation const best = best_of(*losses);
      Flip const flip{best.step, best.layer, best.loss};
      if (auto const error = keep(flip)) return cuda::std::unexpected(*error);
      outcome.flips.push_back(flip);
      steps_.accept(flip.layer);
    }
    outcome.pattern = steps_.pattern();
    outcome.from_records = progress_.evaluations - evaluated_;
    return outcome;
  }

 private:
  std::vector<Candidate> candidates() const {
    std::vector<Candidate> list;
    for (std::int32_t const layer : steps_.candidates())
      list.push_back({steps_.pattern().with_shared(layer), layer, layer});
    return list;
  }

  /// The losses of a step's candidates, in their order: known ones from the records, the others
  /// from the evaluator.
  SearchResult<std::vector<Evaluation>> evaluate(std::int32_t step,
                                                 std::vector<Candidate> const& candidates) {
    std::vector<Evaluation> losses;
    std::vector<Candidate> unknown;
    std::vector<std::size_t> places;  // of the unknown ones among the losses
    progress_.step = step;
    for (Candidate const& candidate : candidates) {
      losses.push_back({step, candidate.flipped, 0});
      auto const known = known_.find({step, candidate.flipped});
      if (known == known_.end()) {
        places.push_back(losses.size() - 1);
        unknown.push_back(candidate);
      } else {
        if (auto const error = check_loss(candidate, known->second))
          return cuda::std::unexpected(*error);
        losses.back().loss = known->second;
        ++progress_.evaluations;
      }
    }
    if (unknown.empty()) return losses;
    if (step > 0) announce();
    if (auto const error = ask(unknown, places, losses)) return cuda::std::unexpected(*error);
    return losses;
  }

  /// Only when the evaluator is about to work from this pattern: a resumed search does not walk it
  /// through what the records already decide.
  void announce() {
    if (!evaluator_.accepted || announced_ == steps_.pattern()) return;
    announced_ = steps_.pattern();
    evaluator_.accepted(announced_);
  }

  std::optional<SearchError> ask(std::vector<Candidate> const& candidates,
                                 std::vector<std::size_t> const& places,
                                 std::vector<Evaluation>& losses) {
    std::vector<bool> reported(candidates.size(), false);
    std::optional<SearchError> error;
    ReportLoss const report = [&, this](std::size_t index, double loss) {
      if (!error) error = check_report(candidates, reported, index, loss);
      if (error) return false;
      reported[index] = true;
      Evaluation& evaluation = losses[places[index]];
      evaluation.loss = loss;
      error = take(evaluation);
      return !error;
    };
    std::optional<std::string> const failed = evaluator_.evaluate(candidates, report);
    if (error) return error;
    if (failed) return SearchError{"evaluator", *failed};
    auto const missing = std::find(reported.begin(), reported.end(), false);
    if (missing == reported.end()) return std::nullopt;
    auto const index = static_cast<std::size_t>(missing - reported.begin());
    return SearchError{name(candidates[index]), "the evaluator reported no loss"};
  }

  static std::optional<SearchError> check_report(std::vector<Candidate> const& candidates,
                                                 std::vector<bool> const& reported,
                                                 std::size_t index, double loss) {
    if (index >= candidates.size())
      return SearchError{"evaluator", "reported a loss of candidate " + std::to_string(index) +
                                          " of a batch of " + std::to_string(candidates.size())};
    if (reported[index])
      return SearchError{name(candidates[index]), "the evaluator reported its loss twice"};
    return check_loss(candidates[index], loss);
  }

  static std::optional<SearchError> check_loss(Candidate const& candidate, double loss) {
    if (std::isfinite(loss)) return std::nullopt;
    return SearchError{name(candidate),
                       std::string("the loss is ") + (std::isnan(loss) ? "NaN" : "infinite") +
                           ", expected a finite number (a large one for a pattern that must not "
                           "be taken)"};
  }

  std::optional<SearchError> take(Evaluation const& evaluation) {
    if (hooks_.record_evaluation)
      if (auto const failed = hooks_.record_evaluation(evaluation))
        return SearchError{"log", *failed};
    ++evaluated_;
    ++progress_.evaluations;
    if (!hooks_.progress) return std::nullopt;
    progress_.loss = evaluation.loss;
    progress_.elapsed_s = now_s() - began_s_;
    auto const left = static_cast<double>(progress_.evaluations_total - progress_.evaluations);
    progress_.remaining_s = progress_.elapsed_s / static_cast<double>(evaluated_) * left;
    hooks_.progress(progress_);
    return std::nullopt;
  }

  /// Records a new flip; one that is recorded must be the same.
  std::optional<SearchError> keep(Flip const& flip) const {
    auto const index = static_cast<std::size_t>(flip.step - 1);
    if (index < records_.flips.size()) {
      if (records_.flips[index] == flip) return std::nullopt;
      return SearchError{"records", "step " + std::to_string(flip.step) + " chose layer " +
                                        std::to_string(records_.flips[index].layer) +
                                        ", but the lowest loss is that of layer " +
                                        std::to_string(flip.layer)};
    }
    if (!hooks_.record_flip) return std::nullopt;
    auto const failed = hooks_.record_flip(flip);
    return failed ? std::optional(SearchError{"log", *failed}) : std::nullopt;
  }

  static std::string name(Candidate const& candidate) {
    std::string text = "candidate " + pattern_text(candidate.pattern);
    if (candidate.flipped == no_layer) return text + " (all layers full)";
    return text + " (layer " + std::to_string(candidate.flipped) + " made shared)";
  }

  double now_s() const {
    if (hooks_.clock_s) return hooks_.clock_s();
    auto const now = std::chrono::steady_clock::now().time_since_epoch();
    return std::chrono::duration<double>(now).count();
  }

  Evaluator const& evaluator_;
  SearchHooks const& hooks_;
  SearchRecords const& records_;
  SearchSteps steps_;
  std::map<std::pair<std::int32_t, std::int32_t>, double> known_;  // by step and layer
  RolePattern announced_;
  SearchProgress progress_;
  std::int64_t evaluated_ = 0;
  double began_s_ = 0;
};

}  // namespace detail

/// Searches.
///
/// Deterministic: the outcome depends on the losses alone, not on the order in which they are
/// reported; of equal losses the lowest layer's wins. Losses that `records` hold are not asked for
/// again, and their flips are not recorded again, so a search that was interrupted goes on where
/// its records end (`io::SearchLog` keeps them in a file). Errors: what `check_problem` says; an
/// evaluator without `evaluate`, or one that fails, reports a loss that is not finite, one twice or
/// none; a recorder that fails; records whose flips do not follow from their losses. Cost: 1 +
/// `evaluation_count(problem)` losses.
inline SearchResult<SearchOutcome> search(SearchProblem const& problem, Evaluator const& evaluator,
                                          SearchHooks const& hooks = {},
                                          SearchRecords const& records = {}) {
  if (auto const error = check_problem(problem)) return cuda::std::unexpected(*error);
  if (!evaluator.evaluate)
    return cuda::std::unexpected(SearchError{"evaluator", "has no function `evaluate`"});
  return detail::GreedySearch(problem, evaluator, hooks, records).run();
}

}  // namespace indexcache
}  // namespace v0
}  // namespace indexshare
