// SPDX-License-Identifier: Apache-2.0
#include <indexshare/io/config.hpp>
#include <indexshare/io/diagnostic_text.hpp>

#include <catch2/catch_test_macros.hpp>

#include <string>
#include <vector>

#include "config_cases.hpp"

using namespace indexshare;

namespace {

bool mentions(std::string const& text, std::string const& part) {
  return text.find(part) != std::string::npos;
}

io::ConfigError refused_text(std::string const& text) {
  auto const config = io::parse_config(text);
  REQUIRE_FALSE(config.has_value());
  return config.error();
}

Json roles(std::string const& letters) {
  Json list = Json::array();
  for (char const letter : letters) list.push_back(letter == 'F' ? "full" : "shared");
  return list;
}

}  // namespace

TEST_CASE("CFG-SCHED R004: indexer_types win over freq and offset, each difference named") {
  SharePlan const plan = accepted(glm_with("indexer_types", roles("FSFSSF"))).plan;
  CHECK(trunk_sources(plan) == std::vector<std::int32_t>{0, 0, 2, 2, 2, 5});
  std::vector<std::string> texts;
  for (ScheduleDiagnostic const diagnostic : plan.diagnostics())
    texts.push_back(io::diagnostic_text(plan, diagnostic));
  CHECK(texts == std::vector<std::string>{
                     "layer 1 is shared by indexer_types, but index_topk_freq calls it full",
                     "layer 5 is full by indexer_types, but index_topk_freq calls it shared"});
}

TEST_CASE("CFG-SCHED R006: null and absent are the same") {
  Json nulls = small_glm();
  Json absent = small_glm();
  for (char const* field :
       {"index_topk_freq", "index_skip_topk_offset", "index_topk_pattern", "indexer_types"}) {
    nulls[field] = nullptr;
    absent.erase(field);
  }
  SharePlan const plan = accepted(nulls).plan;
  CHECK(plan == accepted(absent).plan);
  CHECK(plan.full_layers().count() == 6);
  CHECK(accepted(nulls).model == accepted(absent).model);
}

TEST_CASE("CFG-SCHED: index_topk_pattern is letters or a list of words") {
  Json config = small_glm_by_freq();
  config["index_topk_pattern"] = "FSFSFS";
  SharePlan const letters = accepted(config).plan;
  CHECK(trunk_sources(letters) == std::vector<std::int32_t>{0, 0, 2, 2, 4, 4});
  CHECK(letters.decided_by() == ScheduleSource::pattern);
  config["index_topk_pattern"] = roles("FSFSFS");
  CHECK(accepted(config).plan == letters);
}

TEST_CASE("CFG-SCHED R005 R014: wrong lengths are refused with both numbers") {
  auto const types = [](std::string const& letters) {
    return refused(glm_with("indexer_types", roles(letters)));
  };
  for (char const* letters : {"FFSSF", "FFSSFFF", "F", ""}) {
    CAPTURE(letters);
    CHECK(types(letters).path == "$.indexer_types");
  }
  CHECK(types("FFSSFFF").message() ==
        "$.indexer_types: got 7 entries, expected a list of 6 entries, one for each of "
        "num_hidden_layers");
  for (char const* letters : {"FFSS", "FFSSFFF", ""}) {
    CAPTURE(letters);
    Json config = small_glm_by_freq();
    config["index_topk_pattern"] = letters;
    io::ConfigError const error = refused(config);
    CHECK(error.path == "$.index_topk_pattern");
    CHECK(error.value == std::to_string(std::string(letters).size()) + " letters");
    config["index_topk_pattern"] = roles(letters);
    CHECK(refused(config).path == "$.index_topk_pattern");
  }
  CHECK(refused(glm_with("mlp_layer_types", {"dense"})).path == "$.mlp_layer_types");
}

TEST_CASE("CFG-SCHED R005: unknown words are refused, case matters") {
  for (Json const& word : {Json("Full"), Json("reuse"), Json("F"), Json("SHARED"), Json(""),
                           Json(nullptr), Json(1), Json(true), Json::array()}) {
    CAPTURE(word.dump());
    Json types = roles("FFSSFF");
    types[5] = word;
    io::ConfigError const error = refused(glm_with("indexer_types", types));
    CHECK(error.path == "$.indexer_types[5]");
    CHECK(error.value == word.dump());
    CHECK(error.expected == "\"full\" or \"shared\"");
  }
  for (char const* letters : {"FFSSFf", "FFSSFR", "FFSS F"}) {
    CAPTURE(letters);
    Json config = small_glm_by_freq();
    config["index_topk_pattern"] = letters;
    CHECK(refused(config).path == "$.index_topk_pattern");
  }
}

