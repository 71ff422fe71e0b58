// SPDX-License-Identifier: Apache-2.0
//
// What CUDA attention launches, as arithmetic (R143: a part that lacks something is refused by
// name).
#include <indexshare/cuda/attention_plan.hpp>

#include <catch2/catch_test_macros.hpp>

#include <cstddef>
#include <initializer_list>
#include <limits>
#include <string_view>

#include "random.hpp"

using namespace indexshare;

namespace {

using Fp32 = SparseMla<float, format::Plain<float>>;
using Half = SparseMla<bf16, format::Plain<bf16>>;
using E4m3 = SparseMla<fp16, format::LatentE4m3>;

/// One policy for each way to multiply.
template <class Check>
void for_each_policy(Check const& check) {
  check(Fp32{});
  check(Half{});
  check(E4m3{});
}

constexpr DeviceLimits roomy{90, 132, 232448};

Shape glm_shape(index_t rows, index_t heads, index_t width = 2048) {
  Shape shape;
  shape.rows = rows;
  shape.keys = 1 << 20;
  shape.top_k = width;
  shape.heads = heads;
  shape.key_dim = 576;
  shape.value_dim = 512;
  return shape;
}

template <class Policy>
AttentionPlan plan(Policy policy, Shape const& shape) {
  auto const made = attention_plan(roomy, policy, shape);
  REQUIRE(made.has_value());
  return *made;
}

}  // namespace

TEST_CASE("attention plan: which types go to the tensor cores", "[attention]") {
  CHECK(attention_operands<bf16, format::Plain<bf16>>() == AttentionOperands::half);
  CHECK(attention_operands<fp16, format::Plain<fp16>>() == AttentionOperands::half);
  CHECK(attention_operands<bf16, format::LatentE4m3>() == AttentionOperands::e4m3);
  CHECK(attention_operands<fp16, format::LatentE4m3>() == AttentionOperands::e4m3);
  CHECK(attention_operands<bf16, format::Plain<fp16>>() == AttentionOperands::any);
  CHECK(attention_operands<float, format::Plain<float>>() == AttentionOperands::any);
  CHECK(attention_operands<float, format::LatentE4m3>() == AttentionOperands::any);
}

TEST_CASE("KSHAPE R143: every part from sm_80 on runs every shape, others are refused by name",
          "[attention][fault]") {
  for_each_policy([](auto policy) {
    for (index_t const heads : {1, 5, 8, 16, 24, 32, 40, 64, 128}) {
      for (index_t const key_dim : {1, 576, 577, 4096}) {
        Shape shape = glm_shape(4, heads);
        shape.key_dim = key_dim;
        shape.value_dim = key_dim < 512 ? key_dim : 512;
        CAPTURE(static_cast<int>(detail::operands_of(policy)), heads, key_dim);
        for (int const bytes : {101376, 166912, 232448}) {
          for (int const capability : {80, 86, 89, 90, 100, 120, 121}) {
            CHECK(attention_plan({capability, 100, bytes}, policy, shape).has_value());
          }
        }
        auto const old = attention_plan({75, 100, 232448}, policy, shape);
        REQUIRE_FALSE(old.has_value());
        CHECK(old.error().code == Errc::unsupported);
        CHECK(std::string_view(old.error().what).find("compute capability") !=
              std::string_view::npos);
        CHECK((old.error().expected == 80 && old.error().got == 75));
        auto const small = attention_plan({86, 100, 65536}, policy, shape);
        if (small) continue;
        CHECK(small.error().code == Errc::unsupported);
        CHECK(std::string_view(small.error().what).find("shared memory") != std::string_view::npos);
        CHECK((small.error().expected > 65536 && small.error().expected <= 101376));
        CHECK(small.error().got == 65536);
      }
    }
  });
  CHECK_FALSE(attention_plan({86, 100, 65536}, Half{}, glm_shape(1, 64)).has_value());
}

TEST_CASE("attention plan: the device decides nothing but whether it can", "[attention]") {
  for_each_policy([](auto policy) {
    auto const small = attention_plan({80, 1, 101376}, policy, glm_shape(3, 64));
    auto const large = attention_plan({121, 1000, 232448}, policy, glm_shape(3, 64));
    REQUIRE((small.has_value() && large.has_value()));
    CHECK(small->heads_per_block == large->heads_per_block);
    CHECK(small->keys_per_split == large->keys_per_split);
    CHECK(small->splits == large->splits);
  });
}

