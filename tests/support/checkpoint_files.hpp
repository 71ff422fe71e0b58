// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/element.hpp>
#include <indexshare/io/safetensors_writer.hpp>
#include <indexshare/model_config.hpp>
#include <indexshare/share_plan.hpp>

#include <nlohmann/json.hpp>

#include "random.hpp"

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <span>
#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

/// @file Tiny checkpoints with random weights, written into directories that vanish afterwards.

namespace test {

/// A directory of its own for one test.
class TempDirectory {
 public:
  TempDirectory() {
    static std::atomic<int> made{0};
    std::filesystem::path const root = std::filesystem::temp_directory_path();
    do {
      path_ = root / ("indexshare-test-" + std::to_string(salt()) + "-" + std::to_string(made++));
    } while (!std::filesystem::create_directory(path_));
  }
  TempDirectory(TempDirectory const&) = delete;
  TempDirectory& operator=(TempDirectory const&) = delete;
  ~TempDirectory() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }

  std::string string() const { return path_.string(); }
  std::string file(std::string const& name) const { return (path_ / name).string(); }

  void write(std::string const& name, std::string const& content) const {
    std::ofstream stream(file(name), std::ios::binary);
    stream << content;
    stream.close();
    if (!stream) throw std::runtime_error("cannot write " + file(name));
  }

 private:
  /// Differs between processes, so that tests that run at once rarely have to try again.
  static std::uintptr_t salt() {
    static int const here = 0;
    return reinterpret_cast<std::uintptr_t>(&here) >> 4 & 0xFFFFFF;
  }

  std::filesystem::path path_;
};

inline std::string bytes_of(std::span<std::byte const> bytes) {
  return {reinterpret_cast<char const*>(bytes.data()), bytes.size()};
}

template <class T>
std::string bytes_of(std::vector<T> const& elements) {
  return bytes_of(std::as_bytes(std::span<T const>(elements)));
}

/// One tensor of a checkpoint in the making.
struct FileTensor {
  std::string dtype;
  std::vector<indexshare::index_t> shape;
  std::string bytes;
  /// What a reader must make of it: the elements, with block scales applied.
  std::vector<float> values{};
};

struct CheckpointOptions {
  std::string dtype = "BF16";  ///< of the matrices: BF16, F16, F32 or F8_E4M3
  std::string prefix = "model.";
  bool own_mtp_list = false;     ///< MTP layers under mtp_layers.J, as Hy4 has them
  bool published_names = false;  ///< linear_gate and learnable_sink_param, as the published Hy4
  std::uint64_t seed = 1;
};

/// The self-attention weights of a model, and a norm besides so that there is something to ignore.
/// The schedule decides which layers get an indexer.
class CheckpointFiles {
 public:
  using index_t = indexshare::index_t;

  CheckpointFiles(indexshare::ModelConfig const& config, indexshare::SharePlan const& plan,
                  CheckpointOptions options = {})
      : config_(config), plan_(plan), options_(std::move(options)), random_(options_.seed) {
    for (std::int32_t layer = 0; layer < plan_.total_layers(); ++layer) {
      if (plan_.role(layer) == indexshare::LayerRole::none) continue;
      add_attention(layer);
      if (plan_.is_full(layer)) add_indexer(layer);
    }
    tensors_[options_.prefix + "norm.weight"] = make("BF16", {config_.hidden_size});
  }

  /// What the names of a layer's tensors begin with.
  std::string module(std::int32_t layer) const {
    bool const own = options_.own_mtp_list && layer >= plan_.num_layers();
    return options_.prefix +
           (own ? "mtp_layers." + std::to_string(layer - plan_.num_layers())
                : "layers." + std::to_string(layer)) +
           ".self_attn.";
  }

