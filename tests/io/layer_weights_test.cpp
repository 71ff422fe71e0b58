// SPDX-License-Identifier: Apache-2.0
#include <indexshare/io/config.hpp>
#include <indexshare/io/layer_weights.hpp>

#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>

#include "checkpoint_files.hpp"
#include "tiny_models.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <new>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

using Catch::Matchers::ContainsSubstring;
using indexshare::AttentionWeights;
using indexshare::bf16;
using indexshare::fp16;
using indexshare::from_float;
using indexshare::index_t;
using indexshare::ModelConfig;
using indexshare::SharePlan;
using indexshare::Space;
using indexshare::to_float;
using indexshare::io::Checkpoint;
using indexshare::io::load_layer;
using indexshare::io::LoadedLayer;
using indexshare::io::unused_layers;
using test::CheckpointFiles;
using test::TempDirectory;

// Aligned memory starts as NaN, so that a weight that nobody filled shows (R003).
void* operator new(std::size_t bytes, std::align_val_t alignment) {
  auto const unit = static_cast<std::size_t>(alignment);
  void* const data = std::aligned_alloc(unit, (bytes / unit + 1) * unit);
  if (data == nullptr) throw std::bad_alloc();
  return std::memset(data, 0xFF, (bytes / unit + 1) * unit);
}
void operator delete(void* data, std::align_val_t) noexcept { std::free(data); }
void operator delete(void* data, std::size_t, std::align_val_t) noexcept { std::free(data); }

namespace {

constexpr char const* indexer_tensors[] = {"wq_b.weight", "wk.weight", "k_norm.weight",
                                           "k_norm.bias", "weights_proj.weight"};

/// A checkpoint in a directory of its own.
struct Stored {
  explicit Stored(CheckpointFiles const& files) { files.write_single(directory); }
  Checkpoint open() const { return Checkpoint::open(directory.string()).value(); }

  TempDirectory directory;
};

template <class View>
std::vector<float> floats(View const& view) {
  std::vector<float> values;
  for (index_t i = 0; i < view.extent(0); ++i) {
    if constexpr (View::rank() == 1) {
      values.push_back(to_float(view(i)));
    } else {
      for (index_t j = 0; j < view.extent(1); ++j) values.push_back(to_float(view(i, j)));
    }
  }
  return values;
}

/// What a file's values become as elements of W.
template <class W>
std::vector<float> rounded(std::vector<float> values) {
  for (float& value : values) value = to_float(from_float<W>(value));
  return values;
}

/// All values of a layer, in the order of the structs.
template <class W>
std::vector<float> all_floats(AttentionWeights<Space::host, W> const& w) {
  std::vector<float> all;
  auto const append = [&](auto const& view) {
    auto const values = floats(view);
    all.insert(all.end(), values.begin(), values.end());
  };
  append(w.q_a_proj);
  append(w.q_a_layernorm);
  append(w.q_b_proj);
  append(w.kv_a_proj);
  append(w.kv_a_layernorm);
  append(w.kv_b_proj);
  append(w.o_proj);
  append(w.gate_proj);
  append(w.sinks);
  if (!w.indexer) return all;
  append(w.indexer->wq_b);
  append(w.indexer->wk);
  append(w.indexer->k_norm_weight);
  append(w.indexer->k_norm_bias);
  append(w.indexer->weights_proj);
  return all;
}

/// The views hold what the file says: matrices as W, the rest exactly.
template <class W>
void check_values(LoadedLayer<W> const& loaded, CheckpointFiles const& files) {
  std::string const at = files.module(loaded.layer());
  auto const& w = loaded.views();
  CHECK(floats(w.q_a_proj) == rounded<W>(files.values(at + "q_a_proj.weight")));
  CHECK(floats(w.q_a_layernorm) == files.values(at + "q_a_layernorm.weight"));
  CHECK(floats(w.q_b_proj) == rounded<W>(files.values(at + "q_b_proj.weight")));
  CHECK(floats(w.kv_a_proj) == rounded<W>(files.values(at + "kv_a_proj_with_mqa.weight")));
  CHECK(floats(w.kv_a_layernorm) == files.values(at + "kv_a_layernorm.weight"));
  CHECK(floats(w.kv_b_proj) == rounded<W>(files.values(at + "kv_b_proj.weight")));
  CHECK(floats(w.o_proj) == rounded<W>(files.values(at + "o_proj.weight")));
  if (!w.indexer) return;
  CHECK(floats(w.indexer->wq_b) == rounded<W>(files.values(at + "indexer.wq_b.weight")));
  CHECK(floats(w.indexer->wk) == rounded<W>(files.values(at + "indexer.wk.weight")));
  CHECK(floats(w.indexer->k_norm_weight) == files.values(at + "indexer.k_norm.weight"));
  CHECK(floats(w.indexer->k_norm_bias) == files.values(at + "indexer.k_norm.bias"));
  CHECK(floats(w.indexer->weights_proj) == files.values(at + "indexer.weights_proj.weight"));
}

template <class W>
void check_loads(CheckpointFiles const& files, ModelConfig const& config, SharePlan const& plan) {
  Stored const stored(files);
  auto const checkpoint = stored.open();
  for (std::int32_t layer = 0; layer < plan.total_layers(); ++layer) {
    INFO("layer " << layer);
    auto const loaded = load_layer<W>(checkpoint, config, plan, layer);
    if (!loaded) FAIL(loaded.error().message());
    CHECK(loaded->views().indexer.has_value() == plan.is_full(layer));
    CHECK(loaded->ignored().empty());
    CHECK(check_weights(config, loaded->views()).ok());
    check_values(*loaded, files);
  }
}

/// The message of the error that loading the layer gives.
std::string refusal(CheckpointFiles const& files, ModelConfig const& config, SharePlan const& plan,
                    std::int32_t layer) {
  Stored const stored(files);
  auto const checkpoint = stored.open();
  auto const loaded = load_layer<bf16>(checkpoint, config, plan, layer);
  REQUIRE_FALSE(loaded.has_value());
  CHECK(loaded.error().layer == layer);
  CHECK_THAT(loaded.error().file, ContainsSubstring(stored.directory.string()));
  return loaded.error().message();
}

/// The same for a full layer of the tiny model, whose checkpoint `edit` has changed.
template <class Edit>
std::string refusal_after(Edit edit, std::string const& dtype = "BF16") {
  ModelConfig const config = tiny_model(1);
  SharePlan const plan = plan_of("F");
  CheckpointFiles files(config, plan, {.dtype = dtype});
  edit(files);
  return refusal(files, config, plan, 0);
}

std::string const at0 = "model.layers.0.self_attn.";

}  // namespace

