// SPDX-License-Identifier: Apache-2.0
#include <indexshare/accounting.hpp>

#include <catch2/catch_approx.hpp>
#include <catch2/catch_test_macros.hpp>

#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

#include "config_cases.hpp"

using namespace indexshare;
using Catch::Approx;

namespace {

io::LoadedConfig glm52() { return accepted(json_file("configs/GLM-5.2.json")); }

}  // namespace

TEST_CASE("CFG-OTHER: the parts of GLM-5.2's complete count, per layer") {
  ModelConfig const model = glm52().model;
  CHECK(attention_projection_flops(model) == 2.0 * 165019648);
  CHECK(indexer_projection_flops(model) == 2.0 * 9371648);
  CHECK(index_scoring_flops(model, 1 << 20) == 8192.0 * (1 << 20));
  CHECK(attention_core_flops(model, 2048, CoreForm::absorbed) == 285212672.0);
  CHECK(attention_core_flops(model, 2048, CoreForm::expanded) == 134217728.0);
  CHECK(feed_forward_flops(model) / 1e9 == Approx(52.56).epsilon(1e-3));
  CHECK(output_head_flops(model) == 2.0 * 154880 * 6144);
}

TEST_CASE("CFG-OTHER: twice the active parameters are the matrices of the count") {
  CompleteFlops const flops = complete_decode_flops(glm52().model, 21, 1, CoreForm::absorbed);
  double const matrices = flops.attention_projections + flops.indexer_projections +
                          flops.feed_forward + flops.output_head;
  CHECK(matrices == 2 * 40297758720.0);
}

TEST_CASE("CFG-OTHER: ratios of the complete count at five lengths") {
  auto const [model, plan] = glm52();
  struct Row {
    index_t keys;
    double all_full, shared, absorbed, expanded;
  };
  for (Row const& row :
       {Row{131072, 187.7, 125.4, 1.50, 1.55}, Row{262144, 271.4, 147.9, 1.83, 1.91},
        Row{524288, 438.9, 193.0, 2.27, 2.36}, Row{1000000, 742.9, 274.9, 2.70, 2.78},
        Row{1048576, 773.9, 283.2, 2.73, 2.81}}) {
    CAPTURE(row.keys);
    SharingFlops const absorbed = complete_sharing_flops(model, plan, row.keys, CoreForm::absorbed);
    CHECK(absorbed.all_full.total() / 1e9 == Approx(row.all_full).margin(0.05));
    CHECK(absorbed.shared.total() / 1e9 == Approx(row.shared).margin(0.05));
    CHECK(absorbed.ratio() == Approx(row.absorbed).margin(0.005));
    SharingFlops const expanded = complete_sharing_flops(model, plan, row.keys, CoreForm::expanded);
    CHECK(expanded.ratio() == Approx(row.expanded).margin(0.005));
  }
}

TEST_CASE("CFG-OTHER: the core counts min(length, index_topk) keys") {
  ModelConfig const model = glm52().model;
  auto const core = [&](index_t keys) {
    return complete_decode_flops(model, 21, keys, CoreForm::absorbed).attention_core;
  };
  CHECK(core(2047) < core(2048));
  CHECK(core(2048) == core(2049));
  CHECK(core(0) == 0);
}

TEST_CASE("SHARE-CACHE: cache bytes of GLM-5.2, the KV cache does not shrink") {
  auto const [model, plan] = glm52();
  CHECK(index_key_bytes(model) == 132);
  CHECK(kv_entry_bytes(model) == 656);
  CacheBytes const bytes = cache_bytes_per_token(model, plan);
  CHECK(bytes.index_key_all_full == 10296);
  CHECK(bytes.index_key == 2772);
  CHECK(bytes.kv == 51168);
  CacheBytes const unshared =
      cache_bytes_per_token(model, accepted(json_file("configs/GLM-5.1.reconstructed.json")).plan);
  CHECK(unshared.kv == bytes.kv);
  CHECK(unshared.index_key == bytes.index_key_all_full);
}

TEST_CASE("SHARE-CACHE R106: sharing saves 57 of 78 index-key caches") {
  auto const [model, plan] = glm52();
  CacheBytes const bytes = cache_bytes_per_token(model, plan);
  CHECK(78 * (bytes.index_key_all_full - bytes.index_key) == 57 * bytes.index_key_all_full);
}

TEST_CASE("CFG-OTHER R011: caches built, caches counted and full layers agree") {
  for (int const freq : {1, 4})
    for (int const mtp : {0, 1})
      for (bool const flag : {false, true}) {
        CAPTURE(freq, mtp, flag);
        Json config = small_glm_by_freq();
        config["index_topk_freq"] = freq;
        config["num_nextn_predict_layers"] = mtp;
        config["index_share_for_mtp_iteration"] = flag;
        auto const [model, plan] = accepted(config);
        auto const stage = plan.stage(0, plan.total_layers(), StageStart::own);
        REQUIRE(stage.has_value());
        std::int32_t const trunk = freq == 1 ? 6 : 3;  // F F F S S S
        CHECK(stage->index_caches() == trunk + mtp);   // the flag removes no indexer
        CHECK(plan.full_layers(0, plan.total_layers()).count() == trunk + mtp);
        CHECK(cache_bytes_per_token(model, plan).index_key ==
              (stage->index_caches() - mtp) * index_key_bytes(model));
        CHECK(complete_decode_flops(model, plan.full_layers().count(), 100, CoreForm::absorbed)
                  .index_scoring == trunk * index_scoring_flops(model, 100));
      }
}

