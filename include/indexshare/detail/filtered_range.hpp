// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <iterator>

namespace indexshare {
inline namespace v0 {
namespace detail {

/// The numbers of [first, last) that `Filter::keeps(owner, number)` keeps, each shown as
/// `Filter::value(owner, number)`. A forward range over `owner`, which must outlive it.
template <class Owner, class Filter>
class FilteredRange {
 public:
  class Iterator {
   public:
    using iterator_category = std::forward_iterator_tag;
    using value_type = typename Filter::value_type;
    using difference_type = std::ptrdiff_t;
    using pointer = void;
    using reference = value_type;

    constexpr Iterator() = default;
    constexpr Iterator(Owner const* owner, std::int32_t number, std::int32_t last) noexcept
        : owner_(owner), number_(number), last_(last) {
      skip();
    }

    constexpr value_type operator*() const noexcept { return Filter::value(*owner_, number_); }

    constexpr Iterator& operator++() noexcept {
      ++number_;
      skip();
      return *this;
    }

    constexpr Iterator operator++(int) noexcept {
      Iterator const before = *this;
      ++*this;
      return before;
    }

    friend constexpr bool operator==(Iterator const& a, Iterator const& b) noexcept {
      return a.number_ == b.number_;
    }

   private:
    constexpr void skip() noexcept {
      while (number_ < last_ && !Filter::keeps(*owner_, number_)) ++number_;
    }

    Owner const* owner_ = nullptr;
    std::int32_t number_ = 0;
    std::int32_t last_ = 0;
  };

  constexpr FilteredRange(Owner const& owner, std::int32_t first, std::int32_t last) noexcept
      : owner_(&owner), first_(first), last_(last < first ? first : last) {}

  constexpr Iterator begin() const noexcept { return Iterator(owner_, first_, last_); }
  constexpr Iterator end() const noexcept { return Iterator(owner_, last_, last_); }
  constexpr bool empty() const noexcept { return begin() == end(); }

  constexpr std::int32_t count() const noexcept {
    std::int32_t kept = 0;
    for (Iterator i = begin(); i != end(); ++i) ++kept;
    return kept;
  }

 private:
  Owner const* owner_;
  std::int32_t first_;
  std::int32_t last_;
};

}  // namespace detail
}  // namespace v0
}  // namespace indexshare
