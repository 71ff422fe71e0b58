#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# scripts/bench.sh cuda-sim    counters of every tuned CUDA kernel under an emulator that writes them
#                              (INDEXSHARE_CUDA_LAUNCHER, GPUSIM_STATS) -> build/release/bench/cuda_sim.json
# scripts/bench.sh cuda        times on this machine's GPU, Google Benchmark -> build/release/bench/cuda.json
# scripts/bench.sh compile     CPU time to compile the umbrella headers, beside headers that their users include anyway
set -euo pipefail
repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
source "$repo/scripts/_setup.sh"

usage() { sed -n '4,7s/^# //p' "${BASH_SOURCE[0]}" >&2; exit 2; }
[[ $# -ge 1 ]] || usage
mode=$1
shift

build() {  # build TARGET
  setup test
  has_nvcc || { echo "error: no CUDA compiler (nvcc) on this machine" >&2; exit 2; }
  cmake --preset release "${cmake_args[@]}" -DINDEXSHARE_BUILD_BENCHMARKS=ON \
    -DINDEXSHARE_CUDA_LAUNCHER="${INDEXSHARE_CUDA_LAUNCHER:-}" >/dev/null
  cmake --build build/release --target "$1" -j "$(jobs)"
  mkdir -p build/release/bench
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
    build indexshare_cuda_sim
    [[ -e build/ptxas.tsv && ! tests/cuda/hot_kernels.cu -nt build/ptxas.tsv ]] || scripts/ptxas.sh >/dev/null
    exec python3 bench/cuda/count.py --launcher "$INDEXSHARE_CUDA_LAUNCHER" \
      --program build/release/bin/indexshare_cuda_sim --ptxas build/ptxas.tsv \
      --out build/release/bench/cuda_sim.json "$@"
    ;;
  cuda)
    build indexshare_cuda_bench
    exec build/release/bin/indexshare_cuda_bench --benchmark_out=build/release/bench/cuda.json \
      --benchmark_out_format=json "$@"
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