TEST_CASE("attention plan: a row has top_k keys, or all of them where it is dense", "[attention]") {
  Shape const shape = glm_shape(1, 64);
  auto const covered = [](AttentionPlan const& made, index_t keys) {
    return made.splits * made.keys_per_split >= keys &&
           (made.splits - 1) * made.keys_per_split < keys;
  };
  CHECK(covered(plan(Half{}, shape), 2048));
  CHECK(covered(plan(DenseMla<bf16, format::Plain<bf16>>{}, shape), 1 << 20));
}

TEST_CASE("attention plan: multiples of eight heads leave no head idle", "[attention]") {
  for (index_t heads = 1; heads <= 256; ++heads) {
    auto const made = plan(Half{}, glm_shape(1, heads));
    CHECK(made.head_groups * made.heads_per_block == (heads + 7) / 8 * 8);
  }
  for (index_t const heads : {8, 16, 32, 64}) {
    CHECK(plan(E4m3{}, glm_shape(1, heads)).heads_per_block == heads);
  }
}

TEST_CASE("attention plan: splits cover all keys, write no more than they read and fit the scratch",
          "[attention]") {
  test::Random random(7);
  auto const upto = [&](std::size_t most) { return 1 + static_cast<index_t>(random.below(most)); };
  for (int i = 0; i < 2000; ++i) {
    index_t const width = i % 5 == 0 ? upto(1 << 20) : upto(4096);
    Shape shape = glm_shape(upto(200), upto(130), width);
    if (i % 3 == 0) shape.key_dim = shape.value_dim = upto(700);
    std::size_t const kind = random.below(3);
    auto const made = kind == 0   ? plan(Fp32{}, shape)
                      : kind == 1 ? plan(Half{}, shape)
                                  : plan(E4m3{}, shape);
    CAPTURE(shape.rows, shape.heads, shape.key_dim, width, made.keys_per_split, made.splits);
    CHECK(made.keys_per_split % made.keys_per_tile == 0);
    CHECK(made.keys_per_split * made.splits >= width);
    CHECK(made.keys_per_split * (made.splits - 1) < width);
    if (made.splits == 1) continue;
    CHECK(made.splits <= detail::attend_most_splits);
    // any pass of the call, sized for itself
    for (index_t const rows : {index_t{1}, shape.rows / 2, shape.rows}) {
      WorkspaceCarver carver;
      detail::carve_attend(carver, rows * made.splits, shape.heads, shape.value_dim);
      CHECK(carver.size().bytes <= attention_scratch(shape.with_rows(rows)).bytes);
    }
  }
}

TEST_CASE("attention plan: partial results are no more than the rows that they come from",
          "[attention]") {
  auto const partial_bytes = [](AttentionPlan const& made, Shape const& shape) {
    WorkspaceCarver carver;
    detail::carve_attend(carver, shape.rows * made.splits, shape.heads, shape.value_dim);
    return static_cast<index_t>(carver.size().bytes);
  };
  for (index_t heads = 1; heads <= 128; ++heads) {
    for (index_t const rows : {1, 2, 8, 32, 64, 128}) {
      for (index_t const width : {100, 512, 1000, 2048, 4096, 1 << 20}) {
        Shape const shape = glm_shape(rows, heads, width);
        CAPTURE(heads, rows, width);
        auto const of_half = plan(Half{}, shape);
        if (of_half.splits > 1) CHECK(partial_bytes(of_half, shape) <= rows * width * 576 * 2);
        auto const of_e4m3 = plan(E4m3{}, shape);
        if (of_e4m3.splits > 1) CHECK(partial_bytes(of_e4m3, shape) <= rows * width * 656);
        CHECK((rows == 128) == (plan(E4m3{}, glm_shape(rows, heads)).splits == 1));
      }
    }
  }
}

TEST_CASE("MEM R140: scratch of attention is monotone and knows no keys", "[attention][fault]") {
  test::Random random(8);
  auto const upto = [&](std::size_t most) { return 1 + static_cast<index_t>(random.below(most)); };
  for (int i = 0; i < 2000; ++i) {
    Shape shape = glm_shape(upto(300), upto(130));
    shape.key_dim = upto(700);
    shape.value_dim = upto(static_cast<std::size_t>(shape.key_dim));
    auto const bytes = attention_scratch(shape).bytes;
    for (auto const grow : {&Shape::rows, &Shape::heads, &Shape::key_dim, &Shape::value_dim}) {
      Shape larger = shape;
      larger.*grow += upto(100);
      CHECK(attention_scratch(larger).bytes >= bytes);
    }
    Shape longer = shape;
    longer.keys = longer.top_k = std::numeric_limits<position_t>::max();
    CHECK(attention_scratch(longer).bytes == bytes);
  }
}
