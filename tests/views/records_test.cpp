// SPDX-License-Identifier: Apache-2.0
//
// Rows of caches as bytes: records to save and restore, and copies between slots. Rows are found
// here by formulas of their own, and every byte of a pool is compared, gaps among them.
#if defined(INDEXSHARE_TEST_CUDA)
#include <indexshare/cuda/records.cuh>

#include "../cuda/graph.hpp"
#endif
#include <indexshare/cache_inventory.hpp>
#include <indexshare/host/records.hpp>

#include <catch2/catch_template_test_macros.hpp>
#include <catch2/catch_test_macros.hpp>

#include "cache_pool.hpp"
#include "executors.hpp"
#include "huge.hpp"
#include "memory.hpp"
#include "random.hpp"
#include "refusal.hpp"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <tuple>
#include <type_traits>
#include <vector>

using namespace indexshare;
using test::refused;
using test::space;
using test::succeeded;

namespace {

constexpr bool on_device = space == Space::device;
/// Executors of host memory share these calls but for their threads.
using X = std::tuple_element_t<std::tuple_size_v<test::Executors> - 1, test::Executors>;
using test::Bytes;
using test::Place;
using test::Pool;
using Slots = std::vector<position_t>;

constexpr std::size_t to_size(index_t n) { return static_cast<std::size_t>(n); }

SlotView<space> slot_view(test::Guarded<position_t> const& slots) {
  return make_dense<space, position_t const, 1>(slots.data(), {static_cast<index_t>(slots.size())});
}
Slots all_slots(index_t n) {
  Slots slots(to_size(n));
  for (index_t i = 0; i < n; ++i) slots[to_size(i)] = static_cast<position_t>(i);
  return slots;
}

/// What copy_rows promises, by lists of bytes.
template <class Format>
Bytes copied(Pool<Format>& from, Slots const& from_slots, Pool<Format>& to, Slots const& to_slots) {
  Bytes const source = from.all();
  Bytes target = to.all();
  for (std::size_t i = 0; i < from_slots.size(); ++i) {
    auto const goes_to = to_slots.empty() ? static_cast<position_t>(i) : to_slots[i];
    if (from_slots[i] < 0 || from_slots[i] >= from.slots()) continue;
    if (goes_to < 0 || goes_to >= to.slots()) continue;
    Pool<Format>::write(target, to.parts(goes_to),
                        Pool<Format>::read(source, from.parts(from_slots[i])));
  }
  return target;
}

template <class Format>
Status copy(Pool<Format>& from, Slots const& from_slots, Pool<Format>& to, Slots const& to_slots,
            Workspace ws) {
  X const x{};
  auto const sources = test::guarded(from_slots);
  auto const targets = test::guarded(to_slots);
  Status const status = copy_rows(x, from.view(), slot_view(sources), to.view(),
                                  to_slots.empty() ? SlotView<space>{} : slot_view(targets), ws);
  test::finish(x);
  return status;
}

/// Copies inside one pool and compares every byte.
template <class Format>
void check_inside(Pool<Format>& pool, Slots const& from_slots, Slots const& to_slots) {
  X const x{};
  Bytes const want = copied(pool, from_slots, pool, to_slots);
  test::Scratch scratch(
      copy_rows_workspace(x, Rows{static_cast<index_t>(from_slots.size())}, pool.view()));
  REQUIRE_THAT(copy(pool, from_slots, pool, to_slots, scratch.get()), succeeded());
  CHECK((pool.all() == want));
  CHECK((pool.memory.intact() && scratch.intact()));
}

template <class Format>
Bytes taken(Pool<Format>& pool, Slots const& slots_, std::byte fill = test::unwritten) {
  X const x{};
  auto const slots = test::guarded(slots_);
  auto const n = static_cast<index_t>(slots_.size());
  test::Guarded<std::byte> out(to_size(n * pool.record()), fill);
  REQUIRE_THAT(export_rows(x, pool.view(), slot_view(slots),
                           make_dense<space, std::byte, 2>(out.data(), {n, pool.record()})),
               succeeded());
  test::finish(x);
  CHECK((out.intact() && pool.memory.intact()));
  return Bytes(out.data(), out.data() + out.size());
}

template <class Format>
Status put(Pool<Format>& pool, Bytes const& records_, Slots const& slots_) {
  X const x{};
  auto const records = test::guarded(records_);
  auto const slots = test::guarded(slots_);
  auto const n = static_cast<index_t>(slots_.size());
  Status const status =
      import_rows(x, make_dense<space, std::byte const, 2>(records.data(), {n, pool.record()}),
                  slot_view(slots), pool.view());
  test::finish(x);
  return status;
}

template <class Format_, index_t Lanes>
struct Case {
  using Format = Format_;
  static constexpr index_t lanes = Lanes;
};
/// Published sizes, and ones that fit no word: rows of 5 and 3 bytes, 10 elements of 2 bytes.
using Cases = std::tuple<Case<format::Plain<bf16>, 576>, Case<format::Plain<bf16>, 5>,
                         Case<format::Plain<float>, 3>, Case<format::Plain<e4m3>, 3>,
                         Case<format::IndexKeyE4m3, 128>, Case<format::IndexKeyInt8, 5>,
                         Case<format::LatentE4m3, 576>>;

/// Page sizes that the cases go through, gaps between rows and blocks among them.
std::vector<Place> places(index_t lanes) {
  return {{1, 40, lanes}, {16, 3, lanes, 0, 4}, {32, 2, lanes},
          {64, 1, lanes}, {3, 14, lanes, 2, 5}, {7, 6, lanes, 16, 0}};
}

}  // namespace

