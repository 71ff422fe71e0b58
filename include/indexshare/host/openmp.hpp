// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/exec.hpp>

#include <omp.h>

#include <algorithm>

namespace indexshare {
inline namespace v0 {

/// ParallelFor on OpenMP's threads; needs -fopenmp. Ranges are contiguous, one per thread, cut
/// finer than the threads so that uneven tasks spread.
struct OpenMpFor {
  int threads = omp_get_max_threads();

  int concurrency() const noexcept { return std::max(threads, 1); }

  template <class F>
  void operator()(index_t count, F const& f) const noexcept {
    index_t const pieces = std::min<index_t>(count, index_t{concurrency()} * 8);
#pragma omp parallel for schedule(dynamic) num_threads(concurrency())
    for (index_t piece = 0; piece < pieces; ++piece) {
      f(count * piece / pieces, count * (piece + 1) / pieces, omp_get_thread_num());
    }
  }
};
static_assert(ParallelFor<OpenMpFor>);

}  // namespace v0
}  // namespace indexshare
