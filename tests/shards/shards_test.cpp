// SPDX-License-Identifier: Apache-2.0
//
// Merging what shards of the keys selected and attended to.
#include <indexshare/host/attention.hpp>
#include <indexshare/host/shards.hpp>
#include <indexshare/host/topk.hpp>
#include <indexshare/reference.hpp>
#include <indexshare/topk/radix.hpp>

#include <catch2/catch_template_test_macros.hpp>
#include <catch2/catch_test_macros.hpp>

#include "executors.hpp"
#include "memory.hpp"
#include "oracle.hpp"
#include "random.hpp"
#include "refusal.hpp"

#include <cmath>
#include <limits>
#include <utility>
#include <vector>

using namespace indexshare;
using test::refused;
using test::succeeded;

namespace {

constexpr auto host = Space::host;
constexpr float infinity = std::numeric_limits<float>::infinity();
constexpr float not_a_number = std::numeric_limits<float>::quiet_NaN();
constexpr std::size_t to_size(index_t n) { return static_cast<std::size_t>(n); }

/// How the keys are dealt out: rank r of n holds `first(r) + step * i`.
struct Deal {
  index_t ranks, keys;
  bool in_turn;

  index_t first(index_t rank) const { return in_turn ? rank : rank * share(); }
  index_t step() const { return in_turn ? ranks : 1; }
  index_t share() const { return (keys + ranks - 1) / ranks; }
  /// Keys of the rank below `length` of the request.
  index_t visible(index_t rank, index_t length) const {
    if (in_turn) return length > rank ? (length - rank - 1) / ranks + 1 : 0;
    return std::clamp<index_t>(length - first(rank), 0, share());
  }
};

/// What one rank selected, with a policy of the library.
struct Shard {
  test::Guarded<float> scores;  // [rows, share]
  test::Guarded<position_t> indices, counts;
  test::Guarded<float> best;
  index_t rows, top_k;
  Deal deal;
  index_t rank;

  template <class X>
  Shard(X const& x, std::vector<float> const& all, std::vector<index_t> const& lengths, Deal deal_,
        index_t rank_, index_t k)
      : scores(lengths.size() * to_size(deal_.share())),
        indices(lengths.size() * to_size(k), test::unwritten),
        counts(lengths.size(), test::unwritten),
        best(lengths.size() * to_size(k)),
        rows(static_cast<index_t>(lengths.size())),
        top_k(k),
        deal(deal_),
        rank(rank_) {
    test::Guarded<position_t> visible(lengths.size());
    for (index_t r = 0; r < rows; ++r) {
      visible[to_size(r)] = static_cast<position_t>(deal.visible(rank, lengths[to_size(r)]));
      for (index_t i = 0; i < visible[to_size(r)]; ++i) {
        scores[to_size(r * deal.share() + i)] =
            all[to_size(r * deal.keys + deal.first(rank) + i * deal.step())];
      }
    }
    auto const view = make_selection<host>(indices.data(), counts.data(), Rows{rows}, TopK{k});
    Shape shape{};
    shape.rows = rows;
    shape.keys = deal.share();
    shape.top_k = k;
    test::Scratch ws(topk_workspace(x, RadixTopK{}, shape).value());
    REQUIRE_THAT(
        topk_select(x, RadixTopK{},
                    make_scores<host, float const>(scores.data(), Rows{rows}, Keys{deal.share()}),
                    make_lengths<host>(visible.data(), Rows{rows}), view, ws.get()),
        succeeded());
    for (index_t r = 0; r < rows; ++r) {
      for (index_t j = 0; j < counts[to_size(r)]; ++j) {
        index_t const local = indices[to_size(r * k + j)];
        best[to_size(r * k + j)] = scores[to_size(r * deal.share() + local)];
      }
    }
  }

  ShardSelection get() const {
    return {{make_dense<host, position_t const, 2>(indices.data(), {rows, top_k}),
             make_dense<host, position_t const, 1>(counts.data(), {rows})},
            make_dense<host, float const, 2>(best.data(), {rows, top_k}),
            static_cast<position_t>(deal.first(rank)),
            static_cast<position_t>(deal.step())};
  }
};

struct Merged {
  test::Guarded<position_t> indices, counts;
  index_t top_k;

