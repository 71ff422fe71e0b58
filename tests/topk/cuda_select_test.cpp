// SPDX-License-Identifier: Apache-2.0
//
// RadixTopK on a device against the host's, byte for byte: with the kernels' own sizes, and with
// sizes so small that short rows reach every branch.
#include <indexshare/cuda/topk.cuh>

#include <catch2/catch_template_test_macros.hpp>
#include <catch2/catch_test_macros.hpp>

#include "../cuda/graph.hpp"
#include "cuda_oracle.hpp"

#include <algorithm>
#include <cstddef>
#include <string_view>
#include <vector>

using namespace cuda_topk_test;

namespace {

struct SmallNarrow {
  static constexpr int threads = 32;
  static constexpr int digit_bits = 8;
  static constexpr int row_keys = 64;
};
struct SmallWide {
  static constexpr index_t top_k = 300;
  static constexpr int threads = 64;
  static constexpr int digit_bits = 8;
  static constexpr int row_keys = 512;
  static constexpr int sample_rate = 8;
  static constexpr int least_sample = 64;
  static constexpr int most_sample = 256;
  static constexpr int scores_per_thread = 4;
  static constexpr int chunk = threads * scores_per_thread;
  static constexpr int candidates = 640;
};

/// Scratch for a call with small sizes, and what its kernels leave there.
struct SmallScratch {
  Shape shape;
  index_t slack;
  detail::TopKBuffers buffers;
  test::Scratch memory;

  SmallScratch(test::Cuda const& x, Shape const& s, index_t slack_)
      : shape(s), slack(slack_), memory(plan(x)->workspace) {
    WorkspaceCarver carver(memory.get());
    buffers = detail::carve_topk<SmallWide>(carver, shape.rows, plan(x)->row_chunks);
  }
  Result<TopKPlan> plan(test::Cuda const& x) const {
    return detail::plan_topk<SmallNarrow, SmallWide>(x.limits(), shape, slack);
  }
  std::uint32_t candidates(index_t row) const { return buffers.counters[row].candidates; }
  /// Whether the row was selected from its scores because its candidates would not do.
  bool fell_back(index_t row) const {
    return candidates(row) < shape.top_k || candidates(row) > SmallWide::candidates;
  }
};

template <class Score>
Status select_small(test::Cuda const& x, Batch<Score>& batch, Workspace ws) {
  return detail::radix_select<SmallNarrow, SmallWide, Score>(
      x, batch.template scores<device>(), batch.template lengths<device>(),
      batch.template selection<device>(), ws);
}

template <class Score>
void check_small(test::Cuda const& x, Batch<Score>& batch) {
  SmallScratch scratch(x, batch.shape(), detail::most_line_elements - 1);
  for (int repeat = 0; repeat < 2; ++repeat) {  // the second run finds the first one's counters
    batch.poison_outputs();
    REQUIRE(select_small(x, batch, scratch.memory.get()).ok());
    test::finish(x);
    CHECK(equals_host(batch));
  }
}

template <class Score>
void check_full(test::Cuda const& x, Batch<Score>& batch) {
  auto const need = topk_workspace(x, RadixTopK{}, batch.shape());
  REQUIRE(need.has_value());
  test::Scratch scratch(*need);
  for (int repeat = 0; repeat < 2; ++repeat) {
    batch.poison_outputs();
    REQUIRE(topk_select(x, RadixTopK{}, batch.template scores<device>(),
                        batch.template lengths<device>(), batch.template selection<device>(),
                        scratch.get())
                .ok());
    test::finish(x);
    CHECK(equals_host(batch));
  }
}

/// A row of `length` zeros in which exactly `found` scores pass the threshold of the sample: the
/// sampled 1.0s that decide it, and 2.0s where the sample does not look.
std::vector<float> row_with_candidates(std::uint32_t length, std::uint32_t k, std::uint32_t found) {
  auto const sample = detail::make_topk_sample<SmallWide, float>(length, 0);
  std::uint32_t const rank = detail::topk_sample_rank<SmallWide>(sample.size(), length, k);
  std::vector<float> scores(length, 0.0f);
  std::vector<bool> sampled(length, false);
  for (std::uint32_t i = 0; i < sample.size(); ++i) {
    sampled[sample.position(i)] = true;
    if (i < rank) scores[sample.position(i)] = 1.0f;
  }
  for (std::uint32_t s = 0; s < length && found > rank; ++s) {
    if (sampled[s]) continue;
    scores[s] = 2.0f;
    --found;
  }
  return scores;
}

}  // namespace

