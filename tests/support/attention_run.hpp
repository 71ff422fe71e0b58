// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/attention/mla.hpp>
#if defined(INDEXSHARE_TEST_CUDA)
#include <indexshare/cuda/attention.cuh>
#include <indexshare/cuda/selection.cuh>
#endif
#include <indexshare/host/attention.hpp>
#include <indexshare/reference.hpp>

#include <catch2/catch_test_macros.hpp>

#include "caches.hpp"
#include "executors.hpp"
#include "memory.hpp"
#include "oracle.hpp"
#include "random.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <limits>
#include <span>
#include <type_traits>
#include <vector>

/// @file Attention cases that run on any executor.

namespace test {

/// Query rows, each with its own list of slots, against a KV cache.
template <class Query, class Format>
struct AttentionCase {
  index_t heads;
  index_t value_dim;
  index_t width;  ///< entries of a plan row
  PagedCache<Format> kv;
  float scale = 0.125f;
  std::vector<float> sink{};
  std::vector<float> q{};  ///< [rows][heads][key_dim], as the query type holds it
  std::vector<std::vector<position_t>> slots{};  ///< shorter rows are filled up with stale slots
  std::vector<position_t> counts{};
  std::vector<position_t> lengths{};
  std::vector<position_t> requests{};

  AttentionCase(index_t head_count, index_t value_lanes, index_t entries, CacheShape shape,
                Format format = {})
      : heads(head_count), value_dim(value_lanes), width(entries), kv(shape, format) {}

  index_t rows() const { return static_cast<index_t>(slots.size()); }
  index_t key_dim() const { return kv.lanes(); }

  void add_row(std::vector<float> query, std::vector<position_t> row, position_t count,
               position_t length = 0, position_t request = 0) {
    REQUIRE(query.size() == static_cast<std::size_t>(heads * key_dim()));
    for (float const value : query) {
      q.push_back(indexshare::to_float(indexshare::from_float<Query>(value)));
    }
    slots.push_back(std::move(row));
    counts.push_back(count);
    lengths.push_back(length);
    requests.push_back(request);
  }
  /// A random query for all entries of `row`.
  void add_random_row(std::uint64_t seed, std::vector<position_t> row) {
    auto const count = static_cast<position_t>(row.size());
    add_row(Random(seed).normals(static_cast<std::size_t>(heads * key_dim())), std::move(row),
            count);
  }
  /// A random query for the given logical positions of a request.
  void add_positions(std::uint64_t seed, position_t request, position_t length,
                     std::vector<position_t> const& positions) {
    std::vector<position_t> row;
    for (position_t const position : positions) row.push_back(kv.slot(request, position));
    add_random_row(seed, std::move(row));
    lengths.back() = length;
    requests.back() = request;
  }

  std::span<float const> query(index_t row, index_t head) const {
    return std::span<float const>(q).subspan(
        static_cast<std::size_t>((row * heads + head) * key_dim()),
        static_cast<std::size_t>(key_dim()));
  }

  /// What a token's slot holds; tokens are found by their slot, page by page.
  std::vector<std::span<float const>> gather(index_t row) const {
    auto const r = static_cast<std::size_t>(row);
    index_t const count = std::clamp<index_t>(counts[r], 0, width);
    std::vector<std::span<float const>> keys;
    for (index_t j = 0; j < count; ++j) {
      position_t const slot = slots[r][static_cast<std::size_t>(j)];
      for (index_t request = 0; request < kv.requests(); ++request) {
        for (index_t first = 0; first < kv.keys(); first += kv.page_size()) {
          index_t const place = slot - static_cast<index_t>(kv.slot(request, first));
          if (place < 0 || place >= kv.page_size()) continue;
          keys.push_back(kv.value(request, first + place));
        }
      }
    }
    return keys;
  }
  std::vector<std::span<float const>> gather_dense(index_t row) const {
    auto const r = static_cast<std::size_t>(row);
    std::vector<std::span<float const>> keys;
    for (index_t s = 0; s < std::clamp<index_t>(lengths[r], 0, kv.keys()); ++s) {
      keys.push_back(kv.value(requests[r], s));
    }
    return keys;
  }
  Attended expected(index_t row, index_t head, bool dense) const {
    return attend(query(row, head), dense ? gather_dense(row) : gather(row), value_dim,
                  static_cast<double>(scale),
                  sink.empty() ? nullptr : &sink[static_cast<std::size_t>(head)]);
  }