TEMPLATE_LIST_TEST_CASE("records: saved with one page size, restored with another", "[records]",
                        Cases) {
  using Format = typename TestType::Format;
  for (Place const& saved : places(TestType::lanes)) {
    Pool<Format> from(saved);
    CHECK(record_bytes(from.view()) == from.record());
    Slots const slots = test::Random(3).permutation<position_t>(to_size(from.slots()));
    Bytes const records = taken(from, slots);
    Bytes const source = from.all();
    bool same = true;
    for (std::size_t i = 0; i < slots.size(); ++i) {
      Bytes const row = Pool<Format>::read(source, from.parts(slots[i]));
      same = same && std::equal(row.begin(), row.end(),
                                records.begin() + static_cast<index_t>(i) * from.record());
    }
    CHECK(same);
    for (Place const& restored : places(TestType::lanes)) {
      CAPTURE(saved.page, saved.row_gap, restored.page, restored.row_gap);
      Pool<Format> to(restored, 2);
      // 37 rows go into any of the pools
      Slots targets = test::Random(4).permutation<position_t>(to_size(to.slots()));
      targets.resize(37);
      Bytes const part(records.begin(), records.begin() + 37 * from.record());
      Slots const sources(slots.begin(), slots.begin() + 37);
      Bytes const want = copied(from, sources, to, targets);
      REQUIRE_THAT(put(to, part, targets), succeeded());
      CHECK((to.all() == want));
      CHECK(to.memory.intact());
    }
  }
}

TEMPLATE_LIST_TEST_CASE("copy_rows: between two caches without a workspace, empty entries skipped",
                        "[records]", Cases) {
  using Format = typename TestType::Format;
  for (Place const& a : places(TestType::lanes)) {
    for (Place const& b : {Place{1, 38, TestType::lanes}, Place{5, 8, TestType::lanes, 3, 1}}) {
      CAPTURE(a.page, a.row_gap, b.page);
      Pool<Format> from(a, 5), to(b, 6);
      Slots sources = test::Random(7).permutation<position_t>(to_size(from.slots()));
      Slots targets = test::Random(8).permutation<position_t>(to_size(to.slots()));
      sources.resize(33);
      targets.resize(33);
      sources[0] = 0;
      sources[3] = sources[4];  // read twice
      sources[8] = no_position;
      targets[9] = no_position;
      sources[32] = targets[32] = no_position;
      Bytes want = copied(from, sources, to, targets);
      Bytes const unchanged = from.all();
      REQUIRE_THAT(copy(from, sources, to, targets, {}), succeeded());
      CHECK((to.all() == want));
      want = copied(from, sources, to, {});  // row i to slot i
      REQUIRE_THAT(copy(from, sources, to, {}, {}), succeeded());
      CHECK((to.all() == want));
      CHECK((from.all() == unchanged));
      CHECK((to.memory.intact() && from.memory.intact()));
    }
  }
}

