// SPDX-License-Identifier: Apache-2.0
//
// Faults that were reported for other implementations, from the front end's side: what is
// projected, normed, rotated, transformed and scaled, up to the score or the selection that shows
// it.
#include <catch2/catch_template_test_macros.hpp>
#include <catch2/catch_test_macros.hpp>

#include <indexshare/io/config.hpp>

#include "by_hand.hpp"
#include "decoder.hpp"
#include "executors.hpp"
#include "frontend_model.hpp"
#include "vectors.hpp"

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>
#include <vector>

using namespace frontend_test;

namespace {

using Floats = std::vector<float>;
using Indexer = ReluDotIndexer<float, format::Plain<float>>;

/// A model whose indexer is all that matters.
ModelConfig indexer_model(index_t heads, index_t dim, index_t rope) {
  ModelConfig config = tiny_model(rope, 1);
  config.hidden_size = dim;
  config.q_lora_rank = heads * dim;
  config.index_n_heads = heads;
  config.index_head_dim = dim;
  config.index_topk = 1;
  config.norm_eps = {1e-2, 1e-3, 1e-6};
  return config;
}

/// An indexer that lets its inputs through: the query is q_resid before the rotation, a key is its
/// hidden state after the norm, and the raw head weights are what `head_weights` says.
struct Through {
  ModelConfig config;
  OwnedWeights<float> weights;

  explicit Through(ModelConfig const& c) : config(c), weights(random_weights(c)) {
    weights.indexer->wq_b.identity();
    weights.indexer->wk.identity();
    head_weights(Floats(to_size(c.index_n_heads), 1.0f));
    norm(Floats(to_size(c.index_head_dim), 1.0f), Floats(to_size(c.index_head_dim), 0.0f));
  }
  Through& head_weights(Floats const& w) {
    weights.indexer->weights_proj.fill(
        [&](index_t o, index_t i) { return i == 0 ? w[to_size(o)] : 0.0f; });
    return *this;
  }
  Through& norm(Floats const& gain, Floats const& bias) {
    weights.indexer->k_norm_weight.fill(gain);
    weights.indexer->k_norm_bias.fill(bias);
    return *this;
  }
  /// Gain and bias that give a one-hot key of four lanes back.
  Through& one_hot_keys() {
    return norm(Floats(4, static_cast<float>(std::sqrt(0.1875 + config.norm_eps.index_key))),
                Floats(4, 0.25f));
  }

  template <class X>
  Activations query(X const& x, FrontEnd<> const& front_end, Floats const& q,
                    position_t position) const {
    Activations sides(config, 1, true, Keep::intermediates);
    Floats first(to_size(config.hidden_size), 0.0f);
    first[0] = 1;
    Tokens const token({first}, {position});
    require_ok(
        project_index_queries(x, front_end, weights.indexer->view(),
                              make_dense<host, float const, 2>(q.data(), {1, config.q_lora_rank}),
                              token.hidden(), token.positions(), sides.queries.side));
    return sides;
  }
  template <class X>
  Floats keys(X const& x, FrontEnd<> const& front_end, std::vector<Floats> const& raw,
              std::vector<position_t> const& positions) const {
    Activations sides(config, static_cast<index_t>(raw.size()));
    Tokens const tokens(raw, positions);
    require_ok(project_keys(x, front_end, weights.view(), tokens.hidden(), tokens.positions(),
                            sides.keys.side));
    return values(sides.keys.side.index_k);
  }
};

struct Scored {
  Floats scores;
  position_t best = -1;
};

/// Scores of one query against all keys, and the best position.
template <class X>
Scored score(X const& x, FrontEnd<> const& front_end, QuerySide<host> const& side,
             Floats const& keys, LaneBasis basis = LaneBasis::natural) {
  ModelConfig const& c = front_end.config;
  auto const count = static_cast<index_t>(keys.size()) / c.index_head_dim;
  auto const length = static_cast<position_t>(count);
  position_t const request = 0;
  auto cache =
      make_contiguous_cache<host>(keys.data(), Requests{1}, Keys{count}, HeadDim{c.index_head_dim});
  cache.basis = basis;
  auto const table = make_contiguous_table<host>(Keys{count});
  RowBatch<host> const batch{make_lengths<host>(&length, Rows{1}),
                             make_lengths<host>(&request, Rows{1}), table, table};
  auto const in = indexer_inputs(front_end, side, cache);
  Shape const shape = shape_of(c, Rows{1}, Keys{count});
  require_ok(indexer_check(x, Indexer{}, in, batch, shape));
  Scored result{Floats(to_size(count)), -1};
  position_t chosen = 0;
  HostMemory const memory(select_workspace(x, Indexer{}, RadixTopK{}, shape, 1 << 20).value());
  require_ok(indexer_score(x, Indexer{}, in, batch, ScoreRequest{{0, 1}, 0},
                           make_scores<host>(result.scores.data(), Rows{1}, Keys{count}),
                           memory.view()));
  require_ok(select(x, Indexer{}, RadixTopK{}, in, batch, shape,
                    make_selection<host>(&result.best, &chosen, Rows{1}, TopK{1}), memory.view()));
  return result;
}

/// Scores of the definition without constants, times the constant of the model.
Doubles with_constant(ModelConfig const& config, Doubles scores) {
  for (double& s : scores) s *= index_weight_scale(config);
  return scores;
}

// ---- ROPE

/// R021's model as a config.json; `extra` are more fields.
ModelConfig rope_model(std::string const& family, std::string const& extra = "") {
  auto const config = io::parse_config(R"({"model_type": ")" + family +
                                       R"(", "num_hidden_layers": 1, "hidden_size": 4,
      "num_attention_heads": 2, "q_lora_rank": 4, "kv_lora_rank": 4, "qk_nope_head_dim": 2,
      "qk_rope_head_dim": 4, "v_head_dim": 2, "index_n_heads": 1, "index_head_dim": 4,
      "index_topk": 1, "rms_norm_eps": 1e-5, "rope_theta": 10000)" +
                                       extra + "}");
  if (!config) FAIL(config.error().path << " " << config.error().expected);
  return config->model;
}

