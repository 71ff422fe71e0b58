// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <limits>

namespace indexshare {
inline namespace v0 {

/// Extents, strides and offsets: 1 M tokens times thousands of rows passes 2^31.
using index_t = std::int64_t;

/// Positions, counts, lengths and slots, as they lie in memory.
using position_t = std::int32_t;

/// The largest position, slot or count.
inline constexpr index_t max_position = std::numeric_limits<position_t>::max();

/// Most heads or lanes that a shape may state: far above any model, low enough that products of
/// widths do not wrap.
inline constexpr index_t max_width = index_t{1} << 20;

/// Marks an empty entry of a selection or a position without a slot.
inline constexpr position_t no_position = -1;

/// Strong extents: the order of a tensor's extents is written once, in the view factories, and
/// swapped arguments do not compile.
struct Rows {
  index_t n;
};
struct Requests {
  index_t n;
};
struct Keys {
  index_t n;
};
struct Pages {
  index_t n;
};
struct PageSize {
  index_t n;
};
struct Heads {
  index_t n;
};
struct HeadDim {
  index_t n;
};
struct TopK {
  index_t n;
};

/// What one layer call may bring at most (rows, keys), and the model's fixed sizes (the rest).
/// Workspace sizes and strides come from here, never from lengths that live on a device.
struct Shape {
  index_t rows = 0;         ///< query rows of one call, at most
  index_t keys = 0;         ///< visible keys of one row, at most; lengths are clamped to [0, keys]
  index_t top_k = 0;        ///< width of a selection
  index_t index_heads = 0;  ///< heads of the indexer
  index_t index_dim = 0;    ///< lanes of an index query or key
  index_t heads = 0;        ///< attention heads
  index_t key_dim = 0;      ///< lanes of an attention query or key row: latent + rope
  index_t value_dim = 0;    ///< leading lanes of a key row that are its value: the latent

  constexpr Shape with_rows(index_t count) const noexcept {
    Shape shape = *this;
    shape.rows = count;
    return shape;
  }
};

}  // namespace v0
}  // namespace indexshare
