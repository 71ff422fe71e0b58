#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# scripts/bench.sh cuda-sim    counters of every tuned CUDA kernel under an emulator that writes them
#                              (INDEXSHARE_CUDA_LAUNCHER, GPUSIM_STATS) -> build/release/bench/cuda_sim.json
# scripts/bench.sh cuda        times on this machine's GPU, Google Benchmark -> build/release/bench/cuda.json
# scripts/bench.sh cpu         the host back end beside torch and this machine's peaks -> build/release/bench/cpu.json
#   --quick                    a few shapes, in less than 3 minutes (all: 25)
#   --no-peers                 without torch; else it is installed into build/peers-venv on the first run
#                              (some gigabytes; bench/peers/requirements.txt); others: bench/cpu.py --help
# scripts/bench.sh recall      what ApproximateInt8Indexer finds of exact selections, on synthetic data
# scripts/bench.sh compile     CPU time to compile the umbrella headers, beside headers that their users include anyway
set -euo pipefail
repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
source "$repo/scripts/_setup.sh"

usage() { sed -n '4,12s/^# //p' "${BASH_SOURCE[0]}" >&2; exit 2; }
[[ $# -ge 1 ]] || usage
mode=$1
shift

build() {  # build TARGET [CMAKE_ARGUMENT...]
  cmake --preset release "${cmake_args[@]}" -DINDEXSHARE_BUILD_BENCHMARKS=ON "${@:2}" >/dev/null
  cmake --build build/release --target "$1" -j "$(jobs)"
  mkdir -p build/release/bench
}
build_cuda() {  # build_cuda TARGET
  setup test
  has_nvcc || { echo "error: no CUDA compiler (nvcc) on this machine" >&2; exit 2; }
  build "$1" -DINDEXSHARE_CUDA_LAUNCHER="${INDEXSHARE_CUDA_LAUNCHER:-}"
}

# Prints the Python that has torch as pinned; installs it where it is missing.
torch_python() {
  local venv=$repo/build/peers-venv pins=$repo/bench/peers/requirements.txt
  if ! cmp -s "$pins" "$venv/installed.txt"; then
    say "installing torch into build/peers-venv" >&2
    { python3 -m venv --clear "$venv" && "$venv/bin/pip" install --quiet --disable-pip-version-check -r "$pins" &&
      "$venv/bin/python" -c 'import torch' && cp "$pins" "$venv/installed.txt"; } >&2 || return 1
  fi
  echo "$venv/bin/python"
}

cd "$repo"
case $mode in
  cuda-sim)
    if [[ -z ${INDEXSHARE_CUDA_LAUNCHER:-} ]]; then
      if [[ ! -x build/gpusim/gpusim-run ]]; then
        echo "error: set INDEXSHARE_CUDA_LAUNCHER to an emulator that writes GPUSIM_STATS" >&2
        exit 2
      fi
      export INDEXSHARE_CUDA_LAUNCHER=$repo/build/gpusim/gpusim-run
    fi
    build_cuda indexshare_cuda_sim
    [[ -e build/ptxas.tsv && ! tests/cuda/hot_kernels.cu -nt build/ptxas.tsv ]] || scripts/ptxas.sh >/dev/null
    exec python3 bench/cuda/count.py --launcher "$INDEXSHARE_CUDA_LAUNCHER" \
      --program build/release/bin/indexshare_cuda_sim --ptxas build/ptxas.tsv \
      --out build/release/bench/cuda_sim.json "$@"
    ;;
  cuda)
    build_cuda indexshare_cuda_bench
    exec build/release/bin/indexshare_cuda_bench --benchmark_out=build/release/bench/cuda.json \
      --benchmark_out_format=json "$@"
    ;;
  cpu)
    peers=yes
    arguments=()
    for argument in "$@"; do
      if [[ $argument == --no-peers ]]; then peers=no; else arguments+=("$argument"); fi
    done
    setup test
    build indexshare_bench
    python=
    if [[ $peers == yes ]] && ! python=$(torch_python); then
      say "no torch (see above): going on without it, the ratios will be missing"
    fi
    exec python3 bench/cpu.py --program build/release/bin/indexshare_bench --out build/release/bench/cpu.json \
      --torch-python "$python" "${arguments[@]}"
    ;;
  recall)
    setup test
    build indexshare_int8_recall >/dev/null
    exec build/release/bin/indexshare_int8_recall
    ;;
  compile)
    setup build
    cccl=$(cccl_include)
    nvcc=
    if has_nvcc; then nvcc="$(find_nvcc) -std=c++20 -O3 -Iinclude -arch=compute_80"; fi
    exec python3 bench/compile_time.py --cxx "g++ -std=c++20 -O2 -Iinclude -isystem $cccl" --nvcc "$nvcc" "$@"
    ;;
  *) usage ;;
esac
