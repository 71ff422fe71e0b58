// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file The only macro of the library: functions of views and elements that kernels call too.
#if defined(__CUDACC__)
#define INDEXSHARE_HD __host__ __device__
#else
#define INDEXSHARE_HD
#endif