TEST_CASE("R001, R016: shared layers load without indexer tensors, whatever the dtype") {
  ModelConfig const config = tiny_model(4);
  SharePlan const plan = plan_of("FSSF");
  std::string const dtype = GENERATE("BF16", "F16", "F32", "F8_E4M3");
  INFO(dtype);
  CheckpointFiles const files(config, plan, {.dtype = dtype});
  check_loads<float>(files, config, plan);
  check_loads<bf16>(files, config, plan);
  check_loads<fp16>(files, config, plan);
}

TEST_CASE("R001, R016: a full layer that lacks an indexer tensor is refused by layer and tensor") {
  ModelConfig const config = tiny_model(4);
  SharePlan const plan = plan_of("FSSF");
  std::string const dtype = GENERATE("BF16", "F16", "F32", "F8_E4M3");
  for (std::string const tensor : indexer_tensors) {
    CheckpointFiles files(config, plan, {.dtype = dtype});
    files.drop(files.module(3) + "indexer." + tensor);
    CHECK_THAT(refusal(files, config, plan, 3),
               ContainsSubstring("layer 3: tensor model.layers.3.self_attn.indexer." + tensor) &&
                   ContainsSubstring("no such tensor") && ContainsSubstring("the layer is full"));
    Stored const stored(files);
    auto const checkpoint = stored.open();
    CHECK(load_layer<bf16>(checkpoint, config, plan, 0).has_value());
  }
}

TEST_CASE("Every tensor of a shared layer's attention is required") {
  ModelConfig config = tiny_model(2);
  config.gated_output = config.learnable_sink = true;
  SharePlan const plan = plan_of("FS");
  CheckpointFiles const whole(config, plan);
  for (auto const& [name, tensor] : whole.tensors()) {
    if (!name.starts_with(whole.module(1))) continue;
    CheckpointFiles files = whole;
    files.drop(name);
    CHECK_THAT(refusal(files, config, plan, 1), ContainsSubstring("layer 1: tensor " + name));
  }
}

TEST_CASE("R002: surplus indexer tensors of shared layers are reported and not used") {
  ModelConfig const config = tiny_model(4);
  SharePlan const plan = plan_of("FSSF");
  std::string const dtype = GENERATE("BF16", "F8_E4M3");
  CheckpointFiles const lean(config, plan, {.dtype = dtype});
  CheckpointFiles rich = lean;
  rich.add_indexer(1);
  rich.add_indexer(2);
  Stored const lean_files(lean);
  Stored const rich_files(rich);
  auto const lean_checkpoint = lean_files.open();
  auto const rich_checkpoint = rich_files.open();
  for (std::int32_t layer = 0; layer < 4; ++layer) {
    auto const a = load_layer<bf16>(lean_checkpoint, config, plan, layer).value();
    auto const b = load_layer<bf16>(rich_checkpoint, config, plan, layer).value();
    CHECK(a.views().indexer.has_value() == b.views().indexer.has_value());
    CHECK(all_floats(a.views()) == all_floats(b.views()));
    CHECK(b.ignored() == (plan.is_full(layer)
                              ? std::vector<std::string>{}
                              : rich_checkpoint.names(rich.module(layer) + "indexer.")));
    CHECK(b.ignored().size() == (plan.is_full(layer) ? 0u : dtype == "BF16" ? 5u : 7u));
  }
}

