// SPDX-License-Identifier: Apache-2.0
#include <indexshare/cuda/indexer_plan.hpp>

#include <catch2/catch_test_macros.hpp>

#include <algorithm>
#include <string_view>

using namespace indexshare;

// The launch plan of the CUDA indexer is arithmetic: it is tested on every machine.

namespace {

using Bf16 = ReluDotIndexer<bf16, format::Plain<bf16>>;
using WidenedBf16 = ReluDotIndexer<bf16, format::IndexKeyE4m3>;
using E4m3 = ReluDotIndexer<e4m3, format::IndexKeyE4m3>;
using Fp32 = ReluDotIndexer<float, format::Plain<float>>;

/// Compute capability, multiprocessors, shared memory per block: A100, RTX 3090, RTX 4090, H200,
/// B200, RTX PRO 6000.
constexpr DeviceLimits parts[] = {{80, 108, 166912}, {86, 82, 101376},   {89, 128, 101376},
                                  {90, 132, 232448}, {100, 148, 232448}, {120, 188, 101376}};
constexpr DeviceLimits h200 = parts[3];

constexpr Shape shape_of(index_t rows, index_t keys, index_t heads, index_t lanes) {
  Shape shape;
  shape.rows = rows;
  shape.keys = keys;
  shape.index_heads = heads;
  shape.index_dim = lanes;
  return shape;
}

/// What holds for every plan.
template <class Policy>
void check_plan(DeviceLimits const& limits, Shape const& shape) {
  INFO("sm_" << limits.compute_capability << ", " << limits.shared_memory_bytes << " bytes, "
             << shape.rows << " rows, " << shape.keys << " keys, " << shape.index_heads
             << " heads, " << shape.index_dim << " lanes");
  auto const plan = indexer_plan(limits, Policy{}, shape);
  REQUIRE(plan.has_value());
  CHECK(plan->shared_bytes <= limits.shared_memory_bytes);
  CHECK((plan->threads >= 32 && plan->threads <= 1024 && plan->threads % 32 == 0));
  CHECK(plan->chunk % plan->tile == 0);
  CHECK(plan->row_groups * plan->rows >= shape.rows);
  CHECK((plan->row_groups - 1) * plan->rows < std::max<index_t>(shape.rows, 1));
  CHECK(plan->key_chunks * plan->chunk >= shape.keys);
  CHECK((plan->key_chunks - 1) * plan->chunk < std::max<index_t>(shape.keys, 1));
  CHECK(plan->key_chunks <= 65535);
  if (plan->tensor) {
    CHECK(plan->block.bytes == plan->shared_bytes);
    CHECK((plan->block.stages >= 1 && plan->block.stages <= detail::ScoreBlock::most_stages));
    CHECK(plan->threads == 32 * plan->block.warps);
    CHECK(plan->rows <= 32);  // a lane holds each
    CHECK(plan->block.head_tiles * 8 >= shape.index_heads);
    CHECK(plan->block.head_tiles * 8 < shape.index_heads + 8);  // no wasted product
    // vectors of weights, lines of 128 bytes
    CHECK((plan->block.weights_at % 8 == 0 && plan->block.keys_at % 128 == 0));
    CHECK((plan->block.query_line % 128 == 0 && plan->block.key_line % 128 == 0));
  }
}

static_assert(indexer_plan(h200, Bf16{}, shape_of(1, 131072, 32, 128))->rows == 1);
static_assert(indexer_plan(h200, Bf16{}, shape_of(2048, 131072, 32, 128))->rows == 16);
static_assert(indexer_plan(parts[2], Bf16{}, shape_of(2048, 131072, 32, 128))->rows == 4);
static_assert(indexer_plan(parts[2], WidenedBf16{}, shape_of(2048, 131072, 32, 128))->rows == 8);

}  // namespace

TEST_CASE("indexer plan: fits every part") {
  for (DeviceLimits part : parts) {
    for (int const shared : {65536, 101376, 166912, 232448}) {
      part.shared_memory_bytes = shared;
      for (index_t const rows : {0, 1, 2, 3, 8, 9, 64, 8192}) {
        for (index_t const keys : {0, 1, 31, 256, 4096, 1048576}) {
          for (index_t const heads : {1, 8, 17, 32, 64}) {
            check_plan<Bf16>(part, shape_of(rows, keys, heads, 128));
            check_plan<WidenedBf16>(part, shape_of(rows, keys, heads, 128));
            check_plan<E4m3>(part, shape_of(rows, keys, heads, 128));
            check_plan<Fp32>(part, shape_of(rows, keys, heads, 128));
            check_plan<Bf16>(part, shape_of(rows, keys, heads, 33));
            check_plan<E4m3>(part, shape_of(rows, keys, heads, 48));
          }
        }
      }
      if (shared > 65536) {
        check_plan<Bf16>(part, shape_of(9, 4096, 128, 256));
        check_plan<E4m3>(part, shape_of(9, 4096, 128, 256));
      }
      check_plan<Fp32>(part, shape_of(9, 4096, 300, 4096));
    }
  }
}

