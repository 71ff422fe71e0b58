// SPDX-License-Identifier: Apache-2.0
//
// Raw projections written into caches in one step: the bytes of project_keys followed by the append
// calls, in every format, on each back end.
#if defined(INDEXSHARE_TEST_CUDA)
#include <indexshare/cuda/cache_writes.cuh>

#include "../cuda/graph.hpp"
#endif

#include <catch2/catch_template_test_macros.hpp>
#include <catch2/catch_test_macros.hpp>

#include "cache_pool.hpp"
#include "executors.hpp"
#include "frontend_model.hpp"
#include "memory.hpp"
#include "random.hpp"
#include "refusal.hpp"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

// Not an unnamed namespace: after frontend_model.hpp, cudafe++ of CUDA 13.0 does not come back from
// one.
namespace cache_writes_test {

using namespace frontend_test;
using test::Bytes;
using test::Place;
using test::Pool;
using test::refused;
using test::space;
using test::succeeded;

constexpr bool on_device = space == Space::device;

/// The same memory as the executors see it.
template <class T, class Extents>
auto here(
    cuda::std::mdspan<T, Extents, cuda::std::layout_stride, space_accessor<T, host>> const& view) {
  return Tensor<space, T, Extents::rank()>(view.data_handle(), view.mapping());
}
AttentionWeights<space, float> here(AttentionWeights<host, float> const& w) {
  AttentionWeights<space, float> weights{
      here(w.q_a_proj),  here(w.q_a_layernorm),  here(w.q_b_proj),
      here(w.kv_a_proj), here(w.kv_a_layernorm), here(w.kv_b_proj),
      here(w.o_proj),    here(w.gate_proj),      here(w.sinks)};
  if (w.indexer) {
    weights.indexer = IndexerWeights<space, float>{
        here(w.indexer->wq_b), here(w.indexer->wk), here(w.indexer->k_norm_weight),
        here(w.indexer->k_norm_bias), here(w.indexer->weights_proj)};
  }
  return weights;
}

/// Gives the raw rows that the test chose, whatever hidden states and weights say.
struct GivenRows {
  Tensor<space, float const, 2> kv_a{};
  Tensor<space, float const, 2> index_k{};

  template <Executor X, class T>
  Status operator()(X const& x, Tensor<space, float const, 2> const&, MatrixView<space, T> const&,
                    Tensor<space, float, 2> const& out) const noexcept {
    auto const& rows = out.extent(1) == kv_a.extent(1) ? kv_a : index_k;
    return scale(x, detail::one_head(rows), 1.0f, detail::one_head(out));
  }
};

struct Family {
  char const* name;
  ModelConfig config;
};
ModelConfig real_widths(RopeLayout attention, IndexerRope indexer) {
  ModelConfig config = tiny_model();
  config.kv_lora_rank = 512;
  config.qk_rope_head_dim = 64;
  config.index_head_dim = 128;
  config.rope.theta = 8e6;
  config.rope.layout = attention;
  config.indexer_rope = indexer;
  return config;
}
std::vector<Family> families() {
  using enum RopeLayout;
  return {{"GLM", real_widths(interleaved, {interleaved, RopeLanes::first, 64})},
          {"DeepSeek", real_widths(interleaved, {half_split, RopeLanes::first, 64})},
          {"Hy4", real_widths(half_split, {half_split, RopeLanes::last, 64})},
          {"tiny", tiny_model()},
          {"no rotation", tiny_model(0, 3)}};
}

/// Raw rows of one kind, in the element type that an engine has them in and in fp32.
template <class Raw>
struct RawRows {
  static constexpr index_t pad = 3;
  index_t count, lanes;
  test::Guarded<Raw> rows;
  test::Guarded<float> floats;

  RawRows(index_t tokens, index_t width, std::uint64_t seed)
      : count(tokens),
        lanes(width),
        rows(to_size(tokens * (width + pad))),
        floats(to_size(tokens * width)) {
    fill(seed);
  }
  void fill(std::uint64_t seed) {
    test::Random random(seed);
    for (index_t i = 0; i < count; ++i) {
      float const size = i == 0 ? 1e-6f : random.uniform(0.1f, 30);
      for (index_t k = 0; k < lanes; ++k) {
        Raw const value = from_float<Raw>(random.normal() * size + 0.5f);
        rows[to_size(i * (lanes + pad) + k)] = value;
        floats[to_size(i * lanes + k)] = to_float(value);
      }
    }
  }
  auto view() const {
    return make_strided<space, Raw const, 2>(rows.data(), {count, lanes}, {lanes + pad, 1});
  }
  auto as_floats() const {
    return make_dense<space, float const, 2>(floats.data(), {count, lanes});
  }
};

/// New tokens of two requests, whose 8 pages lie in shuffled order.
struct Arrivals {
  index_t count;
  test::Guarded<position_t> rotary, positions, requests, table;

