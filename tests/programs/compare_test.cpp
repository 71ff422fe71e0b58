// SPDX-License-Identifier: Apache-2.0
#include "compare.hpp"

#include <nlohmann/json.hpp>

#include <catch2/catch_approx.hpp>
#include <catch2/catch_test_macros.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <limits>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

#include "recording_cases.hpp"

using Catch::Approx;
using Catch::Matchers::ContainsSubstring;
using Catch::Matchers::EndsWith;
using indexshare::bf16;
using namespace programs;
using test::Sample;

namespace {

constexpr float not_a_number = std::numeric_limits<float>::quiet_NaN();
constexpr float infinity = std::numeric_limits<float>::infinity();

CompareReport report_of(Recording const& a, Recording const& b, CompareSettings settings = {}) {
  auto const report = compare_recordings(a, b, settings);
  INFO((report ? "" : report.error().message()));
  REQUIRE(report.has_value());
  return *report;
}
CompareReport report_of(Sample const& a, Sample const& b, CompareSettings settings = {}) {
  return report_of(a.recording("A"), b.recording("B"), settings);
}

std::string refusal(Sample const& a, Sample const& b) {
  auto const report = compare_recordings(a.recording(), b.recording(), {});
  REQUIRE_FALSE(report.has_value());
  return report.error().message();
}

/// The report as a person sees it.
std::string text_of(Sample const& a, Sample const& b) {
  Recording const in_a = a.recording("A");
  std::ostringstream out;
  write_comparison(out, in_a, report_of(in_a, b.recording("B")));
  return out.str();
}

QuantityResult const& result_of(CompareReport const& report, std::int32_t layer, Quantity id) {
  for (LayerResult const& found : report.layers)
    for (QuantityResult const& result : found.quantities)
      if (found.layer == layer && result.id == id) return result;
  FAIL("no such result");
  return report.layers.front().quantities.front();
}

/// `3 q_rope`, or nothing.
std::string first_of(CompareReport const& report) {
  LayerResult const* const first = report.first_difference();
  if (first == nullptr) return "";
  return std::to_string(first->layer) + " " +
         std::string(spec_of(first->first_difference()->id).name);
}

struct Outcome {
  int status;
  std::string out;
  std::string err;
};

Outcome run(std::vector<std::string> words) {
  words.insert(words.begin(), "indexshare-compare");
  std::vector<char const*> pointers;
  for (std::string const& word : words) pointers.push_back(word.c_str());
  std::ostringstream out;
  std::ostringstream err;
  int const status = compare(static_cast<int>(pointers.size()), pointers.data(), out, err);
  return {status, out.str(), err.str()};
}

/// A file that goes away with the object.
class TemporaryFile {
 public:
  explicit TemporaryFile(std::string const& name)
      : path_((std::filesystem::temp_directory_path() / ("indexshare_compare_" + name)).string()) {}
  TemporaryFile(std::string const& name, Sample const& made) : TemporaryFile(name) {
    REQUIRE(made.writer().write(path_).has_value());
  }
  TemporaryFile(TemporaryFile const&) = delete;
  ~TemporaryFile() { std::filesystem::remove(path_); }
  std::string const& path() const { return path_; }

 private:
  std::string path_;
};

/// The largest magnitude of slice `slice` of two tensors, [slices, lanes] row-major.
float largest_of(std::vector<float> const& a, std::vector<float> const& b, std::size_t slice,
                 std::size_t lanes) {
  float largest = 0;
  for (std::size_t i = slice * lanes; i < (slice + 1) * lanes; ++i)
    largest = std::max({largest, std::abs(a[i]), std::abs(b[i])});
  return largest;
}

/// One row alone of a sample, the row that `swapped_choice` changes.
Sample row_1_of(Sample made) {
  for (auto& [name, values] : made.floats) {
    auto const place = parse_tensor_name(name);
    if (spec_of(place->id).per_token()) continue;
    std::size_t const row = values.data.size() / 3;
    auto const first = values.data.begin() + static_cast<std::ptrdiff_t>(row);
    values.data = std::vector<float>(first, first + static_cast<std::ptrdiff_t>(row));
    values.shape[0] = 1;
  }
  made.ints.at("rows") = {{1}, {3}};
  for (std::string const layer : {"layer3", "layer4"}) {
    auto& chosen = made.ints.at(layer + ".selection");
    chosen = {{1, 2}, {chosen.data[2], chosen.data[3]}};
  }
  return made;
}

/// Row 1 of the full layer chose the positions 3 and 1; position 2 is now `distance` below 1.
Sample close_scores(float distance) {
  Sample made = test::sample();
  made.at("layer3.scores")[6] = 2 - distance;
  return made;
}

/// As `close_scores`, with positions 1 and 2 the other way round and chosen so by both layers.
Sample swapped_choice(float distance) {
  Sample made = close_scores(distance);
  std::swap(made.at("layer3.scores")[5], made.at("layer3.scores")[6]);
  for (std::string const layer : {"layer3", "layer4"}) {
    made.ints.at(layer + ".selection").data[3] = 2;
    for (std::string const quantity : {".lse", ".attention", ".gated", ".output"}) {
      auto& values = made.floats.at(layer + quantity);
      std::size_t const row = values.data.size() / 3;
      for (std::size_t i = row; i < 2 * row; ++i) values.data[i] += 1;  // of row 1
    }
  }
  return made;
}

}  // namespace

TEST_CASE("Compare: equal recordings agree in every quantity") {
  CompareReport const report = report_of(test::sample(), test::sample());
  CHECK(first_of(report).empty());
  CHECK(report.compared() == 2);
  REQUIRE(report.layers.size() == 2);
  CHECK(report.layers[0].full());
  CHECK_FALSE(report.layers[1].full());
  CHECK(report.layers[1].source == 3);
  CHECK(report.layers[0].quantities.size() == quantity_count);
  for (QuantityResult const& result : report.layers[0].quantities) {
    INFO(spec_of(result.id).name);
    CHECK(result.verdict == Verdict::same);
    CHECK(result.error == 0);
    CHECK(result.off == 0);
    CHECK(result.elements > 0);
  }
  CHECK(result_of(report, 3, Quantity::q).elements == 3 * 2 * 6);
  CHECK(result_of(report, 3, Quantity::scores).elements == 2 + 4 + 2);
  CHECK(result_of(report, 3, Quantity::selection).elements == 3);
}

