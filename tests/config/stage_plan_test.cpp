// SPDX-License-Identifier: Apache-2.0
#include <indexshare/share_plan.hpp>

#include <catch2/catch_test_macros.hpp>

#include <cstdint>
#include <string>

using namespace indexshare;

namespace {

constexpr SharePlan plan_of(std::int32_t layers, std::int64_t freq, std::int64_t offset,
                            std::int32_t mtp) {
  ScheduleFields fields;
  fields.num_layers = layers;
  fields.mtp_layers = mtp;
  fields.freq = freq;
  fields.offset = offset;
  return *make_share_plan(fields);
}

constexpr SharePlan glm52 = plan_of(78, 4, 3, 1);

constexpr StagePlan upper_half = *glm52.stage(39, 79, StageStart::imports_selection);
static_assert(upper_half.import_source() == 38);
static_assert(upper_half.index_cache_slot(42).value() == 0);
static_assert(upper_half.index_caches() == 10);

// While compiling, a look outside the plan's tables would be an error, not just a wrong answer.
static_assert(!glm52.needs_import(-1) && !glm52.needs_import(100000));
static_assert(!glm52.stage(-1, 5, StageStart::own) && !upper_half.index_cache_slot(-1));

}  // namespace

TEST_CASE("SHARE-PP R096: a cut needs the selection exactly where it tears a group apart") {
  for (std::int32_t const cut : {39, 20, 40, 52, 59}) CHECK(glm52.needs_import(cut));
  for (std::int32_t const cut : {26, 38, 42}) CHECK_FALSE(glm52.needs_import(cut));
  for (std::int32_t cut = 1; cut < 78; ++cut) {
    CAPTURE(cut);
    CHECK(glm52.needs_import(cut) == (glm52.role(cut) == LayerRole::shared));
  }
  CHECK_FALSE(glm52.needs_import(0));
  CHECK_FALSE(glm52.needs_import(78));  // the MTP layer selects for itself
  CHECK_FALSE(glm52.needs_import(79));
  CHECK_FALSE(glm52.needs_import(-1));
}

TEST_CASE("SHARE-PP R096 R097 R098: a stage that starts on a shared layer must import") {
  auto const torn = glm52.stage(39, 78, StageStart::own);
  REQUIRE_FALSE(torn.has_value());
  CHECK(torn.error().code == Errc::bad_schedule);
  CHECK(torn.error().layer == 39);
  CHECK(torn.error().expected == 38);
  CHECK(glm52.stage(39, 78, StageStart::imports_selection)->import_source() == 38);
  CHECK(glm52.stage(38, 78, StageStart::own).has_value());
}

TEST_CASE("SHARE-PP R099: nothing is imported where nothing is shared across the cut") {
  constexpr SharePlan all_full = plan_of(78, 1, 3, 1);
  for (std::int32_t cut = 0; cut <= 79; ++cut) CHECK_FALSE(all_full.needs_import(cut));
  CHECK(all_full.stage(39, 78, StageStart::imports_selection)->import_source() == no_source);
  CHECK(glm52.stage(42, 78, StageStart::imports_selection)->import_source() == no_source);
}

TEST_CASE(
    "SHARE-PP: a shared layer behind layers without sparse attention still needs its source") {
  constexpr LayerRole types[] = {LayerRole::full, LayerRole::shared, LayerRole::shared};
  constexpr bool sparse[] = {true, false, true};
  ScheduleFields fields;
  fields.num_layers = 3;
  fields.types = cuda::std::span<LayerRole const>(types);
  fields.sparse = cuda::std::span<bool const>(sparse);
  auto const plan = make_share_plan(fields);
  REQUIRE(plan.has_value());
  CHECK(plan->needs_import(1));
  CHECK(plan->needs_import(2));
  auto const stage = plan->stage(1, 3, StageStart::own);
  REQUIRE_FALSE(stage.has_value());
  CHECK(stage.error().layer == 2);
  CHECK(plan->stage(1, 2, StageStart::own).has_value());  // holds no reader
}

TEST_CASE("SHARE-CACHE R106 R101: one index-key cache per full layer, none for a shared one") {
  auto const stage = glm52.stage(0, 79, StageStart::own);
  REQUIRE(stage.has_value());
  CHECK(stage->index_caches() == 22);
  std::int32_t next = 0;
  for (std::int32_t layer = 0; layer < 79; ++layer) {
    CAPTURE(layer);
    auto const slot = stage->index_cache_slot(layer);
    if (glm52.is_full(layer)) {
      CHECK(slot.value() == next++);
    } else {
      REQUIRE_FALSE(slot.has_value());
      CHECK(slot.error().code == Errc::bad_schedule);
      CHECK(slot.error().layer == layer);
    }
  }
  CHECK(next == 22);
}

TEST_CASE("MTP R119: the MTP layer's cache follows the last full one of its stage") {
  CHECK(glm52.stage(0, 79, StageStart::own)->index_cache_slot(78).value() == 21);
  CHECK(glm52.stage(42, 79, StageStart::own)->index_cache_slot(78).value() == 9);
  CHECK(glm52.stage(78, 79, StageStart::own)->index_cache_slot(78).value() == 0);
}

TEST_CASE("SHARE-PP R106: slots are numbered per stage and known only to it") {
  auto const stage = glm52.stage(42, 60, StageStart::own);
  REQUIRE(stage.has_value());
  CHECK(stage->index_cache_slot(42).value() == 0);
  CHECK(stage->index_cache_slot(58).value() == 4);
  for (std::int32_t const outside : {-1, 38, 41, 60, 62, 78, 600}) {
    CAPTURE(outside);
    auto const slot = stage->index_cache_slot(outside);
    REQUIRE_FALSE(slot.has_value());
    CHECK(slot.error().code == Errc::bad_value);
  }
}

TEST_CASE("SHARE-PP: a stage is a non-empty half-open range inside the model") {
  for (StageRange const range : {StageRange{-1, 5}, StageRange{70, 80}, StageRange{5, 5},
                                 StageRange{6, 5}, StageRange{79, 79}, StageRange{90, 80}}) {
    CAPTURE(range.first, range.last);
    auto const stage = glm52.stage(range.first, range.last, StageStart::imports_selection);
    REQUIRE_FALSE(stage.has_value());
    CHECK(stage.error().code == Errc::bad_value);
  }
}

TEST_CASE("SHARE-PP: the stages of a split follow one another") {
  using enum StageStart;
  StageRange const good[] = {{0, 38, own}, {38, 60, own}, {60, 79, imports_selection}};
  CHECK(check_stages(glm52, good).ok());
  StageRange const gap[] = {{0, 38, own}, {42, 79, own}};
  CHECK(check_stages(glm52, gap).code == Errc::bad_value);
  StageRange const overlap[] = {{0, 42, own}, {38, 79, own}};
  CHECK(check_stages(glm52, overlap).code == Errc::bad_value);
  StageRange const torn[] = {{0, 39, own}, {39, 79, own}};
  CHECK(check_stages(glm52, torn).code == Errc::bad_schedule);
  CHECK(check_stages(glm52, {}).ok());
}
