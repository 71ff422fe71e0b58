// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "owned_state.hpp"
#include "recording.hpp"

#include <indexshare/frontend.hpp>
#include <indexshare/indexshare.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <map>
#include <span>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

/// @file Whole self-attention modules on the host: hidden states in, module output out, every
/// quantity on the way kept. In fp32, so that what differs is the recipe and not the rounding.

namespace programs {

/// The tokens of one forward and which of them are query rows.
struct TokenBatch {
  using position_t = indexshare::position_t;
  using index_t = indexshare::index_t;

  // one entry per token; the tokens of a request follow each other
  std::vector<position_t> rotary;     ///< position that the rotary embedding counts
  std::vector<position_t> requests;   ///< 0 .. request_count - 1
  std::vector<position_t> positions;  ///< in the request, from 0
  // one entry per row
  std::vector<position_t> row_tokens;
  std::vector<position_t> row_rotary;
  std::vector<position_t> row_requests;
  std::vector<position_t> lengths;  ///< keys that the row sees, itself included

  index_t request_count = 0;
  index_t longest = 0;  ///< tokens of the longest request

  index_t tokens() const { return static_cast<index_t>(rotary.size()); }
  index_t rows() const { return static_cast<index_t>(row_tokens.size()); }

  void add_token(position_t request, position_t rotary_position) {
    bool const goes_on = !requests.empty() && requests.back() == request;
    positions.push_back(goes_on ? positions.back() + 1 : 0);
    requests.push_back(request);
    rotary.push_back(rotary_position);
    request_count = std::max<index_t>(request_count, request + 1);
    longest = std::max<index_t>(longest, positions.back() + 1);
  }
  void add_row(position_t token) {
    auto const i = static_cast<std::size_t>(token);
    row_tokens.push_back(token);
    row_rotary.push_back(rotary[i]);
    row_requests.push_back(requests[i]);
    lengths.push_back(positions[i] + 1);
  }

  /// Those of a recording. Its requests are numbered anew, from 0.
  static TokenBatch of(Recording const& recording) {
    TokenBatch batch;
    std::map<std::int32_t, position_t> numbers;
    for (std::size_t token = 0; token < recording.tokens(); ++token) {
      TokenPlace const& place = recording.place(token);
      auto const next = static_cast<position_t>(numbers.size());
      batch.add_token(numbers.emplace(place.request, next).first->second, place.rotary);
    }
    for (std::int32_t const token : recording.row_tokens()) batch.add_row(token);
    return batch;
  }
};

/// Runs the modules of one forward, layer after layer; a shared layer must follow its source. A
/// layer is four steps, `project`, `append`, `attend`, `finish`, and between them everything that
/// was computed can be looked at, and spoilt. Throws std::runtime_error with the layer and the
/// extent when the library refuses a step.
template <class X>
class LayerRun {
 public:
  using index_t = indexshare::index_t;
  using position_t = indexshare::position_t;
  static constexpr auto host = indexshare::Space::host;
  using Rows = indexshare::Rows;
  using FrontEnd = indexshare::FrontEnd<>;
  using Format = indexshare::format::Plain<float>;
  using Indexer = indexshare::ReluDotIndexer<float, Format>;
  using Attention = indexshare::SparseMla<float, Format>;
  using Matrix = indexshare::Tensor<host, float const, 2>;

  static constexpr index_t page_size = 16;

  LayerRun(X exec, FrontEnd const& front_end, TokenBatch batch)
      : exec_(std::move(exec)),
        front_end_(front_end),
        batch_(std::move(batch)),
        activations_(carve(indexshare::WorkspaceCarver{}).size),
        pages_(scattered_pages()),
        kv_(cache_elements(kv_lanes()), poison()),
        index_keys_(cache_elements(config().index_head_dim), poison()),
        latent_(area(batch_.rows(), config().num_attention_heads * config().kv_lora_rank)),
        lse_(area(batch_.rows(), config().num_attention_heads)),
        state_(Rows{batch_.rows()}, indexshare::TopK{config().index_topk}) {
    Sides const sides = carve(indexshare::WorkspaceCarver(activations_.view()));
    queries_ = sides.queries;
    keys_ = sides.keys;
    output_ = sides.output;
  }

  indexshare::ModelConfig const& config() const { return front_end_.config; }
  FrontEnd& front_end() { return front_end_; }
  TokenBatch& batch() { return batch_; }
  indexshare::QuerySide<host> const& queries() const { return queries_; }
  indexshare::KeySide<host> const& keys() const { return keys_; }
  indexshare::OutputSide<host> const& output() const { return output_; }
  indexshare::SelectionState<host>& state() { return *state_; }
  X const& exec() const { return exec_; }

