// SPDX-License-Identifier: Apache-2.0
// A policy lacks one function for the executor: the message names the function.
#include "mock.hpp"

mock::Status run(mock::Layer const& layer, mock::Layer::inputs<mock::Space::device> const& in,
                 mock::SelectionState<mock::Space::device>& state,
                 mock::Layer::outputs<mock::Space::device> const& out) {
  return layer.run(mock::DeviceExec{}, in, state, out, {});
}
