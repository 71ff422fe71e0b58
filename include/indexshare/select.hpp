// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/concepts.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace indexshare {
inline namespace v0 {
namespace detail {

constexpr Status workspace_too_small(char const* what, std::size_t minimum,
                                     std::size_t got) noexcept {
  return failure(Errc::workspace_too_small, what, static_cast<std::int64_t>(minimum),
                 static_cast<std::int64_t>(got));
}

/// What any memory of a workspace must be, whatever its size.
inline Status check_memory(Workspace ws) noexcept {
  if (std::size_t const past = misalignment(ws.data); past != 0) {
    return failure(Errc::bad_value, "alignment of the workspace (got: bytes past a multiple)",
                   static_cast<std::int64_t>(workspace_alignment), static_cast<std::int64_t>(past));
  }
  return ws.data == nullptr && ws.bytes > 0
             ? failure(Errc::missing_input, "memory of the workspace")
             : Status{};
}

/// The workspace of a call that needs `bytes` of it.
inline Status check_workspace(char const* what, Workspace ws, std::size_t bytes) noexcept {
  if (bytes == 0) return {};
  if (ws.bytes < bytes) return workspace_too_small(what, bytes, ws.bytes);
  return check_memory(ws);
}

/// The most rows of a pass whose scratch, `size_of(rows)`, fits into `bytes`. `size_of` is
/// monotone.
template <class SizeOf>
Result<index_t> rows_that_fit(char const* what, index_t rows, std::size_t bytes,
                              SizeOf const& size_of) noexcept {
  Result<WorkspaceSize> const minimum = size_of(index_t{1});
  if (!minimum) return refuse(minimum.error());
  if (minimum->bytes > bytes) return refuse(workspace_too_small(what, minimum->bytes, bytes));
  index_t fits = 1;
  index_t beyond = std::max<index_t>(rows, 1) + 1;
  while (beyond - fits > 1) {
    index_t const middle = fits + (beyond - fits) / 2;
    Result<WorkspaceSize> const size = size_of(middle);
    if (!size) return refuse(size.error());
    (size->bytes <= bytes ? fits : beyond) = middle;
  }
  return fits;
}

/// Scratch for all rows at once, or the whole budget where they must be split. Taking the whole
/// budget keeps the size monotone in every capacity.
template <class SizeOf>
Result<WorkspaceSize> size_within(char const* what, index_t rows, std::size_t budget,
                                  SizeOf const& size_of) noexcept {
  if (Result<index_t> const fits = rows_that_fit(what, 1, budget, size_of); !fits) {
    return refuse(fits.error());
  }
  Result<WorkspaceSize> const all = size_of(std::max<index_t>(rows, 1));
  if (!all) return all;
  return WorkspaceSize{std::min(all->bytes, budget)};
}

/// Calls `pass` for successive row ranges of at most `rows_per_pass` rows.
template <class Pass>
Status for_each_pass(index_t rows, index_t rows_per_pass, Pass const& pass) noexcept {
  for (index_t first = 0; first < rows; first += rows_per_pass) {
    if (Status const status = pass(RowRange{first, std::min(rows_per_pass, rows - first)});
        !status.ok()) {
      return status;
    }
  }
  return {};
}

/// Score rows begin at multiples of 64 elements.
constexpr index_t score_stride(index_t keys) noexcept { return (keys + 63) / 64 * 64; }

/// Scores of one pass followed by the scratch of whichever policy runs on them.
template <class X, class Indexer, class TopK>
Result<WorkspaceSize> select_pass_size(X const& x, Indexer const& indexer, TopK const& topk,
                                       Shape const& shape, index_t rows) noexcept {
  Result<WorkspaceSize> const score = indexer_workspace(x, indexer, shape.with_rows(rows));
  if (!score) return score;
  Result<WorkspaceSize> const best = topk_workspace(x, topk, shape.with_rows(rows));
  if (!best) return best;
  WorkspaceCarver carver;
  carver.take<typename Indexer::score_type>(saturating_area(rows, score_stride(shape.keys)));
  return WorkspaceSize{
      std::min(max_workspace_bytes, carver.size().bytes + std::max(score->bytes, best->bytes))};
}

inline constexpr char const* select_workspace_name =
    "workspace of the selection (scores of one row at least), in bytes";
inline constexpr char const* attention_workspace_name = "workspace of the attention, in bytes";

}  // namespace detail

/// Scratch of `select` within `budget` bytes; the error names the minimum.
template <Executor X, class Indexer, class TopK>
Result<WorkspaceSize> select_workspace(X const& x, Indexer const& indexer, TopK const& topk,
                                       Shape const& shape, std::size_t budget) noexcept {
  return detail::size_within(detail::select_workspace_name, shape.rows, budget,
                             [&](index_t rows) noexcept {
                               return detail::select_pass_size(x, indexer, topk, shape, rows);
                             });
}

/// From indexer inputs to a selection: scores as many rows as the workspace holds, selects, goes
/// on. The result does not depend on the workspace. A back end that can do both at once overloads
/// this and `select_workspace` for its executor and a pair of policies that it knows.
///
/// @param out  selection of all rows of `batch`, width shape.top_k
template <Executor X, class Indexer, class TopK>
Status select(X const& x, Indexer const& indexer, TopK const& topk,
              typename Indexer::template inputs<X::space> const& in,
              RowBatch<X::space> const& batch, Shape const& shape,
              SelectionView<X::space> const& out, Workspace ws) noexcept {
  using Score = typename Indexer::score_type;
  Result<index_t> const rows_per_pass = detail::rows_that_fit(
      detail::select_workspace_name, batch.count(), ws.bytes, [&](index_t rows) noexcept {
        return detail::select_pass_size(x, indexer, topk, shape, rows);
      });
  if (!rows_per_pass) return rows_per_pass.error();

  index_t const stride = detail::score_stride(shape.keys);
  WorkspaceCarver carver(ws);
  auto* const buffer = carver.take<Score>(saturating_area(*rows_per_pass, stride));
  return detail::for_each_pass(batch.count(), *rows_per_pass, [&](RowRange rows) noexcept {
    auto const scores =
        make_strided<X::space, Score, 2>(buffer, {rows.count, shape.keys}, {stride, 1});
    ScoreRequest const request{rows, shape.top_k};
    if (Status const status = indexer_score(x, indexer, in, batch, request, scores, carver.rest());
        !status.ok()) {
      return status;
    }
    SelectionView<X::space> const part{rows_of(out.indices, rows.first, rows.count),
                                       rows_of(out.counts, rows.first, rows.count)};
    return topk_select(x, topk, ScoreView<X::space, Score const>(scores),
                       rows_of(batch.lengths, rows.first, rows.count), part, carver.rest());
  });
}

}  // namespace v0
}  // namespace indexshare
