// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "compare_layers.hpp"
#include "layer_run.hpp"

#include <indexshare/frontend.hpp>
#include <indexshare/indexshare.hpp>
#include <indexshare/io/checkpoint.hpp>
#include <indexshare/io/config.hpp>
#include <indexshare/io/layer_weights.hpp>

#include <cstdint>
#include <functional>
#include <map>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

/// @file The fixtures of tests/golden/<family>: a checkpoint and a recording of what transformers
/// computes with it, and ways to run ours on the same hidden states, right or spoilt.

namespace test {

template <class Expected>
auto taken(Expected&& expected) {
  if (!expected) throw std::runtime_error(expected.error().message());
  return std::move(*expected);
}

inline constexpr char const* golden_families[] = {"glm_moe_dsa", "deepseek_v32", "hy_v4"};

struct GoldenFamily {
  indexshare::io::LoadedConfig config;
  indexshare::io::Checkpoint checkpoint;
  programs::Recording recording;

  explicit GoldenFamily(std::string const& name)
      : config(taken(indexshare::io::read_config_file(directory(name) + "/config.json"))),
        checkpoint(taken(indexshare::io::Checkpoint::open(directory(name)))),
        recording(taken(programs::Recording::open(directory(name) + "/forward.safetensors"))) {
    // transformers does not take every epsilon from the config
    config.model.norm_eps.latent = number("latent_norm_eps");
    config.model.norm_eps.index_key = number("index_key_eps");
  }

  static std::string directory(std::string const& name) {
    return std::string(INDEXSHARE_TEST_DATA_DIR) + "/golden/" + name;
  }

  indexshare::io::LoadedLayer<float> layer(std::int32_t number) const {
    return taken(indexshare::io::load_layer<float>(checkpoint, config.model, config.plan, number));
  }
  std::vector<float> hidden(std::int32_t layer) const {
    return recording.tensor(layer, programs::Quantity::hidden).values<float>();
  }

 private:
  double number(char const* key) const { return std::stod(recording.metadata().at(key)); }
};

using Weights = indexshare::AttentionWeights<indexshare::Space::host, float>;
template <class X>
using Run = programs::LayerRun<X>;
using SerialRun = Run<indexshare::HostExec<>>;
using MlaIn = indexshare::MlaInputs<float, SerialRun::Format, indexshare::Space::host>;

/// What is done wrong in a run; nothing by default.
struct Spoil {
  std::function<void(indexshare::ModelConfig&)> config;
  std::function<void(SerialRun&)> start;  ///< before the first layer
  std::function<void(Weights&, std::int32_t layer)> weights;
  std::function<void(SerialRun&, Weights const&)> projected;
  std::function<void(SerialRun&, MlaIn&, std::int32_t layer)> attention;
  /// Runs selection and attention; by default by the schedule, with ReluDotIndexer.
  std::function<void(SerialRun&, indexshare::SharePlan const&, std::int32_t layer, MlaIn const&)>
      attend;
};

/// All layers of a family in one forward, as a recording.
inline programs::Recording run_family(GoldenFamily const& family, Spoil const& spoil) {
  indexshare::ModelConfig model = family.config.model;
  if (spoil.config) spoil.config(model);
  auto const made = indexshare::make_front_end(model);
  if (!made) throw std::runtime_error(made.error().what);
  SerialRun run({}, *made, programs::TokenBatch::of(family.recording));
  programs::RecordingWriter writer;
  run.describe(writer);
  if (spoil.start) spoil.start(run);
  for (std::int32_t layer = 0; layer < family.config.plan.total_layers(); ++layer) {
    auto const loaded = family.layer(layer);
    Weights weights = loaded.views();
    if (spoil.weights) spoil.weights(weights, layer);
    run.project(weights, family.hidden(layer));
    if (spoil.projected) spoil.projected(run, weights);
    run.append();
    MlaIn in = run.attention_inputs(weights);
    if (spoil.attention) spoil.attention(run, in, layer);
    if (spoil.attend) {
      spoil.attend(run, family.config.plan, layer, in);
    } else {
      run.attend(family.config.plan, layer, in);
    }
    run.finish(weights);
    run.record(writer, layer);
  }
  return taken(programs::Recording::parse("ours", taken(writer.bytes())));
}

inline programs::CompareReport compare(programs::Recording const& ours, GoldenFamily const& family,
                                       double tolerance) {
  programs::CompareSettings settings;
  settings.tolerance = tolerance;
  return taken(programs::compare_recordings(family.recording, ours, settings));
}

}  // namespace test
