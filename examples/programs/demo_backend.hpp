// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "demo_run.hpp"
#include "host_machine.hpp"

#include <functional>
#include <string>

/// @file The back ends of the demo, each behind one function; that of CUDA is compiled by a CUDA
/// compiler, in demo_cuda.cu.

namespace programs {

struct DemoBackend {
  using Run = std::function<DemoResult(indexshare::ModelConfig const&, indexshare::SharePlan const&,
                                       DemoSettings const&, DemoProgress)>;

  std::string where;    ///< for the report's first line
  bool timed = true;    ///< whether the milliseconds of its meters mean anything
  Run run{};            ///< throws std::runtime_error when a call fails
  std::string refusal;  ///< why this back end cannot run here; empty: it can
};

template <class Machine>
auto run_on(Machine machine) {
  return [machine](indexshare::ModelConfig const& model, indexshare::SharePlan const& plan,
                   DemoSettings const& settings, DemoProgress progress) {
    return Demo<Machine>(model, plan, settings, machine, std::move(progress)).run();
  };
}

inline DemoBackend host_backend(ThreadPool& pool) {
  return {std::to_string(pool.size()) + " threads", true, run_on(HostMachine{&pool}), ""};
}

#if defined(INDEXSHARE_WITH_CUDA)
/// @param pool  for the checks on the host
DemoBackend cuda_backend(ThreadPool& pool);
#else
inline DemoBackend cuda_backend(ThreadPool&) {
  DemoBackend none;
  none.refusal =
      "this program was built without the CUDA back end; build it where there is a CUDA toolkit 13 "
      "or later (nvcc on PATH or CUDACXX set)";
  return none;
}
#endif

}  // namespace programs
