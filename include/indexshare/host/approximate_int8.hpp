// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/detail/int8.hpp>
#include <indexshare/host/decode.hpp>
#include <indexshare/host/indexer.hpp>
#include <indexshare/host/simd/foreach.hpp>
#include <indexshare/indexer/approximate_int8.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace indexshare {
inline namespace v0 {
namespace detail {

/// Queries become codes once per row of a tile. Keys stay codes; they are copied together once per
/// block for all rows of the tile.
template <class Query>
struct HostScorer<ApproximateInt8Indexer<Query>> {
  using Inputs = typename ApproximateInt8Indexer<Query>::template inputs<Space::host>;

  struct Scratch {
    std::uint8_t* keys;     ///< [score_block_keys][int8_key_pitch(dim)]
    float* scales;          ///< [score_block_keys]
    std::int8_t* queries;   ///< [tile rows][panels][groups][panel_width][int8_group]
    std::int32_t* offsets;  ///< [tile rows][panels][panel_width]
    float* weights;         ///< [tile rows][panels][panel_width]
    float* head;            ///< [dim]
  };
  static Scratch carve(WorkspaceCarver& carver, index_t tile_rows, Shape const& shape) noexcept {
    index_t const heads = tile_rows * padded_to_panel(shape.index_heads);
    index_t const dim = shape.index_dim;
    auto* const keys =
        carver.take<std::uint8_t>(saturating_area(score_block_keys, int8_key_pitch(dim)));
    auto* const scales = carver.take<float>(static_cast<std::size_t>(score_block_keys));
    auto* const queries =
        carver.take<std::int8_t>(saturating_area(heads, int8_groups(dim) * int8_group));
    auto* const offsets = carver.take<std::int32_t>(static_cast<std::size_t>(heads));
    auto* const weights = carver.take<float>(static_cast<std::size_t>(heads));
    return {keys,    scales,  queries,
            offsets, weights, carver.take<float>(static_cast<std::size_t>(dim))};
  }

  HostScorer(HostIsa isa, Inputs const& inputs, Scratch const& memory) noexcept
      : score_table(kernels<Int8ScoreKernels>(isa)),
        widen(kernels<WidenKernels>(isa)),
        in(inputs),
        scratch(memory) {}

  void pack(index_t i, index_t row) const noexcept {
    std::fill_n(queries(i), padded_heads() * query_bytes(), std::int8_t{0});
    for (index_t h = 0; h < padded_heads(); ++h) {
      std::int32_t sum = 0;
      float weight = 0;
      if (h < heads()) {
        widen_row(widen, &in.q(row, h, 0), dim(), scratch.head);
        std::int8_t* const codes = queries(i) + h / panel_width * panel_width * query_bytes() +
                                   h % panel_width * int8_group;
        // a scale of NaN makes the weight NaN, and so all scores of the row
        weight = in.weights(row, h) * score_table.quantize(scratch.head, dim(), codes, sum);
      }
      scratch.offsets[i * padded_heads() + h] = -128 * sum;
      scratch.weights[i * padded_heads() + h] = weight;
    }
  }
  void take(index_t s, position_t slot, index_t n) const noexcept {
    std::byte const* const codes = in.keys.row(slot);
    std::memcpy(scratch.scales + s, scale_of(in.keys, slot),
                static_cast<std::size_t>(n) * sizeof(float));
    for (index_t i = 0; i < n; ++i) {
      score_table.take(codes + i * in.keys.row_stride, dim(), key(s + i));
    }
  }
  void blank(index_t s) const noexcept {
    std::fill_n(key(s), int8_key_pitch(dim()), std::uint8_t{0});
    scratch.scales[s] = 0;
  }

  void score(index_t i, index_t count, char const* const* ahead, float* out) const noexcept {
    Int8KeyBlock const block{.queries = queries(i),
                             .offsets = scratch.offsets + i * padded_heads(),
                             .weights = scratch.weights + i * padded_heads(),
                             .heads = heads(),
                             .dim = dim(),
                             .keys = scratch.keys,
                             .scales = scratch.scales,
                             .count = count,
                             .ahead = ahead,
                             .ahead_bytes = row_bytes(in.keys)};
    score_table.score(block, out);
  }

 private:
  index_t heads() const noexcept { return in.q.extent(1); }
  index_t dim() const noexcept { return in.q.extent(2); }
  index_t padded_heads() const noexcept { return padded_to_panel(heads()); }
  index_t query_bytes() const noexcept { return int8_groups(dim()) * int8_group; }
  std::uint8_t* key(index_t s) const noexcept { return scratch.keys + s * int8_key_pitch(dim()); }
  std::int8_t* queries(index_t i) const noexcept {
    return scratch.queries + i * padded_heads() * query_bytes();
  }

  Int8ScoreKernels const& score_table;
  WidenKernels const& widen;
  Inputs const& in;
  Scratch scratch;
};

}  // namespace detail
}  // namespace v0
}  // namespace indexshare
