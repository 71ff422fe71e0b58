// SPDX-License-Identifier: Apache-2.0
#include <indexshare/io/search_log.hpp>

#include <catch2/catch_test_macros.hpp>

#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint_files.hpp"

using namespace indexshare;
using namespace indexshare::indexcache;
using io::SearchLog;

namespace {

std::string content(std::string const& file) {
  std::ifstream stream(file, std::ios::binary);
  REQUIRE(stream);
  return {std::istreambuf_iterator<char>(stream), {}};
}

/// Losses that need all digits of a double, some of them equal.
Evaluator evaluator(int* asked = nullptr) {
  return one_by_one([=](Candidate const& candidate) -> Loss {
    if (asked != nullptr) ++*asked;
    double loss = 2;
    for (std::int32_t layer = 0; layer < candidate.pattern.layers(); ++layer)
      loss += (layer * 5 % 3 + 1) * (layer - candidate.pattern.source(layer)) / 30.0;
    return loss;
  });
}

SearchProblem const small{7, 4, {3}, {0, 4}};

SearchOutcome run(SearchResult<SearchLog> log, SearchProblem const& problem, int* asked = nullptr) {
  if (!log) FAIL(log.error().message());
  auto const outcome = search(problem, evaluator(asked), log->hooks(), log->records());
  if (!outcome) FAIL(outcome.error().message());
  return *outcome;
}

std::string error_of(SearchResult<SearchLog> const& log) {
  REQUIRE_FALSE(log.has_value());
  return log.error().message();
}

bool contains(std::string const& text, std::string const& part) {
  return text.find(part) != std::string::npos;
}

/// A log that the small problem writes, and its lines.
struct WholeLog {
  test::TempDirectory directory;
  std::string file = directory.file("log.jsonl");
  SearchOutcome outcome = run(SearchLog::begin(file, small, "m"), small);
  std::string text = content(file);

  std::vector<std::string> lines() const {
    std::vector<std::string> list;
    for (std::size_t at = 0; at < text.size();) {
      std::size_t const end = text.find('\n', at) + 1;
      list.push_back(text.substr(at, end - at));
      at = end;
    }
    return list;
  }

  void write(std::string const& changed) const { directory.write("log.jsonl", changed); }

  /// The error of a log whose line `number`, counted from 1, is another one.
  std::string error_with(std::size_t number, std::string const& line) const {
    std::string changed;
    std::vector<std::string> list = lines();
    list.at(number - 1) = line;
    for (std::string const& part : list) changed += part;
    write(changed);
    std::string const error = error_of(SearchLog::resume(file, small, "m"));
    CHECK(content(file) == changed);
    std::string const place = file + ":" + std::to_string(number) + ": ";
    CAPTURE(error);
    REQUIRE(error.starts_with(place));
    return error.substr(place.size());
  }
};

/// No file can grow beyond so many bytes while it lives.
class FileSizeLimit {
 public:
  explicit FileSizeLimit(std::size_t bytes) {
    signal_before_ = std::signal(SIGXFSZ, SIG_IGN);
    REQUIRE(getrlimit(RLIMIT_FSIZE, &before_) == 0);
    rlimit lower = before_;
    lower.rlim_cur = bytes;
    REQUIRE(setrlimit(RLIMIT_FSIZE, &lower) == 0);
  }
  ~FileSizeLimit() {
    setrlimit(RLIMIT_FSIZE, &before_);
    std::signal(SIGXFSZ, signal_before_);
  }

 private:
  rlimit before_{};
  void (*signal_before_)(int) = nullptr;
};

}  // namespace

TEST_CASE("the lines of a log", "[search_log]") {
  WholeLog const log;
  auto const lines = log.lines();
  REQUIRE(lines.size() == 1 + 1 + static_cast<std::size_t>(evaluation_count(small)) + 4);
  CHECK(lines[0] ==
        R"({"format":"indexshare-search-1","name":"m","layers":7,"pinned":[0,3,4],"blocks":[0,4]})"
        "\n");
  CHECK(lines[1] == "{\"step\":0,\"loss\":2.0}\n");
  CHECK(lines[2] == "{\"step\":1,\"layer\":1,\"loss\":2.1}\n");
  CHECK(lines[3] == "{\"step\":1,\"layer\":2,\"loss\":2.066666666666667}\n");
  CHECK(lines[4] == "{\"step\":1,\"shared\":2,\"loss\":2.066666666666667}\n");
}

