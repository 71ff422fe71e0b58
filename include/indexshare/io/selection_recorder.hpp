// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/dims.hpp>
#include <indexshare/indexcache/overlap_counts.hpp>
#include <indexshare/io/safetensors_format.hpp>
#include <indexshare/io/safetensors_writer.hpp>
#include <indexshare/io/selection_format.hpp>
#include <indexshare/selection.hpp>
#include <indexshare/share/schedule.hpp>
#include <indexshare/status.hpp>
#include <indexshare/views.hpp>

#include <cuda/std/expected>

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

namespace indexshare {
inline namespace v0 {
namespace io {

/// Collects what layers selected, forward after forward, and writes it as one file of recorded
/// selections. For each forward: `begin_forward`, then `add` after each layer that is to be
/// recorded. Every forward records the same layers.
///
/// To find out which layers could share, run the model with every layer full and record all of
/// them. In a model that shares, record the full layers: a shared layer may be added too, its state
/// then holds its source's selection once more.
///
/// Memory: 4 bytes per entry, 0.6 MiB for a row of 78 layers with top_k 2048. Write a file per
/// sample, or every so many rows.
class SelectionRecorder {
 public:
  /// @param layers  of the model: layer numbers are below it
  /// Errors: bad_value for layers that are not in [1, max_schedule_layers], and for a top_k that is
  /// not in [1, overlap_context_limit].
  static Result<SelectionRecorder> make(std::int32_t layers, TopK top_k) {
    if (layers < 1 || layers > max_schedule_layers) {
      return refuse(failure(Errc::bad_value, "layers of a SelectionRecorder, at most",
                            max_schedule_layers, layers));
    }
    if (top_k.n < 1 || top_k.n > indexcache::overlap_context_limit) {
      return refuse(failure(Errc::bad_value, "top_k of a SelectionRecorder, at most",
                            indexcache::overlap_context_limit, top_k.n));
    }
    return SelectionRecorder(layers, top_k.n);
  }

  /// Starts a forward. @param lengths  visible keys of each of its rows, [rows]
  /// Errors: bad_value for a length outside [0, overlap_context_limit]; those of `complete`, which
  /// leave the recorder as it is.
  Status begin_forward(LengthView<Space::host> lengths) {
    if (Status const status = complete(); !status.ok()) return status;
    for (index_t row = 0; row < lengths.extent(0); ++row) {
      if (lengths(row) < 0 || lengths(row) > indexcache::overlap_context_limit) {
        return failure(Errc::bad_value, "length of a recorded row, at most",
                       indexcache::overlap_context_limit, lengths(row));
      }
    }
    for (index_t row = 0; row < lengths.extent(0); ++row) lengths_.push_back(lengths(row));
    forward_rows_ = lengths.extent(0);
    return {};
  }

  /// Records what `layer` reads in this forward.
  /// Errors, with nothing recorded: stale_selection if the state holds none; those of the overload
  /// below.
  Status add(std::int32_t layer, SelectionState<Space::host> const& state) {
    if (state.tag().source_layer == no_position) {
      return failure(Errc::stale_selection, "the state to record holds no selection")
          .at_layer(layer);
    }
    return add(layer, state.selection());
  }

  /// Errors, with nothing recorded: bad_value for a layer that the model does not have, that was
  /// added in this forward already or is not among those of the first forward, and for a count
  /// outside [0, top_k]; bad_shape for other rows than the forward's or another top_k. What the
  /// selection holds is checked when the file is read.
  Status add(std::int32_t layer, SelectionView<Space::host, position_t const> selection) {
    if (Status const status = check(layer, selection); !status.ok()) return status.at_layer(layer);
    std::vector<position_t>& rows = positions_[layer];
    for (index_t row = 0; row < selection.indices.extent(0); ++row) {
      for (index_t i = 0; i < top_k_; ++i) {
        rows.push_back(i < selection.counts(row) ? selection.indices(row, i) : no_position);
      }
    }
    return {};
  }

  /// Rows of all forwards, with the one that is being recorded.
  index_t rows() const noexcept { return static_cast<index_t>(lengths_.size()); }

  /// Whether each layer has every row. Errors: bad_shape, with the first layer that lacks some.
  Status complete() const noexcept {
    for (auto const& [layer, entries] : positions_) {
      if (rows_of(entries) != rows()) {
        return failure(Errc::bad_shape, "rows that were recorded of a layer, in all forwards",
                       rows(), rows_of(entries))
            .at_layer(layer);
      }
    }
    if (positions_.empty() && rows() > 0) {
      return failure(Errc::bad_shape, "layers that were recorded in the first forward", 1, 0);
    }
    return {};
  }

  /// Writes the file, replacing one of that name only when all is written. Errors: nothing was
  /// recorded; those of `complete`; a file that cannot be written.
  /// @param producer  free text that the file carries
  [[nodiscard]] cuda::std::expected<void, SafetensorsError> write(
      std::string const& path, std::string const& producer = "indexshare") const {
    if (positions_.empty()) return fail({path, "", "no layer in the recorder", "at least one"});
    if (Status const status = complete(); !status.ok()) {
      return fail({path, selection_tensor_name(status.layer), std::to_string(status.got) + " rows",
                   std::to_string(status.expected) + ", as many as the forwards had"});
    }
    SafetensorsWriter writer;
    writer.metadata("format", std::string(selection_format));
    writer.metadata("layers", std::to_string(layers_));
    writer.metadata("top_k", std::to_string(top_k_));
    writer.metadata("producer", producer);
    writer.add_view(std::string(selection_lengths_name), {rows()}, std::span(lengths_));
    for (auto const& [layer, entries] : positions_) {
      writer.add_view(selection_tensor_name(layer), {rows(), top_k_}, std::span(entries));
    }
    return writer.write(path);
  }

 private:
  SelectionRecorder(std::int32_t layers, index_t top_k) : layers_(layers), top_k_(top_k) {}

  static cuda::std::unexpected<SafetensorsError> fail(SafetensorsError error) {
    return cuda::std::unexpected<SafetensorsError>(std::move(error));
  }

  index_t rows_of(std::vector<position_t> const& entries) const noexcept {
    return static_cast<index_t>(entries.size()) / top_k_;
  }

  Status check(std::int32_t layer,
               SelectionView<Space::host, position_t const> const& selection) const {
    if (layer < 0 || layer >= layers_) {
      return failure(Errc::bad_value, "layer to record, below", layers_, layer);
    }
    if (selection.indices.extent(1) != top_k_) {
      return failure(Errc::bad_shape, "top_k of a selection to record", top_k_,
                     selection.indices.extent(1));
    }
    if (selection.indices.extent(0) != forward_rows_) {
      return failure(Errc::bad_shape, "rows of a selection to record, against begin_forward",
                     forward_rows_, selection.indices.extent(0));
    }
    if (selection.counts.extent(0) != forward_rows_) {
      return failure(Errc::bad_shape, "counts of a selection to record, against begin_forward",
                     forward_rows_, selection.counts.extent(0));
    }
    index_t const before = rows() - forward_rows_;
    auto const found = positions_.find(layer);
    index_t const recorded = found == positions_.end() ? 0 : rows_of(found->second);
    if (recorded > before) {
      return failure(Errc::bad_value, "layer to record was added in this forward already");
    }
    if (recorded < before) {
      return failure(Errc::bad_value, "layer to record is not among those of the first forward");
    }
    for (index_t row = 0; row < forward_rows_; ++row) {
      if (selection.counts(row) < 0 || selection.counts(row) > top_k_) {
        return failure(Errc::bad_value, "count of a selection to record, at most", top_k_,
                       selection.counts(row));
      }
    }
    return {};
  }

  std::int32_t layers_;
  index_t top_k_;
  index_t forward_rows_ = 0;  // of the forward that is being recorded
  std::vector<position_t> lengths_;
  std::map<std::int32_t, std::vector<position_t>> positions_;  // by layer: [rows, top_k]
};

}  // namespace io
}  // namespace v0
}  // namespace indexshare
