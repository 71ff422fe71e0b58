// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "../programs/metered.hpp"
#include "backend.hpp"

#include <indexshare/indexshare.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

/// @file The engine's attention, computed by the library: the only part that knows both.

namespace mini {

using indexshare::Space;

/// The share policy of the model's layers and of its draft steps, which are numbered from the MTP
/// layer on. The check runs it without reuse: every layer selects for itself.
struct EngineShare {
  indexshare::SharePlan plan{};
  indexshare::MtpDraft drafts{};
  bool reuse = true;
};
constexpr std::int32_t share_source(EngineShare const& share, std::int32_t layer) noexcept {
  if (!share.reuse) return layer;
  return layer < share.drafts.first_layer ? share_source(share.plan, layer)
                                          : share_source(share.drafts, layer);
}

/// Caches of bf16 rows: how the engine's bytes are viewed.
struct Bf16Caches {
  static constexpr char const* name = "bf16";
  using IndexKeys = indexshare::format::Plain<indexshare::bf16>;
  using Kv = indexshare::format::Plain<indexshare::bf16>;

  template <Space S>
  static auto index_keys(std::byte* data, indexshare::Pages pages, indexshare::PageSize page_size,
                         Sizes const& s) {
    return indexshare::make_paged_cache<S>(reinterpret_cast<indexshare::bf16*>(data), pages,
                                           page_size, indexshare::HeadDim{s.index_dim});
  }
  template <Space S>
  static auto kv(std::byte* data, indexshare::Pages pages, indexshare::PageSize page_size,
                 Sizes const& s) {
    return indexshare::make_paged_cache<S>(reinterpret_cast<indexshare::bf16*>(data), pages,
                                           page_size, indexshare::HeadDim{s.key_dim});
  }
  static std::int64_t index_key_bytes(Sizes const& s) { return 2 * s.index_dim; }
  static std::int64_t kv_bytes(Sizes const& s) { return 2 * s.key_dim; }
};

/// What the model's config says about its attention, and how it is to run.
struct AttentionPlan {
  indexshare::SharePlan schedule{};
  float scale = 0;                 ///< of the logits
  std::size_t scratch_budget = 0;  ///< bytes of each workspace, at most
  int micro_batches = 1;
  /// The way of the check: one request in caches without pages, and a layer that would reuse a
  /// selection computes that of its source again.
  bool alone = false;
};

/// What a backend takes from the device, all of it when it is made.
struct BackendBytes {
  std::size_t scratch = 0;  ///< workspaces
  std::size_t states = 0;   ///< selections
  std::size_t index_keys = 0;
  std::size_t kv = 0;
};

/// A backend that tells what it took and what it did.
class MeteredBackend : public AttentionBackend {
 public:
  virtual BackendBytes bytes() const = 0;
  virtual std::int64_t indexer_calls() const = 0;
};

/// @tparam Place   makes an executor of a stream of the engine: `space`, `exec(stream)`
/// @tparam Caches  formats of the caches
template <class Place, class Caches>
class IndexShareBackend final : public MeteredBackend {
 public:
  IndexShareBackend(Place const& place, Sizes const& sizes, AttentionPlan const& plan,
                    Device& device)
      : place_(place),
        device_(&device),
        sizes_(sizes),
        plan_(plan),
        share_{plan.schedule, {sizes.mtp_layer(), true}, !plan.alone},
        stage_(plan.schedule.stage(0, plan.schedule.total_layers(), indexshare::StageStart::own)
                   .value()),
        pages_{plan.alone ? 1 : sizes.pages},
        page_size_{plan.alone ? sizes.request_pages() * sizes.page_size : sizes.page_size} {
    make_caches();
    for (int i = 0; i < plan.micro_batches; ++i) micros_.push_back(make_micro());
  }

  bool has_index_keys(Call const& call) const override {
    return plan_.schedule.is_full(call.layer);
  }
  bool selects(Call const& call) const override {
    return plan_.schedule.is_full(call.layer) && call.draft_step == 0;
  }

