# SPDX-License-Identifier: Apache-2.0
"""Times the host back end beside torch and the machine's peaks. Called by scripts/bench.sh cpu.

Every round goes through the shapes. For each, one process of the program measures the FMA peak of as many threads (for
scores of bf16 the peak of multiplying bf16, for top-k that of reading memory) and the shape; then a torch process,
which stays alive, measures its formulation (bench/peers/torch_cpu.py). Ratios and fractions are taken within a round,
then the median over the rounds. Prints tables and writes one JSON file.
"""

import argparse
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import time

# Names of the program (see --benchmark_list_tests --benchmark_filter=.), whole, as regular expressions.
FULL = (
    "peak/.*",
    "(score|select)/bf16/decode/.*/threads:1",
    "(score|select)/bf16/decode/batch:1/keys:(64K|256K)/threads:2",
    "score/(fp16|fp32|e4m3)/decode/batch:1/keys:(8K|64K|256K)/threads:1",
    "select/e4m3/decode/batch:1/keys:64K/threads:1",
    "topk/random/.*/threads:1",
    "topk/.*/keys:(64K|1M)/threads:1",
    "attention/bf16/decode/.*/threads:1",
    "attention/(fp16|e4m3)/decode/batch:1/keys:(64K|256K)/threads:1",
    "attention/(bf16|e4m3)/decode/batch:1/keys:64K/threads:2",
    "layer_.*/decode/.*/threads:1",
    "layer_full/.*/decode/.*/keys:(64K|256K)/threads:2",
    "score/bf16/prefill/.*/threads:1",
    "score/e4m3/prefill/rows:512/keys:64K/threads:1",
    "select/bf16/prefill/rows:512/.*/threads:1",
    "attention/(bf16|e4m3)/prefill/rows:512/keys:64K/threads:1",
    "attention/bf16/prefill/rows:2048/keys:64K/threads:1",
    "layer_full/bf16/prefill/.*/keys:(8K|16K|64K)/threads:1",
    "layer_shared/bf16/prefill/rows:512/keys:64K/threads:1",
    "(score|attention|layer_full)/bf16/prefill/rows:512/keys:64K/threads:2",
)
QUICK = (
    "peak/.*",
    "(score|select|attention|layer_full)/bf16/decode/batch:1/keys:(8K|64K)/threads:1",
    "(score|attention|layer_full)/bf16/decode/batch:1/keys:64K/threads:2",
    "(score|attention)/e4m3/decode/batch:1/keys:64K/threads:1",
    "topk/(random|ascending|zero)/keys:64K/threads:1",
    "topk/random/keys:1M/threads:1",
    "(score|layer_full)/bf16/prefill/rows:512/keys:8K/threads:1",
)
MEMORY = "layer_full/bf16/prefill/rows:2048/keys:256K/threads:1"
SUFFIX = "/process_time/real_time"  # that Google Benchmark adds


def number(text):
    units = {"K": 2**10, "M": 2**20}
    return int(text[:-1]) * units[text[-1]] if text[-1] in units else int(text)


def shape_of(name):
    """The fields of a record: stage, type (or the order of top-k's scores), mode, extents, threads."""
    parts = name.split("/")
    extents = {part.split(":")[0]: number(part.split(":")[1]) for part in parts if ":" in part}
    shape = {"stage": parts[0], "type": parts[1], "mode": "prefill" if "prefill" in parts else "decode"}
    shape |= {"requests": extents.get("batch", 1), "rows": extents.get("rows", 1), "keys": extents.get("keys", 0)}
    return shape | {"pages": "contiguous" not in parts, "threads": extents["threads"]}


