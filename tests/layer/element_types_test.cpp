// SPDX-License-Identifier: Apache-2.0
#include "element_types.hpp"

namespace {
using namespace layer_test;

// Every type in every role, and the usual one.
using PlainTypes =
    std::tuple<Types<bf16, Plain<bf16>, Plain<bf16>>, Types<float, Plain<bf16>, Plain<fp16>>,
               Types<bf16, Plain<fp16>, Plain<float>>, Types<fp16, Plain<float>, Plain<bf16>>>;

TEMPLATE_LIST_TEST_CASE("DIAG R148: any mix of fp32, bf16 and fp16 runs, sparse and dense",
                        "[types]", PlainTypes) {
  check_types<TestType>();
}

}  // namespace