TEST_CASE("CFG-OTHER: a count that lacks a field says which") {
  for (char const* field : {"vocab_size", "intermediate_size", "moe_intermediate_size",
                            "n_routed_experts", "n_shared_experts", "num_experts_per_tok"}) {
    CAPTURE(field);
    Status const status = can_count_complete(accepted(glm_without(field)).model);
    CHECK(status.code == Errc::unsupported);
    CHECK(std::string(status.what).find(field) != std::string::npos);
  }
  Json config = glm_without("first_k_dense_replace");
  CHECK(can_count_complete(accepted(config).model).ok());
  config.erase("mlp_layer_types");
  CHECK_FALSE(can_count_complete(accepted(config).model).ok());
  Json dense = glm_without("mlp_layer_types");
  dense["first_k_dense_replace"] = 6;
  dense.erase("n_routed_experts");
  CHECK(can_count_complete(accepted(dense).model).ok());  // no layer has experts
  CHECK_FALSE(can_count_complete(accepted(small_glm5_next()).model).ok());
  CHECK_FALSE(can_count_cache_bytes(accepted(small_glm5_next()).model).ok());
}

TEST_CASE("INT32: counts of a model far larger than any do not wrap") {
  Json config = small_glm();
  for (char const* width : {"hidden_size", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim",
                            "v_head_dim", "index_head_dim", "intermediate_size"})
    config[width] = 1 << 20;
  config["num_attention_heads"] = config["num_key_value_heads"] = config["index_n_heads"] = 1 << 16;
  config["index_topk"] = config["max_position_embeddings"] = 2147483647;
  config.erase("qk_head_dim");
  auto const [model, plan] = accepted(config);
  SharingFlops const flops = complete_sharing_flops(model, plan, 2147483647, CoreForm::absorbed);
  CHECK(flops.shared.attention_core ==
        Approx(6 * 2.0 * 65536 * 2147483647.0 * (2 * 1048576.0 + 8)));
  CHECK(flops.ratio() > 1);
  CHECK(cache_bytes_per_token(model, plan).kv > 0);
  CHECK(index_weight_scale(model) > 0);
}

TEST_CASE("CFG-OTHER: a prefill is the sum of its rows, of any range") {
  ModelConfig const model = accepted(small_glm()).model;  // index_topk 4
  for (TokenRange const range :
       {TokenRange{0, 0}, TokenRange{0, 1}, TokenRange{0, 3}, TokenRange{0, 4}, TokenRange{0, 5},
        TokenRange{2, 4}, TokenRange{3, 9}, TokenRange{4, 9}, TokenRange{5, 9}, TokenRange{7, 7},
        TokenRange{0, 1000}}) {
    CAPTURE(range.first, range.last);
    CountedRows by_row;
    CompleteFlops flops;
    MovedBytes bytes;
    for (index_t position = range.first; position < range.last; ++position) {
      index_t const keys = position + 1;
      by_row.rows += 1;
      by_row.visible_keys += static_cast<double>(keys);
      by_row.attended_keys += static_cast<double>(keys < 4 ? keys : 4);
      flops += complete_decode_flops(model, 3, keys, CoreForm::expanded);
      bytes += moved_bytes(model, 3, decoded_row(model, keys));
    }
    CountedRows const rows = prefilled_rows(model, range);
    CHECK(rows == by_row);
    CHECK(complete_flops(model, 3, rows, CoreForm::expanded).total() == flops.total());
    CHECK(moved_bytes(model, 3, rows).total() == bytes.total());
  }
}

TEST_CASE("CFG-OTHER: the whole prefill of a million tokens, exact and by its mean context") {
  auto const [model, plan] = glm52();
  CountedRows const rows = prefilled_rows(model, {0, 1 << 20});
  CHECK(rows.visible_keys == 549756338176.0);  // 2^19 * (2^20 + 1)
  CHECK(rows.attended_keys == 2145387520.0);   // 2^20 * 2048 less the 2047 * 2048 / 2 too few
  SharingFlops const flops = complete_sharing_flops(model, plan, rows, CoreForm::absorbed);
  CHECK(flops.all_full.total() / rows.rows / 1e9 == Approx(438.9).margin(0.05));
  CHECK(flops.shared.total() / rows.rows / 1e9 == Approx(193.0).margin(0.05));
  CHECK(flops.ratio() == Approx(2.274).margin(0.0005));
  FlopsByIndexers const mean =
      accounted_flops(Accounting::half_context, model, decoded_row(model, 1 << 20));
  CHECK(mean.total(21) != flops.shared.total() / rows.rows);  // about, not exactly
  CHECK(mean.total(21) == Approx(flops.shared.total() / rows.rows).epsilon(1e-3));
  // The longest that positions can name: no sum wraps.
  CHECK(prefilled_rows(model, {0, index_t{1} << 31}).visible_keys == 0x1p61 + 0x1p30);
}

