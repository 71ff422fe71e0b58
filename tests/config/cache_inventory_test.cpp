// SPDX-License-Identifier: Apache-2.0
//
// Which caches a request lies in: saving, restoring and reusing it whole.
#include <indexshare/cache_inventory.hpp>

#include <catch2/catch_test_macros.hpp>

#include "refusal.hpp"

#include <string_view>
#include <vector>

using namespace indexshare;
using test::refused;

namespace {

constexpr index_t kv_bytes = 656, key_bytes = 132;

/// A plan from letters F and S.
SharePlan plan_of(std::string_view letters, std::int32_t mtp) {
  std::vector<LayerRole> roles;
  for (char const c : letters) roles.push_back(c == 'F' ? LayerRole::full : LayerRole::shared);
  ScheduleFields fields;
  fields.num_layers = static_cast<std::int32_t>(roles.size());
  fields.mtp_layers = mtp;
  fields.types = cuda::std::span<LayerRole const>(roles.data(), roles.size());
  return make_share_plan(fields).value();
}

SharePlan glm52_plan() {
  ScheduleFields fields;
  fields.num_layers = 78;
  fields.mtp_layers = 1;
  fields.freq = 4;
  fields.offset = 3;
  return make_share_plan(fields).value();
}

CacheInventory whole(SharePlan const& plan) {
  return {plan, 0, plan.total_layers(), kv_bytes, key_bytes};
}

std::vector<CacheId> listed(CacheInventory const& inventory) {
  std::vector<CacheId> caches;
  for (CacheId const cache : inventory) caches.push_back(cache);
  return caches;
}

}  // namespace

TEST_CASE(
    "OFFLOAD R124 R122: a GLM-5.2 request lies in 78 KV and 21 index-key caches, and 2 of MTP",
    "[caches]") {
  SharePlan const plan = glm52_plan();
  auto const caches = listed(whole(plan));
  CHECK(caches.size() == 78 + 21 + 2);
  CHECK(listed({plan, 0, 78, kv_bytes, key_bytes}).size() == 78 + 21);
  CHECK(caches[0] == CacheId{0, CacheKind::kv});
  CHECK(caches[1] == CacheId{0, CacheKind::index_keys});
  CHECK(caches[caches.size() - 2] == CacheId{78, CacheKind::kv});
  CHECK(caches.back() == CacheId{78, CacheKind::index_keys});
  // Trunk: index keys 21 * 132 = 2772 instead of 78 * 132 = 10296, KV 78 * 656 = 51168.
  CHECK(CacheInventory(plan, 0, 78, kv_bytes, key_bytes).bytes(1) == 51168 + 2772);
  CHECK(CacheInventory(plan, 0, 78, kv_bytes, key_bytes).bytes(1 << 20) == (index_t{51168} + 2772)
                                                                               << 20);
}

TEST_CASE("caches: parts of a record lie behind each other", "[caches]") {
  SharePlan const plan = plan_of("FSSF", 1);
  CacheInventory const stage(plan, 1, 5, kv_bytes, key_bytes);
  std::vector<CacheId> const expected{{1, CacheKind::kv}, {2, CacheKind::kv},
                                      {3, CacheKind::kv}, {3, CacheKind::index_keys},
                                      {4, CacheKind::kv}, {4, CacheKind::index_keys}};
  CHECK(listed(stage) == expected);
  index_t const tokens = 7;
  index_t at = 0;
  for (CacheId const cache : stage) {
    CHECK(stage.offset(cache, tokens).value() == at);
    at += stage.row_bytes(cache.kind) * tokens;
  }
  CHECK(stage.bytes(tokens) == at);
  CHECK(stage.bytes(0) == 0);
  CHECK_THAT(stage.offset({1, CacheKind::index_keys}, 7).error(),
             refused(Errc::bad_schedule, "index-key").at(1));
  CHECK_THAT(stage.offset({0, CacheKind::kv}, 7).error(),
             refused(Errc::bad_value, "without a cache").at(0));
  CHECK_THAT(stage.offset({5, CacheKind::index_keys}, 7).error(),
             refused(Errc::bad_value, "without a cache").at(5));
}

TEST_CASE("SHARE-CACHE R101: full, shared, full: a shared layer has one cache, not an empty second",
          "[caches]") {
  SharePlan const plan = plan_of("FSF", 0);
  std::vector<CacheId> const expected{{0, CacheKind::kv},
                                      {0, CacheKind::index_keys},
                                      {1, CacheKind::kv},
                                      {2, CacheKind::kv},
                                      {2, CacheKind::index_keys}};
  CHECK(listed(whole(plan)) == expected);
}

TEST_CASE("OFFLOAD R122: the usable prefix is the least of what the caches hold", "[caches]") {
  SharePlan const plan = plan_of("FSF", 1);
  CacheInventory const caches = whole(plan);  // kv0 keys0 kv1 kv2 keys2 kv3 keys3
  auto const usable = [&](std::vector<index_t> const& cached) {
    return usable_prefix(caches, cuda::std::span<index_t const>(cached.data(), cached.size()));
  };
  CHECK(usable({9, 9, 9, 9, 9, 9, 9}).value().tokens == 9);
  CHECK(usable({9, 9, 4, 9, 9, 9, 9}).value().tokens == 4);
  CHECK(usable({9, 9, 4, 9, 9, 9, 9}).value().limit == CacheId{1, CacheKind::kv});
  // Without the MTP layer's index keys nothing is usable, though all KV is there.
  CHECK(usable({9, 9, 9, 9, 9, 9, 0}).value().tokens == 0);
  CHECK(usable({9, 9, 9, 9, 9, 9, 0}).value().limit == CacheId{3, CacheKind::index_keys});
  CHECK_THAT(usable({9, 9, 9}).error(),
             refused(Errc::bad_shape, "one number per cache").naming(7, 3));
  CHECK_THAT(usable({9, 9, 9, -1, 9, 9, 9}).error(), refused(Errc::bad_value, "cached").at(2));
}
