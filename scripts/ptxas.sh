#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Compiles the kernels to the machine code of every supported GPU generation. A spilled register or local memory in
# a hot kernel is an error; the general ones (any types and widths: *_any_*, *_scalar_*) are only reported. Prints
# registers per kernel and architecture, and writes build/ptxas.tsv: architecture, kernel, registers, static shared
# bytes, local bytes.
set -euo pipefail
repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
source "$repo/scripts/_setup.sh"
cd "$repo"
nvcc=$(find_nvcc) || { echo "no CUDA compiler (nvcc) on this machine" >&2; exit 2; }
architectures=(80 86 89 90 100 120)

mkdir -p build/ptxas
compile() {  # one architecture
  "$nvcc" -std=c++20 -O3 -Iinclude -cubin -gencode "arch=compute_$1,code=sm_$1" \
    -Xptxas -v,-warn-spills,-warn-lmem-usage tests/cuda/hot_kernels.cu -o "build/ptxas/sm_$1.cubin" \
    >"build/ptxas/sm_$1.log" 2>&1 || { cat "build/ptxas/sm_$1.log"; return 1; }
}
export -f compile
export nvcc
printf '%s\n' "${architectures[@]}" | xargs -P "$(jobs)" -I{} bash -c 'compile {}'

for architecture in "${architectures[@]}"; do
  awk -v architecture="sm_$architecture" '
    /Compiling entry function/ { split($0, part, "\047"); kernel = part[2] }
    /bytes stack frame/        { local = $1 }
    /Used [0-9]+ registers/ {
      registers = shared = 0
      for (i = 2; i <= NF; ++i) {
        if ($i ~ /^registers/) registers = $(i - 1)
        if ($i == "bytes" && $(i + 1) ~ /^smem/) shared = $(i - 1)
      }
      print architecture "\t" kernel "\t" registers "\t" shared "\t" local
    }' "build/ptxas/sm_$architecture.log"
done | c++filt -p >build/ptxas.tsv

awk -F'\t' '
  { name = $2; sub(/^(void )?indexshare::v0::detail::/, "", name); gsub(/indexshare::v0::(detail::)?/, "", name)
    if (!(name in seen)) { seen[name] = ++kernels; order[kernels] = name }
    if (!($1 in arch)) { arch[$1] = ++n; title[n] = $1 }
    registers[name, $1] = $3
    if ($5 > 0 && name ~ /_(any|scalar)_/) general += $5
    else if ($5 > 0) { hot += $5; print "error: " $1 ": " $5 " bytes of local memory in " name } }
  END {
    printf "registers per thread, %d kernels:", kernels
    for (i = 1; i <= n; ++i) printf " %7s", title[i]
    print ""
    for (k = 1; k <= kernels; ++k) {
      for (i = 1; i <= n; ++i) printf "%7s", registers[order[k], title[i]]
      print "  " order[k]
    }
    printf "local memory: %d bytes in hot kernels, %d in general ones, of all architectures\n", hot, general
    exit hot > 0
  }' build/ptxas.tsv