  void begin(Call const& call, Batch const& batch) override {
    Micro& micro = micro_of(call);
    micro.forward = {.id = next_id(call), .batch = &batch};
    number(call, batch, micro.forward, micro.numbers);
  }

  void begin_draft(Call const& call, Batch const& batch,
                   Tensor<std::int32_t> const& accepted) override {
    Micro& micro = micro_of(call);
    if (call.draft_step == 1) micro.draft = {.id = next_id(call), .batch = &batch};
    number(call, batch, micro.draft, micro.draft_numbers);
    if (call.draft_step == 1) pass_on_selection(call, accepted);
  }

  void append(Call const& call, LayerTensors const& tensors) override {
    auto const& batch = forward_of(call).rows;
    append_rows_of(call, tensors.kv, batch.kv_pages, kv_cache(call.layer));
    if (has_index_keys(call)) {
      append_rows_of(call, tensors.index_keys, batch.index_pages, index_key_cache(call.layer));
    }
  }

  void attend(Call const& call, LayerTensors const& tensors) override {
    Layer const layer = layer_of(call);
    Forward const& forward = forward_of(call);
    indexshare::Rows const rows{forward.rows.count()};
    indexshare::Heads const heads{sizes_.heads}, index_heads{sizes_.index_heads};
    typename Layer::template inputs<space> in{};
    in.id = forward.id;
    in.batch = forward.rows;
    in.attention.q = indexshare::make_query<space>(bf16(tensors.q), rows, heads,
                                                   indexshare::HeadDim{sizes_.key_dim});
    in.attention.kv = kv_cache(call.layer);
    in.attention.scale = plan_.scale;
    if (layer.is_full()) {  // on the check's way these are still those of the source layer
      in.indexer.emplace();
      in.indexer->q = indexshare::make_query<space>(bf16(tensors.index_q), rows, index_heads,
                                                    indexshare::HeadDim{sizes_.index_dim});
      in.indexer->weights =
          indexshare::make_head_weights<space>(tensors.weights.data(), rows, index_heads);
      in.indexer->keys = index_key_cache(plan_.schedule.source(call.layer).value());
    }
    auto const out = indexshare::make_output<space>(tensors.out.data(), rows, heads,
                                                    indexshare::HeadDim{sizes_.value_dim});
    Tensor<std::byte> const& scratch = micro_of(call).scratch;
    require(layer.run(place_.exec(call.stream), in, state_of(call), {out},
                      {scratch.data(), scratch.bytes()}));
  }

  SelectionRows selection(Call const& call) const override {
    return {state_of(call).selection().indices.data_handle(), sizes_.top_k};
  }

  BackendBytes bytes() const override {
    BackendBytes sum;
    for (auto const& cache : kv_) sum.kv += cache.bytes();
    for (auto const& cache : index_keys_) sum.index_keys += cache.bytes();
    for (auto const& micro : micros_) {
      sum.scratch += micro.scratch.bytes();
      for (auto const& memory : micro.state_memory) sum.states += memory.bytes();
    }
    return sum;
  }
  std::int64_t indexer_calls() const override { return meter_.calls; }

 private:
  static constexpr Space space = Place::space;
  using Indexer = programs::MeteredIndexer<
      indexshare::ReluDotIndexer<indexshare::bf16, typename Caches::IndexKeys>>;
  using Attention = indexshare::SparseMla<indexshare::bf16, typename Caches::Kv>;
  using Layer =
      indexshare::SparseAttentionLayer<Indexer, indexshare::RadixTopK, EngineShare, Attention>;
  using State = indexshare::SelectionState<space>;

  /// A forward in flight: its number, the engine's arrays and the library's view of its rows.
  struct Forward {
    indexshare::ForwardId id{};
    Batch const* batch = nullptr;
    indexshare::LengthView<space> positions{};
    indexshare::RowBatch<space> rows{};
  };
  struct Numbers {
    Tensor<std::int32_t> positions, lengths, requests;
  };
  /// What one micro-batch has for itself.
  struct Micro {
    Forward forward, draft;
    Numbers numbers, draft_numbers;
    Tensor<std::int32_t> anchors;  ///< rows of the last accepted tokens
    Tensor<std::byte> scratch;
    std::vector<Tensor<std::byte>> state_memory;
    std::vector<State> states;  ///< of the trunk, of draft step 0, of the steps after it
  };
  enum StateOf : std::size_t { trunk, first_draft, later_drafts, states };

