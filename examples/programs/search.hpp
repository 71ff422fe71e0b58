// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/indexcache/search.hpp>
#include <indexshare/io/search_log.hpp>
#include <indexshare/io/write_schedule.hpp>

#include <optional>
#include <ostream>
#include <string>

#include "arguments.hpp"
#include "child_process.hpp"
#include "config_text.hpp"
#include "output_file.hpp"
#include "search_baselines.hpp"
#include "search_evaluator.hpp"
#include "search_options.hpp"
#include "search_report.hpp"

namespace programs {

/// One run of indexshare-search. Errors name the option at fault.
class SearchRun {
 public:
  SearchRun(SearchSettings const& settings, std::ostream& err)
      : settings_(settings), err_(err), command_(settings.evaluator, settings.problem.layers) {}

  Parsed<SearchReport> run() {
    SearchReport report;
    report.layers = settings_.problem.layers;
    if (auto const error = prepare(report)) return cuda::std::unexpected(*error);
    if (settings_.evaluator.empty()) return report;
    auto const outcome = search();
    if (!outcome) return cuda::std::unexpected(outcome.error());
    report.outcome = *outcome;
    if (!report.baselines.empty()) {
      auto const problem =
          evaluate_patterns(command_.evaluator(), command_.accepted(), report.baselines);
      if (problem) return reject("--evaluator", one_line(*problem));
    }
    if (auto const how = command_.finish())
      err_ << "note: the evaluator gave all losses, but " << *how << "\n";
    return report;
  }

  /// Sets the pattern in the config, if the user names one.
  std::optional<ArgumentError> write_config(SearchReport const& report) const {
    if (settings_.write_config.empty() || !report.outcome) return std::nullopt;
    auto const written =
        indexshare::io::write_schedule(settings_.write_config, report.outcome->pattern);
    return written ? std::nullopt : std::optional(config_error(written.error()));
  }

  /// Writes the results as JSON, if the user names a file.
  std::optional<ArgumentError> write_json(SearchReport const& report) const {
    if (settings_.json.empty()) return std::nullopt;
    auto const written = write_output("--json", settings_.json, report_json(report).dump(2) + "\n");
    return written ? std::nullopt : std::optional(written.error());
  }

 private:
  using RolePattern = indexshare::indexcache::RolePattern;

  /// What can go wrong before the first loss: a search may take days.
  std::optional<ArgumentError> prepare(SearchReport& report) const {
    if (settings_.shared_in_config)
      err_ << "note: --config shares " << *settings_.shared_in_config
           << " layers already; the search begins with all layers full, which needs the indexer "
              "weights of every layer\n";
    if (settings_.baselines) {
      std::int32_t const layers = settings_.problem.layers;
      std::optional<SquareMatrix> similarity;
      if (!settings_.similarity.empty()) {
        auto const matrix = read_matrix("--similarity", settings_.similarity, layers);
        if (!matrix) return matrix.error();
        similarity = *matrix;
      }
      report.baselines = baseline_patterns(layers, layers - settings_.problem.shared,
                                           similarity ? &*similarity : nullptr);
    }
    if (settings_.write_config.empty()) return std::nullopt;
    auto const text = indexshare::io::detail::read_text_file(settings_.write_config);
    if (!text) return config_error(text.error());
    auto const changed =
        indexshare::io::with_schedule(*text, RolePattern::all_full(settings_.problem.layers));
    if (!changed) return config_error(changed.error());
    return std::nullopt;
  }

  Parsed<indexshare::indexcache::SearchOutcome> search() {
    using indexshare::io::SearchLog;
    auto log = settings_.resume
                   ? SearchLog::resume(settings_.log, settings_.problem, settings_.name)
                   : SearchLog::begin(settings_.log, settings_.problem, settings_.name);
    if (!log) {
      std::error_code ignored;
      bool const there = !settings_.resume && std::filesystem::exists(settings_.log, ignored);
      return reject("--log",
                    one_line(log.error().message()) + (there ? " (--resume goes on from it)" : ""));
    }
    auto hooks = log->hooks();
    if (settings_.progress)
      hooks.progress = [this](auto const& progress) { err_ << progress_line(progress); };
    auto const outcome = indexshare::indexcache::search(settings_.problem, command_.evaluator(),
                                                        hooks, log->records());
    if (outcome) return *outcome;
    return reject(outcome.error().subject, one_line(outcome.error().problem));
  }

  ArgumentError config_error(indexshare::io::ConfigError const& error) const {
    return {"--write-config", one_line(config_error_text(error, settings_.write_config))};
  }

  SearchSettings const& settings_;
  std::ostream& err_;
  IgnoreBrokenPipes ignore_broken_pipes_;
  CommandEvaluator command_;
};

/// The program. Returns its exit status: 0, or 2 after exactly one `error:` line on `err`.
inline int search(int argc, char const* const* argv, std::ostream& out, std::ostream& err) {
  constexpr int failed = 2;
  auto const fail = [&](ArgumentError const& error) {
    err << "error: " << error.message() << "\n";
    return failed;
  };
  auto const arguments = Arguments::parse(search_options, argc, argv);
  if (!arguments) return fail(arguments.error());
  if (arguments->has("--help")) {
    out << help_text("indexshare-search", search_purpose, search_options);
    return 0;
  }
  auto const settings = search_settings(*arguments);
  if (!settings) return fail(settings.error());
  SearchRun run(*settings, err);
  auto const report = run.run();
  if (!report) return fail(report.error());
  write_report(out, *report);
  out.flush();
  // Each is written whatever becomes of the others: a search may have taken days.
  std::optional<ArgumentError> const results[] = {
      out ? std::nullopt : std::optional(ArgumentError{"output", "could not be written"}),
      run.write_config(*report), run.write_json(*report)};
  for (auto const& error : results)
    if (error) return fail(*error);
  return 0;
}

}  // namespace programs
