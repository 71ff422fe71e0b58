// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "arguments.hpp"
#include "machine_memory.hpp"
#include "recording.hpp"
#include "weights_run.hpp"

#include <indexshare/io/config.hpp>
#include <indexshare/io/safetensors.hpp>

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

/// @file The command line of `indexshare-demo --weights DIR`. Everything that can be wrong with it
/// is found before any work, and named by its option.

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
  if (arguments.has("--attend-recorded") && !arguments.has("--input")) {
    return reject("--attend-recorded", "needs --input, whose selections it attends over");
  }
  if (arguments.text("--weights").empty()) return reject("--weights", "expected a directory");
  return true;
}

/// The layers asked for, with the option that asked.
struct WantedLayers {
  std::string_view option;
  std::vector<std::int32_t> layers;
};

/// Those of --layers, else every one that the input has hidden states of, else the default.
inline Parsed<WantedLayers> wanted_layers(Arguments const& arguments,
                                          indexshare::SharePlan const& plan, Recording const* input,
                                          NumberRange otherwise) {
  std::int32_t const total = plan.total_layers();
  if (input == nullptr || arguments.has("--layers")) {
    auto const range = arguments.range("--layers", otherwise, total);
    if (!range) return cuda::std::unexpected(range.error());
    WantedLayers wanted{"--layers", {}};
    for (auto layer = static_cast<std::int32_t>(range->first); layer < range->last; ++layer) {
      if (plan.role(layer) != indexshare::LayerRole::none) wanted.layers.push_back(layer);
    }
    if (wanted.layers.empty()) return reject("--layers", "none of them has sparse attention");
    return wanted;
  }
  WantedLayers wanted{"--input", {}};
  for (std::int32_t const layer : input->layers()) {
    if (!input->has(layer, Quantity::hidden)) continue;
    if (plan.role(layer) == indexshare::LayerRole::none) {
      return reject("--input", "has layer " + std::to_string(layer) +
                                   ", which is none with sparse attention of the model's " +
                                   std::to_string(total) + ", MTP included");
    }
    wanted.layers.push_back(layer);
  }
  if (wanted.layers.empty()) {
    return reject("--input", input->name() + " has no hidden states (layerN.hidden)");
  }
  return wanted;
}

/// A shared layer needs its source before it.
inline Parsed<bool> check_sources(WantedLayers const& wanted, indexshare::SharePlan const& plan) {
  for (std::int32_t const layer : wanted.layers) {
    std::int32_t const source = share_source(plan, layer);
    if (std::find(wanted.layers.begin(), wanted.layers.end(), source) == wanted.layers.end()) {
      return reject(wanted.option, "layer " + std::to_string(layer) +
                                       " shares the selection of layer " + std::to_string(source) +
                                       ", which is not among the layers to run");
    }
  }
  return true;
}

/// Where twice index_topk would ask for more.
inline constexpr std::int64_t largest_default_context = 32768;

inline Parsed<bool> read_run_numbers(Arguments const& arguments, index_t top_k,
                                     WeightsSettings& settings) {
  std::int64_t threads = 0;
  std::int64_t seed = 0;
  NumberOption const numbers[] = {
      {"--context", std::clamp<std::int64_t>(2 * top_k, 2, largest_default_context), 2,
       std::int64_t{1} << 24, &settings.context},
      {"--rows", 32, 1, 4096, &settings.rows},
      {"--threads", std::max(1u, std::thread::hardware_concurrency()), 1, 1024, &threads},
      {"--seed", 1, 0, std::numeric_limits<std::int64_t>::max(), &seed}};
  auto const read = read_numbers(arguments, numbers);
  settings.threads = static_cast<int>(threads);
  settings.seed = static_cast<std::uint64_t>(seed);
  return read;
}

/// Epsilons that other programs choose differently.
inline Parsed<bool> read_epsilons(Arguments const& arguments, indexshare::NormEps& eps) {
  std::pair<char const*, double*> const stated[] = {{"--latent-eps", &eps.latent},
                                                    {"--index-key-eps", &eps.index_key}};
  for (auto const& [option, value] : stated) {
    if (!arguments.has(option)) continue;
    auto const number = parse_number(option, arguments.text(option), 0, 1);
    if (!number) return cuda::std::unexpected(number.error());
    if (*number <= 0 || *number >= 1) {
      return reject(option, "got " + programs::quoted(arguments.text(option)) +
                                ", expected a number above 0 and below 1");
    }
    *value = *number;
  }
  return true;
}

