// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/io/config.hpp>

#include <cstdint>
#include <limits>
#include <optional>
#include <ostream>
#include <string>
#include <string_view>
#include <vector>

#include "arguments.hpp"
#include "config_text.hpp"
#include "inspect_cost_options.hpp"
#include "inspect_costs.hpp"
#include "inspect_json.hpp"
#include "inspect_plot.hpp"
#include "inspect_report.hpp"
#include "inspect_stages.hpp"
#include "inspect_table.hpp"
#include "output_file.hpp"

namespace programs {

inline constexpr OptionSpec inspect_options[] = {
    {"--config", "FILE", "config.json of a model (required)"},
    {"--context", "L", "visible keys to count FLOPs at, e.g. 128K (default: the model's longest)"},
    {"--stages", "A:B,...",
     "pipeline stages, layers A to B - 1 each; MTP layers are the last (default: one stage)"},
    {"--rows", "N", "plan the memory of a call of N query rows at --context keys"},
    {"--budget", "BYTES", "of such a call, for selection and scratch (default 256M)"},
    {"--kv", "FORM", "of the KV caches: fp8-656 (default), fp8-576 or bf16"},
    {"--index-key", "FORM", "of the index-key caches: fp8 (default) or f16"},
    {"--prefill", "A:B",
     "count a prefill of the tokens A to B - 1 too, and --layers, --accounting, --published of it"},
    {"--layers", "", "FLOPs and bytes of each layer and share group"},
    {"--accounting", "NAME", "FLOPs and ratios by a named accounting, or by all"},
    {"--published", "R", "accountings that give the ratio R, e.g. 2.9, rounded to its digits"},
    {"--indexers", "N,...",
     "full layers that such ratios are for, e.g. 21,19.5 (default: the model's, a quarter)"},
    {"--active-parameters", "P", "for the accountings with active parameters, e.g. 40e9"},
    {"--svg", "FILE", "draw FLOPs and bytes per decoded token from 8K keys to --context"},
    {"--json", "", "one JSON object instead of a table"},
    {"--help", "", "this text"},
};

inline constexpr char const* inspect_purpose =
    "Shows which layers of a model select, which share, and what that saves.\n"
    "A stage that starts on a shared layer is refused, unless it is written A:B+import: it then "
    "gets\n"
    "the selection from the stage below. Exit status 2 and one line on stderr for any error.";

/// `error: PATH: ...`, and the file it was found in where PATH is a place inside one.
inline std::string error_line(indexshare::io::ConfigError const& error, std::string const& file) {
  return one_line("error: " + config_error_text(error, file)) + "\n";
}

inline constexpr std::string_view cost_options[] = {"--prefill", "--layers", "--accounting",
                                                    "--published", "--svg"};

/// Refuses an option that asks for counts that this config does not allow.
inline Parsed<bool> check_cost_options(Arguments const& arguments, InspectReport const& report) {
  for (std::string_view const option : {"--indexers", "--active-parameters"})
    if (arguments.has(option) && !asks_for_accountings(arguments))
      return reject(option, "expected together with --accounting or --published");
  for (std::string_view const option : cost_options) {
    if (!arguments.has(option)) continue;
    indexshare::Status const countable =
        indexshare::can_count_complete(report.config.model);  // and then its bytes
    if (!countable.ok()) return reject(option, countable.what);
    bool const needs_context = option == "--svg" || !arguments.has("--prefill");
    if (needs_context && !report.context)
      return reject("--context", "missing, expected the keys to count " + std::string(option) +
                                     " at; the config states no longest context");
  }
  return true;
}

/// Adds what the options for costs ask for. Precondition: make_report has run.
inline Parsed<bool> add_costs(InspectReport& report, Arguments const& arguments) {
  auto const checked = check_cost_options(arguments, report);
  if (!checked) return checked;
  if (arguments.has("--prefill")) {
    auto const range = parse_prefill("--prefill", arguments.text("--prefill"));
    if (!range) return cuda::std::unexpected(range.error());
    report.prefill = count_prefill(report.config, report.forms, *range);
  }
  auto const rows = [&] {
    return report.prefill ? report.prefill->rows
                          : indexshare::decoded_row(report.config.model, *report.context);
  };
  if (arguments.has("--layers")) report.layers = count_layers(report.config, report.forms, rows());
  if (asks_for_accountings(arguments)) {
    auto const request = parse_accounting_request(arguments, report.config.plan);
    if (!request) return cuda::std::unexpected(request.error());
    report.accountings = count_accountings(report.config, rows(), *request);
  }
  return true;
}

/// Writes the drawing if one was asked for.
inline Parsed<bool> write_drawing(InspectReport const& report, Arguments const& arguments) {
  constexpr indexshare::index_t shortest = 16 * 1024;
  if (!arguments.has("--svg")) return true;
  if (*report.context < shortest)
    return reject("--svg", "draws from 8K keys on, expected a --context of at least 16K");
  auto const apart = check_output(arguments, "--svg", {arguments.text("--config")}, "inputs");
  if (!apart) return apart;
  return write_output("--svg", arguments.text("--svg"),
                      cost_drawing(report.config, report.forms, *report.context));
}

/// What the user asked about a config that was read.
inline Parsed<InspectReport> requested_report(Arguments const& arguments,
                                              indexshare::io::LoadedConfig const& config) {
  std::optional<indexshare::index_t> context;
  if (arguments.has("--context")) {
    auto const stated =
        arguments.integer("--context", 0, 1, std::numeric_limits<indexshare::position_t>::max());
    if (!stated) return reject(stated.error().option, stated.error().problem);
    context = *stated;
  }
  std::vector<indexshare::StageRange> stages{{0, config.plan.total_layers()}};
  if (arguments.has("--stages")) {
    auto const stated = parse_stages("--stages", arguments.text("--stages"), config.plan);
    if (!stated) return reject(stated.error().option, stated.error().problem);
    stages = *stated;
  }
  auto const forms = parse_cache_forms(arguments);
  if (!forms) return cuda::std::unexpected(forms.error());
  auto report = make_report(config, stages, context, *forms);
  if (auto const added = add_costs(report, arguments); !added)
    return cuda::std::unexpected(added.error());
  if (arguments.has("--rows")) {
    if (!report.context)
      return reject("--context", "missing, expected the keys to plan --rows for");
    auto const rows = arguments.integer("--rows", 0, 1, std::numeric_limits<std::int32_t>::max());
    if (!rows) return reject(rows.error().option, rows.error().problem);
    auto const budget =
        arguments.integer("--budget", std::int64_t{256} << 20, 1, std::int64_t{1} << 50);
    if (!budget) return reject(budget.error().option, budget.error().problem);
    add_memory(report, *rows, static_cast<std::size_t>(*budget));
  } else if (arguments.has("--budget")) {
    return reject("--budget", "expected together with --rows");
  }
  return report;
}

/// The program. Returns its exit status: 0, or 2 after exactly one line on `err`.
inline int inspect(int argc, char const* const* argv, std::ostream& out, std::ostream& err) {
  constexpr int failed = 2;
  auto const fail = [&](ArgumentError const& error) {
    err << "error: " << error.message() << "\n";
    return failed;
  };
  auto const arguments = Arguments::parse(inspect_options, argc, argv);
  if (!arguments) return fail(arguments.error());
  if (arguments->has("--help")) {
    out << help_text("indexshare-inspect", inspect_purpose, inspect_options);
    return 0;
  }
  if (!arguments->has("--config"))
    return fail({"--config", "missing, expected the config.json of a model"});
  std::string const file = arguments->text("--config");
  auto const config = indexshare::io::read_config_file(file);
  if (!config) {
    err << error_line(config.error(), file);
    return failed;
  }
  auto const report = requested_report(*arguments, *config);
  if (!report) return fail(report.error());
  if (auto const drawn = write_drawing(*report, *arguments); !drawn) return fail(drawn.error());
  if (arguments->has("--json"))
    out << report_json(*report).dump(2) << "\n";
  else
    write_table(out, *report);
  out.flush();
  return out ? 0 : fail({"output", "could not be written"});
}

}  // namespace programs
