// SPDX-License-Identifier: Apache-2.0
// One host view among device views: the output.
#include "mock.hpp"

using namespace indexshare;

#ifdef CONTROL
constexpr auto memory = Space::device;
#else
constexpr auto memory = Space::host;
#endif

mock::Layer::outputs<Space::device> output(float* data) {
  return {make_output<memory>(data, Rows{4}, Heads{2}, HeadDim{8})};
}