/// Whether an existing file may be overwritten: it is empty, or an earlier recording of ours. One
/// of an engine may have cost more.
inline bool is_ours(std::string const& file) {
  std::error_code ignored;
  if (std::filesystem::file_size(file, ignored) == 0) return true;
  auto const old = indexshare::io::SafetensorsFile::open(file);
  if (!old) return false;
  auto const has = [&old](char const* key, std::string_view value) {
    auto const found = old->metadata().find(key);
    return found != old->metadata().end() && found->second == value;
  };
  return has("format", recording_format) && has("producer", demo_producer);
}

/// How many tokens, rows and keys of the longest request a run brings.
struct RunSize {
  double tokens;
  double rows;
  double longest;
};

/// Refuses a run that this machine cannot hold: hidden states, caches, activations, selections.
inline Parsed<bool> check_memory(RunSize const& size, indexshare::ModelConfig const& model) {
  double const per_token =
      4.0 * static_cast<double>(2 * model.hidden_size + 3 * model.kv_lora_rank +
                                3 * model.qk_rope_head_dim + 4 * model.index_head_dim);
  double const per_row =
      4.0 * (static_cast<double>(model.num_attention_heads) *
                 static_cast<double>(2 * model.kv_lora_rank + 3 * model.v_head_dim +
                                     2 * qk_head_dim(model)) +
             static_cast<double>(2 * model.index_n_heads * model.index_head_dim) + size.longest +
             8 * static_cast<double>(model.index_topk));  // states and a list of selections
  double const need = per_token * size.tokens + per_row * size.rows;
  if (need <= 0.5 * machine_memory()) return true;
  return reject("memory", "a layer would take " + gib_text(need) +
                              " beside its weights (index_topk " +
                              std::to_string(model.index_topk) +
                              "): fewer tokens or rows are needed (--context, --rows, --input)");
}

}  // namespace weights_detail

/// Finds out before the work that a recording could not, or must not, be written after it.
inline Parsed<bool> check_record(Arguments const& arguments) {
  if (!arguments.has("--record")) return true;
  std::string const file = arguments.text("--record");
  std::error_code ignored;
  if (arguments.has("--input") &&
      std::filesystem::equivalent(file, arguments.text("--input"), ignored)) {
    return reject("--record", "is the file of --input, which would be overwritten");
  }
  bool const is_new = std::filesystem::symlink_status(file, ignored).type() ==
                      std::filesystem::file_type::not_found;
  auto const status = std::filesystem::status(file, ignored);
  if (std::filesystem::exists(status) && !std::filesystem::is_regular_file(status)) {
    return reject("--record", file + " is no regular file");
  }
  if (std::filesystem::exists(status) && !weights_detail::is_ours(file)) {
    return reject("--record",
                  file + " exists and is no recording of this program; it is not overwritten");
  }
  bool const writable = std::ofstream(file, std::ios::binary | std::ios::app).good();
  if (writable && is_new) std::filesystem::remove(file, ignored);
  if (!writable) return reject("--record", "cannot write " + file);
  return true;
}

/// The settings of a run. Errors name the option.
/// @param input      null: synthetic tokens
/// @param otherwise  layers to run where neither the command line nor the input names any
inline Parsed<WeightsSettings> read_weights_settings(Arguments const& arguments,
                                                     indexshare::io::LoadedConfig const& config,
                                                     Recording const* input,
                                                     NumberRange otherwise) {
  using namespace weights_detail;
  WeightsSettings settings;
  settings.directory = arguments.text("--weights");
  settings.hadamard = arguments.has("--hadamard");
  settings.attend_recorded = arguments.has("--attend-recorded");
  std::string const share = arguments.text("--share", "on");
  if (share != "on" && share != "off") {
    return reject("--share",
                  "got " + programs::quoted(share) + ", expected on or off beside --weights");
  }
  settings.share = share == "on";
  auto wanted = wanted_layers(arguments, config.plan, input, otherwise);
  if (!wanted) return cuda::std::unexpected(wanted.error());
  if (settings.share) {
    auto const checked = check_sources(*wanted, config.plan);
    if (!checked) return cuda::std::unexpected(checked.error());
  }
  settings.layers = std::move(wanted->layers);
  if (auto const read = read_run_numbers(arguments, config.model.index_topk, settings); !read) {
    return cuda::std::unexpected(read.error());
  }
  auto const size_of = [](index_t tokens, index_t rows, index_t longest) {
    return RunSize{static_cast<double>(tokens), static_cast<double>(rows),
                   static_cast<double>(longest)};
  };
  RunSize size = size_of(2 * settings.context, settings.rows, settings.context);
  if (input != nullptr) {
    TokenBatch const batch = TokenBatch::of(*input);
    size = size_of(batch.tokens(), batch.rows(), batch.longest);
  }
  auto const fits = check_memory(size, config.model);
  if (!fits) return cuda::std::unexpected(fits.error());
  return settings;
}

}  // namespace programs