class Program:
    """Our side: a process per measurement."""

    def __init__(self, path, isa, clock):
        self.command = [path, "--benchmark_format=json"] + ([f"--isa={isa}"] if isa else [])
        self.clock = clock
        self.context = {}

    def names(self):
        command = [self.command[0], "--benchmark_list_tests", "--benchmark_filter=."]
        lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
        return [line.removesuffix(SUFFIX) for line in lines]

    def measure(self, names, seconds, repetitions):
        """For each name the medians over the repetitions; times in ms, rates per second."""
        pattern = "|".join(f"^{name}{SUFFIX}$" for name in names)
        arguments = [f"--benchmark_filter={pattern}", f"--benchmark_min_time={seconds / repetitions}"]
        arguments.append(f"--benchmark_repetitions={repetitions}")
        done = subprocess.run(self.command + arguments, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        if done.returncode != 0:
            sys.exit(f"error: it ended with {done.returncode}: {' '.join(done.args)}")
        result = json.loads(done.stdout)
        self.context = result["context"]
        runs = {}
        for run in result["benchmarks"]:
            if run["run_type"] == "iteration":
                runs.setdefault(run["name"].removesuffix(SUFFIX), []).append(run)
        return {name: self.medians(of_name) for name, of_name in runs.items()}

    def medians(self, runs):
        times = {"wall": "real_time", "cpu": "cpu_time"}
        result = {f"{clock}_ms": statistics.median(run[key] for run in runs) for clock, key in times.items()}
        for rate in ("FLOP/s", "B/s"):  # which the program takes by the wall
            if rate in runs[0]:
                by_clock = (run[rate] * run["real_time"] / run[times[self.clock]] for run in runs)
                result[rate] = statistics.median(by_clock)
        memory = {key: runs[0][key] for key in ("peak_MiB", "scratch_MiB")}
        return result | {"ms": result[f"{self.clock}_ms"]} | memory


class Torch:
    """The peer: one process for all measurements."""

    def __init__(self, python, isa):
        environment = dict(os.environ)
        if isa == "avx2":
            environment |= {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
            environment |= {"MKL_ENABLE_INSTRUCTIONS": "AVX2"}
        script = os.path.join(os.path.dirname(os.path.abspath(__file__)), "peers", "torch_cpu.py")
        self.process = subprocess.Popen(
            [python, script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self.hello = self.read()

    def read(self):
        line = self.process.stdout.readline()
        if not line:
            sys.exit("error: the torch process ended")
        return json.loads(line)

    def measure(self, shape, seconds, arithmetic):
        print(json.dumps(shape | {"seconds": seconds, "arithmetic": arithmetic}), file=self.process.stdin, flush=True)
        reply = self.read()
        if "error" in reply:
            sys.exit(f"error: torch, {shape}: {reply['error']}")
        return reply

    def close(self):
        self.process.stdin.close()
        self.process.wait()


def arithmetic_for(shape, torch):
    """fp32, and bf16 where the processor multiplies it and decoding takes little time."""
    both = torch.hello["fast_bf16"] and shape["type"] == "bf16" and shape["mode"] == "decode"
    return ["fp32", "bf16"] if both else ["fp32"]


def peak_of(shape):
    """The peak that a stage runs against, and its unit."""
    if shape["stage"] == "topk":
        return "read", "B/s"
    # bf16 is multiplied in pairs where the processor can; attention and a layer, which are so in part, may pass 1
    pairs = shape["type"] == "bf16" and shape["stage"] in ("score", "select")
    return "bf16" if pairs else "fma", "FLOP/s"


def one_sample(program, torch, name, seconds):
    """What one round says of a shape."""
    shape = shape_of(name)
    repetitions = 1 if shape["mode"] == "prefill" else 5
    if shape["stage"] == "peak":
        return program.measure([name], seconds, repetitions)[name]
    peak, rate = peak_of(shape)
    peak = f"peak/{peak}/threads:{shape['threads']}"
    ours = program.measure([peak, name], seconds, repetitions)
    sample = ours[name] | {"fraction_of_peak": ours[name][rate] / ours[peak][rate]}
    if torch:
        times = torch.measure(shape, seconds, arithmetic_for(shape, torch))
        for label, key in (("torch", "fp32"), ("torch_bf16", "bf16")):
            if key in times:
                milliseconds = times[key][f"{program.clock}_ms"]
                sample |= {f"{label}_ms": milliseconds, f"ratio_to_{label}": milliseconds / sample["ms"]}
    return sample


def median_of(samples):
    return {key: statistics.median(sample[key] for sample in samples) for key in samples[0]}


def record_of(name, samples):
    record = {"name": name} | shape_of(name) | median_of(samples)
    for only_of_a_process in ("peak_MiB", "scratch_MiB"):
        record.pop(only_of_a_process)
    if record["stage"] == "topk":
        record["ns_per_score"] = 1e6 * record["ms"] / record["keys"]
    return record


def peak_memories(program, python, isa):
    """Of processes that run nothing but one prefill chunk. Scratch: above the data and the libraries."""
    ours = program.measure([MEMORY], 0.01, 1)[MEMORY]
    memories = {"name": MEMORY, "ours": ours}
    if python:
        torch = Torch(python, isa)
        reply = torch.measure(shape_of(MEMORY), 0.01, ["fp32"])
        torch.close()
        memories["torch"] = reply["fp32"] | {key: reply[key] for key in ("peak_MiB", "scratch_MiB")}
    return memories


# ---- what follows from the records


def derived(samples):
    """Lines {what, of, value}, each the median over the rounds."""
    lines = []

    def compare(what, name, other, value):
        if name in samples and other in samples:
            pairs = zip(samples[name], samples[other])
            lines.append({"what": what, "of": name, "value": statistics.median(value(a, b) for a, b in pairs)})

    for name in samples:
        if name.startswith("select/"):
            scoring = name.replace("select", "score", 1)
            compare("select over scoring, %", name, scoring, lambda a, b: 100 * (a["ms"] / b["ms"] - 1))
        if name.endswith("threads:2") and not name.startswith("peak"):
            alone = name.replace("threads:2", "threads:1")
            compare("speed-up of two threads", name, alone, lambda a, b: b["ms"] / a["ms"])
        if name.startswith("topk/") and "/random/" not in name:
            random = re.sub("/[a-z]+/", "/random/", name, count=1)
            compare("time of this order over random", name, random, lambda a, b: a["ms"] / b["ms"])
    return lines


def machine(program, torch, isa):
    model = platform.processor()
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo") as file:
            models = re.findall(r"^model name\s*: (.*)$", file.read(), re.MULTILINE)
        model = models[0] if models else model
    described = {"cpu": model, "cpus": os.cpu_count(), "isa": program.context["isa"]}
    described["compiler"] = program.context["compiler"]
    return described | ({"torch": torch.hello["torch"]} if torch else {})


# ---- tables


def cell(record, key, form):
    return form.format(record[key]) if key in record else "-"


def shown_extents(record):
    rows = f"{record['rows']} rows" if record["mode"] == "prefill" else f"{record['requests']} x 1 row"
    rows = "1 row" if rows == "1 x 1 row" else rows
    keys = record["keys"]
    keys = f"{keys >> 20}M" if keys >= 2**20 else f"{keys >> 10}K"
    return f"{rows}, {keys} keys" + ("" if record["pages"] or record["stage"] == "topk" else ", contiguous")


def print_tables(result):
    records = result["records"]
    bf16 = any("torch_bf16_ms" in record for record in records)
    print("\n" + ", ".join(f"{key} {value}" for key, value in result["machine"].items()))
    print("\n| peak | threads | GFLOP/s or GB/s |\n|---|---|---|")
    for record in records:
        if record["stage"] == "peak":
            rate = record.get("FLOP/s", record.get("B/s"))
            print(f"| {record['type']} | {record['threads']} | {rate / 1e9:.1f} |")
    head = ["stage", "shape", "threads", "ms", "of peak", "torch, ms", "ratio"]
    head += ["torch bf16, ms"] if bf16 else []
    print("\n| " + " | ".join(head) + " |\n" + "|---" * len(head) + "|")
    for record in records:
        if record["stage"] == "peak":
            continue
        cells = [f"{record['stage']} {record['type']}", shown_extents(record), str(record["threads"])]
        cells.append(f"{record['ms']:.3g}" if record["ms"] < 100 else f"{record['ms']:.0f}")
        cells.append(cell(record, "fraction_of_peak", "{:.0%}"))
        cells += [cell(record, "torch_ms", "{:.3g}"), cell(record, "ratio_to_torch", "{:.2f}")]
        cells += [cell(record, "torch_bf16_ms", "{:.3g}")] if bf16 else []
        print("| " + " | ".join(cells) + " |")
    print("\n| derived | value |\n|---|---|")
    for record in records:
        if "ns_per_score" in record:
            print(f"| ns per score, {record['name']} | {record['ns_per_score']:.2f} |")
    for line in result["derived"]:
        print(f"| {line['what']}, {line['of']} | {line['value']:.2f} |")
    for side in ("ours", "torch"):
        if side in result.get("memory", {}):
            of_side = result["memory"][side]
            print(
                f"| MiB of {side}, {result['memory']['name']} "
                f"| {of_side['scratch_MiB']:.0f} scratch, {of_side['peak_MiB']:.0f} in all |"
            )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--program", required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--torch-python", default="", help="a Python that has torch; without it there are no ratios")
    parser.add_argument("--quick", action="store_true", help="a few shapes, in a minute or two")
    parser.add_argument("--filter", default="", help="only shapes whose name matches this regular expression")
    parser.add_argument("--isa", default="", help="avx512_bf16, avx512, avx2 or portable; avx2 is asked of torch too")
    parser.add_argument(
        "--clock", choices=("wall", "cpu"), default="wall", help="cpu: for a machine that is busy; one thread only"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=0, help="per shape, side and round; at least one call")
    options = parser.parse_args()
    seconds = options.seconds or (0.15 if options.quick else 0.3)

    program = Program(options.program, options.isa, options.clock)
    wanted = re.compile("|".join(QUICK if options.quick else FULL))
    names = [name for name in program.names() if wanted.fullmatch(name) and re.search(options.filter, name)]
    if options.clock == "cpu":
        names = [name for name in names if name.endswith("threads:1")]
    torch = Torch(options.torch_python, options.isa) if options.torch_python else None
    begin = time.monotonic()
    samples = {name: [] for name in names}
    for number_of_round in range(1, options.rounds + 1):
        for name in names:
            samples[name].append(one_sample(program, torch, name, seconds))
            if sys.stderr.isatty():
                print(f"\r{name:70}", end="", file=sys.stderr, flush=True)
        print(f"\rround {number_of_round} done after {time.monotonic() - begin:.0f} s{'':50}", file=sys.stderr)
    result = {
        "machine": machine(program, torch, options.isa),
        "clock": options.clock,
        "rounds": options.rounds,
        "records": [record_of(name, samples[name]) for name in names],
        "derived": derived(samples),
    }
    if torch:
        torch.close()
    if not options.quick and re.search(options.filter, MEMORY):
        result["memory"] = peak_memories(program, options.torch_python, options.isa)
    with open(options.out, "w") as file:
        json.dump(result, file, indent=1)
    print_tables(result)


if __name__ == "__main__":
    main()
