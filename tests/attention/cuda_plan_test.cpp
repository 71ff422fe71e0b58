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

constexpr AttentionOperands all_operands[] = {AttentionOperands::any, AttentionOperands::half,
                                              AttentionOperands::e4m3};
constexpr DeviceLimits roomy{90, 132, 232448};

Shape glm_shape(index_t rows, index_t heads) {
  Shape shape;
  shape.rows = rows;
  shape.keys = 1 << 20;
  shape.top_k = 2048;
  shape.heads = heads;
  shape.key_dim = 576;
  shape.value_dim = 512;
  return shape;
}

AttentionPlan plan(AttentionOperands operands, Shape const& shape, index_t width) {
  auto const made = plan_attention(roomy, operands, shape, width);
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
  for (auto const operands : all_operands) {
    for (index_t const heads : {1, 5, 8, 16, 24, 32, 40, 64, 128}) {
      for (index_t const key_dim : {1, 576, 577, 4096}) {
        Shape shape = glm_shape(4, heads);
        shape.key_dim = key_dim;
        shape.value_dim = key_dim < 512 ? key_dim : 512;
        CAPTURE(static_cast<int>(operands), heads, key_dim);
        for (int const bytes : {101376, 166912, 232448}) {
          for (int const capability : {80, 86, 89, 90, 100, 120, 121}) {
            CHECK(plan_attention({capability, 100, bytes}, operands, shape, 2048).has_value());
          }
        }
        auto const old = plan_attention({75, 100, 232448}, operands, shape, 2048);
        REQUIRE_FALSE(old.has_value());
        CHECK(old.error().code == Errc::unsupported);
        CHECK(std::string_view(old.error().what).find("compute capability") !=
              std::string_view::npos);
        CHECK((old.error().expected == 80 && old.error().got == 75));
        auto const small = plan_attention({86, 100, 65536}, operands, shape, 2048);
        if (small) continue;
        CHECK(small.error().code == Errc::unsupported);
        CHECK(std::string_view(small.error().what).find("shared memory") != std::string_view::npos);
        CHECK((small.error().expected > 65536 && small.error().expected <= 101376));
        CHECK(small.error().got == 65536);
      }
    }
  }
  CHECK_FALSE(plan_attention({86, 100, 65536}, AttentionOperands::half, glm_shape(1, 64), 2048)
                  .has_value());
}

TEST_CASE("attention plan: the device decides nothing but whether it can", "[attention]") {
  for (auto const operands : all_operands) {
    auto const small = plan_attention({80, 1, 101376}, operands, glm_shape(3, 64), 2048);
    auto const large = plan_attention({121, 1000, 232448}, operands, glm_shape(3, 64), 2048);
    REQUIRE((small.has_value() && large.has_value()));
    CHECK(small->heads_per_block == large->heads_per_block);
    CHECK(small->keys_per_split == large->keys_per_split);
    CHECK(small->splits == large->splits);
  }
}

TEST_CASE("attention plan: multiples of eight heads leave no head idle", "[attention]") {
  for (index_t heads = 1; heads <= 256; ++heads) {
    auto const made = plan(AttentionOperands::half, glm_shape(1, heads), 2048);
    CHECK(made.head_groups * made.heads_per_block == (heads + 7) / 8 * 8);
  }
  for (index_t const heads : {8, 16, 32, 64}) {
    CHECK(plan(AttentionOperands::e4m3, glm_shape(1, heads), 2048).heads_per_block == heads);
  }
}

TEST_CASE("attention plan: splits cover all keys, write no more than they read and fit the scratch",
          "[attention]") {
  test::Random random(7);
  auto const upto = [&](std::size_t most) { return 1 + static_cast<index_t>(random.below(most)); };
  for (int i = 0; i < 2000; ++i) {
    auto const operands = all_operands[random.below(3)];
    Shape shape = glm_shape(upto(200), upto(130));
    if (i % 3 == 0) shape.key_dim = shape.value_dim = upto(700);
    index_t const width = i % 5 == 0 ? upto(1 << 20) : upto(4096);
    auto const made = plan(operands, shape, width);
    CAPTURE(shape.rows, shape.heads, shape.key_dim, width, made.keys_per_split, made.splits);
    CHECK(made.keys_per_split % made.keys_per_tile == 0);
    CHECK(made.keys_per_split * made.splits >= width);
    CHECK(made.keys_per_split * (made.splits - 1) < width);
    if (made.splits == 1) continue;
    CHECK(made.splits <= 32);  // the merge has a lane for each
    // any pass of the call, sized for itself
    for (index_t const rows : {index_t{1}, shape.rows / 2, shape.rows}) {
      WorkspaceCarver carver;
      detail::carve_attend(carver, saturating_area(rows * made.splits, shape.heads),
                           shape.value_dim);
      CHECK(carver.size().bytes <= attention_scratch(shape.with_rows(rows)).bytes);
    }
  }
  for (index_t const heads : {8, 16, 32, 64, 128}) {
    auto const made = plan(AttentionOperands::e4m3, glm_shape(1, heads), 2048);
    CHECK(made.splits > 1);
    CHECK(made.splits * heads * (512 + 2) * 4 <= 2048 * 656 * made.head_groups);
    CHECK(plan(AttentionOperands::e4m3, glm_shape(2048, heads), 2048).splits == 1);
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
