// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/dims.hpp>
#include <indexshare/element.hpp>
#include <indexshare/io/safetensors.hpp>
#include <indexshare/io/safetensors_format.hpp>

#include <cuda/std/expected>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <system_error>
#include <type_traits>
#include <utility>
#include <vector>

#include "recording_quantities.hpp"
#include "recording_writer.hpp"

/// @file Reads a recording of sparse-attention layers. Everything that can be wrong with one is
/// found when it is opened; after that, reading cannot fail.

namespace programs {

/// Multiplies by the Sylvester Hadamard matrix of the lanes' number, scaled by its number^-0.5: its
/// own inverse.
/// @pre the number of lanes is a power of two
inline void hadamard(std::span<double> lanes) {
  for (std::size_t step = 1; step < lanes.size(); step *= 2) {
    for (std::size_t i = 0; i < lanes.size(); ++i) {
      if ((i & step) != 0) continue;
      double const low = lanes[i];
      double const high = lanes[i + step];
      lanes[i] = low + high;
      lanes[i + step] = low - high;
    }
  }
  double const scale = 1 / std::sqrt(static_cast<double>(lanes.size()));
  for (double& lane : lanes) lane *= scale;
}

/// Lanes with all evens before all odds, back to the order of the interleaved layout.
inline void interleave(std::span<double> lanes) {
  std::vector<double> const halves(lanes.begin(), lanes.end());
  std::size_t const pairs = lanes.size() / 2;
  for (std::size_t i = 0; i < pairs; ++i) {
    lanes[2 * i] = halves[i];
    lanes[2 * i + 1] = halves[pairs + i];
  }
}

enum class IndexBasis { natural, hadamard };

/// How a tensor's heads become those of the in-place lane order.
struct LaneOrder {
  std::size_t first = 0;         ///< the rotated lanes that lie evens then odds
  std::size_t count = 0;         ///< 0: nothing to do
  bool behind_hadamard = false;  ///< the order is that of the lanes before the transform

  void apply(std::span<double> lanes) const {
    if (count == 0) return;
    if (behind_hadamard) hadamard(lanes);
    interleave(lanes.subspan(first, count));
    if (behind_hadamard) hadamard(lanes);
  }
};

/// A float tensor of a recording. Belongs to the recording. A slice is one token's or row's part.
class RecordedTensor {
 public:
  RecordedTensor(indexshare::io::SafetensorsEntry const& entry, LaneOrder order)
      : entry_(&entry), order_(order) {}

  std::vector<indexshare::index_t> const& shape() const { return entry_->shape; }
  std::string const& dtype() const { return entry_->dtype; }
  bool is_16_bit() const { return dtype() == "BF16" || dtype() == "F16"; }

  std::size_t slices() const { return static_cast<std::size_t>(shape()[0]); }
  std::size_t lanes() const { return static_cast<std::size_t>(shape().back()); }
  std::size_t heads() const {
    return shape().size() == 3 ? static_cast<std::size_t>(shape()[1]) : 1;
  }
  std::size_t slice_size() const { return heads() * lanes(); }

  /// [heads, lanes] of one token or row, rotated lanes in place.
  void read_slice(std::size_t number, std::span<double> out) const {
    if (dtype() == "F32") decode<float>(number, out);
    if (dtype() == "F64") decode<double>(number, out);
    if (dtype() == "BF16") decode<indexshare::bf16>(number, out);
    if (dtype() == "F16") decode<indexshare::fp16>(number, out);
    for (std::size_t head = 0; head < heads(); ++head)
      order_.apply(out.subspan(head * lanes(), lanes()));
  }

  /// All elements, row-major.
  template <class T>
  std::vector<T> values() const {
    std::vector<T> all;
    all.reserve(slices() * slice_size());
    std::vector<double> slice(slice_size());
    for (std::size_t number = 0; number < slices(); ++number) {
      read_slice(number, slice);
      for (double const value : slice) all.push_back(static_cast<T>(value));
    }
    return all;
  }

 private:
  template <class T>
  void decode(std::size_t number, std::span<double> out) const {
    std::byte const* const data = entry_->data + number * slice_size() * sizeof(T);
    for (std::size_t i = 0; i < slice_size(); ++i) {
      T value;  // the data may be unaligned
      std::memcpy(&value, data + i * sizeof(T), sizeof(T));
      if constexpr (std::is_same_v<T, double>)
        out[i] = value;
      else
        out[i] = indexshare::to_float(value);
    }
  }

