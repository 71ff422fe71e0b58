// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "demo_check.hpp"
#include "demo_data.hpp"
#include "metered.hpp"
#include "owned_state.hpp"
#include "thread_pool.hpp"

#include <indexshare/indexshare.hpp>

#include <cstdint>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

/// @file The demo's stack of layers: runs phases with one share policy, meters each layer, and
/// hands samples to the checker.

namespace programs {

/// What one layer did in one run over all phases.
struct LayerReport {
  std::string role;
  std::int32_t source = 0;
  Meter indexer;
  Meter topk;
  Meter attention;
  std::int64_t rows = 0;
  std::int64_t selected = 0;
};

/// All layers with one share policy for the trunk and one for the draft steps.
struct StackReport {
  std::map<std::int32_t, LayerReport> layers;

  Meter total(Meter LayerReport::*stage) const {
    Meter sum;
    for (auto const& [number, layer] : layers) {
      sum.calls += (layer.*stage).calls;
      sum.rows += (layer.*stage).rows;
      sum.milliseconds += (layer.*stage).milliseconds;
    }
    return sum;
  }
};

/// The trunk layers [first, last) and the first MTP layer, if any, of a model on one machine.
class DemoStack {
 public:
  using Indexer = indexshare::ReluDotIndexer<bf16, indexshare::format::Plain<bf16>>;
  using Attention = indexshare::SparseMla<bf16, indexshare::format::Plain<bf16>>;
  using Exec = indexshare::HostExec<PoolFor>;
  using State = indexshare::SelectionState<Space::host>;

  /// @param exec      runs the layers
  /// @param requests  number of requests; `shape.keys` tokens each at most
  DemoStack(Exec exec, std::uint64_t seed, indexshare::ModelConfig const& model,
            indexshare::Shape const& shape, index_t requests, std::vector<std::int32_t> layers)
      : exec_(exec),
        model_(model),
        shape_(shape),
        data_(seed, shape),
        pages_(seed, requests, shape.keys),
        layers_(std::move(layers)) {
    for (std::int32_t const layer : layers_) caches_.emplace(layer, LayerCaches(pages_, shape_));
  }

  /// Appends tokens on one layer.
  void append(std::int32_t layer, std::vector<Token> const& tokens) {
    require(caches_.at(layer).append(data_, layer, tokens));
  }

  /// Runs physical layer `layer`, which `share` knows as `number`, on the phase's rows.
  template <class Share>
  void run(Share const& share, std::int32_t number, std::int32_t layer, Phase const& phase,
           indexshare::ForwardId id, State& state, LayerReport& report, DemoChecker& checker) {
    index_t const rows = static_cast<index_t>(phase.rows.size());
    RowInputs const values(data_, shape_, layer, phase.rows);
    BatchRows const batch(phase.rows, pages_.table());
    std::vector<float> const sink =
        model_.learnable_sink ? data_.sink(layer) : std::vector<float>{};
    out_.resize(at(rows * shape_.heads * shape_.value_dim));

    using Layer = indexshare::SparseAttentionLayer<MeteredIndexer<Indexer>,
                                                   MeteredTopK<indexshare::RadixTopK>, Share,
                                                   MeteredAttention<Attention>>;
    Layer const module{
        {{}, &report.indexer}, {{}, &report.topk}, share, {{}, &report.attention}, shape_, number};
    typename Layer::template inputs<Space::host> in{};
    in.batch = batch.view();
    in.id = id;
    in.attention = {indexshare::make_query<Space::host>(values.queries.data(), {rows},
                                                        {shape_.heads}, {shape_.key_dim}),
                    caches_.at(layer).kv(), static_cast<float>(indexshare::softmax_scale(model_)),
                    indexshare::make_sink<Space::host>(sink.empty() ? nullptr : sink.data(),
                                                       {static_cast<index_t>(sink.size())})};
    if (module.is_full()) {
      in.indexer.emplace();
      in.indexer->q = indexshare::make_query<Space::host>(values.index_queries.data(), {rows},
                                                          {shape_.index_heads}, {shape_.index_dim});
      in.indexer->weights = indexshare::make_head_weights<Space::host>(
          values.head_weights.data(), {rows}, {shape_.index_heads});
      in.indexer->keys = caches_.at(layer).keys();
    }
    typename Layer::template outputs<Space::host> const outputs{
        indexshare::make_output<Space::host>(out_.data(), {rows}, {shape_.heads},
                                             {shape_.value_dim}),
        {}};

    indexshare::HostMemory& scratch = scratch_for(module);
    require(module.run(exec_, in, state, outputs, scratch.view()));

    report.role = module.is_full() ? "full" : "shared";
    report.source = module.source();
    report.rows += rows;
    for (index_t row = 0; row < rows; ++row) report.selected += state.selection().counts(row);
    checker.check<Indexer, Attention>(shape_, in, state, outputs.out, phase.source_rows);
  }

  /// Passes rows of a draft round's first selection to a later step.
  void hand_over(State const& from, indexshare::ForwardId round,
                 std::vector<position_t> const& rows, Phase const& phase, indexshare::ForwardId id,
                 State& to) {
    BatchRows const batch(phase.rows, pages_.table());
    require(indexshare::compact_selection(
        exec_, from, round,
        indexshare::make_lengths<Space::host>(rows.data(), {static_cast<index_t>(rows.size())}), id,
        batch.view(), to));
  }

 private:
  static void require(indexshare::Status const& status) {
    if (status.ok()) return;
    throw std::runtime_error("layer " + std::to_string(status.layer) + ": " + status.what +
                             " (expected " + std::to_string(status.expected) + ", got " +
                             std::to_string(status.got) + ")");
  }

  /// One scratch for all layers, which run one after the other. 64 MiB bounds the scores.
  template <class Layer>
  indexshare::HostMemory& scratch_for(Layer const& layer) {
    auto const size = layer.workspace(exec_, std::size_t{64} << 20);
    if (!size) require(size.error());
    if (scratch_.view().bytes < size->bytes) scratch_ = indexshare::HostMemory(*size);
    return scratch_;
  }

  Exec exec_;
  indexshare::ModelConfig model_;
  indexshare::Shape shape_;
  DemoData data_;
  Pages pages_;
  std::vector<std::int32_t> layers_;
  std::map<std::int32_t, LayerCaches> caches_;
  indexshare::HostMemory scratch_;
  std::vector<float> out_;
};

}  // namespace programs
