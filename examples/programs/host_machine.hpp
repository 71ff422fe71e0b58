// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "thread_pool.hpp"

#include <indexshare/exec.hpp>
#include <indexshare/host/memory.hpp>

#include <vector>

namespace programs {

/// A machine says where the demo's layers run and where their data lie:
///   Exec, space  the back end's executor and its space
///   Memory       aligned memory, like HostMemory; for states and scratch
///   Vector<T>    an array that the program and the back end read and write
///   exec()       to run layers with
///   host()       to run the host back end with, on the same data
///   finish()     returns when everything enqueued so far is done
///   output_tolerance  how far an output may be off, relative to the largest of its row and head
/// This is the one of the host back end.
struct HostMachine {
  using Exec = indexshare::HostExec<PoolFor>;
  static constexpr indexshare::Space space = indexshare::Space::host;
  using Memory = indexshare::HostMemory;
  template <class T>
  using Vector = std::vector<T>;
  static constexpr double output_tolerance = 5e-5;  // sums in fp32

  ThreadPool* pool;

  Exec exec() const { return {{pool}}; }
  Exec host() const { return exec(); }
  void finish() const {}
};

}  // namespace programs