  indexshare::io::SafetensorsEntry const* entry_;
  LaneOrder order_;
};

/// Where a token stands.
struct TokenPlace {
  std::int32_t request = 0;
  indexshare::index_t position = 0;  ///< in its request, from 0: what selections hold
  std::int32_t rotary = 0;           ///< as the rotary embedding counts
};

/// An opened recording. Moves, but does not copy.
class Recording {
 public:
  using Error = indexshare::io::SafetensorsError;
  template <class T>
  using Expected = cuda::std::expected<T, Error>;

  /// Errors name file, tensor, what was there and what was expected.
  static Expected<Recording> open(std::string const& path) {
    return check(path, indexshare::io::SafetensorsFile::open(path));
  }
  /// @param name  what errors call the content
  static Expected<Recording> parse(std::string name, std::string const& content) {
    auto file = indexshare::io::SafetensorsFile::parse(name, content);
    return check(std::move(name), std::move(file));
  }

  std::string const& name() const { return name_; }
  std::map<std::string, std::string> const& metadata() const { return file_.metadata(); }
  IndexBasis index_basis() const { return basis_; }
  /// `lse` and what follows was computed over another recording's selection, not this one's.
  bool attends_recorded() const { return attends_recorded_; }

  std::size_t tokens() const { return tokens_.size(); }
  std::size_t rows() const { return rows_.size(); }
  TokenPlace const& place(std::size_t token) const { return tokens_[token]; }
  std::size_t token_of(std::size_t row) const { return static_cast<std::size_t>(rows_[row]); }
  std::vector<std::int32_t> const& row_tokens() const { return rows_; }
  /// Keys that a row may select, itself included.
  std::size_t visible_keys(std::size_t row) const {
    return static_cast<std::size_t>(place(token_of(row)).position) + 1;
  }

  /// The layers that have at least one quantity, ascending.
  std::set<std::int32_t> const& layers() const { return layers_; }
  bool has(std::int32_t layer, Quantity id) const { return file_.has(tensor_name(layer, id)); }

  /// A quantity, except `selection`. @pre has(layer, id)
  RecordedTensor tensor(std::int32_t layer, Quantity id) const {
    return {file_.tensors().at(tensor_name(layer, id)), order_of(layer, id)};
  }

  /// The positions that a row selected, ascending. @pre has(layer, Quantity::selection)
  std::vector<std::int32_t> selection(std::int32_t layer, std::size_t row) const {
    auto const& entry = file_.tensors().at(tensor_name(layer, Quantity::selection));
    auto const width = static_cast<std::size_t>(entry.shape[1]);
    std::vector<std::int32_t> chosen(width);
    std::memcpy(chosen.data(), entry.data + row * width * sizeof(std::int32_t),
                width * sizeof(std::int32_t));
    std::erase_if(chosen, [](std::int32_t position) { return position < 0; });
    std::sort(chosen.begin(), chosen.end());
    return chosen;
  }

 private:
  Recording(std::string name, indexshare::io::SafetensorsFile file)
      : name_(std::move(name)), file_(std::move(file)) {}

  static Expected<Recording> check(std::string name,
                                   Expected<indexshare::io::SafetensorsFile> file) {
    if (!file) return cuda::std::unexpected(file.error());
    Recording recording(std::move(name), std::move(*file));
    for (auto const step :
         {&Recording::check_metadata, &Recording::read_tokens, &Recording::read_rows,
          &Recording::check_tensors, &Recording::check_lane_orders, &Recording::check_selections})
      if (auto const checked = (recording.*step)(); !checked)
        return cuda::std::unexpected(checked.error());
    return recording;
  }

  cuda::std::unexpected<Error> fail(std::string tensor, std::string got,
                                    std::string expected) const {
    return cuda::std::unexpected(
        Error{name_, std::move(tensor), std::move(got), std::move(expected)});
  }

  // ---- metadata

  std::optional<std::string> text(char const* key) const {
    auto const found = metadata().find(key);
    return found == metadata().end() ? std::nullopt : std::optional(found->second);
  }

  /// Whether `key` has the text `yes`; absent is `no`.
  Expected<bool> flag(char const* key, char const* no, char const* yes) const {
    std::string const value = text(key).value_or(no);
    if (value != no && value != yes)
      return fail("__metadata__", std::string(key) + " \"" + value + "\"",
                  std::string(no) + " or " + yes);
    return value == yes;
  }

