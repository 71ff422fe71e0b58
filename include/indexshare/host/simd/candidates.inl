// SPDX-License-Identifier: Apache-2.0
// Lists of candidates, by vectors of at most eight: wider ones gain little, and nvcc's front end
// cannot compare integers in them.

inline constexpr int scan_width = lanes < candidate_vector ? lanes : candidate_vector;

using ScanFloats = float __attribute__((vector_size(4 * scan_width)));
using ScanInts = std::int32_t __attribute__((vector_size(4 * scan_width)));
using ScanWords = std::uint32_t __attribute__((vector_size(4 * scan_width)));

/// A bit for each place.
using PlaceSet = unsigned;
inline constexpr PlaceSet all_places = (1u << scan_width) - 1;

INDEXSHARE_ISA_INLINE PlaceSet first_places(index_t n) noexcept {
  return n >= scan_width ? all_places : (1u << n) - 1;
}

INDEXSHARE_ISA_INLINE ScanWords place_numbers() noexcept {
  ScanWords numbers{};
  for (unsigned place = 0; place < scan_width; ++place) numbers[place] = place;
  return numbers;
}

/// The lowest `n` places of a set.
INDEXSHARE_ISA_INLINE PlaceSet first_of(PlaceSet places, index_t n) noexcept {
  if (n >= scan_width) return places;
  PlaceSet rest = places;
  for (; n > 0 && rest != 0; --n) rest &= rest - 1;
  return places ^ rest;
}

/// Where a comparison, whose places are all ones or all zeros, holds.
INDEXSHARE_ISA_INLINE PlaceSet places_of(ScanInts comparison) noexcept {
#if defined(__x86_64__) && INDEXSHARE_ISA_LANES >= 8
  return static_cast<PlaceSet>(__builtin_ia32_movmskps256(bits_as<ScanFloats>(comparison)));
#elif defined(__x86_64__)
  return static_cast<PlaceSet>(__builtin_ia32_movmskps(bits_as<ScanFloats>(comparison)));
#else
  PlaceSet places = 0;
  for (int i = 0; i < scan_width; ++i) places |= static_cast<PlaceSet>(comparison[i] & 1) << i;
  return places;
#endif
}

/// order_key less 2^31, so that it compares as a signed number.
INDEXSHARE_ISA_INLINE ScanInts order_of(ScanFloats scores) noexcept {
  ScanInts const bits = bits_as<ScanInts>(scores);
  ScanInts const magnitude = bits & 0x7FFFFFFF;
  ScanInts const negative = bits >> 31;
  ScanInts const order = (magnitude ^ negative) - negative;
  ScanInts const nan = magnitude > 0x7F800000;
  return (order & ~nan) | (nan & std::numeric_limits<std::int32_t>::min());
}
INDEXSHARE_ISA_INLINE ScanWords keys_of(ScanInts orders) noexcept {
  return bits_as<ScanWords>(orders) ^ 0x80000000u;
}
INDEXSHARE_ISA_INLINE std::int32_t order_of_key(std::uint32_t key) noexcept {
  return static_cast<std::int32_t>(key ^ 0x80000000u);
}

/// Writes a vector of scores and positions of which the given places come first, in their order;
/// what follows them is free to be overwritten. Returns how many they are.
INDEXSHARE_ISA_INLINE index_t pack(ScanFloats scores, ScanInts positions, PlaceSet places,
                                   float* to_scores, position_t* to_positions) noexcept {
#if defined(__x86_64__) && INDEXSHARE_ISA_LANES >= 8
  ScanWords const numbers = (ScanWords{} + packing_order.of[places]) >> (4u * place_numbers());
  ScanInts const from = bits_as<ScanInts>(numbers);  // of which the lowest three bits count
  ScanFloats const packed_scores = __builtin_ia32_permvarsf256(scores, from);
  ScanFloats const packed_positions =
      __builtin_ia32_permvarsf256(bits_as<ScanFloats>(positions), from);
  __builtin_memcpy(to_scores, &packed_scores, sizeof(packed_scores));
  __builtin_memcpy(to_positions, &packed_positions, sizeof(packed_positions));
  return __builtin_popcount(places);
#else
  index_t n = 0;
  for (int i = 0; i < scan_width; ++i) {  // no branch: who stays is hard to predict
    to_scores[n] = scores[i];
    to_positions[n] = positions[i];
    n += places >> i & 1;
  }
  return n;
#endif
}