  indexshare::Shape shape() const {
    indexshare::Shape shape;
    shape.rows = rows();
    shape.keys = kv.keys();
    shape.top_k = width;
    shape.heads = heads;
    shape.key_dim = key_dim();
    shape.value_dim = value_dim;
    return shape;
  }
};

template <class Out>
struct AttentionResult {
  std::vector<Out> out{};    ///< [rows][heads][value_dim]
  std::vector<float> lse{};  ///< [rows][heads], empty if none was asked for
};

template <class T>
bool same_bits(std::vector<T> const& a, std::vector<T> const& b) {
  return a.size() == b.size() &&
         (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0);
}
template <class Out>
bool same_bits(AttentionResult<Out> const& a, AttentionResult<Out> const& b) {
  return same_bits(a.out, b.out) && same_bits(a.lse, b.lse);
}

/// How an attention call is made.
struct AttentionLayout {
  bool lse = true;
  index_t query_pad = 0;    ///< elements between query heads
  index_t out_pad = 0;      ///< elements between output heads
  index_t slot_pad = 0;     ///< entries between plan rows
  index_t lse_pad = 0;      ///< between rows of lse
  bool head_major = false;  ///< queries as [heads][rows][lanes] in memory
  std::byte workspace_fill = nan_poison;
};

/// The memory of an attention run.
template <class Query, class Format, class Out>
class AttentionMemory {
 public:
  using Case = AttentionCase<Query, Format>;

  explicit AttentionMemory(Case const& c, AttentionLayout layout = {})
      : case_(c),
        layout_(layout),
        q_(elements(c.rows() * c.heads * (c.key_dim() + layout.query_pad))),
        sink_(std::span<float const>(c.sink)),
        slots_(elements(c.rows() * (c.width + layout.slot_pad))),
        counts_(std::span<position_t const>(c.counts)),
        lengths_(std::span<position_t const>(c.lengths)),
        requests_(std::span<position_t const>(c.requests)),
        out_(elements(c.rows() * c.heads * (c.value_dim + layout.out_pad)), unwritten),
        lse_(elements(layout.lse ? c.rows() * (c.heads + layout.lse_pad) : 0), unwritten) {
    for (index_t row = 0; row < c.rows(); ++row) {
      for (index_t head = 0; head < c.heads; ++head) {
        for (index_t lane = 0; lane < c.key_dim(); ++lane) {
          q_[elements(row * query_strides()[0] + head * query_strides()[1] + lane)] =
              indexshare::from_float<Query>(c.query(row, head)[elements(lane)]);
        }
      }
      auto const& entries = c.slots[elements(row)];
      for (index_t j = 0; j < c.width + layout.slot_pad; ++j) {
        // after the list: wild, stale but in the cache, negative
        position_t const stale =
            j % 3 == 0 ? position_t{1} << 30 : (j % 3 == 1 ? stale_slot() : -7);
        slots_[elements(row * (c.width + layout.slot_pad) + j)] =
            j < static_cast<index_t>(entries.size()) ? entries[elements(j)] : stale;
      }
    }
  }

