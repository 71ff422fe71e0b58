// SPDX-License-Identifier: Apache-2.0
#pragma once

/// The one place of the version number; CMake reads it from here.
namespace indexshare {
inline namespace v0 {

inline constexpr int version_major = 0;
inline constexpr int version_minor = 1;
inline constexpr int version_patch = 0;

}  // namespace v0
}  // namespace indexshare
