// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/detail/check.hpp>
#include <indexshare/element.hpp>
#include <indexshare/scale_recipe.hpp>
#include <indexshare/status.hpp>
#include <indexshare/views.hpp>

/// @file Index queries in e4m3 with a scale per row and head, the form that an indexer with e4m3
/// queries reads. Back ends: host/quantize.hpp, cuda/quantize.cuh.

namespace indexshare {
inline namespace v0 {
namespace detail {

/// What every back end asks of the arguments of `quantize_queries`.
template <Space S>
Status check_quantize(Tensor<S, float const, 3> const& q, Tensor<S, float, 2> const& weights,
                      Tensor<S, e4m3, 3> const& out, ScaleRecipe const& recipe) noexcept {
  return first_failure({check_extent("rows of the head weights against the index queries",
                                     q.extent(0), weights.extent(0)),
                        check_extent("heads of the head weights against the index queries",
                                     q.extent(1), weights.extent(1)),
                        check_extent("rows of the e4m3 queries", q.extent(0), out.extent(0)),
                        check_extent("heads of the e4m3 queries", q.extent(1), out.extent(1)),
                        check_extent("lanes of the e4m3 queries", q.extent(2), out.extent(2)),
                        check_readable("index queries", q), check_writable("head weights", weights),
                        check_writable("e4m3 queries", out), check_scale_recipe(recipe)});
}

}  // namespace detail
}  // namespace v0
}  // namespace indexshare
