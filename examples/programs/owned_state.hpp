// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/host/memory.hpp>
#include <indexshare/selection.hpp>

namespace programs {

/// A selection state together with its memory.
class OwnedState {
 public:
  OwnedState(indexshare::Rows rows, indexshare::TopK top_k)
      : memory_(State::size(rows, top_k)),
        state_(State::make(memory_.view(), rows, top_k).value()) {}
  indexshare::SelectionState<indexshare::Space::host>& operator*() { return state_; }

 private:
  using State = indexshare::SelectionState<indexshare::Space::host>;
  indexshare::HostMemory memory_;
  State state_;
};

}  // namespace programs