TEMPLATE_LIST_TEST_CASE("copy_rows: inside one cache rows move up, down and in circles",
                        "[records]", Cases) {
  using Format = typename TestType::Format;
  for (Place const& place : places(TestType::lanes)) {
    CAPTURE(place.page, place.row_gap);
    Pool<Format> pool(place, 9);
    index_t const n = pool.slots();
    Slots const low = all_slots(n - 1);
    Slots high = low;
    for (position_t& slot : high) ++slot;
    check_inside(pool, low, high);
    check_inside(pool, high, low);
    check_inside(pool, all_slots(n), test::Random(1).permutation<position_t>(to_size(n)));
    check_inside(pool, {4, 1, 2}, {1, 2, 4});
    check_inside(pool, {0, 1}, {1, 0});
    check_inside(pool, {3, 3, 3}, {3, 0, 5});
    check_inside(pool, {2, no_position, 1, 6}, {1, 0, no_position, 2});
    check_inside(pool, {5, 4, 3}, {});
    check_inside(pool, {}, {});
  }
}

TEST_CASE("SHARE-CACHE R108: a batch reordered to [1, 0], then again, is what it was",
          "[records]") {
  using Format = format::IndexKeyE4m3;
  Pool<Format> pool({4, 2, 128}, 3);  // two requests of four tokens, a page each
  Bytes const before = pool.all();
  Slots const order{4, 5, 6, 7, 0, 1, 2, 3};
  check_inside(pool, order, all_slots(8));
  CHECK((pool.all() != before));
  check_inside(pool, order, all_slots(8));
  CHECK((pool.all() == before));
}

TEST_CASE("copy_rows: parts of one pool that do not overlap need no workspace, others do",
          "[records]") {
  using Format = format::LatentE4m3;
  X const x{};
  Pool<Format> pool({4, 6, 576}, 3);
  auto left = pool.view(), right = pool.view();
  left.blocks = 3;
  right.blocks = 3;
  right.data += 3 * pool.block_stride();
  auto const slots = test::guarded(all_slots(12));
  Bytes want = pool.all();
  std::copy_n(want.begin(), 3 * pool.block_stride(), want.begin() + 3 * pool.block_stride());
  CHECK_THAT(copy_rows(x, left, slot_view(slots), right, {}), succeeded());
  test::finish(x);
  CHECK((pool.all() == want));
  right.data -= pool.block_stride();
  auto const need = copy_rows_workspace(x, Rows{12}, left);
  CHECK(need.bytes == 12 * 656 / 256 * 256 + 256);
  CHECK_THAT(copy_rows(x, left, slot_view(slots), right, {}),
             refused(Errc::workspace_too_small, "copy_rows")
                 .naming(static_cast<std::int64_t>(need.bytes), 0));
  test::finish(x);
  CHECK((pool.all() == want));
}

// ---- what a list may hold