/// Keeps of each vector of scores the places that `keeps` gives for its orders.
template <class Keeps>
INDEXSHARE_ISA_INLINE void keep(Candidates& list, Keeps& keeps) noexcept {
  float* const scores = list.scores;
  position_t* const positions = list.positions;
  index_t const count = list.count;
  index_t kept = 0;
  for (index_t i = 0; i < count; i += scan_width) {
    ScanFloats const score = load_as<ScanFloats>(scores + i);
    PlaceSet const places = keeps(order_of(score)) & first_places(count - i);
    kept += pack(score, load_as<ScanInts>(positions + i), places, scores + kept, positions + kept);
  }
  list.count = kept;
}

/// All that reach the cut. Of those that agree with it in the bits `known` it collects the bits
/// that are ones and zeros in any of them.
struct AtLeast {
  std::uint32_t known;
  std::uint32_t cut;
  ScanWords ones{};
  ScanWords zeros{};

  INDEXSHARE_ISA_INLINE PlaceSet operator()(ScanInts orders) noexcept {
    ScanWords const keys = keys_of(orders);
    ScanWords const agree = bits_as<ScanWords>((keys & known) == cut);
    ones |= keys & agree;
    zeros |= ~keys & agree;
    return places_of(orders >= order_of_key(cut));
  }
};

/// All above the cut and the first `ties` that equal it.
struct Best {
  std::uint32_t cut;
  index_t ties;
  INDEXSHARE_ISA_INLINE PlaceSet operator()(ScanInts orders) noexcept {
    PlaceSet const equal = first_of(places_of(orders == order_of_key(cut)), ties);
    ties -= __builtin_popcount(equal);
    return places_of(orders > order_of_key(cut)) | equal;
  }
};

/// A digit of order keys, and what is known of the digits above it.
struct Digit {
  int shift;
  std::uint32_t mask;
};
inline constexpr Digit digits[] = {{21, 0x7FF}, {10, 0x7FF}, {0, 0x3FF}};

/// How often each value of a digit occurs in the keys that agree with `prefix` in the bits `known`.
INDEXSHARE_ISA_INLINE void count_digit(Candidates const& list, Digit digit, std::uint32_t known,
                                       std::uint32_t prefix, std::uint32_t* histogram) noexcept {
  constexpr index_t block = 8 * scan_width;
  for (index_t first = 0; first < list.count; first += block) {
    std::uint32_t values[block];
    std::uint32_t agree[block];
    index_t const filled = list.count - first < block ? list.count - first : block;
    for (index_t i = 0; i < filled; i += scan_width) {
      ScanWords const keys = keys_of(order_of(load_as<ScanFloats>(list.scores + first + i)));
      ScanWords const value = keys >> digit.shift & digit.mask;
      ScanWords const agrees = bits_as<ScanWords>((keys & known) == prefix) & 1u;
      __builtin_memcpy(values + i, &value, sizeof(value));
      __builtin_memcpy(agree + i, &agrees, sizeof(agrees));
    }
    for (index_t i = 0; i < filled; ++i) histogram[values[i]] += agree[i];
  }
}

INDEXSHARE_ISA_KERNEL void compact_list(Candidates& list) noexcept {
  if (list.count <= list.wanted) return;
  std::uint32_t cut = 0;       // the digits that are known of the last of the best
  index_t ties = list.wanted;  // how many of the best have these digits
  std::uint32_t known = 0;
  for (Digit const digit : digits) {
    std::uint32_t histogram[0x800] = {};
    count_digit(list, digit, known, cut, histogram);
    std::uint32_t value = digit.mask;
    while (histogram[value] < ties) ties -= histogram[value--];
    cut |= value << digit.shift;
    known |= digit.mask << digit.shift;
    AtLeast reaching{known, cut};
    keep(list, reaching);
    std::uint32_t ones = 0;
    std::uint32_t zeros = 0;
    for (int place = 0; place < scan_width; ++place) {
      ones |= reaching.ones[place];
      zeros |= reaching.zeros[place];
    }
    if ((ones & zeros) == 0) {  // a plateau, the kind of tie that real scores have
      cut = ones;
      break;
    }
  }
  Best best{cut, ties};
  keep(list, best);
  list.floor = lowest_above(cut);
  list.open = false;
}

