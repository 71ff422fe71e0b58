// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/indexcache/search.hpp>

#include <charconv>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>

#include "arguments.hpp"
#include "child_process.hpp"

/// @file The evaluator of indexshare-search: a command that gets patterns and answers with losses.

namespace programs {

/// What the command reads on its standard input and writes on its standard output, in lines whose
/// words are separated by one space:
///
/// ```text
/// to the command
///   hello indexshare-search 1 LAYERS        first; 1 is the version of this protocol
///   accepted PATTERN                        until the next one, layers below FIRST_CHANGED compute
///                                           what they compute under PATTERN
///   evaluate ID PATTERN FIRST_CHANGED       the loss of PATTERN (F and S, layer 0 first) is wanted
///   bye                                     last; then comes the end of the input
/// from the command, for each evaluate once, in any order
///   loss ID VALUE                           VALUE as a decimal number, all its digits
///   error ID TEXT                           the search ends with this text
/// ```
///
/// All candidates of a step are sent before their first answer is waited for. Every line counts, so
/// anything else that the command has to say belongs on its standard error.
inline constexpr std::string_view evaluator_hello = "hello indexshare-search 1 ";

/// Starts the command when the first loss is needed.
class CommandEvaluator {
 public:
  /// @param timeout_s  how long a loss may take, from the request or from the loss before it
  CommandEvaluator(std::string command, std::int32_t layers, std::optional<double> timeout_s)
      : command_(std::move(command)), layers_(layers), timeout_s_(timeout_s) {}

  /// Functions for a search, which use this object.
  indexshare::indexcache::Evaluator evaluator() {
    indexshare::indexcache::Evaluator functions;
    functions.evaluate = [this](auto candidates, auto const& report) {
      return evaluate(candidates, report);
    };
    functions.accepted = [this](indexshare::indexcache::RolePattern const& pattern) {
      accepted_ = pattern;
      told_ = false;
    };
    return functions;
  }

  /// The pattern that the command works from; without layers: none yet.
  indexshare::indexcache::RolePattern const& accepted() const noexcept { return accepted_; }

  /// Says goodbye. Returns how the command ended, if it was not with exit status 0.
  /// @param surplus  set to what is wrong if the command has said more than was asked
  std::optional<std::string> finish(std::optional<std::string>& surplus) {
    if (!child_) return std::nullopt;
    child_->send("bye");
    auto const how = child_->finish(std::chrono::seconds(10));
    surplus = check_silent();
    return how;
  }

 private:
  using Candidates = std::span<indexshare::indexcache::Candidate const>;
  using Problem = std::optional<std::string>;

  Problem evaluate(Candidates candidates, indexshare::indexcache::ReportLoss const& report) {
    if (!child_) {
      auto started = ChildProcess::start(command_);
      if (!started) return "cannot be started: " + started.error();
      child_ = std::move(*started);
      child_->send(std::string(evaluator_hello) + std::to_string(layers_));
    }
    if (!told_) child_->send("accepted " + pattern_text(accepted_));
    told_ = true;
    std::map<std::int64_t, std::size_t> waiting;  // by id, place in the batch
    for (std::size_t i = 0; i < candidates.size(); ++i) {
      waiting[next_id_] = i;
      child_->send("evaluate " + std::to_string(next_id_++) + " " +
                   pattern_text(candidates[i].pattern) + " " +
                   std::to_string(candidates[i].first_changed));
    }
    while (!waiting.empty()) {
      auto const line = child_->read_line(deadline());
      if (!line) return silence(waiting.size());
      bool stopped = false;
      auto const problem = take(*line, candidates, waiting, report, stopped);
      if (problem) return *problem + ending();
      if (stopped) return std::nullopt;
    }
    if (auto const surplus = check_silent()) return *surplus + ending();
    return std::nullopt;
  }

  std::optional<ChildProcess::Clock::time_point> deadline() const {
    using Clock = ChildProcess::Clock;
    if (!timeout_s_) return std::nullopt;
    return Clock::now() +
           std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(*timeout_s_));
  }

  /// With all answers there, nothing more may have come: it would mean that they are not what the
  /// command takes them for.
  Problem check_silent() {
    std::string const& more = child_->written();
    if (more.empty()) return std::nullopt;
    return "said " + shown(std::string_view(more).substr(0, more.find('\n'))) +
           " after its last answer, expected nothing";
  }

  Problem take(std::string_view line, Candidates candidates,
               std::map<std::int64_t, std::size_t>& waiting,
               indexshare::indexcache::ReportLoss const& report, bool& stopped) const {
    std::string_view rest = line;
    std::string_view const kind = next_word(rest);
    std::int64_t id = 0;
    bool const known = (kind == "loss" || kind == "error") && read_number(next_word(rest), id);
    double loss = 0;
    if (!known || (kind == "loss" && !read_number(rest, loss)))
      return "said " + shown(line) + ", expected `loss ID VALUE` or `error ID TEXT`";
    auto const place = waiting.find(id);
    if (place == waiting.end()) {
      bool const answered = 0 <= id && id < next_id_;
      return "said " + shown(line) +
             (answered ? ", but it has answered this id" : ", but this id was not asked");
    }
    indexshare::indexcache::Candidate const& candidate = candidates[place->second];
    if (kind == "error")
      return pattern_text(candidate.pattern) + ": " +
             (rest.empty() ? "failed without a reason" : one_line(std::string(rest)));
    stopped = !report(place->second, loss);
    waiting.erase(place);
    return std::nullopt;
  }

  static std::string_view next_word(std::string_view& rest) {
    std::size_t const end = rest.find(' ');
    std::string_view const word = rest.substr(0, end);
    rest.remove_prefix(end == std::string_view::npos ? rest.size() : end + 1);
    return word;
  }

  template <class T>
  static bool read_number(std::string_view text, T& number) {
    auto const [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
    return error == std::errc() && end == text.data() + text.size();
  }

  static std::string shown(std::string_view text) {
    constexpr std::size_t longest = 120;
    return programs::quoted(text.substr(0, longest)) + (text.size() > longest ? "..." : "");
  }

  /// The error when the command writes no more.
  std::string silence(std::size_t answers) {
    if (child_->late()) {
      char seconds[40];
      std::snprintf(seconds, sizeof seconds, "%g", *timeout_s_);
      child_->stop(std::chrono::seconds(0));
      return std::string("no loss came within ") + seconds + " s (--timeout)";
    }
    std::string text =
        child_->unread().empty() ? "wrote no more" : "broke off after " + shown(child_->unread());
    text += ", " + std::to_string(answers) + (answers == 1 ? " answer is" : " answers are") +
            " missing";
    auto const how = child_->stop(patience);
    return text + "; " + how.value_or("its exit status was 0");
  }

  std::string ending() {
    auto const how = child_->stop(patience);
    return how ? "; " + *how : "";
  }

  // Long enough for a command that ends itself when its input ends.
  static constexpr std::chrono::milliseconds patience{1000};

  std::string command_;
  std::int32_t layers_;
  std::optional<double> timeout_s_;
  std::unique_ptr<ChildProcess> child_;
  std::int64_t next_id_ = 0;
  indexshare::indexcache::RolePattern accepted_;
  bool told_ = true;
};

}  // namespace programs
