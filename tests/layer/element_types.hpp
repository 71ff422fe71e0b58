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

/// e4m3 latent: two tiles of 4 codes, then rotary lanes.
inline auto kv_format(E4m3Latent) { return E4m3Latent{8, 4}; }
template <class T>
Plain<T> kv_format(Plain<T>) {
  return {};
}

template <class Case>
void check_types(Layout layout) {
  using M = Model<typename Case::Query, typename Case::Keys, typename Case::Kv>;
  Schedule const share("FS");
  RowList const rows = mixed_rows();
  auto const check = [&](auto x) {
    M model(share, 2, small_shape, layout, kv_format(typename Case::Kv{}));
    Session session(x, model, share, rows);
    session.run_all();
    for (std::int32_t const number : {0, 1}) {
      for (std::size_t r = 0; r < rows.size(); ++r) {
        CAPTURE(number, r);
        auto const selection = selection_by_hand(model, 0, rows[r]);
        CHECK(session.selected(number).row(static_cast<index_t>(r)) == selection);
        CHECK(close(row_of(session.out(number), model.shape, r),
                    attention_by_hand(model, number, rows[r], selection)));
      }
    }

    // R026, R148: whatever the cache holds, sparse equals dense where k covers the keys.
    Shape covering = small_shape;
    covering.top_k = 40;
    M all(share, 2, covering, layout, kv_format(typename Case::Kv{}));
    Session sparse(x, all, share, rows);
    Session<decltype(x), M, Schedule, DensePolicies<M>> dense(x, all, share, rows);
    sparse.run_all();
    dense.run_all();
    for (std::int32_t const number : {0, 1}) {
      CHECK(sparse.result(number) == dense.result(number));
      CHECK(sparse.result(number) != session.result(number));
    }
  };
  SECTION("reference") { check(ReferenceExec{}); }
  SECTION("host, serial") { check(test::Serial{}); }
  SECTION("host, threads") { check(test::Threads{}); }
}

inline Layout paged_or_contiguous() {
  return GENERATE(Layout{4, 8, 1}, Layout{0, 0, 1}, Layout{8, 0, 2});
}

}  // namespace layer_test
