// SPDX-License-Identifier: Apache-2.0
#include "recording.hpp"

#include <catch2/catch_approx.hpp>
#include <catch2/catch_test_macros.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <limits>
#include <string>
#include <vector>

#include "recording_cases.hpp"

using Catch::Approx;
using Catch::Matchers::ContainsSubstring;
using indexshare::bf16;
using indexshare::fp16;
using namespace programs;

namespace {

/// What opening such a recording is refused with.
std::string refusal(test::Sample const& made) {
  auto const opened = Recording::parse("file", made.writer().bytes().value());
  REQUIRE_FALSE(opened.has_value());
  CHECK_THAT(opened.error().message(), ContainsSubstring("file: tensor "));
  return opened.error().message();
}

/// As `refusal`, of a sample with one tensor of another shape; the data are zeros.
std::string shape_refusal(std::string const& name, test::Extents const& shape) {
  test::Sample made = test::sample();
  std::size_t count = 1;
  for (auto const extent : shape) count *= static_cast<std::size_t>(extent);
  made.floats.at(name) = {shape, std::vector<float>(count)};
  return refusal(made);
}

std::string int_refusal(std::string const& name, test::Extents shape,
                        std::vector<std::int32_t> data) {
  test::Sample made = test::sample();
  made.ints[name] = {std::move(shape), std::move(data)};
  return refusal(made);
}

std::vector<float> values(Recording const& recording, std::int32_t layer, Quantity id) {
  return recording.tensor(layer, id).values<float>();
}

}  // namespace

TEST_CASE("Recording: what was written is read") {
  test::Sample made = test::sample();
  made.metadata["producer"] = "a \"test\"";
  Recording const recording = made.recording();
  CHECK(recording.metadata().at("producer") == "a \"test\"");
  CHECK(recording.tokens() == 6);
  CHECK(recording.rows() == 3);
  CHECK(recording.row_tokens() == std::vector<std::int32_t>{1, 3, 5});
  CHECK(recording.layers() == std::set<std::int32_t>{3, 4});
  CHECK(recording.has(3, Quantity::scores));
  CHECK_FALSE(recording.has(4, Quantity::scores));
  CHECK(recording.index_basis() == IndexBasis::natural);
  CHECK(recording.place(2).position == 2);
  CHECK(recording.place(2).rotary == 12);
  CHECK(recording.place(5).request == 7);
  CHECK(recording.place(5).position == 1);
  CHECK(recording.visible_keys(0) == 2);
  CHECK(recording.visible_keys(1) == 4);
  CHECK(recording.visible_keys(2) == 2);
  for (QuantitySpec const& spec : quantities) {
    if (spec.id == Quantity::selection) continue;
    INFO(spec.name);
    std::string const name = tensor_name(3, spec.id);
    CHECK(recording.tensor(3, spec.id).shape() == made.floats.at(name).shape);
    CHECK(values(recording, 3, spec.id) == made.at(name));
  }
  CHECK(recording.selection(3, 1) == std::vector<std::int32_t>{1, 3});
}

TEST_CASE("Recording: it says whose selection the attention was computed over") {
  test::Sample made = test::sample();
  CHECK_FALSE(made.recording().attends_recorded());
  made.metadata["attention_selection"] = "own";
  CHECK_FALSE(made.recording().attends_recorded());
  made.metadata["attention_selection"] = "recorded";
  CHECK(made.recording().attends_recorded());
}

TEST_CASE("Recording: without requests and rows all tokens are rows of one request") {
  RecordingWriter writer;
  writer.add("positions", {3}, std::vector<std::int32_t>{0, 1, 2});
  writer.add(0, Quantity::selection, {3, 2}, std::vector<std::int32_t>{0, -1, -1, 1, 2, -7});
  auto const recording = Recording::parse("file", writer.bytes().value());
  REQUIRE(recording.has_value());
  CHECK(recording->rows() == 3);
  CHECK(recording->visible_keys(2) == 3);
  CHECK(recording->selection(0, 1) == std::vector<std::int32_t>{1});
  CHECK(recording->selection(0, 2) == std::vector<std::int32_t>{2});
}