  Merged(index_t rows, index_t k)
      : indices(to_size(rows * k), test::unwritten),
        counts(to_size(rows), test::unwritten),
        top_k(k) {}
  SelectionView<host> view() {
    return make_selection<host>(indices.data(), counts.data(),
                                Rows{static_cast<index_t>(counts.size())}, TopK{top_k});
  }
  test::Row row(index_t r) const {
    auto const begin = indices.data() + r * top_k;
    return {{begin, begin + top_k}, counts[to_size(r)]};
  }
};

/// Scores of `rows` rows: plateaus that reach over the ranks, zeros of both signs, NaN, infinities.
std::vector<float> hard_scores(index_t rows, index_t keys) {
  test::Random random(static_cast<std::uint64_t>(rows * keys));
  std::vector<float> scores(to_size(rows * keys));
  for (float& score : scores) {
    switch (random.below(8)) {
      case 0:
        score = 0.0f;
        break;
      case 1:
        score = -0.0f;
        break;
      case 2:
        score = 1.5f;
        break;
      case 3:
        score = random.below(9) == 0 ? not_a_number : -infinity;
        break;
      default:
        score = random.normal();
    }
  }
  return scores;
}

}  // namespace

TEMPLATE_LIST_TEST_CASE("shards: the merged selection is that of all keys", "[shards]",
                        test::Executors) {
  TestType const x{};
  index_t const keys = 203;
  std::vector<index_t> const lengths{203, 0, 1, 40, 150, 7, 202};
  auto const rows = static_cast<index_t>(lengths.size());
  auto const scores = hard_scores(rows, keys);
  for (index_t const ranks : {1, 2, 3, 8}) {
    for (bool const in_turn : {false, true}) {
      for (index_t const k : {1, 5, 32, 150, 300}) {
        CAPTURE(ranks, in_turn, k);
        Deal const deal{ranks, keys, in_turn};
        std::vector<Shard> shards;
        std::vector<ShardSelection> views;
        for (index_t r = 0; r < ranks; ++r) shards.emplace_back(x, scores, lengths, deal, r, k);
        for (Shard const& shard : shards) views.push_back(shard.get());
        Merged merged(rows, k);
        test::Scratch ws(merge_selections_workspace(x, ranks, TopK{k}));
        REQUIRE_THAT(merge_selections(x, views, merged.view(), ws.get()), succeeded());
        for (index_t r = 0; r < rows; ++r) {
          auto const row = std::span(scores).subspan(to_size(r * keys), to_size(keys));
          CHECK(test::difference(test::select_by_sort(row, lengths[to_size(r)], k),
                                 merged.row(r)) == "");
        }
        CHECK((ws.intact() && merged.indices.intact() && merged.counts.intact()));
      }
    }
  }
}

TEST_CASE("PARTITION: indices of a shard are its own until they are merged", "[shards][fault]") {
  // Two ranks of four keys: each one's best is its position 0.
  std::vector<float> const scores{9, 0, 0, 0, 8, 0, 0, 0};
  test::Serial const x;
  std::vector<Shard> shards;
  for (index_t r : {0, 1})
    shards.emplace_back(x, scores, std::vector<index_t>{8}, Deal{2, 8, false}, r, 2);
  CHECK(shards[1].indices[0] == 0);
  std::vector<ShardSelection> const views{shards[0].get(), shards[1].get()};
  Merged merged(1, 2);
  test::Scratch ws(merge_selections_workspace(x, 2, TopK{2}));
  REQUIRE_THAT(merge_selections(x, views, merged.view(), ws.get()), succeeded());
  CHECK(merged.row(0) == test::Row{{0, 4}, 2});
}

TEST_CASE("shards: entries that are no position are left out", "[shards]") {
  auto const indices = test::guarded<position_t>({2, -1, 1, 3, -5, 2147483647});
  auto const counts = test::guarded<position_t>({3, 9});
  auto const scores = test::guarded<float>({1, 7, 2, 3, 7, 7});
  std::vector<ShardSelection> const views{
      {{make_dense<host, position_t const, 2>(indices.data(), {2, 3}),
        make_dense<host, position_t const, 1>(counts.data(), {2})},
       make_dense<host, float const, 2>(scores.data(), {2, 3}),
       10,
       2}};
  Merged merged(2, 3);
  test::Scratch ws(merge_selections_workspace(test::Serial{}, 1, TopK{3}));
  REQUIRE_THAT(merge_selections(test::Serial{}, views, merged.view(), ws.get()), succeeded());
  CHECK(merged.row(0) == test::Row{{12, 14, -1}, 2});
  CHECK(merged.row(1) == test::Row{{16, -1, -1}, 1});
}

