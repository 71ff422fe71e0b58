// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/cache.hpp>

#include "executors.hpp"
#include "memory.hpp"
#include "random.hpp"

#include <algorithm>
#include <cassert>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <type_traits>
#include <vector>

/// @file Paged caches with shuffled pages, and writers of the formats of one byte. The layouts are
/// written out here a second time, on purpose without the library's address functions.

namespace test {

using indexshare::index_t;
using indexshare::position_t;

/// Value of an e4m3fn code, by its definition.
inline double e4m3_value(std::uint8_t code) {
  int const exponent = (code >> 3) & 15;
  int const mantissa = code & 7;
  if ((code & 0x7F) == 0x7F) return std::nan("");
  double const magnitude =
      exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 10);
  return (code & 0x80) != 0 ? -magnitude : magnitude;
}

/// Scale that maps the largest of the values to the largest code.
inline float e4m3_scale(std::span<float const> values) {
  float largest = 0;
  for (float const value : values) largest = std::max(largest, std::abs(value));
  return largest > 0 ? largest / 448.0f : 1.0f;
}

/// Writes codes of values / scale and replaces the values by what they decode to.
inline void encode_e4m3(std::span<float> values, float scale, std::byte* codes) {
  for (std::size_t i = 0; i < values.size(); ++i) {
    auto const code = indexshare::from_float<indexshare::e4m3>(values[i] / scale).bits;
    codes[i] = std::byte{code};
    values[i] = static_cast<float>(e4m3_value(code)) * scale;
  }
}

/// What a cache of some format is written with. `encode` puts one token's values into its block
/// and replaces them by what a reader gets.
template <class Format>
struct Codec;

template <class T>
struct Codec<indexshare::format::Plain<T>> {
  using Format = indexshare::format::Plain<T>;
  static index_t block_elements(Format, index_t page_size, index_t lanes) {
    return page_size * lanes;
  }
  static void encode(Format, T* block, index_t, index_t place, std::span<float> values) {
    for (std::size_t i = 0; i < values.size(); ++i) {
      T const element = indexshare::from_float<T>(values[i]);
      block[static_cast<std::size_t>(place) * values.size() + i] = element;
      values[i] = indexshare::to_float(element);
    }
  }
};

template <>
struct Codec<indexshare::format::IndexKeyE4m3> {
  using Format = indexshare::format::IndexKeyE4m3;
  static index_t block_elements(Format, index_t page_size, index_t lanes) {
    return page_size * (lanes + 4);
  }
  static void encode(Format, std::byte* block, index_t page_size, index_t place,
                     std::span<float> values) {
    auto const lanes = static_cast<index_t>(values.size());
    float const scale = e4m3_scale(values);
    encode_e4m3(values, scale, block + place * lanes);
    std::memcpy(block + page_size * lanes + 4 * place, &scale, 4);
  }
};

template <>
struct Codec<indexshare::format::IndexKeyInt8> {
  using Format = indexshare::format::IndexKeyInt8;
  static index_t block_elements(Format, index_t page_size, index_t lanes) {
    return page_size * (lanes + 4);
  }
  static void encode(Format, std::byte* block, index_t page_size, index_t place,
                     std::span<float> values) {
    auto const lanes = static_cast<index_t>(values.size());
    float largest = 0;
    for (float const value : values) largest = std::max(largest, std::abs(value));
    float const scale = largest > 0 ? largest / 127.0f : 1.0f;
    for (index_t lane = 0; lane < lanes; ++lane) {
      float& value = values[static_cast<std::size_t>(lane)];
      auto const code = static_cast<std::int8_t>(std::nearbyint(value / scale));
      block[place * lanes + lane] = static_cast<std::byte>(code);
      value = static_cast<float>(code) * scale;
    }
    std::memcpy(block + page_size * lanes + 4 * place, &scale, 4);
  }
};

template <>
struct Codec<indexshare::format::LatentE4m3> {
  using Format = indexshare::format::LatentE4m3;
  static index_t row_bytes(Format format, index_t lanes) {
    index_t const tiles = (format.latent + format.tile - 1) / format.tile;
    return format.latent + 4 * tiles + 2 * (lanes - format.latent);
  }
  static index_t block_elements(Format format, index_t page_size, index_t lanes) {
    return page_size * row_bytes(format, lanes);
  }
  static void encode(Format format, std::byte* block, index_t, index_t place,
                     std::span<float> values) {
    auto const lanes = static_cast<index_t>(values.size());
    std::byte* const row = block + place * row_bytes(format, lanes);
    std::byte* out = row + format.latent;
    for (index_t first = 0; first < format.latent; first += format.tile) {
      index_t const count = std::min(format.tile, format.latent - first);
      auto const part =
          values.subspan(static_cast<std::size_t>(first), static_cast<std::size_t>(count));
      float const scale = e4m3_scale(part);
      encode_e4m3(part, scale, row + first);
      std::memcpy(out, &scale, 4);
      out += 4;
    }
    for (index_t lane = format.latent; lane < lanes; ++lane) {
      float& value = values[static_cast<std::size_t>(lane)];
      auto const element = indexshare::from_float<indexshare::bf16>(value);
      std::memcpy(out, &element, 2);
      out += 2;
      value = indexshare::to_float(element);
    }
  }
};

struct CacheShape {
  index_t requests = 1;
  index_t keys = 0;  ///< room per request; rounded up to whole pages
  index_t lanes = 0;
  index_t page_size = 0;    ///< 0: contiguous, no page table
  index_t spare_pages = 2;  ///< pages that no request owns
  std::uint64_t seed = 1;   ///< of the pages' order
};

