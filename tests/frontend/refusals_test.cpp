// SPDX-License-Identifier: Apache-2.0
//
// Each part of each call, spoilt one at a time: the message names it with both numbers, no product
// is called and nothing is written.
#include <catch2/catch_test_macros.hpp>

#include "executors.hpp"
#include "frontend_model.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

using namespace frontend_test;

namespace {

/// Counts its calls.
struct CountingProduct {
  int* calls = nullptr;

  template <class X, class T>
  Status operator()(X const& x, Tensor<host, float const, 2> const& in,
                    MatrixView<host, T> const& w,
                    Tensor<host, float, 2> const& out) const noexcept {
    ++*calls;
    return PlainProduct{}(x, in, w, out);
  }
};

/// A view with one extent changed, over the same memory. Strides stay; extents only shrink or grow
/// by one lane of memory that is never touched.
template <class View>
View resized(View const& view, std::size_t dimension, index_t by) {
  constexpr std::size_t rank = View::rank();
  cuda::std::array<index_t, rank> extents{};
  for (std::size_t i = 0; i < rank; ++i) extents[i] = view.extent(i);
  extents[dimension] += by;
  return make_dense<host, typename View::element_type, rank>(view.data_handle(), extents);
}
/// The view with its lanes two apart.
template <class View>
View spread(View const& view) {
  constexpr std::size_t rank = View::rank();
  cuda::std::array<index_t, rank> extents{}, strides{};
  for (std::size_t i = 0; i < rank; ++i) {
    extents[i] = view.extent(i);
    strides[i] = 2 * view.stride(i);
  }
  return make_strided<host, typename View::element_type, rank>(view.data_handle(), extents,
                                                               strides);
}
/// [rows, heads, lanes] with a lane of room between its heads.
template <class View>
View heads_apart(View const& view) {
  index_t const step = view.extent(2) + 1;
  return make_strided<host, typename View::element_type, 3>(
      view.data_handle(), {view.extent(0), view.extent(1), view.extent(2)},
      {view.extent(1) * step, step, 1});
}
template <class View>
View without_memory(View const& view) {
  return View(nullptr, view.mapping());
}

/// Correct arguments of every function of the front end, for a model that uses all of them.
struct Arguments {
  int calls = 0;
  ModelConfig config = tiny_hy_v4();
  OwnedWeights<float> owned = random_weights(config);
  Tokens tokens{config, 0, 5};
  Activations sides{config, 5, true, Keep::intermediates};
  Activations other{config, 5, true, Keep::intermediates};
  std::vector<float> latent_memory = test::Random(1).normals(5 * 3 * 32);
  std::vector<float> kv_memory = test::Random(2).normals(5 * 40);
  std::vector<float> key_memory = std::vector<float>(5 * 3 * 20);
  std::vector<float> value_memory = std::vector<float>(5 * 3 * 16);

  FrontEnd<CountingProduct> front_end =
      make_front_end(config, LaneBasis::natural, CountingProduct{&calls}).value();
  AttentionWeights<host, float> weights = owned.view();
  IndexerWeights<host, float>& indexer = *weights.indexer;
  Tensor<host, float const, 2> hidden = tokens.hidden();
  PositionView<host> positions = tokens.positions();
  Tensor<host, float const, 2> q_resid = detail::read_only(other.queries.side.q_resid);
  QuerySide<host>& q = sides.queries.side;
  KeySide<host>& k = sides.keys.side;
  OutputSide<host>& out = sides.outputs.side;
  Tensor<host, float const, 3> latent =
      make_dense<host, float const, 3>(latent_memory.data(), {5, 3, 32});
  Tensor<host, float const, 2> kv_rows =
      make_dense<host, float const, 2>(kv_memory.data(), {5, 40});
  Tensor<host, float, 3> keys = make_dense<host, float, 3>(key_memory.data(), {5, 3, 20});
  Tensor<host, float, 3> expanded = make_dense<host, float, 3>(value_memory.data(), {5, 3, 16});

  Arguments() = default;
  Arguments(Arguments const&) = delete;