TEST_CASE("CUDA top-k: small sizes, every kind of row, lengths around every boundary", "[topk]") {
  test::Cuda const x;
  for (int kind = 0; kind <= static_cast<int>(Kind::last); ++kind) {
    CAPTURE(kind);
    std::vector<index_t> const lengths{0,   1,   31,   32,   33,   63,   64,   65,   99,
                                       100, 101, 255,  256,  257,  511,  512,  513,  767,
                                       768, 769, 1023, 1024, 1025, 1500, 1900, 2047, 2048};
    for (index_t const k : {1, 100, 300}) {
      CAPTURE(k);
      Batch<float> batch(static_cast<index_t>(lengths.size()), 2048, k);
      for (std::size_t r = 0; r < lengths.size(); ++r) {
        batch.set(static_cast<index_t>(r),
                  make_scores_of(static_cast<Kind>(kind), lengths[r], r + 1));
      }
      check_small(x, batch);
    }
  }
}

TEST_CASE("CUDA top-k: small sizes, widths around every boundary", "[topk]") {
  test::Cuda const x;
  for (index_t const width : {0, 1, 63, 64, 65, 511, 512, 513, 640, 768, 769}) {
    for (index_t const k : {1, 64, 300}) {
      CAPTURE(width, k);
      Batch<float> batch(3, width, k);
      batch.set(0, make_scores_of(Kind::normal, width, 5));
      batch.set(1, make_scores_of(Kind::two_values, width, 6), width + 10);
      batch.set(2, {}, -3);
      check_small(x, batch);
    }
  }
}

TEMPLATE_TEST_CASE("CUDA top-k: rows at any address, outputs with gaps, every element type",
                   "[topk]", float, bf16, fp16, e4m3) {
  test::Cuda const x;
  for (index_t const width : {60, 400, 1300}) {
    for (Layout const layout : {Layout{}, Layout{1, 0, 0, 1}, Layout{7, 1, 0, 1},
                                Layout{0, 13, 5, 1}, Layout{31, 33, 2, 3}, Layout{64, 64, 0, 2}}) {
      CAPTURE(width, layout.score_offset, layout.score_pad, layout.count_step);
      Batch<TestType> batch(6, width, 50, layout);
      for (index_t row = 0; row < 6; ++row) {
        auto const kind = row % 2 == 0 ? Kind::normal : Kind::zeros_and_many;
        batch.set(row, make_scores_of(kind, width, static_cast<std::uint64_t>(row)),
                  width - 17 * row);
      }
      check_small(x, batch);
    }
  }
}

TEST_CASE("CUDA top-k: candidates up to the brim of their buffer, and one more", "[topk]") {
  test::Cuda const x;
  constexpr std::uint32_t length = 2048;
  constexpr index_t k = 100;
  constexpr std::uint32_t most = SmallWide::candidates;
  Batch<float> batch(4, length, k);
  std::uint32_t const found[] = {most - 1, most, most + 1, 1500};
  for (index_t row = 0; row < 4; ++row) {
    batch.set(row, row_with_candidates(length, k, found[row]));
  }
  SmallScratch scratch(x, batch.shape(), 0);
  REQUIRE(select_small(x, batch, scratch.memory.get()).ok());
  test::finish(x);
  for (index_t row = 0; row < 4; ++row) {
    CAPTURE(row);
    CHECK(scratch.candidates(row) == found[row]);
    CHECK(scratch.fell_back(row) == (row >= 2));
  }
  CHECK(equals_host(batch));
}

TEST_CASE("CUDA top-k: a row made against the sample is selected from its scores", "[topk]") {
  test::Cuda const x;
  constexpr std::uint32_t length = 3000;
  constexpr index_t k = 200;
  auto const sample = detail::make_topk_sample<SmallWide, float>(length, 0);
  // the sample sees only the best scores, then only the worst; ties and none
  for (float const step : {0.0f, 1e-3f}) {
    Batch<float> batch(2, length, k);
    for (index_t row = 0; row < 2; ++row) {
      std::vector<float> scores(length);
      for (std::uint32_t s = 0; s < length; ++s) {
        scores[s] = static_cast<float>(row) + step * static_cast<float>(s * 37 % length);
      }
      for (std::uint32_t i = 0; i < sample.size(); ++i) {
        scores[sample.position(i)] += row == 0 ? 10.0f : -10.0f;
      }
      batch.set(row, scores);
    }
    SmallScratch scratch(x, batch.shape(), 0);
    REQUIRE(select_small(x, batch, scratch.memory.get()).ok());
    test::finish(x);
    CHECK(scratch.candidates(0) < k);  // fewer of the best than are wanted
    CHECK(scratch.candidates(1) > SmallWide::candidates);
    CHECK(equals_host(batch));
  }
}

