// SPDX-License-Identifier: Apache-2.0
#include "golden_family.hpp"

#include <catch2/catch_test_macros.hpp>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <functional>
#include <iterator>
#include <optional>
#include <string>
#include <utility>
#include <vector>

/// @file Every trap of the recipe, sprung on purpose: the run must part from transformers, and the
/// comparison must name the quantity that docs/recipes.md names.

using namespace test;
using indexshare::bf16;
using indexshare::from_float;
using indexshare::index_t;
using indexshare::position_t;
using indexshare::to_float;
using programs::Quantity;
constexpr auto host = indexshare::Space::host;

namespace {

using Format = SerialRun::Format;
using Relu = SerialRun::Indexer;

/// How a faulty implementation adds up a score from the heads' dot products.
enum class Sum { without_relu, relu_after_weight, in_bf16, first_head_only };

/// The indexer with a fault in its sum.
template <Sum fault>
struct FaultyIndexer {
  using score_type = float;
  template <indexshare::Space S>
  using inputs = typename Relu::template inputs<S>;
};
template <Sum fault>
indexshare::Result<indexshare::WorkspaceSize> indexer_workspace(indexshare::HostExec<>,
                                                                FaultyIndexer<fault>,
                                                                indexshare::Shape const&) noexcept {
  return indexshare::WorkspaceSize{4096};
}
template <Sum fault>
indexshare::Status indexer_check(indexshare::HostExec<>, FaultyIndexer<fault>,
                                 typename Relu::inputs<host> const& in,
                                 indexshare::RowBatch<host> const& batch,
                                 indexshare::Shape const& shape) noexcept {
  return check_inputs(Relu{}, in, batch, shape);
}
template <Sum fault>
indexshare::Status indexer_score(indexshare::HostExec<>, FaultyIndexer<fault>,
                                 typename Relu::inputs<host> const& in,
                                 indexshare::RowBatch<host> const& batch,
                                 indexshare::ScoreRequest const& request,
                                 indexshare::ScoreView<host> const& scores,
                                 indexshare::Workspace ws) noexcept {
  auto* const key = static_cast<float*>(ws.data);
  for (index_t i = 0; i < request.rows.count; ++i) {
    index_t const row = request.rows.first + i;
    for (index_t s = 0; s < batch.lengths(row); ++s) {
      decode_row(in.keys, batch.index_pages.slot(batch.requests(row), s), key);
      float sum = 0;
      for (index_t h = 0; h < in.q.extent(1); ++h) {
        float dot = 0;
        for (index_t lane = 0; lane < in.q.extent(2); ++lane) dot += in.q(row, h, lane) * key[lane];
        float const weight = in.weights(row, h);
        if (fault == Sum::without_relu) sum += weight * dot;
        if (fault == Sum::relu_after_weight) sum += std::max(0.0f, weight * dot);
        if (fault == Sum::in_bf16) {
          sum = to_float(from_float<bf16>(sum + weight * std::max(0.0f, dot)));
        }
        if (fault == Sum::first_head_only && h == 0) sum = weight * std::max(0.0f, dot);
      }
      scores(i, s) = sum;
    }
  }
  return {};
}

template <Sum fault>
Spoil scores_by() {
  Spoil spoil;
  spoil.attend = [](SerialRun& run, indexshare::SharePlan const& plan, std::int32_t layer,
                    MlaIn const& in) { run.attend<FaultyIndexer<fault>>(plan, layer, in); };
  return spoil;
}

// ---- ways to spoil a run

Spoil in_config(std::function<void(indexshare::ModelConfig&)> change) {
  Spoil spoil;
  spoil.config = std::move(change);
  return spoil;
}
Spoil at_start(std::function<void(SerialRun&)> change) {
  Spoil spoil;
  spoil.start = std::move(change);
  return spoil;
}
Spoil in_weights(std::function<void(Weights&, std::int32_t)> change) {
  Spoil spoil;
  spoil.weights = std::move(change);
  return spoil;
}
Spoil after_projection(std::function<void(SerialRun&, Weights const&)> change) {
  Spoil spoil;
  spoil.projected = std::move(change);
  return spoil;
}
Spoil in_attention(std::function<void(SerialRun&, MlaIn&, std::int32_t)> change) {
  Spoil spoil;
  spoil.attention = std::move(change);
  return spoil;
}

/// Index queries or keys of a run that has an indexer in this layer, rotated anew.
void redo_index_queries(SerialRun& run, Weights const& weights,
                        indexshare::Tensor<host, float, 2> const& latent) {
  if (!weights.indexer) return;
  auto const positions = indexshare::make_lengths<host>(run.batch().row_rotary.data(),
                                                        indexshare::Rows{run.batch().rows()});
  REQUIRE(project_index_queries(run.exec(), run.front_end(), *weights.indexer,
                                indexshare::detail::read_only(latent), run.row_hidden(), positions,
                                run.queries())
              .ok());
}
void copy(indexshare::Tensor<host, float, 2> const& from,
          indexshare::Tensor<host, float, 2> const& to) {
  REQUIRE(scale(indexshare::HostExec<>{},
                indexshare::detail::read_only(indexshare::detail::one_head(from)), 1.0f,
                indexshare::detail::one_head(to))
              .ok());
}
void rotate_keys(SerialRun& run) {
  auto const positions = indexshare::make_lengths<host>(run.batch().rotary.data(),
                                                        indexshare::Rows{run.batch().tokens()});
  REQUIRE(indexshare::detail::finish_index_lanes(
              run.exec(), run.front_end(),
              indexshare::detail::read_only(indexshare::detail::one_head(run.keys().index_k_norm)),
              positions, indexshare::detail::one_head(run.keys().index_k))
              .ok());
}

/// A vector or matrix of the test's own, in the place of a checkpoint's.
struct Storage {
  std::vector<float> values;
  indexshare::VectorView<host> vector() const {
    return indexshare::make_dense<host, float const, 1>(values.data(),
                                                        {static_cast<index_t>(values.size())});
  }
  indexshare::MatrixView<host, float> matrix(index_t rows) const {
    index_t const lanes = static_cast<index_t>(values.size()) / rows;
    return indexshare::make_dense<host, float const, 2>(values.data(), {rows, lanes});
  }
};
Storage& storage() {
  static Storage kept;
  kept.values.clear();
  return kept;
}

/// Rows of each head's part of a matrix, in another order.
/// @param order  of the rows [0, per head) of a head
indexshare::MatrixView<host, float> reordered_rows(
    indexshare::MatrixView<host, float> const& matrix, index_t heads,
    std::vector<index_t> const& order) {
  Storage& kept = storage();
  auto const per_head = static_cast<index_t>(order.size());
  for (index_t h = 0; h < heads; ++h) {
    for (index_t const row : order) {
      for (index_t i = 0; i < matrix.extent(1); ++i) {
        kept.values.push_back(matrix(h * per_head + row, i));
      }
    }
  }
  return kept.matrix(matrix.extent(0));
}
/// 0 .. n - 1, begun at `first`.
std::vector<index_t> rolled(index_t n, index_t first) {
  std::vector<index_t> order;
  for (index_t i = 0; i < n; ++i) order.push_back((first + i) % n);
  return order;
}

// ---- the traps

struct Trap {
  char const* what;  ///< as in docs/recipes.md
  char const* family;
  Spoil spoil;
  Quantity shows;          ///< first
  std::int32_t layer = 0;  ///< first
};

using indexshare::RopeLanes;
using indexshare::RopeLayout;

std::vector<Trap> rotary_traps() {
  return {
      {"indexer pairs half-split", "glm_moe_dsa",
       in_config([](auto& config) { config.indexer_rope.layout = RopeLayout::half_split; }),
       Quantity::index_q},
      {"indexer pairs interleaved", "deepseek_v32",
       in_config([](auto& config) { config.indexer_rope.layout = RopeLayout::interleaved; }),
       Quantity::index_q},
      {"indexer pairs half-split in the keys alone", "glm_moe_dsa",
       after_projection([](SerialRun& run, Weights const& weights) {
         if (!weights.indexer) return;
         run.front_end().config.indexer_rope.layout = RopeLayout::half_split;
         rotate_keys(run);
         run.front_end().config.indexer_rope.layout = RopeLayout::interleaved;
       }),
       Quantity::index_k},
      {"indexer rotates the last lanes", "deepseek_v32",
       in_config([](auto& config) { config.indexer_rope.lanes = RopeLanes::last; }),
       Quantity::index_q},
      {"indexer rotates the first lanes", "hy_v4",
       in_config([](auto& config) { config.indexer_rope.lanes = RopeLanes::first; }),
       Quantity::index_q},
      {"indexer rotates nothing", "glm_moe_dsa",
       after_projection([](SerialRun& run, Weights const& weights) {
         if (!weights.indexer) return;
         auto const saved = run.front_end().frequencies;
         for (float& inverse : run.front_end().frequencies.inverse) inverse = 0;
         redo_index_queries(run, weights, run.queries().q_resid);
         rotate_keys(run);
         run.front_end().frequencies = saved;
       }),
       Quantity::index_q},
      {"attention pairs half-split", "deepseek_v32",
       in_config([](auto& config) { config.rope.layout = RopeLayout::half_split; }),
       Quantity::q_rope},
      {"attention pairs interleaved", "hy_v4",
       in_config([](auto& config) { config.rope.layout = RopeLayout::interleaved; }),
       Quantity::q_rope},
      {"another theta", "glm_moe_dsa", in_config([](auto& config) { config.rope.theta = 1e6; }),
       Quantity::q_rope},
      {"positions counted from 0", "glm_moe_dsa", at_start([](SerialRun& run) {
         run.batch().rotary = run.batch().positions;
         for (std::size_t row = 0; row < run.batch().row_rotary.size(); ++row) {
           run.batch().row_rotary[row] = run.batch().lengths[row] - 1;
         }
       }),
       Quantity::q_rope},
      {"YaRN's frequencies left out", "deepseek_v32", at_start([](SerialRun& run) {
         auto plain = run.front_end().config;
         plain.rope.scaling = indexshare::RopeScaling::none;
         auto const amplitude = run.front_end().frequencies.amplitude;
         run.front_end().frequencies = *rotary_frequencies(plain);
         run.front_end().frequencies.amplitude = amplitude;
       }),
       Quantity::q_rope},
      {"YaRN's ratio of magnitudes left out of cosine and sine", "deepseek_v32",
       at_start([](SerialRun& run) { run.front_end().frequencies.amplitude = 1; }),
       Quantity::q_rope},
      {"YaRN's magnitude instead of the ratio on cosine and sine", "deepseek_v32",
       at_start([](SerialRun& run) {
         auto const& yarn = run.config().rope.yarn;
         run.front_end().frequencies.amplitude =
             static_cast<float>(indexshare::yarn_magnitude(yarn.factor, yarn.mscale));
       }),
       Quantity::q_rope},
  };
}

std::vector<Trap> norm_traps() {
  return {
      {"latent norms with the other eps", "glm_moe_dsa",
       in_config([](auto& config) { config.norm_eps.latent = 1e-5; }), Quantity::q_resid},
      {"KV latent not normed", "deepseek_v32", after_projection([](SerialRun& run, Weights const&) {
         using indexshare::detail::lanes_of;
         index_t const latent = run.config().kv_lora_rank;
         copy(lanes_of(run.keys().kv_a, 0, latent), lanes_of(run.keys().kv_row, 0, latent));
       }),
       Quantity::kv_latent},
      {"q_b_proj reads the raw query latent", "glm_moe_dsa",
       after_projection([](SerialRun& run, Weights const& weights) {
         REQUIRE(run.front_end()
                     .product(run.exec(), indexshare::detail::read_only(run.queries().q_a),
                              weights.q_b_proj, indexshare::detail::flat_heads(run.queries().q))
                     .ok());
       }),
       Quantity::q},
      {"wq_b reads the raw query latent", "glm_moe_dsa",
       after_projection([](SerialRun& run, Weights const& weights) {
         redo_index_queries(run, weights, run.queries().q_a);
       }),
       Quantity::index_q_raw},
      {"k_norm with the latent norms' eps", "glm_moe_dsa",
       in_config([](auto& config) { config.norm_eps.index_key = 1e-5; }), Quantity::index_k_norm},
      {"k_norm with eps 1e-6 where the module has rms_norm_eps", "hy_v4",
       in_config([](auto& config) { config.norm_eps.index_key = 1e-6; }), Quantity::index_k_norm},
      {"k_norm without its bias", "deepseek_v32", in_weights([](Weights& weights, std::int32_t) {
         if (!weights.indexer) return;
         Storage& kept = storage();
         kept.values.assign(static_cast<std::size_t>(weights.indexer->k_norm_bias.extent(0)), 0);
         weights.indexer->k_norm_bias = kept.vector();
       }),
       Quantity::index_k_norm},
      {"k_norm as an RMS norm", "glm_moe_dsa",
       after_projection([](SerialRun& run, Weights const& weights) {
         if (!weights.indexer) return;
         REQUIRE(rms_norm(run.exec(), indexshare::detail::read_only(run.keys().index_k_raw),
                          weights.indexer->k_norm_weight, run.config().norm_eps.index_key,
                          run.keys().index_k_norm)
                     .ok());
         rotate_keys(run);
       }),
       Quantity::index_k_norm},
  };
}

std::vector<Trap> score_traps() {
  return {
      {"Hadamard transform of the index queries alone", "glm_moe_dsa",
       after_projection([](SerialRun& run, Weights const& weights) {
         if (weights.indexer) REQUIRE(hadamard(run.exec(), run.queries().index_q).ok());
       }),
       Quantity::index_q},
      {"Hadamard transform of the index keys alone", "glm_moe_dsa",
       after_projection([](SerialRun& run, Weights const& weights) {
         if (!weights.indexer) return;
         REQUIRE(hadamard(run.exec(), indexshare::detail::one_head(run.keys().index_k)).ok());
       }),
       Quantity::index_k},
      {"weights_proj in bf16", "glm_moe_dsa",
       after_projection([](SerialRun& run, Weights const& weights) {
         if (!weights.indexer) return;
         for (auto const& view : {run.queries().head_weights_raw, run.queries().head_weights}) {
           for (index_t row = 0; row < view.extent(0); ++row) {
             for (index_t h = 0; h < view.extent(1); ++h) {
               view(row, h) = to_float(from_float<bf16>(view(row, h)));
             }
           }
         }
       }),
       Quantity::head_weights_raw},
      {"index_head_dim^-0.5 folded twice", "deepseek_v32",
       after_projection([](SerialRun& run, Weights const& weights) {
         if (!weights.indexer) return;
         auto const view = indexshare::detail::one_head(run.queries().head_weights);
         auto const again = 1 / std::sqrt(static_cast<float>(run.config().index_head_dim));
         REQUIRE(scale(run.exec(), indexshare::detail::read_only(view), again, view).ok());
       }),
       Quantity::head_weights},
      {"no ReLU", "glm_moe_dsa", scores_by<Sum::without_relu>(), Quantity::scores},
      {"ReLU after the head weight", "deepseek_v32", scores_by<Sum::relu_after_weight>(),
       Quantity::scores},
      {"heads not summed", "glm_moe_dsa", scores_by<Sum::first_head_only>(), Quantity::scores},
      {"scores summed in bf16", "deepseek_v32", scores_by<Sum::in_bf16>(), Quantity::scores},
      {"a row does not see itself", "glm_moe_dsa", at_start([](SerialRun& run) {
         for (position_t& length : run.batch().lengths) length -= 1;
       }),
       Quantity::scores},
      {"index_topk one too small", "glm_moe_dsa",
       in_config([](auto& config) { config.index_topk -= 1; }), Quantity::selection},
  };
}

/// Runs an indexer on every layer, with the weights of the layer below where there are none.
Spoil indexer_everywhere(GoldenFamily const& family) {
  Spoil spoil;
  spoil.weights = [&family](Weights& weights, std::int32_t) {
    static std::optional<indexshare::io::LoadedLayer<float>> below;
    if (!below) below = family.layer(0);
    if (!weights.indexer) weights.indexer = below->views().indexer;
  };
  spoil.attend = [](SerialRun& run, indexshare::SharePlan const&, std::int32_t layer,
                    MlaIn const& in) { run.attend(indexshare::EveryLayer{3}, layer, in); };
  return spoil;
}

std::vector<Trap> attention_traps(GoldenFamily const& glm) {
  return {
      {"an indexer on shared layers", "glm_moe_dsa", indexer_everywhere(glm), Quantity::selection,
       1},
      {"a shared layer reads its source's KV", "glm_moe_dsa",
       [] {
         Spoil spoil;
         spoil.projected = [kept = std::vector<float>()](SerialRun& run,
                                                         Weights const& weights) mutable {
           auto const rows = run.keys().kv_row;
           auto* const data = rows.data_handle();
           if (weights.indexer) {
             kept.assign(data, data + rows.extent(0) * rows.extent(1));
           } else {
             std::copy(kept.begin(), kept.end(), data);
           }
         };
         return spoil;
       }(),
       Quantity::kv_latent, 1},
      {"mscale^2 left out of the softmax scale", "deepseek_v32",
       in_attention([](SerialRun& run, MlaIn& in, std::int32_t) {
         in.scale = 1 / std::sqrt(static_cast<float>(qk_head_dim(run.config())));
       }),
       Quantity::lse},
      {"softmax scale of the latent width", "glm_moe_dsa",
       in_attention([](SerialRun& run, MlaIn& in, std::int32_t) {
         in.scale = 1 / std::sqrt(static_cast<float>(run.kv().lanes));
       }),
       Quantity::lse},
      {"all keys instead of the selected ones", "glm_moe_dsa",
       [] {
         Spoil spoil;
         spoil.attend = [](SerialRun& run, indexshare::SharePlan const& plan, std::int32_t layer,
                           MlaIn const& in) {
           run.attend(plan, layer, in);  // for the selection
           using Dense = indexshare::DenseMla<float, Format>;
           indexshare::HostMemory const scratch(
               attention_workspace(run.exec(), Dense{}, run.shape()).value());
           REQUIRE(attention_run(run.exec(), Dense{}, in, run.rows(),
                                 indexshare::RowRange{0, run.batch().rows()}, {},
                                 {run.latent_output(), run.lse()}, run.shape(), scratch.view())
                       .ok());
         };
         return spoil;
       }(),
       Quantity::lse},
      {"kv_b_proj read as W_UV, W_UK", "deepseek_v32",
       in_weights([](Weights& weights, std::int32_t) {
         weights.kv_b_proj = reordered_rows(weights.kv_b_proj, 4, rolled(44, 24));
       }),
       Quantity::lse},
      {"rope lanes of a query head first", "glm_moe_dsa",
       in_weights([](Weights& weights, std::int32_t) {
         weights.q_b_proj = reordered_rows(weights.q_b_proj, 4, rolled(40, 24));
       }),
       Quantity::q},
      {"learned sinks left out", "hy_v4",
       in_attention([](SerialRun&, MlaIn& in, std::int32_t) { in.sink = {}; }),
       Quantity::attention},
      {"gate_proj left at zeros", "hy_v4", in_weights([](Weights& weights, std::int32_t) {
         Storage& kept = storage();  // a gate of sigmoid(0) everywhere
         kept.values.assign(
             static_cast<std::size_t>(weights.gate_proj.extent(0) * weights.gate_proj.extent(1)),
             0);
         weights.gate_proj = kept.matrix(weights.gate_proj.extent(0));
       }),
       Quantity::gated},
      {"heads of o_proj's input in another order", "glm_moe_dsa",
       in_weights([](Weights& weights, std::int32_t) {
         Storage& kept = storage();
         auto const& matrix = weights.o_proj;
         for (index_t o = 0; o < matrix.extent(0); ++o) {
           for (index_t i = 0; i < matrix.extent(1); ++i) {
             kept.values.push_back(matrix(o, (i + 20) % matrix.extent(1)));
           }
         }
         weights.o_proj = kept.matrix(matrix.extent(0));
       }),
       Quantity::output},
  };
}

/// Selections of the report that are other sets, near ties too.
std::size_t changed_selections(programs::CompareReport const& report) {
  std::size_t changed = 0;
  for (auto const& layer : report.layers) changed += layer.selection->different.size();
  return changed;
}

std::string table_row(Trap const& trap, programs::CompareReport const& report) {
  auto const* const layer = report.first_difference();
  std::size_t rows = 0;
  for (auto const& each : report.layers) rows += each.selection->rows;
  return "| " + std::string(trap.what) + " | " + trap.family + " | " +
         std::string(programs::spec_of(layer->first_difference()->id).name) +
         (layer->layer > 0 ? " of layer " + std::to_string(layer->layer) : "") + " | " +
         std::to_string(changed_selections(report)) + " of " + std::to_string(rows) + " |";
}

std::string recipes_document() {
  std::ifstream file(std::string(INDEXSHARE_TEST_DATA_DIR) + "/../docs/recipes.md");
  return {std::istreambuf_iterator<char>(file), {}};
}

}  // namespace

