// SPDX-License-Identifier: Apache-2.0
//
// What the CUDA indexer adds to the case list: exact conversion of e4m3, NaN and infinities on the
// tensor cores, and bits that depend on neither alignment nor launch plan.
#include <indexshare/cuda/indexer.cuh>

#include <catch2/catch_template_test_macros.hpp>
#include <catch2/catch_test_macros.hpp>

#include "../cuda/graph.hpp"
#include "indexer_run.hpp"
#include "random.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string_view>
#include <tuple>
#include <vector>

using namespace indexshare;
using test::check_scores;
using test::Guarded;
using test::IndexerCase;
using test::IndexerInputs;
using test::one_hot;
using test::run_scores;

namespace {

using Scores = std::vector<std::vector<float>>;

template <class Q, class F>
struct Types {
  using Query = Q;
  using Format = F;
  using Case = IndexerCase<Q, F>;
};
using TensorTypes = std::tuple<Types<bf16, format::Plain<bf16>>, Types<fp16, format::Plain<fp16>>,
                               Types<bf16, format::IndexKeyE4m3>, Types<fp16, format::IndexKeyE4m3>,
                               Types<e4m3, format::IndexKeyE4m3>>;
using E4m3KeyTypes =
    std::tuple<Types<bf16, format::IndexKeyE4m3>, Types<fp16, format::IndexKeyE4m3>,
               Types<e4m3, format::IndexKeyE4m3>>;

/// Equal, NaN being equal to NaN.
bool same(std::vector<float> const& a, std::vector<float> const& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                    [](float x, float y) { return x == y || (std::isnan(x) && std::isnan(y)); });
}

/// The executor on a device that says it has other limits.
CudaExec with_limits(int multiprocessors, int shared_memory_bytes) {
  test::Cuda const x;
  DeviceLimits limits = x.limits();
  limits.multiprocessors = multiprocessors;
  limits.shared_memory_bytes = std::min(limits.shared_memory_bytes, shared_memory_bytes);
  return CudaExec(x.stream(), limits);
}

/// Scores with keys that lie elsewhere.
template <class Query, class Format>
Scores scores_with(IndexerCase<Query, Format> const& c,
                   CacheView<Space::device, Format> const& keys, test::IndexerLayout layout = {}) {
  using Policy = typename IndexerCase<Query, Format>::Policy;
  test::Cuda const x;
  IndexerInputs<Query, Format> const memory(c, layout);
  auto in = memory.template inputs<Space::device>();
  in.keys = keys;
  Guarded<float> out(static_cast<std::size_t>(c.rows() * c.keys.keys()), test::unwritten);
  REQUIRE(indexer_score(x, Policy{}, in, memory.template batch<Space::device>(), {{0, c.rows()}, 0},
                        make_scores<Space::device>(out.data(), Rows{c.rows()}, Keys{c.keys.keys()}),
                        {})
              .ok());
  test::finish(x);
  Scores result;
  for (index_t row = 0; row < c.rows(); ++row) {
    float const* const first = out.data() + row * c.keys.keys();
    result.emplace_back(first, first + c.lengths[static_cast<std::size_t>(row)]);
  }
  return result;
}

/// A copy of a cache with other strides and at another address; what lies between is NaN.
template <class Format>
class Moved {
 public:
  using Storage = typename Format::storage;

  Moved(CacheView<Space::device, Format> const& from, index_t row_pad, index_t block_pad,
        index_t offset)
      : view_(from) {
    constexpr bool scaled = std::is_same_v<Format, format::IndexKeyE4m3>;
    view_.row_stride = from.lanes + row_pad;
    view_.block_stride = from.block_size * (view_.row_stride + (scaled ? 4 : 0)) + block_pad;
    memory_ = std::vector<Guarded<Storage>>();
    memory_.emplace_back(static_cast<std::size_t>(from.blocks * view_.block_stride + offset));
    Storage* const data = memory_[0].data() + offset;
    for (index_t block = 0; block < from.blocks; ++block) {
      Storage const* const source = from.data + block * from.block_stride;
      Storage* const target = data + block * view_.block_stride;
      for (index_t place = 0; place < from.block_size; ++place) {
        std::copy_n(source + place * from.row_stride, from.lanes,
                    target + place * view_.row_stride);
      }
      if constexpr (scaled) {
        std::copy_n(source + from.block_size * from.row_stride, from.block_size * 4,
                    target + from.block_size * view_.row_stride);
      }
    }
    view_.data = data;
  }

