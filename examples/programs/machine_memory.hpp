// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <unistd.h>

#include <cstdint>
#include <string>

namespace programs {

/// Bytes of this machine's memory.
inline double machine_memory() {
  return static_cast<double>(sysconf(_SC_PHYS_PAGES)) * static_cast<double>(sysconf(_SC_PAGE_SIZE));
}

/// `3 GiB`, rounded up.
inline std::string gib_text(double bytes) {
  return std::to_string(static_cast<std::int64_t>(bytes / (1 << 30)) + 1) + " GiB";
}

}  // namespace programs
