// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "arguments.hpp"
#include "weights_run.hpp"

#include <indexshare/io/config.hpp>

#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <system_error>
#include <thread>
#include <utility>

/// @file `indexshare-demo --weights DIR`: the command line and the report.

namespace programs {

namespace weights_detail {

/// Options that mean nothing to this mode.
inline constexpr std::string_view foreign_options[] = {"--config", "--decode", "--draft",
                                                       "--golden", "--json"};

inline Parsed<bool> check_options(Arguments const& arguments) {
  for (std::string_view const option : foreign_options) {
    if (arguments.has(option)) return reject(option, "has no meaning beside --weights");
  }
  for (std::string_view const option : {"--context", "--rows", "--seed"}) {
    if (arguments.has("--input") && arguments.has(option)) {
      return reject(option, "has no meaning beside --input, which brings tokens and rows");
    }
  }
  return true;
}

/// The layers to run: those asked for, else every one that the input has, else the default.
inline Parsed<NumberRange> read_layers(Arguments const& arguments,
                                       indexshare::SharePlan const& plan, Recording const* input,
                                       NumberRange otherwise) {
  if (input != nullptr && !input->layers().empty()) {
    otherwise = {*input->layers().begin(), *input->layers().rbegin() + 1};
  }
  auto const layers = arguments.range("--layers", otherwise, plan.total_layers());
  if (!layers) return layers;
  if (layers->last > plan.total_layers()) {
    return reject("--input", "has layer " + std::to_string(layers->last - 1) +
                                 ", and the model has " + std::to_string(plan.total_layers()) +
                                 " layers, MTP included");
  }
  return layers;
}

inline Parsed<WeightsSettings> read_settings(Arguments const& arguments,
                                             indexshare::io::LoadedConfig const& config,
                                             Recording const* input, NumberRange otherwise) {
  WeightsSettings settings;
  settings.directory = arguments.text("--weights");
  settings.hadamard = arguments.has("--hadamard");
  std::string const share = arguments.text("--share", "on");
  if (share != "on" && share != "off") {
    return reject("--share",
                  "got " + programs::quoted(share) + ", expected on or off beside --weights");
  }
  settings.share = share == "on";
  auto const layers = read_layers(arguments, config.plan, input, otherwise);
  if (!layers) return cuda::std::unexpected(layers.error());
  settings.first_layer = static_cast<std::int32_t>(layers->first);
  settings.last_layer = static_cast<std::int32_t>(layers->last);
  if (settings.share) {
    auto const stage =
        config.plan.stage(settings.first_layer, settings.last_layer, indexshare::StageStart::own);
    if (!stage) {
      return reject("--layers", std::string(stage.error().what) + " (layer " +
                                    std::to_string(stage.error().layer) + ", source " +
                                    std::to_string(stage.error().expected) + ")");
    }
  }

  struct Number {
    char const* option;
    std::int64_t otherwise, low, high;
    std::int64_t value;
  };
  std::int64_t const machine = std::max(1u, std::thread::hardware_concurrency());
  Number numbers[] = {
      {"--context", 2 * config.model.index_topk, 2, std::int64_t{1} << 24, 0},
      {"--rows", 32, 1, 4096, 0},
      {"--threads", machine, 1, 1024, 0},
      {"--seed", 1, 0, std::numeric_limits<std::int64_t>::max(), 0},
  };
  for (Number& number : numbers) {
    auto const value = arguments.integer(number.option, number.otherwise, number.low, number.high);
    if (!value) return cuda::std::unexpected(value.error());
    number.value = *value;
  }
  settings.context = numbers[0].value;
  settings.rows = numbers[1].value;
  settings.threads = static_cast<int>(numbers[2].value);
  settings.seed = static_cast<std::uint64_t>(numbers[3].value);
  return settings;
}

/// Epsilons that other programs choose differently.
inline Parsed<bool> read_epsilons(Arguments const& arguments, indexshare::NormEps& eps) {
  std::pair<char const*, double*> const stated[] = {{"--latent-eps", &eps.latent},
                                                    {"--index-key-eps", &eps.index_key}};
  for (auto const& [option, value] : stated) {
    if (!arguments.has(option)) continue;
    auto const number = parse_number(option, arguments.text(option), 0, 1);
    if (!number) return cuda::std::unexpected(number.error());
    *value = *number;
  }
  return true;
}

/// Refuses a run that this machine cannot hold: hidden states, caches, activations of the tokens.
inline Parsed<bool> check_memory(TokenBatch const& batch, indexshare::ModelConfig const& model) {
  double const per_token =
      4.0 * static_cast<double>(2 * model.hidden_size + 3 * model.kv_lora_rank +
                                3 * model.qk_rope_head_dim + 4 * model.index_head_dim);
  double const per_row =
      4.0 * (static_cast<double>(model.num_attention_heads) *
                 static_cast<double>(2 * model.kv_lora_rank + 3 * model.v_head_dim +
                                     2 * qk_head_dim(model)) +
             static_cast<double>(2 * model.index_n_heads * model.index_head_dim) +
             static_cast<double>(batch.longest));
  double const need =
      per_token * static_cast<double>(batch.tokens()) + per_row * static_cast<double>(batch.rows());
  double const have =
      static_cast<double>(sysconf(_SC_PHYS_PAGES)) * static_cast<double>(sysconf(_SC_PAGE_SIZE));
  if (need <= 0.8 * have) return true;
  return reject("--context", "a layer would take " +
                                 std::to_string(static_cast<std::int64_t>(need / (1 << 30)) + 1) +
                                 " GiB beside its weights; lower it");
}

/// Finds out before the work that a recording could not be written after it.
inline Parsed<bool> check_record(Arguments const& arguments) {
  if (!arguments.has("--record")) return true;
  std::string const file = arguments.text("--record");
  std::error_code ignored;
  if (arguments.has("--input") &&
      std::filesystem::equivalent(file, arguments.text("--input"), ignored)) {
    return reject("--record", "is the file of --input, which would be overwritten");
  }
  bool const is_new = !std::filesystem::exists(file, ignored);
  bool const writable = std::ofstream(file, std::ios::binary | std::ios::app).good();
  if (writable && is_new) std::filesystem::remove(file, ignored);
  if (!writable) return reject("--record", "cannot write " + file);
  return true;
}

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

}  // namespace weights_detail

/// Runs the mode. Returns whether its check passed; errors of the command line by option, others as
/// std::runtime_error.
/// @param otherwise  layers to run where neither the command line nor an input names any
inline Parsed<bool> run_weights_mode(Arguments const& arguments,
                                     NumberRange (*otherwise)(indexshare::SharePlan const&),
                                     WeightsRun::Progress const& progress, void (*end_progress)()) {
  using namespace weights_detail;
  if (auto const checked = check_options(arguments); !checked) return checked;
  std::string const directory = arguments.text("--weights");
  std::string const config_file = (std::filesystem::path(directory) / "config.json").string();
  auto config = indexshare::io::read_config_file(config_file);
  if (!config) {
    bool const names_file = config.error().path == config_file;
    return reject("--weights",
                  config.error().message() + (names_file ? "" : " (in " + config_file + ")"));
  }
  if (auto const status = can_run(config->model); !status.ok()) {
    return reject("--weights", std::string(status.what) + " (in " + config_file + ")");
  }
  if (auto const read = read_epsilons(arguments, config->model.norm_eps); !read) return read;

  std::optional<Recording> input;
  if (arguments.has("--input")) {
    auto opened = Recording::open(arguments.text("--input"));
    if (!opened) return reject("--input", opened.error().message());
    input = std::move(*opened);
  }
  Recording const* const recording = input ? &*input : nullptr;
  auto const settings = read_settings(arguments, *config, recording, otherwise(config->plan));
  if (!settings) return cuda::std::unexpected(settings.error());
  if (auto const fits = check_memory(
          input ? TokenBatch::of(*input) : synthetic_tokens(settings->context, settings->rows),
          config->model);
      !fits) {
    return fits;
  }

  bool const records = arguments.has("--record");
  if (auto const writable = check_record(arguments); !writable) return writable;

  ThreadPool pool(settings->threads);
  RecordingWriter writer;
  WeightsRun run(*config, *settings, pool, recording, records ? &writer : nullptr, progress);
  if (auto const missing = run.missing()) {
    return settings->share ? reject("--weights", missing->message())
                           : reject("--share", "off needs an indexer in every layer, and " +
                                                   missing->message());
  }
  std::printf(
      "%s: layers %d:%d of %d (%d MTP), %lld tokens of %lld requests, %lld query rows, "
      "top-k %lld, hidden states %s\n%s\n",
      directory.c_str(), settings->first_layer, settings->last_layer, config->plan.total_layers(),
      config->plan.mtp_layers(), static_cast<long long>(run.batch().tokens()),
      static_cast<long long>(run.batch().request_count), static_cast<long long>(run.batch().rows()),
      static_cast<long long>(config->model.index_topk),
      input ? ("of " + input->name()).c_str() : "synthetic",
      recipe_text(config->model, settings->hadamard).c_str());
  std::fflush(stdout);
  WeightsResult const result = run.run();
  end_progress();
  print_modules(result);
  if (records) {
    std::string const file = arguments.text("--record");
    if (auto const written = writer.write(file); !written) {
      return reject("--record", written.error().message());
    }
    std::printf("\nrecorded: %s\n", file.c_str());
  }
  print_check(result);
  return result.passed();
}

}  // namespace programs
