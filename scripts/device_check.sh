#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# On a machine with a GPU: builds for it, runs the CUDA tests and the benchmarks, and writes one JSON with the GPU,
# the driver, and each shape's time, rates and fraction of the limit (and torch's time, where torch with CUDA is
# installed). Meant to take less than 8 minutes.
#   scripts/device_check.sh [OUT.json] [PEAK_TFLOPS]     default build/device_check.json; PEAK_TFLOPS: dense bf16
#                                                         rate of the tensor cores, for the fraction of the limit
# Everything happens in build/device; nothing is installed but what scripts/test.sh installs.
set -euo pipefail
repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
source "$repo/scripts/_setup.sh"
out=${1:-$repo/build/device_check.json}
peak=${2:-0}
cd "$repo"

has_nvcc || { echo "error: no CUDA compiler (nvcc) on this machine" >&2; exit 2; }
command -v nvidia-smi >/dev/null && nvidia-smi -L || { echo "error: no NVIDIA GPU on this machine" >&2; exit 2; }
began=$SECONDS
elapsed() { echo $((SECONDS - began)); }

setup test
say "building for this GPU"
cmake -S . -B build/device -G Ninja -DCMAKE_BUILD_TYPE=Release -DCMAKE_CUDA_ARCHITECTURES=native \
  -DINDEXSHARE_CUDA=ON -DINDEXSHARE_COMPILE_TESTS=OFF "${cmake_args[@]}" >/dev/null
cmake --build build/device -j "$(nproc)" --target indexshare_cuda_tests indexshare_cuda_bench
build_seconds=$(elapsed)

say "testing"
mkdir -p "$(dirname "$out")"
status=0
timeout 200 ctest --test-dir build/device -L cuda -j 4 --output-on-failure --output-junit tests.xml || status=$?
test_seconds=$(($(elapsed) - build_seconds))

say "measuring"
bench=build/device/bench.json
timeout 180 build/device/bin/indexshare_cuda_bench --peak_tflops="$peak" --benchmark_min_time=0.02 \
  --benchmark_out="$bench" --benchmark_out_format=json || echo "the benchmarks did not finish"
peer=build/device/torch.json
rm -f "$peer"
if python3 -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null; then
  timeout 90 python3 bench/cuda/torch_peer.py --shapes "$bench" --out "$peer" || echo "the torch peer did not finish"
else
  echo "torch with CUDA is not installed: no peer"
fi

python3 - "$out" "$bench" "$peer" build/device/tests.xml "$status" "$build_seconds" "$test_seconds" <<'PYTHON'
import json, re, subprocess, sys
out, bench, peer, junit, status, build, test = sys.argv[1:]

def load(path):
    try:
        with open(path) as file:
            return json.load(file)
    except (OSError, ValueError):
        return None

gpu = subprocess.run(["nvidia-smi", "--query-gpu=name,driver_version,memory.total,clocks.max.sm", "--format=csv,noheader"],
                     capture_output=True, text=True).stdout.strip()
suite = re.search(r'<testsuite [^>]*', open(junit).read(), re.S)
numbers = {key: int(value) for key, value in re.findall(r'(tests|failures|skipped|disabled)="(\d+)"', suite.group(0))} if suite else {}
times = load(bench)
torch = load(peer) or {}
shapes = []
for row in (times or {}).get("benchmarks", []):
    shape = {"name": row["name"].replace("/manual_time", "")}
    if row.get("error_occurred"):
        shape["error"] = row["error_message"]
    else:
        shape["microseconds"] = row["real_time"]
        for key in ("GB_per_s", "TFLOP_per_s", "fraction_of_limit"):
            shape[key] = row.get(key)
        if shape["name"] in torch:
            shape["torch_microseconds"] = torch[shape["name"]]
    shapes.append(shape)
report = {"gpu": gpu, "context": (times or {}).get("context"), "tests": numbers, "tests_status": int(status),
          "build_seconds": int(build), "test_seconds": int(test), "shapes": shapes}
with open(out, "w") as file:
    json.dump(report, file, indent=1)
    file.write("\n")
print(f"{out}: {len(shapes)} shapes, tests {numbers}")
PYTHON
exit "$status"
