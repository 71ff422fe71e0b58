// SPDX-License-Identifier: Apache-2.0
//
// The four projections and what they are for: every quantity against its formula, what bits may
// depend on, the two forms of the attention, a caller's own product.
#include <catch2/catch_template_test_macros.hpp>
#include <catch2/catch_test_macros.hpp>

#include "by_hand.hpp"
#include "decoder.hpp"
#include "executors.hpp"
#include "frontend_model.hpp"
#include "oracle.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

using namespace frontend_test;

namespace {

struct Model {
  char const* name;
  ModelConfig config;
  LaneBasis basis = LaneBasis::natural;
};

ModelConfig with(ModelConfig config, auto const& change) {
  change(config);
  return config;
}

/// Every difference between the families, and widths of R019.
std::vector<Model> models() {
  return {
      {"three heads", tiny_model()},
      {"one head", tiny_model(8, 1)},
      {"no rotation", tiny_model(0, 3)},
      {"everything rotated", with(tiny_model(),
                                  [](auto& c) {
                                    c.qk_rope_head_dim = c.indexer_rope.dims = c.index_head_dim;
                                    c.qk_nope_head_dim = 0;
                                  })},
      {"wider values than keys", with(tiny_model(), [](auto& c) { c.v_head_dim = 40; })},
      {"interleaved indexer",
       with(tiny_model(), [](auto& c) { c.indexer_rope.layout = RopeLayout::interleaved; })},
      {"hy_v4", tiny_hy_v4()},
      {"hadamard", tiny_model(), LaneBasis::hadamard},
      {"hy_v4, hadamard", tiny_hy_v4(), LaneBasis::hadamard},
      {"odd index heads", with(tiny_model(),
                               [](auto& c) {
                                 c.index_n_heads = 3;
                                 c.index_head_dim = 14;
                               })},
  };
}

FrontEnd<> recipe(Model const& model) { return make_front_end(model.config, model.basis).value(); }

/// All tokens' values of one quantity.
Doubles gather(std::vector<TokenByHand> const& tokens, Doubles TokenByHand::*quantity) {
  Doubles all;
  for (TokenByHand const& token : tokens) {
    all.insert(all.end(), (token.*quantity).begin(), (token.*quantity).end());
  }
  return all;
}

std::vector<TokenByHand> tokens_by_hand(Model const& model, AttentionWeights<host, float> const& w,
                                        Tokens& tokens) {
  std::vector<TokenByHand> all;
  for (index_t t = 0; t < tokens.count(); ++t) {
    all.push_back(token_by_hand(model.config, model.basis, w,
                                std::span(tokens.row(t), to_size(model.config.hidden_size)),
                                tokens.positions()(t)));
  }
  return all;
}

/// Every quantity of the query and key side, under its name.
std::vector<std::pair<std::string, std::vector<float>>> quantities(Activations const& sides) {
  auto const& q = sides.queries.side;
  auto const& k = sides.keys.side;
  return {{"q_resid", values(q.q_resid)},
          {"q", values(q.q)},
          {"q_absorbed", values(q.q_absorbed)},
          {"index_q", values(q.index_q)},
          {"head_weights", values(q.head_weights)},
          {"kv_row", values(k.kv_row)},
          {"index_k", values(k.index_k)}};
}

template <class X>
Activations project(X const& x, Model const& model, AttentionWeights<host, float> const& weights,
                    Tokens const& tokens, Keep keep = Keep::results) {
  Activations sides(model.config, tokens.count(), weights.indexer.has_value(), keep);
  auto const front_end = recipe(model);
  require_ok(project_queries(x, front_end, weights, tokens.hidden(), tokens.positions(),
                             sides.queries.side));
  require_ok(
      project_keys(x, front_end, weights, tokens.hidden(), tokens.positions(), sides.keys.side));
  CHECK(sides.intact());
  return sides;
}

constexpr double close_enough = 2e-5;  // sums of 40 fp32 products in a row of five steps

}  // namespace

