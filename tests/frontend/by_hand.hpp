// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "frontend_model.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <span>
#include <vector>

/// @file The front end once more, from its formulas and one token at a time, in double.

namespace frontend_test {

using Doubles = std::vector<double>;

template <class T>
Doubles product_by_hand(MatrixView<host, T> const& w, std::span<double const> in) {
  Doubles out(to_size(w.extent(0)));
  for (index_t o = 0; o < w.extent(0); ++o) {
    for (index_t i = 0; i < w.extent(1); ++i) {
      out[to_size(o)] += static_cast<double>(to_float(w(o, i))) * in[to_size(i)];
    }
  }
  return out;
}

inline Doubles rms_norm_by_hand(std::span<double const> in, VectorView<host> const& gain,
                                double eps) {
  double squares = 0;
  for (double const x : in) squares += x * x;
  double const root = std::sqrt(squares / static_cast<double>(in.size()) + eps);
  Doubles out;
  for (std::size_t i = 0; i < in.size(); ++i) {
    out.push_back(in[i] / root * static_cast<double>(gain(static_cast<index_t>(i))));
  }
  return out;
}

inline Doubles layer_norm_by_hand(std::span<double const> in, VectorView<host> const& gain,
                                  VectorView<host> const& bias, double eps) {
  double const n = static_cast<double>(in.size());
  double sum = 0;
  for (double const x : in) sum += x;
  double variance = 0;
  for (double const x : in) variance += (x - sum / n) * (x - sum / n) / n;
  Doubles out;
  for (std::size_t i = 0; i < in.size(); ++i) {
    auto const lane = static_cast<index_t>(i);
    out.push_back((in[i] - sum / n) / std::sqrt(variance + eps) * static_cast<double>(gain(lane)) +
                  static_cast<double>(bias(lane)));
  }
  return out;
}

/// Turns lanes for a position, the angles without any scaling.
inline void rotate_by_hand(std::span<double> lanes, position_t position, double theta,
                           RopeLayout layout) {
  std::size_t const half = lanes.size() / 2;
  for (std::size_t i = 0; i < half; ++i) {
    double const exponent = -2.0 * static_cast<double>(i) / static_cast<double>(lanes.size());
    double const angle = position * std::pow(theta, exponent);
    double& a = lanes[layout == RopeLayout::interleaved ? 2 * i : i];
    double& b = lanes[layout == RopeLayout::interleaved ? 2 * i + 1 : i + half];
    double const turned = a * std::cos(angle) - b * std::sin(angle);
    b = a * std::sin(angle) + b * std::cos(angle);
    a = turned;
  }
}

/// The transform by its matrix: (-1)^(number of common bits) / sqrt(n).
inline Doubles hadamard_by_hand(std::span<double const> in) {
  Doubles out(in.size());
  for (std::size_t o = 0; o < in.size(); ++o) {
    for (std::size_t i = 0; i < in.size(); ++i) {
      out[o] += (std::popcount(o & i) % 2 == 0 ? in[i] : -in[i]) /
                std::sqrt(static_cast<double>(in.size()));
    }
  }
  return out;
}

/// What a layer makes of one token, under the names of the activations.
struct TokenByHand {
  Doubles q_a, q_resid, q, q_absorbed, index_q_raw, index_q, head_weights_raw, head_weights;
  Doubles kv_a, kv_row, index_k_raw, index_k_norm, index_k;
};

/// Rotates an index head's rotary lanes and changes its basis.
inline Doubles finish_index_head(ModelConfig const& c, LaneBasis basis, Doubles lanes,
                                 position_t position) {
  auto const first = c.indexer_rope.lanes == RopeLanes::first
                         ? std::size_t{0}
                         : lanes.size() - to_size(c.indexer_rope.dims);
  rotate_by_hand(std::span(lanes).subspan(first, to_size(c.indexer_rope.dims)), position,
                 c.rope.theta, c.indexer_rope.layout);
  return basis == LaneBasis::hadamard ? hadamard_by_hand(lanes) : lanes;
}

template <class T>
void index_by_hand(ModelConfig const& c, LaneBasis basis, IndexerWeights<host, T> const& w,
                   Doubles const& x, position_t position, TokenByHand& token) {
  auto const dim = c.index_head_dim;
  token.index_q_raw = product_by_hand(w.wq_b, token.q_resid);
  for (auto head = token.index_q_raw.begin(); head != token.index_q_raw.end(); head += dim) {
    Doubles const lanes = finish_index_head(c, basis, {head, head + dim}, position);
    token.index_q.insert(token.index_q.end(), lanes.begin(), lanes.end());
  }
  token.head_weights_raw = product_by_hand(w.weights_proj, x);
  for (double const weight : token.head_weights_raw) {
    token.head_weights.push_back(
        weight / std::sqrt(static_cast<double>(c.index_n_heads) * static_cast<double>(dim)));
  }
  token.index_k_raw = product_by_hand(w.wk, x);
  token.index_k_norm =
      layer_norm_by_hand(token.index_k_raw, w.k_norm_weight, w.k_norm_bias, c.norm_eps.index_key);
  token.index_k = finish_index_head(c, basis, token.index_k_norm, position);
}

template <class T>
TokenByHand token_by_hand(ModelConfig const& c, LaneBasis basis, AttentionWeights<host, T> const& w,
                          std::span<float const> hidden, position_t position) {
  Doubles const x(hidden.begin(), hidden.end());
  TokenByHand token;
  token.q_a = product_by_hand(w.q_a_proj, x);
  token.q_resid = rms_norm_by_hand(token.q_a, w.q_a_layernorm, c.norm_eps.latent);
  token.q = product_by_hand(w.q_b_proj, token.q_resid);
  token.kv_a = product_by_hand(w.kv_a_proj, x);
  auto const nope = to_size(c.qk_nope_head_dim), rope = to_size(c.qk_rope_head_dim);
  auto const latent = to_size(c.kv_lora_rank);
  for (index_t h = 0; h < c.num_attention_heads; ++h) {
    auto const q = std::span(token.q).subspan(to_size(h) * (nope + rope), nope + rope);
    for (index_t l = 0; l < c.kv_lora_rank; ++l) {  // W_UK^T q_nope
      double sum = 0;
      for (index_t d = 0; d < c.qk_nope_head_dim; ++d) {
        index_t const row = h * (c.qk_nope_head_dim + c.v_head_dim) + d;
        sum += static_cast<double>(to_float(w.kv_b_proj(row, l))) * q[to_size(d)];
      }
      token.q_absorbed.push_back(sum);
    }
    Doubles turned(q.begin() + c.qk_nope_head_dim, q.end());
    rotate_by_hand(turned, position, c.rope.theta, c.rope.layout);
    token.q_absorbed.insert(token.q_absorbed.end(), turned.begin(), turned.end());
  }
  token.kv_row =
      rms_norm_by_hand(std::span(token.kv_a).first(latent), w.kv_a_layernorm, c.norm_eps.latent);
  token.kv_row.insert(token.kv_row.end(), token.kv_a.begin() + c.kv_lora_rank, token.kv_a.end());
  rotate_by_hand(std::span(token.kv_row).subspan(latent, rope), position, c.rope.theta,
                 c.rope.layout);
  if (w.indexer) index_by_hand(c, basis, *w.indexer, x, position, token);
  return token;
}

/// The output side of one row.
struct OutputByHand {
  Doubles attention, gate, gated, output;
};

template <class T>
OutputByHand output_by_hand(ModelConfig const& c, AttentionWeights<host, T> const& w,
                            std::span<float const> hidden, std::span<float const> latent) {
  OutputByHand out;
  for (index_t h = 0; h < c.num_attention_heads; ++h) {
    for (index_t v = 0; v < c.v_head_dim; ++v) {
      index_t const row = h * (c.qk_nope_head_dim + c.v_head_dim) + c.qk_nope_head_dim + v;  // W_UV
      double sum = 0;
      for (index_t l = 0; l < c.kv_lora_rank; ++l) {
        sum += static_cast<double>(to_float(w.kv_b_proj(row, l))) *
               static_cast<double>(latent[to_size(h * c.kv_lora_rank + l)]);
      }
      out.attention.push_back(sum);
    }
  }
  out.gated = out.attention;
  if (c.gated_output) {
    out.gate = product_by_hand(w.gate_proj, Doubles(hidden.begin(), hidden.end()));
    for (std::size_t i = 0; i < out.gated.size(); ++i) {
      out.gated[i] *= 1 / (1 + std::exp(-out.gate[i]));
    }
  }
  out.output = product_by_hand(w.o_proj, out.gated);
  return out;
}

}  // namespace frontend_test
