// SPDX-License-Identifier: Apache-2.0
#include <indexshare/accounting.hpp>

#include <catch2/catch_test_macros.hpp>

#include <cstdio>
#include <sstream>
#include <string>
#include <vector>

#include "config_cases.hpp"

/// @file Tables that were computed once by a script of its own from the published configs of
/// zai-org/GLM-5.2, deepseek-ai/DeepSeek-V3.2 and zai-org/GLM-4.7-Flash (the 30B model of the
/// IndexCache paper, arXiv 2603.12201), and numbers that others measured, named at the place. The
/// text is compared as it was printed: each number is rounded once.

using namespace indexshare;

namespace {

/// As printf prints it.
template <class... Values>
std::string printed(char const* format, Values... values) {
  char text[200];
  std::snprintf(text, sizeof text, format, values...);
  return text;
}

ModelConfig model_of(std::string const& name) {
  return accepted(json_file("configs/" + name + ".json")).model;
}

SharePlan glm52_plan() { return accepted(json_file("configs/GLM-5.2.json")).plan; }

/// Lines that begin with a length: the base, one indexer, and for each number of indexers the
/// total, the ratio to one per layer and the indexers' share.
std::string decode_table(ModelConfig const& model, Accounting accounting,
                         std::vector<index_t> const& lengths,
                         std::vector<double> const& full_layers) {
  double const all = model.num_hidden_layers;
  std::string table;
  for (index_t const keys : lengths) {
    FlopsByIndexers const flops = accounted_flops(accounting, model, decoded_row(model, keys));
    table += printed("  %8d %9.2f %9.3f", static_cast<int>(keys), flops.fixed / 1e9,
                     flops.per_full_layer / 1e9);
    for (double const full : full_layers)
      table += printed(" | %9.2f  %5.2f %4.0f%%", flops.total(full) / 1e9, flops.ratio(all, full),
                       100 * flops.indexer_share(full));
    table += "\n";
  }
  return table;
}

constexpr index_t kibi = 1024;
constexpr index_t mebi = 1024 * kibi;
std::vector<index_t> const lengths{8 * kibi, 16 * kibi,  32 * kibi,  64 * kibi, 128 * kibi,
                                   200000,   256 * kibi, 512 * kibi, 1000000,   mebi};

}  // namespace

TEST_CASE("CFG-OTHER: table of GLM-5.2's decoded token, absorbed core") {
  CHECK("\n" + decode_table(model_of("GLM-5.2"), Accounting::complete_absorbed, lengths,
                            {78, 39, 22, 21, 20, 19.5}) ==
        R"(
      8192    102.45     0.086 |    109.14   1.00    6% |    105.80   1.03    3% |    104.34   1.05    2% |    104.25   1.05    2% |    104.17   1.05    2% |    104.12   1.05    2%
     16384    102.45     0.153 |    114.38   1.00   10% |    108.41   1.06    6% |    105.81   1.08    3% |    105.66   1.08    3% |    105.51   1.08    3% |    105.43   1.08    3%
     32768    102.45     0.287 |    124.85   1.00   18% |    113.65   1.10   10% |    108.77   1.15    6% |    108.48   1.15    6% |    108.19   1.15    5% |    108.05   1.16    5%
     65536    102.45     0.556 |    145.79   1.00   30% |    124.12   1.17   17% |    114.67   1.27   11% |    114.12   1.28   10% |    113.56   1.28   10% |    113.28   1.29   10%
    131072    102.45     1.092 |    187.66   1.00   45% |    145.06   1.29   29% |    126.48   1.48   19% |    125.39   1.50   18% |    124.30   1.51   18% |    123.75   1.52   17%
    200000    102.45     1.657 |    231.71   1.00   56% |    167.08   1.39   39% |    138.91   1.67   26% |    137.25   1.69   25% |    135.59   1.71   24% |    134.76   1.72   24%
    262144    102.45     2.166 |    271.41   1.00   62% |    186.93   1.45   45% |    150.11   1.81   32% |    147.94   1.83   31% |    145.77   1.86   30% |    144.69   1.88   29%
    524288    102.45     4.314 |    438.92   1.00   77% |    270.68   1.62   62% |    197.35   2.22   48% |    193.04   2.27   47% |    188.72   2.33   46% |    186.57   2.35   45%
   1000000    102.45     8.211 |    742.89   1.00   86% |    422.67   1.76   76% |    283.08   2.62   64% |    274.87   2.70   63% |    266.66   2.79   62% |    262.56   2.83   61%
   1048576    102.45     8.609 |    773.93   1.00   87% |    438.19   1.77   77% |    291.84   2.65   65% |    283.23   2.73   64% |    274.62   2.82   63% |    270.32   2.86   62%
)");
}

