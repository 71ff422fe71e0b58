// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "demo_check.hpp"
#include "layer_run.hpp"
#include "thread_pool.hpp"
#include "weights_check.hpp"

#include <indexshare/io/checkpoint.hpp>
#include <indexshare/io/config.hpp>
#include <indexshare/io/layer_weights.hpp>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <functional>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

/// @file Runs self-attention modules of a checkpoint: their weights from its shards, hidden states
/// from a recording or synthetic.

namespace programs {

/// What recordings of these runs state as their producer.
inline constexpr std::string_view demo_producer = "indexshare-demo --weights";

struct WeightsSettings {
  std::string directory;
  std::vector<std::int32_t> layers;  ///< ascending; all have sparse attention
  index_t context = 4096;            ///< tokens of the longer of two synthetic requests
  index_t rows = 32;                 ///< query rows of the synthetic requests
  bool share = true;  ///< by the model's schedule; else every layer runs its own indexer
  bool hadamard = false;
  bool attend_recorded = false;  ///< over the selections of the input
  int threads = 1;
  std::uint64_t seed = 1;
};

/// What one module did.
struct ModuleReport {
  std::int32_t layer = 0;
  bool full = false;
  std::int32_t source = 0;
  double load_ms = 0;
  double front_end_ms = 0;  ///< projections, appends, output
  double attend_ms = 0;     ///< select and attend
  double keys_per_row = 0;
  std::vector<std::string> ignored;  ///< surplus tensors of the file
};

struct WeightsResult {
  std::vector<ModuleReport> modules;
  std::vector<std::int32_t> unused_layers;  ///< in the checkpoint but not in the schedule
  DemoChecker kernels;
  FrontEndChecker front_end;

  bool passed() const { return kernels.passed() && front_end.passed(); }
};

/// Two requests, of `context` and about two thirds as many tokens; rows at their ends and spread
/// over the rest, so that most see more keys than a selection holds.
inline TokenBatch synthetic_tokens(index_t context, index_t rows) {
  TokenBatch batch;
  index_t const lengths[] = {context, std::max<index_t>(1, context * 2 / 3)};
  for (position_t request = 0; request < 2; ++request) {
    for (index_t i = 0; i < lengths[request]; ++i) {
      batch.add_token(request, static_cast<position_t>(i));
    }
  }
  index_t const count = std::min(rows, batch.tokens());
  for (index_t i = 1; i <= count; ++i) {
    batch.add_row(static_cast<position_t>(batch.tokens() * i / count - 1));
  }
  return batch;
}

/// Hidden states of unit mean square, as an RMS norm leaves them. The same for any batch and number
/// of threads.
inline std::vector<float> synthetic_hidden(std::uint64_t seed, std::int32_t layer, index_t tokens,
                                           index_t width) {
  std::vector<float> hidden(static_cast<std::size_t>(tokens * width));
  for (index_t token = 0; token < tokens; ++token) {
    RandomStream random(seed, RandomStream::Use::hidden, layer,
                        {0, static_cast<position_t>(token)});
    for (index_t i = 0; i < width; ++i) {
      hidden[at(token * width + i)] = random.uniform() * 1.7320508f;  // the root of 3
    }
  }
  return hidden;
}

class WeightsRun {
 public:
  using Progress = std::function<void(std::string const&)>;

  /// @param input   hidden states of every layer to run, and their tokens; null: synthetic
  /// @param writer  takes a recording; may be null
  WeightsRun(indexshare::io::LoadedConfig const& config, WeightsSettings settings,
             indexshare::io::Checkpoint checkpoint, indexshare::FrontEnd<> const& front_end,
             ThreadPool& pool, Recording const* input, RecordingWriter* writer, Progress progress)
      : settings_(std::move(settings)),
        plan_(settings_.share ? config.plan : every_layer_full(config)),
        checkpoint_(std::move(checkpoint)),
        input_(input),
        writer_(writer),
        progress_(std::move(progress)),
        run_({{&pool}}, front_end,
             input != nullptr ? TokenBatch::of(*input)
                              : synthetic_tokens(settings_.context, settings_.rows)) {}