TEST_CASE("records: on the host a slot outside the cache is refused, on a device left out",
          "[records]") {
  using Format = format::IndexKeyInt8;
  constexpr position_t most = std::numeric_limits<position_t>::max();
  for (position_t const bad : {position_t{-1}, position_t{-2}, position_t{12}, most}) {
    CAPTURE(bad);
    Pool<Format> pool({4, 3, 8}, 3), other({4, 3, 8}, 4);
    Bytes const before = pool.all();
    Slots const slots{2, bad, 0};
    if constexpr (on_device) {
      Bytes const records = taken(pool, slots);
      Bytes want(36);
      Bytes const first = Pool<Format>::read(before, pool.parts(2));
      Bytes const last = Pool<Format>::read(before, pool.parts(0));
      std::copy(first.begin(), first.end(), want.begin());
      std::copy(last.begin(), last.end(), want.begin() + 24);
      CHECK(records == want);  // zeros between them
      Bytes const imported = copied(pool, slots, other, slots);
      REQUIRE_THAT(put(other, records, slots), succeeded());
      CHECK((other.all() == imported));
      for (bool const is_source : {true, false}) {
        Slots const good{5, 6, 7};
        auto const& sources = is_source ? slots : good;
        auto const& targets = is_source ? good : slots;
        Bytes const moved = copied(pool, sources, other, targets);
        REQUIRE_THAT(copy(pool, sources, other, targets, {}), succeeded());
        CHECK((other.all() == moved));
        check_inside(pool, sources, targets);
      }
    } else {
      X const x{};
      Bytes const untouched = other.all();
      auto const list = test::guarded(slots);
      test::Guarded<std::byte> out(36, test::unwritten);
      CHECK_THAT(export_rows(x, pool.view(), slot_view(list),
                             make_dense<space, std::byte, 2>(out.data(), {3, 12})),
                 refused(Errc::bad_value, "slot of a row to export").naming(12, bad));
      CHECK(out[0] == test::unwritten);
      CHECK_THAT(put(other, Bytes(36), slots),
                 refused(Errc::bad_value, "slot of a row to import").naming(12, bad));
      if (bad != no_position) {
        CHECK_THAT(copy(pool, slots, other, {1, 2, 3}, {}),
                   refused(Errc::bad_value, "copy from").naming(12, bad));
        CHECK_THAT(copy(pool, {1, 2, 3}, other, slots, {}),
                   refused(Errc::bad_value, "copy to").naming(12, bad));
      }
      CHECK((other.all() == untouched));
      CHECK((pool.all() == before));
    }
  }
}

TEST_CASE("records: what does not fit is refused by name, before any work", "[records]") {
  using Format = format::LatentE4m3;
  X const x{};
  Pool<Format> pool({4, 3, 48}, 3, {32, 16}), other({4, 3, 48}, 4, {32, 16});
  Bytes const before = pool.all();
  auto const slots = test::guarded<position_t>({0, 1});
  test::Guarded<std::byte> memory(144, test::unwritten);
  auto const records = [&](index_t n, index_t bytes, index_t stride) {
    return make_strided<space, std::byte, 2>(memory.data(), {n, bytes}, {stride, 1});
  };
  auto const refuses_export = [&](auto const& cache, auto const& out, Errc code, char const* part) {
    CHECK_THAT(export_rows(x, cache, slot_view(slots), out), refused(code, part));
  };
  auto const view = pool.view();
  CHECK(record_bytes(view) == 72);
  refuses_export(view, records(1, 72, 72), Errc::bad_shape, "records against their slots");
  refuses_export(view, records(2, 71, 72), Errc::bad_shape, "bytes of a record");
  refuses_export(view, make_strided<space, std::byte, 2>(memory.data(), {2, 72}, {150, 2}),
                 Errc::bad_stride, "records to write");
  auto broken = view;
  broken.data = nullptr;
  refuses_export(broken, records(2, 72, 72), Errc::missing_input, "memory of the cache");
  broken = view;
  broken.format.tile = 0;
  refuses_export(broken, records(2, 72, 72), Errc::bad_value, "format");
  broken = view;
  broken.block_size = 0;
  refuses_export(broken, records(2, 72, 72), Errc::bad_shape, "block size");
  CHECK_THAT(export_rows(x, view, make_dense<space, position_t const, 1>(nullptr, {2}),
                         records(2, 72, 72)),
             refused(Errc::missing_input, "slots"));
  broken = view;
  broken.row_stride = 71;
  auto const constant = make_dense<space, std::byte const, 2>(memory.data(), {2, 72});
  CHECK_THAT(import_rows(x, constant, slot_view(slots), broken),
             refused(Errc::bad_stride, "strides").naming(72, 71));

  auto const refuses_copy = [&](auto const& to, auto const& to_slots, Errc code, char const* part) {
    CHECK_THAT(copy_rows(x, view, slot_view(slots), to, to_slots), refused(code, part));
  };
  Pool<format::IndexKeyE4m3> key_pool({4, 3, 8}, 3);
  auto keys = key_pool.view();
  keys.lanes = -4;  // a record of 0 bytes
  refuses_export(keys, records(2, 0, 72), Errc::bad_shape, "lanes");

  auto to = other.view();
  to.lanes = 47;
  refuses_copy(to, slot_view(slots), Errc::bad_shape, "lanes of the cache to copy to");
  to = other.view();
  to.format.tile = 32;
  refuses_copy(to, slot_view(slots), Errc::bad_value, "format of the cache to copy to");
  to = other.view();
  to.basis = LaneBasis::hadamard;
  refuses_copy(to, slot_view(slots), Errc::bad_value, "basis");
  to = other.view();
  refuses_copy(to, make_dense<space, position_t const, 1>(slots.data(), {1}), Errc::bad_shape,
               "slots to copy to");
  to.blocks = 0;
  refuses_copy(to, SlotView<space>{}, Errc::bad_shape, "rows to copy");
  to = other.view();
  to.row_stride = 71;
  refuses_copy(to, slot_view(slots), Errc::bad_stride, "strides of the cache to copy to");
  test::Scratch scratch({512});
  Workspace crooked = scratch.get();
  crooked.data = static_cast<std::byte*>(crooked.data) + 1;
  CHECK_THAT(copy_rows(x, view, slot_view(slots), pool.view(), slot_view(slots), crooked),
             refused(Errc::bad_value, "alignment"));
  test::finish(x);
  CHECK((pool.all() == before));
  CHECK(memory[0] == test::unwritten);
}

