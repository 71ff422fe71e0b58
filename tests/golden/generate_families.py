#!/usr/bin/env python3
"""Golden fixtures of whole self-attention modules, one model family a folder.

The oracle is Hugging Face transformers, not this library: a tiny model of each family is run on the
CPU in fp32, from its own checkpoint, and everything its attention computes is written as one
recording (docs/comparing.md) beside that checkpoint and its config.  See README.md.

    generate_families.py            run transformers, certify, write the folders, then check them
    generate_families.py --check    read the folders back and recompute them (numpy only)
    generate_families.py glm_moe_dsa ...   the same for some families only
"""

import argparse
import json
import math
import os
import shutil
import sys
import tempfile
import zlib
from dataclasses import dataclass, replace

import numpy as np

from generate import SMALL_GAP, Worst, layer_norm, read_safetensors, rms_norm, write_safetensors

HERE = os.path.dirname(os.path.abspath(__file__))

SEED = 20250923
HIDDEN, HEADS, QLORA, KVLORA, NOPE, ROPE, V = 56, 4, 32, 48, 24, 16, 20
IHEADS, IDIM, TOPK = 16, 32, 12
VOCAB, INTERMEDIATE = 44, 8
LAYER_EPS = 1e-5  # rms_norm_eps of every config
LATENT = 0.012  # rms of what goes into the latent norms and k_norm
BATCH, LENGTH = 2, 40
STARTS = [0, 1000]  # rotary position of the first token of each request
# Recorded columns of each request: few visible keys, exactly topk (column 11), topk + 1, the last.
COLUMNS = {
    "glm_moe_dsa": [[0, 4, 10, 11, 12, 13, 17, 23, 31, 39], [1, 3, 11, 12, 14, 19, 25, 30, 36, 39]],
    "deepseek_v32": [
        [0, 4, 8, 10, 11, 12, 13, 15, 17, 23, 31, 39],
        [1, 3, 9, 11, 12, 14, 19, 22, 25, 30, 36, 39],
    ],
    "hy_v4": [[0, 10, 11, 12, 13, 17, 23, 31, 39], [3, 11, 12, 14, 19, 25, 30, 39]],
}
FOLDER_LIMIT = 800_000
ADDED = {"hy_v4": {"learnable_sink": True, "gated_mla": True}}  # published, but unknown to transformers


@dataclass(frozen=True)
class Recipe:
    """How a family computes; a mistake is a recipe with one field changed."""

    pairing: str  # main rotary: interleaved | half
    index_pairing: str  # the indexer's
    index_lanes: str  # rotated lanes of an index head: first | last
    k_eps: float
    latent_eps: float = 1e-6
    k_norm: str = "layer"  # layer | rms
    k_bias: bool = True
    relu: bool = True
    index_input: str = "q_resid"
    amplitude: bool = True  # YaRN: the factor on cos and sin
    yarn: bool = True  # YaRN: the frequencies
    mscale: bool = True  # YaRN: the factor on the softmax scale
    sinks: bool = False
    gate: bool = False


RECIPES = {
    "glm_moe_dsa": Recipe("interleaved", "interleaved", "first", 1e-6),
    "deepseek_v32": Recipe("interleaved", "half", "first", 1e-6),
    "hy_v4": Recipe("half", "half", "last", LAYER_EPS, sinks=True, gate=True),
}
CLASSES = {"glm_moe_dsa": "GlmMoeDsa", "deepseek_v32": "DeepseekV32", "hy_v4": "HYV4"}
TYPES = {
    "glm_moe_dsa": ["full", "shared", "full"],
    "deepseek_v32": ["full", "full"],
    "hy_v4": ["full", "shared", "full"],
}


def producer(types, layer):
    while types[layer] == "shared":
        layer -= 1
    return layer


# --------------------------------------------------------------------------------------------------
# Certification: float64, numpy only, from the checkpoint, the config and the layer input.
# --------------------------------------------------------------------------------------------------
def read_json(path):
    with open(path, encoding="utf-8") as f:
        return json.load(f)


def read_checkpoint(folder):
    """-> (name -> array, name -> dtype string, number of files); follows the index of a sharded one."""
    index = os.path.join(folder, "model.safetensors.index.json")
    if not os.path.exists(index):
        tensors, dtypes, _ = read_safetensors(os.path.join(folder, "model.safetensors"))
        return tensors, dtypes, 1
    where, tensors, dtypes = read_json(index)["weight_map"], {}, {}
    for shard in sorted(set(where.values())):
        some, kinds, _ = read_safetensors(os.path.join(folder, shard))
        assert all(where[n] == shard for n in some), shard
        tensors.update(some)
        dtypes.update(kinds)
    assert sorted(tensors) == sorted(where), index
    return tensors, dtypes, len(set(where.values()))


