#!/usr/bin/env python3
"""Golden fixtures for DeepSeek Sparse Attention with cross-layer index sharing.

The oracle is Hugging Face transformers (class GlmMoeDsaModel), not this library: a tiny model with
the GLM-5.2 layer schedule is run on the CPU and everything its attention computes is written to
*.safetensors beside this file.  See README.md for the tensor table.

    generate.py            run transformers, certify, write the fixtures, then check them
    generate.py --check    read the fixtures back and recompute them (numpy only)
"""

import argparse
import inspect
import json
import math
import os
import struct
import sys
import tempfile
import zlib

import numpy as np

HERE = os.path.dirname(os.path.abspath(__file__))

SEED = 20240611
LAYERS = 8
TYPES = ["full", "full", "full", "shared", "shared", "shared", "full", "shared"]
TOPK = 16
HIDDEN, HEADS, QLORA, KVLORA, NOPE, ROPE, V = 80, 4, 64, 64, 32, 64, 48
IHEADS, IDIM = 16, 128
VOCAB = 256
THETA = 8e6
LATENT_EPS = 1e-6  # q_a_layernorm, kv_a_layernorm: class default in transformers
KNORM_EPS = 1e-6  # indexer k_norm (LayerNorm with bias)
LAYER_EPS = 1e-5  # rms_norm_eps of the config: input/post-attention/final norms only
LATENT = 0.012  # rms of the latents before their norms
SMALL_GAP = 1e-5
CASES = ["prefill64_fp32", "short_fp32", "decode_fp32", "leftpad_fp32", "farpos_fp32", "prefill64_bf16"]

# Recorded query columns.  Every case runs the whole sequence; to keep the files small only these
# rows of the query-side tensors are kept (different ones in the two batch entries).
ROWS64 = [
    [0, 1, 5, 14, 15, 16, 17, 18, 22, 27, 33, 38, 44, 51, 57, 63],
    [2, 8, 13, 15, 16, 17, 19, 20, 25, 30, 36, 41, 47, 54, 60, 63],
]
ROWS_LEFTPAD = [
    [9, 10, 15, 23, 24, 25, 26, 29, 34, 39, 43, 47],
    [0, 3, 9, 15, 16, 17, 20, 25, 31, 35, 37, 47],
]
ROWS_FAR = [[0, 7, 15, 16, 17, 23, 28, 33, 37, 41, 45, 47]]


def producer(layer):
    while TYPES[layer] == "shared":
        layer -= 1
    return layer


# --------------------------------------------------------------------------------------------------
# safetensors: a deterministic writer (the official one orders metadata at random) and a reader that
# needs numpy only.
# --------------------------------------------------------------------------------------------------
SIZES = {"F32": 4, "I32": 4, "BF16": 2}


def write_safetensors(path, tensors, metadata):
    """tensors: name -> (dtype, shape, bytes).  4-byte types first, so all are naturally aligned."""
    header, blobs, offset = {"__metadata__": dict(sorted(metadata.items()))}, [], 0
    for name in sorted(tensors, key=lambda n: (-SIZES[tensors[n][0]], n)):
        dtype, shape, data = tensors[name]
        assert len(data) == SIZES[dtype] * math.prod(shape), name
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + len(data)]}
        blobs.append(data)
        offset += len(data)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text)
        for data in blobs:
            f.write(data)


def read_safetensors(path):
    """-> (name -> float32/int32 array, name -> dtype string, metadata)"""
    with open(path, "rb") as f:
        raw = f.read()
    (n,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + n])
    metadata = header.pop("__metadata__")
    out, dtypes = {}, {}
    for name, info in header.items():
        data = raw[8 + n + info["data_offsets"][0] : 8 + n + info["data_offsets"][1]]
        if info["dtype"] == "F32":
            a = np.frombuffer(data, "<f4")
        elif info["dtype"] == "I32":
            a = np.frombuffer(data, "<i4")
        elif info["dtype"] == "BF16":
            a = (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32)
        else:
            raise ValueError(f"{path}: {name} has dtype {info['dtype']}")
        out[name] = a.reshape(info["shape"])
        dtypes[name] = info["dtype"]
    return out, dtypes, metadata


# --------------------------------------------------------------------------------------------------
# Certification: recomputation in float64 from recorded tensors.  Used on every row when the
# fixtures are made, and on the stored rows by --check.  numpy only, written from the equations.
# --------------------------------------------------------------------------------------------------
def rope_tf(a, cos, sin):
    """Pairs (2i, 2i+1) rotated by angle i; output lane order of transformers: evens', then odds'."""
    even, odd = a[..., 0::2], a[..., 1::2]
    return np.concatenate([even * cos - odd * sin, odd * cos + even * sin], -1)


def rms_norm(a, weight, eps):
    return a / np.sqrt((a * a).mean(-1, keepdims=True) + eps) * weight


def layer_norm(a, weight, bias, eps):
    c = a - a.mean(-1, keepdims=True)
    return c / np.sqrt((c * c).mean(-1, keepdims=True) + eps) * weight + bias


class Worst:
    """Largest error per quantity; an error above its limit stops the run."""

    def __init__(self, case):
        self.case, self.err, self.count = case, {}, {}

    def see(self, name, got, want, limit, relative=False):
        got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
        assert got.shape == want.shape, (self.case, name, got.shape, want.shape)
        assert np.array_equal(np.isfinite(got), np.isfinite(want)), (self.case, name, "finiteness")
        m = np.isfinite(want)
        e = float(np.abs(got[m] - want[m]).max()) if m.any() else 0.0
        if relative:
            e /= max(float(np.abs(want[m]).max()), 1e-30)
        self.err[name] = max(self.err.get(name, 0.0), e)
        if not e <= limit:
            raise SystemExit(f"FAIL {self.case}: {name}: error {e:.3e} above {limit:.1e}")

    def add(self, name, n=1):
        self.count[name] = self.count.get(name, 0) + int(n)


