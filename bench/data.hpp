// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "case.hpp"

#include <indexshare/batch.hpp>
#include <indexshare/cache.hpp>
#include <indexshare/element.hpp>
#include <indexshare/host/memory.hpp>
#include <indexshare/selection.hpp>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <utility>
#include <vector>

/// @file Data of the cases: values from a hash of their place (a gigabyte in a second or two), rows
/// of a batch, caches.

namespace bench {

/// GLM-5.2's widths.
constexpr Shape glm52(index_t rows, index_t keys) {
  return {.rows = rows,
          .keys = keys,
          .top_k = 2048,
          .index_heads = 32,
          .index_dim = 128,
          .heads = 64,
          .key_dim = 576,
          .value_dim = 512};
}

/// Scratch that a call may take at most, as an engine would limit it.
inline constexpr std::size_t scratch_budget = std::size_t{64} << 20;

// ---- values

/// A well mixed word for each place. @source MurmurHash3's finish, constants
constexpr std::uint32_t mixed(std::uint32_t seed, index_t place) {
  auto x = static_cast<std::uint32_t>(place) * 0x9E3779B9u + seed * 0x7F4A7C15u;
  x = (x ^ (x >> 16)) * 0x85EBCA6Bu;
  x = (x ^ (x >> 13)) * 0xC2B2AE35u;
  return x ^ (x >> 16);
}

/// Uniform in [-1, 1).
constexpr float uniform(std::uint32_t seed, index_t place) {
  return static_cast<float>(mixed(seed, place) >> 8) * 0x1p-23f - 1.0f;
}

/// Aligned memory that nobody has touched yet.
template <class T>
class Array {
 public:
  explicit Array(index_t count)
      : count_(count), memory_(WorkspaceSize{sizeof(T) * static_cast<std::size_t>(count)}) {}

  template <class ValueAt>
  Array(index_t count, ValueAt const& value_at) : Array(count) {
    for (index_t i = 0; i < count; ++i) data()[i] = value_at(i);
  }

  T* data() const { return static_cast<T*>(memory_.view().data); }
  index_t size() const { return count_; }
  T* begin() const { return data(); }
  T* end() const { return data() + count_; }

 private:
  index_t count_;
  HostMemory memory_;
};

template <class T>
Array<T> uniform_array(index_t count, std::uint32_t seed) {
  return {count, [seed](index_t i) { return from_float<T>(uniform(seed, i)); }};
}

/// For outputs: what a call did not write is found by its check.
inline Array<float> poisoned(index_t count) {
  return {count, [](index_t) { return std::numeric_limits<float>::quiet_NaN(); }};
}

// ---- rows

/// The rows of a case: each the last of its own request (decode), or the last of one request
/// (prefill: causal lengths).
struct Layout {
  index_t requests = 1;
  index_t rows_per_request = 1;
  index_t keys = 0;  ///< of each request
  bool paged = true;

  index_t rows() const { return requests * rows_per_request; }
  Shape shape() const { return glm52(rows(), keys); }

  std::string name() const {
    std::string const rows = rows_per_request == 1
                                 ? "decode/batch:" + std::to_string(requests)
                                 : "prefill/rows:" + std::to_string(rows_per_request);
    return rows + "/keys:" + short_number(keys) + (paged ? "" : "/contiguous");
  }
};

inline std::vector<Layout> decode_layouts() {
  std::vector<Layout> layouts;
  for (index_t const keys : {8, 64, 256, 1024}) layouts.push_back({.keys = keys * 1024});
  return layouts;
}
inline std::vector<Layout> prefill_layouts() {
  std::vector<Layout> layouts;
  for (index_t const rows : {512, 2048}) {
    for (index_t const keys : {8, 16, 64}) {
      layouts.push_back({.rows_per_request = rows, .keys = keys * 1024});
    }
  }
  return layouts;
}

/// Of a stage that reads a cache: also several requests, and a cache without pages.
inline std::vector<Layout> stage_layouts() {
  std::vector<Layout> layouts = decode_layouts();
  layouts.push_back({.requests = 8, .keys = 65536});
  layouts.push_back({.keys = 65536, .paged = false});
  for (Layout const& layout : prefill_layouts()) layouts.push_back(layout);
  return layouts;
}

/// The rows of a layout, and the blocks of the caches that they read: pages in mixed order, or one
/// block per request.
class Batch {
 public:
  static constexpr index_t page_size = 64;

  explicit Batch(Layout const& layout)
      : layout_(layout),
        lengths_(layout.rows(),
                 [&](index_t row) {
                   index_t const later =
                       layout.rows_per_request - 1 - row % layout.rows_per_request;
                   return static_cast<position_t>(layout.keys - later);
                 }),
        requests_(
            layout.rows(),
            [&](index_t row) { return static_cast<position_t>(row / layout.rows_per_request); }),
        pages_(layout.paged ? blocks() : 0,
               [](index_t page) { return static_cast<position_t>(page); }) {
    for (index_t page = pages_.size(); page > 1; --page) {
      std::swap(pages_.data()[page - 1], pages_.data()[mixed(1, page) % page]);
    }
  }

  Layout const& layout() const { return layout_; }
  index_t blocks() const {
    return layout_.paged ? layout_.requests * (layout_.keys / page_size) : layout_.requests;
  }
  index_t block_size() const { return layout_.paged ? page_size : layout_.keys; }

  PageTable<Space::host> table() const {
    if (!layout_.paged) return make_contiguous_table<Space::host>(Keys{layout_.keys});
    return make_page_table<Space::host>(pages_.data(), Requests{layout_.requests},
                                        Pages{layout_.keys / page_size}, PageSize{page_size});
  }
  RowBatch<Space::host> view() const {
    Rows const rows{layout_.rows()};
    return {make_lengths<Space::host>(lengths_.data(), rows),
            make_lengths<Space::host>(requests_.data(), rows), table(), table()};
  }

