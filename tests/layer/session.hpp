// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "executors.hpp"
#include "model.hpp"
#include "policies.hpp"
#include "refusal.hpp"

#include <catch2/catch_template_test_macros.hpp>
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <catch2/generators/catch_generators_range.hpp>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

/// @file One forward of a batch through a model, layer by layer.

namespace layer_test {

/// A selection as it lies in a state.
struct Selected {
  std::vector<position_t> indices;  ///< [rows, top_k]
  std::vector<position_t> counts;
  index_t top_k = 0;

  friend bool operator==(Selected const&, Selected const&) = default;

  std::vector<position_t> row(index_t r) const {
    auto const begin = indices.begin() + r * top_k;
    return {begin, begin + counts[to_size(r)]};
  }
};

template <class View>
Selected copy_selection(View const& view) {
  Selected copy;
  copy.top_k = view.indices.extent(1);
  for (index_t r = 0; r < view.indices.extent(0); ++r) {
    for (index_t j = 0; j < copy.top_k; ++j) copy.indices.push_back(view.indices(r, j));
    copy.counts.push_back(view.counts(r));
  }
  return copy;
}

/// The bits of floats, so that NaN equals itself and -0 is not 0.
inline std::vector<std::uint32_t> bits_of(std::span<float const> values) {
  std::vector<std::uint32_t> bits(values.size());
  std::transform(values.begin(), values.end(), bits.begin(),
                 [](float v) { return std::bit_cast<std::uint32_t>(v); });
  return bits;
}
inline std::vector<float> to_vector(std::span<float const> values) {
  return {values.begin(), values.end()};
}

/// A SelectionState with guarded memory.
class OwnedState {
 public:
  OwnedState(index_t rows, index_t top_k)
      : memory_(SelectionState<host>::size(Rows{rows}, TopK{top_k})),
        state_(*SelectionState<host>::make(memory_.get(), Rows{rows}, TopK{top_k})) {}

  SelectionState<host>& get() { return state_; }
  bool intact() const { return memory_.intact(); }

 private:
  test::Scratch memory_;
  SelectionState<host> state_;
};

/// What an output holds before a call and after a refused one.
inline bool untouched(test::Guarded<float> const& output) {
  auto const bytes = std::as_bytes(output.span());
  return std::all_of(bytes.begin(), bytes.end(), [](std::byte b) { return b == test::unwritten; });
}

/// What a session is made of besides executor, model and share policy.
template <class M>
struct Policies {
  using Indexer = Counting<typename M::Indexer>;
  using TopK = RadixTopK;
  using Attention = typename M::Sparse;
};
template <class M>
struct DensePolicies : Policies<M> {
  using Attention = typename M::Dense;
};
template <class M>
struct FailingPolicies : Policies<M> {
  using TopK = FailingTopK;
};

inline constexpr std::size_t ample = std::size_t{1} << 20;

/// The smallest budget that a layer accepts.
template <class Layer, class X>
std::size_t minimum_budget(Layer const& layer, X const& x) {
  std::size_t budget = 0;
  for (int parts = 0; parts < 3; ++parts) {  // each part of a layer may name its own minimum
    auto const size = layer.workspace(x, budget);
    if (size) break;
    REQUIRE(size.error().code == Errc::workspace_too_small);
    budget = static_cast<std::size_t>(size.error().expected);
  }
  return budget;
}
/// As the budget of a session: its layers' minimum.
inline constexpr std::size_t minimum = 0;

template <class X, class M, class Share, class P = Policies<M>>
class Session {
 public:
  using Indexer = typename P::Indexer;
  using Attention = typename P::Attention;
  using Layer = SparseAttentionLayer<Indexer, typename P::TopK, Share, Attention>;
  using Inputs = typename Layer::template inputs<host>;
  using Outputs = typename Layer::template outputs<host>;

  Session(X exec, M& model, Share share, RowList rows, ForwardId id = {7, 3},
          std::size_t budget = ample, std::int32_t first_number = 0, P = {})
      : x(exec),
        numbering(first_number),
        model_(model),
        share_(share),
        rows_(std::move(rows)),
        id_(id),
        state_(model.shape.rows, model.shape.top_k),
        scratch_(WorkspaceSize{scratch_bytes(budget)}) {
    for (Row const& row : rows_) {
      lengths_.push_back(row.length);
      requests_.push_back(row.request);
    }
    for (std::int32_t number = 0; number < model.layers(); ++number) {
      queries_.emplace_back(rows_, model.shape, number);
      out_.emplace_back(rows_.size() * to_size(model.shape.heads * model.shape.value_dim),
                        test::unwritten);
      lse_.emplace_back(rows_.size() * to_size(model.shape.heads), test::unwritten);
      selected_.emplace_back();
    }
  }

  index_t row_count() const { return static_cast<index_t>(rows_.size()); }
  SelectionState<host>& state() { return state_.get(); }
  ForwardId id() const { return id_; }

  Layer layer(std::int32_t number) {
    Layer layer;
    layer.indexer.calls = &calls;
    layer.share = share_;
    layer.shape = model_.shape;
    layer.layer = number + numbering;
    return layer;
  }

