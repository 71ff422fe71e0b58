// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "../programs/metered.hpp"
#include "indexshare_views.hpp"

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

/// @file The engine's attention, computed by the library.

namespace mini {

/// What the model's config says about its attention, and how it is to run.
struct AttentionPlan {
  indexshare::SharePlan schedule{};
  float scale = 0;                 ///< of the logits
  std::size_t scratch_budget = 0;  ///< bytes of each workspace, at most
  int micro_batches = 1;
};

/// The schedule of the model's layers, and of the MTP layer's draft steps, which are numbered from
/// that layer on: step 0 selects, the others reuse (index_share_for_mtp_iteration).
struct EngineShare {
  indexshare::SharePlan plan{};
  indexshare::MtpDraft drafts{};
};
constexpr std::int32_t share_source(EngineShare const& share, std::int32_t layer) noexcept {
  return layer < share.drafts.first_layer ? share_source(share.plan, layer)
                                          : share_source(share.drafts, layer);
}

/// What a backend takes from the device, all of it when it is made.
struct BackendBytes {
  std::size_t scratch = 0;  ///< workspaces
  std::size_t states = 0;   ///< selections
  std::size_t index_keys = 0;
  std::size_t kv = 0;
};

/// A budget that no layer can run in.
struct ScratchTooSmall : std::runtime_error {
  explicit ScratchTooSmall(std::int64_t bytes)
      : std::runtime_error("a layer needs " + std::to_string(bytes) + " bytes of scratch at least"),
        least(bytes) {}
  std::int64_t least;
};

/// A backend that tells what it took and what it did.
class MeteredBackend : public AttentionBackend {
 public:
  virtual BackendBytes bytes() const = 0;
  virtual std::int64_t indexer_calls() const = 0;
};

/// @tparam Place   makes the library's executor of a stream of the engine: `space`, `exec(stream)`
/// @tparam Caches  formats of the caches
template <class Place, class Caches>
class IndexShareBackend final : public MeteredBackend {
 public:
  IndexShareBackend(Place const& place, Sizes const& sizes, AttentionPlan const& plan,
                    Device& device)
      : place_(place),
        sizes_(sizes),
        plan_(plan),
        caches_(device, plan.schedule, indexshare::Pages{sizes.pages}, page_size(), sizes) {
    for (int i = 0; i < plan.micro_batches; ++i) micros_.push_back(make_micro(device));
  }

  bool has_index_keys(Call const& call) const override {
    return plan_.schedule.is_full(call.layer);
  }
  bool selects(Call const& call) const override { return layer_of(call).is_full(); }

  void begin(Call const& call, Batch const& batch) override {
    Micro& micro = micro_of(call);
    micro.forward = {next_id(call), &batch, number(call, batch, micro.numbers)};
  }

  void begin_draft(Call const& call, Batch const& batch,
                   Tensor<std::int32_t> const& accepted) override {
    Micro& micro = micro_of(call);
    auto const rows = number(call, batch, micro.draft_numbers);
    if (call.draft_step > 1) {
      micro.draft.rows = rows;
    } else {
      micro.draft = {next_id(call), &batch, rows};
      pass_on_selection(call, accepted);
    }
  }

  void append(Call const& call, LayerTensors const& tensors) override {
    NumberedRows const& rows = forward_of(call).rows;
    auto const exec = place_.exec(call.stream);
    auto const count = indexshare::Rows{rows.batch.count()};
    require(append_rows(exec, rows_view<space>(tensors.kv, count), rows.positions,
                        rows.batch.requests, rows.batch.kv_pages, caches_.kv(call.layer))
                .at_layer(call.layer));
    if (!has_index_keys(call)) return;
    require(append_rows(exec, rows_view<space>(tensors.index_keys, count), rows.positions,
                        rows.batch.requests, rows.batch.index_pages, caches_.index_keys(call.layer))
                .at_layer(call.layer));
  }

  void attend(Call const& call, LayerTensors const& tensors) override {
    Layer const layer = layer_of(call);
    Forward const& forward = forward_of(call);
    indexshare::Rows const rows{forward.rows.batch.count()};
    typename Layer::template inputs<space> in{};
    in.id = forward.id;
    in.batch = forward.rows.batch;
    in.attention.q = query_view<space>(tensors.q, rows);
    in.attention.kv = caches_.kv(call.layer);
    in.attention.scale = plan_.scale;
    if (layer.is_full()) {
      in.indexer.emplace();
      in.indexer->q = query_view<space>(tensors.index_q, rows);
      in.indexer->weights = weights_view<space>(tensors.weights, rows);
      in.indexer->keys = caches_.index_keys(call.layer);
    }
    Tensor<std::byte> const& scratch = micro_of(call).scratch;
    require(layer.run(place_.exec(call.stream), in, *state_of(call),
                      {output_view<space>(tensors.out, rows)}, {scratch.data(), scratch.bytes()}));
  }

  SelectionRows selection(Call const& call) const override {
    Micro const& micro = micros_[static_cast<std::size_t>(call.micro)];
    auto const selected = (*micro.states[state_number(call)]).selection();
    return {selected.indices.data_handle(), sizes_.top_k};
  }

