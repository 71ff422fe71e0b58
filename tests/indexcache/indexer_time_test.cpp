// SPDX-License-Identifier: Apache-2.0
#include <indexshare/indexcache/indexer_time.hpp>

#include <catch2/catch_approx.hpp>
#include <catch2/catch_test_macros.hpp>

#include <cstdio>
#include <limits>
#include <string>
#include <vector>

using namespace indexshare;
using namespace indexshare::indexcache;
using Catch::Approx;

namespace {

template <class... Values>
std::string printed(char const* format, Values... values) {
  char text[200];
  std::snprintf(text, sizeof text, format, values...);
  return text;
}

/// Table 1 of the IndexCache paper, arXiv 2603.12201: the 30B model on one H100 node with 47, 24
/// and 12 full layers. Profiled shares of the indexer are those of its profile figure, in percent.
struct Context {
  int thousands;
  double prefill_seconds[3];
  double decode_rate[3];   // tokens/s of one request
  double crowded_rate[3];  // tokens/s per GPU, its KV cache full
  int profiled_prefill;
  int profiled_decode;
};
Context const table_1[] = {
    {10, {0.57, 0.47, 0.45}, {73.5, 84.5, 91.0}, {2700, 3070, 3310}, 27, 27},
    {60, {3.38, 2.86, 2.59}, {67.0, 80.0, 89.5}, {613, 750, 840}, 50, 31},
    {120, {8.57, 6.57, 5.66}, {63.0, 77.0, 88.0}, {341, 431, 498}, 68, 38},
    {200, {19.5, 13.7, 10.7}, {58.0, 73.0, 86.0}, {197, 253, 297}, 81, 41},
};
constexpr double full_layers[3] = {47, 24, 12};

IndexerTime fitted(double const (&times)[3]) {
  std::vector<MeasuredTime> measured;
  for (int i = 0; i < 3; ++i) measured.push_back({full_layers[i], times[i]});
  auto const fit = fit_indexer_time(measured);
  REQUIRE(fit.has_value());
  return *fit;
}

IndexerTime fitted_rate(double const (&rates)[3]) {
  double const times[3] = {1 / rates[0], 1 / rates[1], 1 / rates[2]};
  return fitted(times);
}

}  // namespace

TEST_CASE("the indexer's share that the times of IndexCache's Table 1 imply") {
  std::string table = "\n";
  for (Context const& c : table_1) {
    IndexerTime const prefill = fitted(c.prefill_seconds);
    IndexerTime const decode = fitted_rate(c.decode_rate);
    IndexerTime const crowded = fitted_rate(c.crowded_rate);
    double const scoring = 47 * 8192.0 * (c.thousands * 1e3) * (c.thousands * 1e3) / 2;
    table += printed("%dK prefill %.2f/%.2f share %.0f%%, profiled %d%% (-> %.2fx); %.2f s = %.0f",
                     c.thousands, c.prefill_seconds[0] / c.prefill_seconds[1],
                     c.prefill_seconds[0] / c.prefill_seconds[2], 100 * prefill.indexer_share(47),
                     c.profiled_prefill, speedup_from_share(c.profiled_prefill / 100.0, 47, 12),
                     47 * prefill.per_full_layer, scoring / (47 * prefill.per_full_layer) / 1e12);
    table +=
        printed(" TFLOP/s\n  decode %.2f/%.2f share %.0f%%, profiled %d%% (-> %.2fx), %.0f us",
                c.decode_rate[1] / c.decode_rate[0], c.decode_rate[2] / c.decode_rate[0],
                100 * decode.indexer_share(47), c.profiled_decode,
                speedup_from_share(c.profiled_decode / 100.0, 47, 12), 1e6 * decode.per_full_layer);
    table += printed("; full KV %.2f/%.2f share %.0f%%\n", c.crowded_rate[1] / c.crowded_rate[0],
                     c.crowded_rate[2] / c.crowded_rate[0], 100 * crowded.indexer_share(47));
  }
  CHECK(table == R"(
10K prefill 1.21/1.27 share 30%, profiled 27% (-> 1.25x); 0.17 s = 115 TFLOP/s
  decode 1.15/1.24 share 26%, profiled 27% (-> 1.25x), 75 us; full KV 1.14/1.23 share 25%
60K prefill 1.18/1.31 share 31%, profiled 50% (-> 1.59x); 1.06 s = 653 TFLOP/s
  decode 1.19/1.34 share 34%, profiled 31% (-> 1.30x), 107 us; full KV 1.22/1.37 share 36%
120K prefill 1.30/1.51 share 46%, profiled 68% (-> 2.03x); 3.93 s = 705 TFLOP/s
  decode 1.22/1.40 share 38%, profiled 38% (-> 1.39x), 128 us; full KV 1.26/1.46 share 42%
200K prefill 1.42/1.82 share 61%, profiled 81% (-> 2.52x); 11.82 s = 651 TFLOP/s
  decode 1.26/1.48 share 43%, profiled 41% (-> 1.44x), 160 us; full KV 1.28/1.51 share 45%
)");
}