TEST_CASE("CUDA top-k: random rows do not fall back", "[topk]") {
  test::Cuda const x;
  Batch<float> batch(40, 2048, 100);
  for (index_t row = 0; row < 40; ++row) {
    auto const kind = static_cast<Kind>(row % (static_cast<int>(Kind::last) + 1));
    batch.set(row, make_scores_of(kind, 2048, static_cast<std::uint64_t>(row)));
  }
  SmallScratch scratch(x, batch.shape(), 0);
  REQUIRE(select_small(x, batch, scratch.memory.get()).ok());
  test::finish(x);
  for (index_t row = 0; row < 40; ++row) {
    CAPTURE(row);
    CHECK(!scratch.fell_back(row));
  }
  CHECK(equals_host(batch));
}

TEST_CASE("CUDA top-k: more chunks than shared memory has room for", "[topk]") {
  test::Cuda const x;
  Batch<float> batch(3, 40000, 150);
  batch.set(0, make_scores_of(Kind::normal, 40000, 1));
  batch.set(1, make_scores_of(Kind::two_values, 40000, 2));
  batch.set(2, make_scores_of(Kind::up, 39990, 3));
  check_small(x, batch);
}

TEST_CASE("CUDA top-k: a row does not depend on its batch or address", "[topk]") {
  test::Cuda const x;
  std::vector<position_t> first;
  for (index_t const rows : {1, 2, 9}) {
    for (Layout const layout : {Layout{}, Layout{5, 3, 0, 1}}) {
      Batch<float> batch(rows, 1800, 120, layout);
      for (index_t row = 0; row < rows; ++row) {
        batch.set(row, make_scores_of(Kind::zeros_and_few, 1800 - 100 * row,
                                      row == rows - 1 ? 7 : static_cast<std::uint64_t>(row) + 50));
      }
      batch.set(rows - 1, make_scores_of(Kind::two_values, 1700, 7));
      check_small(x, batch);
      auto const all = batch.bytes().first;
      std::vector<position_t> const last(all.end() - 120, all.end());
      if (first.empty()) first = last;
      CHECK(last == first);
    }
  }
}

TEST_CASE("CUDA top-k: the kernels' own sizes at their boundaries", "[topk]") {
  test::Cuda const x;
  for (index_t const k : {1, 2048, 4096}) {
    std::vector<index_t> const lengths{2047, 2048, 2049, 16383, 16384, 16385, 24575, 24576, 24577};
    Batch<float> batch(static_cast<index_t>(lengths.size()), 24577, k);
    for (std::size_t r = 0; r < lengths.size(); ++r) {
      auto const kind = r % 2 == 0 ? Kind::normal : Kind::zeros_and_few;
      batch.set(static_cast<index_t>(r), make_scores_of(kind, lengths[r], r));
    }
    check_full(x, batch);
  }
  for (index_t const width : {2048, 2049, 16384}) {
    Batch<bf16> batch(2, width, 2000);
    batch.set(0, make_scores_of(Kind::normal, width, 3));
    batch.set(1, make_scores_of(Kind::recent, width, 4));
    check_full(x, batch);
  }
}

TEST_CASE("CUDA top-k: more rows than a grid's second dimension", "[topk]") {
  test::Cuda const x;
  Batch<float> batch(66000, 5, 2);
  for (index_t row = 0; row < 66000; ++row) {
    batch.set(row, test::Random(static_cast<std::uint64_t>(row)).normals(5), row % 7);
  }
  check_full(x, batch);
}