TEST_CASE("shards: what does not fit is refused by name, and nothing is written", "[shards]") {
  test::Serial const x;
  std::vector<float> const scores{9, 0, 0, 0, 8, 0, 0, 0};
  std::vector<Shard> shards;
  for (index_t r : {0, 1})
    shards.emplace_back(x, scores, std::vector<index_t>{8}, Deal{2, 8, false}, r, 2);
  Merged merged(1, 2);
  test::Scratch ws(merge_selections_workspace(x, 2, TopK{2}));
  auto const run = [&](auto const& change) {
    std::vector<ShardSelection> views{shards[0].get(), shards[1].get()};
    change(views[1]);
    return merge_selections(x, views, merged.view(), ws.get());
  };
  CHECK_THAT(run([](auto& s) { s.first = -1; }), refused(Errc::bad_value, "first position"));
  CHECK_THAT(run([](auto& s) { s.step = 0; }), refused(Errc::bad_value, "step"));
  CHECK_THAT(run([](auto& s) { s.scores = {}; }), refused(Errc::bad_shape, "scores"));
  CHECK_THAT(run([](auto& s) { s.selection.counts = {}; }), refused(Errc::bad_shape, "counts"));
  std::vector<ShardSelection> const views{shards[0].get(), shards[1].get()};
  CHECK_THAT(merge_selections(x, views, merged.view(), {}),
             refused(Errc::workspace_too_small, "merge_selections"));
  CHECK(merged.counts[0] == test::unwritten_value<position_t>());
  REQUIRE_THAT(merge_selections(x, {}, merged.view(), {}), succeeded());
  CHECK(merged.row(0) == test::Row{{-1, -1}, 0});
}

namespace {

/// Rows of queries and of the KV of all keys, and attention over any positions of them.
struct Attention {
  static constexpr index_t rows = 3, heads = 5, lanes = 24, values = 16, keys = 90;
  std::vector<float> q, kv, sink;

  Attention() {
    test::Random random(5);
    q = random.normals(to_size(rows * heads * lanes));
    kv = random.normals(to_size(keys * lanes));
    sink = random.normals(to_size(heads));
  }

  struct Result {
    std::vector<float> out = std::vector<float>(to_size(rows * heads * values));
    std::vector<float> lse = std::vector<float>(to_size(rows * heads));
  };

  /// Row r attends to positions[r], by the library.
  template <class X>
  Result run(X const& x, std::vector<std::vector<position_t>> const& positions, bool sinks) const {
    Result result;
    std::vector<position_t> slots(to_size(rows * keys), no_position), counts;
    for (std::size_t r = 0; r < to_size(rows); ++r) {
      std::copy(positions[r].begin(), positions[r].end(),
                slots.begin() + static_cast<index_t>(r) * keys);
      counts.push_back(static_cast<position_t>(positions[r].size()));
    }
    std::vector<position_t> const requests(to_size(rows), 0);
    using Policy = SparseMla<float, format::Plain<float>>;
    Shape const shape{rows, keys, keys, 1, 1, heads, lanes, values};
    RowBatch<host> batch;
    batch.lengths = make_lengths<host>(counts.data(), Rows{rows});
    batch.requests = make_lengths<host>(requests.data(), Rows{rows});
    batch.kv_pages = make_contiguous_table<host>(Keys{keys});
    Policy::inputs<host> const in{
        make_query<host>(q.data(), Rows{rows}, Heads{heads}, HeadDim{lanes}),
        make_contiguous_cache<host>(kv.data(), Requests{1}, Keys{keys}, HeadDim{lanes}), 0.3f,
        sinks ? make_sink<host>(sink.data(), Heads{heads}) : SinkView<host>{}};
    Policy::outputs<host> const out{
        make_output<host>(result.out.data(), Rows{rows}, Heads{heads}, HeadDim{values}),
        make_lse<host>(result.lse.data(), Rows{rows}, Heads{heads})};
    GroupPlan<host> const plan{make_dense<host, position_t const, 2>(slots.data(), {rows, keys}),
                               make_dense<host, position_t const, 1>(counts.data(), {rows})};
    test::Scratch ws(attention_workspace(x, Policy{}, shape).value());
    REQUIRE_THAT(attention_check(x, Policy{}, in, out, batch, shape), succeeded());
    REQUIRE_THAT(
        attention_run(x, Policy{}, in, batch, RowRange{0, rows}, plan, out, shape, ws.get()),
        succeeded());
    return result;
  }
};

bool near(float a, float b) {
  return a == b || std::abs(a - b) <= 3e-6f * std::max(1.0f, std::abs(b));
}
bool near(std::vector<float> const& a, std::vector<float> const& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                    [](float x, float y) { return near(x, y); });
}

}  // namespace