TEMPLATE_LIST_TEST_CASE("KSHAPE R019: every quantity of a token is its formula",
                        "[frontend][fault]", test::Executors) {
  for (Model const& model : models()) {
    CAPTURE(model.name);
    for (bool const full : {true, false}) {
      auto const weights = random_weights(model.config, full, 3);
      Tokens tokens(model.config, 0, 5, 2);
      auto const by_hand = tokens_by_hand(model, weights.view(), tokens);
      auto const got = project(TestType{}, model, weights.view(), tokens, Keep::intermediates);
      auto const check = [&](char const* name, auto const& view, Doubles TokenByHand::*quantity) {
        CAPTURE(name);
        check_close(values(view), gather(by_hand, quantity), close_enough);
      };
      auto const& q = got.queries.side;
      auto const& k = got.keys.side;
      check("q_a", q.q_a, &TokenByHand::q_a);
      check("q_resid", q.q_resid, &TokenByHand::q_resid);
      check("q", q.q, &TokenByHand::q);
      check("q_absorbed", q.q_absorbed, &TokenByHand::q_absorbed);
      check("index_q_raw", q.index_q_raw, &TokenByHand::index_q_raw);
      check("index_q", q.index_q, &TokenByHand::index_q);
      check("head_weights_raw", q.head_weights_raw, &TokenByHand::head_weights_raw);
      check("head_weights", q.head_weights, &TokenByHand::head_weights);
      check("kv_a", k.kv_a, &TokenByHand::kv_a);
      check("kv_row", k.kv_row, &TokenByHand::kv_row);
      check("index_k_raw", k.index_k_raw, &TokenByHand::index_k_raw);
      check("index_k_norm", k.index_k_norm, &TokenByHand::index_k_norm);
      check("index_k", k.index_k, &TokenByHand::index_k);
      CHECK(q.index_q.extent(0) == (full ? 5 : 0));
    }
  }
}

TEMPLATE_LIST_TEST_CASE("front end: the output of a row is its formula, gate included",
                        "[frontend]", test::Executors) {
  for (Model const& model : models()) {
    CAPTURE(model.name);
    ModelConfig const& c = model.config;
    auto const weights = random_weights(c, true, 1);
    for (index_t const rows : {0, 1, 17}) {
      Tokens tokens(c, 0, rows, 1);
      auto const width = c.num_attention_heads * c.kv_lora_rank;
      auto const latent = test::Random(3).normals(to_size(rows * width));
      Activations got(c, rows, true, Keep::intermediates);
      require_ok(project_output(TestType{}, recipe(model), weights.view(), tokens.hidden(),
                                make_dense<host, float const, 3>(
                                    latent.data(), {rows, c.num_attention_heads, c.kv_lora_rank}),
                                got.outputs.side));
      OutputByHand all;
      for (index_t r = 0; r < rows; ++r) {
        auto const row =
            output_by_hand(c, weights.view(), std::span(tokens.row(r), to_size(c.hidden_size)),
                           std::span(latent).subspan(to_size(r * width), to_size(width)));
        auto const append = [](Doubles& to, Doubles const& from) {
          to.insert(to.end(), from.begin(), from.end());
        };
        append(all.attention, row.attention);
        append(all.gate, row.gate);
        append(all.gated, row.gated);
        append(all.output, row.output);
      }
      auto const& side = got.outputs.side;
      check_close(values(side.attention), all.attention, close_enough);
      check_close(values(side.gate), all.gate, close_enough);
      check_close(values(side.gated), all.gated, close_enough);
      check_close(values(side.output), all.output, close_enough);
      CHECK(got.outputs.intact());
    }
  }
}

TEST_CASE("front end: an output side whose `gated` is memory of its own needs no gate",
          "[frontend]") {
  ModelConfig const config = tiny_model();  // has no gate, so nobody would write it
  auto const weights = random_weights(config);
  Tokens const tokens(config, 0, 2);
  auto const latent = test::Random(3).normals(2 * 3 * 32);
  auto const view = make_dense<host, float const, 3>(latent.data(), {2, 3, 32});
  auto const run = [&](Activations& sides) {
    require_ok(project_output(test::Serial{}, make_front_end(config).value(), weights.view(),
                              tokens.hidden(), view, sides.outputs.side));
    return bits(sides.outputs.side.output);
  };
  Activations carved(config, 2), apart(config, 2);
  Vector const elsewhere(2 * 3 * 16);
  apart.outputs.side.gated =
      make_dense<host, float, 3>(const_cast<float*>(elsewhere.view().data_handle()), {2, 3, 16});
  CHECK(run(apart) == run(carved));
}