TEST_CASE("records: a target list without memory, of any extent, means rows in order",
          "[records]") {
  X const x{};
  Pool<format::Plain<float>> from({4, 3, 5}, 3), to({4, 3, 5}, 4), want({4, 3, 5}, 4);
  auto const slots = test::guarded<position_t>({7, 2});
  auto const in_order = test::guarded<position_t>({0, 1});
  REQUIRE_THAT(copy_rows(x, from.view(), slot_view(slots), want.view(), slot_view(in_order)),
               succeeded());
  REQUIRE_THAT(copy_rows(x, from.view(), slot_view(slots), to.view(),
                         make_dense<space, position_t const, 1>(nullptr, {2})),
               succeeded());
  test::finish(x);
  CHECK((to.all() == want.all()));
}

TEST_CASE("records: writing a block of codes checks that it ends behind its scales", "[records]") {
  X const x{};
  Pool<format::IndexKeyE4m3> pool({4, 3, 8, 0, 7}, 3);
  auto cache = pool.view();
  auto const slots = test::guarded<position_t>({0});
  auto const record = test::guarded(Bytes(12));
  auto const run = [&] {
    return import_rows(x, make_dense<space, std::byte const, 2>(record.data(), {1, 12}),
                       slot_view(slots), cache);
  };
  cache.block_stride = 4 * 12 - 1;
  CHECK_THAT(run(), refused(Errc::bad_stride, "strides").naming(48, 47));
  cache.block_stride = 48;
  cache.row_stride = 7;
  CHECK_THAT(run(), refused(Errc::bad_stride, "strides").naming(8, 7));
  cache.row_stride = 8;
  CHECK_THAT(run(), succeeded());
  test::finish(x);
}

TEST_CASE("copy_rows: its workspace grows with the rows and saturates", "[records]") {
  X const x{};
  Pool<format::IndexKeyE4m3> pool({4, 3, 128}, 3);
  auto const bytes = [&](index_t rows) {
    return copy_rows_workspace(x, Rows{rows}, pool.view()).bytes;
  };
  CHECK(bytes(0) == 0);
  CHECK(bytes(-1) == 0);
  CHECK(bytes(1) == 256);
  CHECK(bytes(16) == 2304);  // 132 bytes in words of 16 are 144
  CHECK(bytes(17) > bytes(16));
  CHECK(bytes(index_t{1} << 62) >= max_workspace_bytes);
}

