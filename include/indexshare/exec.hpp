// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/dims.hpp>
#include <indexshare/views.hpp>

#include <concepts>
#include <cstdint>

namespace indexshare {
inline namespace v0 {

/// Where and how a call runs; always the first argument. A back end is the set of overloads for
/// its executor (docs/porting.md builds one).
template <class X>
concept Executor = std::copy_constructible<X> && requires {
  { X::space } -> std::convertible_to<Space>;
};

namespace detail {
struct AnyRange {
  void operator()(index_t, index_t, int) const noexcept {}
};
}  // namespace detail

/// The caller's thread pool: `pf(n, f)` calls f(begin, end, worker) over disjoint ranges that
/// cover [0, n) and returns when all are done. Two calls that run at the same time have different
/// workers; a worker is in [0, pf.concurrency()), which is at least 1: the calling thread counts.
/// `f` does not throw.
template <class P>
concept ParallelFor = std::copy_constructible<P> && requires(P const pf, detail::AnyRange f) {
  pf(index_t{}, f);
  { pf.concurrency() }
  noexcept->std::convertible_to<int>;
};

/// Everything on the calling thread.
struct SerialFor {
  static constexpr int concurrency() noexcept { return 1; }
  template <class F>
  constexpr void operator()(index_t count, F const& f) const noexcept {
    if (count > 0) f(index_t{0}, count, 0);
  }
};

/// Instruction sets that the host's kernels are compiled for, whatever flags a translation unit is
/// compiled with. Scores and outputs of two of them differ by rounding; selections of the same
/// scores do not.
enum class HostIsa : std::uint8_t {
  automatic,  ///< the best one that the processor has
  portable,   ///< vectors of 4 floats: SSE2 on x86-64, NEON on AArch64
  avx2,       ///< AVX2 with FMA and F16C
  avx512,     ///< AVX-512 F, BW, DQ and VL, beside AVX2's
  /// AVX512_BF16 beside avx512: queries of bf16 and rows of bf16, of index keys and of latents, are
  /// multiplied in pairs and summed in float; subnormal numbers among them count as zeros
  avx512_bf16,
};

/// Host execution on the caller's threads; serial by default. Results do not depend on the
/// parallel-for or its concurrency. A call refuses an instruction set that the processor lacks.
template <ParallelFor PF = SerialFor>
struct HostExec {
  static constexpr Space space = Space::host;
  PF parallel_for{};
  HostIsa isa = HostIsa::automatic;
};
static_assert(Executor<HostExec<>> && ParallelFor<SerialFor>);

/// Plain loops with double accumulation on the calling thread: the oracle of every back end.
struct ReferenceExec {
  static constexpr Space space = Space::host;
};
static_assert(Executor<ReferenceExec>);

/// An executor whose memory the host reads and writes directly.
template <class X>
concept HostSpaceExecutor = Executor<X> &&(X::space == Space::host);

}  // namespace v0
}  // namespace indexshare