TEST_CASE("Compare: the first quantity in pipeline order and its largest error are named") {
  Sample const a = test::sample();
  Sample b = test::sample();
  b.at("layer4.hidden")[0] += 1;
  b.at("layer3.output")[0] += 9;
  b.at("layer3.q_rope")[9] += 0.25f;   // row 1, head 0, lane 1
  b.at("layer3.q_rope")[14] -= 0.75f;  // row 1, head 1, lane 2
  CompareReport const report = report_of(a, b);
  CHECK(first_of(report) == "3 q_rope");
  QuantityResult const& result = result_of(report, 3, Quantity::q_rope);
  CHECK(result.elements == 24);
  CHECK(result.off == 2);
  CHECK(result.at.slice == 1);
  CHECK(result.at.head == 1);
  CHECK(result.at.lane == 2);
  CHECK(result.a == a.floats.at("layer3.q_rope").data[14]);
  CHECK(result.b == b.at("layer3.q_rope")[14]);
  float const largest = largest_of(a.floats.at("layer3.q_rope").data, b.at("layer3.q_rope"), 1, 8);
  CHECK(result.magnitude == largest);
  CHECK_FALSE(result.by_median);
  CHECK(result.error == Approx(0.75 / largest));
  CHECK(result_of(report, 3, Quantity::q).verdict == Verdict::same);
  CHECK(result_of(report, 3, Quantity::output).verdict == Verdict::differs);

  std::string const text = text_of(a, b);
  CHECK_THAT(text, ContainsSubstring("layer 3 (full): the first difference is in q_rope"));
  CHECK_THAT(text, ContainsSubstring("row 1, token 3 (request 0, position 3, rotary 13), head 1, "
                                     "lane 2"));
  CHECK_THAT(text, ContainsSubstring(", the largest magnitude of the row; tolerance 1.0e-04\n"));
  CHECK_THAT(text, ContainsSubstring("off             2 of 24 elements, 8.33 %"));
  CHECK_THAT(text, ContainsSubstring(std::string(spec_of(Quantity::q_rope).hint)));
  CHECK_THAT(text, ContainsSubstring("layer 4 (shared): the first difference is in hidden"));
  CHECK_THAT(text, EndsWith("\nfirst difference: layer 3, quantity q_rope\n"));
}

TEST_CASE("Compare: every quantity can be the first to differ, and has a hint") {
  for (QuantitySpec const& spec : quantities) {
    if (spec.id == Quantity::selection) continue;
    INFO(spec.name);
    Sample b = test::sample();
    b.at(tensor_name(3, spec.id))[1] += 1;
    CHECK(first_of(report_of(test::sample(), b)) == "3 " + std::string(spec.name));
    CHECK(spec.hint.size() > 40);
  }
}

TEST_CASE("Compare: errors are relative to the row's largest magnitude, in either file") {
  Sample a = test::sample();
  Sample b = test::sample();
  a.at("layer3.q_a") = {1, 0, 0, 1, 0, 0, 1, 0, 0};
  b.at("layer3.q_a") = {1, 0, 0, 1, 0.9e-4f, 0, 1, 0, 0};
  CHECK(first_of(report_of(a, b)).empty());
  b.at("layer3.q_a")[4] = 1.1e-4f;
  CHECK(first_of(report_of(a, b)) == "3 q_a");
  CHECK(first_of(report_of(a, b, {.tolerance = 1e-3})).empty());
  a.at("layer3.q_a")[5] = -2;  // in one file alone is a difference, but a magnitude too
  CHECK(result_of(report_of(a, b), 3, Quantity::q_a).magnitude == 2);
  CHECK(result_of(report_of(b, a), 3, Quantity::q_a).magnitude == 2);
  b.at("layer3.q_a")[5] = -2;
  CHECK(first_of(report_of(a, b)).empty());
  CHECK(first_of(report_of(a, b, {.tolerance = 0})) == "3 q_a");
  // another quantity's magnitude does not help
  a.at("layer3.q_resid") = b.at("layer3.q_resid") = std::vector<float>(9, 0.0f);
  b.at("layer3.q_resid")[3] = 1e-30f;
  CHECK(first_of(report_of(a, b)) == "3 q_resid");
  CHECK(result_of(report_of(a, b), 3, Quantity::q_resid).error == 1);
}

TEST_CASE("Compare: a token with massive activations hides nothing in the others") {
  Sample a = test::sample();
  Sample b = test::sample();
  for (Sample* const made : {&a, &b})
    for (std::size_t lane = 0; lane < 5; ++lane) made->at("layer3.hidden")[lane] = 1e5f;
  b.at("layer3.hidden")[1] += 1;  // of token 0: 1e-5 of its magnitude
  CHECK(first_of(report_of(a, b)).empty());
  b.at("layer3.hidden")[5 + 2] += 0.1f;  // of token 1: 1e-6 of the largest of all
  CompareReport const report = report_of(a, b);
  CHECK(first_of(report) == "3 hidden");
  QuantityResult const& result = result_of(report, 3, Quantity::hidden);
  CHECK(result.off == 1);
  CHECK(result.at.slice == 1);
  CHECK(result.distance == 1);  // of token 0, the largest that is not relative
  CHECK_THAT(text_of(a, b), ContainsSubstring("the largest magnitude of the token; tolerance"));
  Recording const in_a = a.recording("A");
  CHECK(comparison_json(in_a, in_a, report)["layers"][0]["quantities"][0]["magnitude_of"] ==
        "token");
}

