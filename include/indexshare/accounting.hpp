// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file What a model's sparse attention costs, counted from its config alone: all of accounting/.
/// Counts are of arithmetic and of bytes; neither is a time, and a ratio of counts is not a
/// speed-up.
///
/// MTP layers are left out. Doubles: a count below 2^53 is exact, a larger one does not wrap.

#include <indexshare/accounting/bytes.hpp>
#include <indexshare/accounting/flops.hpp>
#include <indexshare/accounting/named.hpp>
#include <indexshare/accounting/parameters.hpp>
#include <indexshare/accounting/rows.hpp>