def recompute(case, t, w, fp32, report=None):
    """Check every recorded tensor of one case against the equations.  t: case tensors, w: weights."""
    r = report or Worst(case)
    tight = lambda loose: 1e-5 if fp32 else loose
    f = lambda name: t[name].astype(np.float64)
    cols, pad, vis = t["query_columns"], t["pad"], t["visible_len"]
    B, S = cols.shape
    T = t["rope_positions"].shape[1]
    column = np.arange(T)
    visible = (column >= pad[:, None, None]) & (column <= cols[:, :, None])  # [B,S,T]
    assert np.array_equal(visible.sum(-1), vis), case
    assert np.array_equal(vis, cols - pad[:, None] + 1), case
    pick = np.arange(B)[:, None], cols
    # The angle is the float32 product position * inv_freq, as transformers computes it.
    angle = t["rope_positions"].astype(np.float32)[..., None] * t["inv_freq"]
    assert angle.dtype == np.float32
    cos, sin = np.cos(angle.astype(np.float64)), np.sin(angle.astype(np.float64))
    r.see("rope_cos", cos, t["rope_cos"], tight(4e-3))
    r.see("rope_sin", sin, t["rope_sin"], tight(4e-3))
    cos, sin = f("rope_cos"), f("rope_sin")
    qcos, qsin = cos[pick], sin[pick]
    layers = sorted({int(n.split(".")[0][5:]) for n in t if n.startswith("layer")})
    for i in layers:
        p = f"layer{i}."
        full = TYPES[i] == "full"
        r.add("rows", B * S)
        if p + "q_a_out" in t:
            raw, kv = f(p + "q_a_out"), f(p + "kv_a_out")
            want = rms_norm(raw, w[p + "q_a_norm_weight"].astype(np.float64), LATENT_EPS)
            r.see("q_resid (eps 1e-6)", want, t[p + "q_resid"], tight(6e-2))
            ckv = rms_norm(kv[..., :KVLORA], w[p + "kv_a_norm_weight"].astype(np.float64), LATENT_EPS)
            r.see("c_kv (eps 1e-6)", ckv, t[p + "key_row"][..., :KVLORA], tight(6e-2))
            r.see("k_pe", rope_tf(kv[..., KVLORA:], cos, sin), t[p + "key_row"][..., KVLORA:], tight(6e-2))
            if fp32:  # the data can tell the two eps apart
                other = rms_norm(raw, w[p + "q_a_norm_weight"].astype(np.float64), LAYER_EPS)
                assert np.abs(other - t[p + "q_resid"]).max() > 1e-2, case
                other = rms_norm(kv[..., :KVLORA], w[p + "kv_a_norm_weight"].astype(np.float64), LAYER_EPS)
                assert np.abs(other - t[p + "key_row"][..., :KVLORA]).max() > 1e-2, case
        if full:
            src = p
            if p + "wq_b_out" in t:
                q, k = f(p + "wq_b_out"), f(p + "k_norm_out")
                want = layer_norm(
                    f(p + "wk_out"),
                    w[p + "k_norm_weight"].astype(np.float64),
                    w[p + "k_norm_bias"].astype(np.float64),
                    KNORM_EPS,
                )
                r.see("k_norm (eps 1e-6)", want, k, tight(6e-2))
                qi = np.concatenate([rope_tf(q[..., :ROPE], qcos[:, :, None], qsin[:, :, None]), q[..., ROPE:]], -1)
                ki = np.concatenate([rope_tf(k[..., :ROPE], cos, sin), k[..., ROPE:]], -1)
                r.see("q_index", qi, t[p + "q_index"], tight(6e-2))
                r.see("k_index", ki, t[p + "k_index"], tight(6e-2))
                hw = f(p + "weights_proj_out") * (IHEADS**-0.5 * IDIM**-0.5)
                r.see("head_weights from weights_proj", hw, t[p + "head_weights"], 1e-7)
            xw = f(p + "x") @ w[p + "weights_proj"].astype(np.float64).T * (IHEADS**-0.5 * IDIM**-0.5)
            r.see("head_weights from x", xw, t[p + "head_weights"], tight(2e-3))
            # score[t,s] = sum_h w[t,h] * max(0, q[t,h] . k[s])
            dots = np.einsum("bshd,btd->bsht", f(p + "q_index"), f(p + "k_index"))
            score = np.einsum("bsh,bsht->bst", f(p + "head_weights"), np.maximum(dots, 0))
            r.see("scores", np.where(visible, score, -np.inf), t[p + "scores"], 1e-5)
            sets = np.full((B, S, TOPK), -1)
            for b in range(B):
                for s in range(S):
                    lo, n = int(pad[b]), int(vis[b, s])
                    order = sorted(range(n), key=lambda j: (-score[b, s, lo + j], j))
                    want = math.inf if n <= TOPK else score[b, s, lo + order[TOPK - 1]] - score[b, s, lo + order[TOPK]]
                    gap = float(t[p + "gap"][b, s])
                    if math.isinf(want):
                        assert math.isinf(gap), (case, i, b, s)
                    else:
                        r.see("gap", want, gap, 1e-5)
                    sets[b, s, : min(n, TOPK)] = sorted(order[:TOPK])
                    r.add("selection rows")
                    if n > TOPK:
                        r.add("rows with visible > topk")
                        r.add("gap < 1e-5", gap < SMALL_GAP)
                    if not np.array_equal(sets[b, s], t[p + "selected"][b, s]):
                        r.add("set differs")
                        if gap >= SMALL_GAP:
                            raise SystemExit(f"FAIL {case}: layer {i} row {b},{s}: set differs, gap {gap:.3e}")
        else:
            src = f"layer{producer(i)}."
            assert not any((p + n) in t for n in ("q_index", "k_index", "scores", "topk_indices")), (case, i)
            assert np.array_equal(t[p + "used_indices"], t[src + "topk_indices"]), (case, i)
        # raw list of transformers -> set of logical positions
        raw = t[p + "used_indices"]
        sel = np.full((B, S, TOPK), -1, np.int32)
        for b in range(B):
            for s in range(S):
                keep = sorted(int(c) - int(pad[b]) for c in raw[b, s] if visible[b, s, c])
                sel[b, s, : len(keep)] = keep
                assert len(keep) == min(int(vis[b, s]), TOPK) == len(set(keep)), (case, i, b, s)
        assert np.array_equal(sel, t[p + "selected"]), (case, i)
        assert np.array_equal(t[p + "selected"], t[src + "selected"]), (case, i)
        # absorbed attention
        kvb = w[p + "kv_b"].astype(np.float64).reshape(HEADS, NOPE + V, KVLORA)
        qa, key = f(p + "q_abs"), f(p + "key_row")
        want = np.einsum("hnr,bshn->bshr", kvb[:, :NOPE], f(p + "q_nope"))
        r.see("q_abs", want, qa[..., :KVLORA], 1e-5)
        allowed = np.zeros((B, S, T), bool)
        for b in range(B):
            for s in range(S):
                keep = t[p + "selected"][b, s]
                allowed[b, s, keep[keep >= 0] + pad[b]] = True
        logit = float(t["softmax_scale"][0]) * np.einsum("bshd,btd->bsht", qa, key)
        logit = np.where(allowed[:, :, None], logit, -np.inf)
        top = logit.max(-1, keepdims=True)
        e = np.exp(logit - top)
        lse = top[..., 0] + np.log(e.sum(-1))
        r.see("lse", lse, t[p + "lse"], 1e-5)
        u = np.einsum("bsht,btr->bshr", e / e.sum(-1, keepdims=True), key[..., :KVLORA])
        o = np.einsum("hvr,bshr->bshv", kvb[:, NOPE:], u)
        r.see("o (absorbed vs transformers)", o.reshape(B, S, HEADS * V), t[p + "o"], tight(2e-2), not fp32)
    return r