TEST_CASE("Compare: a row below the median is held to the median row's magnitude") {
  Sample a = test::sample();
  Sample b = test::sample();
  a.at("layer3.lse") = {1e-3f, 0, 2, 0, 4, 0};
  b.at("layer3.lse") = {1.1e-3f, 0, 2, 0, 4, 0};
  CompareReport report = report_of(a, b);
  CHECK(first_of(report).empty());
  CHECK(result_of(report, 3, Quantity::lse).magnitude == 2);
  CHECK(result_of(report, 3, Quantity::lse).by_median);
  CHECK(result_of(report, 3, Quantity::lse).error == Approx(0.5e-4));
  b.at("layer3.lse")[0] = 1.3e-3f;
  CHECK(first_of(report_of(a, b)) == "3 lse");
  CHECK_THAT(text_of(a, b),
             ContainsSubstring(" of 2, the median of the rows' largest magnitudes; tolerance"));

  // of an even number of tokens it is the lower one in the middle
  std::vector<float> hidden(30, 0.0f);
  for (std::size_t token = 0; token < 6; ++token)
    hidden[5 * token] = std::array{1.0f, 32.0f, 4.0f, 8.0f, 2.0f, 16.0f}[token];
  a.at("layer3.hidden") = b.at("layer3.hidden") = hidden;
  b.at("layer3.hidden")[1] = 0.5f;
  CHECK(result_of(report_of(a, b), 3, Quantity::hidden).magnitude == 4);
}

TEST_CASE("Compare: slices that are left out have no part in the median") {
  Sample made = test::sample();
  std::vector<float> hidden(30, 0.0f);
  for (std::size_t token = 0; token < 6; ++token) hidden[5 * token] = token < 3 ? 64.0f : 8.0f;
  made.at("layer3.hidden") = hidden;
  Recording const recording = made.recording();
  TensorPair pair(recording, recording, 3, Quantity::hidden);
  CHECK(error_scale(pair, {true, true, true, false, false, false}).median == 8);
  CHECK(error_scale(pair, std::vector<bool>(6, true)).median == 0);
}

TEST_CASE("Compare: the scores of another row make no near tie") {
  Sample a = close_scores(1e-3f);
  Sample b = close_scores(1e-3f);
  for (std::string const layer : {"layer3", "layer4"}) b.ints.at(layer + ".selection").data[3] = 2;
  for (Sample* const made : {&a, &b}) made->at("layer3.scores")[0] = 1000;
  b.at("layer3.scores")[0] += 0.05f;  // 5e-5 of its row
  CompareReport const report = report_of(a, b);
  CHECK(result_of(report, 3, Quantity::scores).verdict == Verdict::same);
  CHECK(first_of(report) == "3 selection");
  CHECK(report.layers[0].selection->different[0].score_error == 0);
}

TEST_CASE("Compare: what is computed from 16-bit numbers has the wider tolerance") {
  Sample b = test::sample();
  auto const with_16_bits = [](Sample const& base, Quantity id) {
    Sample made = base;
    std::string const name = tensor_name(3, id);
    auto const values = made.floats.at(name);
    made.floats.erase(name);
    std::vector<bf16> narrow;
    for (float const value : values.data) narrow.push_back(indexshare::from_float<bf16>(value));
    RecordingWriter writer = made.writer();
    writer.add(name, values.shape, narrow);
    return Recording::parse("A", writer.bytes().value()).value();
  };
  Recording const narrow = with_16_bits(test::sample(), Quantity::kv_a);
  CompareReport report = report_of(narrow, b.recording());
  CHECK(first_of(report).empty());
  CHECK(result_of(report, 3, Quantity::kv_a).error > 1e-4);
  CHECK(result_of(report, 3, Quantity::kv_a).tolerance == 2e-2);
  CHECK(result_of(report, 3, Quantity::kv_latent).tolerance == 2e-2);
  CHECK(result_of(report, 3, Quantity::q_rope).tolerance == 1e-4);
  CHECK(result_of(report, 4, Quantity::kv_a).tolerance == 1e-4);
  // either side
  CHECK(result_of(report_of(b.recording(), narrow), 3, Quantity::kv_a).tolerance == 2e-2);
  CHECK(
      result_of(report_of(narrow, b.recording(), {.tolerance = 1e-4}), 3, Quantity::kv_a).verdict ==
      Verdict::differs);
  // the input has 16 bits: what is computed from it may still be exact
  report = report_of(with_16_bits(test::sample(), Quantity::hidden), b.recording());
  CHECK(result_of(report, 3, Quantity::hidden).tolerance == 2e-2);
  CHECK(result_of(report, 3, Quantity::q_a).tolerance == 1e-4);
}

TEST_CASE("Compare: NaN and infinity") {
  Sample a = test::sample();
  Sample b = test::sample();
  a.at("layer3.lse")[2] = b.at("layer3.lse")[2] = not_a_number;
  a.at("layer3.lse")[3] = b.at("layer3.lse")[3] = -infinity;
  CompareReport report = report_of(a, b);
  CHECK(first_of(report).empty());
  CHECK(result_of(report, 3, Quantity::lse).both_nan == 1);
  CHECK_THAT(text_of(a, b), ContainsSubstring("ok; NaN in both: 1"));

  b.at("layer3.lse")[2] = 1;
  report = report_of(a, b);
  CHECK(first_of(report) == "3 lse");
  CHECK(result_of(report, 3, Quantity::lse).off == 1);
  CHECK(result_of(report, 3, Quantity::lse).at.slice == 1);
  CHECK(result_of(report, 3, Quantity::lse).at.lane == 0);
  CHECK_THAT(text_of(a, b), ContainsSubstring("NaN or inf"));
  CHECK(first_of(report_of(b, a, {.tolerance = 2})) == "3 lse");

  b.at("layer3.lse")[2] = not_a_number;
  for (float const other : {infinity, 0.0f, not_a_number}) {
    b.at("layer3.lse")[3] = other;
    CHECK(first_of(report_of(a, b)) == "3 lse");
  }
}