struct RopeCase {
  char const* name;
  ModelConfig config;
  char const* layout;  ///< name of it in the vector
};
std::vector<RopeCase> rope_cases() {
  return {{"GLM, flag true", rope_model("glm_moe_dsa", R"(, "indexer_rope_interleave": true)"),
           "interleaved"},
          {"GLM, flag false", rope_model("glm_moe_dsa", R"(, "indexer_rope_interleave": false)"),
           "half_split"},
          {"GLM, no flag", rope_model("glm_moe_dsa"), "interleaved"},
          {"DeepSeek-V3.2, no flag", rope_model("deepseek_v32"), "half_split"},
          {"DeepSeek-V3.2, flag true",
           rope_model("deepseek_v32", R"(, "indexer_rope_interleave": true)"), "interleaved"}};
}

/// Vector V01 through a recipe for the query and one for the keys.
struct RopeVector {
  Floats query = test::fault_vector("V01_rope").at("q").get<Floats>();
  position_t query_position = test::fault_vector("V01_rope").at("q_pos").get<position_t>();
  std::vector<Floats> keys = test::fault_vector("V01_rope").at("keys").get<std::vector<Floats>>();

  template <class X>
  Scored run(X const& x, ModelConfig const& for_query, ModelConfig const& for_keys) const {
    Through q(for_query), k(for_keys);
    k.one_hot_keys();
    auto const front_end = make_front_end(for_query).value();
    auto const side = q.query(x, front_end, query, query_position);
    return score(x, front_end, side.queries.side,
                 k.keys(x, make_front_end(for_keys).value(), keys, {0, 1, 2}));
  }
};

}  // namespace

TEMPLATE_LIST_TEST_CASE("ROPE R021, R022, R023, R025: from the flag of a config.json to the index",
                        "[frontend][fault]", test::Executors) {
  RopeVector const v;
  for (RopeCase const& c : rope_cases()) {
    CAPTURE(c.name);
    auto const expected = test::fault_vector("V01_rope").at(c.layout);
    auto const got = v.run(TestType{}, c.config, c.config);
    check_close(
        got.scores,
        with_constant(c.config, expected.at("scores_without_constants").template get<Doubles>()),
        1e-6);
    CHECK(got.best == expected.at("index").at(0).template get<position_t>());
  }
}

TEST_CASE("ROPE R023: the two flags move one layout each", "[frontend][fault]") {
  test::Serial const x{};
  auto const run = [&](std::string const& extra) {
    ModelConfig const config = rope_model("glm_moe_dsa", extra);
    auto const weights = random_weights(config);
    Tokens const tokens(config, 0, 3);
    Activations sides(config, 3);
    auto const front_end = make_front_end(config).value();
    require_ok(project_queries(x, front_end, weights.view(), tokens.hidden(), tokens.positions(),
                               sides.queries.side));
    require_ok(project_keys(x, front_end, weights.view(), tokens.hidden(), tokens.positions(),
                            sides.keys.side));
    return std::vector{bits(sides.queries.side.q_absorbed), bits(sides.keys.side.kv_row),
                       bits(sides.queries.side.index_q), bits(sides.keys.side.index_k)};
  };
  auto const plain = run("");
  auto const indexer = run(R"(, "indexer_rope_interleave": false)");
  auto const attention = run(R"(, "rope_interleave": false)");
  for (std::size_t i = 0; i < 4; ++i) {
    CAPTURE(i);
    CHECK((indexer[i] == plain[i]) == (i < 2));
    CHECK((attention[i] == plain[i]) == (i >= 2));
  }
}

