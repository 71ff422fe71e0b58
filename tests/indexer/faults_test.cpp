// SPDX-License-Identifier: Apache-2.0
//
// Faults that were reported for other implementations, by kind and number of the fault log, and
// what a row's bits may depend on.
#include <indexshare/host/indexer.hpp>
#include <indexshare/indexer/relu_dot.hpp>
#include <indexshare/reference.hpp>
#include <indexshare/select.hpp>

#include <catch2/catch_template_test_macros.hpp>
#include <catch2/catch_test_macros.hpp>

#include "huge.hpp"
#include "indexer_run.hpp"
#include "random.hpp"
#include "vectors.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string_view>
#include <thread>
#include <vector>

using namespace indexshare;
using test::check_scores;
using test::IndexerCase;
using test::IndexerInputs;
using test::one_hot;
using test::Random;
using test::Row;
using test::run_scores;
using test::run_select;

namespace {

using Fp32 = IndexerCase<float, format::Plain<float>>;
using Bf16 = IndexerCase<bf16, format::Plain<bf16>>;

/// Rows of random lengths over requests that are longer than a few blocks of keys.
Bf16 mixed_case(index_t page_size) {
  Bf16 c(17, {.requests = 3, .keys = 192, .lanes = 32, .page_size = page_size, .seed = 4});
  for (index_t r = 0; r < 3; ++r) c.keys.write_random(r, 0, 192, 11);
  Random random(12);
  for (std::uint64_t seed = 0; seed < 21; ++seed) {
    // a prefill chunk of request 0, then decode rows of any request
    bool const prefill = seed < 10;
    c.add_random_row(static_cast<position_t>(prefill ? 120 + seed : random.below(193)),
                     static_cast<position_t>(prefill ? 0 : random.below(3)), seed);
  }
  return c;
}

template <class Query, class Format>
void copy_row(IndexerCase<Query, Format> const& from, index_t row, IndexerCase<Query, Format>& to) {
  auto const q = from.query(row);
  auto const w = from.weights(row);
  auto const r = static_cast<std::size_t>(row);
  to.add_row(from.lengths[r], from.requests[r], {q.begin(), q.end()}, {w.begin(), w.end()});
}

template <class Query, class Format>
void remove_rows(IndexerCase<Query, Format>& c) {
  c.q.clear();
  c.w.clear();
  c.lengths.clear();
  c.requests.clear();
}

}  // namespace

// ---- What a row's bits depend on

TEMPLATE_LIST_TEST_CASE("indexer: a row's bits do not depend on its batch", "[indexer]",
                        test::Executors) {
  auto const c = mixed_case(16);
  auto const together = run_scores(TestType{}, c);
  check_scores(c, together);
  auto shuffled = mixed_case(16);
  remove_rows(shuffled);
  auto const order = Random(2).permutation<index_t>(static_cast<std::size_t>(c.rows()));
  std::vector<std::vector<float>> want;
  for (index_t const row : order) {
    copy_row(c, row, shuffled);
    want.push_back(together[static_cast<std::size_t>(row)]);
  }
  CHECK(run_scores(TestType{}, shuffled) == want);
  for (index_t row = 0; row < c.rows(); ++row) {
    auto alone = mixed_case(16);
    remove_rows(alone);
    copy_row(c, row, alone);
    CHECK(run_scores(TestType{}, alone)[0] == together[static_cast<std::size_t>(row)]);
  }
}

TEMPLATE_LIST_TEST_CASE("indexer: a row's bits do not depend on the pass that scores it",
                        "[indexer]", test::Executors) {
  auto const c = mixed_case(16);
  auto const whole = run_scores(TestType{}, c);
  for (RowRange const range : {RowRange{0, 1}, RowRange{1, 9}, RowRange{7, 13}, RowRange{20, 1}}) {
    auto const part = run_scores(TestType{}, c, {}, 0, range);
    CHECK(std::equal(part.begin(), part.end(), whole.begin() + range.first));
  }
  auto const above = run_scores(TestType{}, c, {}, 125);  // rows up to 125 keys are left out
  for (std::size_t r = 0; r < whole.size(); ++r) {
    CHECK((above[r].empty() ? c.lengths[r] <= 125 : above[r] == whole[r]));
  }
}