TEST_CASE("CFG-OTHER: table of GLM-5.2's decoded token, expanded core") {
  CHECK("\n" + decode_table(model_of("GLM-5.2"), Accounting::complete_expanded, {128 * kibi, mebi},
                            {78, 21, 19.5}) ==
        R"(
    131072     90.67     1.092 |    175.88   1.00   48% |    113.61   1.55   20% |    111.97   1.57   19%
   1048576     90.67     8.609 |    762.15   1.00   88% |    271.45   2.81   67% |    258.54   2.95   65%
)");
}

TEST_CASE("CFG-OTHER: table of DeepSeek-V3.2's decoded token") {
  CHECK("\n" + decode_table(model_of("DeepSeek-V3.2"), Accounting::complete_absorbed,
                            {8 * kibi, 32 * kibi, 64 * kibi, 128 * kibi, 160 * kibi, mebi},
                            {61, 31, 16, 15.25}) ==
        R"(
      8192    108.05     0.162 |    117.94   1.00    8% |    113.07   1.04    4% |    110.64   1.07    2% |    110.52   1.07    2%
     32768    108.05     0.565 |    142.50   1.00   24% |    125.55   1.13   14% |    117.08   1.22    8% |    116.66   1.22    7%
     65536    108.05     1.102 |    175.25   1.00   38% |    142.20   1.23   24% |    125.67   1.39   14% |    124.85   1.40   13%
    131072    108.05     2.175 |    240.74   1.00   55% |    175.48   1.37   38% |    142.85   1.69   24% |    141.22   1.70   23%
    163840    108.05     2.712 |    273.49   1.00   60% |    192.13   1.42   44% |    151.44   1.81   29% |    149.41   1.83   28%
   1048576    108.05    17.208 |   1157.72   1.00   91% |    641.49   1.80   83% |    383.37   3.02   72% |    370.46   3.13   71%
)");
}

TEST_CASE("CFG-OTHER: table of the 30B model's decoded token, its indexer assumed") {
  CHECK("\n" + decode_table(model_of("30B-DSA.indexer_assumed"), Accounting::complete_absorbed,
                            {10000, 60000, 120000, 200000, mebi}, {47, 24, 12, 7}) ==
        R"(
     10000     11.35     0.089 |     15.52   1.00   27% |     13.48   1.15   16% |     12.41   1.25    9% |     11.97   1.30    5%
     60000     11.35     0.498 |     34.78   1.00   67% |     23.31   1.49   51% |     17.33   2.01   35% |     14.84   2.34   24%
    120000     11.35     0.990 |     57.88   1.00   80% |     35.11   1.65   68% |     23.23   2.49   51% |     18.28   3.17   38%
    200000     11.35     1.645 |     88.68   1.00   87% |     50.84   1.74   78% |     31.09   2.85   64% |     22.87   3.88   50%
   1048576     11.35     8.597 |    415.40   1.00   97% |    217.67   1.91   95% |    114.51   3.63   90% |     71.53   5.81   84%
)");
}

