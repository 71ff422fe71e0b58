// SPDX-License-Identifier: Apache-2.0
#include "overlap.hpp"

#include <iostream>

int main(int argc, char** argv) { return programs::overlap(argc, argv, std::cout, std::cerr); }
