// SPDX-License-Identifier: Apache-2.0
//
// The front end on a device: its steps against the host's, whose formulas tests/frontend checks,
// and whole projections with a caller's matrix product on the device.
#include <indexshare/cuda/append.cuh>
#include <indexshare/cuda/frontend.cuh>

#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <catch2/generators/catch_generators_range.hpp>

#include "executors.hpp"
#include "frontend_lanes.hpp"
#include "frontend_model.hpp"
#include "graph.hpp"
#include "memory.hpp"
#include "random.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <iterator>
#include <limits>
#include <vector>

// Not an unnamed namespace: after frontend_model.hpp, cudafe++ of CUDA 13.0 does not come back from
// one.
namespace cuda_frontend_test {

using namespace frontend_test;

constexpr auto device = Space::device;

/// The same managed memory as the device sees it.
template <class T, class Extents>
auto on_device(
    cuda::std::mdspan<T, Extents, cuda::std::layout_stride, space_accessor<T, host>> const& view) {
  return Tensor<device, T, Extents::rank()>(view.data_handle(), view.mapping());
}

// ---- steps

enum class Step { rms_norm, layer_norm, interleaved, half_split, hadamard, scale, gate };
constexpr Step steps[] = {Step::rms_norm, Step::layer_norm, Step::interleaved, Step::half_split,
                          Step::hadamard, Step::scale,      Step::gate};

constexpr double eps = 0.25;  // large, so that a missing one shows
constexpr float factor = 0.375f;

bool turns(Step step) { return step == Step::interleaved || step == Step::half_split; }

/// What a step needs besides its lanes, for rows first_row, first_row + 1, ...
struct Others {
  test::Guarded<float> gain, bias;
  test::Guarded<position_t> positions;
  Lanes gates;
  RotaryFrequencies table;

