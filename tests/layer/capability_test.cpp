// SPDX-License-Identifier: Apache-2.0
//
// The capability query: which kernels a layer runs on a CUDA device, or why it cannot, asked on a
// machine that need not have one.
#include <indexshare/cuda/capability.hpp>

#include "session.hpp"

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace {
using namespace layer_test;
using format::Plain;

/// A100, RTX 3090, RTX 4090, H200, B200, RTX 5090.
constexpr DeviceLimits parts[] = {{80, 108, 166912}, {86, 82, 101376},   {89, 128, 101376},
                                  {90, 132, 232448}, {100, 148, 232448}, {120, 170, 101376}};
constexpr DeviceLimits a100 = parts[0];

template <class Query, class KeyFormat, class KvFormat, class TopK = RadixTopK,
          class IndexQuery = Query>
using LayerOf = SparseAttentionLayer<ReluDotIndexer<IndexQuery, KeyFormat>, TopK, Schedule,
                                     SparseMla<Query, KvFormat>>;
using Fp32 = LayerOf<float, Plain<float>, Plain<float>>;
using Bf16 = LayerOf<bf16, Plain<bf16>, Plain<bf16>>;
using Fp8 = LayerOf<bf16, format::IndexKeyE4m3, format::LatentE4m3, RadixTopK, e4m3>;

constexpr Shape glm52(index_t rows, index_t keys, index_t heads = 64, index_t k = 2048) {
  return {.rows = rows,
          .keys = keys,
          .top_k = k,
          .index_heads = 32,
          .index_dim = 128,
          .heads = heads,
          .key_dim = 576,
          .value_dim = 512};
}
/// Of no published model.
constexpr Shape odd(index_t rows, index_t keys, index_t k = 2048) {
  return {.rows = rows,
          .keys = keys,
          .top_k = k,
          .index_heads = 5,
          .index_dim = 100,
          .heads = 11,
          .key_dim = 300,
          .value_dim = 260};
}

template <class Layer>
Layer layer_of(Shape const& shape, char const* schedule = "FS", std::int32_t number = 0) {
  Layer layer;
  layer.share = Schedule(schedule);
  layer.shape = shape;
  layer.layer = number;
  return layer;
}

constexpr std::size_t plenty = std::size_t{1} << 34;

std::vector<std::string_view> names(StageUse const& stage) {
  std::vector<std::string_view> list;
  for (KernelUse const& kernel : stage) list.push_back(kernel.name);
  return list;
}

/// All kernels of a call, in order.
std::vector<KernelUse> kernels(Capability const& can) {
  std::vector<KernelUse> list;
  for (StageUse const* stage : {&can.indexer, &can.topk, &can.attention}) {
    list.insert(list.end(), stage->begin(), stage->end());
  }
  return list;
}

/// What every answer must be.
void check_answer(Capability const& can, DeviceLimits const& limits) {
  for (KernelUse const& kernel : kernels(can)) {
    CAPTURE(kernel.name);
    CHECK_FALSE(std::string_view(kernel.name).empty());
    CHECK(kernel.shared_bytes >= 0);
    CHECK(kernel.shared_bytes <= limits.shared_memory_bytes);
  }
  CHECK(can.workspace.bytes >= can.topk.scratch.bytes);
  CHECK(can.workspace.bytes >= can.attention.scratch.bytes);
}

bool same(Status const& a, Status const& b) {
  return a.code == b.code && std::string_view(a.what) == b.what && a.layer == b.layer &&
         a.expected == b.expected && a.got == b.got && a.cuda_error == b.cuda_error;
}

// ---- which kernels

struct Expected {
  std::string_view indexer;
  std::vector<std::string_view> topk;
  std::string_view attention;
};

template <class Layer>
void check_dispatch(Shape shape, Expected const& expected) {
  for (DeviceLimits const& limits : parts) {
    for (index_t const k : {512, 2048, 4096}) {
      shape.top_k = k;
      CAPTURE(limits.compute_capability, k, shape.rows, shape.keys, shape.heads);
      auto const can = capability(limits, layer_of<Layer>(shape), plenty);
      REQUIRE(can.has_value());
      check_answer(*can, limits);
      CHECK(names(can->indexer) == std::vector{expected.indexer});
      CHECK(names(can->topk) == expected.topk);
      auto const attention = names(can->attention);
      REQUIRE((attention.size() == 1 || attention.size() == 2));
      CHECK(attention[0] == expected.attention);
      CHECK((attention.size() == 1 || attention[1] == "attention, merge of splits"));
    }
  }
}

}  // namespace

