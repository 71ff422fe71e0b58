# SPDX-License-Identifier: Apache-2.0
"""Times torch on the shapes of bench/*.cpp, on the CPU. Serves bench/cpu.py: a shape per line in, its times out.

The formulation is the fastest found for each shape (one and two threads, AVX2 and AVX-512), with the arithmetic of
the library, fp32 products of values that are stored in fewer bits, on contiguous caches:
  score, decode   keys in chunks of 4096 (of 512 to 65536) to fp32, relu(K q^T) w
  score, prefill  16 rows (of 4 to 128) by chunks of 1024 keys (of 512 to 4096), one product for all rows and heads
  top-k           torch.topk, unsorted (its ties are its own)
  attention       row by row (1 to 32 rows): gather, to fp32, product, softmax, product; dense attention is slower
A second arithmetic, bf16, leaves values as they are and lets torch round every product to bf16: other scores, in
less time where the processor multiplies bf16.
"""

import json
import resource
import statistics
import sys
import time

import torch

TOP_K = 2048
INDEX_HEADS, INDEX_DIM = 32, 128
HEADS, KEY_DIM, VALUE_DIM, ROPE_DIM, TILE = 64, 576, 512, 64, 128
SCALE = 0.0625
DECODE_CHUNK = 4096
PREFILL_ROWS, PREFILL_CHUNK = 16, 1024
TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def poisoned(*extents):
    """For results: memory that a call need not touch first."""
    return torch.full(extents, float("nan"))


