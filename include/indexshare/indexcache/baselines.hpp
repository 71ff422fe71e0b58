// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/indexcache/role_pattern.hpp>
#include <indexshare/share/periodic.hpp>
#include <indexshare/status.hpp>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <random>
#include <span>
#include <utility>
#include <vector>

/// @file Patterns to compare a searched one with.

namespace indexshare {
inline namespace v0 {
namespace indexcache {

namespace detail {

inline Result<RolePattern> every_freq_th(std::int32_t layers, std::int32_t freq,
                                         std::int32_t offset) {
  if (layers < 1 || layers > max_schedule_layers)
    return refuse(failure(Errc::bad_value, "layers must be from 1 to max_schedule_layers",
                          max_schedule_layers, layers));
  if (freq < 1) return refuse(failure(Errc::bad_value, "freq must be at least 1", 1, freq));
  RolePattern pattern = RolePattern::all_full(layers);
  for (std::int32_t layer = 0; layer < layers; ++layer)
    if (!is_full_by_period(layer, freq, offset)) pattern = pattern.with_shared(layer);
  return pattern;
}

inline Status check_full_count(std::int32_t layers, std::int32_t full) noexcept {
  if (layers < 1 || layers > max_schedule_layers)
    return failure(Errc::bad_value, "layers must be from 1 to max_schedule_layers",
                   max_schedule_layers, layers);
  if (full < 1 || full > layers)
    return failure(Errc::bad_value, "full layers must be from 1 to the number of layers", layers,
                   full);
  return {};
}

}  // namespace detail

/// Full layers 0, freq, 2 * freq, ...: the uniform schedule of the paper's text, `FSSSFSSS`.
/// Errors: bad_value for layers outside 1 .. max_schedule_layers or freq < 1.
/// @source IndexCache, arXiv 2603.12201, section 4
inline Result<RolePattern> uniform_paper(std::int32_t layers, std::int32_t freq) {
  return detail::every_freq_th(layers, freq, 1);
}

/// Full layers 0, 1, 1 + freq, 1 + 2 * freq, ...: the uniform schedule of the patches that came
/// with the paper and of the engines that took them over, `FFSSSFSSS`. It has up to one full layer
/// more than the paper's. Errors: as `uniform_paper`.
/// @source THUDM/IndexCache at 08d22d6: `max(layer - 1, 0) % freq`
inline Result<RolePattern> uniform_patches(std::int32_t layers, std::int32_t freq) {
  return detail::every_freq_th(layers, freq, static_cast<std::int32_t>(default_share_offset));
}

/// Sum over the shared layers of a pattern of their similarity to their source.
/// @param similarity  [layers, layers] row-major; [l][j] is read for sources j < l
inline double similarity_sum(RolePattern const& pattern, std::span<double const> similarity) {
  auto const layers = static_cast<std::size_t>(pattern.layers());
  double sum = 0;
  for (std::int32_t layer = 0; layer < pattern.layers(); ++layer)
    if (!pattern.is_full(layer))
      sum += similarity[static_cast<std::size_t>(layer) * layers +
                        static_cast<std::size_t>(pattern.source(layer))];
  return sum;
}

namespace detail {

/// The pattern with the highest similarity sum, by dynamic programming over the full layers from
/// the last to the first.
class SimilarityProgram {
 public:
  SimilarityProgram(std::span<double const> similarity, std::int32_t layers, std::int32_t full)
      : layers_(static_cast<std::size_t>(layers)), full_(static_cast<std::size_t>(full)) {
    sum_groups(similarity);
    best_.assign(full_ + 1, std::vector<double>(layers_ + 1, 0));
    next_.assign(full_ + 1, std::vector<std::size_t>(layers_ + 1, layers_));
    for (std::size_t left = 1; left <= full_; ++left)
      for (std::size_t first = 0; first + left <= layers_; ++first) choose_next(left, first);
  }

  RolePattern pattern() const {
    std::vector<LayerRole> roles(layers_, LayerRole::shared);
    std::size_t layer = 0;
    for (std::size_t left = full_; left > 0; layer = next_[left][layer], --left)
      roles[layer] = LayerRole::full;
    return *RolePattern::from_roles(roles);
  }

 private:
  // groups_[f][e]: similarity to f, summed over the layers f + 1 .. e - 1 that read from it.
  void sum_groups(std::span<double const> similarity) {
    groups_.assign(layers_, std::vector<double>(layers_ + 1, 0));
    for (std::size_t first = 0; first < layers_; ++first)
      for (std::size_t layer = first + 1; layer < layers_; ++layer)
        groups_[first][layer + 1] = groups_[first][layer] + similarity[layer * layers_ + first];
  }

  /// The best that the layers from `first` on can do if it is full, with `left` full layers, itself
  /// counted; and the full layer after it. Of equal ones the lowest.
  void choose_next(std::size_t left, std::size_t first) {
    if (left == 1) {
      best_[left][first] = groups_[first][layers_];
      return;
    }
    std::size_t const last = layers_ - (left - 1);  // later ones leave too few layers
    for (std::size_t next = first + 1; next <= last; ++next) {
      double const sum = groups_[first][next] + best_[left - 1][next];
      if (next > first + 1 && !(sum > best_[left][first])) continue;
      best_[left][first] = sum;
      next_[left][first] = next;
    }
  }

  std::size_t layers_;
  std::size_t full_;
  std::vector<std::vector<double>> groups_;
  std::vector<std::vector<double>> best_;       // by full layers left and first of them
  std::vector<std::vector<std::size_t>> next_;  // the same
};

}  // namespace detail

/// Of all patterns with `full` full layers, the one whose shared layers are most similar to their
/// sources in sum; of equal ones that whose list of full layers comes first in order. A baseline:
/// the paper found it no better than a uniform schedule, because a local measure does not see how a
/// few missed tokens add up through the layers.
/// @param similarity  [layers, layers] row-major; only [l][j] with j < l is read: how well layer l
///                    does, or how much it selects, with the selection of layer j
/// Errors: bad_value for layers outside 1 .. max_schedule_layers or full outside 1 .. layers;
/// bad_shape for a matrix of another size; bad_value for an entry that is not finite: `layer` is
/// then its row and `got` its column. Cost: time layers^2 * full, memory layers * (layers + full).
/// @source IndexCache, arXiv 2603.12201, Appendix C
inline Result<RolePattern> similarity_pattern(std::span<double const> similarity,
                                              std::int32_t layers, std::int32_t full) {
  if (Status const status = detail::check_full_count(layers, full); !status.ok())
    return refuse(status);
  auto const size = static_cast<std::size_t>(layers);
  if (similarity.size() != size * size)
    return refuse(failure(Errc::bad_shape, "similarity must have layers * layers entries",
                          std::int64_t{layers} * layers,
                          static_cast<std::int64_t>(similarity.size())));
  for (std::size_t layer = 0; layer < size; ++layer)
    for (std::size_t source = 0; source < layer; ++source)
      if (!std::isfinite(similarity[layer * size + source]))
        return refuse(failure(Errc::bad_value, "similarity to a lower layer must be finite", 0,
                              static_cast<std::int64_t>(source))
                          .at_layer(static_cast<std::int32_t>(layer)));
  return detail::SimilarityProgram(similarity, layers, full).pattern();
}

/// A random pattern with `full` full layers, layer 0 among them; every such pattern is equally
/// likely. The same seed gives the same pattern on every machine.
/// Errors: bad_value for layers outside 1 .. max_schedule_layers or full outside 1 .. layers.
inline Result<RolePattern> random_pattern(std::int32_t layers, std::int32_t full,
                                          std::uint64_t seed) {
  if (Status const status = detail::check_full_count(layers, full); !status.ok())
    return refuse(status);
  std::vector<std::int32_t> order(static_cast<std::size_t>(layers));
  std::iota(order.begin(), order.end(), 0);
  std::mt19937_64 bits(seed);
  // The distributions of <random> differ between standard libraries.
  auto const below = [&](std::uint64_t end) {
    std::uint64_t const usable = ~std::uint64_t{0} - ~std::uint64_t{0} % end;
    std::uint64_t number = bits();
    while (number >= usable) number = bits();
    return number % end;
  };
  RolePattern pattern = RolePattern::all_full(layers);
  for (std::size_t chosen = 1; chosen <= static_cast<std::size_t>(layers - full); ++chosen) {
    std::size_t const pick = chosen + below(order.size() - chosen);
    std::swap(order[chosen], order[pick]);
    pattern = pattern.with_shared(order[chosen]);
  }
  return pattern;
}

}  // namespace indexcache
}  // namespace v0
}  // namespace indexshare
