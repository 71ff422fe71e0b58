// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/selection.hpp>
#include <indexshare/workspace.hpp>

#include <cstddef>
#include <cstdlib>
#include <memory>
#include <new>

namespace programs {

/// Scratch memory as the library wants it: aligned, owned by the program.
class Scratch {
 public:
  explicit Scratch(indexshare::WorkspaceSize size) : bytes_(size.bytes) {
    data_.reset(std::aligned_alloc(indexshare::workspace_alignment,
                                   indexshare::align_up(bytes_ + 1)));
    if (!data_) throw std::bad_alloc();
  }
  indexshare::Workspace view() const { return {data_.get(), bytes_}; }

 private:
  struct Free {
    void operator()(void* p) const { std::free(p); }
  };
  std::size_t bytes_;
  std::unique_ptr<void, Free> data_;
};

/// A selection state together with its memory.
class OwnedState {
 public:
  OwnedState(indexshare::Rows rows, indexshare::TopK top_k)
      : memory_(State::size(rows, top_k)),
        state_(State::make(memory_.view(), rows, top_k).value()) {}
  indexshare::SelectionState<indexshare::Space::host>& operator*() { return state_; }

 private:
  using State = indexshare::SelectionState<indexshare::Space::host>;
  Scratch memory_;
  State state_;
};

}  // namespace programs
