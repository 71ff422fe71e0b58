// SPDX-License-Identifier: Apache-2.0
//
// What CUDA top-k launches: arithmetic that needs no device.
#include <indexshare/cuda/topk_plan.hpp>

#include <catch2/catch_test_macros.hpp>

#include <algorithm>
#include <cstddef>
#include <string_view>

using namespace indexshare;

namespace {

Shape shape_of(index_t rows, index_t keys, index_t top_k) {
  Shape shape;
  shape.rows = rows;
  shape.keys = keys;
  shape.top_k = top_k;
  return shape;
}

constexpr DeviceLimits devices[] = {{80, 108, 166912}, {86, 82, 101376},   {89, 128, 101376},
                                    {90, 132, 232448}, {100, 148, 232448}, {120, 188, 101376}};

}  // namespace

TEST_CASE("DISPATCH R146: every k runs the kernels of its row width, on every architecture",
          "[topk][fault]") {
  struct Case {
    index_t keys;
    std::string_view rows, chunks;
  };
  for (DeviceLimits const& limits : devices) {
    for (index_t const k : {1, 16, 512, 1024, 2047, 2048, 2049, 4096}) {
      for (Case const& c : {Case{1, "topk_row, narrow", ""},
                            {2048, "topk_row, narrow", ""},
                            {2049, "topk_row, wide", ""},
                            {16384, "topk_row, wide", ""},
                            {16385, "topk_row, wide", "topk_chunk"},
                            {1048576, "topk_row, wide", "topk_chunk"},
                            {max_position, "topk_row, wide", "topk_chunk"}}) {
        CAPTURE(limits.compute_capability, k, c.keys);
        auto const plan = topk_plan(limits, RadixTopK{}, shape_of(8, c.keys, k));
        REQUIRE(plan.has_value());
        CHECK(plan->rows.kernel == c.rows);
        CHECK(plan->chunks.kernel == c.chunks);
        CHECK(plan->rows.blocks == 8);
        // the last chunk reaches the end of a row that begins anywhere in a 128-byte line
        CHECK(plan->chunks.blocks == (c.chunks.empty() ? 0 : 8 * plan->row_chunks));
        CHECK((c.chunks.empty() || plan->row_chunks * 8192 >= c.keys + 127));
        CHECK((plan->workspace.bytes > 0) == !c.chunks.empty());
      }
    }
  }
}

TEST_CASE("SMEM R143: a plan fits the device's shared memory or is refused by name",
          "[topk][fault]") {
  for (int const bytes : {65536, 101376, 166912, 232448}) {
    DeviceLimits const limits{80, 100, bytes};
    for (index_t const keys : {0, 1, 300, 2048, 2049, 8192, 14000, 16384, 16385, 1 << 20}) {
      CAPTURE(bytes, keys);
      auto const plan = topk_plan(limits, RadixTopK{}, shape_of(3, keys, 2048));
      if (bytes == 65536 && keys > 14000) {  // 72 KiB of keys and histogram
        REQUIRE(!plan.has_value());
        CHECK(plan.error().code == Errc::unsupported);
        CHECK(std::string_view(plan.error().what).find("shared memory") != std::string_view::npos);
        CHECK((plan.error().expected == 73888 && plan.error().got == 65536));
      } else {
        REQUIRE(plan.has_value());
        CHECK(std::max(plan->rows.shared_bytes, plan->chunks.shared_bytes) <= bytes);
      }
    }
    if (bytes >=
        101376) {  // two blocks of the kernel that reads the scores, where one SM has 100 KiB
      CHECK(2 * (topk_plan(limits, RadixTopK{}, shape_of(1, 1 << 20, 4096))->chunks.shared_bytes +
                 1024) <=
            101376 + 1024);
    }
  }
}

TEST_CASE("CUDA top-k: what cannot run is refused with the limit", "[topk]") {
  DeviceLimits const good{90, 132, 232448};
  auto const refused = [](DeviceLimits const& limits, Shape const& shape, std::string_view part,
                          index_t expected, index_t got) {
    auto const plan = topk_plan(limits, RadixTopK{}, shape);
    REQUIRE(!plan.has_value());
    INFO(plan.error().what);
    CHECK(plan.error().code == Errc::unsupported);
    CHECK(std::string_view(plan.error().what).find(part) != std::string_view::npos);
    CHECK((plan.error().expected == expected && plan.error().got == got));
  };
  refused({75, 40, 65536}, shape_of(1, 10, 4), "compute capability", 80, 75);
  refused(good, shape_of(1, 10, 4097), "widest selection", 4096, 4097);
  refused(good, shape_of(1, max_position + 1, 4), "keys of a row", max_position, max_position + 1);
  refused(good, shape_of(max_position + 1, 10, 4), "rows", max_position, max_position + 1);
  // 129 blocks for each row of 1 M keys
  // more blocks than one grid holds go in several launches
  CHECK(topk_plan(good, RadixTopK{}, shape_of(max_position / 129 + 1, 1048576, 4)).has_value());
  CHECK(topk_plan(good, RadixTopK{}, shape_of(max_position, 10, 4)).has_value());
}

TEST_CASE("CUDA top-k: the workspace grows with every capacity", "[topk]") {
  DeviceLimits const limits{90, 132, 232448};
  auto const bytes = [&](index_t rows, index_t keys, index_t k) {
    return topk_plan(limits, RadixTopK{}, shape_of(rows, keys, k))->workspace.bytes;
  };
  std::size_t last = 0;
  for (index_t keys = 1; keys < 300000; keys += 997) {
    CHECK(bytes(5, keys, 7) >= last);
    last = bytes(5, keys, 7);
  }
  for (index_t rows = 0; rows < 40; ++rows) {
    CHECK(bytes(rows + 1, 40000, 7) >= bytes(rows, 40000, 7));
  }
  CHECK(bytes(3, 40000, 4096) >= bytes(3, 40000, 1));
  CHECK(bytes(64, 16384, 2048) == 0);
  // negative extents count as none
  CHECK(bytes(-1, 1 << 20, 1) == 0);
  CHECK(bytes(1, -5, 1) == 0);
}