  CacheView<Space::device, Format> const& view() const { return view_; }

 private:
  CacheView<Space::device, Format> view_;
  std::vector<Guarded<Storage>> memory_;
};

/// A prefill chunk of request 0 and decode rows of the others.
template <class Case>
Case mixed_case(index_t heads, index_t lanes, index_t page_size) {
  Case c(heads, {.requests = 3, .keys = 300, .lanes = lanes, .page_size = page_size, .seed = 9});
  for (index_t r = 0; r < 3; ++r) c.keys.write_random(r, 0, 300, 5);
  for (std::uint64_t seed = 0; seed < 13; ++seed) {
    c.add_random_row(static_cast<position_t>(seed < 9 ? 250 + 6 * seed : 300 - seed),
                     static_cast<position_t>(seed < 9 ? 0 : seed % 3), seed);
  }
  return c;
}

/// Sets the stored code of one lane of a key.
template <class Case>
void set_code(Case& c, index_t position, index_t lane, std::uint8_t code) {
  auto const view = c.keys.view();
  auto* const data = const_cast<std::byte*>(view.data);
  index_t const slot = c.keys.slot(0, position);
  data[slot / view.block_size * view.block_stride + slot % view.block_size * view.row_stride +
       lane] = std::byte{code};
}

}  // namespace

TEMPLATE_LIST_TEST_CASE("CUDA indexer: tuned and other shapes are within fp32 rounding",
                        "[indexer][cuda]", TensorTypes) {
  for (index_t const heads : {1, 8, 16, 20, 24, 32, 64, 128}) {
    for (index_t const lanes : {128, 64, 80}) {
      if (lanes != 128 && heads % 20 != 0 && heads != 64) continue;
      INFO(heads << " heads, " << lanes << " lanes");
      typename TestType::Case c(heads,
                                {.requests = 2, .keys = 300, .lanes = lanes, .page_size = 64});
      for (index_t r = 0; r < 2; ++r) c.keys.write_random(r, 0, 300, 2);
      c.add_random_row(300, 0, 1);
      c.add_random_row(257, 0, 2);
      c.add_random_row(31, 1, 3);
      check_scores(c, run_scores(test::Cuda{}, c));
    }
  }
}

TEMPLATE_LIST_TEST_CASE("CUDA indexer: bits do not depend on limits, pages or batch",
                        "[indexer][cuda]", TensorTypes) {
  for (auto const& [heads, lanes] : {std::pair<index_t, index_t>{32, 128}, {9, 48}}) {
    using Case = typename TestType::Case;
    auto const c = mixed_case<Case>(heads, lanes, 16);
    auto const want = run_scores(test::Cuda{}, c);
    check_scores(c, want);
    CHECK(run_scores(test::Cuda{}, mixed_case<Case>(heads, lanes, 0)) == want);
    CHECK(run_scores(test::Cuda{}, mixed_case<Case>(heads, lanes, 1)) == want);
    // from 13 rows of a block to 1, from 8 warps to 1, from 2 buffers of a warp to 1
    for (auto const& [multiprocessors, shared] : {std::pair{1, 232448},
                                                  {1, 166912},
                                                  {1, 101376},
                                                  {1, 65536},
                                                  {8, 101376},
                                                  {1000, 49152},
                                                  {1000, 20480}}) {
      auto const x = with_limits(multiprocessors, shared);
      INFO(multiprocessors << " multiprocessors, " << shared << " bytes");
      CHECK(run_scores(x, c) == want);
    }
    for (index_t const row : {0, 12}) {
      CHECK(run_scores(test::Cuda{}, c, {}, 0, {row, 1})[0] == want[static_cast<std::size_t>(row)]);
    }
  }
}

