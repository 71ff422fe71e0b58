// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/attention/mla.hpp>
#include <indexshare/concepts.hpp>
#include <indexshare/detail/int8.hpp>
#include <indexshare/host/selection.hpp>
#include <indexshare/indexer/approximate_int8.hpp>
#include <indexshare/indexer/relu_dot.hpp>
#include <indexshare/topk/order.hpp>
#include <indexshare/topk/radix.hpp>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>

/// @file The oracle: the equations in plain loops with double accumulation, for every format, on
/// the calling thread. Never optimised; the other back ends are compared with it.

namespace indexshare {
inline namespace v0 {

// ---- indexer

template <class Query, class KeyFormat>
Result<WorkspaceSize> indexer_workspace(ReferenceExec, ReluDotIndexer<Query, KeyFormat> policy,
                                        Shape const& shape) noexcept {
  if (Status const status = check_shape(policy, shape); !status.ok()) return refuse(status);
  WorkspaceCarver carver;
  carver.take<float>(static_cast<std::size_t>(shape.index_dim));
  return carver.size();
}

template <class Query, class KeyFormat>
Status indexer_check(
    ReferenceExec, ReluDotIndexer<Query, KeyFormat> policy,
    typename ReluDotIndexer<Query, KeyFormat>::template inputs<Space::host> const& in,
    RowBatch<Space::host> const& batch, Shape const& shape) noexcept {
  return check_inputs(policy, in, batch, shape);
}

/// The score is rounded to fp32 once, at the end.
template <class Query, class KeyFormat>
Status indexer_score(
    ReferenceExec, ReluDotIndexer<Query, KeyFormat>,
    typename ReluDotIndexer<Query, KeyFormat>::template inputs<Space::host> const& in,
    RowBatch<Space::host> const& batch, ScoreRequest const& request,
    ScoreView<Space::host> const& scores, Workspace ws) noexcept {
  index_t const heads = in.q.extent(1);
  index_t const lanes = in.q.extent(2);
  WorkspaceCarver carver(ws);
  float* const key = carver.take<float>(static_cast<std::size_t>(lanes));
  for (index_t i = 0; i < request.rows.count; ++i) {
    index_t const row = request.rows.first + i;
    index_t const length = clamp_length(batch.lengths(row), scores.extent(1));
    if (length <= request.top_k) continue;
    for (index_t s = 0; s < length; ++s) {
      position_t const slot = batch.index_pages.slot(batch.requests(row), s);
      if (!in.keys.has(slot)) {
        scores(i, s) = -std::numeric_limits<float>::infinity();
        continue;
      }
      decode_row(in.keys, slot, key);
      double sum = 0;
      for (index_t h = 0; h < heads; ++h) {
        double dot = 0;
        for (index_t d = 0; d < lanes; ++d) {
          dot += static_cast<double>(to_float(in.q(row, h, d))) * static_cast<double>(key[d]);
        }
        // a NaN dot must stay NaN, so no std::max
        sum += static_cast<double>(in.weights(row, h)) * (dot < 0 ? 0.0 : dot);
      }
      scores(i, s) = static_cast<float>(sum);
    }
  }
  return {};
}

namespace detail {

struct Int8Reference {
  std::int8_t* codes;  ///< [heads][lanes] of the queries of a row
  float* weights;      ///< [heads] times the scales of the codes
};
inline Int8Reference carve_int8_reference(WorkspaceCarver& carver, index_t heads,
                                          index_t lanes) noexcept {
  return {carver.take<std::int8_t>(saturating_area(heads, lanes)),
          carver.take<float>(static_cast<std::size_t>(heads))};
}

}  // namespace detail

template <class Query>
Result<WorkspaceSize> indexer_workspace(ReferenceExec, ApproximateInt8Indexer<Query> policy,
                                        Shape const& shape) noexcept {
  if (Status const status = check_shape(policy, shape); !status.ok()) return refuse(status);
  WorkspaceCarver carver;
  detail::carve_int8_reference(carver, shape.index_heads, shape.index_dim);
  return carver.size();
}

template <class Query>
Status indexer_check(
    ReferenceExec, ApproximateInt8Indexer<Query> policy,
    typename ApproximateInt8Indexer<Query>::Exact::template inputs<Space::host> const& in,
    RowBatch<Space::host> const& batch, Shape const& shape) noexcept {
  return check_inputs(policy, in, batch, shape);
}

/// The codes of every back end, exact dots of them, and a score that is rounded to fp32 once.
template <class Query>
Status indexer_score(
    ReferenceExec, ApproximateInt8Indexer<Query>,
    typename ApproximateInt8Indexer<Query>::Exact::template inputs<Space::host> const& in,
    RowBatch<Space::host> const& batch, ScoreRequest const& request,
    ScoreView<Space::host> const& scores, Workspace ws) noexcept {
  index_t const heads = in.q.extent(1);
  index_t const lanes = in.q.extent(2);
  WorkspaceCarver carver(ws);
  auto const query = detail::carve_int8_reference(carver, heads, lanes);
  for (index_t i = 0; i < request.rows.count; ++i) {
    index_t const row = request.rows.first + i;
    index_t const length = clamp_length(batch.lengths(row), scores.extent(1));
    if (length <= request.top_k) continue;
    for (index_t h = 0; h < heads; ++h) {
      query.weights[h] =
          in.weights(row, h) *
          detail::quantize_int8(
              lanes, detail::largest_query_code,
              [&](index_t d) noexcept { return to_float(in.q(row, h, d)); },
              [&](index_t d, std::int8_t code) noexcept { query.codes[h * lanes + d] = code; });
    }
    for (index_t s = 0; s < length; ++s) {
      position_t const slot = batch.index_pages.slot(batch.requests(row), s);
      if (!in.keys.has(slot)) {
        scores(i, s) = -std::numeric_limits<float>::infinity();
        continue;
      }
      std::byte const* const key = in.keys.row(slot);
      double sum = 0;
      for (index_t h = 0; h < heads; ++h) {
        std::int64_t dot = 0;
        for (index_t d = 0; d < lanes; ++d) {
          dot += std::int64_t{query.codes[h * lanes + d]} * static_cast<std::int8_t>(key[d]);
        }
        sum += static_cast<double>(query.weights[h]) *
               static_cast<double>(std::max<std::int64_t>(dot, 0));
      }
      auto const scale = detail::load_unaligned<float>(detail::scale_of(in.keys, slot));
      scores(i, s) = static_cast<float>(static_cast<double>(scale) * sum);
    }
  }
  return {};
}

// ---- top-k

inline Result<WorkspaceSize> topk_workspace(ReferenceExec, RadixTopK, Shape const& shape) noexcept {
  WorkspaceCarver carver;
  carver.take<position_t>(static_cast<std::size_t>(shape.keys));
  return carver.size();
}

/// A full sort of the positions by the order of contracts 2.2.
template <Element Score>
Status topk_select(ReferenceExec, RadixTopK policy,
                   ScoreView<Space::host, Score const> const& scores,
                   LengthView<Space::host> const& lengths, SelectionView<Space::host> const& out,
                   Workspace ws) noexcept {
  if (Status const status = check_inputs(policy, scores, lengths, out); !status.ok()) return status;
  index_t const width = out.indices.extent(1);
  WorkspaceCarver carver(ws);
  auto* const order = carver.take<position_t>(static_cast<std::size_t>(scores.extent(1)));
  for (index_t row = 0; row < scores.extent(0); ++row) {
    index_t const length = clamp_length(lengths(row), scores.extent(1));
    index_t const chosen = std::min(width, length);
    for (index_t s = 0; s < length; ++s) order[s] = static_cast<position_t>(s);
    if (length > width) {
      std::sort(order, order + length, [&](position_t a, position_t b) noexcept {
        auto const key_a = order_key(to_float(scores(row, a)));
        auto const key_b = order_key(to_float(scores(row, b)));
        return key_a != key_b ? key_a > key_b : a < b;
      });
      std::sort(order, order + chosen);
    }
    for (index_t j = 0; j < width; ++j) {
      out.indices(row, j) = j < chosen ? order[j] : no_position;
    }
    out.counts(row) = static_cast<position_t>(chosen);
  }
  return {};
}

// ---- attention

namespace detail {

/// One head of one row: softmax over the entries that `slot_of(j)`, j in [0, entries), yields and
/// that lie in the cache. `row`, `values` are scratch of key_dim and value_dim.
template <class Query, class KvFormat, class Out, class SlotOf>
void reference_attend(MlaInputs<Query, KvFormat, Space::host> const& in,
                      MlaOutputs<Out, Space::host> const& out, index_t row, index_t head,
                      index_t entries, SlotOf const& slot_of, float* key, double* values) noexcept {
  index_t const lanes = in.q.extent(2);
  index_t const value_dim = out.out.extent(2);
  auto const logit_of = [&](position_t slot) noexcept {
    decode_row(in.kv, slot, key);
    double dot = 0;
    for (index_t d = 0; d < lanes; ++d) {
      dot += static_cast<double>(to_float(in.q(row, head, d))) * static_cast<double>(key[d]);
    }
    return dot * static_cast<double>(in.scale);
  };

  double largest = -std::numeric_limits<double>::infinity();
  index_t valid = 0;
  for (index_t j = 0; j < entries; ++j) {
    if (!in.kv.has(slot_of(j))) continue;
    largest = std::max(largest, logit_of(slot_of(j)));
    ++valid;
  }
  double total = 0;
  std::fill(values, values + value_dim, 0.0);
  for (index_t j = 0; j < entries; ++j) {
    if (!in.kv.has(slot_of(j))) continue;
    double const weight = std::exp(logit_of(slot_of(j)) - largest);
    total += weight;
    for (index_t v = 0; v < value_dim; ++v) values[v] += weight * static_cast<double>(key[v]);
  }

  bool const empty = valid == 0;
  double const lse = empty ? -std::numeric_limits<double>::infinity() : largest + std::log(total);
  double factor = empty ? 0.0 : 1.0 / total;
  if (in.sink.data_handle() != nullptr && !empty) {
    // exp(lse) / (exp(lse) + exp(sink)) without overflow
    factor /= 1.0 + std::exp(static_cast<double>(in.sink(head)) - lse);
  }
  for (index_t v = 0; v < value_dim; ++v) {
    out.out(row, head, v) = from_float<Out>(static_cast<float>(values[v] * factor));
  }
  if (out.lse.data_handle() != nullptr) out.lse(row, head) = static_cast<float>(lse);
}

struct ReferenceScratch {
  float* key;
  double* values;
};
inline ReferenceScratch carve_reference(WorkspaceCarver& carver, Shape const& shape) noexcept {
  return {carver.take<float>(static_cast<std::size_t>(shape.key_dim)),
          carver.take<double>(static_cast<std::size_t>(shape.value_dim))};
}

}  // namespace detail

template <class Policy>
requires detail::is_mla<Policy> Result<WorkspaceSize> attention_workspace(ReferenceExec,
                                                                          Policy policy,
                                                                          Shape const& shape)
noexcept {
  if (Status const status = check_shape(policy, shape); !status.ok()) return refuse(status);
  WorkspaceCarver carver;
  detail::carve_reference(carver, shape);
  return carver.size();
}

template <class Policy>
requires detail::is_mla<Policy> Status
attention_check(ReferenceExec, Policy, typename Policy::template inputs<Space::host> const& in,
                typename Policy::template outputs<Space::host> const& out,
                RowBatch<Space::host> const& batch, Shape const& shape)
noexcept { return check_inputs(in, out, batch, shape); }

template <class Policy>
requires detail::is_mla<Policy> Status attention_run(
    ReferenceExec, Policy, typename Policy::template inputs<Space::host> const& in,
    RowBatch<Space::host> const& batch, RowRange rows, GroupPlan<Space::host> const& plan,
    typename Policy::template outputs<Space::host> const& out, Shape const& shape, Workspace ws)
noexcept {
  WorkspaceCarver carver(ws);
  auto const scratch = detail::carve_reference(carver, shape);
  for (index_t row = rows.first; row < rows.first + rows.count; ++row) {
    for (index_t head = 0; head < in.q.extent(1); ++head) {
      auto const attend = [&](index_t entries, auto const& slot_of) noexcept {
        detail::reference_attend(in, out, row, head, entries, slot_of, scratch.key, scratch.values);
      };
      if constexpr (Policy::reads_selection) {
        attend(clamp_length(plan.counts(row), plan.slots.extent(1)),
               [&](index_t j) noexcept { return plan.slots(row, j); });
      } else {
        attend(clamp_length(batch.lengths(row), shape.keys),
               [&](index_t j) noexcept { return batch.kv_pages.slot(batch.requests(row), j); });
      }
    }
  }
  return {};
}

}  // namespace v0
}  // namespace indexshare
