// SPDX-License-Identifier: Apache-2.0
//
// Layers captured into CUDA graphs (contracts 5.2, 5.3): once, then replayed with new lengths,
// pages, queries and keys in the same memory. Each replay is compared with an eager run over other
// memory, byte for byte.
#include "graph.hpp"
#include "../layer/session.hpp"
#include "changes.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <utility>
#include <vector>

namespace {
using namespace layer_test;
using cuda_test::Graph;

/// Generic kernels, and those of the published widths in all cache formats.
using SmallModel = Model<>;
using Bf16Model = Model<bf16, format::Plain<bf16>, format::Plain<bf16>>;
using Fp8Model = Model<bf16, format::IndexKeyE4m3, format::LatentE4m3>;
using Fp8QueryModel = Model<e4m3, format::IndexKeyE4m3, format::LatentE4m3>;

template <class M>
Shape shape_of() {
  return std::is_same_v<M, SmallModel> ? small_shape : published_shape;
}
template <class M>
Layout layout_of() {
  return std::is_same_v<M, SmallModel> ? Layout{} : Layout{64, 64, 1};
}

/// A full layer and the two shared layers of its group.
constexpr char const* group = "FSS";

template <class M, template <class> class P = Policies>
using GroupSession = Session<test::Cuda, M, Schedule, P<M>>;

/// Everything that a group leaves behind, bit for bit.
struct Outcome {
  Selected selection;
  std::vector<position_t> slots;
  std::vector<std::vector<std::uint32_t>> layers;