TEMPLATE_LIST_TEST_CASE("CUDA indexer: bits do not depend on alignment", "[indexer][cuda]",
                        TensorTypes) {
  using Case = typename TestType::Case;
  using Format = typename TestType::Format;
  for (index_t const lanes : {128, 48}) {
    Case c(12, {.requests = 2, .keys = 100, .lanes = lanes, .page_size = 16});
    for (index_t r = 0; r < 2; ++r) c.keys.write_random(r, 0, 100, 5);
    for (position_t row = 0; row < 3; ++row) {
      c.add_random_row(98 + row, row / 2, static_cast<std::uint64_t>(row));
    }
    auto const want = run_scores(test::Cuda{}, c);
    check_scores(c, want);
    struct {
      index_t row_pad, block_pad, offset;
    } const places[] = {{0, 0, 1}, {0, 0, 2}, {0, 0, 4}, {0, 0, 8}, {1, 0, 0},
                        {2, 0, 0}, {4, 0, 0}, {8, 0, 0}, {0, 5, 0}, {16, 1, 4}};
    for (auto const& place : places) {
      INFO(place.row_pad << " " << place.block_pad << " " << place.offset);
      Moved<Format> const moved(c.keys.view(), place.row_pad, place.block_pad, place.offset);
      CHECK(scores_with(c, moved.view()) == want);
    }
    for (index_t const pad : {1, 2, 4, 8}) {
      CHECK(scores_with(c, c.keys.view(), {.head_pad = pad}) == want);
      CHECK(scores_with(c, c.keys.view(), {.row_pad = pad}) == want);
    }
    CHECK(scores_with(c, c.keys.view(), {.head_major = true}) == want);
  }
}

TEMPLATE_LIST_TEST_CASE("CUDA indexer: every e4m3 code is converted exactly", "[indexer][cuda]",
                        E4m3KeyTypes) {
  for (index_t const lanes : {128, 48}) {
    // key s has code s in the lane that head 0 asks for; weights of both signs see both of them
    typename TestType::Case c(2, {.requests = 1, .keys = 256, .lanes = lanes, .page_size = 64});
    for (index_t s = 0; s < 256; ++s) {
      c.keys.write(0, s, one_hot(lanes, s % lanes, 448));  // the scale is 1
      set_code(c, s, s % lanes, static_cast<std::uint8_t>(s));
    }
    for (index_t lane = 0; lane < lanes; ++lane) {
      auto query = one_hot(2 * lanes, lane);
      query[static_cast<std::size_t>(lanes + lane)] = -1;
      c.add_row(256, 0, query, {1, -2});
    }
    auto const scores = run_scores(test::Cuda{}, c);
    index_t wrong = 0;
    for (index_t s = 0; s < 256; ++s) {
      auto const code = static_cast<std::uint8_t>(s);
      for (index_t lane = 0; lane < lanes; ++lane) {
        float const got = scores[static_cast<std::size_t>(lane)][static_cast<std::size_t>(s)];
        double const value = test::e4m3_value(code);
        double const want = lane != s % lanes && !std::isnan(value)
                                ? 0.0
                                : (std::isnan(value) ? value : (value > 0 ? value : 2 * value));
        bool const good = std::isnan(want) ? std::isnan(got) : static_cast<double>(got) == want;
        wrong += good ? 0 : 1;
      }
    }
    CHECK(wrong == 0);
  }
}

TEMPLATE_LIST_TEST_CASE("CUDA indexer: NaN codes of keys and queries stay where they are",
                        "[indexer][cuda]", E4m3KeyTypes) {
  for (auto const& [heads, lanes] :
       {std::pair<index_t, index_t>{32, 128}, {5, 128}, {17, 80}, {3, 30}}) {
    auto c = mixed_case<typename TestType::Case>(heads, lanes, 16);
    auto want = run_scores(test::Cuda{}, c);
    index_t lane = 0;
    for (index_t const bad : {0, 7, 8, 31, 32, 100, 127, 128, 249}) {
      set_code(c, bad, lane % lanes, bad % 2 == 0 ? 0x7F : 0xFF);
      lane += 13;
      for (std::size_t row = 0; row < 9; ++row) {  // the rows of request 0
        want[row][static_cast<std::size_t>(bad)] = std::nanf("");
      }
      for (std::size_t row = 9; row < 13; ++row) {
        if (c.requests[row] == 0) want[row][static_cast<std::size_t>(bad)] = std::nanf("");
      }
    }
    auto got = run_scores(test::Cuda{}, c);
    for (std::size_t row = 0; row < want.size(); ++row) CHECK(same(got[row], want[row]));
    c.q[static_cast<std::size_t>(3 * heads * lanes + heads * lanes - 1)] = std::nanf("");
    std::fill(want[3].begin(), want[3].end(), std::nanf(""));
    got = run_scores(test::Cuda{}, c);
    for (std::size_t row = 0; row < want.size(); ++row) CHECK(same(got[row], want[row]));
  }
}

