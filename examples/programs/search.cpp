// SPDX-License-Identifier: Apache-2.0
#include "search.hpp"

#include <iostream>

int main(int argc, char** argv) { return programs::search(argc, argv, std::cout, std::cerr); }
