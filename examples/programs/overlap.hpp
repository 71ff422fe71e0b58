// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/indexcache/overlap_counts.hpp>
#include <indexshare/indexcache/role_pattern.hpp>
#include <indexshare/io/config.hpp>
#include <indexshare/io/pattern_text.hpp>
#include <indexshare/share_plan.hpp>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <ostream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "arguments.hpp"
#include "config_text.hpp"
#include "output_file.hpp"
#include "overlap_measure.hpp"
#include "overlap_report.hpp"
#include "thread_pool.hpp"

namespace programs {

inline constexpr OptionSpec overlap_options[] = {
    {"--config", "FILE", "config.json whose schedule is to be judged"},
    {"--pattern", "FS...", "schedule to be judged, a letter per layer: F full, S shared"},
    {"--skip-short", "", "leaves out rows that select every key they see: they overlap by 1"},
    {"--threads", "N", "threads to count with (default: all)"},
    {"--json", "FILE", "writes the report as JSON too, with the whole matrix"},
    {"--svg", "FILE", "draws the matrix as a heat map"},
    {"--help", "", "this text"},
};

inline constexpr char const* overlap_purpose =
    "Measures how many positions the layers of a model select in common. A FILE holds the "
    "recorded\n"
    "selections of one sample, and all files are counted together; a directory stands for the\n"
    "*.safetensors in it. docs/overlap.md says how an engine writes one. Record with every layer\n"
    "full: a layer that shares shows its source's selection. Exit status 2 and one line on stderr\n"
    "for any error.";

namespace overlap_detail {

/// The schedule that the user gives, if any. Errors: both options; those of reading one.
inline Parsed<std::optional<indexshare::SharePlan>> read_plan(Arguments const& arguments) {
  if (arguments.has("--config") && arguments.has("--pattern"))
    return reject("--pattern", "expected without --config: each states a schedule");
  if (arguments.has("--config")) {
    std::string const file = arguments.text("--config");
    auto const config = indexshare::io::read_config_file(file);
    if (!config) return reject("--config", config_error_text(config.error(), file));
    return std::optional(config->plan);
  }
  if (!arguments.has("--pattern")) return std::optional<indexshare::SharePlan>();
  auto const pattern = indexshare::io::parse_pattern(arguments.text("--pattern"), "--pattern");
  if (!pattern)
    return reject("--pattern",
                  "got " + pattern.error().value + ", expected " + pattern.error().expected);
  auto const plan = indexshare::indexcache::share_plan_of(*pattern);
  if (!plan) return reject("--pattern", plan.error().what);
  return std::optional(*plan);
}

/// Refuses a schedule of another model.
inline Parsed<bool> check_plan(Arguments const& arguments, indexshare::SharePlan const& plan,
                               SelectionKind const& kind) {
  std::int32_t const trunk = plan.num_layers();
  if (kind.model_layers == trunk || kind.model_layers == plan.total_layers()) return true;
  return reject(arguments.has("--config") ? "--config" : "--pattern",
                "got a schedule of " + std::to_string(trunk) + " layers, expected " +
                    std::to_string(kind.model_layers) + " as in " + programs::quoted(kind.file));
}

/// Writes the files that the user asked for.
inline Parsed<bool> write_files(Arguments const& arguments, OverlapReport const& report) {
  if (arguments.has("--json")) {
    // names of files need not be UTF-8
    std::string const json =
        overlap_json(report).dump(1, ' ', false, nlohmann::json::error_handler_t::replace) + "\n";
    auto const written = write_output("--json", arguments.text("--json"), json);
    if (!written) return written;
  }
  if (arguments.has("--svg"))
    return write_output("--svg", arguments.text("--svg"), overlap_svg(report));
  return true;
}

/// Refuses a measurement of nothing, which would look like layers that have nothing in common.
inline Parsed<bool> check_counted(Arguments const& arguments, OverlapMeasurement const& measured) {
  if (measured.counts.rows() > 0) return true;
  std::string const left_out = std::to_string(measured.counts.rows_left_out());
  if (measured.counts.rows_left_out() == 0)
    return reject("files", "no row was counted: the files have none");
  if (arguments.has("--skip-short"))
    return reject("--skip-short", "no row was counted: " + left_out +
                                      " rows left out since they select every key they see");
  return reject("files", "no row was counted: " + left_out + " rows left out without a selection");
}

/// Everything but the output of text.
inline Parsed<OverlapReport> make_overlap_report(Arguments const& arguments) {
  auto const threads =
      arguments.integer("--threads", std::max(1u, std::thread::hardware_concurrency()), 1, 1024);
  if (!threads) return cuda::std::unexpected(threads.error());
  if (arguments.words().empty())
    return reject("files", "got none, expected at least one file of recorded selections");
  auto const files = selection_files(arguments.words());
  if (!files) return cuda::std::unexpected(files.error());
  for (char const* const option : {"--json", "--svg"}) {
    if (auto const kept = check_output(arguments, option, *files, "files to read"); !kept)
      return cuda::std::unexpected(kept.error());
  }
  if (auto const apart = check_outputs_differ(arguments, "--svg", "--json"); !apart)
    return cuda::std::unexpected(apart.error());
  auto const plan = read_plan(arguments);
  if (!plan) return cuda::std::unexpected(plan.error());
  auto const kind = check_selection_files(*files);
  if (!kind) return reject("files", kind.error().message());
  if (*plan) {
    if (auto const fits = check_plan(arguments, **plan, *kind); !fits)
      return cuda::std::unexpected(fits.error());
  }
  ThreadPool pool(static_cast<int>(*threads));
  auto measured =
      measure_overlap(*files, *kind, {.skip_short = arguments.has("--skip-short")}, pool);
  if (!measured) return reject("files", measured.error().message());
  if (auto const counted = check_counted(arguments, *measured); !counted)
    return cuda::std::unexpected(counted.error());
  return OverlapReport{std::move(*measured), *plan};
}

}  // namespace overlap_detail

/// The program. Returns its exit status: 0, or 2 after exactly one line on `err`.
inline int overlap(int argc, char const* const* argv, std::ostream& out, std::ostream& err) {
  constexpr int failed = 2;
  auto const fail = [&](ArgumentError const& error) {
    err << "error: " << one_line(error.message()) << "\n";
    return failed;
  };
  auto const arguments = Arguments::parse(overlap_options, argc, argv, PlainWords::kept);
  if (!arguments) return fail(arguments.error());
  if (arguments->has("--help")) {
    out << help_text("indexshare-overlap FILE...", overlap_purpose, overlap_options);
    return 0;
  }
  auto const report = overlap_detail::make_overlap_report(*arguments);
  if (!report) return fail(report.error());
  write_overlap(out, *report);
  out.flush();
  if (!out) return fail({"output", "could not be written"});
  auto const written = overlap_detail::write_files(*arguments, *report);
  return written ? 0 : fail(written.error());
}

}  // namespace programs
