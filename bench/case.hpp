// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "thread_pool.hpp"

#include <indexshare/exec.hpp>
#include <indexshare/status.hpp>

#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

/// @file What is timed on the host: a call with its data, its work, and a look at what it wrote.

namespace bench {

using namespace indexshare;

using Exec = HostExec<programs::PoolFor>;

/// What a call has to do at least.
struct Work {
  double flops = 0;  ///< of the products, two per multiply-add
  double bytes = 0;  ///< of memory traffic, where that is what limits it
};

/// A prepared call that can be repeated; its data live as long as it does.
struct Call {
  Work work;
  std::function<Status()> run;
  std::function<void()> check = [] {};  ///< after `run`; throws where the results are wrong
};

/// A name, and what makes its data when it is about to run.
struct Case {
  std::string name;
  std::function<Call(Exec const&)> prepare;
};

// One per file. Names say stage, type or order, decode or prefill, and the extents.
std::vector<Case> peak_cases();
std::vector<Case> score_cases();
std::vector<Case> topk_cases();
std::vector<Case> attention_cases();
std::vector<Case> layer_cases();
std::vector<Case> overlap_cases();

inline void require(bool right, char const* what) {
  if (!right) throw std::runtime_error(std::string("wrong result: ") + what);
}
inline void require(Status const& status) {
  if (!status.ok()) throw std::runtime_error(status.what);
}

/// The value of a size query.
template <class T>
T required(Result<T> const& result) {
  if (!result) require(result.error());
  return *result;
}

/// `512`, `64K`, `1M`.
inline std::string short_number(index_t n) {
  constexpr index_t kilo = 1024;
  if (n % (kilo * kilo) == 0) return std::to_string(n / (kilo * kilo)) + "M";
  return n % kilo == 0 ? std::to_string(n / kilo) + "K" : std::to_string(n);
}

}  // namespace bench
