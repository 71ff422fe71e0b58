// SPDX-License-Identifier: Apache-2.0
#include <indexshare/indexshare.hpp>

#include <catch2/catch_approx.hpp>
#include <catch2/catch_template_test_macros.hpp>
#include <catch2/catch_test_macros.hpp>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "huge.hpp"
#include "indexer_run.hpp"
#include "vectors.hpp"

using namespace indexshare;

// Vectors whose fault lies in front of the kernels (rotation, LayerNorm). The rotation is done here
// by the layout that the config states; the library scores and selects.

namespace {

using test::space;
using Indexer = ReluDotIndexer<float, format::Plain<float>>;
using Values = std::vector<float>;

/// Scores of one query row against all keys of a contiguous cache, and its best position.
struct Scored {
  Values scores;
  position_t best;
};

template <class X>
Scored score(X const& x, Values const& q, Values const& weights, Values const& keys) {
  index_t const heads = static_cast<index_t>(weights.size());
  index_t const lanes = static_cast<index_t>(q.size()) / heads;
  index_t const count = static_cast<index_t>(keys.size()) / lanes;
  position_t const length = static_cast<position_t>(count), request = 0;
  auto const lengths = test::guarded({length});
  auto const requests = test::guarded({request});
  auto const query = test::guarded(q);
  auto const head_weights = test::guarded(weights);
  auto const cache = test::guarded(keys);
  auto const table = make_contiguous_table<space>(Keys{count});
  RowBatch<space> const batch{make_lengths<space>(lengths.data(), Rows{1}),
                              make_lengths<space>(requests.data(), Rows{1}), table, table};
  Indexer::inputs<space> const in{
      make_query<space>(query.data(), Rows{1}, Heads{heads}, HeadDim{lanes}),
      make_head_weights<space>(head_weights.data(), Rows{1}, Heads{heads}),
      make_contiguous_cache<space>(cache.data(), Requests{1}, Keys{count}, HeadDim{lanes})};
  Shape const shape{1, count, 1, heads, lanes, 1, 1, 1};
  test::Guarded<float> scores(keys.size() / q.size() * weights.size());
  test::Guarded<position_t> best(1);
  test::Guarded<position_t> chosen(1);
  test::Scratch memory(
      WorkspaceSize{std::max(select_workspace(x, Indexer{}, RadixTopK{}, shape, 1 << 20)->bytes,
                             indexer_workspace(x, Indexer{}, shape)->bytes)});
  REQUIRE(indexer_score(x, Indexer{}, in, batch, ScoreRequest{{0, 1}, 0},
                        make_scores<space>(scores.data(), Rows{1}, Keys{count}), memory.get())
              .ok());
  REQUIRE(select(x, Indexer{}, RadixTopK{}, in, batch, shape,
                 make_selection<space>(best.data(), chosen.data(), Rows{1}, TopK{1}), memory.get())
              .ok());
  test::finish(x);
  return {Values(scores.span().begin(), scores.span().end()), best[0]};
}

/// Rotates a row in place for `position`, pairing lanes by `layout`.
void rotate(float* row, std::size_t dims, double theta, int position, RopeLayout layout) {
  for (std::size_t i = 0; i < dims / 2; ++i) {
    double const angle =
        position * std::pow(theta, -2.0 * static_cast<double>(i) / static_cast<double>(dims));
    std::size_t const a = layout == RopeLayout::interleaved ? 2 * i : i;
    std::size_t const b = layout == RopeLayout::interleaved ? 2 * i + 1 : i + dims / 2;
    double const x = row[a], y = row[b];
    row[a] = static_cast<float>(x * std::cos(angle) - y * std::sin(angle));
    row[b] = static_cast<float>(x * std::sin(angle) + y * std::cos(angle));
  }
}

void check_scores(Scored const& got, nlohmann::json const& scores, nlohmann::json const& index) {
  REQUIRE(got.scores.size() == scores.size());
  for (std::size_t i = 0; i < scores.size(); ++i) {
    INFO(i);
    CHECK(got.scores[i] == Catch::Approx(scores[i].get<double>()).margin(1e-6));
  }
  CHECK(got.best == index.at(0).get<position_t>());
}

}  // namespace

