// SPDX-License-Identifier: Apache-2.0
#include "inspect.hpp"

#include <iostream>

int main(int argc, char** argv) { return programs::inspect(argc, argv, std::cout, std::cerr); }
