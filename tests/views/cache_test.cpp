// SPDX-License-Identifier: Apache-2.0
#include <indexshare/cache.hpp>

#include <indexshare/detail/check.hpp>
#include <indexshare/host/append.hpp>

#include <catch2/catch_template_test_macros.hpp>
#include <catch2/catch_test_macros.hpp>

#include "caches.hpp"
#include "memory.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <span>
#include <string_view>
#include <vector>

using namespace indexshare;

namespace {
constexpr auto host = Space::host;
constexpr position_t int_max = std::numeric_limits<position_t>::max();
}  // namespace

TEST_CASE("page table: maps positions page by page and never reads past itself", "[cache]") {
  std::vector<position_t> const numbers{7, 2, -1, 5, 0, 9};
  test::Guarded<position_t> const pages{std::span<position_t const>(numbers)};
  auto const table = make_page_table<host>(pages.data(), Requests{2}, Pages{3}, PageSize{4});
  CHECK(table.keys() == 12);
  CHECK_FALSE(table.contiguous());
  CHECK(table.slot(0, 0) == 28);
  CHECK(table.slot(0, 7) == 11);
  CHECK(table.slot(1, 3) == 23);
  CHECK(table.slot(1, 11) == 39);
  for (index_t position = 8; position < 12; ++position) {
    CHECK(table.slot(0, position) == no_position);  // the page is not there
  }
  for (index_t const position : {index_t{-1}, index_t{12}, index_t{1} << 40, -(index_t{1} << 40)}) {
    CHECK(table.slot(0, position) == no_position);
    CHECK(table.slot(1, position) == no_position);
  }
  for (index_t const request : {index_t{-1}, index_t{2}, index_t{int_max}}) {
    CHECK(table.slot(request, 0) == no_position);
  }
}

TEST_CASE("page table: without pages request r owns block r", "[cache]") {
  auto const table = make_contiguous_table<host>(Keys{10});
  CHECK(table.contiguous());
  CHECK(table.keys() == 10);
  CHECK(table.slot(0, 9) == 9);
  CHECK(table.slot(3, 4) == 34);
  CHECK(table.slot(3, 10) == no_position);
  CHECK(table.slot(-1, 0) == no_position);
}

TEST_CASE("INT32 R142: a slot past int32 is no slot", "[cache]") {
  std::vector<position_t> const pages{(int_max - 63) / 64, (int_max - 63) / 64 + 1, int_max};
  auto const table = make_page_table<host>(pages.data(), Requests{1}, Pages{3}, PageSize{64});
  CHECK(table.slot(0, 63) == int_max);
  CHECK(table.slot(0, 64) == no_position);
  CHECK(table.slot(0, 128) == no_position);
  auto const rows = make_contiguous_table<host>(Keys{1 << 20});
  CHECK(rows.slot(2047, (1 << 20) - 1) == int_max);
  CHECK(rows.slot(2048, 0) == no_position);
}

TEST_CASE("page table: two tables are the same if they are the same memory read the same way",
          "[cache]") {
  std::vector<position_t> const pages(8, 0);
  auto const make = [&](index_t offset, index_t requests, index_t width, index_t page_size) {
    return make_page_table<host>(pages.data() + offset, Requests{requests}, Pages{width},
                                 PageSize{page_size});
  };
  CHECK(same_pages(make(0, 2, 3, 4), make(0, 2, 3, 4)));
  CHECK_FALSE(same_pages(make(0, 2, 3, 4), make(0, 2, 3, 8)));
  CHECK_FALSE(same_pages(make(0, 2, 3, 4), make(1, 2, 3, 4)));
  CHECK_FALSE(same_pages(make(0, 2, 3, 4), make(0, 3, 2, 4)));
  CHECK_FALSE(same_pages(make(0, 2, 3, 4), make_contiguous_table<host>(Keys{4})));
  CHECK(same_pages(make_contiguous_table<host>(Keys{4}), make_contiguous_table<host>(Keys{4})));
  CHECK_FALSE(
      same_pages(make_contiguous_table<host>(Keys{4}), make_contiguous_table<host>(Keys{5})));
}

TEST_CASE("cache: has() tells the slots that exist", "[cache]") {
  std::vector<float> const memory(3 * 4 * 2);
  auto const cache = make_paged_cache<host>(memory.data(), Pages{3}, PageSize{4}, HeadDim{2});
  CHECK(cache.slots() == 12);
  CHECK((cache.has(0) && cache.has(11)));
  for (index_t const slot : {index_t{-1}, index_t{12}, index_t{int_max}, index_t{1} << 40}) {
    CHECK_FALSE(cache.has(slot));
  }
  CHECK(cache.row(0) == memory.data());
  CHECK(cache.row(11) == memory.data() + 22);
  auto const rows = make_contiguous_cache<host>(memory.data(), Requests{2}, Keys{6}, HeadDim{2});
  CHECK((rows.blocks == 2 && rows.block_size == 6));
  CHECK(rows.row(7) == memory.data() + 14);
}