TEST_CASE("a log cut at any byte is gone on from", "[search_log]") {
  WholeLog const log;
  for (std::size_t cut = 0; cut <= log.text.size(); ++cut) {
    CAPTURE(cut);
    log.write(log.text.substr(0, cut));
    auto const resumed = run(SearchLog::resume(log.file, small, "m"), small);
    REQUIRE(resumed.pattern == log.outcome.pattern);
    REQUIRE(resumed.flips == log.outcome.flips);
    REQUIRE(resumed.all_full_loss == log.outcome.all_full_loss);
    REQUIRE(content(log.file) == log.text);
  }
}

TEST_CASE("what the log holds is not evaluated again", "[search_log]") {
  WholeLog const log;
  int asked = 0;
  run(SearchLog::resume(log.file, small, "m"), small, &asked);
  CHECK(asked == 0);
  // Cut in the middle of line 6: lines 2, 3 and 4 hold two losses of candidates and an outcome.
  std::size_t const fifth = log.text.find("\n{\"step\":2") + 1;
  log.write(log.text.substr(0, fifth + 5));
  auto const resumed = run(SearchLog::resume(log.file, small, "m"), small, &asked);
  CHECK(asked == 1 + evaluation_count(small) - 3);
  CHECK(resumed.from_records == 3);
}

TEST_CASE("a log is extended by a search for more shared layers", "[search_log]") {
  WholeLog const log;
  SearchProblem fewer = small;
  fewer.shared = 2;
  test::TempDirectory const directory;
  std::string const file = directory.file("log");
  auto const shorter = run(SearchLog::begin(file, fewer, "m"), fewer);
  CHECK(shorter.pattern == log.outcome.pattern_at(2));
  run(SearchLog::resume(file, small, "m"), small);
  CHECK(content(file) == log.text);
  // And the other way round: the log stays.
  CHECK(run(SearchLog::resume(file, fewer, "m"), fewer).pattern == shorter.pattern);
  CHECK(content(file) == log.text);
}

TEST_CASE("losses that arrive in another order end in the same outcome", "[search_log]") {
  WholeLog const log;
  Evaluator backwards = evaluator();
  backwards.evaluate = [one = backwards.evaluate](std::span<Candidate const> candidates,
                                                  ReportLoss const& report) {
    for (std::size_t i = candidates.size(); i-- > 0;)
      if (auto const error = one(candidates.subspan(i, 1),
                                 [&](std::size_t, double loss) { return report(i, loss); }))
        return error;
    return std::optional<std::string>();
  };
  test::TempDirectory const directory;
  std::string const file = directory.file("log");
  {
    auto begun = SearchLog::begin(file, small, "m");
    REQUIRE(begun.has_value());
    auto const outcome = search(small, backwards, begun->hooks());
    REQUIRE(outcome.has_value());
    CHECK(outcome->flips == log.outcome.flips);
  }
  CHECK(content(file) != log.text);
  CHECK(run(SearchLog::resume(file, small, "m"), small).flips == log.outcome.flips);
}

TEST_CASE("a log that is there is not begun again", "[search_log]") {
  WholeLog const log;
  CHECK(
      contains(error_of(SearchLog::begin(log.file, small, "m")), log.file + ": cannot be written"));
  CHECK(content(log.file) == log.text);
  // Resuming what is not there begins it.
  std::string const other = log.directory.file("other");
  run(SearchLog::resume(other, small, "m"), small);
  CHECK(content(other) == log.text);
}

TEST_CASE("a log of another search is refused by field", "[search_log]") {
  WholeLog const log;
  auto const refused = [&](SearchProblem const& problem, std::string const& name) {
    std::string const error = error_of(SearchLog::resume(log.file, problem, name));
    CHECK(error.starts_with(log.file + ":1: the log is of another search: "));
    CHECK(content(log.file) == log.text);
    return error;
  };
  CHECK(contains(refused(small, "other"), R"(name: got "m", expected "other")"));
  CHECK(contains(refused({8, 4, {3}, {0, 4}}, "m"), "layers: got 7, expected 8"));
  CHECK(contains(refused({7, 4, {}, {0, 4}}, "m"), "pinned: got [0,3,4], expected [0,4]"));
  CHECK(contains(refused({7, 4, {3, 4}, {}}, "m"), "blocks: got [0,4], expected []"));
  // The same problem in other words.
  run(SearchLog::resume(log.file, {7, 4, {4, 3, 0}, {0, 4}}, "m"), small);
}