TEST_CASE("DISPATCH R146: kernels follow from types and widths, never from k or the architecture",
          "[capability][fault]") {
  std::vector<std::string_view> const narrow{"topk_row, narrow"}, wide{"topk_row, wide"};
  std::vector<std::string_view> const chunks{"topk_row, wide", "topk_chunk"};
  std::string_view const tuned = "indexer scores, tensor cores, 128 lanes";
  std::string_view const scalar = "indexer scores, scalar";
  std::string_view const plain = "attention, tensor cores";
  std::string_view const e4m3_rows = "attention, tensor cores, e4m3 rows";
  std::string_view const any = "attention, any types";
  // a decode step, a draft step and a prefill chunk; one GPU's share of the heads
  for (index_t const rows : {1, 8, 2048}) {
    for (index_t const heads : {8, 16, 64, 128}) {
      check_dispatch<Bf16>(glm52(rows, 131072, heads), {tuned, chunks, plain});
      check_dispatch<Fp8>(glm52(rows, 131072, heads), {tuned, chunks, e4m3_rows});
    }
    check_dispatch<Fp32>(glm52(rows, 131072), {scalar, chunks, any});
    check_dispatch<Bf16>(odd(rows, 131072), {scalar, chunks, any});
    check_dispatch<Bf16>(glm52(rows, 16384), {tuned, wide, plain});
    check_dispatch<Bf16>(glm52(rows, 2048), {tuned, narrow, plain});
  }
  Shape generic = glm52(8, 131072);
  generic.index_dim = 64;
  generic.key_dim = 544;
  check_dispatch<Bf16>(generic, {"indexer scores, tensor cores", chunks, any});
}

TEST_CASE("capability: decode splits a row's keys and merges, prefill does not", "[capability]") {
  for (DeviceLimits const& limits : parts) {
    auto const decode = capability(limits, layer_of<Fp8>(glm52(1, 131072)), plenty);
    CHECK(decode->attention.count == 2);
    CHECK(decode->attention.scratch.bytes > 0);
    auto const prefill = capability(limits, layer_of<Fp8>(glm52(2048, 131072)), plenty);
    CHECK(prefill->attention.count == 1);
  }
}

TEST_CASE("capability: shared and dense layers only attend", "[capability]") {
  auto const full = capability(a100, layer_of<Bf16>(glm52(8, 131072)), plenty);
  auto const shared = capability(a100, layer_of<Bf16>(glm52(8, 131072), "FS", 1), plenty);
  REQUIRE((full.has_value() && shared.has_value()));
  CHECK((shared->indexer.count == 0 && shared->topk.count == 0));
  CHECK(names(shared->attention) == names(full->attention));
  CHECK(shared->workspace.bytes <= full->workspace.bytes);
  using Dense = SparseAttentionLayer<ReluDotIndexer<bf16, Plain<bf16>>, RadixTopK, Schedule,
                                     DenseMla<bf16, Plain<bf16>>>;
  auto const dense = capability(a100, layer_of<Dense>(glm52(8, 131072)), plenty);
  REQUIRE(dense.has_value());
  CHECK((dense->indexer.count == 0 && dense->topk.count == 0));
  CHECK(names(dense->attention)[0] == "attention, tensor cores");
  // a selection that no top-k of this device could have made can still be read
  CHECK(capability(a100, layer_of<Bf16>(glm52(8, 131072, 64, 5000), "FS", 1), plenty).has_value());
}

