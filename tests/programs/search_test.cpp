// SPDX-License-Identifier: Apache-2.0
#include <indexshare/indexcache/search.hpp>
#include <indexshare/io/config.hpp>
#include <indexshare/io/pattern_text.hpp>
#include <indexshare/io/search_log.hpp>

#include <catch2/catch_get_random_seed.hpp>
#include <catch2/catch_test_macros.hpp>
#include <nlohmann/json.hpp>

#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <sstream>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "checkpoint_files.hpp"
#include "random.hpp"
#include "search.hpp"

using namespace indexshare;
using namespace indexshare::indexcache;

namespace {

struct Outcome {
  int status;
  std::string out;
  std::string err;
};

Outcome run(std::vector<std::string> words) {
  words.insert(words.begin(), "indexshare-search");
  std::vector<char const*> pointers;
  for (std::string const& word : words) pointers.push_back(word.c_str());
  std::ostringstream out;
  std::ostringstream err;
  int const status = programs::search(static_cast<int>(pointers.size()), pointers.data(), out, err);
  return {status, out.str(), err.str()};
}

std::string content(std::string const& file) {
  std::ifstream stream(file, std::ios::binary);
  REQUIRE(stream);
  return {std::istreambuf_iterator<char>(stream), {}};
}

bool contains(std::string const& text, std::string const& part) {
  return text.find(part) != std::string::npos;
}

/// An evaluator in shell: distance of each layer to its source, weighted.
std::string const shell_loss = R"(
  loss_of() {
    rest=$1; layer=0; far=0; loss=0
    while [ -n "$rest" ]; do
      case $rest in
        F*) far=0 ;;
        *) far=$((far + 1)); loss=$((loss + (layer * 7 % 5 + 1) * far)) ;;
      esac
      layer=$((layer + 1)); rest=${rest#?}
    done
  }
)";
std::string const shell_evaluator = shell_loss + R"(
  while read -r kind id pattern first; do
    case $kind in evaluate) loss_of "$pattern"; echo "loss $id $loss.5" ;; esac
  done
)";

/// The same in the library.
SearchOutcome expected_outcome(SearchProblem const& problem) {
  auto const outcome =
      search(problem, one_by_one([](Candidate const& candidate) -> Loss {
               double loss = 0.5;
               for (std::int32_t layer = 0; layer < candidate.pattern.layers(); ++layer)
                 loss += (layer * 7 % 5 + 1) * (layer - candidate.pattern.source(layer));
               return loss;
             }));
  REQUIRE(outcome.has_value());
  return *outcome;
}

/// A search of 6 layers of which 3 are to be shared, in a directory of its own.
struct SmallSearch {
  test::TempDirectory directory;
  std::string log = directory.file("log");

  Outcome operator()(std::string const& evaluator, std::vector<std::string> more = {}) const {
    std::vector<std::string> words{"--layers", "6",      "--shared", "3",           "--log",
                                   log,        "--name", "test",     "--evaluator", evaluator};
    words.insert(words.end(), more.begin(), more.end());
    return run(words);
  }
};

bool has_children() { return waitpid(-1, nullptr, WNOHANG) >= 0 || errno != ECHILD; }

}  // namespace

TEST_CASE("a command gives the losses", "[search]") {
  SmallSearch const small;
  SearchOutcome const expected = expected_outcome({6, 3, {}, {}});
  auto const outcome = small(shell_evaluator, {"--json", small.directory.file("json")});
  CAPTURE(outcome.err);
  REQUIRE(outcome.status == 0);
  CHECK(outcome.err.empty());
  std::string const pattern = pattern_text(expected.pattern);
  CHECK(contains(outcome.out, "pattern: " + pattern + "\n"));
  CHECK(contains(outcome.out, "losses: 1 of all layers full, 12 of candidates; 0 of them from"));
  auto const json = nlohmann::json::parse(content(small.directory.file("json")));
  CHECK(json["pattern"] == pattern);
  CHECK(json["indexer_types"].size() == 6);
  CHECK(json["all_full_loss"] == 0.5);
  REQUIRE(json["flips"].size() == 3);
  for (std::size_t i = 0; i < 3; ++i) {
    CHECK(json["flips"][i]["shared"] == expected.flips[i].layer);
    CHECK(json["flips"][i]["loss"] == expected.flips[i].loss);
  }
  CHECK_FALSE(has_children());

  // Whole logs need no command: this one would fail.
  auto const again = small("exit 9", {"--resume"});
  CHECK(again.status == 0);
  CHECK(contains(again.out, "13 of them from the log"));
}