  bool untouched() {
    auto const zero = [](float value) { return value == 0; };
    return sides.untouched() && std::all_of(key_memory.begin(), key_memory.end(), zero) &&
           std::all_of(value_memory.begin(), value_memory.end(), zero);
  }
};

using Function = Status (*)(Arguments&);
constexpr test::Serial x{};

Status queries(Arguments& a) {
  return project_queries(x, a.front_end, a.weights, a.hidden, a.positions, a.q);
}
Status index_queries(Arguments& a) {
  return project_index_queries(x, a.front_end, a.indexer, a.q_resid, a.hidden, a.positions, a.q);
}
Status keys(Arguments& a) {
  return project_keys(x, a.front_end, a.weights, a.hidden, a.positions, a.k);
}
Status output(Arguments& a) {
  return project_output(x, a.front_end, a.weights, a.hidden, a.latent, a.out);
}
Status expand(Arguments& a) {
  return expand_keys(x, a.front_end, a.weights, a.kv_rows, a.keys, a.expanded);
}

struct Refusal {
  Errc code;
  std::string part;
  std::int64_t expected = 0;
  std::int64_t got = 0;
};

/// What one of `functions` says to spoilt arguments.
void refuses(std::vector<Function> const& functions, std::function<void(Arguments&)> const& spoil,
             Refusal const& want) {
  for (std::size_t i = 0; i < functions.size(); ++i) {
    Arguments arguments;
    spoil(arguments);
    Status const status = functions[i](arguments);
    CAPTURE(i, status, want.part, want.expected, want.got);
    CHECK(status.code == want.code);
    CHECK(std::string(status.what).find(want.part) != std::string::npos);
    CHECK((status.expected == want.expected && status.got == want.got));
    CHECK(arguments.calls == 0);
    CHECK(arguments.untouched());
  }
}

/// Spoils every extent, the memory and the stride of one view. `which` finds it in arguments.
template <class Which>
void refuses_views(std::vector<Function> const& functions, std::string const& name,
                   Which const& which) {
  Arguments sound;
  using View = std::remove_cvref_t<decltype(which(sound))>;
  for (std::size_t dimension = 0; dimension < View::rank(); ++dimension) {
    for (index_t const by : {-1, 1}) {
      index_t const extent = which(sound).extent(dimension);
      refuses(functions, [&](Arguments& a) { which(a) = resized(which(a), dimension, by); },
              {Errc::bad_shape, name, extent, extent + by});
    }
  }
  refuses(functions, [&](Arguments& a) { which(a) = without_memory(which(a)); },
          {Errc::missing_input, name});
  if constexpr (View::rank() > 1) {
    refuses(functions, [&](Arguments& a) { which(a) = spread(which(a)); },
            {Errc::bad_stride, name, 1, 2});
  }
  if constexpr (View::rank() == 3 && !std::is_const_v<typename View::element_type>) {
    index_t const lanes = which(sound).extent(2);
    refuses(functions, [&](Arguments& a) { which(a) = heads_apart(which(a)); },
            {Errc::bad_stride, name, lanes, lanes + 1});
  }
}

std::vector<Function> const readers_of_weights{queries, keys, output, expand};
std::vector<Function> const readers_of_indexer{queries, index_queries, keys, output, expand};
std::vector<Function> const readers_of_tokens{queries, index_queries, keys};

}  // namespace

TEST_CASE("front end refusals: sound arguments are taken", "[frontend]") {
  for (Function const function : {queries, index_queries, keys, output, expand}) {
    Arguments arguments;
    require_ok(function(arguments));
    CHECK(arguments.calls > 0);
    CHECK_FALSE(arguments.untouched());
  }
}

TEST_CASE("front end refusals: weights", "[frontend]") {
  using Weights = AttentionWeights<host, float>;
  using Indexer = IndexerWeights<host, float>;
  auto const layer = [](std::string const& name, auto Weights::*view) {
    refuses_views(
        readers_of_weights, name, [=](Arguments & a) -> auto& { return a.weights.*view; });
  };
  auto const indexer = [](std::string const& name, auto Indexer::*view) {
    refuses_views(
        readers_of_indexer, name, [=](Arguments & a) -> auto& { return a.indexer.*view; });
  };
  layer("q_a_proj", &Weights::q_a_proj);
  layer("q_a_layernorm", &Weights::q_a_layernorm);
  layer("q_b_proj", &Weights::q_b_proj);
  layer("kv_a_proj_with_mqa", &Weights::kv_a_proj);
  layer("kv_a_layernorm", &Weights::kv_a_layernorm);
  layer("kv_b_proj", &Weights::kv_b_proj);
  layer("o_proj", &Weights::o_proj);
  layer("gate_proj", &Weights::gate_proj);
  layer("sinks", &Weights::sinks);
  indexer("indexer.wq_b", &Indexer::wq_b);
  indexer("indexer.wk", &Indexer::wk);
  indexer("indexer.k_norm.weight", &Indexer::k_norm_weight);
  indexer("indexer.k_norm.bias", &Indexer::k_norm_bias);
  indexer("indexer.weights_proj", &Indexer::weights_proj);
}

TEST_CASE("front end refusals: a gate or sinks that the model has not", "[frontend]") {
  refuses(readers_of_weights, [](Arguments& a) { a.front_end.config.gated_output = false; },
          {Errc::bad_shape, "gate_proj of a model without a gate", 0, 48});
  refuses(readers_of_weights, [](Arguments& a) { a.front_end.config.learnable_sink = false; },
          {Errc::bad_shape, "sinks of a model without sinks", 0, 3});
}