TEST_CASE("INT32 R142: rows of blocks more than 2^31 bytes apart are copied and exported",
          "[records]") {
  X const x{};
  constexpr index_t stride = (index_t{1} << 31) + 1280;
  test::HugeMemory const memory(to_size(2 * stride + 1288));
  auto* const bytes = memory.as<std::byte>();
  if (bytes == nullptr) SKIP("no 4 GiB of addresses");
  MutableCacheView<space, format::IndexKeyE4m3> const cache{bytes, 3, 2, 128, stride, 640, {}};
  for (index_t i = 0; i < 128; ++i) bytes[640 + i] = std::byte(i + 1);
  for (index_t i = 0; i < 4; ++i) bytes[1280 + 4 + i] = std::byte(200 + i);
  auto const from = test::guarded<position_t>({1}), to = test::guarded<position_t>({5});
  test::Scratch scratch(copy_rows_workspace(x, Rows{1}, cache));
  REQUIRE_THAT(copy_rows(x, cache, slot_view(from), cache, slot_view(to), scratch.get()),
               succeeded());
  test::Guarded<std::byte> record(132);
  REQUIRE_THAT(export_rows(x, cache, slot_view(to),
                           make_dense<space, std::byte, 2>(record.data(), {1, 132})),
               succeeded());
  test::finish(x);
  CHECK(std::memcmp(record.data(), bytes + 640, 128) == 0);
  CHECK(std::memcmp(record.data() + 128, bytes + 1284, 4) == 0);
  CHECK(std::memcmp(bytes + 2 * stride + 640, bytes + 640, 128) == 0);
}

// ---- whole requests

namespace {

/// The caches of a small model, each a pool, and the slots of one request in them.
struct Model {
  SharePlan plan;
  std::vector<Pool<format::LatentE4m3>> kv;
  std::vector<Pool<format::IndexKeyE4m3>> keys;

  static SharePlan plan_of(std::vector<LayerRole> const& roles, std::int32_t mtp) {
    ScheduleFields fields;
    fields.num_layers = static_cast<std::int32_t>(roles.size());
    fields.mtp_layers = mtp;
    fields.types = cuda::std::span<LayerRole const>(roles.data(), roles.size());
    return make_share_plan(fields).value();
  }
  Model(SharePlan const& p, index_t page, std::uint64_t seed) : plan(p) {
    for (CacheId const cache : inventory()) {
      index_t const blocks = 24 / page;
      auto const own = seed + static_cast<std::uint64_t>(cache.layer);
      if (cache.kind == CacheKind::kv) {
        kv.emplace_back(Place{page, blocks, 48}, own, format::LatentE4m3{32, 16});
      } else {
        keys.emplace_back(Place{page, blocks, 16}, own);
      }
    }
  }
  CacheInventory inventory() const { return {plan, 0, plan.total_layers(), 72, 20}; }

  /// f(cache, pool) in the inventory's order.
  template <class F>
  void for_each(F const& f) {
    std::size_t k = 0, i = 0;
    for (CacheId const cache : inventory()) {
      if (cache.kind == CacheKind::kv) {
        f(cache, kv[k++]);
      } else {
        f(cache, keys[i++]);
      }
    }
  }
  /// All of a request's tokens, as bytes; `left_out` is a cache that somebody forgot.
  Bytes save(Slots const& slots, CacheId left_out = {-1, CacheKind::kv}) {
    auto const tokens = static_cast<index_t>(slots.size());
    Bytes record(to_size(inventory().bytes(tokens)));
    for_each([&](CacheId cache, auto& pool) {
      if (cache == left_out) return;
      Bytes const part = taken(pool, slots);
      std::copy(part.begin(), part.end(),
                record.begin() + inventory().offset(cache, tokens).value());
    });
    return record;
  }
  /// The same read by hand, cache after cache.
  Bytes rows(Slots const& slots) {
    Bytes rows;
    for_each([&](CacheId, auto& pool) {
      Bytes const all = pool.all();
      for (position_t const slot : slots) {
        Bytes const row = pool.read(all, pool.parts(slot));
        rows.insert(rows.end(), row.begin(), row.end());
      }
    });
    return rows;
  }
  void restore(Bytes const& record, Slots const& slots, CacheId left_out = {-1, CacheKind::kv}) {
    auto const tokens = static_cast<index_t>(slots.size());
    for_each([&](CacheId cache, auto& pool) {
      if (cache == left_out) return;
      auto const begin = record.begin() + inventory().offset(cache, tokens).value();
      REQUIRE_THAT(put(pool, Bytes(begin, begin + tokens * pool.record()), slots), succeeded());
    });
  }
};

constexpr LayerRole full = LayerRole::full;
constexpr LayerRole shared = LayerRole::shared;

}  // namespace

