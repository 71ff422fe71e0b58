// SPDX-License-Identifier: Apache-2.0
#include <indexshare/indexshare.hpp>

#include <benchmark/benchmark.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <random>
#include <vector>

/// @file The stages of one decode row at GLM-5.2's shape on the host back end, one thread. Rates
/// are of the stated arithmetic, so that runs on different machines can be held against their
/// peaks.

namespace {

using namespace indexshare;

constexpr Shape glm52(index_t keys) {
  return {.rows = 1,
          .keys = keys,
          .top_k = 2048,
          .index_heads = 32,
          .index_dim = 128,
          .heads = 64,
          .key_dim = 576,
          .value_dim = 512};
}

std::size_t at(index_t i) { return static_cast<std::size_t>(i); }

template <class T>
std::vector<T> random_values(index_t count, std::uint32_t seed) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal;
  std::vector<T> values(at(count));
  for (T& value : values) value = from_float<T>(normal(generator));
  return values;
}

/// One request of `keys` tokens in a contiguous cache and its last row.
struct OneRow {
  position_t length;
  position_t request = 0;
  explicit OneRow(index_t keys) : length(static_cast<position_t>(keys)) {}
  RowBatch<Space::host> batch() const {
    auto const table = make_contiguous_table<Space::host>(Keys{length});
    return {make_lengths<Space::host>(&length, Rows{1}),
            make_lengths<Space::host>(&request, Rows{1}), table, table};
  }
};

void rate(benchmark::State& state, double flops) {
  state.counters["FLOP/s"] = benchmark::Counter(flops * static_cast<double>(state.iterations()),
                                                benchmark::Counter::kIsRate);
}

void indexer_decode(benchmark::State& state) {
  using Indexer = ReluDotIndexer<bf16, format::Plain<bf16>>;
  Shape const shape = glm52(state.range(0));
  auto const q = random_values<bf16>(shape.index_heads * shape.index_dim, 1);
  auto const weights = random_values<float>(shape.index_heads, 2);
  auto const keys = random_values<bf16>(shape.keys * shape.index_dim, 3);
  std::vector<float> scores(at(shape.keys));
  OneRow const row(shape.keys);
  Indexer::inputs<Space::host> const in{
      make_query<Space::host>(q.data(), Rows{1}, Heads{shape.index_heads},
                              HeadDim{shape.index_dim}),
      make_head_weights<Space::host>(weights.data(), Rows{1}, Heads{shape.index_heads}),
      make_contiguous_cache<Space::host>(keys.data(), Requests{1}, Keys{shape.keys},
                                         HeadDim{shape.index_dim})};
  HostMemory const memory(indexer_workspace(HostExec<>{}, Indexer{}, shape).value());
  auto const out = make_scores<Space::host>(scores.data(), Rows{1}, Keys{shape.keys});
  for (auto _ : state) {
    Status const status = indexer_score(HostExec<>{}, Indexer{}, in, row.batch(),
                                        ScoreRequest{{0, 1}, shape.top_k}, out, memory.view());
    if (!status.ok()) state.SkipWithError(status.what);
    benchmark::DoNotOptimize(scores.data());
  }
  rate(state, 2.0 * static_cast<double>(shape.index_heads * shape.index_dim * shape.keys));
}

void topk(benchmark::State& state) {
  Shape const shape = glm52(state.range(0));
  constexpr index_t arrays = 8;  // one array repeated flatters branch predictors
  auto const scores = random_values<float>(arrays * shape.keys, 1);
  std::vector<position_t> indices(at(shape.top_k));
  position_t count = 0;
  OneRow const row(shape.keys);
  auto const out = make_selection<Space::host>(indices.data(), &count, Rows{1}, TopK{shape.top_k});
  index_t next = 0;
  for (auto _ : state) {
    ScoreView<Space::host, float const> const view = make_scores<Space::host, float const>(
        scores.data() + next++ % arrays * shape.keys, Rows{1}, Keys{shape.keys});
    Status const status =
        topk_select(HostExec<>{}, RadixTopK{}, view, row.batch().lengths, out, Workspace{});
    if (!status.ok()) state.SkipWithError(status.what);
    benchmark::DoNotOptimize(indices.data());
  }
  state.counters["scores/s"] = benchmark::Counter(
      static_cast<double>(shape.keys * state.iterations()), benchmark::Counter::kIsRate);
}

void attention_decode(benchmark::State& state) {
  using Attention = SparseMla<bf16, format::Plain<bf16>>;
  Shape const shape = glm52(state.range(0));
  auto const q = random_values<bf16>(shape.heads * shape.key_dim, 1);
  auto const kv = random_values<bf16>(shape.keys * shape.key_dim, 2);
  std::vector<float> out(at(shape.heads * shape.value_dim));
  std::vector<position_t> slots(at(shape.top_k));
  std::mt19937 generator(3);
  for (position_t& slot : slots) {
    slot = static_cast<position_t>(generator() % static_cast<std::uint32_t>(shape.keys));
  }
  std::sort(slots.begin(), slots.end());
  auto const count = static_cast<position_t>(shape.top_k);
  GroupPlan<Space::host> const plan{
      make_dense<Space::host, position_t const, 2>(slots.data(), {1, shape.top_k}),
      make_dense<Space::host, position_t const, 1>(&count, {1})};
  OneRow const row(shape.keys);
  Attention::inputs<Space::host> const in{
      make_query<Space::host>(q.data(), Rows{1}, Heads{shape.heads}, HeadDim{shape.key_dim}),
      make_contiguous_cache<Space::host>(kv.data(), Requests{1}, Keys{shape.keys},
                                         HeadDim{shape.key_dim}),
      0.0625f,
      {}};
  Attention::outputs<Space::host> const outputs{
      make_output<Space::host>(out.data(), Rows{1}, Heads{shape.heads}, HeadDim{shape.value_dim}),
      {}};
  HostMemory const memory(attention_workspace(HostExec<>{}, Attention{}, shape).value());
  for (auto _ : state) {
    Status const status = attention_run(HostExec<>{}, Attention{}, in, row.batch(), RowRange{0, 1},
                                        plan, outputs, shape, memory.view());
    if (!status.ok()) state.SkipWithError(status.what);
    benchmark::DoNotOptimize(out.data());
  }
  rate(state,
       2.0 * static_cast<double>(shape.heads * shape.top_k * (shape.key_dim + shape.value_dim)));
}

BENCHMARK(indexer_decode)->Arg(8192)->Arg(65536)->Unit(benchmark::kMillisecond);
BENCHMARK(topk)->Arg(8192)->Arg(65536)->Unit(benchmark::kMicrosecond);
BENCHMARK(attention_decode)->Arg(65536)->Unit(benchmark::kMillisecond);

}  // namespace
