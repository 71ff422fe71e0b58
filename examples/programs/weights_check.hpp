// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "layer_run.hpp"
#include "worst.hpp"

#include <indexshare/frontend.hpp>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <stdexcept>

namespace programs {

/// Recomputes the front end of sampled rows and tokens with the reference, whose products are in
/// double, and keeps the worst difference, relative to the largest value of the row.
class FrontEndChecker {
 public:
  static constexpr double tolerance = 1e-4;

  std::int64_t samples = 0;  ///< rows and tokens recomputed
  double worst = 0;          ///< stays NaN once it is

  bool passed() const { return worst <= tolerance; }

  /// After `run` has computed a layer: its last row and a token in the middle.
  template <class X, class T>
  void check(LayerRun<X>& run,
             indexshare::AttentionWeights<indexshare::Space::host, T> const& weights) {
    std::int64_t const row = run.batch().rows() - 1;
    std::int64_t const token = run.batch().tokens() / 2;
    check_queries(run, weights, row);
    check_keys(run, weights, token);
    check_output(run, weights, row);
  }

 private:
  using Reference = indexshare::ReferenceExec;
  using index_t = indexshare::index_t;
  static constexpr auto host = indexshare::Space::host;
  static constexpr indexshare::Rows one{1};

  /// Carves by one walk for the size and one for the views.
  template <class Carve>
  struct Activations {
    decltype(std::declval<Carve>()(std::declval<indexshare::WorkspaceCarver&>())) side;
    indexshare::HostMemory memory;

    explicit Activations(Carve const& carve) {
      indexshare::WorkspaceCarver count;
      carve(count);
      memory = indexshare::HostMemory(count.size());
      indexshare::WorkspaceCarver walk(memory.view());
      side = carve(walk);
    }
  };

  static indexshare::PositionView<host> position(indexshare::position_t const& value) {
    return indexshare::make_lengths<host>(&value, one);
  }
  static void require(indexshare::Status const& status) {
    if (!status.ok()) throw std::runtime_error(status.what);
  }

  template <class X, class T>
  void check_queries(LayerRun<X>& run, indexshare::AttentionWeights<host, T> const& weights,
                     index_t row) {
    bool const full = weights.indexer.has_value();
    Activations const expected([&](indexshare::WorkspaceCarver& carver) {
      return indexshare::carve_query_side<host>(carver, run.config(), one, full,
                                                indexshare::Keep::results);
    });
    require(project_queries(Reference{}, run.front_end(), weights,
                            indexshare::rows_of(run.row_hidden(), row, 1),
                            position(run.batch().row_rotary[at(row)]), expected.side));
    compare(expected.side.q_absorbed, run.queries().q_absorbed, row);
    if (full) {
      compare(expected.side.index_q, run.queries().index_q, row);
      compare(indexshare::detail::one_head(expected.side.head_weights),
              indexshare::detail::one_head(run.queries().head_weights), row);
    }
    ++samples;
  }

  template <class X, class T>
  void check_keys(LayerRun<X>& run, indexshare::AttentionWeights<host, T> const& weights,
                  index_t token) {
    bool const full = weights.indexer.has_value();
    Activations const expected([&](indexshare::WorkspaceCarver& carver) {
      return indexshare::carve_key_side<host>(carver, run.config(), one, full,
                                              indexshare::Keep::results);
    });
    require(project_keys(Reference{}, run.front_end(), weights,
                         indexshare::rows_of(run.token_hidden(), token, 1),
                         position(run.batch().rotary[at(token)]), expected.side));
    compare(indexshare::detail::one_head(expected.side.kv_row),
            indexshare::detail::one_head(run.keys().kv_row), token);
    if (full) {
      compare(indexshare::detail::one_head(expected.side.index_k),
              indexshare::detail::one_head(run.keys().index_k), token);
    }
    ++samples;
  }

  template <class X, class T>
  void check_output(LayerRun<X>& run, indexshare::AttentionWeights<host, T> const& weights,
                    index_t row) {
    Activations const expected([&](indexshare::WorkspaceCarver& carver) {
      return indexshare::carve_output_side<host>(carver, run.config(), one,
                                                 indexshare::Keep::results);
    });
    require(project_output(
        Reference{}, run.front_end(), weights, indexshare::rows_of(run.row_hidden(), row, 1),
        indexshare::detail::read_only(indexshare::rows_of(run.latent_output(), row, 1)),
        expected.side));
    compare(indexshare::detail::one_head(expected.side.output),
            indexshare::detail::one_head(run.output().output), row);
    ++samples;
  }

  static std::size_t at(index_t i) { return static_cast<std::size_t>(i); }

  using Heads = indexshare::Tensor<host, float, 3>;
  /// Row 0 of `expected` against row `row` of `got`.
  void compare(Heads const& expected, Heads const& got, index_t row) {
    double largest = 0;
    double error = 0;
    for (index_t h = 0; h < expected.extent(1); ++h) {
      for (index_t lane = 0; lane < expected.extent(2); ++lane) {
        largest = std::fmax(largest, std::fabs(double{expected(0, h, lane)}));
        error = programs::worst(error, double{expected(0, h, lane)} - double{got(row, h, lane)});
      }
    }
    worst = programs::worst(worst, relative(error, largest));
  }
};

}  // namespace programs