TEMPLATE_LIST_TEST_CASE("ROPE R024: queries and keys in two layouts are neither model",
                        "[frontend][fault]", test::Executors) {
  RopeVector const v;
  ModelConfig const interleaved = rope_model("glm_moe_dsa");
  ModelConfig const half_split = rope_model("deepseek_v32");
  double const c1 = std::cos(1), s1 = std::sin(1), c2 = std::cos(2), s2 = std::sin(2);
  double const slow_c = std::cos(0.02), slow_s = std::sin(0.02);  // pair 1 turns 100 times slower
  // golden values of each side
  auto const query = [&](ModelConfig const& config) {
    return values(Through(config)
                      .query(TestType{}, make_front_end(config).value(), v.query, 2)
                      .queries.side.index_q);
  };
  check_close(query(interleaved), Doubles{c2, s2, 0, 0}, 1e-6);
  check_close(query(half_split), Doubles{c2, 0, s2, 0}, 1e-6);
  auto const keys = [&](ModelConfig const& config) {
    Through through(config);
    through.one_hot_keys();
    return through.keys(TestType{}, make_front_end(config).value(), v.keys, {0, 1, 2});
  };
  check_close(keys(interleaved),
              Doubles{0, 1, 0, 0, 0, 0, std::cos(0.01), std::sin(0.01), -s2, c2, 0, 0}, 1e-6);
  check_close(keys(half_split), Doubles{0, 1, 0, 0, -s1, 0, c1, 0, 0, slow_c, 0, slow_s}, 1e-6);
  // mixed, either way
  check_close(v.run(TestType{}, interleaved, half_split).scores,
              with_constant(interleaved, {s2, -c2 * s1, s2 * slow_c}), 1e-6);
  check_close(v.run(TestType{}, half_split, interleaved).scores,
              with_constant(interleaved, {0, s2 * std::cos(0.01), -c2 * s2}), 1e-6);
}

TEST_CASE("ROPE R026: a wrong layout shows only where k is below the length", "[frontend][fault]") {
  auto const run = [](index_t top_k, RopeLayout layout) {
    ModelConfig config = tiny_model();
    config.index_topk = top_k;
    config.indexer_rope.layout = layout;
    auto const weights = random_weights(config);
    Decoder decoder(test::Serial{}, make_front_end(config).value(), weights.view(), 24);
    decoder.run(24);
    return decoder.rows;
  };
  auto const right = run(3, RopeLayout::half_split), wrong = run(3, RopeLayout::interleaved);
  CHECK_FALSE(same_bits(right, wrong));
  CHECK(same_bits({right.begin(), right.begin() + 3}, {wrong.begin(), wrong.begin() + 3}));
  CHECK(same_bits(run(24, RopeLayout::half_split), run(24, RopeLayout::interleaved)));
}

TEMPLATE_LIST_TEST_CASE("ROPE R029: equal keys at two positions differ by their rotation alone",
                        "[frontend][fault]", test::Executors) {
  auto const run = [](index_t rope) {
    Through through(indexer_model(1, 4, rope));
    through.one_hot_keys();
    auto const front_end = make_front_end(through.config).value();
    Floats const same{1, 0, 0, 0};
    auto const side = through.query(TestType{}, front_end, same, 5);
    return score(TestType{}, front_end, side.queries.side,
                 through.keys(TestType{}, front_end, {same, same}, {0, 5}));
  };
  auto const turned = run(4);
  check_close(turned.scores, with_constant(indexer_model(1, 4, 4), {std::cos(5), 1}), 1e-6);
  CHECK(turned.best == 1);
  auto const still = run(0);  // a model without rotation ties them, and the first one wins
  CHECK(still.scores[0] == still.scores[1]);
  CHECK(still.best == 0);
}