def check():
    weights, _, _ = read_safetensors(os.path.join(HERE, "weights.safetensors"))
    total = os.path.getsize(os.path.join(HERE, "weights.safetensors"))
    for case in CASES:
        path = os.path.join(HERE, case + ".safetensors")
        tensors, _, meta = read_safetensors(path)
        total += os.path.getsize(path)
        assert meta["case"] == case
        r = recompute(case, tensors, weights, meta["model_dtype"] == "float32")
        print(f"{case}: {os.path.getsize(path)} bytes, {len(tensors)} tensors")
        for name, e in r.err.items():
            print(f"    {name:36s} worst error {e:.2e}")
        for name, n in r.count.items():
            print(f"    {name:36s} {n}")
        if case.endswith("fp32"):
            assert r.count.get("gap < 1e-5", 0) <= 0.02 * max(r.count.get("rows with visible > topk", 0), 1), case
    print(f"all fixtures agree with the equations; {total} bytes in all")


# --------------------------------------------------------------------------------------------------
# The oracle
# --------------------------------------------------------------------------------------------------
def config_dict():
    return dict(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=96, moe_intermediate_size=32,
        num_hidden_layers=LAYERS, num_attention_heads=HEADS, num_key_value_heads=HEADS,
        q_lora_rank=QLORA, kv_lora_rank=KVLORA, qk_nope_head_dim=NOPE, qk_rope_head_dim=ROPE, v_head_dim=V,
        index_n_heads=IHEADS, index_head_dim=IDIM, index_topk=TOPK,
        index_topk_freq=4, index_skip_topk_offset=3, indexer_types=list(TYPES),
        mlp_layer_types=["dense"] * LAYERS, first_k_dense_replace=LAYERS,
        rope_parameters={"rope_type": "default", "rope_theta": THETA},
        max_position_embeddings=1048576, rms_norm_eps=LAYER_EPS, pad_token_id=0, attention_bias=False,
    )  # fmt: skip


