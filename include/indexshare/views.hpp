// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/dims.hpp>
#include <indexshare/macros.hpp>
#include <indexshare/status.hpp>

#include <cuda/std/array>
#include <cuda/std/mdspan>

#include <concepts>
#include <cstddef>
#include <type_traits>

namespace indexshare {
inline namespace v0 {

/// Where memory lives. Part of every view's type: a host view handed to a device executor does
/// not compile.
enum class Space { host, device };

/// mdspan accessor that remembers the memory space.
template <class T, Space S>
struct space_accessor {
  using offset_policy = space_accessor;
  using element_type = T;
  using reference = T&;
  using data_handle_type = T*;
  static constexpr Space space = S;

  constexpr space_accessor() = default;
  template <class U>
  requires std::is_convertible_v<U (*)[], T (*)[]> INDEXSHARE_HD constexpr space_accessor(
      space_accessor<U, S>) noexcept {}

  INDEXSHARE_HD constexpr reference access(data_handle_type p, std::size_t i) const noexcept {
    return p[i];
  }
  INDEXSHARE_HD constexpr data_handle_type offset(data_handle_type p,
                                                  std::size_t i) const noexcept {
    return p + i;
  }
};

/// A strided tensor of rank N in space S. Extents and strides are 64 bits, strides in elements.
template <Space S, class T, std::size_t N>
using Tensor = cuda::std::mdspan<T, cuda::std::dextents<index_t, N>, cuda::std::layout_stride,
                                 space_accessor<T, S>>;

// Role aliases: the name carries the extents.
template <Space S, class T>
using QueryView = Tensor<S, T const, 3>;  ///< [rows, heads, lanes]
template <Space S>
using HeadWeightView = Tensor<S, float const, 2>;  ///< [rows, index heads]
template <Space S, class T = float>
using ScoreView = Tensor<S, T, 2>;  ///< [rows, keys]
template <Space S>
using LengthView = Tensor<S, position_t const, 1>;  ///< [rows]
template <Space S>
using SinkView = Tensor<S, float const, 1>;  ///< [heads], natural-log units
template <Space S, class T>
using OutputView = Tensor<S, T, 3>;  ///< [rows, heads, value lanes]
template <Space S>
using LseView = Tensor<S, float, 2>;  ///< [rows, heads], natural log

/// Where one call reads or writes selections: `indices` [rows, top_k], `counts` [rows].
/// The first counts(r) entries of row r are ascending positions, the rest `no_position`.
template <Space S, class T = position_t>
struct SelectionView {
  Tensor<S, T, 2> indices;
  Tensor<S, T, 1> counts;
};

/// A view over `data` with the given extents and strides (in elements).
template <Space S, class T, std::size_t N>
INDEXSHARE_HD constexpr Tensor<S, T, N> make_strided(
    T* data, cuda::std::array<index_t, N> extents, cuda::std::array<index_t, N> strides) noexcept {
  using Extents = cuda::std::dextents<index_t, N>;
  return Tensor<S, T, N>(data,
                         cuda::std::layout_stride::mapping<Extents>(Extents(extents), strides));
}

/// A dense row-major view.
template <Space S, class T, std::size_t N>
INDEXSHARE_HD constexpr Tensor<S, T, N> make_dense(T* data,
                                                   cuda::std::array<index_t, N> extents) noexcept {
  cuda::std::array<index_t, N> strides{};
  index_t step = 1;
  for (std::size_t i = N; i-- > 0;) {
    strides[i] = step;
    step *= extents[i] > 0 ? extents[i] : 1;
  }
  return make_strided<S, T, N>(data, extents, strides);
}

template <Space S, class T>
constexpr QueryView<S, T> make_query(T const* data, Rows rows, Heads heads, HeadDim dim) noexcept {
  return make_dense<S, T const, 3>(data, {rows.n, heads.n, dim.n});
}
template <Space S>
constexpr HeadWeightView<S> make_head_weights(float const* data, Rows rows, Heads heads) noexcept {
  return make_dense<S, float const, 2>(data, {rows.n, heads.n});
}
template <Space S, class T>
constexpr ScoreView<S, T> make_scores(T* data, Rows rows, Keys keys) noexcept {
  return make_dense<S, T, 2>(data, {rows.n, keys.n});
}
template <Space S>
constexpr LengthView<S> make_lengths(position_t const* data, Rows rows) noexcept {
  return make_dense<S, position_t const, 1>(data, {rows.n});
}
template <Space S>
constexpr SinkView<S> make_sink(float const* data, Heads heads) noexcept {
  return make_dense<S, float const, 1>(data, {heads.n});
}
template <Space S, class T>
constexpr OutputView<S, T> make_output(T* data, Rows rows, Heads heads, HeadDim value) noexcept {
  return make_dense<S, T, 3>(data, {rows.n, heads.n, value.n});
}
template <Space S>
constexpr LseView<S> make_lse(float* data, Rows rows, Heads heads) noexcept {
  return make_dense<S, float, 2>(data, {rows.n, heads.n});
}
template <Space S>
constexpr SelectionView<S> make_selection(position_t* indices, position_t* counts, Rows rows,
                                          TopK top_k) noexcept {
  return {make_dense<S, position_t, 2>(indices, {rows.n, top_k.n}),
          make_dense<S, position_t, 1>(counts, {rows.n})};
}

namespace detail {

/// `data + offset`; a view of no rows may have no memory.
template <class T>
INDEXSHARE_HD constexpr T* further(T* data, index_t offset) noexcept {
  return data == nullptr ? data : data + offset;
}

}  // namespace detail

/// Rows [first, first + count) of a view.
template <class View>
INDEXSHARE_HD constexpr View rows_of(View const& view, index_t first, index_t count) noexcept {
  constexpr std::size_t rank = View::rank();
  cuda::std::array<index_t, rank> extents{};
  cuda::std::array<index_t, rank> strides{};
  for (std::size_t i = 0; i < rank; ++i) {
    extents[i] = view.extent(i);
    strides[i] = view.stride(i);
  }
  extents[0] = count;
  return make_strided<View::accessor_type::space, typename View::element_type, rank>(
      detail::further(view.data_handle(), first * strides[0]), extents, strides);
}

/// The customisation point for an engine's own tensor class: overload `indexshare_tensor` in the
/// class's namespace and return a Tensor of the right rank (docs/shapes.md shows one). `as_view`
/// hands the library's own views through.
template <class T>
constexpr auto as_view(T const& tensor) noexcept requires requires {
  indexshare_tensor(tensor);
}
{ return indexshare_tensor(tensor); }
template <class T, class E, class L, class A>
constexpr auto as_view(cuda::std::mdspan<T, E, L, A> const& view) noexcept {
  return view;
}

/// A type that enters through `as_view`.
template <class T>
concept TensorLike = requires(T const& tensor) {
  { as_view(tensor).rank() } -> std::convertible_to<std::size_t>;
  { decltype(as_view(tensor))::accessor_type::space } -> std::convertible_to<Space>;
};

}  // namespace v0
}  // namespace indexshare