TEST_CASE("CFG-OTHER: parts that do not depend on the length, and parameters") {
  auto const parts = [](char const* name, CoreForm form) {
    ModelConfig const c = model_of(name);
    CompleteFlops const f = complete_decode_flops(c, 1, mebi, form);
    return printed("%.2f %.2f %.2f %.2f %.4f %.0f", f.attention_projections / 1e9,
                   f.feed_forward / 1e9, f.output_head / 1e9, f.attention_core / 1e9,
                   f.indexer_projections / 1e9, index_scoring_flops(c, 1));
  };
  CHECK(parts("GLM-5.2", CoreForm::absorbed) == "25.74 52.56 1.90 22.25 0.0187 8192");
  CHECK(parts("GLM-5.2", CoreForm::expanded) == "25.74 52.56 1.90 10.47 0.0187 8192");
  CHECK(parts("DeepSeek-V3.2", CoreForm::absorbed) == "22.83 48.57 1.85 34.80 0.0279 16384");
  CHECK(parts("30B-DSA.indexer_assumed", CoreForm::absorbed) == "2.05 4.48 0.63 4.19 0.0069 8192");

  // Active parameters here with the embedding, as in the table.
  auto const parameters = [](char const* name) {
    ModelConfig const c = model_of(name);
    double const embedding = output_head_flops(c) / 2;
    return printed("%.2fB %.2fB", (active_parameters(c, c.num_hidden_layers) + embedding) / 1e9,
                   total_parameters(c, c.num_hidden_layers) / 1e9);
  };
  CHECK(parameters("GLM-5.2") == "41.78B 743.91B");
  CHECK(parameters("DeepSeek-V3.2") == "38.40B 671.88B");
  CHECK(parameters("30B-DSA.indexer_assumed") == "4.06B 30.11B");
  ModelConfig const glm = model_of("GLM-5.2");
  CHECK(printed("%.3fB", total_parameters(glm, 21) / 1e9) == "743.376B");
  CHECK(printed("%.3fB", (active_parameters(glm, 21) + output_head_flops(glm) / 2) / 1e9) ==
        "41.249B");
  // A third party counted 40.298 billion in the checkpoint, without the embedding.
  CHECK(printed("%.3fB", active_parameters(glm, 21) / 1e9) == "40.298B");
  CHECK(printed("%.1f %.2f", attention_projection_parameters(glm) / 1e6,
                indexer_parameters(glm) / 1e6) == "165.0 9.37");
  CHECK(printed("%.1f%%",
                100 * index_reduction_flops(glm, 1000) / index_scoring_flops(glm, 1000)) == "1.2%");
}

TEST_CASE("CFG-OTHER: ratios of named accountings of GLM-5.2 at a million keys") {
  struct Row {
    index_t keys;
    Accounting accounting;
    char const* ratios[4];  // of 78 to 22, 21, 20 and 19.5
  };
  Row const rows[] = {
      {1000000, Accounting::complete_absorbed, {"2.624", "2.703", "2.786", "2.829"}},
      {1000000, Accounting::complete_absorbed_reduction, {"2.631", "2.710", "2.794", "2.838"}},
      {1000000, Accounting::complete_expanded, {"2.695", "2.779", "2.868", "2.915"}},
      {1000000, Accounting::no_core, {"2.763", "2.853", "2.948", "2.999"}},
      {1000000, Accounting::active_parameters, {"2.763", "2.853", "2.949", "2.999"}},
      {1000000, Accounting::active_parameters_core, {"2.624", "2.702", "2.786", "2.829"}},
      {1000000, Accounting::no_head, {"2.635", "2.715", "2.799", "2.843"}},
      {1000000, Accounting::attention_block, {"3.011", "3.123", "3.244", "3.308"}},
      {1000000, Accounting::core_and_indexer, {"3.266", "3.404", "3.554", "3.634"}},
      {1000000, Accounting::indexer_only, {"3.545", "3.714", "3.900", "4.000"}},
      {1000000, Accounting::half_weight_indexer, {"2.193", "2.240", "2.290", "2.316"}},
      {1000000, Accounting::half_context, {"2.194", "2.242", "2.292", "2.318"}},
      {1048576, Accounting::complete_absorbed, {"2.652", "2.732", "2.818", "2.863"}},
      {1048576, Accounting::complete_absorbed_reduction, {"2.659", "2.740", "2.826", "2.871"}},
      {1048576, Accounting::complete_expanded, {"2.721", "2.808", "2.900", "2.948"}},
      {1048576, Accounting::no_core, {"2.788", "2.880", "2.978", "3.030"}},
      {1048576, Accounting::active_parameters, {"2.788", "2.880", "2.979", "3.030"}},
      {1048576, Accounting::active_parameters_core, {"2.652", "2.732", "2.818", "2.863"}},
      {1048576, Accounting::no_head, {"2.663", "2.744", "2.831", "2.876"}},
      {1048576, Accounting::attention_block, {"3.031", "3.145", "3.268", "3.333"}},
      {1048576, Accounting::core_and_indexer, {"3.278", "3.417", "3.568", "3.649"}},
      {1048576, Accounting::indexer_only, {"3.545", "3.714", "3.900", "4.000"}},
      {1048576, Accounting::half_weight_indexer, {"2.223", "2.272", "2.324", "2.351"}},
      {1048576, Accounting::half_context, {"2.224", "2.274", "2.326", "2.353"}},
  };
  ModelConfig const model = model_of("GLM-5.2");
  for (Row const& row : rows) {
    FlopsByIndexers const flops =
        accounted_flops(row.accounting, model, decoded_row(model, row.keys), 40e9);
    double const full_layers[] = {22, 21, 20, 19.5};
    for (int i = 0; i < 4; ++i) {
      CAPTURE(row.keys, static_cast<int>(row.accounting), full_layers[i]);
      CHECK(printed("%.3f", flops.ratio(78, full_layers[i])) == row.ratios[i]);
    }
  }
}

