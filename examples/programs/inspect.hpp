// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/io/config.hpp>

#include <cstdint>
#include <limits>
#include <optional>
#include <ostream>
#include <string>
#include <vector>

#include "arguments.hpp"
#include "config_text.hpp"
#include "inspect_json.hpp"
#include "inspect_report.hpp"
#include "inspect_stages.hpp"
#include "inspect_table.hpp"

namespace programs {

inline constexpr OptionSpec inspect_options[] = {
    {"--config", "FILE", "config.json of a model (required)"},
    {"--context", "L", "visible keys to count FLOPs at, e.g. 128K (default: the model's longest)"},
    {"--stages", "A:B,...",
     "pipeline stages, layers A to B - 1 each; MTP layers are the last (default: one stage)"},
    {"--rows", "N", "plan the memory of a call of N query rows at --context keys"},
    {"--budget", "BYTES", "of such a call, for selection and scratch (default 256M)"},
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
  auto report = make_report(config, stages, context);
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
  if (arguments->has("--json"))
    out << report_json(*report).dump(2) << "\n";
  else
    write_table(out, *report);
  out.flush();
  return out ? 0 : fail({"output", "could not be written"});
}

}  // namespace programs