TEST_CASE("R003: no weight of a loaded layer is left unfilled") {
  ModelConfig config = tiny_model(4, 1);
  config.gated_output = config.learnable_sink = true;
  SharePlan const plan = plan_of("FSSF", 1);
  std::string const dtype = GENERATE("BF16", "F16", "F32", "F8_E4M3");
  Stored const stored(CheckpointFiles(config, plan, {.dtype = dtype}));
  auto const checkpoint = stored.open();
  float poison;
  std::memset(&poison, 0xFF, sizeof poison);
  REQUIRE(std::isnan(poison));
  for (std::int32_t layer = 0; layer < plan.total_layers(); ++layer) {
    auto const loaded = load_layer<float>(checkpoint, config, plan, layer).value();
    REQUIRE(check_weights(config, loaded.views()).ok());
    auto const values = all_floats(loaded.views());
    CHECK(std::none_of(values.begin(), values.end(), [](float v) { return std::isnan(v); }));
  }
}

TEST_CASE("R013: the MTP layer is loaded with its own indexer, and reported where none is stated") {
  ModelConfig const config = tiny_model(2, 1);
  SharePlan const plan = plan_of("FS", 1);
  for (bool const own_list : {false, true}) {
    CheckpointFiles const files(config, plan, {.own_mtp_list = own_list});
    check_loads<bf16>(files, config, plan);
    Stored const stored(files);
    auto const checkpoint = stored.open();
    CHECK(unused_layers(checkpoint, plan).empty());
    CHECK(unused_layers(checkpoint, plan_of("FS")) == std::vector<std::int32_t>{2});
    CHECK(unused_layers(checkpoint, plan_of("F")) ==
          (own_list ? std::vector<std::int32_t>{1} : std::vector<std::int32_t>{1, 2}));
    CHECK_FALSE(load_layer<bf16>(checkpoint, tiny_model(2), plan_of("FS"), 2).has_value());

    CheckpointFiles lacking = files;
    lacking.drop(files.module(2) + "indexer.k_norm.bias");
    CHECK_THAT(refusal(lacking, config, plan, 2),
               ContainsSubstring("layer 2") && ContainsSubstring("indexer.k_norm.bias"));
  }
}

TEST_CASE("Unused layers are those whose modules no layer of the plan is read from") {
  ModelConfig const config = tiny_model(1);
  SharePlan const plan = plan_of("F");
  CheckpointFiles files(config, plan);
  for (char const* const name :
       {"model.layers.3.mlp.gate.weight", "model.layers.self_attn.x", "layers.4.self_attn",
        "other.layers.5.self_attn.x", "model.layers.6x.self_attn.x", "model.layers.07.self_attn.x",
        "model.layers.00.self_attn.x"}) {
    files.add_zeros(name, "F32", {1});
  }
  Stored const none(files);
  CHECK(unused_layers(none.open(), plan).empty());
  for (char const* const name : {"layers.2.self_attn.x", "model.mtp_layers.3.self_attn.x",
                                 "model.language_model.layers.9.self_attn.x",
                                 "model.layers.99999999999999999999.self_attn.x"}) {
    files.add_zeros(name, "F32", {1});
  }
  Stored const some(files);
  CHECK(unused_layers(some.open(), plan) ==
        std::vector<std::int32_t>{2, 4, 9, std::numeric_limits<std::int32_t>::max()});
}

TEST_CASE("R015: a bias of weights_proj is unknown, and no checkpoint needs one") {
  CHECK_THAT(refusal_after([](CheckpointFiles& files) {
               files.add_zeros(at0 + "indexer.weights_proj.bias", "BF16", {3});
             }),
             ContainsSubstring("layer 0: tensor " + at0 + "indexer.weights_proj.bias") &&
                 ContainsSubstring("unknown tensor"));
}

TEST_CASE("R017: packed tensors are refused by name") {
  CHECK_THAT(refusal_after([](CheckpointFiles& files) {
               files.drop(at0 + "indexer.wk.weight");
               files.add_zeros(at0 + "indexer.wk.qweight", "I32", {14, 9});
               files.add_zeros(at0 + "indexer.wk.scales", "F16", {14, 1});
             }),
             ContainsSubstring("tensor " + at0 + "indexer.wk.qweight") &&
                 ContainsSubstring("unknown tensor"));
  // on a shared layer as well, where the known ones are ignored
  ModelConfig const config = tiny_model(2);
  SharePlan const plan = plan_of("FS");
  CheckpointFiles files(config, plan);
  files.add_indexer(1);
  files.rename(files.module(1) + "indexer.wk.weight", files.module(1) + "indexer.wk.weight_packed");
  CHECK_THAT(refusal(files, config, plan, 1),
             ContainsSubstring("layer 1") && ContainsSubstring("indexer.wk.weight_packed"));
}