TEST_CASE("lengths are clamped to [0, capacity]", "[cache]") {
  CHECK(clamp_length(-1, 8) == 0);
  CHECK(clamp_length(std::numeric_limits<position_t>::min(), 8) == 0);
  CHECK(clamp_length(0, 8) == 0);
  CHECK(clamp_length(8, 8) == 8);
  CHECK(clamp_length(9, 8) == 8);
  CHECK(clamp_length(int_max, 8) == 8);
  CHECK(clamp_length(3, 0) == 0);
}

TEMPLATE_TEST_CASE("cache formats: a reader gets what was written", "[cache]", format::Plain<float>,
                   format::Plain<bf16>, format::Plain<fp16>, format::IndexKeyE4m3,
                   format::IndexKeyInt8) {
  for (index_t const page_size : {0, 1, 3, 16}) {
    for (index_t const lanes : {1, 16, 33, 128}) {
      test::PagedCache<TestType> cache(
          {.requests = 3, .keys = 18, .lanes = lanes, .page_size = page_size});
      for (index_t request = 0; request < 3; ++request) cache.write_random(request, 0, 18, 5);
      auto const view = cache.view();
      CHECK(view.slots() == cache.slots());
      test::Guarded<float> row(static_cast<std::size_t>(lanes));
      index_t wrong = 0;
      for (index_t request = 0; request < 3; ++request) {
        for (index_t position = 0; position < 18; ++position) {
          position_t const slot = cache.pages().slot(request, position);
          REQUIRE(slot == cache.slot(request, position));
          REQUIRE(view.has(slot));
          decode_row(view, slot, row.data());
          auto const want = cache.value(request, position);
          wrong += std::equal(want.begin(), want.end(), row.data()) ? 0 : 1;
        }
      }
      INFO("page size " << page_size << ", lanes " << lanes);
      CHECK(wrong == 0);
      CHECK(row.intact());
    }
  }
}

TEST_CASE("cache formats: latent rows with any latent, tile and rope", "[cache]") {
  for (format::LatentE4m3 const format : {format::LatentE4m3{512, 128}, format::LatentE4m3{32, 16},
                                          format::LatentE4m3{40, 16}, format::LatentE4m3{7, 128}}) {
    for (index_t const rope : {0, 1, 8, 64}) {
      test::PagedCache<format::LatentE4m3> cache(
          {.requests = 1, .keys = 9, .lanes = format.latent + rope, .page_size = 4}, format);
      cache.write_random(0, 0, 9, 8);
      test::Guarded<float> row(static_cast<std::size_t>(format.latent + rope));
      index_t wrong = 0;
      for (index_t position = 0; position < 9; ++position) {
        decode_row(cache.view(), cache.slot(0, position), row.data());
        auto const want = cache.value(0, position);
        wrong += std::equal(want.begin(), want.end(), row.data()) ? 0 : 1;
      }
      INFO("latent " << format.latent << ", rope " << rope);
      CHECK(wrong == 0);
      CHECK(row.intact());
    }
  }
}

TEST_CASE("FP8 R039: scales of latent rows are fp32, not powers of two", "[cache]") {
  constexpr index_t row_bytes = 512 + 16 + 128;
  static_assert(row_bytes == 656);
  test::Guarded<std::byte> memory(2 * row_bytes);
  std::byte* const token = memory.data() + row_bytes;
  std::fill_n(token, 512, std::byte{from_float<e4m3>(16.0f).bits});
  float const scales[] = {0.75f, 1.5f, 0.3f, 1.0f};
  std::memcpy(token + 512, scales, sizeof scales);
  for (index_t lane = 0; lane < 64; ++lane) {
    auto const value = from_float<bf16>(static_cast<float>(lane));
    std::memcpy(token + 528 + 2 * lane, &value, 2);
  }
  auto const cache = make_latent_e4m3_cache<host>(memory.data(), Pages{1}, PageSize{2}, 512, 64);
  CHECK((cache.row_stride == row_bytes && cache.lanes == 576));
  test::Guarded<float> row(576);
  decode_row(CacheView<host, format::LatentE4m3>(cache), 1, row.data());
  for (std::size_t i = 0; i < 128; ++i) {
    REQUIRE(row[i] == 12.0f);
    REQUIRE(row[128 + i] == 24.0f);
    REQUIRE(row[256 + i] == 0.3f * 16.0f);  // 4.8
    REQUIRE(row[384 + i] == 16.0f);
  }
  for (std::size_t i = 0; i < 64; ++i) REQUIRE(row[512 + i] == static_cast<float>(i));
}

