// SPDX-License-Identifier: Apache-2.0
#include <indexshare/indexshare.hpp>
#include <indexshare/interop/boundary_views.hpp>

#include <catch2/catch_test_macros.hpp>

#include <array>
#include <cstddef>
#include <vector>

using namespace indexshare;

namespace {

constexpr Space host = Space::host;
using Cached = format::Plain<bf16>;
using Layer = SparseAttentionLayer<ReluDotIndexer<fp16, format::IndexKeyE4m3>, RadixTopK,
                                   Pattern<"FS">, SparseMla<bf16, Cached, bf16>>;

}  // namespace

TEST_CASE("Boundary: dense arrays have the strides of dense views") {
  float data[24];
  auto const array = boundary::dense(data, 2, 3, 4);
  auto const view = boundary::to_view<host, float const>(array);
  auto const expected = make_dense<host, float const, 3>(data, {2, 3, 4});
  CHECK(view.data_handle() == data);
  CHECK(view.mapping() == expected.mapping());
}

TEST_CASE("Boundary: strides that are not dense come through") {
  position_t data[40] = {};
  boundary::Array<position_t const, 2> const array{data, {3, 4}, {10, 1}};
  auto const view = boundary::to_view<host, position_t const>(array);
  CHECK(&view(2, 3) == data + 23);
  CHECK(view.extent(0) == 3);
}

TEST_CASE("Boundary: a page table without data is the contiguous one") {
  PageTable<host> const table = boundary::to_pages<host>({{}, 8});
  CHECK(table.contiguous());
  CHECK(same_pages(table, make_contiguous_table<host>(Keys{8})));
  position_t const pages[]{4, 2};
  PageTable<host> const paged = boundary::to_pages<host>({boundary::dense(pages, 1, 2), 16});
  CHECK(same_pages(paged, make_page_table<host>(pages, Requests{1}, Pages{2}, PageSize{16})));
  CHECK(paged.slot(0, 17) == 33);
}

TEST_CASE("Boundary: every part of a call arrives, with the types of the layer") {
  std::array<std::byte, 64> memory{};
  position_t const lengths[]{5, 6}, requests[]{0, 1};
  float const weights[]{1, 2}, sink[]{3};
  float lse[2];

  boundary::LayerCall call;
  call.batch.lengths = boundary::dense(lengths, 2);
  call.batch.requests = boundary::dense(requests, 2);
  call.batch.index_pages.page_size = 4;
  call.batch.kv_pages.page_size = 8;
  call.forward = 7;
  call.batch_id = 3;
  call.q = boundary::dense<void const>(memory.data() + 2, 2, 1, 2);
  call.kv = boundary::dense_cache(memory.data() + 4, 2, 8, 2);
  call.scale = 0.5f;
  call.sink = boundary::dense(sink, 1);
  call.out = boundary::dense<void>(memory.data() + 6, 2, 1, 1);
  call.lse = boundary::dense(lse, 2, 1);

  auto in = boundary::to_inputs<Layer, host>(call);
  CHECK_FALSE(in.indexer);  // a shared layer
  CHECK(in.id == ForwardId{7, 3});
  CHECK(in.batch.lengths(1) == 6);
  CHECK(in.batch.requests(1) == 1);
  CHECK(in.batch.index_pages.page_size == 4);
  CHECK(in.batch.kv_pages.page_size == 8);
  CHECK(in.attention.q.data_handle() == reinterpret_cast<bf16 const*>(memory.data() + 2));
  CHECK(in.attention.q.extent(2) == 2);
  CHECK(in.attention.kv.data == reinterpret_cast<bf16 const*>(memory.data() + 4));
  CHECK(in.attention.kv.slots() == 16);
  CHECK(in.attention.kv.block_stride == 16);
  CHECK(in.attention.scale == 0.5f);
  CHECK(in.attention.sink(0) == 3);
  auto const out = boundary::to_outputs<Layer, host>(call);
  CHECK(out.out.data_handle() == reinterpret_cast<bf16*>(memory.data() + 6));
  CHECK(out.lse.data_handle() == lse);

  call.index_q = boundary::dense<void const>(memory.data() + 8, 2, 1, 4);
  call.head_weights = boundary::dense(weights, 2, 1);
  call.index_keys = {memory.data() + 10, 2, 4, 4, 32, 4};
  in = boundary::to_inputs<Layer, host>(call);
  REQUIRE(in.indexer);
  CHECK(in.indexer->q.data_handle() == reinterpret_cast<fp16 const*>(memory.data() + 8));
  CHECK(in.indexer->weights(1, 0) == 2);
  CHECK(in.indexer->keys.data == memory.data() + 10);
  CHECK(in.indexer->keys.block_stride == 32);
  CHECK(in.indexer->keys.row_stride == 4);
}

TEST_CASE("Boundary: absent parts stay absent and pass the layer's checks") {
  bf16 const q[2] = {}, kv[16] = {};
  bf16 out[1] = {};
  position_t const length[]{0}, request[]{0};
  boundary::LayerCall call;
  call.batch.lengths = boundary::dense(length, 1);
  call.batch.requests = boundary::dense(request, 1);
  call.batch.kv_pages.page_size = 8;
  call.q = boundary::dense<void const>(q, 1, 1, 2);
  call.kv = boundary::dense_cache(const_cast<bf16*>(kv), 1, 8, 2);
  call.scale = 1;
  call.out = boundary::dense<void>(out, 1, 1, 1);
  auto const in = boundary::to_inputs<Layer, host>(call);
  auto const outputs = boundary::to_outputs<Layer, host>(call);
  Shape const shape{1, 8, 4, 1, 4, 1, 2, 1};
  CHECK(attention_check(HostExec<>{}, SparseMla<bf16, Cached, bf16>{}, in.attention, outputs,
                        in.batch, shape)
            .ok());
}
