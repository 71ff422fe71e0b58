// SPDX-License-Identifier: Apache-2.0
//
// Tags on the device (contracts 7.3): a replayed graph repeats no check of the host, so a state
// that the wrong micro-batch filled is found by the work itself.
#include "../layer/session.hpp"
#include "graph.hpp"

#include <cstdint>
#include <memory>
#include <vector>

namespace {
using namespace layer_test;
using cuda_test::Graph;

using SmallModel = Model<>;
using SmallSession = Session<test::Cuda, SmallModel, Schedule>;

/// Two micro-batches of a model of a full and a shared layer. Both wrongly use the state of `a`.
struct TwoBatches {
  test::Cuda x;
  Schedule share{"FSS"};
  SmallModel model{share, 3};
  SmallSession a{x, model, share, mixed_rows(), {7, 0}};
  SmallSession b;
  test::Guarded<TagMismatch> mismatch;

  explicit TwoBatches(RowList rows_of_b, ForwardId id_of_b)
      : b(x, model, share, std::move(rows_of_b), id_of_b), mismatch(1) {
    mismatch[0] = {};
  }

  SelectionState<space>& state() { return a.state(); }
  std::unique_ptr<Graph> capture(SmallSession& session, std::int32_t number) {
    return std::make_unique<Graph>(x, [&] {
      REQUIRE_THAT(session.enqueue(number, session.inputs(number), state()), succeeded());
    });
  }
};

TEST_CASE("GRAPH tags: graphs of two micro-batches over one state, replayed in a wrong order",
          "[tags][graph]") {
  struct Other {
    RowList rows;
    ForwardId id;
    char const* what;
  };
  Other const other = GENERATE(Other{mixed_rows(), {7, 1}, "another batch"},
                               Other{mixed_rows(), {8, 0}, "another forward"},
                               Other{chunk(0, 29, 4), {7, 0}, "another row count"});
  TwoBatches t(other.rows, other.id);
  t.state().check_tags_on_device(t.mismatch.data());
  // on the host each capture finds the state as its own full layer left it
  auto const full_a = t.capture(t.a, 0);
  auto const shared_a = t.capture(t.a, 1);
  auto const full_b = t.capture(t.b, 0);
  auto const shared_b = t.capture(t.b, 1);
  for (auto const* graph : {full_a.get(), shared_a.get(), full_b.get(), shared_b.get()}) {
    CHECK(graph->only_device_work());
  }

  // right order, twice
  for (int replay = 0; replay < 2; ++replay) {
    for (auto const* graph : {full_a.get(), shared_a.get(), full_b.get(), shared_b.get()}) {
      graph->replay();
    }
    CHECK(t.mismatch[0].found == 0);
    CHECK(status_of(t.mismatch[0]).ok());
  }

  // b's full layer comes before a's shared layer has read
  full_a->replay();
  full_b->replay();
  shared_a->replay();
  REQUIRE(t.mismatch[0].found == 1);
  CHECK(t.mismatch[0].layer == 1);
  CHECK(t.mismatch[0].expected == SelectionTag{{7, 0}, 10, 0});
  CHECK(t.mismatch[0].got ==
        SelectionTag{other.id, static_cast<std::int32_t>(other.rows.size()), 0});
  Status const status = status_of(t.mismatch[0]);
  CHECK(status.code == Errc::stale_selection);
  CHECK(std::string_view(status.what).find(other.what) != std::string_view::npos);
  CHECK(status.layer == 1);

  // the first finding stays, later ones count
  shared_b->replay();
  CHECK(t.mismatch[0].found == 1);
  full_a->replay();
  shared_b->replay();
  CHECK(t.mismatch[0].found == 2);
  CHECK(t.mismatch[0].expected == SelectionTag{{7, 0}, 10, 0});

  // cleared by the caller, found anew
  t.mismatch[0] = {};
  shared_b->replay();
  CHECK(t.mismatch[0].found == 1);
  CHECK(t.mismatch[0].got == SelectionTag{{7, 0}, 10, 0});
}

TEST_CASE("GRAPH tags: a shared layer that reads the group of another source layer is found",
          "[tags][graph]") {
  test::Cuda const x;
  Schedule const share("FSFS");
  SmallModel model(share, 4);
  SmallSession session(x, model, share, mixed_rows());
  test::Guarded<TagMismatch> mismatch(1);
  mismatch[0] = {};
  session.state().check_tags_on_device(mismatch.data());
  std::vector<std::unique_ptr<Graph>> layers;
  for (std::int32_t number = 0; number < 4; ++number) {
    layers.push_back(
        std::make_unique<Graph>(x, [&] { REQUIRE_THAT(session.enqueue(number), succeeded()); }));
  }
  for (auto const& layer : layers) layer->replay();
  CHECK(mismatch[0].found == 0);
  layers[0]->replay();
  layers[3]->replay();
  CHECK(mismatch[0].found == 1);
  CHECK(mismatch[0].layer == 3);
  CHECK((mismatch[0].expected.source_layer == 2 && mismatch[0].got.source_layer == 0));
}

TEST_CASE("GRAPH tags: eager calls stamp and compare, too, and find nothing", "[tags]") {
  TwoBatches t(mixed_rows(), {7, 1});
  t.state().check_tags_on_device(t.mismatch.data());
  for (auto* const session : {&t.a, &t.b}) {
    for (std::int32_t number = 0; number < 3; ++number) {
      REQUIRE_THAT(session->run(number, session->inputs(number), t.state()), succeeded());
    }
  }
  CHECK(t.mismatch[0].found == 0);
  // what the host refuses, the device never sees
  CHECK_THAT(t.a.run(1, t.a.inputs(1), t.state()), refused(Errc::stale_selection, "another batch"));
  CHECK(t.mismatch[0].found == 0);
}

TEST_CASE("GRAPH tags: without the option nothing is enqueued for it", "[tags][graph]") {
  TwoBatches t(mixed_rows(), {7, 1});
  auto const nodes = [&](SmallSession& session, std::int32_t number) {
    return t.capture(session, number)->nodes().size();
  };
  std::size_t const full = nodes(t.a, 0);
  std::size_t const shared = nodes(t.a, 1);
  t.state().check_tags_on_device(t.mismatch.data());
  CHECK(nodes(t.a, 0) == full + 1);
  CHECK(nodes(t.a, 1) == shared + 1);
  t.state().check_tags_on_device(nullptr);
  CHECK(nodes(t.a, 0) == full);
  CHECK(nodes(t.a, 1) == shared);
}

TEST_CASE("GRAPH tags: dense layers neither stamp nor compare", "[tags]") {
  test::Cuda const x;
  Schedule const share("FS");
  SmallModel model(share, 2);
  Session<test::Cuda, SmallModel, Schedule, DensePolicies<SmallModel>> dense(x, model, share,
                                                                             mixed_rows());
  test::Guarded<TagMismatch> mismatch(1);
  mismatch[0] = {};
  dense.state().check_tags_on_device(mismatch.data());
  dense.run_all();
  CHECK(mismatch[0].found == 0);
}

// ---- selections that are handed over

TEST_CASE("GRAPH tags: imported and compacted selections carry their tags", "[tags][graph]") {
  test::Cuda const x;
  Schedule const share("F");
  SmallModel model(share, 1);
  SmallSession step0(x, model, share, mixed_rows(), {1, 0});
  SmallSession later(x, model, share, mixed_rows(), {5, 0});
  RowList const drafts = join({chunk(1, 37), chunk(3, 40)});
  SmallSession step1(x, model, share, drafts, {2, 0});
  auto const rows = test::guarded<position_t>({9, 8});
  test::Guarded<TagMismatch> of_step0(1), of_step1(1);
  of_step0[0] = of_step1[0] = {};
  step0.state().check_tags_on_device(of_step0.data());
  step1.state().check_tags_on_device(of_step1.data());

  Session<test::Cuda, SmallModel, MtpDraft> draft(x, model, MtpDraft{0, true}, drafts, {2, 0},
                                                  ample, 1);
  auto in = draft.inputs(0);
  in.indexer = cuda::std::nullopt;
  Graph const first(x, [&] { REQUIRE_THAT(step0.enqueue(0), succeeded()); });
  Graph const compact(x, [&] {
    REQUIRE_THAT(compact_selection(x, step0.state(), {1, 0}, numbers(rows), {2, 0}, step1.batch(),
                                   step1.state()),
                 succeeded());
  });
  Graph const second(x, [&] { REQUIRE_THAT(draft.enqueue(0, in, step1.state()), succeeded()); });
  Graph const other(
      x, [&] { REQUIRE_THAT(later.enqueue(0, later.inputs(0), step0.state()), succeeded()); });
  for (Graph const* graph : {&first, &compact, &second, &compact, &second}) graph->replay();
  CHECK((of_step0[0].found == 0 && of_step1[0].found == 0));

  // another forward took the state before it was compacted
  other.replay();
  compact.replay();
  CHECK(of_step0[0].found == 1);
  CHECK(of_step0[0].layer == -1);
  CHECK((of_step0[0].expected.id.forward == 1 && of_step0[0].got.id.forward == 5));
  CHECK(of_step1[0].found == 0);

  // an import over the compacted selection
  Graph const imported(x, [&] {
    auto const from = std::as_const(step0.state()).selection();
    REQUIRE_THAT(import_selection(x, {rows_of(from.indices, 0, 2), rows_of(from.counts, 0, 2)},
                                  {3, 0}, 0, step1.batch(), step1.state()),
                 succeeded());
  });
  compact.replay();
  imported.replay();
  second.replay();
  CHECK(of_step1[0].found == 1);
  CHECK((of_step1[0].expected.id.forward == 2 && of_step1[0].got.id.forward == 3));
}

}  // namespace
