// SPDX-License-Identifier: Apache-2.0
#include <indexshare/interop/dlpack.hpp>

#include "dlpack_abi.hpp"

#include <catch2/catch_template_test_macros.hpp>
#include <catch2/catch_test_macros.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>

#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <type_traits>
#include <vector>

using namespace indexshare;
namespace dl = test::dlpack;
using Catch::Matchers::ContainsSubstring;

namespace {

/// A float tensor [3, 4] with all that a test may want to spoil.
struct Sample {
  alignas(16) float data[32];
  std::int64_t shape[3] = {3, 4, 2};
  std::int64_t strides[3] = {8, 2, 1};
  dl::Tensor tensor{data, {dl::cpu, 0}, 3, {2, 32, 1}, shape, strides, 0};

  Sample() {
    for (int i = 0; i < 32; ++i) data[i] = static_cast<float>(i);
  }
};

struct engine_half {
  std::uint16_t bits;
};

}  // namespace

template <>
inline constexpr indexshare::DlpackType indexshare::dlpack_type<engine_half>{2, 16};

TEST_CASE("DLPack in: strides, offset and dense tensors") {
  Sample sample;
  auto const view = from_dlpack<Space::host, float const, 3>(sample.tensor);
  REQUIRE(view);
  CHECK((view->extent(0) == 3 && view->extent(1) == 4 && view->extent(2) == 2));
  CHECK((*view)(2, 3, 1) == 23);

  sample.strides[0] = 1;  // transposed: rows next to each other
  sample.strides[1] = 3;
  sample.strides[2] = 12;
  CHECK((*from_dlpack<Space::host, float, 3>(sample.tensor))(2, 3, 1) == 23);

  sample.tensor.strides = nullptr;
  sample.tensor.byte_offset = 8;
  auto const dense = from_dlpack<Space::host, float, 3>(sample.tensor);
  CHECK((*dense)(1, 2, 1) == 8 + 4 + 1 + 2);
  (*dense)(0, 0, 0) = -5;
  CHECK(sample.data[2] == -5);
}

TEST_CASE(
    "DLPack in: the stride of a single element is not looked at, nor the data of an empty one") {
  Sample sample;
  sample.shape[0] = 1;
  sample.strides[0] = -77;
  auto const single = from_dlpack<Space::host, float, 3>(sample.tensor);
  REQUIRE(single);
  CHECK((*single)(0, 3, 1) == 7);
  CHECK(single->stride(0) == 8);  // a leading dimension that a BLAS takes
  sample.shape[1] = 0;
  sample.tensor.data = nullptr;
  auto const empty = from_dlpack<Space::host, float, 3>(sample.tensor);
  REQUIRE(empty);
  CHECK(empty->size() == 0);
}

TEMPLATE_TEST_CASE("DLPack in and out: element types", "", float, fp16, bf16, e4m3, position_t,
                   std::byte, engine_half) {
  std::vector<TestType> data(6);
  std::memset(data.data(), 1, data.size() * sizeof(TestType));
  auto const view = make_dense<Space::host, TestType, 2>(data.data(), {2, 3});
  auto* const managed = to_dlpack<dl::Versioned>(view, 0, 0);
  REQUIRE(managed != nullptr);
  CHECK(managed->dl_tensor.dtype.bits == 8 * sizeof(TestType));
  CHECK(managed->version.minor == (std::is_same_v<TestType, e4m3> ? 1u : 0u));  // code 10 is of 1.1
  auto const back = from_dlpack<Space::host, TestType, 2>(*managed);
  REQUIRE(back);
  CHECK(back->data_handle() == data.data());
  CHECK(back->mapping() == view.mapping());
  managed->deleter(managed);
}

TEST_CASE("DLPack in: what cannot be a view is refused and named") {
  struct Case {
    std::function<void(Sample&)> spoil;
    Errc code;
    char const* what;
    std::int64_t expected;
    std::int64_t got;
  };
  Case const cases[] = {
      {[](Sample& s) { s.tensor.device.device_type = dl::cuda; }, Errc::unsupported, "device", 1,
       2},
      {[](Sample& s) { s.tensor.device.device_type = dl::vulkan; }, Errc::unsupported, "device", 1,
       7},
      {[](Sample& s) { s.tensor.ndim = 2; }, Errc::bad_shape, "rank", 3, 2},
      {[](Sample& s) { s.tensor.dtype.code = 4; }, Errc::bad_value, "type code", 2, 4},
      {[](Sample& s) { s.tensor.dtype.bits = 64; }, Errc::bad_value, "bits", 32, 64},
      {[](Sample& s) { s.tensor.dtype.lanes = 4; }, Errc::bad_value, "bits", 32, 128},
      {[](Sample& s) { s.tensor.shape = nullptr; }, Errc::missing_input, "shape", 0, 0},
      {[](Sample& s) { s.shape[1] = -1; }, Errc::bad_shape, "extent", 0, -1},
      {[](Sample& s) { s.strides[1] = -2; }, Errc::bad_stride, "stride", 0, -2},
      {[](Sample& s) { s.tensor.data = nullptr; }, Errc::missing_input, "data", 0, 0},
      {[](Sample& s) { s.tensor.byte_offset = 6; }, Errc::bad_value, "alignment", 4, 2},
  };
  for (Case const& wrong : cases) {
    Sample sample;
    wrong.spoil(sample);
    auto const view = from_dlpack<Space::host, float const, 3>(sample.tensor);
    INFO(wrong.what);
    REQUIRE(!view);
    CHECK(view.error().code == wrong.code);
    CHECK_THAT(view.error().what, ContainsSubstring(wrong.what));
    CHECK(view.error().expected == wrong.expected);
    CHECK(view.error().got == wrong.got);
  }
}