TEST_CASE("capability: a budget decides how many rows a pass has", "[capability]") {
  auto const layer = layer_of<Bf16>(glm52(2048, 131072));
  std::size_t const least = minimum_budget(layer, CudaPlanner{a100});
  index_t last = 0;
  for (std::size_t const budget : {least, 8 * least, plenty}) {
    auto const can = capability(a100, layer, budget);
    REQUIRE(can.has_value());
    check_answer(*can, a100);
    CHECK(can->workspace.bytes <= budget);
    CHECK(can->indexer.rows == can->topk.rows);
    CHECK(can->indexer.rows > last);
    last = can->indexer.rows;
    // scores of the pass and the scratch beside them fill the workspace
    std::size_t const scores = 4 * 131072 * to_size(can->topk.rows);
    CHECK(scores + can->topk.scratch.bytes <= can->workspace.bytes);
  }
  CHECK(last == 2048);
  auto const too_small = capability(a100, layer, least - 1);
  REQUIRE_FALSE(too_small.has_value());
  CHECK(too_small.error().code == Errc::workspace_too_small);
}

// ---- refusals

namespace {

template <class Layer>
std::optional<Status> refusal(DeviceLimits const& limits, Layer const& layer,
                              std::size_t budget = plenty) {
  auto const can = capability(limits, layer, budget);
  if (can) return std::nullopt;
  return can.error();
}

/// Fits, or is refused with the numbers; gives the shared memory that would do.
template <class Layer>
int shared_memory_for(DeviceLimits limits, Layer const& layer) {
  for (int tries = 0; tries < 4; ++tries) {
    auto const can = capability(limits, layer, plenty);
    if (can) {
      check_answer(*can, limits);
      return limits.shared_memory_bytes;
    }
    CHECK_THAT(can.error(), refused(Errc::unsupported, "shared memory").at(0));
    CHECK(can.error().got == limits.shared_memory_bytes);
    REQUIRE(can.error().expected > can.error().got);
    limits.shared_memory_bytes = static_cast<int>(can.error().expected);
  }
  FAIL("each refusal asks for more than the last");
  return 0;
}

template <class Layer>
void check_shared_memory() {
  int refusals = 0, fits = 0;
  for (index_t const rows : {1, 8, 2048}) {
    for (index_t const heads : {8, 64, 128}) {
      for (index_t const keys : {2048, 131072}) {
        for (Shape const& shape : {glm52(rows, keys, heads), odd(rows, keys)}) {
          auto const layer = layer_of<Layer>(shape);
          for (int const bytes : {65536, 101376, 166912, 232448}) {
            CAPTURE(rows, heads, keys, shape.key_dim, bytes);
            int const need = shared_memory_for({86, 82, bytes}, layer);
            if (bytes > 65536) CHECK(need == bytes);  // every part that the kernels are made for
            (need == bytes ? fits : refusals) += 1;
            // one byte less than asked for is too little
            if (need > bytes) CHECK(refusal({86, 82, need - 1}, layer).has_value());
          }
        }
      }
    }
  }
  CHECK(refusals > 0);
  CHECK(fits > 3 * refusals);
}

}  // namespace

TEST_CASE("SMEM R143: a layer fits the device's shared memory or is refused by name and number",
          "[capability][fault]") {
  SECTION("fp32") { check_shared_memory<Fp32>(); }
  SECTION("bf16") { check_shared_memory<Bf16>(); }
  SECTION("fp8") { check_shared_memory<Fp8>(); }
}