TEST_CASE("CFG-SCHED R005 R102: a schedule that begins with a shared layer is refused") {
  CHECK(refused(glm_with("indexer_types", roles("SFSFSF"))).path == "$.indexer_types[0]");
  Json config = small_glm_by_freq();
  config["index_topk_pattern"] = "SFSFSF";
  CHECK(refused(config).path == "$.index_topk_pattern");
  config["index_topk_pattern"] = nullptr;
  config["index_skip_topk_offset"] = 0;
  CHECK(refused(config).path == "$.index_skip_topk_offset");
  CHECK(refused(glm_with("index_topk_freq", 0)).path == "$.index_topk_freq");
  CHECK(refused(glm_with("index_topk_freq", -4)).path == "$.index_topk_freq");
}

TEST_CASE("CFG-OTHER R010: index_topk must be there and at least 1") {
  io::ConfigError const missing = refused(glm_without("index_topk"));
  CHECK(missing.path == "$.index_topk");
  CHECK(missing.value.empty());
  CHECK(mentions(missing.message(), "missing"));
  CHECK(refused(glm_with("index_topk", 0)).path == "$.index_topk");
  CHECK(refused(glm_with("index_topk", nullptr)).path == "$.index_topk");
}

TEST_CASE("CFG-OTHER: every required field is missed by name") {
  for (char const* field :
       {"model_type", "num_hidden_layers", "hidden_size", "num_attention_heads", "q_lora_rank",
        "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "index_n_heads",
        "index_head_dim", "index_topk", "rms_norm_eps"}) {
    CAPTURE(field);
    Json config = glm_without(field);
    config.erase("qk_head_dim");
    io::ConfigError const error = refused(config);
    CHECK(error.path == std::string("$.") + field);
    CHECK(error.value.empty());
  }
  for (char const* field : {"learnable_sink", "gated_mla"}) {
    CAPTURE(field);
    Json config = small_hy_v4();
    config.erase(field);
    io::ConfigError const error = refused(config);
    CHECK(error.path == std::string("$.") + field);
    CHECK(error.expected.find("transformers") != std::string::npos);
  }
  for (char const* field :
       {"index_kpool", "index_kpool_compress", "index_kpool_always_select_tail"}) {
    CAPTURE(field);
    Json config = small_glm5_next();
    config["text_config"].erase(field);
    CHECK(refused(config).path == std::string("$.text_config.") + field);
  }
}

TEST_CASE("CFG-OTHER: a number of another type or size is refused") {
  for (char const* value :
       {"true", "\"2048\"", "1.5", "78.0", "-1", "9223372036854775808", "1e30", "2147483648", "[]",
        "{}", "-9223372036854775808", "18446744073709551615"}) {
    CAPTURE(value);
    io::ConfigError const error = refused(glm_with("index_topk", Json::parse(value)));
    CHECK(error.path == "$.index_topk");
    CHECK(error.value == Json::parse(value).dump());
    CHECK(error.expected == "an integer from 1 to 2147483647");
  }
  for (char const* value : {"true", "\"1e-5\"", "0", "-1e-5", "[]"}) {
    CAPTURE(value);
    CHECK(refused(glm_with("rms_norm_eps", Json::parse(value))).path == "$.rms_norm_eps");
  }
  for (char const* value : {"1", "\"true\"", "[]"}) {
    CAPTURE(value);
    CHECK(refused(glm_with("indexer_rope_interleave", Json::parse(value))).path ==
          "$.indexer_rope_interleave");
  }
}