TEST_CASE("times on a line give that line, and times at other numbers of full layers") {
  MeasuredTime const measured[] = {{47, 3 + 47 * 0.25}, {24, 3 + 24 * 0.25}, {7, 3 + 7 * 0.25}};
  auto const fit = fit_indexer_time(measured);
  REQUIRE(fit.has_value());
  CHECK(fit->fixed == Approx(3));
  CHECK(fit->per_full_layer == Approx(0.25));
  CHECK(fit->at(12) == Approx(6));
  CHECK(fit->at(0) == Approx(3));
  CHECK(fit->indexer_share(12) == Approx(0.5));
  CHECK(fit->speedup(12, 4) == Approx(1.5));
  CHECK(speedup_from_share(fit->indexer_share(12), 12, 4) == Approx(fit->speedup(12, 4)));
}

TEST_CASE("a line through noisy times is the one with the least squares") {
  MeasuredTime const measured[] = {{8, 10}, {4, 7}, {2, 5}, {1, 5.5}, {8, 10.5}};
  auto const fit = fit_indexer_time(measured);
  REQUIRE(fit.has_value());
  auto const squares = [&](double fixed, double slope) {
    double sum = 0;
    for (MeasuredTime const& one : measured) {
      double const error = fixed + slope * one.full_layers - one.time;
      sum += error * error;
    }
    return sum;
  };
  double const least = squares(fit->fixed, fit->per_full_layer);
  for (double const step : {-1e-3, 1e-3}) {
    CHECK(squares(fit->fixed + step, fit->per_full_layer) > least);
    CHECK(squares(fit->fixed, fit->per_full_layer + step) > least);
  }
}

TEST_CASE("times that no line can be fitted to are refused with the place") {
  auto const refused = [](std::vector<MeasuredTime> const& measured) {
    auto const fit = fit_indexer_time(measured);
    REQUIRE_FALSE(fit.has_value());
    CHECK(fit.error().code == Errc::bad_value);
    return fit.error();
  };
  CHECK(refused({}).got == 0);
  CHECK(refused({{47, 1}}).got == 1);
  CHECK(refused({{47, 1}, {47, 2}, {47, 3}}).got == 3);
  CHECK(refused({{0.1, 1}, {0.1, 2}, {0.1, 3}}).got == 3);  // a mean that is not exactly 0.1
  CHECK(refused({{47, 1}, {24, 0}}).got == 1);
  CHECK(std::string(refused({{47, 1}, {24, -1}}).what).starts_with("time"));
  CHECK(refused({{47, 1}, {24, std::numeric_limits<double>::infinity()}}).got == 1);
  CHECK(std::string(refused({{-1, 1}, {24, 1}}).what).starts_with("full_layers"));
  CHECK(refused({{47, 1}, {24, 1}, {std::numeric_limits<double>::quiet_NaN(), 1}}).got == 2);
}