TEST_CASE("Traps: each one sprung is seen, first in the quantity that the documents name") {
  GoldenFamily const glm("glm_moe_dsa");
  GoldenFamily const deepseek("deepseek_v32");
  GoldenFamily const hy("hy_v4");
  std::string const document = recipes_document();
  for (auto const& traps : {rotary_traps(), norm_traps(), score_traps(), attention_traps(glm)}) {
    for (Trap const& trap : traps) {
      GoldenFamily const& family = trap.family == std::string("glm_moe_dsa") ? glm
                                   : trap.family == std::string("hy_v4")     ? hy
                                                                             : deepseek;
      auto const report = compare(run_family(family, trap.spoil), family, 1e-5);
      INFO(trap.what << ", " << trap.family);
      auto const* const layer = report.first_difference();
      CHECK(layer != nullptr);
      if (layer == nullptr) continue;
      CHECK(layer->layer == trap.layer);
      CHECK(programs::spec_of(layer->first_difference()->id).name ==
            programs::spec_of(trap.shows).name);
      std::printf("%s\n", table_row(trap, report).c_str());
      INFO("docs/recipes.md must have the row\n" << table_row(trap, report));
      CHECK(document.find(table_row(trap, report)) != std::string::npos);
    }
  }
}

TEST_CASE("Traps: a run with nothing spoilt shows none") {
  for (char const* const name : golden_families) {
    GoldenFamily const family(name);
    CHECK(compare(run_family(family, {}), family, 1e-5).first_difference() == nullptr);
  }
}