/// What reaches the floor; with denormals treated as zeros, more than that.
INDEXSHARE_ISA_INLINE ScanInts reaches(float floor, ScanFloats scores) noexcept {
  return scores >= ScanFloats{} + floor;
}

/// Positions that follow each other.
struct Following {
  index_t first;
  INDEXSHARE_ISA_INLINE ScanInts at(index_t i) const noexcept {
    return bits_as<ScanInts>(place_numbers() + static_cast<std::uint32_t>(first + i));
  }
};

/// Positions of a list, whose memory ends with a whole vector.
struct Listed {
  position_t const* positions;
  INDEXSHARE_ISA_INLINE ScanInts at(index_t i) const noexcept {
    return load_as<ScanInts>(positions + i);
  }
};

/// Adds those of a vector that lie in `filled` and reach the floor. The list has room.
INDEXSHARE_ISA_INLINE void enter(Candidates& list, ScanFloats scores, ScanInts positions,
                                 PlaceSet filled) noexcept {
  PlaceSet const places = list.open ? filled : places_of(reaches(list.floor, scores)) & filled;
  list.count +=
      pack(scores, positions, places, list.scores + list.count, list.positions + list.count);
}

/// Less than a vector of scores.
template <class Positions>
INDEXSHARE_ISA_INLINE void add_few(Candidates& list, float const* scores,
                                   Positions const& positions, index_t n) noexcept {
  ScanFloats few{};
  for (index_t place = 0; place < n; ++place) few[place] = scores[place];
  if (list.capacity - list.count < n) compact_list(list);
  enter(list, few, positions.at(0), first_places(n));
}

/// The scores from `first` on, at most least_candidate_room. The last vector may begin before them.
template <class Positions>
INDEXSHARE_ISA_INLINE void add_step(Candidates& list, float const* scores,
                                    Positions const& positions, index_t first, index_t n) noexcept {
  index_t const last = n - scan_width;
  ScanInts any = reaches(list.floor, load_as<ScanFloats>(scores + last));
#pragma GCC unroll 8
  for (index_t i = first; i < last; i += scan_width) {
    any |= reaches(list.floor, load_as<ScanFloats>(scores + i));
  }
  if (!list.open && places_of(any) == 0) return;
  if (list.capacity - list.count < n - first) compact_list(list);
  index_t i = first;
#pragma GCC unroll 8
  for (; i < last; i += scan_width) {
    enter(list, load_as<ScanFloats>(scores + i), positions.at(i), all_places);
  }
  enter(list, load_as<ScanFloats>(scores + last), positions.at(last),
        all_places & ~first_places(i - last));
}

template <class Positions>
INDEXSHARE_ISA_INLINE void add(Candidates& list, float const* scores, Positions const& positions,
                               index_t n) noexcept {
  if (n < scan_width) return add_few(list, scores, positions, n);
  constexpr index_t step = least_candidate_room;
  index_t first = 0;
  for (; first + step <= n; first += step) add_step(list, scores, positions, first, first + step);
  if (first < n) add_step(list, scores, positions, first, n);
}

INDEXSHARE_ISA_KERNEL void append_scores(Candidates& list, float const* scores,
                                         index_t first_position, index_t n) noexcept {
  add(list, scores, Following{first_position}, n);
}
INDEXSHARE_ISA_KERNEL void append_list(Candidates& list, Candidates const& later) noexcept {
  add(list, later.scores, Listed{later.positions}, later.count);
}

template <>
inline constexpr CandidateKernels table<CandidateKernels>{&append_scores, &append_list,
                                                          &compact_list};
