// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file The macros of the library: functions of views and elements that kernels call too, and
/// kernels.
#if defined(__CUDACC__)
#define INDEXSHARE_HD __host__ __device__
/// A kernel belongs to its translation unit: two libraries built with different versions of these
/// headers do not share it.
#define INDEXSHARE_KERNEL static __global__
#else
#define INDEXSHARE_HD
#endif
