// SPDX-License-Identifier: Apache-2.0
//
// The stages of a layer taken out one by one, host beside CUDA on the same memory: where two runs
// part, the first stage that differs is the culprit.
#include "../layer/session.hpp"

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>
#include <vector>

namespace {
using namespace layer_test;

using SmallModel = Model<>;
using Bf16Model = Model<bf16, format::Plain<bf16>, format::Plain<bf16>>;
using Fp16Model = Model<fp16, format::Plain<fp16>, format::Plain<fp16>>;
using Fp8Model = Model<bf16, format::IndexKeyE4m3, format::LatentE4m3>;
using Fp8QueryModel = Model<e4m3, format::IndexKeyE4m3, format::LatentE4m3>;

template <class M>
Shape shape_of() {
  Shape shape = small_shape;
  if (std::is_same_v<M, SmallModel>) return shape;
  shape.index_heads = shape.heads = 8;
  shape.index_dim = 128;
  shape.key_dim = 576;
  shape.value_dim = 512;
  return shape;
}

/// What can be taken out of a layer's run: scores from `indexer_score`, the selection and its slots
/// from the state, outputs.
struct Stages {
  std::vector<std::vector<std::uint32_t>> scores;  ///< bits, of each row above k
  Selected selection;
  std::vector<position_t> slots;
  std::vector<float> out, lse;
};

template <class X, class M, class Attention>
Stages stages_of(X const& x, M& model, RowList const& rows) {
  constexpr Space s = X::space;
  using Layer = SparseAttentionLayer<typename M::Indexer, RadixTopK, Schedule, Attention>;
  Shape const& shape = model.shape;
  Rows const count{static_cast<index_t>(rows.size())};
  LayerQueries<typename M::Element> const queries(rows, shape, 0);
  auto const lengths = column(rows, &Row::length);
  auto const requests = column(rows, &Row::request);
  Layer layer;
  layer.share = Schedule("F");
  layer.shape = shape;

  typename Layer::template inputs<s> in;
  in.id = {1, 0};
  in.batch = {make_lengths<s>(lengths.data(), count), make_lengths<s>(requests.data(), count),
              model.index_keys(0).template pages<s>(), model.kv(0).template pages<s>()};
  in.indexer = typename M::Indexer::template inputs<s>{
      make_query<s>(queries.index_q.data(), count, Heads{shape.index_heads},
                    HeadDim{shape.index_dim}),
      make_head_weights<s>(queries.weights.data(), count, Heads{shape.index_heads}),
      model.index_keys(0).template view<s>()};
  in.attention = {
      make_query<s>(queries.q.data(), count, Heads{shape.heads}, HeadDim{shape.key_dim}),
      model.kv(0).template view<s>(), 0.125f};
  test::Guarded<float> out(rows.size() * to_size(shape.heads * shape.value_dim));
  test::Guarded<float> lse(rows.size() * to_size(shape.heads));
  typename Layer::template outputs<s> const outputs{
      make_output<s>(out.data(), count, Heads{shape.heads}, HeadDim{shape.value_dim}),
      make_lse<s>(lse.data(), count, Heads{shape.heads})};

  TopK const top_k{shape.top_k};
  test::Guarded<std::byte> state_memory(SelectionState<s>::size(count, top_k).bytes);
  auto state =
      SelectionState<s>::make({state_memory.data(), state_memory.bytes()}, count, top_k).value();
  test::Guarded<std::byte> scratch(layer.workspace(x, ample).value().bytes);
  REQUIRE_THAT(layer.run(x, in, state, outputs, {scratch.data(), scratch.bytes()}), succeeded());
  test::finish(x);

  Stages stages;
  stages.out = to_vector(out.span());
  stages.lse = to_vector(lse.span());
  if constexpr (Attention::reads_selection) {
    stages.selection = copy_selection(std::as_const(state).selection());
    auto const slots = state.plan().slots;
    stages.slots.assign(slots.data_handle(), slots.data_handle() + count.n * shape.top_k);
  }
  test::Guarded<float> scores(rows.size() * to_size(shape.keys));
  test::Guarded<std::byte> score_scratch(indexer_workspace(x, layer.indexer, shape).value().bytes);
  REQUIRE_THAT(indexer_score(x, layer.indexer, *in.indexer, in.batch, {{0, count.n}, shape.top_k},
                             make_scores<s>(scores.data(), count, Keys{shape.keys}),
                             {score_scratch.data(), score_scratch.bytes()}),
               succeeded());
  test::finish(x);
  for (std::size_t r = 0; r < rows.size(); ++r) {
    bool const scored = rows[r].length > shape.top_k;
    stages.scores.push_back(bits_of(scores.span().subspan(
        r * to_size(shape.keys), scored ? to_size(rows[r].length) : std::size_t{0})));
  }
  return stages;
}

/// Largest distance of two outputs.
float distance(std::vector<float> const& a, std::vector<float> const& b) {
  REQUIRE(a.size() == b.size());
  float largest = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    if (a[i] != b[i]) largest = std::max(largest, std::abs(a[i] - b[i]));
  }
  return largest;
}

/// Softmax weights in 16 bits on the tensor cores: each off by 2^-9 of itself, values up to 3.
template <class M>
constexpr float tolerance = std::is_same_v<M, SmallModel> ? 1e-5f : 3 * 0x1p-8f;

TEMPLATE_TEST_CASE("DIAG R147: scores, selection, slots and attention of a run, stage by stage",
                   "[stages][fault]", SmallModel, Bf16Model, Fp16Model, Fp8Model, Fp8QueryModel) {
  TestType model(Schedule("F"), 1, shape_of<TestType>(), {64, 16, 1});
  using Attention = typename TestType::Sparse;
  RowList const rows = mixed_rows();
  auto const device = stages_of<test::Cuda, TestType, Attention>(test::Cuda{}, model, rows);
  auto const host = stages_of<test::Serial, TestType, Attention>(test::Serial{}, model, rows);
  CHECK(device.scores == host.scores);  // small integers: exact everywhere
  CHECK(device.selection == host.selection);
  CHECK(device.slots == host.slots);
  CHECK(distance(device.out, host.out) <= tolerance<TestType>);
  CHECK(distance(device.lse, host.lse) <= 1e-4f);
}

// Garbage began at 1.5 K keys, below k.
TEMPLATE_TEST_CASE("DIAG R148: k >= len equals dense in every cache format, far into the context",
                   "[stages][fault]", Bf16Model, Fp16Model, Fp8Model) {
  test::Cuda const x;
  Shape shape = shape_of<TestType>();
  shape.top_k = 2048;
  shape.keys = 2048;
  shape.rows = 4;
  TestType model(Schedule("F"), 1, shape, {64, 64, 1}, {}, {2048});
  RowList const rows{{0, 1535}, {0, 1601}, {0, 2047}, {0, 2048}};
  auto const sparse = stages_of<test::Cuda, TestType, typename TestType::Sparse>(x, model, rows);
  auto const dense = stages_of<test::Cuda, TestType, typename TestType::Dense>(x, model, rows);
  CHECK(bits_of(sparse.out) == bits_of(dense.out));
  CHECK(bits_of(sparse.lse) == bits_of(dense.lse));
  for (index_t r = 0; r < 4; ++r) {
    CHECK(sparse.selection.counts[to_size(r)] == rows[to_size(r)].length);
  }
  auto const host =
      stages_of<test::Serial, TestType, typename TestType::Dense>(test::Serial{}, model, rows);
  CHECK(distance(dense.out, host.out) <= tolerance<TestType>);
  CHECK(distance(dense.lse, host.lse) <= 1e-4f);
}

}  // namespace
