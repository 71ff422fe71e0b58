// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "demo_data.hpp"
#include "host_machine.hpp"
#include "worst.hpp"

#include <indexshare/indexshare.hpp>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <map>
#include <stdexcept>
#include <vector>

/// @file Checks what the layers produced against the reference back end, on sampled rows.

namespace programs {

/// Recomputes sampled rows with the reference and counts what differs.
class DemoChecker {
 public:
  static constexpr double tolerance = HostMachine::output_tolerance;
  double allowed = tolerance;  ///< of this run's outputs

  std::int64_t selections = 0;  ///< rows of full layers recomputed, compared byte for byte
  std::int64_t reused = 0;      ///< rows of shared layers compared with their source's
  std::int64_t outputs = 0;     ///< (row, head) outputs recomputed
  std::int64_t wrong_selections = 0;
  std::int64_t wrong_reused = 0;
  std::int64_t wrong_outputs = 0;
  double worst_output = 0;
  std::int64_t host_rows = 0;    ///< rows of full layers that the host back end selected too
  std::int64_t host_differ = 0;  ///< of them, those with other bytes

  bool passed() const { return wrong_selections + wrong_reused + wrong_outputs + host_differ == 0; }

  /// One layer call: all rows of a reused selection; one row of a computed one (every call of the
  /// first ones, then every fourth, as the reference is slow) and four heads of one output row.
  /// @tparam Indexer, Attention  the layer's policies, which the reference runs too
  /// @param source_rows  row of the source layer's batch that each row reuses; empty: its own
  template <class Indexer, class Attention, class Inputs>
  void check(indexshare::Shape const& shape, Inputs const& in,
             indexshare::SelectionState<Space::host> const& state,
             indexshare::OutputView<Space::host, float> const& out,
             std::vector<position_t> const& source_rows) {
    auto const selection = state.selection();
    index_t const rows = in.batch.count();
    index_t const row = (calls_ * 7 + 3) % rows;  // any row, never the same place twice in a row
    if (in.indexer) {
      if (calls_ < 16 || calls_ % 4 == 0) check_selection<Indexer>(shape, in, selection, row);
      remember(state.tag(), selection);
    } else {
      check_reuse(state.tag(), selection, source_rows);
    }
    check_output<Attention>(shape, in, selection, out, row);
    ++calls_;
  }

  /// Selects once more on the host back end and compares all rows byte for byte.
  template <class Indexer, class X, class Inputs>
  void compare_with_host(
      X const& host, indexshare::Shape const& shape, Inputs const& in,
      indexshare::SelectionView<Space::host, position_t const> const& selection) {
    indexshare::RadixTopK const topk;
    auto const size = select_workspace(host, Indexer{}, topk, shape, std::size_t{64} << 20);
    indexshare::HostMemory const scratch(size.value());
    index_t const rows = in.batch.count();
    std::vector<position_t> indices(at(rows * shape.top_k));
    std::vector<position_t> counts(at(rows));
    auto const expected = indexshare::make_selection<Space::host>(
        indices.data(), counts.data(), indexshare::Rows{rows}, indexshare::TopK{shape.top_k});
    require(select(host, Indexer{}, topk, *in.indexer, in.batch, shape, expected, scratch.view()));
    for (index_t row = 0; row < rows; ++row) {
      ++host_rows;
      host_differ +=
          entries(selection, row) == entries({expected.indices, expected.counts}, row) ? 0 : 1;
    }
  }

 private:
  using Selection = indexshare::SelectionView<Space::host, position_t const>;
  using Reference = indexshare::ReferenceExec;

  static indexshare::RowBatch<Space::host> one_row(indexshare::RowBatch<Space::host> batch,
                                                   index_t row) {
    batch.lengths = indexshare::rows_of(batch.lengths, row, 1);
    batch.requests = indexshare::rows_of(batch.requests, row, 1);
    return batch;
  }

  static void require(indexshare::Status const& status) {
    if (!status.ok()) throw std::runtime_error(status.what);
  }

  /// Entries, then the count: the selection of a row as it is compared.
  static std::vector<position_t> entries(Selection const& selection, index_t row) {
    std::vector<position_t> list;
    for (index_t j = 0; j < selection.indices.extent(1); ++j) {
      list.push_back(selection.indices(row, j));
    }
    list.push_back(selection.counts(row));
    return list;
  }