  explicit Arrivals(index_t n)
      : count(n),
        rotary(to_size(n)),
        positions(to_size(n)),
        requests(to_size(n)),
        table(test::guarded(test::Random(5).permutation<position_t>(8))) {
    for (index_t i = 0; i < n; ++i) {
      index_t const token = (i * 5 + 2) % n;
      requests[to_size(i)] = static_cast<position_t>(token % 2);
      positions[to_size(i)] = static_cast<position_t>(token / 2);
      rotary[to_size(i)] = static_cast<position_t>(37 + 100003 * token);
    }
  }
  auto numbers(test::Guarded<position_t> const& list) const {
    return make_lengths<space>(list.data(), Rows{count});
  }
  NewTokens<space> tokens() const {
    return {numbers(rotary), numbers(positions), numbers(requests)};
  }
  PageTable<space> pages(index_t page) const {
    return make_page_table<space>(table.data(), Requests{2}, Pages{4}, PageSize{page});
  }
};

/// One model with raw rows for its caches.
template <class Raw>
struct Setup {
  ModelConfig config;
  OwnedWeights<float> owned;
  RawRows<Raw> kv_a, index_k;
  Arrivals arrivals;
  FrontEnd<GivenRows> front_end;
  test::Guarded<float> hidden;
  test::Guarded<std::byte> activations;

  explicit Setup(ModelConfig const& c, LaneBasis basis = LaneBasis::natural, index_t tokens = 7)
      : config(c),
        owned(random_weights(c)),
        kv_a(tokens, c.kv_lora_rank + c.qk_rope_head_dim, 11),
        index_k(tokens, c.index_head_dim, 12),
        arrivals(tokens),
        front_end(
            make_front_end(c, basis, GivenRows{kv_a.as_floats(), index_k.as_floats()}).value()),
        hidden(to_size(tokens * c.hidden_size)),
        activations(side_bytes()) {}

  std::size_t side_bytes() const {
    WorkspaceCarver carver;
    carve_key_side<space>(carver, config, Rows{arrivals.count}, true, Keep::results);
    return carver.size().bytes;
  }
  /// The activations of the steps one by one.
  template <class X>
  KeySide<space> projected(X const& x) {
    WorkspaceCarver carver({activations.data(), activations.size()});
    auto const side =
        carve_key_side<space>(carver, config, Rows{arrivals.count}, true, Keep::results);
    auto const states =
        make_dense<space, float const, 2>(hidden.data(), {arrivals.count, config.hidden_size});
    REQUIRE_THAT(project_keys(x, front_end, here(owned.view()), states,
                              arrivals.numbers(arrivals.rotary), side),
                 succeeded());
    return side;
  }
  template <class Format>
  auto index_cache(Pool<Format>& pool) const {
    auto cache = pool.view();
    cache.basis = front_end.index_basis;
    return cache;
  }

  template <class X, class Format>
  Bytes keys_in_steps(X const& x, Pool<Format>& pool, ScaleRecipe const& recipe) {
    REQUIRE_THAT(append_index_keys(x, front_end, projected(x), arrivals.numbers(arrivals.positions),
                                   arrivals.numbers(arrivals.requests),
                                   arrivals.pages(pool.place.page), index_cache(pool), recipe),
                 succeeded());
    test::finish(x);
    return pool.all();
  }
  template <class X, class Format>
  Bytes kv_in_steps(X const& x, Pool<Format>& pool, ScaleRecipe const& recipe) {
    REQUIRE_THAT(append_kv(x, projected(x), arrivals.numbers(arrivals.positions),
                           arrivals.numbers(arrivals.requests), arrivals.pages(pool.place.page),
                           pool.view(), recipe),
                 succeeded());
    test::finish(x);
    return pool.all();
  }
  template <class X, class Format>
  Status write_keys(X const& x, Pool<Format>& pool, ScaleRecipe const& recipe) {
    Status const status = write_index_keys(
        x, front_end, *here(owned.view()).indexer, index_k.view(), arrivals.tokens(),
        arrivals.pages(pool.place.page), index_cache(pool), recipe);
    test::finish(x);
    return status;
  }
  template <class X, class Format>
  Status write_rows(X const& x, Pool<Format>& pool, ScaleRecipe const& recipe) {
    Status const status =
        write_kv(x, front_end, here(owned.view()).kv_a_layernorm, kv_a.view(), arrivals.tokens(),
                 arrivals.pages(pool.place.page), pool.view(), recipe);
    test::finish(x);
    return status;
  }

