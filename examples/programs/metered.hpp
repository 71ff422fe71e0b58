// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/concepts.hpp>
#include <indexshare/select.hpp>

#include <chrono>
#include <cstddef>
#include <cstdint>

/// @file Policies that wrap a policy, count its calls and time it: the layer has no hook, and needs
/// none.

namespace programs {

/// What one stage of the layers did.
struct Meter {
  /// Calls of the layer: one that is split into passes counts once, by its first rows.
  std::int64_t calls = 0;
  std::int64_t rows = 0;
  double milliseconds = 0;  ///< of the calls; a back end that only enqueues is not waited for

  template <class F>
  indexshare::Status measure(indexshare::RowRange pass, F const& f) noexcept {
    auto const start = std::chrono::steady_clock::now();
    indexshare::Status const status = f();
    std::chrono::duration<double, std::milli> const taken =
        std::chrono::steady_clock::now() - start;
    calls += pass.first == 0 ? 1 : 0;
    rows += pass.count;
    milliseconds += taken.count();
    return status;
  }
};

/// An indexer whose selections are metered: `select` is what a layer calls, and what a back end may
/// fuse, so it is measured as one.
template <class P>
struct MeteredIndexer {
  using score_type = typename P::score_type;
  template <indexshare::Space S>
  using inputs = typename P::template inputs<S>;
  P policy{};
  Meter* meter = nullptr;
};
template <class X, class P>
auto indexer_workspace(X const& x, MeteredIndexer<P> const& p,
                       indexshare::Shape const& shape) noexcept {
  return indexer_workspace(x, p.policy, shape);
}
template <class X, class P>
auto indexer_check(X const& x, MeteredIndexer<P> const& p,
                   typename P::template inputs<X::space> const& in,
                   indexshare::RowBatch<X::space> const& batch,
                   indexshare::Shape const& shape) noexcept {
  return indexer_check(x, p.policy, in, batch, shape);
}
template <class X, class P>
indexshare::Status indexer_score(
    X const& x, MeteredIndexer<P> const& p, typename P::template inputs<X::space> const& in,
    indexshare::RowBatch<X::space> const& batch, indexshare::ScoreRequest const& request,
    indexshare::ScoreView<X::space, typename P::score_type> const& scores,
    indexshare::Workspace ws) noexcept {
  return indexer_score(x, p.policy, in, batch, request, scores, ws);
}
template <class X, class P, class TopK>
auto select_workspace(X const& x, MeteredIndexer<P> const& p, TopK const& topk,
                      indexshare::Shape const& shape, std::size_t budget) noexcept {
  return select_workspace(x, p.policy, topk, shape, budget);
}
template <class X, class P, class TopK>
indexshare::Status select(X const& x, MeteredIndexer<P> const& p, TopK const& topk,
                          typename P::template inputs<X::space> const& in,
                          indexshare::RowBatch<X::space> const& batch,
                          indexshare::Shape const& shape,
                          indexshare::SelectionView<X::space> const& out,
                          indexshare::Workspace ws) noexcept {
  return p.meter->measure({0, batch.count()}, [&]() noexcept {
    return select(x, p.policy, topk, in, batch, shape, out, ws);
  });
}

template <class P>
struct MeteredAttention {
  static constexpr bool reads_selection = P::reads_selection;
  template <indexshare::Space S>
  using inputs = typename P::template inputs<S>;
  template <indexshare::Space S>
  using outputs = typename P::template outputs<S>;
  P policy{};
  Meter* meter = nullptr;
};
template <class X, class P>
auto attention_workspace(X const& x, MeteredAttention<P> const& p,
                         indexshare::Shape const& shape) noexcept {
  return attention_workspace(x, p.policy, shape);
}
template <class X, class P>
auto attention_check(X const& x, MeteredAttention<P> const& p,
                     typename P::template inputs<X::space> const& in,
                     typename P::template outputs<X::space> const& out,
                     indexshare::RowBatch<X::space> const& batch,
                     indexshare::Shape const& shape) noexcept {
  return attention_check(x, p.policy, in, out, batch, shape);
}
template <class X, class P>
indexshare::Status attention_run(
    X const& x, MeteredAttention<P> const& p, typename P::template inputs<X::space> const& in,
    indexshare::RowBatch<X::space> const& batch, indexshare::RowRange rows,
    indexshare::GroupPlan<X::space> const& plan, typename P::template outputs<X::space> const& out,
    indexshare::Shape const& shape, indexshare::Workspace ws) noexcept {
  return p.meter->measure(rows, [&]() noexcept {
    return attention_run(x, p.policy, in, batch, rows, plan, out, shape, ws);
  });
}

}  // namespace programs
