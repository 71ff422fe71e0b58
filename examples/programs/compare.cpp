// SPDX-License-Identifier: Apache-2.0
#include "compare.hpp"

#include <iostream>

int main(int argc, char** argv) { return programs::compare(argc, argv, std::cout, std::cerr); }
