// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/detail/check.hpp>
#include <indexshare/exec.hpp>
#include <indexshare/frontend/front_end.hpp>
#include <indexshare/frontend/lanes.hpp>
#include <indexshare/frontend/weights.hpp>

/// @file What the three sides of the front end share: checks, and running steps in order.

namespace indexshare {
inline namespace v0 {
namespace detail {

/// Runs steps in order until one fails.
template <class... Steps>
Status run_steps(Steps const&... steps) noexcept {
  Status status;
  ((status = steps(), status.ok()) && ...);
  return status;
}

template <class View>
constexpr Status check_activation(char const* what, View const& view, index_t rows,
                                  index_t lanes) noexcept {
  static_assert(View::rank() == 2);
  return first_failure({check_extent(what, rows, view.extent(0)),
                        check_extent(what, lanes, view.extent(1)), check_writable(what, view)});
}

/// The heads of a row lie dense, as `flat_heads` needs them.
template <class View>
constexpr Status check_activation(char const* what, View const& view, index_t rows, index_t heads,
                                  index_t lanes) noexcept {
  static_assert(View::rank() == 3);
  if (Status const status = first_failure(
          {check_extent(what, rows, view.extent(0)), check_extent(what, heads, view.extent(1)),
           check_extent(what, lanes, view.extent(2)), check_writable(what, view)});
      !status.ok()) {
    return status;
  }
  bool const apart = rows > 0 && lanes > 0 && heads > 1 && view.stride(1) != lanes;
  return apart ? failure(Errc::bad_stride, what, lanes, view.stride(1)) : Status{};
}

template <Space S>
constexpr Status check_hidden(ModelConfig const& config,
                              Tensor<S, float const, 2> const& hidden) noexcept {
  return first_failure(
      {check_extent("lanes of the hidden states", config.hidden_size, hidden.extent(1)),
       check_readable("hidden states", hidden)});
}

template <Space S>
constexpr Status check_tokens(ModelConfig const& config, Tensor<S, float const, 2> const& hidden,
                              PositionView<S> const& positions) noexcept {
  return first_failure(
      {check_hidden(config, hidden),
       check_extent("rotary positions of the hidden states", hidden.extent(0), positions.extent(0)),
       check_readable("rotary positions", positions)});
}

/// What `make_front_end` has seen to, again: a recipe's fields are open to its owner.
template <class Product>
constexpr Status check_recipe(FrontEnd<Product> const& front_end) noexcept {
  ModelConfig const& config = front_end.config;
  return first_failure({check_extent("lanes that the rotary frequencies rotate",
                                     config.qk_rope_head_dim, 2 * front_end.frequencies.pairs),
                        check_at_most("pairs of the rotary frequencies",
                                      RotaryFrequencies::max_pairs, front_end.frequencies.pairs),
                        check_extent("indexer_rope.dims against qk_rope_head_dim",
                                     config.qk_rope_head_dim, config.indexer_rope.dims),
                        check_at_most("indexer_rope.dims against index_head_dim",
                                      config.index_head_dim, config.indexer_rope.dims),
                        check_basis(config, front_end.index_basis)});
}

/// W_UK or W_UV of one head: rows [first, first + count) of its part of kv_b_proj.
template <Space S, class T>
constexpr MatrixView<S, T> kv_b_rows(ModelConfig const& config, MatrixView<S, T> const& kv_b,
                                     index_t head, index_t first, index_t count) noexcept {
  index_t const per_head = config.qk_nope_head_dim + config.v_head_dim;
  return rows_of(kv_b, head * per_head + first, count);
}
template <Space S, class T>
constexpr MatrixView<S, T> w_uk(ModelConfig const& config, MatrixView<S, T> const& kv_b,
                                index_t head) noexcept {
  return kv_b_rows(config, kv_b, head, 0, config.qk_nope_head_dim);
}
template <Space S, class T>
constexpr MatrixView<S, T> w_uv(ModelConfig const& config, MatrixView<S, T> const& kv_b,
                                index_t head) noexcept {
  return kv_b_rows(config, kv_b, head, config.qk_nope_head_dim, config.v_head_dim);
}

/// f(head) for every head, until one fails.
template <class F>
Status for_each_head(index_t heads, F const& f) noexcept {
  Status status;
  for (index_t head = 0; head < heads && status.ok(); ++head) status = f(head);
  return status;
}

/// Rotates the rotary lanes of index queries or keys and copies the others, then changes the basis.
template <class Product, Executor X>
Status finish_index_lanes(X const& x, FrontEnd<Product> const& front_end,
                          Tensor<X::space, float const, 3> const& raw,
                          PositionView<X::space> const& positions,
                          Tensor<X::space, float, 3> const& out) noexcept {
  ModelConfig const& config = front_end.config;
  index_t const begin = rope_begin(config);
  index_t const end = rope_end(config);
  index_t const lanes = config.index_head_dim;
  return run_steps(
      [&]() noexcept { return scale(x, lanes_of(raw, 0, begin), 1.0f, lanes_of(out, 0, begin)); },
      [&]() noexcept {
        return scale(x, lanes_of(raw, end, lanes - end), 1.0f, lanes_of(out, end, lanes - end));
      },
      [&]() noexcept {
        return rotate(x, lanes_of(raw, begin, end - begin), positions, front_end.frequencies,
                      config.indexer_rope.layout, lanes_of(out, begin, end - begin));
      },
      [&]() noexcept {
        return front_end.index_basis == LaneBasis::hadamard ? hadamard(x, out) : Status{};
      });
}

}  // namespace detail
}  // namespace v0
}  // namespace indexshare