TEST_CASE("GRAPH R134, R135, R136: a captured selection follows lengths and scores",
          "[topk][fault]") {
  test::Cuda const x;
  Batch<float> batch(5, 1600, 90);
  auto const fill = [&](std::uint64_t seed, index_t cut) {
    for (index_t row = 0; row < 5; ++row) {
      batch.set(row,
                make_scores_of(Kind::zeros_and_many, 1600, seed + static_cast<std::uint64_t>(row)),
                std::max<index_t>(0, 1600 - cut * row));
    }
  };
  for (index_t row = 0; row < 5; ++row) batch.set(row, {}, 0);  // captured with nothing to do
  SmallScratch scratch(x, batch.shape(), detail::most_line_elements - 1);
  for (auto const mode : {cudaStreamCaptureModeGlobal, cudaStreamCaptureModeThreadLocal,
                          cudaStreamCaptureModeRelaxed}) {
    cuda_test::Graph const graph(
        x, [&] { REQUIRE(select_small(x, batch, scratch.memory.get()).ok()); }, mode);
    CHECK(graph.nodes().size() == 2);
    CHECK(graph.only_device_work());
    for (index_t const cut : {0, 399, 0, 700, 1600}) {
      fill(static_cast<std::uint64_t>(cut) + 11, cut);
      for (int replay = 0; replay < 2; ++replay) {
        batch.poison_outputs();
        graph.replay();
        CHECK(equals_host(batch));
      }
    }
  }
}

TEST_CASE("CUDA top-k: two calls in flight with two workspaces", "[topk]") {
  test::Cuda const x;
  cudaStream_t other = nullptr;
  test::require(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking));
  Batch<float> a(4, 1500, 77);
  Batch<float> b(4, 1500, 77);
  for (index_t row = 0; row < 4; ++row) {
    a.set(row, make_scores_of(Kind::normal, 1500, static_cast<std::uint64_t>(row)));
    b.set(row, make_scores_of(Kind::two_values, 1500, static_cast<std::uint64_t>(row)));
  }
  SmallScratch first(x, a.shape(), 127), second(x, b.shape(), 127);
  CHECK(select_small(x, a, first.memory.get()).ok());
  CHECK(detail::radix_select<SmallNarrow, SmallWide, float>(
            CudaExec(other, x.limits()), b.scores<device>(), b.lengths<device>(),
            b.selection<device>(), second.memory.get())
            .ok());
  test::finish(x);
  test::require(cudaStreamSynchronize(other));
  CHECK(equals_host(a));
  CHECK(equals_host(b));
  test::require(cudaStreamDestroy(other));
}

TEST_CASE("CUDA top-k: refusals come before any launch", "[topk]") {
  test::Cuda const x;
  Batch<float> batch(2, 20000, 16);
  for (index_t row = 0; row < 2; ++row) batch.set(row, make_scores_of(Kind::normal, 20000, 1));
  auto const need = topk_workspace(x, RadixTopK{}, batch.shape());
  REQUIRE(need.has_value());
  test::Scratch small(WorkspaceSize{need->bytes / 2});
  auto const before = batch.bytes();
  auto const call = [&](CudaExec const& exec, Workspace ws) {
    return topk_select(exec, RadixTopK{}, batch.scores<device>(), batch.lengths<device>(),
                       batch.selection<device>(), ws);
  };
  Status const status = call(x, small.get());
  CHECK(status.code == Errc::workspace_too_small);
  CHECK(status.got == static_cast<std::int64_t>(need->bytes / 2));
  CHECK(call(x, {}).code == Errc::workspace_too_small);
  test::Scratch enough(WorkspaceSize{need->bytes + 4});
  Workspace const shifted{static_cast<std::byte*>(enough.get().data) + 4, need->bytes};
  CHECK(call(x, shifted).code == Errc::bad_value);
  CHECK(call(x, {nullptr, need->bytes}).code == Errc::missing_input);
  DeviceLimits old = x.limits();
  old.compute_capability = 75;
  CHECK(call(CudaExec(x.stream(), old), enough.get()).code == Errc::unsupported);
  DeviceLimits tight = x.limits();
  tight.shared_memory_bytes = 65536;
  CHECK(call(CudaExec(x.stream(), tight), enough.get()).code == Errc::unsupported);
  CHECK(topk_workspace(CudaExec(x.stream(), tight), RadixTopK{}, batch.shape()).error().code ==
        Errc::unsupported);
  Shape wide = batch.shape();
  wide.top_k = 4097;
  CHECK(topk_workspace(x, RadixTopK{}, wide).error().code == Errc::unsupported);
  test::finish(x);
  CHECK(batch.bytes() == before);
  CHECK(call(x, enough.get()).ok());
  test::finish(x);
  CHECK(equals_host(batch));
}