TEST_CASE("what the command reads", "[search]") {
  SmallSearch const small;
  std::string const record = small.directory.file("record");
  auto const outcome = small("tee " + record + " | { " + shell_evaluator + " }", {"--baselines"});
  REQUIRE(outcome.status == 0);
  std::string const text = content(record);
  CHECK(
      text.starts_with("hello indexshare-search 1 6\nevaluate 0 FFFFFF 0\naccepted FFFFFF\n"
                       "evaluate 1 FSFFFF 1\nevaluate 2 FFSFFF 2\n"));
  SearchOutcome const expected = expected_outcome({6, 3, {}, {}});
  CHECK(contains(text, "\naccepted " + pattern_text(expected.pattern_at(1)) + "\nevaluate 6 "));
  // The baselines come last, against the pattern that the last step began with.
  std::string const last = pattern_text(expected.pattern_at(2));
  std::size_t const told = text.find("\naccepted " + last + "\n");
  REQUIRE(told != std::string::npos);
  CHECK_FALSE(contains(text.substr(told + 1), "accepted " + pattern_text(expected.pattern)));
  CHECK(text.find("accepted", told + 10) == std::string::npos);
  std::string const uniform = "FSFSFS";
  auto const changed = first_difference(*io::parse_pattern(last), *io::parse_pattern(uniform));
  CHECK(contains(text, "evaluate 13 " + uniform + " " + std::to_string(changed) + "\n"));
  CHECK(text.ends_with("\nbye\n"));
}

TEST_CASE("answers in any order", "[search]") {
  // All candidates of a step have as many F as there are candidates; answers come backwards.
  std::string const backwards = shell_loss + R"(
    answers=; count=0
    while read -r kind id pattern first; do
      [ "$kind" = evaluate ] || continue
      loss_of "$pattern"
      full=$(printf %s "$pattern" | tr -d S)
      [ "$pattern" = FFFFFF ] && full=F
      answers="loss $id $loss.5
$answers"
      count=$((count + 1))
      [ "$count" = "${#full}" ] && { printf %s "$answers"; answers=; count=0; }
    done
    exit 0
  )";
  SmallSearch const small;
  auto const outcome = small(backwards);
  CAPTURE(outcome.err);
  REQUIRE(outcome.status == 0);
  CHECK(contains(outcome.out,
                 "pattern: " + pattern_text(expected_outcome({6, 3, {}, {}}).pattern) + "\n"));
}

