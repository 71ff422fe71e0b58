// SPDX-License-Identifier: Apache-2.0
#include <indexshare/share_plan.hpp>

#include <catch2/catch_test_macros.hpp>

#include <cstdint>
#include <type_traits>
#include <vector>

#include "config_cases.hpp"

using namespace indexshare;

namespace {

constexpr LayerRole F = LayerRole::full;
constexpr LayerRole S = LayerRole::shared;

template <std::size_t Count>
constexpr cuda::std::span<LayerRole const> roles(LayerRole const (&list)[Count]) {
  return list;
}

constexpr ScheduleFields by_freq(std::int32_t layers, std::int64_t freq, std::int64_t offset,
                                 std::int32_t mtp = 0) {
  ScheduleFields fields;
  fields.num_layers = layers;
  fields.mtp_layers = mtp;
  fields.freq = freq;
  fields.offset = offset;
  return fields;
}

// Usable while compiling, as a table of a firmware or a static model would.
constexpr SharePlan glm52 = *make_share_plan(by_freq(78, 4, 3, 1));
static_assert(std::is_trivially_copyable_v<SharePlan>);
static_assert(std::semiregular<SharePlan>);
static_assert(sizeof(SharePlan) < 2048);
static_assert(glm52.full_layers().count() == 21);
static_assert(share_source(glm52, 77) == 74);
static_assert(share_source(glm52, 78) == 78);
static_assert(share_source(glm52, 79) == no_source);
static_assert(noexcept(share_source(glm52, 0)));
static_assert(glm52.group_of(0).value() == 0 && glm52.group_of(5).value() == 2);
static_assert(!make_share_plan(by_freq(6, 4, 0)));
static_assert(SharePlan{}.total_layers() == 0 && share_source(SharePlan{}, 0) == no_source);

ScheduleFields of_types(cuda::std::span<LayerRole const> types) {
  ScheduleFields fields;
  fields.num_layers = static_cast<std::int32_t>(types.size());
  fields.types = types;
  return fields;
}

/// Refused as a schedule; the status, for what a test wants to know about it.
Status failure_of(ScheduleFields const& fields) {
  auto const plan = make_share_plan(fields);
  REQUIRE_FALSE(plan.has_value());
  CHECK(plan.error().code == Errc::bad_schedule);
  return plan.error();
}

void check_refused(ScheduleFields const& fields) { CHECK_FALSE(failure_of(fields).ok()); }

}  // namespace

TEST_CASE("CFG-SCHED R004-R009: schedules and sources of fault_vectors.json") {
  Json const vectors = json_file("fault_vectors.json");
  int checked = 0;
  for (auto const& [name, vector] : vectors.items()) {
    if (!name.starts_with("sched_")) continue;
    CAPTURE(name);
    auto const plan = make_share_plan(by_freq(
        vector["num_hidden_layers"], vector["index_topk_freq"], vector["index_skip_topk_offset"]));
    REQUIRE(plan.has_value());
    CHECK(listed(plan->full_layers()) == vector["full"].get<std::vector<std::int32_t>>());
    CHECK(trunk_sources(*plan) == vector["source"].get<std::vector<std::int32_t>>());
    ++checked;
  }
  CHECK(checked == 4);
}

TEST_CASE("CFG-SCHED R004: indexer_types win over freq and offset, differences reported") {
  constexpr LayerRole types[] = {F, S, F, S, S, F};
  ScheduleFields fields = of_types(roles(types));
  fields.freq = 4;
  fields.offset = 3;
  auto const plan = make_share_plan(fields);
  REQUIRE(plan.has_value());
  CHECK(trunk_sources(*plan) == std::vector<std::int32_t>{0, 0, 2, 2, 2, 5});
  CHECK(plan->decided_by() == ScheduleSource::indexer_types);
  CHECK(listed(plan->diagnostics()) ==
        std::vector<ScheduleDiagnostic>{
            {1, ScheduleSource::indexer_types, ScheduleSource::freq_offset},
            {5, ScheduleSource::indexer_types, ScheduleSource::freq_offset}});
}

