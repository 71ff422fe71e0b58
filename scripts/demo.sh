#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Installs what is missing, builds the programs and runs the main job: scripts/demo.sh [options of indexshare-demo]
# With --backend cuda it runs on the machine's GPU, or under the command in INDEXSHARE_CUDA_LAUNCHER.
set -euo pipefail
repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
source "$repo/scripts/_setup.sh"

setup build
cd "$repo"
say "building build/release/bin"
mkdir -p build
log=$repo/build/demo.log
# The first configuration asks for the programs alone; a tree that scripts/test.sh set up stays as it is.
if [[ ! -e build/release/CMakeCache.txt ]]; then
  cmake_args+=(-DINDEXSHARE_BUILD_TESTS=OFF -DINDEXSHARE_BUILD_BENCHMARKS=OFF)
fi
if ! { cmake --preset release "${cmake_args[@]}" &&
       cmake --build build/release --target indexshare-demo indexshare-inspect indexshare-compare -j "$(jobs)"; } >"$log" 2>&1; then
  cat "$log"
  exit 1
fi
launcher=()
[[ -n ${INDEXSHARE_CUDA_LAUNCHER:-} && " $* " == *" --backend cuda "* ]] && launcher=("$INDEXSHARE_CUDA_LAUNCHER")
exec "${launcher[@]}" build/release/bin/indexshare-demo "$@"
