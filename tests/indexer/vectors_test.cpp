// SPDX-License-Identifier: Apache-2.0
#include <indexshare/indexshare.hpp>

#include <catch2/catch_approx.hpp>
#include <catch2/catch_template_test_macros.hpp>
#include <catch2/catch_test_macros.hpp>

#include <cmath>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "executors.hpp"
#include "vectors.hpp"

using namespace indexshare;

// Vectors whose fault lies in front of the kernels (rotation, LayerNorm). The rotation is done here
// by the layout that the config states; the library scores and selects.

namespace {

constexpr Space host = Space::host;
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
  auto const table = make_contiguous_table<host>(Keys{count});
  RowBatch<host> const batch{make_lengths<host>(&length, Rows{1}),
                             make_lengths<host>(&request, Rows{1}), table, table};
  Indexer::inputs<host> const in{
      make_query<host>(q.data(), Rows{1}, Heads{heads}, HeadDim{lanes}),
      make_head_weights<host>(weights.data(), Rows{1}, Heads{heads}),
      make_contiguous_cache<host>(keys.data(), Requests{1}, Keys{count}, HeadDim{lanes})};
  Shape const shape{1, count, 1, heads, lanes, 1, 1, 1};
  Scored result{Values(keys.size() / q.size() * weights.size()), -1};
  position_t chosen = 0;
  HostMemory const memory(select_workspace(x, Indexer{}, RadixTopK{}, shape, 1 << 20).value());
  REQUIRE(indexer_score(x, Indexer{}, in, batch, ScoreRequest{{0, 1}, 0},
                        make_scores<host>(result.scores.data(), Rows{1}, Keys{count}),
                        memory.view())
              .ok());
  REQUIRE(select(x, Indexer{}, RadixTopK{}, in, batch, shape,
                 make_selection<host>(&result.best, &chosen, Rows{1}, TopK{1}), memory.view())
              .ok());
  return result;
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
  std::vector<position_t> lengths;  // draft rows are rows of a batch with a length of their own
  for (int row = 0; row < next_n; ++row) lengths.push_back(context - next_n + 1 + row);
  Rows const rows{next_n};
  Values const scores(static_cast<std::size_t>(next_n) * 16, 1.0f);
  std::vector<position_t> indices(scores.size(), -7), counts(lengths.size(), -7);
  HostMemory const memory(
      topk_workspace(TestType{}, RadixTopK{}, Shape{next_n, 16, 16, 1, 1, 1, 1, 1}).value());
  REQUIRE(topk_select(TestType{}, RadixTopK{}, make_scores<host>(scores.data(), rows, Keys{16}),
                      make_lengths<host>(lengths.data(), rows),
                      make_selection<host>(indices.data(), counts.data(), rows, TopK{16}),
                      memory.view())
              .ok());
  for (std::size_t row = 0; row < lengths.size(); ++row) {
    auto const visible = v.at("visible").at(row).template get<position_t>();
    CHECK(counts[row] == visible);
    CHECK(indices[row * 16 + static_cast<std::size_t>(visible) - 1] == visible - 1);
    CHECK(indices[row * 16 + static_cast<std::size_t>(visible)] == -1);
  }
}

TEST_CASE("INT32 R142: vector V19, offsets past 2^31 stay positive") {
  auto const v = test::fault_vector("V19_offsets");
  auto const offset = [](index_t block_stride, index_t slot) {
    CacheView<host, format::LatentE4m3> cache{};
    cache.blocks = slot + 1;
    cache.block_stride = block_stride;
    return cache.block_of(slot) - cache.data;
  };
  CHECK(offset(41984, 51151) == v.at("51151*41984").get<std::int64_t>());
  CHECK(offset(8448, 254201) == v.at("254201*8448").get<std::int64_t>());
  auto const scores = make_scores<host>(static_cast<float*>(nullptr), Rows{2049}, Keys{1048576});
  CHECK(static_cast<std::int64_t>(scores.mapping()(2048, 0)) ==
        v.at("2048*1048576").get<std::int64_t>());
  auto const square = make_scores<host>(static_cast<float*>(nullptr), Rows{46342}, Keys{46341});
  CHECK(static_cast<std::int64_t>(square.mapping()(46341, 0)) ==
        v.at("46341*46341").get<std::int64_t>());
}
