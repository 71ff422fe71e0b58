// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/cuda/topk.cuh>
#include <indexshare/host/memory.hpp>
#include <indexshare/host/topk.hpp>

#include <catch2/catch_test_macros.hpp>

#include "executors.hpp"
#include "memory.hpp"
#include "oracle.hpp"
#include "random.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <string>
#include <utility>
#include <vector>

/// @file Rows of scores in managed memory, which the host's top-k and a device's read alike, and
/// distributions that are hard in some way.

namespace cuda_topk_test {

using namespace indexshare;
inline constexpr auto device = Space::device;
inline constexpr auto host = Space::host;
constexpr std::size_t to_size(index_t n) { return static_cast<std::size_t>(n); }

struct Layout {
  index_t score_offset = 0;  ///< elements before the first row
  index_t score_pad = 0;     ///< elements between score rows
  index_t index_pad = 0;
  index_t count_step = 1;  ///< stride of counts and lengths
};

/// Scores [rows, width] and a selection of them, full of poison to begin with.
template <class Score>
class Batch {
 public:
  Batch(index_t rows, index_t width, index_t k, Layout layout = {})
      : rows_(rows),
        width_(width),
        k_(k),
        layout_(layout),
        score_stride_(width + layout.score_pad),
        index_stride_(k + layout.index_pad),
        scores_(to_size(layout.score_offset + rows * score_stride_)),
        lengths_(to_size(rows * layout.count_step)),
        indices_(to_size(rows * index_stride_), test::unwritten),
        counts_(to_size(rows * layout.count_step), test::unwritten) {}

  /// Columns from `length` on become NaN and huge numbers in turn.
  void set(index_t row, std::vector<float> const& scores, index_t length) {
    Score* const out = scores_.data() + layout_.score_offset + row * score_stride_;
    for (index_t s = 0; s < width_; ++s) {
      float const poison = s % 2 == 0 ? 1e30f : std::numeric_limits<float>::quiet_NaN();
      bool const given = s < length && s < static_cast<index_t>(scores.size());
      out[s] = from_float<Score>(given ? scores[to_size(s)] : poison);
    }
    lengths_[to_size(row * layout_.count_step)] = static_cast<position_t>(length);
  }
  void set(index_t row, std::vector<float> const& scores) {
    set(row, scores, static_cast<index_t>(scores.size()));
  }
  void poison_outputs() {
    indices_.fill(test::unwritten);
    counts_.fill(test::unwritten);
  }

  template <Space S>
  ScoreView<S, Score const> scores() const {
    return make_strided<S, Score const, 2>(scores_.data() + layout_.score_offset, {rows_, width_},
                                           {score_stride_, 1});
  }
  template <Space S>
  LengthView<S> lengths() const {
    return make_strided<S, position_t const, 1>(lengths_.data(), {rows_}, {layout_.count_step});
  }
  template <Space S>
  SelectionView<S> selection() {
    return {make_strided<S, position_t, 2>(indices_.data(), {rows_, k_}, {index_stride_, 1}),
            make_strided<S, position_t, 1>(counts_.data(), {rows_}, {layout_.count_step})};
  }
  Shape shape() const {
    Shape shape;
    shape.rows = rows_;
    shape.keys = width_;
    shape.top_k = k_;
    return shape;
  }

  /// Everything that was written or left alone, to be compared byte for byte.
  std::pair<std::vector<position_t>, std::vector<position_t>> bytes() const {
    auto const i = indices_.span();
    auto const c = counts_.span();
    return {{i.begin(), i.end()}, {c.begin(), c.end()}};
  }
  /// The same as the host's RadixTopK writes it.
  auto expected() {
    auto const mine = bytes();
    poison_outputs();
    HostMemory const scratch(topk_workspace(test::Serial{}, RadixTopK{}, shape()).value());
    REQUIRE(topk_select(test::Serial{}, RadixTopK{}, scores<host>(), lengths<host>(),
                        selection<host>(), scratch.view())
                .ok());
    auto want = bytes();
    std::copy(mine.first.begin(), mine.first.end(), indices_.data());
    std::copy(mine.second.begin(), mine.second.end(), counts_.data());
    return want;
  }

 private:
  index_t rows_, width_, k_;
  Layout layout_;
  index_t score_stride_, index_stride_;
  test::Guarded<Score> scores_;
  test::Guarded<position_t> lengths_, indices_, counts_;
};

/// Whether the batch holds what the host writes; names the first difference.
template <class Score>
bool equals_host(Batch<Score>& batch) {
  auto const got = batch.bytes();
  auto const want = batch.expected();
  if (got == want) return true;
  auto const at = std::mismatch(got.first.begin(), got.first.end(), want.first.begin());
  if (at.first != got.first.end()) {
    UNSCOPED_INFO("entry " << at.first - got.first.begin() << " is " << *at.first << ", expected "
                           << *at.second);
  } else {
    UNSCOPED_INFO("counts differ");
  }
  return false;
}

/// Scores that are hard for a selection in one way each.
enum class Kind {
  normal,
  zeros_and_few,   ///< as after ReLU: a plateau of zeros, few positive scores
  zeros_and_many,  ///< more positive scores than are wanted
  all_equal,
  two_values,
  mostly_nan,
  all_nan,
  signed_zeros,
  infinities,
  up,
  down,
  recent,     ///< all winners at the end
  clustered,  ///< winners in a few runs
  periodic,
  last_bits,  ///< scores that differ in the last ten bits only
  last = last_bits
};

inline std::vector<float> make_scores_of(Kind kind, index_t n, std::uint64_t seed) {
  constexpr float infinity = std::numeric_limits<float>::infinity();
  constexpr float nan = std::numeric_limits<float>::quiet_NaN();
  test::Random random(seed * 100 + static_cast<std::uint64_t>(kind));
  std::vector<float> scores(to_size(n));
  for (index_t s = 0; s < n; ++s) {
    float& score = scores[to_size(s)];
    switch (kind) {
      case Kind::normal:
        score = random.normal();
        break;
      case Kind::zeros_and_few:
        score = random.below(1000) < 3 ? random.uniform(0.1f, 2) : 0.0f;
        break;
      case Kind::zeros_and_many:
        score = random.below(4) == 0 ? random.uniform(0.1f, 2) : 0.0f;
        break;
      case Kind::all_equal:
        score = -3.5f;
        break;
      case Kind::two_values:
        score = random.below(2) == 0 ? 1.0f : 2.0f;
        break;
      case Kind::mostly_nan:
        score = random.below(100) == 0 ? random.normal() : nan;
        break;
      case Kind::all_nan:
        score = random.below(2) == 0 ? nan : -nan;
        break;
      case Kind::signed_zeros:
        score = random.below(2) == 0 ? 0.0f : -0.0f;
        break;
      case Kind::infinities:
        score = random.below(3) == 0   ? -infinity
                : random.below(5) == 0 ? infinity
                                       : random.normal();
        break;
      case Kind::up:
        score = static_cast<float>(s) - 1000.0f;
        break;
      case Kind::down:
        score = 1000.0f - static_cast<float>(s);
        break;
      case Kind::recent:
        score = random.normal() + (s * 20 > n * 19 ? 10.0f : 0.0f);
        break;
      case Kind::clustered:
        score = random.normal() + ((s / 97) % 13 == 5 ? 6.0f : 0.0f);
        break;
      case Kind::periodic:
        score = static_cast<float>(s % 64);
        break;
      case Kind::last_bits:
        score = 1.125f + static_cast<float>(random.below(1024)) * 0x1p-23f;
        break;
    }
  }
  return scores;
}

}  // namespace cuda_topk_test