TEST_CASE("CFG-OTHER: what the fixed part would have to be for exactly 2.9") {
  ModelConfig const model = model_of("GLM-5.2");
  auto const needed = [&](index_t keys) {
    FlopsByIndexers const flops =
        accounted_flops(Accounting::no_core, model, decoded_row(model, keys));
    return printed("%.1f %.1f", flops.fixed_for_ratio(78, 21, 2.9) / 1e9,
                   flops.fixed_for_ratio(78, 19.5, 2.9) / 1e9);
  };
  CHECK(needed(1000000) == "73.9 92.7");
  CHECK(needed(mebi) == "77.5 97.2");
  FlopsByIndexers const flops =
      accounted_flops(Accounting::no_core, model, decoded_row(model, mebi));
  CHECK(printed("%.1f %.2f", flops.fixed / 1e9, index_scoring_flops(model, mebi) / 1e9) ==
        "80.2 8.59");
  FlopsByIndexers const at_needed{flops.fixed_for_ratio(78, 21, 2.9), flops.per_full_layer};
  CHECK(printed("%.9f", at_needed.ratio(78, 21)) == "2.900000000");
  CHECK(printed("%.3f", FlopsByIndexers{0, 1}.ratio(78, 21)) == "3.714");
}

// The ratios of this table again, with fewer digits, as the notes on the model have them; 137.2
// and 175.2 there are 137.3 and 175.3, rounded twice.
TEST_CASE("CFG-OTHER: short tables: GLM-5.2, DeepSeek-V3.2 and the 30B model") {
  auto const line = [](char const* name, index_t keys, double fewer) {
    ModelConfig const c = model_of(name);
    FlopsByIndexers const f =
        accounted_flops(Accounting::complete_absorbed, c, decoded_row(c, keys));
    double const all = c.num_hidden_layers;
    return printed("%.1f (%.0f%%) %.1f (%.2fx)", f.total(all) / 1e9, 100 * f.indexer_share(all),
                   f.total(fewer) / 1e9, f.ratio(all, fewer));
  };
  CHECK(line("GLM-5.2", 8 * kibi, 21) == "109.1 (6%) 104.3 (1.05x)");
  CHECK(line("GLM-5.2", 32 * kibi, 21) == "124.8 (18%) 108.5 (1.15x)");
  CHECK(line("GLM-5.2", 64 * kibi, 21) == "145.8 (30%) 114.1 (1.28x)");
  CHECK(line("GLM-5.2", 128 * kibi, 21) == "187.7 (45%) 125.4 (1.50x)");
  CHECK(line("GLM-5.2", 200000, 21) == "231.7 (56%) 137.2 (1.69x)");
  CHECK(line("GLM-5.2", 256 * kibi, 21) == "271.4 (62%) 147.9 (1.83x)");
  CHECK(line("GLM-5.2", 512 * kibi, 21) == "438.9 (77%) 193.0 (2.27x)");
  CHECK(line("GLM-5.2", mebi, 21) == "773.9 (87%) 283.2 (2.73x)");
  CHECK(line("DeepSeek-V3.2", 8 * kibi, 16) == "117.9 (8%) 110.6 (1.07x)");
  CHECK(line("DeepSeek-V3.2", 32 * kibi, 16) == "142.5 (24%) 117.1 (1.22x)");
  CHECK(line("DeepSeek-V3.2", 64 * kibi, 16) == "175.2 (38%) 125.7 (1.39x)");
  CHECK(line("DeepSeek-V3.2", 128 * kibi, 16) == "240.7 (55%) 142.9 (1.69x)");
  CHECK(line("DeepSeek-V3.2", 160 * kibi, 16) == "273.5 (60%) 151.4 (1.81x)");
  CHECK(line("DeepSeek-V3.2", mebi, 16) == "1157.7 (91%) 383.4 (3.02x)");
  CHECK(line("30B-DSA.indexer_assumed", 10000, 12) == "15.5 (27%) 12.4 (1.25x)");
  CHECK(line("30B-DSA.indexer_assumed", 60000, 12) == "34.8 (67%) 17.3 (2.01x)");
  CHECK(line("30B-DSA.indexer_assumed", 120000, 12) == "57.9 (80%) 23.2 (2.49x)");
  CHECK(line("30B-DSA.indexer_assumed", 200000, 12) == "88.7 (87%) 31.1 (2.85x)");
  CHECK(line("30B-DSA.indexer_assumed", mebi, 12) == "415.4 (97%) 114.5 (3.63x)");
}

