// SPDX-License-Identifier: Apache-2.0
#include "golden_family.hpp"

#include "executors.hpp"

#include <catch2/catch_template_test_macros.hpp>
#include <catch2/catch_test_macros.hpp>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <map>
#include <string>
#include <vector>

using namespace test;
using indexshare::index_t;
using indexshare::position_t;
using programs::Quantity;
constexpr auto host = indexshare::Space::host;

namespace {

/// As the comparison measures errors; fp32 sums of up to 80 products in another order
/// than transformers'.
constexpr double tolerance = 3e-6;

template <class X>
programs::Recording run_on(GoldenFamily const& family, indexshare::LaneBasis basis, X const& exec) {
  auto const front_end = indexshare::make_front_end(family.config.model, basis);
  Run<X> run(exec, *front_end, programs::TokenBatch::of(family.recording));
  programs::RecordingWriter writer;
  run.describe(writer);
  for (std::int32_t layer = 0; layer < family.config.plan.total_layers(); ++layer) {
    auto const loaded = family.layer(layer);
    run.run(family.config.plan, layer, loaded.views(), family.hidden(layer));
    run.record(writer, layer);
  }
  return taken(programs::Recording::parse("ours", taken(writer.bytes())));
}

}  // namespace

TEMPLATE_LIST_TEST_CASE("Golden families: every quantity from hidden states to module output", "",
                        Executors) {
  for (char const* const name : golden_families) {
    GoldenFamily const family(name);
    auto const ours = run_on(family, indexshare::LaneBasis::natural, TestType{});
    auto const report = compare(ours, family, tolerance);
    std::map<Quantity, double> worst;
    std::size_t rows = 0;
    for (programs::LayerResult const& layer : report.layers) {
      for (programs::QuantityResult const& result : layer.quantities) {
        INFO(name << " layer " << layer.layer << " "
                  << std::string(programs::spec_of(result.id).name) << " error " << result.error);
        CHECK(result.verdict == programs::Verdict::same);
        worst[result.id] = std::max(worst[result.id], result.error);
      }
      REQUIRE(layer.selection);
      CHECK(layer.selection->different.empty());
      CHECK(layer.selection->mean_overlap == 1);
      CHECK(layer.reuse_faults.empty());
      rows += layer.selection->rows;
    }
    CHECK(report.layers.size() == static_cast<std::size_t>(family.config.plan.total_layers()));
    CHECK(report.first_difference() == nullptr);
    // every quantity that the family has was compared
    CHECK(worst.size() == programs::quantity_count - (family.config.model.gated_output ? 0 : 1));
    std::printf("%-13s %zu selections equal; scores %.1e, lse %.1e, output %.1e\n", name, rows,
                worst[Quantity::scores], worst[Quantity::lse], worst[Quantity::output]);
  }
}

TEST_CASE("Golden families: a Hadamard basis on both sides changes no selection") {
  for (char const* const name : golden_families) {
    GoldenFamily const family(name);
    auto const ours = run_on(family, indexshare::LaneBasis::hadamard, Serial{});
    REQUIRE(ours.index_basis() == programs::IndexBasis::hadamard);
    CHECK(compare(ours, family, tolerance).first_difference() == nullptr);
  }
}

