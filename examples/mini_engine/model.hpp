// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "backend.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>

/// @file A model that costs nothing to own: weights are a hash, projections read two lanes of a
/// small hidden state per output lane. What matters here is real: every number depends on the
/// layer, the token, its position and all that attention returned before, so that one wrong
/// selection changes what comes after; and a row's numbers do not depend on the rows beside it.

namespace mini {

constexpr int hidden_width = 32;
constexpr int vocabulary = 256;
using Hidden = std::array<float, hidden_width>;

inline std::uint32_t mix(std::uint32_t a, std::uint32_t b) {
  std::uint32_t x = a * 0x9E3779B1u ^ (b + 0x7F4A7C15u);
  x = (x ^ x >> 16) * 0x7FEB352Du;
  x = (x ^ x >> 15) * 0x846CA68Bu;
  return x ^ x >> 16;
}

inline Bf16 to_bf16(float value) {
  auto const bits = std::bit_cast<std::uint32_t>(value);
  return static_cast<Bf16>((bits + 0x7FFFu + (bits >> 16 & 1)) >> 16);
}

class Model {
 public:
  Model(Sizes const& sizes, std::uint32_t seed) : sizes_(sizes), seed_(seed) {}

  Hidden embed(int token, int position) const {
    Hidden hidden;
    for (std::size_t lane = 0; lane < hidden_width; ++lane) {
      hidden[lane] = unit(Part::token, token, lane) + 0.5f * unit(Part::position, position, lane);
    }
    return normalised(hidden);
  }

  /// What the MTP layer reads at a position: the trunk's (or the draft's) hidden state there and
  /// the token that follows.
  Hidden mtp_input(Hidden hidden, int next_token) const {
    for (std::size_t lane = 0; lane < hidden_width; ++lane) {
      hidden[lane] += unit(Part::token, next_token, lane);
    }
    return normalised(hidden);
  }

  // What row `row` brings to a layer.

  void project_kv(int layer, Hidden const& hidden, LayerTensors const& to, int row) const {
    project(Part::kv, layer, hidden, to.kv.row(row), sizes_.key_dim, same);
  }
  void project_query(int layer, Hidden const& hidden, LayerTensors const& to, int row) const {
    project(Part::query, layer, hidden, to.q.row(row), sizes_.heads * sizes_.key_dim, to_bf16);
  }
  void project_index_key(int layer, Hidden const& hidden, LayerTensors const& to, int row) const {
    project(Part::index_key, layer, hidden, to.index_keys.row(row), sizes_.index_dim, same);
  }
  /// Index queries and head weights, with the indexer's constants folded into the weights.
  void project_index_query(int layer, Hidden const& hidden, LayerTensors const& to, int row) const {
    project(Part::index_query, layer, hidden, to.index_q.row(row),
            sizes_.index_heads * sizes_.index_dim, to_bf16);
    float const scale = 1.0f / std::sqrt(static_cast<float>(sizes_.index_heads) *
                                         static_cast<float>(sizes_.index_dim));
    project(Part::head_weight, layer, hidden, to.weights.row(row), sizes_.index_heads,
            [scale](float value) { return value * scale; });
  }

  /// The hidden state after a layer: a projection of the attention's output is added.
  Hidden absorb(int layer, Hidden hidden, float const* out) const {
    Hidden added{};
    auto const value_dim = static_cast<std::uint32_t>(sizes_.value_dim);
    for (std::uint32_t lane = 0; lane < hidden_width; ++lane) {
      for (std::uint32_t head = 0; head < static_cast<std::uint32_t>(sizes_.heads); ++head) {
        std::uint32_t const bits = mix(key(Part::output, layer), head * hidden_width + lane);
        float const value = out[head * value_dim + (bits >> 1) % value_dim];
        added[lane] += (bits & 1) != 0 ? value : -value;
      }
    }
    added = normalised(added);
    for (std::size_t lane = 0; lane < hidden_width; ++lane) hidden[lane] += added[lane];
    return normalised(hidden);
  }

  /// The likeliest next token. Each token has a usual successor, so that drafts are often right.
  int next_token(Hidden const& hidden, int token) const {
    constexpr float habit = 20.0f;
    int const usual = static_cast<int>(mix(key(Part::successor, 0), number(token)) % vocabulary);
    int best = 0;
    float best_logit = -INFINITY;
    for (int word = 0; word < vocabulary; ++word) {
      std::uint32_t const signs = mix(key(Part::head, 0), number(word));
      float logit = word == usual ? habit : 0.0f;
      for (std::size_t lane = 0; lane < hidden_width; ++lane) {
        logit += (signs >> lane & 1) != 0 ? hidden[lane] : -hidden[lane];
      }
      if (logit > best_logit) {
        best_logit = logit;
        best = word;
      }
    }
    return best;
  }

  /// The hidden state that a stored document's token had in a layer (requests restore its cache
  /// rows instead of computing them).
  Hidden stored(int layer, int token, int position) const {
    Hidden hidden = embed(token, position);
    for (std::size_t lane = 0; lane < hidden_width; ++lane) {
      hidden[lane] += unit(Part::stored, layer * vocabulary + token, lane);
    }
    return normalised(hidden);
  }

  /// Token `i` of a prompt or document with this number.
  int prompt_token(int text, int i) const {
    return static_cast<int>(mix(key(Part::prompt, text), number(i)) % vocabulary);
  }

 private:
  enum class Part : std::uint32_t {
    token,
    position,
    kv,
    query,
    index_key,
    index_query,
    head_weight,
    output,
    successor,
    head,
    stored,
    prompt,
  };
  static std::uint32_t number(int value) { return static_cast<std::uint32_t>(value); }
  static float same(float value) { return value; }

  std::uint32_t key(Part part, int layer) const {
    return mix(seed_, mix(static_cast<std::uint32_t>(part), number(layer)));
  }
  /// A number from -1 to 1.
  float unit(Part part, int what, std::size_t lane) const {
    std::uint32_t const bits = mix(key(part, what), static_cast<std::uint32_t>(lane));
    return static_cast<float>(static_cast<int>(bits >> 8) - (1 << 23)) * 0x1p-23f;
  }
  static Hidden normalised(Hidden hidden) {
    float squares = 0;
    for (float const lane : hidden) squares += lane * lane;
    float const scale = 1.0f / std::sqrt(squares / hidden_width + 1e-6f);
    for (float& lane : hidden) lane *= scale;
    return hidden;
  }
  /// Each output lane is the sum or difference of two lanes of the hidden state.
  template <class T, class Convert>
  void project(Part part, int layer, Hidden const& hidden, T* out, int lanes,
               Convert const& convert) const {
    std::uint32_t const seed = key(part, layer);
    for (int lane = 0; lane < lanes; ++lane) {
      std::uint32_t const bits = mix(seed, number(lane));
      float const a = hidden[bits % hidden_width];
      float const b = hidden[(bits >> 5) % hidden_width];
      float const first = (bits & 1024) != 0 ? a : -a;
      out[lane] = convert(((bits & 2048) != 0 ? first + b : first - b) * 0.70710678f);
    }
  }

  Sizes sizes_;
  std::uint32_t seed_;
};

}  // namespace mini
