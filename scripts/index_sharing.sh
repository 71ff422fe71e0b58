#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# The experiment of docs/index_sharing.md: which layers of the three small models in examples/small_dsa can share, and what
# that costs. Installs what is missing, builds the programs, runs some minutes; a run that was stopped goes on where it was.
#   scripts/index_sharing.sh [--sequences N] [--held-out-sequences N] [--train] [--keep]
#     --sequences, --held-out-sequences   of small_dsa experiment
#     --train   trains the three models anew (hours; those that are there are kept; installs torch into build/venv)
#     --keep    also puts results and drawings where the repository has them: examples/small_dsa/results, docs
# Results: build/index_sharing, or build/index_sharing_trained with --train
set -euo pipefail
repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
source "$repo/scripts/_setup.sh"

sequences=128
held_out=256
train=no
keep=no
while (($#)); do
  case $1 in
    --sequences) sequences=${2:?--sequences: expected a number}; shift 2 ;;
    --held-out-sequences) held_out=${2:?--held-out-sequences: expected a number}; shift 2 ;;
    --train) train=yes; shift ;;
    --keep) keep=yes; shift ;;
    --help) sed -n '3,/^set/{/^set/d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"; exit ;;
    *) echo "error: $1: unknown option; --help lists them" >&2; exit 2 ;;
  esac
done
for option in "--sequences $sequences" "--held-out-sequences $held_out"; do
  if [[ ! ${option#* } =~ ^[1-9][0-9]*$ ]]; then
    echo "error: ${option%% *}: got \"${option#* }\", expected a whole number above 0" >&2
    exit 2
  fi
done

setup build
cd "$repo"
say "building build/release/bin"
mkdir -p build
log=$repo/build/index_sharing.log
# The first configuration asks for the programs alone; a tree that scripts/test.sh set up stays as it is.
if [[ ! -e build/release/CMakeCache.txt ]]; then
  cmake_args+=(-DINDEXSHARE_BUILD_TESTS=OFF -DINDEXSHARE_BUILD_BENCHMARKS=OFF)
fi
if ! { cmake --preset release "${cmake_args[@]}" &&
       cmake --build build/release --target small_dsa indexshare-overlap indexshare-search -j "$(jobs)"; } >"$log" 2>&1; then
  cat "$log"
  exit 1
fi

models=examples/small_dsa
results=build/index_sharing
if [[ $train == yes ]]; then
  results=build/index_sharing_trained
  models=$results
  if [[ ! -x build/venv/bin/python ]]; then
    python3 -c 'import ensurepip' 2>/dev/null || apt_install python3-venv
    python3 -m venv build/venv
  fi
  build/venv/bin/python -m pip install --quiet --disable-pip-version-check --requirement examples/small_dsa/requirements.txt
  for seed in 1 2 3; do
    [[ -e $models/seed$seed/check.safetensors ]] && continue  # written last
    say "training seed $seed"
    build/venv/bin/python examples/small_dsa/train.py --seed "$seed" --out "$models/seed$seed"
  done
fi

mkdir -p "$results"
# What a run writes gets its name once it is whole: one that fails leaves the results of an earlier one.
json=()
for seed in 1 2 3; do
  name=seed$seed
  say "$name: searching and comparing"
  build/release/bin/small_dsa experiment --model "$models/$name" --sequences "$sequences" \
    --held-out-sequences "$held_out" --json "$results/$name.json" --log "$results/$name-$sequences.log" --resume \
    2>"$results/$name.progress.part" | tee "$results/$name.txt.part" || { tail -n 1 "$results/$name.progress.part" >&2; exit 1; }
  mv "$results/$name.progress.part" "$results/$name.progress"
  mv "$results/$name.txt.part" "$results/$name.txt"
  json+=("$results/$name.json")
done

say "drawing"
build/release/bin/small_dsa plot --json "$(IFS=,; echo "${json[*]}")" --svg "$results/loss.svg"
rm -rf "$results/selections.part"
build/release/bin/small_dsa record --model "$models/seed1" --sequences 16 --out "$results/selections.part" >/dev/null
rm -rf "$results/selections"
mv "$results/selections.part" "$results/selections"
searched=$(sed -n 's/^ *8 shared, [^F]* \(F[FS]*\) .*/\1/p' "$results/seed1.txt")
build/release/bin/indexshare-overlap "$results/selections" --skip-short --pattern "$searched" --svg "$results/overlap.svg" \
  >"$results/overlap.txt.part"
mv "$results/overlap.txt.part" "$results/overlap.txt"
if [[ $keep == yes ]]; then
  mkdir -p examples/small_dsa/results
  for seed in 1 2 3; do
    cp "$results/seed$seed.json" examples/small_dsa/results/
    cp "$results/seed$seed-$sequences.log" "examples/small_dsa/results/seed$seed.log"
  done
  cp "$results/loss.svg" docs/index_sharing_loss.svg
  cp "$results/overlap.svg" docs/index_sharing_overlap.svg
fi
say "results in $results: seed1.json .. seed3.json, loss.svg, overlap.svg"
say "the programs are in build/release/bin: small_dsa, indexshare-overlap, indexshare-search"