  Others(index_t rows, index_t heads, index_t width, index_t first_row)
      : gain(to_size(width)),
        bias(to_size(width)),
        positions(to_size(rows)),
        gates(rows, heads, width) {
    test::Random random(1);
    for (index_t i = 0; i < width; ++i) {
      gain[to_size(i)] = random.uniform(0.5f, 1.5f);
      bias[to_size(i)] = random.normal();
    }
    for (index_t r = 0; r < rows; ++r) {
      positions[to_size(r)] = static_cast<position_t>(977 * (first_row + r) + 1);
    }
    gates.random(9, first_row);
    ModelConfig config = tiny_model();
    config.qk_rope_head_dim = width;
    if (width % 2 == 0 && width <= 2 * RotaryFrequencies::max_pairs) {
      table = *rotary_frequencies(config);
    }
  }
};

/// Runs a step on any executor.
template <class X, Space S = X::space>
Status run_step(X const& x, Step step, Tensor<S, float, 3> const& from,
                Tensor<S, float, 3> const& out, Others& others) {
  auto const in = detail::read_only(from);
  auto const vector = [](test::Guarded<float> const& values) {
    return make_dense<S, float const, 1>(values.data(), {static_cast<index_t>(values.size())});
  };
  auto const each_head = [&](auto const& f) {
    for (index_t h = 0; h < in.extent(1); ++h) {
      if (Status const status = f(detail::head_of(in, h), detail::head_of(out, h)); !status.ok()) {
        return status;
      }
    }
    return Status{};
  };
  auto const gates = others.gates.view();
  switch (step) {
    case Step::rms_norm:
      return each_head([&](auto const& a, auto const& b) {
        return rms_norm(x, a, vector(others.gain), eps, b);
      });
    case Step::layer_norm:
      return each_head([&](auto const& a, auto const& b) {
        return layer_norm(x, a, vector(others.gain), vector(others.bias), eps, b);
      });
    case Step::interleaved:
    case Step::half_split:
      return rotate(
          x, in, make_lengths<S>(others.positions.data(), Rows{in.extent(0)}), others.table,
          step == Step::interleaved ? RopeLayout::interleaved : RopeLayout::half_split, out);
    case Step::hadamard: {
      Status const status = scale(x, in, 1.0f, out);
      return status.ok() ? hadamard(x, out) : status;
    }
    case Step::scale:
      return scale(x, in, factor, out);
    case Step::gate:
      return gate(x, in, Tensor<S, float const, 3>(gates.data_handle(), gates.mapping()), out);
  }
  return {};
}

struct Batch {
  index_t rows, heads, width;
  index_t first_row = 0;
};

std::vector<float> on_host(Step step, Batch const& b) {
  Lanes in(b.rows, b.heads, b.width), out(b.rows, b.heads, b.width);
  Others others(b.rows, b.heads, b.width, b.first_row);
  in.random(5, b.first_row);
  REQUIRE(run_step(test::Serial{}, step, in.view(), out.view(), others).ok());
  return out.take();
}
std::vector<float> on_gpu(Step step, Batch const& b, Layout from = {}, Layout to = {}) {
  test::Cuda const x;
  Lanes in(b.rows, b.heads, b.width, from), out(b.rows, b.heads, b.width, to);
  Others others(b.rows, b.heads, b.width, b.first_row);
  in.random(5, b.first_row);
  REQUIRE(run_step(x, step, on_device(in.view()), on_device(out.view()), others).ok());
  test::finish(x);
  CHECK(in.take() == values(Lanes(b.rows, b.heads, b.width).random(5, b.first_row).view()));
  return out.take();
}

auto any_step() {
  return GENERATE(Catch::Generators::from_range(std::begin(steps), std::end(steps)));
}

bool fits(Step step, index_t width) {
  if (turns(step)) return width % 2 == 0 && width <= 2 * RotaryFrequencies::max_pairs;
  return step != Step::hadamard || (width & (width - 1)) == 0;
}

void check_near(std::vector<float> const& got, std::vector<float> const& want, double tolerance) {
  check_close(got, std::vector<double>(want.begin(), want.end()), tolerance);
}

TEST_CASE("CUDA front end steps: the host's numbers", "[frontend]") {
  Step const step = any_step();
  CAPTURE(static_cast<int>(step));
  for (index_t const width : {1, 2, 7, 16, 64, 128, 257, 512, 2048}) {
    if (!fits(step, width)) continue;
    for (index_t const rows : {0, 1, 17}) {
      for (index_t const heads : {1, 3, 9}) {
        if (rows * heads * width > 40000) continue;
        CAPTURE(width, rows, heads);
        auto const got = on_gpu(step, {rows, heads, width});
        auto const want = on_host(step, {rows, heads, width});
        check_near(got, want, 1e-6);
        // additions and one factor: nothing that a device could round in another way
        if (step == Step::hadamard || step == Step::scale) CHECK(bits_of(got) == bits_of(want));
      }
    }
  }
}

TEST_CASE("CUDA front end steps: in place, strided and out of place give the same bits",
          "[frontend]") {
  Step const step = any_step();
  CAPTURE(static_cast<int>(step));
  Batch const batch{17, 3, 16};
  auto const want = bits_of(on_gpu(step, batch));
  CHECK(bits_of(on_gpu(step, batch, {.head_pad = 5, .row_pad = 2}, {})) == want);
  CHECK(bits_of(on_gpu(step, batch, {}, {.head_pad = 1, .row_pad = 7})) == want);
  test::Cuda const x;
  Lanes memory(17, 3, 16, {.head_pad = 3, .row_pad = 1});
  Others others(17, 3, 16, 0);
  memory.random(5);
  REQUIRE(run_step(x, step, on_device(memory.view()), on_device(memory.view()), others).ok());
  test::finish(x);
  CHECK(bits_of(memory.take()) == want);
}

TEST_CASE("CUDA front end steps: a row's bits depend on the row alone", "[frontend]") {
  Step const step = any_step();
  CAPTURE(static_cast<int>(step));
  auto const want = bits_of(on_gpu(step, {33, 9, 16}));
  for (index_t const row : {0, 16, 32}) {
    auto const alone = bits_of(on_gpu(step, {1, 9, 16, row}));
    CHECK(std::equal(alone.begin(), alone.end(), want.begin() + row * 9 * 16));
  }
  test::Cuda const x;
  Lanes in(33, 9, 16), out(33, 9, 16);
  Others others(33, 9, 16, 0);
  in.random(5);
  for (index_t i = 0; i < 16; ++i) in.view()(5, 1, i) = std::nanf("");
  REQUIRE(run_step(x, step, on_device(in.view()), on_device(out.view()), others).ok());
  test::finish(x);
  auto const got = out.take();
  index_t wrong = 0;
  for (std::size_t i = 0; i < got.size(); ++i) {
    bool const poisoned = i / 16 == 5 * 9 + 1;
    bool const right =
        poisoned ? std::isnan(got[i]) : std::bit_cast<std::uint32_t>(got[i]) == want[i];
    wrong += right ? 0 : 1;
  }
  CHECK(wrong == 0);
}

TEST_CASE("CUDA front end steps: more rows than a grid has blocks", "[frontend]") {
  Step const step = any_step();
  CAPTURE(static_cast<int>(step));
  check_near(on_gpu(step, {4099, 3, 16}), on_host(step, {4099, 3, 16}), 1e-6);
  if (step == Step::hadamard) {  // a block for each head
    check_near(on_gpu(step, {4099, 1, 256}), on_host(step, {4099, 1, 256}), 1e-6);
  }
}

TEST_CASE("CUDA front end steps: norms of rows whose squares pass fp32", "[frontend]") {
  test::Cuda const x;
  for (index_t const width : {1, 7, 257, 1000}) {
    Lanes in(3, 1, width), got(3, 1, width), want(3, 1, width);
    Others others(3, 1, width, 0);
    in.random(1);
    for (index_t i = 0; i < width; ++i) in.view()(1, 0, i) = 0;
    for (index_t i = 0; i < width; ++i) in.view()(2, 0, i) *= 1e25f;
    for (Step const step : {Step::rms_norm, Step::layer_norm}) {
      REQUIRE(run_step(x, step, on_device(in.view()), on_device(got.view()), others).ok());
      REQUIRE(run_step(test::Serial{}, step, in.view(), want.view(), others).ok());
      test::finish(x);
      check_near(values(got.view()), values(want.view()), 1e-6);
    }
  }
}

TEST_CASE("CUDA rotate: angles of any size", "[frontend]") {
  test::Cuda const x;
  constexpr position_t most = std::numeric_limits<position_t>::max();
  std::vector<position_t> const list{0, 1, 2, 3, -1, 1000, 65536, 1048575, 1048576, 99999999, most};
  auto const positions = test::guarded(list);
  auto const rows = static_cast<index_t>(list.size());
  RotaryFrequencies table;
  table.pairs = 4;
  float const inverse[]{1.0f, 0.1f, 3.0e-4f, 1.57079637f};
  std::copy_n(inverse, 4, table.inverse);
  Lanes lanes(rows, 1, 8);
  for (index_t r = 0; r < rows; ++r) {
    for (index_t i = 0; i < 8; ++i) lanes.view()(r, 0, i) = i % 2 == 0 ? 1.0f : 0.0f;
  }
  auto const view = on_device(lanes.view());
  REQUIRE(rotate(x, detail::read_only(view), make_lengths<device>(positions.data(), Rows{rows}),
                 table, RopeLayout::interleaved, view)
              .ok());
  test::finish(x);
  for (index_t r = 0; r < rows; ++r) {
    for (index_t i = 0; i < 4; ++i) {
      CAPTURE(list[to_size(r)], inverse[i]);
      float const angle = static_cast<float>(list[to_size(r)]) * inverse[i];
      double const exact = static_cast<double>(angle);
      CHECK(std::abs(static_cast<double>(lanes.view()(r, 0, 2 * i)) - std::cos(exact)) < 2e-7);
      CHECK(std::abs(static_cast<double>(lanes.view()(r, 0, 2 * i + 1)) - std::sin(exact)) < 2e-7);
    }
  }
}

TEST_CASE("CUDA hadamard: its widest head, and the refusal above it", "[frontend]") {
  test::Cuda const x;
  Lanes got(1, 1, 8192), want(1, 1, 8192);
  got.random(1);
  want.random(1);
  REQUIRE(hadamard(x, on_device(got.view())).ok());
  REQUIRE(hadamard(test::Serial{}, want.view()).ok());
  test::finish(x);
  CHECK(bits_of(got.take()) == bits_of(want.take()));
  Lanes wide(1, 1, 16384);
  Status status;
  CHECK(cuda_test::enqueued_by(x, [&] { status = hadamard(x, on_device(wide.view())); }) == 0);
  CHECK(status.code == Errc::unsupported);
  CHECK((status.expected == 8192 && status.got == 16384));
}

TEST_CASE("CUDA front end steps: gates at their ends", "[frontend]") {
  test::Cuda const x;
  float const infinite = std::numeric_limits<float>::infinity();
  auto const in = test::guarded<float>({3, 3, 3, 3, 3});
  auto const gates = test::guarded<float>({0, 200, -200, infinite, -infinite});
  test::Guarded<float> out(5);
  auto const view = [](auto* p) {
    return make_dense<device, std::remove_pointer_t<decltype(p)>, 3>(p, {1, 1, 5});
  };
  REQUIRE(gate(x, view(in.data()), view(gates.data()), view(out.data())).ok());
  test::finish(x);
  CHECK(std::vector<float>(out.span().begin(), out.span().end()) ==
        std::vector<float>{1.5f, 3, 0, 3, 0});
}

// ---- projections

/// out[r, o] = sum_i w[o, i] * in[r, i], a thread per element: stands for a caller's cuBLAS.
template <class T>
INDEXSHARE_KERNEL void product_kernel(Tensor<device, float const, 2> in, MatrixView<device, T> w,
                                      Tensor<device, float, 2> out) {
  index_t const item = index_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (item >= out.extent(0) * out.extent(1)) return;
  index_t const r = item / out.extent(1);
  index_t const o = item % out.extent(1);
  double sum = 0;
  for (index_t i = 0; i < w.extent(1); ++i) sum += double{to_float(w(o, i))} * double{in(r, i)};
  out(r, o) = static_cast<float>(sum);
}

struct DeviceProduct {
  template <Element T>
  Status operator()(CudaExec const& x, Tensor<device, float const, 2> const& in,
                    MatrixView<device, T> const& w,
                    Tensor<device, float, 2> const& out) const noexcept {
    auto const blocks = static_cast<unsigned>((out.extent(0) * out.extent(1) + 63) / 64);
    return detail::launch(x, "product of the test", product_kernel<T>, {dim3(blocks), 64, 0}, in, w,
                          out);
  }
};
static_assert(MatrixProduct<DeviceProduct, CudaExec, bf16>);

template <class T>
AttentionWeights<device, T> on_device(AttentionWeights<host, T> const& w) {
  AttentionWeights<device, T> weights{
      on_device(w.q_a_proj),  on_device(w.q_a_layernorm),  on_device(w.q_b_proj),
      on_device(w.kv_a_proj), on_device(w.kv_a_layernorm), on_device(w.kv_b_proj),
      on_device(w.o_proj),    on_device(w.gate_proj),      on_device(w.sinks)};
  if (w.indexer) {
    weights.indexer = IndexerWeights<device, T>{
        on_device(w.indexer->wq_b), on_device(w.indexer->wk), on_device(w.indexer->k_norm_weight),
        on_device(w.indexer->k_norm_bias), on_device(w.indexer->weights_proj)};
  }
  return weights;
}

/// Activations of one space in managed memory.
template <Space S>
struct Sides {
  static std::size_t bytes(ModelConfig const& config, index_t rows, bool full, Keep keep) {
    WorkspaceCarver carver;
    carve(carver, config, rows, full, keep);
    return carver.size().bytes;
  }
  struct All {
    QuerySide<S> queries;
    KeySide<S> keys;
    OutputSide<S> outputs;
  };
  static All carve(WorkspaceCarver& carver, ModelConfig const& config, index_t rows, bool full,
                   Keep keep) {
    All all;
    all.queries = carve_query_side<S>(carver, config, Rows{rows}, full, keep);
    all.keys = carve_key_side<S>(carver, config, Rows{rows}, full, keep);
    all.outputs = carve_output_side<S>(carver, config, Rows{rows}, keep);
    return all;
  }