TEST_CASE("front end: results in place are those beside their intermediates, bit for bit",
          "[frontend]") {
  for (Model const& model : models()) {
    CAPTURE(model.name);
    auto const weights = random_weights(model.config);
    Tokens const tokens(model.config, 3, 6);
    auto const kept = project(test::Serial{}, model, weights.view(), tokens, Keep::intermediates);
    auto const results = project(test::Serial{}, model, weights.view(), tokens, Keep::results);
    auto const want = quantities(kept), got = quantities(results);
    for (std::size_t i = 0; i < want.size(); ++i) {
      CAPTURE(want[i].first);
      CHECK(bits_of(got[i].second) == bits_of(want[i].second));
    }
    auto const latent = test::Random(4).normals(
        to_size(6 * model.config.num_attention_heads * model.config.kv_lora_rank));
    auto const outputs = [&](Keep keep) {
      Activations sides(model.config, 6, true, keep);
      require_ok(project_output(
          test::Serial{}, recipe(model), weights.view(), tokens.hidden(),
          make_dense<host, float const, 3>(
              latent.data(), {6, model.config.num_attention_heads, model.config.kv_lora_rank}),
          sides.outputs.side));
      return std::pair(bits(sides.outputs.side.gated), bits(sides.outputs.side.output));
    };
    CHECK(outputs(Keep::results) == outputs(Keep::intermediates));
    Activations const small(model.config, 6, true, Keep::results);
    CHECK(small.queries.side.q_a.data_handle() == small.queries.side.q_resid.data_handle());
  }
}

TEMPLATE_LIST_TEST_CASE("front end: a token's bits do not depend on its batch or the threads",
                        "[frontend]", test::HostExecutors) {
  for (Model const& model : {models()[0], models()[8]}) {
    auto const weights = random_weights(model.config);
    auto const want =
        quantities(project(test::Serial{}, model, weights.view(), Tokens(model.config, 0, 33)));
    for (auto const& [first, count] :
         {std::pair<index_t, index_t>{0, 33}, {0, 0}, {0, 1}, {32, 1}, {5, 17}}) {
      auto const got = quantities(
          project(TestType{}, model, weights.view(), Tokens(model.config, first, count, 5)));
      for (std::size_t i = 0; i < want.size(); ++i) {
        CAPTURE(model.name, first, count, want[i].first);
        auto const width = want[i].second.size() / 33;
        auto const rows =
            std::span(want[i].second).subspan(to_size(first) * width, to_size(count) * width);
        CHECK(bits_of(got[i].second) == bits_of(rows));
      }
    }
  }
}

TEST_CASE("front end: a token that is NaN leaves the others alone", "[frontend]") {
  for (Model const& model : models()) {
    CAPTURE(model.name);
    auto const weights = random_weights(model.config);
    Tokens tokens(model.config, 0, 18);
    auto const want = quantities(project(test::Threads{}, model, weights.view(), tokens));
    for (index_t i = 0; i < model.config.hidden_size; ++i) tokens.row(7)[i] = std::nanf("");
    auto const got = quantities(project(test::Threads{}, model, weights.view(), tokens));
    for (std::size_t i = 0; i < want.size(); ++i) {
      CAPTURE(want[i].first);
      auto const width = static_cast<index_t>(want[i].second.size() / 18);
      auto const all = bits_of(got[i].second), before = bits_of(want[i].second);
      CHECK(std::equal(all.begin(), all.begin() + 7 * width, before.begin()));
      CHECK(std::equal(all.begin() + 8 * width, all.end(), before.begin() + 8 * width));
    }
  }
}

// ---- What the quantities are for

