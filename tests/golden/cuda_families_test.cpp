// SPDX-License-Identifier: Apache-2.0
#include "cuda_families.hpp"

#include "cuda_executor.hpp"

#include <catch2/catch_test_macros.hpp>

TEST_CASE("Golden families: selection and attention on CUDA give transformers' module output") {
  test::need_device();
  for (char const* const name : {"glm_moe_dsa", "deepseek_v32", "hy_v4"}) {
    golden_cuda::check_family(name);
  }
}