TEST_CASE("CUDA indexer: what lies past the longest row is not read", "[indexer][cuda]") {
  // the second page of the request is not mapped to memory that may be read
  IndexerCase<bf16, format::Plain<bf16>> c(
      8, {.requests = 1, .keys = 128, .lanes = 128, .page_size = 64, .spare_pages = 0});
  c.keys.write_random(0, 0, 64, 3);
  c.add_random_row(50, 0, 1);
  c.add_random_row(64, 0, 2);
  auto const want = run_scores(test::Cuda{}, c);
  check_scores(c, want);
  Guarded<bf16> memory(64 * 128);
  auto view = c.keys.view();
  std::copy_n(view.data + c.keys.slot(0, 0) * 128, 64 * 128, memory.data());
  view.data = memory.data() - c.keys.slot(0, 0) * 128;  // of two blocks one exists
  CHECK(scores_with(c, view) == want);
}

TEST_CASE("CUDA indexer: a captured call is replayed with new lengths, pages and data",
          "[indexer][cuda]") {
  using Case = IndexerCase<e4m3, format::IndexKeyE4m3>;
  auto c = mixed_case<Case>(32, 128, 16);
  index_t const width = c.keys.keys();
  test::Cuda const x;
  IndexerInputs<e4m3, format::IndexKeyE4m3> const memory(c);
  auto const in = memory.inputs<Space::device>();
  auto const batch = memory.batch<Space::device>();
  auto* const lengths = const_cast<position_t*>(batch.lengths.data_handle());
  Guarded<float> out(static_cast<std::size_t>(c.rows() * width), test::unwritten);
  cuda_test::Graph const graph(x, [&] {
    REQUIRE(indexer_score(x, Case::Policy{}, in, batch, {{0, c.rows()}, 20},
                          make_scores<Space::device>(out.data(), Rows{c.rows()}, Keys{width}), {})
                .ok());
  });
  CHECK(graph.only_device_work());
  for (std::uint64_t turn = 0; turn < 3; ++turn) {
    for (index_t row = 0; row < c.rows(); ++row) {
      auto const r = static_cast<std::size_t>(row);
      c.lengths[r] =
          static_cast<position_t>((row * 37 + 5 + 100 * static_cast<index_t>(turn)) % (width + 1));
      lengths[row] = c.lengths[r];
    }
    std::swap(c.keys.entry(1, 0), c.keys.entry(1, 3));
    for (index_t r = 0; r < 3; ++r) c.keys.write_random(r, 0, width, turn);
    out.fill(test::unwritten);
    graph.replay();
    auto const want = run_scores(x, c, {}, 20);
    for (index_t row = 0; row < c.rows(); ++row) {
      auto const& scores = want[static_cast<std::size_t>(row)];
      CHECK(std::equal(scores.begin(), scores.end(), out.data() + row * width));
    }
  }
}