TEST_CASE("CFG-SCHED R004: each weaker field is compared, the strongest present one wins") {
  constexpr LayerRole types[] = {F, S, F, S};
  constexpr LayerRole pattern[] = {F, F, S, S};
  ScheduleFields fields = of_types(roles(types));
  fields.pattern = roles(pattern);
  fields.freq = 1;
  auto const by_types = make_share_plan(fields);
  REQUIRE(by_types.has_value());
  constexpr ScheduleSource by_list = ScheduleSource::indexer_types;
  constexpr ScheduleSource by_letters = ScheduleSource::pattern;
  constexpr ScheduleSource by_period = ScheduleSource::freq_offset;
  CHECK(listed(by_types->diagnostics()) ==
        std::vector<ScheduleDiagnostic>{{1, by_list, by_letters},
                                        {1, by_list, by_period},
                                        {2, by_list, by_letters},
                                        {3, by_list, by_period}});
  fields.types.reset();
  auto const by_pattern = make_share_plan(fields);
  REQUIRE(by_pattern.has_value());
  CHECK(trunk_sources(*by_pattern) == std::vector<std::int32_t>{0, 1, 1, 1});
  CHECK(listed(by_pattern->diagnostics()) ==
        std::vector<ScheduleDiagnostic>{{2, by_letters, by_period}, {3, by_letters, by_period}});
}

TEST_CASE("CFG-SCHED R006: nothing stated, and an offset alone, share nothing") {
  ScheduleFields fields;
  fields.num_layers = 4;
  auto const nothing = make_share_plan(fields);
  REQUIRE(nothing.has_value());
  CHECK(trunk_sources(*nothing) == std::vector<std::int32_t>{0, 1, 2, 3});
  CHECK(nothing->decided_by() == ScheduleSource::all_full);
  fields.offset = 3;
  CHECK(make_share_plan(fields).value() == nothing.value());
}

TEST_CASE("CFG-SCHED: the offset of a stated freq is 2 if absent") {
  ScheduleFields fields = by_freq(78, 4, 1);
  fields.offset.reset();
  auto const plan = make_share_plan(fields);
  REQUIRE(plan.has_value());
  std::vector<std::int32_t> const full = listed(plan->full_layers());
  CHECK(std::vector<std::int32_t>(full.begin(), full.begin() + 4) ==
        std::vector<std::int32_t>{0, 1, 5, 9});
  CHECK(full.back() == 77);
}

TEST_CASE("CFG-SCHED R005 R014: a list must have exactly one entry per trunk layer") {
  std::vector<LayerRole> const list(79, F);
  bool mask[79]{};
  for (std::size_t entries : {std::size_t{0}, std::size_t{77}, std::size_t{79}}) {
    CAPTURE(entries);
    ScheduleFields fields;
    fields.num_layers = 78;
    fields.mtp_layers = 1;
    ScheduleFields with_types = fields;
    with_types.types = cuda::std::span<LayerRole const>(list.data(), entries);
    Status const status = failure_of(with_types);
    CHECK(status.expected == 78);
    CHECK(status.got == static_cast<std::int64_t>(entries));
    ScheduleFields with_pattern = fields;
    with_pattern.pattern = cuda::std::span<LayerRole const>(list.data(), entries);
    check_refused(with_pattern);
    ScheduleFields with_mask = fields;
    with_mask.sparse = cuda::std::span<bool const>(mask, entries);
    check_refused(with_mask);
  }
  // A weaker list is held to the same rule, though it decides nothing.
  ScheduleFields loser = of_types(cuda::std::span<LayerRole const>(list.data(), 78));
  loser.pattern = cuda::std::span<LayerRole const>(list.data(), 77);
  check_refused(loser);
}

TEST_CASE("CFG-SCHED R005 R102: a shared layer without a source is refused, by number") {
  constexpr LayerRole types[] = {S, F, S, F};
  CHECK(failure_of(of_types(roles(types))).layer == 0);
  ScheduleFields pattern = of_types(roles(types));
  pattern.pattern = pattern.types;
  pattern.types.reset();
  CHECK(failure_of(pattern).layer == 0);
  // The same list as a weaker field is only a difference.
  constexpr LayerRole fine[] = {F, F, S, F};
  ScheduleFields loser = of_types(roles(fine));
  loser.pattern = roles(types);
  auto const plan = make_share_plan(loser);
  REQUIRE(plan.has_value());
  CHECK(plan->diagnostics().count() == 1);
}