TEST_CASE("CFG-OTHER: text that is not one JSON object is refused") {
  std::string const good = small_glm().dump();
  CHECK(mentions(refused_text("").value, "invalid JSON at line 1"));
  CHECK(refused_text("[]").path == "$");
  CHECK(refused_text("3").expected == "a JSON object");
  CHECK(mentions(refused_text(good + "x").value, "invalid JSON"));
  CHECK(mentions(refused_text(good + good).value, "invalid JSON"));
  CHECK(mentions(refused_text("{\n  \"a\": NaN}").value, "line 2, column 8"));
  CHECK(refused_text("{\"a\": NaN}").path == "$.a");
  CHECK(refused_text("{\"rope_theta\": 1e999}").path == "$.rope_theta");
  CHECK(refused_text("{\"rope_theta\": 1e999}").value == "a number too large for a double");
  CHECK(refused_text("{\"a\": {\"b\": [1, {\"c\": 1, \"c\": 2}]}}").path == "$.a.b[1].c");
  CHECK(refused_text("{\"a\": 1, \"a\": 1}").value == "a second value");
  CHECK(refused_text("{\"a b\": 1, \"a b\": 1}").path == "$[\"a b\"]");
  CHECK(mentions(refused_text("{\"a\": \"\xff\"}").value, "invalid JSON"));
  CHECK(mentions(refused_text(std::string(1 << 20, '[')).value, "nesting"));
  CHECK(mentions(
      refused_text("{\"a\":" + std::string(100000, '[') + std::string(100000, ']') + "}").value,
      "nesting"));
  CHECK(io::parse_config("\xEF\xBB\xBF" + good).has_value());  // a byte-order mark is harmless
}

TEST_CASE("CFG-OTHER: errors are one line, whatever the text holds") {
  for (char const* text : {"{\"a\\nb\": 1, \"a\\nb\": 1}", "{\"model_type\": \"x\\n\\u0007y\"}"}) {
    std::string const message = refused_text(text).message();
    CAPTURE(message);
    for (char const c : message) CHECK(static_cast<unsigned char>(c) >= 0x20);
  }
  CHECK(refused_text("{\"model_type\": \"" + std::string(5000, 'x') + "\"}").message().size() <
        200);
}

TEST_CASE("CFG-OTHER: an unknown model_type is refused with the known ones") {
  for (Json const& type : {Json("deepseek_v4"), Json("GLM_MOE_DSA"), Json(""), Json(3)}) {
    io::ConfigError const error = refused(glm_with("model_type", type));
    CHECK(error.path == "$.model_type");
    CHECK(error.value == type.dump());
  }
  CHECK(mentions(refused(glm_with("model_type", "deepseek_v4")).message(), "glm_moe_dsa"));
}

TEST_CASE("CFG-OTHER: a nested text model is read, its errors name the place") {
  Json text = small_glm();
  auto const nested = [](char const* outer, Json const& inner) {
    return Json{{"model_type", outer}, {"text_config", inner}};
  };
  CHECK(accepted(nested("glm_moe_dsa", text)).model == accepted(small_glm()).model);
  CHECK(accepted(nested("some_vision_model", text)).plan == accepted(small_glm()).plan);
  CHECK(accepted({{"text_config", text}}).model == accepted(small_glm()).model);
  Json unnamed = text;
  unnamed.erase("model_type");
  CHECK(accepted(nested("glm_moe_dsa", unnamed)).model == accepted(small_glm()).model);
  CHECK(refused(nested("some_vision_model", unnamed)).path == "$.model_type");
  CHECK(refused(nested("hy_v4", text)).path == "$.text_config.model_type");
  Json wrong = text;
  wrong["index_topk"] = "2048";
  CHECK(refused(nested("glm_moe_dsa", wrong)).path == "$.text_config.index_topk");
  CHECK(refused(nested("glm_moe_dsa", 3)).path == "$.text_config");
  Json flat = small_glm();
  flat["text_config"] = nullptr;
  CHECK(accepted(flat).model == accepted(small_glm()).model);
}

TEST_CASE("CFG-OTHER: a field beside text_config must not contradict it") {
  Json config = {{"model_type", "glm_moe_dsa"}, {"text_config", small_glm()}};
  config["index_topk"] = 4;
  CHECK(accepted(config).model.index_topk == 4);
  config["index_topk"] = 8;
  CHECK(refused(config).path == "$.index_topk");
  config.erase("index_topk");
  config["sliding_window"] = 128;  // known, and not in text_config
  CHECK(refused(config).path == "$.sliding_window");
  config.erase("sliding_window");
  config["vision_config"] = {{"index_topk", 9}};
  CHECK(accepted(config).model.index_topk == 4);
}

