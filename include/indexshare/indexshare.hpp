// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file Everything that a host compiler and the CCCL headers suffice for. The pipeline in order:
/// config -> plan -> indexer -> top-k -> selection -> attention -> layer; then what a layer would
/// run on a CUDA device, which need not be there.

#include <indexshare/version.hpp>

#include <indexshare/model_config.hpp>
#include <indexshare/share_plan.hpp>

#include <indexshare/cache_inventory.hpp>

#include <indexshare/share/every_layer.hpp>
#include <indexshare/share/mtp_draft.hpp>
#include <indexshare/share/pattern.hpp>
#include <indexshare/share/periodic.hpp>

#include <indexshare/attention/mla.hpp>
#include <indexshare/indexer/approximate_int8.hpp>
#include <indexshare/indexer/relu_dot.hpp>
#include <indexshare/selection.hpp>
#include <indexshare/topk/radix.hpp>

#include <indexshare/host/append.hpp>
#include <indexshare/host/approximate_int8.hpp>
#include <indexshare/host/attention.hpp>
#include <indexshare/host/batch.hpp>
#include <indexshare/host/indexer.hpp>
#include <indexshare/host/memory.hpp>
#include <indexshare/host/prefetch.hpp>
#include <indexshare/host/records.hpp>
#include <indexshare/host/selection.hpp>
#include <indexshare/host/shards.hpp>
#include <indexshare/host/topk.hpp>
#include <indexshare/reference.hpp>

#include <indexshare/handover.hpp>
#include <indexshare/layer.hpp>

#include <indexshare/cuda/capability.hpp>

#include <indexshare/accounting.hpp>