TEST_CASE("R017: wk in fp8 is its dequantised matrix, also in a last block that is narrower") {
  ModelConfig config = tiny_model(1);
  config.hidden_size = 128 + 72;
  config.index_head_dim = 128 + 6;
  SharePlan const plan = plan_of("F");
  CheckpointFiles files(config, plan);
  std::string const name = at0 + "indexer.wk.weight";
  std::vector<float> const scales{0.3f, 5.0f, 0.07f, 11.0f};
  files.set_fp8(name, 134, 200, scales);
  Stored const stored(files);
  auto const checkpoint = stored.open();
  auto const as_float = load_layer<float>(checkpoint, config, plan, 0).value();
  auto const as_bf16 = load_layer<bf16>(checkpoint, config, plan, 0).value();
  auto const& codes = files.at(name).bytes;
  for (std::size_t o = 0; o < 134; ++o) {
    for (std::size_t i = 0; i < 200; ++i) {
      auto const code = static_cast<std::uint8_t>(codes[o * 200 + i]);
      float const scale = o < 128 ? (i < 128 ? 0.3f : 5.0f) : (i < 128 ? 0.07f : 11.0f);
      float const value = to_float(indexshare::e4m3{code}) * scale;
      auto const row = static_cast<index_t>(o);
      auto const column = static_cast<index_t>(i);
      REQUIRE(as_float.views().indexer->wk(row, column) == value);
      REQUIRE(as_bf16.views().indexer->wk(row, column).bits == from_float<bf16>(value).bits);
    }
  }
}

TEST_CASE("R018: scales of wk are applied, and weights_proj beside it stays exact") {
  ModelConfig config = tiny_model(1);
  config.hidden_size = 256;
  SharePlan const plan = plan_of("F");
  CheckpointFiles files(config, plan);
  std::string const name = at0 + "indexer.wk.weight";
  files.set_fp8(name, 14, 256, {0.5f, 2.0f});
  Stored const stored(files);
  auto const checkpoint = stored.open();
  auto const loaded = load_layer<bf16>(checkpoint, config, plan, 0).value();
  auto const& codes = files.at(name).bytes;
  bool scale_shows = false;
  for (index_t o = 0; o < 14; ++o) {
    for (index_t i = 0; i < 256; ++i) {
      float const code = to_float(indexshare::e4m3{
          static_cast<std::uint8_t>(codes[static_cast<std::size_t>(o * 256 + i)])});
      float const value = to_float(loaded.views().indexer->wk(o, i));
      REQUIRE(value == code * (i < 128 ? 0.5f : 2.0f));
      scale_shows = scale_shows || value != code;
    }
  }
  CHECK(scale_shows);
  CHECK(floats(loaded.views().indexer->weights_proj) ==
        files.values(at0 + "indexer.weights_proj.weight"));
}

TEST_CASE("R019: a miniature model loads") {
  ModelConfig config = tiny_model(2);
  config.kv_lora_rank = 32;
  config.qk_rope_head_dim = 8;
  config.v_head_dim = 16;
  config.index_head_dim = 16;
  config.index_n_heads = 2;
  SharePlan const plan = plan_of("FS");
  check_loads<float>(CheckpointFiles(config, plan), config, plan);
  check_loads<bf16>(CheckpointFiles(config, plan, {.dtype = "F8_E4M3"}), config, plan);
}

TEST_CASE("Scale blocks of kv_b straddle heads") {
  ModelConfig config = tiny_model(1);
  config.num_attention_heads = 12;  // 336 rows of 28 per head: blocks end inside heads 4 and 9
  config.kv_lora_rank = 160;        // blocks of 128 and 32 columns
  SharePlan const plan = plan_of("F");
  CheckpointFiles files(config, plan);
  std::string const name = at0 + "kv_b_proj.weight";
  std::vector<float> const scales{1, 2, 4, 8, 16, 32};
  files.set_fp8(name, 336, 160, scales);
  Stored const stored(files);
  auto const checkpoint = stored.open();
  auto const loaded = load_layer<bf16>(checkpoint, config, plan, 0).value();
  auto const& codes = files.at(name).bytes;
  for (index_t head = 0; head < 12; ++head) {
    for (index_t lane = 0; lane < 28; ++lane) {
      for (index_t i = 0; i < 160; ++i) {
        index_t const row = head * 28 + lane;
        auto const code = static_cast<std::uint8_t>(codes[static_cast<std::size_t>(row * 160 + i)]);
        float const scale = scales[static_cast<std::size_t>(row / 128 * 2 + (i < 128 ? 0 : 1))];
        REQUIRE(to_float(loaded.views().kv_b_proj(row, i)) ==
                to_float(indexshare::e4m3{code}) * scale);
      }
    }
  }
}