TEST_CASE("capability: what cannot run is refused by name", "[capability][fault]") {
  for (DeviceLimits const& limits : parts) {
    auto const layer = layer_of<Bf16>(glm52(8, 131072, 64, 5000));
    Status const wide = refusal(limits, layer).value();
    CHECK_THAT(wide, refused(Errc::unsupported, "widest selection").at(0).naming(4096, 5000));
    CHECK_FALSE(refusal(limits, layer_of<Bf16>(glm52(8, 131072, 64, 4096))).has_value());

    Shape shape = glm52(8, 131072);
    shape.index_heads = 0;
    CHECK_THAT(refusal(limits, layer_of<Bf16>(shape)).value(),
               refused(Errc::bad_shape, "index_heads").at(0));
    shape = glm52(8, 131072);
    shape.value_dim = 577;
    CHECK_THAT(refusal(limits, layer_of<Bf16>(shape, "FFF", 2)).value(),
               refused(Errc::bad_shape, "value_dim").at(2).naming(576, 577));
    CHECK_THAT(refusal(limits, layer_of<Bf16>(glm52(8, 0))).value(),
               refused(Errc::bad_shape, "shape.keys"));
  }
  // Turing
  CHECK_THAT(refusal({75, 40, 65536}, layer_of<Fp8>(glm52(8, 131072))).value(),
             refused(Errc::unsupported, "compute capability").at(0).naming(80, 75));
  CHECK_THAT(refusal({75, 40, 232448}, layer_of<Fp32>(odd(1, 9), "FS", 1)).value(),
             refused(Errc::unsupported, "compute capability").at(1).naming(80, 75));
  // limits that nobody filled in
  CHECK(refusal({}, layer_of<Bf16>(glm52(8, 131072))).has_value());
}

TEST_CASE("capability: the full sort takes any k", "[capability]") {
  using Sorted = LayerOf<bf16, Plain<bf16>, Plain<bf16>, FullSortTopK>;
  for (DeviceLimits const& limits : parts) {
    auto const can = capability(limits, layer_of<Sorted>(glm52(8, 131072, 64, 100000)), plenty);
    REQUIRE(can.has_value());
    check_answer(*can, limits);
    CHECK(names(can->topk) == std::vector<std::string_view>{"full_sort_keys",
                                                            "CUB, segmented radix sort",
                                                            "full_sort_write"});
    CHECK(can->topk.scratch.bytes > std::size_t{16} * 8 * 131072);
  }
  CHECK_THAT(topk_plan({75, 40, 65536}, FullSortTopK{}, glm52(1, 10)).error(),
             refused(Errc::unsupported, "compute capability").naming(80, 75));
  CHECK_THAT(topk_plan(a100, FullSortTopK{}, glm52(1, max_position + 1)).error(),
             refused(Errc::unsupported, "keys of a row").naming(max_position, max_position + 1));
}

// ---- policies of an engine

namespace {

struct NewestTopK {
  index_t most = 0;
};

constexpr Result<StageUse> topk_plan(DeviceLimits const&, NewestTopK const& policy,
                                     Shape const& shape) noexcept {
  if (shape.top_k > policy.most) {
    return refuse(failure(Errc::unsupported, "newest keys", policy.most, shape.top_k));
  }
  return StageUse{{{"newest", 1024}}, 1};
}
template <Executor X>
constexpr Result<WorkspaceSize> topk_workspace(X const& x, NewestTopK const& policy,
                                               Shape const& shape) noexcept {
  auto const plan = topk_plan(x.limits(), policy, shape);
  if (!plan) return refuse(plan.error());
  return WorkspaceSize{512};
}

}  // namespace

TEST_CASE("capability: an engine's own policy takes part", "[capability]") {
  auto layer = layer_of<LayerOf<bf16, Plain<bf16>, Plain<bf16>, NewestTopK>>(glm52(8, 131072));
  layer.topk.most = 2048;
  auto const can = capability(a100, layer, plenty);
  REQUIRE(can.has_value());
  CHECK(names(can->topk) == std::vector<std::string_view>{"newest"});
  CHECK(can->topk.begin()->shared_bytes == 1024);
  CHECK((can->topk.rows == 8 && can->topk.scratch.bytes == 512));
  layer.topk.most = 100;
  CHECK_THAT(refusal(a100, layer).value(),
             refused(Errc::unsupported, "newest keys").at(0).naming(100, 2048));
}

// ---- the layer's own answer

