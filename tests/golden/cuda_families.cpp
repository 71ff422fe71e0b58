// SPDX-License-Identifier: Apache-2.0
#include <indexshare/cuda/attention.cuh>
#include <indexshare/cuda/indexer.cuh>
#include <indexshare/cuda/selection.cuh>
#include <indexshare/cuda/topk.cuh>

#include "cuda_families.hpp"
#include "golden_family.hpp"

#include "executors.hpp"
#include "managed_block.hpp"
#include "memory.hpp"

#include <catch2/catch_test_macros.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdio>
#include <vector>

/// @file The families' fixtures with selection and attention on CUDA. What comes before and after
/// them is the host's front end, so each quantity is compared with transformers' as on the host.

namespace golden_cuda {

using namespace test;
using indexshare::index_t;
using indexshare::position_t;
using indexshare::Tensor;
using programs::Quantity;
constexpr auto host = indexshare::Space::host;
constexpr auto device = indexshare::Space::device;

/// As tests/golden/families_test.cpp.
constexpr double tolerance = 3e-6;

/// Copies of host arrays where the device reads them, for as long as this lives.
class Mirror {
 public:
  template <class View>
  auto operator()(View const& view) {
    using T = std::remove_const_t<typename View::element_type>;
    return Tensor<device, T const, View::rank()>(
        copy(view.data_handle(), view.mapping().required_span_size()), view.mapping());
  }
  auto operator()(indexshare::CacheView<host, SerialRun::Format> const& cache) {
    return indexshare::CacheView<device, SerialRun::Format>{
        copy(cache.data, cache.blocks * cache.block_stride),
        cache.blocks,
        cache.block_size,
        cache.lanes,
        cache.block_stride,
        cache.row_stride,
        cache.format,
        cache.basis};
  }
  auto operator()(indexshare::PageTable<host> const& table) {
    return indexshare::PageTable<device>{(*this)(table.pages), table.page_size};
  }
  auto operator()(indexshare::RowBatch<host> const& batch) {
    return indexshare::RowBatch<device>{(*this)(batch.lengths), (*this)(batch.requests),
                                        (*this)(batch.index_pages), (*this)(batch.kv_pages)};
  }

 private:
  template <class T>
  T const* copy(T const* data, index_t count) {
    if (data == nullptr) return nullptr;  // an input that is absent
    auto const* const bytes = reinterpret_cast<std::byte const*>(data);
    arrays_.emplace_back(std::span(bytes, static_cast<std::size_t>(count) * sizeof(T)));
    return reinterpret_cast<T const*>(arrays_.back().data());
  }

  std::vector<Guarded<std::byte>> arrays_;
};

/// The layers of one forward on CUDA, one state for all, each on copies of what the host's run has.
class DeviceLayers {
 public:
  explicit DeviceLayers(SerialRun& run)
      : out_(static_cast<std::size_t>(run.latent_output().size())),
        lse_(static_cast<std::size_t>(run.lse().size())),
        state_(indexshare::Rows{run.batch().rows()}, indexshare::TopK{run.config().index_topk}),
        batch_(batch_memory_(run.rows())) {}

  /// Selects or reuses, and attends; then the host's run has the results.
  void attend(SerialRun& run, indexshare::SharePlan const& plan, std::int32_t number,
              MlaIn const& in) {
    using Layer = indexshare::SparseAttentionLayer<SerialRun::Indexer, indexshare::RadixTopK,
                                                   indexshare::SharePlan, SerialRun::Attention>;
    Layer const layer{{}, {}, plan, {}, run.shape(), number};
    Mirror mirror;
    typename Layer::template inputs<device> inputs{
        {}, {mirror(in.q), mirror(in.kv), in.scale, mirror(in.sink)}, batch_, {1, 0}};
    if (layer.is_full()) {
      auto const from = indexer_inputs(run.front_end(), run.queries(), run.index_keys());
      inputs.indexer.emplace();
      inputs.indexer->q = mirror(from.q);
      inputs.indexer->weights = mirror(from.weights);
      inputs.indexer->keys = mirror(from.keys);
      inputs.indexer->q_basis = from.q_basis;
    }
    out_.fill(unwritten);
    lse_.fill(unwritten);
    Cuda const exec;
    Scratch scratch(layer.workspace(exec, std::size_t{1} << 24).value());
    auto const status = layer.run(exec, inputs, *state_, outputs(run), scratch.get());
    INFO(status.what);
    REQUIRE(status.ok());
    finish(exec);
    std::copy(out_.span().begin(), out_.span().end(), run.latent_output().data_handle());
    std::copy(lse_.span().begin(), lse_.span().end(), run.lse().data_handle());
  }

  /// Row by row, without the entries past its count.
  std::vector<position_t> selected(index_t row) const {
    auto const state = state_.on_host();
    auto const selection = state.selection();
    position_t const* const first = &selection.indices(row, 0);
    return {first, first + selection.counts(row)};
  }

 private:
  indexshare::MlaOutputs<float, device> outputs(SerialRun& run) {
    index_t const rows = run.batch().rows();
    index_t const heads = run.config().num_attention_heads;
    return {indexshare::make_output<device>(out_.data(), indexshare::Rows{rows},
                                            indexshare::Heads{heads},
                                            indexshare::HeadDim{run.config().kv_lora_rank}),
            indexshare::make_lse<device>(lse_.data(), indexshare::Rows{rows},
                                         indexshare::Heads{heads})};
  }

  Guarded<float> out_;
  Guarded<float> lse_;
  programs::StateIn<device, ManagedBlock> state_;
  Mirror batch_memory_;
  indexshare::RowBatch<device> batch_;
};

void check_family(char const* name) {
  GoldenFamily const family(name);
  std::optional<DeviceLayers> layers;
  int equal = 0;
  Spoil spoil;
  spoil.start = [&](SerialRun& run) { layers.emplace(run); };
  spoil.attend = [&](SerialRun& run, indexshare::SharePlan const& plan, std::int32_t number,
                     MlaIn const& in) {
    run.attend(plan, number, in);  // scores and selection of the recording
    layers->attend(run, plan, number, in);
    auto const selection = run.state().selection();
    for (index_t row = 0; row < run.batch().rows(); ++row) {
      position_t const* const first = &selection.indices(row, 0);
      std::vector<position_t> const want(first, first + selection.counts(row));
      INFO(name << " layer " << number << " row " << row);
      CHECK(layers->selected(row) == want);
      ++equal;
    }
  };
  auto const report = compare(run_family(family, spoil), family, tolerance);
  double worst = 0;
  for (programs::LayerResult const& layer : report.layers) {
    for (programs::QuantityResult const& result : layer.quantities) {
      INFO(name << " layer " << layer.layer << " " << std::string(programs::spec_of(result.id).name)
                << " error " << result.error);
      CHECK(result.verdict == programs::Verdict::same);
      if (result.id == Quantity::output) worst = std::max(worst, result.error);
    }
  }
  CHECK(equal > 0);
  CHECK(report.layers.size() == static_cast<std::size_t>(family.config.plan.total_layers()));
  CHECK(report.first_difference() == nullptr);
  std::printf("%-13s %d selections equal to the host's; output %.1e\n", name, equal, worst);
}

}  // namespace golden_cuda