TEST_CASE("Compare: recordings of other tokens, rows or shapes are refused") {
  Sample const a = test::sample();
  Sample b = test::sample();
  b.ints.at("positions").data[3] = 14;
  CHECK_THAT(refusal(a, b), ContainsSubstring("positions: got 13 of token 3 in A and 14 in B"));
  b = test::sample();
  b.ints.at("requests").data = {4, 4, 4, 4, 2, 2};  // other names for the same requests
  CHECK(first_of(report_of(a, b)).empty());
  b.ints.at("requests").data = {0, 0, 0, 7, 7, 7};
  for (std::string const layer : {"layer3", "layer4"})
    b.ints.at(layer + ".selection").data = {1, 0, 0, -1, 0, 1};
  CHECK_THAT(refusal(a, b),
             ContainsSubstring("requests: got position 3 of token 3 in A and 0 in B"));
  b = test::sample();
  b.ints.at("rows").data = {1, 2, 5};
  for (std::string const layer : {"layer3", "layer4"})
    b.ints.at(layer + ".selection").data = {0, 1, 0, 1, 0, 1};
  CHECK_THAT(refusal(a, b), ContainsSubstring("rows: got token 3 as row 1 in A and 2 in B"));

  Sample few;
  few.ints["positions"] = {{2}, {10, 11}};
  few.floats["layer3.hidden"] = {{2, 5}, std::vector<float>(10)};
  CHECK_THAT(refusal(a, few), ContainsSubstring("positions: got 6 tokens in A and 2 in B"));
  few.ints["positions"] = a.ints.at("positions");
  few.ints["requests"] = a.ints.at("requests");
  few.floats["layer3.hidden"] = {{6, 5}, std::vector<float>(30)};
  CHECK_THAT(refusal(a, few), ContainsSubstring("rows: got 3 rows in A and 6 in B"));

  b = test::sample();
  b.floats.at("layer4.q_a") = {{3, 4}, std::vector<float>(12)};
  b.floats.at("layer4.q_resid") = b.floats.at("layer4.q_a");
  CHECK_THAT(refusal(a, b), ContainsSubstring("layer4.q_a: got shape [3, 3] in A and [3, 4] in B"));
}

TEST_CASE("Compare: lane orders are brought together") {
  Sample a = test::sample();
  Sample b = test::sample();
  b.metadata["rotated_lanes"] = "evens_then_odds";
  b.metadata["index_rotated_lanes"] = "evens_then_odds";
  b.metadata["index_rope_dims"] = "4";
  b.metadata["index_rope_lanes"] = "last";
  CHECK(first_of(report_of(a, b)) == "3 q_rope");
  auto const split = [](std::vector<float>& values, std::size_t lanes, std::size_t first) {
    for (std::size_t head = first; head < values.size(); head += lanes)
      std::swap(values[head + 1], values[head + 2]);  // 0 1 2 3 becomes 0 2 1 3
  };
  for (std::string const layer : {"layer3", "layer4"}) {
    split(b.at(layer + ".q_rope"), 4, 0);
    split(b.at(layer + ".k_rope"), 4, 0);
  }
  CHECK(first_of(report_of(a, b)) == "3 index_q");
  split(b.at("layer3.index_q"), 8, 4);
  CHECK(first_of(report_of(a, b)) == "3 index_k");
  split(b.at("layer3.index_k"), 8, 4);
  CHECK(first_of(report_of(a, b)).empty());
}

TEST_CASE("HAD: index vectors in two bases are compared in the Hadamard basis") {
  Sample const natural = test::sample();
  Sample transformed = test::sample();
  transformed.metadata["index_basis"] = "hadamard";
  CHECK(first_of(report_of(natural, transformed)) == "3 index_q");
  for (std::string const name : {"layer3.index_q", "layer3.index_k"}) {
    std::vector<float>& values = transformed.at(name);
    for (std::size_t head = 0; head < values.size(); head += 8) {
      std::vector<double> lanes(values.begin() + static_cast<std::ptrdiff_t>(head),
                                values.begin() + static_cast<std::ptrdiff_t>(head + 8));
      hadamard(lanes);
      for (std::size_t i = 0; i < 8; ++i) values[head + i] = static_cast<float>(lanes[i]);
    }
  }
  CHECK(first_of(report_of(natural, transformed)).empty());
  CHECK(first_of(report_of(transformed, natural)).empty());
  CHECK(first_of(report_of(transformed, transformed)).empty());
  // where it lies and what the values are is said in the basis of the comparison
  QuantityResult const moved = result_of(report_of(natural, transformed), 3, Quantity::index_k);
  CHECK(moved.magnitude ==
        Approx(result_of(report_of(transformed, transformed), 3, Quantity::index_k).magnitude));

  Sample odd;
  odd.ints["positions"] = {{1}, {0}};
  odd.floats["layer0.index_k"] = {{1, 6}, std::vector<float>(6)};
  Sample odd_basis = odd;
  odd_basis.metadata["index_basis"] = "hadamard";
  CHECK_FALSE(Recording::parse("B", odd_basis.writer().bytes().value()).has_value());
}

TEST_CASE("Compare: scores past the visible keys do not count, nor their number") {
  Sample const a = test::sample();
  Sample b = test::sample();
  b.floats.at("layer3.scores") = {
      {3, 5}, {0.5f, 0.25f, not_a_number, 7, 7, 0.125f, 2, 1, 4, infinity, 0.5f, 0.25f, 7, 7, 7}};
  CHECK(first_of(report_of(a, b)).empty());
  b.at("layer3.scores")[8] = 3;  // key 3 of row 1
  CompareReport const report = report_of(a, b);
  CHECK(first_of(report) == "3 scores");
  QuantityResult const& result = result_of(report, 3, Quantity::scores);
  CHECK(result.magnitude == 4);  // of its visible keys
  CHECK(result.at.slice == 1);
  CHECK(result.at.lane == 3);
  CHECK_THAT(text_of(a, b), ContainsSubstring("position 3, rotary 13), key 3\n"));
}

TEST_CASE("Compare: selections are sets") {
  Sample const a = test::sample();
  Sample b = test::sample();
  b.ints.at("layer3.selection") = {{3, 4}, {0, -1, 1, -1, -1, -1, 1, 3, 1, 0, -1, -1}};
  CHECK(first_of(report_of(a, b)).empty());
  CHECK(result_of(report_of(a, b), 3, Quantity::selection).off == 0);
}

