// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/batch.hpp>
#include <indexshare/cache.hpp>
#include <indexshare/detail/check.hpp>
#include <indexshare/views.hpp>

namespace indexshare {
inline namespace v0 {

/// The lightning indexer: score(t, s) = sum_h w[t,h] * max(0, q[t,h] . k[s]), fp32.
/// The front end folds every constant (H^-0.5, D^-0.5, the scale of an e4m3 query head, which is
/// positive) into w, in fp32; nothing is applied here. A position without a slot scores -inf.
///
/// @tparam Query      element of the queries: float, bf16, fp16, e4m3
/// @tparam KeyFormat  layout of the index-key cache: format::Plain<T>, format::IndexKeyE4m3,
///                    format::IndexKeyInt8
/// @source DeepSeek-V3.2-Exp inference/model.py, Indexer, commit 3b99a53
template <Element Query, class KeyFormat>
struct ReluDotIndexer {
  using score_type = float;

  template <Space S>
  struct inputs {
    QueryView<S, Query> q{};         ///< [rows, index heads, index dim], rotated
    HeadWeightView<S> weights{};     ///< [rows, index heads], constants folded in; may be negative
    CacheView<S, KeyFormat> keys{};  ///< one row of index-dim lanes per token, rotated
    LaneBasis q_basis = LaneBasis::natural;  ///< must be that of `keys`
  };
};

/// What every back end asks of a shape, for its `indexer_workspace`. Errors: bad_shape.
template <Element Query, class KeyFormat>
constexpr Status check_shape(ReluDotIndexer<Query, KeyFormat> const&, Shape const& shape) noexcept {
  using namespace detail;
  return first_failure({check_at_least("shape.index_heads", 1, shape.index_heads),
                        check_at_most("shape.index_heads", max_width, shape.index_heads),
                        check_at_least("shape.index_dim", 1, shape.index_dim),
                        check_at_most("shape.index_dim", max_width, shape.index_dim)});
}

/// The checks that every back end shares, for its `indexer_check`; a back end adds its own limits.
/// Errors: bad_shape, bad_stride, missing_input, bad_value; `what` names the extent.
template <Element Query, class KeyFormat, Space S>
Status check_inputs(ReluDotIndexer<Query, KeyFormat> const& policy,
                    typename ReluDotIndexer<Query, KeyFormat>::template inputs<S> const& in,
                    RowBatch<S> const& batch, Shape const& shape) noexcept {
  using namespace detail;
  return first_failure({
      check_shape(policy, shape),
      check_extent("rows of the index queries", batch.count(), in.q.extent(0)),
      check_extent("heads of the index queries", shape.index_heads, in.q.extent(1)),
      check_extent("lanes of the index queries", shape.index_dim, in.q.extent(2)),
      check_extent("rows of the head weights", batch.count(), in.weights.extent(0)),
      check_extent("heads of the head weights", shape.index_heads, in.weights.extent(1)),
      check_readable("index queries", in.q),
      check_readable("head weights", in.weights),
      check_cache(index_key_cache_names, in.keys, shape.index_dim, batch.index_pages),
      in.q_basis == in.keys.basis
          ? Status{}
          : failure(Errc::bad_value,
                    "basis of the index queries against the index-key cache's (0 natural, 1 "
                    "hadamard)",
                    static_cast<std::int64_t>(in.keys.basis),
                    static_cast<std::int64_t>(in.q_basis)),
  });
}

}  // namespace v0
}  // namespace indexshare
