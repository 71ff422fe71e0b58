// SPDX-License-Identifier: Apache-2.0
// Rows and heads of a query are swapped.
#include <indexshare/views.hpp>

using namespace indexshare;

auto query(float const* data) {
#ifdef CONTROL
  return make_query<Space::host>(data, Rows{4}, Heads{2}, HeadDim{8});
#else
  return make_query<Space::host>(data, Heads{2}, Rows{4}, HeadDim{8});
#endif
}