def load_oracle():
    """Import torch and transformers, and refuse a release that is no oracle for index sharing."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    import transformers

    bad = lambda why: SystemExit(
        f"transformers {transformers.__version__} is no oracle for this library: {why}. "
        "Install the versions of requirements.txt."
    )
    try:
        from transformers.models.glm_moe_dsa import modeling_glm_moe_dsa as mod
        from transformers.models.glm_moe_dsa.configuration_glm_moe_dsa import GlmMoeDsaConfig as Config
    except ImportError as e:
        raise bad(f"it has no glm_moe_dsa ({e})")
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    kw = config_dict()
    derived = Config(**{k: v for k, v in kw.items() if k != "indexer_types"})
    if getattr(derived, "indexer_types", None) != TYPES:
        raise bad(f"freq 4, offset 3 gives {getattr(derived, 'indexer_types', None)}, not {TYPES}")
    cfg = Config(**kw)
    if cfg.indexer_types != TYPES:
        raise bad("it does not keep indexer_types")
    cfg._attn_implementation = "eager"
    if not hasattr(mod, "apply_rotary_pos_emb_interleave"):
        raise bad("it has no apply_rotary_pos_emb_interleave")
    model = mod.GlmMoeDsaModel(cfg).eval()
    for i, layer in enumerate(model.layers):
        if (layer.self_attn.indexer is None) != (TYPES[i] == "shared"):
            raise bad(f"layer {i} is {TYPES[i]} but its indexer is {layer.self_attn.indexer}")
    # The pairing is measured, not read from the source: push one token through the indexer.
    ix = model.layers[0].self_attn.indexer
    cos, sin = model.rotary_emb(torch.zeros(1, 1, HIDDEN), torch.tensor([[37]]))
    seen = {}

    class Cache:
        def update_indexer(self, k, layer):
            seen["k"] = k
            return k

    x = torch.randn(1, 1, HIDDEN)
    args = [x, torch.randn(1, 1, QLORA), (cos, sin), torch.zeros(1, 1, 1), torch.tensor([[37]])]
    ix(*args, Cache())
    with torch.no_grad():
        k = ix.k_norm(ix.wk(x)).double().numpy()
    c, s = cos[..., : ROPE // 2].double().numpy(), sin[..., : ROPE // 2].double().numpy()
    lo, hi = k[..., : ROPE // 2], k[..., ROPE // 2 : ROPE]
    half = np.concatenate([lo * c - hi * s, hi * c + lo * s], -1)
    got = seen["k"][..., :ROPE].detach().double().numpy()
    if np.abs(got - rope_tf(k[..., :ROPE], c, s)).max() > 1e-5:
        kind = "half-split" if np.abs(got - half).max() < 1e-5 else "unknown"
        raise bad(f"the rotary pairing of GlmMoeDsaIndexer is {kind}, not interleaved (before PR #46842?)")
    att = model.layers[0].self_attn
    eps = dict(
        q_a=att.q_a_layernorm.variance_epsilon, kv_a=att.kv_a_layernorm.variance_epsilon, k_norm=ix.k_norm.eps,
        input=model.layers[0].input_layernorm.variance_epsilon, final=model.norm.variance_epsilon,
    )  # fmt: skip
    want = dict(q_a=LATENT_EPS, kv_a=LATENT_EPS, k_norm=KNORM_EPS, input=LAYER_EPS, final=LAYER_EPS)
    if eps != want:
        raise bad(f"norm eps are {eps}, not {want}")
    if att.scaling != (NOPE + ROPE) ** -0.5:
        raise bad(f"softmax scale is {att.scaling}")
    versions = {"torch": torch.__version__.split("+")[0], "transformers": transformers.__version__}
    pins = dict(
        line.strip().split("==")
        for line in open(os.path.join(HERE, "requirements.txt"))
        if "==" in line and not line.startswith("#")
    )
    for name, version in versions.items():
        if pins[name] != version:
            print(f"warning: {name} {version} is not the pinned {pins[name]}", file=sys.stderr)
    return torch, mod, cfg, model, versions, eps


def randomise(torch, model):
    """Weights by name, independent of construction order; every value is exact in bfloat16, so the
    float32 and the bfloat16 model have the same weights."""

    def scale(name, shape):
        fan = shape[-1] ** -0.5
        if "embed_tokens" in name:
            return 1.0
        for key, s in (
            # small latents, so that eps 1e-6 and 1e-5 give visibly different norms
            ("q_a_proj", LATENT), ("kv_a_proj_with_mqa", LATENT), ("indexer.wk.", LATENT),
            ("kv_b_proj", 1.2), (".q_b_proj", 1.2), ("indexer.wq_b", 1.0), ("weights_proj", 1.5),
            ("o_proj", 1.0), ("gate_proj", 1.0), ("up_proj", 1.0), ("down_proj", 1.0),
        ):  # fmt: skip
            if key in name:
                return s * fan
        raise AssertionError(name)

    with torch.no_grad():
        for name, p in model.named_parameters():
            g = torch.Generator().manual_seed(SEED + zlib.crc32(name.encode()))
            if "norm" in name and name.endswith("weight"):
                v = 0.5 + torch.rand(p.shape, generator=g)
            elif name.endswith("k_norm.bias"):
                v = 0.4 * torch.randn(p.shape, generator=g)
            else:
                v = scale(name, p.shape) * torch.randn(p.shape, generator=g)
                if "kv_a_proj_with_mqa" in name:  # the rope rows are not normalised
                    v[KVLORA:] /= LATENT
            p.copy_(v.bfloat16().float())
    shared = [f"layers.{i}.self_attn.indexer." for i in range(LAYERS) if TYPES[i] == "shared"]
    assert not any(n.startswith(s) for n in model.state_dict() for s in shared)


class Recorder:
    """Collects what one forward pass computes, layer by layer, from transformers' own objects."""

    def __init__(self, torch, mod, model):
        self.torch, self.mod, self.model, self.handles = torch, mod, model, []

    def __enter__(self):
        self.layers, self.now = [dict() for _ in range(LAYERS)], None
        torch, mod = self.torch, self.mod
        for i, layer in enumerate(self.model.layers):
            att = layer.self_attn
            hook = lambda m, name, i=i: self.handles.append(
                m.register_forward_hook(lambda _m, _a, out: self.layers[i].__setitem__(name, out.detach().clone()))
            )

            def enter(_m, args, kwargs, i=i):
                self.now = i
                self.layers[i]["x"] = kwargs["hidden_states"].detach().clone()
                self.layers[i]["rope"] = []

            def leave(_m, _args, _kwargs, out, i=i):
                self.layers[i]["used"] = out[2].clone()
                self.now = None

            self.handles.append(att.register_forward_pre_hook(enter, with_kwargs=True))
            self.handles.append(att.register_forward_hook(leave, with_kwargs=True))
            hook(att.q_a_proj, "q_a_out")
            hook(att.q_a_layernorm, "q_resid")
            hook(att.q_b_proj, "q_b_out")
            hook(att.kv_a_proj_with_mqa, "kv_a_out")
            hook(att.kv_a_layernorm, "c_kv_new")
            self.handles.append(
                att.o_proj.register_forward_pre_hook(
                    lambda _m, a, i=i: self.layers[i].__setitem__("o", a[0].detach().clone())
                )
            )
            if att.indexer is not None:
                for name in ("wq_b", "wk", "k_norm", "weights_proj"):
                    hook(getattr(att.indexer, name), name)
                hook(att.indexer, "topk")
        self.handles.append(
            self.model.rotary_emb.register_forward_hook(lambda _m, _a, out: setattr(self, "cos_sin", out))
        )
        self.saved = (torch.Tensor.topk, mod.apply_rotary_pos_emb_interleave, mod.eager_attention_forward)
        topk, rotary, eager = self.saved

        def topk2(this, *a, **kw):
            if self.now is not None:
                assert "scores" not in self.layers[self.now]
                self.layers[self.now]["scores"] = this.detach().clone()
            return topk(this, *a, **kw)

        def rotary2(*a, **kw):
            out = rotary(*a, **kw)
            self.layers[self.now]["rope"].append(tuple(o.detach().clone() for o in out))
            return out

        def eager2(module, query, key, value, mask, **kw):
            out, p = eager(module, query, key, value, mask, **kw)
            d = self.layers[self.now]
            d["query"], d["p"], d["scaling"] = query.detach().clone(), p.detach().clone(), kw["scaling"]
            return out, p

        torch.Tensor.topk, mod.apply_rotary_pos_emb_interleave, mod.eager_attention_forward = topk2, rotary2, eager2
        return self

    def __exit__(self, *_):
        self.torch.Tensor.topk, self.mod.apply_rotary_pos_emb_interleave, self.mod.eager_attention_forward = self.saved
        for h in self.handles:
            h.remove()
        self.handles = []


# what a forward pass has one row of per new token
QUERY_ROWS = (
    "x", "q_a_out", "q_resid", "q_nope", "q_pe", "o", "used", "topk", "q_index", "wq_b", "weights_proj",
)  # fmt: skip


def real_rows(rows, pad, n):
    """n rows of real tokens: columns pad..pad+n-2 and the last."""
    return rows[[*range(pad, pad + n - 1), rows.shape[0] - 1]]