TEMPLATE_LIST_TEST_CASE("KSHAPE R019: a miniature runs from hidden states to the output",
                        "[frontend][fault]", test::Executors) {
  for (Model const& model : models()) {
    CAPTURE(model.name);
    auto const weights = random_weights(model.config);
    for (index_t const tokens : {1, 17, 33}) {
      Decoder decoder(TestType{}, recipe(model), weights.view(), 40);
      decoder.run(tokens);
      decoder.run(0);
      // by hand from what lies in the caches: scores, selection, attention, output
      auto const index_keys = decoder.stored_index_keys();
      auto const kv = decoder.stored_kv();
      Shape const& shape = decoder.shape;
      Tokens inputs(model.config, 0, tokens);
      auto const by_hand = tokens_by_hand(model, weights.view(), inputs);
      auto const floats = [](Doubles const& d) { return std::vector<float>(d.begin(), d.end()); };
      std::vector<std::span<float const>> cached;
      std::vector<float> scores;
      for (index_t t = 0; t < tokens; ++t) {
        auto const at = to_size(t);
        cached.push_back(
            std::span(kv).subspan(at * to_size(shape.key_dim), to_size(shape.key_dim)));
        auto const q = floats(by_hand[at].index_q), w = floats(by_hand[at].head_weights);
        scores.clear();
        for (std::size_t s = 0; s <= at; ++s) {
          auto const key =
              std::span(index_keys).subspan(s * to_size(shape.index_dim), to_size(shape.index_dim));
          scores.push_back(static_cast<float>(test::index_score(q, w, key).value));
        }
        auto const want = test::select_by_sort(scores, t + 1, shape.top_k);
        auto const& got = decoder.rows[at];
        CHECK(got.selected ==
              std::vector<position_t>(want.indices.begin(), want.indices.begin() + want.count));
        std::vector<std::span<float const>> chosen;
        for (position_t const s : got.selected)
          chosen.push_back(cached[static_cast<std::size_t>(s)]);
        Doubles latent;
        for (index_t h = 0; h < shape.heads; ++h) {
          auto const all = floats(by_hand[at].q_absorbed);
          auto const query =
              std::span(all).subspan(to_size(h * shape.key_dim), to_size(shape.key_dim));
          float const sink = model.config.learnable_sink ? weights.view().sinks(h) : 0.0f;
          auto const attended =
              test::attend(query, chosen, shape.value_dim,
                           1 / std::sqrt(static_cast<double>(qk_head_dim(model.config))),
                           model.config.learnable_sink ? &sink : nullptr);
          latent.insert(latent.end(), attended.out.begin(), attended.out.end());
        }
        check_close(got.latent, latent, close_enough);
        auto const out = output_by_hand(model.config, weights.view(),
                                        std::span(inputs.row(t), to_size(model.config.hidden_size)),
                                        floats(latent));
        check_close(got.output, out.output, close_enough);
      }
    }
  }
}

TEST_CASE("LEN R051: chunks, tokens one by one and a whole prefill give the same bits",
          "[frontend][fault]") {
  for (Model const& model : models()) {
    CAPTURE(model.name);
    auto const weights = random_weights(model.config);
    auto const run = [&](auto x, std::vector<index_t> const& chunks, Keep keep = Keep::results) {
      Decoder<decltype(x), bf16> decoder(x, recipe(model), weights.view(), 16);
      for (index_t const count : chunks) decoder.run(count, keep);
      REQUIRE(decoder.rows.size() == 12);
      return decoder.rows;
    };
    auto const whole = run(test::Serial{}, {12});
    CHECK(same_bits(run(test::Serial{}, {5, 4, 3}), whole));
    CHECK(same_bits(run(test::Serial{}, std::vector<index_t>(12, 1)), whole));
    CHECK(same_bits(run(test::Threads{}, {7, 5}), whole));
    CHECK(same_bits(run(test::Backward{}, {1, 11}, Keep::intermediates), whole));
    CHECK(whole.back().selected.size() == 4);  // k < len
  }
}

TEMPLATE_LIST_TEST_CASE("front end: the expanded form gives the attention of the absorbed one",
                        "[frontend]", test::Executors) {
  for (Model const& model : models()) {
    CAPTURE(model.name);
    ModelConfig config = model.config;
    config.gated_output = config.learnable_sink = false;  // not between the two forms
    auto const weights = random_weights(config);
    auto const front_end = make_front_end(config, model.basis).value();
    Decoder decoder(TestType{}, front_end, weights.view(), 16);
    decoder.run(12);
    index_t const heads = config.num_attention_heads, dim = qk_head_dim(config);
    index_t const v = config.v_head_dim;
    auto const kv = decoder.stored_kv();
    test::Guarded<float> keys(to_size(12 * heads * dim)), expanded(to_size(12 * heads * v));
    require_ok(expand_keys(TestType{}, front_end, weights.view(),
                           make_dense<host, float const, 2>(kv.data(), {12, decoder.shape.key_dim}),
                           make_dense<host, float, 3>(keys.data(), {12, heads, dim}),
                           make_dense<host, float, 3>(expanded.data(), {12, heads, v})));
    CHECK((keys.intact() && expanded.intact()));
    for (std::size_t t = 0; t < 12; ++t) {
      Doubles want;
      for (index_t h = 0; h < heads; ++h) {
        auto const query = std::span(decoder.queries[t]).subspan(to_size(h * dim), to_size(dim));
        double total = 0;
        Doubles sums(to_size(v));
        for (position_t const s : decoder.rows[t].selected) {
          auto const key = keys.span().subspan(to_size((s * heads + h) * dim), to_size(dim));
          double const weight =
              std::exp(test::dot(query, key).value / std::sqrt(static_cast<double>(dim)));
          total += weight;
          for (index_t i = 0; i < v; ++i) {
            sums[to_size(i)] +=
                weight * static_cast<double>(expanded[to_size((s * heads + h) * v + i)]);
          }
        }
        for (double const sum : sums) want.push_back(sum / total);
      }
      check_close(decoder.rows[t].attention, want, close_enough);
    }
  }
}

