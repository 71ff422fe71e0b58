// SPDX-License-Identifier: Apache-2.0
//
// Policies of a caller in all four places, a pair of them fused, and an engine's tensor class.
#include "by_hand.hpp"
#include "session.hpp"

#include <cuda/std/array>

#include <cmath>

namespace engine {

using namespace indexshare;

// ---- an indexer without keys, with scores in fp16: the nearest even position is best

struct NearestEven {
  using score_type = fp16;
  template <Space S>
  struct inputs {
    LengthView<S> centre;  ///< [rows]
  };
};

template <Executor X>
Result<WorkspaceSize> indexer_workspace(X const&, NearestEven, Shape const&) noexcept {
  return WorkspaceSize{0};
}
template <Executor X>
Status indexer_check(X const&, NearestEven, NearestEven::inputs<X::space> const& in,
                     RowBatch<X::space> const& batch, Shape const&) noexcept {
  return in.centre.extent(0) == batch.count() ? Status{}
                                              : failure(Errc::bad_shape, "centres of NearestEven",
                                                        batch.count(), in.centre.extent(0));
}
template <HostSpaceExecutor X>
Status indexer_score(X const&, NearestEven, NearestEven::inputs<Space::host> const& in,
                     RowBatch<Space::host> const& batch, ScoreRequest const& request,
                     ScoreView<Space::host, fp16> const& scores, Workspace) noexcept {
  for (index_t i = 0; i < request.rows.count; ++i) {
    index_t const row = request.rows.first + i;
    index_t const length = clamp_length(batch.lengths(row), scores.extent(1));
    if (length <= request.top_k) continue;
    for (index_t s = 0; s < length; ++s) {
      auto const distance = static_cast<float>(std::abs(s - in.centre(row)));
      scores(i, s) = from_float<fp16>(s % 2 == 0 ? -distance : -1000.0f - distance);
    }
  }
  return {};
}

// ---- a top-k that leaves every other candidate out, on scores of any type

struct EveryOtherBest {};

template <Executor X>
Result<WorkspaceSize> topk_workspace(X const& x, EveryOtherBest, Shape shape) noexcept {
  shape.top_k *= 2;
  return topk_workspace(x, RadixTopK{}, shape);
}
template <HostSpaceExecutor X, Element Score>
Status topk_select(X const&, EveryOtherBest, ScoreView<Space::host, Score const> const& scores,
                   LengthView<Space::host> const& lengths, SelectionView<Space::host> const& out,
                   Workspace) noexcept {
  index_t const width = out.indices.extent(1);
  for (index_t row = 0; row < scores.extent(0); ++row) {
    index_t const length = clamp_length(lengths(row), scores.extent(1));
    index_t const n = std::min(width, length);
    index_t written = 0;
    for (index_t s = 0; s < length && written < n; ++s) {
      index_t rank = s;
      if (length > width) {
        rank = 0;
        for (index_t other = 0; other < length; ++other) {
          float const a = to_float(scores(row, other));
          float const b = to_float(scores(row, s));
          rank += a > b || (a == b && other < s);
        }
        if (rank % 2 != 0 || rank / 2 >= n) continue;
      }
      out.indices(row, written++) = static_cast<position_t>(s);
    }
    for (index_t j = written; j < width; ++j) out.indices(row, j) = no_position;
    out.counts(row) = static_cast<position_t>(written);
  }
  return {};
}

// ---- a share policy: everybody reads layer `source`, which selects

struct AllReadOne {
  std::int32_t source = 0;
};
constexpr std::int32_t share_source(AllReadOne const& p, std::int32_t layer) noexcept {
  return layer >= p.source ? p.source : no_source;
}

// ---- an attention: the mean of the selected rows

struct MeanOfSelected {
  static constexpr bool reads_selection = true;
  template <Space S>
  struct inputs {
    CacheView<S, format::Plain<float>> kv;
  };
  template <Space S>
  struct outputs {
    Tensor<S, float, 2> mean;  ///< [rows, value_dim]
  };
};

template <Executor X>
Result<WorkspaceSize> attention_workspace(X const&, MeanOfSelected, Shape const& shape) noexcept {
  WorkspaceCarver carver;
  carver.take<float>(static_cast<std::size_t>(shape.key_dim));
  return carver.size();
}
template <Executor X>
Status attention_check(X const&, MeanOfSelected, MeanOfSelected::inputs<X::space> const&,
                       MeanOfSelected::outputs<X::space> const& out,
                       RowBatch<X::space> const& batch, Shape const&) noexcept {
  return out.mean.extent(0) == batch.count() ? Status{}
                                             : failure(Errc::bad_shape, "rows of the means");
}
template <HostSpaceExecutor X>
Status attention_run(X const&, MeanOfSelected, MeanOfSelected::inputs<Space::host> const& in,
                     RowBatch<Space::host> const&, RowRange rows,
                     GroupPlan<Space::host> const& plan,
                     MeanOfSelected::outputs<Space::host> const& out, Shape const& shape,
                     Workspace ws) noexcept {
  WorkspaceCarver carver(ws);
  auto* const lanes = carver.take<float>(static_cast<std::size_t>(shape.key_dim));
  for (index_t row = rows.first; row < rows.first + rows.count; ++row) {
    for (index_t v = 0; v < shape.value_dim; ++v) out.mean(row, v) = 0;
    for (index_t j = 0; j < plan.counts(row); ++j) {
      decode_row(in.kv, plan.slots(row, j), lanes);
      for (index_t v = 0; v < shape.value_dim; ++v) {
        out.mean(row, v) += lanes[v] / static_cast<float>(plan.counts(row));
      }
    }
  }
  return {};
}

static_assert(IndexerPolicy<NearestEven, HostExec<>> && IndexerPolicy<NearestEven, ReferenceExec>);
static_assert(TopKPolicy<EveryOtherBest, HostExec<>, fp16>);
static_assert(TopKPolicy<EveryOtherBest, ReferenceExec, float>);
static_assert(SharePolicy<AllReadOne>);
static_assert(AttentionPolicy<MeanOfSelected, HostExec<>>);
static_assert(!SharePolicy<NearestEven> && !TopKPolicy<AllReadOne, HostExec<>, float>);
static_assert(!IndexerPolicy<EveryOtherBest, HostExec<>>);

// ---- a pair that its author fuses

struct FusedIndexer : NearestEven {
  int* fused_calls = nullptr;
};
struct FusedTopK {};

template <Executor X>
Result<WorkspaceSize> topk_workspace(X const&, FusedTopK, Shape const&) noexcept {
  return refuse(failure(Errc::unsupported, "FusedTopK runs fused only"));
}
template <Executor X>
Status topk_select(X const&, FusedTopK, ScoreView<X::space, fp16 const> const&,
                   LengthView<X::space> const&, SelectionView<X::space> const&,
                   Workspace) noexcept {
  return failure(Errc::unsupported, "FusedTopK runs fused only");
}
template <Executor X>
Result<WorkspaceSize> select_workspace(X const&, FusedIndexer const&, FusedTopK const&,
                                       Shape const&, std::size_t budget) noexcept {
  constexpr std::size_t need = 512;
  if (budget < need) {
    return refuse(failure(Errc::workspace_too_small, "workspace of the fused pair", need,
                          static_cast<std::int64_t>(budget)));
  }
  return WorkspaceSize{need};
}
/// Selects the k last keys.
template <HostSpaceExecutor X>
Status select(X const&, FusedIndexer const& indexer, FusedTopK const&,
              NearestEven::inputs<Space::host> const&, RowBatch<Space::host> const& batch,
              Shape const& shape, SelectionView<Space::host> const& out, Workspace) noexcept {
  ++*indexer.fused_calls;
  for (index_t row = 0; row < batch.count(); ++row) {
    index_t const length = clamp_length(batch.lengths(row), shape.keys);
    index_t const n = std::min(shape.top_k, length);
    for (index_t j = 0; j < shape.top_k; ++j) {
      out.indices(row, j) = j < n ? static_cast<position_t>(length - n + j) : no_position;
    }
    out.counts(row) = static_cast<position_t>(n);
  }
  return {};
}

// ---- an engine's tensor class

struct EngineTensor {
  float* data;
  std::int64_t sizes[3];
  std::int64_t steps[3];
};
inline Tensor<Space::host, float const, 3> indexshare_tensor(EngineTensor const& t) noexcept {
  return make_strided<Space::host, float const, 3>(t.data, {t.sizes[0], t.sizes[1], t.sizes[2]},
                                                   {t.steps[0], t.steps[1], t.steps[2]});
}
static_assert(TensorLike<EngineTensor> && !TensorLike<int>);

}  // namespace engine

