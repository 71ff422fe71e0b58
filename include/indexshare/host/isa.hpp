// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/exec.hpp>
#include <indexshare/status.hpp>

namespace indexshare {
inline namespace v0 {

/// Whether kernels of this instruction set exist in this build and the processor runs them.
inline bool runs_here(HostIsa isa) noexcept {
  switch (isa) {
#if defined(__x86_64__)
    case HostIsa::avx512_bf16:
      return runs_here(HostIsa::avx512) && __builtin_cpu_supports("avx512bf16");
    case HostIsa::avx512:
      return runs_here(HostIsa::avx2) && __builtin_cpu_supports("avx512f") &&
             __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
             __builtin_cpu_supports("avx512vl");
    case HostIsa::avx2:  // clang 14 has no name for F16C; what has AVX2 has it
      return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
             __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2");
#else
    case HostIsa::avx512_bf16:
    case HostIsa::avx512:
    case HostIsa::avx2:
      return false;
#endif
    case HostIsa::automatic:
    case HostIsa::portable:
      return true;
  }
  return false;
}

/// The instruction set that `automatic` stands for on this processor, else the one given.
inline HostIsa resolved(HostIsa isa) noexcept {
  if (isa != HostIsa::automatic) return isa;
  if (runs_here(HostIsa::avx512_bf16)) return HostIsa::avx512_bf16;
  if (runs_here(HostIsa::avx512)) return HostIsa::avx512;
  return runs_here(HostIsa::avx2) ? HostIsa::avx2 : HostIsa::portable;
}

namespace detail {

/// For every size query and check of the host's policies. Errors: unsupported, bad_value.
template <class PF>
Status check_executor(HostExec<PF> const& x) noexcept {
  if (!runs_here(x.isa)) {
    return failure(Errc::unsupported,
                   "instruction set of the host executor: this processor lacks it");
  }
  int const workers = x.parallel_for.concurrency();
  return workers >= 1 ? Status{}
                      : failure(Errc::bad_value, "concurrency of the parallel-for", 1, workers);
}

}  // namespace detail
}  // namespace v0
}  // namespace indexshare