/// A cache of several requests. What was never written is NaN: spare pages, the ends of pages.
template <class Format>
class PagedCache {
 public:
  using Storage = typename Format::storage;

  explicit PagedCache(CacheShape shape, Format format = {})
      : shape_(shape),
        format_(format),
        paged_(shape.page_size > 0),
        page_size_(paged_ ? shape.page_size : std::max<index_t>(shape.keys, 1)),
        max_pages_(paged_ ? (shape.keys + page_size_ - 1) / page_size_ : 1),
        blocks_(shape.requests * max_pages_ + (paged_ ? shape.spare_pages : 0)),
        block_elements_(Codec<Format>::block_elements(format, page_size_, shape.lanes)),
        memory_(static_cast<std::size_t>(blocks_ * block_elements_)),
        table_(static_cast<std::size_t>(paged_ ? shape.requests * max_pages_ : 0)),
        values_(static_cast<std::size_t>(shape.requests * keys() * shape.lanes), std::nanf("")) {
    if (!paged_) return;
    auto const order =
        Random(shape.seed).permutation<position_t>(static_cast<std::size_t>(blocks_));
    std::copy_n(order.begin(), table_.size(), table_.data());
  }

  index_t keys() const { return max_pages_ * page_size_; }
  index_t lanes() const { return shape_.lanes; }
  index_t requests() const { return shape_.requests; }
  index_t page_size() const { return page_size_; }

  /// Writes one token.
  void write(index_t request, index_t position, std::span<float const> values) {
    auto const stored = place_of(request, position);
    assert(values.size() == stored.size());
    std::copy(values.begin(), values.end(), stored.begin());
    Codec<Format>::encode(format_, block(request, position), page_size_, position % page_size_,
                          stored);
  }
  /// Writes random tokens [first, last) of a request, the same for every format and page size.
  void write_random(index_t request, index_t first, index_t last, std::uint64_t seed) {
    for (index_t position = first; position < last; ++position) {
      Random random(seed * 1000003u + static_cast<std::uint64_t>(request * 7919 + position));
      write(request, position, random.normals(static_cast<std::size_t>(lanes())));
    }
  }
  /// What a reader gets for a token.
  std::span<float const> value(index_t request, index_t position) const {
    return std::span<float const>(values_).subspan(offset(request, position),
                                                   static_cast<std::size_t>(lanes()));
  }
  /// Takes a page out of a request's table; its tokens have no slot any more.
  void unmap(index_t request, index_t page) { entry(request, page) = indexshare::no_position; }
  position_t& entry(index_t request, index_t page) {
    return table_[static_cast<std::size_t>(request * max_pages_ + page)];
  }

  position_t slot(index_t request, index_t position) const {
    index_t const page = position / page_size_;
    index_t const owner =
        paged_ ? table_[static_cast<std::size_t>(request * max_pages_ + page)] : request;
    return static_cast<position_t>(owner * page_size_ + position % page_size_);
  }
  index_t slots() const { return blocks_ * page_size_; }

  template <indexshare::Space S = space>
  auto view() const {
    if constexpr (std::is_same_v<Format, indexshare::format::IndexKeyE4m3>) {
      return indexshare::make_index_key_e4m3_cache<S>(memory_.data(), indexshare::Pages{blocks_},
                                                      indexshare::PageSize{page_size_},
                                                      indexshare::HeadDim{lanes()});
    } else if constexpr (std::is_same_v<Format, indexshare::format::IndexKeyInt8>) {
      return indexshare::make_index_key_int8_cache<S>(memory_.data(), indexshare::Pages{blocks_},
                                                      indexshare::PageSize{page_size_},
                                                      indexshare::HeadDim{lanes()});
    } else if constexpr (std::is_same_v<Format, indexshare::format::LatentE4m3>) {
      return indexshare::make_latent_e4m3_cache<S>(memory_.data(), indexshare::Pages{blocks_},
                                                   indexshare::PageSize{page_size_}, format_.latent,
                                                   lanes() - format_.latent, format_.tile);
    } else {
      return indexshare::make_paged_cache<S>(memory_.data(), indexshare::Pages{blocks_},
                                             indexshare::PageSize{page_size_},
                                             indexshare::HeadDim{lanes()});
    }
  }
  template <indexshare::Space S = space>
  indexshare::PageTable<S> pages() const {
    if (!paged_) return indexshare::make_contiguous_table<S>(indexshare::Keys{page_size_});
    return indexshare::make_page_table<S>(table_.data(), indexshare::Requests{requests()},
                                          indexshare::Pages{max_pages_},
                                          indexshare::PageSize{page_size_});
  }
  Guarded<Storage>& memory() { return memory_; }

 private:
  std::size_t offset(index_t request, index_t position) const {
    return static_cast<std::size_t>((request * keys() + position) * lanes());
  }
  std::span<float> place_of(index_t request, index_t position) {
    return std::span<float>(values_).subspan(offset(request, position),
                                             static_cast<std::size_t>(lanes()));
  }
  Storage* block(index_t request, index_t position) {
    return memory_.data() + slot(request, position) / page_size_ * block_elements_;
  }

  CacheShape shape_;
  Format format_;
  bool paged_;
  index_t page_size_;
  index_t max_pages_;
  index_t blocks_;
  index_t block_elements_;
  Guarded<Storage> memory_;
  Guarded<position_t> table_;
  std::vector<float> values_;
};

}  // namespace test
