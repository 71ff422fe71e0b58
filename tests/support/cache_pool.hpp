// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/cache.hpp>

#include "executors.hpp"
#include "memory.hpp"
#include "random.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <vector>

/// @file Caches of any format in a pool of random bytes, with gaps between rows and blocks, to be
/// compared byte by byte. Rows are found by formulas of their own.

namespace test {

using indexshare::index_t;
using Bytes = std::vector<std::byte>;

/// How a cache lies in its pool, in elements of storage.
struct Place {
  index_t page = 1, blocks = 1, lanes = 1;
  index_t row_gap = 0, block_gap = 0;
};

/// A pool full of random bytes with a cache in it.
template <class Format>
struct Pool {
  using Storage = typename Format::storage;
  static constexpr bool latent = std::is_same_v<Format, indexshare::format::LatentE4m3>;
  static constexpr bool scaled = std::is_same_v<Format, indexshare::format::IndexKeyE4m3> ||
                                 std::is_same_v<Format, indexshare::format::IndexKeyInt8>;

  Place place;
  Format format{};
  test::Guarded<Storage> memory;

  explicit Pool(Place p, std::uint64_t seed = 1, Format f = {})
      : place(p), format(f), memory(static_cast<std::size_t>(p.blocks * block_stride())) {
    test::Random random(seed);
    auto* const bytes = reinterpret_cast<std::byte*>(memory.data());
    for (std::size_t i = 0; i < memory.bytes(); ++i) bytes[i] = std::byte(random.bits());
  }

  index_t row_size() const {  // in elements
    if constexpr (latent) {
      index_t const tiles = (format.latent + format.tile - 1) / format.tile;
      return format.latent + 4 * tiles + 2 * (place.lanes - format.latent);
    } else {
      return place.lanes;
    }
  }
  index_t row_stride() const { return row_size() + place.row_gap; }
  index_t block_stride() const {
    return place.page * (row_stride() + (scaled ? 4 : 0)) + place.block_gap;
  }
  index_t slots() const { return place.blocks * place.page; }
  index_t record() const { return row_size() * index_t{sizeof(Storage)} + (scaled ? 4 : 0); }

  template <indexshare::Space S = space>
  indexshare::MutableCacheView<S, Format> view() {
    return {memory.data(),  place.blocks, place.page, place.lanes,
            block_stride(), row_stride(), format};
  }

  std::byte* bytes() { return reinterpret_cast<std::byte*>(memory.data()); }
  Bytes all() { return Bytes(bytes(), bytes() + memory.bytes()); }
  /// The record of a row, and where its two parts lie in bytes of the pool.
  struct Parts {
    index_t row, scale, row_bytes;
  };
  Parts parts(index_t slot) const {
    index_t const block = slot / place.page * block_stride();
    index_t const j = slot % place.page;
    auto const size = index_t{sizeof(Storage)};
    return {(block + j * row_stride()) * size, block + place.page * row_stride() + 4 * j,
            row_size() * size};
  }
  static Bytes read(Bytes const& all, Parts const& p) {
    Bytes row(all.begin() + p.row, all.begin() + p.row + p.row_bytes);
    if (scaled) row.insert(row.end(), all.begin() + p.scale, all.begin() + p.scale + 4);
    return row;
  }
  static void write(Bytes& all, Parts const& p, Bytes const& row) {
    std::copy_n(row.begin(), p.row_bytes, all.begin() + p.row);
    if (scaled) std::copy_n(row.begin() + p.row_bytes, 4, all.begin() + p.scale);
  }
};

}  // namespace test
