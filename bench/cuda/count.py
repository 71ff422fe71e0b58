# SPDX-License-Identifier: Apache-2.0
"""Runs each counted case under an emulator and holds its counters against what the algorithm needs.

Called by scripts/bench.sh cuda-sim. One record per case and kernel, and one per case ("kernel": "all").

  global_sector_ratio     bytes of all 32-byte sectors touched, over the least possible: for scoring the unique bytes
                          times the groups of a request's query rows that read its keys again; for top-k the unique
                          bytes; for attention the gathered rows alone: sectors loaded but for those of queries and
                          slot lists, over the rows' bytes times the groups of heads that gather them again
  strict_sector_ratio     scoring, over the unique bytes and the keys alone once more for each further group of rows
  partial_ratio           attention whose keys are split: bytes of partial results written, over the gathered rows'
  shared_wavefront_ratio  shared-memory wavefronts over the conflict-free number
  mma_ratio               FLOPs of mma instructions over those of the algorithm
  instructions_per_item   PTX warp instructions per score, or per gathered key and 64 heads
  local_bytes, registers  ptxas, the most of all architectures; smem_bytes: static and dynamic, per block
"""

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile


def simple_name(kernel):
    """Kernel name without arguments, namespaces and template arguments."""
    name = kernel.split("(")[0].split("<")[0].split()[-1]
    return name.split("::")[-1]


def sector_bytes(counters):
    sectors = sum(
        counters[key]
        for key in ("global_load_sectors", "global_store_sectors", "bulk_load_sectors", "bulk_store_sectors")
    )
    return 32 * sectors


def number_after(word, text):
    return int(text.split(word + " ")[1].split(",")[0])


def row_groups(work):
    """Groups of a request's rows that read its keys."""
    rows = number_after("rows", work["case"]) / number_after("requests", work["case"])
    return math.ceil(rows / work["rows_per_block"])


def strict_sector_ratio(work, counters):
    if work["stage"] != "score":
        return None
    least = counters["global_unique_bytes"] + (row_groups(work) - 1) * work["key_bytes"]
    return ratio(sector_bytes(counters), least)


def sector_ratio(work, kernel, counters):
    unique = counters["global_unique_bytes"]
    if work["stage"] == "score":
        return ratio(sector_bytes(counters), unique * row_groups(work))
    if work["stage"] == "attend":
        if kernel != "attend_tensor_kernel":
            return None
        rows, heads = number_after("rows", work["case"]), number_after("heads", work["case"])
        groups = math.ceil(heads / work["heads_per_block"])
        splits = counters["blocks"] / (rows * groups)
        besides = work["query_bytes"] * splits + work["slot_bytes"] * groups
        loaded = 32 * (counters["global_load_sectors"] + counters["bulk_load_sectors"])
        return ratio(loaded - besides, work["gathered_bytes"] * groups)
    return ratio(sector_bytes(counters), unique)


def partial_ratio(work, kernel, counters):
    """Partial results are what the attention kernel stores in calls that a merge finishes."""
    if kernel != "attend_tensor_kernel" or not work["merged"]:
        return None
    return ratio(32 * counters["global_store_sectors"], work["gathered_bytes"] * 1.0)


def ratio(a, b):
    return round(a / b, 4) if b else None


def record(work, kernel, counters, ptxas):
    flops = sum(counters["mma_flops"].values())
    matching = [row for name, row in ptxas.items() if simple_name(name) == kernel] if kernel != "all" else []
    return {
        "stage": work["stage"],
        "case": work["case"],
        "kernel": kernel,
        "items": work["items"],
        "launches": counters["launches"],
        "blocks": counters["blocks"],
        "global_sector_ratio": sector_ratio(work, kernel, counters),
        "strict_sector_ratio": strict_sector_ratio(work, counters),
        "partial_ratio": partial_ratio(work, kernel, counters),
        "global_bytes": sector_bytes(counters),
        "unique_bytes": counters["global_unique_bytes"],
        "gathered_bytes": work["gathered_bytes"],
        "shared_wavefront_ratio": ratio(counters["shared_wavefronts"], counters["shared_wavefronts_ideal"]),
        "mma_ratio": ratio(flops, work["flops"]) if flops else None,
        "instructions_per_item": ratio(counters["warp_instructions"], work["items"]),
        "local_bytes": max((row[1] for row in matching), default=None),
        "registers": max((row[0] for row in matching), default=None),
        "smem_bytes": counters["shared_bytes"] or None,
    }


