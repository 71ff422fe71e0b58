# SPDX-License-Identifier: Apache-2.0
"""Times torch on the shapes of device.cu: CUDA events, L2 flushed, median. Called by scripts/device_check.sh.

Scoring: relu(q @ k^T) weighted over heads, keys in chunks so that the product over all heads fits; top-k: torch.topk
(its ties and order are its own); attention: gather of the selected rows, then two batched products. bf16 throughout;
e4m3 shapes have no torch peer that reads the same bytes, so they are left out.
"""

import argparse
import json
import statistics

import torch


def median_microseconds(call, flush, device, repeats=7):
    if device == "cpu":  # only to see that the script runs
        call()
        return 0.0
    times = []
    for _ in range(repeats + 2):
        flush.zero_()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(1e3 * begin.elapsed_time(end))
    return statistics.median(times[2:])


def number(text):
    units = {"K": 1024, "M": 1024 * 1024}
    return int(text[:-1]) * units[text[-1]] if text[-1] in units else int(text)


def fields_of(name):
    return {part.split(":")[0]: number(part.split(":")[1]) for part in name.split("/") if ":" in part}


def score_call(name, device):
    fields = fields_of(name)
    heads, lanes, keys = 32, 128, fields["keys"]
    requests, rows = (fields["batch"], 1) if "batch" in fields else (1, fields["rows"])
    q = torch.randn(requests, rows, heads, lanes, dtype=torch.bfloat16, device=device)
    w = torch.randn(requests, rows, heads, 1, device=device)
    k = torch.randn(requests, keys, lanes, dtype=torch.bfloat16, device=device)
    scores = torch.empty(requests, rows, keys, device=device)
    chunk = max(256, min(keys, 2**28 // max(1, requests * rows * heads)))

    def call():
        for first in range(0, keys, chunk):
            dots = torch.einsum("brhd,bkd->brhk", q, k[:, first : first + chunk])
            scores[:, :, first : first + chunk] = (torch.relu(dots).float() * w).sum(2)

    return call


def topk_call(name, device):
    fields = fields_of(name)
    scores = torch.randn(fields["rows"], fields["keys"], device=device)
    return lambda: torch.topk(scores, 2048, dim=-1)


def attend_call(name, device):
    fields = fields_of(name)
    rows, heads = fields.get("batch") or fields["rows"], fields["heads"]
    cache = torch.randn(65536, 576, dtype=torch.bfloat16, device=device)
    q = torch.randn(rows, heads, 576, dtype=torch.bfloat16, device=device)
    slots = torch.randint(0, 65536, (rows, 2048), device=device)
    chunk = max(1, min(rows, 128))

    def call():
        for first in range(0, rows, chunk):
            kv = cache[slots[first : first + chunk]]
            logits = torch.bmm(q[first : first + chunk], kv.transpose(1, 2)).float() * 0.0625
            torch.bmm(torch.softmax(logits, -1).to(torch.bfloat16), kv[:, :, :512])

    return call


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", required=True, help="Google Benchmark JSON whose names are timed")
    parser.add_argument("--out", required=True)
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    flush = torch.empty(256 * 1024 * 1024 if options.device == "cuda" else 1, dtype=torch.int8, device=options.device)
    makers = {"score/bf16": score_call, "topk/": topk_call, "attend/bf16": attend_call}
    times = {}
    with open(options.shapes) as file:
        names = [row["name"].replace("/manual_time", "") for row in json.load(file)["benchmarks"]]
    for name in names:
        for prefix, maker in makers.items():
            if name.startswith(prefix):
                try:
                    times[name] = median_microseconds(maker(name, options.device), flush, options.device)
                except torch.OutOfMemoryError:
                    pass  # the shape is left without a peer
    with open(options.out, "w") as file:
        json.dump(times, file, indent=1)


if __name__ == "__main__":
    main()
