// SPDX-License-Identifier: Apache-2.0
//
// How engines batch: chunks of several requests numbered on the device, prefixes in common pages,
// pools and tables that run out.
#if defined(INDEXSHARE_TEST_CUDA)
#include <indexshare/cuda/batch.cuh>
#endif

#include "by_hand.hpp"
#include "session.hpp"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

namespace {
using namespace layer_test;

/// Tokens of each request that a call brings, and how many it holds then.
struct Mode {
  std::string name;
  std::vector<position_t> starts, lengths;
};

/// The rows of a mode, numbered by the library, with `padding` more.
template <class X>
RowList numbered(X const& x, Mode const& mode, std::size_t padding) {
  auto const starts = test::guarded(mode.starts);
  auto const lengths = test::guarded(mode.lengths);
  std::size_t const count = to_size(mode.starts.back()) + padding;
  test::Guarded<position_t> positions(count), row_lengths(count), requests(count);
  auto const view = [count](test::Guarded<position_t>& values) {
    return make_dense<space, position_t, 1>(values.data(), {static_cast<index_t>(count)});
  };
  REQUIRE_THAT(number_rows(x, {numbers(starts), numbers(lengths)},
                           {view(positions), view(row_lengths), view(requests)}),
               succeeded());
  test::finish(x);
  RowList rows;
  for (std::size_t r = 0; r < count; ++r) rows.push_back({requests[r], row_lengths[r]});
  return rows;
}

std::vector<Mode> const modes{
    {"decode", {0, 1, 2, 3, 4}, {29, 37, 4, 40}},
    {"whole prompt", {0, 0, 0, 4, 4}, {29, 37, 4, 40}},
    {"second chunk and its tail", {0, 5, 6, 6, 6}, {24, 37, 4, 40}},
    {"chunks, decode rows, nobody", {0, 5, 6, 6, 9}, {29, 37, 4, 40}},
    {"drafts of 1, 2, 4 and 8 rows", {0, 1, 3, 7, 15}, {29, 37, 4, 40}},
    {"idle", {0, 0, 0, 0, 0}, {29, 37, 4, 40}},
};

TEMPLATE_LIST_TEST_CASE("ADDR R125: every mode, paged and contiguous, alone and with padding",
                        "[serving]", test::Executors) {
  TestType const x{};
  Schedule const share("FS");
  for (Mode const& mode : modes) {
    for (Layout const layout : {Layout{4, 8, 1}, Layout{1, 16, 2}, Layout{0, 0, 3}}) {
      for (std::size_t const padding : {0u, 1u}) {
        CAPTURE(mode.name, layout.index_page, padding);
        Model<> model(share, 2, small_shape, layout);
        RowList const rows = numbered(x, mode, padding);
        Session session(x, model, share, rows);
        session.run_all();
        for (std::size_t r = 0; r < rows.size(); ++r) {
          CAPTURE(r);
          bool const pads = rows[r].request == no_position;
          auto const expected =
              pads ? std::vector<position_t>{} : selection_by_hand(model, 0, rows[r]);
          CHECK(session.selected(1).row(static_cast<index_t>(r)) == expected);
          CHECK(close(row_of(session.out(1), model.shape, r),
                      attention_by_hand(model, 1, rows[r], expected)));
        }
      }
    }
  }
}

/// Gives the first `tokens` tokens of request 1 to be those of request 0 too, in pages of its own.
template <class M>
void same_prompt(M& model, position_t tokens) {
  for (std::int32_t layer = 0; layer < model.layers(); ++layer) {
    for (position_t s = 0; s < tokens; ++s) {
      auto const values = [&](Part part, index_t lanes) {
        return token_values(part, layer, 0, s, lanes);
      };
      model.kv(layer).write(1, s, values(Part::kv, model.shape.key_dim));
      if (model.has_index_keys(layer)) {
        model.index_keys(layer).write(1, s, values(Part::index_key, model.shape.index_dim));
      }
    }
  }
}

/// Maps the pages of the first `tokens` tokens of request 1 to those of request 0.
template <class M>
void common_pages(M& model, position_t tokens) {
  auto const map = [&](auto& cache) {
    for (index_t page = 0; page < tokens / cache.page_size(); ++page) {
      cache.entry(1, page) = cache.entry(0, page);
    }
  };
  for (std::int32_t layer = 0; layer < model.layers(); ++layer) {
    map(model.kv(layer));
    if (model.has_index_keys(layer)) map(model.index_keys(layer));
  }
}

TEMPLATE_LIST_TEST_CASE("serving: a prefix in pages of another request is that request's prefix",
                        "[serving]", test::Executors) {
  TestType const x{};
  Schedule const share("FSSF");
  position_t const prefix = 16;
  Model<> apart(share, 4), common(share, 4);
  same_prompt(apart, prefix);
  common_pages(common, prefix);
  same_prompt(common, prefix);
  REQUIRE(common.kv(2).slot(1, prefix - 1) == common.kv(2).slot(0, prefix - 1));
  REQUIRE(common.kv(2).slot(1, prefix) != common.kv(2).slot(0, prefix));
  // The suffix of request 1 is prefilled from the end of the prefix on, while request 0 decodes.
  RowList const rows = join({chunk(0, 29), chunk(1, 24, 8), chunk(0, 18), chunk(1, 37)});
  Session expected(x, apart, share, rows);
  Session session(x, common, share, rows);
  expected.run_all();
  session.run_all();
  for (std::int32_t const layer : {0, 1, 2, 3}) {
    CHECK(session.selected(layer) == expected.selected(layer));
    CHECK(session.result(layer) == expected.result(layer));
  }
  CHECK(session.selected(2).row(4) == selection_by_hand(apart, 0, rows[4]));
  auto const in_prefix = [&](position_t s) { return s < prefix; };
  auto const selected = session.selected(0).row(4);
  CHECK(std::any_of(selected.begin(), selected.end(), in_prefix));
}

/// Appends tokens [first, last) of a request to layer 0, and says what became of the call.
template <class X>
std::pair<Status, Status> append_tokens(X const& x, Model<>& model, position_t request,
                                        position_t first, position_t last) {
  auto const run = [&](auto& cache, PageTable<space> const& pages, Part part) {
    std::vector<float> values;
    test::Guarded<position_t> at(to_size(last - first)), of(to_size(last - first));
    for (position_t s = first; s < last; ++s) {
      auto const token = token_values(part, 0, request, s, cache.lanes());
      values.insert(values.end(), token.begin(), token.end());
      at[to_size(s - first)] = s;
      of[to_size(s - first)] = request;
    }
    auto const rows = test::guarded(values);
    Status const status = append_rows(
        x, make_dense<space, float const, 2>(rows.data(), {last - first, cache.lanes()}),
        numbers(at), numbers(of), pages, writable(cache));
    test::finish(x);
    return status;
  };
  return {run(model.kv(0), model.kv_pages(), Part::kv),
          run(model.index_keys(0), model.index_pages(), Part::index_key)};
}

std::vector<std::uint32_t> contents(test::PagedCache<format::Plain<float>>& cache) {
  return bits_of(cache.memory().span());
}

TEMPLATE_LIST_TEST_CASE(
    "PAGE R130: at the context limit draft rows are refused or skipped, never "
    "written past it",
    "[serving]", test::Executors) {
  TestType const x{};
  auto const page = GENERATE(index_t{1}, index_t{8});
  Model<> model(Schedule("F"), 1, small_shape, {page, page, 5}, {}, {29, 37, 4, 38});
  Model<> longer(Schedule("F"), 1, small_shape, {page, page, 5}, {}, {29, 37, 4, 40});
  auto const before = contents(model.kv(0));
  // A token and its two drafts at positions 38, 39 and 40; the table ends at 40.
  auto const [kv, keys] = append_tokens(x, model, 3, 38, 41);
  if (space == Space::host) {
    CHECK_THAT(kv, refused(Errc::bad_value, "without a slot").naming(40, 40));
    CHECK_THAT(keys, refused(Errc::bad_value, "without a slot").naming(40, 40));
    CHECK(contents(model.kv(0)) == before);
  } else {
    REQUIRE_THAT(kv, succeeded());
    REQUIRE_THAT(keys, succeeded());
    CHECK(contents(model.kv(0)) == contents(longer.kv(0)));
    CHECK(contents(model.index_keys(0)) == contents(longer.index_keys(0)));
  }
  CHECK(model.kv(0).memory().intact());
  CHECK(model.index_keys(0).memory().intact());
}

TEMPLATE_LIST_TEST_CASE("MEM R128: an index-key pool that is full first refuses cleanly",
                        "[serving]", test::Executors) {
  TestType const x{};
  Model<> model(Schedule("F"), 1, small_shape, {4, 8, 1}, {}, {29, 37, 4, 32});
  model.index_keys(0).unmap(3, 9);  // KV has room for positions 36 .. 39, index keys do not
  auto const keys_before = contents(model.index_keys(0));
  auto const [kv, keys] = append_tokens(x, model, 3, 36, 40);
  CHECK_THAT(kv, succeeded());
  if (space == Space::host) {
    CHECK_THAT(keys, refused(Errc::bad_value, "without a slot"));
  } else {
    CHECK_THAT(keys, succeeded());
  }
  CHECK(contents(model.index_keys(0)) == keys_before);
  // Others go on.
  RowList const rows = join({chunk(1, 37), chunk(3, 32)});
  Session session(x, model, Schedule("F"), rows);
  session.run_all();
  for (std::size_t r : {0u, 1u}) {
    CHECK(session.selected(0).row(static_cast<index_t>(r)) == selection_by_hand(model, 0, rows[r]));
  }
}

TEMPLATE_LIST_TEST_CASE("MTP R123: with k below the length the MTP layer is sparse", "[serving]",
                        test::Executors) {
  TestType const x{};
  Model<> model(Schedule("F"), 1, small_shape, {}, {}, {20, 33});
  RowList const rows = join({chunk(1, 33, 2), chunk(0, 20)});
  Session<TestType, Model<>, MtpDraft> step(x, model, MtpDraft{78, true}, rows, {1, 0}, ample, 78);
  REQUIRE_THAT(step.run(0), succeeded());
  for (std::size_t r = 0; r < rows.size(); ++r) {
    auto const selection = selection_by_hand(model, 0, rows[r]);
    auto const got = row_of(step.out(0), model.shape, r);
    CHECK(selection.size() == 6);
    CHECK(close(got, attention_by_hand(model, 0, rows[r], selection)));
    CHECK_FALSE(close(got, attention_by_hand(model, 0, rows[r], all_below(rows[r].length))));
  }
}

}  // namespace