TEST_CASE("Recording: the same content is the same bytes, and data are aligned") {
  test::Sample const made = test::sample();
  RecordingWriter backwards;
  for (auto name = made.ints.rbegin(); name != made.ints.rend(); ++name)
    backwards.add(name->first, name->second.shape, name->second.data);
  for (auto name = made.floats.rbegin(); name != made.floats.rend(); ++name)
    backwards.add(name->first, name->second.shape, name->second.data);
  std::string const bytes = made.writer().bytes().value();
  CHECK(bytes == backwards.bytes().value());
  for (std::size_t extra = 0; extra < 9; ++extra) {
    test::Sample padded = made;
    padded.metadata["producer"] = std::string(extra, 'x');
    std::string const content = padded.writer().bytes().value();
    std::uint64_t length = 0;
    std::memcpy(&length, content.data(), sizeof length);
    CHECK(length % 8 == 0);
    CHECK(Recording::parse("file", content).has_value());
  }
}

TEST_CASE("Recording: written files, and errors of the writer") {
  std::filesystem::path const path =
      std::filesystem::temp_directory_path() / "indexshare_recording_test.safetensors";
  test::Sample const made = test::sample();
  REQUIRE(made.writer().write(path.string()).has_value());
  auto const opened = Recording::open(path.string());
  REQUIRE(opened.has_value());
  CHECK(opened->name() == path.string());
  CHECK(values(*opened, 3, Quantity::q) == made.floats.at("layer3.q").data);
  std::filesystem::remove(path);

  CHECK_THAT(Recording::open(path.string()).error().message(), ContainsSubstring(path.string()));
  CHECK_THAT(made.writer().write("/no/such/directory/file").error().message(),
             ContainsSubstring("/no/such/directory/file") && ContainsSubstring("writable"));
  if (std::filesystem::exists("/dev/full"))
    CHECK_THAT(made.writer().write("/dev/full").error().message(),
               ContainsSubstring("/dev/full") && ContainsSubstring("write error"));

  RecordingWriter wrong = made.writer();
  wrong.add(9, Quantity::q_a, {2, 3}, std::vector<float>(5));
  CHECK_THAT(wrong.bytes().error().message(),
             ContainsSubstring("layer9.q_a") && ContainsSubstring("20 bytes"));
  RecordingWriter twice = made.writer();
  twice.add(3, Quantity::q_a, {3, 3}, std::vector<float>(9));
  twice.add(9, Quantity::q_a, {2, 3}, std::vector<float>(5));  // the first error counts
  CHECK_THAT(twice.bytes().error().message(),
             ContainsSubstring("layer3.q_a") && ContainsSubstring("twice"));
}

TEST_CASE("Recording: 16-bit and double elements are read") {
  test::Sample made = test::sample();
  made.floats.erase("layer3.q_a");
  made.floats.erase("layer3.kv_a");
  made.floats.erase("layer3.q_resid");
  RecordingWriter writer = made.writer();
  std::vector<bf16> brain;
  std::vector<fp16> narrow;
  std::vector<double> wide;
  for (int i = 0; i < 9; ++i) {
    brain.push_back(indexshare::from_float<bf16>(static_cast<float>(i) - 2.5f));
    wide.push_back(i * 0.1);
  }
  for (int i = 0; i < 42; ++i)
    narrow.push_back(indexshare::from_float<fp16>(0.125f * static_cast<float>(i)));
  writer.add(3, Quantity::q_a, {3, 3}, brain);
  writer.add(3, Quantity::q_resid, {3, 3}, wide);
  writer.add(3, Quantity::kv_a, {6, 7}, narrow);
  auto const recording = Recording::parse("file", writer.bytes().value());
  REQUIRE(recording.has_value());
  CHECK(recording->tensor(3, Quantity::q_a).is_16_bit());
  CHECK(recording->tensor(3, Quantity::kv_a).is_16_bit());
  CHECK_FALSE(recording->tensor(3, Quantity::q_resid).is_16_bit());
  CHECK(values(*recording, 3, Quantity::q_a)[1] == -1.5f);
  CHECK(recording->tensor(3, Quantity::q_resid).values<double>() == wide);
  CHECK(values(*recording, 3, Quantity::kv_a)[41] == 5.125f);
}

