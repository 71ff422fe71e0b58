// SPDX-License-Identifier: Apache-2.0
#include <indexshare/attention/mla.hpp>
#include <indexshare/host/attention.hpp>
#include <indexshare/host/selection.hpp>
#include <indexshare/reference.hpp>

#include <catch2/catch_template_test_macros.hpp>
#include <catch2/catch_test_macros.hpp>

#include "attention_run.hpp"
#include "random.hpp"

#include <cmath>
#include <cstdint>
#include <limits>
#include <string_view>
#include <type_traits>
#include <vector>

using namespace indexshare;
using test::AttentionCase;

namespace {
using test::space;
using Format = format::Plain<float>;
}  // namespace

TEMPLATE_LIST_TEST_CASE("attention: bad inputs are refused by name, outputs untouched",
                        "[attention]", test::Executors) {
  AttentionCase<float, Format> c(3, 8, 4, {.requests = 1, .keys = 12, .lanes = 10, .page_size = 4});
  c.kv.write_random(0, 0, 12, 1);
  c.sink = {0, 0, 0};
  for (std::uint64_t row = 0; row < 2; ++row) c.add_positions(row, 0, 12, {0, 4, 9});
  test::AttentionMemory<float, Format, float> memory(c);
  struct Call {
    MlaInputs<float, Format, space> in;
    MlaOutputs<float, space> out;
    RowBatch<space> batch;
    Shape shape;
  };
  Call const good{memory.inputs(), memory.outputs(), memory.batch(), c.shape()};
  auto const check = [](Call const& call) {
    TestType const x{};
    Status const sparse =
        attention_check(x, SparseMla<float, Format>{}, call.in, call.out, call.batch, call.shape);
    Status const dense =
        attention_check(x, DenseMla<float, Format>{}, call.in, call.out, call.batch, call.shape);
    CHECK(sparse.code == dense.code);
    return sparse;
  };
  auto const refuses = [&](auto change, Errc code, std::string_view part, std::int64_t expected,
                           std::int64_t got) {
    Call call = good;
    change(call);
    Status const status = check(call);
    INFO(part << " / " << status.what << " " << status.expected << " " << status.got);
    CHECK(status.code == code);
    CHECK(std::string_view(status.what).find(part) != std::string_view::npos);
    CHECK((status.expected == expected && status.got == got));
  };
  REQUIRE(check(good).ok());

  float const* const q = good.in.q.data_handle();
  float* const out = good.out.out.data_handle();
  float* const lse = good.out.lse.data_handle();
  auto const dense3 = [](auto* p, index_t a, index_t b, index_t d) {
    return make_dense<space, std::remove_pointer_t<decltype(p)>, 3>(p, {a, b, d});
  };
  refuses([&](Call& x) { x.in.q = dense3(q, 1, 3, 10); }, Errc::bad_shape,
          "rows of the attention queries", 2, 1);
  refuses([&](Call& x) { x.in.q = dense3(q, 2, 2, 10); }, Errc::bad_shape,
          "heads of the attention queries", 3, 2);
  refuses([&](Call& x) { x.in.q = dense3(q, 2, 3, 9); }, Errc::bad_shape,
          "lanes of the attention queries", 10, 9);
  refuses([&](Call& x) { x.in.q = dense3(static_cast<float const*>(nullptr), 2, 3, 10); },
          Errc::missing_input, "attention queries", 0, 0);
  refuses(
      [&](Call& x) {
        x.in.q = make_strided<space, float const, 3>(q, {2, 3, 10}, {60, 20, 2});
      },
      Errc::bad_stride, "attention queries", 1, 2);
  refuses([&](Call& x) { x.out.out = dense3(out, 3, 3, 8); }, Errc::bad_shape,
          "rows of the attention output", 2, 3);
  refuses([&](Call& x) { x.out.out = dense3(out, 2, 4, 8); }, Errc::bad_shape,
          "heads of the attention output", 3, 4);
  refuses([&](Call& x) { x.out.out = dense3(out, 2, 3, 7); }, Errc::bad_shape,
          "lanes of the attention output", 8, 7);
  refuses([&](Call& x) { x.out.out = dense3(static_cast<float*>(nullptr), 2, 3, 8); },
          Errc::missing_input, "attention output", 0, 0);
  refuses(
      [&](Call& x) {
        x.out.out = make_strided<space, float, 3>(out, {2, 3, 8}, {48, 16, 2});
      },
      Errc::bad_stride, "attention output", 1, 2);
  refuses([&](Call& x) { x.out.lse = make_lse<space>(lse, Rows{1}, Heads{3}); }, Errc::bad_shape,
          "rows of lse", 2, 1);
  refuses([&](Call& x) { x.out.lse = make_lse<space>(lse, Rows{2}, Heads{2}); }, Errc::bad_shape,
          "heads of lse", 3, 2);
  refuses([&](Call& x) { x.in.sink = make_sink<space>(q, Heads{4}); }, Errc::bad_shape,
          "heads of the sink", 3, 4);
  refuses([&](Call& x) { x.in.kv.lanes = 9; }, Errc::bad_shape, "lanes of the KV cache", 10, 9);
  refuses([&](Call& x) { x.in.kv.block_size = 8; }, Errc::bad_shape, "block size of the KV cache",
          4, 8);
  refuses([&](Call& x) { x.in.kv.data = nullptr; }, Errc::missing_input, "memory of the KV cache",
          0, 0);
  refuses([&](Call& x) { x.in.kv.row_stride = 0; }, Errc::bad_stride, "strides of the KV cache", 1,
          0);
  refuses([&](Call& x) { x.shape.heads = 0; }, Errc::bad_shape, "shape.heads", 1, 0);
  refuses([&](Call& x) { x.shape.value_dim = 0; }, Errc::bad_shape, "shape.value_dim", 1, 0);
  refuses([&](Call& x) { x.shape.value_dim = 11; }, Errc::bad_shape, "shape.value_dim", 10, 11);
  for (float const scale : {0.0f, -0.5f, std::nanf(""), std::numeric_limits<float>::infinity(),
                            -std::numeric_limits<float>::infinity()}) {
    refuses([&](Call& x) { x.in.scale = scale; }, Errc::bad_value, "scale", 0, 0);
  }
  MlaInputs<float, Format, space> const fresh{good.in.q, good.in.kv};
  CHECK_FALSE(fresh.scale > 0);  // there is no default
  CHECK(memory.untouched());

  Call without = good;
  without.out.lse = {};
  without.in.sink = {};
  CHECK(check(without).ok());
}