  test::Guarded<std::byte> memory;
  All all;

  Sides(ModelConfig const& config, index_t rows, bool full, Keep keep)
      : memory(bytes(config, rows, full, keep)) {
    WorkspaceCarver carver({memory.data(), memory.bytes()});
    all = carve(carver, config, rows, full, keep);
  }
};

struct Model {
  char const* name;
  ModelConfig config;
  LaneBasis basis = LaneBasis::natural;
};

std::vector<Model> models() {
  return {{"three heads", tiny_model()},
          {"no rotation", tiny_model(0, 3)},
          {"hy_v4", tiny_hy_v4()},
          {"hadamard", tiny_model(), LaneBasis::hadamard}};
}

/// Latent outputs of an attention.
test::Guarded<float> latent(ModelConfig const& config, index_t rows) {
  test::Guarded<float> memory(to_size(rows * config.num_attention_heads * config.kv_lora_rank));
  test::Random random(3);
  for (std::size_t i = 0; i < memory.size(); ++i) memory[i] = random.normal();
  return memory;
}

template <Space S, class X, class Product>
void project(X const& x, FrontEnd<Product> const& front_end,
             AttentionWeights<S, float> const& weights, Tensor<S, float const, 2> const& hidden,
             PositionView<S> const& positions, test::Guarded<float> const& attended,
             typename Sides<S>::All const& sides) {
  ModelConfig const& config = front_end.config;
  require_ok(project_queries(x, front_end, weights, hidden, positions, sides.queries));
  require_ok(project_keys(x, front_end, weights, hidden, positions, sides.keys));
  require_ok(project_output(
      x, front_end, weights, hidden,
      make_dense<S, float const, 3>(
          attended.data(), {hidden.extent(0), config.num_attention_heads, config.kv_lora_rank}),
      sides.outputs));
}

template <Space S>
std::vector<std::vector<float>> quantities(typename Sides<S>::All const& sides) {
  auto const& q = sides.queries;
  auto const& k = sides.keys;
  auto const& o = sides.outputs;
  return {values(q.q_resid),      values(q.q),      values(q.q_absorbed), values(q.index_q),
          values(q.head_weights), values(k.kv_row), values(k.index_k),    values(o.attention),
          values(o.gated),        values(o.output)};
}

TEST_CASE("CUDA front end: projections with a product on the device are the host's",
          "[frontend][graph]") {
  test::Cuda const x;
  for (Model const& model : models()) {
    for (bool const full : {true, false}) {
      for (Keep const keep : {Keep::results, Keep::intermediates}) {
        CAPTURE(model.name, full, static_cast<int>(keep));
        auto const weights = random_weights(model.config, full, 3);
        Tokens tokens(model.config, 0, 5, 2);
        auto const attended = latent(model.config, 5);
        Sides<device> got(model.config, 5, full, keep);
        auto const on_gpu = make_front_end(model.config, model.basis, DeviceProduct{}).value();
        // captured, so that it is seen to enqueue only
        cuda_test::Graph const graph(x, [&] {
          project<device>(x, on_gpu, on_device(weights.view()), on_device(tokens.hidden()),
                          on_device(tokens.positions()), attended, got.all);
        });
        CHECK(graph.only_device_work());
        for (index_t const first : {0, 100}) {
          Tokens const others(model.config, first, 5, 2);
          for (index_t t = 0; t < 5; ++t) {
            for (index_t i = 0; i < model.config.hidden_size; ++i) {
              tokens.row(t)[i] = others.hidden()(t, i);
            }
          }
          graph.replay();
          Sides<host> want(model.config, 5, full, keep);
          auto const front_end = make_front_end(model.config, model.basis).value();
          project<host>(ReferenceExec{}, front_end, weights.view(), tokens.hidden(),
                        tokens.positions(), attended, want.all);
          auto const a = quantities<device>(got.all);
          auto const b = quantities<host>(want.all);
          for (std::size_t i = 0; i < a.size(); ++i) {
            CAPTURE(i);
            check_near(a[i], b[i], 2e-5);
          }
        }
      }
    }
  }
}

TEST_CASE("CUDA front end: keys are appended to caches of the right basis only", "[frontend]") {
  test::Cuda const x;
  ModelConfig const config = tiny_model();
  auto const front_end = make_front_end(config, LaneBasis::hadamard, DeviceProduct{}).value();
  Sides<device> sides(config, 5, true, Keep::results);
  auto const index_k = sides.all.keys.index_k;
  auto const kv_row = sides.all.keys.kv_row;
  test::Random random(1);
  for (index_t t = 0; t < 5; ++t) {
    for (index_t i = 0; i < index_k.extent(1); ++i) index_k(t, i) = random.normal();
    for (index_t i = 0; i < kv_row.extent(1); ++i) kv_row(t, i) = random.normal();
  }
  auto const positions = test::guarded<position_t>({4, 0, 1, 3, 2});
  auto const requests = test::guarded<position_t>({0, 0, 0, 0, 0});
  auto const pages = make_contiguous_table<device>(Keys{5});
  test::Guarded<bf16> keys(to_size(5 * index_k.extent(1)), test::unwritten);
  test::Guarded<bf16> kv(to_size(5 * kv_row.extent(1)), test::unwritten);
  auto key_cache =
      make_contiguous_cache<device>(keys.data(), Requests{1}, Keys{5}, HeadDim{index_k.extent(1)});
  auto const kv_cache =
      make_contiguous_cache<device>(kv.data(), Requests{1}, Keys{5}, HeadDim{kv_row.extent(1)});
  auto const at = make_lengths<device>(positions.data(), Rows{5});
  auto const of = make_lengths<device>(requests.data(), Rows{5});
  Status status;
  CHECK(cuda_test::enqueued_by(x, [&] {
          status = append_index_keys(x, front_end, sides.all.keys, at, of, pages, key_cache);
        }) == 0);
  CHECK(status.code == Errc::bad_value);
  key_cache.basis = LaneBasis::hadamard;
  REQUIRE(append_index_keys(x, front_end, sides.all.keys, at, of, pages, key_cache).ok());
  REQUIRE(append_kv(x, sides.all.keys, at, of, pages, kv_cache).ok());
  test::finish(x);
  index_t wrong = 0;
  auto const check_rows = [&](auto const& rows, test::Guarded<bf16> const& cache) {
    for (index_t t = 0; t < 5; ++t) {
      for (index_t i = 0; i < rows.extent(1); ++i) {
        index_t const place = positions[to_size(t)] * rows.extent(1) + i;
        wrong += cache[to_size(place)].bits != from_float<bf16>(rows(t, i)).bits ? 1 : 0;
      }
    }
  };
  check_rows(index_k, keys);
  check_rows(kv_row, kv);
  CHECK(wrong == 0);
}

TEST_CASE("CUDA front end: what is wrong is refused before any work", "[frontend]") {
  test::Cuda const x;
  ModelConfig const config = tiny_hy_v4();
  auto const front_end = make_front_end(config, LaneBasis::natural, DeviceProduct{}).value();
  auto const weights = random_weights(config, true);
  Tokens const tokens(config, 0, 5);
  Sides<device> sides(config, 5, true, Keep::intermediates);
  auto queries = sides.all.queries;
  queries.index_q = {};
  auto keys = sides.all.keys;
  keys.index_k = {};
  Status of_queries, of_keys;
  CHECK(cuda_test::enqueued_by(x, [&] {
          of_queries =
              project_queries(x, front_end, on_device(weights.view()), on_device(tokens.hidden()),
                              on_device(tokens.positions()), queries);
          of_keys = project_keys(x, front_end, on_device(weights.view()),
                                 on_device(tokens.hidden()), on_device(tokens.positions()), keys);
        }) == 0);
  CHECK(of_queries.code == Errc::bad_shape);
  CHECK(of_keys.code == Errc::bad_shape);
}

}  // namespace cuda_frontend_test