  template <indexshare::Space S = space>
  auto inputs() const {
    return indexshare::MlaInputs<Query, Format, S>{
        indexshare::make_strided<S, Query const, 3>(
            q_.data(), {case_.rows(), case_.heads, case_.key_dim()}, query_strides()),
        case_.kv.template view<S>(), case_.scale,
        case_.sink.empty()
            ? indexshare::SinkView<S>{}
            : indexshare::make_sink<S>(sink_.data(), indexshare::Heads{case_.heads})};
  }
  template <indexshare::Space S = space>
  auto outputs() {
    index_t const step = case_.value_dim + layout_.out_pad;
    return indexshare::MlaOutputs<Out, S>{
        indexshare::make_strided<S, Out, 3>(out_.data(),
                                            {case_.rows(), case_.heads, case_.value_dim},
                                            {case_.heads * step, step, 1}),
        layout_.lse
            ? indexshare::make_strided<S, float, 2>(lse_.data(), {case_.rows(), case_.heads},
                                                    {case_.heads + layout_.lse_pad, 1})
            : indexshare::LseView<S>{}};
  }
  template <indexshare::Space S = space>
  indexshare::GroupPlan<S> plan() const {
    return {indexshare::make_strided<S, position_t const, 2>(
                slots_.data(), {case_.rows(), case_.width}, {case_.width + layout_.slot_pad, 1}),
            indexshare::make_lengths<S>(counts_.data(), indexshare::Rows{case_.rows()})};
  }
  template <indexshare::Space S = space>
  indexshare::RowBatch<S> batch() const {
    indexshare::Rows const rows{case_.rows()};
    return {indexshare::make_lengths<S>(lengths_.data(), rows),
            indexshare::make_lengths<S>(requests_.data(), rows),
            {},
            case_.kv.template pages<S>()};
  }

  bool untouched() const {
    auto const blank = [](auto const& memory) {
      auto const* const bytes = reinterpret_cast<std::byte const*>(memory.data());
      return std::all_of(bytes, bytes + memory.bytes(), [](std::byte b) { return b == unwritten; });
    };
    return blank(out_) && blank(lse_);
  }

  /// The outputs, packed; checks what lies between and around them.
  AttentionResult<Out> take() const {
    CHECK((out_.intact() && lse_.intact()));
    AttentionResult<Out> result;
    index_t stray = 0;
    auto const blank = unwritten_value<Out>();
    auto const blank_lse = unwritten_value<float>();
    index_t const step = case_.value_dim + layout_.out_pad;
    for (index_t i = 0; i < case_.rows() * case_.heads * step; ++i) {
      Out const& value = out_[elements(i)];
      if (i % step < case_.value_dim) {
        result.out.push_back(value);
      } else {
        stray += std::memcmp(&value, &blank, sizeof(Out)) != 0 ? 1 : 0;
      }
    }
    index_t const lse_step = case_.heads + layout_.lse_pad;
    for (index_t i = 0; i < static_cast<index_t>(lse_.size()); ++i) {
      float const& value = lse_[elements(i)];
      if (i % lse_step < case_.heads) {
        result.lse.push_back(value);
      } else {
        stray += std::memcmp(&value, &blank_lse, sizeof(float)) != 0 ? 1 : 0;
      }
    }
    CHECK(stray == 0);
    return result;
  }

 private:
  static std::size_t elements(index_t n) { return static_cast<std::size_t>(n); }
  cuda::std::array<index_t, 3> query_strides() const {
    index_t const step = case_.key_dim() + layout_.query_pad;
    if (layout_.head_major) return {step, std::max<index_t>(case_.rows(), 1) * step, 1};
    return {case_.heads * step, step, 1};
  }
  position_t stale_slot() const { return static_cast<position_t>(case_.kv.slots() - 1); }

