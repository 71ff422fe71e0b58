// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/element.hpp>
#include <indexshare/host/memory.hpp>
#include <indexshare/io/checkpoint.hpp>
#include <indexshare/io/checkpoint_error.hpp>
#include <indexshare/io/detail/attention_tensors.hpp>
#include <indexshare/io/detail/convert_weights.hpp>
#include <indexshare/io/safetensors_format.hpp>
#include <indexshare/share_plan.hpp>
#include <indexshare/views.hpp>

#include <cuda/std/array>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace indexshare {
inline namespace v0 {
namespace io::detail {

/// Reads the tensors of one self-attention module: a visitor of `visit_attention_tensors` and
/// `visit_indexer_tensors`. The first error counts, after it nothing is read.
class LayerReader {
 public:
  /// @param owned  takes the memory of converted tensors; null: names, types, shapes and block
  ///               scales are looked at, elements are not, and views stay as they are
  LayerReader(Checkpoint const& checkpoint, ModelConfig const& config, SharePlan const& plan,
              std::int32_t layer, std::vector<HostMemory>* owned)
      : checkpoint_(checkpoint), config_(config), plan_(plan), layer_(layer), owned_(owned) {}

  std::optional<CheckpointError> const& error() const noexcept { return error_; }

  /// Finds the module and looks at every name below it, before any tensor is read. Returns the
  /// names of an indexer that a shared layer has too much.
  CheckpointResult<std::vector<std::string>> check_names() {
    if (auto const found = find_module(); !found) return refuse(found.error());
    KnownNames const known(config_);
    std::vector<std::string> surplus;
    for (std::string& name : checkpoint_.names(module_)) {
      std::string const below = name.substr(module_.size());
      auto const is_in = [&](std::vector<std::string> const& names) {
        return std::find(names.begin(), names.end(), below) != names.end();
      };
      if (is_in(known.attention)) continue;
      if (!is_in(known.indexer)) {
        return refuse({checkpoint_.directory(), layer_, name, "an unknown tensor",
                       "only tensors that this model's self_attn is known to have"});
      }
      if (!plan_.is_full(layer_)) surplus.push_back(std::move(name));
    }
    return surplus;
  }

  template <class T, std::size_t N>
  void operator()(TensorName const& name, cuda::std::array<index_t, N> const& extents,
                  Tensor<Space::host, T const, N>& view) {
    if (error_) return;
    std::optional<std::string> const full_name = choose(name);
    if (!full_name) return;
    auto const tensor = checkpoint_.find(*full_name);
    if (!tensor) {
      error_ = tensor.error();
      return;
    }
    Source const source{*full_name, tensor->file, tensor->entry};
    if (!is_supported(source.entry.dtype, N)) {
      return fail(source, "dtype " + source.entry.dtype,
                  N == 2 ? "BF16, F16, F32 or F8_E4M3" : "BF16, F16 or F32");
    }
    std::vector<index_t> const wanted(extents.begin(), extents.end());
    if (source.entry.shape != wanted) {
      return fail(source, "shape " + shape_text(source.entry.shape), shape_text(wanted));
    }
    if (owned_ == nullptr) return check_scales(source);
    T const* const data = elements<T>(source);
    if (!error_) view = make_dense<Space::host, T const, N>(data, extents);
  }

 private:
  struct Source {
    std::string const& name;
    std::string const& file;
    SafetensorsEntry const& entry;
  };

  void fail(Source const& source, std::string got, std::string expected) {
    error_ = {source.file, layer_, source.name, std::move(got), std::move(expected)};
  }

  CheckpointResult<void> find_module() {
    std::vector<std::string> const candidates = attention_prefixes(plan_, layer_);
    for (std::string const& prefix : candidates) {
      if (!checkpoint_.has_any(prefix)) continue;
      if (!module_.empty()) {
        return refuse({checkpoint_.directory(), layer_, "",
                       "tensors under " + module_ + " and under " + prefix, "one of the two"});
      }
      module_ = prefix;
    }
    if (!module_.empty()) return {};
    return refuse(
        {checkpoint_.directory(), layer_, "", "no tensor of the layer", candidates.front() + "*"});
  }

  /// The full name of a tensor that the file has under one of its names.
  std::optional<std::string> choose(TensorName const& tensor) {
    std::string const name = module_ + std::string(tensor.name);
    if (tensor.other.empty()) {
      if (checkpoint_.has(name)) return name;
      error_ = {checkpoint_.directory(), layer_, name, "no such tensor",
                tensor.name.starts_with("indexer.") ? "it, as the layer is full by the schedule"
                                                    : "it in the checkpoint"};
      return std::nullopt;
    }
    std::string const other = module_ + std::string(tensor.other);
    if (checkpoint_.has(name) == checkpoint_.has(other)) {
      error_ = {checkpoint_.directory(), layer_, name,
                checkpoint_.has(name) ? "a second one under " + other : "no such tensor",
                "one of that name or " + std::string(tensor.other)};
      return std::nullopt;
    }
    bool const is_first = checkpoint_.has(name);
    std::string const stray = scale_name(is_first ? other : name);
    if (checkpoint_.has(stray)) {
      error_ = {checkpoint_.directory(), layer_, stray, "scales without their tensor",
                "both or none"};
      return std::nullopt;
    }
    return is_first ? name : other;
  }

  static bool is_supported(std::string_view dtype, std::size_t rank) {
    return dtype == safetensors_dtype<bf16> || dtype == safetensors_dtype<fp16> ||
           dtype == safetensors_dtype<float> || (dtype == safetensors_dtype<e4m3> && rank == 2);
  }

  /// An fp8 matrix has good scales, anything else has none.
  void check_scales(Source const& source) {
    if (source.entry.dtype == safetensors_dtype<e4m3>) {
      scales_of(source);
    } else if (std::string const scales = scale_name(source.name); checkpoint_.has(scales)) {
      error_ = {source.file, layer_, scales, "scales of a tensor of dtype " + source.entry.dtype,
                "scales only beside F8_E4M3 matrices"};
    }
  }

  /// The elements of a tensor of a supported dtype.
  template <class T>
  T const* elements(Source const& source) {
    std::string const& dtype = source.entry.dtype;
    if (dtype == safetensors_dtype<e4m3>) return dequantised<T>(source);
    check_scales(source);
    if (error_) return nullptr;
    if (T const* const in_file = as_it_lies<T>(source.entry)) return in_file;
    if (dtype == safetensors_dtype<bf16>) return converted<bf16, T>(source);
    if (dtype == safetensors_dtype<fp16>) return converted<fp16, T>(source);
    return converted<float, T>(source);
  }

  /// The elements in the file if they are of the type asked for and aligned, else null.
  template <class T>
  static T const* as_it_lies(SafetensorsEntry const& entry) {
    if (safetensors_dtype<T> == nullptr || entry.dtype != safetensors_dtype<T>) return nullptr;
    if (reinterpret_cast<std::uintptr_t>(entry.data) % alignof(T) != 0) return nullptr;
    return reinterpret_cast<T const*>(entry.data);
  }

  template <class T>
  T* allocate(std::size_t count) {
    owned_->emplace_back(WorkspaceSize{count * sizeof(T)});
    return static_cast<T*>(owned_->back().view().data);
  }

  template <class From, class To>
  To const* converted(Source const& source) {
    std::size_t const count = source.entry.bytes / sizeof(From);
    To* const to = allocate<To>(count);
    if (auto const bad = convert<From>(source.entry.data, count, to)) {
      fail_at(source, *bad, to_float(load_unaligned<From>(source.entry.data, *bad)),
              "a value that the element type asked for can hold");
    }
    return to;
  }

  template <class To>
  To const* dequantised(Source const& source) {
    index_t const out = source.entry.shape[0];
    index_t const in = source.entry.shape[1];
    std::vector<float> const scales = scales_of(source);
    if (error_) return nullptr;
    To* const to = allocate<To>(source.entry.bytes);
    if (auto const bad = dequantise(source.entry.data, scales, out, in, to)) {
      auto const code = std::to_integer<std::size_t>(source.entry.data[*bad]);
      bool const is_nan = !is_finite(e4m3_values[code]);
      fail(source, element_text(source.entry, *bad) + (is_nan ? " is NaN" : " is too large"),
           is_nan ? "no NaN in fp8 weights"
                  : "code times scale to be a value that the element type asked for can hold");
    }
    return to;
  }

  /// The block scales of an fp8 matrix, all positive and finite.
  std::vector<float> scales_of(Source const& matrix) {
    std::string const name = scale_name(matrix.name);
    if (!checkpoint_.has(name)) {
      error_ = {matrix.file, layer_, name, "no such tensor",
                "the block scales of an F8_E4M3 matrix"};
      return {};
    }
    auto const tensor = checkpoint_.find(name);
    if (!tensor) {
      error_ = tensor.error();
      return {};
    }
    Source const source{name, tensor->file, tensor->entry};
    if (source.entry.dtype != safetensors_dtype<float>) {
      fail(source, "dtype " + source.entry.dtype, safetensors_dtype<float>);
      return {};
    }
    std::vector<index_t> const wanted{scale_blocks(matrix.entry.shape[0]),
                                      scale_blocks(matrix.entry.shape[1])};
    if (source.entry.shape != wanted) {
      fail(source, "shape " + shape_text(source.entry.shape),
           shape_text(wanted) + ", a scale per 128 x 128 block");
      return {};
    }
    std::vector<float> scales(source.entry.bytes / sizeof(float));
    if (!scales.empty()) std::memcpy(scales.data(), source.entry.data, source.entry.bytes);
    for (std::size_t i = 0; i < scales.size(); ++i) {
      if (!(scales[i] > 0) || !is_finite(scales[i])) {
        fail_at(source, i, scales[i], "a positive finite scale");
        return {};
      }
    }
    return scales;
  }

  void fail_at(Source const& source, std::size_t number, float value, std::string expected) {
    char text[32];
    std::snprintf(text, sizeof text, "%g", static_cast<double>(value));
    fail(source, element_text(source.entry, number) + " is " + text, std::move(expected));
  }

  /// `element [3, 17]` for the element of that number.
  static std::string element_text(SafetensorsEntry const& entry, std::size_t number) {
    std::vector<index_t> place(entry.shape.size());
    auto rest = static_cast<index_t>(number);
    for (std::size_t i = entry.shape.size(); i-- > 0;) {
      place[i] = rest % entry.shape[i];
      rest /= entry.shape[i];
    }
    return "element " + shape_text(place);
  }

  Checkpoint const& checkpoint_;
  ModelConfig const& config_;
  SharePlan const& plan_;
  std::int32_t layer_;
  std::vector<HostMemory>* owned_;
  std::string module_;  // what the names of the module's tensors begin with
  std::optional<CheckpointError> error_;
};

}  // namespace io::detail
}  // namespace v0
}  // namespace indexshare