  /// Finds out whether every layer has the tensors that it needs. Errors name file, layer, tensor.
  std::optional<indexshare::io::CheckpointError> missing() const {
    for (std::int32_t const layer : settings_.layers) {
      auto const found = check_layer(checkpoint_, run_.config(), plan_, layer);
      if (!found) return found.error();
    }
    return std::nullopt;
  }

  TokenBatch const& batch() { return run_.batch(); }

  /// @pre `missing` finds nothing, and `check_input` neither.
  /// Throws std::runtime_error for a value that no weight can have.
  WeightsResult run() {
    WeightsResult result;
    result.unused_layers = unused_layers(checkpoint_, plan_);
    if (writer_ != nullptr) {
      writer_->metadata("producer", std::string(demo_producer));
      writer_->metadata("attention_selection", settings_.attend_recorded ? "recorded" : "own");
      if (settings_.attend_recorded) {
        writer_->metadata("attended_selections", selection_fingerprint(*input_, settings_.layers));
      }
      run_.describe(*writer_);
    }
    for (std::int32_t const layer : settings_.layers) {
      progress_("layer " + std::to_string(layer));
      result.modules.push_back(run_module(layer, result));
    }
    return result;
  }

 private:
  using Clock = std::chrono::steady_clock;
  static double milliseconds_since(Clock::time_point start) {
    return std::chrono::duration<double, std::milli>(Clock::now() - start).count();
  }

  /// The model's layers without its schedule.
  static indexshare::SharePlan every_layer_full(indexshare::io::LoadedConfig const& config) {
    return indexshare::make_share_plan(
               {.num_layers = config.plan.num_layers(), .mtp_layers = config.plan.mtp_layers()})
        .value();
  }

  /// The module's input.
  std::vector<float> hidden_of(std::int32_t layer) {
    return input_ != nullptr ? input_->tensor(layer, Quantity::hidden).values<float>()
                             : synthetic_hidden(settings_.seed, layer, run_.batch().tokens(),
                                                run_.config().hidden_size);
  }

  /// The selections of the input.
  std::vector<std::vector<position_t>> selected_in_input(std::int32_t layer) const {
    std::vector<std::vector<position_t>> selected;
    for (std::size_t row = 0; row < input_->rows(); ++row) {
      selected.push_back(input_->selection(layer, row));
    }
    return selected;
  }

  ModuleReport run_module(std::int32_t layer, WeightsResult& result) {
    ModuleReport report;
    report.layer = layer;
    report.full = plan_.is_full(layer);
    report.source = share_source(plan_, layer);
    auto start = Clock::now();
    // float holds every weight as it is; a fp8 one is its code times its scale
    auto const loaded = indexshare::io::load_layer<float>(checkpoint_, run_.config(), plan_, layer);
    if (!loaded) throw std::runtime_error(loaded.error().message());
    report.ignored = loaded->ignored();
    report.load_ms = milliseconds_since(start);

    auto const& weights = loaded->views();
    std::vector<float> const hidden = hidden_of(layer);
    start = Clock::now();
    run_.project(weights, hidden);
    run_.append();
    report.front_end_ms = milliseconds_since(start);
    start = Clock::now();
    auto const in = run_.attend(plan_, layer, run_.attention_inputs(weights));
    report.attend_ms = milliseconds_since(start);
    using Run = LayerRun<Exec>;
    result.kernels.check<Run::Indexer, Run::Attention>(run_.shape(), in, run_.state(),
                                                       run_.latent_output(), {});
    if (settings_.attend_recorded) {
      run_.attend_over(selected_in_input(layer), layer, in.attention);
    }
    start = Clock::now();
    run_.finish(weights);
    report.front_end_ms += milliseconds_since(start);

    auto const selection = run_.state().selection();
    for (index_t row = 0; row < run_.batch().rows(); ++row) {
      report.keys_per_row +=
          static_cast<double>(selection.counts(row)) / static_cast<double>(run_.batch().rows());
    }
    result.front_end.check(run_, weights);
    if (writer_ != nullptr) run_.record(*writer_, layer);
    return report;
  }

  using Exec = indexshare::HostExec<PoolFor>;

  WeightsSettings settings_;
  indexshare::SharePlan plan_;
  indexshare::io::Checkpoint checkpoint_;
  Recording const* input_;
  RecordingWriter* writer_;
  Progress progress_;
  LayerRun<Exec> run_;
};

}  // namespace programs