TEMPLATE_LIST_TEST_CASE("ROPE R047: at position 0 every lane is where it was", "[frontend][fault]",
                        test::Executors) {
  for (RopeLanes const lanes : {RopeLanes::first, RopeLanes::last}) {
    ModelConfig config = tiny_model(4, 1);
    config.indexer_rope.lanes = lanes;
    config.kv_lora_rank = config.qk_nope_head_dim = 6;
    config.q_lora_rank = 10;
    config.index_n_heads = 1;
    config.index_head_dim = 10;
    config.hidden_size = 10;
    auto weights = random_weights(config);
    weights.q_b_proj.identity();
    weights.kv_b_proj.identity();  // W_UK of the one head is the unit matrix
    weights.kv_a_proj.identity();
    weights.kv_a_layernorm.constant(1);
    weights.q_a_proj.identity();
    weights.q_a_layernorm.constant(1);
    weights.indexer->wq_b.identity();
    // rope lanes 1, nope lanes 10 * lane, in the attention's order: nope first
    Floats hidden;
    for (index_t lane = 0; lane < 10; ++lane) {
      hidden.push_back(lane < 6 ? 10.0f * static_cast<float>(lane) : 1.0f);
    }
    Tokens const token({hidden}, {0});
    Activations sides(config, 1, true, Keep::intermediates);
    auto const front_end = make_front_end(config).value();
    require_ok(project_queries(TestType{}, front_end, weights.view(), token.hidden(),
                               token.positions(), sides.queries.side));
    require_ok(project_keys(TestType{}, front_end, weights.view(), token.hidden(),
                            token.positions(), sides.keys.side));
    auto const& q = sides.queries.side;
    auto const in_order = [](auto const& got, auto const& want) {
      Floats const a = values(got), b = values(want);
      check_close(a, Doubles(b.begin(), b.end()), 1e-6);
    };
    in_order(q.q, q.q_resid);
    in_order(q.q_absorbed, q.q);
    in_order(q.index_q, q.index_q_raw);
    CHECK(values(q.q_rope(config)) == Floats(4, q.q(0, 0, 9)));
    CHECK(q.q(0, 0, 5) > 4 * q.q(0, 0, 9));  // so that lanes are told apart
    in_order(detail::lanes_of(sides.keys.side.kv_row, 6, 4),
             detail::lanes_of(sides.keys.side.kv_a, 6, 4));
    in_order(sides.keys.side.index_k, sides.keys.side.index_k_norm);
  }
}

TEST_CASE("ROPE R047: rotated lanes of an index head are the first or the last",
          "[frontend][fault]") {
  for (RopeLanes const lanes : {RopeLanes::first, RopeLanes::last}) {
    ModelConfig config = indexer_model(1, 6, 4);
    config.indexer_rope.lanes = lanes;
    Through const through(config);
    auto const got =
        values(through.query(test::Serial{}, make_front_end(config).value(), {1, 2, 3, 4, 5, 6}, 3)
                   .queries.side.index_q);
    Floats const before{1, 2, 3, 4, 5, 6};
    for (std::size_t i = 0; i < 6; ++i) {
      bool const rotated = lanes == RopeLanes::first ? i < 4 : i >= 2;
      CHECK((got[i] != before[i]) == rotated);
    }
  }
}

TEMPLATE_LIST_TEST_CASE("ROPE R149: YaRN with equal factors leaves rotated lanes their size",
                        "[frontend][fault]", test::Executors) {
  ModelConfig config = indexer_model(1, 3, 2);
  config.rope.theta = 1e4;
  config.rope.scaling = RopeScaling::yarn;
  config.rope.yarn = {40, 32, 1, 1, 1, 4096};
  Through through(config);
  // normed one-hot keys are (sqrt 2, -sqrt 1/2, -sqrt 1/2) and turns; A becomes [1,0|0], B
  // [0,0|1.2]
  auto const root = static_cast<float>(std::sqrt(2.0));
  through.norm({root / 3, 0, 0.4f * root}, {1.0f / 3, 0, 0.4f});
  auto front_end = make_front_end(config).value();
  auto const run = [&] {
    auto const side = through.query(TestType{}, front_end, {1, 0, 1}, 0);
    return score(TestType{}, front_end, side.queries.side,
                 through.keys(TestType{}, front_end, {{1, 0, 0}, {0, 0, 1}}, {0, 0}));
  };
  auto const got = run();
  check_close(got.scores, with_constant(config, {1, 1.2}), 1e-5);
  CHECK(got.best == 1);
  CHECK(front_end.frequencies.amplitude == 1);
  CHECK(std::abs(index_weight_scale(config) - 1 / std::sqrt(3.0)) < 1e-12);
  // the fault: cosine and sine inflated on both sides
  front_end.frequencies.amplitude = static_cast<float>(yarn_magnitude(40, 1));
  auto const inflated = run();
  check_close(inflated.scores, with_constant(config, {1.87385, 1.2}), 1e-5);
  CHECK(inflated.best == 0);
}

