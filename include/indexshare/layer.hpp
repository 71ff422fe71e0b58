// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/concepts.hpp>
#include <indexshare/detail/check.hpp>
#include <indexshare/handover.hpp>
#include <indexshare/select.hpp>
#include <indexshare/share/source.hpp>

#include <cuda/std/optional>

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace indexshare {
inline namespace v0 {

/// What one layer call brings. `indexer` is present on a full layer and absent on a shared one.
template <class Indexer, class Attention, Space S>
struct LayerInputs {
  cuda::std::optional<typename Indexer::template inputs<S>> indexer{};
  typename Attention::template inputs<S> attention{};
  RowBatch<S> batch{};
  ForwardId id{};
};

/// One sparse-attention layer of a model: asks the share policy for its role, selects or reuses,
/// and attends to its own KV at the selected positions. A value without memory of its own.
///
/// Appending index keys and KV is a separate call, made before `run`.
template <class Indexer, class TopK, class Share, class Attention>
struct SparseAttentionLayer {
  template <Space S>
  using inputs = LayerInputs<Indexer, Attention, S>;
  template <Space S>
  using outputs = typename Attention::template outputs<S>;

  Indexer indexer{};
  TopK topk{};
  Share share{};
  Attention attention{};
  Shape shape{};           ///< what a call may bring at most; sizes the workspace
  std::int32_t layer = 0;  ///< number that the share policy knows it by

  /// The layer whose selection this one uses, itself when it is full, or `no_source`.
  constexpr std::int32_t source() const noexcept {
    detail::require_share_policy<Share>();
    return share_source(share, layer);
  }
  constexpr bool is_full() const noexcept { return source() == layer; }

  /// Scratch bytes of `run` for any batch within `shape`, at most `budget`; layers that run one
  /// after the other can use one workspace of the largest. Host arithmetic only; monotone in every
  /// extent of `shape`; the results of `run` do not depend on it. Needs only the size functions of
  /// the policies, so an executor without kernels can be asked (CudaPlanner). Errors:
  /// workspace_too_small with the minimum as `expected`; unsupported or bad_shape when a policy
  /// cannot run the shape on this executor.
  template <Executor X>
  Result<WorkspaceSize> workspace(X const& x, std::size_t budget) const noexcept {
    require_sizes<X>();
    if (Status const status = check_shape(); !status.ok()) return refuse(status.at_layer(layer));
    Result<WorkspaceSize> const attend = detail::size_within(detail::attention_workspace_name,
                                                             shape.rows, budget, attention_size(x));
    if (!Attention::reads_selection || !is_full()) {
      return attend ? attend : refuse(attend.error().at_layer(layer));
    }
    Result<WorkspaceSize> const choose = select_workspace(x, indexer, topk, shape, budget);
    if (attend && choose) return WorkspaceSize{std::max(attend->bytes, choose->bytes)};
    return refuse(larger_need(attend, choose).at_layer(layer));
  }

  /// Runs the layer on `in.batch`. On a full layer `state` receives the selection and its group
  /// plan; on a shared layer it must hold those of this forward's source layer. With an attention
  /// policy that reads no selection (dense) neither indexer nor state is touched.
  ///
  /// Allocates nothing, synchronises nothing. All checks come before any work, so an error leaves
  /// outputs untouched; it names the extent and the layer. A batch without rows is legal; the
  /// workspace is checked all the same.
  template <Executor X>
  Status run(X const& x, inputs<X::space> const& in, SelectionState<X::space>& state,
             outputs<X::space> const& out, Workspace ws) const noexcept {
    require_policies<X>();
    Status status = check(x, in, state, out, ws);
    if constexpr (Attention::reads_selection) {
      if (status.ok()) status = is_full() ? fill(x, in, state, ws) : reuse(x, in, state);
    }
    if (status.ok()) status = attend(x, in, state, out, ws);
    return status.at_layer(layer);
  }

 private:
  template <Executor X>
  static consteval void require_sizes() {
    detail::require_indexer_size<Indexer, X>();
    detail::require_topk_size<TopK, X>();
    detail::require_share_policy<Share>();
    detail::require_attention_size<Attention, X>();
  }
  template <Executor X>
  static consteval void require_policies() {
    detail::require_indexer_policy<Indexer, X>();
    detail::require_topk_policy<TopK, X, typename Indexer::score_type>();
    detail::require_share_policy<Share>();
    detail::require_attention_policy<Attention, X>();
  }

  /// Of two size queries, at least one refused: the refusal to report. Where both only want more
  /// memory it is the larger minimum, so that one more try suffices.
  static constexpr Status larger_need(Result<WorkspaceSize> const& a,
                                      Result<WorkspaceSize> const& b) noexcept {
    if (a) return b.error();
    if (b) return a.error();
    if (a.error().code != Errc::workspace_too_small) return a.error();
    if (b.error().code != Errc::workspace_too_small) return b.error();
    return a.error().expected < b.error().expected ? b.error() : a.error();
  }

  template <Executor X>
  auto attention_size(X const& x) const noexcept {
    return [this, &x](index_t rows) noexcept {
      return attention_workspace(x, attention, shape.with_rows(rows));
    };
  }

  constexpr Status check_shape() const noexcept {
    return detail::first_failure({
        detail::check_at_least("shape.rows", 0, shape.rows),
        detail::check_at_most("shape.rows", max_position, shape.rows),
        detail::check_at_least("shape.keys", 1, shape.keys),
        detail::check_at_most("shape.keys", max_position, shape.keys),
        detail::check_at_least("shape.top_k", 1, shape.top_k),
        detail::check_at_most("shape.top_k", max_position, shape.top_k),
    });
  }

  SelectionTag expected_tag(ForwardId id, index_t rows) const noexcept {
    return {id, static_cast<std::int32_t>(rows), source()};
  }

  template <Space S>
  Status check_batch(RowBatch<S> const& batch) const noexcept {
    Status const status = detail::first_failure({
        check_shape(),
        detail::check_at_least("rows of batch.lengths", 0, batch.count()),
        detail::check_at_most("rows of batch.lengths against shape.rows", shape.rows,
                              batch.count()),
        detail::check_extent("rows of batch.requests against batch.lengths", batch.count(),
                             batch.requests.extent(0)),
        detail::check_readable("batch.lengths", batch.lengths),
        detail::check_readable("batch.requests", batch.requests),
    });
    if (!status.ok()) return status;
    PageTable<S> pages = batch.kv_pages;
    // A reused group plan may point into staging caches; whether it does, check_shared compares.
    if (Attention::reads_selection && !is_full()) pages.staging_slots = 0;
    return detail::check_covering_table(detail::kv_table_names, pages, shape.keys);
  }

  template <Executor X>
  Status check(X const& x, inputs<X::space> const& in, SelectionState<X::space> const& state,
               outputs<X::space> const& out, Workspace ws) const noexcept {
    if (Status const status = check_batch(in.batch); !status.ok()) return status;
    if (Status const status = attention_check(x, attention, in.attention, out, in.batch, shape);
        !status.ok()) {
      return status;
    }
    if constexpr (Attention::reads_selection) {
      if (Status const status = check_role(x, in, state); !status.ok()) return status;
    }
    return check_workspace(x, ws);
  }

  template <Executor X>
  Status check_role(X const& x, inputs<X::space> const& in,
                    SelectionState<X::space> const& state) const noexcept {
    std::int32_t const from = source();
    if (from == no_source) return failure(Errc::bad_schedule, "the share policy has no source");
    if (from > layer) {
      return failure(Errc::bad_schedule, "the share policy's source lies above the layer", layer,
                     from);
    }
    if (Status const status = detail::first_failure(
            {detail::check_value("forward of in.id (it must be given)", 0, in.id.forward),
             detail::check_extent("top_k of the state against shape.top_k", shape.top_k,
                                  state.top_k()),
             detail::check_at_most("rows of the batch for the state's capacity", state.rows(),
                                   in.batch.count())});
        !status.ok()) {
      return status;
    }
    return from == layer ? check_full(x, in) : check_shared(in, state);
  }

  template <Executor X>
  Status check_full(X const& x, inputs<X::space> const& in) const noexcept {
    if (!in.indexer) {
      return failure(Errc::missing_input, "a full layer needs indexer inputs");
    }
    Status const status =
        detail::check_covering_table(detail::index_table_names, in.batch.index_pages, shape.keys);
    return status.ok() ? indexer_check(x, indexer, *in.indexer, in.batch, shape) : status;
  }

  template <Space S>
  Status check_shared(inputs<S> const& in, SelectionState<S> const& state) const noexcept {
    if (in.indexer) {
      return failure(Errc::bad_value, "a shared layer takes no indexer inputs");
    }
    if (Status const status = match_tag(expected_tag(in.id, in.batch.count()), state.tag());
        !status.ok()) {
      return status;
    }
    if (index_t const staged = state.plan_pages().staging_slots,
        brought = in.batch.kv_pages.staging_slots;
        staged != brought) {
      return failure(Errc::stale_selection,
                     staged == 0
                         ? "batch.kv_pages of staging caches, but the group plan points into "
                           "the KV caches; call plan_prefetch first"
                         : "the group plan points into staging caches (plan_prefetch), "
                           "batch.kv_pages does not; call plan_group first",
                     staged, brought);
    }
    if (!same_pages(in.batch.kv_pages, state.plan_pages())) {
      return failure(Errc::stale_selection,
                     "batch.kv_pages is not the table of the group plan; call plan_group first",
                     state.plan_pages().page_size, in.batch.kv_pages.page_size);
    }
    return {};
  }

  template <Executor X>
  Status check_workspace(X const& x, Workspace ws) const noexcept {
    if (Status const status = detail::check_memory(ws); !status.ok()) return status;
    Result<WorkspaceSize> const need = workspace(x, ws.bytes);
    return need ? Status{} : need.error();
  }

  template <Executor X>
  Status fill(X const& x, inputs<X::space> const& in, SelectionState<X::space>& state,
              Workspace ws) const noexcept {
    state.clear();  // so that a failing policy leaves no half-written selection to be shared
    index_t const rows = in.batch.count();
    if (Status const status =
            select(x, indexer, topk, *in.indexer, in.batch, shape, state.selection(rows), ws);
        !status.ok()) {
      return status;
    }
    state.set_tag(expected_tag(in.id, rows));
    Status status = detail::write_tag_on_device(x, state);
    if (status.ok()) status = plan_group(x, in.batch, state);
    if (!status.ok()) state.clear();
    return status;
  }

  template <Executor X>
  Status reuse(X const& x, inputs<X::space> const& in,
               SelectionState<X::space> const& state) const noexcept {
    return detail::compare_tag_on_device(x, state, expected_tag(in.id, in.batch.count()), layer);
  }

  template <Executor X>
  Status attend(X const& x, inputs<X::space> const& in, SelectionState<X::space> const& state,
                outputs<X::space> const& out, Workspace ws) const noexcept {
    GroupPlan<X::space> plan{};
    if constexpr (Attention::reads_selection) plan = state.plan();
    index_t const rows = in.batch.count();
    Result<index_t> const rows_per_pass =
        detail::rows_that_fit(detail::attention_workspace_name, rows, ws.bytes, attention_size(x));
    if (!rows_per_pass) return rows_per_pass.error();
    return detail::for_each_pass(rows, *rows_per_pass, [&, this](RowRange pass) noexcept {
      return attention_run(x, attention, in.attention, in.batch, pass, plan, out, shape, ws);
    });
  }
};

}  // namespace v0
}  // namespace indexshare
