// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "../programs/thread_pool.hpp"
#include "indexshare_backend.hpp"

#include <functional>
#include <memory>
#include <string>

/// @file Where the engine can run: the host, and CUDA if the program was built with it.

namespace mini {

struct Platform {
  using MakeBackend =
      std::function<std::unique_ptr<MeteredBackend>(Sizes const&, AttentionPlan const&, Device&)>;

  std::string where{};
  std::string refusal{};  ///< why it cannot run here; empty: it can
  std::unique_ptr<Device> device{};
  MakeBackend backend{};
};

template <class Caches, class Place>
Platform::MakeBackend backend_on(Place const& place) {
  return [place](Sizes const& sizes, AttentionPlan const& plan, Device& device) {
    return std::make_unique<IndexShareBackend<Place, Caches>>(place, sizes, plan, device);
  };
}

struct HostPlace {
  static constexpr Space space = Space::host;
  programs::ThreadPool* pool;

  indexshare::HostExec<programs::PoolFor> exec(void* /*stream*/) const { return {{pool}}; }
};

inline Platform host_platform(programs::ThreadPool& pool) {
  return {"the host, " + std::to_string(pool.size()) + " threads", "", std::make_unique<Device>(),
          backend_on<Bf16Caches>(HostPlace{&pool})};
}

#if defined(INDEXSHARE_WITH_CUDA)
Platform cuda_platform();
#else
inline Platform cuda_platform() {
  Platform none;
  none.refusal = "this program was built without the CUDA back end";
  return none;
}
#endif

}  // namespace mini
