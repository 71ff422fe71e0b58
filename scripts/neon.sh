#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# The host's case lists (top-k, indexer, attention, kernels) compiled for AArch64 and run under qemu: NEON is what
# HostIsa::portable is there. Installs the cross compiler and qemu-user if they are missing; without them, or on a
# machine whose packages have no arm64 Catch2, says so and does nothing.
set -euo pipefail
repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
source "$repo/scripts/_setup.sh"
cd "$repo"

skip() { echo "not run for NEON: $1"; exit 0; }

# Catch2 of the machine's own package source, for arm64, unpacked under build/: no foreign architecture is added.
fetch_catch2() {
  local state=build/neon-packages entry kind codename
  compgen -G "$state/root/usr/lib/*/libCatch2.a" >/dev/null && return
  codename=$(. /etc/os-release && printf '%s' "${VERSION_CODENAME:-}")
  entry=$(backports_entry "$codename" /etc/apt/sources.list.d/*.sources /etc/apt/sources.list \
    /etc/apt/sources.list.d/*.list) || return 1
  kind=$(sed -n '1s/^# //p' <<<"$entry")
  rm -rf "$state"
  mkdir -p "$state"/{lists,cache,sources,root}
  sed 1d <<<"$entry" >"$state/sources/backports.$kind"
  local options=(-o APT::Architecture=arm64 -o APT::Architectures::=arm64 -o Debug::NoLocking=1
    -o Dir::State::Lists="$repo/$state/lists" -o Dir::Cache="$repo/$state/cache" -o APT::Sandbox::User=root
    -o Dir::Etc::SourceList=/dev/null -o Dir::Etc::SourceParts="$repo/$state/sources")
  apt-get "${options[@]}" update -qq
  (cd "$state" && apt-get "${options[@]}" download -qq libcatch2-dev:arm64)
  dpkg -x "$state"/libcatch2-dev_*_arm64.deb "$state/root"
}

[[ $(uname -m) == x86_64 ]] || skip "this machine is $(uname -m)"
setup test
missing=()
has_command aarch64-linux-gnu-g++ || missing+=(g++-aarch64-linux-gnu)
has_command qemu-aarch64 || missing+=(qemu-user)
if ((${#missing[@]})); then apt_install "${missing[@]}" || true; fi
has_command aarch64-linux-gnu-g++ || skip "no cross compiler"
has_command qemu-aarch64 || skip "no qemu-user"
fetch_catch2 || skip "no Catch2 3 for arm64 in this machine's package sources"

tests=(topk indexer attention isa)
cmake -S . -B build/neon -G Ninja "${cmake_args[@]}" -DCMAKE_BUILD_TYPE=Debug -DCMAKE_CXX_FLAGS_DEBUG=-O1 -DCMAKE_SYSTEM_NAME=Linux \
  -DCMAKE_SYSTEM_PROCESSOR=aarch64 -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++ \
  -DCMAKE_CROSSCOMPILING_EMULATOR="qemu-aarch64;-L;/usr/aarch64-linux-gnu" \
  -DCatch2_DIR="$(dirname "$(find "$repo/build/neon-packages/root" -name Catch2Config.cmake)")" \
  -DINDEXSHARE_CUDA=OFF -DINDEXSHARE_COMPILE_TESTS=OFF -DINDEXSHARE_BUILD_BENCHMARKS=OFF \
  -DINDEXSHARE_BUILD_EXAMPLES=OFF >build/neon.log
cmake --build build/neon -j "$(jobs)" --target $(printf 'indexshare_%s_test ' "${tests[@]}")
for test in "${tests[@]}"; do
  say "$test under qemu-aarch64"
  qemu-aarch64 -L /usr/aarch64-linux-gnu "build/neon/tests/bin/indexshare_${test}_test" | tail -n 4
done
