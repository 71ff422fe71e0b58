// SPDX-License-Identifier: Apache-2.0
// The number of pages and their size are swapped.
#include <indexshare/cache.hpp>

using namespace indexshare;

auto keys(float const* data) {
#ifdef CONTROL
  return make_paged_cache<Space::host>(data, Pages{4}, PageSize{64}, HeadDim{128});
#else
  return make_paged_cache<Space::host>(data, PageSize{64}, Pages{4}, HeadDim{128});
#endif
}
