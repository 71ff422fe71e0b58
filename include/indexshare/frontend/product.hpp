// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/exec.hpp>
#include <indexshare/frontend/weights.hpp>
#include <indexshare/status.hpp>
#include <indexshare/views.hpp>

#include <concepts>

namespace indexshare {
inline namespace v0 {

/// The caller's matrix product, `product(x, in, w, out)`:
///   out[r, o] = sum_i w[o, i] * in[r, i]
/// with `in` [rows, in] and `out` [rows, out] in fp32, innermost stride 1, rows a stride apart. Of
/// `w` [out, in] one of the two strides is 1 and the other is the leading dimension: kv_b_proj is
/// used as it is and transposed. `in` and `out` do not overlap. Extents fit each other; the front
/// end has checked them. Called with the weight type of the checkpoint and, for weights_proj, with
/// float. Must be done when it returns, or be ordered before later work of the same
/// executor. It does not throw.
template <class M, class X, class T>
concept MatrixProduct = Executor<X> &&
    requires(M const product, X const& x, Tensor<X::space, float const, 2> const in,
             MatrixView<X::space, T> const w, MatrixView<X::space, float> const w32,
             Tensor<X::space, float, 2> const out) {
  { product(x, in, w, out) } -> std::same_as<Status>;
  { product(x, in, w32, out) } -> std::same_as<Status>;
};

/// Plain loops on the host: what the front end uses where the caller gives no product
/// (host/product.hpp).
struct PlainProduct;

}  // namespace v0
}  // namespace indexshare
