// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace golden_cuda {

/// Checks one of tests/golden/<family> with selection and attention on CUDA. In a source of its
/// own: nvcc 13.0's front end does not come to an end over unnamed namespaces, which test cases
/// make, after golden_family.hpp.
void check_family(char const* name);

}  // namespace golden_cuda
