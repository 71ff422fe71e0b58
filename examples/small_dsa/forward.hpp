// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "../programs/owned_state.hpp"
#include "choices.hpp"
#include "model.hpp"
#include "random_selection.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

/// @file A forward of one sequence through the model, layer by layer, on one thread.

namespace small_dsa {

/// What the rows of one sequence attend to. Without rows: nothing was selected yet.
struct Selected {
  std::vector<position_t> indices;  ///< [tokens, index_topk] ascending, then no_position
  std::vector<position_t> counts;   ///< [tokens]
};

/// Where a forward stands before a layer: enough to go on from there.
struct Boundary {
  std::vector<float> hidden;  ///< [tokens, hidden]
  Selected selected;          ///< in force
};

/// What the query rows of one sequence predict.
struct Outcome {
  std::vector<double> losses;  ///< cross-entropy of each row, in nats
  std::int64_t right = 0;      ///< rows whose best logit is the answer
};

/// Memory of one forward at a time; a thread has its own. Results do not depend on what ran before.
/// Calls return the library's Status, which names layer and extent.
class Forward {
 public:
  using Status = indexshare::Status;
  using Rows = indexshare::Rows;
  using Keys = indexshare::Keys;
  using Format = indexshare::format::Plain<float>;
  using Attention = indexshare::SparseMla<float, Format>;

  /// @param model  outlives the object
  explicit Forward(Model const& model)
      : model_(&model),
        tokens_(model.task().tokens()),
        activations_(carve(indexshare::WorkspaceCarver{}).size),
        hidden_(area(width())),
        kv_(area(kv_lanes())),
        index_keys_(area(config().index_head_dim)),
        requests_(static_cast<std::size_t>(tokens_), 0),
        positions_(static_cast<std::size_t>(tokens_)),
        lengths_(positions_.size()),
        state_(Rows{tokens_}, indexshare::TopK{config().index_topk}),
        sides_(carve(indexshare::WorkspaceCarver(activations_.view()))),
        scratch_(scratch_size()) {
    std::iota(positions_.begin(), positions_.end(), position_t{0});
    std::iota(lengths_.begin(), lengths_.end(), position_t{1});
  }

  /// The sequence's embeddings, before layer 0. @pre it has the model's sizes
  void begin(Sequence const& sequence) {
    for (std::size_t token = 0; token < sequence.tokens(); ++token) {
      float const* const key = model_->embed_key().row(sequence.key[token]);
      float const* const value = model_->embed_value().row(sequence.value[token]);
      float const* const hops = model_->embed_hops().row(sequence.hops[token]);
      float* const out = hidden_.data() + token * static_cast<std::size_t>(width());
      for (index_t i = 0; i < width(); ++i) out[i] = key[i] + value[i] + hops[i];
    }
    ++forward_;
    (*state_).clear();
  }

  /// Goes on from before some layer. @param source  the layer that made the boundary's selection
  Status resume(Boundary const& boundary, std::int32_t source) {
    std::copy(boundary.hidden.begin(), boundary.hidden.end(), hidden_.begin());
    ++forward_;
    (*state_).clear();
    Selected const& from = boundary.selected;
    if (from.counts.empty()) return {};
    index_t const top_k = config().index_topk;
    return import_selection(
        exec_,
        indexshare::SelectionView<host, position_t const>{
            indexshare::make_dense<host, position_t const, 2>(from.indices.data(),
                                                              {tokens_, top_k}),
            indexshare::make_dense<host, position_t const, 1>(from.counts.data(), {tokens_})},
        id(), source, rows(), *state_);
  }

  Boundary boundary() { return {hidden_, selected()}; }

  Selected selected() {
    Selected copy;
    if ((*state_).tag().source_layer == indexshare::no_position) return copy;
    auto const selection = (*state_).selection();
    for (index_t row = 0; row < tokens_; ++row) {
      for (index_t i = 0; i < config().index_topk; ++i) {
        copy.indices.push_back(selection.indices(row, i));
      }
      copy.counts.push_back(selection.counts(row));
    }
    return copy;
  }

  /// Layer `number`. @param sequence  number of the sequence in its set, for random selections
  Status layer(indexshare::SharePlan const& plan, std::int32_t number, Choice choice,
               std::int32_t sequence) {
    Status status = attention(plan, number, choice, sequence);
    if (status.ok()) status = mlp(model_->block(number));
    return status.at_layer(number);
  }