TEST_CASE("front end refusals: hidden states and positions", "[frontend]") {
  auto const& functions = readers_of_tokens;
  auto const hidden = [](Arguments & a) -> auto& { return a.hidden; };
  for (index_t const by : {-1, 1}) {
    refuses(functions, [&](Arguments& a) { a.hidden = resized(a.hidden, 1, by); },
            {Errc::bad_shape, "lanes of the hidden states", 24, 24 + by});
    refuses(functions, [&](Arguments& a) { a.hidden = resized(a.hidden, 0, by); },
            {Errc::bad_shape, "rotary positions of the hidden states", 5 + by, 5});
    refuses(functions, [&](Arguments& a) { a.positions = resized(a.positions, 0, by); },
            {Errc::bad_shape, "rotary positions of the hidden states", 5, 5 + by});
    refuses({output}, [&](Arguments& a) { a.hidden = resized(a.hidden, 0, by); },
            {Errc::bad_shape, "rows of the hidden states against the attention output", 5, 5 + by});
    refuses({output}, [&](Arguments& a) { a.hidden = resized(a.hidden, 1, by); },
            {Errc::bad_shape, "lanes of the hidden states", 24, 24 + by});
  }
  for (auto const& which : {functions, {output}}) {
    refuses(which, [&](Arguments& a) { hidden(a) = without_memory(a.hidden); },
            {Errc::missing_input, "hidden states"});
    refuses(which, [&](Arguments& a) { hidden(a) = spread(a.hidden); },
            {Errc::bad_stride, "hidden states", 1, 2});
  }
  refuses(functions, [](Arguments& a) { a.positions = without_memory(a.positions); },
          {Errc::missing_input, "rotary positions"});
}

TEST_CASE("front end refusals: activations", "[frontend]") {
  auto const view = [](std::vector<Function> const& functions, std::string const& name,
                       auto which) { refuses_views(functions, name, which); };
  view(
      {queries}, "q_a", [](Arguments & a) -> auto& { return a.q.q_a; });
  view(
      {queries}, "q_resid", [](Arguments & a) -> auto& { return a.q.q_resid; });
  view(
      {queries}, "q", [](Arguments & a) -> auto& { return a.q.q; });
  view(
      {queries}, "q_absorbed", [](Arguments & a) -> auto& { return a.q.q_absorbed; });
  for (Function const function : {queries, index_queries}) {
    view(
        {function}, "index_q_raw", [](Arguments & a) -> auto& { return a.q.index_q_raw; });
    view(
        {function}, "index_q", [](Arguments & a) -> auto& { return a.q.index_q; });
    view(
        {function}, "head_weights_raw",
        [](Arguments & a) -> auto& { return a.q.head_weights_raw; });
    view(
        {function}, "head_weights", [](Arguments & a) -> auto& { return a.q.head_weights; });
  }
  view(
      {index_queries}, "q_resid", [](Arguments & a) -> auto& { return a.q_resid; });
  view(
      {keys}, "kv_a", [](Arguments & a) -> auto& { return a.k.kv_a; });
  view(
      {keys}, "kv_row", [](Arguments & a) -> auto& { return a.k.kv_row; });
  view(
      {keys}, "index_k_raw", [](Arguments & a) -> auto& { return a.k.index_k_raw; });
  view(
      {keys}, "index_k_norm", [](Arguments & a) -> auto& { return a.k.index_k_norm; });
  view(
      {keys}, "index_k", [](Arguments & a) -> auto& { return a.k.index_k; });
  view(
      {output}, "attention", [](Arguments & a) -> auto& { return a.out.attention; });
  view(
      {output}, "gate", [](Arguments & a) -> auto& { return a.out.gate; });
  view(
      {output}, "gated", [](Arguments & a) -> auto& { return a.out.gated; });
  view(
      {output}, "output", [](Arguments & a) -> auto& { return a.out.output; });
  view(
      {expand}, "expanded keys", [](Arguments & a) -> auto& { return a.keys; });
  view(
      {expand}, "expanded values", [](Arguments & a) -> auto& { return a.expanded; });
}

