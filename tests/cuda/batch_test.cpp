// SPDX-License-Identifier: Apache-2.0
//
// Rows from chunks inside a captured graph: continuous batching changes the chunks, not the graph.
#include <indexshare/cuda/batch.cuh>
#include <indexshare/host/batch.hpp>

#include <catch2/catch_test_macros.hpp>

#include "executors.hpp"
#include "graph.hpp"
#include "memory.hpp"
#include "random.hpp"
#include "refusal.hpp"

#include <vector>

using namespace indexshare;
using test::succeeded;

namespace {

constexpr std::size_t requests = 9, rows = 40;

/// Buffers of a fixed size, as an engine's graph has them.
struct Buffers {
  test::Guarded<position_t> starts{requests + 1}, tokens{requests}, accepted{requests};
  test::Guarded<position_t> positions{rows}, lengths{rows}, owners{rows}, last{requests};

  void next(test::Random& random) {
    starts[0] = 0;
    for (std::size_t r = 0; r < requests; ++r) {
      auto const chunk = 1 + static_cast<position_t>(random.below(4));
      starts[r + 1] = starts[r] + chunk;
      tokens[r] = chunk + static_cast<position_t>(random.below(5000));
      accepted[r] = 1 + static_cast<position_t>(random.below(static_cast<std::size_t>(chunk)));
    }
    for (auto* const out : {&positions, &lengths, &owners, &last}) out->fill(test::unwritten);
  }

  template <Space S, class X>
  void run(X const& x) {
    auto const numbers = [](test::Guarded<position_t>& values) {
      return make_dense<S, position_t, 1>(values.data(), {static_cast<index_t>(values.size())});
    };
    auto const given = [](test::Guarded<position_t> const& values) {
      return make_lengths<S>(values.data(), Rows{static_cast<index_t>(values.size())});
    };
    REQUIRE_THAT(number_rows(x, Chunks<S>{given(starts), given(tokens)},
                             {numbers(positions), numbers(lengths), numbers(owners)}),
                 succeeded());
    REQUIRE_THAT(last_accepted_rows(x, given(starts), given(accepted), numbers(last)), succeeded());
  }

  std::vector<position_t> results() const {
    std::vector<position_t> all;
    for (auto const* const out : {&positions, &lengths, &owners, &last}) {
      all.insert(all.end(), out->data(), out->data() + out->size());
    }
    return all;
  }
};

}  // namespace

TEST_CASE("GRAPH R134: rows are numbered anew in every replay", "[batch][graph]") {
  test::Cuda const x;
  Buffers device, host;
  std::fill_n(device.starts.data(), requests + 1, 0);  // captured with an idle batch
  std::fill_n(device.tokens.data(), requests, 0);
  std::fill_n(device.accepted.data(), requests, 0);
  cuda_test::Graph const graph(x, [&] { device.run<Space::device>(x); });
  CHECK(graph.only_device_work());
  for (std::uint64_t replay = 1; replay < 6; ++replay) {
    test::Random random(replay), same(replay);
    device.next(random);
    host.next(same);
    graph.replay();
    host.run<Space::host>(test::Serial{});
    CHECK(device.results() == host.results());
  }
}
