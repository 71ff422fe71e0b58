// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/indexcache/search.hpp>
#include <indexshare/io/detail/json_path.hpp>
#include <indexshare/io/detail/text_file.hpp>

#include <cuda/std/expected>

#if defined(__unix__) || defined(__APPLE__)
#include <fcntl.h>
#include <sys/file.h>
#endif

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

namespace indexshare {
inline namespace v0 {
namespace io {

namespace detail {

inline constexpr char const* search_log_format = "indexshare-search-1";

using LogLine = nlohmann::ordered_json;

inline std::string text_of(LogLine const& line) {
  return line.dump(-1, ' ', false, LogLine::error_handler_t::replace) + "\n";
}

/// The first line: what the search is about. The number of steps is not part of it, since a search
/// for fewer shared layers is the beginning of one for more.
inline LogLine header_line(indexcache::SearchProblem const& problem, std::string const& name) {
  LogLine full = LogLine::array();
  auto const pinned = indexcache::detail::pinned_layers(problem);
  for (std::size_t layer = 0; layer < pinned.size(); ++layer)
    if (pinned[layer]) full.push_back(layer);
  return {{"format", search_log_format},
          {"name", name},
          {"layers", problem.layers},
          {"pinned", full},
          {"blocks", problem.blocks}};
}

inline LogLine line_of(indexcache::Evaluation const& evaluation) {
  if (evaluation.step == 0) return {{"step", 0}, {"loss", evaluation.loss}};
  return {{"step", evaluation.step}, {"layer", evaluation.layer}, {"loss", evaluation.loss}};
}

inline LogLine line_of(indexcache::Flip const& flip) {
  return {{"step", flip.step}, {"shared", flip.layer}, {"loss", flip.loss}};
}

/// Reads the lines of a log in order and holds each against what the search it belongs to would
/// write there.
class SearchLogReader {
 public:
  using Problem = std::optional<std::string>;  // what is wrong with a line

  explicit SearchLogReader(indexcache::SearchProblem const& problem)
      : steps_(with_all_steps(problem)), candidates_(steps_.candidates()) {}

  indexcache::SearchRecords const& records() const noexcept { return records_; }

  Problem read(std::string_view text) {
    LogLine const line = LogLine::parse(text, nullptr, false);
    bool const known = line.is_object() && is_whole(line, "step") && is_loss(line);
    if (known && line.size() == 2) return read_all_full(line);
    if (known && line.size() == 3 && is_whole(line, "layer")) return read_candidate(line);
    if (known && line.size() == 3 && is_whole(line, "shared")) return read_flip(line);
    return "got " + shown(nlohmann::json(std::string(text))) +
           ", expected the loss of a candidate or the outcome of a step";
  }

 private:
  static indexcache::SearchProblem with_all_steps(indexcache::SearchProblem problem) {
    auto const pinned = indexcache::detail::pinned_layers(problem);
    problem.shared = static_cast<std::int32_t>(std::count(pinned.begin(), pinned.end(), false));
    return problem;
  }

  static bool is_whole(LogLine const& line, char const* field) {
    auto const found = line.find(field);
    return found != line.end() && found->is_number_unsigned() &&
           found->get<std::uint64_t>() <= static_cast<std::uint64_t>(max_schedule_layers);
  }

  static bool is_loss(LogLine const& line) {
    auto const found = line.find("loss");
    return found != line.end() && found->is_number() && std::isfinite(found->get<double>());
  }

  Problem read_all_full(LogLine const& line) {
    if (line["step"] != 0) return "the loss of a candidate without its layer";
    if (!records_.evaluations.empty()) return "the all-full pattern a second time";
    records_.evaluations.push_back({0, indexcache::no_layer, line["loss"].get<double>()});
    return std::nullopt;
  }

  Problem read_candidate(LogLine const& line) {
    indexcache::Evaluation const evaluation{line["step"].get<std::int32_t>(),
                                            line["layer"].get<std::int32_t>(),
                                            line["loss"].get<double>()};
    if (auto const problem = check_step(evaluation.step)) return problem;
    std::string const layer = "layer " + std::to_string(evaluation.layer);
    if (!std::binary_search(candidates_.begin(), candidates_.end(), evaluation.layer))
      return layer + " is no candidate of step " + std::to_string(evaluation.step);
    auto const same = [&](indexcache::Evaluation const& known) {
      return known.layer == evaluation.layer;
    };
    if (std::any_of(losses_.begin(), losses_.end(), same))
      return layer + " a second time in step " + std::to_string(evaluation.step);
    losses_.push_back(evaluation);
    records_.evaluations.push_back(evaluation);
    return std::nullopt;
  }

  Problem read_flip(LogLine const& line) {
    indexcache::Flip const flip{line["step"].get<std::int32_t>(),
                                line["shared"].get<std::int32_t>(), line["loss"].get<double>()};
    if (auto const problem = check_step(flip.step)) return problem;
    if (losses_.size() != candidates_.size())
      return "the outcome of step " + std::to_string(flip.step) + " after " +
             std::to_string(losses_.size()) + " of its " + std::to_string(candidates_.size()) +
             " candidates";
    std::sort(losses_.begin(), losses_.end(),
              [](auto const& a, auto const& b) { return a.layer < b.layer; });
    indexcache::Evaluation const best = indexcache::best_of(losses_);
    if (flip != indexcache::Flip{best.step, best.layer, best.loss})
      return "step " + std::to_string(flip.step) + " chose layer " + std::to_string(flip.layer) +
             ", but the lowest loss is that of layer " + std::to_string(best.layer);
    records_.flips.push_back(flip);
    steps_.accept(flip.layer);
    candidates_ = steps_.candidates();
    losses_.clear();
    return std::nullopt;
  }

  Problem check_step(std::int32_t step) const {
    if (records_.evaluations.empty()) return "a step before the loss of the all-full pattern";
    if (steps_.finished()) return "a step after the last one";
    if (step == steps_.step()) return std::nullopt;
    return "got step " + std::to_string(step) + ", expected step " + std::to_string(steps_.step());
  }

  indexcache::SearchSteps steps_;
  std::vector<std::int32_t> candidates_;        // of the step that is read
  std::vector<indexcache::Evaluation> losses_;  // of the step that is read
  indexcache::SearchRecords records_;
};

}  // namespace detail

/// The log of a search: a text file to which each loss and each outcome of a step is appended when
/// it is known, one JSON object per line and one write per line. A search that is killed at any
/// moment goes on from it, with the same outcome; without a change of the order in which losses are
/// reported, the log too ends up the same, byte for byte.
///
/// A line cut off by the kill is dropped. Anything else that the search would not have written
/// there is an error that names file and line. On POSIX systems a log that is open is locked
/// (flock): a second search on it is refused, and a process that ends, however, leaves no lock.
/// Elsewhere, and in file systems without locks, two searches must not use a log at the same time.
///
/// ```text
/// {"format":"indexshare-search-1","name":"my model, my data","layers":4,"pinned":[0],"blocks":[]}
/// {"step":0,"loss":2.5}                 all layers full
/// {"step":1,"layer":1,"loss":2.75}      a candidate: layer 1 made shared
/// {"step":1,"layer":2,"loss":2.625}
/// {"step":1,"layer":3,"loss":2.875}
/// {"step":1,"shared":2,"loss":2.625}    the outcome of the step
/// ```
class SearchLog {
 public:
  /// Begins a log. `name` says what the losses are of (model, data, seed): only a search of the
  /// same name and problem goes on from it, with any number of steps. Errors: a file that exists,
  /// which is left alone; one that cannot be created; what `check_problem` says.
  static indexcache::SearchResult<SearchLog> begin(std::string const& file,
                                                   indexcache::SearchProblem const& problem,
                                                   std::string const& name) {
    if (auto const error = check_problem(problem)) return cuda::std::unexpected(*error);
    SearchLog log(file);
    if (auto const error = log.open("wbx")) return cuda::std::unexpected(*error);
    if (auto const failed = log.append(detail::header_line(problem, name)))
      return refuse(file, *failed);
    return log;
  }

  /// Goes on from a log, or begins one if there is no such file.
  /// Errors: as `begin`; a log in use; one of another search or something else than a log; a line
  /// that does not belong there. The file is then left alone.
  static indexcache::SearchResult<SearchLog> resume(std::string const& file,
                                                    indexcache::SearchProblem const& problem,
                                                    std::string const& name) {
    std::error_code failed;
    if (!std::filesystem::exists(file, failed) && !failed) return begin(file, problem, name);
    if (auto const error = check_problem(problem)) return cuda::std::unexpected(*error);
    if (!std::filesystem::is_regular_file(file, failed))  // a pipe would be waited for
      return refuse(file, std::filesystem::is_directory(file, failed)
                              ? "got a directory, expected a file"
                              : "got a pipe, device or other special file, expected a file");
    SearchLog log(file);
    if (auto const error = log.open("ab")) return cuda::std::unexpected(*error);
    auto const text = detail::read_text_file(file);
    if (!text)
      return refuse(file, "got " + text.error().value + ", expected " + text.error().expected);
    auto const used = log.read(*text, problem, detail::header_line(problem, name));
    if (!used) return cuda::std::unexpected(used.error());
    if (*used < text->size()) std::filesystem::resize_file(file, *used, failed);
    if (failed) return refuse(file, "cannot be shortened: " + failed.message());
    if (*used > 0) return log;
    if (auto const unwritten = log.append(detail::header_line(problem, name)))
      return refuse(file, *unwritten);
    return log;
  }

  /// What the file held when it was opened.
  indexcache::SearchRecords const& records() const noexcept { return records_; }

  /// Appends a line. Returns nothing, or why it could not be written: what is in the file then can
  /// still be resumed from.
  std::optional<std::string> add(indexcache::Evaluation const& evaluation) {
    return append(detail::line_of(evaluation));
  }
  std::optional<std::string> add(indexcache::Flip const& flip) {
    return append(detail::line_of(flip));
  }

  /// Hooks that record in this log, which must stay where it is while they are used.
  indexcache::SearchHooks hooks() {
    indexcache::SearchHooks hooks;
    hooks.record_evaluation = [this](indexcache::Evaluation const& known) { return add(known); };
    hooks.record_flip = [this](indexcache::Flip const& flip) { return add(flip); };
    return hooks;
  }

 private:
  struct Closer {
    void operator()(std::FILE* stream) const noexcept { std::fclose(stream); }
  };

  explicit SearchLog(std::string file) : file_(std::move(file)) {}

  static cuda::std::unexpected<indexcache::SearchError> refuse(std::string subject,
                                                               std::string problem) {
    return cuda::std::unexpected(indexcache::SearchError{std::move(subject), std::move(problem)});
  }

  static std::string system_text() { return std::generic_category().message(errno); }

  std::optional<indexcache::SearchError> open(char const* mode) {
    stream_.reset(std::fopen(file_.c_str(), mode));
    if (!stream_) return indexcache::SearchError{file_, "cannot be written: " + system_text()};
    if (in_use()) return indexcache::SearchError{file_, "is in use by another search"};
    // Without a buffer a line is one write, and nothing of a failed one is tried again later.
    std::setvbuf(stream_.get(), nullptr, _IONBF, 0);
    return std::nullopt;
  }

  /// Locks the file. Whether another one has locked it: where there are no locks, none has.
  bool in_use() const {
#if defined(__unix__) || defined(__APPLE__)
    int const descriptor = fileno(stream_.get());
    // A child process that outlives this one must not keep the lock.
    fcntl(descriptor, F_SETFD, FD_CLOEXEC);
    return flock(descriptor, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK;
#else
    return false;
#endif
  }

  std::optional<std::string> append(detail::LogLine const& line) {
    std::string const text = detail::text_of(line);
    if (std::fwrite(text.data(), 1, text.size(), stream_.get()) == text.size()) return std::nullopt;
    return "could not be written to " + file_ + ": " + system_text();
  }

  /// Takes the records of all whole lines. Returns how many bytes these lines have.
  indexcache::SearchResult<std::size_t> read(std::string_view text,
                                             indexcache::SearchProblem const& problem,
                                             detail::LogLine const& header) {
    detail::SearchLogReader reader(problem);
    std::size_t used = 0;
    for (std::size_t number = 1; used < text.size(); ++number) {
      std::size_t const end = text.find('\n', used);
      bool const whole = end != std::string_view::npos;
      std::string_view const line = text.substr(used, end - used);
      std::optional<std::string> problem_of_line;
      if (number == 1)
        problem_of_line = whole ? check_header(line, header) : check_torn_header(line, header);
      else if (whole)
        problem_of_line = reader.read(line);
      if (problem_of_line) return refuse(file_ + ":" + std::to_string(number), *problem_of_line);
      if (!whole) break;
      used = end + 1;
    }
    records_ = reader.records();
    return used;
  }

  static constexpr char const* other_file = "this is not the log of a search";

  static std::optional<std::string> check_header(std::string_view line,
                                                 detail::LogLine const& expected) {
    auto const got = detail::LogLine::parse(line, nullptr, false);
    if (!got.is_object() || !got.contains("format") || got["format"] != expected["format"] ||
        got.size() != expected.size())
      return other_file;
    // As a reader sees them: a name that is not UTF-8 was replaced when it was written.
    auto const wanted = detail::LogLine::parse(detail::text_of(expected));
    for (auto const& [field, value] : wanted.items())
      if (!got.contains(field) || got[field] != value)
        return "the log is of another search: " + field + ": got " +
               (got.contains(field) ? detail::shown(nlohmann::json(got[field])) : "nothing") +
               ", expected " + detail::shown(nlohmann::json(value));
    return std::nullopt;
  }

  /// A file without a line break may be somebody's own: only what this search would have begun with
  /// is dropped.
  static std::optional<std::string> check_torn_header(std::string_view line,
                                                      detail::LogLine const& expected) {
    if (detail::text_of(expected).starts_with(line)) return std::nullopt;
    return other_file;
  }

  std::string file_;
  std::unique_ptr<std::FILE, Closer> stream_;
  indexcache::SearchRecords records_;
};

}  // namespace io
}  // namespace v0
}  // namespace indexshare