TEST_CASE("CUDA indexer: refusals name the reason", "[indexer][cuda]") {
  test::Cuda const x;
  IndexerCase<bf16, format::Plain<bf16>> c(128, {.requests = 1, .keys = 64, .lanes = 256});
  c.keys.write_random(0, 0, 64, 1);
  c.add_random_row(64, 0, 1);
  IndexerInputs<bf16, format::Plain<bf16>> const memory(c);
  auto const refuses = [&](CudaExec const& exec, std::string_view part) {
    decltype(c)::Policy const policy{};
    auto const in = memory.inputs<Space::device>();
    auto const batch = memory.batch<Space::device>();
    Guarded<float> out(64, test::unwritten);
    auto const scores = make_scores<Space::device>(out.data(), Rows{1}, Keys{64});
    auto const size = indexer_workspace(exec, policy, c.shape(1));
    REQUIRE_FALSE(size.has_value());
    for (Status const& status : {size.error(), indexer_check(exec, policy, in, batch, c.shape(1)),
                                 indexer_score(exec, policy, in, batch, {{0, 1}, 0}, scores, {})}) {
      CHECK(status.code == Errc::unsupported);
      CHECK(std::string_view(status.what).find(part) != std::string_view::npos);
    }
    test::finish(exec);
    CHECK(out[0] == test::unwritten_value<float>());
  };
  refuses(with_limits(100, 65536), "shared memory");
  DeviceLimits old = x.limits();
  old.compute_capability = 75;
  refuses(CudaExec(x.stream(), old), "compute capability");
}

// ---- types of the user

namespace mine {

/// A 16-bit fixed-point element.
struct Fixed {
  std::int16_t eighths;
};
INDEXSHARE_HD inline float to_float(Fixed value) noexcept {
  return static_cast<float>(value.eighths) / 8;
}

/// Rows that store their lanes from last to first.
struct Backward {
  using storage = float;
};
template <Space S>
INDEXSHARE_HD inline void decode_row(CacheView<S, Backward> const& cache, index_t slot,
                                     float* out) noexcept {
  float const* const row = cache.row(slot);
  for (index_t i = 0; i < cache.lanes; ++i) out[i] = row[cache.lanes - 1 - i];
}

}  // namespace mine

TEST_CASE("CUDA indexer: elements and key formats of the user", "[indexer][cuda]") {
  constexpr index_t heads = 3;
  constexpr index_t lanes = 20;
  constexpr index_t keys = 70;
  Guarded<mine::Fixed> q(heads * lanes);
  Guarded<float> w(heads);
  Guarded<float> k(keys * lanes);
  Guarded<position_t> length(1);
  Guarded<position_t> request(1);
  Guarded<float> out(keys, test::unwritten);
  length[0] = keys - 1;
  request[0] = 0;
  test::Random random(3);
  for (std::size_t i = 0; i < q.size(); ++i) {
    q[i].eighths = static_cast<std::int16_t>(static_cast<int>(random.below(65)) - 32);
  }
  for (std::size_t i = 0; i < k.size(); ++i) k[i] = static_cast<float>(random.below(9)) - 4;
  for (std::size_t i = 0; i < w.size(); ++i) w[i] = static_cast<float>(i) - 1.5f;

  using Policy = ReluDotIndexer<mine::Fixed, mine::Backward>;
  test::Cuda const x;
  static_assert(IndexerPolicy<Policy, CudaExec>);
  Policy::inputs<Space::device> const in{
      make_query<Space::device>(q.data(), Rows{1}, Heads{heads}, HeadDim{lanes}),
      make_head_weights<Space::device>(w.data(), Rows{1}, Heads{heads}),
      {k.data(), 1, keys, lanes, keys * lanes, lanes, {}}};
  auto const table = make_contiguous_table<Space::device>(Keys{keys});
  RowBatch<Space::device> const batch{make_lengths<Space::device>(length.data(), Rows{1}),
                                      make_lengths<Space::device>(request.data(), Rows{1}), table,
                                      table};
  REQUIRE(indexer_score(x, Policy{}, in, batch, {{0, 1}, 0},
                        make_scores<Space::device>(out.data(), Rows{1}, Keys{keys}), {})
              .ok());
  test::finish(x);
  index_t wrong = 0;
  for (std::size_t s = 0; s + 1 < keys; ++s) {
    float sum = 0;  // of eighths: exact
    for (std::size_t h = 0; h < heads; ++h) {
      float dot = 0;
      for (std::size_t d = 0; d < lanes; ++d) {
        dot += to_float(q[h * lanes + d]) * k[s * lanes + (lanes - 1 - d)];
      }
      sum += w[h] * std::max(dot, 0.0f);
    }
    wrong += out[s] == sum ? 0 : 1;
  }
  CHECK(wrong == 0);
  CHECK(out[keys - 1] == test::unwritten_value<float>());
}
