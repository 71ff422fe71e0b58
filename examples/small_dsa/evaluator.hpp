// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "../programs/thread_pool.hpp"
#include "forward.hpp"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <numeric>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

/// @file What a choice of sharing layers costs: the loss of the model on a set of sequences.

namespace small_dsa {

/// Means over all query rows of a set.
struct Score {
  double loss = 0;  ///< cross-entropy in nats
  /// Standard error of the loss, from its spread over the sequences; one has none.
  std::optional<double> loss_error;
  double accuracy = 0;  ///< share of the rows whose best logit is the answer

  friend bool operator==(Score const&, Score const&) = default;
};

/// Evaluates choices on one set of sequences, on all threads of a pool. A score depends on the
/// choices and the set alone: not on the threads, nor on what was evaluated before.
class Evaluator {
 public:
  /// @param model, pool  outlive the object
  Evaluator(Model const& model, std::vector<Sequence> sequences, programs::ThreadPool& pool)
      : model_(&model), sequences_(std::move(sequences)), pool_{&pool} {
    for (int worker = 0; worker < pool_.concurrency(); ++worker) {
      forwards_.push_back(std::make_unique<Forward>(model));
    }
  }

  std::size_t sequences() const { return sequences_.size(); }

  /// Layers computed so far, over all sequences: what reuse saves.
  std::int64_t layers_run() const { return layers_run_.load(); }

  /// Keeps what forwards of `base` have before each layer, so that whatever agrees with it in its
  /// first layers is evaluated from the first that differs. Costs a forward from where it differs
  /// from the last base.
  /// Memory: per sequence, token and layer, 4 * (hidden + index_topk + 1) bytes.
  Expected<void> keep(Choices const& base) {
    auto const plan = share_plan(base);
    auto const count = static_cast<index_t>(sequences_.size());
    std::int32_t const from = kept_before(base);
    if (from == static_cast<std::int32_t>(base.size())) return {};
    if (boundaries_.empty()) boundaries_.resize(sequences_.size() * layers());
    Choices const old = std::exchange(base_, {});  // nothing, should a step fail
    auto const done = for_each(count, [&](index_t item, Forward& forward) {
      auto const sequence = static_cast<std::size_t>(item);
      Forward::Status status = start(forward, old, sequence, from);
      for (std::int32_t layer = from; layer < model_->layers() && status.ok(); ++layer) {
        if (layer > 0) boundary(sequence, layer) = forward.boundary();
        status = run(forward, plan, base, layer, sequence);
      }
      return status;
    });
    if (done) base_ = base;
    return done;
  }

  /// Scores of several choices, in their order. Errors: what the library refuses, with the layer.
  /// @pre each has as many entries as the model has layers
  Expected<std::vector<Score>> evaluate(std::span<Choices const> candidates) {
    std::vector<indexshare::SharePlan> plans;
    for (Choices const& candidate : candidates) plans.push_back(share_plan(candidate));
    std::vector<Outcome> outcomes(candidates.size() * sequences_.size());
    auto const done =
        for_each(static_cast<index_t>(outcomes.size()), [&](index_t item, Forward& forward) {
          auto const sequence = static_cast<std::size_t>(item) % sequences_.size();
          auto const number = static_cast<std::size_t>(item) / sequences_.size();
          Choices const& candidate = candidates[number];
          // before a layer that differs, not at the end: outcomes are not kept
          std::int32_t const from = std::min(kept_before(candidate), model_->layers() - 1);
          Forward::Status status = start(forward, base_, sequence, from);
          for (std::int32_t layer = from; layer < model_->layers() && status.ok(); ++layer) {
            status = run(forward, plans[number], candidate, layer, sequence);
          }
          return status.ok() ? forward.outcome(sequences_[sequence],
                                               outcomes[static_cast<std::size_t>(item)])
                             : status;
        });
    if (!done) return refuse(done.error());
    std::vector<Score> scores;
    for (std::size_t number = 0; number < candidates.size(); ++number) {
      scores.push_back(
          mean(std::span(outcomes).subspan(number * sequences_.size(), sequences_.size())));
    }
    return scores;
  }

