// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <limits>
#include <ostream>
#include <string>
#include <vector>

#include "arguments.hpp"
#include "compare_layers.hpp"
#include "compare_report.hpp"
#include "output_file.hpp"
#include "recording.hpp"

namespace programs {

inline constexpr OptionSpec compare_options[] = {
    {"--tolerance", "X",
     "largest error, relative to the larger of a token's or row's largest magnitude and the median "
     "one's (default: 1e-4; 2e-2 for 16 bits)"},
    {"--layers", "A:B", "layers A to B - 1 (default: all)"},
    {"--json", "FILE", "writes the report as JSON too"},
    {"--help", "", "this text"},
};

inline constexpr char const* compare_purpose =
    "Compares two recordings of sparse-attention layers and shows, for each layer, the first\n"
    "quantity in pipeline order that differs. Exit status 0: the same, 1: a difference, 2: an "
    "error,\n"
    "in one line on stderr, 3: nothing differs, but something that both files have could not be\n"
    "compared.";

namespace compare_detail {

inline constexpr int exit_differs = 1;
inline constexpr int exit_failed = 2;
inline constexpr int exit_not_compared = 3;

inline Parsed<CompareSettings> read_compare_settings(Arguments const& arguments) {
  CompareSettings settings;
  if (arguments.has("--tolerance")) {
    // two numbers are never further apart than twice the larger magnitude
    auto const tolerance = parse_number("--tolerance", arguments.text("--tolerance"), 0, 2);
    if (!tolerance) return cuda::std::unexpected(tolerance.error());
    settings.tolerance = *tolerance;
  }
  if (arguments.has("--layers")) {
    auto const layers = arguments.range("--layers", {}, std::numeric_limits<std::int32_t>::max());
    if (!layers) return cuda::std::unexpected(layers.error());
    settings.layers = *layers;
  }
  return settings;
}

inline void write_head(std::ostream& out, char const* side, Recording const& recording) {
  auto const producer = recording.metadata().find("producer");
  out << side << " " << one_line(recording.name());
  if (producer != recording.metadata().end()) out << ", by " << one_line(producer->second);
  if (recording.attends_recorded()) out << ", attends over the other's selection";
  out << "\n";
}

inline int status_of(CompareReport const& report) {
  if (report.first_difference() != nullptr) return exit_differs;
  return report.complete() ? 0 : exit_not_compared;
}

}  // namespace compare_detail

/// The program. Returns its exit status: 0 the same, 1 a difference, 2 after one line on `err`, 3
/// no difference, but a quantity of which nothing could be compared.
inline int compare(int argc, char const* const* argv, std::ostream& out, std::ostream& err) {
  using namespace compare_detail;
  auto const fail = [&err](std::string const& message) {
    err << "error: " << one_line(message) << "\n";
    return exit_failed;
  };
  auto const arguments = Arguments::parse(compare_options, argc, argv, PlainWords::kept);
  if (!arguments) return fail(arguments.error().message());
  if (arguments->has("--help")) {
    out << help_text("indexshare-compare A.safetensors B.safetensors", compare_purpose,
                     compare_options);
    return 0;
  }
  std::vector<std::string> const& files = arguments->words();
  if (files.size() != 2)
    return fail("files: got " + std::to_string(files.size()) +
                ", expected two recordings, A.safetensors and B.safetensors");
  auto const settings = read_compare_settings(*arguments);
  if (!settings) return fail(settings.error().message());
  if (auto const kept = check_output(*arguments, "--json", files, "recordings"); !kept)
    return fail(kept.error().message());
  auto const a = Recording::open(files[0]);
  if (!a) return fail(a.error().message());
  auto const b = Recording::open(files[1]);
  if (!b) return fail(b.error().message());
  auto const report = compare_recordings(*a, *b, *settings);
  if (!report) return fail(report.error().message());
  if (arguments->has("--json")) {
    std::string const json = comparison_json(*a, *b, *report).dump(2) + "\n";
    if (auto const written = write_output("--json", arguments->text("--json"), json); !written)
      return fail(written.error().message());
  }
  write_head(out, "A", *a);
  write_head(out, "B", *b);
  out << a->tokens() << " tokens, " << a->rows() << " rows\n";
  write_comparison(out, *a, *report);
  out.flush();
  if (!out) return fail("output: could not be written");
  return status_of(*report);
}

}  // namespace programs