TEST_CASE("Recording: lanes with evens before odds come back in place") {
  test::Sample made = test::sample();
  made.metadata["rotated_lanes"] = "evens_then_odds";
  for (float* const lanes : {&made.at("layer3.q_rope")[4], &made.at("layer3.k_rope")[0]}) {
    float const halves[]{0, 2, 1, 3};  // lane j of the halves is element 0, 2, 1, 3 in place
    std::copy(halves, halves + 4, lanes);
  }
  Recording const recording = made.recording();
  auto const q = values(recording, 3, Quantity::q_rope);
  CHECK(std::vector<float>(q.begin() + 4, q.begin() + 8) == std::vector<float>{0, 1, 2, 3});
  auto const k = values(recording, 3, Quantity::k_rope);
  CHECK(std::vector<float>(k.begin(), k.begin() + 4) == std::vector<float>{0, 1, 2, 3});
  // nothing else moves
  CHECK(values(recording, 3, Quantity::q) == made.at("layer3.q"));
  CHECK(values(recording, 3, Quantity::index_q) == made.at("layer3.index_q"));
}

TEST_CASE("Recording: rotated index lanes sit first or last") {
  test::Sample made = test::sample();
  made.metadata["index_rotated_lanes"] = "evens_then_odds";
  made.metadata["index_rope_dims"] = "6";
  made.metadata["index_rope_lanes"] = "first";
  std::vector<float>& key = made.at("layer3.index_k");
  float const first[]{0, 2, 4, 1, 3, 5, 6, 7};
  std::copy(first, first + 8, key.begin() + 8);
  auto read = values(made.recording(), 3, Quantity::index_k);
  std::vector<float> const in_place{0, 1, 2, 3, 4, 5, 6, 7};
  CHECK(std::vector<float>(read.begin() + 8, read.begin() + 16) == in_place);

  made.metadata["index_rope_lanes"] = "last";
  float const last[]{0, 1, 2, 4, 6, 3, 5, 7};
  std::copy(last, last + 8, key.begin() + 8);
  read = values(made.recording(), 3, Quantity::index_k);
  CHECK(std::vector<float>(read.begin() + 8, read.begin() + 16) == in_place);
  CHECK(values(made.recording(), 3, Quantity::q_rope) == made.at("layer3.q_rope"));
  CHECK(values(made.recording(), 3, Quantity::index_k_norm) == made.at("layer3.index_k_norm"));
}

TEST_CASE("HAD: the Hadamard matrix is Sylvester's, and its own inverse") {
  std::vector<double> lanes{1, 0, 0, 0};
  hadamard(lanes);
  CHECK(lanes == std::vector<double>{0.5, 0.5, 0.5, 0.5});
  lanes = {0, 0, 1, 0};  // column 2: + + - -
  hadamard(lanes);
  CHECK(lanes == std::vector<double>{0.5, 0.5, -0.5, -0.5});
  hadamard(lanes);
  CHECK(lanes == std::vector<double>{0, 0, 1, 0});
}

TEST_CASE("HAD: lanes ordered before a Hadamard transform are put in place behind it") {
  std::vector<double> const in_place{3, 1, 4, 1, 5, 9, 2, 6};
  std::vector<double> halves{3, 4, 1, 1, 5, 9, 2, 6};  // the first four, evens then odds
  std::vector<double> expected = in_place;
  hadamard(expected);
  hadamard(halves);
  test::Sample made = test::sample();
  made.metadata["index_basis"] = "hadamard";
  made.metadata["index_rotated_lanes"] = "evens_then_odds";
  made.metadata["index_rope_dims"] = "4";
  made.metadata["index_rope_lanes"] = "first";
  for (std::size_t i = 0; i < 8; ++i)
    made.at("layer3.index_q")[8 + i] = static_cast<float>(halves[i]);
  Recording const recording = made.recording();
  CHECK(recording.index_basis() == IndexBasis::hadamard);
  auto const read = values(recording, 3, Quantity::index_q);
  for (std::size_t i = 0; i < 8; ++i) CHECK(read[8 + i] == Approx(expected[i]));
}

