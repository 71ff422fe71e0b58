// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "../programs/arguments.hpp"
#include "../programs/output_file.hpp"
#include "experiment_plot.hpp"
#include "experiment_report.hpp"
#include "serve.hpp"

#include <indexshare/io/search_log.hpp>
#include <indexshare/io/selection_recorder.hpp>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <istream>
#include <iterator>
#include <memory>
#include <optional>
#include <ostream>
#include <span>
#include <string>
#include <string_view>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

/// @file The program small_dsa: its commands and their options.

namespace small_dsa {

using programs::Arguments;
using programs::OptionSpec;

struct Command {
  std::string_view name;
  std::string_view purpose;
  std::span<OptionSpec const> options;
};

namespace detail {

inline constexpr OptionSpec model_option{
    "--model", "DIR", "config.json and model.safetensors, such as examples/small_dsa/seed1"};
inline constexpr std::int64_t held_out_count = 256;  ///< sequences, unless an option says it
inline constexpr OptionSpec sequences_option{"--sequences", "N",
                                             "sequences that a loss is the mean of (128)"};
inline constexpr OptionSpec threads_option{"--threads", "N", "threads (all of the machine)"};
inline constexpr OptionSpec help_option{"--help", "", "this text"};

inline constexpr OptionSpec evaluate_options[] = {
    model_option,
    {"--pattern", "LETTERS",
     "a letter per layer: F runs its indexer, S shares the selection of the layer below, R takes "
     "keys at random"},
    {"--sequences", "N", "sequences that a loss is the mean of (128, with --held-out 256)"},
    {"--held-out", "", "on the data that patterns are judged on, not on calibration data"},
    threads_option,
    help_option,
};

inline constexpr OptionSpec search_options[] = {
    model_option,
    {"--shared", "K", "layers to share (all but the first)"},
    sequences_option,
    {"--log", "FILE", "takes every loss when it is known"},
    {"--resume", "", "go on from the log of a search that was stopped"},
    threads_option,
    help_option,
};

inline constexpr OptionSpec experiment_options[] = {
    model_option,
    {"--json", "FILE", "takes the results"},
    {"--log", "FILE", "of the search"},
    {"--resume", "", "go on from the log of a search that was stopped"},
    sequences_option,
    {"--held-out-sequences", "N", "sequences that patterns are judged on (256)"},
    {"--random-patterns", "N", "for each number of full layers (10)"},
    threads_option,
    help_option,
};

inline constexpr OptionSpec plot_options[] = {
    {"--json", "FILE,FILE..", "results of experiments, one panel each"},
    {"--svg", "FILE", "takes the drawing"},
    help_option,
};

inline constexpr OptionSpec serve_options[] = {model_option, sequences_option, threads_option,
                                               help_option};

inline constexpr OptionSpec record_options[] = {
    model_option,
    {"--out", "DIR", "takes a file for each sequence"},
    {"--sequences", "N", "calibration sequences to record (128)"},
    threads_option,
    help_option,
};

inline constexpr Command commands[] = {
    {"evaluate",
     "Loss and accuracy of the model with a pattern of full and shared layers, on calibration "
     "data.",
     evaluate_options},
    {"search",
     "Makes one layer after the other share: in each step the one that costs the least on\n"
     "calibration data. Prints what each step did.",
     search_options},
    {"experiment",
     "Searches down to one full layer, then compares the patterns on the way, on data that the\n"
     "search has not seen, with uniform patterns, one by similarity, random ones, and random keys.",
     experiment_options},
    {"serve",
     "Answers indexshare-search --evaluator 'small_dsa serve --model DIR' with losses on\n"
     "calibration data.",
     serve_options},
    {"record",
     "Writes what each layer selects on calibration data, all layers full, for indexshare-overlap.",
     record_options},
    {"plot", "Draws results of experiments: loss against the number of shared layers.",
     plot_options},
};

inline std::string overview() {
  std::string text =
      "usage: small_dsa COMMAND [options]\n"
      "A small transformer with sparse attention and an indexer in every layer. It was trained to\n"
      "follow references through a context of many more records than a layer may select, so that "
      "a\n"
      "wrong selection costs loss. Which layers can do without an indexer of their own?\n\n";
  for (Command const& command : commands) {
    std::string name(command.name);
    name.resize(12, ' ');
    std::string purpose(command.purpose);
    std::replace(purpose.begin(), purpose.end(), '\n', ' ');
    text += "  " + name + purpose + "\n";
  }
  return text + "\nsmall_dsa COMMAND --help lists the options of a command.\n";
}

/// What goes wrong: one line.
using Failure = std::optional<std::string>;

inline Failure write_file(std::string const& option, std::string const& path,
                          std::string const& text) {
  auto const written = programs::write_output(option, path, text);
  return written ? Failure() : written.error().message();
}

/// Refuses an output that is an input or another output, before any work.
inline Failure check_outputs(Arguments const& arguments,
                             std::vector<std::string_view> const& options,
                             std::vector<std::string> const& inputs) {
  for (std::string_view const option : options) {
    auto const kept = programs::check_output(arguments, option, inputs, "files to read");
    if (!kept) return kept.error().message();
    for (std::string_view const other : options) {
      if (other == option) break;
      auto const apart = programs::check_outputs_differ(arguments, option, other);
      if (!apart) return apart.error().message();
    }
  }
  return std::nullopt;
}

/// The files of the model that `--model` names.
inline std::vector<std::string> model_files(Arguments const& arguments) {
  std::string const directory = arguments.text("--model");
  return {directory + "/config.json", directory + "/model.safetensors"};
}

/// FNV-1a of a file: tells the logs of two models apart.
inline std::string fingerprint(std::string const& path) {
  std::ifstream stream(path, std::ios::binary);
  std::uint64_t hash = 0xCBF29CE484222325u;
  for (std::istreambuf_iterator<char> it(stream), end; it != end; ++it) {
    hash = (hash ^ static_cast<unsigned char>(*it)) * 0x100000001B3u;
  }
  char text[17];
  std::snprintf(text, sizeof text, "%016llx", static_cast<unsigned long long>(hash));
  return text;
}

/// What all commands with a model begin with.
class Session {
 public:
  static Expected<Session> open(Arguments const& arguments) {
    std::string const directory = arguments.text("--model");
    if (directory.empty()) return refuse("--model: missing, expected the model's directory");
    std::int64_t const usual = arguments.has("--held-out") ? held_out_count : 128;
    auto const sequences = arguments.integer("--sequences", usual, 1, 1 << 20);
    if (!sequences) return refuse(sequences.error().message());
    auto const all = static_cast<std::int64_t>(std::max(1u, std::thread::hardware_concurrency()));
    auto const threads = arguments.integer("--threads", all, 1, 1024);
    if (!threads) return refuse(threads.error().message());
    auto model = Model::load(directory);
    if (!model) return refuse(model.error());
    return Session(directory, std::move(*model), static_cast<std::int32_t>(*sequences),
                   static_cast<int>(*threads));
  }

