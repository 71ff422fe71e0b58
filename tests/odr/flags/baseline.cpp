// SPDX-License-Identifier: Apache-2.0
#include "body.hpp"

double flags::baseline(indexshare::HostIsa isa) { return run(isa); }