TEST_CASE("a name may be any text", "[search_log]") {
  test::TempDirectory const directory;
  std::string const name = "a \"quoted\"\nname \xff of \xc3\xa4";
  run(SearchLog::begin(directory.file("log"), small, name), small);
  int asked = 0;
  run(SearchLog::resume(directory.file("log"), small, name), small, &asked);
  CHECK(asked == 0);
}

TEST_CASE("a file that is no log is left alone", "[search_log]") {
  test::TempDirectory const directory;
  for (std::string const text : {"notes", "notes\n", "\n", "{}", "{}\n", "[1]\n",
                                 "{\"format\":\"indexshare-search-2\"}\n"}) {
    CAPTURE(text);
    directory.write("file", text);
    CHECK(error_of(SearchLog::resume(directory.file("file"), small, "m")) ==
          directory.file("file") + ":1: this is not the log of a search");
    CHECK(content(directory.file("file")) == text);
  }
  CHECK(contains(error_of(SearchLog::resume(directory.string(), small, "m")), "a directory"));
  CHECK(contains(error_of(SearchLog::begin(directory.file("no/log"), small, "m")),
                 "cannot be written: No such file"));
  // A problem without a meaning touches no file.
  CHECK(contains(error_of(SearchLog::begin(directory.file("new"), {7, 9, {}, {}}, "m")), "shared"));
  CHECK_FALSE(std::filesystem::exists(directory.file("new")));
}

TEST_CASE("a line that does not belong there is named", "[search_log]") {
  WholeLog const log;
  // Lines: 1 header, 2 all full, 3 and 4 candidates 1 and 2, 5 outcome, 6 and 7 candidates of the
  // other block.
  CHECK(contains(log.error_with(3, "{\"step\":1,\"layer\":1,\"los\n"), "expected the loss of"));
  CHECK(contains(log.error_with(3, "\n"), "got \"\""));
  CHECK(
      contains(log.error_with(3, "{\"step\":1,\"layer\":1,\"loss\":null}\n"), "expected the loss"));
  CHECK(contains(log.error_with(3, "{\"step\":1,\"layer\":1,\"loss\":\"2\"}\n"), "expected the"));
  CHECK(contains(log.error_with(3, "{\"step\":1,\"layer\":1,\"loss\":1e999}\n"), "expected the"));
  CHECK(contains(log.error_with(3, "{\"step\":1,\"layer\":-1,\"loss\":2.1}\n"), "expected the"));
  CHECK(contains(log.error_with(3, "{\"step\":1,\"layer\":1.5,\"loss\":2.1}\n"), "expected the"));
  CHECK(contains(log.error_with(3, "{\"step\":1,\"layer\":1,\"loss\":2.1,\"x\":1}\n"), "expected"));
  CHECK(contains(log.error_with(3, "{\"step\":1,\"loss\":2.1}\n"), "without its layer"));
  CHECK(contains(log.error_with(3, "{\"step\":0,\"loss\":2.1}\n"), "all-full pattern a second"));
  CHECK(
      contains(log.error_with(2, "{\"step\":1,\"layer\":1,\"loss\":2.1}\n"), "before the loss of"));
  CHECK(contains(log.error_with(3, "{\"step\":2,\"layer\":1,\"loss\":2.1}\n"),
                 "got step 2, expected step 1"));
  CHECK(contains(log.error_with(3, "{\"step\":1,\"layer\":5,\"loss\":2.1}\n"),
                 "layer 5 is no candidate of step 1"));  // of the other block
  CHECK(contains(log.error_with(3, "{\"step\":1,\"layer\":3,\"loss\":2.1}\n"), "no candidate"));
  CHECK(contains(log.error_with(4, "{\"step\":1,\"layer\":1,\"loss\":2.1}\n"),
                 "layer 1 a second time in step 1"));
  CHECK(contains(log.error_with(4, "{\"step\":1,\"shared\":1,\"loss\":2.1}\n"),
                 "the outcome of step 1 after 1 of its 2 candidates"));
  CHECK(contains(log.error_with(5, "{\"step\":1,\"shared\":1,\"loss\":2.1}\n"),
                 "step 1 chose layer 1, but the lowest loss is that of layer 2"));
  CHECK(contains(log.error_with(5, "{\"step\":1,\"shared\":2,\"loss\":2.0}\n"), "step 1 chose"));
  // A whole line is never taken for a torn one, the last one included.
  log.write(log.text + "x\n");
  CHECK(contains(error_of(SearchLog::resume(log.file, small, "m")),
                 log.file + ":" + std::to_string(log.lines().size() + 1) + ": got \"x\""));
}