TEST_CASE("SCALE R149: the attention's scale with and without mscale", "[frontend][fault]") {
  ModelConfig config = tiny_model();  // 12 + 8 lanes
  auto const scale_of = [&] {
    auto const weights = random_weights(config);
    Activations const sides(config, 0);
    CacheView<host, format::Plain<float>> const kv{};
    return static_cast<double>(
        attention_inputs(make_front_end(config).value(), weights.view(), sides.queries.side, kv)
            .scale);
  };
  double const plain = 1 / std::sqrt(20.0);
  CHECK(std::abs(scale_of() - plain) < 1e-7);
  config.rope.scaling = RopeScaling::yarn;
  config.rope.yarn = {40, 32, 1, 1, 1, 4096};
  CHECK(std::abs(scale_of() / plain - 1.87385) < 1e-5);
  config.rope.yarn.mscale_all_dim = 0;
  CHECK(std::abs(scale_of() - plain) < 1e-7);
}

// ---- NORM

TEST_CASE("NORM R012: latents take the latent epsilon, index keys their own", "[frontend][fault]") {
  ModelConfig config = indexer_model(1, 2, 0);
  config.kv_lora_rank = 2;
  auto const normed = [&](NormEps const& eps) {
    config.norm_eps = eps;
    Through through(config);
    through.weights.q_a_proj.identity();
    through.weights.q_a_layernorm.constant(1);
    through.weights.kv_a_proj.identity();
    through.weights.kv_a_layernorm.constant(1);
    Tokens const token({{1e-3f, -1e-3f}}, {0});
    Activations sides(config, 1, true, Keep::intermediates);
    auto const front_end = make_front_end(config).value();
    require_ok(project_queries(test::Serial{}, front_end, through.weights.view(), token.hidden(),
                               token.positions(), sides.queries.side));
    require_ok(project_keys(test::Serial{}, front_end, through.weights.view(), token.hidden(),
                            token.positions(), sides.keys.side));
    return Doubles{static_cast<double>(sides.queries.side.q_resid(0, 0)),
                   static_cast<double>(sides.keys.side.kv_row(0, 0)),
                   static_cast<double>(sides.keys.side.index_k(0, 0))};
  };
  auto const near = [](Doubles const& got, Doubles const& want) {
    check_close(std::vector<float>(got.begin(), got.end()), want, 1e-4);
  };
  // 1e-3 / sqrt(1e-6 + eps)
  near(normed({1e-4, 1e-5, 1e-6}), {0.3015, 0.3015, 0.7071});
  near(normed({1e-6, 1e-4, 1e-5}), {0.0995, 0.0995, 0.3015});
  near(normed({1e-5, 1e-6, 1e-4}), {0.7071, 0.7071, 0.0995});
}

TEMPLATE_LIST_TEST_CASE("NORM R033: vector V02 through the projection, whatever rms_norm_eps says",
                        "[frontend][fault]", test::Executors) {
  auto const v = test::fault_vector("V02_layernorm_eps");
  for (auto const& [name, eps] : {std::pair{"1e-06", 1e-6}, std::pair{"1e-05", 1e-5}}) {
    CAPTURE(name);
    ModelConfig config = indexer_model(2, 2, 0);
    config.norm_eps = {1e-5, 1e-5, eps};
    Through through(config);
    through.norm({1, 1}, {0, 1}).head_weights({1, 0.75f});
    auto const front_end = make_front_end(config).value();
    auto const keys = through.keys(TestType{}, front_end, {{1e-3f, -1e-3f}, {0.1f, 0.5f}}, {0, 1});
    auto const& expected = v.at(name);
    auto want = expected.at("k_A").template get<Doubles>();
    for (double const lane : expected.at("k_B").template get<Doubles>()) want.push_back(lane);
    check_close(keys, want, 1e-6);
    auto const side = through.query(TestType{}, front_end, {2, 0, 0, 1}, 0);
    auto const got = score(TestType{}, front_end, side.queries.side, keys);
    check_close(got.scores, with_constant(config, expected.at("scores").template get<Doubles>()),
                1e-6);
    CHECK(got.best == expected.at("index").at(0).template get<position_t>());
  }
  // a config's rms_norm_eps is not that of the index keys
  CHECK(rope_model("glm_moe_dsa").norm_eps.latent == 1e-5);
  CHECK(rope_model("glm_moe_dsa").norm_eps.index_key == 1e-6);
}

TEMPLATE_LIST_TEST_CASE("NORM R034: index keys are normed about their mean, with a bias",
                        "[frontend][fault]", test::Executors) {
  auto const run = [](Floats const& bias) {
    Through through(indexer_model(1, 2, 0));
    through.norm({1, 1}, bias);
    auto const front_end = make_front_end(through.config).value();
    auto const keys = through.keys(TestType{}, front_end, {{3, 1}}, {0});
    auto const side = through.query(TestType{}, front_end, {0, 1}, 0);
    return std::pair(keys, score(TestType{}, front_end, side.queries.side, keys).scores[0]);
  };
  auto const [plain, zero] = run({0, 0});
  check_close(plain, Doubles{1, -1}, 1e-6);  // an RMS norm gives 1.3416, 0.4472
  CHECK(zero == 0);
  auto const [shifted, positive] = run({0, 2});
  check_close(shifted, Doubles{1, 1}, 1e-6);
  check_close(Floats{positive}, Doubles{1 / std::sqrt(2.0)}, 1e-6);
}