  /// Of the hidden states after the last layer.
  Status outcome(Sequence const& sequence, Outcome& out) {
    index_t const first = model_->task().records;
    index_t const queries = model_->task().queries;
    auto const hidden = indexshare::make_dense<host, float const, 2>(
        hidden_.data() + first * width(), {queries, width()});
    auto const normed =
        indexshare::make_dense<host, float, 2>(sides_.normed.data_handle(), {queries, width()});
    Status status =
        rms_norm(exec_, hidden, model_->norm().vector(), config().norm_eps.layer, normed);
    if (status.ok()) status = product(normed, model_->head(), sides_.logits);
    out = {};
    for (index_t row = 0; row < queries && status.ok(); ++row) {
      float const* const logits = &sides_.logits(row, 0);
      std::int32_t const target = sequence.target[static_cast<std::size_t>(first + row)];
      float const* const best = std::max_element(logits, logits + model_->task().keys);
      double sum = 0;
      for (index_t i = 0; i < model_->task().keys; ++i) {
        sum += std::exp(double{logits[i]} - double{*best});
      }
      out.losses.push_back(std::log(sum) + double{*best} - double{logits[target]});
      out.right += best - logits == target ? 1 : 0;
    }
    return status;
  }

 private:
  struct Sides {
    indexshare::QuerySide<host> queries;
    indexshare::KeySide<host> keys;
    indexshare::OutputSide<host> output;
    indexshare::Tensor<host, float, 2> normed;  ///< [tokens, hidden] input of a module
    indexshare::Tensor<host, float, 3> latent;  ///< [tokens, heads, latent]
    indexshare::Tensor<host, float, 2> gate;    ///< [tokens, intermediate]
    indexshare::Tensor<host, float, 2> up;      ///< the same
    indexshare::Tensor<host, float, 2> change;  ///< [tokens, hidden] output of the MLP
    indexshare::Tensor<host, float, 2> logits;  ///< [queries, keys]
    indexshare::WorkspaceSize size;
  };

  indexshare::ModelConfig const& config() const { return model_->config(); }
  index_t width() const { return config().hidden_size; }
  index_t kv_lanes() const { return config().kv_lora_rank + config().qk_rope_head_dim; }
  std::size_t area(index_t lanes) const { return static_cast<std::size_t>(tokens_ * lanes); }

  /// One walk for the size and for the views.
  Sides carve(indexshare::WorkspaceCarver carver) const {
    constexpr auto keep = indexshare::Keep::results;
    Rows const rows{tokens_};
    index_t const wide = config().feed_forward.intermediate_size;
    auto const matrix = [&](index_t count, index_t lanes) {
      return indexshare::make_dense<host, float, 2>(
          carver.take<float>(static_cast<std::size_t>(count * lanes)), {count, lanes});
    };
    Sides sides;
    sides.queries = indexshare::carve_query_side<host>(carver, config(), rows, true, keep);
    sides.keys = indexshare::carve_key_side<host>(carver, config(), rows, true, keep);
    sides.output = indexshare::carve_output_side<host>(carver, config(), rows, keep);
    sides.normed = matrix(tokens_, width());
    index_t const heads = config().num_attention_heads;
    index_t const lanes = config().kv_lora_rank;
    sides.latent = indexshare::make_dense<host, float, 3>(carver.take<float>(area(heads * lanes)),
                                                          {tokens_, heads, lanes});
    sides.gate = matrix(tokens_, wide);
    sides.up = matrix(tokens_, wide);
    sides.change = matrix(tokens_, width());
    sides.logits = matrix(model_->task().queries, model_->task().keys);
    sides.size = carver.size();
    return sides;
  }

  /// Of any layer, whatever its choice.
  indexshare::WorkspaceSize scratch_size() const {
    constexpr std::size_t budget = std::size_t{1} << 22;
    indexshare::WorkspaceSize largest;
    for (std::size_t const bytes :
         {layer_of<indexshare::ReluDotIndexer<float, Format>>({}, 0)
              .workspace(exec_, budget)
              ->bytes,
          layer_of<RandomIndexer>({}, 0).workspace(exec_, budget)->bytes}) {
      largest.bytes = std::max(largest.bytes, bytes);
    }
    return largest;
  }

  template <class Indexer>
  indexshare::SparseAttentionLayer<Indexer, indexshare::RadixTopK, indexshare::SharePlan, Attention>
  layer_of(indexshare::SharePlan const& plan, std::int32_t number) const {
    return {{}, {}, plan, {}, shape_of(config(), Rows{tokens_}, Keys{tokens_}), number};
  }

  indexshare::ForwardId id() const { return {forward_, 0}; }
  indexshare::PageTable<host> table() const {
    return indexshare::make_contiguous_table<host>(Keys{tokens_});
  }
  indexshare::RowBatch<host> rows() const {
    Rows const count{tokens_};
    return {indexshare::make_lengths<host>(lengths_.data(), count),
            indexshare::make_lengths<host>(requests_.data(), count), table(), table()};
  }
  template <class Storage>
  auto cache(Storage& storage, index_t lanes) const {
    return indexshare::make_contiguous_cache<host>(storage.data(), indexshare::Requests{1},
                                                   Keys{tokens_}, indexshare::HeadDim{lanes});
  }

