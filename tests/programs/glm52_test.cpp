// SPDX-License-Identifier: Apache-2.0
#include "glm52.hpp"

#include <indexshare/io/config.hpp>

#include <catch2/catch_test_macros.hpp>

#include <string>

TEST_CASE("Demo: the built-in GLM-5.2 is the one of its config.json") {
  auto const published = indexshare::io::read_config_file(std::string(INDEXSHARE_TEST_DATA_DIR) +
                                                          "/configs/GLM-5.2.json");
  REQUIRE(published.has_value());
  CHECK(programs::glm52_model() == published->model);
  auto const plan = programs::glm52_plan();
  REQUIRE(plan.total_layers() == published->plan.total_layers());
  for (std::int32_t layer = 0; layer < plan.total_layers(); ++layer) {
    CHECK(share_source(plan, layer) == share_source(published->plan, layer));
  }
}
