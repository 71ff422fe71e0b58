// SPDX-License-Identifier: Apache-2.0
#include <indexshare/share/every_layer.hpp>
#include <indexshare/share/mtp_draft.hpp>
#include <indexshare/share/pattern.hpp>
#include <indexshare/share/periodic.hpp>

#include <catch2/catch_test_macros.hpp>

#include <concepts>
#include <cstdint>
#include <limits>
#include <vector>

using namespace indexshare;

// What a layer asks of a share policy.
template <class Policy>
concept LooksLikeASharePolicy = std::semiregular<Policy> && requires(Policy const policy) {
  { share_source(policy, std::int32_t{0}) }
  noexcept->std::same_as<std::int32_t>;
};
static_assert(LooksLikeASharePolicy<EveryLayer>);
static_assert(LooksLikeASharePolicy<Periodic>);
static_assert(LooksLikeASharePolicy<Pattern<"FFSS">>);
static_assert(LooksLikeASharePolicy<MtpDraft>);

static_assert(share_source(EveryLayer{3}, 2) == 2);
static_assert(share_source(EveryLayer{3}, 3) == no_source);
static_assert(share_source(EveryLayer{3}, -1) == no_source);

static_assert(share_source(Periodic{78, 4, 3}, 5) == 2);
static_assert(share_source(Periodic{78, 4, 3}, 77) == 74);
static_assert(share_source(Periodic{78, 4, 3}, 78) == no_source);
static_assert(share_source(Periodic{78, 4, 3}, -1) == no_source);

static_assert(share_source(Pattern<"FFSS">{}, 3) == 1);
static_assert(share_source(Pattern<"FFSSFS">{}, 5) == 4);
static_assert(share_source(Pattern<"FFSS">{}, 4) == no_source);
static_assert(share_source(Pattern<"FFSS">{}, -1) == no_source);
static_assert(Pattern<"FFSS">::layers == 4);

namespace {

// The rule as the config's authors state it, layer by layer.
std::vector<std::int32_t> sources_by_loop(std::int32_t layers, std::int32_t freq,
                                          std::int32_t offset) {
  std::vector<std::int32_t> sources;
  std::int32_t full = -1;
  for (std::int32_t i = 0; i < layers; ++i) {
    std::int32_t const count = i - offset + 1 > 0 ? i - offset + 1 : 0;
    if (count % freq == 0) full = i;
    sources.push_back(full);
  }
  return sources;
}

}  // namespace

TEST_CASE("SHARE-PP R097: the closed form of a source is the loop, offsets 1..5 x freq 1..6") {
  for (std::int32_t offset = 1; offset <= 5; ++offset)
    for (std::int32_t freq = 1; freq <= 6; ++freq) {
      std::vector<std::int32_t> const expected = sources_by_loop(78, freq, offset);
      for (std::int32_t layer = 0; layer < 78; ++layer) {
        CAPTURE(offset, freq, layer);
        REQUIRE(share_source(Periodic{78, freq, offset}, layer) ==
                expected[static_cast<std::size_t>(layer)]);
      }
    }
}

TEST_CASE("CFG-SCHED R008: a period without its offset is another schedule") {
  std::vector<std::int32_t> full;
  for (std::int32_t layer = 0; layer < 12; ++layer)
    if (share_source(Periodic{12, 4, 3}, layer) == layer) full.push_back(layer);
  CHECK(full == std::vector<std::int32_t>{0, 1, 2, 6, 10});
  CHECK(share_source(Periodic{12, 4, 2}, 5) == 5);  // the default offset
  CHECK(Periodic{}.offset == 2);
}

TEST_CASE("CFG-SCHED R005: a period without meaning gives no layer a source") {
  for (Periodic const policy : {Periodic{6, 4, 0}, Periodic{6, 0, 3}, Periodic{6, -1, 3},
                                Periodic{6, 4, -2}, Periodic{0, 4, 3}, Periodic{}})
    for (std::int32_t layer = -1; layer < 7; ++layer)
      CHECK(share_source(policy, layer) == no_source);
}

TEST_CASE("CFG-SCHED: a period survives extreme numbers") {
  constexpr std::int32_t largest = std::numeric_limits<std::int32_t>::max();
  constexpr std::int32_t smallest = std::numeric_limits<std::int32_t>::min();
  CHECK(share_source(Periodic{largest, 1, largest}, largest - 1) == largest - 1);
  CHECK(share_source(Periodic{largest, largest, 1}, largest - 1) == 0);
  CHECK(share_source(Periodic{6, 4, 3}, smallest) == no_source);
  CHECK(share_source(MtpDraft{0, true}, smallest) == no_source);
  CHECK(is_full_by_period(0, std::numeric_limits<std::int64_t>::max(),
                          std::numeric_limits<std::int64_t>::max()));
}

TEST_CASE("MTP R110 R111: the first draft step selects for itself, whatever the flag says") {
  CHECK(share_source(MtpDraft{78, true}, 78) == 78);
  CHECK(share_source(MtpDraft{78, false}, 78) == 78);
  CHECK(share_source(MtpDraft{78, true}, 81) == 78);
  CHECK(share_source(MtpDraft{78, false}, 81) == 81);
  CHECK(share_source(MtpDraft{78, true}, 77) == no_source);
}
