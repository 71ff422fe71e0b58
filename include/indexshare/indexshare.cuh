// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file indexshare.hpp and the CUDA back end: executor, kernels of the pipeline in order,
/// appending, and the front end's steps. Not in it: full_sort.cuh, since CUB's headers take as long
/// to compile as all of this.

#include <indexshare/indexshare.hpp>

#include <indexshare/cuda/device_limits.hpp>
#include <indexshare/cuda/exec.cuh>

#include <indexshare/cuda/attention.cuh>
#include <indexshare/cuda/indexer.cuh>
#include <indexshare/cuda/selection.cuh>
#include <indexshare/cuda/topk.cuh>

#include <indexshare/cuda/append.cuh>
#include <indexshare/cuda/batch.cuh>
#include <indexshare/cuda/cache_writes.cuh>
#include <indexshare/cuda/frontend.cuh>
#include <indexshare/cuda/quantize.cuh>
#include <indexshare/cuda/records.cuh>
