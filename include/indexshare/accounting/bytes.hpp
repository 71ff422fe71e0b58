// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/accounting/flops.hpp>
#include <indexshare/accounting/parameters.hpp>
#include <indexshare/accounting/rows.hpp>
#include <indexshare/dims.hpp>
#include <indexshare/model_config.hpp>
#include <indexshare/share_plan.hpp>
#include <indexshare/status.hpp>

#include <cstdint>

/// @file Bytes of the caches, and bytes that a call moves.

namespace indexshare {
inline namespace v0 {

/// How index keys are stored.
enum class IndexKeyForm : std::uint8_t {
  e4m3,  ///< e4m3 lanes and one fp32 scale: 132 bytes of 128 lanes
  f16,   ///< 2 bytes per lane, fp16 or bf16: 256
};

/// How the KV entries of a layer are stored. Sizes are those of 512 latent and 64 rotary lanes.
enum class KvForm : std::uint8_t {
  latent_e4m3,  ///< e4m3 latent, one fp32 scale per 128 lanes, bf16 rotary lanes: 656 bytes
  e4m3,         ///< one byte per lane, no scales: 576
  bf16,         ///< 2 bytes per lane: 1152
};

/// Whether the byte formulas describe the model's caches. Errors: unsupported, `what` is the
/// reason.
constexpr Status can_count_cache_bytes(ModelConfig const& c) noexcept {
  if (c.family == ModelFamily::glm5_next)
    return failure(Errc::unsupported,
                   "the cache layouts have no linear-attention layers and pooled index keys");
  return {};
}

/// Bytes of one index key.
constexpr index_t index_key_bytes(ModelConfig const& c,
                                  IndexKeyForm form = IndexKeyForm::e4m3) noexcept {
  return form == IndexKeyForm::e4m3 ? c.index_head_dim + 4 : 2 * c.index_head_dim;
}

/// Bytes of one layer's KV entry.
constexpr index_t kv_entry_bytes(ModelConfig const& c, KvForm form = KvForm::latent_e4m3) noexcept {
  index_t const lanes = c.kv_lora_rank + c.qk_rope_head_dim;
  if (form == KvForm::e4m3) return lanes;
  if (form == KvForm::bf16) return 2 * lanes;
  index_t const scales = (c.kv_lora_rank + 127) / 128;
  return c.kv_lora_rank + 4 * scales + 2 * c.qk_rope_head_dim;
}

/// Cache bytes of one token over the trunk. Sharing leaves `kv` as it is: a shared layer attends to
/// its own keys and values.
struct CacheBytes {
  index_t index_key_all_full = 0;  ///< were every layer full
  index_t index_key = 0;
  index_t kv = 0;

  constexpr index_t total_all_full() const noexcept { return index_key_all_full + kv; }
  constexpr index_t total() const noexcept { return index_key + kv; }
};

/// Precondition: can_count_cache_bytes(c).
constexpr CacheBytes cache_bytes_per_token(ModelConfig const& c, SharePlan const& plan,
                                           KvForm kv = KvForm::latent_e4m3,
                                           IndexKeyForm key = IndexKeyForm::e4m3) noexcept {
  return {plan.num_layers() * index_key_bytes(c, key),
          plan.full_layers().count() * index_key_bytes(c, key),
          plan.num_layers() * kv_entry_bytes(c, kv)};
}

/// Bytes that `rows` move because of sparse attention: what decode at batch 1 is bound by. Index
/// keys and KV entries are read once by every row that uses them: rows that share a read (those of
/// a prefill, verified drafts) move less.
struct MovedBytes {
  double index_keys = 0;
  double scores = 0;  ///< fp32, written by the scoring and read by the top-k; 0 where it is fused
  double kv_entries = 0;  ///< gathered by the attention

  constexpr double total() const noexcept { return index_keys + scores + kv_entries; }

  constexpr MovedBytes& operator+=(MovedBytes const& other) noexcept {
    index_keys += other.index_keys;
    scores += other.scores;
    kv_entries += other.kv_entries;
    return *this;
  }
};

/// Of a trunk with `full_layers` indexers. Precondition: can_count_cache_bytes(c).
constexpr MovedBytes moved_bytes(ModelConfig const& c, double full_layers, CountedRows const& rows,
                                 KvForm kv = KvForm::latent_e4m3,
                                 IndexKeyForm key = IndexKeyForm::e4m3) noexcept {
  constexpr double write_and_read = 2 * sizeof(float);
  return {
      full_layers * rows.visible_keys * detail::real(index_key_bytes(c, key)),
      full_layers * rows.visible_keys * write_and_read,
      detail::real(c.num_hidden_layers) * rows.attended_keys * detail::real(kv_entry_bytes(c, kv))};
}

/// Of one trunk layer. Preconditions: can_count_cache_bytes(c), 0 <= layer < plan.num_layers().
constexpr MovedBytes layer_moved_bytes(ModelConfig const& c, SharePlan const& plan,
                                       std::int32_t layer, CountedRows const& rows,
                                       KvForm kv = KvForm::latent_e4m3,
                                       IndexKeyForm key = IndexKeyForm::e4m3) noexcept {
  MovedBytes bytes = moved_bytes(c, plan.is_full(layer) ? 1 : 0, rows, kv, key);
  bytes.kv_entries = rows.attended_keys * detail::real(kv_entry_bytes(c, kv));
  return bytes;
}

/// Bytes moved with an indexer in every trunk layer and with those of the plan.
struct SharingBytes {
  MovedBytes all_full{};
  MovedBytes shared{};

  constexpr double ratio() const noexcept { return all_full.total() / shared.total(); }
};

/// Precondition: can_count_cache_bytes(c).
constexpr SharingBytes sharing_bytes(ModelConfig const& c, SharePlan const& plan,
                                     CountedRows const& rows, KvForm kv = KvForm::latent_e4m3,
                                     IndexKeyForm key = IndexKeyForm::e4m3) noexcept {
  return {moved_bytes(c, plan.num_layers(), rows, kv, key),
          moved_bytes(c, plan.full_layers().count(), rows, kv, key)};
}

/// FLOPs of index scoring per byte of index keys that one row reads.
constexpr double scoring_flops_per_byte(ModelConfig const& c,
                                        IndexKeyForm key = IndexKeyForm::e4m3) noexcept {
  return index_scoring_flops(c, 1) / detail::real(index_key_bytes(c, key));
}

/// Bytes of one layer's indexer weights in bf16, which a shared layer does not have.
constexpr double indexer_weight_bytes(ModelConfig const& c) noexcept {
  return 2 * indexer_parameters(c);
}

}  // namespace v0
}  // namespace indexshare
