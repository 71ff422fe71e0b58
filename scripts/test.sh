#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Installs what is missing, builds everything (programs in build/release/bin) and runs every test.
#   scripts/test.sh [arguments of ctest, such as -R '^topk']
# CUDA tests are built where there is a toolkit. They run on the machine's GPU, or under the command in
# INDEXSHARE_CUDA_LAUNCHER (an emulator); with neither they are skipped, with the reason.
# Last line: `N passed, N failed[, N skipped]`; exit status 0 if and only if nothing failed.
set -euo pipefail
repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
source "$repo/scripts/_setup.sh"

# Whatever ends the script before the tests have run counts as a failure, in the same form.
trap 'printf "no test was run (set-up or build failed)\n0 passed, 1 failed\n"' EXIT

setup test
cd "$repo"
say "building"
# The tests are built in the release tree: optimised, they run the sizes that matter, and assertions stay on in
# them (tests/CMakeLists.txt). Debug and sanitizer builds are .ci/run's.
cmake --preset release "${cmake_args[@]}" -DINDEXSHARE_BUILD_TESTS=ON -DINDEXSHARE_BUILD_BENCHMARKS=ON \
  -DINDEXSHARE_CUDA_LAUNCHER="${INDEXSHARE_CUDA_LAUNCHER:-}"
cmake --build build/release -j "$(jobs)"

say "testing"
summary=$repo/build/release/tests.xml
rm -f "$summary"
status=0
ctest --test-dir build/release --output-on-failure -j "$(jobs)" --output-junit "$summary" "$@" || status=$?
trap - EXIT
count() { sed -n "/<testsuite /,/>/s/.*[[:space:]]$1=\"\([0-9]*\)\".*/\1/p" "$summary" | head -n 1; }
total=$(count tests) failed=$(count failures) skipped=$(($(count skipped) + $(count disabled)))
if ((failed == 0 && status != 0)); then failed=1; fi  # ctest's own errors are failures too

if ((skipped)); then
  echo "skipped, with the reason:"
  awk '  # many tests may be skipped for one reason: each reason once, with its first test
    function note(reason) {
      gsub(/^ +| +$/, "", reason)
      if (!count[reason]++) first[reason] = name
      skipped = next_line = 0
    }
    /<testcase /         { name = $0; sub(/.* name="/, "", name); sub(/".*/, "", name); skipped = /status="notrun"/ }
    skipped && next_line { note($0) }
    skipped && /skipped: / { sub(/.*skipped: /, ""); sub(/<.*/, ""); note($0) }
    /explicitly with message/ { next_line = 1 }
    END { for (reason in count) {
      more = count[reason] > 1 ? " and " count[reason] - 1 " more" : ""
      print "  " first[reason] more ": " reason
    } }
  ' "$summary"
fi
printf '%d passed, %d failed%s\n' $((total - failed - skipped)) "$failed" "$( ((skipped)) && printf ', %d skipped' "$skipped")"
((failed == 0))
