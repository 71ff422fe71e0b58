// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/io/safetensors_format.hpp>

#include <cuda/std/expected>

#include <cstdint>
#include <string>
#include <utility>

namespace indexshare {
inline namespace v0 {
namespace io {

/// Why a checkpoint or a layer of it was refused: where, what was there, what was expected.
struct CheckpointError {
  std::string file;         ///< file or directory; empty: none is at fault
  std::int32_t layer = -1;  ///< -1: not tied to a layer
  std::string tensor;       ///< name in the file; empty: the file as a whole
  std::string got;
  std::string expected;

  /// One line: `FILE: layer 3: tensor TENSOR: got GOT, expected EXPECTED`.
  std::string message() const {
    std::string text;
    if (!file.empty()) text += file + ": ";
    if (layer >= 0) text += "layer " + std::to_string(layer) + ": ";
    if (!tensor.empty()) text += "tensor " + tensor + ": ";
    text += "got " + got + ", expected " + expected;
    for (char& c : text) {  // names come from files
      if (static_cast<unsigned char>(c) < 0x20) c = '?';
    }
    return text;
  }

  friend bool operator==(CheckpointError const&, CheckpointError const&) = default;
};

/// A value or the reason why there is none.
template <class T>
using CheckpointResult = cuda::std::expected<T, CheckpointError>;

namespace detail {

inline cuda::std::unexpected<CheckpointError> refuse(CheckpointError error) {
  return cuda::std::unexpected<CheckpointError>(std::move(error));
}

inline CheckpointError checkpoint_error(SafetensorsError const& error) {
  return {error.file, -1, error.tensor, error.value, error.expected};
}

}  // namespace detail

}  // namespace io
}  // namespace v0
}  // namespace indexshare