  static void require(indexshare::Status const& status) {
    if (status.ok()) return;
    throw std::runtime_error("layer " + std::to_string(status.layer) + ": " + status.what +
                             " (expected " + std::to_string(status.expected) + ", got " +
                             std::to_string(status.got) + ", CUDA error " +
                             std::to_string(status.cuda_error) + ")");
  }
  template <class T>
  static T value_of(indexshare::Result<T> const& result) {
    if (!result) require(result.error());
    return *result;
  }
  static indexshare::bf16 const* bf16(Tensor<Bf16> const& tensor) {
    return reinterpret_cast<indexshare::bf16 const*>(tensor.data());  // the same 16 bits
  }

  indexshare::Shape shape() const {
    return {.rows = sizes_.rows,
            .keys = sizes_.keys,
            .top_k = sizes_.top_k,
            .index_heads = sizes_.index_heads,
            .index_dim = sizes_.index_dim,
            .heads = sizes_.heads,
            .key_dim = sizes_.key_dim,
            .value_dim = sizes_.value_dim};
  }
  Layer layer_number(int number) const {
    return {.indexer = {.meter = &meter_}, .share = share_, .shape = shape(), .layer = number};
  }
  Layer layer_of(Call const& call) const { return layer_number(call.layer + call.draft_step); }

  Micro& micro_of(Call const& call) { return micros_[static_cast<std::size_t>(call.micro)]; }
  Forward const& forward_of(Call const& call) {
    return call.draft_step == 0 ? micro_of(call).forward : micro_of(call).draft;
  }
  StateOf state_index(Call const& call) const {
    if (call.layer < sizes_.mtp_layer()) return trunk;
    return call.draft_step == 0 ? first_draft : later_drafts;
  }
  State& state_of(Call const& call) { return micro_of(call).states[state_index(call)]; }
  State const& state_of(Call const& call) const {
    return micros_[static_cast<std::size_t>(call.micro)].states[state_index(call)];
  }

  indexshare::ForwardId next_id(Call const& call) {
    return {.forward = forwards_++, .batch = call.micro};
  }

  /// A KV cache for every layer, index keys for the full ones; the MTP layer's among them.
  void make_caches() {
    std::int64_t const tokens = pages_.n * page_size_.n;
    for (int layer = 0; layer < stage_.last(); ++layer) {
      kv_.emplace_back(*device_,
                       std::initializer_list<std::int64_t>{tokens, Caches::kv_bytes(sizes_)});
    }
    for (int i = 0; i < stage_.index_caches(); ++i) {
      index_keys_.emplace_back(
          *device_, std::initializer_list<std::int64_t>{tokens, Caches::index_key_bytes(sizes_)});
    }
  }
  auto kv_cache(int layer) const {
    return Caches::template kv<space>(kv_[static_cast<std::size_t>(layer)].data(), pages_,
                                      page_size_, sizes_);
  }
  auto index_key_cache(int layer) const {
    auto const number = static_cast<std::size_t>(value_of(stage_.index_cache_slot(layer)));
    return Caches::template index_keys<space>(index_keys_[number].data(), pages_, page_size_,
                                              sizes_);
  }

