// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/dims.hpp>
#include <indexshare/model_config.hpp>
#include <indexshare/status.hpp>
#include <indexshare/views.hpp>

#include <algorithm>
#include <cmath>

namespace indexshare {
inline namespace v0 {

/// Rotary positions of rows or tokens. They need not be the positions within the request that
/// selections hold: an engine may start a request anywhere.
template <Space S>
using PositionView = Tensor<S, position_t const, 1>;  ///< [rows]

/// The angles of a model: pair i of a token at position p turns by p * inverse[i], all in fp32,
/// and cosine and sine are multiplied by `amplitude`. One table serves the attention and the
/// indexer.
///
/// The product is fp32 because that is what checkpoints were trained and are served with: at
/// position 10^6 it is off by up to 0.03 rad, and a table in double would select other keys.
/// Implementations of pow differ in the last bit of a frequency, which shows at such positions
/// too; to reproduce another implementation there, overwrite `inverse` with its table.
struct RotaryFrequencies {
  static constexpr index_t max_pairs = 256;

  float inverse[max_pairs] = {};
  index_t pairs = 0;  ///< half of the rotated lanes; 0: nothing is rotated
  float amplitude = 1;
};

namespace detail {

/// Which pairs YaRN leaves alone (0) and which it slows down by its factor (1), between them
/// linearly, as a function of how often a pair turns within the original context.
/// @source YaRN paper, section 3.2; transformers `_compute_yarn_parameters`, release 5.24.0
class YarnRamp {
 public:
  YarnRamp(YarnScaling const& yarn, double theta, index_t dims) noexcept {
    auto const pair_turning = [&](double times) noexcept {
      double const context = static_cast<double>(yarn.original_max_position_embeddings);
      return static_cast<double>(dims) * std::log(context / (times * 2 * pi)) /
             (2 * std::log(theta));
    };
    low_ = std::max(std::floor(pair_turning(yarn.beta_fast)), 0.0);
    high_ = std::min(std::ceil(pair_turning(yarn.beta_slow)), static_cast<double>(dims) - 1);
    if (low_ == high_) high_ += 0.001;
  }

  float operator()(index_t pair) const noexcept {
    float const ramp =
        static_cast<float>(static_cast<double>(pair) - low_) / static_cast<float>(high_ - low_);
    return std::min(std::max(ramp, 0.0f), 1.0f);
  }

 private:
  static constexpr double pi = 3.14159265358979323846;
  double low_;
  double high_;
};

constexpr Status check_yarn(YarnScaling const& yarn) noexcept {
  constexpr double largest = 1e12;  // as io::parse_config has it
  if (!(yarn.factor >= 1 && yarn.factor <= largest)) {
    return failure(Errc::bad_value, "rope.yarn.factor must be 1 or more", 1);
  }
  if (!(yarn.beta_slow > 0 && yarn.beta_fast > yarn.beta_slow && yarn.beta_fast <= largest)) {
    return failure(Errc::bad_value, "rope.yarn.beta_fast must exceed beta_slow, and both 0");
  }
  if (!(yarn.mscale >= 0 && yarn.mscale <= largest && yarn.mscale_all_dim >= 0 &&
        yarn.mscale_all_dim <= largest)) {
    return failure(Errc::bad_value, "rope.yarn.mscale and mscale_all_dim must be 0 or more");
  }
  return yarn.original_max_position_embeddings >= 1
             ? Status{}
             : failure(Errc::bad_value, "rope.yarn.original_max_position_embeddings", 1,
                       yarn.original_max_position_embeddings);
}

}  // namespace detail

/// The table of a model. Errors: bad_shape (an odd number of rotary lanes), unsupported (more than
/// 512 of them), bad_value (a rotary base not above 1 or not finite; YaRN without its factor or
/// original context).
/// @source transformers `compute_default_rope_parameters`, `_compute_yarn_parameters`
inline Result<RotaryFrequencies> rotary_frequencies(ModelConfig const& config) noexcept {
  index_t const dims = config.qk_rope_head_dim;
  RotaryFrequencies table;
  if (dims == 0) return table;
  if (dims % 2 != 0) {
    return refuse(failure(Errc::bad_shape, "qk_rope_head_dim must be even: lanes turn in pairs",
                          dims + 1, dims));
  }
  if (dims / 2 > RotaryFrequencies::max_pairs) {
    return refuse(failure(Errc::unsupported, "qk_rope_head_dim of a table of rotary frequencies",
                          2 * RotaryFrequencies::max_pairs, dims));
  }
  if (!(config.rope.theta > 1) || !std::isfinite(config.rope.theta)) {
    return refuse(failure(Errc::bad_value, "rope.theta must be above 1 and finite", 1));
  }
  bool const yarn = config.rope.scaling == RopeScaling::yarn;
  if (yarn) {
    if (Status const status = detail::check_yarn(config.rope.yarn); !status.ok()) {
      return refuse(status);
    }
  }
  table.pairs = dims / 2;
  table.amplitude = static_cast<float>(rope_amplitude(config));
  auto const factor = static_cast<float>(config.rope.yarn.factor);
  detail::YarnRamp const slowed(config.rope.yarn, config.rope.theta, dims);
  for (index_t i = 0; i < table.pairs; ++i) {
    float const exponent = static_cast<float>(2 * i) / static_cast<float>(dims);
    auto const power = static_cast<float>(std::pow(config.rope.theta, double{exponent}));
    float const plain = 1.0f / power;
    // as the sources mix the two: by the share that is kept, not by the share that is slowed
    float const kept = yarn ? 1.0f - slowed(i) : 1.0f;
    table.inverse[i] = yarn ? 1.0f / (factor * power) * (1.0f - kept) + plain * kept : plain;
  }
  return table;
}

}  // namespace v0
}  // namespace indexshare