  /// The query side of the rows and the key side of the tokens.
  /// @param hidden  [tokens, hidden]
  template <class T>
  void project(indexshare::AttentionWeights<host, T> const& weights,
               std::span<float const> hidden) {
    index_t const width = config().hidden_size;
    hidden_.assign(hidden.begin(), hidden.end());
    row_hidden_.clear();
    for (position_t const token : batch_.row_tokens) {
      auto const first = hidden.begin() + token * width;
      row_hidden_.insert(row_hidden_.end(), first, first + width);
    }
    full_ = weights.indexer.has_value();
    require(
        project_keys(exec_, front_end_, weights, token_hidden(), positions(batch_.rotary), keys_));
    require(project_queries(exec_, front_end_, weights, row_hidden(), positions(batch_.row_rotary),
                            queries_));
  }

  /// Writes the tokens into the layer's caches.
  void append() {
    require(append_kv(exec_, keys_, positions(batch_.positions), positions(batch_.requests),
                      table(), cache(kv_, kv_lanes())));
    if (!full_) return;
    require(append_index_keys(exec_, front_end_, keys_, positions(batch_.positions),
                              positions(batch_.requests), table(), writable_index_keys()));
  }

  indexshare::CacheView<host, Format> index_keys() { return writable_index_keys(); }
  indexshare::CacheView<host, Format> kv() { return cache(kv_, kv_lanes()); }

  indexshare::RowBatch<host> rows() const {
    return {positions(batch_.lengths), positions(batch_.row_requests), table(), table()};
  }
  indexshare::Shape shape() const {
    return shape_of(config(), Rows{batch_.rows()},
                    indexshare::Keys{pages_per_request() * page_size});
  }

  template <class T>
  indexshare::MlaInputs<float, Format, host> attention_inputs(
      indexshare::AttentionWeights<host, T> const& weights) {
    return indexshare::attention_inputs(front_end_, weights, queries_, kv());
  }

  /// Selects or reuses, and attends. Returns the inputs, for whoever checks the outcome.
  /// @param number  the layer, as `share` knows it
  template <class Policy = Indexer, class Share>
  auto attend(Share const& share, std::int32_t number,
              indexshare::MlaInputs<float, Format, host> const& attention) {
    using Layer = indexshare::SparseAttentionLayer<Policy, indexshare::RadixTopK, Share, Attention>;
    Layer const layer{{}, {}, share, {}, shape(), number};
    typename Layer::template inputs<host> in{{}, attention, rows(), {1, 0}};
    scores_.clear();
    if (layer.is_full()) {
      auto const inputs = indexer_inputs(front_end_, queries_, index_keys());
      in.indexer = typename Policy::template inputs<host>{inputs.q, inputs.weights, inputs.keys,
                                                          inputs.q_basis};
      score(Policy{}, *in.indexer);
    }
    indexshare::HostMemory const scratch(layer.workspace(exec_, std::size_t{1} << 28).value());
    require(layer.run(exec_, in, *state_, {latent_output(), lse()}, scratch.view()));
    return in;
  }

  /// Attends once more, over a selection made elsewhere, in place of the run's own: `lse` and the
  /// latent output are then that selection's. `state` keeps the run's own.
  /// @param selected  per row the positions in its request, ascending, at most index_topk
  void attend_over(std::vector<std::vector<position_t>> const& selected, std::int32_t number,
                   indexshare::MlaInputs<float, Format, host> const& attention) {
    index_t const width = config().index_topk;
    std::vector<position_t> indices(area(batch_.rows(), width), indexshare::no_position);
    std::vector<position_t> counts;
    for (std::size_t row = 0; row < selected.size(); ++row) {
      std::copy(selected[row].begin(), selected[row].end(),
                indices.begin() + static_cast<std::ptrdiff_t>(row) * width);
      counts.push_back(static_cast<position_t>(selected[row].size()));
    }
    auto const selection = indexshare::make_selection<host>(
        indices.data(), counts.data(), Rows{batch_.rows()}, indexshare::TopK{width});
    OwnedState other(Rows{batch_.rows()}, indexshare::TopK{width});
    require(import_selection(exec_,
                             indexshare::SelectionView<host, position_t const>{
                                 indexshare::detail::read_only(selection.indices),
                                 indexshare::detail::read_only(selection.counts)},
                             indexshare::ForwardId{1, 0}, number, rows(), *other));

    using Layer =
        indexshare::SparseAttentionLayer<Indexer, indexshare::RadixTopK, ReaderOf, Attention>;
    Layer const layer{{}, {}, {number}, {}, shape(), number + 1};
    indexshare::HostMemory const scratch(layer.workspace(exec_, std::size_t{1} << 28).value());
    require(layer.run(exec_, {{}, attention, rows(), {1, 0}}, *other, {latent_output(), lse()},
                      scratch.view()));
  }

