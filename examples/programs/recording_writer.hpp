// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/io/safetensors_writer.hpp>

#include <cstdint>
#include <ranges>
#include <string>
#include <utility>

#include "recording_quantities.hpp"

namespace programs {

/// Collects a recording and writes it. The names are the format's: `positions`, `requests`, `rows`
/// and the quantities of layers; `Recording` checks what was written when it reads it.
class RecordingWriter : public indexshare::io::SafetensorsWriter {
 public:
  RecordingWriter() { metadata("format", std::string(recording_format)); }

  using SafetensorsWriter::add;

  /// A quantity of a layer, row-major. Copies its elements.
  /// @param elements  contiguous: std::int32_t for `selection`, else float, double, bf16 or fp16
  template <std::ranges::contiguous_range Elements>
  void add(std::int32_t layer, Quantity id, Shape shape, Elements const& elements) {
    add(tensor_name(layer, id), std::move(shape), elements);
  }
};

}  // namespace programs