TEST_CASE("CFG-OTHER: layers, share groups and the model, FLOPs and bytes, of each family") {
  for (Json const& config :
       {small_glm(), small_deepseek(), small_hy_v4(), json_file("configs/GLM-5.2.json")}) {
    CAPTURE(config["model_type"].get<std::string>());
    auto const [model, plan] = accepted(config);
    REQUIRE(can_count_complete(model).ok());
    for (CountedRows const& rows : {decoded_row(model, 3000), prefilled_rows(model, {1, 700})}) {
      CompleteFlops layers;
      MovedBytes bytes;
      for (std::int32_t layer = 0; layer < plan.num_layers(); ++layer) {
        CompleteFlops const one = layer_flops(model, plan, layer, rows, CoreForm::absorbed);
        CHECK((one.index_scoring > 0) == plan.is_full(layer));
        layers += one;
        bytes += layer_moved_bytes(model, plan, layer, rows);
      }
      CompleteFlops groups;
      for (std::int32_t const source : plan.full_layers())
        groups += share_group_flops(model, plan, source, rows, CoreForm::absorbed);
      layers.output_head = groups.output_head = rows.rows * output_head_flops(model);
      double const whole =
          complete_flops(model, plan.full_layers().count(), rows, CoreForm::absorbed).total();
      CHECK(layers.total() == Approx(whole).epsilon(1e-12));
      CHECK(groups.total() == Approx(whole).epsilon(1e-12));
      CHECK(bytes.total() == sharing_bytes(model, plan, rows).shared.total());
    }
  }
}

TEST_CASE("CFG-OTHER: a share group of GLM-5.2 costs its full layer and its readers") {
  io::LoadedConfig const config = glm52();
  CountedRows const row = decoded_row(config.model, 1 << 20);
  auto const group = [&](std::int32_t source) {
    return share_group_flops(config.model, config.plan, source, row, CoreForm::absorbed);
  };
  CHECK(group(0).index_scoring == 8192.0 * (1 << 20));
  CHECK(group(0).attention_core == 285212672.0);
  CHECK(group(74).index_scoring == 8192.0 * (1 << 20));
  CHECK(group(74).attention_core == 4 * 285212672.0);
  CHECK(group(74).attention_projections == 4 * 2.0 * 165019648);
  CHECK(group(2).feed_forward == 2.0 * 226492416 + 3 * 2.0 * 341311488);
}

TEST_CASE("CFG-OTHER: accountings that round to a published ratio") {
  ModelConfig const model = glm52().model;
  auto const found = [&](PublishedRatio const& published, std::vector<double> const& full_layers,
                         double active) {
    std::vector<std::string> lines;
    for_each_accounting_of(published, model, decoded_row(model, 1 << 20), full_layers, active,
                           [&](AccountingName const& named, double full, double ratio) {
                             char text[80];
                             std::snprintf(text, sizeof text, "%s %g %.3f", named.name, full,
                                           ratio);
                             lines.push_back(text);
                           });
    return lines;
  };
  CHECK(found({2.9, 1}, {21, 19.5, 20, 22}, 40e9) ==
        std::vector<std::string>{
            "complete-absorbed 19.5 2.863", "complete-absorbed-reduction 19.5 2.871",
            "complete-expanded 19.5 2.948", "complete-expanded 20 2.900", "no-core 21 2.880",
            "active-parameters 21 2.880", "active-parameters-core 19.5 2.863", "no-head 19.5 2.876",
            "no-core-no-head 21 2.894"});
  CHECK(found({2.73, 2}, {21}, 0) == std::vector<std::string>{"complete-absorbed 21 2.732"});
  CHECK(found({2.7, 1}, {21}, 0) == std::vector<std::string>{"complete-absorbed 21 2.732",
                                                             "complete-absorbed-reduction 21 2.740",
                                                             "no-head 21 2.744"});
  CHECK(found({9.9, 1}, {21, 20}, 40e9).empty());
}

TEST_CASE("CFG-OTHER: a ratio is rounded once") {
  CHECK(rounds_to(2.85, {2.9, 1}));
  CHECK_FALSE(rounds_to(2.8499, {2.9, 1}));  // 2.85 with two digits
  CHECK(rounds_to(2.9499, {2.9, 1}));
  CHECK_FALSE(rounds_to(2.95, {2.9, 1}));
  CHECK(rounds_to(3.4, {3, 0}));
  CHECK_FALSE(rounds_to(2.9, {2.90001, 5}));
}

TEST_CASE("CFG-OTHER: names of accountings are those of the enumeration, each once") {
  int number = 0;
  for (AccountingName const& named : accounting_names) {
    CHECK(static_cast<int>(named.accounting) == number++);
    for (AccountingName const& other : accounting_names)
      CHECK((&named == &other) == (std::string(named.name) == other.name));
  }
  CHECK(number == static_cast<int>(Accounting::half_context) + 1);
}
