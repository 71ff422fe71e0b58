// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/element.hpp>
#include <indexshare/exec.hpp>
#include <indexshare/host/isa.hpp>
#include <indexshare/host/simd/tables.hpp>

#include <cstdint>
#include <type_traits>
#include <utility>

/// @file The host's kernels, compiled once per instruction set: kernels.inl is included for each,
/// in a namespace of its own, with
///   INDEXSHARE_ISA            that namespace
///   INDEXSHARE_ISA_LANES      floats per vector
///   INDEXSHARE_ISA_REGISTERS  vector registers
///   INDEXSHARE_ISA_TARGET     attribute that every function of the body carries
/// so a consumer needs no flags. Kernels are reached through tables of function pointers, one per
/// stage, which take only pointers and numbers.

// Two translation units with different flags compile one kernel to different code. The namespaces
// below tell their symbols apart, so that a linker cannot replace the one by the other.
#if defined(__AVX512F__)
#define INDEXSHARE_ISA_FLAGS built_with_avx512
#elif defined(__AVX2__)
#define INDEXSHARE_ISA_FLAGS built_with_avx2
#elif defined(__AVX__)
#define INDEXSHARE_ISA_FLAGS built_with_avx
#else
#define INDEXSHARE_ISA_FLAGS built_with_baseline
#endif
#if defined(__FAST_MATH__)
#define INDEXSHARE_ISA_MATH fast_math
#else
#define INDEXSHARE_ISA_MATH ieee_math
#endif

#if defined(__CUDACC__)
#pragma nv_diagnostic push
#pragma nv_diag_suppress 1675  // its front end hands '#pragma GCC unroll' on, and warns
#endif

namespace indexshare {
inline namespace v0 {
namespace detail {
inline namespace INDEXSHARE_ISA_FLAGS {
inline namespace INDEXSHARE_ISA_MATH {

#define INDEXSHARE_ISA portable
#define INDEXSHARE_ISA_LANES 4
#if defined(__aarch64__)
#define INDEXSHARE_ISA_REGISTERS 32
#else
#define INDEXSHARE_ISA_REGISTERS 16
#endif
#define INDEXSHARE_ISA_TARGET
#include <indexshare/host/simd/kernels.inl>
#undef INDEXSHARE_ISA
#undef INDEXSHARE_ISA_LANES
#undef INDEXSHARE_ISA_REGISTERS
#undef INDEXSHARE_ISA_TARGET

#if defined(__x86_64__)
#define INDEXSHARE_ISA avx2
#define INDEXSHARE_ISA_LANES 8
#define INDEXSHARE_ISA_REGISTERS 16
#define INDEXSHARE_ISA_TARGET __attribute__((target("avx2,fma,f16c,bmi,bmi2")))
#include <indexshare/host/simd/kernels.inl>
#undef INDEXSHARE_ISA
#undef INDEXSHARE_ISA_LANES
#undef INDEXSHARE_ISA_REGISTERS
#undef INDEXSHARE_ISA_TARGET

#define INDEXSHARE_ISA avx512
#define INDEXSHARE_ISA_LANES 16
#define INDEXSHARE_ISA_REGISTERS 32
#define INDEXSHARE_ISA_TARGET \
  __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,bmi,bmi2")))
#include <indexshare/host/simd/kernels.inl>
#undef INDEXSHARE_ISA
#undef INDEXSHARE_ISA_LANES
#undef INDEXSHARE_ISA_REGISTERS
#undef INDEXSHARE_ISA_TARGET

#define INDEXSHARE_ISA_TARGET \
  __attribute__((target("avx512bf16,avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,bmi,bmi2")))
#include <indexshare/host/simd/bf16_pairs.inl>
#undef INDEXSHARE_ISA_TARGET
#endif

/// A stage's table (tables.hpp) for an instruction set that runs here.
template <class Table>
Table const& kernels(HostIsa isa) noexcept {
#if defined(__x86_64__)
  switch (resolved(isa)) {
    case HostIsa::avx512_bf16:
    case HostIsa::avx512:
      return avx512::table<Table>;
    case HostIsa::avx2:
      return avx2::table<Table>;
    default:
      break;
  }
#else
  static_cast<void>(isa);
#endif
  return portable::table<Table>;
}

/// Kernels for pairs of bf16, or null where the instruction set has none.
inline PairKernels const* pair_kernels(HostIsa isa) noexcept {
#if defined(__x86_64__)
  if (resolved(isa) == HostIsa::avx512_bf16) return &avx512_bf16::pair_table;
#else
  static_cast<void>(isa);
#endif
  return nullptr;
}

}  // namespace INDEXSHARE_ISA_MATH
}  // namespace INDEXSHARE_ISA_FLAGS
}  // namespace detail
}  // namespace v0
}  // namespace indexshare

#if defined(__CUDACC__)
#pragma nv_diagnostic pop
#endif
#undef INDEXSHARE_ISA_FLAGS
#undef INDEXSHARE_ISA_MATH
