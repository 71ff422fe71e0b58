// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/frontend.hpp>
#include <indexshare/indexshare.hpp>

#include <catch2/catch_test_macros.hpp>

#include "memory.hpp"
#include "random.hpp"
#include "status_text.hpp"

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

/// @file A tiny model for the front end: widths by hand, random weights, tokens and activations.
/// All memory has guards, and what nobody wrote is NaN.

namespace frontend_test {

using namespace indexshare;

inline constexpr Space host = Space::host;

constexpr std::size_t to_size(index_t n) { return static_cast<std::size_t>(n); }

inline void require_ok(Status const& status) {
  CAPTURE(status);
  REQUIRE(status.ok());
}

/// The miniature of R019. All widths that could be mixed up differ, and so do the epsilons.
inline ModelConfig tiny_model() {
  ModelConfig config;
  config.hidden_size = 24;
  config.num_attention_heads = 3;
  config.q_lora_rank = 20;
  config.kv_lora_rank = 32;
  config.qk_nope_head_dim = 12;
  config.qk_rope_head_dim = 8;
  config.v_head_dim = 16;
  config.index_n_heads = 2;
  config.index_head_dim = 16;
  config.index_topk = 4;
  config.norm_eps = {1e-2, 1e-3, 1e-4};
  config.rope.theta = 100;
  config.rope.layout = RopeLayout::interleaved;
  config.indexer_rope = {RopeLayout::half_split, RopeLanes::first, 8};
  return config;
}

inline ModelConfig tiny_model(index_t rope, index_t heads) {
  ModelConfig config = tiny_model();
  config.qk_rope_head_dim = config.indexer_rope.dims = rope;
  if (rope == 0) config.rope.theta = 0;
  config.num_attention_heads = heads;
  return config;
}

/// Hy4's differences: rotated lanes last and paired by halves, a sink, a gate.
inline ModelConfig tiny_hy_v4() {
  ModelConfig config = tiny_model();
  config.rope.layout = RopeLayout::half_split;
  config.indexer_rope.lanes = RopeLanes::last;
  config.learnable_sink = config.gated_output = true;
  return config;
}

/// A weight matrix, its rows `pad` elements apart.
template <class T>
class Matrix {
 public:
  Matrix(index_t out, index_t in, index_t pad = 0)
      : out_(out), in_(in), step_(in + pad), memory_(to_size(out * step_)) {}

  T& operator()(index_t o, index_t i) { return memory_[to_size(o * step_ + i)]; }
  float at(index_t o, index_t i) const { return to_float(memory_[to_size(o * step_ + i)]); }

  Matrix& fill(auto const& value) {
    for (index_t o = 0; o < out_; ++o) {
      for (index_t i = 0; i < in_; ++i) (*this)(o, i) = from_float<T>(value(o, i));
    }
    return *this;
  }
  Matrix& identity() {
    return fill([](index_t o, index_t i) { return o == i ? 1.0f : 0.0f; });
  }
  /// Normal numbers that leave the size of an input about as it is.
  Matrix& random(test::Random& random) {
    auto const scale = 1 / std::sqrt(static_cast<float>(in_ > 0 ? in_ : 1));
    return fill([&](index_t, index_t) { return random.normal() * scale; });
  }

  MatrixView<host, T> view() const {
    return make_strided<host, T const, 2>(memory_.data(), {out_, in_}, {step_ > 0 ? step_ : 1, 1});
  }

 private:
  index_t out_, in_, step_;
  test::Guarded<T> memory_;
};

/// A gain, bias or sink.
class Vector {
 public:
  explicit Vector(index_t n) : memory_(to_size(n)) {}
  Vector& fill(std::vector<float> const& values) {
    REQUIRE(values.size() == memory_.size());
    std::copy(values.begin(), values.end(), memory_.data());
    return *this;
  }
  Vector& constant(float value) { return fill(std::vector<float>(memory_.size(), value)); }
  /// Numbers around `mean`, none of which is the value that hides a missing step.
  Vector& random(test::Random& random, float mean) {
    for (std::size_t i = 0; i < memory_.size(); ++i) {
      memory_[i] = mean + random.uniform(0.1f, 0.4f) * (i % 2 == 0 ? 1.0f : -1.0f);
    }
    return *this;
  }
  VectorView<host> view() const {
    return make_dense<host, float const, 1>(memory_.data(), {static_cast<index_t>(memory_.size())});
  }