TEMPLATE_LIST_TEST_CASE("ROPE R021, R022, R025: vector V01, the layout decides which key wins", "",
                        test::Executors) {
  auto const v = test::fault_vector("V01_rope");
  for (auto const& [name, layout] : {std::pair{"interleaved", RopeLayout::interleaved},
                                     std::pair{"half_split", RopeLayout::half_split}}) {
    CAPTURE(name);
    auto const dims = v.at("rope_dim").template get<std::size_t>();
    auto const theta = v.at("theta").template get<double>();
    auto q = v.at("q").template get<Values>();
    rotate(q.data(), dims, theta, v.at("q_pos").template get<int>(), layout);
    Values keys;
    int position = 0;
    for (auto const& key : v.at("keys")) {
      auto row = key.template get<Values>();
      rotate(row.data(), dims, theta, position++, layout);
      keys.insert(keys.end(), row.begin(), row.end());
    }
    check_scores(score(TestType{}, q, v.at("w").template get<Values>(), keys),
                 v.at(name).at("scores_without_constants"), v.at(name).at("index"));
  }
}

TEMPLATE_LIST_TEST_CASE("NORM R033: vector V02, the eps of the key norm decides which key wins", "",
                        test::Executors) {
  auto const v = test::fault_vector("V02_layernorm_eps");
  for (char const* const eps : {"1e-06", "1e-05"}) {
    CAPTURE(eps);
    auto const& expected = v.at(eps);
    auto keys = expected.at("k_A").template get<Values>();
    auto const b = expected.at("k_B").template get<Values>();
    keys.insert(keys.end(), b.begin(), b.end());
    check_scores(score(TestType{}, {2, 0, 0, 1}, {1, 0.75f}, keys), expected.at("scores"),
                 expected.at("index"));
  }
}

TEMPLATE_LIST_TEST_CASE("KSHAPE R118: vector V17, draft rows select among what each of them sees",
                        "", test::Executors) {
  auto const v = test::fault_vector("V17_next_n");
  int const context = v.at("context_len_incl_drafts"), next_n = v.at("next_n");
  std::vector<position_t>
      visible_keys;  // draft rows are rows of a batch with a length of their own
  for (int row = 0; row < next_n; ++row) visible_keys.push_back(context - next_n + 1 + row);
  Rows const rows{next_n};
  auto const lengths = test::guarded(visible_keys);
  auto const scores = test::guarded(Values(static_cast<std::size_t>(next_n) * 16, 1.0f));
  test::Guarded<position_t> indices(scores.size(), test::unwritten);
  test::Guarded<position_t> counts(lengths.size(), test::unwritten);
  test::Scratch memory(
      topk_workspace(TestType{}, RadixTopK{}, Shape{next_n, 16, 16, 1, 1, 1, 1, 1}).value());
  REQUIRE(topk_select(TestType{}, RadixTopK{}, make_scores<space>(scores.data(), rows, Keys{16}),
                      make_lengths<space>(lengths.data(), rows),
                      make_selection<space>(indices.data(), counts.data(), rows, TopK{16}),
                      memory.get())
              .ok());
  test::finish(TestType{});
  for (std::size_t row = 0; row < lengths.size(); ++row) {
    auto const visible = v.at("visible").at(row).template get<position_t>();
    CHECK(counts[row] == visible);
    CHECK(indices[row * 16 + static_cast<std::size_t>(visible) - 1] == visible - 1);
    CHECK(indices[row * 16 + static_cast<std::size_t>(visible)] == -1);
  }
}

#if !defined(INDEXSHARE_TEST_CUDA)
TEST_CASE("INT32 R142: vector V19, offsets past 2^31 stay positive") {
  auto const v = test::fault_vector("V19_offsets");
  test::HugeMemory const memory(std::size_t{1} << 32);
  if (memory.as<std::byte>() == nullptr) SKIP("the system does not reserve 4 GiB of addresses");
  auto const offset = [&](index_t block_stride, index_t slot) {
    CacheView<space, format::LatentE4m3> cache{};
    cache.data = memory.as<std::byte>();
    cache.blocks = slot + 1;
    cache.block_stride = block_stride;
    return cache.block_of(slot) - cache.data;
  };
  CHECK(offset(41984, 51151) == v.at("51151*41984").get<std::int64_t>());
  CHECK(offset(8448, 254201) == v.at("254201*8448").get<std::int64_t>());
  auto const scores = make_scores<space>(static_cast<float*>(nullptr), Rows{2049}, Keys{1048576});
  CHECK(static_cast<std::int64_t>(scores.mapping()(2048, 0)) ==
        v.at("2048*1048576").get<std::int64_t>());
  auto const square = make_scores<space>(static_cast<float*>(nullptr), Rows{46342}, Keys{46341});
  CHECK(static_cast<std::int64_t>(square.mapping()(46341, 0)) ==
        v.at("46341*46341").get<std::int64_t>());
}
#endif
