// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "memory.cuh"

#include <indexshare/cuda/attention.cuh>
#include <indexshare/cuda/indexer.cuh>
#include <indexshare/cuda/topk.cuh>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

/// @file The shapes that are counted under an emulator and timed on a GPU: memory of one call, the
/// call, and what the algorithm cannot do without.

namespace bench {

using namespace indexshare;
inline constexpr auto on = Space::device;

/// What a call has to do at least. Bytes are those of its inputs and outputs, each once.
struct Work {
  double items = 0;  ///< scores, or gathered keys times heads / 64
  double bytes = 0;
  double flops = 0;            ///< of the matrix products, two per multiply-add
  double gathered_bytes = 0;   ///< attention: rows that the selections name, repeats counted
  double query_bytes = 0;      ///< attention: of all rows
  double slot_bytes = 0;       ///< attention: of the rows' lists of slots
  double heads_per_block = 0;  ///< attention: heads that share one read of a row
  double key_bytes = 0;        ///< scoring: keys of all requests
  double rows_per_block = 0;   ///< scoring: query rows that share one read of a key
};

/// A prepared call that can be repeated; its memory lives as long as it does.
struct Call {
  Work work;
  std::function<Status(CudaExec const&)> run;
};

struct Case {
  std::string stage;  ///< score, topk, attend
  std::string name;   ///< unique
  std::function<Call(DeviceLimits const&)> prepare;
};

// ---- rows of a batch

/// `rows` rows in groups of `per_request`, the last of each request seeing all `keys` keys.
struct BatchRows {
  DeviceArray<position_t> lengths;
  DeviceArray<position_t> requests;

  BatchRows(index_t rows, index_t per_request, index_t keys)
      : lengths(make(rows, [&](index_t i) { return keys - (per_request - 1 - i % per_request); })),
        requests(make(rows, [&](index_t i) { return i / per_request; })) {}

  LengthView<on> length_view() const { return make_lengths<on>(lengths.data(), {lengths.size()}); }
  LengthView<on> request_view() const {
    return make_lengths<on>(requests.data(), {requests.size()});
  }

 private:
  template <class F>
  static DeviceArray<position_t> make(index_t rows, F const& value) {
    std::vector<position_t> values;
    for (index_t i = 0; i < rows; ++i) values.push_back(static_cast<position_t>(value(i)));
    return DeviceArray<position_t>(values);
  }
};

/// Pages of all requests in mixed order.
struct Table {
  static constexpr index_t page_size = 64;
  index_t requests;
  index_t per_request;
  DeviceArray<position_t> numbers;

  Table(index_t request_count, index_t keys)
      : requests(request_count),
        per_request((keys + page_size - 1) / page_size),
        numbers(shuffled(request_count * per_request)) {}

  index_t pages() const { return requests * per_request; }
  PageTable<on> view() const {
    return make_page_table<on>(numbers.data(), {requests}, {per_request}, {page_size});
  }

 private:
  static DeviceArray<position_t> shuffled(index_t count) {
    std::vector<position_t> order;
    for (index_t i = 0; i < count; ++i) order.push_back(static_cast<position_t>(i));
    for (index_t i = count; i > 1; --i) {
      auto const other = static_cast<std::size_t>(mixed(static_cast<std::uint64_t>(i)) %
                                                  static_cast<std::uint64_t>(i));
      std::swap(order[static_cast<std::size_t>(i - 1)], order[other]);
    }
    return DeviceArray<position_t>(order);
  }
};

// ---- caches

template <class Format>
struct Cache;

template <class T>
struct Cache<format::Plain<T>> {
  DeviceArray<T> memory;
  index_t pages, lanes;
  Cache(index_t page_count, index_t lane_count, std::uint64_t seed)
      : memory(normal_array<T>(page_count * Table::page_size * lane_count, seed)),
        pages(page_count),
        lanes(lane_count) {}
  auto view() const {
    return make_paged_cache<on>(static_cast<T const*>(memory.data()), {pages}, {Table::page_size},
                                {lanes});
  }
  double row_bytes() const { return static_cast<double>(lanes) * sizeof(T); }
};

template <>
struct Cache<format::IndexKeyE4m3> {
  DeviceArray<std::byte> memory;
  index_t pages, lanes;
  Cache(index_t page_count, index_t lane_count, std::uint64_t seed)
      : memory(page_count * Table::page_size * (lane_count + 4)),
        pages(page_count),
        lanes(lane_count) {
    index_t const codes = Table::page_size * lanes;
    fill_codes<<<512, 256>>>(memory.data(), memory.size(), seed);
    fill_scales<<<512, 256>>>(memory.data(), pages, codes + 4 * Table::page_size, codes,
                              Table::page_size);
    require(cudaGetLastError());
  }
  auto view() const {
    return make_index_key_e4m3_cache<on>(static_cast<std::byte const*>(memory.data()), {pages},
                                         {Table::page_size}, {lanes});
  }
  double row_bytes() const { return static_cast<double>(lanes + 4); }
};

template <>
struct Cache<format::LatentE4m3> {
  static constexpr index_t rope = 64;
  DeviceArray<std::byte> memory;
  index_t pages, latent;
  Cache(index_t page_count, index_t lane_count, std::uint64_t seed)
      : memory(page_count * Table::page_size * bytes_of(lane_count - rope)),
        pages(page_count),
        latent(lane_count - rope) {
    index_t const rows = pages * Table::page_size;
    index_t const tiles = latent / 128;
    fill_codes<<<512, 256>>>(memory.data(), memory.size(), seed);
    fill_scales<<<512, 256>>>(memory.data(), rows, bytes_of(latent), latent, tiles);
    fill_rotary<<<512, 256>>>(memory.data(), rows, bytes_of(latent), latent + 4 * tiles, rope);
    require(cudaGetLastError());
  }
  auto view() const {
    return make_latent_e4m3_cache<on>(static_cast<std::byte const*>(memory.data()), {pages},
                                      {Table::page_size}, latent, rope);
  }
  double row_bytes() const { return static_cast<double>(bytes_of(latent)); }

