// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "../programs/demo_data.hpp"

#include <indexshare/indexshare.hpp>

#include <cstdint>

/// @file The control: a layer that selects as many keys as its indexer would, but at random.

namespace small_dsa {

/// An indexer policy whose scores are random numbers: every row of every layer gets other keys, the
/// same ones in each run.
struct RandomIndexer {
  using score_type = float;
  template <indexshare::Space>
  struct inputs {
    std::uint64_t seed = 0;
    std::int32_t layer = 0;
    std::int32_t sequence = 0;
  };
};

template <indexshare::HostSpaceExecutor X>
indexshare::Result<indexshare::WorkspaceSize> indexer_workspace(X const&, RandomIndexer,
                                                                indexshare::Shape const&) noexcept {
  return indexshare::WorkspaceSize{0};
}

template <indexshare::HostSpaceExecutor X>
indexshare::Status indexer_check(X const&, RandomIndexer,
                                 RandomIndexer::inputs<indexshare::Space::host> const&,
                                 indexshare::RowBatch<indexshare::Space::host> const&,
                                 indexshare::Shape const&) noexcept {
  return {};
}

template <indexshare::HostSpaceExecutor X>
indexshare::Status indexer_score(X const&, RandomIndexer,
                                 RandomIndexer::inputs<indexshare::Space::host> const& in,
                                 indexshare::RowBatch<indexshare::Space::host> const& batch,
                                 indexshare::ScoreRequest const& request,
                                 indexshare::ScoreView<indexshare::Space::host> const& scores,
                                 indexshare::Workspace) noexcept {
  for (indexshare::index_t i = 0; i < request.rows.count; ++i) {
    indexshare::index_t const length =
        indexshare::clamp_length(batch.lengths(request.rows.first + i), scores.extent(1));
    programs::RandomStream random(in.seed, programs::RandomStream::Use::random_selection, in.layer,
                                  {in.sequence, static_cast<indexshare::position_t>(length - 1)});
    for (indexshare::index_t s = 0; s < length; ++s) scores(i, s) = random.uniform();
  }
  return {};
}
static_assert(indexshare::IndexerPolicy<RandomIndexer, indexshare::HostExec<>>);

}  // namespace small_dsa