  Status product(indexshare::Tensor<host, float const, 2> const& in, OwnedTensor const& weights,
                 indexshare::Tensor<host, float, 2> const& out) const {
    return model_->front_end().product(exec_, in, weights.matrix(), out);
  }

  /// sides_.normed = the hidden states after a norm.
  Status normalise(OwnedTensor const& gain) {
    auto const hidden =
        indexshare::make_dense<host, float const, 2>(hidden_.data(), {tokens_, width()});
    return rms_norm(exec_, hidden, gain.vector(), config().norm_eps.layer, sides_.normed);
  }
  void add_to_hidden(indexshare::Tensor<host, float, 2> const& change) {
    for (index_t row = 0; row < tokens_; ++row) {
      float* const out = hidden_.data() + row * width();
      for (index_t i = 0; i < width(); ++i) out[i] += change(row, i);
    }
  }

  Status attention(indexshare::SharePlan const& plan, std::int32_t number, Choice choice,
                   std::int32_t sequence) {
    auto weights = model_->attention(number);
    if (choice != Choice::full) weights.indexer.reset();
    Status status = normalise(model_->block(number).input_norm);
    if (status.ok()) status = project_and_append(weights);
    if (status.ok()) {
      status = choice == Choice::random
                   ? attend(layer_of<RandomIndexer>(plan, number), weights,
                            RandomIndexer::inputs<host>{random_seed, number, sequence})
                   : attend_as_model(plan, number, weights);
    }
    if (status.ok()) {
      status = project_output(exec_, model_->front_end(), weights, sides_.normed, sides_.latent,
                              sides_.output);
    }
    if (status.ok()) add_to_hidden(sides_.output.output);
    return status;
  }

  Status project_and_append(indexshare::AttentionWeights<host, float> const& weights) {
    auto const& front_end = model_->front_end();
    indexshare::Tensor<host, float const, 2> const x = sides_.normed;
    auto const at = indexshare::make_lengths<host>(positions_.data(), Rows{tokens_});
    auto const requests = indexshare::make_lengths<host>(requests_.data(), Rows{tokens_});
    Status status = project_keys(exec_, front_end, weights, x, at, sides_.keys);
    if (status.ok()) {
      status = append_kv(exec_, sides_.keys, at, requests, table(), cache(kv_, kv_lanes()));
    }
    if (status.ok() && weights.indexer) {
      status = append_index_keys(exec_, front_end, sides_.keys, at, requests, table(),
                                 cache(index_keys_, config().index_head_dim));
    }
    if (status.ok()) status = project_queries(exec_, front_end, weights, x, at, sides_.queries);
    return status;
  }

  Status attend_as_model(indexshare::SharePlan const& plan, std::int32_t number,
                         indexshare::AttentionWeights<host, float> const& weights) {
    using Indexer = indexshare::ReluDotIndexer<float, Format>;
    cuda::std::optional<Indexer::inputs<host>> inputs;
    if (weights.indexer) {
      indexshare::CacheView<host, Format> const keys = cache(index_keys_, config().index_head_dim);
      inputs = indexer_inputs(model_->front_end(), sides_.queries, keys);
    }
    return attend(layer_of<Indexer>(plan, number), weights, inputs);
  }

  template <class Layer, class Inputs>
  Status attend(Layer const& layer, indexshare::AttentionWeights<host, float> const& weights,
                Inputs const& indexer) {
    indexshare::CacheView<host, Format> const kv = cache(kv_, kv_lanes());
    typename Layer::template inputs<host> const in{
        indexer, attention_inputs(model_->front_end(), weights, sides_.queries, kv), rows(), id()};
    return layer.run(exec_, in, *state_, {sides_.latent}, scratch_.view());
  }

  Status mlp(BlockWeights const& block) {
    Status status = normalise(block.mlp_norm);
    if (status.ok()) status = product(sides_.normed, block.gate, sides_.gate);
    if (status.ok()) status = product(sides_.normed, block.up, sides_.up);
    if (!status.ok()) return status;
    for (index_t row = 0; row < tokens_; ++row) {
      for (index_t i = 0; i < sides_.gate.extent(1); ++i) {
        float& gate = sides_.gate(row, i);
        gate = gate / (1.0f + std::exp(-gate)) * sides_.up(row, i);
      }
    }
    status = product(sides_.gate, block.down, sides_.change);
    if (status.ok()) add_to_hidden(sides_.change);
    return status;
  }

  static constexpr std::uint64_t random_seed = 1;

  Model const* model_;
  index_t tokens_;
  indexshare::HostExec<> exec_;
  indexshare::HostMemory activations_;
  std::vector<float> hidden_;
  std::vector<float> kv_;
  std::vector<float> index_keys_;
  std::vector<position_t> requests_;
  std::vector<position_t> positions_;
  std::vector<position_t> lengths_;
  programs::OwnedState state_;
  Sides sides_;
  indexshare::HostMemory scratch_;
  std::int64_t forward_ = 0;
};

}  // namespace small_dsa