TEST_CASE("Compare: a near tie is named and is no difference") {
  Sample const a = close_scores(1e-5f);
  Sample const b = swapped_choice(1e-5f);
  CompareReport const report = report_of(a, b);
  CHECK(first_of(report).empty());
  for (LayerResult const& layer : report.layers) {
    INFO(layer.layer);
    REQUIRE(layer.selection.has_value());
    SelectionResult const& selection = *layer.selection;
    CHECK(selection.near_ties() == 1);
    CHECK(selection.scores_layer == 3);  // the shared layer is judged by its source's scores
    CHECK(*selection.score_error == Approx(1e-5).epsilon(0.02));
    CHECK(selection.mean_overlap == Approx((1 + 0.5 + 1) / 3));
    REQUIRE(selection.different.size() == 1);
    SelectionRow const& row = selection.different[0];
    CHECK(row.row == 1);
    CHECK(row.only_a == std::vector<std::int32_t>{1});
    CHECK(row.only_b == std::vector<std::int32_t>{2});
    CHECK(*row.gap == Approx(1e-5).epsilon(0.02));
    CHECK(*row.swapped == Approx(1e-5).epsilon(0.02));
    // what follows from another key has no counterpart
    CHECK(result_of(report, layer.layer, Quantity::attention).rows_left_out == 1);
    CHECK(result_of(report, layer.layer, Quantity::attention).elements == 2 * 2 * 3);
  }
  CHECK(result_of(report, 3, Quantity::scores).rows_left_out == 0);
  std::string const text = text_of(a, b);
  CHECK_THAT(text, ContainsSubstring("1 of 3 rows differ, 1 of them near ties"));
  CHECK_THAT(text, ContainsSubstring("near tie      row 1, token 3"));
  CHECK_THAT(text, ContainsSubstring("ok; near-tie rows left out: 1"));
  CHECK_THAT(text, ContainsSubstring("scores of the row agree within 1.0e-05"));
  CHECK_THAT(text, ContainsSubstring("layer 3 (full): agrees\n"));
  CHECK_THAT(text,
             EndsWith("\nall 2 layers agree; near-tie rows left out of lse, attention, gated, "
                      "output: 2 of 6, in layers 3, 4; a run of indexshare-demo with "
                      "--attend-recorded compares them\n"));
  CHECK(report.complete());

  // a fault in another row is still one
  Sample faulty = b;
  faulty.at("layer3.attention")[0] += 1;
  CHECK(first_of(report_of(a, faulty)) == "3 attention");
}

TEST_CASE("Compare: a quantity whose rows are all near ties is not said to agree") {
  Sample a = row_1_of(close_scores(1e-5f));
  Sample b = row_1_of(swapped_choice(1e-5f));
  a.floats.erase("layer4.gated");
  CompareReport const report = report_of(a, b);
  CHECK(first_of(report).empty());
  CHECK_FALSE(report.complete());
  for (Quantity const id : {Quantity::lse, Quantity::attention, Quantity::output}) {
    CHECK(result_of(report, 4, id).verdict == Verdict::not_compared);
    CHECK(result_of(report, 4, id).elements == 0);
  }
  CHECK(result_of(report, 4, Quantity::gated).verdict == Verdict::only_b);
  CHECK(result_of(report, 3, Quantity::scores).verdict == Verdict::same);
  std::string const text = text_of(a, b);
  CHECK_THAT(text, ContainsSubstring("layer 4 (shared): agrees as far as it could be compared\n"));
  CHECK_THAT(text, ContainsSubstring("not compared; near-tie rows left out: 1\n"));
  CHECK_THAT(text,
             EndsWith("\nall 2 layers agree, but nothing of lse, attention, gated, output of layer "
                      "3, nor of lse, attention, output of layer 4 was compared: every row is a "
                      "near tie; a run of indexshare-demo with --attend-recorded compares them\n"));

  Recording const in_a = a.recording("A");
  Recording const in_b = b.recording("B");
  auto const json = comparison_json(in_a, in_b, report);
  CHECK(json["same"] == false);
  CHECK(json["first_difference"].is_null());
  REQUIRE(json["not_compared"].size() == 7);
  CHECK(json["not_compared"][0] ==
        nlohmann::ordered_json{{"layer", 3}, {"quantity", "lse"}, {"reason", "near ties"}});
  auto const& output = json["layers"][0]["quantities"][static_cast<std::size_t>(Quantity::output)];
  CHECK(output["verdict"] == "not compared");
  CHECK(output["rows_left_out"] == 1);
  CHECK_FALSE(output.contains("error"));

  TemporaryFile const file_a("tie_a.safetensors", a);
  TemporaryFile const file_b("tie_b.safetensors", b);
  CHECK(run({file_a.path(), file_b.path()}).status == 3);
  CHECK(run({file_a.path(), file_a.path()}).status == 0);
  CHECK_THAT(run({"--help"}).out, ContainsSubstring("3: nothing differs, but"));
  // a difference comes first, and what was not seen below it is said
  b.at("layer4.q")[0] += 1;
  TemporaryFile const faulty("tie_c.safetensors", b);
  Outcome const outcome = run({file_a.path(), faulty.path()});
  CHECK(outcome.status == 1);
  CHECK_THAT(outcome.out,
             ContainsSubstring("\nfirst difference: layer 4, quantity q; nothing of "
                               "lse, attention, gated, output of layer 3 was compared"));
}

TEST_CASE("Compare: a layer of which nothing could be compared is none that agrees") {
  Sample a = row_1_of(close_scores(1e-5f));
  Sample b = row_1_of(swapped_choice(1e-5f));
  for (Sample* const made : {&a, &b}) {
    made->ints.erase("layer4.selection");
    for (QuantitySpec const& spec : quantities)
      if (spec.id != Quantity::attention) made->floats.erase(tensor_name(4, spec.id));
  }
  TemporaryFile const file_a("one_a.safetensors", a);
  TemporaryFile const file_b("one_b.safetensors", b);
  Outcome outcome = run({file_a.path(), file_b.path()});
  CHECK(outcome.status == 3);
  CHECK_THAT(outcome.out, ContainsSubstring("\nall 1 layers agree, but nothing of"));
  outcome = run({file_a.path(), file_b.path(), "--layers", "4:5"});
  CHECK(outcome.status == 3);
  CHECK_THAT(outcome.out, ContainsSubstring("layer 4 (shared): nothing that could be compared\n"));
  CHECK_THAT(outcome.out,
             ContainsSubstring("\nnothing of attention of layer 4 was compared: every row"));
}

TEST_CASE("Compare: a quantity that is all NaN in both files is not said to agree") {
  Sample made = test::sample();
  for (float& value : made.at("layer3.kv_a")) value = not_a_number;
  CompareReport const report = report_of(made, made);
  CHECK(result_of(report, 3, Quantity::kv_a).verdict == Verdict::not_compared);
  CHECK_FALSE(report.complete());
  CHECK_THAT(text_of(made, made),
             ContainsSubstring("not compared; NaN in both: 42\n") &&
                 EndsWith("\nall 2 layers agree, but nothing of kv_a of layer 3 was compared: all "
                          "of it is NaN in both files\n"));
  made.at("layer3.kv_a")[7] = 1;
  CHECK(report_of(made, made).complete());
}

