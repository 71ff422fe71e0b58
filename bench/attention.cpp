// SPDX-License-Identifier: Apache-2.0
#include "data.hpp"

#include <indexshare/indexshare.hpp>

#include <memory>

/// @file Attention to top_k keys per row at random positions, sorted.

namespace bench {
namespace {

constexpr float scale = 0.0625f;

/// Slots of one position in each of top_k equal parts of a row's keys.
Array<position_t> scattered_slots(Batch const& batch) {
  index_t const top_k = batch.layout().shape().top_k;
  auto const rows = batch.view();
  return {batch.layout().rows() * top_k, [&](index_t i) {
            index_t const row = i / top_k;
            index_t const begin = batch.length(row) * (i % top_k) / top_k;
            index_t const end = batch.length(row) * (i % top_k + 1) / top_k;
            index_t const position = begin + mixed(5, i) % (end - begin);
            return rows.kv_pages.slot(rows.requests(row), position);
          }};
}

template <class Query, class Format>
struct AttentionData {
  using Attention = SparseMla<Query, Format>;

  Batch batch;
  Shape shape;
  Array<Query> q;
  Cache<Format> kv;
  Array<position_t> slots;
  Array<position_t> counts;
  Array<float> out;
  HostMemory memory;

  AttentionData(Exec const& exec, Layout const& layout)
      : batch(layout),
        shape(layout.shape()),
        q(uniform_array<Query>(shape.rows * shape.heads * shape.key_dim, 6)),
        kv(batch, shape.key_dim, 7),
        slots(scattered_slots(batch)),
        counts(shape.rows, [&](index_t) { return static_cast<position_t>(shape.top_k); }),
        out(poisoned(shape.rows * shape.heads * shape.value_dim)),
        memory(required(attention_workspace(exec, Attention{}, shape))) {}

  /// The first `rows` rows with the first `heads` heads.
  typename Attention::template inputs<Space::host> inputs(index_t rows, index_t heads) const {
    auto const all = make_query<Space::host>(q.data(), Rows{shape.rows}, Heads{shape.heads},
                                             HeadDim{shape.key_dim});
    return {make_strided<Space::host, Query const, 3>(q.data(), {rows, heads, shape.key_dim},
                                                      {all.stride(0), all.stride(1), 1}),
            kv.view(),
            scale,
            {}};
  }
  GroupPlan<Space::host> plan() const {
    return {make_dense<Space::host, position_t const, 2>(slots.data(), {shape.rows, shape.top_k}),
            make_dense<Space::host, position_t const, 1>(counts.data(), {shape.rows})};
  }
};

/// Every output is there, and the first head of the first row is the reference's.
template <class Data>
void check_outputs(Data const& data) {
  check_means(data.out);
  Shape shape = data.shape.with_rows(1);
  shape.heads = 1;
  Array<float> const expected = poisoned(shape.value_dim);
  typename Data::Attention const attention;
  HostMemory const memory(required(attention_workspace(ReferenceExec{}, attention, shape)));
  require(attention_run(
      ReferenceExec{}, attention, data.inputs(1, 1), data.batch.view(), RowRange{0, 1}, data.plan(),
      {make_output<Space::host>(expected.data(), Rows{1}, Heads{1}, HeadDim{shape.value_dim}), {}},
      shape, memory.view()));
  for (index_t v = 0; v < shape.value_dim; ++v) {
    require(std::fabs(data.out.data()[v] - expected.data()[v]) < 1e-4f, "an attention output");
  }
}

template <class Query, class Format>
Call attention_call(Exec const& exec, Layout const& layout) {
  using Data = AttentionData<Query, Format>;
  auto const data = std::make_shared<Data>(exec, layout);
  Shape const shape = data->shape;
  auto const out = make_output<Space::host>(data->out.data(), Rows{shape.rows}, Heads{shape.heads},
                                            HeadDim{shape.value_dim});
  return {{.flops = data->batch.attention_flops()},
          [=] {
            return attention_run(exec, typename Data::Attention{},
                                 data->inputs(shape.rows, shape.heads), data->batch.view(),
                                 RowRange{0, shape.rows}, data->plan(), {out, {}}, shape,
                                 data->memory.view());
          },
          [=] { check_outputs(*data); }};
}

template <class Query, class Format>
void add_type(std::vector<Case>& cases, std::string const& type,
              std::vector<Layout> const& layouts) {
  for (Layout const& layout : layouts) {
    cases.push_back({"attention/" + type + "/" + layout.name(), [=](Exec const& exec) {
                       return attention_call<Query, Format>(exec, layout);
                     }});
  }
}

}  // namespace

std::vector<Case> attention_cases() {
  std::vector<Layout> const layouts = stage_layouts();
  std::vector<Case> cases;
  add_type<bf16, format::Plain<bf16>>(cases, "bf16", layouts);
  add_type<fp16, format::Plain<fp16>>(cases, "fp16", layouts);
  add_type<bf16, format::LatentE4m3>(cases, "e4m3", layouts);
  return cases;
}

}  // namespace bench