TEST_CASE("ROPE: the two forms of the rotary fields") {
  Json older = glm_without("rope_parameters");
  older["rope_theta"] = 8000000.0;
  older["rope_scaling"] = nullptr;
  CHECK(accepted(older).model == accepted(small_glm()).model);
  Json both = small_glm();
  both["rope_theta"] = 8000000;
  CHECK(accepted(both).model == accepted(small_glm()).model);
  both["rope_theta"] = 10000;
  CHECK(refused(both).path == "$.rope_theta");
  CHECK(refused(glm_without("rope_parameters")).path == "$.rope_theta");
  Json no_theta = small_glm();
  no_theta["rope_parameters"].erase("rope_theta");
  CHECK(refused(no_theta).path == "$.rope_theta");
  no_theta["rope_theta"] = 8000000;
  CHECK(accepted(no_theta).model == accepted(small_glm()).model);

  Json yarn = small_deepseek();
  Json parameters = yarn["rope_scaling"];
  parameters["rope_type"] = "yarn";  // beside `type`, as some files have it
  parameters["rope_theta"] = 10000;
  Json newer = yarn;
  newer.erase("rope_scaling");
  newer.erase("rope_theta");
  newer["rope_parameters"] = parameters;
  CHECK(accepted(newer).model == accepted(yarn).model);
  newer["rope_scaling"] = yarn["rope_scaling"];
  CHECK(accepted(newer).model == accepted(yarn).model);
  newer["rope_scaling"]["factor"] = 4;
  CHECK(refused(newer).path == "$.rope_scaling");
  newer["rope_scaling"] = {{"type", "yarn"}};
  CHECK(refused(newer).path == "$.rope_scaling.factor");
}

TEST_CASE("ROPE: a model that rotates nothing needs no theta") {
  Json config = glm_without("rope_parameters");
  config["qk_rope_head_dim"] = 0;
  config["qk_head_dim"] = 12;
  ModelConfig const model = accepted(config).model;
  CHECK(model.rope.theta == 0);
  CHECK(model.indexer_rope.dims == 0);
}

TEST_CASE("ROPE: rotary options that are not followed are refused") {
  auto const path_with = [](char const* field, Json value) {
    Json config = small_deepseek();
    config["rope_scaling"][field] = std::move(value);
    return refused(config).path;
  };
  CHECK(path_with("type", "linear") == "$.rope_scaling.type");
  CHECK(path_with("rope_type", "dynamic") == "$.rope_scaling.type");  // differs from `type`
  CHECK(path_with("type", 3) == "$.rope_scaling.type");
  CHECK(path_with("factor", 0.5) == "$.rope_scaling.factor");
  CHECK(path_with("beta_slow", 64) == "$.rope_scaling.beta_fast");
  CHECK(path_with("attention_factor", 1.0) == "$.rope_scaling.attention_factor");
  CHECK(path_with("truncate", false) == "$.rope_scaling.truncate");
  CHECK(path_with("partial_rotary_factor", 0.5) == "$.rope_scaling.partial_rotary_factor");
  CHECK(path_with("long_factor", {1, 2}) == "$.rope_scaling.long_factor");
  CHECK(path_with("original_max_position_embeddings", nullptr) ==
        "$.rope_scaling.original_max_position_embeddings");
  Json idle = small_glm();
  idle["rope_parameters"]["factor"] = 4;  // with rope_type default it would be ignored
  CHECK(refused(idle).path == "$.rope_parameters.factor");
  for (Json const& no_object : {Json(3), Json::array(), Json("default")})
    CHECK(refused(glm_with("rope_parameters", no_object)).path == "$.rope_parameters");
  CHECK(refused(glm_with("rope_ratio", 2)).path == "$.rope_ratio");
}

TEST_CASE("CFG-OTHER: values that the library does not follow are refused, neutral ones are not") {
  struct Case {
    char const* field;
    Json refused;
    Json neutral;
  };
  std::vector<Case> const cases = {{"attention_bias", true, false},
                                   {"num_key_value_heads", 1, 2},
                                   {"qk_head_dim", 12, 20},
                                   {"sliding_window", 128, nullptr},
                                   {"use_sliding_window", true, false},
                                   {"index_kpool", 4, 1},
                                   {"index_k_norm_type", "rms", "layernorm"},
                                   {"index_init_tokens", 1, 0},
                                   {"index_local_tokens", 16, 0},
                                   {"moe_layer_freq", 2, 1},
                                   {"partial_rotary_factor", 0.5, 1.0},
                                   {"learnable_sink", true, false},
                                   {"gated_mla", true, false},
                                   {"use_index_cache", false, true},
                                   {"index_source_layer_ids", {0, 1}, nullptr},
                                   {"indexer_dtype", "fp4", nullptr}};
  for (Case const& test : cases) {
    CAPTURE(test.field);
    CHECK(refused(glm_with(test.field, test.refused)).path == std::string("$.") + test.field);
    CHECK(accepted(glm_with(test.field, test.neutral)).model == accepted(small_glm()).model);
  }
}

