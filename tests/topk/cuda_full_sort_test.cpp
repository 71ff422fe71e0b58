// SPDX-License-Identifier: Apache-2.0
//
// Three ways to one selection on a device, and the host's: RadixTopK, FullSortTopK (CUB) and an
// oracle of Thrust's stable sort.
#include <indexshare/cuda/full_sort.cuh>
#include <indexshare/cuda/topk.cuh>

#include <thrust/device_ptr.h>
#include <thrust/execution_policy.h>
#include <thrust/functional.h>
#include <thrust/sequence.h>
#include <thrust/sort.h>

#include <catch2/catch_template_test_macros.hpp>
#include <catch2/catch_test_macros.hpp>

#include "../cuda/graph.hpp"
#include "cuda_oracle.hpp"

#include <algorithm>
#include <cstdint>
#include <vector>

using namespace cuda_topk_test;

namespace {

/// Selections by thrust::stable_sort_by_key of each row's positions. Under a descending order of
/// built-in keys that is Thrust's radix sort; its merge sort reads one shared word past its keys.
template <class Score>
void thrust_select(cudaStream_t stream, Batch<Score>& batch) {
  auto const scores = batch.template scores<host>();
  auto const lengths = batch.template lengths<host>();
  auto const out = batch.template selection<host>();
  auto const policy = thrust::cuda::par.on(stream);
  for (index_t row = 0; row < scores.extent(0); ++row) {
    index_t const length = clamp_length(lengths(row), scores.extent(1));
    index_t const chosen = std::min(length, out.indices.extent(1));
    test::Guarded<std::uint32_t> keys(to_size(length));
    test::Guarded<position_t> order(to_size(length));
    for (index_t s = 0; s < length; ++s) keys[to_size(s)] = order_key(to_float(scores(row, s)));
    thrust::device_ptr<position_t> const first(order.data());
    thrust::sequence(policy, first, first + length);
    if (length > chosen) {
      thrust::device_ptr<std::uint32_t> const key(keys.data());
      thrust::stable_sort_by_key(policy, key, key + length, first,
                                 thrust::greater<std::uint32_t>{});
      thrust::sort(policy, first, first + chosen);
    }
    test::require(cudaStreamSynchronize(stream));
    for (index_t j = 0; j < out.indices.extent(1); ++j) {
      out.indices(row, j) = j < chosen ? order[to_size(j)] : no_position;
    }
    out.counts(row) = static_cast<position_t>(chosen);
  }
}

template <class Policy, class Score>
void select_with(test::Cuda const& x, Policy policy, Batch<Score>& batch) {
  auto const need = topk_workspace(x, policy, batch.shape());
  REQUIRE(need.has_value());
  test::Scratch scratch(*need);
  batch.poison_outputs();
  REQUIRE(topk_select(x, policy, batch.template scores<device>(), batch.template lengths<device>(),
                      batch.template selection<device>(), scratch.get())
              .ok());
  test::finish(x);
}

template <class Score>
void check_all(test::Cuda const& x, Batch<Score>& batch) {
  select_with(x, RadixTopK{}, batch);
  CHECK(equals_host(batch));
  auto const radix = batch.bytes();
  select_with(x, FullSortTopK{}, batch);
  CHECK(batch.bytes() == radix);
  batch.poison_outputs();
  thrust_select(x.stream(), batch);
  CHECK(batch.bytes() == radix);
}

}  // namespace

TEST_CASE("CUDA top-k: radix, CUB, Thrust and the host agree on every kind of row", "[topk]") {
  test::Cuda const x;
  for (int kind = 0; kind <= static_cast<int>(Kind::last); ++kind) {
    CAPTURE(kind);
    Batch<float> batch(4, 3000, 256);
    auto const row = [&](index_t r, index_t n) {
      batch.set(r, make_scores_of(static_cast<Kind>(kind), n, static_cast<std::uint64_t>(r)));
    };
    row(0, 3000);
    row(1, 257);
    row(2, 256);
    row(3, 1500);
    check_all(x, batch);
  }
}

TEMPLATE_TEST_CASE("CUDA top-k: radix, CUB, Thrust and the host agree on every element type",
                   "[topk]", bf16, fp16, e4m3) {
  test::Cuda const x;
  Batch<TestType> batch(3, 1100, 100, Layout{3, 5, 2, 2});
  batch.set(0, make_scores_of(Kind::normal, 1100, 1));
  batch.set(1, make_scores_of(Kind::infinities, 1000, 2), 1000);
  batch.set(2, make_scores_of(Kind::mostly_nan, 900, 3), 900);
  check_all(x, batch);
}