TEST_CASE("Scales are refused by name unless they fit, are positive and finite") {
  std::string const wk = at0 + "indexer.wk.weight";
  std::string const scale = wk + "_scale_inv";
  auto const after_scale = [&](float value) {
    return refusal_after([&](CheckpointFiles& files) { files.set_fp8(wk, 14, 36, {value}); });
  };
  using Limits = std::numeric_limits<float>;
  for (float const value :
       {0.0f, -0.0f, -1.0f, Limits::infinity(), -Limits::infinity(), Limits::quiet_NaN()}) {
    CHECK_THAT(after_scale(value), ContainsSubstring("tensor " + scale) &&
                                       ContainsSubstring("element [0, 0] is") &&
                                       ContainsSubstring("positive finite"));
  }
  CHECK_THAT(after_scale(0), ContainsSubstring("is 0,"));
  CHECK_THAT(after_scale(-1e-9f), ContainsSubstring("is -1e-09,"));

  CHECK_THAT(refusal_after([&](CheckpointFiles& files) { files.drop(scale); }, "F8_E4M3"),
             ContainsSubstring("tensor " + scale) && ContainsSubstring("no such tensor"));
  CHECK_THAT(refusal_after(
                 [&](CheckpointFiles& files) {
                   files.set(scale, "BF16", {1, 1});
                 },
                 "F8_E4M3"),
             ContainsSubstring("tensor " + scale) && ContainsSubstring("got dtype BF16") &&
                 ContainsSubstring("expected F32"));
  // R041: exponents alone are another format of scales, which nothing here decodes by guess
  CHECK_THAT(refusal_after(
                 [&](CheckpointFiles& files) {
                   files.add_zeros(scale, "F8_E8M0", {1, 1});
                 },
                 "F8_E4M3"),
             ContainsSubstring("tensor " + scale) && ContainsSubstring("got dtype F8_E8M0"));
  CHECK_THAT(refusal_after(
                 [&](CheckpointFiles& files) {
                   files.set(scale, "F32", {14, 1});
                 },
                 "F8_E4M3"),
             ContainsSubstring("tensor " + scale) && ContainsSubstring("got shape [14, 1]") &&
                 ContainsSubstring("expected [1, 1]"));
  CHECK_THAT(refusal_after([&](CheckpointFiles& files) {
               files.set(scale, "F32", {1, 1});
             }),
             ContainsSubstring("tensor " + scale) && ContainsSubstring("dtype BF16"));
  CHECK_THAT(refusal_after([&](CheckpointFiles& files) {
               files.set(at0 + "q_a_layernorm.weight_scale_inv", "F32", {1, 1});
             }),
             ContainsSubstring("q_a_layernorm.weight_scale_inv"));
}

TEST_CASE("NaN in fp8 and values that do not fit are refused by element") {
  std::string const wk = at0 + "indexer.wk.weight";
  for (char const code : {'\x7F', '\xFF'}) {
    CHECK_THAT(refusal_after([&](CheckpointFiles& files) { files.at(wk).bytes[2 * 36 + 5] = code; },
                             "F8_E4M3"),
               ContainsSubstring("tensor " + wk) && ContainsSubstring("element [2, 5] is NaN"));
  }
  CHECK_THAT(refusal_after([&](CheckpointFiles& files) { files.set_fp8(wk, 14, 36, {3e38f}); }),
             ContainsSubstring("tensor " + wk) && ContainsSubstring("too large"));

  ModelConfig const config = tiny_model(1);
  SharePlan const plan = plan_of("F");
  CheckpointFiles files(config, plan, {.dtype = "F32"});
  float const large = 7e4f;
  std::memcpy(files.at(at0 + "o_proj.weight").bytes.data() + 33 * 4, &large, 4);
  Stored const stored(files);
  auto const checkpoint = stored.open();
  CHECK(load_layer<bf16>(checkpoint, config, plan, 0).has_value());
  CHECK_THAT(load_layer<fp16>(checkpoint, config, plan, 0).error().message(),
             ContainsSubstring("o_proj.weight") && ContainsSubstring("element [1, 1] is 70000"));
}

TEST_CASE("F32 becomes bf16 rounded to nearest, ties to even") {
  ModelConfig const config = tiny_model(1);
  SharePlan const plan = plan_of("F");
  CheckpointFiles files(config, plan, {.dtype = "F32"});
  std::uint32_t const bits[] = {0x3F808000u, 0x3F818000u, 0x3F808001u, 0x3F807FFFu};
  std::memcpy(files.at(at0 + "q_a_proj.weight").bytes.data(), bits, sizeof bits);
  Stored const stored(files);
  auto const checkpoint = stored.open();
  auto const loaded = load_layer<bf16>(checkpoint, config, plan, 0).value();
  auto const& view = loaded.views().q_a_proj;
  CHECK(view(0, 0).bits == 0x3F80);
  CHECK(view(0, 1).bits == 0x3F82);
  CHECK(view(0, 2).bits == 0x3F81);
  CHECK(view(0, 3).bits == 0x3F80);
}

