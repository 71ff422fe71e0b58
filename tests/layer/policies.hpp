// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/indexshare.hpp>

#include <cstddef>
#include <cstdint>

/// @file Policies of a caller: a schedule, an indexer that counts, and two that fail midway.

namespace layer_test {

using namespace indexshare;

/// A share policy: the source of each layer, from letters as in Pattern, known at run time.
struct Schedule {
  static constexpr std::int32_t most = 80;

  std::int32_t layers = 0;
  std::int16_t sources[most]{};

  constexpr Schedule() = default;
  explicit constexpr Schedule(char const* letters) {
    for (; letters[layers] != '\0'; ++layers) {
      bool const reads = letters[layers] == 'S';
      auto const self = static_cast<std::int16_t>(layers);
      sources[layers] = !reads ? self : layers > 0 ? sources[layers - 1] : std::int16_t{no_source};
    }
  }
};

constexpr std::int32_t share_source(Schedule const& policy, std::int32_t layer) noexcept {
  return 0 <= layer && layer < policy.layers ? policy.sources[layer] : no_source;
}

struct Calls {
  int scores = 0;      ///< calls of indexer_score
  index_t rows = 0;    ///< rows that they asked for
  int checks = 0;      ///< calls of indexer_check
  int fail_score = 0;  ///< number of the score call that fails, counted from 1; 0: none
};

/// An indexer that counts and forwards.
template <class Inner>
struct Counting {
  using score_type = typename Inner::score_type;
  template <Space S>
  using inputs = typename Inner::template inputs<S>;

  Calls* calls = nullptr;
  Inner inner{};
};

template <Executor X, class Inner>
Result<WorkspaceSize> indexer_workspace(X const& x, Counting<Inner> const& p,
                                        Shape const& shape) noexcept {
  return indexer_workspace(x, p.inner, shape);
}

template <Executor X, class Inner>
Status indexer_check(X const& x, Counting<Inner> const& p,
                     typename Inner::template inputs<X::space> const& in,
                     RowBatch<X::space> const& batch, Shape const& shape) noexcept {
  if (p.calls != nullptr) ++p.calls->checks;
  return indexer_check(x, p.inner, in, batch, shape);
}

template <Executor X, class Inner>
Status indexer_score(X const& x, Counting<Inner> const& p,
                     typename Inner::template inputs<X::space> const& in,
                     RowBatch<X::space> const& batch, ScoreRequest const& request,
                     ScoreView<X::space, typename Inner::score_type> const& scores,
                     Workspace ws) noexcept {
  if (p.calls != nullptr) {
    p.calls->rows += request.rows.count;
    if (++p.calls->scores == p.calls->fail_score) {
      return failure(Errc::backend_error, "the test's indexer gives up");
    }
  }
  return indexer_score(x, p.inner, in, batch, request, scores, ws);
}

/// A top-k that selects half a pass and fails.
struct FailingTopK {
  bool fails = true;
};

template <Executor X>
Result<WorkspaceSize> topk_workspace(X const& x, FailingTopK, Shape const& shape) noexcept {
  return topk_workspace(x, RadixTopK{}, shape);
}

template <Executor X, class Score>
Status topk_select(X const& x, FailingTopK const& p, ScoreView<X::space, Score const> const& scores,
                   LengthView<X::space> const& lengths, SelectionView<X::space> const& out,
                   Workspace ws) noexcept {
  Status const status = topk_select(x, RadixTopK{}, scores, lengths, out, ws);
  return p.fails ? failure(Errc::backend_error, "the test's top-k gives up") : status;
}

}  // namespace layer_test
