# SPDX-License-Identifier: Apache-2.0
"""Times the compilation of the umbrella headers against a header that their users include anyway.

Called by scripts/bench.sh compile. CPU seconds, compilers and headers taken in turn, medians of several rounds.
"""

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile

# umbrella and its peer
HOST = ("indexshare/indexshare.hpp", "cuda/std/mdspan")
CUDA = ("indexshare/indexshare.cuh", "cub/block/block_radix_sort.cuh")


def cpu_seconds(command, header, suffix, folder):
    source = os.path.join(folder, "unit" + suffix)
    with open(source, "w") as file:
        file.write(f"#include <{header}>\nint main() {{}}\n")
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command + ["-c", source, "-o", os.path.join(folder, "unit.o")])
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode != 0:
        sys.exit(f"{header} does not compile")
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cxx", required=True, help="command of the host compiler with its include paths")
    parser.add_argument("--nvcc", default="", help="the same of nvcc; without it only the host's header is timed")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    compilers = [(options.cxx.split(), ".cpp", HOST)]
    if options.nvcc:
        compilers.append((options.nvcc.split(), ".cu", CUDA))
    for command, suffix, headers in compilers:
        times = {header: [] for header in headers}
        with tempfile.TemporaryDirectory() as folder:
            for _ in range(options.rounds):
                for header in headers:
                    times[header].append(cpu_seconds(command, header, suffix, folder))
        ours, peer = (statistics.median(times[header]) for header in headers)
        print(f"{headers[0]:28}{ours:6.2f} s   {headers[1]:32}{peer:6.2f} s   ratio {ours / peer:.2f}")


if __name__ == "__main__":
    main()