  Expected<void> check_metadata() {
    auto const format = text("format");
    if (!format || *format != recording_format)
      return fail("__metadata__", format ? "format \"" + *format + "\"" : "no format",
                  "format \"" + std::string(recording_format) + "\"");
    auto const rotated = flag("rotated_lanes", "in_place", "evens_then_odds");
    if (!rotated) return cuda::std::unexpected(rotated.error());
    auto const index_rotated = flag("index_rotated_lanes", "in_place", "evens_then_odds");
    if (!index_rotated) return cuda::std::unexpected(index_rotated.error());
    auto const transformed = flag("index_basis", "natural", "hadamard");
    if (!transformed) return cuda::std::unexpected(transformed.error());
    auto const recorded = flag("attention_selection", "own", "recorded");
    if (!recorded) return cuda::std::unexpected(recorded.error());
    attends_recorded_ = *recorded;
    reorder_ = *rotated;
    basis_ = *transformed ? IndexBasis::hadamard : IndexBasis::natural;
    return *index_rotated ? read_index_rope() : Expected<void>();
  }

  /// Which lanes of an index head are rotated; must be stated where their order is not in place.
  Expected<void> read_index_rope() {
    std::string const lanes = text("index_rope_dims").value_or("");
    std::size_t count = 0;
    auto const [end, error] = std::from_chars(lanes.data(), lanes.data() + lanes.size(), count);
    if (error != std::errc() || end != lanes.data() + lanes.size() || count == 0 || count % 2 != 0)
      return fail("__metadata__", "index_rope_dims \"" + lanes + "\"",
                  "an even number of lanes, as index_rotated_lanes is evens_then_odds");
    if (!text("index_rope_lanes"))
      return fail("__metadata__", "no index_rope_lanes",
                  "first or last, as index_rotated_lanes is evens_then_odds");
    auto const last = flag("index_rope_lanes", "first", "last");
    if (!last) return cuda::std::unexpected(last.error());
    index_rope_lanes_ = count;
    index_rope_last_ = *last;
    return {};
  }

  // ---- tokens and rows

  Expected<std::vector<std::int32_t>> numbers(char const* tensor) const {
    auto values = file_.read<std::int32_t>(tensor);
    if (!values) return values;
    auto const& shape = file_.tensors().at(tensor).shape;
    if (shape.size() != 1 || shape[0] == 0)
      return fail(tensor, "shape " + indexshare::io::shape_text(shape), "one extent of at least 1");
    return values;
  }

  Expected<void> read_tokens() {
    auto const positions = numbers("positions");
    if (!positions) return cuda::std::unexpected(positions.error());
    std::size_t const count = positions->size();
    std::vector<std::int32_t> requests(count, 0);
    if (file_.has("requests")) {
      auto stated = numbers("requests");
      if (!stated) return cuda::std::unexpected(stated.error());
      if (stated->size() != count)
        return fail("requests", std::to_string(stated->size()) + " tokens",
                    std::to_string(count) + ", as positions has");
      requests = std::move(*stated);
    }
    std::set<std::int32_t> seen;
    for (std::size_t token = 0; token < count; ++token) {
      std::string const where = " of token " + std::to_string(token);
      if ((*positions)[token] < 0)
        return fail("positions", std::to_string((*positions)[token]) + where, "at least 0");
      std::int32_t const request = requests[token];
      bool const goes_on = token > 0 && request == requests[token - 1];
      if (!goes_on && !seen.insert(request).second)
        return fail("requests", "request " + std::to_string(request) + where + ", after others",
                    "all tokens of a request behind each other");
      indexshare::index_t const position = goes_on ? tokens_.back().position + 1 : 0;
      tokens_.push_back({request, position, (*positions)[token]});
    }
    return {};
  }

  Expected<void> read_rows() {
    if (!file_.has("rows")) {
      for (std::size_t token = 0; token < tokens(); ++token)
        rows_.push_back(static_cast<std::int32_t>(token));
      return {};
    }
    auto stated = numbers("rows");
    if (!stated) return cuda::std::unexpected(stated.error());
    std::int32_t before = -1;
    for (std::int32_t const token : *stated) {
      if (token <= before)
        return fail("rows", std::to_string(token) + " after " + std::to_string(before),
                    "token numbers from 0, ascending");
      if (static_cast<std::size_t>(token) >= tokens())
        return fail("rows", "token " + std::to_string(token),
                    "below " + std::to_string(tokens()) + ", the number of positions");
      before = token;
    }
    rows_ = std::move(*stated);
    return {};
  }

