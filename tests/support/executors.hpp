// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/exec.hpp>
#include <indexshare/host/isa.hpp>

#include <catch2/catch_test_macros.hpp>

#include <algorithm>
#include <atomic>
#include <thread>
#include <tuple>
#include <vector>

#if defined(INDEXSHARE_TEST_CUDA)
#include "cuda_executor.hpp"
#endif

/// @file The executors that every case list runs on.

namespace test {

/// Three threads that take single items as they come: the least regular cut of a range.
struct ThreadFor {
  static constexpr int concurrency() noexcept { return 3; }

  template <class F>
  void operator()(indexshare::index_t count, F const& f) const {
    std::atomic<indexshare::index_t> next{0};
    auto const work = [&](int worker) {
      for (indexshare::index_t i = next++; i < count; i = next++) f(i, i + 1, worker);
    };
    std::vector<std::thread> others;
    for (int worker = 1; worker < concurrency() && worker < count; ++worker) {
      others.emplace_back(work, worker);
    }
    work(0);
    for (std::thread& other : others) other.join();
  }
};

/// Single items from last to first on the calling thread, under the highest worker number.
struct BackwardFor {
  static constexpr int concurrency() noexcept { return 5; }

  template <class F>
  void operator()(indexshare::index_t count, F const& f) const {
    for (indexshare::index_t i = count; i-- > 0;) f(i, i + 1, concurrency() - 1);
  }
};

using Serial = indexshare::HostExec<>;
using Threads = indexshare::HostExec<ThreadFor>;
using Backward = indexshare::HostExec<BackwardFor>;

/// Threads with the kernels of one instruction set. Where the processor lacks it, the test case is
/// skipped.
template <indexshare::HostIsa Isa>
struct On : Threads {
  On() {
    isa = Isa;
    if (!runs_here(isa)) {
      SKIP("this processor lacks instruction set " << static_cast<int>(isa) << " of HostIsa");
    }
  }
};

/// Host executors are done when their calls return.
template <indexshare::HostSpaceExecutor X>
void finish(X const&) {}

#if defined(INDEXSHARE_TEST_CUDA)
/// The case lists are compiled a second time, as CUDA.
using Executors = std::tuple<Cuda>;
using IsaExecutors = Executors;
using AllExecutors = Executors;
inline constexpr auto space = indexshare::Space::device;
#else
/// For TEMPLATE_LIST_TEST_CASE.
using Executors = std::tuple<indexshare::ReferenceExec, Serial, Threads>;
/// For case lists that reach into the kernels of an instruction set.
using IsaExecutors =
    std::tuple<On<indexshare::HostIsa::portable>, On<indexshare::HostIsa::avx2>,
               On<indexshare::HostIsa::avx512>, On<indexshare::HostIsa::avx512_bf16>>;
/// For the cases that show most at once.
using AllExecutors =
    std::tuple<indexshare::ReferenceExec, Serial, Threads, On<indexshare::HostIsa::portable>,
               On<indexshare::HostIsa::avx2>, On<indexshare::HostIsa::avx512>,
               On<indexshare::HostIsa::avx512_bf16>>;
/// Of the memory that Executors work on.
inline constexpr auto space = indexshare::Space::host;
#endif
/// Those that promise the same bits as each other for scores and attention.
using HostExecutors = std::tuple<Serial, Threads, Backward>;

}  // namespace test