def uniform(*extents, dtype=torch.float32):
    """Values in [-1, 1); rows past 65536 repeat the ones before, which are quicker to make."""
    rows = min(extents[0], 65536)
    values = torch.empty(rows, *extents[1:], dtype=dtype).uniform_(-1, 1)
    return values if rows == extents[0] else values.repeat(extents[0] // rows, *(1 for _ in extents[1:]))


# ---- caches: rows [first, last), or those of an index, in some arithmetic


class Plain:
    def __init__(self, rows, lanes, dtype):
        self.values = uniform(rows, lanes, dtype=dtype)

    def block(self, first, last, arithmetic):
        return self.values[first:last].to(arithmetic)

    def gather(self, index, arithmetic):
        return self.values.index_select(0, index).to(arithmetic)


class E4m3:
    """Codes with a scale per tile of them, then `rope` lanes in bf16."""

    def __init__(self, rows, lanes, rope=0):
        self.codes = (448 * uniform(rows, lanes - rope)).to(torch.float8_e4m3fn).view(torch.uint8)
        self.scales = torch.full((rows, (lanes - rope) // TILE), 1 / 448)
        self.rope = uniform(rows, rope, dtype=torch.bfloat16)

    def decode(self, codes, scales, rope):
        # A code's bits in those of fp16 make 2^-8 of its value; torch's own conversion takes 16 times as long.
        halves = codes.view(torch.int8).to(torch.int16).bitwise_left_shift_(7).bitwise_and_(~0x4000)
        values = halves.view(torch.float16).float().view(len(codes), -1, TILE).mul_(256 * scales[:, :, None])
        values = values.view(len(codes), -1)
        return torch.cat((values, rope.float()), 1) if rope.shape[1] else values

    def block(self, first, last, arithmetic):
        return self.decode(self.codes[first:last], self.scales[first:last], self.rope[first:last]).to(arithmetic)

    def gather(self, index, arithmetic):
        parts = (part.index_select(0, index) for part in (self.codes, self.scales, self.rope))
        return self.decode(*parts).to(arithmetic)


# ---- stages; every prepare function makes data and returns a call of one argument, the arithmetic


class Indexer:
    def __init__(self, shape):
        self.rows, self.requests, self.length = shape["rows"], shape["requests"], shape["keys"]
        kind, rows = shape["type"], self.requests * self.length
        self.keys = E4m3(rows, INDEX_DIM) if kind == "e4m3" else Plain(rows, INDEX_DIM, TYPES[kind])
        self.q = uniform(self.requests * self.rows, INDEX_HEADS, INDEX_DIM, dtype=torch.bfloat16)
        self.weights = uniform(self.requests * self.rows, INDEX_HEADS)

    def decode(self, row, scores, arithmetic):
        q, weights = self.q[row].to(arithmetic), self.weights[row]
        for first in range(0, self.length, DECODE_CHUNK):
            last = min(first + DECODE_CHUNK, self.length)
            keys = self.keys.block(row * self.length + first, row * self.length + last, arithmetic)
            torch.mv(torch.relu_(keys @ q.T).float(), weights, out=scores[first:last])

    def prefill(self, first_row, scores, arithmetic):
        """Rows first_row.. of the one request; returns how many keys the last of them sees."""
        rows = len(scores)
        longest = self.length - self.rows + first_row + rows
        q = self.q[first_row : first_row + rows].to(arithmetic).view(rows * INDEX_HEADS, INDEX_DIM)
        weights = self.weights[first_row : first_row + rows, None]
        for first in range(0, longest, PREFILL_CHUNK):
            last = min(first + PREFILL_CHUNK, longest)
            dots = torch.relu_(q @ self.keys.block(first, last, arithmetic).T).float()
            scores[:, first:last] = torch.bmm(weights, dots.view(rows, INDEX_HEADS, -1))[:, 0]
        future = torch.full((rows, rows), float("-inf")).triu_(1)
        scores[:, longest - rows : longest] += future
        return longest

    def blocks(self, arithmetic, use, scores):
        """Scores all rows, block by block: `use(first row, scores of the block)`."""
        if self.rows == 1:
            for row in range(self.requests):
                self.decode(row, scores[row], arithmetic)
                use(row, scores[row : row + 1])
        else:
            for first in range(0, self.rows, PREFILL_ROWS):
                block = scores[first : first + PREFILL_ROWS] if len(scores) == self.rows else scores
                use(first, block[:, : self.prefill(first, block, arithmetic)])


def top_k(scores):
    return torch.topk(scores, TOP_K, sorted=False).indices


def prepare_score(shape):
    indexer = Indexer(shape)
    scores = poisoned(indexer.requests * indexer.rows, indexer.length)
    return lambda arithmetic: indexer.blocks(arithmetic, lambda first, block: None, scores)


def block_of_scores(shape):
    return torch.empty(shape["requests"] if shape["rows"] == 1 else PREFILL_ROWS, shape["keys"])


def prepare_select(shape):
    indexer, scores = Indexer(shape), block_of_scores(shape)
    selection = torch.empty(indexer.requests * indexer.rows, TOP_K, dtype=torch.int64)

    def use(first, block):
        selection[first : first + len(block)] = top_k(block)

    return lambda arithmetic: indexer.blocks(arithmetic, use, scores)


def prepare_topk(shape):
    keys = shape["keys"]
    progress = torch.arange(keys) / keys
    make = {
        "random": lambda i: uniform(keys),
        "ascending": lambda i: progress + i,
        "descending": lambda i: i - progress,
        "drift": lambda i: uniform(keys) + 2 * progress,
        "levels": lambda i: torch.floor(8.5 * uniform(keys)),
        "zero": lambda i: torch.zeros(keys),
    }[shape["type"]]
    arrays = [make(i) for i in range(16)]

    def call(arithmetic):
        arrays.append(arrays.pop(0))
        top_k(arrays[0])

    return call


class Attention:
    def __init__(self, shape):
        self.rows = shape["rows"] * shape["requests"]
        rows, kind = shape["requests"] * shape["keys"], shape["type"]
        self.kv = E4m3(rows, KEY_DIM, ROPE_DIM) if kind == "e4m3" else Plain(rows, KEY_DIM, TYPES[kind])
        self.q = uniform(self.rows, HEADS, KEY_DIM, dtype=torch.bfloat16)
        self.out = poisoned(self.rows, HEADS, VALUE_DIM)

    def run(self, row, index, arithmetic):
        kv = self.kv.gather(index, arithmetic)
        logits = (self.q[row].to(arithmetic) @ kv.T).float().mul_(SCALE)
        self.out[row] = torch.softmax(logits, -1).to(arithmetic) @ kv[:, :VALUE_DIM]


def scattered(shape):
    """For each row, ascending, one place in each of TOP_K equal parts of its request's keys."""
    rows, keys = shape["rows"] * shape["requests"], shape["keys"] - shape["rows"]
    places = ((torch.arange(TOP_K) + torch.rand(rows, TOP_K)) * (keys / TOP_K)).long()
    return places + torch.arange(rows)[:, None] // shape["rows"] * shape["keys"]


def prepare_attention(shape):
    attention, index = Attention(shape), scattered(shape)

    def call(arithmetic):
        for row in range(attention.rows):
            attention.run(row, index[row], arithmetic)

    return call


def prepare_layer(shape):
    indexer, attention, scores = Indexer(shape), Attention(shape), block_of_scores(shape)

    def use_in(arithmetic):
        def use(first, block):
            for i, index in enumerate(top_k(block)):
                request = (first + i) // indexer.rows
                attention.run(first + i, index + request * indexer.length, arithmetic)

        return use

    return lambda arithmetic: indexer.blocks(arithmetic, use_in(arithmetic), scores)


PREPARE = {
    "score": prepare_score,
    "select": prepare_select,
    "topk": prepare_topk,
    "attention": prepare_attention,
    "layer_full": prepare_layer,
    "layer_shared": prepare_attention,
}

WARM_UP = {"stage": "layer_full", "type": "bf16", "requests": 1, "rows": 1, "keys": 65536}

# ---- times


def peak_memory():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure(call, seconds):
    """Medians in ms; a first call that takes long is the only one."""
    times = []
    while not times or (len(times) < 200 and sum(wall for wall, cpu in times) < seconds):
        wall, cpu = time.perf_counter(), time.process_time()
        call()
        times.append((time.perf_counter() - wall, time.process_time() - cpu))
        if len(times) == 1 and times[0][0] < seconds:
            seconds += times[0][0]
    times = times[1:] or times
    return {key: 1e3 * statistics.median(column) for key, column in zip(("wall_ms", "cpu_ms"), zip(*times))}


def answer(request):
    torch.set_num_threads(request["threads"])
    call = PREPARE[request["stage"]](request)
    before = peak_memory()
    times = {name: measure(lambda: call(TYPES[name]), request["seconds"]) for name in request["arithmetic"]}
    return {**times, "peak_MiB": peak_memory(), "scratch_MiB": peak_memory() - before}


def main():
    fast_bf16 = torch.ops.mkldnn._is_mkldnn_bf16_supported() and torch.cpu._is_avx512_bf16_supported()
    print(json.dumps({"torch": torch.__version__, "fast_bf16": fast_bf16}), flush=True)
    with torch.inference_mode():
        # Until the C library has seen large blocks come and go, it maps each one anew.
        answer({**WARM_UP, "threads": 1, "seconds": 0.1, "arithmetic": ["fp32"]})
        for line in sys.stdin:
            try:
                reply = answer(json.loads(line))
            except (RuntimeError, MemoryError) as error:
                reply = {"error": str(error)}
            print(json.dumps(reply), flush=True)


if __name__ == "__main__":
    main()