  /// Random indexer tensors, also for a layer that should have none.
  void add_indexer(std::int32_t layer) {
    std::string const at = module(layer) + "indexer.";
    index_t const dim = config_.index_head_dim;
    add_matrix(at + "wq_b.weight", {config_.index_n_heads * dim, config_.q_lora_rank});
    add_matrix(at + "wk.weight", {dim, config_.hidden_size});
    add_small(at + "weights_proj.weight", {config_.index_n_heads, config_.hidden_size});
    add_small(at + "k_norm.weight", {dim});
    add_small(at + "k_norm.bias", {dim});
  }

  std::map<std::string, FileTensor> const& tensors() const { return tensors_; }
  FileTensor& at(std::string const& name) { return tensors_.at(name); }
  std::vector<float> const& values(std::string const& name) const {
    return tensors_.at(name).values;
  }

  void drop(std::string const& name) {
    if (tensors_.erase(name) == 0) throw std::out_of_range(name);
  }
  void rename(std::string const& from, std::string const& to) {
    auto node = tensors_.extract(from);
    if (node.empty()) throw std::out_of_range(from);
    node.key() = to;
    tensors_.insert(std::move(node));
  }
  /// A tensor of zero bytes.
  void add_zeros(std::string const& name, std::string const& dtype, std::vector<index_t> shape) {
    std::size_t const bytes = indexshare::io::safetensors_bytes(dtype, shape).value();
    tensors_[name] = {dtype, std::move(shape), std::string(bytes, '\0')};
  }
  /// Random elements in place of what is there.
  void set(std::string const& name, std::string const& dtype, std::vector<index_t> shape) {
    tensors_[name] = make(dtype, std::move(shape));
  }
  /// An fp8 matrix with scales in place of what is there. @param scales  one per block
  void set_fp8(std::string const& name, index_t out, index_t in, std::vector<float> const& scales) {
    FileTensor matrix = make("F8_E4M3", {out, in});
    index_t const columns = (in + 127) / 128;
    for (index_t o = 0; o < out; ++o) {
      for (index_t i = 0; i < in; ++i) {
        float const scale = scales.at(static_cast<std::size_t>(o / 128 * columns + i / 128));
        matrix.values[static_cast<std::size_t>(o * in + i)] *= scale;
      }
    }
    tensors_[name] = std::move(matrix);
    tensors_[name + "_scale_inv"] = {"F32", {(out + 127) / 128, columns}, bytes_of(scales), scales};
  }

  /// One model.safetensors.
  std::string single_file() const {
    indexshare::io::SafetensorsWriter writer;
    for (auto const& [name, tensor] : tensors_) add_to(writer, name, tensor);
    return value_of(writer.bytes());
  }
  void write_single(TempDirectory const& directory,
                    std::string const& file = "model.safetensors") const {
    directory.write(file, single_file());
  }

  /// Shards and their index; neighbours in the order of names share a shard.
  void write_shards(TempDirectory const& directory, std::size_t shards) const {
    std::vector<indexshare::io::SafetensorsWriter> writers(shards);
    nlohmann::json index = {{"metadata", {{"total_size", 1}}},  // as wrong as nobody checks
                            {"weight_map", nlohmann::json::object()}};
    std::size_t number = 0;
    for (auto const& [name, tensor] : tensors_) {
      std::size_t const shard = number++ * shards / tensors_.size();
      add_to(writers[shard], name, tensor);
      index["weight_map"][name] = shard_name(shard, shards);
    }
    for (std::size_t shard = 0; shard < shards; ++shard) {
      directory.write(shard_name(shard, shards), value_of(writers[shard].bytes()));
    }
    directory.write("model.safetensors.index.json", index.dump(2));
  }

  static std::string shard_name(std::size_t shard, std::size_t shards) {
    auto const five = [](std::size_t n) {
      std::string const digits = std::to_string(n);
      return std::string(5 - digits.size(), '0') + digits;
    };
    return "model-" + five(shard + 1) + "-of-" + five(shards) + ".safetensors";
  }

