// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/dims.hpp>
#include <indexshare/indexcache/detail/common_bits.hpp>
#include <indexshare/status.hpp>
#include <indexshare/views.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

/// @file How much of their selections layers have in common, counted row by row.
///
/// The overlap of layers i and j in a row is |T_i & T_j| / max(|T_i|, |T_j|), 0 where both are
/// empty; over rows it is the mean. As long as every layer selects the same number of positions, as
/// exact top-k does, this is the |T_i & T_j| / k of IndexCache. It is symmetric.
/// @source IndexCache, figure 4

namespace indexshare {
inline namespace v0 {
namespace indexcache {

/// Positions that an `OverlapCounter` takes are below this: its table has an entry for each.
inline constexpr index_t overlap_context_limit = index_t{1} << 26;

struct OverlapOptions {
  /// Leaves out rows that select everything they see: their overlap is 1 whatever layers do.
  bool skip_short = false;
};

/// The sums of `OverlapCounter`s. Whole numbers: they do not depend on the order of rows, nor on
/// which counter had which row. A row's overlap enters as a multiple of 2^-32, to the nearest: with
/// a top_k that is a power of two sums are exact, else the mean is within 2^-33.
class OverlapCounts {
 public:
  /// No rows yet. @param layers  at least 0
  explicit OverlapCounts(index_t layers)
      : layers_(layers), sums_(static_cast<std::size_t>(layers * (layers + 1) / 2)) {}

  index_t layers() const noexcept { return layers_; }
  /// Rows in the sums. At most 2^31 - 1 fit.
  std::int64_t rows() const noexcept { return rows_; }
  /// Rows that were left out: those in which no layer selects anything, and short ones if
  /// `OverlapOptions::skip_short`.
  std::int64_t rows_left_out() const noexcept { return left_out_; }
  /// Rows that select everything they see, counted or left out.
  std::int64_t short_rows() const noexcept { return short_; }

  /// Mean overlap of two layers, counted from 0; 0 without rows.
  /// Preconditions: i and j in [0, layers()).
  double overlap(index_t i, index_t j) const noexcept {
    return mean(sums_[place(std::max(i, j), std::min(i, j))]);
  }

  /// Mean overlap that random selections of the same sizes would have: size / length. Nothing if
  /// the length of a counted row is not known, or without rows.
  std::optional<double> random_overlap() const noexcept {
    if (rows_ == 0 || rows_with_length_ != rows_) return std::nullopt;
    return mean(random_);
  }

  /// Adds what another one has counted. Errors: bad_shape for other layers, with nothing added.
  Status merge(OverlapCounts const& other) noexcept {
    if (other.layers_ != layers_) {
      return failure(Errc::bad_shape, "layers of the counts to merge", layers_, other.layers_);
    }
    for (std::size_t i = 0; i < sums_.size(); ++i) sums_[i] += other.sums_[i];
    random_ += other.random_;
    rows_ += other.rows_;
    rows_with_length_ += other.rows_with_length_;
    left_out_ += other.left_out_;
    short_ += other.short_;
    return {};
  }

  friend bool operator==(OverlapCounts const&, OverlapCounts const&) = default;

 private:
  friend class OverlapCounter;

  static constexpr int fraction_bits = 32;

  /// part / whole in units of 2^-32. Preconditions: 0 <= part <= whole < 2^31.
  static std::uint64_t quotient(std::uint64_t part, std::uint64_t whole) noexcept {
    if (whole == 0) return 0;
    return ((part << fraction_bits) + whole / 2) / whole;
  }

  double mean(std::uint64_t sum) const noexcept {
    if (rows_ == 0) return 0;
    return static_cast<double>(sum) / static_cast<double>(std::uint64_t{1} << fraction_bits) /
           static_cast<double>(rows_);
  }

  /// Of the pair in the lower triangle. Precondition: low <= high.
  static std::size_t place(index_t high, index_t low) noexcept {
    return static_cast<std::size_t>(high * (high + 1) / 2 + low);
  }

  index_t layers_;
  std::vector<std::uint64_t> sums_;  // of overlaps, pair by pair
  std::uint64_t random_ = 0;         // of size / length
  std::int64_t rows_ = 0;
  std::int64_t rows_with_length_ = 0;
  std::int64_t left_out_ = 0;
  std::int64_t short_ = 0;
};

/// Selections of all layers for some rows.
struct LayerSelections {
  /// [layers, rows, top_k], in any order; a negative entry is empty. Positions of a row are
  /// distinct; one that is there twice counts once.
  Tensor<Space::host, position_t const, 3> positions{};
  /// Visible keys [rows]; no rows: not known. Then a row counts as short if every layer selects
  /// fewer than top_k positions, so that one with exactly top_k visible keys is not found.
  LengthView<Space::host> lengths{};
};

/// Counts overlaps of rows. One per thread: it has the scratch memory, about 4 bytes per position
/// of the longest row and 6 per entry of a row's selections. Merge the counts afterwards.
///
/// Cost per row: one table access per entry, then L^2 / 2 intersections of bit sets over the
/// positions that any layer selects. With L = 78, k = 2048 and overlaps as published about 0.6 ms
/// (docs/overlap.md).
class OverlapCounter {
 public:
  explicit OverlapCounter(index_t layers, OverlapOptions options = {})
      : options_(options), counts_(layers), sizes_(static_cast<std::size_t>(layers)) {}

  OverlapCounts const& counts() const noexcept { return counts_; }

  /// Counts the rows. Errors, with nothing counted of the rows from the faulty one on: bad_shape
  /// for an extent that does not fit; bad_stride if the entries of a row do not follow each other;
  /// bad_value for a position at or past `overlap_context_limit` or a negative length.
  Status add(LayerSelections const& selections) {
    if (Status const status = check(selections); !status.ok()) return status;
    for (index_t row = 0; row < selections.positions.extent(1); ++row) {
      if (Status const status = add_row(selections, row); !status.ok()) return status;
    }
    return {};
  }

 private:
  Status check(LayerSelections const& in) const noexcept {
    if (in.positions.extent(0) != counts_.layers()) {
      return failure(Errc::bad_shape, "layers of the selections", counts_.layers(),
                     in.positions.extent(0));
    }
    if (in.positions.extent(2) < 1) {
      return failure(Errc::bad_shape, "top_k of the selections", 1, in.positions.extent(2));
    }
    if (in.positions.extent(2) > overlap_context_limit) {
      return failure(Errc::bad_shape, "top_k of the selections", overlap_context_limit,
                     in.positions.extent(2));
    }
    if (in.positions.stride(2) != 1) {
      return failure(Errc::bad_stride, "entries of a row of selections", 1, in.positions.stride(2));
    }
    index_t const lengths = in.lengths.extent(0);
    if (lengths != 0 && lengths != in.positions.extent(1)) {
      return failure(Errc::bad_shape, "lengths of the selections' rows", in.positions.extent(1),
                     lengths);
    }
    return {};
  }

  Status add_row(LayerSelections const& in, index_t row) {
    index_t const length = in.lengths.extent(0) == 0 ? -1 : in.lengths(row);
    if (in.lengths.extent(0) != 0 && length < 0) {
      return failure(Errc::bad_value, "length of a row of selections", 0, length);
    }
    if (Status const status = number_positions(in, row); !status.ok()) return status;
    mark_positions();
    forget_positions();
    count_row(length, in.positions.extent(2));
    return {};
  }

  /// Gives each position that is selected at all a number, in the order in which they come, and
  /// writes the numbers of every layer's picks down. Bit sets over these numbers are shorter than
  /// sets over positions: few positions are selected, and mostly by many layers.
  Status number_positions(LayerSelections const& in, index_t row) {
    picks_.clear();
    touched_.clear();
    for (index_t layer = 0; layer < counts_.layers(); ++layer) {
      position_t const* const entries = &in.positions(layer, row, 0);
      for (index_t i = 0; i < in.positions.extent(2); ++i) {
        if (entries[i] < 0) continue;
        auto const position = static_cast<std::size_t>(entries[i]);
        if (position >= numbers_.size()) {
          if (entries[i] >= overlap_context_limit) {
            forget_positions();
            return failure(Errc::bad_value, "position in a selection, below", overlap_context_limit,
                           entries[i])
                .at_layer(static_cast<std::int32_t>(layer));
          }
          numbers_.resize(std::max(position + 1, 2 * numbers_.size()));
        }
        std::uint32_t& number = numbers_[position];
        if (number == 0) {
          touched_.push_back(entries[i]);
          number = static_cast<std::uint32_t>(touched_.size());
        }
        picks_.push_back(number - 1);
      }
      sizes_[static_cast<std::size_t>(layer)].picks = picks_.size();
    }
    return {};
  }

  void mark_positions() {
    std::size_t const block_bits = 64 * detail::bit_block;
    words_ = (touched_.size() + block_bits - 1) / block_bits * detail::bit_block;
    bits_.assign(sizes_.size() * words_, 0);
    std::size_t at = 0;
    for (std::size_t layer = 0; layer < sizes_.size(); ++layer) {
      std::uint64_t* const set = bits_.data() + layer * words_;
      for (; at < sizes_[layer].picks; ++at) {
        set[picks_[at] / 64] |= std::uint64_t{1} << picks_[at] % 64;
      }
    }
  }

  void forget_positions() noexcept {
    for (position_t const position : touched_) numbers_[static_cast<std::size_t>(position)] = 0;
  }

  /// @param length  visible keys, -1: not known
  void count_row(index_t length, index_t top_k) {
    std::uint64_t largest = 0;
    for (std::size_t layer = 0; layer < sizes_.size(); ++layer) {
      sizes_[layer].distinct = common(layer, layer);
      largest = std::max(largest, sizes_[layer].distinct);
    }
    bool const is_short =
        length >= 0 ? length <= top_k : largest < static_cast<std::uint64_t>(top_k);
    if (is_short) ++counts_.short_;
    if (largest == 0 || (is_short && options_.skip_short)) {
      ++counts_.left_out_;
      return;
    }
    ++counts_.rows_;
    if (length >= 0) {
      ++counts_.rows_with_length_;
      // a selection of positions that the row does not see would be more than all of them
      auto const visible = static_cast<std::uint64_t>(length);
      counts_.random_ += OverlapCounts::quotient(std::min(largest, visible), visible);
    }
    add_pairs();
  }

  void add_pairs() {
    std::size_t pair = 0;
    for (std::size_t high = 0; high < sizes_.size(); ++high) {
      for (std::size_t low = 0; low < high; ++low) {
        counts_.sums_[pair++] += OverlapCounts::quotient(
            common(high, low), std::max(sizes_[high].distinct, sizes_[low].distinct));
      }
      counts_.sums_[pair++] +=
          OverlapCounts::quotient(sizes_[high].distinct, sizes_[high].distinct);
    }
  }

  std::uint64_t common(std::size_t a, std::size_t b) const noexcept {
    return detail::common_bits(bits_.data() + a * words_, bits_.data() + b * words_, words_);
  }

  struct LayerSize {
    std::size_t picks = 0;       // where the layer's part of picks_ ends
    std::uint64_t distinct = 0;  // positions that it selects
  };

  OverlapOptions options_;
  OverlapCounts counts_;
  std::vector<LayerSize> sizes_;
  std::vector<std::uint32_t> numbers_;  // by position: 1 + its number, 0: none
  std::vector<position_t> touched_;     // positions that have a number
  std::vector<std::uint32_t> picks_;    // the numbers that layers select, one layer after the other
  std::vector<std::uint64_t> bits_;     // a set of numbers per layer
  std::size_t words_ = 0;               // of a set
};

}  // namespace indexcache
}  // namespace v0
}  // namespace indexshare
