// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "demo_check.hpp"
#include "demo_data.hpp"
#include "metered.hpp"
#include "owned_state.hpp"

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
  Meter selection;
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
template <class Machine>
class DemoStack {
 public:
  using Indexer = indexshare::ReluDotIndexer<bf16, indexshare::format::Plain<bf16>>;
  using Attention = indexshare::SparseMla<bf16, indexshare::format::Plain<bf16>>;
  using State = StateIn<Machine::space, typename Machine::Memory>;

  /// @param machine   runs the layers
  /// @param requests  number of requests; `shape.keys` tokens each at most
  DemoStack(Machine const& machine, std::uint64_t seed, indexshare::ModelConfig const& model,
            indexshare::Shape const& shape, index_t requests,
            std::vector<std::int32_t> const& layers)
      : machine_(machine),
        model_(model),
        shape_(shape),
        data_(seed, shape),
        pages_(seed, requests, shape.keys) {
    for (std::int32_t const layer : layers) caches_.try_emplace(layer, machine_, pages_, shape_);
  }

  /// Appends tokens on one layer.
  void append(std::int32_t layer, std::vector<Token> const& tokens) {
    require(caches_.at(layer).append(data_, layer, tokens));
  }

  /// Runs physical layer `layer`, which `share` knows as `number`, on the phase's rows.
  template <class Share>
  void run(Share const& share, std::int32_t number, std::int32_t layer, Phase const& phase,
           indexshare::ForwardId id, State& state, LayerReport& report, DemoChecker& checker) {
    using Layer = indexshare::SparseAttentionLayer<MeteredIndexer<Indexer>, indexshare::RadixTopK,
                                                   Share, MeteredAttention<Attention>>;
    Layer const module{{{}, &report.selection}, {}, share, {{}, &report.attention}, shape_, number};
    Call const call{
        {data_, shape_, layer, phase.rows, model_.learnable_sink}, {phase.rows, pages_}, layer, id};
    indexshare::Rows const rows{static_cast<index_t>(phase.rows.size())};
    out_.resize(at(rows.n * shape_.heads * shape_.value_dim));

    typename Machine::Memory& scratch = scratch_for(module);
    require(module.run(machine_.exec(), inputs<Layer, Machine::space>(call, module.is_full()),
                       *state, {output<Machine::space>(rows), {}}, scratch.view()));
    machine_.finish();

    report.role = module.is_full() ? "full" : "shared";
    report.source = module.source();
    report.rows += rows.n;
    auto const on_host = state.on_host();
    auto const in = inputs<Layer, Space::host>(call, module.is_full());
    for (index_t row = 0; row < rows.n; ++row) report.selected += on_host.selection().counts(row);
    checker.check<Indexer, Attention>(shape_, in, on_host, output<Space::host>(rows),
                                      phase.source_rows);
    if constexpr (Machine::space == Space::device) {
      if (module.is_full()) {
        checker.compare_with_host<Indexer>(machine_.host(), shape_, in, on_host.selection());
      }
    }
  }

  /// Passes rows of a draft round's first selection to a later step.
  void hand_over(State& from, indexshare::ForwardId round, std::vector<position_t> const& rows,
                 Phase const& phase, indexshare::ForwardId id, State& to) {
    BatchRows<Machine> const batch(phase.rows, pages_);
    typename Machine::template Vector<position_t> const kept(rows.begin(), rows.end());
    auto const kept_rows = indexshare::make_lengths<Machine::space>(
        kept.data(), indexshare::Rows{static_cast<index_t>(kept.size())});
    require(indexshare::compact_selection(machine_.exec(), *from, round, kept_rows, id,
                                          batch.template view<Machine::space>(), *to));
    machine_.finish();
  }

 private:
  /// What one layer call reads.
  struct Call {
    RowInputs<Machine> values;
    BatchRows<Machine> batch;
    std::int32_t layer;
    indexshare::ForwardId id;
  };

  static void require(indexshare::Status const& status) {
    if (status.ok()) return;
    std::string const numbers =
        status.code == indexshare::Errc::backend_error
            ? "CUDA error " + std::to_string(status.cuda_error)
            : "expected " + std::to_string(status.expected) + ", got " + std::to_string(status.got);
    throw std::runtime_error("layer " + std::to_string(status.layer) + ": " + status.what + " (" +
                             numbers + ")");
  }

  template <class Layer, Space S>
  typename Layer::template inputs<S> inputs(Call const& call, bool full) const {
    LayerCaches<Machine> const& caches = caches_.at(call.layer);
    RowInputs<Machine> const& values = call.values;
    typename Layer::template inputs<S> in{};
    in.batch = call.batch.template view<S>();
    in.id = call.id;
    // Extents have their types spelled out: nvcc drops the braces of {x} in a template.
    indexshare::Rows const rows{in.batch.count()};
    in.attention.q =
        indexshare::make_query<S>(values.queries.data(), rows, indexshare::Heads{shape_.heads},
                                  indexshare::HeadDim{shape_.key_dim});
    in.attention.kv = caches.template kv<S>();
    in.attention.scale = static_cast<float>(indexshare::softmax_scale(model_));
    if (!values.sink.empty()) {
      in.attention.sink =
          indexshare::make_sink<S>(values.sink.data(), indexshare::Heads{shape_.heads});
    }
    if (full) {
      indexshare::Heads const heads{shape_.index_heads};
      in.indexer.emplace();
      in.indexer->q = indexshare::make_query<S>(values.index_queries.data(), rows, heads,
                                                indexshare::HeadDim{shape_.index_dim});
      in.indexer->weights =
          indexshare::make_head_weights<S>(values.head_weights.data(), rows, heads);
      in.indexer->keys = caches.template keys<S>();
    }
    return in;
  }

  template <Space S>
  indexshare::OutputView<S, float> output(indexshare::Rows rows) {
    return indexshare::make_output<S>(out_.data(), rows, indexshare::Heads{shape_.heads},
                                      indexshare::HeadDim{shape_.value_dim});
  }

  /// One scratch for all layers, which run one after the other. 64 MiB bounds the scores.
  template <class Layer>
  typename Machine::Memory& scratch_for(Layer const& layer) {
    auto const size = layer.workspace(machine_.exec(), std::size_t{64} << 20);
    if (!size) require(size.error());
    if (scratch_.view().bytes < size->bytes) scratch_ = typename Machine::Memory(*size);
    return scratch_;
  }

  Machine machine_;
  indexshare::ModelConfig model_;
  indexshare::Shape shape_;
  DemoData data_;
  Pages<Machine> pages_;
  std::map<std::int32_t, LayerCaches<Machine>> caches_;
  typename Machine::Memory scratch_;
  typename Machine::template Vector<float> out_;
};

}  // namespace programs