def run(torch, mod, model, ids, cache, mask=None, positions=None):
    """One forward pass -> list of per-layer dicts of torch tensors (rows of this call, keys of all)."""
    with Recorder(torch, mod, model) as rec, torch.no_grad():
        model(input_ids=ids, attention_mask=mask, position_ids=positions, cache=cache, use_cache=True)
    B, S = ids.shape
    for i, d in enumerate(rec.layers):
        (q_rot, k_rot) = d["rope"][0]
        d["q_nope"] = d["q_b_out"].view(B, S, HEADS, NOPE + ROPE)[..., :NOPE]
        d["q_pe"] = q_rot.transpose(1, 2)
        assert torch.equal(torch.cat([d["q_nope"], d["q_pe"]], -1), d["query"].transpose(1, 2))
        held = cache.layers[i]
        # transformers caches the latent: keys = c_kv, values = k_pe
        d["key_row"] = torch.cat([held.keys[:, 0], held.values[:, 0]], -1)
        assert torch.equal(d["key_row"][:, -S:, :KVLORA], d["c_kv_new"])
        assert torch.equal(d["key_row"][:, -S:, KVLORA:], k_rot[:, 0])
        if TYPES[i] == "full":
            assert len(d["rope"]) == 2
            qi, ki = d["rope"][1]
            d["q_index"] = torch.cat([qi, d["wq_b"].view(B, S, IHEADS, IDIM)[..., ROPE:]], -1)
            d["k_index"] = held.indexer_keys.clone()
            assert torch.equal(d["k_index"][:, -S:], torch.cat([ki[:, :, 0], d["k_norm"][..., ROPE:]], -1))
            assert torch.equal(d["used"], d["topk"])
        else:
            assert len(d["rope"]) == 1 and getattr(held, "indexer_keys", None) is None
            assert "scores" not in d
            assert torch.equal(d["used"], rec.layers[producer(i)]["topk"])
    return rec.layers, rec.cos_sin


def to_numpy(a):
    return (a.detach().float() if a.is_floating_point() else a.detach()).numpy()


class Case:
    """All rows of one case in numpy (float32/int32); stored rows are chosen at the end."""

    def __init__(self, name, fp32, ids, positions, pad, columns, cos, sin, inv_freq):
        self.name, self.fp32 = name, fp32
        half = ROPE // 2
        col = np.asarray(columns, np.int32)
        self.t = {
            "input_ids": to_numpy(ids).astype(np.int32),
            "rope_positions": positions.astype(np.int32),
            "pad": np.asarray(pad, np.int32),
            "query_columns": col,
            "visible_len": (col - np.asarray(pad, np.int32)[:, None] + 1).astype(np.int32),
            "rope_cos": to_numpy(cos)[..., :half],
            "rope_sin": to_numpy(sin)[..., :half],
            "inv_freq": to_numpy(inv_freq),
            "softmax_scale": np.array([(NOPE + ROPE) ** -0.5], np.float32),
            "index_topk": np.array([TOPK], np.int32),
        }
        self.dtype = {n: "I32" if a.dtype == np.int32 else "F32" for n, a in self.t.items()}
        if not fp32:
            self.dtype["rope_cos"] = self.dtype["rope_sin"] = "BF16"
        self.p = {}  # attention weights of transformers, for certification only

    def put(self, name, a, dtype=None):
        self.t[name] = a
        self.dtype[name] = dtype or ("I32" if a.dtype == np.int32 else "F32" if self.fp32 else "BF16")

    def add_layers(self, layers, weights):
        """layers: per-layer dict over all rows in query_columns (all of them recorded by TF)."""
        pad, col = self.t["pad"], self.t["query_columns"]
        B, S = col.shape
        for i, d in enumerate(layers):
            p = f"layer{i}."
            T = d["key_row"].shape[1]
            column = np.arange(T)
            visible = (column >= pad[:, None, None]) & (column <= col[:, :, None])
            for name in ("x", "q_a_out", "kv_a_out", "q_resid", "q_nope", "key_row", "o"):
                self.put(p + name, to_numpy(d[name]))
            self.put(p + "used_indices", to_numpy(d["used"]).astype(np.int32))
            self.put(p + "selected", self.selected(self.t[p + "used_indices"], visible))
            # q_abs in float64, stored in float32
            kvb = weights[p + "kv_b"].astype(np.float64).reshape(HEADS, NOPE + V, KVLORA)
            latent = np.einsum("hnr,bshn->bshr", kvb[:, :NOPE], to_numpy(d["q_nope"]).astype(np.float64))
            qa = np.concatenate([latent, to_numpy(d["q_pe"]).astype(np.float64)], -1).astype(np.float32)
            self.put(p + "q_abs", qa, "F32")
            logit = np.einsum("bshd,btd->bsht", qa.astype(np.float64), to_numpy(d["key_row"]).astype(np.float64))
            allowed = np.zeros((B, S, T), bool)
            sel = self.t[p + "selected"]
            for b in range(B):
                for s in range(S):
                    keep = sel[b, s][sel[b, s] >= 0] + pad[b]
                    allowed[b, s, keep] = True
            logit = np.where(allowed[:, :, None], logit * (NOPE + ROPE) ** -0.5, -np.inf)
            top = logit.max(-1)
            lse = top + np.log(np.exp(logit - top[..., None]).sum(-1))
            self.put(p + "lse", lse.astype(np.float32), "F32")
            self.p[i] = (np.exp(logit - lse[..., None]), to_numpy(d["p"]))
            if TYPES[i] == "full":
                for name in ("q_index", "k_index"):
                    self.put(p + name, to_numpy(d[name]))
                self.put(p + "wq_b_out", to_numpy(d["wq_b"]).reshape(B, S, IHEADS, IDIM))
                self.put(p + "wk_out", to_numpy(d["wk"]))
                self.put(p + "k_norm_out", to_numpy(d["k_norm"]))
                self.put(p + "weights_proj_out", to_numpy(d["weights_proj"]))
                # transformers: weights = W x (as float32) * H_I^-0.5; D_I^-0.5 goes on the dot product.
                hw = to_numpy(d["weights_proj"]) * np.float32(IHEADS**-0.5) * np.float32(IDIM**-0.5)
                self.put(p + "head_weights", hw.astype(np.float32), "F32")
                self.put(p + "topk_indices", to_numpy(d["topk"]).astype(np.int32))
                raw = to_numpy(d["scores"])
                assert (raw[~visible] <= -1e38).all() and np.isfinite(raw[visible]).all()
                self.masked_value = float(raw[~visible].max()) if (~visible).any() else None
                scores = np.where(visible, raw, -np.inf).astype(np.float32)
                self.put(p + "scores", scores, "F32")
                ordered = np.sort(scores, -1)[..., ::-1].astype(np.float64)
                gap = np.full((B, S), np.inf)
                more = self.t["visible_len"] > TOPK
                if more.any():
                    gap[more] = ordered[more][:, TOPK - 1] - ordered[more][:, TOPK]
                self.put(p + "gap", gap.astype(np.float32), "F32")

    def selected(self, raw, visible):
        pad = self.t["pad"]
        out = np.full(raw.shape[:2] + (TOPK,), -1, np.int32)
        for b in range(raw.shape[0]):
            for s in range(raw.shape[1]):
                keep = sorted(int(c) - int(pad[b]) for c in raw[b, s] if visible[b, s, c])
                out[b, s, : len(keep)] = keep
        return out

    def certify(self, weights):
        """Every row that transformers computed, against the float64 equations."""
        r = recompute(self.name + " (all rows)", self.t, weights, self.fp32)
        for i, (mine, theirs) in self.p.items():
            theirs = np.swapaxes(theirs, 1, 2)  # [B,H,S,T] -> [B,S,H,T]
            r.see("attention weights", mine, theirs, 1e-5 if self.fp32 else 2e-2)
            off = theirs[~(mine > 0)]
            assert off.size == 0 or np.abs(off).max() == 0.0, (self.name, i)
        return r

    def write(self, keep_layers, keep_rows, detail, metadata):
        t = {}
        B = self.t["query_columns"].shape[0]
        S = self.t["query_columns"].shape[1]
        rows = None
        if keep_rows is not None:
            at = [[int(np.flatnonzero(self.t["query_columns"][b] == c)[0]) for c in keep_rows[b]] for b in range(B)]
            rows = (np.arange(B)[:, None], np.asarray(at))
        query_side = {
            "query_columns", "visible_len", "x", "q_a_out", "q_resid", "q_nope", "q_abs", "o", "lse", "used_indices",
            "selected", "q_index", "wq_b_out", "weights_proj_out", "head_weights", "topk_indices", "scores", "gap",
        }  # fmt: skip
        details = {"q_a_out", "kv_a_out", "wq_b_out", "wk_out", "k_norm_out", "weights_proj_out"}
        for name, a in self.t.items():
            short = name.split(".")[-1]
            if name.startswith("layer"):
                i = int(name.split(".")[0][5:])
                if i not in keep_layers or (short in details and i not in detail):
                    continue
            if rows is not None and short in query_side:
                assert a.shape[:2] == (B, S), name
                a = a[rows]
            t[name] = a
        meta = dict(metadata)
        meta.update(
            case=self.name,
            model_dtype="float32" if self.fp32 else "bfloat16",
            recorded_layers=json.dumps(keep_layers),
            detail_layers=json.dumps(detail),
            transformers_masked_score=repr(self.masked_value),
        )
        path = os.path.join(HERE, self.name + ".safetensors")
        blobs = {}
        for name, a in t.items():
            a = np.ascontiguousarray(a)
            if self.dtype[name] == "BF16":
                bits = a.astype(np.float32).view(np.uint32)
                assert not (bits & 0xFFFF).any(), name  # already bfloat16 values
                data = (bits >> 16).astype("<u2").tobytes()
            else:
                data = a.astype("<i4" if self.dtype[name] == "I32" else "<f4").tobytes()
            blobs[name] = (self.dtype[name], a.shape, data)
        write_safetensors(path, blobs, meta)
        return path