TEST_CASE("Compare: attention over the other file's selection is compared in every row") {
  Sample const a = row_1_of(close_scores(1e-5f));
  Sample b = row_1_of(swapped_choice(1e-5f));
  for (bool const in_b : {true, false}) {
    Sample recorded = in_b ? b : a;
    recorded.metadata["attention_selection"] = "recorded";
    CompareReport const report = in_b ? report_of(a, recorded) : report_of(recorded, b);
    CHECK(first_of(report) == "3 lse");  // `swapped_choice` attended over its own
    CHECK(report.complete());
    CHECK(report.layers[0].selection->near_ties() == 1);
    CHECK(result_of(report, 3, Quantity::selection).verdict == Verdict::same);
    CHECK(result_of(report, 3, Quantity::lse).rows_left_out == 0);
  }
  b.metadata["attention_selection"] = "recorded";
  for (std::string const layer : {"layer3", "layer4"})
    for (std::string const quantity : {".lse", ".attention", ".gated", ".output"})
      b.at(layer + quantity) = a.floats.at(layer + quantity).data;
  TemporaryFile const file_a("own.safetensors", a);
  TemporaryFile const file_b("recorded.safetensors", b);
  Outcome const outcome = run({file_a.path(), file_b.path()});
  CHECK(outcome.status == 0);
  CHECK_THAT(outcome.out,
             ContainsSubstring(file_b.path() + ", attends over the other's selection\n"));
  CHECK_THAT(outcome.out, EndsWith("\nall 2 layers agree\n"));
}

TEST_CASE("Compare: a shared layer without a recorded selection has its source's near ties") {
  Sample a = close_scores(1e-5f);
  Sample b = swapped_choice(1e-5f);
  a.ints.erase("layer4.selection");
  CHECK(first_of(report_of(a, b)).empty());
  CHECK(result_of(report_of(a, b), 4, Quantity::selection).verdict == Verdict::only_b);
  CHECK(result_of(report_of(a, b), 4, Quantity::output).rows_left_out == 1);
}

TEST_CASE("Compare: a wrong selection is a difference although scores agree") {
  Sample const a = test::sample();
  Sample b = test::sample();
  SECTION("another key") {
    b.ints.at("layer3.selection").data[3] = 2;  // score 1 in place of 2
    CompareReport const report = report_of(a, b);
    CHECK(first_of(report) == "3 selection");
    SelectionRow const& row = report.layers[0].selection->different.at(0);
    CHECK(*row.swapped == 1);
    CHECK(*row.gap == 1);
    CHECK_FALSE(row.near_tie);
    CHECK(result_of(report, 3, Quantity::selection).off == 1);
    std::string const text = text_of(a, b);
    CHECK_THAT(text, ContainsSubstring("differs       row 1, token 3"));
    CHECK_THAT(text,
               ContainsSubstring("gap at the boundary 1.0e+00, swapped scores up to 1.0e+00"));
    CHECK_THAT(text, ContainsSubstring(std::string(spec_of(Quantity::selection).hint)));
  }
  SECTION("a key too few, though its score is tied") {
    b.ints.at("layer3.selection").data[3] = -1;
    CHECK(first_of(report_of(a, b)) == "3 selection");
    CHECK(first_of(report_of(b, a)) == "3 selection");
  }
  SECTION("a key too many") {
    b.ints.at("layer3.selection") = {{3, 3}, {1, 0, -1, 3, 1, 2, 0, 1, -1}};
    CHECK(first_of(report_of(a, b)) == "3 selection");
  }
  SECTION("further apart than the scores' error explains") {
    Sample const near_a = close_scores(2.5e-5f);
    Sample near_b = swapped_choice(2.5e-5f);
    CHECK(first_of(report_of(near_a, near_b)).empty());
    near_b.at("layer3.scores") = near_a.floats.at("layer3.scores").data;
    near_b.at("layer3.scores")[7] += 1e-5f;  // the only error: 1e-5, and 2.5e-5 is more than twice
    CHECK(first_of(report_of(near_a, near_b)) == "3 selection");
    near_b.at("layer3.scores")[7] += 0.5e-5f;
    CHECK(first_of(report_of(near_a, near_b)).empty());
  }
}

TEST_CASE("Compare: an exact tie is a near tie for scores that are bit for bit equal") {
  Sample const a = close_scores(0);
  CHECK(first_of(report_of(a, swapped_choice(0))).empty());
  CHECK(report_of(a, swapped_choice(0)).layers[0].selection->near_ties() == 1);
}

TEST_CASE("Compare: positions without a score are near nothing") {
  for (float const score : {not_a_number, infinity, -infinity}) {
    // the same in both files, at positions that changed places
    Sample a = close_scores(0);
    Sample b = swapped_choice(0);
    for (Sample* const sample : {&a, &b}) {
      for (float& value : sample->floats.at("layer3.scores").data) value = score;
    }
    auto const report = report_of(a, b);
    CHECK(report.layers[0].selection->near_ties() == 0);
    CHECK(report.first_difference() != nullptr);
  }
}

TEST_CASE("Compare: without scores that agree no row is a near tie") {
  Sample a = close_scores(1e-5f);
  Sample b = swapped_choice(1e-5f);
  Sample const without = [&a] {
    Sample made = a;
    made.floats.erase("layer3.scores");
    return made;
  }();
  CompareReport report = report_of(without, b);
  CHECK(first_of(report) == "3 selection");
  CHECK(*report.layers[0].selection->scores_of == Side::b);
  // of B's scores: B chose 3 and 2
  CHECK(*report.layers[0].selection->different[0].gap == Approx(1e-5).epsilon(0.02));
  CHECK_FALSE(report.layers[0].selection->score_error.has_value());

  b.at("layer3.scores")[0] += 1;
  report = report_of(a, b);
  CHECK(first_of(report) == "3 scores");
  CHECK(result_of(report, 3, Quantity::selection).verdict == Verdict::differs);
  CHECK(result_of(report, 4, Quantity::selection).verdict == Verdict::differs);

  b.floats.erase("layer3.scores");
  report = report_of(without, b);
  CHECK_FALSE(report.layers[0].selection->scores_of.has_value());
  CHECK_FALSE(report.layers[0].selection->different[0].gap.has_value());
  CHECK_THAT(text_of(without, b), ContainsSubstring("no scores are recorded"));
}

