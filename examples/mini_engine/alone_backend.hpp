// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "indexshare_backend.hpp"

#include <algorithm>
#include <cstdint>

/// @file The plain way, to compare with: one request in caches without pages, and every layer
/// selects for itself. A layer that the model lets share computes its source's selection again,
/// from the source's index keys and queries. So does a draft step, from those of the last row.

namespace mini {

template <class Place, class Caches>
class AloneBackend final : public AttentionBackend {
 public:
  AloneBackend(Place const& place, Sizes const& sizes, AttentionPlan const& plan, Device& device)
      : place_(place),
        sizes_(sizes),
        plan_(plan),
        caches_(device, plan.schedule, indexshare::Pages{1}, indexshare::PageSize{sizes.keys},
                sizes),
        positions_(device, {sizes.rows}),
        lengths_(device, {sizes.rows}),
        requests_(device, {sizes.rows}),
        state_(device, sizes) {
    auto const scratch = value_of(layer(0).workspace(place.exec(nullptr), plan.scratch_budget));
    scratch_ = Tensor<std::byte>(device, {static_cast<std::int64_t>(scratch.bytes)});
  }

  bool has_index_keys(Call const& call) const override {
    return plan_.schedule.is_full(call.layer);
  }
  /// Not on layers that share: their source's queries must stay where they are.
  bool selects(Call const& call) const override { return has_index_keys(call); }

  void begin(Call const&, Batch const& batch) override {
    ++forward_;
    rows_ = {batch.rows};
    for (int row = 0; row < batch.rows; ++row) {
      positions_[row] = batch.lengths[0] - batch.rows + row;
      lengths_[row] = positions_[row] + 1;
      requests_[row] = 0;
    }
  }
  /// A draft step is one row with the anchor's index query and length. It is not appended: no step
  /// sees positions behind the anchor.
  void begin_draft(Call const& call, Batch const&, Tensor<std::int32_t> const& accepted) override {
    if (call.draft_step > 1) return;
    anchor_ = accepted[0] - 1;
    lengths_[0] = lengths_[anchor_];
    rows_ = {1};
  }

  void append(Call const& call, LayerTensors const& tensors) override {
    auto const exec = place_.exec(call.stream);
    auto const positions = numbers_view<space>(positions_, rows_.n);
    auto const requests = numbers_view<space>(requests_, rows_.n);
    require(append_rows(exec, rows_view<space>(tensors.kv, rows_), positions, requests, table(),
                        caches_.kv(call.layer)));
    if (!has_index_keys(call)) return;
    require(append_rows(exec, rows_view<space>(tensors.index_keys, rows_), positions, requests,
                        table(), caches_.index_keys(call.layer)));
  }

  void attend(Call const& call, LayerTensors const& tensors) override {
    if (call.draft_step == 1) {
      std::copy_n(tensors.index_q.row(anchor_), tensors.index_q.row(1) - tensors.index_q.row(0),
                  tensors.index_q.row(0));
      std::copy_n(tensors.weights.row(anchor_), tensors.weights.size(1), tensors.weights.row(0));
    }
    std::int32_t const source = plan_.schedule.source(call.layer).value();
    typename Layer::template inputs<space> in{};
    in.id = {.forward = forward_};
    in.batch = {numbers_view<space>(lengths_, rows_.n), numbers_view<space>(requests_, rows_.n),
                table(), table()};
    in.attention = {query_view<space>(tensors.q, rows_), caches_.kv(call.layer), plan_.scale, {}};
    in.indexer = {query_view<space>(tensors.index_q, rows_),
                  weights_view<space>(tensors.weights, rows_), caches_.index_keys(source)};
    require(layer(call.layer)
                .run(place_.exec(call.stream), in, *state_,
                     {output_view<space>(tensors.out, rows_)},
                     {scratch_.data(), scratch_.bytes()}));
  }

  SelectionRows selection(Call const&) const override {
    return {(*state_).selection().indices.data_handle(), sizes_.top_k};
  }

 private:
  static constexpr Space space = Place::space;
  using Layer = indexshare::SparseAttentionLayer<
      indexshare::ReluDotIndexer<indexshare::bf16, typename Caches::IndexKeys>,
      indexshare::RadixTopK, indexshare::EveryLayer,
      indexshare::SparseMla<indexshare::bf16, typename Caches::Kv>>;

  Layer layer(int number) const {
    return {.share = {.layers = plan_.schedule.total_layers()},
            .shape = shape_of(sizes_),
            .layer = number};
  }
  indexshare::PageTable<space> table() const {
    return indexshare::make_contiguous_table<space>(indexshare::Keys{sizes_.keys});
  }

  Place place_;
  Sizes sizes_;
  AttentionPlan plan_;
  LayerCaches<space, Caches> caches_;
  Tensor<std::int32_t> positions_, lengths_, requests_;
  Tensor<std::byte> scratch_;
  OwnedSelection<space> state_;
  indexshare::Rows rows_{0};
  int anchor_ = 0;  // the last row of the forward
  std::int64_t forward_ = 0;
};

}  // namespace mini
