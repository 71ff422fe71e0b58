// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "arguments.hpp"
#include "config_text.hpp"
#include "weights_input.hpp"
#include "weights_report.hpp"
#include "weights_settings.hpp"

#include <indexshare/io/checkpoint.hpp>
#include <indexshare/io/config.hpp>

#include <cstdio>
#include <filesystem>
#include <optional>
#include <string>
#include <utility>

/// @file `indexshare-demo --weights DIR`.

namespace programs {

namespace weights_detail {

inline Parsed<indexshare::io::LoadedConfig> read_config(std::string const& directory) {
  std::string const file = (std::filesystem::path(directory) / "config.json").string();
  auto config = indexshare::io::read_config_file(file);
  if (!config) return reject("--weights", config_error_text(config.error(), file));
  return *config;
}

inline Parsed<indexshare::FrontEnd<>> make_recipe(indexshare::ModelConfig const& model,
                                                  bool hadamard) {
  using indexshare::LaneBasis;
  auto const natural = make_front_end(model);
  auto const made = hadamard ? make_front_end(model, LaneBasis::hadamard) : natural;
  if (made) return *made;
  indexshare::Status const status = made.error();
  bool const has_numbers = status.expected != 0 || status.got != 0;
  return reject(natural ? "--hadamard" : "--weights",
                status.what + (has_numbers ? ": expected " + std::to_string(status.expected) +
                                                 ", got " + std::to_string(status.got)
                                           : std::string()));
}

inline void print_head(WeightsSettings const& settings, indexshare::io::LoadedConfig const& config,
                       TokenBatch const& batch, Recording const* input) {
  std::string layers;
  for (std::int32_t const layer : settings.layers) {
    layers += (layers.empty() ? "" : " ") + std::to_string(layer);
  }
  std::printf(
      "%s: layers %s of %d (%d MTP), %lld tokens of %lld requests, %lld query rows, top-k %lld, "
      "hidden states %s\n%s\n",
      settings.directory.c_str(), layers.c_str(), config.plan.total_layers(),
      config.plan.mtp_layers(), static_cast<long long>(batch.tokens()),
      static_cast<long long>(batch.request_count), static_cast<long long>(batch.rows()),
      static_cast<long long>(config.model.index_topk),
      input != nullptr ? ("of " + input->name()).c_str() : "synthetic",
      recipe_text(config.model, settings.hadamard).c_str());
  std::fflush(stdout);
}

inline std::string missing_text(indexshare::io::CheckpointError const& missing) {
  return "off needs an indexer in every layer, and " + missing.file + " lacks " + missing.tensor +
         " of layer " + std::to_string(missing.layer);
}

}  // namespace weights_detail

/// Runs the mode. Returns whether its check passed; errors by option, those of the work itself as
/// std::runtime_error.
/// @param otherwise  layers to run where neither the command line nor an input names any
inline Parsed<bool> run_weights_mode(Arguments const& arguments,
                                     NumberRange (*otherwise)(indexshare::SharePlan const&),
                                     WeightsRun::Progress const& progress, void (*end_progress)()) {
  using namespace weights_detail;
  if (auto const checked = check_options(arguments); !checked) return checked;
  auto config = read_config(arguments.text("--weights"));
  if (!config) return cuda::std::unexpected(config.error());
  if (auto const read = read_epsilons(arguments, config->model.norm_eps); !read) return read;
  auto const recipe = make_recipe(config->model, arguments.has("--hadamard"));
  if (!recipe) return cuda::std::unexpected(recipe.error());

  std::optional<Recording> opened;
  if (arguments.has("--input")) {
    auto read = Recording::open(arguments.text("--input"));
    if (!read) return reject("--input", read.error().message());
    opened = std::move(*read);
  }
  Recording const* const input = opened ? &*opened : nullptr;
  auto const settings = read_weights_settings(arguments, *config, input, otherwise(config->plan));
  if (!settings) return cuda::std::unexpected(settings.error());
  if (input != nullptr) {
    auto const wrong =
        check_input(*input, config->model, settings->layers, settings->attend_recorded);
    if (wrong) return reject("--input", *wrong);
  }
  if (auto const writable = check_record(arguments); !writable) return writable;
  auto checkpoint = indexshare::io::Checkpoint::open(settings->directory);
  if (!checkpoint) return reject("--weights", checkpoint.error().message());

  ThreadPool pool(settings->threads);
  RecordingWriter writer;
  bool const records = arguments.has("--record");
  WeightsRun run(*config, *settings, std::move(*checkpoint), *recipe, pool, input,
                 records ? &writer : nullptr, progress);
  if (auto const missing = run.missing()) {
    bool const no_indexer =
        !settings->share && missing->tensor.find(".indexer.") != std::string::npos;
    return no_indexer ? reject("--share", missing_text(*missing))
                      : reject("--weights", missing->message());
  }
  print_head(*settings, *config, run.batch(), input);
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