namespace {

/// Of layers at random, some of which no device runs.
template <class Visit>
void for_random_layers(Visit const& visit) {
  test::Random random(4);
  auto const upto = [&](std::size_t most) { return 1 + static_cast<index_t>(random.below(most)); };
  for (int i = 0; i < 400; ++i) {
    Shape shape = i % 2 == 0 ? glm52(upto(3000) - 1, upto(200000), upto(130), upto(4600))
                             : odd(upto(3000) - 1, upto(200000), upto(4600));
    if (i % 7 == 0) shape.index_heads = upto(400);
    if (i % 11 == 0) shape.index_dim = upto(60000);
    if (i % 13 == 0) shape.value_dim = shape.key_dim + upto(3) - 2;
    DeviceLimits limits = parts[random.below(6)];
    if (i % 5 == 0) limits.shared_memory_bytes = 65536;
    if (i % 17 == 0) limits.compute_capability = 75;
    visit(shape, limits, std::size_t{1} << random.below(36), i % 3 == 0 ? 1 : 0);
  }
}

template <class Layer, class Exec>
void check_same_answer(Exec const& exec_for) {
  int refusals = 0;
  for_random_layers([&](Shape const& shape, DeviceLimits const& limits, std::size_t budget,
                        std::int32_t number) {
    CAPTURE(shape.rows, shape.keys, shape.top_k, shape.heads, shape.index_heads, shape.index_dim,
            limits.compute_capability, limits.shared_memory_bytes, budget, number);
    auto const layer = layer_of<Layer>(shape, "FS", number);
    auto const can = capability(limits, layer, budget);
    auto const size = layer.workspace(exec_for(limits), budget);
    REQUIRE(can.has_value() == size.has_value());
    if (can) {
      CHECK(can->workspace.bytes == size->bytes);
      check_answer(*can, limits);
    } else {
      CHECK(same(can.error(), size.error()));
      refusals += can.error().code == Errc::unsupported ? 1 : 0;
    }
  });
  CHECK(refusals > 20);
}

}  // namespace

TEST_CASE("capability: the planner's size query gives the same answer", "[capability]") {
  auto const planner = [](DeviceLimits const& limits) { return CudaPlanner{limits}; };
  check_same_answer<Fp32>(planner);
  check_same_answer<Bf16>(planner);
  check_same_answer<Fp8>(planner);
}

#if defined(INDEXSHARE_TEST_CUDA)

TEST_CASE("capability: a CUDA executor's size query gives the same answer", "[capability]") {
  auto const exec = [](DeviceLimits const& limits) {
    return CudaExec(static_cast<cudaStream_t>(nullptr), limits);
  };
  check_same_answer<Fp32>(exec);
  check_same_answer<LayerOf<float, Plain<float>, Plain<float>, FullSortTopK>>(exec);
}

TEST_CASE("capability: run refuses with the same Status", "[capability][fault]") {
  test::Cuda const x;
  Schedule const share("FS");
  Shape deep = small_shape;  // a query of 20000 lanes fits no block
  deep.index_dim = 20000;
  Shape wide = small_shape;
  wide.key_dim = 2000;
  Shape many = small_shape;
  many.keys = 20000;  // top-k of long rows
  struct Case {
    Shape shape;
    DeviceLimits limits;
  };
  for (Case const& c :
       {Case{small_shape, {75, 40, 232448}}, Case{small_shape, {90, 132, 1024}},
        Case{wide, {86, 82, 40000}}, Case{many, {86, 82, 65536}}, Case{deep, {80, 108, 65536}}}) {
    CAPTURE(c.shape.index_dim, c.shape.key_dim, c.shape.keys, c.limits.shared_memory_bytes);
    Model<> model(share, 1, c.shape);
    Session<CudaExec, Model<>, Schedule> session(x, model, share, mixed_rows());
    session.x = CudaExec(x.stream(), c.limits);
    Status const refused_by_query =
        refusal(c.limits, layer_of<Fp32>(c.shape), session.workspace().bytes).value();
    Status const refused_by_run = session.run(0);
    CHECK(refused_by_query.code == Errc::unsupported);
    CAPTURE(refused_by_query, refused_by_run);
    CHECK(same(refused_by_query, refused_by_run));
    CHECK(session.untouched_outputs(0));
  }
}

#endif