TEMPLATE_LIST_TEST_CASE("attention: an fp8 latent that does not fit the lanes is refused",
                        "[attention]", test::Executors) {
  using Latent = format::LatentE4m3;
  AttentionCase<bf16, Latent> c(1, 16, 2, {.requests = 1, .keys = 4, .lanes = 24}, {16, 8});
  c.add_row(std::vector<float>(24, 0.0f), {0}, 1);
  test::AttentionMemory<bf16, Latent, float> memory(c);
  auto in = memory.inputs();
  auto const check = [&] {
    return attention_check(TestType{}, SparseMla<bf16, Latent>{}, in, memory.outputs(),
                           memory.batch(), c.shape());
  };
  CHECK(check().ok());
  for (Latent const bad : {Latent{25, 8}, Latent{16, 0}, Latent{-1, 8}}) {
    in.kv.format = bad;
    CHECK(check().code == Errc::bad_value);
    CHECK(std::string_view(check().what).find("KV cache") != std::string_view::npos);
  }
}

TEMPLATE_LIST_TEST_CASE("validate: reports every kind of what the kernels tolerate", "[selection]",
                        test::Executors) {
  struct Plan {
    std::vector<position_t> slots;
    std::vector<position_t> counts;
    std::vector<position_t> lengths;
  };
  auto const report = [](Plan const& p) {
    auto const rows = static_cast<index_t>(p.counts.size());
    Shape shape;
    shape.keys = 20;
    auto const slots = test::guarded(p.slots);
    auto const counts = test::guarded(p.counts);
    auto const lengths = test::guarded(p.lengths);
    return test::validate_now(TestType{},
                              {make_dense<space, position_t const, 2>(slots.data(), {rows, 4}),
                               make_lengths<space>(counts.data(), Rows{rows})},
                              10, make_lengths<space>(lengths.data(), Rows{rows}), shape);
  };
  CHECK(report({{0, 3, 9, 5, 2, -1, -1, -1}, {4, 1}, {20, 0}}) == SelectionReport{});
  CHECK(report({{0, 0, -1, -1, 1, 99, 99, 1}, {1, 1}, {1, 1}}) ==
        SelectionReport{});  // past counts

  SelectionReport const outside = report({{-1, 10, 2, std::numeric_limits<position_t>::max(),
                                           std::numeric_limits<position_t>::min(), 1, 2, 3},
                                          {4, 4},
                                          {5, 5}});
  CHECK((outside.outside == 4 && outside.duplicates == 0));
  CHECK((outside.bad_counts == 0 && outside.bad_lengths == 0));

  // an entry that repeats counts once, however often it occurred before; -1 twice is no duplicate
  SelectionReport const duplicates = report({{7, 7, 7, 1, -1, -1, 2, 2}, {4, 4}, {5, 5}});
  CHECK((duplicates.duplicates == 3 && duplicates.outside == 2));

  SelectionReport const counts =
      report({{0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3}, {-1, 5, 4}, {4, 4, 4}});
  CHECK((counts.bad_counts == 2 && counts.outside == 0 && counts.duplicates == 0));

  SelectionReport const lengths =
      report({{0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3}, {1, 1, 1}, {-1, 21, 20}});
  CHECK((lengths.bad_lengths == 2 && lengths.bad_counts == 0));

  SelectionReport const all = report({{3, 3, 11, 0}, {9}, {21}});
  CHECK(all == SelectionReport{1, 1, 1, 1});
}
