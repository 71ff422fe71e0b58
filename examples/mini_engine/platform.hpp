// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "../programs/thread_pool.hpp"
#include "alone_backend.hpp"
#include "indexshare_backend.hpp"

#include <functional>
#include <memory>
#include <string>

/// @file Where the engine can run: the host, and CUDA if the program was built with it.

namespace mini {

/// How the rows of the caches lie.
enum class CacheFormat { bf16, e4m3 };

/// A place to run at, and what makes the backends there. They need the device to live on.
struct Platform {
  template <class Backend>
  using Make = std::function<std::unique_ptr<Backend>(Sizes const&, AttentionPlan const&, Device&)>;

  std::string where{};
  std::string refusal{};  ///< why it cannot run here; empty: it can
  std::unique_ptr<Device> device{};
  Make<MeteredBackend> make_backend{};
  Make<AttentionBackend> make_alone{};
};

template <class Caches, class Place>
void set_backends(Platform& platform, Place const& place) {
  platform.make_backend = [place](auto const& sizes, auto const& plan, Device& device) {
    return std::make_unique<IndexShareBackend<Place, Caches>>(place, sizes, plan, device);
  };
  platform.make_alone = [place](auto const& sizes, auto const& plan, Device& device) {
    return std::make_unique<AloneBackend<Place, Caches>>(place, sizes, plan, device);
  };
}

template <class Place>
Platform platform_on(Place const& place, std::string where, std::unique_ptr<Device> device,
                     CacheFormat format) {
  Platform platform{std::move(where), "", std::move(device), {}, {}};
  if (format == CacheFormat::bf16) {
    set_backends<Bf16Caches>(platform, place);
  } else {
    set_backends<E4m3Caches>(platform, place);
  }
  return platform;
}

struct HostPlace {
  static constexpr Space space = Space::host;
  programs::ThreadPool* pool;

  indexshare::HostExec<programs::PoolFor> exec(void* /*stream*/) const { return {{pool}}; }
};

inline Platform host_platform(programs::ThreadPool& pool, CacheFormat format) {
  return platform_on(HostPlace{&pool}, "the host, " + std::to_string(pool.size()) + " threads",
                     std::make_unique<Device>(), format);
}

#if defined(INDEXSHARE_WITH_CUDA)
Platform cuda_platform(CacheFormat format);
#else
inline Platform cuda_platform(CacheFormat) {
  Platform none;
  none.refusal =
      "this program was built without the CUDA back end; build it where there is a CUDA toolkit 13 "
      "or later (nvcc on PATH or CUDACXX set)";
  return none;
}
#endif

}  // namespace mini
