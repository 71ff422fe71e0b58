# SPDX-License-Identifier: Apache-2.0
#
# Sourced by scripts/*.sh and .ci/run; call `setup LEVEL`. Installs what is missing and nothing else: no network
# is used on a machine that has everything.
#   setup build   compiler, cmake, ninja, nlohmann_json, CCCL headers
#   setup test    + Catch2 3, Google Benchmark
#   setup ci      + clang and its OpenMP
# Sets cmake_args, the arguments for configuring on this machine.

[[ -n ${repo:-} ]] || repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cmake_args=()

say() { printf '== %s\n' "$*"; }

as_root() {
  if [[ $(id -u) == 0 ]]; then "$@"; else sudo "$@"; fi
}
apt_get() {
  as_root env DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=300 "$@"
}
can_install() {
  command -v apt-get >/dev/null && { [[ $(id -u) == 0 ]] || command -v sudo >/dev/null; }
}

has_command() { command -v "$1" >/dev/null; }
has_header() {  # a header on the default include path
  has_command g++ && printf '#include <%s>\n' "$1" | g++ -std=c++20 -E -x c++ - >/dev/null 2>&1
}
has_cmake() {
  local have
  has_command cmake && have=$(cmake --version | sed -n '1s/.* //p') &&
    [[ $(printf '%s\n' 3.24 "$have" | sort -V | head -n 1) == 3.24 ]]
}
has_candidate() { [[ $(apt-cache policy "$1" | sed -n 's/^ *Candidate: //p') =~ [0-9] ]]; }

# apt_install PACKAGE...: with the package lists at hand if they know the packages, else with fresh ones.
apt_install() {
  local package fresh=no
  if ! can_install; then
    say "missing: $* - not installed (needs apt-get and root or sudo); trying without"
    return 0
  fi
  say "installing: $*"
  for package in "$@"; do
    if [[ $fresh == no ]] && ! has_candidate "$package"; then apt_update; fresh=yes; fi
  done
  apt_get install -y --no-install-recommends "$@" && return 0
  [[ $fresh == no ]] && apt_update && apt_get install -y --no-install-recommends "$@"
}
# One unreachable source among several is no reason to stop: the installation shows what is really missing.
apt_update() { apt_get update || say "apt-get update reported errors (see above), going on"; }

# Where CMake looks for the CUDA compiler too (cmake/IndexshareCUDA.cmake).
find_nvcc() {
  local root
  command -v nvcc && return
  for root in "${CUDA_PATH:-}" "${CUDA_HOME:-}" /usr/local/cuda; do
    if [[ -n $root && -x $root/bin/nvcc ]]; then echo "$root/bin/nvcc"; return; fi
  done
  return 1
}
has_nvcc() { find_nvcc >/dev/null; }

# ---- Catch2 3: in main of newer releases, in the backports of Debian 12 ----------------------------------

catch2_candidate() { apt-cache policy catch2 | sed -n 's/^ *Candidate: //p'; }
catch2_versions() { apt-cache madison catch2 | sed 's/^[^|]*| *\([^ |]*\).*/\1/'; }

# backports_entry CODENAME SOURCE...: the machine's own entry for CODENAME, its suite replaced by the backports.
# Everything else of the entry (address, options, key) is the machine's. Prints the file's text; the first line
# says its format, "# sources" or "# list".
backports_entry() {
  local codename=$1 source entry
  shift
  for source in "$@"; do
    [[ -r $source ]] || continue
    case $source in
      *.sources)  # paragraphs of "Field: value"
        entry=$(awk -v RS= -v codename="$codename" '
          {
            types = suites = ""; enabled = 1; out = ""
            n = split($0, lines, "\n")
            for (i = 1; i <= n; ++i) {
              line = lines[i]
              if (line ~ /^Types:/) { types = line; line = "Types: deb" }
              else if (line ~ /^Suites:/) { suites = line " "; line = "Suites: " codename "-backports" }
              else if (line ~ /^Components:/) line = "Components: main"
              else if (line ~ /^Enabled: *no/) enabled = 0
              else if (line ~ /^#/) continue
              out = out line "\n"
            }
            if (enabled && types ~ /[ \t]deb( |$)/ && suites ~ ("[ \t]" codename "[ \t]")) {
              printf "# sources\n%s", out
              exit
            }
          }' "$source") ;;
      *)  # lines "deb [options] address suite component..."
        entry=$(sed -nE "s/^deb[ \t]+((\[[^]]*\][ \t]+)?[^ \t]+)[ \t]+$codename[ \t]+.*/# list\ndeb \1 $codename-backports main/p" \
          "$source" | head -n 2) ;;
    esac
    if [[ -n $entry ]]; then printf '%s\n' "$entry"; return 0; fi
  done
  return 1
}

