// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/dims.hpp>
#include <indexshare/views.hpp>

#include <cstddef>

/// @file Parts of activations [rows, heads, lanes] and of the matrices that make them.

namespace indexshare {
inline namespace v0 {
namespace detail {

/// Lanes [first, first + count) of a view's last dimension.
template <class View>
constexpr View lanes_of(View const& view, index_t first, index_t count) noexcept {
  constexpr std::size_t rank = View::rank();
  cuda::std::array<index_t, rank> extents{};
  cuda::std::array<index_t, rank> strides{};
  for (std::size_t i = 0; i < rank; ++i) {
    extents[i] = i + 1 == rank ? count : view.extent(i);
    strides[i] = view.stride(i);
  }
  return make_strided<View::accessor_type::space, typename View::element_type, rank>(
      further(view.data_handle(), first * view.stride(rank - 1)), extents, strides);
}

/// One head of [rows, heads, lanes] as [rows, lanes].
template <Space S, class T>
constexpr Tensor<S, T, 2> head_of(Tensor<S, T, 3> const& view, index_t head) noexcept {
  return make_strided<S, T, 2>(further(view.data_handle(), head * view.stride(1)),
                               {view.extent(0), view.extent(2)}, {view.stride(0), view.stride(2)});
}

/// [rows, heads, lanes] as [rows, heads * lanes]. Precondition: the heads of a row lie dense.
template <Space S, class T>
constexpr Tensor<S, T, 2> flat_heads(Tensor<S, T, 3> const& view) noexcept {
  return make_strided<S, T, 2>(view.data_handle(),
                               {view.extent(0), view.extent(1) * view.extent(2)},
                               {view.stride(0), view.stride(2)});
}

/// [rows, lanes] as [rows, 1, lanes].
template <Space S, class T>
constexpr Tensor<S, T, 3> one_head(Tensor<S, T, 2> const& view) noexcept {
  index_t const step = view.extent(1) > 0 ? view.extent(1) : 1;  // mdspan has no stride 0
  return make_strided<S, T, 3>(view.data_handle(), {view.extent(0), 1, view.extent(1)},
                               {view.stride(0), step, view.stride(1)});
}

template <Space S, class T>
constexpr Tensor<S, T, 2> transposed(Tensor<S, T, 2> const& view) noexcept {
  return make_strided<S, T, 2>(view.data_handle(), {view.extent(1), view.extent(0)},
                               {view.stride(1), view.stride(0)});
}

/// A reader's view of the same memory.
template <class View>
constexpr auto read_only(View const& view) noexcept {
  return Tensor<View::accessor_type::space, typename View::element_type const, View::rank()>(
      view.data_handle(), view.mapping());
}

}  // namespace detail
}  // namespace v0
}  // namespace indexshare
