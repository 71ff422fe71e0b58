// SPDX-License-Identifier: Apache-2.0
#include "cases.cuh"

#include <indexshare/cuda/exec.cuh>

#include <benchmark/benchmark.h>

#include <algorithm>
#include <cstdio>
#include <exception>
#include <memory>
#include <string>

/// @file Times of the stages on a GPU: CUDA events around one call, the L2 cache flushed before
/// each. Counters: bytes and flops per second of what the algorithm needs (not of what a kernel
/// moves), and the fraction of the limit that binds, max(bytes / memory rate, flops / tensor rate).
/// The rates are the device's own numbers (memory clock x width) and, for the tensor cores,
/// --peak_tflops.

namespace {

using namespace bench;

/// What limits a call on this device.
struct Roof {
  double bytes_per_second = 0;
  double flops_per_second = 0;
  double seconds(Work const& work) const {
    return std::max(work.bytes / bytes_per_second,
                    flops_per_second > 0 ? work.flops / flops_per_second : 0);
  }
};

class Device {
 public:
  explicit Device(double peak_tflops) : limits_(*device_limits(0)) {
    require(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
    require(cudaEventCreate(&begin_));
    require(cudaEventCreate(&end_));
    int l2 = 0;
    int clock_khz = 0;
    int width_bits = 0;
    require(cudaDeviceGetAttribute(&l2, cudaDevAttrL2CacheSize, 0));
    require(cudaDeviceGetAttribute(&clock_khz, cudaDevAttrMemoryClockRate, 0));
    require(cudaDeviceGetAttribute(&width_bits, cudaDevAttrGlobalMemoryBusWidth, 0));
    flush_bytes_ = 2 * static_cast<std::size_t>(l2);
    require(cudaMalloc(&flush_, flush_bytes_ + 1));
    roof_ = {2e3 * clock_khz * width_bits / 8, 1e12 * peak_tflops};
  }

  DeviceLimits const& limits() const { return limits_; }
  Roof const& roof() const { return roof_; }

  /// Seconds of one call with a cold L2.
  double time(Call const& call) {
    require(cudaMemsetAsync(flush_, 0, flush_bytes_, stream_));
    require(cudaEventRecord(begin_, stream_));
    require(call.run(CudaExec(stream_, limits_)));
    require(cudaEventRecord(end_, stream_));
    require(cudaEventSynchronize(end_));
    float milliseconds = 0;
    require(cudaEventElapsedTime(&milliseconds, begin_, end_));
    return 1e-3 * static_cast<double>(milliseconds);
  }

 private:
  DeviceLimits limits_;
  cudaStream_t stream_ = nullptr;
  cudaEvent_t begin_ = nullptr;
  cudaEvent_t end_ = nullptr;
  std::size_t flush_bytes_ = 0;
  void* flush_ = nullptr;
  Roof roof_;
};

void measure(benchmark::State& state, Device& device, Case const& one) {
  try {
    Call const call = one.prepare(device.limits());
    device.time(call);  // modules load on the first launch
    double seconds = 0;
    for (auto _ : state) {
      double const taken = device.time(call);
      state.SetIterationTime(taken);
      seconds += taken;
    }
    double const mean = seconds / static_cast<double>(state.iterations());
    state.counters["GB_per_s"] = call.work.bytes / mean / 1e9;
    state.counters["TFLOP_per_s"] = call.work.flops / mean / 1e12;
    state.counters["fraction_of_limit"] = device.roof().seconds(call.work) / mean;
  } catch (std::exception const& error) {
    state.SkipWithError(error.what());
  }
}

std::string in_k(index_t keys) {
  return keys >= 1048576 ? std::to_string(keys / 1048576) + "M" : std::to_string(keys / 1024) + "K";
}

template <class Query, class Format>
void add_score(std::vector<Case>& cases, std::string const& types) {
  auto const add = [&](std::string const& name, index_t rows, index_t per_request, index_t keys) {
    cases.push_back({"score", "score/" + types + "/" + name, [=](DeviceLimits const& limits) {
                       return score_call<Query, Format>(limits, glm52(rows, keys), per_request);
                     }});
  };
  for (index_t const batch : {1, 8, 32}) {
    for (index_t const keys : {8192, 65536, 131072, 1048576}) {
      add("decode/batch:" + std::to_string(batch) + "/keys:" + in_k(keys), batch, 1, keys);
    }
  }
  for (index_t const keys : {32768, 131072}) {
    add("prefill/rows:2048/keys:" + in_k(keys), 2048, 2048, keys);
  }
}

template <class Query, class Format>
void add_attend(std::vector<Case>& cases, std::string const& types) {
  auto const add = [&](std::string const& name, index_t rows, index_t heads) {
    Shape shape = glm52(rows, 65536);
    shape.heads = heads;
    cases.push_back(
        {"attend", "attend/" + types + "/heads:" + std::to_string(heads) + "/" + name,
         [=](DeviceLimits const& limits) { return attend_call<Query, Format>(limits, shape); }});
  };
  for (index_t const heads : {8, 16, 64}) {
    for (index_t const batch : {1, 8, 32, 128}) {
      add("decode/batch:" + std::to_string(batch), batch, heads);
    }
    add("prefill/rows:2048", 2048, heads);
  }
}

std::vector<Case> timed_cases() {
  std::vector<Case> cases;
  add_score<bf16, format::Plain<bf16>>(cases, "bf16");
  add_score<e4m3, format::IndexKeyE4m3>(cases, "e4m3");
  for (index_t const rows : {1, 8, 64}) {
    for (index_t const keys : {131072, 1048576}) {
      cases.push_back(
          {"topk", "topk/rows:" + std::to_string(rows) + "/keys:" + in_k(keys),
           [=](DeviceLimits const& limits) { return topk_call(limits, rows, keys, 2048); }});
    }
  }
  add_attend<bf16, format::Plain<bf16>>(cases, "bf16");
  add_attend<bf16, format::LatentE4m3>(cases, "e4m3");
  return cases;
}

/// Takes `--peak_tflops=N` out of the arguments: dense bf16 rate of the tensor cores, for the roof.
double take_peak(int& argc, char** argv) {
  std::string const option = "--peak_tflops=";
  double peak = 0;
  int kept = 0;
  for (int i = 0; i < argc; ++i) {
    std::string const argument = argv[i];
    if (argument.rfind(option, 0) == 0) {
      peak = std::stod(argument.substr(option.size()));
    } else {
      argv[kept++] = argv[i];
    }
  }
  argc = kept;
  return peak;
}

}  // namespace

int main(int argc, char** argv) {
  double const peak = take_peak(argc, argv);
  benchmark::Initialize(&argc, argv);
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    std::fprintf(stderr, "error: no CUDA device\n");
    return 2;
  }
  cudaDeviceProp properties{};
  require(cudaGetDeviceProperties(&properties, 0));
  int driver = 0;
  require(cudaDriverGetVersion(&driver));
  benchmark::AddCustomContext("gpu", properties.name);
  benchmark::AddCustomContext("cuda_driver", std::to_string(driver));
  Device device(peak);
  for (Case const& one : timed_cases()) {
    benchmark::RegisterBenchmark(
        one.name.c_str(), [&device, one](benchmark::State& state) { measure(state, device, one); })
        ->UseManualTime()
        ->Unit(benchmark::kMicrosecond);
  }
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}
