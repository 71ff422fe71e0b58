// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "../layer/session.hpp"

#include <cstddef>
#include <cstring>
#include <utility>
#include <vector>

/// @file What changes in the memory of a model and a session between two replays of a graph.

namespace layer_test {

template <class S>
void set_rows(S& session, RowList const& rows) {
  auto const write = [&](LengthView<space> const& view, position_t Row::*member) {
    auto* const values = const_cast<position_t*>(view.data_handle());  // the test's own memory
    for (std::size_t r = 0; r < rows.size(); ++r) values[r] = rows[r].*member;
  };
  REQUIRE(static_cast<index_t>(rows.size()) == session.row_count());
  write(session.batch().lengths, &Row::length);
  write(session.batch().requests, &Row::request);
}

template <class T>
void overwrite_with(test::Guarded<T>& to, test::Guarded<T> const& from) {
  REQUIRE(to.size() == from.size());
  std::memcpy(to.data(), from.data(), to.bytes());
}

/// Queries and head weights of the rows, as a new session has them.
template <class M, class S>
void set_queries(M const& model, S& session, RowList const& rows) {
  for (std::int32_t number = 0; number < model.layers(); ++number) {
    LayerQueries<typename M::Element> const fresh(rows, model.shape, number);
    overwrite_with(session.queries(number).q, fresh.q);
    overwrite_with(session.queries(number).index_q, fresh.index_q);
    overwrite_with(session.queries(number).weights, fresh.weights);
  }
}

/// Writes all tokens again, with the numbers of other layers.
template <class M>
void set_tokens(M& model, std::int32_t as_layer) {
  for (std::int32_t number = 0; number < model.layers(); ++number) {
    for (index_t request = 0; request < model.requests(); ++request) {
      for (position_t s = 0; s < contexts[to_size(request)]; ++s) {
        model.kv(number).write(
            request, s, token_values(Part::kv, as_layer + number, request, s, model.shape.key_dim));
        if (!model.has_index_keys(number)) continue;
        model.index_keys(number).write(
            request, s,
            token_values(Part::index_key, as_layer + number, request, s, model.shape.index_dim));
      }
    }
  }
}

/// Swaps pages between two requests, in every cache of a kind; the tokens lie wrongly until they
/// are written again.
template <class Cache>
void swap_pages(Cache& cache, index_t a, index_t b) {
  for (index_t page = 0; page < cache.keys() / cache.page_size(); ++page) {
    std::swap(cache.entry(a, page), cache.entry(b, page));
  }
}
template <class M>
void move_pages(M& model, index_t a, index_t b) {
  for (std::int32_t number = 0; number < model.layers(); ++number) {
    swap_pages(model.kv(number), a, b);
    if (model.has_index_keys(number)) swap_pages(model.index_keys(number), a, b);
  }
}

/// Ten rows each, all different: below k, at k, above it, far above it.
inline std::vector<RowList> batches() {
  return {join({chunk(0, 29, 5), chunk(2, 4, 3), chunk(3, 40), chunk(1, 37)}),
          join({chunk(3, 40, 10)}),
          join({chunk(1, 9, 4), chunk(0, 6, 3), chunk(3, 7, 2), {{2, 0}}}),
          join({chunk(2, 4, 4), chunk(0, 1), chunk(1, 37, 5)})};
}

}  // namespace layer_test