TEMPLATE_LIST_TEST_CASE("indexer: a row's bits do not depend on the pages", "[indexer]",
                        test::Executors) {
  auto const want = run_scores(TestType{}, mixed_case(0));
  for (index_t const page_size : {1, 4, 16, 64}) {
    CHECK(run_scores(TestType{}, mixed_case(page_size)) == want);
  }
}

#if !defined(INDEXSHARE_TEST_CUDA)
TEST_CASE("indexer: host bits do not depend on threads or their order", "[indexer]") {
  auto const c = mixed_case(4);
  auto const want = run_scores(test::Serial{}, c);
  CHECK(run_scores(test::Threads{}, c) == want);
  CHECK(run_scores(test::Backward{}, c) == want);
}
#endif

#if !defined(INDEXSHARE_TEST_CUDA)
TEST_CASE("indexer: two calls in flight with two workspaces", "[indexer]") {
  auto const c = mixed_case(16);
  auto const want = run_select(test::Serial{}, c, 40);
  Shape const shape = c.shape(40);
  IndexerInputs<bf16, format::Plain<bf16>> const memory(c);
  struct Call {
    test::Scratch workspace;
    test::Guarded<position_t> indices;
    test::Guarded<position_t> counts;
    bool ok = true;
  };
  auto const need = select_workspace(test::Threads{}, Bf16::Policy{}, RadixTopK{}, shape, 1 << 20);
  REQUIRE(need.has_value());
  std::vector<Call> calls;
  for (int i = 0; i < 2; ++i) {
    calls.push_back({test::Scratch(*need),
                     test::Guarded<position_t>(static_cast<std::size_t>(c.rows() * 40)),
                     test::Guarded<position_t>(static_cast<std::size_t>(c.rows()))});
  }
  std::vector<std::thread> threads;
  for (Call& call : calls) {
    threads.emplace_back([&] {  // no Catch2 assertions in here
      for (int repeat = 0; repeat < 5; ++repeat) {
        auto const out = make_selection<test::space>(call.indices.data(), call.counts.data(),
                                                     Rows{c.rows()}, TopK{40});
        call.ok = select(test::Threads{}, Bf16::Policy{}, RadixTopK{}, memory.inputs(),
                         memory.batch(), shape, out, call.workspace.get())
                      .ok() &&
                  call.ok;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (Call const& call : calls) {
    CHECK(call.ok);
    for (index_t row = 0; row < c.rows(); ++row) {
      auto const& expected = want[static_cast<std::size_t>(row)];
      CHECK(std::equal(expected.indices.begin(), expected.indices.end(),
                       call.indices.data() + row * 40));
    }
  }
}
#endif

TEMPLATE_LIST_TEST_CASE("MEM R138: the selection does not depend on the budget", "[indexer][fault]",
                        test::Executors) {
  auto const c = mixed_case(16);
  auto const want = run_select(TestType{}, c, 40);
  using Policy = Bf16::Policy;
  std::size_t previous = 0;
  for (index_t const rows : {1, 2, 3, 8, 20}) {  // bytes for exactly so many rows per pass
    auto const need = select_workspace(TestType{}, Policy{}, RadixTopK{},
                                       c.shape(40).with_rows(rows), std::size_t{1} << 30);
    REQUIRE(need.has_value());
    CHECK(need->bytes >= previous);  // a fused selection needs no more for more than a few rows
    previous = need->bytes;
    CHECK(run_select(TestType{}, c, 40, need->bytes) == want);
    CHECK(run_select(TestType{}, c, 40, need->bytes + 255) == want);
  }
  CHECK(run_select(TestType{}, c, 40, 0) == want);
}

TEMPLATE_LIST_TEST_CASE("MEM R138: 64 rows of 16384 keys in a quarter of a MiB", "[indexer][fault]",
                        test::Executors) {
  IndexerCase<bf16, format::IndexKeyE4m3> c(
      1, {.requests = 1, .keys = 16384, .lanes = 16, .page_size = 64});
  c.keys.write_random(0, 0, 16384, 1);
  for (std::uint64_t seed = 0; seed < 64; ++seed) {
    c.add_random_row(static_cast<position_t>(16384 - 250 * seed), 0, seed);
  }
  auto const whole = run_select(TestType{}, c, 64);
  CHECK(run_select(TestType{}, c, 64, std::size_t{1} << 18) == whole);
}

TEMPLATE_LIST_TEST_CASE("MEM R140: the selection's workspace is monotone and depends on maxima",
                        "[indexer][fault]", test::Executors) {
  using Policy = Bf16::Policy;
  Shape const base{.rows = 1000, .keys = 300, .top_k = 32, .index_heads = 5, .index_dim = 48};
  auto const bytes = [](Shape const& shape, std::size_t budget) {
    auto const size = select_workspace(TestType{}, Policy{}, RadixTopK{}, shape, budget);
    REQUIRE(size.has_value());
    CHECK(size->bytes <= budget);
    return size->bytes;
  };
  auto const refused = select_workspace(TestType{}, Policy{}, RadixTopK{}, base, 100);
  REQUIRE_FALSE(refused.has_value());
  CHECK(refused.error().code == Errc::workspace_too_small);
  CHECK(refused.error().got == 100);
  auto const minimum = static_cast<std::size_t>(refused.error().expected);
  CHECK(select_workspace(TestType{}, Policy{}, RadixTopK{}, base, minimum).has_value());
  CHECK_FALSE(select_workspace(TestType{}, Policy{}, RadixTopK{}, base, minimum - 1).has_value());
  // the smaller budget splits the rows
  for (std::size_t const budget : {8 * minimum, std::size_t{1} << 30}) {
    std::size_t const at_base = bytes(base, budget);
    for (index_t const more : {1, 2, 64, 100}) {
      for (int field = 0; field < 5; ++field) {
        Shape larger = base;
        if (field == 0) larger.rows += more;
        if (field == 1) larger.keys += more;
        if (field == 2) larger.top_k += more;
        if (field == 3) larger.index_heads += more;
        if (field == 4) larger.index_dim += more;
        CHECK(bytes(larger, budget) >= at_base);
      }
    }
  }
}

// ---- Faults

TEMPLATE_LIST_TEST_CASE("ADDR R037: sampled columns are what they are when scored alone",
                        "[indexer][fault]", test::Executors) {
  Bf16 c(32, {.requests = 1, .keys = 3000, .lanes = 16, .page_size = 64});
  c.keys.write_random(0, 0, 3000, 37);
  for (std::uint64_t seed = 0; seed < 4; ++seed) {
    c.add_random_row(static_cast<position_t>(2997 + seed), 0, seed);
  }
  check_scores(c, run_scores(TestType{}, c));
}

TEMPLATE_LIST_TEST_CASE("ADDR R038: lengths around groups of pages", "[indexer][fault]",
                        test::Executors) {
  for (index_t const boundary : {255, 256, 257, 511, 512, 513}) {
    for (index_t const page_size : {0, 4}) {
      Fp32 c(1, {.requests = 1, .keys = 600, .lanes = 4, .page_size = page_size, .seed = 38});
      for (index_t s = 0; s < boundary + 2; ++s) {
        c.keys.write(0, s,
                     one_hot(4, 1, s == boundary - 1 ? 2.0f : 1.0f / static_cast<float>(s + 2)));
      }
      for (index_t const length : {boundary - 1, boundary, boundary + 1}) {
        c.add_row(static_cast<position_t>(length), 0, one_hot(4, 1), {1});
      }
      auto const rows = run_select(TestType{}, c, 1);
      CHECK(rows[0] == Row{{0}, 1});
      CHECK(rows[1] == Row{{static_cast<position_t>(boundary - 1)}, 1});
      CHECK(rows[2] == rows[1]);
    }
  }
}

TEMPLATE_LIST_TEST_CASE("RACE R043: twenty runs give the same bits", "[indexer][fault]",
                        test::Executors) {
  for (index_t const heads : {1, 16, 64}) {
    Bf16 c(heads, {.requests = 1, .keys = 260, .lanes = 16, .page_size = 64});
    c.keys.write_random(0, 0, 260, 43);
    for (std::uint64_t seed = 0; seed < 9; ++seed) {
      c.add_random_row(static_cast<position_t>(252 + seed), 0, seed);
    }
    auto const want = run_scores(TestType{}, c);
    int wrong = 0;
    for (int run = 0; run < 20; ++run) wrong += run_scores(TestType{}, c) == want ? 0 : 1;
    CHECK(wrong == 0);
  }
}

TEMPLATE_LIST_TEST_CASE("ADDR R044: batches around the number of heads", "[indexer][fault]",
                        test::Executors) {
  for (index_t const rows : {3, 4, 5}) {
    Fp32 c(4, {.requests = rows, .keys = 7, .lanes = 6});
    for (index_t r = 0; r < rows; ++r) {
      c.keys.write_random(r, 0, 7, 44);
      c.add_random_row(7, static_cast<position_t>(r), static_cast<std::uint64_t>(r));
    }
    check_scores(c, run_scores(TestType{}, c));
  }
}

TEMPLATE_LIST_TEST_CASE("ADDR R048: rows after the first chunk use their own weights",
                        "[indexer][fault]", test::Executors) {
  auto const run = [](auto c) {
    for (index_t s = 0; s < 2; ++s) c.keys.write(0, s, one_hot(2, s));
    for (index_t const chunk : {1, 2, 3}) {
      remove_rows(c);
      for (index_t row = 0; row <= chunk; ++row) {
        c.add_row(2, 0, {1, 0, 0, 1},
                  row < chunk ? std::vector<float>{1, 0} : std::vector<float>{0, 1});
      }
      using Policy = typename decltype(c)::Policy;
      auto const budget = select_workspace(TestType{}, Policy{}, RadixTopK{},
                                           c.shape(1).with_rows(chunk), std::size_t{1} << 30);
      REQUIRE(budget.has_value());
      auto const rows = run_select(TestType{}, c, 1, budget->bytes);
      for (index_t row = 0; row <= chunk; ++row) {
        CHECK(rows[static_cast<std::size_t>(row)] == Row{{row < chunk ? 0 : 1}, 1});
      }
    }
  };
  test::CacheShape const shape{.requests = 1, .keys = 2, .lanes = 2};
  run(Fp32(2, shape));
  run(Bf16(2, shape));
  run(IndexerCase<fp16, format::Plain<fp16>>(2, shape));
  run(IndexerCase<bf16, format::IndexKeyE4m3>(2, shape));
  run(IndexerCase<e4m3, format::IndexKeyE4m3>(2, shape));
}

TEMPLATE_LIST_TEST_CASE("INT32 R049: a thousand rows of 64 heads over eight keys",
                        "[indexer][fault]", test::Executors) {
  Bf16 c(64, {.requests = 1, .keys = 8, .lanes = 2});
  c.keys.write_random(0, 0, 8, 49);
  for (std::uint64_t seed = 0; seed < 1024; ++seed) c.add_random_row(8, 0, seed);
  check_scores(c, run_scores(TestType{}, c));
}

TEMPLATE_LIST_TEST_CASE("LEN R050: draft rows end inside a tile and leave the next row alone",
                        "[indexer][fault]", test::Executors) {
  Bf16 c(2, {.requests = 2, .keys = 192, .lanes = 16, .page_size = 64});
  for (index_t r = 0; r < 2; ++r) c.keys.write_random(r, 0, 130, 50);  // 130.. is NaN
  for (position_t request = 0; request < 2; ++request) {
    for (position_t draft = 0; draft < 4; ++draft) {
      c.add_random_row(127 + draft, request, static_cast<std::uint64_t>(4 * request + draft));
    }
  }
  check_scores(c, run_scores(TestType{}, c));  // canaries from each length on
}

TEMPLATE_LIST_TEST_CASE("LEN R051: vector V13, chunked prefill selects what a whole one does",
                        "[indexer][fault]", test::Executors) {
  auto const expected = test::fault_vector("V13_chunked").at("expect");
  index_t const k = test::fault_vector("V13_chunked").at("k");
  constexpr index_t tokens = 12;
  auto const score = [](index_t t, index_t j) { return j == 0 ? 10 : (7 * j + 3 * t) % 11; };
  auto const write = [&](Fp32& c, index_t first, index_t last) {
    for (index_t j = first; j < last; ++j) {
      std::vector<float> key;  // lane t holds the score of query t, which is a one-hot
      for (index_t t = 0; t < tokens; ++t) key.push_back(static_cast<float>(score(t, j)));
      c.keys.write(0, j, key);
    }
  };
  std::vector<Row> want;
  for (auto const& list : expected) {
    Row row{list.template get<std::vector<position_t>>(), 0};
    row.count = static_cast<position_t>(3 - std::count(row.indices.begin(), row.indices.end(), -1));
    std::sort(row.indices.begin(), row.indices.begin() + row.count);
    want.push_back(row);
  }
  for (auto const& chunks :
       {std::vector<index_t>{12}, std::vector<index_t>{5, 4, 3}, std::vector<index_t>{7, 5}}) {
    Fp32 c(1, {.requests = 1, .keys = 16, .lanes = tokens, .page_size = 4});
    std::vector<Row> got;
    index_t start = 0;
    for (index_t const chunk : chunks) {
      write(c, start, start + chunk);  // later keys are still NaN
      remove_rows(c);
      for (index_t t = start; t < start + chunk; ++t) {
        c.add_row(static_cast<position_t>(t + 1), 0, one_hot(tokens, t), {1});
      }
      auto const rows = run_select(TestType{}, c, k);
      got.insert(got.end(), rows.begin(), rows.end());
      start += chunk;
    }
    CHECK(got == want);
  }
}

TEMPLATE_LIST_TEST_CASE("LEN R066: odd widths", "[indexer][fault]", test::Executors) {
  for (index_t width = 1; width <= 17; ++width) {
    Bf16 c(3, {.requests = 1, .keys = width, .lanes = 8});
    c.keys.write_random(0, 0, width, 66);
    for (index_t length = 1; length <= width; ++length) {
      c.add_random_row(static_cast<position_t>(length), 0, static_cast<std::uint64_t>(length));
    }
    check_scores(c, run_scores(TestType{}, c));
  }
  for (index_t const width : {8191, 8192, 8193, 8194}) {
    Bf16 c(1, {.requests = 1, .keys = width, .lanes = 2});
    c.keys.write_random(0, 0, width, 66);
    c.add_random_row(static_cast<position_t>(width), 0, 1);
    c.add_random_row(static_cast<position_t>(width - 1), 0, 2);
    check_scores(c, run_scores(TestType{}, c));
  }
}

TEMPLATE_LIST_TEST_CASE("ADDR R071: a score matrix wider than the page table reaches",
                        "[indexer][fault]", test::Executors) {
  Fp32 c(1, {.requests = 1, .keys = 32, .lanes = 4, .page_size = 1});
  c.keys.write_random(0, 0, 32, 71);
  for (position_t const length : {30, 32, 40, 128}) c.add_random_row(length, 0, 71);
  IndexerInputs<float, format::Plain<float>> const memory(c);
  Shape shape = c.shape(1);
  shape.keys = 128;
  test::Guarded<float> scores(4 * 128, test::unwritten);
  TestType const x{};
  test::Scratch workspace(*indexer_workspace(x, Fp32::Policy{}, shape));
  REQUIRE(indexer_score(x, Fp32::Policy{}, memory.inputs(), memory.batch(), {{0, 4}, 1},
                        make_scores<test::space>(scores.data(), Rows{4}, Keys{128}),
                        workspace.get())
              .ok());
  test::finish(x);
  index_t wrong = 0;
  for (index_t r = 0; r < 4; ++r) {
    for (index_t s = 0; s < c.lengths[static_cast<std::size_t>(r)]; ++s) {
      float const got = scores[static_cast<std::size_t>(r * 128 + s)];
      bool const good = s < 32 ? std::abs(static_cast<double>(got) - c.expected(0, s).value) < 1e-5
                               : got == -std::numeric_limits<float>::infinity();
      wrong += good ? 0 : 1;
    }
  }
  CHECK(wrong == 0);
  CHECK(scores.intact());
}

TEMPLATE_LIST_TEST_CASE("LEN R074: a cache that is longer than what was written",
                        "[indexer][fault]", test::Executors) {
  Fp32 c(1, {.requests = 1, .keys = 16, .lanes = 2, .page_size = 4});
  for (index_t s = 0; s < 16; ++s) c.keys.write(0, s, std::vector<float>{1e30f, 1e30f});  // stale
  for (index_t s = 0; s < 16; ++s) {
    c.keys.write(0, s, std::vector<float>{static_cast<float>((5 * s) % 16), 0});
    remove_rows(c);
    c.add_row(static_cast<position_t>(s + 1), 0, {1, 0}, {1});
    auto const scores = run_scores(TestType{}, c);
    CHECK(run_select(TestType{}, c, 8)[0] == test::select_by_sort(scores[0], s + 1, 8));
    check_scores(c, scores);
  }
}

TEMPLATE_LIST_TEST_CASE("LEN R076: the last pass is shorter than the others", "[indexer][fault]",
                        test::Executors) {
  for (index_t const chunk : {1, 3, 8}) {
    Fp32 c(2, {.requests = 1, .keys = 30, .lanes = 4, .page_size = 4});
    c.keys.write_random(0, 0, 30, 76);
    for (index_t r = 0; r < 2 * chunk + 1; ++r) {
      c.add_random_row(static_cast<position_t>(30 - r), 0, static_cast<std::uint64_t>(r));
    }
    auto const budget = select_workspace(TestType{}, Fp32::Policy{}, RadixTopK{},
                                         c.shape(5).with_rows(chunk), std::size_t{1} << 30);
    REQUIRE(budget.has_value());
    auto const rows = run_select(TestType{}, c, 5, budget->bytes);  // guards after the last row
    CHECK(rows == run_select(TestType{}, c, 5));
  }
}

TEMPLATE_LIST_TEST_CASE("SHORTCUT R137: keys that were written while the row was short",
                        "[indexer][fault]", test::Executors) {
  Fp32 c(1, {.requests = 2, .keys = 8, .lanes = 1, .page_size = 4});
  float const values[] = {9, 1, 8, 2, 7};
  for (index_t r = 0; r < 2; ++r) {
    for (index_t s = 0; s < 5; ++s) c.keys.write(r, s, std::vector<float>{values[s]});
  }
  c.add_row(3, 0, {1}, {1});  // selects everything
  c.add_row(5, 1, {1}, {1});
  auto const rows = run_select(TestType{}, c, 4);
  CHECK(rows[0] == Row{{0, 1, 2, -1}, 3});
  CHECK(rows[1] == Row{{0, 2, 3, 4}, 4});
  remove_rows(c);
  c.add_row(5, 0, {1}, {1});
  CHECK(run_select(TestType{}, c, 4)[0] == rows[1]);
}

TEMPLATE_LIST_TEST_CASE("INT32 R142: blocks of keys more than 2^31 elements apart",
                        "[indexer][fault]", test::Executors) {
  constexpr index_t stride = (index_t{1} << 31) + 64;
  constexpr index_t lanes = 8;
  test::HugeMemory const memory(static_cast<std::size_t>(2 * stride + 64) * sizeof(bf16));
  auto* const keys = memory.template as<bf16>();
  if (keys == nullptr) SKIP("no 8 GiB of addresses here");
  Bf16 c(2, {.requests = 1, .keys = 12, .lanes = lanes, .page_size = 4, .spare_pages = 0});
  c.keys.write_random(0, 0, 12, 42);
  c.add_random_row(12, 0, 1);
  auto view = c.keys.view();
  for (index_t block = 0; block < 3; ++block) {
    std::memcpy(keys + block * stride, view.data + block * view.block_stride,
                static_cast<std::size_t>(4 * lanes) * sizeof(bf16));
  }
  view.data = keys;
  view.block_stride = stride;
  IndexerInputs<bf16, format::Plain<bf16>> const inputs(c);
  auto in = inputs.inputs();
  in.keys = view;
  TestType const x{};
  test::Scratch workspace(*indexer_workspace(x, Bf16::Policy{}, c.shape(1)));
  test::Guarded<float> scores(12, test::unwritten);
  REQUIRE(indexer_score(x, Bf16::Policy{}, in, inputs.batch(), {{0, 1}, 1},
                        make_scores<test::space>(scores.data(), Rows{1}, Keys{12}), workspace.get())
              .ok());
  test::finish(x);
  check_scores(c, {std::vector<float>(scores.data(), scores.data() + 12)});
}

// ---- Refusals

TEMPLATE_LIST_TEST_CASE("indexer: bad inputs are refused by name", "[indexer]", test::Executors) {
  Fp32 c(3, {.requests = 2, .keys = 8, .lanes = 16, .page_size = 4});
  for (int row = 0; row < 4; ++row) c.add_random_row(8, 0, 1);
  IndexerInputs<float, format::Plain<float>> const memory(c);
  using Inputs = decltype(memory.inputs());
  auto const refuses = [&](auto change, Errc code, std::string_view part, std::int64_t expected,
                           std::int64_t got) {
    Inputs in = memory.inputs();
    RowBatch<test::space> batch = memory.batch();
    Shape shape = c.shape(2);
    change(in, batch, shape);
    Status const status = indexer_check(TestType{}, Fp32::Policy{}, in, batch, shape);
    INFO(part << " / " << status.what << " " << status.expected << " " << status.got);
    CHECK(status.code == code);
    CHECK(std::string_view(status.what).find(part) != std::string_view::npos);
    CHECK((status.expected == expected && status.got == got));
  };
  using test::Guarded;
  float const* const data = memory.inputs().q.data_handle();
  auto const q = [&](float const* p, index_t rows, index_t heads, index_t lanes, index_t step = 1) {
    return make_strided<test::space, float const, 3>(p, {rows, heads, lanes},
                                                     {heads * lanes * step, lanes * step, step});
  };
  REQUIRE(
      indexer_check(TestType{}, Fp32::Policy{}, memory.inputs(), memory.batch(), c.shape(2)).ok());
  refuses([&](auto& in, auto&, auto&) { in.q = q(data, 3, 3, 16); }, Errc::bad_shape,
          "rows of the index queries", 4, 3);
  refuses([&](auto& in, auto&, auto&) { in.q = q(data, 4, 2, 16); }, Errc::bad_shape,
          "heads of the index queries", 3, 2);
  refuses([&](auto& in, auto&, auto&) { in.q = q(data, 4, 3, 15); }, Errc::bad_shape,
          "lanes of the index queries", 16, 15);
  refuses([&](auto& in, auto&, auto&) { in.q = q(nullptr, 4, 3, 16); }, Errc::missing_input,
          "index queries", 0, 0);
  refuses([&](auto& in, auto&, auto&) { in.q = q(data, 4, 3, 16, 2); }, Errc::bad_stride,
          "index queries", 1, 2);
  refuses([&](auto& in, auto&,
              auto&) { in.weights = make_head_weights<test::space>(data, Rows{5}, Heads{3}); },
          Errc::bad_shape, "rows of the head weights", 4, 5);
  refuses([&](auto& in, auto&,
              auto&) { in.weights = make_head_weights<test::space>(data, Rows{4}, Heads{4}); },
          Errc::bad_shape, "heads of the head weights", 3, 4);
  refuses([&](auto& in, auto&,
              auto&) { in.weights = make_head_weights<test::space>(nullptr, Rows{4}, Heads{3}); },
          Errc::missing_input, "head weights", 0, 0);
  refuses([&](auto& in, auto&, auto&) { in.keys.lanes = 8; }, Errc::bad_shape,
          "lanes of the index-key cache", 16, 8);
  refuses([&](auto& in, auto&, auto&) { in.keys.block_size = 1; }, Errc::bad_shape,
          "block size of the index-key cache", 4, 1);  // R045: page 4 to a page-1 cache
  refuses([&](auto& in, auto&, auto&) { in.keys.data = nullptr; }, Errc::missing_input,
          "memory of the index-key cache", 0, 0);
  refuses([&](auto& in, auto&, auto&) { in.keys.row_stride = 0; }, Errc::bad_stride,
          "strides of the index-key cache", 1, 0);
  refuses([&](auto&, auto&, auto& shape) { shape.index_heads = 4; }, Errc::bad_shape,
          "heads of the index queries", 4, 3);
  refuses([&](auto&, auto&, auto& shape) { shape.index_dim = 32; }, Errc::bad_shape,
          "lanes of the index queries", 32, 16);
}

TEMPLATE_LIST_TEST_CASE("indexer: too small a workspace is refused before any work", "[indexer]",
                        test::Executors) {
  Fp32 c(2, {.requests = 1, .keys = 20, .lanes = 8});
  c.keys.write_random(0, 0, 20, 1);
  c.add_random_row(20, 0, 1);
  IndexerInputs<float, format::Plain<float>> const memory(c);
  Shape const shape = c.shape(4);
  test::Guarded<position_t> indices(4, test::unwritten);
  test::Guarded<position_t> counts(1, test::unwritten);
  auto const out = make_selection<test::space>(indices.data(), counts.data(), Rows{1}, TopK{4});
  auto const minimum = select_workspace(TestType{}, Fp32::Policy{}, RadixTopK{}, shape, 0);
  REQUIRE_FALSE(minimum.has_value());
  auto const bytes = static_cast<std::size_t>(minimum.error().expected);
  test::Scratch workspace(WorkspaceSize{bytes - 1});
  Status const status = select(TestType{}, Fp32::Policy{}, RadixTopK{}, memory.inputs(),
                               memory.batch(), shape, out, workspace.get());
  CHECK(status.code == Errc::workspace_too_small);
  CHECK(status.expected == static_cast<std::int64_t>(bytes));
  CHECK(status.got == static_cast<std::int64_t>(bytes - 1));
  std::vector<position_t> const blank(4, std::bit_cast<position_t>(0xA5A5A5A5u));
  CHECK(std::equal(blank.begin(), blank.end(), indices.data()));
}
