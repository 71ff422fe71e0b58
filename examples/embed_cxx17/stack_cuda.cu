// SPDX-License-Identifier: Apache-2.0
#include "stack_on.hpp"

#include <indexshare/indexshare.cuh>

std::unique_ptr<engine::SparseStack> engine::cuda_stack(SparseStack::Config const& config,
                                                        void* stream) {
  auto const limits = indexshare::device_limits(0);
  if (!limits || stream == nullptr) return nullptr;
  indexshare::CudaExec const exec{static_cast<cudaStream_t>(stream), *limits};
  return std::make_unique<StackOn<indexshare::CudaExec>>(exec, config);
}