TEST_CASE("ADDR R046: index keys in e4m3 are codes of a block, then its scales", "[cache]") {
  // miniature of fault_cases I: page of 4 tokens, 16 lanes = 64 code bytes + 4 scales of 4 bytes
  test::Guarded<std::byte> memory(2 * 80);
  auto const cache =
      make_index_key_e4m3_cache<host>(memory.data(), Pages{2}, PageSize{4}, HeadDim{16});
  CHECK((cache.block_stride == 80 && cache.row_stride == 16));
  for (int token = 0; token < 4; ++token) {
    for (int lane = 0; lane < 16; ++lane) {
      memory[static_cast<std::size_t>(80 + token * 16 + lane)] =
          std::byte{from_float<e4m3>(static_cast<float>(lane == token ? 2 : 0)).bits};
    }
    float const scale = 0.5f + static_cast<float>(token);
    std::memcpy(memory.data() + 80 + 64 + 4 * token, &scale, 4);
  }
  test::Guarded<float> row(16);
  for (index_t token = 0; token < 4; ++token) {
    decode_row(CacheView<host, format::IndexKeyE4m3>(cache), 4 + token, row.data());
    for (index_t lane = 0; lane < 16; ++lane) {
      CHECK(row[static_cast<std::size_t>(lane)] ==
            (lane == token ? 2.0f * (0.5f + static_cast<float>(token)) : 0.0f));
    }
  }
}

TEST_CASE("FP8 R040: the scale's format is part of the cache's type", "[cache]") {
  using E4m3 = CacheView<host, format::IndexKeyE4m3>;
  static_assert(!std::is_convertible_v<E4m3, CacheView<host, format::LatentE4m3>>);
  static_assert(!std::is_convertible_v<CacheView<host, format::Plain<bf16>>,
                                       CacheView<host, format::Plain<fp16>>>);
  static_assert(!std::is_convertible_v<E4m3, CacheView<Space::device, format::IndexKeyE4m3>>);
  SUCCEED();
}

TEST_CASE("caches: checks name what they refuse", "[cache]") {
  std::vector<float> memory(4 * 8 * 16);
  auto const good = make_paged_cache<host>(static_cast<float const*>(memory.data()), Pages{4},
                                           PageSize{8}, HeadDim{16});
  std::vector<position_t> const pages(2, 0);
  auto const table = make_page_table<host>(pages.data(), Requests{1}, Pages{2}, PageSize{8});
  auto const check = [&](auto const& cache) {
    return detail::check_cache(detail::kv_cache_names, cache, index_t{16}, table);
  };
  auto const refuses = [&](auto change, Errc code, std::string_view part) {
    auto cache = good;
    change(cache);
    Status const status = check(cache);
    INFO(status.what);
    CHECK(status.code == code);
    CHECK(std::string_view(status.what).find(part) != std::string_view::npos);
  };
  CHECK(check(good).ok());
  refuses([](auto& c) { c.lanes = 15; }, Errc::bad_shape, "lanes of the KV cache");
  refuses([](auto& c) { c.block_size = 4; }, Errc::bad_shape, "block size of the KV cache");
  refuses([](auto& c) { c.block_size = 0; }, Errc::bad_shape, "block size of the KV cache");
  refuses([](auto& c) { c.blocks = -1; }, Errc::bad_shape, "blocks of the KV cache");
  refuses([](auto& c) { c.blocks = index_t{1} << 28; }, Errc::bad_shape, "blocks of the KV cache");
  refuses([](auto& c) { c.data = nullptr; }, Errc::missing_input, "memory of the KV cache");
  refuses([](auto& c) { c.row_stride = 0; }, Errc::bad_stride, "strides of the KV cache");
  refuses([](auto& c) { c.block_stride = -1; }, Errc::bad_stride, "strides of the KV cache");

  auto latent = CacheView<host, format::LatentE4m3>{
      reinterpret_cast<std::byte const*>(memory.data()), 1, 8, 16, 512, 64, {12, 4}};
  CHECK(check(latent).ok());
  latent.format.tile = 0;
  CHECK(check(latent).code == Errc::bad_value);
  latent.format = {17, 4};
  CHECK(check(latent).code == Errc::bad_value);
}