  /// The output of the module.
  template <class T>
  void finish(indexshare::AttentionWeights<host, T> const& weights) {
    require(project_output(exec_, front_end_, weights, row_hidden(),
                           indexshare::detail::read_only(latent_output()), output_));
  }

  /// All four steps.
  template <class Share, class T>
  auto run(Share const& share, std::int32_t number,
           indexshare::AttentionWeights<host, T> const& weights, std::span<float const> hidden) {
    project(weights, hidden);
    append();
    auto const in = attend(share, number, attention_inputs(weights));
    finish(weights);
    return in;
  }

  Matrix token_hidden() const { return matrix(hidden_, batch_.tokens()); }
  Matrix row_hidden() const { return matrix(row_hidden_, batch_.rows()); }
  indexshare::OutputView<host, float> latent_output() {
    return indexshare::make_output<host>(latent_.data(), Rows{batch_.rows()},
                                         indexshare::Heads{config().num_attention_heads},
                                         indexshare::HeadDim{config().kv_lora_rank});
  }
  indexshare::LseView<host> lse() {
    return indexshare::make_lse<host>(lse_.data(), Rows{batch_.rows()},
                                      indexshare::Heads{config().num_attention_heads});
  }

  /// What a recording holds beside its layers.
  void describe(RecordingWriter& writer) const {
    writer.metadata("index_basis", front_end_.index_basis == indexshare::LaneBasis::hadamard
                                       ? "hadamard"
                                       : "natural");
    writer.metadata("latent_norm_eps", number_text(config().norm_eps.latent));
    writer.metadata("index_key_eps", number_text(config().norm_eps.index_key));
    writer.add("positions", {batch_.tokens()}, batch_.rotary);
    writer.add("requests", {batch_.tokens()}, batch_.requests);
    writer.add("rows", {batch_.rows()}, batch_.row_tokens);
  }

  /// Adds what the last layer computed.
  void record(RecordingWriter& writer, std::int32_t layer) {
    using indexshare::detail::lanes_of;
    using indexshare::detail::one_head;
    index_t const latent = config().kv_lora_rank;
    index_t const rope = config().qk_rope_head_dim;
    add(writer, layer, Quantity::hidden, token_hidden());
    add(writer, layer, Quantity::q_a, queries_.q_a);
    add(writer, layer, Quantity::q_resid, queries_.q_resid);
    add(writer, layer, Quantity::q, queries_.q);
    add(writer, layer, Quantity::q_rope, queries_.q_rope(config()));
    add(writer, layer, Quantity::kv_a, keys_.kv_a);
    add(writer, layer, Quantity::kv_latent, lanes_of(keys_.kv_row, 0, latent));
    add(writer, layer, Quantity::k_rope, lanes_of(keys_.kv_row, latent, rope));
    if (!scores_.empty()) {
      add(writer, layer, Quantity::index_q_raw, queries_.index_q_raw);
      add(writer, layer, Quantity::index_q, queries_.index_q);
      add(writer, layer, Quantity::index_k_raw, keys_.index_k_raw);
      add(writer, layer, Quantity::index_k_norm, keys_.index_k_norm);
      add(writer, layer, Quantity::index_k, keys_.index_k);
      add(writer, layer, Quantity::head_weights_raw, queries_.head_weights_raw);
      add(writer, layer, Quantity::head_weights, queries_.head_weights);
      writer.add(layer, Quantity::scores, {batch_.rows(), batch_.longest}, scores_);
    }
    auto const selection = (*state_).selection();
    add(writer, layer, Quantity::selection,
        indexshare::rows_of(selection.indices, 0, batch_.rows()));
    add(writer, layer, Quantity::lse, lse());
    add(writer, layer, Quantity::attention, output_.attention);
    if (config().gated_output) add(writer, layer, Quantity::gated, output_.gated);
    add(writer, layer, Quantity::output, output_.output);
  }

 private:
  /// Share policy: every layer above `source` reads from it.
  struct ReaderOf {
    std::int32_t source = 0;
    friend constexpr std::int32_t share_source(ReaderOf const& policy, std::int32_t) noexcept {
      return policy.source;
    }
  };

  struct Sides {
    indexshare::QuerySide<host> queries;
    indexshare::KeySide<host> keys;
    indexshare::OutputSide<host> output;
    indexshare::WorkspaceSize size;
  };

  /// One walk for the size and for the views.
  Sides carve(indexshare::WorkspaceCarver carver) const {
    constexpr auto keep = indexshare::Keep::intermediates;
    Sides sides;
    Rows const rows{batch_.rows()};
    sides.queries = indexshare::carve_query_side<host>(carver, config(), rows, true, keep);
    sides.keys =
        indexshare::carve_key_side<host>(carver, config(), Rows{batch_.tokens()}, true, keep);
    sides.output = indexshare::carve_output_side<host>(carver, config(), rows, keep);
    sides.size = carver.size();
    return sides;
  }

