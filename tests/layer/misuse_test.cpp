// SPDX-License-Identifier: Apache-2.0
#include <indexshare/indexshare.hpp>

#include <catch2/catch_test_macros.hpp>

#include <cstddef>
#include <cstdint>
#include <limits>
#include <string_view>
#include <utility>
#include <vector>

// What a first user of the library got wrong without being told.

using namespace indexshare;

namespace {

constexpr Space host = Space::host;
using Plain = format::Plain<float>;
using Indexer = ReluDotIndexer<float, Plain>;
using Layer = SparseAttentionLayer<Indexer, RadixTopK, Pattern<"FS">, SparseMla<float, Plain>>;

/// Two rows of one request of 8 tokens, top-k 2, all widths 1.
struct Toy {
  std::vector<position_t> lengths{5, 6}, requests{0, 0};
  std::vector<float> keys{3, 9, 1, 7, 5, 8, 0, 0}, ones{1, 1}, out{-7, -7};
  HostMemory memory{SelectionState<host>::size(Rows{2}, TopK{2})};
  HostMemory scratch{{std::size_t{1} << 16}};
  SelectionState<host> state = SelectionState<host>::make(memory.view(), Rows{2}, TopK{2}).value();
  Layer::inputs<host> in{};
  Layer::outputs<host> outputs{make_output<host>(out.data(), Rows{2}, Heads{1}, HeadDim{1}), {}};
  Layer layer{.shape = {2, 8, 2, 1, 1, 1, 1, 1}, .layer = 0};

  Toy() {
    auto const query = make_query<host>(ones.data(), Rows{2}, Heads{1}, HeadDim{1});
    auto const cache =
        make_contiguous_cache<host>(std::as_const(keys).data(), Requests{1}, Keys{8}, HeadDim{1});
    in.batch = batch();
    in.id = {.forward = 1};
    in.indexer = {query, make_head_weights<host>(ones.data(), Rows{2}, Heads{1}), cache};
    in.attention = {query, cache, 1.0f, {}};
  }
  RowBatch<host> batch() const {
    auto const table = make_contiguous_table<host>(Keys{8});
    return {make_lengths<host>(lengths.data(), Rows{2}),
            make_lengths<host>(requests.data(), Rows{2}), table, table};
  }
  Status run() { return layer.run(HostExec<>{}, in, state, outputs, scratch.view()); }
};

void check_refused(Status const& status, Errc code, std::string_view what) {
  INFO(status.what);
  CHECK(status.code == code);
  CHECK(std::string_view(status.what).find(what) != std::string_view::npos);
}

}  // namespace

TEST_CASE("SHARE-STALE: a forward id that was forgotten is refused on full and shared layers") {
  Toy toy;
  toy.in.id = {};
  check_refused(toy.run(), Errc::bad_value, "in.id");
  CHECK(toy.out == std::vector<float>{-7, -7});
  toy.in.id = {.forward = 1};
  REQUIRE(toy.run().ok());
  toy.in.id = {};
  toy.in.indexer.reset();
  toy.layer.layer = 1;
  check_refused(toy.run(), Errc::bad_value, "in.id");
}

TEST_CASE("INT32: page sizes that would wrap are refused") {
  Toy toy;
  position_t const pages[4]{0, 1, 2, 3};
  toy.in.batch.kv_pages = make_page_table<host>(
      pages, Requests{1}, Pages{4}, PageSize{std::numeric_limits<std::int64_t>::max() / 2});
  check_refused(toy.run(), Errc::bad_shape, "batch.kv_pages.page_size");
}

TEST_CASE("CONTRACT: lse without memory is refused, absent lse is not") {
  Toy toy;
  REQUIRE(toy.run().ok());
  toy.outputs.lse = make_lse<host>(nullptr, Rows{2}, Heads{1});
  check_refused(toy.run(), Errc::missing_input, "lse");
}

TEST_CASE("MTP: a draft step cannot read the selection of another round") {
  Toy toy;
  REQUIRE(toy.run().ok());
  HostMemory const memory(SelectionState<host>::size(Rows{2}, TopK{2}));
  auto step = SelectionState<host>::make(memory.view(), Rows{2}, TopK{2}).value();
  position_t const rows[2]{1, 0};
  auto const compact = [&](ForwardId round, ForwardId id) {
    return compact_selection(HostExec<>{}, toy.state, round, make_lengths<host>(rows, Rows{2}), id,
                             toy.batch(), step);
  };
  check_refused(compact({2, 0}, {3, 0}), Errc::stale_selection, "another forward");
  check_refused(compact({1, 5}, {3, 0}), Errc::stale_selection, "another batch");
  check_refused(compact({1, 0}, {}), Errc::bad_value, "forward of the id");
  REQUIRE(compact({1, 0}, {3, 0}).ok());
  CHECK(step.selection().indices(0, 1) == 5);
}

TEST_CASE("MTP: states that share part of their memory are refused") {
  Toy toy;
  HostMemory const memory({2 * SelectionState<host>::size(Rows{2}, TopK{2}).bytes});
  auto const size = SelectionState<host>::size(Rows{2}, TopK{2}).bytes;
  auto* const bytes = static_cast<std::byte*>(memory.view().data);
  toy.state = SelectionState<host>::make({bytes, size}, Rows{2}, TopK{2}).value();
  REQUIRE(toy.run().ok());
  position_t const rows[2]{1, 0};
  for (std::size_t const shift : {std::size_t{256}, size}) {
    auto other = SelectionState<host>::make({bytes + shift, size}, Rows{2}, TopK{2}).value();
    Status const status =
        compact_selection(HostExec<>{}, toy.state, {1, 0}, make_lengths<host>(rows, Rows{2}),
                          {2, 0}, toy.batch(), other);
    CHECK(status.ok() == (shift == size));
  }
}

TEST_CASE("SHARE-STALE R103: an import without a source layer is refused") {
  Toy toy;
  REQUIRE(toy.run().ok());
  HostMemory const memory(SelectionState<host>::size(Rows{2}, TopK{2}));
  auto stage = SelectionState<host>::make(memory.view(), Rows{2}, TopK{2}).value();
  auto const from = std::as_const(toy.state).selection();
  check_refused(import_selection(HostExec<>{}, from, {1, 0}, -1, toy.batch(), stage),
                Errc::bad_value, "source layer");
  CHECK(import_selection(HostExec<>{}, from, {1, 0}, 0, toy.batch(), stage).ok());
}

TEST_CASE("ADDR: rows are not appended to a cache whose rows overlap") {
  std::vector<float> memory(64, -7.0f), rows(8, 1.0f);
  position_t const positions[2]{0, 1}, requests[2]{0, 0};
  auto const table = make_contiguous_table<host>(Keys{4});
  auto const append = [&](index_t block_stride, index_t row_stride) {
    MutableCacheView<host, Plain> cache{memory.data(), 3, 4, 4, block_stride, row_stride, {}};
    return append_rows(HostExec<>{},
                       make_dense<host, float const, 2>(std::as_const(rows).data(), {2, 4}),
                       make_lengths<host>(positions, Rows{2}),
                       make_lengths<host>(requests, Rows{2}), table, cache);
  };
  check_refused(append(16, 1), Errc::bad_stride, "strides of the cache");
  check_refused(append(15, 4), Errc::bad_stride, "strides of the cache");
  CHECK(memory == std::vector<float>(64, -7.0f));
  CHECK(append(16, 4).ok());
  CHECK(append(4, 12).ok());  // tokens of all blocks side by side
}
