// SPDX-License-Identifier: Apache-2.0
#include "counted_cases.cuh"

#include <indexshare/cuda/exec.cuh>

#include <cstdio>
#include <exception>
#include <string_view>

/// @file One counted case per process, for an emulator that writes counters at exit.
///   indexshare_cuda_sim list        names, one per line
///   indexshare_cuda_sim run NAME    runs the case once and prints its work as JSON

namespace {

int run(std::string_view name) {
  for (bench::Case const& one : bench::counted_cases()) {
    if (one.name != name) continue;
    auto const limits = indexshare::device_limits(0);
    if (!limits) bench::require(limits.error());
    bench::Call const call = one.prepare(*limits);
    cudaStream_t stream = nullptr;
    bench::require(cudaDeviceSynchronize());
    bench::require(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    bench::require(call.run(indexshare::CudaExec(stream, *limits)));
    bench::require(cudaStreamSynchronize(stream));
    bench::Work const& work = call.work;
    std::printf(
        "{\"stage\": \"%s\", \"case\": \"%s\", \"items\": %.0f, \"bytes\": %.0f, \"flops\": %.0f, "
        "\"gathered_bytes\": %.0f, \"query_bytes\": %.0f, \"slot_bytes\": %.0f, "
        "\"heads_per_block\": %.0f, \"key_bytes\": %.0f, \"rows_per_block\": %.0f}\n",
        one.stage.c_str(), one.name.c_str(), work.items, work.bytes, work.flops,
        work.gathered_bytes, work.query_bytes, work.slot_bytes, work.heads_per_block,
        work.key_bytes, work.rows_per_block);
    return 0;
  }
  std::fprintf(stderr, "no case of this name\n");
  return 2;
}

}  // namespace

int main(int argc, char** argv) {
  std::string_view const mode = argc > 1 ? argv[1] : "";
  try {
    if (mode == "run" && argc == 3) return run(argv[2]);
  } catch (std::exception const& error) {
    std::fprintf(stderr, "error: %s\n", error.what());
    return 2;
  }
  if (mode != "list") {
    std::fprintf(stderr, "usage: indexshare_cuda_sim list | run NAME\n");
    return 2;
  }
  for (bench::Case const& one : bench::counted_cases()) std::printf("%s\n", one.name.c_str());
  return 0;
}