TEST_CASE("Compare: 16-bit scores may be half a step from what was selected by") {
  // Both recorded 2 and the next bf16 below it; either may have been the better one.
  float const below = 2 - 0x1p-7f;
  Sample a = close_scores(2 - below);
  Sample b = a;
  for (std::string const layer : {"layer3", "layer4"}) b.ints.at(layer + ".selection").data[3] = 2;
  CHECK(first_of(report_of(a, b)) == "3 selection");
  auto const narrow = [](Sample made) {
    auto const scores = made.floats.at("layer3.scores");
    made.floats.erase("layer3.scores");
    std::vector<bf16> values;
    for (float const value : scores.data) values.push_back(indexshare::from_float<bf16>(value));
    RecordingWriter writer = made.writer();
    writer.add("layer3.scores", scores.shape, values);
    return Recording::parse("narrow", writer.bytes().value()).value();
  };
  CHECK(first_of(report_of(narrow(a), narrow(b))).empty());
}

TEST_CASE("SHARE-STALE: a shared layer that does not reuse its source's selection is reported") {
  Sample const a = test::sample();
  Sample b = test::sample();
  b.ints.at("layer4.selection").data[3] = 2;
  CompareReport report = report_of(a, b);
  CHECK(first_of(report) == "4 selection");
  REQUIRE(report.layers[1].reuse_faults.size() == 1);
  ReuseFault const& fault = report.layers[1].reuse_faults[0];
  CHECK(fault.side == Side::b);
  CHECK(fault.source == 3);
  CHECK(fault.rows == 1);
  CHECK(fault.first_row == 1);
  CHECK_THAT(text_of(a, b),
             ContainsSubstring("in B layer 4 does not reuse layer 3's selection (rows "
                               "that differ: 1, the first is row 1)"));
  CHECK_THAT(text_of(a, b), ContainsSubstring("differs, 1 of 3; not its source's"));
  // both do the same: reported, but no difference between them
  report = report_of(b, b);
  CHECK(first_of(report).empty());
  CHECK(report.layers[1].reuse_faults.size() == 2);
  CHECK_THAT(text_of(b, b), ContainsSubstring("in A layer 4 does not reuse layer 3's selection"));

  // the other file has no selection there: the fault is all there is to see
  Sample without = a;
  without.ints.erase("layer4.selection");
  CHECK(first_of(report_of(without, b)) == "4 selection");
  CHECK(first_of(report_of(a, without)).empty());

  // a layer with an indexer of its own, recorded by either file, selects for itself
  Sample full = a;
  full.floats["layer4.head_weights"] = full.floats.at("layer3.head_weights");
  CHECK(report_of(full, b).layers[1].reuse_faults.empty());
  CHECK(report_of(full, b).layers[1].full());
}

TEST_CASE("SHARE-STALE: the source is the nearest full layer below, in the files or not shown") {
  Sample made = test::sample();
  // layer 7: full, with another selection; layer 9: shared, from 7
  for (auto const& [name, values] : test::sample().floats)
    if (name.starts_with("layer3."))
      made.floats["layer7." + name.substr(std::string("layer3.").size())] = values;
  made.ints["layer7.selection"] = {{3, 2}, {0, 1, 3, 2, 0, 1}};
  made.ints["layer9.selection"] = made.ints.at("layer3.selection");
  CompareReport report = report_of(made, made, {.layers = NumberRange{9, 10}});
  REQUIRE(report.layers.size() == 1);
  REQUIRE(report.layers[0].reuse_faults.size() == 2);
  CHECK(report.layers[0].reuse_faults[0].source == 7);
  made.ints["layer9.selection"] = made.ints.at("layer7.selection");
  CHECK(report_of(made, made).layers.back().reuse_faults.empty());
  made.ints.erase("layer7.selection");
  CHECK(report_of(made, made).layers.back().reuse_faults.empty());
}

TEST_CASE("Compare: what only one file has is shown and is no difference") {
  Sample a = test::sample();
  Sample b = test::sample();
  a.floats.erase("layer3.gated");
  b.floats.erase("layer3.q_a");
  for (auto const& spec : quantities) {
    b.floats.erase(tensor_name(4, spec.id));
    b.ints.erase(tensor_name(4, spec.id));
  }
  b.floats["layer8.hidden"] = b.floats.at("layer3.hidden");
  CompareReport const report = report_of(a, b);
  CHECK(first_of(report).empty());
  CHECK(result_of(report, 3, Quantity::gated).verdict == Verdict::only_b);
  CHECK(result_of(report, 3, Quantity::q_a).verdict == Verdict::only_a);
  CHECK(report.only_a == std::vector<std::int32_t>{4});
  CHECK(report.only_b == std::vector<std::int32_t>{8});
  std::string const text = text_of(a, b);
  CHECK_THAT(text_of(test::sample(), b), ContainsSubstring("layer 3 (full): agrees"));
  CHECK_THAT(text, ContainsSubstring("layers only in A: 4\nlayers only in B: 8\n"));
  CHECK_THAT(text, EndsWith("all 1 layers agree\n"));

  // layers in common, but no quantity of them
  Sample hidden;
  hidden.ints = {{"positions", a.ints.at("positions")},
                 {"requests", a.ints.at("requests")},
                 {"rows", a.ints.at("rows")}};
  Sample output = hidden;
  hidden.floats["layer3.hidden"] = a.floats.at("layer3.hidden");
  output.floats["layer3.output"] = a.floats.at("layer3.output");
  CHECK_THAT(refusal(hidden, output), ContainsSubstring("no quantity of a layer"));
  CHECK_THAT(text_of(hidden, hidden), ContainsSubstring("layer 3 (no indexer recorded): agrees"));
}