TEST_CASE("Other dtypes are refused by name") {
  for (char const* const dtype : {"F8_E5M2", "U8", "I8", "F64", "I32", "F8_E8M0", "F4"}) {
    INFO(dtype);
    CHECK_THAT(refusal_after([&](CheckpointFiles& files) {
                 files.add_zeros(at0 + "q_b_proj.weight", dtype, {40, 24});
               }),
               ContainsSubstring("q_b_proj.weight: got dtype " + std::string(dtype)) &&
                   ContainsSubstring("BF16, F16, F32 or F8_E4M3"));
  }
  CHECK_THAT(refusal_after([&](CheckpointFiles& files) {
               files.add_zeros(at0 + "q_b_proj.weight", "I8", {40, 12});  // packed: half as wide
             }),
             ContainsSubstring("got dtype I8"));
  CHECK_THAT(refusal_after([&](CheckpointFiles& files) {
               files.set(at0 + "indexer.k_norm.bias", "F8_E4M3", {14});
             }),
             ContainsSubstring("k_norm.bias: got dtype F8_E4M3") &&
                 ContainsSubstring("expected BF16, F16 or F32"));
}

TEST_CASE("Shapes are checked against the config, for every tensor") {
  ModelConfig config = tiny_model(1);
  config.gated_output = config.learnable_sink = true;
  SharePlan const plan = plan_of("F");
  CheckpointFiles const whole(config, plan);
  for (auto const& [name, tensor] : whole.tensors()) {
    if (!name.starts_with(at0)) continue;
    CheckpointFiles files = whole;
    auto shape = tensor.shape;
    ++shape.back();
    files.set(name, "BF16", shape);
    CHECK_THAT(
        refusal(files, config, plan, 0),
        ContainsSubstring("tensor " + name + ": got shape " + indexshare::io::shape_text(shape) +
                          ", expected " + indexshare::io::shape_text(tensor.shape)));
  }
  CHECK_THAT(refusal_after([](CheckpointFiles& files) {
               files.set(at0 + "o_proj.weight", "BF16", {32, 36});  // transposed
             }),
             ContainsSubstring("got shape [32, 36], expected [36, 32]"));
  CHECK_THAT(refusal_after([](CheckpointFiles& files) {
               files.set(at0 + "q_a_layernorm.weight", "BF16", {1, 24});
             }),
             ContainsSubstring("got shape [1, 24], expected [24]"));
}

TEST_CASE("Names of a model saved without its head or inside a multimodal one are known") {
  ModelConfig const config = tiny_model(2, 1);
  SharePlan const plan = plan_of("FS", 1);
  for (std::string const prefix : {"model.", "", "model.language_model."}) {
    for (bool const own_list : {false, true}) {
      CheckpointFiles const files(config, plan, {.prefix = prefix, .own_mtp_list = own_list});
      check_loads<bf16>(files, config, plan);
      CHECK(unused_layers(Stored(files).open(), plan).empty());
    }
  }
  CHECK_THAT(refusal(CheckpointFiles(config, plan, {.prefix = "transformer."}), config, plan, 0),
             ContainsSubstring("no tensor of the layer") &&
                 ContainsSubstring("model.layers.0.self_attn.*"));
  CheckpointFiles both(config, plan);
  both.add_zeros("layers.0.self_attn.q_a_proj.weight", "BF16", {24, 36});
  CHECK_THAT(refusal(both, config, plan, 0), ContainsSubstring("under model.layers.0.self_attn.") &&
                                                 ContainsSubstring("under layers.0.self_attn."));
  CheckpointFiles two_lists(config, plan);
  two_lists.add_zeros("model.mtp_layers.0.self_attn.q_a_proj.weight", "BF16", {24, 36});
  CHECK_THAT(refusal(two_lists, config, plan, 2), ContainsSubstring("one of the two"));
}

