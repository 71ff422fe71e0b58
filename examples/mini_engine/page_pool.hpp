// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <deque>
#include <unordered_map>
#include <vector>

/// @file Pages of the caches: a free list, and full pages that requests with the same beginning share.

namespace mini {

/// A page is a block of every cache of the model at once: KV of all layers, index keys of the full
/// ones, those of the MTP layer too. So whoever reuses a page has all that any layer needs.
class PagePool {
 public:
  PagePool(int pages, int page_size)
      : page_size_(static_cast<std::size_t>(page_size)), pages_(static_cast<std::size_t>(pages)) {
    for (int page = 0; page < pages; ++page) free_.push_back(page);
  }

  int free_pages() const { return static_cast<int>(free_.size()); }

  /// The pages that already hold the beginning of `tokens`; each gains a user.
  std::vector<int> reuse(std::vector<int> const& tokens) {
    std::vector<int> found;
    for (std::uint64_t const key : keys(tokens, tokens.size())) {
      auto const known = known_.find(key);
      if (known == known_.end()) break;
      int const page = known->second;
      if (at(page).users++ == 0) std::erase(free_, page);
      found.push_back(page);
    }
    return found;
  }

  /// Adds `count` pages of nobody to `pages`, or none if there are too few.
  bool take(int count, std::vector<int>& pages) {
    if (count > free_pages()) return false;
    for (; count > 0; --count) {
      int const page = free_.front();
      free_.pop_front();
      forget(page);
      at(page).users = 1;
      pages.push_back(page);
    }
    return true;
  }

  /// From now on the full pages among a request's first `computed` tokens can be reused. They are
  /// not written to any more.
  void publish(std::vector<int> const& pages, std::vector<int> const& tokens, int computed) {
    std::size_t i = 0;
    for (std::uint64_t const key : keys(tokens, static_cast<std::size_t>(computed) + 1)) {
      int const page = pages[i++];
      if (at(page).key == 0 && known_.emplace(key, page).second) at(page).key = key;
    }
  }

  /// The request leaves. What can be reused is the last to be given away.
  void release(std::vector<int> const& pages) {
    for (int const page : pages) {
      if (--at(page).users > 0) continue;
      if (at(page).key == 0) {
        free_.push_front(page);
      } else {
        free_.push_back(page);
      }
    }
  }

 private:
  struct Page {
    int users = 0;
    std::uint64_t key = 0;  // 0: not published
  };
  Page& at(int page) { return pages_[static_cast<std::size_t>(page)]; }

  void forget(int page) {
    if (at(page).key != 0) known_.erase(at(page).key);
    at(page).key = 0;
  }

  /// One key per full page among the first `known` tokens: a hash of all tokens up to the end of the
  /// page, and of the token after it. A row of the MTP layer depends on the token that follows its
  /// own, so without that one the last row of a page would belong to another continuation.
  std::vector<std::uint64_t> keys(std::vector<int> const& tokens, std::size_t known) const {
    std::vector<std::uint64_t> result;
    std::uint64_t hash = 0xCBF29CE484222325u;
    for (std::size_t i = 0; i < known && i < tokens.size(); ++i) {
      hash = (hash ^ static_cast<std::uint64_t>(tokens[i] + 1)) * 0x100000001B3u;
      if (i > 0 && i % page_size_ == 0) result.push_back(hash ^ hash >> 32);
    }
    return result;
  }

  std::size_t page_size_;
  std::vector<Page> pages_;
  std::deque<int> free_;
  std::unordered_map<std::uint64_t, int> known_;
};

}  // namespace mini