TEST_CASE("indexer plan: the kernel is a function of types, heads and lanes") {
  auto const tensor = [](auto policy, index_t heads, index_t lanes) {
    bool result = false;
    bool first = true;
    for (DeviceLimits const& part : parts) {
      for (index_t const rows : {1, 4096}) {
        bool const now = indexer_plan(part, policy, shape_of(rows, 4096, heads, lanes))->tensor;
        CHECK((first || now == result));
        result = now;
        first = false;
      }
    }
    return result;
  };
  CHECK(tensor(Bf16{}, 32, 128));
  CHECK(tensor(Bf16{}, 1, 16));
  CHECK(tensor(E4m3{}, 128, 256));
  CHECK(tensor(WidenedBf16{}, 64, 48));
  CHECK(tensor(ReluDotIndexer<fp16, format::Plain<fp16>>{}, 8, 128));
  CHECK_FALSE(tensor(Fp32{}, 32, 128));
  CHECK_FALSE(tensor(ReluDotIndexer<bf16, format::Plain<fp16>>{}, 32, 128));
  CHECK_FALSE(tensor(ReluDotIndexer<e4m3, format::Plain<e4m3>>{}, 32, 128));
  CHECK_FALSE(tensor(ReluDotIndexer<float, format::IndexKeyE4m3>{}, 32, 128));
  CHECK_FALSE(tensor(Bf16{}, 129, 128));
  CHECK_FALSE(tensor(Bf16{}, 32, 272));
  CHECK_FALSE(tensor(Bf16{}, 32, 120));
}

TEST_CASE("indexer plan: few rows are spread by keys, many share a read of them") {
  for (DeviceLimits const& part : parts) {
    INFO("sm_" << part.compute_capability);
    for (index_t const rows : {1, 2, 8}) {  // a long context: the whole chip works
      auto const decode = indexer_plan(part, E4m3{}, shape_of(rows, 131072, 32, 128));
      CHECK(2 * decode->row_groups * decode->key_chunks >= part.multiprocessors);
    }
    auto const prefill = indexer_plan(part, E4m3{}, shape_of(2048, 32768, 32, 128));
    CHECK(prefill->rows >= 4);
    CHECK(4 * prefill->row_groups * prefill->key_chunks >= 3 * part.multiprocessors);
    // the queries that all chunks read again are a twelfth of the keys that all rows read
    CHECK(prefill->key_chunks * 12 * prefill->rows * 32 <= 32768 + 12 * prefill->rows * 32);
  }
  auto const one = indexer_plan(h200, Bf16{}, shape_of(1, 4096, 32, 128));
  CHECK((one->key_chunks - 1) * 12 * 32 <= 4096);
}

TEST_CASE("indexer plan: blocks come in waves that fill at least half of the part") {
  // one wave of 768 keys, not two of 512 with half of the second idle
  CHECK(indexer_plan(h200, Bf16{}, shape_of(1, 98304, 32, 128))->key_chunks == 128);
  for (DeviceLimits const& part : parts) {
    for (index_t const rows : {1, 5, 32, 200, 2048}) {
      for (index_t const keys : {262144, 300000, 1048576}) {
        INFO("sm_" << part.compute_capability << ", " << rows << " rows, " << keys << " keys");
        auto const plan = indexer_plan(part, E4m3{}, shape_of(rows, keys, 32, 128));
        index_t const blocks = plan->row_groups * plan->key_chunks;
        index_t const waves = (blocks + part.multiprocessors - 1) / part.multiprocessors;
        CHECK(2 * blocks >= waves * part.multiprocessors);
      }
    }
  }
}

TEST_CASE("indexer plan: refusals name the reason") {
  auto const refuses = [](auto policy, DeviceLimits const& limits, Shape const& shape, Errc code,
                          std::string_view part) {
    auto const plan = indexer_plan(limits, policy, shape);
    REQUIRE_FALSE(plan.has_value());
    CHECK(plan.error().code == code);
    CHECK(std::string_view(plan.error().what).find(part) != std::string_view::npos);
    return plan.error();
  };
  Status const old = refuses(Bf16{}, {75, 40, 65536}, shape_of(1, 1, 8, 128), Errc::unsupported,
                             "compute capability");
  CHECK((old.expected == 80 && old.got == 75));
  Status const memory = refuses(Bf16{}, {89, 60, 65536}, shape_of(1, 4096, 128, 256),
                                Errc::unsupported, "shared memory");
  CHECK((memory.expected > 65536 && memory.got == 65536));
  CHECK(
      indexer_plan({89, 60, static_cast<int>(memory.expected)}, Bf16{}, shape_of(1, 4096, 128, 256))
          .has_value());
  (void)refuses(Fp32{}, {90, 132, 232448}, shape_of(1, 4096, 1, 100000), Errc::unsupported,
                "shared memory");
  (void)refuses(Bf16{}, h200, shape_of(1, 4096, 0, 128), Errc::bad_shape, "index_heads");
  (void)refuses(Bf16{}, h200, shape_of(1, 4096, 8, 0), Errc::bad_shape, "index_dim");
}

TEST_CASE("indexer plan: what one row can run, many rows can") {
  for (DeviceLimits const& part : parts) {
    for (index_t const heads : {1, 64, 100, 128}) {
      for (index_t const lanes : {16, 128, 256, 700, 12000}) {
        bool const one = indexer_plan(part, Bf16{}, shape_of(1, 9, heads, lanes)).has_value();
        CHECK(indexer_plan(part, Bf16{}, shape_of(500, 9000, heads, lanes)).has_value() == one);
      }
    }
  }
}