 private:
  static index_t bytes_of(index_t latent_lanes) {
    return latent_lanes + latent_lanes / 128 * 4 + rope * 2;
  }
};

// ---- calls

inline Shape glm52(index_t rows, index_t keys) {
  return {.rows = rows,
          .keys = keys,
          .top_k = 2048,
          .index_heads = 32,
          .index_dim = 128,
          .heads = 64,
          .key_dim = 576,
          .value_dim = 512};
}

/// Scoring of `shape.rows` rows, `per_request` of them in each request.
template <class Query, class Format>
Call score_call(DeviceLimits const& limits, Shape const& shape, index_t per_request) {
  using Policy = ReluDotIndexer<Query, Format>;
  struct Memory {
    BatchRows rows;
    Table table;
    Cache<Format> keys;
    DeviceArray<Query> q;
    DeviceArray<float> weights;
    DeviceArray<float> scores;
    DeviceArray<std::byte> scratch;
  };
  CudaExec const sizing(static_cast<cudaStream_t>(nullptr), limits);
  auto const bytes = indexer_workspace(sizing, Policy{}, shape);
  if (!bytes) require(bytes.error());
  index_t const requests = shape.rows / per_request;
  Table table(requests, shape.keys);
  index_t const pages = table.pages();
  index_t const stride = (shape.keys + 63) / 64 * 64;
  auto const memory = std::make_shared<Memory>(
      Memory{BatchRows(shape.rows, per_request, shape.keys), std::move(table),
             Cache<Format>(pages, shape.index_dim, 1),
             normal_array<Query>(shape.rows * shape.index_heads * shape.index_dim, 2),
             normal_array<float>(shape.rows * shape.index_heads, 3),
             DeviceArray<float>(shape.rows * stride),
             DeviceArray<std::byte>(static_cast<index_t>(bytes->bytes))});
  Call call;
  double const scores = static_cast<double>(shape.rows) * static_cast<double>(shape.keys) -
                        static_cast<double>(requests * per_request * (per_request - 1) / 2);
  double const width = static_cast<double>(shape.index_heads * shape.index_dim);
  call.work.items = scores;
  call.work.flops = 2 * scores * width;
  call.work.key_bytes = static_cast<double>(requests * shape.keys) * memory->keys.row_bytes();
  call.work.bytes =
      call.work.key_bytes + static_cast<double>(shape.rows) * width * sizeof(Query) + 4 * scores;
  call.work.rows_per_block = static_cast<double>(indexer_plan(limits, Policy{}, shape)->rows);
  call.run = [memory, shape, stride, bytes = bytes->bytes](CudaExec const& x) {
    typename Policy::template inputs<on> const in{
        make_query<on>(static_cast<Query const*>(memory->q.data()), {shape.rows},
                       {shape.index_heads}, {shape.index_dim}),
        make_head_weights<on>(memory->weights.data(), {shape.rows}, {shape.index_heads}),
        memory->keys.view()};
    RowBatch<on> const batch{memory->rows.length_view(), memory->rows.request_view(),
                             memory->table.view(), memory->table.view()};
    return indexer_score(
        x, Policy{}, in, batch, {{0, shape.rows}, 1},
        make_strided<on, float, 2>(memory->scores.data(), {shape.rows, shape.keys}, {stride, 1}),
        Workspace{memory->scratch.data(), bytes});
  };
  return call;
}

/// Selection of k from rows of scores of some kind: `kind(i)` for the i-th of all.
template <class Score = float, class Kind = Normal>
Call topk_call(DeviceLimits const& limits, index_t rows, index_t keys, index_t k,
               Kind kind = Kind{4}) {
  struct Memory {
    BatchRows rows;
    DeviceArray<Score> scores;
    DeviceArray<position_t> indices;
    DeviceArray<position_t> counts;
    DeviceArray<std::byte> scratch;
  };
  Shape shape = glm52(rows, keys);
  shape.top_k = k;
  CudaExec const sizing(static_cast<cudaStream_t>(nullptr), limits);
  auto const bytes = topk_workspace(sizing, RadixTopK{}, shape);
  if (!bytes) require(bytes.error());
  auto const memory = std::make_shared<Memory>(
      Memory{BatchRows(rows, 1, keys), filled_array<Score>(rows * keys, kind),
             DeviceArray<position_t>(rows * k), DeviceArray<position_t>(rows),
             DeviceArray<std::byte>(static_cast<index_t>(bytes->bytes))});
  Call call;
  call.work.items = static_cast<double>(rows) * static_cast<double>(keys);
  call.work.bytes = sizeof(Score) * call.work.items + 4 * static_cast<double>(rows * (k + 1));
  call.run = [memory, rows, keys, k, bytes = bytes->bytes](CudaExec const& x) {
    return topk_select(
        x, RadixTopK{},
        make_scores<on>(static_cast<Score const*>(memory->scores.data()), {rows}, {keys}),
        memory->rows.length_view(),
        make_selection<on>(memory->indices.data(), memory->counts.data(), {rows}, {k}),
        Workspace{memory->scratch.data(), bytes});
  };
  return call;
}

/// Sparse attention of `shape.rows` rows, each over its own `shape.top_k` of the `shape.keys` slots
/// of one cache.
template <class Query, class Format>
Call attend_call(DeviceLimits const& limits, Shape const& shape) {
  using Policy = SparseMla<Query, Format, bf16>;
  struct Memory {
    BatchRows rows;
    Table table;
    Cache<Format> kv;
    DeviceArray<Query> q;
    DeviceArray<position_t> slots;
    DeviceArray<position_t> counts;
    DeviceArray<bf16> out;
    DeviceArray<float> lse;
    DeviceArray<std::byte> scratch;
  };
  CudaExec const sizing(static_cast<cudaStream_t>(nullptr), limits);
  auto const bytes = attention_workspace(sizing, Policy{}, shape);
  if (!bytes) require(bytes.error());
  Table table(1, shape.keys);
  index_t const pages = table.pages();
  std::vector<position_t> slots;
  for (index_t row = 0; row < shape.rows; ++row) {
    // an odd step modulo a power of two visits every slot once: no repeats within a row
    index_t const step =
        2 * static_cast<index_t>(mixed(static_cast<std::uint64_t>(row)) % 4096) + 1;
    for (index_t j = 0; j < shape.top_k; ++j) {
      slots.push_back(static_cast<position_t>((row * 97 + j * step) % shape.keys));
    }
  }
  auto const memory = std::make_shared<Memory>(
      Memory{BatchRows(shape.rows, shape.rows, shape.keys), std::move(table),
             Cache<Format>(pages, shape.key_dim, 5),
             normal_array<Query>(shape.rows * shape.heads * shape.key_dim, 6),
             DeviceArray<position_t>(slots),
             DeviceArray<position_t>(std::vector<position_t>(static_cast<std::size_t>(shape.rows),
                                                             static_cast<position_t>(shape.top_k))),
             DeviceArray<bf16>(shape.rows * shape.heads * shape.value_dim),
             DeviceArray<float>(shape.rows * shape.heads),
             DeviceArray<std::byte>(static_cast<index_t>(bytes->bytes))});
  Call call;
  double const gathered = static_cast<double>(shape.rows * shape.top_k);
  double const heads = static_cast<double>(shape.heads);
  call.work.items = gathered * heads / 64;
  call.work.flops = 2 * gathered * heads * static_cast<double>(shape.key_dim + shape.value_dim);
  call.work.gathered_bytes = gathered * memory->kv.row_bytes();
  call.work.bytes =
      call.work.gathered_bytes + static_cast<double>(shape.rows) * heads *
                                     (sizeof(Query) * static_cast<double>(shape.key_dim) +
                                      sizeof(bf16) * static_cast<double>(shape.value_dim));
  call.work.query_bytes =
      static_cast<double>(shape.rows) * heads * sizeof(Query) * static_cast<double>(shape.key_dim);
  call.work.slot_bytes = gathered * sizeof(position_t);
  call.work.heads_per_block =
      static_cast<double>(attention_plan(limits, Policy{}, shape)->heads_per_block);
  call.run = [memory, shape, bytes = bytes->bytes](CudaExec const& x) {
    typename Policy::template inputs<on> const in{
        make_query<on>(static_cast<Query const*>(memory->q.data()), {shape.rows}, {shape.heads},
                       {shape.key_dim}),
        memory->kv.view(), 0.0625f};
    typename Policy::template outputs<on> const out{
        make_output<on>(memory->out.data(), {shape.rows}, {shape.heads}, {shape.value_dim}),
        make_lse<on>(memory->lse.data(), {shape.rows}, {shape.heads})};
    RowBatch<on> const batch{memory->rows.length_view(), memory->rows.request_view(),
                             memory->table.view(), memory->table.view()};
    GroupPlan<on> const plan{
        make_dense<on, position_t const, 2>(memory->slots.data(), {shape.rows, shape.top_k}),
        make_lengths<on>(memory->counts.data(), {shape.rows})};
    return attention_run(x, Policy{}, in, batch, {0, shape.rows}, plan, out, shape,
                         Workspace{memory->scratch.data(), bytes});
  };
  return call;
}

}  // namespace bench
