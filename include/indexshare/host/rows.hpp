// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/dims.hpp>
#include <indexshare/exec.hpp>

#include <type_traits>

/// @file Work row by row on any executor of host memory.

namespace indexshare {
inline namespace v0 {
namespace detail {

/// Workers of an executor: numbers below this come to `for_each_row`'s function.
template <HostSpaceExecutor X>
index_t workers_of(X const& x) noexcept {
  if constexpr (requires { x.parallel_for; }) {
    return x.parallel_for.concurrency();
  } else {
    return 1;
  }
}

/// f(row) or f(row, worker) for each row, in no order.
template <HostSpaceExecutor X, class F>
void for_each_row(X const& x, index_t rows, F const& f) noexcept {
  auto const some = [&](index_t begin, index_t end, [[maybe_unused]] int worker) noexcept {
    for (index_t row = begin; row < end; ++row) {
      if constexpr (std::is_invocable_v<F const&, index_t, int>) {
        f(row, worker);
      } else {
        f(row);
      }
    }
  };
  if constexpr (requires { x.parallel_for; }) {
    x.parallel_for(rows, some);
  } else {
    some(0, rows, 0);
  }
}

}  // namespace detail
}  // namespace v0
}  // namespace indexshare