TEST_CASE("Recording: metadata that are missing or unknown are refused") {
  auto const with = [](std::string const& key, std::string const& value) {
    test::Sample made = test::sample();
    made.metadata[key] = value;
    return refusal(made);
  };
  CHECK_THAT(with("format", "pt"),
             ContainsSubstring("\"pt\"") && ContainsSubstring("indexshare-recording-1"));
  CHECK_THAT(with("rotated_lanes", "neox"), ContainsSubstring("rotated_lanes \"neox\"") &&
                                                ContainsSubstring("in_place or evens_then_odds"));
  CHECK_THAT(with("index_basis", "walsh"), ContainsSubstring("natural or hadamard"));
  CHECK_THAT(with("attention_selection", "other"),
             ContainsSubstring("attention_selection \"other\", expected own or recorded"));
  CHECK_THAT(with("index_rotated_lanes", "x"), ContainsSubstring("index_rotated_lanes"));
  CHECK_THAT(with("index_rotated_lanes", "evens_then_odds"),
             ContainsSubstring("index_rope_dims \"\""));

  std::string const content = R"({"positions":{"dtype":"I32","shape":[1],"data_offsets":[0,4]}})";
  std::string file(8, '\0');
  file[0] = static_cast<char>(content.size());
  auto const opened = Recording::parse("file", file + content + std::string(4, '\0'));
  REQUIRE_FALSE(opened.has_value());
  CHECK_THAT(opened.error().message(), ContainsSubstring("no format"));

  test::Sample made = test::sample();
  made.metadata["index_rotated_lanes"] = "evens_then_odds";
  for (char const* const lanes : {"3", "-2", "4x", "0", ""}) {
    made.metadata["index_rope_dims"] = lanes;
    CHECK_THAT(refusal(made), ContainsSubstring("index_rope_dims \"" + std::string(lanes) + "\""));
  }
  made.metadata["index_rope_dims"] = "4";
  CHECK_THAT(refusal(made), ContainsSubstring("no index_rope_lanes"));
  made.metadata["index_rope_lanes"] = "middle";
  CHECK_THAT(refusal(made), ContainsSubstring("first or last"));
  made.metadata["index_rope_lanes"] = "last";
  made.metadata["index_rope_dims"] = "10";
  CHECK_THAT(refusal(made), ContainsSubstring("layer3.index_q") && ContainsSubstring("8 lanes") &&
                                ContainsSubstring("10 of index_rope_dims"));
}

TEST_CASE("Recording: tokens, requests and rows that contradict each other are refused") {
  test::Sample made = test::sample();
  made.ints.erase("positions");
  CHECK_THAT(refusal(made), ContainsSubstring("tensor positions: got no such tensor"));
  CHECK_THAT(int_refusal("positions", {2, 3}, {0, 1, 2, 3, 4, 5}), ContainsSubstring("[2, 3]"));
  CHECK_THAT(int_refusal("positions", {0}, {}), ContainsSubstring("at least 1"));
  CHECK_THAT(int_refusal("positions", {6}, {0, 1, -1, 3, 0, 1}),
             ContainsSubstring("-1 of token 2"));
  CHECK_THAT(int_refusal("requests", {5}, {0, 0, 0, 0, 7}),
             ContainsSubstring("5 tokens") && ContainsSubstring("6, as positions has"));
  CHECK_THAT(int_refusal("requests", {6}, {0, 0, 7, 0, 7, 7}),
             ContainsSubstring("request 0 of token 3"));
  CHECK_THAT(int_refusal("rows", {3}, {1, 5, 3}), ContainsSubstring("3 after 5"));
  CHECK_THAT(int_refusal("rows", {3}, {1, 3, 3}), ContainsSubstring("3 after 3"));
  CHECK_THAT(int_refusal("rows", {3}, {-1, 3, 5}), ContainsSubstring("-1 after -1"));
  CHECK_THAT(int_refusal("rows", {3}, {1, 3, 6}),
             ContainsSubstring("token 6") && ContainsSubstring("below 6"));
  // T and R of the tensors
  CHECK_THAT(int_refusal("rows", {2}, {1, 3}),
             ContainsSubstring("layer3.q_a") && ContainsSubstring("2 rows (extent 0), as in rows"));
  CHECK_THAT(shape_refusal("layer4.kv_a", {5, 7}),
             ContainsSubstring("layer4.kv_a: got shape [5, 7]") &&
                 ContainsSubstring("6 tokens (extent 0), as in positions"));

  RecordingWriter writer;
  writer.add("positions", {2}, std::vector<float>{0, 1});
  auto const floats = Recording::parse("file", writer.bytes().value());
  REQUIRE_FALSE(floats.has_value());
  CHECK_THAT(floats.error().message(), ContainsSubstring("dtype F32, expected I32"));
}