  friend bool operator==(Outcome const&, Outcome const&) = default;
};

template <class S>
Outcome outcome_of(S& session) {
  Outcome outcome;
  if constexpr (S::Attention::reads_selection) {
    outcome.selection = copy_selection(std::as_const(session.state()).selection());
    auto const slots = session.state().plan().slots;
    for (index_t r = 0; r < slots.extent(0); ++r) {
      for (index_t j = 0; j < slots.extent(1); ++j) outcome.slots.push_back(slots(r, j));
    }
  }
  for (std::int32_t number = 0; number < 3; ++number) {
    outcome.layers.push_back(session.result(number));
  }
  return outcome;
}

template <class S>
void enqueue_group(S& session) {
  for (std::int32_t number = 0; number < 3; ++number) {
    REQUIRE_THAT(session.enqueue(number), succeeded());
  }
}

/// The same batch over memory of its own, without a graph.
template <class S, class M>
Outcome eager(M& model, RowList const& rows) {
  S session(test::Cuda{}, model, Schedule(group), rows);
  session.run_all(0, 3);
  return outcome_of(session);
}

// ---- capture and replay

TEMPLATE_TEST_CASE("GRAPH: a group captured once equals eager runs under everything new", "[graph]",
                   SmallModel, Bf16Model, Fp8Model, Fp8QueryModel) {
  test::Cuda const x;
  TestType model(Schedule(group), 3, shape_of<TestType>(), layout_of<TestType>());
  auto const all = batches();
  using S = GroupSession<TestType>;
  S session(x, model, Schedule(group), all[0]);
  Graph const graph(x, [&] { enqueue_group(session); });
  CHECK(graph.only_device_work());
  for (std::size_t replay = 0; replay < all.size() + 1; ++replay) {
    CAPTURE(replay);
    RowList const& rows = all[replay % all.size()];
    move_pages(model, static_cast<index_t>(replay % 3), 3);
    set_tokens(model, static_cast<std::int32_t>(3 * replay));
    set_rows(session, rows);
    set_queries(model, session, rows);
    overwrite(session.workspace(), replay % 2 == 0 ? 0x5A : 0xFF);
    graph.replay();
    CHECK(outcome_of(session) == eager<S>(model, rows));
  }
}

TEMPLATE_TEST_CASE("GRAPH: a layer enqueues the kernels that the capability query lists",
                   "[graph][capability]", SmallModel, Bf16Model, Fp8Model) {
  test::Cuda const x;
  Schedule const share("FS");
  for (index_t const keys : {40, 20000}) {
    for (position_t const rows : {1, 9}) {
      Shape shape = shape_of<TestType>();
      shape.rows = rows;
      shape.keys = keys;
      shape.top_k = 600;  // a few rows' keys are split and merged
      TestType model(share, 2, shape, layout_of<TestType>(), {}, {40});
      GroupSession<TestType> session(x, model, share, chunk(0, 40, rows));
      for (std::int32_t const number : {0, 1}) {
        CAPTURE(keys, rows, number);
        SparseAttentionLayer<typename TestType::Indexer, RadixTopK, Schedule,
                             typename TestType::Sparse> const layer{
            .share = share, .shape = shape, .layer = number};
        auto const can = capability(x.limits(), layer, session.workspace().bytes);
        REQUIRE(can.has_value());
        std::vector<int> listed;
        if (number == 0) listed.push_back(0);  // map_slots
        for (StageUse const* stage : {&can->indexer, &can->topk, &can->attention}) {
          REQUIRE((stage->count == 0 || stage->rows >= rows));  // one pass
          for (KernelUse const& kernel : *stage) listed.push_back(kernel.shared_bytes);
        }
        std::sort(listed.begin(), listed.end());
        if (number == 1) REQUIRE_THAT(session.run(0), succeeded());
        Graph const graph(x, [&] { REQUIRE_THAT(session.enqueue(number), succeeded()); });
        CHECK(graph.shared_bytes() == listed);
      }
    }
  }
}

TEST_CASE("GRAPH R131: replay uses the caller's memory, whatever is allocated since",
          "[graph][fault]") {
  test::Cuda const x;
  SmallModel model(Schedule(group), 3);
  auto const rows = mixed_rows();
  GroupSession<SmallModel> session(x, model, Schedule(group), rows);
  Graph const graph(x, [&] { enqueue_group(session); });
  graph.replay();
  auto const before = outcome_of(session);
  {
    std::vector<std::unique_ptr<test::Scratch>> blocks;
    for (std::size_t i = 0; i < 100; ++i) {
      blocks.push_back(
          std::make_unique<test::Scratch>(WorkspaceSize{512 * (i + 1)}, std::byte{0x77}));
      if (i % 3 == 0) blocks.erase(blocks.begin());
    }
    graph.replay();
    CHECK(outcome_of(session) == before);
  }
  graph.replay();
  CHECK(outcome_of(session) == before);
  CHECK(before == eager<GroupSession<SmallModel>>(model, rows));
}

TEST_CASE("GRAPH R132: ten replays, the same addresses and the same bytes", "[graph][fault]") {
  test::Cuda const x;
  SmallModel model(Schedule(group), 3);
  GroupSession<SmallModel> session(x, model, Schedule(group), mixed_rows());
  Graph const graph(x, [&] { enqueue_group(session); });
  auto const addresses = [&] {
    auto const selection = std::as_const(session.state()).selection();
    return std::vector<void const*>{selection.indices.data_handle(), selection.counts.data_handle(),
                                    session.state().plan().slots.data_handle(),
                                    session.state().plan_pages().pages.data_handle()};
  };
  auto const at_capture = addresses();
  graph.replay();
  auto const first = outcome_of(session);
  for (int replay = 0; replay < 9; ++replay) {
    overwrite(session.workspace(), replay);
    graph.replay();
    CHECK(outcome_of(session) == first);
    CHECK(addresses() == at_capture);
  }
}

/// One way to use the library, on rows that replace each other.
struct Mode {
  char const* name;
  RowList first;   ///< at capture
  RowList second;  ///< at the second replay
};

std::vector<Mode> all_modes() {
  return {
      {"one decode row", chunk(3, 40), chunk(1, 20)},
      {"decode rows", join({chunk(0, 29), chunk(1, 37), chunk(3, 40)}),
       join({chunk(3, 7), chunk(0, 6), chunk(2, 2)})},
      {"prefill", chunk(3, 16, 16), chunk(1, 37, 16)},
      {"mixed", batches()[0], batches()[2]},
      {"below k", join({chunk(2, 4, 3), chunk(0, 6, 2)}), join({chunk(3, 5, 3), chunk(1, 1, 2)})},
      {"empty rows", {{0, 0}, {1, 0}}, {{0, 10}, {-1, 0}}},
      {"no rows", {}, {}}};
}

template <class M, template <class> class P>
void check_modes(std::vector<Mode> const& modes, cudaStreamCaptureMode capture_mode) {
  test::Cuda const x;
  using S = GroupSession<M, P>;
  for (Mode const& mode : modes) {
    CAPTURE(mode.name);
    M model(Schedule(group), 3, shape_of<M>(), layout_of<M>());
    S session(x, model, Schedule(group), mode.first);
    Graph const graph(
        x, [&] { enqueue_group(session); }, capture_mode);
    CHECK(graph.only_device_work());
    for (RowList const* rows : {&mode.first, &mode.second, &mode.first}) {
      set_rows(session, *rows);
      set_queries(model, session, *rows);
      overwrite(session.workspace(), 0xFF);
      graph.replay();
      CHECK(outcome_of(session) == eager<S>(model, *rows));
    }
  }
}

TEST_CASE("GRAPH R133: every mode eager and captured, in every capture mode", "[graph][fault]") {
  auto const capture_mode = GENERATE(cudaStreamCaptureModeGlobal, cudaStreamCaptureModeThreadLocal,
                                     cudaStreamCaptureModeRelaxed);
  SECTION("sparse") { check_modes<SmallModel, Policies>(all_modes(), capture_mode); }
  SECTION("dense") { check_modes<SmallModel, DensePolicies>(all_modes(), capture_mode); }
}

TEST_CASE("GRAPH R133: decode and mixed rows with fp8 caches", "[graph][fault]") {
  std::vector<Mode> const modes{all_modes()[0], all_modes()[3]};
  SECTION("sparse") { check_modes<Fp8Model, Policies>(modes, cudaStreamCaptureModeGlobal); }
  SECTION("dense") { check_modes<Fp8Model, DensePolicies>(modes, cudaStreamCaptureModeGlobal); }
}

TEST_CASE("GRAPH R133: draft steps and imports captured", "[graph][fault]") {
  test::Cuda const x;
  Schedule const share("F");
  SmallModel model(share, 1);
  auto const all = batches();
  RowList const drafts = join({chunk(0, 29), chunk(3, 40)});
  Session<test::Cuda, SmallModel, Schedule> step0(x, model, share, all[0], {1, 0});
  Session<test::Cuda, SmallModel, MtpDraft> step1(x, model, MtpDraft{0, true}, drafts, {2, 0},
                                                  ample, 1);
  OwnedState received(16, model.shape.top_k);
  auto rows = test::guarded<position_t>({4, 8});
  auto in = step1.inputs(0);
  in.indexer = cuda::std::nullopt;
  Graph const graph(x, [&] {
    REQUIRE_THAT(step0.enqueue(0), succeeded());
    REQUIRE_THAT(compact_selection(x, step0.state(), {1, 0}, numbers(rows), {2, 0}, step1.batch(),
                                   step1.state()),
                 succeeded());
    REQUIRE_THAT(step1.enqueue(0, in, step1.state()), succeeded());
    REQUIRE_THAT(import_selection(x, std::as_const(step0.state()).selection(), {1, 0}, 0,
                                  step0.batch(), received.get()),
                 succeeded());
  });
  CHECK(graph.only_device_work());
  for (std::size_t replay = 0; replay < 4; ++replay) {
    rows[0] = static_cast<position_t>(9 - replay);
    rows[1] = static_cast<position_t>(replay);
    set_rows(step0, all[replay]);
    set_queries(model, step0, all[replay]);
    graph.replay();
    auto const selected = copy_selection(std::as_const(step0.state()).selection());
    auto const compacted = copy_selection(std::as_const(step1.state()).selection());
    CHECK(compacted.row(0) == selected.row(rows[0]));
    CHECK(compacted.row(1) == selected.row(rows[1]));
    CHECK(copy_selection(std::as_const(received.get()).selection()) == selected);
  }
}

TEMPLATE_TEST_CASE("GRAPH R134: captured with 4 keys, replayed with 9 and with 40 in other pages",
                   "[graph][fault]", SmallModel, Bf16Model) {
  test::Cuda const x;
  TestType model(Schedule(group), 3, shape_of<TestType>(), layout_of<TestType>());
  using S = GroupSession<TestType>;
  S session(x, model, Schedule(group), chunk(3, 4));
  Graph const graph(x, [&] { enqueue_group(session); });
  for (position_t const length : {9, 40, 4, 40, 6, 7}) {
    CAPTURE(length);
    move_pages(model, length % 3, 3);
    set_tokens(model, length);
    set_rows(session, chunk(3, length));
    set_queries(model, session, chunk(3, length));
    graph.replay();
    CHECK(outcome_of(session) == eager<S>(model, chunk(3, length)));
  }
}

TEMPLATE_TEST_CASE("GRAPH R135: each array updated alone is the captured one", "[graph][fault]",
                   SmallModel, Fp8Model) {
  test::Cuda const x;
  auto const rows = mixed_rows();
  using M = TestType;
  using S = GroupSession<M>;
  M model(Schedule(group), 3, shape_of<M>(), layout_of<M>());
  S session(x, model, Schedule(group), rows);
  Graph const graph(x, [&] { enqueue_group(session); });
  graph.replay();

  // Changes of one array; the eager twin is given the same contents.
  struct Change {
    char const* name;
    std::function<void(M&, S&)> apply;
  };
  RowList shorter = rows, moved = rows;
  shorter[9].length = 20;
  moved[9].request = 3;
  auto const reverse = [](auto& values) {
    std::reverse(values.data(), values.data() + values.size());
  };
  Change const changes[]{
      {"lengths", [&](M&, S& s) { set_rows(s, shorter); }},
      {"requests", [&](M&, S& s) { set_rows(s, moved); }},
      {"queries", [&](M&, S& s) { reverse(s.queries(1).q); }},
      {"index queries", [&](M&, S& s) { reverse(s.queries(0).index_q); }},
      {"head weights", [&](M&, S& s) { reverse(s.queries(0).weights); }},
      {"KV of a shared layer",
       [](M& m, S&) {
         for (position_t s = 0; s < 40; ++s) {
           m.kv(2).write(3, s, token_values(Part::kv, 60, 3, s, m.shape.key_dim));
         }
       }},
      {"index keys",
       [](M& m, S&) {
         for (position_t s = 0; s < 40; ++s) {
           m.index_keys(0).write(3, s, token_values(Part::index_key, 60, 3, s, m.shape.index_dim));
         }
       }},
      {"KV pages", [](M& m, S&) { swap_pages(m.kv(0), 1, 3); }},
      {"index pages", [](M& m, S&) { swap_pages(m.index_keys(0), 1, 3); }},
  };
  auto before = outcome_of(session);
  for (Change const& change : changes) {
    CAPTURE(change.name);
    change.apply(model, session);
    graph.replay();
    auto const after = outcome_of(session);
    CHECK(after != before);
    S twin(x, model, Schedule(group), rows);
    RowList now;
    for (index_t r = 0; r < session.row_count(); ++r) {
      now.push_back({session.batch().requests(r), session.batch().lengths(r)});
    }
    set_rows(twin, now);
    for (std::int32_t number = 0; number < 3; ++number) {
      overwrite_with(twin.queries(number).q, session.queries(number).q);
      overwrite_with(twin.queries(number).index_q, session.queries(number).index_q);
      overwrite_with(twin.queries(number).weights, session.queries(number).weights);
    }
    twin.run_all(0, 3);
    CHECK(after == outcome_of(twin));
    before = after;
  }
}

TEMPLATE_TEST_CASE("GRAPH R136: captured and replayed with all lengths zero", "[graph][fault]",
                   SmallModel, Fp8Model) {
  test::Cuda const x;
  TestType model(Schedule(group), 3, shape_of<TestType>(), layout_of<TestType>());
  using S = GroupSession<TestType>;
  RowList const none(10, Row{0, 0});
  S session(x, model, Schedule(group), none);
  Graph const graph(x, [&] { enqueue_group(session); });
  auto const rows = mixed_rows();
  for (RowList const* batch : {&none, &rows, &none}) {
    set_rows(session, *batch);
    set_queries(model, session, *batch);
    overwrite(session.workspace(), 0xFF);
    graph.replay();
    auto const outcome = outcome_of(session);
    CHECK(outcome == eager<S>(model, *batch));
    if (batch == &rows) continue;
    CHECK(outcome.selection.counts == std::vector<position_t>(10, 0));
    CHECK(outcome.selection.indices ==
          std::vector<position_t>(outcome.selection.indices.size(), no_position));
    CHECK(outcome.slots == std::vector<position_t>(outcome.slots.size(), no_position));
    for (std::int32_t number = 0; number < 3; ++number) {
      auto const out = session.out(number);
      CHECK(out == std::vector<float>(out.size(), 0.0f));
      auto const* const lse = session.outputs(number).lse.data_handle();
      CHECK(std::all_of(lse, lse + 10 * model.shape.heads, [](float value) {
        return value == -std::numeric_limits<float>::infinity();
      }));
    }
  }
}

// The time-out is that of the test program: a graph that hangs ends it.
TEST_CASE("GRAPH R144: a whole forward with draft steps in one graph comes back",
          "[graph][fault]") {
  test::Cuda const x;
  Schedule const share("FSSFS");
  SmallModel model(share, 5);
  auto const rows = mixed_rows();
  Session<test::Cuda, SmallModel, Schedule> target(x, model, share, rows, {1, 0});
  RowList const drafts = join({chunk(0, 29), chunk(3, 40)});
  MtpDraft const draft{0, true};
  Session<test::Cuda, SmallModel, MtpDraft> step1(x, model, draft, drafts, {2, 0}, ample, 1);
  auto const accepted = test::guarded<position_t>({4, 8});
  auto in = step1.inputs(0);
  in.indexer = cuda::std::nullopt;
  Graph const graph(x, [&] {
    for (std::int32_t number = 0; number < 5; ++number) {
      REQUIRE_THAT(target.enqueue(number), succeeded());
    }
    REQUIRE_THAT(target.enqueue(0), succeeded());
    REQUIRE_THAT(compact_selection(x, target.state(), {1, 0}, numbers(accepted), {2, 0},
                                   step1.batch(), step1.state()),
                 succeeded());
    REQUIRE_THAT(step1.enqueue(0, in, step1.state()), succeeded());
  });
  graph.replay();
  auto const first = step1.result(0);
  for (int replay = 0; replay < 10; ++replay) graph.replay();
  CHECK(step1.result(0) == first);
  Session<test::Cuda, SmallModel, Schedule> expected(x, model, share, rows, {1, 0});
  expected.run_all();
  for (std::int32_t number = 1; number < 5; ++number) {
    CHECK(target.result(number) == expected.result(number));
  }
}

TEST_CASE("GRAPH: two graphs in flight on two streams, with two states and workspaces, do not meet",
          "[graph]") {
  test::Cuda const x;
  cudaStream_t other_stream = nullptr;
  test::require(cudaStreamCreateWithFlags(&other_stream, cudaStreamNonBlocking));
  {
    CudaExec const y(other_stream, x.limits());
    SmallModel model(Schedule(group), 3);
    auto const all = batches();
    GroupSession<SmallModel> a(x, model, Schedule(group), all[0], {7, 0});
    Session<CudaExec, SmallModel, Schedule> b(y, model, Schedule(group), all[1], {7, 1});
    Graph const of_a(x, [&] { enqueue_group(a); });
    Graph const of_b(y, [&] { enqueue_group(b); });
    for (int replay = 0; replay < 3; ++replay) {
      of_a.launch();
      of_b.launch();
      of_a.launch();
    }
    test::finish(x);
    test::finish(y);
    CHECK(outcome_of(a) == eager<GroupSession<SmallModel>>(model, all[0]));
    CHECK(outcome_of(b) == eager<GroupSession<SmallModel>>(model, all[1]));
  }
  test::require(cudaStreamDestroy(other_stream));
}

// ---- several blocks per row

TEST_CASE("GRAPH: top-k over several blocks per row starts anew in each replay", "[graph]") {
  test::Cuda const x;
  constexpr index_t rows = 2, keys = 50000, k = 300;
  test::Guarded<float> scores(to_size(rows * keys));
  test::Guarded<position_t> lengths(to_size(rows));
  test::Guarded<position_t> indices(to_size(rows * k)), counts(to_size(rows));
  test::Guarded<position_t> want_indices(to_size(rows * k)), want_counts(to_size(rows));
  Shape shape;
  shape.rows = rows;
  shape.keys = keys;
  shape.top_k = k;
  test::Scratch scratch(topk_workspace(x, RadixTopK{}, shape).value());
  REQUIRE(scratch.get().bytes > 0);
  auto const run = [&]<class X>(X const& exec, auto& to, auto& of, Workspace ws) {
    return topk_select(exec, RadixTopK{},
                       make_scores<X::space>(std::as_const(scores).data(), Rows{rows}, Keys{keys}),
                       make_lengths<X::space>(lengths.data(), Rows{rows}),
                       make_selection<X::space>(to.data(), of.data(), Rows{rows}, TopK{k}), ws);
  };
  lengths[0] = lengths[1] = 0;
  Graph const graph(x, [&] { REQUIRE_THAT(run(x, indices, counts, scratch.get()), succeeded()); });
  CHECK(graph.only_device_work());
  test::Random random(1);
  position_t const replays[][2]{{50000, 40000}, {50000, 50000}, {299, 50000}, {50000, 0}};
  for (auto const& replay : replays) {
    for (std::size_t i = 0; i < scores.size(); ++i) {
      scores[i] = static_cast<float>(random.below(2000));  // ties at the threshold
    }
    std::copy_n(replay, rows, lengths.data());
    overwrite(scratch.get(), replay[0] % 3 == 0 ? 0x00 : 0xA7);
    graph.replay();
    HostMemory const host(topk_workspace(test::Serial{}, RadixTopK{}, shape).value());
    REQUIRE_THAT(run(test::Serial{}, want_indices, want_counts, host.view()), succeeded());
    CHECK(std::memcmp(indices.data(), want_indices.data(), indices.bytes()) == 0);
    CHECK(std::memcmp(counts.data(), want_counts.data(), counts.bytes()) == 0);
  }
}

TEST_CASE("GRAPH: one decode row, its keys shared by many blocks", "[graph]") {
  test::Cuda const x;
  Shape shape = published_shape;
  shape.rows = 1;
  shape.keys = 2048;
  shape.top_k = 512;
  Bf16Model model(Schedule(group), 3, shape, {64, 64, 1}, {}, {2048});
  using S = GroupSession<Bf16Model>;
  S session(x, model, Schedule(group), chunk(0, 5));
  Graph const graph(x, [&] { enqueue_group(session); });
  for (position_t const length : {2048, 511, 1025}) {
    CAPTURE(length);
    set_rows(session, chunk(0, length));
    set_queries(model, session, chunk(0, length));
    overwrite(session.workspace(), 0xFF);
    graph.replay();
    CHECK(outcome_of(session) == eager<S>(model, chunk(0, length)));
  }
}

// ---- splitting by rows

TEST_CASE("INT32 R141: scores past 2 GiB are split by rows", "[workspace][fault]") {
  test::Cuda const x;
  SparseAttentionLayer<Bf16Model::Indexer, RadixTopK, Schedule, Bf16Model::Sparse> layer;
  layer.share = Schedule("F");
  layer.shape = published_shape;
  layer.shape.keys = 1 << 20;
  layer.shape.top_k = 2048;
  constexpr std::size_t two_gib = std::size_t{1} << 31;
  for (index_t const rows : {512, 513, 2048, 8192}) {
    CAPTURE(rows);
    layer.shape.rows = rows;
    auto const within = layer.workspace(x, two_gib - 1);
    REQUIRE(within.has_value());
    CHECK(within->bytes <= two_gib - 1);
    auto const whole = layer.workspace(x, std::size_t{1} << 50);
    REQUIRE(whole.has_value());
    CHECK(whole->bytes >= static_cast<std::size_t>(rows) * 4 << 20);
  }
}

TEMPLATE_TEST_CASE("INT32 R141: split by rows or in one piece, the same bytes",
                   "[workspace][fault]", SmallModel, Fp8Model) {
  test::Cuda const x;
  TestType model(Schedule(group), 3, shape_of<TestType>(), layout_of<TestType>());
  auto const rows = mixed_rows();
  using S = GroupSession<TestType>;
  S one_piece(x, model, Schedule(group), rows);
  one_piece.run_all(0, 3);
  S split(x, model, Schedule(group), rows, {7, 3}, minimum);
  CHECK(split.workspace().bytes < one_piece.workspace().bytes);
  Graph const graph(x, [&] { enqueue_group(split); });
  graph.replay();
  CHECK(outcome_of(split) == outcome_of(one_piece));
}

}  // namespace