TEST_CASE("CUDA top-k: radix, CUB, Thrust and the host agree on long rows", "[topk]") {
  test::Cuda const x;
  for (Kind const kind : {Kind::normal, Kind::recent, Kind::two_values}) {
    Batch<float> batch(2, 40000, 2048);
    batch.set(0, make_scores_of(kind, 40000, 4));
    batch.set(1, make_scores_of(kind, 16385, 5));
    check_all(x, batch);
  }
}

TEST_CASE("CUDA full sort: widths and lengths at their ends", "[topk]") {
  test::Cuda const x;
  for (index_t const width : {0, 1, 7, 1024, 1025}) {
    for (index_t const k : {1, 8, 5000}) {
      CAPTURE(width, k);
      Batch<float> batch(3, width, k);
      batch.set(0, make_scores_of(Kind::normal, width, 5));
      batch.set(1, make_scores_of(Kind::two_values, width, 6), width + 10);
      batch.set(2, {}, -3);
      select_with(x, FullSortTopK{}, batch);
      CHECK(equals_host(batch));
    }
  }
  Batch<float> none(0, 10, 4);
  select_with(x, FullSortTopK{}, none);
}

TEST_CASE("CUDA full sort: CUB asks for no more than it is given", "[topk]") {
  test::Cuda const x;
  for (int const rows : {1, 3, 1000, 1 << 20}) {
    for (int const keys : {1, 2047, 100000, static_cast<int>(max_position)}) {
      if (index_t{rows} * keys > max_position) continue;
      CAPTURE(rows, keys);
      std::size_t bytes = 0;
      std::uint32_t const* result = nullptr;
      test::require(detail::sort_segments(x, {}, rows, rows * keys, 32, nullptr, bytes, result));
      CHECK(bytes > 0);
      CHECK(bytes <= detail::full_sort_library_bytes);
    }
  }
}

TEST_CASE("CUDA full sort: captured once, replayed with new lengths and scores", "[topk]") {
  test::Cuda const x;
  Batch<float> batch(3, 700, 60);
  for (index_t row = 0; row < 3; ++row) batch.set(row, {}, 0);
  auto const need = topk_workspace(x, FullSortTopK{}, batch.shape());
  REQUIRE(need.has_value());
  test::Scratch scratch(*need);
  cuda_test::Graph const graph(x, [&] {
    REQUIRE(topk_select(x, FullSortTopK{}, batch.scores<device>(), batch.lengths<device>(),
                        batch.selection<device>(), scratch.get())
                .ok());
  });
  CHECK(graph.only_device_work());
  for (index_t const cut : {0, 350, 700}) {
    for (index_t row = 0; row < 3; ++row) {
      batch.set(row, make_scores_of(Kind::normal, 700, static_cast<std::uint64_t>(cut + row)),
                std::max<index_t>(0, 700 - cut * row));
    }
    for (int replay = 0; replay < 2; ++replay) {
      batch.poison_outputs();
      graph.replay();
      CHECK(equals_host(batch));
    }
  }
}

TEST_CASE("CUDA full sort: the workspace grows with every capacity; too little is refused",
          "[topk]") {
  test::Cuda const x;
  auto const bytes = [&](index_t rows, index_t keys) {
    Shape shape;
    shape.rows = rows;
    shape.keys = keys;
    shape.top_k = 16;
    auto const need = topk_workspace(x, FullSortTopK{}, shape);
    REQUIRE(need.has_value());
    return need->bytes;
  };
  CHECK(bytes(0, 100) <= bytes(1, 100));
  for (index_t rows = 1; rows < 100000; rows *= 3) {
    for (index_t keys = 1; keys < 4000000; keys *= 3) {
      CHECK(bytes(rows, keys) <= bytes(rows + 1, keys));
      CHECK(bytes(rows, keys) <= bytes(rows, keys + 1));
    }
  }
  Shape shape;
  shape.rows = 1;
  shape.keys = max_position + 1;
  CHECK(topk_workspace(x, FullSortTopK{}, shape).error().code == Errc::unsupported);
  Batch<float> batch(1, 100, 4);
  batch.set(0, make_scores_of(Kind::normal, 100, 1));
  CHECK(topk_select(x, FullSortTopK{}, batch.scores<device>(), batch.lengths<device>(),
                    batch.selection<device>(), {})
            .code == Errc::workspace_too_small);
}
