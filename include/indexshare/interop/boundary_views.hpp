// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/batch.hpp>
#include <indexshare/cache.hpp>
#include <indexshare/interop/boundary.hpp>
#include <indexshare/views.hpp>

#include <type_traits>

/// @file The C++20 side of interop/boundary.hpp: structures to views. Host arithmetic only; extents
/// and strides are checked by the call that gets the views.

namespace indexshare {
inline namespace v0 {
namespace boundary {

/// @tparam T  the element, const where the array's is
template <Space S, class T, class U, std::size_t Rank>
constexpr Tensor<S, T, Rank> to_view(Array<U, Rank> const& array) noexcept {
  static_assert(std::is_void_v<U> || std::is_same_v<std::remove_cv_t<T>, std::remove_cv_t<U>>);
  static_assert(std::is_const_v<T> || !std::is_const_v<U>);
  cuda::std::array<index_t, Rank> extents{};
  cuda::std::array<index_t, Rank> strides{};
  bool empty = false;
  for (std::size_t i = 0; i < Rank; ++i) {
    extents[i] = array.extents[i];
    empty = empty || extents[i] == 0;
  }
  // of an absent array strides are 0, which mdspan does not take
  for (std::size_t i = 0; i < Rank; ++i) strides[i] = empty ? 1 : array.strides[i];
  return make_strided<S, T, Rank>(static_cast<T*>(array.data), extents, strides);
}

template <Space S, class Format>
constexpr MutableCacheView<S, Format> to_cache(Cache const& cache, Format format = {}) noexcept {
  return {static_cast<typename Format::storage*>(cache.data),
          cache.blocks,
          cache.block_size,
          cache.lanes,
          cache.block_stride,
          cache.row_stride,
          format};
}

template <Space S>
constexpr PageTable<S> to_pages(Pages const& pages) noexcept {
  return {to_view<S, position_t const>(pages.table), pages.page_size};
}

template <Space S>
constexpr RowBatch<S> to_batch(Batch const& batch) noexcept {
  return {to_view<S, position_t const>(batch.lengths), to_view<S, position_t const>(batch.requests),
          to_pages<S>(batch.index_pages), to_pages<S>(batch.kv_pages)};
}

/// Inputs of `Layer`, a SparseAttentionLayer of ReluDotIndexer and an MLA policy, whose types say
/// what the elements and formats are. Caches have their format's published widths and the natural
/// basis.
template <class Layer, Space S>
constexpr typename Layer::template inputs<S> to_inputs(LayerCall const& call) noexcept {
  typename Layer::template inputs<S> in{};
  in.batch = to_batch<S>(call.batch);
  in.id = {call.forward, call.batch_id};
  using Query = typename decltype(in.attention.q)::element_type;
  using KvFormat = typename decltype(in.attention.kv)::format_type;
  in.attention.q = to_view<S, Query>(call.q);
  in.attention.kv = to_cache<S, KvFormat>(call.kv);
  in.attention.scale = call.scale;
  in.attention.sink = to_view<S, float const>(call.sink);
  if (call.index_q.data != nullptr) {
    auto& indexer = in.indexer.emplace();
    using IndexQuery = typename decltype(indexer.q)::element_type;
    using KeyFormat = typename decltype(indexer.keys)::format_type;
    indexer.q = to_view<S, IndexQuery>(call.index_q);
    indexer.weights = to_view<S, float const>(call.head_weights);
    indexer.keys = to_cache<S, KeyFormat>(call.index_keys);
  }
  return in;
}

template <class Layer, Space S>
constexpr typename Layer::template outputs<S> to_outputs(LayerCall const& call) noexcept {
  typename Layer::template outputs<S> out{};
  out.out = to_view<S, typename decltype(out.out)::element_type>(call.out);
  out.lse = to_view<S, float>(call.lse);
  return out;
}

}  // namespace boundary
}  // namespace v0
}  // namespace indexshare
