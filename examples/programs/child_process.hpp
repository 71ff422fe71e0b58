// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda/std/expected>

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <iterator>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <system_error>
#include <thread>
#include <utility>

/// @file A command that runs beside the program and talks with it in lines (POSIX).

extern char** environ;

namespace programs {

/// While it lives, writing to a pipe that nobody reads is an error instead of the program's end.
class IgnoreBrokenPipes {
 public:
  IgnoreBrokenPipes() {
    struct sigaction ignore = {};
    ignore.sa_handler = SIG_IGN;
    sigaction(SIGPIPE, &ignore, &before_);
  }
  ~IgnoreBrokenPipes() { sigaction(SIGPIPE, &before_, nullptr); }
  IgnoreBrokenPipes(IgnoreBrokenPipes const&) = delete;
  IgnoreBrokenPipes& operator=(IgnoreBrokenPipes const&) = delete;

 private:
  struct sigaction before_ = {};
};

/// While it lives, a signal that ends the program first ends a process group, which gets no signals
/// from the terminal. One object at a time.
class EndGroupOnSignal {
 public:
  EndGroupOnSignal() {
    struct sigaction forward = {};
    forward.sa_handler = end_group;
    forward.sa_flags = static_cast<int>(SA_RESETHAND);  // the second time ends the program
    for (std::size_t i = 0; i < std::size(signals); ++i) {
      sigaction(signals[i], nullptr, &before_[i]);
      if (before_[i].sa_handler != SIG_IGN) sigaction(signals[i], &forward, nullptr);
    }
  }
  ~EndGroupOnSignal() {
    group_ = 0;
    for (std::size_t i = 0; i < std::size(signals); ++i)
      if (before_[i].sa_handler != SIG_IGN) sigaction(signals[i], &before_[i], nullptr);
  }
  EndGroupOnSignal(EndGroupOnSignal const&) = delete;
  EndGroupOnSignal& operator=(EndGroupOnSignal const&) = delete;

  void set(pid_t group) noexcept { group_ = group; }

  /// Blocks the signals for this thread. Returns what was blocked before.
  sigset_t hold() const noexcept {
    sigset_t held;
    sigset_t before;
    sigemptyset(&held);
    for (int const signal : signals) sigaddset(&held, signal);
    pthread_sigmask(SIG_BLOCK, &held, &before);
    return before;
  }

 private:
  static constexpr int signals[] = {SIGINT, SIGTERM, SIGHUP};

  /// Processes that a shell starts with & ignore SIGINT: SIGTERM follows.
  static void end_group(int signal) {
    if (pid_t const group = group_; group > 0) {
      kill(-group, signal);
      kill(-group, SIGTERM);
    }
    raise(signal);
  }

  static inline std::atomic<pid_t> group_{0};
  static_assert(std::atomic<pid_t>::is_always_lock_free);
  struct sigaction before_[std::size(signals)] = {};
};

/// One end of a pipe.
class PipeEnd {
 public:
  explicit PipeEnd(int descriptor = -1) : descriptor_(descriptor) {}
  PipeEnd(PipeEnd&& other) noexcept : descriptor_(std::exchange(other.descriptor_, -1)) {}
  PipeEnd& operator=(PipeEnd&& other) noexcept {
    std::swap(descriptor_, other.descriptor_);
    return *this;
  }
  ~PipeEnd() { close(); }

  int get() const noexcept { return descriptor_; }
  void close() noexcept {
    if (descriptor_ >= 0) ::close(descriptor_);
    descriptor_ = -1;
  }

 private:
  int descriptor_;
};

/// A command of /bin/sh whose standard input and output are pipes to this program; its standard
/// error is this program's. It is a process group of its own: what the shell starts ends with it.
/// Ends with the object, or with a signal to the program, at the latest. One at a time. Needs
/// `IgnoreBrokenPipes`.
class ChildProcess {
 public:
  using Clock = std::chrono::steady_clock;