  template <class Indexer, class Inputs>
  void check_selection(indexshare::Shape const& shape, Inputs const& in, Selection const& got,
                       index_t row) {
    auto const batch = one_row(in.batch, row);
    auto inputs = *in.indexer;
    inputs.q = indexshare::rows_of(inputs.q, row, 1);
    inputs.weights = indexshare::rows_of(inputs.weights, row, 1);

    std::vector<float> scores(at(shape.keys));
    auto const view = indexshare::make_scores<Space::host>(scores.data(), {1}, {shape.keys});
    std::vector<position_t> expected(at(shape.top_k + 1));
    auto const out = indexshare::make_selection<Space::host>(
        expected.data(), expected.data() + shape.top_k, {1}, {shape.top_k});
    indexshare::HostMemory const scratch(
        {std::max(indexer_workspace(Reference{}, Indexer{}, shape).value().bytes,
                  topk_workspace(Reference{}, indexshare::RadixTopK{}, shape).value().bytes)});
    require(indexer_score(Reference{}, Indexer{}, inputs, batch, {{0, 1}, shape.top_k}, view,
                          scratch.view()));
    require(topk_select(Reference{}, indexshare::RadixTopK{},
                        indexshare::ScoreView<Space::host, float const>(view), batch.lengths, out,
                        scratch.view()));
    ++selections;
    wrong_selections += entries(got, row) == expected ? 0 : 1;
  }

  void remember(indexshare::SelectionTag const& tag, Selection const& selection) {
    auto& kept = kept_[tag.source_layer];
    kept.clear();
    for (index_t row = 0; row < tag.rows; ++row) kept.push_back(entries(selection, row));
  }

  void check_reuse(indexshare::SelectionTag const& tag, Selection const& selection,
                   std::vector<position_t> const& source_rows) {
    auto const& kept = kept_.at(tag.source_layer);
    for (index_t row = 0; row < tag.rows; ++row) {
      index_t const source = source_rows.empty() ? row : source_rows.at(at(row));
      ++reused;
      wrong_reused += entries(selection, row) == kept.at(at(source)) ? 0 : 1;
    }
  }

  template <class Attention, class Inputs>
  void check_output(indexshare::Shape const& shape, Inputs const& in, Selection const& selection,
                    indexshare::OutputView<Space::host, float> const& out, index_t row) {
    indexshare::Shape part = shape.with_rows(1);
    part.heads = std::min<index_t>(4, shape.heads);
    index_t const first_head = calls_ % (shape.heads - part.heads + 1);

    auto inputs = in.attention;
    inputs.q = decltype(inputs.q)(
        &in.attention.q(row, first_head, 0),
        {cuda::std::dextents<index_t, 3>(1, part.heads, part.key_dim),
         cuda::std::array{in.attention.q.stride(0), in.attention.q.stride(1), index_t{1}}});
    if (inputs.sink.data_handle() != nullptr) {
      inputs.sink =
          indexshare::make_sink<Space::host>(&in.attention.sink(first_head), {part.heads});
    }
    auto const batch = one_row(in.batch, row);
    std::vector<position_t> slots;
    for (index_t j = 0; j < part.top_k; ++j) {
      slots.push_back(batch.kv_pages.slot(batch.requests(0), selection.indices(row, j)));
    }
    indexshare::GroupPlan<Space::host> const plan{
        indexshare::make_dense<Space::host, position_t const, 2>(slots.data(), {1, part.top_k}),
        indexshare::rows_of(selection.counts, row, 1)};
    std::vector<float> expected(at(part.heads * part.value_dim));
    indexshare::HostMemory const scratch(
        attention_workspace(Reference{}, Attention{}, part).value());
    require(attention_run(
        Reference{}, Attention{}, inputs, batch, {0, 1}, plan,
        {indexshare::make_output<Space::host>(expected.data(), {1}, {part.heads}, {part.value_dim}),
         {}},
        part, scratch.view()));
    for (index_t h = 0; h < part.heads; ++h) {
      double largest = 0;
      double error = 0;
      for (index_t v = 0; v < part.value_dim; ++v) {
        double const reference = expected[at(h * part.value_dim + v)];
        double const difference = out(row, first_head + h, v) - reference;
        largest = std::fmax(largest, std::fabs(reference));
        error = worst(error, difference);
      }
      ++outputs;
      double const off = relative(error, largest);
      wrong_outputs += off <= allowed ? 0 : 1;
      worst_output = worst(worst_output, off);
    }
  }

  index_t calls_ = 0;
  std::map<std::int32_t, std::vector<std::vector<position_t>>> kept_;
};

}  // namespace programs
