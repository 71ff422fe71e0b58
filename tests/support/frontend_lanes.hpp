// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "frontend_model.hpp"
#include "memory.hpp"
#include "random.hpp"

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

/// @file Activations that front-end steps read and write.

namespace frontend_test {

struct Layout {
  index_t head_pad = 0;
  index_t row_pad = 0;
};

/// Activations [rows, heads, lanes] with NaN between and around them.
class Lanes {
 public:
  Lanes(index_t rows, index_t heads, index_t lanes, Layout layout = {})
      : extents_{rows, heads, lanes},
        strides_{heads * (lanes + layout.head_pad) + layout.row_pad, lanes + layout.head_pad, 1},
        memory_(to_size(rows * strides_[0])) {}

  /// Row r as in every batch.
  Lanes& random(std::uint64_t seed, index_t first_row = 0) {
    for (index_t r = 0; r < extents_[0]; ++r) {
      test::Random random(seed * 1000 + static_cast<std::uint64_t>(first_row + r));
      for (index_t h = 0; h < extents_[1]; ++h) {
        for (index_t i = 0; i < extents_[2]; ++i) view()(r, h, i) = random.normal();
      }
    }
    return *this;
  }
  Tensor<host, float, 3> view() {
    return make_strided<host, float, 3>(memory_.data(), extents_, strides_);
  }
  Tensor<host, float const, 3> in() { return detail::read_only(view()); }

  /// The values; nothing else may have been written.
  std::vector<float> take() {
    auto const taken = values(view());
    for (index_t r = 0; r < extents_[0]; ++r) {
      for (index_t h = 0; h < extents_[1]; ++h) {
        for (index_t i = 0; i < extents_[2]; ++i) view()(r, h, i) = std::bit_cast<float>(~0u);
      }
    }
    auto const bytes = std::as_bytes(memory_.span());
    CHECK(
        std::all_of(bytes.begin(), bytes.end(), [](std::byte b) { return b == test::nan_poison; }));
    CHECK(memory_.intact());
    return taken;
  }

 private:
  cuda::std::array<index_t, 3> extents_, strides_;
  test::Guarded<float> memory_;
};

}  // namespace frontend_test
