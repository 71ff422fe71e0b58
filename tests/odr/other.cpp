// SPDX-License-Identifier: Apache-2.0
#include "use.hpp"

float other_result() { return odr::run_layer(indexshare::HostExec<>{}); }
void const* other_address() { return &indexshare::version_minor; }