  // ---- tensors of layers

  Expected<void> check_tensors() {
    for (auto const& [name, entry] : file_.tensors()) {
      if (name == "positions" || name == "requests" || name == "rows") continue;
      auto const place = parse_tensor_name(name);
      if (!place)
        return fail(name, "a name that the format does not have",
                    "positions, requests, rows or layerN.<quantity>");
      layers_.insert(place->layer);
    }
    for (std::int32_t const layer : layers_)
      if (auto const checked = check_layer(layer); !checked) return checked;
    return {};
  }

  /// An extent that was met, and where.
  struct Met {
    indexshare::index_t value;
    std::string source;
  };
  using Extents = std::map<Extent, Met>;

  Expected<void> check_layer(std::int32_t layer) const {
    Extents extents{
        {Extent::tokens, {static_cast<indexshare::index_t>(tokens()), "positions"}},
        {Extent::rows,
         {static_cast<indexshare::index_t>(rows()), file_.has("rows") ? "rows" : "positions"}}};
    for (QuantitySpec const& spec : quantities) {
      if (!has(layer, spec.id)) continue;
      if (auto const checked = check_tensor(layer, spec, extents); !checked) return checked;
    }
    return check_sums(layer, extents);
  }

  Expected<void> check_tensor(std::int32_t layer, QuantitySpec const& spec,
                              Extents& extents) const {
    std::string const name = tensor_name(layer, spec.id);
    auto const& entry = file_.tensors().at(name);
    bool const whole = spec.id == Quantity::selection;
    bool const is_float = entry.dtype == "F32" || entry.dtype == "BF16" || entry.dtype == "F16" ||
                          entry.dtype == "F64";
    if (whole ? entry.dtype != "I32" : !is_float)
      return fail(name, "dtype " + entry.dtype, whole ? "I32" : "F32, BF16, F16 or F64");
    if (entry.shape.size() != spec.rank())
      return fail(name, "shape " + indexshare::io::shape_text(entry.shape),
                  std::to_string(spec.rank()) + " extents");
    for (std::size_t i = 0; i < spec.rank(); ++i) {
      Extent const extent = spec.extents[i];
      auto const [met, is_new] = extents.emplace(extent, Met{entry.shape[i], name});
      std::string const got = "shape " + indexshare::io::shape_text(entry.shape);
      std::string const subject =
          std::string(extent_name(extent)) + " (extent " + std::to_string(i) + ")";
      if (entry.shape[i] < 1) return fail(name, got, "at least 1 of " + subject);
      if (met->second.value != entry.shape[i])
        return fail(
            name, got,
            std::to_string(met->second.value) + " " + subject + ", as in " + met->second.source);
    }
    if (spec.id == Quantity::scores && entry.shape[1] < longest())
      return fail(name, "shape " + indexshare::io::shape_text(entry.shape),
                  "at least " + std::to_string(longest()) + " keys, as a row sees so many");
    return {};
  }

  indexshare::index_t longest() const {
    std::size_t most = 0;
    for (std::size_t row = 0; row < rows(); ++row) most = std::max(most, visible_keys(row));
    return static_cast<indexshare::index_t>(most);
  }

  /// Extents that are made of others.
  Expected<void> check_sums(std::int32_t layer, Extents const& extents) const {
    auto const rope = extents.find(Extent::rope_dim);
    if (rope == extents.end()) return {};
    auto const query = extents.find(Extent::query_dim);
    if (query != extents.end() && query->second.value < rope->second.value)
      return fail(query->second.source, std::to_string(query->second.value) + " query lanes",
                  "at least the " + std::to_string(rope->second.value) + " rope lanes of " +
                      rope->second.source);
    auto const row = extents.find(Extent::kv_row);
    auto const latent = extents.find(Extent::kv_rank);
    if (row == extents.end() || latent == extents.end()) return {};
    indexshare::index_t const sum = latent->second.value + rope->second.value;
    if (row->second.value != sum)
      return fail(tensor_name(layer, Quantity::kv_a), std::to_string(row->second.value) + " lanes",
                  std::to_string(sum) + ", the latent and rope lanes of " + latent->second.source +
                      " and " + rope->second.source);
    return {};
  }