TEST_CASE("front end: HostExec and ReferenceExec agree end to end", "[frontend]") {
  for (Model const& model : models()) {
    CAPTURE(model.name);
    auto const weights = random_weights(model.config);
    Decoder host_run(test::Threads{}, recipe(model), weights.view(), 40);
    Decoder reference(ReferenceExec{}, recipe(model), weights.view(), 40);
    host_run.run(33);
    reference.run(33);
    for (std::size_t t = 0; t < 33; ++t) {
      CHECK(host_run.rows[t].selected == reference.rows[t].selected);
      auto const& want = reference.rows[t].output;
      check_close(host_run.rows[t].output, Doubles(want.begin(), want.end()), close_enough);
    }
  }
}

TEST_CASE("front end: a shared layer's queries and KV rows are those of a full one", "[frontend]") {
  Model const model = models()[0];
  auto const full = random_weights(model.config);
  auto shared = full.view();
  shared.indexer.reset();
  Tokens const tokens(model.config, 0, 4);
  auto const a = project(test::Serial{}, model, full.view(), tokens);
  auto const b = project(test::Serial{}, model, shared, tokens);
  CHECK(bits(a.queries.side.q_absorbed) == bits(b.queries.side.q_absorbed));
  CHECK(bits(a.keys.side.kv_row) == bits(b.keys.side.kv_row));
  CHECK(b.queries.side.index_q.data_handle() == nullptr);
  CHECK(b.keys.side.index_k.data_handle() == nullptr);
}

TEST_CASE("front end: index queries alone are those of the whole query side", "[frontend]") {
  for (Model const& model : models()) {
    auto const weights = random_weights(model.config);
    Tokens const tokens(model.config, 0, 4);
    auto const want = project(test::Serial{}, model, weights.view(), tokens, Keep::intermediates);
    Activations alone(model.config, 4);
    require_ok(project_index_queries(test::Serial{}, recipe(model), *weights.view().indexer,
                                     detail::read_only(want.queries.side.q_resid), tokens.hidden(),
                                     tokens.positions(), alone.queries.side));
    CHECK(bits(alone.queries.side.index_q) == bits(want.queries.side.index_q));
    CHECK(bits(alone.queries.side.head_weights) == bits(want.queries.side.head_weights));
  }
}

TEST_CASE("front end: weights in bf16 and fp16, weights_proj in fp32", "[frontend]") {
  auto const run = [](auto element) {
    using T = decltype(element);
    ModelConfig const config = tiny_hy_v4();
    auto weights = random_weights<T>(config);
    // the same numbers in fp32
    OwnedWeights<float> widened(config);
    auto const widen = [](auto& to, auto const& from) {
      to.fill([&](index_t o, index_t i) { return from.at(o, i); });
    };
    widened.random(7);
    widen(widened.q_a_proj, weights.q_a_proj);
    widen(widened.q_b_proj, weights.q_b_proj);
    widen(widened.kv_a_proj, weights.kv_a_proj);
    widen(widened.kv_b_proj, weights.kv_b_proj);
    widen(widened.o_proj, weights.o_proj);
    widen(widened.gate_proj, weights.gate_proj);
    widen(widened.indexer->wq_b, weights.indexer->wq_b);
    widen(widened.indexer->wk, weights.indexer->wk);
    auto const front_end = make_front_end(config).value();
    Decoder decoder(test::Serial{}, front_end, weights.view(), 16);
    Decoder same(test::Serial{}, front_end, widened.view(), 16);
    decoder.run(12);
    same.run(12);
    CHECK(same_bits(decoder.rows, same.rows));
  };
  run(bf16{});
  run(fp16{});
}

// ---- A product of the caller's own

