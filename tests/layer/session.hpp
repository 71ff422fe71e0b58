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
#include <cstring>
#include <optional>
#include <utility>
#include <vector>

/// @file One forward of a batch through a model, layer by layer.

namespace layer_test {

using test::refused;
using test::succeeded;

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

/// A SelectionState with guarded memory, which the host reads, too.
class OwnedState {
 public:
  OwnedState(index_t rows, index_t top_k)
      : memory_(SelectionState<space>::size(Rows{rows}, TopK{top_k}).bytes),
        state_(*SelectionState<space>::make({memory_.data(), memory_.bytes()}, Rows{rows},
                                            TopK{top_k})) {}

  SelectionState<space>& get() { return state_; }
  bool intact() const { return memory_.intact(); }

 private:
  test::Guarded<std::byte> memory_;
  SelectionState<space> state_;
};

/// Row numbers, lengths or positions as a call takes them.
inline LengthView<space> numbers(test::Guarded<position_t> const& values) {
  return make_lengths<space>(values.data(), Rows{static_cast<index_t>(values.size())});
}
/// Some member of every row.
inline test::Guarded<position_t> column(RowList const& rows, position_t Row::*member) {
  test::Guarded<position_t> values(rows.size());
  for (std::size_t r = 0; r < rows.size(); ++r) values[r] = rows[r].*member;
  return values;
}

/// A cache as append_rows takes it.
template <class T>
MutableCacheView<space, format::Plain<T>> writable(test::PagedCache<format::Plain<T>>& cache) {
  return make_paged_cache<space>(cache.memory().data(), Pages{cache.slots() / cache.page_size()},
                                 PageSize{cache.page_size()}, HeadDim{cache.lanes()});
}

/// Appends one token's row to a cache through the library.
template <class X>
void append(X const& x, test::PagedCache<format::Plain<float>>& cache,
            PageTable<space> const& pages, position_t request, position_t position,
            std::vector<float> const& values) {
  auto const rows = test::guarded(values);
  auto const at = test::guarded<position_t>({position});
  auto const of = test::guarded<position_t>({request});
  REQUIRE_THAT(append_rows(x,
                           make_dense<space, float const, 2>(
                               rows.data(), {1, static_cast<index_t>(values.size())}),
                           numbers(at), numbers(of), pages, writable(cache)),
               succeeded());
  test::finish(x);
}

/// Fills a workspace; what an earlier call left there means nothing.
inline void overwrite(Workspace ws, int byte) {
#if defined(INDEXSHARE_TEST_CUDA)
  test::require(cudaMemset(ws.data, byte, ws.bytes));
  test::require(cudaDeviceSynchronize());
#else
  std::memset(ws.data, byte, ws.bytes);
#endif
}

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

inline constexpr std::size_t ample = std::size_t{1} << 22;

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
  using Inputs = typename Layer::template inputs<space>;
  using Outputs = typename Layer::template outputs<space>;

  Session(X exec, M& model, Share share, RowList rows, ForwardId id = {7, 3},
          std::size_t budget = ample, std::int32_t first_number = 0, P = {})
      : x(exec),
        numbering(first_number),
        model_(model),
        share_(share),
        rows_(std::move(rows)),
        id_(id),
        lengths_(column(rows_, &Row::length)),
        requests_(column(rows_, &Row::request)),
        state_(model.shape.rows, model.shape.top_k),
        scratch_(WorkspaceSize{scratch_bytes(budget)}) {
    for (std::int32_t number = 0; number < model.layers(); ++number) {
      queries_.emplace_back(rows_, model.shape, number);
      out_.emplace_back(rows_.size() * to_size(model.shape.heads * model.shape.value_dim),
                        test::unwritten);
      lse_.emplace_back(rows_.size() * to_size(model.shape.heads), test::unwritten);
      selected_.emplace_back();
    }
  }

  index_t row_count() const { return static_cast<index_t>(rows_.size()); }
  SelectionState<space>& state() { return state_.get(); }
  ForwardId id() const { return id_; }

  Layer layer(std::int32_t number) {
    Layer layer;
    layer.indexer.calls = &calls;
    layer.share = share_;
    layer.shape = model_.shape;
    layer.layer = number + numbering;
    return layer;
  }

  RowBatch<space> batch() const {
    return {numbers(lengths_), numbers(requests_), model_.index_pages(), model_.kv_pages()};
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
    return typename Indexer::template inputs<space>{
        make_query<space>(data.index_q.data(), rows, Heads{shape.index_heads},
                          HeadDim{shape.index_dim}),
        make_head_weights<space>(data.weights.data(), rows, Heads{shape.index_heads}),
        model_.index_keys(number).view()};
  }
  auto attention_inputs(std::int32_t number) {
    Shape const& shape = model_.shape;
    return typename Attention::template inputs<space>{
        make_query<space>(queries_[to_size(number)].q.data(), Rows{row_count()}, Heads{shape.heads},
                          HeadDim{shape.key_dim}),
        model_.kv(number).view(), 0.125f};
  }
  Outputs outputs(std::int32_t number) {
    Shape const& shape = model_.shape;
    Rows const rows{row_count()};
    return {make_output<space>(out_[to_size(number)].data(), rows, Heads{shape.heads},
                               HeadDim{shape.value_dim}),
            make_lse<space>(lse_[to_size(number)].data(), rows, Heads{shape.heads})};
  }

  /// Runs one layer, waits for it and keeps its selection.
  Status run(std::int32_t number) { return run(number, inputs(number)); }
  Status run(std::int32_t number, Inputs const& in) { return run(number, in, state()); }
  Status run(std::int32_t number, Inputs const& in, SelectionState<space>& state) {
    Status const status = enqueue(number, in, state);
    test::finish(x);
    if (status.ok() && Attention::reads_selection) {
      selected_[to_size(number)] = copy_selection(state.selection());
    }
    return status;
  }
  /// Runs one layer without waiting for it.
  Status enqueue(std::int32_t number) { return enqueue(number, inputs(number), state()); }
  Status enqueue(std::int32_t number, Inputs const& in, SelectionState<space>& state) {
    return layer(number).run(x, in, state, outputs(number), scratch_.get());
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
  test::Guarded<position_t> lengths_;
  test::Guarded<position_t> requests_;
  std::vector<LayerQueries<typename M::Element>> queries_;
  std::vector<test::Guarded<float>> out_;
  std::vector<test::Guarded<float>> lse_;
  std::vector<Selected> selected_;
  OwnedState state_;
  test::Scratch scratch_;
};

}  // namespace layer_test
