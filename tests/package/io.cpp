// SPDX-License-Identifier: Apache-2.0
#include <indexshare/indexshare.hpp>

#include <nlohmann/json.hpp>

int main() { return nlohmann::json::parse("[1, 2]").size() == 2 ? 0 : 1; }