// ---- SCALE and SCORE

TEMPLATE_LIST_TEST_CASE("SCORE R028: vector V03 through the projections", "[frontend][fault]",
                        test::Executors) {
  auto const v = test::fault_vector("V03_relu");
  Through through(indexer_model(2, 2, 0));
  // the norm makes [1, -1] of key A and zeros of key B, which has no variance
  through.norm({2, 11}, {1, 1}).head_weights(v.at("w").template get<Floats>());
  auto const front_end = make_front_end(through.config).value();
  auto const keys = through.keys(TestType{}, front_end, {{1, -1}, {5, 5}}, {0, 1});
  check_close(keys, Doubles{3, -10, 1, 1}, 2e-6);
  auto const side = through.query(TestType{}, front_end, {1, 0, 0, 1}, 0);
  auto const got = score(TestType{}, front_end, side.queries.side, keys);
  check_close(got.scores, with_constant(through.config, v.at("scores").template get<Doubles>()),
              2e-6);
  CHECK(got.best == v.at("index_k1").at(0).template get<position_t>());
}

TEMPLATE_LIST_TEST_CASE("SCALE R030: the constants are in the head weights, once",
                        "[frontend][fault]", test::Executors) {
  Through through(indexer_model(1, 4, 0));
  through.norm({0, 0, 0, 0}, {2, 2, 0, 0}).head_weights({2});
  auto const front_end = make_front_end(through.config).value();
  auto const side = through.query(TestType{}, front_end, {2, 2, 0, 0}, 0);
  CHECK(values(side.queries.side.head_weights_raw) == Floats{2});
  CHECK(values(side.queries.side.head_weights) == Floats{1});  // 2 * 4^-0.5 * 1^-0.5
  auto const keys = through.keys(TestType{}, front_end, {{1, 0, 0, 0}}, {0});
  CHECK(score(TestType{}, front_end, side.queries.side, keys).scores == Floats{8});
  // and the number of heads: 4 heads of 16 lanes make 1/8
  Through many(indexer_model(4, 16, 0));
  many.head_weights({1, -2, 4, 0});
  auto const weights = many.query(TestType{}, make_front_end(many.config).value(), Floats(64), 0);
  CHECK(values(weights.queries.side.head_weights) == Floats{0.125f, -0.25f, 0.5f, 0});
}

TEMPLATE_LIST_TEST_CASE("SCALE R032: head weights stay fp32 where the other weights are bf16",
                        "[frontend][fault]", test::Executors) {
  ModelConfig const config = indexer_model(2, 2, 0);
  OwnedWeights<bf16> weights = random_weights<bf16>(config);
  auto& indexer = *weights.indexer;
  indexer.wq_b.identity();
  indexer.wk.identity();
  // normed keys are [1, -1] and [-1, 1]; they become [1, 0] and [0, 1.002]
  indexer.k_norm_weight.fill({0.5f, 0.501f});
  indexer.k_norm_bias.fill({0.5f, 0.501f});
  indexer.weights_proj.fill([](index_t o, index_t i) {
    return i > 0 ? 0.0f : o == 0 ? 1 + 0x1p-8f : 1.0f;  // bf16 would make the first weight 1
  });
  auto const front_end = make_front_end(config).value();
  Tokens const tokens({{1, -1}, {-1, 1}}, {0, 1});
  Activations sides(config, 2);
  require_ok(project_keys(TestType{}, front_end, weights.view(), tokens.hidden(),
                          tokens.positions(), sides.keys.side));
  Floats const query{1, 0, 0, 1};
  Tokens const row({{1, 0}}, {2});
  Activations rows(config, 1);
  require_ok(project_index_queries(TestType{}, front_end, indexer.view(),
                                   make_dense<host, float const, 2>(query.data(), {1, 4}),
                                   row.hidden(), row.positions(), rows.queries.side));
  CHECK(values(rows.queries.side.head_weights) == Floats{(1 + 0x1p-8f) / 2, 0.5f});
  CHECK(score(TestType{}, front_end, rows.queries.side, values(sides.keys.side.index_k)).best == 0);
}

// ---- HAD