TEST_CASE("Gate and sinks: either name, not both, and none that the config does not state") {
  ModelConfig config = tiny_model(1);
  config.gated_output = config.learnable_sink = true;
  SharePlan const plan = plan_of("F");
  std::string const dtype = GENERATE("BF16", "F8_E4M3");
  for (bool const published : {false, true}) {
    CheckpointFiles const files(config, plan, {.dtype = dtype, .published_names = published});
    check_loads<bf16>(files, config, plan);
    Stored const stored(files);
    auto const checkpoint = stored.open();
    auto const loaded = load_layer<float>(checkpoint, config, plan, 0).value();
    std::string const gate = at0 + (published ? "linear_gate.weight" : "gate_proj.weight");
    std::string const sinks = at0 + (published ? "learnable_sink_param" : "sinks");
    CHECK(floats(loaded.views().gate_proj) == files.values(gate));
    CHECK(floats(loaded.views().sinks) == files.values(sinks));

    CheckpointFiles both = files;
    both.set(at0 + (published ? "sinks" : "learnable_sink_param"), "BF16", {2});
    CHECK_THAT(refusal(both, config, plan, 0), ContainsSubstring("sinks: got a second one under") &&
                                                   ContainsSubstring("learnable_sink_param"));
    CheckpointFiles neither = files;
    neither.drop(gate);
    CHECK_THAT(refusal(neither, config, plan, 0),
               ContainsSubstring("gate_proj.weight: got no such tensor") &&
                   ContainsSubstring("linear_gate.weight"));
    CheckpointFiles stray = files;
    stray.set(at0 + (published ? "gate_proj" : "linear_gate") + ".weight_scale_inv", "F32", {1, 1});
    CHECK_THAT(refusal(stray, config, plan, 0), ContainsSubstring("scales without their tensor"));

    ModelConfig plain = config;
    plain.gated_output = false;
    CHECK_THAT(refusal(files, plain, plan, 0),
               ContainsSubstring("tensor " + gate + ": got an unknown tensor"));
    plain = config;
    plain.learnable_sink = false;
    CHECK_THAT(refusal(files, plain, plan, 0),
               ContainsSubstring("tensor " + sinks + ": got an unknown tensor"));
  }
}

TEST_CASE("Layers that cannot be loaded are refused before a tensor is read") {
  ModelConfig const config = tiny_model(3);
  SharePlan const plan = plan_of("F.S");
  Stored const stored(CheckpointFiles(config, plan));
  auto const checkpoint = stored.open();
  auto const message = [&](ModelConfig const& model, SharePlan const& schedule,
                           std::int32_t layer) {
    return load_layer<bf16>(checkpoint, model, schedule, layer).error().message();
  };
  CHECK(load_layer<bf16>(checkpoint, config, plan, 2).has_value());
  CHECK_THAT(message(config, plan, 1), ContainsSubstring("layer 1: got a layer without sparse"));
  CHECK_THAT(message(config, plan, 3), ContainsSubstring("layer 3: got no such layer"));
  CHECK_THAT(message(config, plan, -1), ContainsSubstring("got no such layer"));
  CHECK_THAT(message(config, plan_of("FFFF"), 0),
             ContainsSubstring("a plan of 4 + 0 layers") && ContainsSubstring("3 + 0"));
  CHECK_THAT(message(config, plan_of("FFF", 1), 0), ContainsSubstring("a plan of 3 + 1 layers"));
  ModelConfig huge = config;
  huge.num_attention_heads = index_t{1} << 62;
  CHECK_THAT(message(huge, plan, 0), ContainsSubstring("num_attention_heads 4611686018427387904"));
  ModelConfig negative = config;
  negative.v_head_dim = -1;
  CHECK_THAT(message(negative, plan, 0), ContainsSubstring("v_head_dim -1"));
  ModelConfig pooled = config;
  pooled.key_pooling.tokens_per_key = 4;
  CHECK_THAT(message(pooled, plan, 0), ContainsSubstring("index_kpool"));
}

TEST_CASE("What lies in the file as it is needed is not copied, the rest is converted") {
  ModelConfig const config = tiny_model(1);
  SharePlan const plan = plan_of("F");
  CheckpointFiles const files(config, plan);
  TempDirectory const directory;
  std::string content = files.single_file();
  directory.write("model.safetensors", content);
  auto const checkpoint = Checkpoint::open(directory.string()).value();
  auto const in_place = load_layer<bf16>(checkpoint, config, plan, 0).value();
  auto const data_of = [](Checkpoint const& from, std::string const& name) {
    return static_cast<void const*>(from.find(at0 + name).value().entry.data);
  };
  CHECK(in_place.views().o_proj.data_handle() == data_of(checkpoint, "o_proj.weight"));
  CHECK(in_place.views().indexer->wk.data_handle() == data_of(checkpoint, "indexer.wk.weight"));
  // 24 + 40 + 2 * 14 of norms and 3 * 36 of weights_proj are fp32 whatever W is
  CHECK(in_place.owned_bytes() == 4 * (24 + 40 + 2 * 14 + 3 * 36));

  // the same file with a header that ends at an odd address
  TempDirectory const odd;
  std::uint64_t length;
  std::memcpy(&length, content.data(), 8);
  content.insert(static_cast<std::size_t>(8 + length), 1, ' ');
  ++length;
  std::memcpy(content.data(), &length, 8);
  odd.write("model.safetensors", content);
  auto const shifted = Checkpoint::open(odd.string()).value();
  auto const copied = load_layer<bf16>(shifted, config, plan, 0).value();
  CHECK(all_floats(copied.views()) == all_floats(in_place.views()));
  CHECK(copied.views().o_proj.data_handle() != data_of(shifted, "o_proj.weight"));
  CHECK(reinterpret_cast<std::uintptr_t>(copied.views().o_proj.data_handle()) % 2 == 0);

  CheckpointFiles const wide(config, plan, {.dtype = "F32"});
  Stored const stored(wide);
  auto const fp32 = stored.open();
  CHECK(load_layer<float>(fp32, config, plan, 0).value().owned_bytes() == 0);
}