TEST_CASE("a command that fails is quoted, and the log stays", "[search]") {
  struct Failure {
    std::string command;
    std::string message;
  };
  std::string const skip_hello = "read -r hello; ";
  std::string const three_losses =
      skip_hello + "read -r a; echo loss 0 0.5; read -r a; read -r a; echo loss 1 3.5; ";
  Failure const failures[] = {
      {"exit 3", "wrote no more, 1 answer is missing; its exit status was 3"},
      {"exit 0", "wrote no more, 1 answer is missing; its exit status was 0"},
      {"kill -9 $$", "wrote no more, 1 answer is missing; it was ended by signal 9"},
      {"no-such-command-anywhere 2>/dev/null", "its exit status was 127 (command not found)"},
      {"printf 'loss 0'", "broke off after \"loss 0\", 1 answer is missing; its exit status"},
      {"head -c 100000 /dev/zero | tr '\\0' x", "broke off after \"xxxxx"},
      {"echo Loading", "said \"Loading\", expected `loss ID VALUE` or `error ID TEXT`"},
      {"echo", "said \"\", expected `loss ID VALUE`"},
      {"echo loss 0 1.5 x", "said \"loss 0 1.5 x\", expected"},
      {"echo 'loss  0 1.5'", "said \"loss  0 1.5\", expected"},
      {"echo loss 0 1,5; exit 4",
       "said \"loss 0 1,5\", expected `loss ID VALUE` or `error ID "
       "TEXT`; its exit status was 4"},
      {"echo loss 1 1.5", "said \"loss 1 1.5\", but this id was not asked"},
      {"echo loss -1 1.5", "said \"loss -1 1.5\", but this id was not asked"},
      {skip_hello + "read -r a; echo error 0 out of memory", "FFFFFF: out of memory"},
      {three_losses + "echo loss 1 3.5", "said \"loss 1 3.5\", but it has answered this id"},
      {three_losses + "echo loss 0 3.5", "said \"loss 0 3.5\", but it has answered this id"},
      {three_losses + "echo error 2 layer 2 broke", "FFSFFF: layer 2 broke"},
      {three_losses + "exit 5", "wrote no more, 4 answers are missing; its exit status was 5"},
  };
  for (Failure const& failure : failures) {
    CAPTURE(failure.command);
    SmallSearch const small;
    auto const outcome = small(failure.command);
    CHECK(outcome.status == 2);
    CHECK(outcome.out.empty());
    CAPTURE(outcome.err);
    CHECK(outcome.err.starts_with("error: evaluator: "));
    CHECK(contains(outcome.err, failure.message));
    CHECK(outcome.err.find('\n') == outcome.err.size() - 1);
    CHECK_FALSE(has_children());
    auto const resumed = small(shell_evaluator, {"--resume"});
    CHECK(resumed.status == 0);
  }
}

TEST_CASE("a loss that is no number ends search and command", "[search]") {
  SmallSearch const small;
  auto const outcome = small("read -r a; read -r a; echo loss 0 nan; read -r a");
  CHECK(outcome.status == 2);
  CHECK(contains(outcome.err, "error: candidate FFFFFF (all layers full): the loss is NaN"));
  CHECK_FALSE(has_children());
}

TEST_CASE("a command that does not end is ended", "[search]") {
  SmallSearch const small;
  auto const outcome =
      small("trap '' TERM; echo x; n=0; while [ $n -lt 200 ]; do n=$((n + 1)); sleep 0.05; done");
  CHECK(outcome.status == 2);
  CHECK(contains(outcome.err, "; it was stopped, since it did not end itself"));
  CHECK_FALSE(has_children());
}

TEST_CASE("a command that ends badly after all losses is noted", "[search]") {
  SmallSearch const small;
  auto const outcome = small(shell_evaluator + "exit 7");
  CHECK(outcome.status == 0);
  CHECK(outcome.err == "note: the evaluator gave all losses, but its exit status was 7\n");
}

TEST_CASE("a killed search goes on to the same result", "[search]") {
  SearchOutcome const expected = expected_outcome({14, 9, {5}, {0, 7}});
  test::TempDirectory const directory;
  std::string const file = directory.file("log");
  std::vector<std::string> const words{
      "--layers", "14", "--shared", "9",    "--pin",    "5",           "--blocks",     "0,7",
      "--log",    file, "--name",   "kill", "--resume", "--evaluator", shell_evaluator};
  auto const whole = run(words);
  REQUIRE(whole.status == 0);
  std::string const log = content(file);
  CHECK(contains(whole.out, "pattern: " + pattern_text(expected.pattern) + "\n"));

  test::Random random(Catch::getSeed());
  int killed = 0;
  for (int round = 0; round < 4; ++round) {
    std::filesystem::remove(file);
    for (int kills = 0; kills < 3; ++kills) {
      // The moment is random, but within the search: when the log has so many bytes.
      std::error_code ignored;
      std::size_t const before =
          std::filesystem::exists(file) ? std::filesystem::file_size(file) : 0;
      std::size_t const moment = before + random.below(log.size() / 3);
      CAPTURE(round, kills, moment);
      pid_t const child = fork();
      REQUIRE(child >= 0);
      if (child == 0) _exit(run(words).status);
      while (waitpid(child, nullptr, WNOHANG) == 0) {
        auto const size = std::filesystem::file_size(file, ignored);
        if (!ignored && size >= moment) {
          kill(child, SIGKILL);
          waitpid(child, nullptr, 0);
          ++killed;
          break;
        }
        std::this_thread::sleep_for(std::chrono::microseconds(100));
      }
      REQUIRE(std::filesystem::exists(file));
      CHECK(log.starts_with(content(file)));
    }
    auto const resumed = run(words);
    CAPTURE(resumed.err);
    CHECK(resumed.status == 0);
    CHECK(content(file) == log);
    CHECK(contains(resumed.out, "pattern: " + pattern_text(expected.pattern) + "\n"));
  }
  CHECK(killed > 0);  // else no moment was within a search
}

