// SPDX-License-Identifier: Apache-2.0
#include "element_types.hpp"

namespace {
using namespace layer_test;

using Fp8Types =
    std::tuple<Types<bf16, E4m3Keys, E4m3Latent>, Types<fp16, E4m3Keys, Plain<fp16>>,
               Types<float, Plain<float>, E4m3Latent>, Types<e4m3, E4m3Keys, E4m3Latent>>;

TEMPLATE_LIST_TEST_CASE("FP8 R148: e4m3 index keys and latents run, sparse and dense", "[types]",
                        Fp8Types) {
  check_types<TestType>();
}

}  // namespace