TEST_CASE("HAD R035: the basis reaches the bytes that are cached", "[frontend][fault]") {
  ModelConfig const config = indexer_model(1, 128, 0);
  Floats outlier(128, 0.0f);
  outlier[0] = 448;
  auto const codes = [&](LaneBasis basis) {
    Through through(config);
    through.norm(Floats(128, 0.0f), outlier);
    auto const lanes = through.keys(test::Serial{}, make_front_end(config, basis).value(),
                                    {Floats(128, 1.0f)}, {0});
    float const scale = test::e4m3_scale(lanes);
    std::vector<int> out;
    for (float const lane : lanes) out.push_back(from_float<e4m3>(lane / scale).bits);
    return std::pair(lanes, out);
  };
  auto const [lanes, natural] = codes(LaneBasis::natural);
  CHECK(natural[0] == 0x7E);  // 448
  CHECK(std::count(natural.begin(), natural.end(), 0) == 127);
  auto const [spread, hadamard] = codes(LaneBasis::hadamard);
  check_close(spread, Doubles(128, 448 / std::sqrt(128.0)), 1e-6);  // 39.6
  CHECK(std::count(hadamard.begin(), hadamard.end(), 0x7E) == 128);
}

TEMPLATE_LIST_TEST_CASE("HAD R036: vector V05, one basis for both sides", "[frontend][fault]",
                        test::Executors) {
  auto const v = test::fault_vector("V05_hadamard");
  Through through(indexer_model(1, 4, 0));
  // the norm makes (3, -1, -1, -1) / sqrt 3 of key A and zeros of key B
  auto const root = static_cast<float>(std::sqrt(3.0));
  through.norm({root / 6, root / 2, root / 2, root / 2}, Floats(4, 0.5f));
  auto const natural = make_front_end(through.config).value();
  auto const hadamard = make_front_end(through.config, LaneBasis::hadamard).value();
  auto const keys = [&](FrontEnd<> const& front_end) {
    return through.keys(TestType{}, front_end, {{1, 0, 0, 0}, {1, 1, 1, 1}}, {0, 1});
  };
  auto const query = [&](FrontEnd<> const& front_end) {
    return through.query(TestType{}, front_end, {1, 0, 0, 0}, 2);
  };
  auto const want = [&](char const* name) {
    return with_constant(through.config, v.at(name).template get<Doubles>());
  };
  auto const true_scores = score(TestType{}, natural, query(natural).queries.side, keys(natural));
  check_close(true_scores.scores, want("true"), 2e-6);
  auto const both = score(TestType{}, hadamard, query(hadamard).queries.side, keys(hadamard),
                          LaneBasis::hadamard);
  check_close(both.scores, want("both"), 2e-6);
  CHECK(both.best == true_scores.best);
  // who lies about the basis of the cache gets the fault: the order flips
  auto const lied =
      score(TestType{}, hadamard, query(hadamard).queries.side, keys(natural), LaneBasis::hadamard);
  check_close(lied.scores, want("q_only"), 2e-6);
  CHECK(lied.best != true_scores.best);
}

TEST_CASE("HAD R036: a mixture of bases is refused, by the append and by the layer",
          "[frontend][fault]") {
  ModelConfig const config = tiny_model();
  auto const weights = random_weights(config);
  for (LaneBasis const basis : {LaneBasis::natural, LaneBasis::hadamard}) {
    LaneBasis const other = basis == LaneBasis::natural ? LaneBasis::hadamard : LaneBasis::natural;
    Decoder decoder(test::Serial{}, make_front_end(config, basis).value(), weights.view(), 8);
    Chunk chunk(config, 0, 6);
    require_ok(decoder.project(chunk));
    auto const refused = [&](Status const& status, std::string const& part, LaneBasis expected,
                             LaneBasis got) {
      CAPTURE(status);
      CHECK(status.code == Errc::bad_value);
      CHECK(std::string(status.what).find(part) != std::string::npos);
      CHECK(status.expected == static_cast<std::int64_t>(expected));
      CHECK(status.got == static_cast<std::int64_t>(got));
    };
    decoder.index_basis = other;
    refused(decoder.append(chunk), "basis of the cache to append to", basis, other);
    decoder.index_basis.reset();
    require_ok(decoder.append(chunk));
    test::Guarded<float> latent(6 * 3 * 32, test::unwritten);
    auto const as_other = [&](auto& in) { in.indexer->keys.basis = other; };
    refused(decoder.attend(chunk, latent, as_other), "basis of the index queries", other, basis);
    auto const queries_as_other = [&](auto& in) { in.indexer->q_basis = other; };
    refused(decoder.attend(chunk, latent, queries_as_other), "basis of the index queries", basis,
            other);
    auto const bytes = std::as_bytes(latent.span());
    CHECK(
        std::all_of(bytes.begin(), bytes.end(), [](std::byte b) { return b == test::unwritten; }));
    require_ok(decoder.attend(chunk, latent));
  }
}

