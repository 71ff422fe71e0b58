// SPDX-License-Identifier: Apache-2.0
#include "data.hpp"

#include <indexshare/host/isa.hpp>

#include <benchmark/benchmark.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <algorithm>
#include <cstdint>
#include <memory>
#include <numeric>

/// @file What the machine can do at most, with the executor's threads: fused multiply-adds in the
/// executor's instruction set, and streams through memory.

namespace bench {
namespace {

// ---- fused multiply-adds

/// Independent sums: more than any processor has multiply-adds in flight.
constexpr int chains = 12;

// The same function for each instruction set, because a target attribute cannot depend on a
// template parameter and does not reach what is inlined.

/// x = x * factor + term in every chain, `steps` times.
void multiply_add_portable(index_t steps) {
  using V = float __attribute__((vector_size(16)));
  V x[chains];
  V const factor = V{} + 0.5f;
  V const term = V{} + 1.0f;
#pragma GCC unroll 12
  for (int c = 0; c < chains; ++c) x[c] = V{} + static_cast<float>(c);
  for (index_t i = 0; i < steps; ++i) {
#pragma GCC unroll 12
    for (int c = 0; c < chains; ++c) x[c] = x[c] * factor + term;
  }
  V sum{};
  for (int c = 0; c < chains; ++c) sum += x[c];
  benchmark::DoNotOptimize(sum);
}
#if defined(__x86_64__)
__attribute__((target("avx2,fma"))) void multiply_add_avx2(index_t steps) {
  using V = float __attribute__((vector_size(32)));
  V x[chains];
  V const factor = V{} + 0.5f;
  V const term = V{} + 1.0f;
#pragma GCC unroll 12
  for (int c = 0; c < chains; ++c) x[c] = V{} + static_cast<float>(c);
  for (index_t i = 0; i < steps; ++i) {
#pragma GCC unroll 12
    for (int c = 0; c < chains; ++c) x[c] = x[c] * factor + term;
  }
  V sum{};
  for (int c = 0; c < chains; ++c) sum += x[c];
  benchmark::DoNotOptimize(sum);
}
__attribute__((target("avx512f"))) void multiply_add_avx512(index_t steps) {
  using V = float __attribute__((vector_size(64)));
  V x[chains];
  V const factor = V{} + 0.5f;
  V const term = V{} + 1.0f;
#pragma GCC unroll 12
  for (int c = 0; c < chains; ++c) x[c] = V{} + static_cast<float>(c);
  for (index_t i = 0; i < steps; ++i) {
#pragma GCC unroll 12
    for (int c = 0; c < chains; ++c) x[c] = x[c] * factor + term;
  }
  V sum{};
  for (int c = 0; c < chains; ++c) sum += x[c];
  benchmark::DoNotOptimize(sum);
}
/// The same of pairs of bf16: x = x + 2 products.
__attribute__((target("avx512f,avx512bf16"))) void multiply_add_pairs(index_t steps) {
  __m512 x[chains];
  __m512bh const pairs = _mm512_cvtne2ps_pbh(_mm512_set1_ps(0.5f), _mm512_set1_ps(0.5f));
#pragma GCC unroll 12
  for (int c = 0; c < chains; ++c) x[c] = _mm512_set1_ps(static_cast<float>(c));
  for (index_t i = 0; i < steps; ++i) {
#pragma GCC unroll 12
    for (int c = 0; c < chains; ++c) x[c] = _mm512_dpbf16_ps(x[c], pairs, pairs);
  }
  __m512 sum = _mm512_setzero_ps();
  for (int c = 0; c < chains; ++c) sum = _mm512_add_ps(sum, x[c]);
  benchmark::DoNotOptimize(sum);
}
#endif

struct MultiplyAdd {
  void (*run)(index_t steps);
  int lanes;  ///< products of a step and chain
};
MultiplyAdd multiply_add(HostIsa isa) {
#if defined(__x86_64__)
  HostIsa const set = resolved(isa);
  if (set == HostIsa::avx512 || set == HostIsa::avx512_bf16) return {multiply_add_avx512, 16};
  if (set == HostIsa::avx2) return {multiply_add_avx2, 8};
#endif
  return {multiply_add_portable, 4};
}

/// For bf16 times bf16: in pairs where the instruction set has that.
MultiplyAdd multiply_add_bf16(HostIsa isa) {
#if defined(__x86_64__)
  if (resolved(isa) == HostIsa::avx512_bf16) return {multiply_add_pairs, 32};
#endif
  return multiply_add(isa);
}

Call multiply_add_call(Exec const& exec, MultiplyAdd kernel) {
  constexpr index_t steps = 1000000;  // milliseconds: waking a thread takes microseconds
  double const threads = exec.parallel_for.concurrency();
  return {{.flops = 2.0 * threads * chains * kernel.lanes * steps}, [=] {
            exec.parallel_for.pool->on_every_thread([&](int) { kernel.run(steps); });
            return Status{};
          }};
}

// ---- streams

constexpr index_t stream_length = index_t{1}
                                  << 24;  // 128 MiB per array of 8 bytes: no cache holds it

Call read_call(Exec const& exec) {
  auto const data = std::make_shared<Array<std::uint64_t>>(
      stream_length, [](index_t i) { return static_cast<std::uint64_t>(i); });
  return {{.bytes = 8.0 * stream_length}, [=] {
            exec.parallel_for(stream_length, [&](index_t begin, index_t end, int) noexcept {
              auto const sum =
                  std::accumulate(data->data() + begin, data->data() + end, std::uint64_t{0});
              benchmark::DoNotOptimize(sum);
            });
            return Status{};
          }};
}

Call triad_call(Exec const& exec) {
  struct Data {
    Array<double> a, b, c;
  };
  auto const ones = [](index_t) { return 1.0; };
  auto const data = std::make_shared<Data>(
      Data{{stream_length, ones}, {stream_length, ones}, {stream_length, ones}});
  return {{.bytes = 3 * 8.0 * stream_length}, [=] {
            exec.parallel_for(stream_length, [&](index_t begin, index_t end, int) noexcept {
              double const* const b = data->b.data();
              double const* const c = data->c.data();
              double* const a = data->a.data();
              for (index_t i = begin; i < end; ++i) a[i] = b[i] + 3.0 * c[i];
              benchmark::ClobberMemory();
            });
            return Status{};
          }};
}

}  // namespace

std::vector<Case> peak_cases() {
  auto const fma = [](Exec const& exec) { return multiply_add_call(exec, multiply_add(exec.isa)); };
  auto const bf16 = [](Exec const& exec) {
    return multiply_add_call(exec, multiply_add_bf16(exec.isa));
  };
  return {
      {"peak/fma", fma}, {"peak/bf16", bf16}, {"peak/read", read_call}, {"peak/triad", triad_call}};
}

}  // namespace bench