TEST_CASE("CFG-OTHER: head_dim and fields of other parts are not read") {
  Json config = small_glm();
  for (Json const& value : {Json(64), Json(192), Json("x"), Json(nullptr)}) {
    config["head_dim"] = value;
    CHECK(accepted(config).model == accepted(small_glm()).model);
  }
  config["num_experts"] = 77;
  config["bos_token_id"] = 0;
  config["quantization_config"] = {{"quant_method", "fp8"}};
  CHECK(accepted(config).model == accepted(small_glm()).model);
}

TEST_CASE("CFG-OTHER: dense layers stated twice must agree") {
  CHECK(refused(glm_with("first_k_dense_replace", 1)).path == "$.mlp_layer_types[1]");
  CHECK(refused(glm_with("first_k_dense_replace", 7)).path == "$.first_k_dense_replace");
  Json config = small_glm();
  config["mlp_layer_types"][3] = "Sparse";
  CHECK(refused(config).path == "$.mlp_layer_types[3]");
  CHECK(refused(glm_with("num_experts_per_tok", 9)).path == "$.num_experts_per_tok");
}

TEST_CASE("ROPE: as many lanes as the indexer can rotate, in pairs") {
  Json config = glm_without("qk_head_dim");
  config["qk_rope_head_dim"] = 7;
  CHECK(refused(config).path == "$.qk_rope_head_dim");
  config["qk_rope_head_dim"] = 16;
  CHECK(refused(config).path == "$.qk_rope_head_dim");
}

TEST_CASE("CFG-SCHED: only glm5_next has layers of another kind, and must say which") {
  Json types(6, "deepseek_sparse_attention");
  CHECK(accepted(glm_with("layer_types", types)).plan == accepted(small_glm()).plan);
  types[2] = "linear_attention";
  CHECK(refused(glm_with("layer_types", types)).path == "$.layer_types[2]");
  CHECK(refused(glm_with("linear_attn_config", Json::object())).path == "$.linear_attn_config");

  Json const base = small_glm5_next();
  auto const text_with = [&](char const* field, Json value) {
    Json config = base;
    config["text_config"][field] = std::move(value);
    return config;
  };
  CHECK(trunk_sources(accepted(base).plan) == std::vector<std::int32_t>{-1, 1, -1, 1, 1, -1});
  CHECK(accepted(text_with("layer_types", nullptr)).plan == accepted(base).plan);
  CHECK(accepted(text_with("linear_attn_config", nullptr)).plan == accepted(base).plan);
  Json by_linear = text_with("layer_types", nullptr);
  by_linear["text_config"]["linear_attn_config"].erase("full_attn_layers");
  CHECK(accepted(by_linear).plan == accepted(base).plan);
  by_linear["text_config"].erase("linear_attn_config");
  CHECK(refused(by_linear).path == "$.text_config.layer_types");
  Json differ = base;
  differ["text_config"]["linear_attn_config"]["kda_layers"] = {1, 3, 6};
  CHECK(refused(differ).path == "$.text_config.linear_attn_config.kda_layers[2]");
  differ["text_config"]["linear_attn_config"]["kda_layers"] = {1, 3, 5};  // counted from 1
  CHECK(refused(differ).path == "$.text_config.linear_attn_config.kda_layers");
  CHECK(refused(text_with("index_kpool", 3)).path == "$.text_config.index_kpool");
  CHECK(refused(text_with("linear_attn_config", 3)).path == "$.text_config.linear_attn_config");
}

TEST_CASE("CFG-OTHER: a file that cannot be read is named") {
  auto const missing = io::read_config_file(data_file("configs/no-such-file.json"));
  REQUIRE_FALSE(missing.has_value());
  CHECK(missing.error().path == data_file("configs/no-such-file.json"));
  auto const directory = io::read_config_file(data_file("configs"));
  REQUIRE_FALSE(directory.has_value());
  CHECK(directory.error().value == "a directory");
}