namespace {

/// What a product was called with.
struct Call {
  void const* w;  ///< address of its first element
  index_t rows, ins, outs;
  bool transposed;
};

/// Records its calls, checks what the documentation promises, and fails at one of them.
struct OwnProduct {
  std::vector<Call>* calls = nullptr;
  std::size_t fails_at = std::size_t(-1);

  static constexpr Status failed = failure(Errc::backend_error, "the engine's product", 5, 6);

  template <class X, class T>
  Status operator()(X const& x, Tensor<host, float const, 2> const& in,
                    MatrixView<host, T> const& w, Tensor<host, float, 2> const& out) const {
    calls->push_back(
        {w.data_handle(), in.extent(0), in.extent(1), out.extent(1), w.stride(1) != 1});
    check(in, w, out);
    return calls->size() - 1 == fails_at ? failed : PlainProduct{}(x, in, w, out);
  }

  template <class T>
  static void check(Tensor<host, float const, 2> const& in, MatrixView<host, T> const& w,
                    Tensor<host, float, 2> const& out) {
    CHECK(in.extent(0) == out.extent(0));
    CHECK(in.extent(1) == w.extent(1));
    CHECK(out.extent(1) == w.extent(0));
    CHECK(in.stride(1) == 1);
    CHECK(in.stride(0) >= in.extent(1));
    CHECK(out.stride(1) == 1);
    CHECK(out.stride(0) >= out.extent(1));
    bool const row_major = w.stride(1) == 1 && w.stride(0) >= w.extent(1);
    bool const column_major = w.stride(0) == 1 && w.stride(1) >= w.extent(0);
    CHECK((row_major || column_major));
    auto const begin = [](auto const& view) {
      return reinterpret_cast<std::uintptr_t>(view.data_handle());
    };
    auto const end = [&](auto const& view) {
      return begin(view) + to_size(view.mapping().required_span_size()) * sizeof(float);
    };
    CHECK((end(in) <= begin(out) || end(out) <= begin(in)));
  }
};

}  // namespace

TEST_CASE("front end: an own product is called once per matrix, heads apart", "[frontend]") {
  for (Model const& model : models()) {
    CAPTURE(model.name);
    ModelConfig const& c = model.config;
    auto const weights = random_weights(c, true, 5);
    auto const w = weights.view();
    Tokens const tokens(c, 0, 6, 1);
    std::vector<Call> calls;
    auto const front_end = make_front_end(c, model.basis, OwnProduct{.calls = &calls}).value();
    auto const check = [&](std::vector<Call> const& want) {
      REQUIRE(calls.size() == want.size());
      for (std::size_t i = 0; i < want.size(); ++i) {
        CAPTURE(i);
        CHECK(calls[i].w == want[i].w);
        CHECK(calls[i].rows == 6);
        CHECK(calls[i].ins == want[i].ins);
        CHECK(calls[i].outs == want[i].outs);
        CHECK((calls[i].transposed || want[i].outs * want[i].ins == 0) ==
              (want[i].transposed || want[i].outs * want[i].ins == 0));
      }
      calls.clear();
    };
    auto const whole = [](auto const& matrix) {
      return Call{matrix.data_handle(), 6, matrix.extent(1), matrix.extent(0), false};
    };
    index_t const per_head = c.qk_nope_head_dim + c.v_head_dim;
    auto const head = [&](index_t h, index_t skip) {
      return w.kv_b_proj.data_handle() + (h * per_head + skip) * w.kv_b_proj.stride(0);
    };
    Activations sides(c, 6);
    require_ok(project_queries(test::Serial{}, front_end, w, tokens.hidden(), tokens.positions(),
                               sides.queries.side));
    std::vector<Call> want{whole(w.q_a_proj), whole(w.q_b_proj)};
    for (index_t h = 0; h < c.num_attention_heads; ++h) {
      want.push_back({head(h, 0), 6, c.qk_nope_head_dim, c.kv_lora_rank, true});
    }
    want.push_back(whole(w.indexer->wq_b));
    want.push_back(whole(w.indexer->weights_proj));
    check(want);

    require_ok(project_keys(test::Serial{}, front_end, w, tokens.hidden(), tokens.positions(),
                            sides.keys.side));
    check({whole(w.kv_a_proj), whole(w.indexer->wk)});

    auto const latent =
        test::Random(1).normals(to_size(6 * c.num_attention_heads * c.kv_lora_rank));
    require_ok(project_output(
        test::Serial{}, front_end, w, tokens.hidden(),
        make_dense<host, float const, 3>(latent.data(), {6, c.num_attention_heads, c.kv_lora_rank}),
        sides.outputs.side));
    want.clear();
    for (index_t h = 0; h < c.num_attention_heads; ++h) {
      want.push_back({head(h, c.qk_nope_head_dim), 6, c.kv_lora_rank, c.v_head_dim, false});
    }
    if (c.gated_output) want.push_back(whole(w.gate_proj));
    want.push_back(whole(w.o_proj));
    check(want);

    std::vector<float> keys(to_size(6 * c.num_attention_heads * qk_head_dim(c)));
    std::vector<float> expanded(to_size(6 * c.num_attention_heads * c.v_head_dim));
    require_ok(expand_keys(
        test::Serial{}, front_end, w, detail::read_only(sides.keys.side.kv_row),
        make_dense<host, float, 3>(keys.data(), {6, c.num_attention_heads, qk_head_dim(c)}),
        make_dense<host, float, 3>(expanded.data(), {6, c.num_attention_heads, c.v_head_dim})));
    want.clear();
    for (index_t h = 0; h < c.num_attention_heads; ++h) {
      want.push_back({head(h, 0), 6, c.kv_lora_rank, c.qk_nope_head_dim, false});
      want.push_back({head(h, c.qk_nope_head_dim), 6, c.kv_lora_rank, c.v_head_dim, false});
    }
    check(want);

    auto const plain = quantities(project(test::Serial{}, model, w, tokens));
    auto const own = quantities(sides);
    for (std::size_t i = 0; i < plain.size(); ++i) {
      CHECK(bits_of(own[i].second) == bits_of(plain[i].second));
    }
  }
}

