// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <nlohmann/json.hpp>

#include <fstream>
#include <stdexcept>
#include <string>

namespace test {

/// One entry of tests/fault_vectors.json.
inline nlohmann::json fault_vector(std::string const& name) {
  std::string const path = INDEXSHARE_TEST_DATA_DIR "/fault_vectors.json";
  std::ifstream file(path);
  if (!file) throw std::runtime_error("cannot open " + path);
  return nlohmann::json::parse(file).at(name);
}

}  // namespace test