TEST_CASE(
    "Golden families: a decode step gives the bits of the row in a prefill of both requests") {
  for (char const* const name : golden_families) {
    GoldenFamily const family(name);
    indexshare::FrontEnd<> const front_end = *indexshare::make_front_end(family.config.model);
    auto const batch = programs::TokenBatch::of(family.recording);
    index_t const width = family.config.model.hidden_size;
    SerialRun whole({}, front_end, batch);
    std::vector<std::vector<float>> expected;
    std::vector<std::vector<position_t>> chosen;
    for (std::int32_t layer = 0; layer < family.config.plan.total_layers(); ++layer) {
      auto const loaded = family.layer(layer);
      whole.run(family.config.plan, layer, loaded.views(), family.hidden(layer));
      auto const output = whole.output().output;
      expected.emplace_back(output.data_handle(), output.data_handle() + batch.rows() * width);
      auto const selected = whole.state().selection().indices;
      chosen.emplace_back(selected.data_handle(),
                          selected.data_handle() + batch.rows() * selected.extent(1));
    }
    for (index_t row = 0; row < batch.rows(); ++row) {
      // a run whose only row is this one and that knows nothing of later tokens
      programs::TokenBatch single;
      auto const token = batch.row_tokens[static_cast<std::size_t>(row)];
      for (index_t i = 0; i <= token; ++i) {
        single.add_token(batch.requests[static_cast<std::size_t>(i)],
                         batch.rotary[static_cast<std::size_t>(i)]);
      }
      single.add_row(token);
      SerialRun step({}, front_end, single);
      for (std::int32_t layer = 0; layer < family.config.plan.total_layers(); ++layer) {
        auto const loaded = family.layer(layer);
        auto hidden = family.hidden(layer);
        hidden.resize(static_cast<std::size_t>((token + 1) * width));
        step.run(family.config.plan, layer, loaded.views(), hidden);
        auto const l = static_cast<std::size_t>(layer);
        float const* const ours = step.output().output.data_handle();
        INFO(name << " layer " << layer << " row " << row);
        CHECK(std::equal(ours, ours + width, expected[l].begin() + row * width));
        auto const selected = step.state().selection().indices;
        CHECK(std::equal(selected.data_handle(), selected.data_handle() + selected.extent(1),
                         chosen[l].begin() + row * selected.extent(1)));
      }
    }
  }
}

TEST_CASE("Golden families: the expanded form gives the attention of the absorbed one") {
  for (char const* const name : golden_families) {
    GoldenFamily const family(name);
    auto const& model = family.config.model;
    SerialRun run({}, *indexshare::make_front_end(model),
                  programs::TokenBatch::of(family.recording));
    for (std::int32_t layer = 0; layer < family.config.plan.total_layers(); ++layer) {
      auto const loaded = family.layer(layer);
      run.run(family.config.plan, layer, loaded.views(), family.hidden(layer));
      index_t const tokens = run.batch().tokens();
      index_t const heads = model.num_attention_heads;
      index_t const lanes = qk_head_dim(model);
      std::vector<float> key_memory(static_cast<std::size_t>(tokens * heads * lanes));
      std::vector<float> value_memory(static_cast<std::size_t>(tokens * heads * model.v_head_dim));
      auto const keys =
          indexshare::make_dense<host, float, 3>(key_memory.data(), {tokens, heads, lanes});
      auto const values = indexshare::make_dense<host, float, 3>(value_memory.data(),
                                                                 {tokens, heads, model.v_head_dim});
      REQUIRE(expand_keys(run.exec(), run.front_end(), loaded.views(),
                          indexshare::detail::read_only(run.keys().kv_row), keys, values)
                  .ok());
      double const scale = softmax_scale(model);
      double largest = 0;
      double error = 0;
      auto const selection = run.state().selection();
      for (index_t row = 0; row < run.batch().rows(); ++row) {
        auto const r = static_cast<std::size_t>(row);
        index_t const first =  // token that is position 0 of the row's request
            run.batch().row_tokens[r] - run.batch().lengths[r] + 1;
        for (index_t h = 0; h < heads; ++h) {
          std::vector<double> weights;
          double total = model.learnable_sink ? std::exp(double{loaded.views().sinks(h)}) : 0;
          for (index_t j = 0; j < selection.counts(row); ++j) {
            index_t const token = first + selection.indices(row, j);
            double logit = 0;
            for (index_t i = 0; i < lanes; ++i) {
              index_t const nope = model.qk_nope_head_dim;
              double const q = i < nope ? run.queries().q(row, h, i)
                                        : run.queries().q_rope(model)(row, h, i - nope);
              logit += q * double{keys(token, h, i)};
            }
            weights.push_back(std::exp(scale * logit));
            total += weights.back();
          }
          for (index_t v = 0; v < model.v_head_dim; ++v) {
            double sum = 0;
            for (std::size_t j = 0; j < weights.size(); ++j) {
              sum += weights[j] / total *
                     double{values(first + selection.indices(row, static_cast<index_t>(j)), h, v)};
            }
            double const ours = run.output().attention(row, h, v);
            largest = std::max(largest, std::fabs(sum));
            error = std::fabs(ours - sum) <= error ? error : std::fabs(ours - sum);
          }
        }
      }
      INFO(name << " layer " << layer);
      CHECK(error <= 3e-6 * largest);
    }
  }
}
