// SPDX-License-Identifier: Apache-2.0
#include "program.hpp"

#include <iostream>

int main(int argc, char** argv) {
  return small_dsa::run(argc, argv, std::cin, std::cout, std::cerr);
}
