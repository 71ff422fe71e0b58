// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "backend.hpp"

#include <indexshare/indexshare.hpp>

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

/// @file The engine's sizes, tensors and caches as the library sees them: views, no copies.

namespace mini {

using indexshare::Space;

/// A refusal of the library becomes the engine's exception.
inline void require(indexshare::Status const& status) {
  if (status.ok()) return;
  throw std::runtime_error("layer " + std::to_string(status.layer) + ": " + status.what +
                           " (expected " + std::to_string(status.expected) + ", got " +
                           std::to_string(status.got) + ", CUDA error " +
                           std::to_string(status.cuda_error) + ")");
}
template <class T>
T value_of(indexshare::Result<T> const& result) {
  if (!result) require(result.error());
  return *result;
}

inline indexshare::Shape shape_of(Sizes const& sizes) {
  return {.rows = sizes.rows,
          .keys = sizes.keys,
          .top_k = sizes.top_k,
          .index_heads = sizes.index_heads,
          .index_dim = sizes.index_dim,
          .heads = sizes.heads,
          .key_dim = sizes.key_dim,
          .value_dim = sizes.value_dim};
}

// Tensors have room for `sizes.rows` rows; a call sees the first `rows` of them.

template <Space S>
auto numbers_view(Tensor<std::int32_t> const& tensor, indexshare::index_t count) {
  return indexshare::make_dense<S, indexshare::position_t, 1>(tensor.data(), {count});
}
template <Space S>
auto rows_view(Tensor<float> const& tensor, indexshare::Rows rows) {
  return indexshare::make_dense<S, float const, 2>(tensor.data(), {rows.n, tensor.size(1)});
}
template <Space S>
auto query_view(Tensor<Bf16> const& tensor, indexshare::Rows rows) {
  auto const* const data =
      reinterpret_cast<indexshare::bf16 const*>(tensor.data());  // 16 bits each
  return indexshare::make_query<S>(data, rows, indexshare::Heads{tensor.size(1)},
                                   indexshare::HeadDim{tensor.size(2)});
}
template <Space S>
auto weights_view(Tensor<float> const& tensor, indexshare::Rows rows) {
  return indexshare::make_head_weights<S>(tensor.data(), rows, indexshare::Heads{tensor.size(1)});
}
template <Space S>
auto output_view(Tensor<float> const& tensor, indexshare::Rows rows) {
  return indexshare::make_output<S>(tensor.data(), rows, indexshare::Heads{tensor.size(1)},
                                    indexshare::HeadDim{tensor.size(2)});
}

/// Caches of bf16 rows.
struct Bf16Caches {
  using IndexKeys = indexshare::format::Plain<indexshare::bf16>;
  using Kv = indexshare::format::Plain<indexshare::bf16>;

  static std::int64_t index_key_bytes(Sizes const& s) { return 2 * s.index_dim; }
  static std::int64_t kv_bytes(Sizes const& s) { return 2 * s.key_dim; }
  template <Space S>
  static auto index_keys(std::byte* data, indexshare::Pages pages, indexshare::PageSize page_size,
                         Sizes const& s) {
    return indexshare::make_paged_cache<S>(reinterpret_cast<indexshare::bf16*>(data), pages,
                                           page_size, indexshare::HeadDim{s.index_dim});
  }
  template <Space S>
  static auto kv(std::byte* data, indexshare::Pages pages, indexshare::PageSize page_size,
                 Sizes const& s) {
    return indexshare::make_paged_cache<S>(reinterpret_cast<indexshare::bf16*>(data), pages,
                                           page_size, indexshare::HeadDim{s.key_dim});
  }
};

/// Caches of e4m3 codes with scales, byte for byte those of fp8 engines: 132 bytes per index key
/// and 656 per KV row, for 128 lanes and 512 + 64.
struct E4m3Caches {
  using IndexKeys = indexshare::format::IndexKeyE4m3;
  using Kv = indexshare::format::LatentE4m3;
  static constexpr std::int64_t tile = 128;  // codes of a latent that share a scale