TEST_CASE("A layer that moves keeps its views, and is not copied") {
  static_assert(!std::is_copy_constructible_v<LoadedLayer<bf16>>);
  ModelConfig const config = tiny_model(1);
  SharePlan const plan = plan_of("F");
  Stored const stored(CheckpointFiles(config, plan, {.dtype = "F8_E4M3"}));
  auto const checkpoint = stored.open();
  std::vector<LoadedLayer<bf16>> layers;
  layers.push_back(load_layer<bf16>(checkpoint, config, plan, 0).value());
  auto const before = all_floats(layers[0].views());
  auto const* const data = layers[0].views().o_proj.data_handle();
  layers.push_back(load_layer<bf16>(checkpoint, config, plan, 0).value());
  CHECK(layers[0].views().o_proj.data_handle() == data);
  CHECK(all_floats(layers[0].views()) == before);
  CHECK(layers[0].layer() == 0);
}

TEST_CASE("Some layers of a sharded checkpoint open some of its files") {
  ModelConfig const config = tiny_model(8);
  SharePlan const plan = plan_of("FSSSFSSS");
  CheckpointFiles const files(config, plan, {.dtype = "F8_E4M3"});
  TempDirectory const directory;
  files.write_shards(directory, 8);
  auto const checkpoint = Checkpoint::open(directory.string()).value();
  CHECK(unused_layers(checkpoint, plan).empty());
  CHECK(checkpoint.open_files() == 0);
  check_values(load_layer<bf16>(checkpoint, config, plan, 2).value(), files);
  CHECK(checkpoint.open_files() <= 3);
  for (std::int32_t layer = 0; layer < 8; ++layer) {
    check_values(load_layer<bf16>(checkpoint, config, plan, layer).value(), files);
  }
  CHECK(checkpoint.open_files() >= 7);
}

TEST_CASE("Checkpoints that transformers wrote load as their configs state") {
  for (std::string const family : {"glm_moe_dsa", "deepseek_v32", "hy_v4"}) {
    INFO(family);
    std::string const directory = INDEXSHARE_TEST_DATA_DIR "/golden/" + family;
    auto const config = indexshare::io::read_config_file(directory + "/config.json");
    if (!config) FAIL(config.error().message());
    auto const checkpoint = Checkpoint::open(directory);
    if (!checkpoint) FAIL(checkpoint.error().message());
    CHECK(unused_layers(*checkpoint, config->plan).empty());
    for (std::int32_t layer = 0; layer < config->plan.total_layers(); ++layer) {
      auto const loaded = load_layer<bf16>(*checkpoint, config->model, config->plan, layer);
      if (!loaded) FAIL(loaded.error().message());
      CHECK(check_weights(config->model, loaded->views()).ok());
      CHECK(loaded->ignored().empty());
    }
  }
}

TEST_CASE("A layer can be checked without its elements being read") {
  ModelConfig const config = tiny_model(2);
  SharePlan const plan = plan_of("FS");
  std::string const dtype = GENERATE("BF16", "F8_E4M3");
  CheckpointFiles const whole(config, plan, {.dtype = dtype});
  auto const refused = [&](CheckpointFiles const& files, std::int32_t layer) {
    Stored const stored(files);
    auto const checked = check_layer(stored.open(), config, plan, layer);
    return checked ? std::string() : checked.error().message();
  };
  CHECK(refused(whole, 0).empty());
  CHECK(refused(whole, 1).empty());

  // what it refuses, load_layer refuses in the same words
  std::string const matrix = whole.module(0) + "indexer.wk.weight";
  std::vector<CheckpointFiles> spoilt(3, whole);
  spoilt[0].drop(matrix);
  spoilt[1].set(matrix, "BF16", {config.index_head_dim, config.hidden_size + 1});
  spoilt[2].add_zeros(whole.module(0) + "indexer.wk.bias", "F32", {config.index_head_dim});
  if (dtype == "F8_E4M3") {
    spoilt.push_back(whole);
    spoilt.back().drop(matrix + "_scale_inv");
  } else {
    spoilt.push_back(whole);
    spoilt.back().add_zeros(matrix + "_scale_inv", "F32", {1, 1});
  }
  for (CheckpointFiles const& files : spoilt) {
    std::string const message = refused(files, 0);
    CHECK_THAT(message, ContainsSubstring("indexer.wk"));
    Stored const stored(files);
    auto const checkpoint = stored.open();
    auto const checked = check_layer(checkpoint, config, plan, 0);
    auto const loaded = load_layer<float>(checkpoint, config, plan, 0);
    REQUIRE((!checked && !loaded));
    CHECK(checked.error().message() == loaded.error().message());
  }
}