def spread(case):
    """The case is worth testing: layers select differently, selections are spread, softmax is not flat."""
    t, vis = case.t, case.t["visible_len"]
    deep = vis >= 2 * TOPK
    line = []
    if not deep.any():
        return
    fulls = [i for i in range(LAYERS) if TYPES[i] == "full"]
    sets = {i: [set(r.tolist()) for r in t[f"layer{i}.selected"][deep]] for i in fulls}
    for a in fulls:
        for b in fulls:
            if a < b:
                share = np.mean([len(x & y) / TOPK for x, y in zip(sets[a], sets[b])])
                line.append(f"{a}/{b} {share:.2f}")
                assert share < 0.6 and not any(x == y for x, y in zip(sets[a], sets[b])), (case.name, a, b)
    window = np.mean([np.mean(np.asarray(sorted(s)) / (v - 1)) for i in fulls for s, v in zip(sets[i], vis[deep])])
    entropy = [float((-p[deep] * np.log(np.maximum(p[deep], 1e-300))).sum(-1).mean()) for p, _ in case.p.values()]
    print(
        f"    overlap of full layers: {', '.join(line)}; mean relative position of a selection {window:.2f}; "
        f"softmax entropy {min(entropy):.2f}..{max(entropy):.2f} of {math.log(TOPK):.2f}"
    )
    assert 0.3 < window < 0.7
    assert 0.2 * math.log(TOPK) < min(entropy) and max(entropy) < 0.95 * math.log(TOPK)