  index_t length(index_t row) const { return lengths_.data()[row]; }

  /// FLOPs of the scores: rows that select everything they see have none.
  double score_flops() const {
    Shape const shape = layout_.shape();
    index_t scores = 0;
    for (index_t row = 0; row < layout_.rows(); ++row) {
      scores += length(row) > shape.top_k ? length(row) : 0;
    }
    return 2.0 * static_cast<double>(shape.index_heads * shape.index_dim * scores);
  }
  /// FLOPs of attention to top_k keys per row.
  double attention_flops() const {
    Shape const shape = layout_.shape();
    return 2.0 * static_cast<double>(shape.heads * (shape.key_dim + shape.value_dim) *
                                     layout_.rows() * shape.top_k);
  }

 private:
  Layout layout_;
  Array<position_t> lengths_;
  Array<position_t> requests_;
  Array<position_t> pages_;
};

// ---- caches

/// A cache in some format for the blocks of a batch, with values in [-1, 1].
template <class Format>
class Cache;

template <class T>
class Cache<format::Plain<T>> {
 public:
  Cache(Batch const& batch, index_t lanes, std::uint32_t seed)
      : blocks_(batch.blocks()),
        block_size_(batch.block_size()),
        lanes_(lanes),
        values_(uniform_array<T>(blocks_ * block_size_ * lanes, seed)) {}

  auto view() const {
    return make_paged_cache<Space::host, T const>(values_.data(), Pages{blocks_},
                                                  PageSize{block_size_}, HeadDim{lanes_});
  }

 private:
  index_t blocks_, block_size_, lanes_;
  Array<T> values_;
};

/// Writes `count` codes of values in [-1, 1] for `unit_scale`.
inline void write_codes(std::byte* codes, index_t count, std::uint32_t seed, index_t place) {
  for (index_t i = 0; i < count; ++i) {
    codes[i] = std::byte{from_float<e4m3>(448 * uniform(seed, place + i)).bits};
  }
}
inline constexpr float unit_scale = 1.0f / 448;

template <class T>
void write_value(std::byte* bytes, T value) {
  std::copy_n(reinterpret_cast<std::byte const*>(&value), sizeof(T), bytes);
}

template <>
class Cache<format::IndexKeyE4m3> {
 public:
  Cache(Batch const& batch, index_t lanes, std::uint32_t seed)
      : blocks_(batch.blocks()),
        block_size_(batch.block_size()),
        lanes_(lanes),
        bytes_(blocks_ * block_size_ * (lanes + 4)) {
    index_t const codes = block_size_ * lanes;
    index_t const block_bytes = codes + block_size_ * 4;
    for (index_t block = 0; block < blocks_; ++block) {
      std::byte* const data = bytes_.data() + block * block_bytes;
      write_codes(data, codes, seed, block * codes);
      for (index_t i = 0; i < block_size_; ++i) write_value(data + codes + 4 * i, unit_scale);
    }
  }

  auto view() const {
    return make_index_key_e4m3_cache<Space::host, std::byte const>(
        bytes_.data(), Pages{blocks_}, PageSize{block_size_}, HeadDim{lanes_});
  }

 private:
  index_t blocks_, block_size_, lanes_;
  Array<std::byte> bytes_;
};

template <>
class Cache<format::LatentE4m3> {
 public:
  Cache(Batch const& batch, index_t lanes, std::uint32_t seed)
      : blocks_(batch.blocks()),
        block_size_(batch.block_size()),
        latent_(lanes - rope),
        bytes_(blocks_ * block_size_ * row_bytes()) {
    for (index_t slot = 0; slot < blocks_ * block_size_; ++slot) {
      std::byte* const row = bytes_.data() + slot * row_bytes();
      write_codes(row, latent_, seed, slot * lanes);
      std::byte* const scales = row + latent_;
      for (index_t i = 0; i < latent_ / tile; ++i) write_value(scales + 4 * i, unit_scale);
      std::byte* const rotary = scales + latent_ / tile * 4;
      for (index_t i = 0; i < rope; ++i) {
        write_value(rotary + 2 * i, from_float<bf16>(uniform(seed + 1, slot * rope + i)));
      }
    }
  }

  auto view() const {
    return make_latent_e4m3_cache<Space::host, std::byte const>(
        bytes_.data(), Pages{blocks_}, PageSize{block_size_}, latent_, rope, tile);
  }

 private:
  static constexpr index_t rope = 64;
  static constexpr index_t tile = 128;
  index_t row_bytes() const { return latent_ + latent_ / tile * 4 + rope * 2; }

  index_t blocks_, block_size_, latent_;
  Array<std::byte> bytes_;
};

// ---- checks

/// Every row of `selection` has top_k ascending positions below its length.
inline void check_selection(SelectionView<Space::host, position_t const> const& selection,
                            Batch const& batch) {
  index_t const top_k = selection.indices.extent(1);
  for (index_t row = 0; row < selection.indices.extent(0); ++row) {
    require(selection.counts(row) == top_k, "count of a selection");
    for (index_t j = 0; j < top_k; ++j) {
      position_t const before = j > 0 ? selection.indices(row, j - 1) : -1;
      require(before < selection.indices(row, j), "order of a selection");
    }
    require(selection.indices(row, top_k - 1) < batch.length(row), "positions of a selection");
  }
}

/// Attention outputs are means of values in [-1, 1].
inline void check_means(Array<float> const& out) {
  require(std::all_of(out.begin(), out.end(), [](float x) { return std::fabs(x) <= 1.0001f; }),
          "range of an attention output");
}

}  // namespace bench