TEST_CASE("Compare: exit status, options and errors of the program") {
  TemporaryFile const a("a.safetensors", test::sample());
  Sample other = test::sample();
  other.metadata["producer"] = "an\nengine";
  other.at("layer4.q")[0] += 1;
  TemporaryFile const b("b.safetensors", other);
  TemporaryFile const json("report.json");

  Outcome outcome = run({a.path(), a.path()});
  CHECK(outcome.status == 0);
  CHECK(outcome.err.empty());
  CHECK_THAT(outcome.out, EndsWith("all 2 layers agree\n"));
  outcome = run({a.path(), "--json", json.path(), b.path()});
  CHECK(outcome.status == 1);
  CHECK(outcome.err.empty());
  CHECK_THAT(outcome.out, EndsWith("first difference: layer 4, quantity q\n"));
  CHECK_THAT(outcome.out, ContainsSubstring("B " + b.path() + ", by an?engine\n"));
  CHECK(run({a.path(), b.path(), "--layers", "3:4"}).status == 0);
  CHECK(run({a.path(), b.path(), "--layers=4:5"}).status == 1);
  CHECK(run({a.path(), b.path(), "--tolerance", "2"}).status == 0);
  CHECK_THAT(run({"--help"}).out, ContainsSubstring("A.safetensors B.safetensors [options]") &&
                                      ContainsSubstring("--tolerance X"));

  auto const error = [](std::vector<std::string> words) {
    Outcome const failed = run(std::move(words));
    CHECK(failed.status == 2);
    CHECK(failed.out.empty());
    CHECK(std::count(failed.err.begin(), failed.err.end(), '\n') == 1);
    CHECK_THAT(failed.err, EndsWith("\n"));
    return failed.err;
  };
  CHECK_THAT(error({}), ContainsSubstring("got 0, expected two recordings"));
  CHECK_THAT(error({a.path()}), ContainsSubstring("got 1, expected two recordings"));
  CHECK_THAT(error({a.path(), b.path(), a.path()}), ContainsSubstring("got 3"));
  CHECK_THAT(error({a.path(), "/no/such\nfile"}), ContainsSubstring("/no/such?file"));
  CHECK_THAT(error({a.path(), b.path(), "--tol", "1"}), ContainsSubstring("unknown option"));
  for (std::string const tolerance : {"-1", "2.1", "nan", "inf", "1e-4x", "x"})
    CHECK_THAT(error({a.path(), b.path(), "--tolerance=" + tolerance}),
               ContainsSubstring("--tolerance: got \"" + tolerance + "\""));
  CHECK_THAT(error({a.path(), b.path(), "--layers", "4"}), ContainsSubstring("--layers"));
  CHECK_THAT(error({a.path(), b.path(), "--layers", "7:9"}),
             ContainsSubstring("--layers: there is no quantity"));
  CHECK_THAT(error({a.path(), b.path(), "--json", "/no/such/directory/x"}),
             ContainsSubstring("--json: cannot write"));
}

TEST_CASE("Compare: the JSON report overwrites no recording") {
  TemporaryFile const a("kept_a.safetensors", test::sample());
  TemporaryFile const b("kept_b.safetensors", test::sample());
  TemporaryFile const link("kept_link.json");
  std::filesystem::create_hard_link(b.path(), link.path());
  auto const size = std::filesystem::file_size(a.path());
  for (std::string const& json : {a.path(), b.path(), link.path()}) {
    // before any work: the other recording is not even opened
    for (std::string const& other : {a.path(), std::string("/no/such/file")}) {
      Outcome const outcome = run({json == a.path() ? a.path() : b.path(), other, "--json", json});
      CHECK(outcome.status == 2);
      CHECK_THAT(outcome.err, ContainsSubstring("error: --json: got \"" + json +
                                                "\", which is one of the recordings"));
    }
  }
  CHECK(std::filesystem::file_size(a.path()) == size);
  CHECK(Recording::open(b.path()).has_value());
}

TEST_CASE("Compare: hints name the options that tell a choice from a fault") {
  auto const names = [](Quantity id, char const* option) {
    return spec_of(id).hint.find(option) != std::string_view::npos;
  };
  CHECK(names(Quantity::q_resid, "--latent-eps"));
  CHECK(names(Quantity::kv_latent, "--latent-eps"));
  CHECK(names(Quantity::index_k_norm, "--index-key-eps"));
  CHECK(names(Quantity::index_q, "--hadamard"));
  CHECK(names(Quantity::index_k, "--hadamard"));
}

TEST_CASE("Compare: the JSON report has what the text has") {
  Sample const a = close_scores(1e-5f);
  Sample b = swapped_choice(1e-5f);
  b.at("layer3.index_k")[8 + 3] = not_a_number;
  Recording const in_a = a.recording("A");
  Recording const in_b = b.recording("B");
  auto const json = comparison_json(in_a, in_b, report_of(in_a, in_b));
  CHECK(json["a"] == "A");
  CHECK(json["same"] == false);
  CHECK(json["not_compared"].empty());
  CHECK(json["first_difference"]["layer"] == 3);
  CHECK(json["first_difference"]["quantity"] == "index_k");
  CHECK(json["layers"].size() == 2);
  auto const& layer = json["layers"][0];
  CHECK(layer["role"] == "full");
  CHECK(json["layers"][1]["role"] == "shared");
  CHECK(json["layers"][1]["first_difference"].is_null());
  auto const& key = layer["quantities"][static_cast<std::size_t>(Quantity::index_k)];
  CHECK(key["quantity"] == "index_k");
  CHECK(key["verdict"] == "differs");
  CHECK(key["error"] == "inf");
  CHECK(key["b"] == "nan");
  CHECK(key["magnitude_of"] == "median");
  CHECK(key["at"]["token"] == 1);
  CHECK(key["at"]["lane"] == 3);
  CHECK_FALSE(key["at"].contains("row"));
  auto const& row = layer["selection"]["different_rows"][0];
  CHECK(row["near_tie"] == true);
  CHECK(row["score_error"].get<double>() == Approx(1e-5).epsilon(0.02));
  CHECK(row["row"] == 1);
  CHECK(row["token"] == 3);
  CHECK(row["only_b"] == std::vector<std::int32_t>{2});
  CHECK(layer["selection"]["near_ties"] == 1);
  CHECK(layer["not_reused"].empty());
  CHECK(json.dump().find("null") != std::string::npos);  // and it can be written
}