TEST_CASE("OFFLOAD R122 R124: a request comes back whole, MTP caches too; one left out shows",
          "[records]") {
  SharePlan const plan = Model::plan_of({full, shared, shared, full}, 1);
  Slots const old_slots{9, 2, 17, 5, 23}, new_slots{0, 1, 2, 3, 4};
  Model saved(plan, 4, 100);
  CHECK(saved.inventory().count() == 5 + 3);  // KV of every layer; index keys of 0, 3 and MTP's 4
  Bytes const record = saved.save(old_slots);
  CHECK((record == saved.rows(old_slots)));
  Model other(plan, 3, 200);  // another engine, with other pages
  other.restore(record, new_slots);
  CHECK((other.rows(new_slots) == record));
  for (CacheId const forgotten : saved.inventory()) {
    CAPTURE(forgotten.layer, static_cast<int>(forgotten.kind));
    Model careless(plan, 3, 300);
    careless.restore(record, new_slots, forgotten);
    CHECK((careless.rows(new_slots) != record));
    CHECK((saved.save(old_slots, forgotten) != record));
  }
  CHECK(other.inventory().offset({1, CacheKind::index_keys}, 5).error().code == Errc::bad_schedule);
}

TEST_CASE(
    "SHARE-CACHE R101: caches of full, shared, full are saved, restored, trimmed and reset "
    "before anything was written",
    "[records]") {
  SharePlan const plan = Model::plan_of({full, shared, full}, 0);
  Model model(plan, 4, 1);
  std::vector<Bytes> before;
  model.for_each([&](CacheId, auto& pool) { before.push_back(pool.all()); });
  CHECK(before.size() == 3 + 2);
  Bytes const nothing = model.save({});
  CHECK(nothing.empty());
  model.restore(nothing, {});
  std::size_t i = 0;
  model.for_each([&](CacheId, auto& pool) {
    check_inside(pool, {}, {});  // a trim or reset that moves no token
    CHECK((pool.all() == before[i++]));
  });
  CHECK(usable_prefix(model.inventory(), cuda::std::span<index_t const>()).error().code ==
        Errc::bad_shape);
  std::vector<index_t> const none(5, 0);
  CHECK(usable_prefix(model.inventory(), cuda::std::span<index_t const>(none.data(), 5))
            .value()
            .tokens == 0);
}

TEST_CASE("SHARE-CACHE R108: a request cropped to 3 tokens goes on as a fresh one does",
          "[records]") {
  SharePlan const plan = Model::plan_of({full, shared, full}, 0);
  // Tokens 0..4 in slots 8..12 of one engine; the crop keeps 0..2, and token 3 comes anew.
  Slots const slots{8, 9, 10, 11};
  Model cropped(plan, 4, 1), fresh(plan, 4, 50), next(plan, 4, 70);
  Bytes const three = cropped.save({8, 9, 10});
  fresh.restore(three, {0, 1, 2});
  Bytes const token = next.save({0});
  cropped.restore(token, {11});  // written over what was cropped away
  fresh.restore(token, {3});
  CHECK((cropped.rows(slots) == fresh.rows({0, 1, 2, 3})));
  CHECK((cropped.rows({11}) == next.rows({0})));
}

#if defined(INDEXSHARE_TEST_CUDA)

// ---- graphs