 private:
  test::Guarded<float> memory_;
};

template <class T = float>
struct OwnedIndexer {
  Matrix<T> wq_b;
  Matrix<T> wk;
  Vector k_norm_weight;
  Vector k_norm_bias;
  Matrix<float> weights_proj;

  OwnedIndexer(ModelConfig const& c, index_t pad)
      : wq_b(c.index_n_heads * c.index_head_dim, c.q_lora_rank, pad),
        wk(c.index_head_dim, c.hidden_size, pad),
        k_norm_weight(c.index_head_dim),
        k_norm_bias(c.index_head_dim),
        weights_proj(c.index_n_heads, c.hidden_size, pad) {}

  OwnedIndexer& random(test::Random& random) {
    wq_b.random(random);
    wk.random(random);
    k_norm_weight.random(random, 1);
    k_norm_bias.random(random, 0);
    weights_proj.random(random);
    return *this;
  }
  IndexerWeights<host, T> view() const {
    return {wq_b.view(), wk.view(), k_norm_weight.view(), k_norm_bias.view(), weights_proj.view()};
  }
};

/// Weights of one layer; a shared one has no indexer.
template <class T = float>
struct OwnedWeights {
  Matrix<T> q_a_proj;
  Vector q_a_layernorm;
  Matrix<T> q_b_proj;
  Matrix<T> kv_a_proj;
  Vector kv_a_layernorm;
  Matrix<T> kv_b_proj;
  Matrix<T> o_proj;
  Matrix<T> gate_proj;
  Vector sinks;
  std::optional<OwnedIndexer<T>> indexer;

  explicit OwnedWeights(ModelConfig const& c, bool full = true, index_t pad = 0)
      : q_a_proj(c.q_lora_rank, c.hidden_size, pad),
        q_a_layernorm(c.q_lora_rank),
        q_b_proj(c.num_attention_heads * qk_head_dim(c), c.q_lora_rank, pad),
        kv_a_proj(c.kv_lora_rank + c.qk_rope_head_dim, c.hidden_size, pad),
        kv_a_layernorm(c.kv_lora_rank),
        kv_b_proj(c.num_attention_heads * (c.qk_nope_head_dim + c.v_head_dim), c.kv_lora_rank, pad),
        o_proj(c.hidden_size, c.num_attention_heads * c.v_head_dim, pad),
        gate_proj(c.gated_output ? c.num_attention_heads * c.v_head_dim : 0,
                  c.gated_output ? c.hidden_size : 0, pad),
        sinks(c.learnable_sink ? c.num_attention_heads : 0) {
    if (full) indexer.emplace(c, pad);
  }

  OwnedWeights& random(std::uint64_t seed) {
    test::Random random(seed);
    for (Matrix<T>* matrix : {&q_a_proj, &q_b_proj, &kv_a_proj, &kv_b_proj, &o_proj, &gate_proj}) {
      matrix->random(random);
    }
    q_a_layernorm.random(random, 1);
    kv_a_layernorm.random(random, 1);
    sinks.random(random, 0);
    if (indexer) indexer->random(random);
    return *this;
  }
  AttentionWeights<host, T> view() const {
    AttentionWeights<host, T> weights{q_a_proj.view(),  q_a_layernorm.view(),  q_b_proj.view(),
                                      kv_a_proj.view(), kv_a_layernorm.view(), kv_b_proj.view(),
                                      o_proj.view(),    gate_proj.view(),      sinks.view()};
    if (indexer) weights.indexer = indexer->view();
    return weights;
  }
};

template <class T = float>
OwnedWeights<T> random_weights(ModelConfig const& config, bool full = true, index_t pad = 0) {
  OwnedWeights<T> weights(config, full, pad);
  weights.random(7);
  return weights;
}

/// Hidden states and rotary positions of the tokens `first`, `first + 1`, ... of a request. A
/// token's numbers depend on nothing but its position; the rotary one is another.
class Tokens {
 public:
  static constexpr position_t rotary_start = 37;

  Tokens(ModelConfig const& config, index_t first, index_t count, index_t pad = 0)
      : count_(count),
        lanes_(config.hidden_size),
        step_(config.hidden_size + pad),
        hidden_(to_size(count * step_)),
        positions_(to_size(count)) {
    for (index_t t = 0; t < count; ++t) {
      test::Random random(static_cast<std::uint64_t>(1000 + first + t));
      for (index_t i = 0; i < lanes_; ++i) hidden_[to_size(t * step_ + i)] = random.normal();
      positions_[to_size(t)] = rotary_start + static_cast<position_t>(first + t);
    }
  }
  /// Rows and positions by hand.
  Tokens(std::vector<std::vector<float>> const& rows, std::vector<position_t> const& positions)
      : count_(static_cast<index_t>(rows.size())),
        lanes_(static_cast<index_t>(rows.at(0).size())),
        step_(lanes_),
        hidden_(rows.size() * rows[0].size()),
        positions_(std::span<position_t const>(positions)) {
    for (std::size_t t = 0; t < rows.size(); ++t) {
      std::copy(rows[t].begin(), rows[t].end(), hidden_.data() + t * rows[0].size());
    }
  }