  RowBatch<host> batch() const {
    Rows const rows{row_count()};
    return {make_lengths<host>(lengths_.data(), rows), make_lengths<host>(requests_.data(), rows),
            model_.index_pages(), model_.kv_pages()};
  }

  /// Inputs of a layer that has caches and queries of its own.
  Inputs inputs(std::int32_t number) {
    Inputs in{{}, attention_inputs(number), batch(), id_};
    if (model_.has_index_keys(number)) in.indexer = indexer_inputs(number);
    return in;
  }
  auto indexer_inputs(std::int32_t number) {
    LayerQueries<typename M::Element>& data = queries_[to_size(number)];
    Shape const& shape = model_.shape;
    Rows const rows{row_count()};
    return typename Indexer::template inputs<host>{
        make_query<host>(data.index_q.data(), rows, Heads{shape.index_heads},
                         HeadDim{shape.index_dim}),
        make_head_weights<host>(data.weights.data(), rows, Heads{shape.index_heads}),
        model_.index_keys(number).view()};
  }
  auto attention_inputs(std::int32_t number) {
    Shape const& shape = model_.shape;
    return typename Attention::template inputs<host>{
        make_query<host>(queries_[to_size(number)].q.data(), Rows{row_count()}, Heads{shape.heads},
                         HeadDim{shape.key_dim}),
        model_.kv(number).view(), 0.125f};
  }
  Outputs outputs(std::int32_t number) {
    Shape const& shape = model_.shape;
    Rows const rows{row_count()};
    return {make_output<host>(out_[to_size(number)].data(), rows, Heads{shape.heads},
                              HeadDim{shape.value_dim}),
            make_lse<host>(lse_[to_size(number)].data(), rows, Heads{shape.heads})};
  }

  /// Runs one layer and keeps its selection.
  Status run(std::int32_t number) { return run(number, inputs(number)); }
  Status run(std::int32_t number, Inputs const& in) { return run(number, in, state()); }
  Status run(std::int32_t number, Inputs const& in, SelectionState<host>& state) {
    Status const status = layer(number).run(x, in, state, outputs(number), scratch_.get());
    if (status.ok() && Attention::reads_selection) {
      selected_[to_size(number)] = copy_selection(state.selection());
    }
    return status;
  }
  /// Runs layers [first, last).
  void run_all(std::int32_t first, std::int32_t last) {
    for (std::int32_t number = first; number < last; ++number) {
      REQUIRE_THAT(run(number), succeeded());
    }
    REQUIRE(intact());
  }
  void run_all() { run_all(0, model_.layers()); }

  Selected const& selected(std::int32_t number) const { return selected_[to_size(number)]; }
  /// Output and lse of a layer, bit for bit.
  std::vector<std::uint32_t> result(std::int32_t number) const {
    auto bits = bits_of(out_[to_size(number)].span());
    auto const more = bits_of(lse_[to_size(number)].span());
    bits.insert(bits.end(), more.begin(), more.end());
    return bits;
  }
  /// The same of one row.
  std::vector<std::uint32_t> row_result(std::int32_t number, std::size_t r) const {
    auto const part = [&](test::Guarded<float> const& all) {
      std::size_t const width = all.size() / rows_.size();
      return bits_of(all.span().subspan(r * width, width));
    };
    auto bits = part(out_[to_size(number)]);
    auto const more = part(lse_[to_size(number)]);
    bits.insert(bits.end(), more.begin(), more.end());
    return bits;
  }
  std::vector<float> out(std::int32_t number) const {
    return to_vector(out_[to_size(number)].span());
  }
  bool untouched_outputs(std::int32_t number) const {
    return untouched(out_[to_size(number)]) && untouched(lse_[to_size(number)]);
  }
  bool intact() const {
    auto const whole = [](auto const& memory) { return memory.intact(); };
    return state_.intact() && scratch_.intact() && std::all_of(out_.begin(), out_.end(), whole) &&
           std::all_of(lse_.begin(), lse_.end(), whole);
  }
  Workspace workspace() { return scratch_.get(); }

  LayerQueries<typename M::Element>& queries(std::int32_t number) {
    return queries_[to_size(number)];
  }

  X x;
  Calls calls;
  std::int32_t numbering;  ///< number of the model's layer 0, as the share policy knows it

 private:
  std::size_t scratch_bytes(std::size_t budget) {
    auto const size =
        layer(0).workspace(x, budget == minimum ? minimum_budget(layer(0), x) : budget);
    REQUIRE(size.has_value());
    return size->bytes;
  }

  M& model_;
  Share share_;
  RowList rows_;
  ForwardId id_;
  std::vector<position_t> lengths_;
  std::vector<position_t> requests_;
  std::vector<LayerQueries<typename M::Element>> queries_;
  std::vector<test::Guarded<float>> out_;
  std::vector<test::Guarded<float>> lse_;
  std::vector<Selected> selected_;
  OwnedState state_;
  test::Scratch scratch_;
};

}  // namespace layer_test
