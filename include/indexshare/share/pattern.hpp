// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/share/source.hpp>

#include <cstddef>
#include <cstdint>

namespace indexshare {
inline namespace v0 {

/// A string literal as a template argument: `Pattern<"FFSS">`.
template <std::size_t Size>
struct PatternLetters {
  char letters[Size]{};

  // Implicit, so that a literal converts in the template argument list.
  constexpr PatternLetters(char const (&literal)[Size]) noexcept {
    for (std::size_t i = 0; i < Size; ++i) letters[i] = literal[i];
  }

  static constexpr std::int32_t count() noexcept { return static_cast<std::int32_t>(Size) - 1; }

  constexpr bool only_known_letters() const noexcept {
    for (std::int32_t i = 0; i < count(); ++i)
      if (letters[i] != 'F' && letters[i] != 'S') return false;
    return true;
  }
};

/// Share policy written in the source code: one letter per layer, F (full) or S (shared).
/// `Pattern<"FFSS">` has four layers; layers 2 and 3 read the selection of layer 1.
template <PatternLetters Letters>
struct Pattern {
  static_assert(Letters.count() > 0, "Pattern needs one letter per layer: it has none");
  static_assert(Letters.only_known_letters(),
                "Pattern knows two letters: F (full layer) and S (shared layer), upper case");
  static_assert(Letters.letters[0] != 'S',
                "Pattern must not begin with S: layer 0 would have no full layer to read from");

  static constexpr std::int32_t layers = Letters.count();

  friend constexpr bool operator==(Pattern const&, Pattern const&) = default;

  /// The layer whose selection `layer` reads; `no_source` past the pattern's end, which is not
  /// extended in any way. A friend, because nvcc 13.0 cannot deduce `Letters` of a template.
  friend constexpr std::int32_t share_source(Pattern const&, std::int32_t layer) noexcept {
    if (layer < 0 || layer >= layers) return no_source;
    std::int32_t source = layer;
    while (Letters.letters[source] == 'S') --source;
    return source;
  }
};

}  // namespace v0
}  // namespace indexshare
