// SPDX-License-Identifier: Apache-2.0
#include <indexshare/indexcache/role_pattern.hpp>
#include <indexshare/io/pattern_text.hpp>

#include <catch2/catch_test_macros.hpp>

#include <cstdint>
#include <string>
#include <vector>

using namespace indexshare;
using namespace indexshare::indexcache;

namespace {

RolePattern pattern_of(std::string const& text) {
  auto const pattern = io::parse_pattern(text);
  REQUIRE(pattern.has_value());
  return *pattern;
}

// arXiv 2603.12201, Appendix B.
constexpr char const* half_30b = "FSFSFSSSSFSFFFFSFFSSFFSFFFSSFFSSFSSSSFSFFFSFSSF";
constexpr char const* quarter_30b = "FSFSFSSSSFSSSFSSFFSSFSSFSSSSFSSSFSSSSFSSSSSSSSS";
constexpr char const* eighth_30b = "FSSSFSSSSSSSSFSSSFSSSSSFSSSSFSSSSSSSSFSSSSSSSSS";
constexpr char const* half_glm5 =
    "FFSFSSSFSSFFFSSSFFFSFSSSSSSFFSFFSFFSSFFFFFFSFFFFFSFFSSSSSSFSFFFSFSSSFSFFSFFSSS";
constexpr char const* quarter_glm5 =
    "FFSFSSSFSSFSFSSSSSSSFSSSSSSFSSSFSFSSSSFFFFFSSSFFSSSFSSSSSSSSFSSSFSSSSSSFSFSSSS";

}  // namespace

TEST_CASE("a pattern knows its sources and counts", "[role_pattern]") {
  RolePattern const pattern = pattern_of("FSFFSS");
  CHECK(pattern.layers() == 6);
  CHECK(pattern.full_count() == 3);
  CHECK(pattern.shared_count() == 3);
  CHECK(pattern.full_layers() == std::vector<std::int32_t>{0, 2, 3});
  std::vector<std::int32_t> sources;
  for (std::int32_t layer = 0; layer < 6; ++layer) sources.push_back(pattern.source(layer));
  CHECK(sources == std::vector<std::int32_t>{0, 0, 2, 3, 3, 3});
  CHECK(pattern_text(pattern) == "FSFFSS");
  CHECK(RolePattern().layers() == 0);
}

TEST_CASE("a flip re-routes the layers that read from it", "[role_pattern]") {
  RolePattern const flipped = pattern_of("FFSFSS").with_shared(3);
  CHECK(pattern_text(flipped) == "FFSSSS");
  CHECK(flipped.source(5) == 1);
  CHECK(first_difference(flipped, pattern_of("FFSFSS")) == 3);
  CHECK(first_difference(flipped, flipped) == 6);
}

TEST_CASE("published patterns are nested in one another", "[role_pattern]") {
  CHECK(nested_in(pattern_of(eighth_30b), pattern_of(quarter_30b)));
  CHECK(nested_in(pattern_of(quarter_30b), pattern_of(half_30b)));
  CHECK(nested_in(pattern_of(quarter_glm5), pattern_of(half_glm5)));
  CHECK_FALSE(nested_in(pattern_of(half_30b), pattern_of(quarter_30b)));
  CHECK_FALSE(nested_in(pattern_of("FSF"), pattern_of("FFS")));
  CHECK_FALSE(nested_in(pattern_of("FS"), pattern_of("FFF")));
  CHECK(pattern_of(half_30b).full_count() == 24);
  CHECK(pattern_of(quarter_30b).full_layers() ==
        std::vector<std::int32_t>{0, 2, 4, 9, 13, 16, 17, 20, 23, 28, 32, 37});
  CHECK(pattern_of(half_glm5).full_count() == 40);
  CHECK(pattern_of(quarter_glm5).full_count() == 22);
}

TEST_CASE("roles without a meaning are refused by layer", "[role_pattern]") {
  constexpr LayerRole full = LayerRole::full;
  constexpr LayerRole shared = LayerRole::shared;
  auto const no_role = RolePattern::from_roles(std::vector{full, shared, LayerRole::none});
  REQUIRE_FALSE(no_role.has_value());
  CHECK(no_role.error().layer == 2);
  auto const sourceless = RolePattern::from_roles(std::vector{shared, full});
  REQUIRE_FALSE(sourceless.has_value());
  CHECK(sourceless.error().layer == 0);
  CHECK_FALSE(RolePattern::from_roles({}).has_value());
  std::vector<LayerRole> const many(max_schedule_layers + 1, full);
  CHECK_FALSE(RolePattern::from_roles(many).has_value());
  CHECK(RolePattern::from_roles(std::span(many).first(max_schedule_layers)).has_value());
}

TEST_CASE("a pattern becomes the plan of a layer call", "[role_pattern]") {
  auto const plan = share_plan_of(pattern_of("FFSSFS"), 1);
  REQUIRE(plan.has_value());
  CHECK(plan->num_layers() == 6);
  CHECK(plan->total_layers() == 7);
  CHECK(share_source(*plan, 3) == 1);
  CHECK(share_source(*plan, 5) == 4);
  CHECK(plan->is_full(6));
  CHECK_FALSE(share_plan_of(RolePattern()).has_value());
}