 private:
  void add_attention(std::int32_t layer) {
    std::string const at = module(layer);
    indexshare::ModelConfig const& c = config_;
    index_t const heads = c.num_attention_heads;
    add_matrix(at + "q_a_proj.weight", {c.q_lora_rank, c.hidden_size});
    add_small(at + "q_a_layernorm.weight", {c.q_lora_rank});
    add_matrix(at + "q_b_proj.weight",
               {heads * (c.qk_nope_head_dim + c.qk_rope_head_dim), c.q_lora_rank});
    add_matrix(at + "kv_a_proj_with_mqa.weight",
               {c.kv_lora_rank + c.qk_rope_head_dim, c.hidden_size});
    add_small(at + "kv_a_layernorm.weight", {c.kv_lora_rank});
    add_matrix(at + "kv_b_proj.weight",
               {heads * (c.qk_nope_head_dim + c.v_head_dim), c.kv_lora_rank});
    add_matrix(at + "o_proj.weight", {c.hidden_size, heads * c.v_head_dim});
    if (c.gated_output) {
      add_matrix(at + (options_.published_names ? "linear_gate.weight" : "gate_proj.weight"),
                 {heads * c.v_head_dim, c.hidden_size});
    }
    if (c.learnable_sink) {
      add_small(at + (options_.published_names ? "learnable_sink_param" : "sinks"), {heads});
    }
  }

  void add_matrix(std::string const& name, std::vector<index_t> shape) {
    if (options_.dtype != "F8_E4M3") {
      tensors_[name] = make(options_.dtype, std::move(shape));
      return;
    }
    index_t const blocks = ((shape[0] + 127) / 128) * ((shape[1] + 127) / 128);
    std::vector<float> scales(static_cast<std::size_t>(blocks));
    for (float& scale : scales) scale = random_.uniform(0.25f, 4.0f);
    set_fp8(name, shape[0], shape[1], scales);
  }

  /// A tensor that no published checkpoint has in fp8.
  void add_small(std::string const& name, std::vector<index_t> shape) {
    tensors_[name] = make(options_.dtype == "F8_E4M3" ? "BF16" : options_.dtype, std::move(shape));
  }

  FileTensor make(std::string const& dtype, std::vector<index_t> shape) {
    if (dtype == "BF16") return make_of<indexshare::bf16>(dtype, std::move(shape));
    if (dtype == "F16") return make_of<indexshare::fp16>(dtype, std::move(shape));
    if (dtype == "F8_E4M3") return make_of<indexshare::e4m3>(dtype, std::move(shape));
    if (dtype == "F32") return make_of<float>(dtype, std::move(shape));
    throw std::invalid_argument(dtype);
  }

  template <class T>
  FileTensor make_of(std::string const& dtype, std::vector<index_t> shape) {
    std::size_t count = 1;
    for (index_t const extent : shape) count *= static_cast<std::size_t>(extent);
    std::vector<T> elements(count);
    FileTensor tensor{dtype, std::move(shape), {}, std::vector<float>(count)};
    for (std::size_t i = 0; i < count; ++i) {
      elements[i] = indexshare::from_float<T>(random_.normal());
      tensor.values[i] = indexshare::to_float(elements[i]);
    }
    tensor.bytes = bytes_of(elements);
    return tensor;
  }

  static void add_to(indexshare::io::SafetensorsWriter& writer, std::string const& name,
                     FileTensor const& tensor) {
    writer.add(name, tensor.dtype, tensor.shape, std::as_bytes(std::span(tensor.bytes)));
  }

  static std::string value_of(indexshare::io::SafetensorsWriter::Expected<std::string> bytes) {
    if (!bytes) throw std::runtime_error(bytes.error().message());
    return std::move(*bytes);
  }

  indexshare::ModelConfig config_;
  indexshare::SharePlan plan_;
  CheckpointOptions options_;
  Random random_;
  std::map<std::string, FileTensor> tensors_;
};

}  // namespace test
