// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/cache.hpp>
#include <indexshare/detail/check.hpp>
#include <indexshare/dims.hpp>
#include <indexshare/exec.hpp>
#include <indexshare/host/rows.hpp>
#include <indexshare/share/schedule.hpp>
#include <indexshare/status.hpp>
#include <indexshare/views.hpp>

#include <array>
#include <cmath>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <limits>

/// @file The loss that trains one indexer for several layers: a full layer and the shared layers
/// that read its selection are its served layers, and its index scores are drawn towards the
/// attention of all of them. For training code that calls C++: value and gradient with respect to
/// the scores, on the host.
///
/// Of one row (query token) over its positions, with q = softmax(scores) and p_j the attention of
/// served layer j, averaged over heads:
///
///     loss        = mean_j KL(p_j || q)            gradient = q - mean_j p_j
///
/// Gradients go to the scores alone. Attention is a constant here (detached): the loss trains the
/// indexer, not the layers that it serves.
///
/// @source IndexCache, arXiv 2603.12201, section 4 (L_multi; its gradient is that of
/// KL(mean_j p_j || q), Proposition 1)

namespace indexshare {
inline namespace v0 {
namespace indexcache {

/// What one row adds to the loss, in nats.
struct DistillationLoss {
  double multi = 0;  ///< mean_j KL(p_j || q)
  /// KL of the p_j from their mean, averaged (the Jensen-Shannon divergence of the served layers):
  /// at most log(served layers), 0 if all attend alike. No indexer can bring `multi` below it, so
  /// it says how shareable one selection of positions is among these layers.
  double divergence = 0;
  /// Served layers whose attention is 0 at every position of the row. They have no distribution
  /// there and are left out of the means.
  std::int32_t layers_without_mass = 0;

  /// KL(mean_j p_j || q), which has the same gradient.
  constexpr double average() const noexcept { return multi - divergence; }
};

/// Every visible key of a row: dense warm-up. Also the selected keys, where scores and attention
/// are both gathered already: lengths are then the counts of the selection, keys its top_k.
template <std::floating_point Score = float, std::floating_point Attention = float>
struct DenseDistillation {
  Tensor<Space::host, Score const, 2> scores{};  ///< [rows, keys] index scores
  LengthView<Space::host> lengths{};             ///< [rows] visible keys, clamped to [0, keys]
  Tensor<Space::host, Attention const, 3> attention{};  ///< [served layers, rows, keys]
};

/// Where the attention of a selected position lies.
enum class AttentionColumns : std::uint8_t {
  entries,    ///< beside its entry of the selection, [served layers, rows, top_k]
  positions,  ///< in its own column, [served layers, rows, keys]
};

/// The selected keys of a row alone: sparse training.
template <std::floating_point Score = float, std::floating_point Attention = float>
struct SelectedDistillation {
  Tensor<Space::host, Score const, 2> scores{};  ///< [rows, keys] index scores
  /// [rows, top_k] positions, distinct within a row (`indices` of a SelectionView). `no_position`
  /// and everything else outside [0, keys) takes no part.
  Tensor<Space::host, position_t const, 2> indices{};
  Tensor<Space::host, Attention const, 3> attention{};
  AttentionColumns columns = AttentionColumns::entries;
};

/// What `distill` writes. Both are overwritten, not added to.
template <std::floating_point Gradient = float>
struct DistillationOutput {
  Tensor<Space::host, DistillationLoss, 1> losses{};  ///< [rows]
  /// of `multi` with respect to the scores: [rows, keys], or [rows, top_k] beside the entries of a
  /// selection; 0 where no position takes part
  Tensor<Space::host, Gradient, 2> gradient{};
};

namespace detail {

/// log softmax, safe for scores of any magnitude: exp sees no number above 0.
struct LogSoftmax {
  double largest = -std::numeric_limits<double>::infinity();
  double log_sum = 0;  ///< of exp(score - largest)

  double operator()(double score) const noexcept {
    if (largest == -std::numeric_limits<double>::infinity()) return largest;  // not inf - inf
    return score - largest - log_sum;
  }
};

/// The positions of one row: `count` entries; a score lies in column `score_column(i)`, negative if
/// entry i takes no part, the attention to it in column `attention_column(i)`.
template <class Inputs, class ScoreColumn, class AttentionColumn>
class DistilledRow {
 public:
  DistilledRow(Inputs const& in, index_t row, index_t count, ScoreColumn score_column,
               AttentionColumn attention_column) noexcept
      : in_(in),
        row_(row),
        count_(count),
        score_column_(score_column),
        attention_column_(attention_column) {}

  /// The row's loss; hands the gradient of entry i to write(i, gradient).
  template <class Write>
  DistillationLoss distill(Write const& write) const noexcept {
    LogSoftmax const log_softmax = normalise_scores();
    std::array<double, max_schedule_layers> mass;  // written below as far as it is read
    DistillationLoss loss;
    index_t const layers = in_.attention.extent(0);
    for (index_t layer = 0; layer < layers; ++layer) {
      double& sum = mass[static_cast<std::size_t>(layer)];
      sum = mass_of(layer);
      if (sum != 0) continue;
      ++loss.layers_without_mass;
      sum = 1;  // of a layer that is 0 everywhere and so adds nothing
    }
    double const share = 1 / static_cast<double>(layers - loss.layers_without_mass);
    bool const any_mass = loss.layers_without_mass < layers;
    for (index_t i = 0; i < count_; ++i) {
      if (score_column_(i) < 0 || !any_mass) {
        write(i, 0.0);
        continue;
      }
      double const log_q = log_softmax(score(i));
      double mean = 0;
      for (index_t layer = 0; layer < layers; ++layer) mean += share * probability(layer, i, mass);
      double const log_mean = std::log(mean);
      for (index_t layer = 0; layer < layers; ++layer) {
        double const p = probability(layer, i, mass);
        if (p == 0) continue;  // 0 log 0 = 0
        double const log_p = std::log(p);
        loss.multi += share * p * (log_p - log_q);
        loss.divergence += share * p * (log_p - log_mean);
      }
      write(i, std::exp(log_q) - mean);
    }
    return loss;
  }

 private:
  double score(index_t i) const noexcept {
    return static_cast<double>(in_.scores(row_, score_column_(i)));
  }
  double attention(index_t layer, index_t i) const noexcept {
    return static_cast<double>(in_.attention(layer, row_, attention_column_(i)));
  }
  double probability(index_t layer, index_t i,
                     std::array<double, max_schedule_layers> const& mass) const noexcept {
    return attention(layer, i) / mass[static_cast<std::size_t>(layer)];
  }

  LogSoftmax normalise_scores() const noexcept {
    LogSoftmax result;
    for (index_t i = 0; i < count_; ++i) {
      if (score_column_(i) >= 0 && score(i) > result.largest) result.largest = score(i);
    }
    double sum = 0;
    for (index_t i = 0; i < count_; ++i) {
      if (score_column_(i) >= 0) sum += std::exp(score(i) - result.largest);
    }
    result.log_sum = std::log(sum);
    return result;
  }

  double mass_of(index_t layer) const noexcept {
    double sum = 0;
    for (index_t i = 0; i < count_; ++i) {
      if (score_column_(i) >= 0) sum += attention(layer, i);
    }
    return sum;
  }

  Inputs const& in_;
  index_t row_;
  index_t count_;
  ScoreColumn score_column_;
  AttentionColumn attention_column_;
};

/// What both forms share.
template <class Inputs, class Gradient>
Status check_distillation(Inputs const& in, DistillationOutput<Gradient> const& out,
                          index_t attention_columns, index_t gradient_columns) noexcept {
  using namespace v0::detail;
  index_t const rows = in.scores.extent(0);
  return first_failure(
      {check_at_least("served layers of the attention", 1, in.attention.extent(0)),
       check_at_most("served layers of the attention", max_schedule_layers, in.attention.extent(0)),
       check_extent("rows of the attention", rows, in.attention.extent(1)),
       check_extent("columns of the attention", attention_columns, in.attention.extent(2)),
       check_extent("rows of the losses", rows, out.losses.extent(0)),
       check_extent("rows of the gradient", rows, out.gradient.extent(0)),
       check_extent("columns of the gradient", gradient_columns, out.gradient.extent(1)),
       check_readable("index scores", in.scores), check_readable("attention", in.attention),
       check_writable("losses", out.losses), check_writable("gradient", out.gradient)});
}

}  // namespace detail

/// The mean over heads of each row's attention, normalised to sum 1 over its visible keys: what
/// the loss calls p_j. `distill` normalises what it is given, so a caller with another way to sum
/// over heads needs no division.
///
/// @param weights  [rows, heads, keys], 0 or more: softmax of each head
/// @param lengths  [rows], clamped to [0, keys]; columns at or past it are not read
/// @param out      [rows, keys], for example the slice of one served layer; 0 at or past the length
///                 and in a row whose weights are all 0
/// Errors: bad_shape, bad_stride, missing_input.
template <HostSpaceExecutor X, std::floating_point Weight, std::floating_point Attention>
Status average_heads(X const& x, Tensor<Space::host, Weight const, 3> const& weights,
                     LengthView<Space::host> const& lengths,
                     Tensor<Space::host, Attention, 2> const& out) noexcept {
  using namespace v0::detail;
  index_t const rows = weights.extent(0);
  index_t const keys = weights.extent(2);
  if (Status const status =
          first_failure({check_extent("lengths of the attention weights", rows, lengths.extent(0)),
                         check_extent("rows of the averaged attention", rows, out.extent(0)),
                         check_extent("keys of the averaged attention", keys, out.extent(1)),
                         check_readable("attention weights", weights),
                         check_readable("lengths of the attention weights", lengths),
                         check_writable("averaged attention", out)});
      !status.ok()) {
    return status;
  }
  for_each_row(x, rows, [&](index_t row) noexcept {
    index_t const length = clamp_length(lengths(row), keys);
    auto const sum_over_heads = [&](index_t key) noexcept {
      double sum = 0;
      for (index_t head = 0; head < weights.extent(1); ++head) {
        sum += static_cast<double>(weights(row, head, key));
      }
      return sum;
    };
    double mass = 0;
    for (index_t key = 0; key < length; ++key) mass += sum_over_heads(key);
    for (index_t key = 0; key < keys; ++key) {
      bool const visible = key < length && mass != 0;
      out(row, key) = visible ? static_cast<Attention>(sum_over_heads(key) / mass) : Attention{0};
    }
  });
  return {};
}

/// Loss and gradient of each row over all its visible keys; see the top of the file.
///
/// Attention is 0 or more and finite; each served layer's row is divided by its sum over the row's
/// positions first, so sums over heads do as well as means. Computed in double; a row's result
/// depends on nothing but its own data. A row without visible keys has loss 0.
/// Scores of -inf have q = 0: with attention 0 they add nothing, with more `multi` is +inf (the
/// gradient stays finite). A NaN anywhere in a row, or a score of +inf, makes that row NaN.
/// Columns at or past a length are not read. Allocates nothing. Time: one log per served layer and
/// position. Errors, before anything is written: bad_shape, bad_stride, missing_input.
template <HostSpaceExecutor X, class Score, class Attention, class Gradient>
Status distill(X const& x, DenseDistillation<Score, Attention> const& in,
               DistillationOutput<Gradient> const& out) noexcept {
  using namespace v0::detail;
  index_t const rows = in.scores.extent(0);
  index_t const keys = in.scores.extent(1);
  if (Status const status =
          first_failure({check_extent("lengths of the index scores", rows, in.lengths.extent(0)),
                         check_readable("lengths of the index scores", in.lengths),
                         detail::check_distillation(in, out, keys, keys)});
      !status.ok()) {
    return status;
  }
  for_each_row(x, rows, [&](index_t row) noexcept {
    index_t const length = clamp_length(in.lengths(row), keys);
    auto const column = [](index_t i) noexcept { return i; };
    auto const write = [&](index_t i, double gradient) noexcept {
      out.gradient(row, i) = static_cast<Gradient>(gradient);
    };
    out.losses(row) = detail::DistilledRow(in, row, length, column, column).distill(write);
    for (index_t key = length; key < keys; ++key) write(key, 0.0);
  });
  return {};
}

/// The same on the selected positions: q is the softmax of the scores there, and each served
/// layer's attention is divided by its own sum there before the mean is taken. (The mean divided by
/// its sum is something else: a layer that attends elsewhere would count less.)
///
/// A row whose entries are all empty has loss 0. Only the scores of selected positions are read.
/// The gradient lies beside the entries; add it to column indices(row, entry) for one of all
/// scores.
template <HostSpaceExecutor X, class Score, class Attention, class Gradient>
Status distill(X const& x, SelectedDistillation<Score, Attention> const& in,
               DistillationOutput<Gradient> const& out) noexcept {
  using namespace v0::detail;
  index_t const rows = in.scores.extent(0);
  index_t const keys = in.scores.extent(1);
  index_t const top_k = in.indices.extent(1);
  bool const beside = in.columns == AttentionColumns::entries;
  if (Status const status = first_failure(
          {check_extent("rows of the selection's indices", rows, in.indices.extent(0)),
           check_readable("selection's indices", in.indices),
           detail::check_distillation(in, out, beside ? top_k : keys, top_k)});
      !status.ok()) {
    return status;
  }
  for_each_row(x, rows, [&](index_t row) noexcept {
    auto const position = [&](index_t i) noexcept -> index_t {
      index_t const p = in.indices(row, i);
      return p < keys ? p : no_position;
    };
    auto const attention_column = [&](index_t i) noexcept { return beside ? i : position(i); };
    auto const write = [&](index_t i, double gradient) noexcept {
      out.gradient(row, i) = static_cast<Gradient>(gradient);
    };
    out.losses(row) =
        detail::DistilledRow(in, row, top_k, position, attention_column).distill(write);
  });
  return {};
}

}  // namespace indexcache
}  // namespace v0
}  // namespace indexshare