namespace {
using namespace layer_test;
constexpr Space host = Space::host;

/// Attends to the mean of the rows that an own indexer and top-k chose.
template <class X, class Indexer, class TopK>
struct OwnCall {
  using Layer = SparseAttentionLayer<Indexer, TopK, engine::AllReadOne, engine::MeanOfSelected>;

  explicit OwnCall(X exec) : x(exec) {
    for (Row const& row : rows) {
      lengths.push_back(row.length);
      requests.push_back(row.request);
      centres.push_back(row.length / 2);
    }
    layer.share = {1};
    layer.layer = 1;
    layer.shape = model.shape;
  }
  Rows count() const { return {static_cast<index_t>(rows.size())}; }

  Status run(std::int32_t number) {
    layer.layer = number;
    auto const ws = layer.workspace(x, ample);
    if (!ws) return ws.error();
    test::Scratch scratch(*ws);
    typename Layer::template inputs<host> in{
        {},
        {model.kv(number).view()},
        {make_lengths<host>(lengths.data(), count()), make_lengths<host>(requests.data(), count()),
         model.index_pages(), model.kv_pages()},
        {3, 4}};
    if (number == 1) {
      in.indexer = {make_lengths<host>(centres.data(), Rows{count().n - missing_centres})};
    }
    mean.fill(test::unwritten);
    Status const status =
        layer.run(x, in, state.get(),
                  {make_dense<host, float, 2>(mean.data(), {count().n, model.shape.value_dim})},
                  scratch.get());
    CHECK(scratch.intact());
    return status;
  }