TEST_CASE("front end: a product that fails ends the call with its status", "[frontend]") {
  ModelConfig const c = tiny_hy_v4();
  auto const weights = random_weights(c);
  auto const w = weights.view();
  Tokens const tokens(c, 0, 3);
  auto const latent = test::Random(1).normals(3 * 3 * 32);
  auto const kv_rows = test::Random(2).normals(3 * 40);
  std::vector<float> keys(3 * 3 * 20), expanded(3 * 3 * 16);
  using Function = std::function<Status(FrontEnd<OwnProduct> const&, Activations&)>;
  test::Serial const x{};
  std::vector<std::pair<std::size_t, Function>> const functions{
      {7,
       [&](auto const& f, Activations& a) {
         return project_queries(x, f, w, tokens.hidden(), tokens.positions(), a.queries.side);
       }},
      {2,
       [&](auto const& f, Activations& a) {
         return project_index_queries(x, f, *w.indexer,
                                      make_dense<host, float const, 2>(latent.data(), {3, 20}),
                                      tokens.hidden(), tokens.positions(), a.queries.side);
       }},
      {2,
       [&](auto const& f, Activations& a) {
         return project_keys(x, f, w, tokens.hidden(), tokens.positions(), a.keys.side);
       }},
      {5,
       [&](auto const& f, Activations& a) {
         return project_output(x, f, w, tokens.hidden(),
                               make_dense<host, float const, 3>(latent.data(), {3, 3, 32}),
                               a.outputs.side);
       }},
      {6, [&](auto const& f, Activations&) {
         return expand_keys(x, f, w, make_dense<host, float const, 2>(kv_rows.data(), {3, 40}),
                            make_dense<host, float, 3>(keys.data(), {3, 3, 20}),
                            make_dense<host, float, 3>(expanded.data(), {3, 3, 16}));
       }}};
  for (auto const& [calls_in_all, function] : functions) {
    for (std::size_t fails_at = 0; fails_at <= calls_in_all; ++fails_at) {
      CAPTURE(calls_in_all, fails_at);
      std::vector<Call> calls;
      Activations sides(c, 3);
      Status const status = function(
          make_front_end(c, LaneBasis::natural, OwnProduct{&calls, fails_at}).value(), sides);
      if (fails_at == calls_in_all) {
        CHECK(status.ok());
        CHECK(calls.size() == calls_in_all);
      } else {
        CHECK(status.code == OwnProduct::failed.code);
        CHECK(std::string(status.what) == OwnProduct::failed.what);
        CHECK((status.expected == 5 && status.got == 6));
        CHECK(calls.size() == fails_at + 1);
      }
    }
  }
}
