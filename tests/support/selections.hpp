// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/dims.hpp>
#include <indexshare/indexcache/overlap_counts.hpp>
#include <indexshare/io/safetensors_writer.hpp>
#include <indexshare/io/selection_format.hpp>
#include <indexshare/views.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "random.hpp"

/// @file Selections of several layers, made up.

namespace test {

/// What layers selected for the rows of a sample.
struct MadeSelections {
  indexshare::index_t layers = 0;
  indexshare::index_t rows = 0;
  indexshare::index_t top_k = 0;
  std::vector<indexshare::position_t> positions;  ///< [layers, rows, top_k]
  std::vector<indexshare::position_t> lengths;    ///< [rows], or empty

  indexshare::position_t& at(indexshare::index_t layer, indexshare::index_t row,
                             indexshare::index_t entry) {
    return positions[static_cast<std::size_t>((layer * rows + row) * top_k + entry)];
  }
  indexshare::position_t at(indexshare::index_t layer, indexshare::index_t row,
                            indexshare::index_t entry) const {
    return positions[static_cast<std::size_t>((layer * rows + row) * top_k + entry)];
  }

  indexshare::indexcache::LayerSelections view() const {
    using namespace indexshare;
    return {make_dense<Space::host, position_t const, 3>(positions.data(), {layers, rows, top_k}),
            make_lengths<Space::host>(lengths.data(), Rows{static_cast<index_t>(lengths.size())})};
  }

  /// Rows [first, first + count).
  MadeSelections rows_from(indexshare::index_t first, indexshare::index_t count) const {
    MadeSelections part{layers, count, top_k, {}, {}};
    for (indexshare::index_t layer = 0; layer < layers; ++layer) {
      auto const begin = positions.begin() + (layer * rows + first) * top_k;
      part.positions.insert(part.positions.end(), begin, begin + count * top_k);
    }
    if (!lengths.empty()) {
      part.lengths.assign(lengths.begin() + first, lengths.begin() + first + count);
    }
    return part;
  }

  /// As a file, layers numbered from 0.
  indexshare::io::SafetensorsWriter writer() const {
    using namespace indexshare;
    io::SafetensorsWriter writer;
    writer.metadata("format", std::string(io::selection_format));
    writer.metadata("layers", std::to_string(layers));
    writer.metadata("top_k", std::to_string(top_k));
    if (!lengths.empty()) writer.add("lengths", {rows}, lengths);
    for (index_t layer = 0; layer < layers; ++layer) {
      auto const begin = positions.begin() + layer * rows * top_k;
      writer.add(io::selection_tensor_name(static_cast<std::int32_t>(layer)), {rows, top_k},
                 std::vector<position_t>(begin, begin + rows * top_k));
    }
    return writer;
  }
};

/// Rows of different lengths, from none to `longest` visible keys. A layer keeps about 3 of 4 picks
/// of the layer before it. Entries are in no order, empty ones are anywhere. If `uneven`, layers
/// select fewer than they could.
inline MadeSelections random_selections(indexshare::index_t layers, indexshare::index_t rows,
                                        indexshare::index_t top_k, indexshare::index_t longest,
                                        bool uneven, std::uint64_t seed) {
  using indexshare::position_t;
  Random random(seed);
  MadeSelections made{layers, rows, top_k, {}, {}};
  made.positions.assign(static_cast<std::size_t>(layers * rows * top_k), indexshare::no_position);
  for (indexshare::index_t row = 0; row < rows; ++row) {
    auto const length = random.below(static_cast<std::size_t>(longest) + 1);
    made.lengths.push_back(static_cast<position_t>(length));
    auto order = random.permutation<position_t>(length);
    for (indexshare::index_t layer = 0; layer < layers; ++layer) {
      std::size_t const most = std::min(static_cast<std::size_t>(top_k), length);
      for (std::size_t i = 0; most < length && i < most; ++i) {
        if (random.below(4) == 0) std::swap(order[i], order[most + random.below(length - most)]);
      }
      std::size_t const picks = uneven && most > 0 ? random.below(most + 1) : most;
      auto const slots = random.permutation<indexshare::index_t>(static_cast<std::size_t>(top_k));
      for (std::size_t i = 0; i < picks; ++i) made.at(layer, row, slots[i]) = order[i];
    }
  }
  return made;
}

}  // namespace test
