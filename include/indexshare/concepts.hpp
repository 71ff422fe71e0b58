// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/batch.hpp>
#include <indexshare/cache.hpp>
#include <indexshare/dims.hpp>
#include <indexshare/exec.hpp>
#include <indexshare/selection.hpp>
#include <indexshare/status.hpp>
#include <indexshare/views.hpp>
#include <indexshare/workspace.hpp>

#include <concepts>
#include <cstdint>

/// @file What a policy is: a small semiregular value whose options are its members, with free
/// functions found by ADL whose first argument is the executor. One overload set per back end.
/// docs/policies.md writes one in 40 lines.

namespace indexshare {
inline namespace v0 {

/// Rows [first, first + count) of a batch: one pass of a call that was split to fit its scratch.
struct RowRange {
  index_t first = 0;
  index_t count = 0;
};

/// What a score pass must deliver: the scores of `rows` whose length is above `top_k`. The other
/// rows select everything they see; their scores are never read and may be left unwritten.
struct ScoreRequest {
  RowRange rows;
  index_t top_k = 0;
};

// One concept per function, so that a diagnostic can name the missing one.
namespace detail {

template <class P, class X>
concept HasIndexerTypes = std::semiregular<P> && requires {
  typename P::score_type;
  typename P::template inputs<X::space>;
};
template <class P, class X>
concept HasIndexerWorkspace = requires(P const p, X const x, Shape shape) {
  { indexer_workspace(x, p, shape) }
  noexcept->std::same_as<Result<WorkspaceSize>>;
};
template <class P, class X>
concept HasIndexerCheck = requires(P const p, X const x,
                                   typename P::template inputs<X::space> const in,
                                   RowBatch<X::space> const batch, Shape shape) {
  { indexer_check(x, p, in, batch, shape) }
  noexcept->std::same_as<Status>;
};
template <class P, class X>
concept HasIndexerScore = requires(P const p, X const x,
                                   typename P::template inputs<X::space> const in,
                                   RowBatch<X::space> const batch, ScoreRequest request,
                                   ScoreView<X::space, typename P::score_type> scores,
                                   Workspace ws) {
  { indexer_score(x, p, in, batch, request, scores, ws) }
  noexcept->std::same_as<Status>;
};

template <class P, class X>
concept HasTopKWorkspace = requires(P const p, X const x, Shape shape) {
  { topk_workspace(x, p, shape) }
  noexcept->std::same_as<Result<WorkspaceSize>>;
};
template <class P, class X, class Score>
concept HasTopKSelect = requires(P const p, X const x, ScoreView<X::space, Score const> scores,
                                 LengthView<X::space> lengths, SelectionView<X::space> out,
                                 Workspace ws) {
  { topk_select(x, p, scores, lengths, out, ws) }
  noexcept->std::same_as<Status>;
};

template <class P>
concept HasShareSource = requires(P const p, std::int32_t layer) {
  { share_source(p, layer) }
  noexcept->std::same_as<std::int32_t>;
};

template <class P, class X>
concept HasAttentionTypes = std::semiregular<P> && requires {
  typename P::template inputs<X::space>;
  typename P::template outputs<X::space>;
  { P::reads_selection } -> std::convertible_to<bool>;
};
template <class P, class X>
concept HasAttentionWorkspace = requires(P const p, X const x, Shape shape) {
  { attention_workspace(x, p, shape) }
  noexcept->std::same_as<Result<WorkspaceSize>>;
};
template <class P, class X>
concept HasAttentionCheck = requires(P const p, X const x,
                                     typename P::template inputs<X::space> const in,
                                     typename P::template outputs<X::space> const out,
                                     RowBatch<X::space> const batch, Shape shape) {
  { attention_check(x, p, in, out, batch, shape) }
  noexcept->std::same_as<Status>;
};
template <class P, class X>
concept HasAttentionRun = requires(P const p, X const x,
                                   typename P::template inputs<X::space> const in,
                                   RowBatch<X::space> const batch, RowRange rows,
                                   GroupPlan<X::space> const plan,
                                   typename P::template outputs<X::space> const out, Shape shape,
                                   Workspace ws) {
  { attention_run(x, p, in, batch, rows, plan, out, shape, ws) }
  noexcept->std::same_as<Status>;
};

}  // namespace detail

/// Scores keys. `indexer_workspace` gives the scratch of a pass of shape.rows rows, or why the
/// shape cannot run (it is the capability query too); `indexer_check` refuses bad inputs before
/// any work; `indexer_score` writes scores(i, s) for row request.rows.first + i and each key s
/// below the row's length, and nothing at or past it.
template <class P, class X>
concept IndexerPolicy =
    Executor<X> && detail::HasIndexerTypes<P, X> && detail::HasIndexerWorkspace<P, X> &&
    detail::HasIndexerCheck<P, X> && detail::HasIndexerScore<P, X>;

/// Selects. `topk_select` writes for row r the n = min(k, lengths(r)) best keys under (score
/// descending, position ascending) as ascending positions, fills the rest of the row with
/// `no_position` and writes n; k is the width of `out`. Lengths are clamped to the width of
/// `scores`. Scores of rows with length <= k are not read.
template <class P, class X, class Score>
concept TopKPolicy = Executor<X> && std::semiregular<P> && detail::HasTopKWorkspace<P, X> &&
    detail::HasTopKSelect<P, X, Score>;

/// The schedule: `share_source(policy, layer)` is the layer whose selection `layer` uses (itself:
/// a full layer), or `no_source`.
template <class P>
concept SharePolicy = std::semiregular<P> && detail::HasShareSource<P>;

/// Attends to the selected keys. `attention_run` computes rows `rows` of `out`; it reads the plan
/// only if `P::reads_selection`.
template <class P, class X>
concept AttentionPolicy =
    Executor<X> && detail::HasAttentionTypes<P, X> && detail::HasAttentionWorkspace<P, X> &&
    detail::HasAttentionCheck<P, X> && detail::HasAttentionRun<P, X>;

namespace detail {

// The sentences that a compiler prints when a policy does not fit. What a size query needs comes
// first: an executor may answer these and run nothing.

template <class P, class X>
consteval void require_indexer_size() {
  static_assert(HasIndexerTypes<P, X>,
                "IndexerPolicy: the policy must be semiregular and have `score_type` and "
                "`template <Space> struct inputs`; see docs/policies.md");
  static_assert(HasIndexerWorkspace<P, X>,
                "IndexerPolicy: indexer_workspace(exec, policy, shape) noexcept -> "
                "Result<WorkspaceSize> is missing for this executor; include its back end or "
                "see docs/policies.md");
}
template <class P, class X>
consteval void require_indexer_policy() {
  require_indexer_size<P, X>();
  static_assert(HasIndexerCheck<P, X>,
                "IndexerPolicy: indexer_check(exec, policy, inputs, batch, shape) noexcept -> "
                "Status is missing for this executor; see docs/policies.md");
  static_assert(HasIndexerScore<P, X>,
                "IndexerPolicy: indexer_score(exec, policy, inputs, batch, request, scores, "
                "workspace) noexcept -> Status is missing for this executor; see docs/policies.md");
}

template <class P, class X>
consteval void require_topk_size() {
  static_assert(std::semiregular<P>, "TopKPolicy: the policy must be semiregular");
  static_assert(HasTopKWorkspace<P, X>,
                "TopKPolicy: topk_workspace(exec, policy, shape) noexcept -> "
                "Result<WorkspaceSize> is missing for this executor; include its back end or "
                "see docs/policies.md");
}
template <class P, class X, class Score>
consteval void require_topk_policy() {
  require_topk_size<P, X>();
  static_assert(HasTopKSelect<P, X, Score>,
                "TopKPolicy: topk_select(exec, policy, scores, lengths, selection, workspace) "
                "noexcept -> Status is missing for this executor and score type; see "
                "docs/policies.md");
}

template <class P>
consteval void require_share_policy() {
  static_assert(std::semiregular<P>, "SharePolicy: the policy must be semiregular");
  static_assert(HasShareSource<P>,
                "SharePolicy: share_source(policy, layer) noexcept -> std::int32_t is missing; "
                "see docs/policies.md");
}

template <class P, class X>
consteval void require_attention_size() {
  static_assert(HasAttentionTypes<P, X>,
                "AttentionPolicy: the policy must be semiregular and have `template <Space> "
                "struct inputs`, `outputs` and `static constexpr bool reads_selection`; see "
                "docs/policies.md");
  static_assert(HasAttentionWorkspace<P, X>,
                "AttentionPolicy: attention_workspace(exec, policy, shape) noexcept -> "
                "Result<WorkspaceSize> is missing for this executor; include its back end or "
                "see docs/policies.md");
}
template <class P, class X>
consteval void require_attention_policy() {
  require_attention_size<P, X>();
  static_assert(HasAttentionCheck<P, X>,
                "AttentionPolicy: attention_check(exec, policy, inputs, outputs, batch, shape) "
                "noexcept -> Status is missing for this executor; see docs/policies.md");
  static_assert(HasAttentionRun<P, X>,
                "AttentionPolicy: attention_run(exec, policy, inputs, batch, rows, plan, outputs, "
                "shape, workspace) noexcept -> Status is missing for this executor; see "
                "docs/policies.md");
}

}  // namespace detail

}  // namespace v0
}  // namespace indexshare
