// SPDX-License-Identifier: Apache-2.0
// Host views are handed to a device executor.
#include "mock.hpp"

#ifdef CONTROL
using Inputs = mock::Layer::inputs<mock::Space::device>;
#else
using Inputs = mock::Layer::inputs<mock::Space::host>;
#endif

mock::Status run(mock::Layer const& layer, Inputs const& in,
                 mock::SelectionState<mock::Space::device>& state,
                 mock::Layer::outputs<mock::Space::device> const& out) {
  return layer.run(mock::DeviceExec{}, in, state, out, {});
}
