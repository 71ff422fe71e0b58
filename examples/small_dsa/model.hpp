// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "task.hpp"

#include <indexshare/element.hpp>
#include <indexshare/frontend.hpp>
#include <indexshare/indexshare.hpp>
#include <indexshare/io/checkpoint.hpp>
#include <indexshare/io/config.hpp>
#include <indexshare/io/layer_weights.hpp>
#include <indexshare/io/safetensors.hpp>

#include <cuda/std/expected>

#include <nlohmann/json.hpp>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

/// @file The weights of a small transformer with sparse attention in every layer: embeddings, per
/// layer a self-attention module and a gated MLP in pre-norm blocks, a norm and a head.

namespace small_dsa {

using indexshare::index_t;
using indexshare::position_t;
inline constexpr auto host = indexshare::Space::host;

/// A value, or one line that names the file and what is wrong with it.
template <class T>
using Expected = cuda::std::expected<T, std::string>;

inline cuda::std::unexpected<std::string> refuse(std::string why) {
  return cuda::std::unexpected<std::string>(std::move(why));
}

using Matrix = indexshare::MatrixView<host, float>;
using Vector = indexshare::VectorView<host>;

/// A tensor of the model that is not of a self-attention module. Moving it leaves views valid.
class OwnedTensor {
 public:
  OwnedTensor() = default;
  OwnedTensor(std::vector<float> values, std::vector<index_t> shape)
      : values_(std::move(values)), shape_(std::move(shape)) {}

  Matrix matrix() const {
    return indexshare::make_dense<host, float const, 2>(values_.data(), {shape_[0], shape_[1]});
  }
  Vector vector() const {
    return indexshare::make_dense<host, float const, 1>(values_.data(), {shape_[0]});
  }
  float const* row(std::int32_t number) const { return values_.data() + number * shape_[1]; }

 private:
  std::vector<float> values_;
  std::vector<index_t> shape_;
};

/// What a layer has beside its self-attention module.
struct BlockWeights {
  OwnedTensor input_norm;
  OwnedTensor mlp_norm;
  OwnedTensor gate;
  OwnedTensor up;
  OwnedTensor down;
};

namespace detail {

inline Expected<TaskSizes> read_task(std::string const& file) {
  std::ifstream stream(file);
  auto const json = nlohmann::json::parse(stream, nullptr, false);
  TaskSizes sizes;
  std::pair<char const*, std::int32_t*> const fields[] = {{"keys", &sizes.keys},
                                                          {"records", &sizes.records},
                                                          {"queries", &sizes.queries},
                                                          {"max_hops", &sizes.max_hops}};
  for (auto const& [name, value] : fields) {
    std::string const path = file + ": $.small_dsa." + name;
    auto const* const object =
        json.is_object() && json.contains("small_dsa") ? &json["small_dsa"] : nullptr;
    if (object == nullptr || !object->is_object() || !object->contains(name)) {
      return refuse(path + ": missing, expected the task that the model was trained on");
    }
    nlohmann::json const& number = (*object)[name];
    if (!number.is_number_integer() || number < 1 || number > (1 << 16)) {
      return refuse(path + ": got " + number.dump() + ", expected a whole number from 1 to 65536");
    }
    *value = number.get<std::int32_t>();
  }
  if (sizes.records > sizes.keys) {
    return refuse(file + ": $.small_dsa.records: got " + std::to_string(sizes.records) +
                  ", expected at most keys (" + std::to_string(sizes.keys) + ")");
  }
  return sizes;
}

template <class T>
bool all_finite(indexshare::io::SafetensorsEntry const& entry) {
  for (std::size_t at = 0; at < entry.bytes; at += sizeof(T)) {
    T element;
    std::memcpy(&element, entry.data + at, sizeof element);
    if (!std::isfinite(indexshare::to_float(element))) return false;
  }
  return true;
}

/// Names the first tensor with a NaN or an infinity: losses of such weights mean nothing.
inline std::string refuse_non_finite(indexshare::io::Checkpoint const& checkpoint) {
  for (std::string const& name : checkpoint.names()) {
    auto const tensor = checkpoint.find(name);
    if (!tensor) return tensor.error().message();
    std::string const& type = tensor->entry.dtype;
    bool const finite = type == "F32"    ? all_finite<float>(tensor->entry)
                        : type == "BF16" ? all_finite<indexshare::bf16>(tensor->entry)
                        : type == "F16"  ? all_finite<indexshare::fp16>(tensor->entry)
                                         : true;  // load_layer looks at fp8 itself
    if (!finite) {
      return tensor->file + ": tensor " + name +
             ": got a NaN or an infinity, expected finite weights";
    }
  }
  return {};
}

/// Reads tensors of one file; the first error stays.
class TensorReader {
 public:
  explicit TensorReader(indexshare::io::SafetensorsFile const& file) : file_(file) {}

  OwnedTensor read(std::string const& name, std::vector<index_t> shape) {
    auto values = file_.read<float>(name, shape);
    if (values) return OwnedTensor(std::move(*values), std::move(shape));
    if (error_.empty()) error_ = values.error().message();
    return {};
  }
  std::string const& error() const { return error_; }