TEST_CASE("a log is neither overwritten nor mixed up", "[search]") {
  SmallSearch const small;
  REQUIRE(small(shell_evaluator).status == 0);
  std::string const log = content(small.log);
  auto const again = small(shell_evaluator);
  CHECK(again.status == 2);
  CHECK(again.err.starts_with("error: --log: " + small.log));
  CHECK(again.err.ends_with("(--resume goes on from it)\n"));
  auto const other = run({"--layers", "7", "--shared", "3", "--log", small.log, "--name", "test",
                          "--resume", "--evaluator", shell_evaluator});
  CHECK(other.status == 2);
  CHECK(contains(other.err, ":1: the log is of another search: layers: got 6, expected 7"));
  CHECK(content(small.log) == log);
}

TEST_CASE("no file is written over another one", "[search]") {
  test::TempDirectory const directory;
  directory.write("config.json", "{}");
  directory.write("similarity", "[[1]]");
  std::filesystem::create_symlink(directory.file("config.json"), directory.file("link"));
  std::string const dotted = directory.file("./log");
  struct Clash {
    std::vector<std::string> words;
    std::string output;
    std::string other;
  };
  std::string const config = directory.file("config.json");
  std::string const similarity = directory.file("similarity");
  std::string const log = directory.file("log");
  std::string const other = directory.file("new");
  Clash const clashes[] = {
      {{"--layers", "6", "--log", log, "--json", dotted}, "--json", "--log"},
      {{"--config", config, "--log", log, "--json", directory.file("link")}, "--json", "--config"},
      {{"--layers", "6", "--log", log, "--baselines", "--similarity", similarity, "--json",
        similarity},
       "--json",
       "--similarity"},
      {{"--layers", "6", "--log", log, "--write-config", config, "--json", config},
       "--json",
       "--write-config"},
      {{"--layers", "6", "--log", log, "--write-config", dotted}, "--write-config", "--log"},
      {{"--layers", "6", "--log", log, "--baselines", "--similarity", similarity, "--write-config",
        similarity},
       "--write-config",
       "--similarity"},
      {{"--config", config, "--log", config, "--resume"}, "--log", "--config"},
      {{"--layers", "6", "--log", other, "--json", other}, "--json", "--log"},
  };
  for (Clash const& clash : clashes) {
    std::vector<std::string> words = clash.words;
    words.insert(words.end(), {"--shared", "3", "--evaluator", "touch " + directory.file("ran")});
    auto const outcome = run(words);
    CAPTURE(outcome.err);
    CHECK(outcome.status == 2);
    CHECK(outcome.err.starts_with("error: " + clash.output + ": got "));
    CHECK(contains(outcome.err, ", which is the file of " + clash.other + ", expected another"));
    CHECK(content(config) == "{}");
    CHECK(content(similarity) == "[[1]]");
    for (std::string const file : {"log", "new", "ran"})
      CHECK_FALSE(std::filesystem::exists(directory.file(file)));
  }
}

