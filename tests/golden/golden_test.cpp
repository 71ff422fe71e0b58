// SPDX-License-Identifier: Apache-2.0
#if defined(INDEXSHARE_TEST_CUDA)
#include <indexshare/cuda/append.cuh>
#include <indexshare/cuda/attention.cuh>
#include <indexshare/cuda/indexer.cuh>
#include <indexshare/cuda/selection.cuh>
#include <indexshare/cuda/topk.cuh>
#endif

#include "golden_replay.hpp"

#include "executors.hpp"
#include "managed_block.hpp"
#include "memory.hpp"

#include <catch2/catch_template_test_macros.hpp>
#include <catch2/catch_test_macros.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>

#include <cstdio>
#include <string>
#include <tuple>

#if defined(INDEXSHARE_TEST_CUDA)
template <>
struct programs::ReplayMemory<test::Cuda> {
  template <class T>
  using Array = test::Guarded<T>;
  using Block = test::ManagedBlock;
  static void finish(test::Cuda const& x) { test::finish(x); }
};
#endif

namespace {

#if defined(INDEXSHARE_TEST_CUDA)
using GoldenExecutors = test::Executors;
#else
using GoldenExecutors = std::tuple<indexshare::ReferenceExec, test::Serial>;
#endif

/// A case of tests/golden with the worst errors it may show. fp32: transformers sums in fp32 in
/// another order than we do. bf16: the oracle rounds q, keys, probabilities and outputs to bf16
/// (2^-9), so outputs agree to a few of those.
struct Case {
  char const* name;
  double score;
  double lse;
  double output;
};
constexpr Case cases[] = {
    {"prefill64_fp32", 1e-5, 5e-6, 1e-5}, {"short_fp32", 1e-5, 5e-6, 1e-5},
    {"decode_fp32", 1e-5, 5e-6, 1e-5},    {"leftpad_fp32", 1e-5, 5e-6, 1e-5},
    {"farpos_fp32", 1e-5, 5e-6, 1e-5},    {"prefill64_bf16", 1e-5, 5e-6, 2e-2},
};

std::string directory() { return std::string(INDEXSHARE_TEST_DATA_DIR) + "/golden"; }

}  // namespace

TEMPLATE_LIST_TEST_CASE("Golden: transformers' selections, reuse and outputs", "",
                        GoldenExecutors) {
  std::printf("%-16s %6s %8s %6s %7s %10s %10s %10s\n", "case", "rows", "skipped", "wrong",
              "shared", "score", "lse", "output");
  for (Case const& golden : cases) {
    auto const report = programs::replay_golden(TestType{}, directory(), golden.name);
    std::printf("%-16s %6lld %8lld %6lld %7lld %10.2e %10.2e %10.2e\n", golden.name,
                static_cast<long long>(report.rows), static_cast<long long>(report.skipped),
                static_cast<long long>(report.wrong), static_cast<long long>(report.shared_rows),
                report.score_error, report.lse_error, report.output_error);
    INFO(golden.name);
    CHECK(report.rows > 0);
    CHECK(report.shared_rows > 0);
    CHECK(report.skipped * 50 <= report.rows + report.skipped);
    CHECK(report.wrong == 0);
    CHECK(report.shared_wrong == 0);
    CHECK(report.score_error <= golden.score);
    CHECK(report.lse_error <= golden.lse);
    CHECK(report.output_error <= golden.output);
  }
}

TEST_CASE("Golden: a fixture that is not there is named") {
  CHECK_THROWS_WITH(
      programs::replay_golden(indexshare::ReferenceExec{}, directory(), "nothing_fp32"),
      Catch::Matchers::ContainsSubstring("nothing_fp32"));
}