  void check_means(std::int32_t number, std::vector<std::vector<position_t>> const& selections) {
    Selected const selected = copy_selection(state.get().selection());
    for (std::size_t r = 0; r < rows.size(); ++r) {
      CAPTURE(r);
      CHECK(selected.row(static_cast<index_t>(r)) == selections[r]);
      for (index_t v = 0; v < model.shape.value_dim; ++v) {
        float sum = 0;
        for (position_t const s : selections[r]) {
          sum += std::as_const(model.kv(number)).value(rows[r].request, s)[to_size(v)];
        }
        float const expected = sum / static_cast<float>(selections[r].size());
        CHECK(std::abs(mean[r * to_size(model.shape.value_dim) + to_size(v)] - expected) < 1e-5f);
      }
    }
  }

  X x;
  Model<> model{Schedule("FFS"), 3};
  RowList rows = join({chunk(3, 40), chunk(2, 4), chunk(0, 25, 2)});
  std::vector<position_t> lengths, requests, centres;
  index_t missing_centres = 0;
  Layer layer;
  OwnedState state{8, small_shape.top_k};
  test::Guarded<float> mean{4 * to_size(small_shape.value_dim)};
};

TEMPLATE_LIST_TEST_CASE("CONTRACT: an own indexer with fp16 scores under the library's top-k",
                        "[own]", test::Executors) {
  OwnCall<TestType, engine::NearestEven, RadixTopK> call(TestType{});
  // Centres 20, 2, 12, 12: six even positions around, the lower one of a tie.
  std::vector<std::vector<position_t>> const expected{
      {14, 16, 18, 20, 22, 24}, {0, 1, 2, 3}, {6, 8, 10, 12, 14, 16}, {6, 8, 10, 12, 14, 16}};
  REQUIRE_THAT(call.run(1), succeeded());
  call.check_means(1, expected);
  REQUIRE_THAT(call.run(2), succeeded());
  call.check_means(2, expected);
  CHECK_THAT(call.run(0), refused(Errc::bad_schedule, "no source").at(0));
}

TEMPLATE_LIST_TEST_CASE("CONTRACT: an own top-k on fp16 scores", "[own]", test::Executors) {
  OwnCall<TestType, engine::NearestEven, engine::EveryOtherBest> call(TestType{});
  REQUIRE_THAT(call.run(1), succeeded());
  // Ranks 0, 2, 4, .. : 20, 22, 24, 26, 28, 30; behind 12 come 14, 16, 18, 20 and 22.
  std::vector<std::vector<position_t>> const expected{
      {20, 22, 24, 26, 28, 30}, {0, 1, 2, 3}, {12, 14, 16, 18, 20, 22}, {12, 14, 16, 18, 20, 22}};
  call.check_means(1, expected);
}

TEMPLATE_LIST_TEST_CASE("CONTRACT: an own indexer's refusal comes before any work", "[own]",
                        test::Executors) {
  OwnCall<TestType, engine::NearestEven, RadixTopK> call(TestType{});
  call.missing_centres = 1;
  CHECK_THAT(call.run(1), refused(Errc::bad_shape, "centres of NearestEven").at(1).naming(4, 3));
  CHECK(untouched(call.mean));
  CHECK(call.state.get().tag() == SelectionTag{});
}

TEMPLATE_LIST_TEST_CASE("DISPATCH: a select for a known pair is found and used", "[own]",
                        test::Executors) {
  OwnCall<TestType, engine::FusedIndexer, engine::FusedTopK> call(TestType{});
  int fused = 0;
  call.layer.indexer.fused_calls = &fused;
  auto const little = call.layer.workspace(call.x, 256);  // enough for the attention
  REQUIRE_FALSE(little.has_value());
  CHECK_THAT(little.error(),
             refused(Errc::workspace_too_small, "fused pair").at(1).naming(512, 256));

  REQUIRE_THAT(call.run(1), succeeded());
  CHECK(fused == 1);
  std::vector<std::vector<position_t>> const expected{
      {34, 35, 36, 37, 38, 39}, {0, 1, 2, 3}, {18, 19, 20, 21, 22, 23}, {19, 20, 21, 22, 23, 24}};
  call.check_means(1, expected);
  REQUIRE_THAT(call.run(2), succeeded());
  CHECK(fused == 1);
  call.check_means(2, expected);
}

TEMPLATE_LIST_TEST_CASE("ADDR: an engine's tensor enters through as_view", "[own]",
                        test::Executors) {
  TestType const x{};
  Schedule const share("F");
  Model<> model(share, 1);
  Session expected(x, model, share, mixed_rows());
  expected.run_all();
  Session session(x, model, share, mixed_rows());
  auto in = session.inputs(0);
  auto const foreign = [](auto const& view) {
    engine::EngineTensor t{const_cast<float*>(view.data_handle()), {}, {}};
    for (std::size_t i = 0; i < 3; ++i) {
      t.sizes[i] = view.extent(i);
      t.steps[i] = view.stride(i);
    }
    return t;
  };
  engine::EngineTensor const q = foreign(in.attention.q);
  engine::EngineTensor const index_q = foreign(in.indexer->q);
  in.attention.q = as_view(q);
  in.indexer->q = as_view(index_q);
  REQUIRE_THAT(session.run(0, in), succeeded());
  CHECK(session.result(0) == expected.result(0));
  CHECK(as_view(as_view(q)).data_handle() == q.data);
}

}  // namespace
