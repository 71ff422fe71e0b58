// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/detail/filtered_range.hpp>
#include <indexshare/dims.hpp>
#include <indexshare/share_plan.hpp>
#include <indexshare/status.hpp>

#include <cuda/std/span>

#include <cstddef>
#include <cstdint>

/// @file Which caches a request's tokens lie in: what must be saved, moved and restored together,
/// how many bytes that is, and how long a prefix is that can be reused. A KV cache restored without
/// its index keys runs, and selects garbage.

namespace indexshare {
inline namespace v0 {

/// What a cache of a layer holds.
enum class CacheKind : std::uint8_t {
  kv,          ///< latent | rope rows: every layer with sparse attention has its own
  index_keys,  ///< full layers only, MTP layers among them
};

/// One cache of a model.
struct CacheId {
  std::int32_t layer = 0;
  CacheKind kind = CacheKind::kv;

  friend constexpr bool operator==(CacheId const&, CacheId const&) noexcept = default;
};

namespace detail {

/// Two numbers per layer, one for each kind.
struct CacheFilter {
  using value_type = CacheId;
  static constexpr std::int32_t kinds = 2;

  static constexpr CacheId value(SharePlan const&, std::int32_t number) noexcept {
    return {number / kinds, number % kinds == 0 ? CacheKind::kv : CacheKind::index_keys};
  }
  static constexpr bool keeps(SharePlan const& plan, std::int32_t number) noexcept {
    CacheId const id = value(plan, number);
    return id.kind == CacheKind::kv ? plan.role(id.layer) != LayerRole::none
                                    : plan.is_full(id.layer);
  }
};

}  // namespace detail

/// The caches of layers [first, last) of a model, in order of layers, KV before index keys: the
/// order of a record, in which all rows of one cache lie behind each other
/// (`export_rows`, `import_rows`). Refers to the plan, which must outlive it.
class CacheInventory {
 public:
  using Range = detail::FilteredRange<SharePlan, detail::CacheFilter>;

  /// @param row_bytes  of one token in the KV caches and in the index-key caches, as `record_bytes`
  ///                   of a cache view says
  constexpr CacheInventory(SharePlan const& plan, std::int32_t first, std::int32_t last,
                           index_t kv_row_bytes, index_t index_key_row_bytes) noexcept
      : caches_(plan, first * detail::CacheFilter::kinds, last * detail::CacheFilter::kinds),
        row_bytes_{kv_row_bytes, index_key_row_bytes} {}
  CacheInventory(SharePlan const&&, std::int32_t, std::int32_t, index_t, index_t) = delete;

  constexpr auto begin() const noexcept { return caches_.begin(); }
  constexpr auto end() const noexcept { return caches_.end(); }
  constexpr std::int32_t count() const noexcept { return caches_.count(); }

  constexpr index_t row_bytes(CacheKind kind) const noexcept {
    return row_bytes_[static_cast<int>(kind)];
  }

  /// Bytes that `tokens` tokens of one request take in all caches; of a record of them.
  constexpr index_t bytes(index_t tokens) const noexcept {
    index_t of_token = 0;
    for (CacheId const cache : *this) of_token += row_bytes(cache.kind);
    return of_token * tokens;
  }

  /// Where the rows of `cache` begin in a record of `tokens` tokens, in bytes.
  /// Errors, with the layer: bad_schedule for index keys of a shared layer; bad_value for a layer
  /// outside the inventory or without sparse attention.
  constexpr Result<index_t> offset(CacheId cache, index_t tokens) const noexcept {
    index_t before = 0;
    bool has_kv = false;
    for (CacheId const each : *this) {
      if (each == cache) return before * tokens;
      has_kv = has_kv || each == CacheId{cache.layer, CacheKind::kv};
      before += row_bytes(each.kind);
    }
    return refuse((has_kv ? failure(Errc::bad_schedule, "only a full layer owns an index-key cache")
                          : failure(Errc::bad_value, "layer without a cache in this inventory"))
                      .at_layer(cache.layer));
  }

 private:
  Range caches_;
  index_t row_bytes_[detail::CacheFilter::kinds];
};

/// How much of a request's beginning need not be computed again.
struct UsablePrefix {
  index_t tokens = 0;
  CacheId limit{};  ///< the first of the caches that hold no more
};

/// The usable prefix is the least of what each cache holds: any layer may select any position, and
/// a shared layer reads its own KV wherever its source selected.
///
/// @param cached  tokens from position 0 on that each cache still holds, in the inventory's order
/// Errors: bad_shape for another number of caches; bad_value for a negative number, with the layer.
/// A caller that needs the last token's output computes at least that token.
constexpr Result<UsablePrefix> usable_prefix(CacheInventory const& inventory,
                                             cuda::std::span<index_t const> cached) noexcept {
  if (cached.size() != static_cast<std::size_t>(inventory.count())) {
    return refuse(failure(Errc::bad_shape, "cached tokens, one number per cache", inventory.count(),
                          static_cast<std::int64_t>(cached.size())));
  }
  UsablePrefix prefix{};
  std::size_t i = 0;
  for (CacheId const cache : inventory) {
    index_t const tokens = cached[i];
    if (tokens < 0) {
      return refuse(failure(Errc::bad_value, "cached tokens", 0, tokens).at_layer(cache.layer));
    }
    if (i == 0 || tokens < prefix.tokens) prefix = {tokens, cache};
    ++i;
  }
  return prefix;
}

}  // namespace v0
}  // namespace indexshare
