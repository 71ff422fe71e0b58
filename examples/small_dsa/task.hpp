// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "../programs/demo_data.hpp"

#include <cstddef>
#include <cstdint>
#include <numeric>
#include <utility>
#include <vector>

/// @file Pointer chasing. A sequence first states a map, one record (key, value) a token in any
/// order; each value is again a key. Then come queries, each a key and a number of hops: its answer
/// is what that many steps through the map lead to. A step needs one record out of all of them, so
/// a row whose selection lacks it cannot know the answer, and each further hop needs another one.

namespace small_dsa {

struct TaskSizes {
  std::int32_t keys = 0;     ///< symbols; a record's value is one of them
  std::int32_t records = 0;  ///< at most `keys`
  std::int32_t queries = 0;
  std::int32_t max_hops = 0;  ///< a query asks for 1 .. max_hops

  std::int32_t tokens() const { return records + queries; }

  friend bool operator==(TaskSizes const&, TaskSizes const&) = default;
};

/// One entry per token: records, then queries.
struct Sequence {
  static constexpr std::int32_t no_target = -1;

  std::vector<std::int32_t> key;
  std::vector<std::int32_t> value;   ///< `keys` ("none") on queries
  std::vector<std::int32_t> hops;    ///< 0 on records
  std::vector<std::int32_t> target;  ///< the answer; no_target on records

  std::size_t tokens() const { return key.size(); }

  friend bool operator==(Sequence const&, Sequence const&) = default;
};

namespace detail {

inline std::size_t below(programs::RandomStream& random, std::size_t end) {
  return static_cast<std::size_t>(random.next() % end);
}

inline std::size_t index(std::int32_t number) { return static_cast<std::size_t>(number); }

/// `count` of 0 .. all - 1 in random order.
inline std::vector<std::int32_t> choose(programs::RandomStream& random, std::int32_t all,
                                        std::int32_t count) {
  std::vector<std::int32_t> numbers(index(all));
  std::iota(numbers.begin(), numbers.end(), 0);
  for (std::size_t i = 0; i < index(count); ++i) {
    std::swap(numbers[i], numbers[i + below(random, numbers.size() - i)]);
  }
  numbers.resize(index(count));
  return numbers;
}

}  // namespace detail

/// Sequence `number` of the set that `seed` names. The map is one cycle through all records, so no
/// number of hops below `records` leads back.
inline Sequence make_sequence(TaskSizes const& sizes, std::uint64_t seed, std::int32_t number) {
  using detail::index;
  programs::RandomStream random(seed, programs::RandomStream::Use::task, 0, {number, 0});
  auto const cycle = detail::choose(random, sizes.keys, sizes.records);
  auto const order = detail::choose(random, sizes.records, sizes.records);
  Sequence sequence;
  auto const add = [&](std::int32_t key, std::int32_t value, std::int32_t hops,
                       std::int32_t target) {
    sequence.key.push_back(key);
    sequence.value.push_back(value);
    sequence.hops.push_back(hops);
    sequence.target.push_back(target);
  };
  auto const at = [&](std::size_t place) { return cycle[place % cycle.size()]; };
  for (std::int32_t const place : order) {
    add(at(index(place)), at(index(place) + 1), 0, Sequence::no_target);
  }
  for (std::int32_t query = 0; query < sizes.queries; ++query) {
    std::size_t const place = detail::below(random, cycle.size());
    auto const hops = static_cast<std::int32_t>(1 + detail::below(random, index(sizes.max_hops)));
    add(at(place), sizes.keys, hops, at(place + index(hops)));
  }
  return sequence;
}

inline std::vector<Sequence> make_sequences(TaskSizes const& sizes, std::uint64_t seed,
                                            std::int32_t count) {
  std::vector<Sequence> sequences;
  for (std::int32_t number = 0; number < count; ++number) {
    sequences.push_back(make_sequence(sizes, seed, number));
  }
  return sequences;
}

/// Seeds of the sets that the experiment uses. Patterns are searched on the first and judged on the
/// second; both differ from whatever the weights were trained on, which another generator made.
inline constexpr std::uint64_t calibration_seed = 0x63616C6962726174;
inline constexpr std::uint64_t held_out_seed = 0x68656C642D6F7574;

}  // namespace small_dsa