def total(parts):
    """Sum of the counters of several kernels."""
    out = {}
    for part in parts:
        for key, value in part.items():
            if isinstance(value, dict):
                mine = out.setdefault(key, {})
                for name, number in value.items():
                    mine[name] = mine.get(name, 0) + number
            elif isinstance(value, (int, float)):
                out[key] = out.get(key, 0) + value
    out["shared_bytes"] = 0
    return out


def read_ptxas(path):
    kernels = {}
    with open(path) as lines:
        for line in lines:
            _, kernel, registers, _, local = line.rstrip("\n").split("\t")
            most = kernels.get(kernel, (0, 0))
            kernels[kernel] = (max(most[0], int(registers)), max(most[1], int(local or 0)))
    return kernels


def run_case(launcher, program, name):
    with tempfile.TemporaryDirectory() as folder:
        stats = os.path.join(folder, "stats.json")
        environment = dict(os.environ, GPUSIM_STATS=stats, GPUSIM_THREADS="1", GPUSIM_DEVICE="h200")
        for check in ("GPUSIM_RACECHECK", "GPUSIM_INITCHECK", "GPUSIM_SEED"):
            environment.pop(check, None)
        done = subprocess.run([launcher, program, "run", name], env=environment, capture_output=True, text=True)
        if done.returncode != 0:
            sys.exit(f"{name}: {done.stderr or done.stdout}")
        with open(stats) as file:
            return json.loads(done.stdout), json.load(file)["kernels"]


def cell(value):
    return "-" if value is None else f"{value:.2f}" if value < 5 else f"{value:.1f}"


def merged_rows(records):
    """One row per case: the numbers of its first kernel, and as `total` the instructions of all of them."""
    cases = {}
    for record in records:
        row = cases.setdefault(record["case"], dict(record))
        row["total"] = record["instructions_per_item"]
    return cases.values()


def print_tables(records):
    """The tables of docs/performance.md."""
    columns = {
        "global_sector_ratio": "sectors",
        "strict_sector_ratio": "strict",
        "partial_ratio": "partials / KV",
        "shared_wavefront_ratio": "waves",
        "mma_ratio": "MMA",
        "instructions_per_item": "instructions",
        "total": "with merge",
    }
    shown = {
        "score": ("global_sector_ratio", "strict_sector_ratio", "shared_wavefront_ratio", "mma_ratio", "instructions_per_item"),
        "topk": ("global_sector_ratio", "shared_wavefront_ratio", "instructions_per_item"),
        "attend": tuple(name for name in columns if name != "strict_sector_ratio"),
    }
    for stage, names in shown.items():
        # top-k's kernels belong together, so its row is that of all; attention's merge is told apart
        chosen = [row for row in records if row["stage"] == stage]
        last = {row["case"]: row for row in chosen}
        rows = list(last.values()) if stage == "topk" else list(merged_rows(chosen))
        if not rows:
            continue
        print("| " + " | ".join([stage] + [columns[name] for name in names]) + " |")
        print("|---" * (len(names) + 1) + "|")
        for row in rows:
            print("| " + " | ".join([row["case"].removeprefix(stage + " ")] + [cell(row[name]) for name in names]) + " |")
        print()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--launcher", required=True)
    parser.add_argument("--program", required=True)
    parser.add_argument("--ptxas", required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    options = parser.parse_args()

    names = subprocess.run([options.program, "list"], capture_output=True, text=True, check=True).stdout.splitlines()
    ptxas = read_ptxas(options.ptxas)
    records = []
    for name in names:
        if options.only not in name:
            continue
        work, kernels = run_case(options.launcher, options.program, name)
        ours = [kernel for kernel in kernels if "indexshare::v0::detail" in kernel["name"]]
        work["merged"] = len(ours) > 1
        for kernel in ours:
            records.append(record(work, simple_name(kernel["name"]), kernel, ptxas))
        if len(ours) > 1:
            records.append(record(work, "all", total(ours), ptxas))
    with open(options.out, "w") as file:
        json.dump({"device": "h200 (emulated)", "records": records}, file, indent=1)
        file.write("\n")
    print_tables(records)


if __name__ == "__main__":
    main()
