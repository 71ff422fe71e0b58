// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "by_hand.hpp"
#include "session.hpp"

#include <tuple>

/// @file One list of checks for every combination of element types.

namespace layer_test {

/// Element of the queries, formats of the index keys and of the KV.
template <class Q, class K, class V>
struct Types {
  using Query = Q;
  using Keys = K;
  using Kv = V;
};
template <class T>
using Plain = format::Plain<T>;
using E4m3Keys = format::IndexKeyE4m3;
using E4m3Latent = format::LatentE4m3;

/// e4m3 latent: of the small shape two tiles of 4 codes, then rotary lanes.
inline auto kv_format(E4m3Latent format, Shape const& shape) {
  return shape.key_dim == small_shape.key_dim ? E4m3Latent{8, 4} : format;
}
template <class T>
Plain<T> kv_format(Plain<T>, Shape const&) {
  return {};
}

/// Tensor cores multiply softmax weights in 16 bits: each is off by 2^-9 of itself at most, and the
/// values are 3 at most. Everybody else sums in fp32.
constexpr float output_tolerance(Shape const& shape) {
  bool const tensor_cores = space == Space::device && shape.key_dim == published_shape.key_dim;
  return tensor_cores ? 3 * 0x1p-8f : 1e-4f;
}

template <class Case>
void check_types(Shape const& shape, Layout layout) {
  using M = Model<typename Case::Query, typename Case::Keys, typename Case::Kv>;
  Schedule const share("FS");
  RowList const rows = mixed_rows();
  auto const check = [&](auto x) {
    auto const format = kv_format(typename Case::Kv{}, shape);
    M model(share, 2, shape, layout, format);
    Session session(x, model, share, rows);
    session.run_all();
    for (std::int32_t const number : {0, 1}) {
      for (std::size_t r = 0; r < rows.size(); ++r) {
        CAPTURE(number, r);
        auto const selection = selection_by_hand(model, 0, rows[r]);
        CHECK(session.selected(number).row(static_cast<index_t>(r)) == selection);
        CHECK(close(row_of(session.out(number), model.shape, r),
                    attention_by_hand(model, number, rows[r], selection), output_tolerance(shape)));
      }
    }

    // R026, R148: whatever the cache holds, sparse equals dense where k covers the keys.
    Shape covering = shape;
    covering.top_k = 40;
    M all(share, 2, covering, layout, format);
    Session sparse(x, all, share, rows);
    Session<decltype(x), M, Schedule, DensePolicies<M>> dense(x, all, share, rows);
    sparse.run_all();
    dense.run_all();
    for (std::int32_t const number : {0, 1}) {
      CHECK(sparse.result(number) == dense.result(number));
      CHECK(sparse.result(number) != session.result(number));
    }
  };
#if defined(INDEXSHARE_TEST_CUDA)
  check(test::Cuda{});
#else
  SECTION("reference") { check(ReferenceExec{}); }
  SECTION("host, serial") { check(test::Serial{}); }
  SECTION("host, threads") { check(test::Threads{}); }
#endif
}

inline Layout paged_or_contiguous() {
  return GENERATE(Layout{4, 8, 1}, Layout{0, 0, 1}, Layout{8, 0, 2});
}

/// The small shape in every layout, the published one in one.
template <class Case>
void check_types() {
  SECTION("small widths") { check_types<Case>(small_shape, paged_or_contiguous()); }
  SECTION("published widths") { check_types<Case>(published_shape, {64, 64, 1}); }
}

}  // namespace layer_test