TEST_CASE("a log that cannot grow ends the search and can be gone on from", "[search_log]") {
  WholeLog const log;
  test::TempDirectory const directory;
  std::string const file = directory.file("log");
  std::size_t const room = log.text.size() / 2;
  SearchResult<SearchOutcome> outcome;
  {
    FileSizeLimit const limit(room);
    auto begun = SearchLog::begin(file, small, "m");
    REQUIRE(begun.has_value());
    outcome = search(small, evaluator(), begun->hooks());
  }
  REQUIRE_FALSE(outcome.has_value());
  CHECK(contains(outcome.error().message(), "log: could not be written to " + file + ": "));
  CHECK(content(file) == log.text.substr(0, room));
  run(SearchLog::resume(file, small, "m"), small);
  CHECK(content(file) == log.text);
}

TEST_CASE("a log is used by one search at a time", "[search_log]") {
  test::TempDirectory const directory;
  std::string const file = directory.file("log");
  {
    auto begun = SearchLog::begin(file, small, "m");
    REQUIRE(begun.has_value());
    REQUIRE_FALSE(begun->add(Evaluation{0, no_layer, 2.5}));
    std::string const text = content(file);
    CHECK(error_of(SearchLog::resume(file, small, "m")) == file + ": is in use by another search");
    SearchLog const moved = std::move(*begun);  // the lock goes along
    CHECK(error_of(SearchLog::resume(file, small, "m")) == file + ": is in use by another search");
    CHECK(content(file) == text);
  }
  {
    auto const resumed = SearchLog::resume(file, small, "m");
    REQUIRE(resumed.has_value());
    CHECK(error_of(SearchLog::resume(file, small, "m")) == file + ": is in use by another search");
  }
  run(SearchLog::resume(file, small, "m"), small);
}

TEST_CASE("a killed process leaves no lock, nor does what it started", "[search_log]") {
  test::TempDirectory const directory;
  std::string const file = directory.file("log");
  int ready[2];
  REQUIRE(pipe(ready) == 0);
  pid_t const search = fork();
  REQUIRE(search >= 0);
  if (search == 0) {
    auto const log = SearchLog::begin(file, small, "m");
    // The background command outlives this process by some seconds.
    std::string const command = "(echo; exec sleep 5) >&" + std::to_string(ready[1]) + " &";
    if (!log || std::system(command.c_str()) != 0) _exit(1);
    pause();
  }
  char byte = 0;
  REQUIRE(read(ready[0], &byte, 1) == 1);
  CHECK(error_of(SearchLog::resume(file, small, "m")) == file + ": is in use by another search");
  kill(search, SIGKILL);
  waitpid(search, nullptr, 0);
  run(SearchLog::resume(file, small, "m"), small);
}

TEST_CASE("a special file is no log", "[search_log]") {
  test::TempDirectory const directory;
  std::string const pipe = directory.file("pipe");
  REQUIRE(mkfifo(pipe.c_str(), 0600) == 0);
  CHECK(contains(error_of(SearchLog::resume(pipe, small, "m")), pipe + ": got a pipe, device or"));
  CHECK(contains(error_of(SearchLog::begin(pipe, small, "m")), pipe + ": cannot be written"));
  CHECK(contains(error_of(SearchLog::resume("/dev/null", small, "m")), "/dev/null: got a pipe"));
}

TEST_CASE("an evaluator without a function is an error", "[search_log]") {
  auto const outcome = search(small, Evaluator{});
  REQUIRE_FALSE(outcome.has_value());
  CHECK(outcome.error().message() == "evaluator: has no function `evaluate`");
}
