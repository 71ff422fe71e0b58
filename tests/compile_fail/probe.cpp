// SPDX-License-Identifier: Apache-2.0
// Never compiled: see CMakeLists.txt.
