// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/exec.hpp>

/// @file What the three translation units of the program define, each built with its own flags.

namespace flags {

/// Scores, selects and attends over 300 keys with the kernels of an instruction set, and returns
/// the sum of what was selected, or a negative number for an error.
double baseline(indexshare::HostIsa isa);
double wide(indexshare::HostIsa isa);  ///< built for AVX-512
double fast(indexshare::HostIsa isa);  ///< built with -ffast-math

}  // namespace flags
