// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/cache.hpp>
#include <indexshare/frontend/product.hpp>
#include <indexshare/frontend/rotary.hpp>
#include <indexshare/model_config.hpp>
#include <indexshare/status.hpp>

#include <bit>
#include <cstdint>

/// @file From hidden states to the inputs of a sparse-attention layer, and from its output to that
/// of the self-attention module: the recipe of a model family, as its config states it. Every
/// number that implementations disagree about is a field of `FrontEnd`.

namespace indexshare {
inline namespace v0 {

/// The recipe of one model. A value; serves all its layers.
template <class Product = PlainProduct>
struct FrontEnd {
  ModelConfig config{};  ///< widths, epsilons, rotary layouts, sink, gate
  RotaryFrequencies
      frequencies{};  ///< of `rotary_frequencies(config)`, or of another implementation
  LaneBasis index_basis = LaneBasis::natural;  ///< that index queries and index keys are made in
  Product product{};                           ///< see MatrixProduct
};

namespace detail {

constexpr Status check_basis(ModelConfig const& config, LaneBasis index_basis) noexcept {
  if (index_basis != LaneBasis::hadamard || config.index_head_dim < 1) return {};
  auto const lanes = static_cast<std::uint64_t>(config.index_head_dim);
  return std::has_single_bit(lanes)
             ? Status{}
             : failure(Errc::unsupported,
                       "index_head_dim of a Hadamard basis must be a power of two (expected: the "
                       "next one)",
                       static_cast<std::int64_t>(std::bit_ceil(lanes)), config.index_head_dim);
}

constexpr bool is_eps(double eps) noexcept { return eps > 0 && eps < 1; }

/// Epsilons have no default that is right, so a forgotten one is refused.
constexpr Status check_epsilons(NormEps const& eps) noexcept {
  if (!is_eps(eps.latent)) {
    return failure(Errc::bad_value, "norm_eps.latent must be given, above 0 and below 1");
  }
  if (!is_eps(eps.index_key)) {
    return failure(Errc::bad_value, "norm_eps.index_key must be above 0 and below 1");
  }
  return {};
}

}  // namespace detail

/// The recipe that `config` states. Errors: those of `rotary_frequencies`; bad_value for an epsilon
/// that is not given; unsupported for a model that `can_run` refuses, and for a Hadamard basis of
/// an index dim that is no power of two.
template <class Product = PlainProduct>
Result<FrontEnd<Product>> make_front_end(ModelConfig const& config,
                                         LaneBasis index_basis = LaneBasis::natural,
                                         Product product = {}) noexcept {
  if (Status const status = can_run(config); !status.ok()) return refuse(status);
  if (Status const status = detail::check_epsilons(config.norm_eps); !status.ok()) {
    return refuse(status);
  }
  if (Status const status = detail::check_basis(config, index_basis); !status.ok()) {
    return refuse(status);
  }
  Result<RotaryFrequencies> const frequencies = rotary_frequencies(config);
  if (!frequencies) return refuse(frequencies.error());
  return FrontEnd<Product>{config, *frequencies, index_basis, product};
}

}  // namespace v0
}  // namespace indexshare