TEMPLATE_LIST_TEST_CASE("shards: the merged attention is that over all keys", "[shards]",
                        test::Executors) {
  TestType const x{};
  Attention const model;
  // Row 0 over three shards, row 1 in the second alone, row 2 nowhere.
  std::vector<std::vector<position_t>> const all{{1, 5, 31, 32, 60, 61, 89}, {33, 40}, {}};
  for (bool const sinks : {false, true}) {
    CAPTURE(sinks);
    auto const whole = model.run(x, all, sinks);
    std::vector<Attention::Result> parts;
    for (position_t first : {0, 30, 60}) {
      std::vector<std::vector<position_t>> own(3);
      for (std::size_t r = 0; r < 3; ++r) {
        std::copy_if(all[r].begin(), all[r].end(), std::back_inserter(own[r]),
                     [&](position_t s) { return first <= s && s < first + 30; });
      }
      parts.push_back(model.run(x, own, false));
    }
    for (float& value : parts[0].out) {  // of row 1, which has no key there: never read
      auto const at = static_cast<index_t>(&value - parts[0].out.data());
      if (at / (Attention::heads * Attention::values) == 1) value = not_a_number;
    }
    std::vector<ShardAttention<float>> shards;
    for (auto const& part : parts) {
      shards.push_back({make_dense<host, float const, 3>(part.out.data(),
                                                         {3, Attention::heads, Attention::values}),
                        make_dense<host, float const, 2>(part.lse.data(), {3, Attention::heads})});
    }
    Attention::Result merged;
    cuda::std::span<ShardAttention<float> const> const views(shards.data(), shards.size());
    auto const out = make_output<host>(merged.out.data(), Rows{3}, Heads{Attention::heads},
                                       HeadDim{Attention::values});
    REQUIRE_THAT(
        merge_attention(
            x, views,
            sinks ? make_sink<host>(model.sink.data(), Heads{Attention::heads}) : SinkView<host>{},
            out, make_lse<host>(merged.lse.data(), Rows{3}, Heads{Attention::heads})),
        succeeded());
    CHECK(near(merged.out, whole.out));
    CHECK(near(merged.lse, whole.lse));
    CHECK(merged.lse.back() == -infinity);
    CHECK(merged.out.back() == 0.0f);
  }
}

TEST_CASE("shards: far apart lse, one shard, and what is refused", "[shards]") {
  test::Serial const x;
  std::vector<float> const a{2, 4}, b{6, 8};
  auto const merge = [&](float lse_a, float lse_b, std::vector<float>& out,
                         std::vector<float>& lse) {
    std::vector<ShardAttention<float>> const shards{
        {make_dense<host, float const, 3>(a.data(), {1, 1, 2}),
         make_dense<host, float const, 2>(&lse_a, {1, 1})},
        {make_dense<host, float const, 3>(b.data(), {1, 1, 2}),
         make_dense<host, float const, 2>(&lse_b, {1, 1})}};
    return merge_attention(x, cuda::std::span<ShardAttention<float> const>(shards.data(), 2), {},
                           make_output<host>(out.data(), Rows{1}, Heads{1}, HeadDim{2}),
                           make_lse<host>(lse.data(), Rows{1}, Heads{1}));
  };
  std::vector<float> out(2), lse(1);
  REQUIRE_THAT(merge(1000, -1000, out, lse), succeeded());
  CHECK((out == a && lse[0] == 1000));
  REQUIRE_THAT(merge(-1e30f, -infinity, out, lse), succeeded());
  CHECK((out == a && lse[0] == -1e30f));
  REQUIRE_THAT(merge(80, 80, out, lse), succeeded());
  CHECK(out == std::vector<float>{4, 6});
  CHECK(near(lse[0], 80 + std::log(2.0f)));
  for (auto const& [first, second] : std::vector<std::pair<float, float>>{{not_a_number, -infinity},
                                                                          {-infinity, not_a_number},
                                                                          {not_a_number, 1},
                                                                          {1, not_a_number}}) {
    REQUIRE_THAT(merge(first, second, out, lse), succeeded());
    CHECK((std::isnan(out[0]) && std::isnan(out[1]) && std::isnan(lse[0])));
  }
  ShardAttention<float> const odd{make_dense<host, float const, 3>(a.data(), {1, 2, 1}),
                                  make_dense<host, float const, 2>(b.data(), {1, 1})};
  CHECK_THAT(merge_attention(x, cuda::std::span<ShardAttention<float> const>(&odd, 1), {},
                             make_output<host>(out.data(), Rows{1}, Heads{1}, HeadDim{2}), {}),
             refused(Errc::bad_shape, "heads of a shard's attention").naming(1, 2));
}