TEST_CASE("a result that cannot be written is printed", "[search]") {
  SmallSearch const small;
  for (std::string const place : {"no/json", "."}) {
    auto const refused = small(shell_evaluator, {"--json", small.directory.file(place)});
    CHECK(refused.status == 2);
    CHECK(refused.err.starts_with("error: --json: cannot write "));
    CHECK_FALSE(std::filesystem::exists(small.log));
  }
  // The directory goes while the search runs.
  std::filesystem::create_directory(small.directory.file("later"));
  auto const outcome = small("rmdir " + small.directory.file("later") + "; " + shell_evaluator,
                             {"--json", small.directory.file("later/json")});
  CHECK(outcome.status == 2);
  CHECK(outcome.err.starts_with("error: --json: cannot write "));
  CHECK(contains(outcome.out, "pattern: "));
}

TEST_CASE("progress is a line per loss", "[search]") {
  SmallSearch const small;
  auto const outcome = small(shell_evaluator, {"--progress"});
  REQUIRE(outcome.status == 0);
  CHECK(std::count(outcome.err.begin(), outcome.err.end(), '\n') == 13);
  CHECK(outcome.err.starts_with("step 0 of 3, loss 1 of 13: 0.5; "));
  CHECK(outcome.err.ends_with(" left\n"));
  CHECK(programs::duration_text(59.6) == "1m 00s");
  CHECK(programs::duration_text(3725) == "1h 02m");
  CHECK(programs::duration_text(4) == "4s");
}

TEST_CASE("baselines without and with losses", "[search]") {
  test::TempDirectory const directory;
  directory.write("bare", "[[1,0,0,0],[0.5,1,0,0],[0.1,0.75,1,0],[0.1,0.5,0.25,1]]");
  directory.write("wrapped",
                  R"({"layers": 4, "overlap": )" + content(directory.file("bare")) + "}");
  for (std::string const file : {"bare", "wrapped"}) {
    auto const outcome = run({"--layers", "4", "--full-ratio", "1/2", "--baselines", "--similarity",
                              directory.file(file)});
    CAPTURE(outcome.err);
    REQUIRE(outcome.status == 0);
    CHECK(contains(outcome.out, "uniform, paper, period 2      2 full  FSFS\n"));
    CHECK(contains(outcome.out, "uniform, patches, period 2    3 full  FFSF\n"));
    CHECK(contains(outcome.out, "highest similarity            2 full  FFSS\n"));
    CHECK_FALSE(contains(outcome.out, "loss"));
  }
  SmallSearch const small;
  auto const outcome = small(shell_evaluator, {"--baselines"});
  CAPTURE(outcome.err);
  REQUIRE(outcome.status == 0);
  // FSFSFS: 3 + 2 + 1 for layers 1, 3 and 5.
  CHECK(contains(outcome.out, "uniform, paper, period 2      3 full  loss 6.5           FSFSFS\n"));
}

TEST_CASE("the pattern goes into a config", "[search]") {
  SmallSearch const small;
  small.directory.write("config.json", R"({
    "model_type": "glm_moe_dsa", "num_hidden_layers": 6, "hidden_size": 256,
    "num_attention_heads": 8, "q_lora_rank": 96, "kv_lora_rank": 64, "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16, "v_head_dim": 48, "index_n_heads": 4, "index_head_dim": 32,
    "index_topk": 128, "rms_norm_eps": 1e-5, "rope_theta": 8000000, "vocab_size": 1000,
    "first_k_dense_replace": 6, "intermediate_size": 512
  })");
  std::string const file = small.directory.file("config.json");
  auto const outcome = run({"--config", file, "--full-ratio", "0.5", "--log", small.log,
                            "--evaluator", shell_evaluator, "--write-config", file});
  CAPTURE(outcome.err);
  REQUIRE(outcome.status == 0);
  auto const config = io::read_config_file(file);
  REQUIRE(config.has_value());
  auto const expected = expected_outcome({6, 3, {}, {}}).pattern;
  for (std::int32_t layer = 0; layer < 6; ++layer)
    CHECK(share_source(config->plan, layer) == expected.source(layer));

  // Asked again: the config says now that it shares.
  auto const again = run({"--config", file, "--shared", "3", "--log", small.log, "--resume",
                          "--evaluator", shell_evaluator});
  CHECK(again.status == 0);
  CHECK(contains(again.err, "note: --config shares 3 layers already"));

  // A config that the pattern cannot go into is refused before the first loss.
  auto const refused = run({"--layers", "7", "--shared", "3", "--log", small.directory.file("new"),
                            "--evaluator", "exit 1", "--write-config", file});
  CHECK(refused.status == 2);
  CHECK(contains(refused.err, "error: --write-config: num_hidden_layers: got 6, expected 7"));
  CHECK_FALSE(std::filesystem::exists(small.directory.file("new")));
}