 private:
  indexshare::io::SafetensorsFile const& file_;
  std::string error_;
};

}  // namespace detail

class Model {
 public:
  Model(Model&&) = default;
  Model& operator=(Model&&) = default;

  /// Reads config.json and model.safetensors of a directory. Errors name the file and the field or
  /// tensor: no such file; a config that `io::read_config_file` refuses or without `small_dsa`; a
  /// tensor that is missing or has another type or shape or a NaN or infinity; a layer without an
  /// indexer.
  static Expected<Model> load(std::string const& directory) {
    std::string const config_file = directory + "/config.json";
    auto const config = indexshare::io::read_config_file(config_file);
    if (!config) return refuse(in_file(config_file, config.error().message()));
    if (config->plan.full_layers().count() != config->model.num_hidden_layers) {
      return refuse(config_file +
                    ": $.indexer_types: got shared layers, expected an indexer in every layer: "
                    "which of them to share is what this program tries out");
    }
    auto const task = detail::read_task(config_file);
    if (!task) return refuse(task.error());
    auto front_end = indexshare::make_front_end<>(config->model);
    if (!front_end) return refuse(config_file + ": " + front_end.error().what);
    auto checkpoint = indexshare::io::Checkpoint::open(directory);
    if (!checkpoint) return refuse(checkpoint.error().message());
    Model model(*front_end, *task, std::move(*checkpoint));
    if (std::string const why = model.read_attention(config->plan); !why.empty()) {
      return refuse(why);
    }
    auto const file = indexshare::io::SafetensorsFile::open(directory + "/model.safetensors");
    if (!file) return refuse(file.error().message());
    if (std::string const why = model.read_rest(*file); !why.empty()) return refuse(why);
    if (std::string const why = detail::refuse_non_finite(model.checkpoint_); !why.empty()) {
      return refuse(why);
    }
    return model;
  }

  indexshare::FrontEnd<> const& front_end() const { return front_end_; }
  indexshare::ModelConfig const& config() const { return front_end_.config; }
  TaskSizes const& task() const { return task_; }
  std::int32_t layers() const { return config().num_hidden_layers; }

  /// Of a layer that runs its indexer.
  indexshare::AttentionWeights<host, float> const& attention(std::int32_t layer) const {
    return attention_[detail::index(layer)].views();
  }
  BlockWeights const& block(std::int32_t layer) const { return blocks_[detail::index(layer)]; }
  OwnedTensor const& embed_key() const { return embed_key_; }
  OwnedTensor const& embed_value() const { return embed_value_; }
  OwnedTensor const& embed_hops() const { return embed_hops_; }
  OwnedTensor const& norm() const { return norm_; }
  OwnedTensor const& head() const { return head_; }

 private:
  Model(indexshare::FrontEnd<> const& front_end, TaskSizes const& task,
        indexshare::io::Checkpoint checkpoint)
      : front_end_(front_end), task_(task), checkpoint_(std::move(checkpoint)) {}

  static std::string in_file(std::string const& file, std::string const& message) {
    return message.starts_with(file) ? message : file + ": " + message;
  }

  std::string read_attention(indexshare::SharePlan const& all_full) {
    for (std::int32_t layer = 0; layer < layers(); ++layer) {
      auto loaded = indexshare::io::load_layer<float>(checkpoint_, config(), all_full, layer);
      if (!loaded) return loaded.error().message();
      attention_.push_back(std::move(*loaded));
    }
    return {};
  }

  std::string read_rest(indexshare::io::SafetensorsFile const& file) {
    detail::TensorReader reader(file);
    index_t const width = config().hidden_size;
    index_t const wide = config().feed_forward.intermediate_size;
    embed_key_ = reader.read("model.embed_key.weight", {task_.keys, width});
    embed_value_ = reader.read("model.embed_value.weight", {task_.keys + 1, width});
    embed_hops_ = reader.read("model.embed_hops.weight", {task_.max_hops + 1, width});
    for (std::int32_t layer = 0; layer < layers(); ++layer) {
      std::string const prefix = "model.layers." + std::to_string(layer) + ".";
      BlockWeights& block = blocks_.emplace_back();
      block.input_norm = reader.read(prefix + "input_layernorm.weight", {width});
      block.mlp_norm = reader.read(prefix + "post_attention_layernorm.weight", {width});
      block.gate = reader.read(prefix + "mlp.gate_proj.weight", {wide, width});
      block.up = reader.read(prefix + "mlp.up_proj.weight", {wide, width});
      block.down = reader.read(prefix + "mlp.down_proj.weight", {width, wide});
    }
    norm_ = reader.read("model.norm.weight", {width});
    head_ = reader.read("lm_head.weight", {task_.keys, width});
    return reader.error();
  }

  indexshare::FrontEnd<> front_end_;
  TaskSizes task_;
  indexshare::io::Checkpoint checkpoint_;  // the attention weights lie in its file
  std::vector<indexshare::io::LoadedLayer<float>> attention_;
  std::vector<BlockWeights> blocks_;
  OwnedTensor embed_key_;
  OwnedTensor embed_value_;
  OwnedTensor embed_hops_;
  OwnedTensor norm_;
  OwnedTensor head_;
};

}  // namespace small_dsa
