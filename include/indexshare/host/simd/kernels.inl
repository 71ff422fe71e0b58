// SPDX-License-Identifier: Apache-2.0
// The body that foreach.hpp compiles for each instruction set. Without the attribute on a helper
// too, g++ keeps the vectors that it takes in memory.
#define INDEXSHARE_ISA_INLINE INDEXSHARE_ISA_TARGET __attribute__((always_inline)) inline
#define INDEXSHARE_ISA_KERNEL INDEXSHARE_ISA_TARGET __attribute__((noinline)) inline

namespace INDEXSHARE_ISA {

/// The kernels of one stage: a specialisation for each table of tables.hpp.
template <class Table>
inline constexpr Table table;

#include <indexshare/host/simd/vectors.inl>
#include <indexshare/host/simd/widen.inl>
#include <indexshare/host/simd/panels.inl>
#include <indexshare/host/simd/narrow.inl>
#include <indexshare/host/simd/score.inl>
#include <indexshare/host/simd/int8.inl>
#include <indexshare/host/simd/attention.inl>
#include <indexshare/host/simd/candidates.inl>

}  // namespace INDEXSHARE_ISA

#undef INDEXSHARE_ISA_INLINE
#undef INDEXSHARE_ISA_KERNEL