  // ---- lane orders

  static bool is_index_vector(Quantity id) {
    return id == Quantity::index_q || id == Quantity::index_k;
  }

  LaneOrder order_of(std::int32_t layer, Quantity id) const {
    auto const lanes =
        static_cast<std::size_t>(file_.tensors().at(tensor_name(layer, id)).shape.back());
    if (reorder_ && (id == Quantity::q_rope || id == Quantity::k_rope)) return {0, lanes, false};
    if (index_rope_lanes_ == 0 || !is_index_vector(id)) return {};
    std::size_t const first = index_rope_last_ ? lanes - index_rope_lanes_ : 0;
    return {first, index_rope_lanes_, basis_ == IndexBasis::hadamard};
  }

  Expected<void> check_lane_orders() {
    for (std::int32_t const layer : layers_) {
      for (Quantity const id :
           {Quantity::q_rope, Quantity::k_rope, Quantity::index_q, Quantity::index_k}) {
        if (!has(layer, id)) continue;
        if (auto const checked = check_lane_order(layer, id); !checked) return checked;
      }
    }
    return {};
  }

  Expected<void> check_lane_order(std::int32_t layer, Quantity id) const {
    std::string const name = tensor_name(layer, id);
    auto const lanes = static_cast<std::size_t>(file_.tensors().at(name).shape.back());
    std::string const got = std::to_string(lanes) + " lanes";
    if (!is_index_vector(id)) {
      if (reorder_ && lanes % 2 != 0)
        return fail(name, got, "an even number, as rotated_lanes is evens_then_odds");
      return {};
    }
    if (lanes < index_rope_lanes_)
      return fail(name, got,
                  "at least the " + std::to_string(index_rope_lanes_) + " of index_rope_dims");
    if (basis_ == IndexBasis::hadamard && (lanes & (lanes - 1)) != 0)
      return fail(name, got, "a power of two, as index_basis is hadamard");
    return {};
  }

  // ---- selections

  Expected<void> check_selections() {
    for (std::int32_t const layer : layers_) {
      if (!has(layer, Quantity::selection)) continue;
      for (std::size_t row = 0; row < rows(); ++row) {
        auto const chosen = selection(layer, row);
        std::string const where = " in row " + std::to_string(row);
        std::size_t const visible = visible_keys(row);
        if (!chosen.empty() && static_cast<std::size_t>(chosen.back()) >= visible)
          return fail(tensor_name(layer, Quantity::selection),
                      "position " + std::to_string(chosen.back()) + where,
                      "below " + std::to_string(visible) + ", its visible keys");
        if (auto const twice = std::adjacent_find(chosen.begin(), chosen.end());
            twice != chosen.end())
          return fail(tensor_name(layer, Quantity::selection),
                      "position " + std::to_string(*twice) + " twice" + where, "it once");
      }
    }
    return {};
  }

  std::string name_;
  indexshare::io::SafetensorsFile file_;
  bool reorder_ = false;              ///< q_rope and k_rope lie evens then odds
  std::size_t index_rope_lanes_ = 0;  ///< of index_q and index_k, if those do
  bool index_rope_last_ = false;
  IndexBasis basis_ = IndexBasis::natural;
  bool attends_recorded_ = false;
  std::vector<TokenPlace> tokens_;
  std::vector<std::int32_t> rows_;
  std::set<std::int32_t> layers_;
};

/// A fingerprint (FNV-1a) of the selections of some layers: says whether a run attended over those
/// of this file. @pre all of the layers have one
template <class Layers>
std::string selection_fingerprint(Recording const& recording, Layers const& layers) {
  std::uint64_t hash = 14695981039346656037u;
  auto const add = [&hash](std::int64_t number) {
    for (int byte = 0; byte < 8; ++byte) {
      hash = (hash ^ (static_cast<std::uint64_t>(number) >> (8 * byte) & 0xFF)) * 1099511628211u;
    }
  };
  for (std::int32_t const layer : layers) {
    for (std::size_t row = 0; row < recording.rows(); ++row) {
      add(-1 - std::int64_t{layer});
      for (std::int32_t const position : recording.selection(layer, row)) add(position);
    }
  }
  char text[20];
  std::snprintf(text, sizeof text, "%016llx", static_cast<unsigned long long>(hash));
  return text;
}

}  // namespace programs