TEMPLATE_LIST_TEST_CASE("CUDA records: captured once, replayed with new slots and rows",
                        "[records][graph]", Cases) {
  using Format = typename TestType::Format;
  X const x{};
  Pool<Format> from({4, 5, TestType::lanes}, 1), to({3, 7, TestType::lanes, 2, 1}, 2);
  auto sources = test::guarded(Slots(6, no_position)),
       targets = test::guarded(Slots(6, no_position));
  test::Guarded<std::byte> records(to_size(6 * from.record()), test::unwritten);
  test::Scratch scratch(copy_rows_workspace(x, Rows{6}, from.view()));
  cuda_test::Graph const graph(x, [&] {
    // a hand-over inside `from`, then out through records and into `to`
    REQUIRE_THAT(copy_rows(x, from.view(), slot_view(sources), from.view(), slot_view(targets),
                           scratch.get()),
                 succeeded());
    REQUIRE_THAT(export_rows(x, from.view(), slot_view(targets),
                             make_dense<space, std::byte, 2>(records.data(), {6, from.record()})),
                 succeeded());
    REQUIRE_THAT(
        import_rows(x, make_dense<space, std::byte const, 2>(records.data(), {6, from.record()}),
                    slot_view(sources), to.view()),
        succeeded());
    REQUIRE_THAT(copy_rows(x, from.view(), slot_view(sources), to.view(), slot_view(targets)),
                 succeeded());
  });
  CHECK(graph.only_device_work());
  CHECK(graph.nodes().size() == 5);
  for (std::uint64_t replay = 1; replay < 4; ++replay) {
    test::Random random(replay);
    for (auto* const list : {&sources, &targets}) {
      Slots const order = random.permutation<position_t>(20);
      std::copy_n(order.begin(), 6, list->data());
    }
    sources[static_cast<std::size_t>(replay)] = no_position;
    Slots const from_slots(sources.data(), sources.data() + 6);
    Slots const to_slots(targets.data(), targets.data() + 6);
    Pool<Format> want_from({4, 5, TestType::lanes}), want_to({3, 7, TestType::lanes, 2, 1});
    std::copy_n(from.bytes(), from.memory.bytes(), want_from.bytes());
    std::copy_n(to.bytes(), to.memory.bytes(), want_to.bytes());
    for (auto const& [a, a_slots, b, b_slots] :
         {std::tuple{&want_from, from_slots, &want_from, to_slots},
          std::tuple{&want_from, to_slots, &want_to, from_slots},
          std::tuple{&want_from, from_slots, &want_to, to_slots}}) {
      Bytes const bytes = copied(*a, a_slots, *b, b_slots);
      std::copy(bytes.begin(), bytes.end(), b->bytes());
    }
    graph.replay();
    CHECK((from.all() == want_from.all()));
    CHECK((to.all() == want_to.all()));
  }
}

TEST_CASE("CUDA records: rows come from pinned memory of the host and go back", "[records]") {
  X const x{};
  using Format = format::LatentE4m3;
  Pool<Format> resident({16, 3, 576}, 1), staging({1, 8, 576}, 2);
  void* pinned = nullptr;
  void* seen = nullptr;
  test::require(cudaHostAlloc(&pinned, resident.memory.bytes(), cudaHostAllocMapped));
  test::require(cudaHostGetDevicePointer(&seen, pinned, 0));
  std::copy_n(resident.bytes(), resident.memory.bytes(), static_cast<std::byte*>(pinned));
  auto on_host = resident.view();
  on_host.data = static_cast<std::byte*>(seen);
  Slots const list{40, 3, no_position, 17, 0, no_position};
  auto const slots = test::guarded(list);
  Bytes const want = copied(resident, list, staging, {});
  REQUIRE_THAT(copy_rows(x, on_host, slot_view(slots), staging.view(), {}), succeeded());
  test::finish(x);
  CHECK((staging.all() == want));
  auto const back = test::guarded<position_t>({1, 2, 4, 5, 6, 7});
  Bytes const returned = copied(staging, Slots(back.data(), back.data() + 6), resident, list);
  REQUIRE_THAT(copy_rows(x, staging.view(), slot_view(back), on_host, slot_view(slots)),
               succeeded());
  test::finish(x);
  CHECK(std::memcmp(pinned, returned.data(), returned.size()) == 0);
  test::require(cudaFreeHost(pinned));
}

TEST_CASE("CUDA records: refusals enqueue nothing", "[records]") {
  X const x{};
  Pool<format::IndexKeyE4m3> pool({4, 5, 128}, 1);
  auto const slots = test::guarded(all_slots(6));
  CHECK(cuda_test::enqueued_by(x, [&] {
          CHECK_THAT(copy_rows(x, pool.view(), slot_view(slots), pool.view(), {}),
                     refused(Errc::workspace_too_small, "copy_rows"));
        }) == 0);
}

#endif
