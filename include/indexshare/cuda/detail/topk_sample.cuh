// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/cuda/topk_plan.hpp>
#include <indexshare/macros.hpp>

#include <cmath>
#include <cstdint>

namespace indexshare {
inline namespace v0 {
namespace detail {

/// Elements of a 32-byte sector, the least that a read costs.
template <class Score>
inline constexpr std::uint32_t sector_elements = sizeof(Score) < 32 ? 32 / sizeof(Score) : 1;

/// Which scores of a long row are looked at first: whole sectors, one from each of `groups`
/// equal parts of the row, at a place that a hash gives. So a trend along the row does no harm, and
/// no period of the scores matches that of the sample. The sample only bounds the work: any
/// choice gives the same selection.
struct TopKSample {
  std::uint32_t first;    ///< position of the row's first whole sector
  std::uint32_t sectors;  ///< whole sectors of the row
  std::uint32_t groups;
  std::uint32_t width;  ///< scores of a group

  INDEXSHARE_HD constexpr std::uint32_t size() const noexcept { return groups * width; }
  /// Ascending in i.
  INDEXSHARE_HD constexpr std::uint32_t position(std::uint32_t i) const noexcept {
    std::uint32_t const group = i / width;
    std::uint32_t const begin = part(group);
    std::uint32_t const places = part(group + 1) - begin;
    std::uint32_t hash = (group + 1) * 0x9E3779B9u;
    hash = (hash ^ (hash >> 15)) * 0x85EBCA6Bu;
    hash ^= hash >> 13;
    auto const place = static_cast<std::uint32_t>((std::uint64_t{hash} * places) >> 32);
    return first + (begin + place) * width + i % width;
  }

 private:
  INDEXSHARE_HD constexpr std::uint32_t part(std::uint32_t group) const noexcept {
    return static_cast<std::uint32_t>(std::uint64_t{group} * sectors / groups);
  }
};

/// @param length  more than Wide::row_keys
/// @param skew    elements of the row's first sector that lie before the row
template <class Wide, class Score>
INDEXSHARE_HD constexpr TopKSample make_topk_sample(std::uint32_t length,
                                                    std::uint32_t skew) noexcept {
  constexpr std::uint32_t width = sector_elements<Score>;
  static_assert(Wide::least_sample >= width && Wide::least_sample < Wide::row_keys / 2);
  static_assert(Wide::most_sample <= Wide::row_keys, "the sample lies where a short row does");
  std::uint32_t const first = skew == 0 ? 0 : width - skew;
  std::uint32_t wanted = length / Wide::sample_rate;
  if (wanted < Wide::least_sample) wanted = Wide::least_sample;
  if (wanted > Wide::most_sample) wanted = Wide::most_sample;
  return {first, (length - first) / width, wanted / width, width};
}

/// The place of the threshold in the sample, best first. If m of n scores are sampled, about
/// e = m * k / n of the k best are among them, give or take sqrt(e); and E = m * C / n of the
/// C best, where C is what the candidates' buffer holds. The threshold is 8 deviations above e, or
/// as many above e as below E where that is less. Neighbours that are alike make the deviations up
/// to sqrt(8) times larger.
template <class Wide>
INDEXSHARE_HD inline std::uint32_t topk_sample_rank(std::uint32_t sampled, std::uint32_t length,
                                                    std::uint32_t k) noexcept {
  float const expected =
      static_cast<float>(sampled) * static_cast<float>(k) / static_cast<float>(length);
  float const ratio = static_cast<float>(Wide::candidates) / static_cast<float>(k);
  float const generous = expected + 8 * sqrtf(expected) + 4;
  float const middle = expected * sqrtf(ratio) + 1;
  auto const rank = static_cast<std::uint32_t>(generous < middle ? generous : middle);
  std::uint32_t const most = k < sampled ? k : sampled;  // k sampled scores suffice
  return rank < 1 ? 1 : rank < most ? rank : most;
}

}  // namespace detail
}  // namespace v0
}  // namespace indexshare