  Case const& case_;
  AttentionLayout layout_;
  Guarded<Query> q_;
  Guarded<float> sink_;
  Guarded<position_t> slots_;
  Guarded<position_t> counts_;
  Guarded<position_t> lengths_;
  Guarded<position_t> requests_;
  Guarded<Out> out_;
  Guarded<float> lse_;
};

/// The report of `validate`, on the host.
template <indexshare::HostSpaceExecutor X>
indexshare::SelectionReport validate_now(X const& x, indexshare::GroupPlan<X::space> const& plan,
                                         index_t cache_slots,
                                         indexshare::LengthView<X::space> const& lengths,
                                         indexshare::Shape const& shape) {
  return validate(x, plan, cache_slots, lengths, shape);
}
#if defined(INDEXSHARE_TEST_CUDA)
inline indexshare::SelectionReport validate_now(
    indexshare::CudaExec const& x, indexshare::GroupPlan<indexshare::Space::device> const& plan,
    index_t cache_slots, indexshare::LengthView<indexshare::Space::device> const& lengths,
    indexshare::Shape const& shape) {
  Guarded<indexshare::SelectionReport> report(1);
  REQUIRE(validate(x, plan, cache_slots, lengths, shape, report.data()).ok());
  finish(x);
  return report[0];
}
#endif

/// Runs sparse (or dense) attention with exactly the workspace that the size query names.
template <class Out = float, bool Dense = false, class X, class Query, class Format>
AttentionResult<Out> run_attention(X const& x, AttentionCase<Query, Format> const& c,
                                   AttentionLayout layout = {}) {
  using Policy = std::conditional_t<Dense, indexshare::DenseMla<Query, Format, Out>,
                                    indexshare::SparseMla<Query, Format, Out>>;
  constexpr auto on = X::space;
  AttentionMemory<Query, Format, Out> memory(c, layout);
  auto const shape = c.shape();
  auto const checked =
      attention_check(x, Policy{}, memory.template inputs<on>(), memory.template outputs<on>(),
                      memory.template batch<on>(), shape);
  INFO(checked.what << ", expected " << checked.expected << ", got " << checked.got);
  REQUIRE(checked.ok());
  auto const need = attention_workspace(x, Policy{}, shape);
  REQUIRE(need.has_value());
  Scratch workspace(*need, layout.workspace_fill);
  auto const plan = Dense ? indexshare::GroupPlan<on>{} : memory.template plan<on>();
  REQUIRE(attention_run(x, Policy{}, memory.template inputs<on>(), memory.template batch<on>(),
                        {0, c.rows()}, plan, memory.template outputs<on>(), shape, workspace.get())
              .ok());
  finish(x);
  CHECK(workspace.intact());
  return memory.take();
}

/// Half a unit in the last place of an output, relative, and half of the smallest step.
template <class Out>
struct Rounding;
template <>
struct Rounding<float> {
  static constexpr double relative = 0x1p-24, absolute = 0;
};
template <>
struct Rounding<indexshare::bf16> {
  static constexpr double relative = 0x1p-8, absolute = 0;
};
template <>
struct Rounding<indexshare::fp16> {
  static constexpr double relative = 0x1p-11, absolute = 0x1p-25;
};

/// What the weights lose to the type that multiplies them, relative to the magnitude of the terms.
template <class Query, class Format>
double weight_rounding([[maybe_unused]] indexshare::Shape const& shape) {
#if defined(INDEXSHARE_TEST_CUDA)
  constexpr auto operands = indexshare::attention_operands<Query, Format>();
  if (!indexshare::detail::on_tensor_cores(operands, shape)) return 0;
  if (operands == indexshare::AttentionOperands::e4m3) return 0x1p-10;
  return std::is_same_v<Query, indexshare::fp16> ? 0x1p-11 : 0x1p-8;
#else
  return 0;
#endif
}

/// Compares with the oracle that gathers.
template <bool Dense = false, class Query, class Format, class Out>
void check_attention(AttentionCase<Query, Format> const& c, AttentionResult<Out> const& got) {
  for (index_t row = 0; row < c.rows(); ++row) {
    for (index_t head = 0; head < c.heads; ++head) {
      Attended const want = c.expected(row, head, Dense);
      auto const at = static_cast<std::size_t>(row * c.heads + head);
      INFO("row " << row << ", head " << head);
      if (!got.lse.empty()) {
        double const lse = static_cast<double>(got.lse[at]);
        bool const close =
            std::isinf(want.lse) ? lse == want.lse : std::abs(lse - want.lse) <= want.lse_tolerance;
        INFO("lse " << lse << ", expected " << want.lse);
        if (!close) FAIL_CHECK();
      }
      for (index_t v = 0; v < c.value_dim; ++v) {
        auto const i = static_cast<std::size_t>(v);
        double const value = static_cast<double>(
            indexshare::to_float(got.out[at * static_cast<std::size_t>(c.value_dim) + i]));
        double const before_rounding =
            want.out_tolerance[i] + weight_rounding<Query, Format>(c.shape()) * want.magnitudes[i];
        double const bound = before_rounding + Rounding<Out>::absolute +
                             Rounding<Out>::relative * (std::abs(want.out[i]) + before_rounding);
        if (std::abs(value - want.out[i]) <= bound) continue;
        INFO("lane " << v << ": " << value << ", expected " << want.out[i] << " +- " << bound);
        FAIL_CHECK();
        return;
      }
    }
  }
  SUCCEED();
}

}  // namespace test