def power(case, w):
    """How many selections a wrong indexer would change: the case must be able to see each mistake."""
    t, pick = case.t, (np.arange(case.t["pad"].shape[0])[:, None], case.t["query_columns"])
    f = lambda n: t[n].astype(np.float64)
    half = lambda a, c, s: np.concatenate([a[..., :32] * c - a[..., 32:] * s, a[..., 32:] * c + a[..., :32] * s], -1)
    changed, rows, shift = {}, 0, {}
    pos = t["rope_positions"]
    exact = pos[..., None] * THETA ** -(np.arange(0, ROPE, 2) / ROPE)
    for i in range(LAYERS):
        if TYPES[i] == "shared":
            continue
        p = f"layer{i}."
        gamma, beta = w[p + "k_norm_weight"].astype(np.float64), w[p + "k_norm_bias"].astype(np.float64)
        q, wk, hw = f(p + "wq_b_out"), f(p + "wk_out"), f(p + "head_weights")

        def score(rope=rope_tf, last=False, cos=f("rope_cos"), sin=f("rope_sin"), k=None, relu=True, hw=hw):
            k = layer_norm(wk, gamma, beta, KNORM_EPS) if k is None else k

            def turn(a, c, s):
                if last:
                    return np.concatenate([a[..., :ROPE], rope(a[..., ROPE:], c, s)], -1)
                return np.concatenate([rope(a[..., :ROPE], c, s), a[..., ROPE:]], -1)

            qi = turn(q, cos[pick][:, :, None], sin[pick][:, :, None])
            dots = np.einsum("bshd,btd->bsht", qi, turn(k, cos, sin))
            return np.einsum("bsh,bsht->bst", hw, np.maximum(dots, 0) if relu else dots)

        ref = t[p + "scores"]
        visible = np.isfinite(ref)
        wide = t["visible_len"] > TOPK
        rows += int(wide.sum())
        top = lambda a: np.sort(np.argsort(np.where(visible, -a, np.inf), -1, kind="stable")[..., :TOPK], -1)
        for name, a in {
            "nothing wrong": score(),
            "half-split pairing": score(rope=half),
            "RoPE on the last 64": score(last=True),
            "k_norm eps 1e-5": score(k=layer_norm(wk, gamma, beta, 1e-5)),
            "k_norm without bias": score(k=layer_norm(wk, gamma, 0.0, KNORM_EPS)),
            "k_norm as RMSNorm": score(k=rms_norm(wk, gamma, KNORM_EPS)),
            "no ReLU": score(relu=False),
            "|head weights|": score(hw=np.abs(hw)),
            "float64 RoPE angle": score(cos=np.cos(exact), sin=np.sin(exact)),
        }.items():
            changed[name] = changed.get(name, 0) + int((top(a) != top(ref)).any(-1)[wide].sum())
            shift[name] = max(shift.get(name, 0.0), float(np.abs(a - ref)[visible].max()))
    print(f"    selections changed by a mistake, of {rows} rows (largest score change):")
    for name, n in changed.items():
        print(f"        {name:24s}{n:4d}  ({shift[name]:.1e})")
    assert changed["nothing wrong"] == 0
    for name, n in changed.items():
        small = name in ("nothing wrong", "float64 RoPE angle", "k_norm eps 1e-5")
        assert n > 0.5 * rows or small, (case.name, name)
    assert shift["k_norm eps 1e-5"] > 1e-2, case.name


