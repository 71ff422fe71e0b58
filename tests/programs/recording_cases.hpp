// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/dims.hpp>

#include <catch2/catch_test_macros.hpp>

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "random.hpp"
#include "recording.hpp"

/// @file A small recording with every quantity, to be changed in one place by a test.

namespace test {

using Extents = std::vector<indexshare::index_t>;

template <class T>
struct Values {
  Extents shape;
  std::vector<T> data;
};

/// A recording that is not yet written.
struct Sample {
  std::map<std::string, std::string> metadata;
  std::map<std::string, Values<float>> floats;
  std::map<std::string, Values<std::int32_t>> ints;

  programs::RecordingWriter writer() const {
    programs::RecordingWriter writer;
    for (auto const& [key, value] : metadata) writer.metadata(key, value);
    for (auto const& [name, values] : floats) writer.add(name, values.shape, values.data);
    for (auto const& [name, values] : ints) writer.add(name, values.shape, values.data);
    return writer;
  }
  programs::Recording recording(std::string const& name = "file") const {
    auto opened = programs::Recording::parse(name, writer().bytes().value());
    INFO((opened ? "" : opened.error().message()));
    REQUIRE(opened.has_value());
    return std::move(*opened);
  }
  std::vector<float>& at(std::string const& name) { return floats.at(name).data; }
};

/// Extents of a sample by name.
inline indexshare::index_t sample_extent(programs::Extent extent) {
  using programs::Extent;
  static std::map<Extent, indexshare::index_t> const extents{
      {Extent::tokens, 6},      {Extent::rows, 3},      {Extent::hidden_size, 5},
      {Extent::q_rank, 3},      {Extent::heads, 2},     {Extent::query_dim, 6},
      {Extent::rope_dim, 4},    {Extent::kv_row, 7},    {Extent::kv_rank, 3},
      {Extent::index_heads, 2}, {Extent::index_dim, 8}, {Extent::keys, 4},
      {Extent::selected, 2},    {Extent::value_dim, 3}};
  return extents.at(extent);
}

/// Tokens 0..3 are request 0 at rotary positions 10..13, tokens 4 and 5 are request 7. Rows are the
/// tokens 1, 3 and 5: they see 2, 4 and 2 keys. Layer 3 is full, layer 4 shared.
inline Sample sample() {
  using programs::Quantity;
  Sample made;
  Random random(7);
  made.ints["positions"] = {{6}, {10, 11, 12, 13, 0, 1}};
  made.ints["requests"] = {{6}, {0, 0, 0, 0, 7, 7}};
  made.ints["rows"] = {{3}, {1, 3, 5}};
  for (std::int32_t const layer : {3, 4}) {
    for (programs::QuantitySpec const& spec : programs::quantities) {
      if (spec.id == Quantity::selection || (layer == 4 && belongs_to_indexer(spec.id))) continue;
      Extents shape;
      std::size_t count = 1;
      for (std::size_t i = 0; i < spec.rank(); ++i) {
        shape.push_back(sample_extent(spec.extents[i]));
        count *= static_cast<std::size_t>(shape.back());
      }
      made.floats[tensor_name(layer, spec.id)] = {shape, random.normals(count)};
    }
    made.ints[tensor_name(layer, Quantity::selection)] = {{3, 2}, {1, 0, 3, 1, 0, 1}};
  }
  // row 1 chose 3 and 1 of its four keys; columns past the visible keys are rubbish
  made.at("layer3.scores") = {0.5f, 0.25f, 99, 99, 0.125f, 2, 1, 4, 0.5f, 0.25f, -99, 99};
  return made;
}

}  // namespace test
