// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/dims.hpp>
#include <indexshare/indexcache/overlap_counts.hpp>
#include <indexshare/io/safetensors.hpp>
#include <indexshare/io/safetensors_format.hpp>
#include <indexshare/io/selection_format.hpp>
#include <indexshare/share/schedule.hpp>
#include <indexshare/views.hpp>

#include <cuda/std/expected>

#include <algorithm>
#include <charconv>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

/// @file Reads recorded selections.

namespace indexshare {
inline namespace v0 {
namespace io {

/// Some rows of a file, copied and checked. Reuse it for the next rows: it keeps its memory.
class SelectionRows {
 public:
  /// [layers, rows, top_k] and [rows], valid until the next rows are read.
  indexcache::LayerSelections view() const noexcept {
    indexcache::LayerSelections view;
    view.positions =
        make_dense<Space::host, position_t const, 3>(positions_.data(), {layers_, rows_, top_k_});
    view.lengths =
        make_lengths<Space::host>(lengths_.data(), Rows{static_cast<index_t>(lengths_.size())});
    return view;
  }

 private:
  friend class SelectionFile;

  index_t layers_ = 0;
  index_t rows_ = 0;
  index_t top_k_ = 0;
  std::vector<position_t> positions_;
  std::vector<position_t> lengths_;
  std::vector<std::uint64_t> seen_;  // scratch: a bit per position, all 0 between rows
};

/// A file of recorded selections: which positions each layer selected for each row of one sample.
/// Moves, but does not copy. What it says about itself is checked when it is opened, the selections
/// when they are read. The file is mapped: see SafetensorsFile for what must not happen to it.
class SelectionFile {
 public:
  using Error = SafetensorsError;
  template <class T>
  using Expected = cuda::std::expected<T, Error>;

  /// Errors: those of SafetensorsFile::open; another format; metadata that are missing or no
  /// number; a tensor that is not of the layout, has another element type or other rows; no layer;
  /// a negative length.
  static Expected<SelectionFile> open(std::string const& path) {
    auto file = SafetensorsFile::open(path);
    if (!file) return fail(std::move(file.error()));
    return make(path, std::move(*file));
  }

  /// The same for a content in memory, which is copied. @param name  what errors call it
  static Expected<SelectionFile> parse(std::string name, std::string const& content) {
    auto file = SafetensorsFile::parse(name, content);
    if (!file) return fail(std::move(file.error()));
    return make(std::move(name), std::move(*file));
  }

  std::string const& name() const noexcept { return name_; }
  /// Layers of the model, recorded or not: numbers are below this.
  std::int32_t model_layers() const noexcept { return model_layers_; }
  /// Numbers of the recorded layers, ascending; at least one.
  std::vector<std::int32_t> const& layers() const noexcept { return layers_; }
  index_t top_k() const noexcept { return top_k_; }
  index_t rows() const noexcept { return rows_; }
  /// Whether the file says how many keys each row sees.
  bool has_lengths() const noexcept { return has_lengths_; }

  /// Copies rows [first, first + count) of every layer. Several threads may read at once, each into
  /// its own SelectionRows. Errors: an entry below -1; a position that the row does not see, or at
  /// or past `overlap_context_limit` where lengths are not recorded; a position twice in a row.
  /// Precondition: 0 <= first, 0 <= count, first + count <= rows().
  Expected<void> read_rows(index_t first, index_t count, SelectionRows& into) const {
    into.layers_ = static_cast<index_t>(layers_.size());
    into.rows_ = count;
    into.top_k_ = top_k_;
    into.lengths_.resize(static_cast<std::size_t>(has_lengths_ ? count : 0));
    copy(std::string(selection_lengths_name), first, 1, into.lengths_);
    auto const per_layer = static_cast<std::size_t>(count * top_k_);
    into.positions_.resize(layers_.size() * per_layer);
    for (std::size_t i = 0; i < layers_.size(); ++i) {
      std::string const tensor = selection_tensor_name(layers_[i]);
      std::span<position_t> const rows =
          std::span(into.positions_).subspan(i * per_layer, per_layer);
      copy(tensor, first, top_k_, rows);
      for (index_t row = 0; row < count; ++row) {
        auto const entries =
            rows.subspan(static_cast<std::size_t>(row * top_k_), static_cast<std::size_t>(top_k_));
        index_t const limit = has_lengths_ ? into.lengths_[static_cast<std::size_t>(row)]
                                           : indexcache::overlap_context_limit;
        std::string const wrong = fault_of(entries, limit, into.seen_);
        if (!wrong.empty()) return fail(row_error(tensor, wrong, first + row, limit));
      }
    }
    return {};
  }

 private:
  SelectionFile(std::string name, SafetensorsFile file)
      : name_(std::move(name)), file_(std::move(file)) {}

  static cuda::std::unexpected<Error> fail(Error error) {
    return cuda::std::unexpected<Error>(std::move(error));
  }

  static Expected<SelectionFile> make(std::string name, SafetensorsFile file) {
    SelectionFile selections(std::move(name), std::move(file));
    if (auto const read = selections.read_metadata(); !read) return fail(read.error());
    if (auto const read = selections.read_tensors(); !read) return fail(read.error());
    if (auto const read = selections.check_lengths(); !read) return fail(read.error());
    return selections;
  }

  Expected<void> read_metadata() {
    auto const format = file_.metadata().find("format");
    if (format == file_.metadata().end() || format->second != selection_format) {
      std::string const found =
          format == file_.metadata().end() ? "no format" : "format " + format->second;
      return fail({name_, "__metadata__", found, "format " + std::string(selection_format)});
    }
    auto const layers = read_number("layers", max_schedule_layers);
    if (!layers) return fail(layers.error());
    model_layers_ = static_cast<std::int32_t>(*layers);
    auto const top_k = read_number("top_k", indexcache::overlap_context_limit);
    if (!top_k) return fail(top_k.error());
    top_k_ = *top_k;
    return {};
  }

  Expected<index_t> read_number(std::string const& key, index_t most) const {
    auto const found = file_.metadata().find(key);
    std::string const expected = key + " from 1 to " + std::to_string(most);
    if (found == file_.metadata().end())
      return fail({name_, "__metadata__", "no " + key, expected});
    std::string const& text = found->second;
    index_t number = 0;
    auto const [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
    if (error != std::errc() || end != text.data() + text.size() || number < 1 || number > most) {
      return fail({name_, "__metadata__", key + " " + text, expected});
    }
    return number;
  }

  Expected<void> read_tensors() {
    rows_ = -1;
    for (auto const& [tensor, entry] : file_.tensors()) {
      if (auto const fits = read_tensor(tensor, entry); !fits) return fits;
    }
    if (layers_.empty()) {
      return fail(
          {name_, "", "no selection", "a tensor " + selection_tensor_name(0) + " or another"});
    }
    std::sort(layers_.begin(), layers_.end());  // the names are in order of their text
    return {};
  }

  Expected<void> read_tensor(std::string const& tensor, SafetensorsEntry const& entry) {
    bool const lengths = tensor == selection_lengths_name;
    auto const layer = parse_selection_tensor_name(tensor);
    if (!lengths && (!layer || *layer >= model_layers_)) {
      return fail({name_, tensor, "a tensor of this name",
                   selection_tensor_name(0) + " to " + selection_tensor_name(model_layers_ - 1) +
                       " or " + std::string(selection_lengths_name)});
    }
    if (entry.dtype != "I32") return fail({name_, tensor, "dtype " + entry.dtype, "I32"});
    if (rows_ < 0 && !entry.shape.empty()) rows_ = entry.shape[0];
    std::vector<index_t> expected{rows_};
    if (!lengths) expected.push_back(top_k_);
    if (entry.shape != expected) {
      return fail({name_, tensor, "shape " + shape_text(entry.shape), expected_shape(lengths)});
    }
    has_lengths_ = has_lengths_ || lengths;
    if (layer) layers_.push_back(*layer);
    return {};
  }

  std::string expected_shape(bool lengths) const {
    std::string const rows = rows_ < 0 ? "rows" : std::to_string(rows_);
    if (lengths) return "shape [" + rows + "]";
    return "shape [" + rows + ", " + std::to_string(top_k_) + "], the same rows in every tensor";
  }

  Expected<void> check_lengths() const {
    if (!has_lengths_) return {};
    std::string const tensor(selection_lengths_name);
    std::vector<position_t> lengths(static_cast<std::size_t>(rows_));
    copy(tensor, 0, 1, lengths);
    for (std::size_t row = 0; row < lengths.size(); ++row) {
      if (lengths[row] < 0 || lengths[row] > indexcache::overlap_context_limit) {
        return fail({name_, tensor, std::to_string(lengths[row]) + " in row " + std::to_string(row),
                     "a number from 0 to " + std::to_string(indexcache::overlap_context_limit)});
      }
    }
    return {};
  }

  /// Elements from row `first` on, `columns` in each. The data may be unaligned.
  void copy(std::string const& tensor, index_t first, index_t columns,
            std::span<position_t> into) const {
    if (into.empty()) return;
    std::byte const* const data = file_.tensors().at(tensor).data;
    std::memcpy(into.data(), data + static_cast<std::size_t>(first * columns) * sizeof(position_t),
                into.size_bytes());
  }

  /// What is wrong with a row's entries, or nothing. @param limit  positions are below it
  static std::string fault_of(std::span<position_t const> entries, index_t limit,
                              std::vector<std::uint64_t>& seen) {
    position_t last = no_position;
    bool ascends = true;
    for (position_t const entry : entries) {
      if (entry < no_position || entry >= limit) return "entry " + std::to_string(entry);
      if (entry == no_position) continue;
      ascends = ascends && entry > last;
      last = entry;
    }
    return ascends ? std::string() : repeat_in(entries, seen);
  }

  /// The position that is there twice, in words, or nothing.
  static std::string repeat_in(std::span<position_t const> entries,
                               std::vector<std::uint64_t>& seen) {
    std::string repeat;
    for (position_t const entry : entries) {
      if (entry == no_position) continue;
      auto const position = static_cast<std::size_t>(entry);
      if (position / 64 >= seen.size()) seen.resize(position / 64 + 1);
      std::uint64_t const bit = std::uint64_t{1} << position % 64;
      if ((seen[position / 64] & bit) != 0 && repeat.empty()) {
        repeat = "position " + std::to_string(entry) + " twice";
      }
      seen[position / 64] |= bit;
    }
    for (position_t const entry : entries) {
      if (entry != no_position) seen[static_cast<std::size_t>(entry) / 64] = 0;
    }
    return repeat;
  }

  Error row_error(std::string const& tensor, std::string const& wrong, index_t row,
                  index_t limit) const {
    std::string const visible =
        has_lengths_ ? " (the row sees " + std::to_string(limit) + " keys)" : "";
    std::string const expected = limit == 0 ? "-1 alone"
                                            : "distinct positions from 0 to " +
                                                  std::to_string(limit - 1) + ", or -1 for none";
    return {name_, tensor, wrong + " in row " + std::to_string(row), expected + visible};
  }

  std::string name_;
  SafetensorsFile file_;
  std::int32_t model_layers_ = 0;
  index_t top_k_ = 0;
  index_t rows_ = 0;
  bool has_lengths_ = false;
  std::vector<std::int32_t> layers_;
};

}  // namespace io
}  // namespace v0
}  // namespace indexshare