  /// Errors: why the system starts no shell. A command that does not exist shows only in how the
  /// shell ends.
  static cuda::std::expected<std::unique_ptr<ChildProcess>, std::string> start(
      std::string const& command) {
    int input[2];
    int output[2];
    if (pipe(input) != 0) return system_error();
    PipeEnd child_input(input[0]);
    std::unique_ptr<ChildProcess> child(new ChildProcess);
    child->input_ = PipeEnd(input[1]);
    if (pipe(output) != 0) return system_error();
    child->output_ = PipeEnd(output[0]);
    PipeEnd child_output(output[1]);
    for (int const end : {input[0], input[1], output[0], output[1]})
      fcntl(end, F_SETFD, FD_CLOEXEC);
    fcntl(input[1], F_SETFL, O_NONBLOCK);
    if (int const error = child->spawn(command, child_input.get(), child_output.get()); error != 0)
      return cuda::std::unexpected(std::generic_category().message(error));
    return child;
  }

  ~ChildProcess() { stop(std::chrono::seconds(1)); }
  ChildProcess(ChildProcess const&) = delete;
  ChildProcess& operator=(ChildProcess const&) = delete;

  /// Queues a line; `read_line` and `finish` write it.
  void send(std::string_view line) { unsent_.append(line).append("\n"); }

  /// The next line that the child writes, without its end. While it waits, it writes what is
  /// queued: neither side can block the other. Nothing: the child writes no more, or a line without
  /// end; `unread` then holds what there is of one. Or, as `late` then says, the deadline is over.
  std::optional<std::string> read_line(std::optional<Clock::time_point> deadline = {}) {
    constexpr std::size_t longest = std::size_t{1} << 16;
    for (;;) {
      if (std::size_t const end = unread_.find('\n'); end != std::string::npos) {
        std::string line = unread_.substr(0, end);
        unread_.erase(0, end + 1);
        return line;
      }
      if (unread_.size() > longest) return std::nullopt;
      late_ = deadline && Clock::now() >= *deadline;
      if (late_ || !exchange(deadline)) return std::nullopt;
    }
  }

  std::string const& unread() const noexcept { return unread_; }
  bool late() const noexcept { return late_; }

  /// What the child has written and nobody has read, without waiting for more.
  std::string const& written() {
    while (output_.get() >= 0 && exchange(Clock::now()) && got_some_) {
    }
    return unread_;
  }

  /// Closes the child's input after what is queued, waits for its end and says how it ended:
  /// nothing for exit status 0.
  std::optional<std::string> finish(std::chrono::milliseconds patience) {
    while (!unsent_.empty() && input_.get() >= 0 && exchange()) {
    }
    return stop(patience);
  }

  /// Closes the child's input at once, waits for its end, ends it where it does not end itself, and
  /// what it has started.
  std::optional<std::string> stop(std::chrono::milliseconds patience) {
    if (id_ <= 0) return ending_;
    input_.close();
    if (!wait(patience)) {
      ending_ = "it was stopped, since it did not end itself";
      kill(-id_, SIGTERM);
      if (!wait(std::chrono::seconds(1))) {
        kill(-id_, SIGKILL);
        int ignored = 0;
        while (waitpid(id_, &ignored, 0) < 0 && errno == EINTR) {
        }
      }
    }
    end_rest();
    id_ = 0;
    signals_.reset();
    return ending_;
  }

 private:
  ChildProcess() = default;

  static cuda::std::unexpected<std::string> system_error() {
    return cuda::std::unexpected(std::generic_category().message(errno));
  }

