// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/indexcache/search.hpp>
#include <indexshare/io/config.hpp>
#include <indexshare/share/schedule.hpp>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "arguments.hpp"
#include "config_text.hpp"
#include "output_file.hpp"

/// @file Command line of indexshare-search.

namespace programs {

inline constexpr OptionSpec search_options[] = {
    {"--layers", "N", "layers of the model, or:"},
    {"--config", "FILE", "config.json that says how many it has"},
    {"--shared", "K", "layers that are to share, or:"},
    {"--full-ratio", "R", "part of the layers that stays full, 0.25 or 1/4; rounded up to layers"},
    {"--evaluator", "COMMAND", "command for /bin/sh that answers with losses, as above"},
    {"--log", "FILE", "every loss is written here at once; the search can go on from it"},
    {"--resume", "", "go on from --log, or begin if there is no such file"},
    {"--name", "TEXT", "what the losses are of, kept in the log (default: the command)"},
    {"--pin", "A,B,...", "layers that stay full; layer 0 always does"},
    {"--blocks", "0,A,B,...", "first layers of pipeline stages, which stay full; searched in turn"},
    {"--baselines", "", "uniform and random patterns too; with --evaluator, their losses"},
    {"--similarity", "FILE", "JSON matrix of overlaps: also the pattern with the highest sum"},
    {"--write-config", "FILE", "set the pattern in this existing config.json"},
    {"--json", "FILE", "write all results as JSON"},
    {"--progress", "", "a line on stderr for each loss, with the time that is left"},
    {"--help", "", "this text"},
};

inline constexpr char const* search_purpose =
    "Finds the layers of a model that can share the selection of a layer below: from all layers\n"
    "full, each step makes the layer shared with which the loss is lowest (IndexCache, arXiv\n"
    "2603.12201). The losses come from your command, which talks in lines on its standard input\n"
    "and output:\n"
    "  it gets      hello indexshare-search 1 LAYERS\n"
    "               accepted PATTERN                   what later candidates differ from\n"
    "               evaluate ID PATTERN FIRST_CHANGED  F and S per layer; lower layers are as "
    "before\n"
    "               bye\n"
    "  it answers   loss ID VALUE  or  error ID TEXT   once per evaluate, in any order\n"
    "examples/search_evaluator.py is one to start from. Exit status 2 and one line on stderr for\n"
    "any error; the log then has all losses so far.";

/// What a user asked for.
struct SearchSettings {
  indexshare::indexcache::SearchProblem problem;
  std::string evaluator;  ///< empty: baselines only
  std::string name;
  std::string log;
  bool resume = false;
  bool baselines = false;
  bool progress = false;
  std::string similarity;                          ///< file; empty: none
  std::string write_config;                        ///< file; empty: none
  std::string json;                                ///< file; empty: none
  std::optional<std::int32_t> shared_in_config{};  ///< of --config, if it is not 0
};

/// `A,B,...`, layers.
inline Parsed<std::vector<std::int32_t>> parse_layers(std::string_view option,
                                                      std::string_view text) {
  std::vector<std::int32_t> layers;
  for (bool more = true; more;) {
    std::size_t const comma = text.find(',');
    more = comma != std::string_view::npos;
    auto const layer =
        parse_integer(option, text.substr(0, comma), 0, indexshare::max_schedule_layers - 1);
    if (!layer) return cuda::std::unexpected(layer.error());
    layers.push_back(static_cast<std::int32_t>(*layer));
    if (more) text.remove_prefix(comma + 1);
  }
  return layers;
}

/// `0.25` or `1/4`, above 0 and at most 1.
inline Parsed<double> parse_ratio(std::string_view option, std::string_view text) {
  constexpr double smallest = 1e-6;
  constexpr double most = 1e6;
  std::size_t const slash = text.find('/');
  if (slash == std::string_view::npos) return parse_number(option, text, smallest, 1);
  auto const above = parse_number(option, text.substr(0, slash), smallest, most);
  auto const below = parse_number(option, text.substr(slash + 1), smallest, most);
  if (above && below && *above <= *below) return *above / *below;
  return reject(option, "got " + programs::quoted(text) +
                            ", expected a ratio above 0 and up to 1, 0.25 or "
                            "1/4");
}

namespace detail {

/// Exactly one of two options.
inline std::optional<ArgumentError> check_one_of(Arguments const& arguments, char const* a,
                                                 char const* b) {
  if (arguments.has(a) && arguments.has(b))
    return ArgumentError{b, std::string("expected it or ") + a + ", not both"};
  if (!arguments.has(a) && !arguments.has(b))
    return ArgumentError{a, std::string("missing, expected it or ") + b};
  return std::nullopt;
}

inline std::optional<ArgumentError> check_together(Arguments const& arguments) {
  for (auto const& [a, b] : {std::pair{"--layers", "--config"}, {"--shared", "--full-ratio"}})
    if (auto const error = check_one_of(arguments, a, b)) return error;
  if (!arguments.has("--evaluator")) {
    if (!arguments.has("--baselines"))
      return ArgumentError{"--evaluator", "missing, expected a command that gives losses"};
    for (char const* const option :
         {"--log", "--resume", "--name", "--pin", "--blocks", "--write-config", "--progress"})
      if (arguments.has(option)) return ArgumentError{option, "expected together with --evaluator"};
  } else if (arguments.text("--evaluator").empty()) {
    return ArgumentError{"--evaluator", "got \"\", expected a command that gives losses"};
  } else if (!arguments.has("--log")) {
    return ArgumentError{"--log", "missing, expected a file for the losses"};
  }
  if (arguments.has("--similarity") && !arguments.has("--baselines"))
    return ArgumentError{"--similarity", "expected together with --baselines"};
  return std::nullopt;
}

/// Each file that is written must be another than all that are read or written besides. Only
/// --config may be --write-config: the pattern then goes into it.
inline std::optional<ArgumentError> check_files(Arguments const& arguments) {
  std::pair<char const*, char const*> const apart[] = {
      {"--log", "--config"},       {"--log", "--similarity"},         {"--json", "--log"},
      {"--json", "--config"},      {"--json", "--similarity"},        {"--json", "--write-config"},
      {"--write-config", "--log"}, {"--write-config", "--similarity"}};
  for (auto const& [output, other] : apart)
    if (arguments.has(output) && arguments.has(other) &&
        same_file(arguments.text(output), arguments.text(other)))
      return ArgumentError{output, "got " + programs::quoted(arguments.text(output)) +
                                       ", which is the file of " + other +
                                       ", expected another file"};
  for (char const* const option : {"--json", "--write-config"})
    if (arguments.has(option))
      if (auto const place = check_place(option, arguments.text(option)); !place)
        return place.error();
  return std::nullopt;
}

inline Parsed<std::int32_t> layers_of_config(std::string const& file, SearchSettings& settings) {
  auto const config = indexshare::io::read_config_file(file);
  if (!config) return reject("--config", one_line(config_error_text(config.error(), file)));
  std::int32_t shared = 0;
  for (std::int32_t layer = 0; layer < config->plan.num_layers(); ++layer) {
    if (config->plan.role(layer) == indexshare::LayerRole::none)
      return reject("--config", "layer " + std::to_string(layer) + " of " + programs::quoted(file) +
                                    " has no sparse attention, expected a model whose layers all "
                                    "have it");
    shared += config->plan.is_full(layer) ? 0 : 1;
  }
  if (shared > 0) settings.shared_in_config = shared;
  return config->plan.num_layers();
}

inline Parsed<std::int32_t> read_layers(Arguments const& arguments, SearchSettings& settings) {
  if (arguments.has("--config")) return layers_of_config(arguments.text("--config"), settings);
  auto const stated = arguments.integer("--layers", 0, 1, indexshare::max_schedule_layers);
  if (!stated) return cuda::std::unexpected(stated.error());
  return static_cast<std::int32_t>(*stated);
}

inline Parsed<std::int32_t> read_shared(Arguments const& arguments, std::int32_t layers) {
  if (arguments.has("--full-ratio")) {
    auto const ratio = parse_ratio("--full-ratio", arguments.text("--full-ratio"));
    if (!ratio) return cuda::std::unexpected(ratio.error());
    return indexshare::indexcache::shared_for_ratio(layers, *ratio);
  }
  auto const stated = arguments.integer("--shared", 0, 0, layers - 1);
  if (!stated) return cuda::std::unexpected(stated.error());
  return static_cast<std::int32_t>(*stated);
}

}  // namespace detail

/// Reads the options; a config, but no other file.
inline Parsed<SearchSettings> search_settings(Arguments const& arguments) {
  if (auto const error = detail::check_together(arguments)) return cuda::std::unexpected(*error);
  if (auto const error = detail::check_files(arguments)) return cuda::std::unexpected(*error);
  SearchSettings settings;
  auto const layers = detail::read_layers(arguments, settings);
  if (!layers) return cuda::std::unexpected(layers.error());
  settings.problem.layers = *layers;
  auto const shared = detail::read_shared(arguments, *layers);
  if (!shared) return cuda::std::unexpected(shared.error());
  settings.problem.shared = *shared;
  for (auto const& [option, list] :
       {std::pair{"--pin", &settings.problem.pinned}, {"--blocks", &settings.problem.blocks}}) {
    if (!arguments.has(option)) continue;
    auto const stated = parse_layers(option, arguments.text(option));
    if (!stated) return cuda::std::unexpected(stated.error());
    *list = *stated;
  }
  if (auto const error = check_problem(settings.problem))
    return reject(error->subject, error->problem);
  settings.evaluator = arguments.text("--evaluator");
  settings.name = arguments.text("--name", settings.evaluator);
  settings.log = arguments.text("--log");
  settings.resume = arguments.has("--resume");
  settings.baselines = arguments.has("--baselines");
  settings.progress = arguments.has("--progress");
  settings.similarity = arguments.text("--similarity");
  settings.write_config = arguments.text("--write-config");
  settings.json = arguments.text("--json");
  return settings;
}

}  // namespace programs
