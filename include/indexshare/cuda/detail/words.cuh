// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/element.hpp>

#include <cstdint>
#include <type_traits>

/// @file Words: pairs of 16-bit values, and shared memory by 32-bit addresses, with the distance in
/// the instruction.

namespace indexshare {
inline namespace v0 {
namespace detail {

__device__ inline float minus_infinity() { return __int_as_float(0xFF800000); }

template <class T>
__device__ inline std::uint32_t pack_pair(float low, float high) {
  std::uint32_t packed;
  if constexpr (std::is_same_v<T, bf16>) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  }
  return packed;
}

template <int Ahead = 0>
__device__ inline float load_float(std::uint32_t address) {
  float x;
  asm volatile("ld.shared.f32 %0, [%1 + %2];" : "=f"(x) : "r"(address), "n"(Ahead) : "memory");
  return x;
}
template <int Ahead = 0>
__device__ inline float2 load_float2(std::uint32_t address) {
  float2 x;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2 + %3];"
               : "=f"(x.x), "=f"(x.y)
               : "r"(address), "n"(Ahead)
               : "memory");
  return x;
}
template <int Ahead = 0>
__device__ inline float4 load_float4(std::uint32_t address) {
  float4 x;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4 + %5];"
               : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
               : "r"(address), "n"(Ahead)
               : "memory");
  return x;
}
template <int Ahead>
__device__ inline void load_floats(std::uint32_t address, float (&x)[1]) {
  x[0] = load_float<Ahead>(address);
}
template <int Ahead>
__device__ inline void load_floats(std::uint32_t address, float (&x)[2]) {
  float2 const pair = load_float2<Ahead>(address);
  x[0] = pair.x;
  x[1] = pair.y;
}
template <int Ahead = 0>
__device__ inline std::uint32_t load_word(std::uint32_t address) {
  std::uint32_t x;
  asm volatile("ld.shared.b32 %0, [%1 + %2];" : "=r"(x) : "r"(address), "n"(Ahead) : "memory");
  return x;
}
template <int Ahead = 0>
__device__ inline uint2 load_words2(std::uint32_t address) {
  uint2 x;
  asm volatile("ld.shared.v2.b32 {%0, %1}, [%2 + %3];"
               : "=r"(x.x), "=r"(x.y)
               : "r"(address), "n"(Ahead)
               : "memory");
  return x;
}
template <int Ahead = 0>
__device__ inline uint4 load_words4(std::uint32_t address) {
  uint4 x;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4 + %5];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "r"(address), "n"(Ahead)
               : "memory");
  return x;
}
template <int Ahead = 0>
__device__ inline void store_float(std::uint32_t address, float x) {
  asm volatile("st.shared.f32 [%0 + %1], %2;" ::"r"(address), "n"(Ahead), "f"(x) : "memory");
}
__device__ inline void store_word(std::uint32_t address, std::uint32_t x) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(x) : "memory");
}
template <int Ahead = 0>
__device__ inline void store_float2(std::uint32_t address, float x, float y) {
  asm volatile("st.shared.v2.f32 [%0 + %1], {%2, %3};" ::"r"(address), "n"(Ahead), "f"(x), "f"(y)
               : "memory");
}
template <int Ahead = 0>
__device__ inline void store_words2(std::uint32_t address, std::uint32_t x, std::uint32_t y) {
  asm volatile("st.shared.v2.b32 [%0 + %1], {%2, %3};" ::"r"(address), "n"(Ahead), "r"(x), "r"(y)
               : "memory");
}
template <int Ahead = 0>
__device__ inline void store_words4(std::uint32_t address, uint4 x) {
  asm volatile("st.shared.v4.b32 [%0 + %1], {%2, %3, %4, %5};" ::"r"(address), "n"(Ahead), "r"(x.x),
               "r"(x.y), "r"(x.z), "r"(x.w)
               : "memory");
}
template <int Ahead = 0>
__device__ inline void store_half(std::uint32_t address, std::uint32_t x) {
  asm volatile("st.shared.b16 [%0 + %1], %2;" ::"r"(address), "n"(Ahead),
               "h"(static_cast<std::uint16_t>(x))
               : "memory");
}

}  // namespace detail
}  // namespace v0
}  // namespace indexshare