TEST_CASE("SHARE-CACHE: cache bytes per token of GLM-5.2 in three forms of KV") {
  ModelConfig const model = model_of("GLM-5.2");
  auto const line = [&](KvForm kv) {
    CacheBytes const bytes = cache_bytes_per_token(model, glm52_plan(), kv);
    auto const all = static_cast<int>(bytes.total_all_full());
    auto const saved = all - static_cast<int>(bytes.total());
    return printed("%d: %d, %d (-%d, %.2f%%), KV %d", static_cast<int>(kv_entry_bytes(model, kv)),
                   all, static_cast<int>(bytes.total()), saved, 100.0 * saved / all,
                   static_cast<int>(bytes.kv));
  };
  CHECK(line(KvForm::latent_e4m3) == "656: 61464, 53940 (-7524, 12.24%), KV 51168");
  // SGLang pull request 30531 measured 55,225 and 47,702 bytes on 4 GB300 with this form.
  CHECK(line(KvForm::e4m3) == "576: 55224, 47700 (-7524, 13.62%), KV 44928");
  CHECK(line(KvForm::bf16) == "1152: 100152, 92628 (-7524, 7.51%), KV 89856");
}

TEST_CASE("SHARE-CACHE: index keys, indexer weights and KV of GLM-5.2 at a length") {
  ModelConfig const model = model_of("GLM-5.2");
  CacheBytes const bytes = cache_bytes_per_token(model, glm52_plan());
  CHECK(bytes.index_key_all_full - bytes.index_key == 57 * 132);
  CHECK(printed("%.2f -> %.2f GB, KV %.2f GB", 1e-9 * double(bytes.index_key_all_full * mebi),
                1e-9 * double(bytes.index_key * mebi),
                1e-9 * double(bytes.kv * mebi)) == "10.80 -> 2.91 GB, KV 53.65 GB");
  // ik_llama.cpp pull request 2093 reports 2.5 GiB -> 672 MiB at 128K.
  CacheBytes const f16 =
      cache_bytes_per_token(model, glm52_plan(), KvForm::bf16, IndexKeyForm::f16);
  CHECK(printed("%.3f GiB -> %.0f MiB",
                double(f16.index_key_all_full * 128 * kibi) / double(1 << 30),
                double(f16.index_key * 128 * kibi) / double(1 << 20)) == "2.438 GiB -> 672 MiB");
  // SGLang pull request 30922 measured 1.07 GB of weights that 57 layers do not have.
  CHECK(printed("%.2f MB, %.3f GB", indexer_weight_bytes(model) / 1e6,
                57 * indexer_weight_bytes(model) / 1e9) == "18.74 MB, 1.068 GB");
}

TEST_CASE("SHARE-CACHE: MB that a decoded token of GLM-5.2 moves") {
  ModelConfig const model = model_of("GLM-5.2");
  std::string table = "\n";
  for (index_t const keys : lengths) {
    CountedRows const row = decoded_row(model, keys);
    auto const [all, few] = sharing_bytes(model, glm52_plan(), row);
    table +=
        printed("  %8d %9.1f %9.1f %8.1f %7.1f %7.1f   %.2f   %.0f\n", static_cast<int>(keys),
                all.index_keys / 1e6, few.index_keys / 1e6, all.scores / 1e6, few.scores / 1e6,
                all.kv_entries / 1e6, all.total() / few.total(), scoring_flops_per_byte(model));
    CHECK(all.kv_entries == few.kv_entries);
  }
  CHECK(table == R"(
      8192      84.3      22.7      5.1     1.4   104.8   1.51   62
     16384     168.7      45.4     10.2     2.8   104.8   1.85   62
     32768     337.4      90.8     20.4     5.5   104.8   2.30   62
     65536     674.8     181.7     40.9    11.0   104.8   2.76   62
    131072    1349.5     363.3     81.8    22.0   104.8   3.13   62
    200000    2059.2     554.4    124.8    33.6   104.8   3.30   62
    262144    2699.0     726.7    163.6    44.0   104.8   3.39   62
    524288    5398.1    1453.3    327.2    88.1   104.8   3.54   62
   1000000   10296.0    2772.0    624.0   168.0   104.8   3.62   62
   1048576   10796.1    2906.7    654.3   176.2   104.8   3.63   62
)");
}