  int spawn(std::string const& command, int input, int output) {
    posix_spawn_file_actions_t files;
    posix_spawnattr_t attributes;
    posix_spawn_file_actions_init(&files);
    posix_spawnattr_init(&attributes);
    posix_spawn_file_actions_adddup2(&files, input, STDIN_FILENO);
    posix_spawn_file_actions_adddup2(&files, output, STDOUT_FILENO);
    sigset_t defaults;  // an ignored signal would stay ignored in the child
    sigemptyset(&defaults);
    sigaddset(&defaults, SIGPIPE);
    posix_spawnattr_setsigdefault(&attributes, &defaults);
    posix_spawnattr_setpgroup(&attributes, 0);
    signals_.emplace();
    // A signal that comes before the group is known would end the program and leave the command.
    sigset_t const before = signals_->hold();
    posix_spawnattr_setsigmask(&attributes, &before);
    posix_spawnattr_setflags(
        &attributes, POSIX_SPAWN_SETSIGDEF | POSIX_SPAWN_SETPGROUP | POSIX_SPAWN_SETSIGMASK);
    std::string shell = "sh";
    std::string option = "-c";
    std::string text = command;
    char* const arguments[] = {shell.data(), option.data(), text.data(), nullptr};
    int const error = posix_spawn(&id_, "/bin/sh", &files, &attributes, arguments, environ);
    posix_spawnattr_destroy(&attributes);
    posix_spawn_file_actions_destroy(&files);
    if (error != 0) id_ = 0;
    signals_->set(id_);
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    return error;
  }

  /// Ends what is left of the group once the shell is gone.
  void end_rest() const {
    auto const deadline = Clock::now() + std::chrono::seconds(1);
    if (kill(-id_, SIGTERM) != 0) return;
    while (kill(-id_, 0) == 0) {
      if (Clock::now() >= deadline) {
        kill(-id_, SIGKILL);
        return;
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
  }

  /// Waits until something can be written or read, and does it. False: the child writes no more.
  bool exchange(std::optional<Clock::time_point> deadline = {}) {
    got_some_ = false;
    pollfd ends[] = {{output_.get(), POLLIN, 0}, {unsent_.empty() ? -1 : input_.get(), POLLOUT, 0}};
    int wait_ms = -1;
    if (deadline) {
      using std::chrono::milliseconds;
      auto const left = std::chrono::ceil<milliseconds>(*deadline - Clock::now());
      wait_ms = static_cast<int>(std::clamp<milliseconds::rep>(left.count(), 0, 1'000'000));
    }
    if (poll(ends, 2, wait_ms) < 0) return errno == EINTR;
    if (ends[1].revents != 0) write_some();
    if (ends[0].revents == 0) return true;
    char block[4096];
    ssize_t const got = read(output_.get(), block, sizeof block);
    got_some_ = got > 0;
    if (got > 0) unread_.append(block, static_cast<std::size_t>(got));
    return got > 0 || (got < 0 && errno == EINTR);
  }

  void write_some() {
    ssize_t const written = write(input_.get(), unsent_.data(), unsent_.size());
    if (written > 0) {
      unsent_.erase(0, static_cast<std::size_t>(written));
    } else if (errno != EAGAIN && errno != EINTR) {
      unsent_.clear();  // nobody reads: what the child still says, and how it ends, counts
      input_.close();
    }
  }

  /// Whether the child has ended within the time; `ending_` then says how.
  bool wait(std::chrono::milliseconds patience) {
    auto const deadline = Clock::now() + patience;
    for (;;) {
      int status = 0;
      pid_t const ended = waitpid(id_, &status, WNOHANG);
      if (ended == id_) {
        if (!ending_) ending_ = ending_text(status);
        return true;
      }
      if (ended < 0 && errno != EINTR) return true;
      if (Clock::now() >= deadline) return false;
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
  }

  static std::optional<std::string> ending_text(int status) {
    if (WIFSIGNALED(status)) return "it was ended by signal " + std::to_string(WTERMSIG(status));
    int const code = WEXITSTATUS(status);
    if (code == 0) return std::nullopt;
    constexpr int no_command = 127;
    return "its exit status was " + std::to_string(code) +
           (code == no_command ? " (command not found)" : "");
  }

  pid_t id_ = 0;
  PipeEnd input_;
  PipeEnd output_;
  std::string unsent_;
  std::string unread_;
  bool got_some_ = false;  // by the last exchange
  bool late_ = false;
  std::optional<std::string> ending_;
  std::optional<EndGroupOnSignal> signals_;
};

}  // namespace programs