TEST_CASE("HAD R036: rows of attention keys are natural, and a cache marked otherwise is refused",
          "[frontend][fault]") {
  ModelConfig const config = tiny_model();
  auto const weights = random_weights(config);
  Tokens const tokens(config, 0, 3);
  Activations sides(config, 3);
  auto const front_end = make_front_end(config, LaneBasis::hadamard).value();
  require_ok(project_keys(test::Serial{}, front_end, weights.view(), tokens.hidden(),
                          tokens.positions(), sides.keys.side));
  std::vector<float> storage(3 * 40, 7.0f);
  std::vector<position_t> const places{0, 1, 2}, requests{0, 0, 0};
  auto cache = make_contiguous_cache<host>(storage.data(), Requests{1}, Keys{3}, HeadDim{40});
  auto const append = [&] {
    return append_kv(test::Serial{}, sides.keys.side, make_lengths<host>(places.data(), Rows{3}),
                     make_lengths<host>(requests.data(), Rows{3}),
                     make_contiguous_table<host>(Keys{3}), cache);
  };
  cache.basis = LaneBasis::hadamard;
  Status const refused = append();
  CHECK(refused.code == Errc::bad_value);
  CHECK(std::string(refused.what).find("basis of the cache") != std::string::npos);
  CHECK(std::all_of(storage.begin(), storage.end(), [](float x) { return x == 7.0f; }));
  cache.basis = LaneBasis::natural;
  require_ok(append());
}

TEST_CASE("HAD R036: the basis changes no selection and no output's bits", "[frontend][fault]") {
  ModelConfig const config = tiny_model();
  auto const weights = random_weights(config);
  Decoder natural(test::Serial{}, make_front_end(config).value(), weights.view(), 24);
  Decoder hadamard(test::Serial{}, make_front_end(config, LaneBasis::hadamard).value(),
                   weights.view(), 24);
  natural.run(24);
  hadamard.run(24);
  CHECK(same_bits(natural.rows, hadamard.rows));  // scores are further apart than they move
  CHECK(natural.stored_index_keys() != hadamard.stored_index_keys());
  CHECK(bits_of(natural.stored_kv()) == bits_of(hadamard.stored_kv()));
}

// ---- Caches and Hy4

TEST_CASE("front end: rows are rounded once when they are appended", "[frontend]") {
  ModelConfig const config = tiny_model();
  auto const weights = random_weights(config);
  Decoder<test::Serial, bf16> narrow(test::Serial{}, make_front_end(config).value(), weights.view(),
                                     12);
  Decoder<test::Serial, float> wide(test::Serial{}, make_front_end(config).value(), weights.view(),
                                    12);
  narrow.run(12);
  wide.run(12);
  auto const rounded = [](Floats lanes) {
    for (float& lane : lanes) lane = to_float(from_float<bf16>(lane));
    return lanes;
  };
  CHECK(narrow.stored_kv() == rounded(wide.stored_kv()));
  CHECK(narrow.stored_index_keys() == rounded(wide.stored_index_keys()));
}

TEST_CASE("front end: what cannot be appended is refused and nothing is written", "[frontend]") {
  ModelConfig const config = tiny_model();
  auto const weights = random_weights(config);
  Decoder decoder(test::Serial{}, make_front_end(config).value(), weights.view(), 8);
  Chunk chunk(config, 0, 3);
  require_ok(decoder.project(chunk));
  chunk.positions[2] = 8;  // past the page table
  Status const status = decoder.append(chunk);
  CAPTURE(status);
  CHECK(status.code == Errc::bad_value);
  CHECK(status.got == 8);
  auto const cache = decoder.index_keys();
  auto const* const bytes = reinterpret_cast<std::byte const*>(cache.data);
  CHECK(std::all_of(bytes, bytes + cache.blocks * cache.block_stride * 4,
                    [](std::byte b) { return b == test::nan_poison; }));
}

TEST_CASE("front end: sinks reach the attention of the models that have them", "[frontend]") {
  auto const inputs = [](ModelConfig const& config) {
    auto const weights = random_weights(config);
    Activations const sides(config, 2);
    CacheView<host, format::Plain<float>> const kv{};
    auto const in =
        attention_inputs(make_front_end(config).value(), weights.view(), sides.queries.side, kv);
    CHECK(in.q.data_handle() == sides.queries.side.q_absorbed.data_handle());
    return std::pair(in.sink.extent(0), in.sink.data_handle() != nullptr);
  };
  CHECK(inputs(tiny_hy_v4()) == std::pair<index_t, bool>(3, true));
  CHECK(inputs(tiny_model()) == std::pair<index_t, bool>(0, false));
}