TEST_CASE("options that make no sense are named", "[search]") {
  test::TempDirectory const directory;
  std::string const log = directory.file("log");
  directory.write("short", "[[1,0],[0,1]]");
  directory.write("text", "[[1,0,0],[\"x\",1,0],[0,0,1]]");
  directory.write("rubbish", "no json");
  struct Refusal {
    std::vector<std::string> words;
    std::string start;
  };
  std::vector<std::string> const complete{"--layers", "3", "--shared",    "1",
                                          "--log",    log, "--evaluator", "exit 1"};
  auto const with = [&](std::vector<std::string> more) {
    more.insert(more.begin(), complete.begin(), complete.end());
    return more;
  };
  Refusal const refusals[] = {
      {{}, "--layers: missing, expected it or --config"},
      {{"--layers", "3"}, "--shared: missing, expected it or --full-ratio"},
      {{"--layers", "3", "--shared", "1"}, "--evaluator: missing"},
      {{"--layers", "3", "--shared", "1", "--evaluator", "x"}, "--log: missing"},
      {{"--layers", "3", "--shared", "1", "--evaluator", "", "--log", log},
       "--evaluator: got \"\", expected a command"},
      {{"--layers", "3", "--shared", "3", "--baselines"}, "--shared: got \"3\""},
      {{"--layers", "0", "--shared", "0", "--baselines"}, "--layers: got \"0\""},
      {{"--layers", "3", "--shared", "1", "--baselines", "--pin", "1"}, "--pin: expected together"},
      {{"--config", "/nonexistent", "--shared", "1", "--baselines"}, "--config: /nonexistent: got"},
      {with({"--config", "x"}), "--config: expected it or --layers, not both"},
      {with({"--full-ratio", "0.5"}), "--full-ratio: expected it or --shared, not both"},
      {with({"--similarity", "x"}), "--similarity: expected together with --baselines"},
      {with({"--pin", "1,x"}), "--pin: got \"x\""},
      {with({"--pin", "1,"}), "--pin: got \"\""},
      {with({"--pin", "3"}), "pinned layer: got 3, expected a number from 0 to 2"},
      {with({"--pin", "1,2"}), "shared layers: got 1, expected 0 to 0"},
      {with({"--blocks", "1"}), "blocks: the first begins at layer 1"},
      {with({"--baselines", "--similarity", directory.file("short")}),
       "--similarity: " + directory.file("short") + ": got 2 rows, expected 3 rows"},
      {with({"--baselines", "--similarity", directory.file("text")}),
       "--similarity: " + directory.file("text") + ": row 1: column 0: got \"x\", expected a num"},
      {with({"--baselines", "--similarity", directory.file("rubbish")}),
       "--similarity: " + directory.file("rubbish") + ": got no JSON"},
      {with({"--write-config", directory.file("none")}),
       "--write-config: " + directory.file("none") + ": got"},
      {{"--layers", "3", "--full-ratio", "0", "--baselines"}, "--full-ratio: got \"0\""},
      {{"--layers", "3", "--full-ratio", "3/2", "--baselines"}, "--full-ratio: got \"3/2\""},
      {{"--layers", "3", "--full-ratio", "1/0", "--baselines"}, "--full-ratio: got \"1/0\""},
  };
  for (Refusal const& refusal : refusals) {
    auto const outcome = run(refusal.words);
    CAPTURE(refusal.start, outcome.err);
    CHECK(outcome.status == 2);
    CHECK(outcome.err.starts_with("error: " + refusal.start));
    CHECK(outcome.err.find('\n') == outcome.err.size() - 1);
    CHECK(outcome.out.empty());
    CHECK_FALSE(std::filesystem::exists(log));
  }
}