  /// What the layers select in a forward of `choices`: per sequence [layers, tokens, index_topk].
  Expected<std::vector<std::vector<position_t>>> selections(Choices const& choices) {
    auto const plan = share_plan(choices);
    std::vector<std::vector<position_t>> all(sequences_.size());
    auto const done =
        for_each(static_cast<index_t>(sequences_.size()), [&](index_t item, Forward& forward) {
          auto const sequence = static_cast<std::size_t>(item);
          forward.begin(sequences_[sequence]);
          Forward::Status status;
          for (std::int32_t layer = 0; layer < model_->layers() && status.ok(); ++layer) {
            status = run(forward, plan, choices, layer, sequence);
            auto const selected = forward.selected().indices;
            all[sequence].insert(all[sequence].end(), selected.begin(), selected.end());
          }
          return status;
        });
    if (!done) return refuse(done.error());
    return all;
  }

  Expected<Score> evaluate(Choices const& choices) {
    auto const scores = evaluate(std::span(&choices, 1));
    if (!scores) return refuse(scores.error());
    return scores->front();
  }

 private:
  std::size_t layers() const { return static_cast<std::size_t>(model_->layers()); }

  Boundary& boundary(std::size_t sequence, std::int32_t layer) {
    return boundaries_[sequence * layers() + static_cast<std::size_t>(layer)];
  }

  /// Layers that need not be run again.
  std::int32_t kept_before(Choices const& choices) const {
    return base_.empty() ? 0 : first_difference(base_, choices);
  }

  Forward::Status start(Forward& forward, Choices const& base, std::size_t sequence,
                        std::int32_t layer) {
    if (layer == 0) {
      forward.begin(sequences_[sequence]);
      return {};
    }
    return forward.resume(boundary(sequence, layer), share_source(share_plan(base), layer - 1));
  }

  Forward::Status run(Forward& forward, indexshare::SharePlan const& plan, Choices const& choices,
                      std::int32_t layer, std::size_t sequence) {
    ++layers_run_;
    return forward.layer(plan, layer, choices[static_cast<std::size_t>(layer)],
                         static_cast<std::int32_t>(sequence));
  }

  /// Calls f(item, memory of the thread) for all items; the error of one of those that fail.
  template <class F>
  Expected<void> for_each(index_t count, F const& f) {
    std::mutex mutex;
    std::string error;
    std::atomic<bool> failed{false};
    pool_(count, [&](index_t begin, index_t end, int worker) {
      for (index_t item = begin; item < end && !failed; ++item) {
        Forward::Status const status = f(item, *forwards_[static_cast<std::size_t>(worker)]);
        if (status.ok()) continue;
        failed = true;
        std::lock_guard const lock(mutex);
        error = message(status);
      }
    });
    if (failed) return refuse(error);
    return {};
  }

  static std::string message(Forward::Status const& status) {
    return "layer " + std::to_string(status.layer) + ": " + status.what + ": expected " +
           std::to_string(status.expected) + ", got " + std::to_string(status.got);
  }

  /// Summed in the order of the sequences, which all have as many rows.
  static Score mean(std::span<Outcome const> outcomes) {
    auto const count = static_cast<double>(outcomes.size());
    Score score;
    std::vector<double> means;
    for (Outcome const& outcome : outcomes) {
      auto const rows = static_cast<double>(outcome.losses.size());
      means.push_back(std::accumulate(outcome.losses.begin(), outcome.losses.end(), 0.0) / rows);
      score.loss += means.back() / count;
      score.accuracy += static_cast<double>(outcome.right) / rows / count;
    }
    if (means.size() < 2) return score;
    double squares = 0;
    for (double const mean : means) squares += (mean - score.loss) * (mean - score.loss);
    score.loss_error = std::sqrt(squares / (count - 1) / count);
    return score;
  }

  Model const* model_;
  std::vector<Sequence> sequences_;
  programs::PoolFor pool_;
  std::vector<std::unique_ptr<Forward>> forwards_;  // one per worker
  std::vector<Boundary> boundaries_;                // [sequences, layers] of base_
  Choices base_;                                    // empty: nothing is kept
  std::atomic<std::int64_t> layers_run_{0};
};

}  // namespace small_dsa