  index_t count() const { return count_; }
  float* row(index_t t) { return hidden_.data() + t * step_; }
  Tensor<host, float const, 2> hidden() const {
    return make_strided<host, float const, 2>(hidden_.data(), {count_, lanes_}, {step_, 1});
  }
  PositionView<host> positions() const {
    return make_lengths<host>(positions_.data(), Rows{count_});
  }

 private:
  index_t count_, lanes_, step_;
  test::Guarded<float> hidden_;
  test::Guarded<position_t> positions_;
};

/// A side of activations in memory of exactly the size that its walk counts.
template <class Side>
class Carved {
 public:
  template <class Carve>
  explicit Carved(Carve const& carve) : memory_(counted(carve)) {
    WorkspaceCarver carver(memory_.get());
    side = carve(carver);
    REQUIRE(carver.size().bytes == memory_.get().bytes);
  }
  bool intact() const { return memory_.intact(); }
  /// Whether nobody wrote into it.
  bool untouched() {
    auto const* const bytes = static_cast<std::byte const*>(memory_.get().data);
    return std::all_of(bytes, bytes + memory_.get().bytes,
                       [](std::byte b) { return b == test::nan_poison; });
  }

  Side side;

 private:
  template <class Carve>
  static WorkspaceSize counted(Carve const& carve) {
    WorkspaceCarver carver;
    static_cast<void>(carve(carver));
    return carver.size();
  }
  test::Scratch memory_;
};

struct Activations {
  Carved<QuerySide<host>> queries;
  Carved<KeySide<host>> keys;
  Carved<OutputSide<host>> outputs;

  Activations(ModelConfig const& config, index_t rows, bool full = true, Keep keep = Keep::results)
      : queries([&](WorkspaceCarver& carver) {
          return carve_query_side<host>(carver, config, Rows{rows}, full, keep);
        }),
        keys([&](WorkspaceCarver& carver) {
          return carve_key_side<host>(carver, config, Rows{rows}, full, keep);
        }),
        outputs([&](WorkspaceCarver& carver) {
          return carve_output_side<host>(carver, config, Rows{rows}, keep);
        }) {}

  bool intact() const { return queries.intact() && keys.intact() && outputs.intact(); }
  bool untouched() { return queries.untouched() && keys.untouched() && outputs.untouched(); }
};

/// The elements of a view in order.
template <class View>
std::vector<float> values(View const& view) {
  std::vector<float> out;
  for (index_t r = 0; r < view.extent(0); ++r) {
    if constexpr (View::rank() == 2) {
      for (index_t i = 0; i < view.extent(1); ++i) out.push_back(view(r, i));
    } else {
      for (index_t h = 0; h < view.extent(1); ++h) {
        for (index_t i = 0; i < view.extent(2); ++i) out.push_back(view(r, h, i));
      }
    }
  }
  return out;
}

/// The bits of floats, so that NaN equals itself and -0 is not 0.
inline std::vector<std::uint32_t> bits_of(std::span<float const> floats) {
  std::vector<std::uint32_t> bits;
  for (float const value : floats) bits.push_back(std::bit_cast<std::uint32_t>(value));
  return bits;
}
template <class View>
std::vector<std::uint32_t> bits(View const& view) {
  return bits_of(values(view));
}

/// Whether every value is within `tolerance` of the expected one, relative above 1; fails with the
/// first that is not.
inline void check_close(std::span<float const> got, std::span<double const> want,
                        double tolerance) {
  REQUIRE(got.size() == want.size());
  for (std::size_t i = 0; i < got.size(); ++i) {
    double const error = std::abs(static_cast<double>(got[i]) - want[i]);
    if (error <= tolerance * std::max(1.0, std::abs(want[i]))) continue;
    INFO("value " << i << ": " << got[i] << ", expected " << want[i]);
    FAIL_CHECK();
    return;
  }
  SUCCEED();
}

}  // namespace frontend_test