  Micro make_micro() const {
    Micro micro;
    Device& device = *device_;
    for (Numbers* const numbers : {&micro.numbers, &micro.draft_numbers}) {
      for (auto* const array : {&numbers->positions, &numbers->lengths, &numbers->requests}) {
        *array = Tensor<std::int32_t>(device, {sizes_.rows});
      }
    }
    micro.anchors = Tensor<std::int32_t>(device, {sizes_.requests});
    // All layers have one shape, and a full one needs the most.
    auto const scratch =
        value_of(layer_number(0).workspace(place_.exec(nullptr), plan_.scratch_budget));
    micro.scratch = Tensor<std::byte>(device, {static_cast<std::int64_t>(scratch.bytes)});
    indexshare::Rows const rows{sizes_.rows};
    indexshare::TopK const top_k{sizes_.top_k};
    for (std::size_t i = 0; i < states; ++i) {
      auto const bytes = static_cast<std::int64_t>(State::size(rows, top_k).bytes);
      auto const& memory =
          micro.state_memory.emplace_back(device, std::initializer_list<std::int64_t>{bytes});
      micro.states.push_back(value_of(State::make({memory.data(), memory.bytes()}, rows, top_k)));
    }
    return micro;
  }

  indexshare::PageTable<space> page_table(Batch const& batch) const {
    if (plan_.alone)
      return indexshare::make_contiguous_table<space>(indexshare::Keys{page_size_.n});
    return indexshare::make_page_table<space>(batch.pages.data(),
                                              indexshare::Requests{batch.requests},
                                              indexshare::Pages{batch.pages.size(1)}, page_size_);
  }

  /// Which token of which request each row is, from the engine's chunks.
  void number(Call const& call, Batch const& batch, Forward& forward,
              Numbers const& numbers) const {
    using indexshare::index_t;
    using indexshare::position_t;
    index_t const rows = batch.rows;
    auto const numbers_of = [rows](Tensor<std::int32_t> const& array) {
      return indexshare::make_dense<space, position_t, 1>(array.data(), {rows});
    };
    indexshare::Chunks<space> const chunks{
        indexshare::make_lengths<space>(batch.starts.data(), indexshare::Rows{batch.requests + 1}),
        indexshare::make_lengths<space>(batch.lengths.data(), indexshare::Rows{batch.requests})};
    indexshare::RowNumbers<space> const out{
        numbers_of(numbers.positions), numbers_of(numbers.lengths), numbers_of(numbers.requests)};
    require(number_rows(place_.exec(call.stream), chunks, out));
    auto const pages = page_table(batch);  // one for the index keys and all KV
    forward.positions = out.positions;
    forward.rows = {out.lengths, out.requests, pages, pages};
  }

  /// The selection of draft step 0 goes on to the steps after it: for each request the row of its
  /// last accepted token.
  void pass_on_selection(Call const& call, Tensor<std::int32_t> const& accepted) {
    Micro& micro = micro_of(call);
    auto const exec = place_.exec(call.stream);
    indexshare::Rows const requests{micro.draft.batch->requests};
    auto const starts = indexshare::make_lengths<space>(micro.forward.batch->starts.data(),
                                                        indexshare::Rows{requests.n + 1});
    require(last_accepted_rows(exec, starts,
                               indexshare::make_lengths<space>(accepted.data(), requests),
                               indexshare::make_dense<space, indexshare::position_t, 1>(
                                   micro.anchors.data(), {requests.n})));
    require(compact_selection(exec, micro.states[first_draft], micro.forward.id,
                              indexshare::make_lengths<space>(micro.anchors.data(), requests),
                              micro.draft.id, micro.draft.rows, micro.states[later_drafts]));
  }

  template <class Cache>
  void append_rows_of(Call const& call, Tensor<float> const& values,
                      indexshare::PageTable<space> const& pages, Cache const& cache) {
    Forward const& forward = forward_of(call);
    auto const rows = indexshare::make_dense<space, float const, 2>(
        values.data(), {forward.rows.count(), values.size(1)});
    require(append_rows(place_.exec(call.stream), rows, forward.positions, forward.rows.requests,
                        pages, cache)
                .at_layer(call.layer));
  }

  Place place_;
  Device* device_;
  Sizes sizes_;
  AttentionPlan plan_;
  EngineShare share_;
  indexshare::StagePlan stage_;
  indexshare::Pages pages_;
  indexshare::PageSize page_size_;
  std::vector<Tensor<std::byte>> kv_;
  std::vector<Tensor<std::byte>> index_keys_;
  std::vector<Micro> micros_;
  std::int64_t forwards_ = 0;
  mutable programs::Meter meter_;
};

}  // namespace mini
