// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "weights_run.hpp"

#include <cstdint>
#include <cstdio>
#include <string>

/// @file What `indexshare-demo --weights DIR` prints.

namespace programs {

inline void print_modules(WeightsResult const& result) {
  std::printf("\n%6s  %-6s %6s %10s %13s %11s %14s\n", "layer", "role", "source", "load ms",
              "front end ms", "attend ms", "keys per row");
  for (ModuleReport const& module : result.modules) {
    std::printf("%6d  %-6s %6d %10.1f %13.1f %11.1f %14.1f\n", module.layer,
                module.full ? "full" : "shared", module.source, module.load_ms, module.front_end_ms,
                module.attend_ms, module.keys_per_row);
  }
  for (ModuleReport const& module : result.modules) {
    for (std::string const& tensor : module.ignored) {
      std::printf("ignored, as layer %d shares the selection of layer %d: %s\n", module.layer,
                  module.source, tensor.c_str());
    }
  }
  for (std::int32_t const layer : result.unused_layers) {
    std::printf("not used: layer %d is in the checkpoint but not in config.json\n", layer);
  }
}

inline void print_check(WeightsResult const& result) {
  DemoChecker const& kernels = result.kernels;
  std::printf(
      "\nCheck against the reference back end\n"
      "  front end: %lld rows and tokens recomputed, worst error %.1e of the largest value "
      "(allowed %.0e)\n"
      "  selections: %lld rows recomputed, %lld differ (byte for byte)\n"
      "  reuse: %lld rows of shared layers, %lld differ from their source\n"
      "  attention: %lld head rows recomputed, %lld off, worst error %.1e (allowed %.0e)\n"
      "CHECK %s\n",
      static_cast<long long>(result.front_end.samples), result.front_end.worst,
      FrontEndChecker::tolerance, static_cast<long long>(kernels.selections),
      static_cast<long long>(kernels.wrong_selections), static_cast<long long>(kernels.reused),
      static_cast<long long>(kernels.wrong_reused), static_cast<long long>(kernels.outputs),
      static_cast<long long>(kernels.wrong_outputs), kernels.worst_output, DemoChecker::tolerance,
      result.passed() ? "PASSED" : "FAILED");
}

/// The recipe that the run followed, for comparison with an engine's.
inline std::string recipe_text(indexshare::ModelConfig const& model, bool hadamard) {
  using indexshare::RopeLayout;
  auto const layout = [](RopeLayout value) {
    return value == RopeLayout::interleaved ? "interleaved" : "half-split";
  };
  char text[400];
  std::snprintf(text, sizeof text,
                "recipe: rotary %s, indexer rotary %s on the %s %lld of %lld lanes, theta %g%s; "
                "latent norm eps %g, k_norm eps %g; softmax scale %.6g; index basis %s%s%s",
                layout(model.rope.layout), layout(model.indexer_rope.layout),
                model.indexer_rope.lanes == indexshare::RopeLanes::first ? "first" : "last",
                static_cast<long long>(model.indexer_rope.dims),
                static_cast<long long>(model.index_head_dim), model.rope.theta,
                model.rope.scaling == indexshare::RopeScaling::yarn ? " with YaRN" : "",
                model.norm_eps.latent, model.norm_eps.index_key, softmax_scale(model),
                hadamard ? "hadamard" : "natural", model.learnable_sink ? "; sinks" : "",
                model.gated_output ? "; gated output" : "");
  return text;
}

}  // namespace programs
