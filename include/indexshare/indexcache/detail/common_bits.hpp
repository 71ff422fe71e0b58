// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace indexshare {
inline namespace v0 {
namespace indexcache::detail {

/// Words that `common_bits` takes at a time: bit sets are padded to a multiple of it.
inline constexpr std::size_t bit_block = 16;

/// Two words. Every processor that this runs on has registers of 16 bytes, but the x86-64 baseline
/// has no instruction that counts bits: hence the counting by carry-save adders below.
using WordPair = std::uint64_t __attribute__((vector_size(16)));

inline WordPair load_pair(std::uint64_t const* words) noexcept {
  WordPair pair;
  std::memcpy(&pair, words, sizeof pair);
  return pair;
}

/// Adds three bits in each lane: the sum stays in `sum`, the carry is returned.
inline WordPair add_bits(WordPair& sum, WordPair a, WordPair b) noexcept {
  WordPair const either = sum ^ a;
  WordPair const carry = (sum & a) | (either & b);
  sum = either ^ b;
  return carry;
}

/// The bits of each byte, counted.
inline WordPair bits_of_bytes(WordPair x) noexcept {
  x = x - ((x >> 1) & 0x5555555555555555u);
  x = (x & 0x3333333333333333u) + ((x >> 2) & 0x3333333333333333u);
  return (x + (x >> 4)) & 0x0F0F0F0F0F0F0F0Fu;
}

/// The sum of all bytes, none of which is above 248.
inline std::uint64_t sum_of_bytes(WordPair x) noexcept {
  x = (x & 0x00FF00FF00FF00FFu) + ((x >> 8) & 0x00FF00FF00FF00FFu);
  x = x + (x >> 16);
  x = (x + (x >> 32)) & 0xFFFFu;
  return x[0] + x[1];
}

/// Bits that are set in both sets. @param words  a multiple of `bit_block`
/// @source Harley-Seal counting: Mula, Kurz, Lemire, "Faster population counts using AVX2
/// instructions" (arXiv 1611.07612), section 3
inline std::uint64_t common_bits(std::uint64_t const* a, std::uint64_t const* b,
                                 std::size_t words) noexcept {
  constexpr int most = 31;  // blocks whose counts of at most 8 fit a byte
  WordPair ones{};
  WordPair twos{};
  WordPair fours{};
  std::uint64_t eights = 0;
  WordPair pending{};
  int blocks = 0;
  for (std::size_t at = 0; at < words; at += bit_block) {
    auto const both = [&](std::size_t i) {
      return load_pair(a + at + 2 * i) & load_pair(b + at + 2 * i);
    };
    WordPair const twos_a = add_bits(ones, both(0), both(1));
    WordPair const twos_b = add_bits(ones, both(2), both(3));
    WordPair const fours_a = add_bits(twos, twos_a, twos_b);
    WordPair const twos_c = add_bits(ones, both(4), both(5));
    WordPair const twos_d = add_bits(ones, both(6), both(7));
    WordPair const fours_b = add_bits(twos, twos_c, twos_d);
    pending = pending + bits_of_bytes(add_bits(fours, fours_a, fours_b));
    if (++blocks == most) {
      eights += sum_of_bytes(pending);
      pending = WordPair{};
      blocks = 0;
    }
  }
  eights += sum_of_bytes(pending);
  return 8 * eights + 4 * sum_of_bytes(bits_of_bytes(fours)) +
         2 * sum_of_bytes(bits_of_bytes(twos)) + sum_of_bytes(bits_of_bytes(ones));
}

}  // namespace indexcache::detail
}  // namespace v0
}  // namespace indexshare
