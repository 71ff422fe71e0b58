// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/host/memory.hpp>
#include <indexshare/selection.hpp>

namespace programs {

/// A selection state of space S together with its memory.
template <indexshare::Space S, class Memory>
class StateIn {
 public:
  StateIn(indexshare::Rows rows, indexshare::TopK top_k)
      : memory_(State::size(rows, top_k)),
        state_(State::make(memory_.view(), rows, top_k).value()) {}
  indexshare::SelectionState<S>& operator*() { return state_; }

  /// The same selection for the host, where the host can read the memory: once the work that fills
  /// it is done.
  indexshare::SelectionState<indexshare::Space::host> on_host() const {
    using HostState = indexshare::SelectionState<indexshare::Space::host>;
    auto state = HostState::make(memory_.view(), indexshare::Rows{state_.rows()},
                                 indexshare::TopK{state_.top_k()})
                     .value();
    state.set_tag(state_.tag());
    return state;
  }

 private:
  using State = indexshare::SelectionState<S>;
  Memory memory_;
  State state_;
};

using OwnedState = StateIn<indexshare::Space::host, indexshare::HostMemory>;

}  // namespace programs
