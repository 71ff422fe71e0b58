// SPDX-License-Identifier: Apache-2.0
#include <indexshare/exec.hpp>

#include <catch2/catch_test_macros.hpp>

#include <atomic>
#include <cstddef>
#include <vector>

#include "thread_pool.hpp"

#if defined(_OPENMP)
#include <indexshare/host/openmp.hpp>
#endif

namespace {

/// Every index once, workers in range, and no worker in two ranges at a time.
template <class PF>
void check_contract(PF const& pf) {
  for (indexshare::index_t const count : {0, 1, 2, 7, 64, 1000}) {
    std::vector<std::atomic<int>> seen(static_cast<std::size_t>(count));
    std::vector<std::atomic<int>> busy(static_cast<std::size_t>(pf.concurrency()));
    std::atomic<int> wrong{0};
    pf(count, [&](indexshare::index_t begin, indexshare::index_t end, int worker) noexcept {
      if (worker < 0 || worker >= pf.concurrency() || begin >= end) {
        ++wrong;
        return;
      }
      if (busy[static_cast<std::size_t>(worker)]++ != 0) ++wrong;
      for (indexshare::index_t i = begin; i < end; ++i) ++seen[static_cast<std::size_t>(i)];
      --busy[static_cast<std::size_t>(worker)];
    });
    INFO(count);
    CHECK(wrong == 0);
    for (auto const& times : seen) CHECK(times == 1);
  }
}

}  // namespace

TEST_CASE("ParallelFor: serial and the programs' pool keep the contract") {
  check_contract(indexshare::SerialFor{});
  for (int const threads : {1, 2, 5}) {
    programs::ThreadPool pool(threads);
    check_contract(programs::PoolFor{&pool});
  }
}

TEST_CASE("ParallelFor: OpenMP keeps the contract") {
#if defined(_OPENMP)
  for (int const threads : {1, 2, 5}) check_contract(indexshare::OpenMpFor{threads});
#else
  SKIP("this compiler has no OpenMP");
#endif
}
