// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/element.hpp>
#include <indexshare/frontend/weights.hpp>
#include <indexshare/host/memory.hpp>
#include <indexshare/io/checkpoint.hpp>
#include <indexshare/io/checkpoint_error.hpp>
#include <indexshare/io/detail/attention_tensors.hpp>
#include <indexshare/io/detail/layer_numbers.hpp>
#include <indexshare/io/detail/layer_reader.hpp>
#include <indexshare/model_config.hpp>
#include <indexshare/share_plan.hpp>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace indexshare {
inline namespace v0 {
namespace io {

/// The self-attention weights of one layer, made by `load_layer`. Moves, but does not copy; moving
/// leaves the views valid.
///
/// A view points into the checkpoint's mapped file where the tensor lies there as it is needed
/// (right element type, aligned), so the Checkpoint must outlive the layer; everything else was
/// converted into memory of the layer's own.
template <Element W>
class LoadedLayer {
 public:
  LoadedLayer(LoadedLayer&&) = default;
  LoadedLayer& operator=(LoadedLayer&&) = default;

  std::int32_t layer() const noexcept { return layer_; }

  /// The weights; `indexer` is set on full layers and nowhere else.
  AttentionWeights<Space::host, W> const& views() const noexcept { return views_; }

  /// Full names of the tensors of an indexer that the checkpoint has for a shared layer. The
  /// schedule says that the layer has no indexer, so they were not used.
  std::vector<std::string> const& ignored() const noexcept { return ignored_; }

  /// Bytes of converted tensors. What the views read from the file is not among them.
  std::size_t owned_bytes() const noexcept {
    std::size_t bytes = 0;
    for (HostMemory const& memory : owned_) bytes += memory.view().bytes;
    return bytes;
  }

 private:
  template <Element V>
  friend CheckpointResult<LoadedLayer<V>> load_layer(Checkpoint const&, ModelConfig const&,
                                                     SharePlan const&, std::int32_t);
  LoadedLayer() = default;

  std::int32_t layer_ = -1;
  AttentionWeights<Space::host, W> views_;
  std::vector<HostMemory> owned_;
  std::vector<std::string> ignored_;
};

namespace detail {

/// The walk over a layer's tensors. Fills `views` and `owned`, or, with a null `owned`, only looks.
/// Returns the names of surplus tensors.
template <Element W>
CheckpointResult<std::vector<std::string>> read_layer(Checkpoint const& checkpoint,
                                                      ModelConfig const& config,
                                                      SharePlan const& plan, std::int32_t layer,
                                                      AttentionWeights<Space::host, W>& views,
                                                      std::vector<HostMemory>* owned) {
  auto const refuse_layer = [layer](CheckpointError error) {
    error.layer = layer;
    return refuse(std::move(error));
  };
  if (auto const fits = check_model(config, plan); !fits) return refuse_layer(fits.error());
  LayerRole const role = plan.role(layer);
  if (role == LayerRole::none) {
    return refuse_layer(
        {"", layer, "", plan.contains(layer) ? "a layer without sparse attention" : "no such layer",
         "a full or shared layer below " + std::to_string(plan.total_layers())});
  }
  LayerReader reader(checkpoint, config, plan, layer, owned);
  auto surplus = reader.check_names();
  if (!surplus) return refuse_layer(std::move(surplus.error()));
  visit_attention_tensors(config, views, reader);
  if (role == LayerRole::full) visit_indexer_tensors(config, views.indexer.emplace(), reader);
  if (reader.error()) return refuse_layer(*reader.error());
  return surplus;
}

}  // namespace detail

/// Loads the self-attention of a layer; MTP layers count on from the trunk. The schedule, never the
/// presence of tensors, decides whether the layer has an indexer.
///
/// Matrices become `W`, rounded once to nearest even, from BF16, F16, F32 or F8_E4M3 with block
/// scales; norm gains, biases, sinks and weights_proj become float. docs/checkpoints.md has the
/// names and all rules.
///
/// @param W any element type with a `from_float`, but not fp8
/// Errors: a plan or widths that are not the config's, or a model that `can_run` refuses; a layer
/// that does not exist or has no sparse attention; a tensor that is missing, has two names, or is
/// not known below self_attn; another dtype or shape; fp8 without its scales or scales without fp8;
/// a scale that is not positive and finite; a NaN in fp8; a value that does not fit `W`; what
/// Checkpoint::find refuses. Throws std::bad_alloc.
template <Element W>
CheckpointResult<LoadedLayer<W>> load_layer(Checkpoint const& checkpoint, ModelConfig const& config,
                                            SharePlan const& plan, std::int32_t layer) {
  static_assert(!std::same_as<W, e4m3>, "fp8 weights are of no use without their scales");
  LoadedLayer<W> loaded;
  loaded.layer_ = layer;
  auto surplus = detail::read_layer(checkpoint, config, plan, layer, loaded.views_, &loaded.owned_);
  if (!surplus) return detail::refuse(std::move(surplus.error()));
  loaded.ignored_ = std::move(*surplus);
  return loaded;
}

/// Whether `load_layer` would find the layer's tensors: names, types, shapes, block scales.
/// Elements are not read, so that a program can check all its layers before it begins. Opens the
/// files that hold them. Errors: those of `load_layer` but for the values of elements.
inline CheckpointResult<void> check_layer(Checkpoint const& checkpoint, ModelConfig const& config,
                                          SharePlan const& plan, std::int32_t layer) {
  AttentionWeights<Space::host, float> unused;
  auto const surplus = detail::read_layer(checkpoint, config, plan, layer, unused, nullptr);
  if (!surplus) return detail::refuse(surplus.error());
  return {};
}

/// A checkpoint that is gone when the call returns would leave views into nothing.
template <Element W>
CheckpointResult<LoadedLayer<W>> load_layer(Checkpoint const&&, ModelConfig const&,
                                            SharePlan const&, std::int32_t) = delete;

/// Numbers, ascending, of the layers that have self-attention tensors which `load_layer` reads for
/// no layer of the plan: say, an MTP layer that the config does not count. Opens no file that is
/// not open.
inline std::vector<std::int32_t> unused_layers(Checkpoint const& checkpoint,
                                               SharePlan const& plan) {
  return detail::layers_outside(checkpoint, plan);
}

}  // namespace io
}  // namespace v0
}  // namespace indexshare
