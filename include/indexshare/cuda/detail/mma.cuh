// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/element.hpp>

#include <cuda/std/type_traits>

#include <cstddef>
#include <cstdint>
#include <utility>

/// @file The instructions that tensor-core kernels are made of, from sm_80 on: asynchronous copies
/// to shared memory, ldmatrix, mma.sync. Fragment layouts are those of the PTX ISA, sections
/// "ldmatrix" and "Matrix Fragments for mma.m16n8k16": in a warp, lane = 4 * group + member.

namespace indexshare {
inline namespace v0 {
namespace detail {

__device__ inline std::uint32_t shared_address(void const* pointer) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(pointer));
}

// ---- asynchronous copies

/// 16 bytes from global to shared memory, past L1; both 16-byte aligned. With `valid` false the
/// source is not read and zeros are written.
__device__ inline void copy_async_16(std::uint32_t target, void const* source, bool valid = true) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(target),
               "l"(__cvta_generic_to_global(source)), "r"(valid ? 16 : 0)
               : "memory");
}
/// The same of 4 or 8 bytes, through L1.
template <int Bytes>
__device__ inline void copy_async_small(std::uint32_t target, void const* source,
                                        bool valid = true) {
  static_assert(Bytes == 4 || Bytes == 8);
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(target),
               "l"(__cvta_generic_to_global(source)), "n"(Bytes), "r"(valid ? Bytes : 0)
               : "memory");
}
/// 16 bytes, past L1, of which the first `bytes` (0 or 16) come from a global address; the others
/// are zeros. The offsets cost no additions.
template <int TargetOffset, int SourceOffset>
__device__ inline void copy_async_16_at(std::uint32_t target, std::size_t source, unsigned bytes) {
  asm volatile("cp.async.cg.shared.global [%0 + %1], [%2 + %3], 16, %4;" ::"r"(target),
               "n"(TargetOffset), "l"(source), "n"(SourceOffset), "r"(bytes)
               : "memory");
}
__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
/// Waits until at most `Pending` of this thread's latest groups are under way.
template <int Pending>
__device__ inline void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(Pending) : "memory");
}

// ---- fragments

/// Four 8x8 matrices of 16-bit elements at `address + Offset`, which costs no addition; lane i
/// gives the address of row i % 8 of matrix i / 8.
template <int Offset>
__device__ inline void load_matrices_at(std::uint32_t (&out)[4], std::uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4 + %5];"
               : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
               : "r"(address), "n"(Offset)
               : "memory");
}
__device__ inline void load_matrices(std::uint32_t (&out)[4], std::uint32_t address) {
  load_matrices_at<0>(out, address);
}
/// The same, each matrix transposed.
template <int Offset>
__device__ inline void load_matrices_transposed_at(std::uint32_t (&out)[4], std::uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4 + %5];"
               : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
               : "r"(address), "n"(Offset)
               : "memory");
}

/// c += a * b, 16x8x16 in bf16 or fp16, accumulated in fp32. c[0], c[1]: row `group`, columns
/// 2 * member and the next; c[2], c[3]: row group + 8.
template <class T>
__device__ inline void multiply_add(float (&c)[4], std::uint32_t const (&a)[4], std::uint32_t b0,
                                    std::uint32_t b1);
template <>
__device__ inline void multiply_add<bf16>(float (&c)[4], std::uint32_t const (&a)[4],
                                          std::uint32_t b0, std::uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <>
__device__ inline void multiply_add<fp16>(float (&c)[4], std::uint32_t const (&a)[4],
                                          std::uint32_t b0, std::uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 890
/// The same, 16x8x32 in e4m3: sm_89 and later.
template <>
__device__ inline void multiply_add<e4m3>(float (&c)[4], std::uint32_t const (&a)[4],
                                          std::uint32_t b0, std::uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
#endif

/// c = a * b, the first step of a sum: nothing has to be cleared before it.
template <class T>
__device__ inline void multiply(float (&c)[4], std::uint32_t const (&a)[4], std::uint32_t b0,
                                std::uint32_t b1);
template <>
__device__ inline void multiply<bf16>(float (&c)[4], std::uint32_t const (&a)[4], std::uint32_t b0,
                                      std::uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %10, %10, %10};"
      : "=f"(c[0]), "=f"(c[1]), "=f"(c[2]), "=f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(0.0f));
}
template <>
__device__ inline void multiply<fp16>(float (&c)[4], std::uint32_t const (&a)[4], std::uint32_t b0,
                                      std::uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %10, %10, %10};"
      : "=f"(c[0]), "=f"(c[1]), "=f"(c[2]), "=f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(0.0f));
}
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 890
template <>
__device__ inline void multiply<e4m3>(float (&c)[4], std::uint32_t const (&a)[4], std::uint32_t b0,
                                      std::uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %10, %10, %10};"
      : "=f"(c[0]), "=f"(c[1]), "=f"(c[2]), "=f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(0.0f));
}
#endif

// ---- loops over constants

/// f of cuda::std::integral_constant<int, 0>, ..., <int, N - 1>: a loop whose counter may be an
/// immediate operand.
template <int N, class F>
__device__ __forceinline__ void for_constants(F const& f) {
  [&]<int... I>(std::integer_sequence<int, I...>) {
    (f(cuda::std::integral_constant<int, I>{}), ...);
  }
  (std::make_integer_sequence<int, N>{});
}

// ---- arithmetic that must not lose a NaN

/// max(0, x) that keeps NaN, as the indexer's ReLU must.
__device__ inline float relu(float x) {
  float y;
  asm("max.NaN.f32 %0, %1, 0f00000000;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace detail
}  // namespace v0
}  // namespace indexshare