TEST_CASE("Recording: tensors of a wrong name, type or shape are refused") {
  for (std::string const name : {"layer3.qa", "layer3", "layer03.q_a", "layer-1.q_a", "layerx.q_a",
                                 "layer3.q_a.weight", "hidden", "layer99999999999.q_a"}) {
    test::Sample made = test::sample();
    made.floats[name] = made.floats.at("layer3.q_a");
    CHECK_THAT(refusal(made),
               ContainsSubstring("tensor " + name + ":") && ContainsSubstring("layerN.<quantity>"));
  }
  CHECK_THAT(shape_refusal("layer3.q", {3, 12}),
             ContainsSubstring("shape [3, 12], expected 3 extents"));
  CHECK_THAT(shape_refusal("layer3.k_rope", {6, 1, 4}), ContainsSubstring("expected 2 extents"));
  CHECK_THAT(shape_refusal("layer3.attention", {3, 4, 3}),
             ContainsSubstring("2 heads (extent 1), as in layer3.q"));
  CHECK_THAT(shape_refusal("layer3.index_k", {6, 9}),
             ContainsSubstring("8 index lanes (extent 1), as in layer3.index_q_raw"));
  CHECK_THAT(shape_refusal("layer3.output", {3, 6}), ContainsSubstring("as in layer3.hidden"));
  CHECK_THAT(shape_refusal("layer3.gated", {3, 2, 0}), ContainsSubstring("at least 1"));
  CHECK_THAT(shape_refusal("layer3.scores", {3, 3}), ContainsSubstring("at least 4 keys"));
  CHECK_THAT(shape_refusal("layer3.kv_a", {6, 8}),
             ContainsSubstring("8 lanes, expected 7, the latent and rope lanes"));
  CHECK_THAT(shape_refusal("layer3.q", {3, 2, 3}), ContainsSubstring("at least the 4 rope lanes"));

  test::Sample made = test::sample();
  made.floats.erase("layer3.q_a");
  made.ints["layer3.q_a"] = {{3, 3}, std::vector<std::int32_t>(9)};
  CHECK_THAT(refusal(made), ContainsSubstring("layer3.q_a: got dtype I32, expected F32"));
  made = test::sample();
  made.ints.erase("layer3.selection");
  made.floats["layer3.selection"] = {{3, 2}, std::vector<float>(6)};
  CHECK_THAT(refusal(made), ContainsSubstring("layer3.selection: got dtype F32, expected I32"));
  made = test::sample();
  made.metadata["index_basis"] = "hadamard";
  for (auto const id : {Quantity::index_q_raw, Quantity::index_q, Quantity::index_k_raw,
                        Quantity::index_k_norm, Quantity::index_k})
    made.floats.erase(tensor_name(3, id));
  made.floats["layer3.index_k"] = {{6, 6}, std::vector<float>(36)};
  CHECK_THAT(refusal(made), ContainsSubstring("power of two"));
  made = test::sample();
  made.metadata["rotated_lanes"] = "evens_then_odds";
  for (std::string const layer : {"layer3.", "layer4."}) {
    made.floats[layer + "q_rope"] = {{3, 2, 3}, std::vector<float>(18)};
    made.floats[layer + "k_rope"] = {{6, 3}, std::vector<float>(18)};
    made.floats[layer + "kv_a"] = {{6, 6}, std::vector<float>(36)};
  }
  CHECK_THAT(refusal(made), ContainsSubstring("even number"));
}

TEST_CASE("Recording: selections outside of the visible keys are refused") {
  CHECK_THAT(int_refusal("layer4.selection", {3, 2}, {1, 0, 3, 4, 0, 1}),
             ContainsSubstring("layer4.selection") && ContainsSubstring("position 4 in row 1") &&
                 ContainsSubstring("below 4, its visible keys"));
  // request 7 starts over: its second token sees two keys
  CHECK_THAT(int_refusal("layer4.selection", {3, 2}, {1, 0, 3, 1, 0, 2}),
             ContainsSubstring("position 2 in row 2"));
  CHECK_THAT(int_refusal("layer3.selection", {3, 2}, {1, 0, 3, 3, 0, 1}),
             ContainsSubstring("position 3 twice in row 1"));
}

TEST_CASE("Recording: names of tensors are taken apart exactly") {
  auto const place = parse_tensor_name("layer78.index_k_norm");
  REQUIRE(place.has_value());
  CHECK(place->layer == 78);
  CHECK(place->id == Quantity::index_k_norm);
  CHECK(tensor_name(78, Quantity::index_k_norm) == "layer78.index_k_norm");
  CHECK_FALSE(parse_tensor_name("").has_value());
  CHECK_FALSE(parse_tensor_name("layer.q").has_value());
  CHECK_FALSE(parse_tensor_name("layer3.").has_value());
}
