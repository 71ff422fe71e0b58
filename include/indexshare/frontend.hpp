// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file The optional front end with its host back end: hidden states -> inputs of a layer, output
/// of a layer -> output of the self-attention module. Not part of indexshare.hpp.

#include <indexshare/frontend/activations.hpp>
#include <indexshare/frontend/cache_writes.hpp>
#include <indexshare/frontend/front_end.hpp>
#include <indexshare/frontend/keys.hpp>
#include <indexshare/frontend/output.hpp>
#include <indexshare/frontend/product.hpp>
#include <indexshare/frontend/quantize.hpp>
#include <indexshare/frontend/queries.hpp>
#include <indexshare/frontend/rotary.hpp>
#include <indexshare/frontend/weights.hpp>

#include <indexshare/host/append.hpp>
#include <indexshare/host/cache_writes.hpp>
#include <indexshare/host/frontend.hpp>
#include <indexshare/host/product.hpp>
#include <indexshare/host/quantize.hpp>