def yarn_mscale(factor, mscale):
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def frequencies(rope, yarn=True):
    """Inverse frequencies in float64, one per pair of lanes."""
    i = np.arange(ROPE // 2, dtype=np.float64)
    plain = rope["rope_theta"] ** (-2 * i / ROPE)
    if rope["rope_type"] != "yarn" or not yarn:
        return plain
    original, log_theta = rope["original_max_position_embeddings"], math.log(rope["rope_theta"])
    # the pair that turns n times over the original length
    pair = lambda n: ROPE * math.log(original / (n * 2 * math.pi)) / (2 * log_theta)
    low = max(math.floor(pair(rope["beta_fast"])), 0)
    high = min(math.ceil(pair(rope["beta_slow"])), ROPE - 1)
    ramp = np.clip((i - low) / (high - low), 0, 1)
    return plain / rope["factor"] * ramp + plain * (1 - ramp)


def amplitude(rope):
    if rope["rope_type"] != "yarn":
        return 1.0
    return yarn_mscale(rope["factor"], rope["mscale"]) / yarn_mscale(rope["factor"], rope["mscale_all_dim"])


def softmax_scale(rope, mscale=True):
    scale = (NOPE + ROPE) ** -0.5
    if rope["rope_type"] == "yarn" and mscale:
        scale *= yarn_mscale(rope["factor"], rope["mscale_all_dim"]) ** 2
    return scale


def rotate(a, cos, sin, pairing):
    """Rotates all lanes of a, result in place: pairs (2i, 2i+1), or (i, i + n/2)."""
    out, half = np.empty_like(a), a.shape[-1] // 2
    if pairing == "interleaved":
        first, second = slice(0, None, 2), slice(1, None, 2)
    else:
        first, second = slice(0, half), slice(half, None)
    x, y = a[..., first], a[..., second]
    out[..., first], out[..., second] = x * cos - y * sin, y * cos + x * sin
    return out


def in_order(a, order):
    """The rotated lanes in the order that a recording declares."""
    return a if order == "in_place" else np.concatenate([a[..., 0::2], a[..., 1::2]], -1)


def on_lanes(a, lanes, change):
    """change() applied to the rotated lanes of an index head."""
    if lanes == "first":
        return np.concatenate([change(a[..., :ROPE]), a[..., ROPE:]], -1)
    return np.concatenate([a[..., :-ROPE], change(a[..., -ROPE:])], -1)


class Layer:
    """One layer of a family in float64.  Quantities are named as in a recording, rotated lanes in place."""

    def __init__(self, family, config, weights, layer, positions, requests, rows, inv_freq, recipe=None):
        self.recipe, self.rope, self.rows = recipe or RECIPES[family], config["rope_parameters"], rows
        prefix = f"model.layers.{layer}.self_attn."
        self.w = {n[len(prefix) :]: a for n, a in weights.items() if n.startswith(prefix)}
        # transformers rounds the frequencies and the angle to float32
        if not self.recipe.yarn:
            inv_freq = frequencies(self.rope, False).astype(np.float32)
        angle = (positions.astype(np.float32)[:, None] * inv_freq).astype(np.float64)
        gain = amplitude(self.rope) if self.recipe.amplitude else 1.0
        self.cos, self.sin = np.cos(angle) * gain, np.sin(angle) * gain
        column = np.zeros(len(requests), np.int64)
        for t in range(1, len(requests)):
            column[t] = column[t - 1] + 1 if requests[t] == requests[t - 1] else 0
        self.visible, self.length = column[rows] + 1, int(column.max()) + 1
        start = rows - column[rows]  # token of position 0 of each row's request
        self.keys = np.minimum(start[:, None] + np.arange(self.length), len(requests) - 1)  # [R, L] tokens

    def weight(self, name):
        return self.w[name + ".weight"].astype(np.float64)

    def linear(self, name, x):
        return x @ self.weight(name).T

    def main(self, hidden):
        r, R, x = self.recipe, len(self.rows), hidden.astype(np.float64)
        d = {"q_a": self.linear("q_a_proj", x[self.rows]), "kv_a": self.linear("kv_a_proj_with_mqa", x)}
        d["q_resid"] = rms_norm(d["q_a"], self.weight("q_a_layernorm"), r.latent_eps)
        d["q"] = self.linear("q_b_proj", d["q_resid"]).reshape(R, HEADS, NOPE + ROPE)
        c, s = self.cos[self.rows][:, None], self.sin[self.rows][:, None]
        d["q_rope"] = rotate(d["q"][..., NOPE:], c, s, r.pairing)
        d["kv_latent"] = rms_norm(d["kv_a"][:, :KVLORA], self.weight("kv_a_layernorm"), r.latent_eps)
        d["k_rope"] = rotate(d["kv_a"][:, KVLORA:], self.cos, self.sin, r.pairing)
        return d

    def indexer(self, hidden, d):
        r, R, x = self.recipe, len(self.rows), hidden.astype(np.float64)
        e = {"index_q_raw": self.linear("indexer.wq_b", d[r.index_input]).reshape(R, IHEADS, IDIM)}
        k = e["index_k_raw"] = self.linear("indexer.wk", x)
        gamma, beta = self.weight("indexer.k_norm"), self.w["indexer.k_norm.bias"].astype(np.float64)
        if r.k_norm == "rms":
            norm = rms_norm(k, gamma, r.k_eps)
        else:
            norm = layer_norm(k, gamma, beta if r.k_bias else 0.0, r.k_eps)
        e["index_k_norm"] = norm
        c, s = self.cos[self.rows][:, None], self.sin[self.rows][:, None]
        e["index_q"] = on_lanes(e["index_q_raw"], r.index_lanes, lambda a: rotate(a, c, s, r.index_pairing))
        e["index_k"] = on_lanes(norm, r.index_lanes, lambda a: rotate(a, self.cos, self.sin, r.index_pairing))
        e["head_weights_raw"] = self.linear("indexer.weights_proj", x[self.rows])
        e["head_weights"] = e["head_weights_raw"] * IHEADS**-0.5 * IDIM**-0.5
        dots = np.einsum("rhd,rtd->rht", e["index_q"], e["index_k"][self.keys])
        scores = np.einsum("rh,rht->rt", e["head_weights"], np.maximum(dots, 0) if r.relu else dots)
        e["scores"] = np.where(np.arange(self.length) < self.visible[:, None], scores, -np.inf)
        return e

    def select(self, scores):
        """-> (set of each row, gap between the last selected score and the best that is not)."""
        sets, gaps = [], []
        for row, n in zip(scores, self.visible):
            order = sorted(range(n), key=lambda j: (-row[j], j))
            sets.append(frozenset(order[:TOPK]))
            gaps.append(math.inf if n <= TOPK else row[order[TOPK - 1]] - row[order[TOPK]])
        return sets, gaps

    def attend(self, hidden, d, sets):
        """Attention of the expanded keys and values over the given sets, gate and output projection."""
        r, R, x = self.recipe, len(self.rows), hidden.astype(np.float64)
        kv = self.linear("kv_b_proj", d["kv_latent"]).reshape(-1, HEADS, NOPE + V)
        one = np.broadcast_to(d["k_rope"][:, None], (len(kv), HEADS, ROPE))  # the same for all heads
        key = np.concatenate([kv[..., :NOPE], one], -1)[self.keys]  # [R, L, H, nope + rope]
        q = np.concatenate([d["q"][..., :NOPE], d["q_rope"]], -1)
        logit = softmax_scale(self.rope, r.mscale) * np.einsum("rhd,rthd->rht", q, key)
        chosen = np.zeros((R, self.length), bool)
        for i, s in enumerate(sets):
            chosen[i, sorted(s)] = True
        logit = np.where(chosen[:, None], logit, -np.inf)
        top = logit.max(-1)
        lse = top + np.log(np.exp(logit - top[..., None]).sum(-1))
        total = np.logaddexp(lse, self.w["learnable_sink_param"].astype(np.float64)) if r.sinks else lse
        self.p = np.exp(logit - total[..., None])
        o = np.einsum("rht,rthv->rhv", self.p, kv[..., NOPE:][self.keys])
        out = {"lse": lse, "attention": o}
        if r.gate:
            gate = self.linear("linear_gate", x[self.rows]).reshape(R, HEADS, V)
            o = out["gated"] = o / (1 + np.exp(-gate))
        out["output"] = self.linear("o_proj", o.reshape(R, HEADS * V))
        return out


LIMIT = {"q_a": 1e-7, "index_k_raw": 1e-7, "head_weights": 1e-6}  # small values; else 2e-5


def recompute(family, folder):
    """Check one folder; returns what the other checks need."""
    config = read_json(os.path.join(folder, "config.json"))
    weights, dtypes, files = read_checkpoint(folder)
    t, _, meta = read_safetensors(os.path.join(folder, "forward.safetensors"))
    report, types, recipe = Worst(family), TYPES[family], RECIPES[family]
    extents = dict(
        model_type=family, num_hidden_layers=len(types), hidden_size=HIDDEN, num_attention_heads=HEADS,
        q_lora_rank=QLORA, kv_lora_rank=KVLORA, qk_nope_head_dim=NOPE, qk_rope_head_dim=ROPE, v_head_dim=V,
        index_n_heads=IHEADS, index_head_dim=IDIM, index_topk=TOPK, rms_norm_eps=LAYER_EPS, vocab_size=VOCAB,
        **ADDED.get(family, {}),
    )  # fmt: skip
    assert {n: config[n] for n in extents} == extents and config.get("indexer_types", types) == types
    assert (files > 1) == (family == "glm_moe_dsa")
    for i, kind in enumerate(types):
        assert (f"model.layers.{i}.self_attn.indexer.wk.weight" in weights) == (kind == "full"), (family, i)
    for name, a in weights.items():
        assert not (np.ascontiguousarray(a).view(np.uint32) & 0xFFFF).any(), (name, "not exact in bfloat16")
    assert meta["format"] == "indexshare-recording-1"
    assert float(meta["latent_norm_eps"]) == recipe.latent_eps and float(meta["index_key_eps"]) == recipe.k_eps
    assert meta["index_rope_dims"] == str(ROPE) and meta["index_rope_lanes"] == recipe.index_lanes
    inv_freq = np.array(json.loads(meta["inv_freq"]), np.float32)
    assert np.abs(inv_freq / frequencies(config["rope_parameters"]) - 1).max() < 3e-7, (family, inv_freq)
    assert abs(float(meta["softmax_scale"]) / softmax_scale(config["rope_parameters"]) - 1) < 1e-12
    positions, requests, rows = t["positions"], t["requests"], t["rows"]
    assert np.array_equal(positions, np.concatenate([s + np.arange(LENGTH) for s in STARTS]))
    assert np.array_equal(requests, np.repeat(np.arange(BATCH), LENGTH))
    assert rows.tolist() == [b * LENGTH + c for b in range(BATCH) for c in COLUMNS[family][b]]
    layers, sets, seen, smallest = {}, {}, {"positions", "requests", "rows"}, math.inf
    for i, kind in enumerate(types):
        p = f"layer{i}."
        hidden = t[p + "hidden"]
        layer = layers[i] = Layer(family, config, weights, i, positions, requests, rows, inv_freq)
        main = layer.main(hidden)
        want, sets[i] = dict(main), []
        for row, n in zip(t[p + "selection"], layer.visible):  # visible keys only, none twice, none missing
            keep = [int(j) for j in row if j >= 0]
            assert len(keep) == len(set(keep)) == min(n, TOPK) and max(keep) < n, (family, i)
            sets[i].append(frozenset(keep))
        if kind == "full":
            want.update(layer.indexer(hidden, main))
            for mine, gap, theirs, n in zip(*layer.select(want["scores"]), sets[i], layer.visible):
                smallest = min(smallest, gap)
                report.add("rows of full layers")
                report.add("rows with visible > topk", n > TOPK)
                report.add("gap < 1e-5", gap < SMALL_GAP)
                report.add("set differs", mine != theirs)
                if mine != theirs and gap >= SMALL_GAP:
                    raise SystemExit(f"FAIL {family}: layer {i}: set differs, gap {gap:.3e}")
        else:
            assert sets[i] == sets[producer(types, i)], (family, i)
        want.update(layer.attend(hidden, main, sets[i]))
        for name in ("q_rope", "k_rope"):
            want[name] = in_order(want[name], meta["rotated_lanes"])
        for name in {"index_q", "index_k"} & set(want):
            want[name] = on_lanes(
                want[name], recipe.index_lanes, lambda a: in_order(a, meta["index_rotated_lanes"])
            )
        for name, a in want.items():
            report.see(name, a, t[p + name], LIMIT.get(name, 2e-5))
        seen |= {p + n for n in want} | {p + "hidden", p + "selection"}
    assert seen == set(t), (family, seen ^ set(t))
    assert report.count["gap < 1e-5"] == 0, (family, "choose another seed")
    size = sum(os.path.getsize(os.path.join(folder, f)) for f in os.listdir(folder))
    assert size <= FOLDER_LIMIT, (family, size)
    return report, dict(
        config=config, weights=weights, dtypes=dtypes, files=files, t=t, inv_freq=inv_freq, sets=sets, layers=layers,
        size=size, smallest=smallest,
    )  # fmt: skip


def mistakes(family):
    """(name, wrong recipe, what it must change: the selections or the values of a quantity)"""
    r = RECIPES[family]
    other = lambda pairing: "half" if pairing == "interleaved" else "interleaved"
    yield "indexer: other pairing", replace(r, index_pairing=other(r.index_pairing)), "selection"
    yield "indexer: other lanes", replace(r, index_lanes="last" if r.index_lanes == "first" else "first"), "selection"
    yield "k_norm: other eps", replace(r, k_eps=LAYER_EPS if r.k_eps == 1e-6 else 1e-6), "index_k"
    yield "k_norm: no bias", replace(r, k_bias=False), "selection"
    yield "k_norm: RMSNorm", replace(r, k_norm="rms"), "selection"
    yield "no ReLU", replace(r, relu=False), "selection"
    yield "raw q_a into wq_b", replace(r, index_input="q_a"), "selection"
    if family == "deepseek_v32":
        yield "no amplitude on cos, sin", replace(r, amplitude=False), "selection"
        yield "plain frequencies", replace(r, yarn=False), "selection"
        yield "scale without mscale^2", replace(r, mscale=False), "output"
    yield "latent norms: eps 1e-5", replace(r, latent_eps=1e-5), "output"
    yield "attention: other pairing", replace(r, pairing=other(r.pairing)), "output"
    if r.sinks:
        yield "no sinks", replace(r, sinks=False), "output"
    if r.gate:
        yield "no gate", replace(r, gate=False), "output"


def power(family, f):
    """Selections and values that a mistake changes: the data must be able to see each."""
    t, table = f["t"], {}
    for name, recipe, must in [("nothing wrong", RECIPES[family], None), *mistakes(family)]:
        changed = rows = 0
        shift = {"index_k": 0.0, "scores": 0.0, "output": 0.0}

        def see(quantity, a, b):
            shift[quantity] = max(shift[quantity], float(np.abs(a - b)[np.isfinite(b)].max()))

        for i, kind in enumerate(TYPES[family]):
            hidden = t[f"layer{i}.hidden"]
            layer = Layer(
                family, f["config"], f["weights"], i, t["positions"], t["requests"], t["rows"], f["inv_freq"], recipe
            )
            main = layer.main(hidden)
            if kind == "full":
                good = f["layers"][i].indexer(hidden, f["layers"][i].main(hidden))
                wrong = layer.indexer(hidden, main)
                see("index_k", wrong["index_k"], good["index_k"])
                with np.errstate(invalid="ignore"):
                    see("scores", wrong["scores"], good["scores"])
                wide = layer.visible > TOPK
                sets, _ = layer.select(wrong["scores"])
                changed += sum(a != b for a, b, w in zip(sets, f["sets"][i], wide) if w)
                rows += int(wide.sum())
            # over the right selection: what a mistake changes beyond it
            see("output", layer.attend(hidden, main, f["sets"][i])["output"], t[f"layer{i}.output"])
        table[name] = (changed, rows, shift)
        if must is None:
            assert changed == 0 and shift["output"] < 2e-5
        elif must == "selection":
            assert changed > 0, (family, name)
        else:
            assert shift[must] > 1e-2, (family, name, shift)
    return table


def check(families):
    total = 0
    for family in families:
        report, f = recompute(family, os.path.join(HERE, family))
        total += f["size"]
        kinds = sorted(set(f["dtypes"].values()))
        print(f"{family}: {f['size']} bytes; checkpoint of {f['files']} file(s), {', '.join(kinds)}")
        for name, e in report.err.items():
            print(f"    {name:20s} worst error {e:.2e}")
        for name, n in report.count.items():
            print(f"    {name:28s}{n}")
        print(f"    smallest gap                {f['smallest']:.1e}")
        for i, layer in f["layers"].items():
            wide, p = layer.visible > TOPK, np.maximum(layer.p, 1e-300)
            entropy = -(p * np.log(p)).sum(-1)[wide].mean()
            share = f", left to the sink {1 - layer.p.sum(-1).mean():.2f}" if RECIPES[family].sinks else ""
            print(f"    layer {i}: softmax entropy {entropy:.2f} of {math.log(TOPK):.2f}{share}")
        print("    a mistake changes           selections   index_k  scores   output over the right selection")
        for name, (changed, rows, shift) in power(family, f).items():
            values = "  ".join(f"{shift[q]:.1e}" for q in ("index_k", "scores", "output"))
            print(f"        {name:26s}{changed:3d} of {rows}   {values}")
    print(f"all families agree with the equations; {total} bytes in all")


# --------------------------------------------------------------------------------------------------
# The oracle
# --------------------------------------------------------------------------------------------------
def config_dict(family):
    n = len(TYPES[family])
    kw = dict(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=INTERMEDIATE, moe_intermediate_size=4,
        num_hidden_layers=n, num_attention_heads=HEADS, num_key_value_heads=HEADS, q_lora_rank=QLORA,
        kv_lora_rank=KVLORA, qk_nope_head_dim=NOPE, qk_rope_head_dim=ROPE, v_head_dim=V, index_n_heads=IHEADS,
        index_head_dim=IDIM, index_topk=TOPK, n_routed_experts=2, num_experts_per_tok=1, n_shared_experts=1, n_group=1,
        topk_group=1, mlp_layer_types=["dense"] * n, max_position_embeddings=2560, rms_norm_eps=LAYER_EPS,
        bos_token_id=0, eos_token_id=1, pad_token_id=None,
    )  # fmt: skip
    if family == "glm_moe_dsa":
        kw.update(indexer_types=TYPES[family], index_topk_freq=2, index_skip_topk_offset=1, first_k_dense_replace=n)
        kw["rope_parameters"] = {"rope_type": "default", "rope_theta": 8e6}
    elif family == "deepseek_v32":
        kw["first_k_dense_replace"] = n
        kw["rope_parameters"] = {
            "rope_type": "yarn", "rope_theta": 1e4, "factor": 40.0, "original_max_position_embeddings": 64,
            "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 0.8,
        }  # fmt: skip
    else:
        # two experts are the fewest: the router takes the best two of a group before it chooses one
        kw.update(indexer_types=TYPES[family], mlp_layer_types=["dense", "sparse", "sparse"], hc_mult=2)
        kw["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e7}
    return kw


def randomise(torch, model):
    """Weights by name, independent of construction order; every value is exact in bfloat16."""
    scale = {
        # small latents, so that eps 1e-6 and 1e-5 give visibly different norms
        "q_a_proj": LATENT, "kv_a_proj_with_mqa": LATENT, "indexer.wk": LATENT,
        "kv_b_proj": 1.2, "q_b_proj": 1.2, "weights_proj": 1.5,
    }  # fmt: skip
    with torch.no_grad():
        for name, p in [*model.named_parameters(), *model.named_buffers()]:
            if "inv_freq" in name:
                continue
            g = torch.Generator().manual_seed(SEED + zlib.crc32(name.encode()))
            draw = torch.randn(p.shape, generator=g)
            if "norm" in name and name.endswith("weight"):
                v = 0.5 + torch.rand(p.shape, generator=g)
            elif name.endswith("k_norm.bias"):
                v = 0.4 * draw
            elif name.endswith("sinks"):
                v = 2 * torch.rand(p.shape, generator=g)
            elif p.ndim == 1:  # scales and biases of the hyper connections and of the router
                v = 0.3 * draw
            elif "embed_tokens" in name:
                v = draw
            else:
                v = next((s for key, s in scale.items() if key in name), 1.0) * p.shape[-1] ** -0.5 * draw
                if "kv_a_proj_with_mqa" in name:  # the rope rows are not normalised
                    v[KVLORA:] /= LATENT
            p.copy_(v.bfloat16().float())


class Recorder:
    """Collects what one forward pass computes, layer by layer, from transformers' own objects."""

    def __init__(self, torch, mod, model):
        self.torch, self.mod, self.model, self.handles = torch, mod, model, []

    def keep(self, name, a):
        assert name not in self.layers[self.now], name
        self.layers[self.now][name] = a.detach().clone()

    def __enter__(self):
        self.layers, self.now = [dict() for _ in self.model.layers], None
        for i, layer in enumerate(self.model.layers):
            att = layer.self_attn
            on = lambda m, name: self.handles.append(
                m.register_forward_hook(lambda _m, _a, out: self.keep(name, out))
            )

            def enter(_m, _args, kwargs, i=i):
                self.now = i
                self.keep("hidden", kwargs["hidden_states"])
                self.layers[i]["rope"] = []

            def leave(_m, _args, _kwargs, out):
                self.keep("output", out[0])
                if len(out) > 2:
                    self.keep("used", out[2])
                self.now = None

            self.handles.append(att.register_forward_pre_hook(enter, with_kwargs=True))
            self.handles.append(att.register_forward_hook(leave, with_kwargs=True))
            self.handles.append(att.o_proj.register_forward_pre_hook(lambda _m, a: self.keep("into_o_proj", a[0])))
            on(att.q_a_proj, "q_a")
            on(att.q_a_layernorm, "q_resid")
            on(att.q_b_proj, "q")
            on(att.kv_a_proj_with_mqa, "kv_a")
            on(att.kv_a_layernorm, "kv_latent")
            if att.indexer is not None:
                on(att.indexer.wq_b, "index_q_raw")
                on(att.indexer.wk, "index_k_raw")
                on(att.indexer.k_norm, "index_k_norm")
                on(att.indexer.weights_proj, "head_weights_raw")
                on(att.indexer, "topk")
        self.saved = []

        def wrap(where, name, make):
            real = getattr(where, name)
            self.saved.append((where, name, real))
            setattr(where, name, make(real))

        def topk(real):
            def call(this, *a, **kw):
                if self.now is not None:  # the router of an MLP uses topk too
                    self.keep("scores", this)
                return real(this, *a, **kw)

            return call

        def eager(real):
            def call(module, query, key, value, mask, **kw):
                out, p = real(module, query, key, value, mask, **kw)
                for name, a in (("query", query), ("key", key), ("p", p), ("attention", out)):
                    self.keep(name, a)
                self.layers[self.now]["scaling"] = kw["scaling"]
                return out, p

            return call

        def rotary(name):
            def make(real):
                def call(*a, **kw):
                    out = real(*a, **kw)
                    self.layers[self.now]["rope"].append((name, *(o.detach().clone() for o in out)))
                    return out

                return call

            return make

        wrap(self.torch.Tensor, "topk", topk)
        wrap(self.mod, "eager_attention_forward", eager)
        for name in set(ROTARY.values()) & set(dir(self.mod)):
            wrap(self.mod, name, rotary(name))
        return self

    def __exit__(self, *_):
        for where, name, real in self.saved:
            setattr(where, name, real)
        for h in self.handles:
            h.remove()


ROTARY = {"interleaved": "apply_rotary_pos_emb_interleave", "half": "apply_rotary_pos_emb"}


def make_recording(torch, family, layers, cache, positions):
    """-> (name -> array in the layout of a recording, metadata of its lanes)"""
    types, recipe, B, S = TYPES[family], RECIPES[family], BATCH, LENGTH
    pick = np.concatenate([b * S + np.asarray(COLUMNS[family][b]) for b in range(B)])
    flat = lambda a: np.ascontiguousarray(a.reshape(B * S, *a.shape[2:]).numpy())
    t = {
        "positions": flat(positions).astype(np.int32),
        "requests": np.repeat(np.arange(B), S).astype(np.int32),
        "rows": pick.astype(np.int32),
    }
    column = np.arange(S)
    visible = np.tile(column[:, None] >= column, (B, 1))[pick]  # [R, S]
    for i, d in enumerate(layers):
        p, full, held = f"layer{i}.", types[i] == "full", cache.layers[i]

        def put(token=None, **quantities):
            for name, a in quantities.items():
                t[p + name] = flat(a) if token else flat(a)[pick]

        assert len(d["rope"]) == 1 + full and d["rope"][0][0] == ROTARY[recipe.pairing], (family, i)
        q, q_rope, k_rope = d["q"].view(B, S, HEADS, -1), d["rope"][0][1].transpose(1, 2), d["rope"][0][2][:, 0]
        put(True, hidden=d["hidden"], kv_a=d["kv_a"], kv_latent=d["kv_latent"], k_rope=k_rope)
        put(q_a=d["q_a"], q_resid=d["q_resid"], q=q, q_rope=q_rope)
        # these are what attention multiplied, and what the cache holds
        assert torch.equal(torch.cat([q[..., :NOPE], q_rope], -1), d["query"].transpose(1, 2))
        assert torch.equal(held.keys[:, 0], d["kv_latent"]) and torch.equal(held.values[:, 0], k_rope)
        if full:
            name, q_turned, k_turned = d["rope"][1]
            assert name == ROTARY[recipe.index_pairing], (family, i)
            raw = d["index_q_raw"].view(B, S, IHEADS, IDIM)
            join = lambda turned, a: torch.cat(
                [turned, a[..., ROPE:]] if recipe.index_lanes == "first" else [a[..., :-ROPE], turned], -1
            )
            put(index_q_raw=raw, index_q=join(q_turned, raw), head_weights_raw=d["head_weights_raw"])
            put(True, index_k_raw=d["index_k_raw"], index_k_norm=d["index_k_norm"], index_k=held.indexer_keys)
            assert torch.equal(held.indexer_keys, join(k_turned[:, :, 0], d["index_k_norm"])), (family, i)
            folded = np.float32(IHEADS**-0.5) * np.float32(IDIM**-0.5)
            t[p + "head_weights"] = (t[p + "head_weights_raw"] * folded).astype(np.float32)
            scores = flat(d["scores"])[pick]
            assert (scores[~visible] <= -1e38).all() and np.isfinite(scores[visible]).all()
            t[p + "scores"] = np.where(visible, scores, -np.inf).astype(np.float32)
            used = d["topk"]
            assert torch.equal(d.get("used", used), used)
        else:
            assert not {"topk", "scores"} & set(d) and getattr(held, "indexer_keys", None) is None
            used = d["used"]
            assert torch.equal(used, layers[producer(types, i)]["topk"]), (family, i)
        # transformers' order, without the invisible columns that it names when few keys are visible
        t[p + "selection"] = np.full((len(pick), TOPK), -1, np.int32)
        chosen = np.zeros_like(visible)
        for r, row in enumerate(flat(used)[pick]):
            row = [c for c in row if visible[r, c]]
            t[p + "selection"][r, : len(row)] = row
            chosen[r, row] = True
        # lse in float64, from the q and k that attention multiplied; without the sink
        query, key = (d[n].double().transpose(1, 2) for n in ("query", "key"))
        logit = np.einsum("rhd,rthd->rht", flat(query)[pick], key.numpy()[t["requests"][pick]])
        logit = np.where(chosen[:, None], d["scaling"] * logit, -np.inf)
        top = logit.max(-1)
        t[p + "lse"] = (top + np.log(np.exp(logit - top[..., None]).sum(-1))).astype(np.float32)
        weights = flat(d["p"].transpose(1, 2))[pick]
        assert (weights[~np.broadcast_to(chosen[:, None], weights.shape)] == 0).all(), (family, i)
        put(attention=d["attention"], output=d["output"])
        into = d["into_o_proj"].view(B, S, HEADS, V)
        if recipe.gate:
            put(gated=into)
        else:
            assert torch.equal(into, d["attention"])
    order = lambda pairing: "evens_then_odds" if pairing == "interleaved" else "in_place"
    return t, {
        "format": "indexshare-recording-1",
        "rotated_lanes": order(recipe.pairing),
        "index_rotated_lanes": order(recipe.index_pairing),
        "index_rope_dims": str(ROPE),
        "index_rope_lanes": recipe.index_lanes,
        "index_basis": "natural",
    }


def write_folder(family, folder, work):
    """Checkpoint, config and recording of one family, all made by transformers."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    from importlib import import_module

    import torch
    import transformers
    from safetensors import safe_open
    from transformers.cache_utils import DynamicCache

    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    versions = {"torch": torch.__version__.split("+")[0], "transformers": transformers.__version__}
    for line in open(os.path.join(HERE, "requirements.txt")):
        name, _, pin = line.strip().partition("==")
        if versions.get(name, pin) != pin:
            print(f"warning: {name} {versions[name]} is not the pinned {pin}", file=sys.stderr)
    package = f"transformers.models.{family}."
    mod = import_module(package + f"modeling_{family}")
    Config = getattr(import_module(package + f"configuration_{family}"), CLASSES[family] + "Config")
    Model = getattr(mod, CLASSES[family] + "ForCausalLM")
    kw = config_dict(family)
    if family == "glm_moe_dsa":  # the list and freq/offset say the same
        assert Config(**{n: v for n, v in kw.items() if n != "indexer_types"}).indexer_types == TYPES[family]
    model = Model(Config(**kw)).eval()
    randomise(torch, model)
    # fp32 to bfloat16 as from_pretrained does it (it keeps some modules in fp32); saved, that is the
    # checkpoint, and the fp32 model that runs is loaded from it.
    first = os.path.join(work, "first")
    model.save_pretrained(first)
    size = "110KB" if family == "glm_moe_dsa" else "1GB"
    Model.from_pretrained(first, dtype=torch.bfloat16).save_pretrained(folder, max_shard_size=size)
    run = Model.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    before, after = model.state_dict(), run.state_dict()
    assert list(before) == list(after)
    assert all(torch.equal(a, after[n]) and after[n].dtype == torch.float32 for n, a in before.items())
    for name in os.listdir(folder):
        if name != "config.json" and not name.startswith("model"):
            os.remove(os.path.join(folder, name))  # generation_config.json
    path = os.path.join(folder, "config.json")
    config = read_json(path)
    if family in ADDED:
        assert not set(ADDED[family]) & set(config)
        with open(path, "w", encoding="utf-8") as f:
            f.write(json.dumps({**config, **ADDED[family]}, indent=2, sort_keys=True) + "\n")

    g = torch.Generator().manual_seed(SEED)
    ids = torch.stack([torch.randperm(VOCAB, generator=g)[:LENGTH] for _ in range(BATCH)])
    positions = torch.arange(LENGTH) + torch.tensor(STARTS)[:, None]
    cache = DynamicCache(config=run.config)
    with Recorder(torch, mod, run.model) as rec, torch.no_grad():
        run.model(input_ids=ids, position_ids=positions, cache=cache, use_cache=True)
    t, lanes = make_recording(torch, family, rec.layers, cache, positions)
    attention, rotary = run.model.layers[0].self_attn, run.model.rotary_emb
    assert attention.kv_a_layernorm.variance_epsilon == attention.q_a_layernorm.variance_epsilon
    assert abs(rotary.attention_scaling - amplitude(config["rope_parameters"])) < 1e-12
    meta = dict(
        lanes,
        producer=f"transformers {transformers.__version__} {Model.__name__}, eager attention, fp32, CPU",
        generator="tests/golden/generate_families.py",
        model_class=Model.__name__,
        torch_version=versions["torch"],
        transformers_version=versions["transformers"],
        seed=str(SEED),
        latent_norm_eps=repr(attention.q_a_layernorm.variance_epsilon),
        index_key_eps=repr(attention.indexer.k_norm.eps),
        inv_freq=json.dumps([float(x) for x in rotary.inv_freq]),
        rotary_amplitude=repr(float(rotary.attention_scaling)),
        softmax_scale=repr(float(attention.scaling)),
        input_ids=json.dumps(ids.tolist()),
    )
    kind = lambda a: ("I32", "<i4") if a.dtype == np.int32 else ("F32", "<f4")
    path = os.path.join(folder, "forward.safetensors")
    write_safetensors(path, {n: (kind(a)[0], a.shape, a.astype(kind(a)[1]).tobytes()) for n, a in t.items()}, meta)
    mine, _, m = read_safetensors(path)
    with safe_open(path, "np") as f:  # the official reader agrees
        assert sorted(f.keys()) == sorted(mine) and f.metadata() == m
        assert all(np.array_equal(f.get_tensor(n), mine[n]) for n in mine)


def generate(family):
    with tempfile.TemporaryDirectory() as work:
        folder, target = os.path.join(work, family), os.path.join(HERE, family)
        write_folder(family, folder, work)
        _, found = recompute(family, folder)  # stops here, with nothing replaced, if they disagree
        power(family, found)
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(folder, target)
        for name in os.listdir(target):
            os.chmod(os.path.join(target, name), 0o644)  # safetensors writes them for the owner only


if __name__ == "__main__":
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument("--check", action="store_true", help="only read the folders back and recompute them")
    a.add_argument("families", nargs="*", metavar="family", help="default: all")
    args = a.parse_args()
    families = args.families or list(RECIPES)
    if not args.check:
        for family in families:
            generate(family)
    check(families)