  BackendBytes bytes() const override {
    BackendBytes sum{.index_keys = caches_.index_key_bytes(), .kv = caches_.kv_bytes()};
    for (Micro const& micro : micros_) {
      sum.scratch += micro.scratch.bytes();
      for (auto const& state : micro.states) sum.states += state.bytes();
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

  /// Which token of which request each row is.
  struct NumberedRows {
    indexshare::RowBatch<space> batch{};
    indexshare::LengthView<space> positions{};
  };
  /// A forward in flight.
  struct Forward {
    indexshare::ForwardId id{};
    Batch const* batch = nullptr;
    NumberedRows rows{};
  };
  struct Numbers {
    Tensor<std::int32_t> positions, lengths, requests;
  };
  /// What a micro-batch has for itself.
  struct Micro {
    Forward forward{}, draft{};
    Numbers numbers{}, draft_numbers{};
    Tensor<std::int32_t> anchors{};  ///< rows of the last accepted tokens
    Tensor<std::byte> scratch{};
    std::vector<OwnedSelection<space>> states{};  ///< one of each StateNumber
  };
  enum StateNumber : std::size_t { trunk, first_draft, later_drafts, state_count };

  indexshare::PageSize page_size() const { return {sizes_.page_size}; }

  Layer layer_number(int number) const {
    EngineShare const share{plan_.schedule, {sizes_.mtp_layer(), true}};
    return {
        .indexer = {.meter = &meter_}, .share = share, .shape = shape_of(sizes_), .layer = number};
  }
  Layer layer_of(Call const& call) const { return layer_number(call.layer + call.draft_step); }

  Micro& micro_of(Call const& call) { return micros_[static_cast<std::size_t>(call.micro)]; }
  Forward const& forward_of(Call const& call) {
    return call.draft_step == 0 ? micro_of(call).forward : micro_of(call).draft;
  }
  StateNumber state_number(Call const& call) const {
    if (call.layer < sizes_.mtp_layer()) return trunk;
    return call.draft_step == 0 ? first_draft : later_drafts;
  }
  OwnedSelection<space>& state_of(Call const& call) {
    return micro_of(call).states[state_number(call)];
  }

  indexshare::ForwardId next_id(Call const& call) {
    return {.forward = forwards_++, .batch = call.micro};
  }

  Micro make_micro(Device& device) const {
    Micro micro;
    for (Numbers* const numbers : {&micro.numbers, &micro.draft_numbers}) {
      for (auto* const array : {&numbers->positions, &numbers->lengths, &numbers->requests}) {
        *array = Tensor<std::int32_t>(device, {sizes_.rows});
      }
    }
    micro.anchors = Tensor<std::int32_t>(device, {sizes_.requests});
    for (std::size_t i = 0; i < state_count; ++i) micro.states.emplace_back(device, sizes_);
    micro.scratch = Tensor<std::byte>(device, {scratch_bytes()});
    return micro;
  }

  /// All layers have one shape, and a full layer needs the most: one workspace serves them all.
  std::int64_t scratch_bytes() const {
    auto const need = layer_number(0).workspace(place_.exec(nullptr), plan_.scratch_budget);
    if (!need && need.error().code == indexshare::Errc::workspace_too_small) {
      throw ScratchTooSmall(need.error().expected);
    }
    return static_cast<std::int64_t>(value_of(need).bytes);
  }

  /// Numbers the rows on the device, from the engine's chunks.
  NumberedRows number(Call const& call, Batch const& batch, Numbers const& numbers) const {
    indexshare::Chunks<space> const chunks{numbers_view<space>(batch.starts, batch.requests + 1),
                                           numbers_view<space>(batch.lengths, batch.requests)};
    indexshare::RowNumbers<space> const out{numbers_view<space>(numbers.positions, batch.rows),
                                            numbers_view<space>(numbers.lengths, batch.rows),
                                            numbers_view<space>(numbers.requests, batch.rows)};
    require(number_rows(place_.exec(call.stream), chunks, out));
    auto const pages = indexshare::make_page_table<space>(  // one for index keys and KV alike
        batch.pages.data(), indexshare::Requests{batch.requests},
        indexshare::Pages{batch.pages.size(1)}, page_size());
    return {{out.lengths, out.requests, pages, pages}, out.positions};
  }

  /// The selection of draft step 0 goes on to the steps after it: for each request the row of its
  /// last accepted token.
  void pass_on_selection(Call const& call, Tensor<std::int32_t> const& accepted) {
    Micro& micro = micro_of(call);
    auto const exec = place_.exec(call.stream);
    int const requests = micro.draft.batch->requests;
    require(last_accepted_rows(exec, numbers_view<space>(micro.forward.batch->starts, requests + 1),
                               numbers_view<space>(accepted, requests),
                               numbers_view<space>(micro.anchors, requests)));
    indexshare::LengthView<space> const anchors = numbers_view<space>(micro.anchors, requests);
    require(compact_selection(exec, *micro.states[first_draft], micro.forward.id, anchors,
                              micro.draft.id, micro.draft.rows.batch, *micro.states[later_drafts]));
  }

  Place place_;
  Sizes sizes_;
  AttentionPlan plan_;
  LayerCaches<space, Caches> caches_;
  std::vector<Micro> micros_;
  std::int64_t forwards_ = 0;
  mutable programs::Meter meter_;
};

}  // namespace mini