def generate():
    torch, mod, cfg, model, versions, eps = load_oracle()
    from transformers.cache_utils import DynamicCache

    randomise(torch, model)
    g = torch.Generator().manual_seed(SEED)
    some = lambda B, S: torch.stack([torch.randperm(VOCAB - 1, generator=g)[:S] + 1 for _ in range(B)])

    w = {}
    for i, layer in enumerate(model.layers):
        att, p = layer.self_attn, f"layer{i}."
        w[p + "kv_b"] = to_numpy(att.kv_b_proj.weight)
        w[p + "q_a_norm_weight"] = to_numpy(att.q_a_layernorm.weight)
        w[p + "kv_a_norm_weight"] = to_numpy(att.kv_a_layernorm.weight)
        if att.indexer is not None:
            w[p + "k_norm_weight"] = to_numpy(att.indexer.k_norm.weight)
            w[p + "k_norm_bias"] = to_numpy(att.indexer.k_norm.bias)
            w[p + "weights_proj"] = to_numpy(att.indexer.weights_proj.weight)

    meta = {
        "generator": "tests/golden/generate.py",
        "oracle": "transformers GlmMoeDsaModel, eager attention, CPU",
        "torch_version": versions["torch"],
        "transformers_version": versions["transformers"],
        "seed": str(SEED),
        "config": json.dumps(config_dict(), sort_keys=True),
        "layer_roles": json.dumps(TYPES),
        "producer_layer": json.dumps([producer(i) for i in range(LAYERS)]),
        "norm_eps": json.dumps(eps, sort_keys=True),
        "rope_pairing": "interleaved (2i, 2i+1), for attention and indexer",
        "lane_order": "rotated part (64 lanes): evens then odds. Lane j < 32 is element 2j of the in-place "
        "interleaved layout, lane 32+j is element 2j+1. The same for q and k, so dot products agree. "
        "Indexer: lanes 0..63 rotated, 64..127 not. *_out tensors are before RoPE, in checkpoint order.",
        "head_weights_note": "float32(weights_proj(x)) * index_n_heads^-0.5 * index_head_dim^-0.5: ALL constants "
        "folded; score[t,s] = sum_h head_weights[t,h] * max(0, q_index[t,h] . k_index[s]).",
        "scores_note": "transformers' own float32 scores; invisible entries, where transformers has about finfo.min, "
        "are -inf here.",
        "indices_note": "topk_indices/used_indices are transformers' raw lists: COLUMNS of the padded sequence, by "
        "descending score, with invisible columns when fewer than index_topk are visible. selected is the set in "
        "logical positions (column - pad), ascending, padded with -1.",
        "gap_note": "score[K-1]-score[K] of the sorted visible scores; +inf if visible_len <= K.",
        "q_abs_note": "[W_UK[h]^T q_nope | q_pe], made in float64, stored as float32; attention q of head h is "
        "[q_nope | q_abs[64:128]].",
        "key_row_note": "[c_kv (after kv_a_layernorm) | k_pe (after RoPE)].",
        "rows_note": "query-side tensors have S rows; row (b,s) is column query_columns[b,s] and sees columns "
        "pad[b]..query_columns[b,s], visible_len[b,s] of them.",
        "lse_note": "natural log of sum of exp(softmax_scale * q_abs . key_row) over the selected keys (float64).",
    }
    write_safetensors(
        os.path.join(HERE, "weights.safetensors"),
        {n: ("F32", a.shape, np.ascontiguousarray(a, "<f4").tobytes()) for n, a in w.items()},
        dict(meta, case="weights", note="All values are exact in bfloat16 and serve the bfloat16 case too. kv_b "
             "[H*(nope+v), kv_lora]: per head, nope rows of W_UK and then v rows of W_UV."),
    )  # fmt: skip

    def report(case, keep_layers, keep_rows, detail):
        r = case.certify(w)
        gaps = r.count.get("gap < 1e-5", 0)
        n = r.count.get("rows with visible > topk", 0)
        print(f"{case.name}: certified on all rows; gap < 1e-5 in {gaps} of {n} rows")
        for name, e in r.err.items():
            print(f"    {name:36s} worst error {e:.2e}")
        spread(case)
        if case.name in ("prefill64_fp32", "farpos_fp32"):
            power(case, w)
        case.write(keep_layers, keep_rows, detail, meta)

    def simple(name, m, fp32, ids, keep_layers, keep_rows, detail, mask=None, positions=None, pad=None):
        B, S = ids.shape
        cache = DynamicCache(config=cfg)
        layers, (cos, sin) = run(torch, mod, m, ids, cache, mask, positions)
        pos = np.broadcast_to(np.arange(S), (B, S)) if positions is None else to_numpy(positions)
        cos, sin = (a.expand(B, -1, -1) for a in (cos, sin))
        pad = [0] * B if pad is None else pad
        if any(pad):
            # rows of pad tokens mean nothing: keep as many real rows as the most padded entry has
            first = max(pad)
            for d in layers:
                d["p"] = d["p"].transpose(1, 2)
                for n in QUERY_ROWS + ("scores", "p"):
                    if n in d:
                        d[n] = torch.stack([real_rows(d[n][b], pad[b], S - first) for b in range(B)])
                d["p"] = d["p"].transpose(1, 2)
            columns = [real_rows(torch.arange(S), p, S - first).tolist() for p in pad]
        else:
            columns = [list(range(S))] * B
        case = Case(name, fp32, ids, pos, pad, columns, cos, sin, m.rotary_emb.inv_freq)
        case.add_layers(layers, w)
        report(case, keep_layers, keep_rows, detail)
        return case

    everything = list(range(LAYERS))
    ids64 = some(2, 64)
    simple("prefill64_fp32", model, True, ids64, everything, ROWS64, [])
    simple("short_fp32", model, True, some(1, 11), [2, 3], None, [2, 3])

    # decode: 40 tokens, then 8 single steps with the cache
    ids = some(2, 48)
    cache = DynamicCache(config=cfg)
    prompt = run(torch, mod, model, ids[:, :40], cache)[0]
    steps = [run(torch, mod, model, ids[:, c : c + 1], cache)[0] for c in range(40, 48)]
    whole, (cos, sin) = run(torch, mod, model, ids, DynamicCache(config=cfg))
    stacked = []
    for i in range(LAYERS):
        last, d = steps[-1][i], {}
        for n in QUERY_ROWS:
            if n in last:
                d[n] = torch.cat([s[i][n] for s in steps], 1)
        grow = lambda a, fill: torch.nn.functional.pad(a, (0, 48 - a.shape[-1]), value=fill)
        d["p"] = torch.cat([grow(s[i]["p"], 0.0) for s in steps], 2)
        if "scores" in last:
            d["scores"] = torch.cat([grow(s[i]["scores"], -math.inf) for s in steps], 1)
            d["k_index"] = last["k_index"]
        d["key_row"] = last["key_row"]
        for n in ("kv_a_out", "wk", "k_norm"):
            if n in last:
                d[n] = torch.cat([prompt[i][n]] + [s[i][n] for s in steps], 1)
        stacked.append(d)
    worst = {}
    for i in range(LAYERS):
        for n in ("x", "q_resid", "q_nope", "q_pe", "o", "q_index", "weights_proj", "key_row", "k_index", "scores"):
            if n in stacked[i]:
                a, b = stacked[i][n], whole[i][n]
                if n not in ("key_row", "k_index"):
                    b = b[:, 40:]
                if n == "scores":
                    seen = a.isfinite()
                    assert (b[~seen] <= -1e38).all()
                    a, b = a[seen], b[seen]
                worst[n] = max(worst.get(n, 0.0), (a - b).abs().max().item())
        assert torch.equal(stacked[i]["used"].sort(-1).values, whole[i]["used"][:, 40:].sort(-1).values), i
    print("decode against prefill of 48:", ", ".join(f"{n} {e:.1e}" for n, e in worst.items()), "; sets equal")
    assert max(worst.values()) < 1e-4, worst
    case = Case(
        "decode_fp32", True, ids, np.broadcast_to(np.arange(48), (2, 48)), [0, 0], [list(range(40, 48))] * 2,
        *(a.expand(2, -1, -1) for a in (cos, sin)), model.rotary_emb.inv_freq,
    )  # fmt: skip
    case.add_layers(stacked, w)
    report(case, everything, None, [])

    # left padding, with the position_ids that generate() would pass
    ids, pad = some(2, 48), [9, 0]
    mask = torch.ones_like(ids)
    for b, n in enumerate(pad):
        mask[b, :n] = 0
        ids[b, :n] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    simple("leftpad_fp32", model, True, ids, [2, 3], ROWS_LEFTPAD, [], mask, positions, pad)

    base = 1_000_000
    simple("farpos_fp32", model, True, some(1, 48), [2, 3], ROWS_FAR, [2, 3], None, torch.arange(48)[None] + base)

    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        half = mod.GlmMoeDsaModel.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="eager").eval()
    for (n, a), (_, b) in zip(sorted(model.state_dict().items()), sorted(half.state_dict().items())):
        assert torch.equal(a, b.float()), n
    kept = sorted({str(p.dtype) for p in half.parameters()})
    meta["bf16_weights_proj_dtype"] = str(half.layers[0].self_attn.indexer.weights_proj.weight.dtype)
    print("bfloat16 model: parameter dtypes", kept, "weights_proj", meta["bf16_weights_proj_dtype"])
    simple("prefill64_bf16", half, False, ids64, [2, 3], ROWS64, [])

    # the files are valid for the official reader
    from safetensors.numpy import load_file
    from safetensors import safe_open

    for name in CASES + ["weights"]:
        path = os.path.join(HERE, name + ".safetensors")
        mine, dtypes, m = read_safetensors(path)
        with safe_open(path, "pt") as f:
            assert sorted(f.keys()) == sorted(mine) and f.metadata() == m
            for n in f.keys():
                assert np.array_equal(f.get_tensor(n).float().numpy(), mine[n].astype(np.float32)), n


if __name__ == "__main__":
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument("--check", action="store_true", help="only read the fixtures back and recompute them")
    if not a.parse_args().check:
        generate()
    check()