  static void require(indexshare::Status const& status) {
    if (status.ok()) return;
    std::string const layer =
        status.layer >= 0 ? "layer " + std::to_string(status.layer) + ": " : "";
    throw std::runtime_error(layer + status.what + ": expected " + std::to_string(status.expected) +
                             ", got " + std::to_string(status.got));
  }

  static std::size_t area(index_t rows, index_t lanes) {
    return static_cast<std::size_t>(rows * lanes);
  }
  static float poison() { return std::numeric_limits<float>::quiet_NaN(); }
  static std::string number_text(double number) {
    std::string text = std::to_string(number * 1e9);  // an eps has no more digits
    return text.substr(0, text.find('.')) + "e-9";
  }

  index_t kv_lanes() const { return config().kv_lora_rank + config().qk_rope_head_dim; }
  index_t pages_per_request() const { return (batch_.longest + page_size - 1) / page_size; }
  index_t all_pages() const { return batch_.request_count * pages_per_request(); }
  std::size_t cache_elements(index_t lanes) const { return area(all_pages() * page_size, lanes); }

  /// No page lies where its number suggests.
  std::vector<position_t> scattered_pages() const {
    std::vector<position_t> pages(static_cast<std::size_t>(all_pages()));
    for (std::size_t i = 0; i < pages.size(); ++i) {
      pages[i] = static_cast<position_t>(pages.size() - 1 - i);
    }
    return pages;
  }

  indexshare::PageTable<host> table() const {
    return indexshare::make_page_table<host>(
        pages_.data(), indexshare::Requests{batch_.request_count},
        indexshare::Pages{pages_per_request()}, indexshare::PageSize{page_size});
  }
  auto cache(std::vector<float>& storage, index_t lanes) const {
    return indexshare::make_paged_cache<host>(storage.data(), indexshare::Pages{all_pages()},
                                              indexshare::PageSize{page_size},
                                              indexshare::HeadDim{lanes});
  }
  indexshare::MutableCacheView<host, Format> writable_index_keys() {
    auto view = cache(index_keys_, config().index_head_dim);
    view.basis = front_end_.index_basis;
    return view;
  }
  static indexshare::PositionView<host> positions(std::vector<position_t> const& list) {
    return indexshare::make_lengths<host>(list.data(), Rows{static_cast<index_t>(list.size())});
  }
  Matrix matrix(std::vector<float> const& values, index_t rows) const {
    return indexshare::make_dense<host, float const, 2>(values.data(),
                                                        {rows, config().hidden_size});
  }

  /// The scores of all rows; -inf past a row's keys.
  template <class Policy>
  void score(Policy const& policy, typename Policy::template inputs<host> const& in) {
    scores_.assign(area(batch_.rows(), batch_.longest), -std::numeric_limits<float>::infinity());
    indexshare::HostMemory const scratch(indexer_workspace(exec_, policy, shape()).value());
    require(indexer_score(exec_, policy, in, rows(),
                          indexshare::ScoreRequest{{0, batch_.rows()}, 0},
                          indexshare::make_scores<host>(scores_.data(), Rows{batch_.rows()},
                                                        indexshare::Keys{batch_.longest}),
                          scratch.view()));
    for (index_t row = 0; row < batch_.rows(); ++row) {
      auto const begin = scores_.begin() + row * batch_.longest;
      std::fill(begin + batch_.lengths[static_cast<std::size_t>(row)], begin + batch_.longest,
                -std::numeric_limits<float>::infinity());
    }
  }

  template <class View>
  static void add(RecordingWriter& writer, std::int32_t layer, Quantity id, View const& view) {
    std::vector<index_t> shape;
    for (std::size_t i = 0; i < View::rank(); ++i) shape.push_back(view.extent(i));
    std::vector<std::remove_const_t<typename View::element_type>> values;
    for (index_t row = 0; row < view.extent(0); ++row) {
      for (index_t i = 0; i < view.extent(1); ++i) {
        if constexpr (View::rank() == 2) {
          values.push_back(view(row, i));
        } else {
          for (index_t lane = 0; lane < view.extent(2); ++lane) {
            values.push_back(view(row, i, lane));
          }
        }
      }
    }
    writer.add(layer, id, std::move(shape), values);
  }

  X exec_;
  FrontEnd front_end_;
  TokenBatch batch_;
  indexshare::HostMemory activations_;
  std::vector<position_t> pages_;
  std::vector<float> kv_;
  std::vector<float> index_keys_;
  std::vector<float> latent_;
  std::vector<float> lse_;
  OwnedState state_;
  indexshare::QuerySide<host> queries_;
  indexshare::KeySide<host> keys_;
  indexshare::OutputSide<host> output_;
  std::vector<float> hidden_;
  std::vector<float> row_hidden_;
  std::vector<float> scores_;
  bool full_ = false;
};

}  // namespace programs