TEST_CASE("front end refusals: what the output and the expanded form read", "[frontend]") {
  for (index_t const by : {-1, 1}) {
    refuses({output}, [&](Arguments& a) { a.latent = resized(a.latent, 1, by); },
            {Errc::bad_shape, "heads of the attention output", 3, 3 + by});
    refuses({output}, [&](Arguments& a) { a.latent = resized(a.latent, 2, by); },
            {Errc::bad_shape, "lanes of the attention output", 32, 32 + by});
    refuses({expand}, [&](Arguments& a) { a.kv_rows = resized(a.kv_rows, 1, by); },
            {Errc::bad_shape, "lanes of the KV rows", 40, 40 + by});
    refuses({expand}, [&](Arguments& a) { a.kv_rows = resized(a.kv_rows, 0, by); },
            {Errc::bad_shape, "expanded keys", 5 + by, 5});
  }
  refuses({output}, [](Arguments& a) { a.latent = without_memory(a.latent); },
          {Errc::missing_input, "attention output"});
  refuses({output}, [](Arguments& a) { a.latent = spread(a.latent); },
          {Errc::bad_stride, "attention output", 1, 2});
  refuses({expand}, [](Arguments& a) { a.kv_rows = without_memory(a.kv_rows); },
          {Errc::missing_input, "KV rows"});
  refuses({expand}, [](Arguments& a) { a.kv_rows = spread(a.kv_rows); },
          {Errc::bad_stride, "KV rows", 1, 2});
}

TEST_CASE("front end refusals: a recipe that was changed after it was made", "[frontend]") {
  auto const& functions = readers_of_tokens;
  refuses(functions, [](Arguments& a) { a.front_end.frequencies.pairs = 3; },
          {Errc::bad_shape, "lanes that the rotary frequencies rotate", 8, 6});
  refuses(functions, [](Arguments& a) { a.front_end.config.indexer_rope.dims = 6; },
          {Errc::bad_shape, "indexer_rope.dims against qk_rope_head_dim", 8, 6});
  auto const hadamard_of_12 = [](Arguments& a) {
    a.front_end.index_basis = LaneBasis::hadamard;
    a.front_end.config.index_head_dim = 12;
    auto const narrow = [](auto& view, std::size_t dimension, index_t by) {
      view = resized(view, dimension, by);
    };
    narrow(a.indexer.wq_b, 0, -8);
    narrow(a.indexer.wk, 0, -4);
    narrow(a.indexer.k_norm_weight, 0, -4);
    narrow(a.indexer.k_norm_bias, 0, -4);
  };
  refuses(functions, hadamard_of_12,
          {Errc::unsupported, "index_head_dim of a Hadamard basis", 16, 12});
}

TEST_CASE("front end refusals: rotated lanes must fit an index head", "[frontend]") {
  ModelConfig config = tiny_model();
  config.index_head_dim = 6;  // io::parse_config refuses it, a config by hand may have it
  auto const weights = random_weights(config);
  Tokens const tokens(config, 0, 2);
  Activations sides(config, 2);
  auto const front_end = make_front_end(config).value();
  for (Status const& status : {project_queries(x, front_end, weights.view(), tokens.hidden(),
                                               tokens.positions(), sides.queries.side),
                               project_keys(x, front_end, weights.view(), tokens.hidden(),
                                            tokens.positions(), sides.keys.side)}) {
    CAPTURE(status);
    CHECK(status.code == Errc::bad_shape);
    CHECK(std::string(status.what) == "indexer_rope.dims against index_head_dim");
    CHECK((status.expected == 6 && status.got == 8));
  }
  CHECK(sides.untouched());
}

TEST_CASE("front end refusals: models that have no recipe", "[frontend]") {
  auto const refused = [](ModelConfig const& config, LaneBasis basis, Refusal const& want) {
    auto const front_end = make_front_end(config, basis);
    REQUIRE_FALSE(front_end.has_value());
    CAPTURE(front_end.error());
    CHECK(front_end.error().code == want.code);
    CHECK(std::string(front_end.error().what).find(want.part) != std::string::npos);
    CHECK((front_end.error().expected == want.expected && front_end.error().got == want.got));
  };
  ModelConfig pooled = tiny_model();
  pooled.key_pooling.tokens_per_key = 4;
  refused(pooled, LaneBasis::natural, {Errc::unsupported, "index_kpool", 1, 4});
  for (double const eps : {0.0, -1e-6, 1.0, std::nan(""), HUGE_VAL}) {
    ModelConfig latent = tiny_model();
    latent.norm_eps.latent = eps;
    refused(latent, LaneBasis::natural, {Errc::bad_value, "norm_eps.latent", 0, 0});
    ModelConfig key = tiny_model();
    key.norm_eps.index_key = eps;
    refused(key, LaneBasis::natural, {Errc::bad_value, "norm_eps.index_key", 0, 0});
  }
  ModelConfig forgotten = tiny_model();
  forgotten.norm_eps = {};
  refused(forgotten, LaneBasis::natural, {Errc::bad_value, "norm_eps.latent", 0, 0});
  for (auto const& [lanes, next] : {std::pair<index_t, index_t>{12, 16}, {96, 128}, {129, 256}}) {
    ModelConfig config = tiny_model();
    config.index_head_dim = lanes;
    refused(config, LaneBasis::hadamard,
            {Errc::unsupported, "index_head_dim of a Hadamard basis", next, lanes});
    CHECK(make_front_end(config).has_value());
  }
}
