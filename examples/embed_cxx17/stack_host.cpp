// SPDX-License-Identifier: Apache-2.0
#include "stack_on.hpp"

std::unique_ptr<engine::SparseStack> engine::host_stack(SparseStack::Config const& config) {
  return std::make_unique<StackOn<indexshare::HostExec<>>>(indexshare::HostExec<>{}, config);
}
