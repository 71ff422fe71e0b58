// SPDX-License-Identifier: Apache-2.0
#include "data.hpp"

#include <indexshare/indexshare.hpp>

#include <memory>

/// @file Scores, and selections from them.

namespace bench {
namespace {

/// Index queries, weights and keys of a batch.
template <class Query, class Format>
struct IndexerData {
  using Indexer = ReluDotIndexer<Query, Format>;

  Batch batch;
  Shape shape;
  Array<Query> q;
  Array<float> weights;
  Cache<Format> keys;

  explicit IndexerData(Layout const& layout)
      : batch(layout),
        shape(layout.shape()),
        q(uniform_array<Query>(shape.rows * shape.index_heads * shape.index_dim, 2)),
        weights(uniform_array<float>(shape.rows * shape.index_heads, 3)),
        keys(batch, shape.index_dim, 4) {}

  typename Indexer::template inputs<Space::host> inputs() const {
    Heads const heads{shape.index_heads};
    return {make_query<Space::host>(q.data(), Rows{shape.rows}, heads, HeadDim{shape.index_dim}),
            make_head_weights<Space::host>(weights.data(), Rows{shape.rows}, heads), keys.view()};
  }
  Work work() const { return {.flops = batch.score_flops()}; }
};

/// Every score is there, and the first of the first row are those of the reference.
template <class Data>
void check_scores(Data const& data, ScoreView<Space::host> const& scores) {
  for (index_t row = 0; row < data.shape.rows; ++row) {
    float const* const first = &scores(row, 0);
    require(std::all_of(first, first + data.batch.length(row),
                        [](float x) { return std::isfinite(x); }),
            "a score is missing");
  }
  constexpr position_t sample = 64;
  position_t const length = sample;
  Array<float> const expected = poisoned(sample);
  auto batch = data.batch.view();
  batch.lengths = make_lengths<Space::host>(&length, Rows{1});
  typename Data::Indexer const indexer;
  HostMemory const memory(required(indexer_workspace(ReferenceExec{}, indexer, data.shape)));
  require(indexer_score(ReferenceExec{}, indexer, data.inputs(), batch, ScoreRequest{{0, 1}, 0},
                        make_scores<Space::host>(expected.data(), Rows{1}, Keys{sample}),
                        memory.view()));
  for (index_t s = 0; s < sample; ++s) {
    require(std::fabs(scores(0, s) - expected.data()[s]) < 1e-3f, "a score");
  }
}

template <class Query, class Format>
Call score_call(Exec const& exec, Layout const& layout) {
  struct Data : IndexerData<Query, Format> {
    using IndexerData<Query, Format>::IndexerData;
    Array<float> scores = poisoned(this->shape.rows * this->shape.keys);
    HostMemory memory;
  };
  auto const data = std::make_shared<Data>(layout);
  typename Data::Indexer const indexer;
  data->memory = HostMemory(required(indexer_workspace(exec, indexer, data->shape)));
  auto const scores =
      make_scores<Space::host>(data->scores.data(), Rows{data->shape.rows}, Keys{data->shape.keys});
  return {data->work(),
          [=] {
            return indexer_score(exec, indexer, data->inputs(), data->batch.view(),
                                 ScoreRequest{{0, data->shape.rows}, data->shape.top_k}, scores,
                                 data->memory.view());
          },
          [=] { check_scores(*data, scores); }};
}

template <class Query, class Format>
Call select_call(Exec const& exec, Layout const& layout) {
  struct Data : IndexerData<Query, Format> {
    using IndexerData<Query, Format>::IndexerData;
    Array<position_t> indices{this->shape.rows * this->shape.top_k};
    Array<position_t> counts{this->shape.rows};
    HostMemory memory;
  };
  auto const data = std::make_shared<Data>(layout);
  typename Data::Indexer const indexer;
  data->memory = HostMemory(
      required(select_workspace(exec, indexer, RadixTopK{}, data->shape, scratch_budget)));
  auto const selection = make_selection<Space::host>(
      data->indices.data(), data->counts.data(), Rows{data->shape.rows}, TopK{data->shape.top_k});
  return {data->work(),
          [=] {
            return select(exec, indexer, RadixTopK{}, data->inputs(), data->batch.view(),
                          data->shape, selection, data->memory.view());
          },
          [=] {
            check_selection({selection.indices, selection.counts}, data->batch);
          }};
}

template <class Query, class Format>
void add_type(std::vector<Case>& cases, std::string const& type,
              std::vector<Layout> const& layouts) {
  for (Layout const& layout : layouts) {
    std::string const name = type + "/" + layout.name();
    cases.push_back({"score/" + name,
                     [=](Exec const& exec) { return score_call<Query, Format>(exec, layout); }});
    cases.push_back({"select/" + name,
                     [=](Exec const& exec) { return select_call<Query, Format>(exec, layout); }});
  }
}

}  // namespace

std::vector<Case> score_cases() {
  std::vector<Layout> const layouts = stage_layouts();
  std::vector<Case> cases;
  add_type<bf16, format::Plain<bf16>>(cases, "bf16", layouts);
  add_type<fp16, format::Plain<fp16>>(cases, "fp16", layouts);
  add_type<float, format::Plain<float>>(cases, "fp32", layouts);
  add_type<bf16, format::IndexKeyE4m3>(cases, "e4m3", layouts);
  return cases;
}

}  // namespace bench
