// SPDX-License-Identifier: Apache-2.0
// Broken configs by the thousand: none may crash the reader, and what it accepts must be usable.
#include <indexshare/accounting.hpp>
#include <indexshare/io/config.hpp>

#include <catch2/catch_test_macros.hpp>

#include <cmath>
#include <string>
#include <vector>

#include "config_cases.hpp"

using namespace indexshare;

namespace {

std::vector<Json> bases() {
  return {small_glm(),
          small_glm_by_freq(),
          small_deepseek(),
          small_hy_v4(),
          small_glm5_next(),
          json_file("configs/GLM-5.2.json"),
          json_file("configs/DeepSeek-V3.2.json"),
          json_file("configs/Hy4-preview.partial.json"),
          json_file("configs/GLM-5.3-Flash.glm5_next.from_test_fixture.json")};
}

std::vector<Json> const& junk() {
  static std::vector<Json> const values = {nullptr,
                                           true,
                                           false,
                                           0,
                                           -1,
                                           1,
                                           2,
                                           1.5,
                                           1e300,
                                           -0.0,
                                           2147483647,
                                           2147483648,
                                           INT64_MIN,
                                           UINT64_MAX,
                                           "",
                                           "2048",
                                           "full",
                                           "yarn",
                                           Json::array(),
                                           Json::object(),
                                           {1, 2, 3},
                                           {"full"},
                                           Json({{"a", 1}})};
  return values;
}

/// A refusal must say where and what; an accepted config must hold numbers that can be used.
void check_outcome(io::ConfigResult<io::LoadedConfig> const& result) {
  if (!result) {
    bool const told = result.error().path.starts_with('$') && !result.error().expected.empty();
    bool const one_line = result.error().message().find_first_of("\r\n") == std::string::npos;
    if (!told || !one_line) FAIL_CHECK("a poor message: " << result.error().message());
    return;
  }
  auto const& [model, plan] = *result;
  bool const usable = plan.num_layers() == model.num_hidden_layers && model.index_topk > 0 &&
                      std::isfinite(softmax_scale(model)) && std::isfinite(rope_amplitude(model)) &&
                      rope_begin(model) >= 0 && rope_end(model) <= model.index_head_dim;
  if (!usable) FAIL_CHECK("an unusable config was accepted");
  if (can_count_complete(model).ok() && can_count_cache_bytes(model).ok()) {
    double const ratio = complete_sharing_flops(model, plan, 1000, CoreForm::absorbed).ratio();
    if (!(ratio >= 1) || cache_bytes_per_token(model, plan).kv <= 0)
      FAIL_CHECK("an accepted config cannot be counted");
  }
}

void check_junk_at(Json& whole, Json& place) {
  Json const original = place;
  for (Json const& value : junk()) {
    place = value;
    check_outcome(read(whole));
  }
  place = original;
}

/// Junk in place of every value, at every depth; of a long list, in its first and last entry.
void check_junk_below(Json& whole, Json& place) {
  if (place.is_object())
    for (auto& [key, value] : place.items()) {
      check_junk_at(whole, value);
      check_junk_below(whole, value);
    }
  if (place.is_array() && !place.empty()) {
    check_junk_at(whole, place.front());
    check_junk_at(whole, place.back());
  }
}

}  // namespace

TEST_CASE("CFG-OTHER: junk in any field is refused or harmless") {
  for (Json& config : bases()) check_junk_below(config, config);
}

TEST_CASE("CFG-OTHER: any field may be dropped, any list shortened") {
  for (Json const& config : bases()) {
    bool const nested = config.contains("text_config");
    Json const& text = nested ? config["text_config"] : config;
    for (auto const& [key, value] : text.items()) {
      Json changed = config;
      Json& changed_text = nested ? changed["text_config"] : changed;
      changed_text.erase(key);
      check_outcome(read(changed));
      if (!value.is_array() || value.empty()) continue;
      changed_text[key] = value;
      changed_text[key].erase(0);
      check_outcome(read(changed));
    }
  }
}

TEST_CASE("CFG-OTHER: no beginning of a config is a config") {
  for (Json const& config : bases()) {
    std::string const text = config.dump();
    for (std::size_t length = 0; length < text.size(); ++length) {
      auto const result = io::parse_config(std::string_view(text).substr(0, length));
      if (result) FAIL_CHECK("accepted the first " << length << " bytes");
      check_outcome(result);
    }
  }
}

TEST_CASE("CFG-OTHER: any byte of a config may be another") {
  for (Json const& config : {small_glm(), small_deepseek(), small_glm5_next()}) {
    std::string const text = config.dump();
    for (std::size_t at = 0; at < text.size(); ++at)
      for (char const byte : {'\0', '"', '{', ']', ',', '9', '-', 'e', '\x80', '\n'}) {
        std::string changed = text;
        changed[at] = byte;
        check_outcome(io::parse_config(changed));
      }
  }
}
