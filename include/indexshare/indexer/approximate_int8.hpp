// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/batch.hpp>
#include <indexshare/cache.hpp>
#include <indexshare/detail/check.hpp>
#include <indexshare/indexer/relu_dot.hpp>

#include <cstdint>
#include <limits>

namespace indexshare {
inline namespace v0 {

/// A faster, approximate `ReluDotIndexer<Query, format::IndexKeyInt8>`, with the same inputs: dots
/// of integers instead of floats,
///   score(t, s) = k_scale[s] * sum_h w[t,h] * q_scale[t,h] * max(0, q_code[t,h] . k_code[s]).
///
/// Approximate in two places. The keys: the cache holds codes of 8 bits, so a lane is off by up to
/// 1/254 of the key's largest (the caller has chosen that with the cache). The queries: the call
/// rounds each head to codes of 7 bits, -64 .. 64, so a lane is off by up to 1/128 of the head's
/// largest lane. Selections differ from the exact ones near the cut: docs/policies.md has the share
/// that they find. All else is as in the exact indexer: dots are exact integers, heads are summed
/// in fp32, a row's bits depend on its own data, ties go to the lower position, and a position
/// without a slot scores -inf.
///
/// Scales of keys are not negative. A key of scale NaN scores NaN. A head with a lane that is NaN
/// or infinite, or with a weight that is NaN, makes all scores of its row NaN. A head whose lanes
/// are all below 2^-107 counts as zeros.
///
/// On the host and the reference; no other back end has it. Include host/approximate_int8.hpp.
/// @tparam Query  element of the queries: float, bf16, fp16, e4m3
template <Element Query>
struct ApproximateInt8Indexer {
  using score_type = float;
  using Exact = ReluDotIndexer<Query, format::IndexKeyInt8>;

  template <Space S>
  using inputs = typename Exact::template inputs<S>;
};

/// Lanes of a dot that stays within 32 bits.
inline constexpr index_t max_int8_index_dim = index_t{1} << 16;
static_assert(255 * 64 * max_int8_index_dim <= std::numeric_limits<std::int32_t>::max());

/// As of the exact indexer, and at most `max_int8_index_dim` lanes. Errors: bad_shape.
template <Element Query>
constexpr Status check_shape(ApproximateInt8Indexer<Query> const&, Shape const& shape) noexcept {
  using namespace detail;
  return first_failure(
      {check_shape(typename ApproximateInt8Indexer<Query>::Exact{}, shape),
       check_at_most("shape.index_dim of int8 keys", max_int8_index_dim, shape.index_dim)});
}

/// As of the exact indexer. Errors: bad_shape, bad_stride, missing_input, bad_value.
template <Element Query, Space S>
Status check_inputs(ApproximateInt8Indexer<Query> const& policy,
                    typename ApproximateInt8Indexer<Query>::Exact::template inputs<S> const& in,
                    RowBatch<S> const& batch, Shape const& shape) noexcept {
  return detail::first_failure(
      {check_shape(policy, shape),
       check_inputs(typename ApproximateInt8Indexer<Query>::Exact{}, in, batch, shape)});
}

}  // namespace v0
}  // namespace indexshare