  Model const& model() const { return *model_; }

  Evaluator calibration() { return {*model_, task(calibration_seed, sequences_), *pool_}; }
  Evaluator held_out(std::int32_t sequences) {
    return {*model_, task(held_out_seed, sequences), *pool_};
  }
  std::int32_t sequences() const { return sequences_; }

  /// `seed1` of a path to it.
  std::string name() const {
    auto const path = std::filesystem::weakly_canonical(directory_);
    return path.filename().string();
  }
  /// What a search's losses are of.
  std::string search_name() const {
    return "small_dsa " + name() + ", weights " + fingerprint(directory_ + "/model.safetensors") +
           ", " + std::to_string(sequences_) + " calibration sequences";
  }

 private:
  Session(std::string directory, Model model, std::int32_t sequences, int threads)
      : directory_(std::move(directory)),
        model_(std::make_unique<Model>(std::move(model))),
        pool_(std::make_unique<programs::ThreadPool>(threads)),
        sequences_(sequences) {}

  std::vector<Sequence> task(std::uint64_t seed, std::int32_t count) const {
    return make_sequences(model_->task(), seed, count);
  }

  std::string directory_;
  std::unique_ptr<Model> model_;
  std::unique_ptr<programs::ThreadPool> pool_;
  std::int32_t sequences_;
};

/// Where the commands read and write.
struct Streams {
  std::istream& in;
  std::ostream& out;
  std::ostream& progress;
};

inline Failure evaluate(Arguments const& arguments, Streams const& streams) {
  auto session = Session::open(arguments);
  if (!session) return session.error();
  std::string const text = arguments.text("--pattern");
  auto const choices = pattern_of(text, session->model());
  if (!choices) {
    return "--pattern: got " + programs::quoted(text) + ", " + expected_pattern(session->model());
  }
  Evaluator evaluator = arguments.has("--held-out") ? session->held_out(session->sequences())
                                                    : session->calibration();
  auto const score = evaluator.evaluate(*choices);
  if (!score) return score.error();
  char line[160];
  std::snprintf(line, sizeof line, "loss %.6f +- %s nats, accuracy %.2f %%\n", score->loss,
                error_text(*score, 6).c_str(), 100 * score->accuracy);
  streams.out << text << ": " << line;
  return std::nullopt;
}

inline std::string progress_line(indexshare::indexcache::SearchProgress const& progress) {
  char line[160];
  std::snprintf(line, sizeof line,
                "step %d of %d, loss %lld of %lld: %.4f, %.0f s, about %.0f s left", progress.step,
                progress.steps, static_cast<long long>(progress.evaluations),
                static_cast<long long>(progress.evaluations_total), progress.loss,
                progress.elapsed_s, progress.remaining_s);
  return line;
}

/// Searches, with a log if the command line has one.
inline Expected<indexshare::indexcache::SearchOutcome> run_search(Session const& session,
                                                                  Evaluator& calibration,
                                                                  Arguments const& arguments,
                                                                  std::int32_t shared,
                                                                  Streams const& streams) {
  using indexshare::io::SearchLog;
  auto const problem = search_problem(session.model(), shared);
  indexshare::indexcache::SearchHooks hooks;
  indexshare::indexcache::SearchRecords records;
  std::optional<SearchLog> log;
  if (arguments.has("--log")) {
    std::string const file = arguments.text("--log");
    auto opened = arguments.has("--resume")
                      ? SearchLog::resume(file, problem, session.search_name())
                      : SearchLog::begin(file, problem, session.search_name());
    if (!opened) return refuse("--log: " + opened.error().message());
    log.emplace(std::move(*opened));
    hooks = log->hooks();
    records = log->records();
  } else if (arguments.has("--resume")) {
    return refuse("--resume: needs --log FILE, the log to go on from");
  }
  hooks.progress = [&](auto const& progress) {
    streams.progress << progress_line(progress) << "\n" << std::flush;
  };
  auto found =
      indexshare::indexcache::search(problem, search_evaluator(calibration), hooks, records);
  if (!found) return refuse(found.error().message());
  return std::move(*found);
}

inline Failure search(Arguments const& arguments, Streams const& streams) {
  if (auto const failure = check_outputs(arguments, {"--log"}, model_files(arguments)))
    return failure;
  auto session = Session::open(arguments);
  if (!session) return session.error();
  std::int32_t const most = session->model().layers() - 1;
  auto const shared = arguments.integer("--shared", most, 0, most);
  if (!shared) return shared.error().message();
  Evaluator calibration = session->calibration();
  auto const found =
      run_search(*session, calibration, arguments, static_cast<std::int32_t>(*shared), streams);
  if (!found) return found.error();
  char line[160];
  std::snprintf(line, sizeof line, "all layers full          %s  loss %.6f\n",
                text_of(choices_of(found->pattern_at(0))).c_str(), found->all_full_loss);
  streams.out << line;
  for (auto const& flip : found->flips) {
    std::snprintf(line, sizeof line, "step %2d: layer %2d shared  %s  loss %.6f\n", flip.step,
                  flip.layer, text_of(choices_of(found->pattern_at(flip.step))).c_str(), flip.loss);
    streams.out << line;
  }
  return std::nullopt;
}

inline Failure experiment(Arguments const& arguments, Streams const& streams) {
  if (auto const failure = check_outputs(arguments, {"--log", "--json"}, model_files(arguments)))
    return failure;
  auto session = Session::open(arguments);
  if (!session) return session.error();
  auto const held_out_sequences =
      arguments.integer("--held-out-sequences", held_out_count, 1, 1 << 20);
  if (!held_out_sequences) return held_out_sequences.error().message();
  auto const random_patterns = arguments.integer("--random-patterns", 10, 0, 1000);
  if (!random_patterns) return random_patterns.error().message();
  Evaluator calibration = session->calibration();
  auto const found =
      run_search(*session, calibration, arguments, session->model().layers() - 1, streams);
  if (!found) return found.error();
  auto result = plan_experiment(session->model(), *found, calibration,
                                {static_cast<std::int32_t>(*random_patterns)});
  if (!result) return result.error();
  Evaluator held_out = session->held_out(static_cast<std::int32_t>(*held_out_sequences));
  if (auto const scored = score_experiment(*result, held_out); !scored) return scored.error();
  ExperimentSource const source{session->name(), calibration.sequences(), held_out.sequences()};
  streams.out << source.model << ": " << source.calibration_sequences << " calibration sequences, "
              << source.held_out_sequences << " held out\n";
  write_experiment(streams.out, *result);
  if (!arguments.has("--json")) return std::nullopt;
  return write_file("--json", arguments.text("--json"),
                    experiment_json(session->model(), *result, source).dump(1) + "\n");
}

inline Failure serve(Arguments const& arguments, Streams const& streams) {
  auto session = Session::open(arguments);
  if (!session) return session.error();
  Evaluator calibration = session->calibration();
  return small_dsa::serve(calibration, session->model(), streams.in, streams.out);
}

/// @param positions  [layers, tokens, index_topk] of one sequence
inline Failure write_selections(Model const& model, std::vector<position_t> const& positions,
                                std::string const& path) {
  index_t const tokens = model.task().tokens();
  index_t const top_k = model.config().index_topk;
  std::vector<position_t> lengths, counts;
  for (index_t row = 0; row < tokens; ++row) {
    lengths.push_back(static_cast<position_t>(row + 1));
    counts.push_back(static_cast<position_t>(std::min(row + 1, top_k)));
  }
  auto recorder =
      indexshare::io::SelectionRecorder::make(model.layers(), indexshare::TopK{top_k}).value();
  indexshare::Rows const rows{tokens};
  auto status = recorder.begin_forward(indexshare::make_lengths<host>(lengths.data(), rows));
  for (std::int32_t layer = 0; layer < model.layers() && status.ok(); ++layer) {
    status = recorder.add(
        layer, {indexshare::make_dense<host, position_t const, 2>(
                    positions.data() + layer * tokens * top_k, {tokens, top_k}),
                indexshare::make_dense<host, position_t const, 1>(counts.data(), {tokens})});
  }
  if (!status.ok()) return std::string(status.what);
  auto const written = recorder.write(path, "small_dsa record");
  return written ? Failure() : "--out: " + written.error().message();
}

/// Refuses a directory with selections of another run: whoever reads it would count them too.
inline Failure check_record_directory(std::filesystem::path const& directory) {
  std::error_code failed;  // a directory that is not there yet has none
  for (std::filesystem::directory_iterator entry(directory, failed), end; !failed && entry != end;
       entry.increment(failed)) {
    if (entry->path().extension() == ".safetensors") {
      return "--out: got a directory that has " + programs::quoted(entry->path().string()) +
             " already, expected one without *.safetensors";
    }
  }
  return std::nullopt;
}

inline Failure record(Arguments const& arguments, Streams const& streams) {
  if (!arguments.has("--out")) return "--out: missing, expected a directory for the files";
  if (auto const failure = check_record_directory(arguments.text("--out"))) return failure;
  auto session = Session::open(arguments);
  if (!session) return session.error();
  std::filesystem::path const directory = arguments.text("--out");
  std::error_code failed;
  std::filesystem::create_directories(directory, failed);
  if (failed) return "--out: cannot make " + programs::quoted(directory.string());
  Evaluator calibration = session->calibration();
  auto const selections = calibration.selections(
      Choices(static_cast<std::size_t>(session->model().layers()), Choice::full));
  if (!selections) return selections.error();
  for (std::size_t i = 0; i < selections->size(); ++i) {
    std::string number = std::to_string(i);
    number.insert(0, 4 - std::min<std::size_t>(number.size(), 4), '0');
    auto const failure = write_selections(session->model(), (*selections)[i],
                                          (directory / (number + ".safetensors")).string());
    if (failure) return failure;
  }
  streams.out << selections->size() << " files in " << directory.string() << "\n";
  return std::nullopt;
}

inline Failure plot(Arguments const& arguments, Streams const&) {
  std::vector<nlohmann::json> experiments;
  std::vector<std::string> names;
  std::string rest = arguments.text("--json");
  while (!rest.empty()) {
    std::size_t const comma = std::min(rest.find(','), rest.size());
    names.push_back(rest.substr(0, comma));
    rest.erase(0, comma + 1);
  }
  if (names.empty()) return "--json: missing, expected results of small_dsa experiment";
  if (!arguments.has("--svg")) return "--svg: missing, expected the file for the drawing";
  if (auto const failure = check_outputs(arguments, {"--svg"}, names)) return failure;
  for (std::string const& name : names) {
    std::ifstream stream(name);
    experiments.push_back(nlohmann::json::parse(stream, nullptr, false));
    if (!stream.is_open() || experiments.back().is_discarded()) {
      return "--json: " + programs::quoted(name) + " cannot be read as JSON";
    }
  }
  auto const svg = experiment_svg(experiments, names);
  if (!svg) return "--json: " + svg.error();
  return write_file("--svg", arguments.text("--svg"), *svg);
}

inline Failure run_command(std::string_view name, Arguments const& arguments,
                           Streams const& streams) {
  if (name == "evaluate") return evaluate(arguments, streams);
  if (name == "search") return search(arguments, streams);
  if (name == "experiment") return experiment(arguments, streams);
  if (name == "serve") return serve(arguments, streams);
  if (name == "record") return record(arguments, streams);
  return plot(arguments, streams);
}

}  // namespace detail

/// The program. Returns its exit status: 0, or 2 after one line on `err`, where searches also
/// report how far they are.
inline int run(int argc, char const* const* argv, std::istream& in, std::ostream& out,
               std::ostream& err) {
  auto const fail = [&err](std::string const& message) {
    err << "error: " << programs::one_line(message) << "\n";
    return 2;
  };
  std::string_view const name = argc > 1 ? argv[1] : "--help";
  if (name == "--help") {
    out << detail::overview();
    return 0;
  }
  auto const command = std::find_if(std::begin(detail::commands), std::end(detail::commands),
                                    [&](Command const& known) { return known.name == name; });
  if (command == std::end(detail::commands)) {
    return fail(programs::quoted(name) + ": unknown command; --help lists them");
  }
  auto const arguments = Arguments::parse(command->options, argc - 1, argv + 1);
  if (!arguments) return fail(arguments.error().message());
  if (arguments->has("--help")) {
    out << programs::help_text("small_dsa " + std::string(name), command->purpose,
                               command->options);
    return 0;
  }
  if (auto const failure = detail::run_command(name, *arguments, {in, out, err}))
    return fail(*failure);
  out.flush();
  return out ? 0 : fail("output: could not be written");
}

}  // namespace small_dsa