TEST_CASE("CFG-SCHED R005: freq or offset below 1 is refused even where it decides nothing") {
  check_refused(by_freq(6, 4, 0));
  check_refused(by_freq(6, 0, 3));
  check_refused(by_freq(6, -4, 3));
  check_refused(by_freq(6, 4, -1));
  constexpr LayerRole types[] = {F, S};
  ScheduleFields fields = of_types(roles(types));
  fields.offset = 0;
  CHECK(failure_of(fields).got == 0);
}

TEST_CASE("CFG-SCHED R005: a role that is neither full nor shared is refused, by number") {
  LayerRole const types[] = {F, LayerRole::none, F};
  CHECK(failure_of(of_types(roles(types))).layer == 1);
  LayerRole const poison[] = {F, F, static_cast<LayerRole>(0xCD)};
  CHECK(failure_of(of_types(roles(poison))).layer == 2);
}

TEST_CASE("CFG-SCHED: more layers than a plan holds are refused") {
  CHECK(make_share_plan(by_freq(max_schedule_layers, 4, 3)).has_value());
  CHECK(make_share_plan(by_freq(max_schedule_layers - 1, 4, 3, 1)).has_value());
  check_refused(by_freq(max_schedule_layers + 1, 4, 3));
  check_refused(by_freq(max_schedule_layers, 4, 3, 1));
  check_refused(by_freq(0, 4, 3));
  check_refused(by_freq(-1, 4, 3));
  check_refused(by_freq(4, 4, 3, -1));
}

TEST_CASE(
    "CFG-SCHED R007: layers outside the schedule are range errors, MTP layers own an indexer") {
  for (std::int32_t const layer : {-1, 79, 512, -2147483647}) {
    CAPTURE(layer);
    auto const source = glm52.source(layer);
    REQUIRE_FALSE(source.has_value());
    CHECK(source.error().code == Errc::bad_value);
    CHECK(source.error().layer == layer);
    CHECK_FALSE(glm52.group_of(layer).has_value());
    CHECK(glm52.role(layer) == LayerRole::none);
    CHECK(share_source(glm52, layer) == no_source);
  }
  CHECK(glm52.source(78).value() == 78);
  CHECK(glm52.group_of(78).value() == 21);
  auto const without_mtp = make_share_plan(by_freq(78, 4, 3, 0));
  CHECK_FALSE(without_mtp->source(78).has_value());
}

TEST_CASE("CFG-SCHED R020: leading full layers are full, not dense") {
  // The offset counts layers that select for themselves. There is no third kind of sparse layer.
  for (std::int32_t const layer : {0, 1, 2}) CHECK(glm52.role(layer) == LayerRole::full);
  CHECK(glm52.role(3) == LayerRole::shared);
}

TEST_CASE(
    "SHARE-STALE R107: a chain of shared layers reads from the full layer, not from each other") {
  constexpr LayerRole types[] = {F, S, S, S};
  auto const plan = make_share_plan(of_types(roles(types)));
  CHECK(trunk_sources(*plan) == std::vector<std::int32_t>{0, 0, 0, 0});
}

TEST_CASE("CFG-SCHED: a layer without sparse attention has no source and passes a group on") {
  constexpr LayerRole types[] = {F, F, S, F, S, S};
  constexpr bool sparse[] = {false, true, false, false, true, true};
  ScheduleFields fields = of_types(roles(types));
  fields.sparse = cuda::std::span<bool const>(sparse);
  auto const plan = make_share_plan(fields);
  REQUIRE(plan.has_value());
  CHECK(trunk_sources(*plan) == std::vector<std::int32_t>{-1, 1, -1, -1, 1, 1});
  CHECK(plan->source(0).value() == no_source);
  CHECK(plan->group_of(0).value() == no_source);
  CHECK(plan->group_of(5).value() == 0);
  CHECK(listed(plan->full_layers()) == std::vector<std::int32_t>{1});
  // "shared" on layer 2 asks for nothing; "full" on 0 and 3 is overruled.
  CHECK(listed(plan->diagnostics()) ==
        std::vector<ScheduleDiagnostic>{
            {0, ScheduleSource::layer_types, ScheduleSource::indexer_types},
            {3, ScheduleSource::layer_types, ScheduleSource::indexer_types}});
  constexpr bool only_shared[] = {false, false, true, false, true, true};
  fields.sparse = cuda::std::span<bool const>(only_shared);
  CHECK(failure_of(fields).layer == 2);
}
