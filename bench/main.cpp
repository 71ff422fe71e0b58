// SPDX-License-Identifier: Apache-2.0
#include "case.hpp"

#include <indexshare/host/isa.hpp>

#include <benchmark/benchmark.h>

#include <sys/resource.h>

#include <cstdio>
#include <exception>
#include <optional>
#include <string_view>

/// @file Times of the host back end at GLM-5.2's widths, beside the machine's peaks, on 1 and 2
/// threads. Times are of the wall; the CPU time is the process's. Some shapes take gigabytes and
/// minutes, so without --benchmark_filter only the small ones run; `.` is all of them.
/// --isa=avx512_bf16|avx512|avx2|portable takes another instruction set than the best.

namespace {

using namespace bench;

constexpr char const* small_cases = "peak|topk/.*keys:8K|decode/batch:1/keys:8K";

struct NamedIsa {
  std::string_view name;
  HostIsa isa;
};
constexpr NamedIsa isas[] = {{"avx512_bf16", HostIsa::avx512_bf16},
                             {"avx512", HostIsa::avx512},
                             {"avx2", HostIsa::avx2},
                             {"portable", HostIsa::portable}};

/// Takes --isa out of the arguments. Without it: the best one; nothing where the name is wrong or
/// the processor lacks it.
std::optional<HostIsa> take_isa(int& argc, char** argv) {
  constexpr std::string_view flag = "--isa=";
  for (int i = 1; i < argc; ++i) {
    std::string_view const argument = argv[i];
    if (!argument.starts_with(flag)) continue;
    for (int j = i; j + 1 < argc; ++j) argv[j] = argv[j + 1];
    --argc;
    for (NamedIsa const& one : isas) {
      if (argument.substr(flag.size()) == one.name && runs_here(one.isa)) return one.isa;
    }
    return {};
  }
  return resolved(HostIsa::automatic);
}

std::string name_of(HostIsa isa) {
  for (NamedIsa const& one : isas) {
    if (one.isa == isa) return std::string(one.name);
  }
  return {};
}

std::string compiler() {
#if defined(__clang__)
  return __VERSION__;
#else
  return std::string("g++ ") + __VERSION__;
#endif
}

/// The most memory that this process has had, in MiB.
double peak_memory() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return static_cast<double>(usage.ru_maxrss) / 1024;  // KiB on Linux
}

/// Keeps the data of the case that runs: Google Benchmark starts a case several times, with more
/// iterations each time and once per repetition.
class Runner {
 public:
  void measure(benchmark::State& state, Case const& one, Exec const& exec) {
    try {
      if (&one != case_ || exec.parallel_for.pool != pool_) prepare(one, exec);
      for (auto _ : state) {
        if (Status const status = call_->run(); !status.ok()) return fail(state, status.what);
      }
      if (!checked_) call_->check();
      checked_ = true;
      report(state);
    } catch (std::exception const& error) {
      fail(state, error.what());
    }
  }

  bool failed() const { return failed_; }

 private:
  void fail(benchmark::State& state, char const* what) {
    state.SkipWithError(what);
    failed_ = true;
  }

  void prepare(Case const& one, Exec const& exec) {
    call_.reset();
    case_ = nullptr;
    call_ = one.prepare(exec);
    case_ = &one;
    pool_ = exec.parallel_for.pool;
    checked_ = false;
    memory_ = peak_memory();
  }

  void report(benchmark::State& state) const {
    using benchmark::Counter;
    constexpr auto rate = Counter::kIsIterationInvariantRate;
    if (call_->work.flops > 0) state.counters["FLOP/s"] = Counter(call_->work.flops, rate);
    if (call_->work.bytes > 0) state.counters["B/s"] = Counter(call_->work.bytes, rate);
    // These two say something of a case that runs alone.
    state.counters["peak_MiB"] = peak_memory();
    state.counters["scratch_MiB"] = peak_memory() - memory_;
  }

  Case const* case_ = nullptr;
  programs::ThreadPool const* pool_ = nullptr;
  std::optional<Call> call_;
  bool checked_ = false;
  bool failed_ = false;
  double memory_ = 0;  ///< peak before the first run, data included
};

std::vector<Case> all_cases() {
  std::vector<Case> all;
  for (auto const& cases : {peak_cases(), score_cases(), topk_cases(), attention_cases(),
                            layer_cases(), overlap_cases()}) {
    all.insert(all.end(), cases.begin(), cases.end());
  }
  return all;
}

}  // namespace

int main(int argc, char** argv) {
  std::optional<HostIsa> const isa = take_isa(argc, argv);
  if (!isa) {
    std::fprintf(stderr,
                 "error: --isa takes avx512_bf16, avx512, avx2 or portable, what this processor "
                 "has\n");
    return 2;
  }
  programs::ThreadPool one(1);
  programs::ThreadPool two(2);
  std::vector<Case> const cases = all_cases();
  Runner runner;
  for (programs::ThreadPool* const pool : {&one, &two}) {
    for (Case const& each : cases) {
      std::string const name = each.name + "/threads:" + std::to_string(pool->size());
      benchmark::RegisterBenchmark(name.c_str(),
                                   [&, exec = Exec{{pool}, *isa}](benchmark::State& state) {
                                     runner.measure(state, each, exec);
                                   })
          ->Unit(benchmark::kMillisecond)
          ->UseRealTime()
          ->MeasureProcessCPUTime();
    }
  }
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 1;
  if (benchmark::GetBenchmarkFilter().empty()) benchmark::SetBenchmarkFilter(small_cases);
  benchmark::AddCustomContext("isa", name_of(*isa));
  benchmark::AddCustomContext("compiler", compiler());
  benchmark::RunSpecifiedBenchmarks();
  benchmark::Shutdown();
  return runner.failed() ? 1 : 0;
}