  static std::int64_t index_key_bytes(Sizes const& s) { return s.index_dim + 4; }
  static std::int64_t kv_bytes(Sizes const& s) {
    return s.value_dim + (s.value_dim + tile - 1) / tile * 4 + 2 * (s.key_dim - s.value_dim);
  }
  template <Space S>
  static auto index_keys(std::byte* data, indexshare::Pages pages, indexshare::PageSize page_size,
                         Sizes const& s) {
    return indexshare::make_index_key_e4m3_cache<S>(data, pages, page_size,
                                                    indexshare::HeadDim{s.index_dim});
  }
  template <Space S>
  static auto kv(std::byte* data, indexshare::Pages pages, indexshare::PageSize page_size,
                 Sizes const& s) {
    return indexshare::make_latent_e4m3_cache<S>(data, pages, page_size, s.value_dim,
                                                 s.key_dim - s.value_dim, tile);
  }
};

/// The caches of all layers, in memory of the engine: KV for every layer, index keys for the full
/// ones; the MTP layer is one of either.
template <Space S, class Caches>
class LayerCaches {
 public:
  LayerCaches(Device& device, indexshare::SharePlan const& schedule, indexshare::Pages pages,
              indexshare::PageSize page_size, Sizes const& sizes)
      : stage_(value_of(schedule.stage(0, schedule.total_layers(), indexshare::StageStart::own))),
        pages_(pages),
        page_size_(page_size),
        sizes_(sizes) {
    std::int64_t const tokens = pages.n * page_size.n;
    auto const add = [&](std::vector<Tensor<std::byte>>& caches, std::int64_t row_bytes) {
      caches.push_back(Tensor<std::byte>(device, {tokens, row_bytes}));
    };
    for (int i = 0; i < stage_.last(); ++i) add(kv_, Caches::kv_bytes(sizes));
    for (int i = 0; i < stage_.index_caches(); ++i)
      add(index_keys_, Caches::index_key_bytes(sizes));
  }

  auto kv(int layer) const {
    std::byte* const data = kv_[static_cast<std::size_t>(layer)].data();
    return Caches::template kv<S>(data, pages_, page_size_, sizes_);
  }
  /// Of a full layer; by its layer number.
  auto index_keys(int layer) const {
    auto const number = static_cast<std::size_t>(value_of(stage_.index_cache_slot(layer)));
    return Caches::template index_keys<S>(index_keys_[number].data(), pages_, page_size_, sizes_);
  }

  std::size_t kv_bytes() const { return bytes_of(kv_); }
  std::size_t index_key_bytes() const { return bytes_of(index_keys_); }

 private:
  static std::size_t bytes_of(std::vector<Tensor<std::byte>> const& caches) {
    std::size_t bytes = 0;
    for (auto const& cache : caches) bytes += cache.bytes();
    return bytes;
  }

  indexshare::StagePlan stage_;
  indexshare::Pages pages_;
  indexshare::PageSize page_size_;
  Sizes sizes_;
  std::vector<Tensor<std::byte>> kv_;
  std::vector<Tensor<std::byte>> index_keys_;
};

/// A selection state and its memory.
template <Space S>
class OwnedSelection {
 public:
  using State = indexshare::SelectionState<S>;

  OwnedSelection(Device& device, Sizes const& sizes)
      : memory_(device, {static_cast<std::int64_t>(State::size(rows(sizes), top_k(sizes)).bytes)}),
        state_(
            value_of(State::make({memory_.data(), memory_.bytes()}, rows(sizes), top_k(sizes)))) {}
  State& operator*() { return state_; }
  State const& operator*() const { return state_; }
  std::size_t bytes() const { return memory_.bytes(); }

 private:
  static indexshare::Rows rows(Sizes const& sizes) { return {sizes.rows}; }
  static indexshare::TopK top_k(Sizes const& sizes) { return {sizes.top_k}; }

  Tensor<std::byte> memory_;
  State state_;
};

}  // namespace mini