  template <class X, class Format>
  void check_keys(X const& x, ScaleRecipe const& recipe, Format format = {}, index_t page = 4) {
    Place const place{page, 8, config.index_head_dim, 2, 3};
    Pool<Format> got(place, 1, format), want(place, 1, format);
    Bytes const before = got.all();
    Bytes const steps = keys_in_steps(x, want, recipe);
    REQUIRE_THAT(write_keys(x, got, recipe), succeeded());
    CHECK((got.all() == steps));
    CHECK((got.all() != before));
    CHECK((got.memory.intact() && index_k.rows.intact()));
  }
  template <class X, class Format>
  void check_kv(X const& x, ScaleRecipe const& recipe, Format format = {}, index_t page = 4) {
    Place const place{page, 8, config.kv_lora_rank + config.qk_rope_head_dim, 2, 3};
    Pool<Format> got(place, 1, format), want(place, 1, format);
    Bytes const before = got.all();
    Bytes const steps = kv_in_steps(x, want, recipe);
    REQUIRE_THAT(write_rows(x, got, recipe), succeeded());
    CHECK((got.all() == steps));
    CHECK((got.all() != before));
    CHECK((got.memory.intact() && kv_a.rows.intact()));
  }
};

#if defined(INDEXSHARE_TEST_CUDA)
using Executors = test::Executors;
#else
using Executors = std::tuple<ReferenceExec, test::Serial, test::Threads, test::Backward>;
#endif

template <class X, class Raw>
void check_everything() {
  X const x{};
  for (Family const& family : families()) {
    format::LatentE4m3 const latents{family.config.kv_lora_rank,
                                     family.config.kv_lora_rank == 512 ? 128 : 12};
    for (LaneBasis const basis : {LaneBasis::natural, LaneBasis::hadamard}) {
      CAPTURE(family.name, static_cast<int>(basis));
      Setup<Raw> s(family.config, basis);
      s.check_keys(x, {}, format::Plain<float>{});
      s.check_keys(x, {}, format::Plain<bf16>{});
      s.check_keys(x, scale_recipes::vllm_index_key, format::IndexKeyE4m3{});
      s.check_keys(x, scale_recipes::act_quant, format::IndexKeyE4m3{});
      if constexpr (!on_device) s.check_keys(x, {}, format::IndexKeyInt8{});
      if (basis == LaneBasis::hadamard) continue;  // of index keys alone
      s.check_kv(x, {}, format::Plain<float>{});
      s.check_kv(x, {}, format::Plain<fp16>{});
      s.check_kv(x, scale_recipes::vllm_latent, latents);
      s.check_kv(x, scale_recipes::flashmla_latent, latents);
    }
  }
}

TEMPLATE_LIST_TEST_CASE("cache writes: raw rows of fp32 in one step give the bytes of the steps",
                        "[frontend][cache]", Executors) {
  check_everything<TestType, float>();
}

TEMPLATE_LIST_TEST_CASE("cache writes: raw rows of bf16 in one step give the bytes of the steps",
                        "[frontend][cache]", Executors) {
  check_everything<TestType, bf16>();
}

TEMPLATE_LIST_TEST_CASE("cache writes: one token, none, and as many as fill the pages",
                        "[frontend][cache]", Executors) {
  TestType const x{};
  for (index_t const tokens : {1, 32}) {
    CAPTURE(tokens);
    Setup<float> s(tiny_model(), LaneBasis::hadamard, tokens);
    s.check_keys(x, {}, format::IndexKeyE4m3{});
    s.check_kv(x, {}, format::LatentE4m3{32, 16});
  }
  Setup<float> nobody(tiny_model(), LaneBasis::natural, 0);
  Pool<format::Plain<float>> pool({4, 8, 16});
  Bytes const before = pool.all();
  CHECK_THAT(nobody.write_keys(x, pool, {}), succeeded());
  CHECK((pool.all() == before));
}

TEMPLATE_LIST_TEST_CASE(
    "cache writes: a token without a slot is refused by the host and skipped "
    "by a device",
    "[frontend][cache]", Executors) {
  TestType const x{};
  for (position_t const bad :
       {position_t{-1}, position_t{16}, std::numeric_limits<position_t>::max()}) {
    Setup<float> s(tiny_model());
    Pool<format::IndexKeyE4m3> keys({4, 8, 16}), others({4, 8, 16});
    Pool<format::LatentE4m3> kv({4, 8, 40}, 1, {32, 16});
    Bytes const no_keys = keys.all();
    Bytes const no_kv = kv.all();
    Bytes want = s.keys_in_steps(x, others, {});
    auto const p = s.arrivals.positions[2];
    auto const page = s.arrivals.table[to_size(s.arrivals.requests[2] * 4 + p / 4)];
    auto const parts = keys.parts(page * 4 + p % 4);
    Pool<format::IndexKeyE4m3>::write(want, parts,
                                      Pool<format::IndexKeyE4m3>::read(no_keys, parts));
    s.arrivals.positions[2] = bad;
    if constexpr (on_device) {
      CHECK_THAT(s.write_keys(x, keys, {}), succeeded());
      CHECK((keys.all() == want));
      CHECK_THAT(s.write_rows(x, kv, {}), succeeded());
      std::fill_n(s.arrivals.positions.data(), 7, bad);
      Bytes const some = kv.all();
      CHECK(some != no_kv);
      CHECK_THAT(s.write_rows(x, kv, {}), succeeded());
      CHECK((kv.all() == some));
    } else {
      CHECK_THAT(s.write_keys(x, keys, {}), refused(Errc::bad_value, "without a slot"));
      CHECK_THAT(s.write_rows(x, kv, {}), refused(Errc::bad_value, "without a slot"));
      CHECK((keys.all() == no_keys));
      CHECK((kv.all() == no_kv));
    }
  }
}

TEST_CASE("cache writes: what is wrong is refused by name, before any work", "[frontend][cache]") {
  using X = std::tuple_element_t<0, Executors>;
  X const x{};
  Setup<bf16> s(tiny_hy_v4());
  Pool<format::Plain<bf16>> keys({4, 8, 16}), kv({4, 8, 40});
  Bytes const before = keys.all();
  auto const weights = here(s.owned.view());
  auto const refuses_keys = [&](auto const& front_end, auto const& indexer, auto const& raw,
                                NewTokens<space> const& tokens, auto const& cache, Errc code,
                                char const* part) {
    CHECK_THAT(write_index_keys(x, front_end, indexer, raw, tokens, s.arrivals.pages(4), cache),
               refused(code, part));
  };
  auto const tokens = s.arrivals.tokens();
  auto const raw = s.index_k.view();
  auto const indexer = *weights.indexer;
  refuses_keys(s.front_end, indexer, s.kv_a.view(), tokens, keys.view(), Errc::bad_shape,
               "lanes of the raw index keys");
  auto wrong = indexer;
  wrong.k_norm_bias = {};
  refuses_keys(s.front_end, wrong, raw, tokens, keys.view(), Errc::bad_shape, "k_norm.bias");
  wrong = indexer;
  wrong.k_norm_weight = make_dense<space, float const, 1>(nullptr, {16});
  refuses_keys(s.front_end, wrong, raw, tokens, keys.view(), Errc::missing_input, "k_norm.weight");
  auto others = tokens;
  others.rotary = make_lengths<space>(s.arrivals.rotary.data(), Rows{6});
  refuses_keys(s.front_end, indexer, raw, others, keys.view(), Errc::bad_shape, "rotary positions");
  others = tokens;
  others.rotary = make_lengths<space>(nullptr, Rows{7});
  refuses_keys(s.front_end, indexer, raw, others, keys.view(), Errc::missing_input, "rotary");
  others = tokens;
  others.requests = make_lengths<space>(s.arrivals.requests.data(), Rows{6});
  refuses_keys(s.front_end, indexer, raw, others, keys.view(), Errc::bad_shape, "requests");
  auto marked = keys.view();
  marked.basis = LaneBasis::hadamard;
  refuses_keys(s.front_end, indexer, raw, tokens, marked, Errc::bad_value, "basis");
  auto transformed = s.front_end;
  transformed.index_basis = LaneBasis::hadamard;
  refuses_keys(transformed, indexer, raw, tokens, keys.view(), Errc::bad_value, "basis");
  auto turned = s.front_end;
  turned.frequencies.pairs = 3;
  refuses_keys(turned, indexer, raw, tokens, keys.view(), Errc::bad_shape, "rotary frequencies");

  CHECK_THAT(
      write_kv(x, s.front_end, weights.kv_a_layernorm, raw, tokens, s.arrivals.pages(4), kv.view()),
      refused(Errc::bad_shape, "raw KV projection").naming(40, 16));
  CHECK_THAT(write_kv(x, s.front_end, weights.q_a_layernorm, s.kv_a.view(), tokens,
                      s.arrivals.pages(4), kv.view()),
             refused(Errc::bad_shape, "kv_a_layernorm").naming(32, 20));
  auto natural_only = kv.view();
  natural_only.basis = LaneBasis::hadamard;
  CHECK_THAT(write_kv(x, s.front_end, weights.kv_a_layernorm, s.kv_a.view(), tokens,
                      s.arrivals.pages(4), natural_only),
             refused(Errc::bad_value, "basis"));
  Pool<format::IndexKeyE4m3> codes({4, 8, 16});
  CHECK_THAT(s.write_keys(x, codes, {.amax_floor = 0}), refused(Errc::bad_value, "amax_floor"));

  auto wide = s.front_end;
  wide.config.kv_lora_rank = 8192;
  Vector const gain(8192);
  test::Guarded<float> row(8200);
  test::Guarded<float> memory(8200);
  auto const number = test::guarded<position_t>({0});
  auto const at = make_lengths<space>(number.data(), Rows{1});
  CHECK_THAT(
      write_kv(x, wide, here(gain.view()), make_dense<space, float const, 2>(row.data(), {1, 8200}),
               {at, at, at}, make_contiguous_table<space>(Keys{1}),
               make_contiguous_cache<space>(memory.data(), Requests{1}, Keys{1}, HeadDim{8200})),
      refused(Errc::unsupported, "in one step").naming(8192, 8200));
  test::finish(x);
  CHECK((keys.all() == before));
}

TEST_CASE("cache writes: the widest row that is written in one step", "[frontend][cache]") {
  using X = std::tuple_element_t<0, Executors>;
  X const x{};
  ModelConfig config = tiny_model();
  config.index_head_dim = 8192;
  Setup<float>(config, LaneBasis::hadamard, 2).check_keys(x, {}, format::IndexKeyE4m3{});
  config = tiny_model();
  config.kv_lora_rank = 8192 - config.qk_rope_head_dim;
  Setup<float>(config, LaneBasis::natural, 2).check_kv(x, {}, format::LatentE4m3{8184, 128});
}

#if defined(INDEXSHARE_TEST_CUDA)

TEST_CASE("CUDA cache writes: more tokens than a grid has blocks", "[frontend][cache]") {
  test::Cuda const x;
  Setup<float> s(tiny_model(), LaneBasis::hadamard, detail::most_blocks + 77);
  s.check_keys(x, {}, format::IndexKeyE4m3{}, 600);
  s.check_kv(x, {}, format::LatentE4m3{32, 16}, 600);
}

TEST_CASE("CUDA cache writes: one kernel each, captured once, replayed with new rows and places",
          "[frontend][cache][graph]") {
  test::Cuda const x;
  Setup<bf16> s(families()[0].config, LaneBasis::hadamard);
  Pool<format::IndexKeyE4m3> keys({4, 8, 128}), want_keys({4, 8, 128});
  Pool<format::LatentE4m3> kv({4, 8, 576}), want_kv({4, 8, 576});
  auto const indexer = *here(s.owned.view()).indexer;
  auto const gain = here(s.owned.view()).kv_a_layernorm;
  cuda_test::Graph const graph(x, [&] {
    REQUIRE_THAT(write_index_keys(x, s.front_end, indexer, s.index_k.view(), s.arrivals.tokens(),
                                  s.arrivals.pages(4), s.index_cache(keys)),
                 succeeded());
    REQUIRE_THAT(write_kv(x, s.front_end, gain, s.kv_a.view(), s.arrivals.tokens(),
                          s.arrivals.pages(4), kv.view()),
                 succeeded());
  });
  CHECK(graph.only_device_work());
  CHECK(graph.nodes().size() == 2);
  for (std::uint64_t replay = 0; replay < 3; ++replay) {
    s.kv_a.fill(20 + replay);
    s.index_k.fill(30 + replay);
    std::rotate(s.arrivals.table.data(), s.arrivals.table.data() + 3, s.arrivals.table.data() + 8);
    for (index_t i = 0; i < 7; ++i) s.arrivals.rotary[to_size(i)] += 1000;
    graph.replay();
    CHECK((keys.all() == s.keys_in_steps(x, want_keys, {})));
    CHECK((kv.all() == s.kv_in_steps(x, want_kv, {})));
  }
}

#endif

}  // namespace cache_writes_test