install_catch2() {
  local codename entry file version
  if ! can_install; then apt_install catch2; return; fi
  has_candidate catch2 || apt_update
  if [[ ! $(catch2_versions) =~ (^|$'\n')([3-9]|[1-9][0-9])\. ]]; then
    codename=$(. /etc/os-release && printf '%s' "${VERSION_CODENAME:-}")
    if ! entry=$(backports_entry "$codename" /etc/apt/sources.list.d/*.sources /etc/apt/sources.list \
        /etc/apt/sources.list.d/*.list); then
      say "Catch2 3 is not in this machine's package sources, and no source entry for '$codename' was found to derive the backports from"
      return 1
    fi
    file=/etc/apt/sources.list.d/indexshare-backports.$(sed -n '1s/^# //p' <<<"$entry")
    say "adding $codename-backports ($file) for Catch2 3"
    as_root tee "$file" >/dev/null <<<"$(sed 1d <<<"$entry")"
    # Only this source, keeping the lists of the others.
    local parts
    parts=$(mktemp -d) && cp "$file" "$parts/" && chmod 755 "$parts"
    apt_get update -o Dir::Etc::SourceList=/dev/null -o Dir::Etc::SourceParts="$parts" -o APT::Get::List-Cleanup=0
    rm -r "$parts"
  fi
  if [[ $(catch2_candidate) =~ ^([3-9]|[1-9][0-9])\. ]]; then
    apt_install catch2
  else  # backports are never chosen by themselves
    version=$(catch2_versions | sort -V | tail -n 1)
    say "installing: catch2 $version"
    apt_get install -y --no-install-recommends "catch2=$version" "libcatch2-dev=$version"
  fi
}

# ---- CCCL: of a CUDA toolkit >= 13 if there is one, else of the pinned wheel, unpacked under build/ --------

toolkit_cccl() {  # prints its directory
  local nvcc root
  nvcc=$(command -v nvcc || true)
  for root in "${CUDA_PATH:-}" "${CUDA_HOME:-}" "${nvcc%/bin/nvcc}" /usr/local/cuda; do
    if [[ -n $root && -e $root/include/cccl/cuda/std/mdspan ]]; then echo "$root/include/cccl"; return; fi
  done
  return 1
}
has_toolkit_cccl() { toolkit_cccl >/dev/null; }
cccl_include() {  # after setup
  toolkit_cccl || printf '%s\n' "${cmake_args[@]}" | sed -n 's/^-DINDEXSHARE_CCCL_INCLUDE_DIR=//p' | head -n 1
}

fetch_cccl() {
  local requirement=$repo/scripts/cccl-wheel.txt version target include unpack
  version=$(sed -n 's/^nvidia-cuda-cccl==\([0-9.]*\).*/\1/p' "$requirement")
  target=$repo/build/_deps/cccl-$version
  include=$target/nvidia/cu13/include/cccl
  if [[ ! -e $include/cuda/std/mdspan ]]; then
    if ! has_command python3 || ! python3 -m pip --version >/dev/null 2>&1; then apt_install python3-pip; fi
    say "fetching the CCCL headers $version"
    mkdir -p "$repo/build/_deps"
    rm -rf "$repo"/build/_deps/unpack.*
    unpack=$(mktemp -d "$repo/build/_deps/unpack.XXXXXX")
    # Headers are the same for every platform, so one wheel with one hash serves all.
    python3 -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: \
      --platform manylinux2014_x86_64 --require-hashes --requirement "$requirement" --dest "$unpack"
    python3 -m zipfile -e "$unpack"/nvidia_cuda_cccl-*.whl "$unpack/tree"
    rm -rf "$target"
    mv "$unpack/tree" "$target"  # in one step: an interrupted fetch leaves nothing that looks complete
    rm -r "$unpack"
  fi
  cmake_args+=("-DINDEXSHARE_CCCL_INCLUDE_DIR=$include")
}

# ---- All of it -------------------------------------------------------------------------------------------

setup() {
  local level=$1 missing=()
  has_command g++ || missing+=(g++)
  has_cmake || missing+=(cmake)
  has_command ninja || missing+=(ninja-build)
  has_header nlohmann/json.hpp || missing+=(nlohmann-json3-dev)
  if [[ $level != build ]]; then
    has_header benchmark/benchmark.h || missing+=(libbenchmark-dev)
  fi
  if [[ $level == ci ]]; then
    has_command clang++ || missing+=(clang)
    compgen -G '/usr/lib/llvm-*/lib/clang/*/include/omp.h' >/dev/null || missing+=(libomp-dev)
  fi
  if ((${#missing[@]})); then apt_install "${missing[@]}"; fi
  if [[ $level != build ]]; then has_header catch2/catch_test_macros.hpp || install_catch2; fi

  if [[ -n ${INDEXSHARE_CCCL_INCLUDE_DIR:-} ]]; then
    cmake_args+=("-DINDEXSHARE_CCCL_INCLUDE_DIR=$INDEXSHARE_CCCL_INCLUDE_DIR")
  elif ! has_toolkit_cccl; then
    fetch_cccl
  fi

  # Warnings are errors with the compilers that CI has seen, those of Debian 12; a newer one may know new warnings.
  if [[ -r /etc/os-release && $(. /etc/os-release && printf '%s' "${VERSION_CODENAME:-}") == bookworm ]]; then
    cmake_args+=(-DINDEXSHARE_WERROR=ON)
  fi
}

# Half of a big machine, all of a small one.
jobs() {
  local cores
  cores=$(nproc)
  echo $((cores > 4 ? cores / 2 : cores))
}