TEST_CASE("DLPack in: offsets and extents past all memory are refused") {
  Sample sample;
  sample.tensor.byte_offset = ~std::uint64_t{0} - 3;
  auto const past = from_dlpack<Space::host, float, 3>(sample.tensor);
  REQUIRE(!past);
  CHECK(past.error().code == Errc::bad_value);
  CHECK_THAT(past.error().what, ContainsSubstring("byte_offset"));

  sample.tensor.byte_offset = 0;
  sample.tensor.strides = nullptr;
  sample.shape[1] = sample.shape[2] = std::int64_t{1} << 62;
  auto const huge = from_dlpack<Space::host, float, 3>(sample.tensor);
  REQUIRE(!huge);
  CHECK(huge.error().code == Errc::bad_shape);
  CHECK(huge.error().got == std::int64_t{1} << 62);

  sample.shape[1] = 4;
  sample.shape[2] = 1;
  sample.shape[0] = std::int64_t{1} << 60;  // elements fit, bytes do not
  CHECK(from_dlpack<Space::host, float, 3>(sample.tensor).error().code == Errc::bad_shape);
  sample.shape[0] = 3;
  sample.tensor.strides = sample.strides;
  sample.strides[0] = std::int64_t{1} << 60;
  CHECK(from_dlpack<Space::host, float, 3>(sample.tensor).error().code == Errc::bad_shape);
  sample.strides[0] = 8;
  CHECK(from_dlpack<Space::host, float, 3>(sample.tensor).has_value());
}

TEST_CASE("DLPack in: memory spaces") {
  auto const reaches = [](Space space, dl::DeviceType device) {
    Sample sample;
    sample.tensor.device.device_type = device;
    return space == Space::host ? from_dlpack<Space::host, float, 3>(sample.tensor).has_value()
                                : from_dlpack<Space::device, float, 3>(sample.tensor).has_value();
  };
  CHECK(reaches(Space::host, dl::cpu));
  CHECK(reaches(Space::host, dl::cuda_host));
  CHECK(reaches(Space::host, dl::cuda_managed));
  CHECK(!reaches(Space::host, dl::cuda));
  CHECK(reaches(Space::device, dl::cuda));
  CHECK(reaches(Space::device, dl::cuda_managed));
  CHECK(!reaches(Space::device, dl::cpu));
  CHECK(!reaches(Space::device, dl::cuda_host));
}

TEST_CASE("DLPack in: version and the read-only flag") {
  Sample sample;
  dl::Versioned managed{{1, 3}, nullptr, nullptr, 1, sample.tensor};
  CHECK(from_dlpack<Space::host, float const, 3>(managed).has_value());
  auto const writable = from_dlpack<Space::host, float, 3>(managed);
  REQUIRE(!writable);
  CHECK_THAT(writable.error().what, ContainsSubstring("read-only"));
  managed.flags = 0;
  CHECK(from_dlpack<Space::host, float, 3>(managed).has_value());
  managed.version.major = 2;
  CHECK(from_dlpack<Space::host, float const, 3>(managed).error().got == 2);
  CHECK(
      from_dlpack<Space::host, float, 3>(dl::Managed{sample.tensor, nullptr, nullptr}).has_value());
}

TEST_CASE("DLPack out: the consumer's deleter releases the owner, once") {
  auto const data = std::make_shared<std::vector<float>>(24);
  auto const view = make_strided<Space::device, float, 2>(data->data(), {3, 4}, {8, 1});
  auto* const managed = to_dlpack<dl::Managed>(view, data, 5);
  REQUIRE(managed != nullptr);
  CHECK(data.use_count() == 2);
  dl::Tensor const& tensor = managed->dl_tensor;
  CHECK(tensor.data == data->data());
  CHECK(tensor.device.device_type == dl::cuda);
  CHECK(tensor.device.device_id == 5);
  CHECK((tensor.ndim == 2 && tensor.shape[0] == 3 && tensor.shape[1] == 4));
  CHECK((tensor.strides[0] == 8 && tensor.strides[1] == 1 && tensor.byte_offset == 0));
  managed->deleter(managed);
  CHECK(data.use_count() == 1);
}

TEST_CASE("DLPack out: a view of const elements is flagged read-only") {
  float const data[4] = {};
  auto* const managed = to_dlpack<dl::Versioned>(make_dense<Space::host, float const, 1>(data, {4}),
                                                 std::make_unique<int>(1), 0);
  CHECK(managed->flags == 1);
  CHECK(managed->version.major == 1);
  CHECK(managed->dl_tensor.device.device_type == dl::cpu);
  CHECK(!from_dlpack<Space::host, float, 1>(*managed));
  managed->deleter(managed);
}
