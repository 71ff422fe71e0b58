#!/usr/bin/env python3
"""Trains the small DSA transformer of this folder on the CPU.

The task is pointer chasing.  A sequence holds 128 records (key, value) in random order, in which every
value is the key of another record; then 32 queries (key, number of hops, 1 to 4).  The answer to a query
is the key that is reached after so many hops.  A row attends to 16 selected tokens per layer, so the
indexers must find one certain record in 128 for each hop, and each hop needs another record: a selection
that is wrong, or that comes from a layer which looks for another hop, costs several nats.

    python3 -m venv venv && venv/bin/pip install -r requirements.txt
    venv/bin/python train.py --seed 1 --out seed1                            a model of this folder
    venv/bin/python train.py --seed 1 --out /tmp/try --steps-scale 0.005     tries the script, trains nothing

seed1 and seed3 were made so; seed2, the first, with --warm-up-steps 200 --warm-up-rate 3e-3, before
the longer warm-up was found to be better.  A seed takes about 15 minutes of one core of an AMD EPYC, and
twice that where the core is shared.  The same seed gives the same weights on one machine.

Three phases, as in DeepSeek-V3.2-Exp: the trunk with dense attention; the indexers alone, by the
divergence between the attention and the softmax of the index scores (dense warm-up); both with sparse
attention, the indexers by the divergence over the selected tokens and without a gradient to the trunk.
The first phase begins with few records, and has a loss after every third layer, which is to have made
one more hop: steps on the way to the task, not parts of it.

Writes into the folder of --out
    config.json          the fields of a glm_moe_dsa model, and "small_dsa", the sizes of the task
    model.safetensors    the weights, fp32, with the names of such a model
    check.safetensors    four sequences, and torch's loss of each of their queries for several schedules
                         (F = full, S = shared: the layer uses the selection of the nearest full layer below)
"""

import argparse
import ctypes
import json
import os
import time

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

KEYS, RECORDS, QUERIES, MAX_HOPS = 128, 128, 32, 4
HIDDEN, LAYERS, HEADS = 64, 12, 4
Q_LORA, KV_LORA, NOPE, ROPE, V_DIM = 32, 32, 16, 8, 16
INDEX_HEADS, INDEX_DIM, TOP_K = 4, 16, 16
INTERMEDIATE = 128
THETA, EPS, K_NORM_EPS = 10000.0, 1e-5, 1e-6

LAYERS_PER_HOP = LAYERS // MAX_HOPS
BATCH = 16
CHECK_SEQUENCES, CHECK_SEED = 4, 20260717
CHECK_PATTERNS = ["FFFFFFFFFFFF", "FSFSFSFSFSFS", "FFFSSSFSSSFS", "FSSFFSSSFSSF", "FFSSSSSFSFFF"]

# (records, queries, steps, learning rate) of the phase with dense attention: few records first, as they
# are found sooner
DENSE_STAGES = [(8, 56, 1200, 4e-3), (16, 48, 500, 4e-3), (32, 64, 500, 4e-3), (RECORDS, 64, 250, 2e-3)]
WARM_UP_STEPS, WARM_UP_RATE = 300, 1e-2  # defaults
SPARSE_STEPS, SPARSE_RATE = 350, 1e-3


def keep_freed_memory():
    """glibc returns large blocks to the system when they are freed, and each step would fault them in again."""
    m_trim_threshold, m_mmap_threshold = -1, -3
    try:
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(m_mmap_threshold, 32 << 20)  # the most that every version takes
        libc.mallopt(m_trim_threshold, (1 << 31) - 1)
    except (OSError, AttributeError):
        pass  # another C library: slower, nothing else


# The task


def make_batch(generator, sequences, records, queries):
    """Token ids key, value, hops [sequences, records + queries], and targets [hop][sequences, queries].

    targets[n] is the answer where a query makes n hops at most; the last one is the task's.
    """
    cycle = torch.rand(sequences, KEYS, generator=generator).argsort(1)[:, :records]
    place = torch.rand(sequences, records, generator=generator).argsort(1)
    start = torch.randint(records, (sequences, queries), generator=generator)
    hops = torch.randint(1, MAX_HOPS + 1, (sequences, queries), generator=generator)

    def key_at(index):
        return cycle.gather(1, index % records)

    key = torch.cat((key_at(place), key_at(start)), 1)
    value = torch.cat((key_at(place + 1), torch.full_like(start, KEYS)), 1)
    all_hops = torch.cat((torch.zeros_like(place), hops), 1)
    targets = [key_at(start + hops.clamp(max=most)) for most in range(MAX_HOPS + 1)]
    return (key, value, all_hops), targets


# The model: modules are named so that the state dict has the names of a glm_moe_dsa checkpoint


def linear(inputs, outputs):
    return nn.Linear(inputs, outputs, bias=False)


def rotate(x, angles):
    """Rotates the pairs of lanes (2i, 2i + 1) of the last dimension."""
    cos, sin = angles
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2)


def rotation(tokens):
    frequency = THETA ** (-torch.arange(0, ROPE, 2, dtype=torch.float32) / ROPE)
    angle = torch.arange(tokens, dtype=torch.float32)[:, None] * frequency
    return angle.cos(), angle.sin()


def select(scores):
    """Mask [.., row, token] to add: 0 at the TOP_K best tokens of a row, of equal ones the earlier; else -inf.

    Tokens that a row does not see have the score -inf, and they are -inf in the mask.
    """
    best = scores.sort(dim=-1, descending=True, stable=True).indices[..., :TOP_K]
    mask = torch.full_like(scores, float("-inf")).scatter_(-1, best, 0.0)
    return mask.masked_fill_(scores == float("-inf"), float("-inf"))


def divergence(attention, scores):
    """KL(attention averaged over heads || softmax of the scores), the mean over rows."""
    target = attention.detach().mean(1)
    log_scores = scores.log_softmax(-1).clamp(min=-1e4)  # -inf * 0 where nothing may be selected
    return (target * (target.clamp(min=1e-9).log() - log_scores)).sum(-1).mean()


class RmsNorm(nn.Module):
    def __init__(self, lanes):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(lanes))

    def forward(self, x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * self.weight


class Indexer(nn.Module):
    def __init__(self):
        super().__init__()
        self.wq_b = linear(Q_LORA, INDEX_HEADS * INDEX_DIM)
        self.wk = linear(HIDDEN, INDEX_DIM)
        self.k_norm = nn.LayerNorm(INDEX_DIM, eps=K_NORM_EPS)
        self.weights_proj = linear(HIDDEN, INDEX_HEADS)

    def forward(self, x, q_resid, angles, causal):
        """Scores [sequences, row, token], -inf where a row does not see the token."""
        sequences, tokens, _ = x.shape
        q = self.wq_b(q_resid).view(sequences, tokens, INDEX_HEADS, INDEX_DIM).transpose(1, 2)
        q = torch.cat((rotate(q[..., :ROPE], angles), q[..., ROPE:]), -1)
        k = self.k_norm(self.wk(x))
        k = torch.cat((rotate(k[..., :ROPE], angles), k[..., ROPE:]), -1)
        weights = self.weights_proj(x).transpose(1, 2) * (INDEX_HEADS * INDEX_DIM) ** -0.5
        dots = torch.matmul(q, k.unsqueeze(1).transpose(-1, -2)).relu()
        return (dots * weights.unsqueeze(-1)).sum(1) + causal


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_a_proj = linear(HIDDEN, Q_LORA)
        self.q_a_layernorm = RmsNorm(Q_LORA)
        self.q_b_proj = linear(Q_LORA, HEADS * (NOPE + ROPE))
        self.kv_a_proj_with_mqa = linear(HIDDEN, KV_LORA + ROPE)
        self.kv_a_layernorm = RmsNorm(KV_LORA)
        self.kv_b_proj = linear(KV_LORA, HEADS * (NOPE + V_DIM))
        self.o_proj = linear(HEADS * V_DIM, HIDDEN)
        self.indexer = Indexer()

    def forward(self, x, mode, selection):
        """Output, the selection that was used, and the loss of the indexer (None where it is not wanted).

        selection: mask of the source layer for a shared layer, None for a full one.
        """
        sequences, tokens, _ = x.shape
        q_resid = self.q_a_layernorm(self.q_a_proj(x))
        q = self.q_b_proj(q_resid).view(sequences, tokens, HEADS, NOPE + ROPE).transpose(1, 2)
        q = torch.cat((q[..., :NOPE], rotate(q[..., NOPE:], mode.angles)), -1)
        kv_a = self.kv_a_proj_with_mqa(x)
        kv = self.kv_b_proj(self.kv_a_layernorm(kv_a[..., :KV_LORA]))
        kv = kv.view(sequences, tokens, HEADS, NOPE + V_DIM).transpose(1, 2)
        k_rope = rotate(kv_a[..., KV_LORA:], mode.angles).unsqueeze(1).expand(-1, HEADS, -1, -1)
        k = torch.cat((kv[..., :NOPE], k_rope), -1)

        scores = None
        if mode.indexers and selection is None:
            scores = self.indexer(x.detach(), q_resid.detach(), mode.angles, mode.causal)
        mask = mode.causal
        if mode.sparse:
            selection = select(scores.detach()) if selection is None else selection
            mask = selection.unsqueeze(1)
        logits = torch.matmul(q * (NOPE + ROPE) ** -0.5, k.transpose(-1, -2)) + mask
        attention = logits.softmax(-1)
        out = torch.matmul(attention, kv[..., NOPE:]).transpose(1, 2).flatten(2)

        index_loss = None
        if mode.index_loss:
            index_loss = divergence(attention, scores + selection if mode.sparse else scores)
        return self.o_proj(out), selection, index_loss


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_proj = linear(HIDDEN, INTERMEDIATE)
        self.up_proj = linear(HIDDEN, INTERMEDIATE)
        self.down_proj = linear(INTERMEDIATE, HIDDEN)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.input_layernorm = RmsNorm(HIDDEN)
        self.self_attn = Attention()
        self.post_attention_layernorm = RmsNorm(HIDDEN)
        self.mlp = Mlp()


class Trunk(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_key = nn.Embedding(KEYS, HIDDEN)
        self.embed_value = nn.Embedding(KEYS + 1, HIDDEN)  # the last one: no value
        self.embed_hops = nn.Embedding(MAX_HOPS + 1, HIDDEN)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm = RmsNorm(HIDDEN)


class Mode:
    """What a forward pass computes besides the trunk."""

    def __init__(self, tokens, indexers=False, sparse=False, index_loss=False):
        self.indexers, self.sparse, self.index_loss = indexers, sparse, index_loss
        self.angles = rotation(tokens)
        self.causal = torch.full((tokens, tokens), float("-inf")).triu(1)


class SmallDsa(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = Trunk()
        self.lm_head = linear(HIDDEN, KEYS)
        self.initialise()

    def initialise(self):
        """Random, except that a query of an attention head begins as the key of the same input.

        Rows then begin with a preference for tokens that resemble them, which is what the task needs;
        from independent matrices it takes several times as many steps to find.
        """
        for name, p in self.named_parameters():
            if p.dim() == 2:
                nn.init.normal_(p, std=0.2 if "embed" in name else p.shape[1] ** -0.5)
        with torch.no_grad():
            for layer in self.model.layers:
                attention = layer.self_attn
                attention.o_proj.weight *= 0.5
                layer.mlp.down_proj.weight *= 0.5
                attention.q_a_proj.weight.copy_(attention.kv_a_proj_with_mqa.weight[:KV_LORA])
                q_b = attention.q_b_proj.weight.view(HEADS, NOPE + ROPE, Q_LORA)
                kv_b = attention.kv_b_proj.weight.view(HEADS, NOPE + V_DIM, KV_LORA)
                q_b[:, :NOPE] = kv_b[:, :NOPE]

    def forward(self, ids, mode, pattern="F" * LAYERS):
        """Hidden states after each LAYERS_PER_HOP layers, and the losses of the indexers."""
        key, value, hops = ids
        m = self.model
        x = m.embed_key(key) + m.embed_value(value) + m.embed_hops(hops)
        states, index_losses, selection = [], [], None
        for number, layer in enumerate(m.layers):
            if pattern[number] == "F":
                selection = None
            change, selection, index_loss = layer.self_attn(layer.input_layernorm(x), mode, selection)
            x = x + change
            x = x + layer.mlp(layer.post_attention_layernorm(x))
            if index_loss is not None:
                index_losses.append(index_loss)
            if (number + 1) % LAYERS_PER_HOP == 0:
                states.append(x)
        return states, index_losses

    def loss(self, state, target, reduction="mean"):
        """Cross-entropy in nats over the query rows, which are the last ones."""
        logits = self.lm_head(self.model.norm(state[:, -target.shape[1] :]))
        return F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction=reduction)


# Training


class Training:
    def __init__(self, seed):
        torch.manual_seed(seed)
        self.net = SmallDsa()
        self.generator = torch.Generator().manual_seed(seed)
        self.indexers = [p for n, p in self.net.named_parameters() if ".indexer." in n]
        self.trunk = [p for n, p in self.net.named_parameters() if ".indexer." not in n]
        self.began = time.time()

    def steps(self, phase, count, rate, parameters, records, queries, loss_of, **mode):
        """`count` steps of AdamW; loss_of(states, index losses, targets) is what they make small."""
        optimizer = torch.optim.AdamW(parameters, lr=rate, betas=(0.9, 0.98), weight_decay=0.01)
        mode = Mode(records + queries, **mode)
        for step in range(1, count + 1):
            warm = min(1.0, step / 20)
            optimizer.param_groups[0]["lr"] = rate * min(warm, max(0.05, 2.0 * (1 - step / count)))
            ids, targets = make_batch(self.generator, BATCH, records, queries)
            states, index_losses = self.net(ids, mode)
            losses = [self.net.loss(s, t) for s, t in zip(states, targets[1:])]
            optimizer.zero_grad(set_to_none=True)
            loss_of(losses, index_losses).backward()
            nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            if step % 20 == 0 or step == count:
                self.report(phase, records, step, count, losses, index_losses)

    def report(self, phase, records, step, count, losses, index_losses):
        text = f"{time.time() - self.began:5.0f} s  {phase:8} {records:3} records  step {step:4}/{count}  loss"
        text += "".join(f" {x.item():.3f}" for x in losses)
        if index_losses:
            text += "  divergence" + "".join(f" {x.item():.2f}" for x in index_losses)
        print(text, flush=True)

    def run(self, scale, warm_up_steps, warm_up_rate):
        def scaled(steps):
            return max(1, round(steps * scale))

        for records, queries, count, rate in DENSE_STAGES:
            self.steps("dense", scaled(count), rate, self.trunk, records, queries, lambda task, index: sum(task))
        for p in self.trunk:
            p.requires_grad_(False)
        self.steps("warm-up", scaled(warm_up_steps), warm_up_rate, self.indexers, RECORDS, QUERIES,
                   lambda task, index: sum(index), indexers=True, index_loss=True)
        for p in self.trunk:
            p.requires_grad_(True)
        self.steps("sparse", scaled(SPARSE_STEPS), SPARSE_RATE, self.trunk + self.indexers, RECORDS, QUERIES,
                   lambda task, index: task[-1] + sum(index), indexers=True, index_loss=True, sparse=True)


# Files


def config():
    return {
        "architectures": ["GlmMoeDsaForCausalLM"],
        "model_type": "glm_moe_dsa",
        "dtype": "float32",
        "num_hidden_layers": LAYERS,
        "hidden_size": HIDDEN,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "q_lora_rank": Q_LORA,
        "kv_lora_rank": KV_LORA,
        "qk_nope_head_dim": NOPE,
        "qk_rope_head_dim": ROPE,
        "qk_head_dim": NOPE + ROPE,
        "v_head_dim": V_DIM,
        "index_n_heads": INDEX_HEADS,
        "index_head_dim": INDEX_DIM,
        "index_topk": TOP_K,
        "indexer_types": ["full"] * LAYERS,
        "intermediate_size": INTERMEDIATE,
        "first_k_dense_replace": LAYERS,
        "hidden_act": "silu",
        "rms_norm_eps": EPS,
        "rope_interleave": True,
        "indexer_rope_interleave": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": THETA},
        "max_position_embeddings": RECORDS + QUERIES,
        "num_nextn_predict_layers": 0,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "vocab_size": KEYS,
        "small_dsa": {"keys": KEYS, "records": RECORDS, "queries": QUERIES, "max_hops": MAX_HOPS},
    }


@torch.no_grad()
def check_tensors(net):
    generator = torch.Generator().manual_seed(CHECK_SEED)
    ids, targets = make_batch(generator, CHECK_SEQUENCES, RECORDS, QUERIES)
    tensors = {name: x.to(torch.int32) for name, x in zip(("key", "value", "hops"), ids)}
    no_target = torch.full((CHECK_SEQUENCES, RECORDS), -1)
    tensors["target"] = torch.cat((no_target, targets[-1]), 1).to(torch.int32)
    mode = Mode(RECORDS + QUERIES, indexers=True, sparse=True)
    for pattern in CHECK_PATTERNS:
        states, _ = net(ids, mode, pattern)
        tensors["loss." + pattern] = net.loss(states[-1], targets[-1], "none").view(CHECK_SEQUENCES, QUERIES)
    return tensors


def write_config(folder):
    with open(os.path.join(folder, "config.json"), "w", encoding="utf-8") as file:
        json.dump(config(), file, indent=2)
        file.write("\n")


def write(net, folder):
    weights = {name: x.detach().contiguous() for name, x in net.state_dict().items()}
    save_file(weights, os.path.join(folder, "model.safetensors"))
    write_check(net, folder)


def write_check(net, folder):
    check = check_tensors(net)
    save_file(check, os.path.join(folder, "check.safetensors"))
    for pattern in CHECK_PATTERNS:
        print(f"{pattern}  loss {check['loss.' + pattern].mean().item():.4f}")


def main():
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0], epilog="What it makes and how: the head of this file."
    )
    parser.add_argument("--seed", type=int, help="of the initial weights and the training data")
    parser.add_argument("--out", required=True, metavar="DIR", help="folder for the files, made if need be")
    parser.add_argument("--steps-scale", type=float, default=1.0, metavar="X",
                        help="factor on the steps of all phases (default 1; 0.005 only tries the script)")
    parser.add_argument("--warm-up-steps", type=int, default=WARM_UP_STEPS, metavar="N",
                        help=f"steps of the indexers alone (default {WARM_UP_STEPS})")
    parser.add_argument("--warm-up-rate", type=float, default=WARM_UP_RATE, metavar="X",
                        help=f"their learning rate (default {WARM_UP_RATE})")
    parser.add_argument("--check-only", action="store_true",
                        help="train nothing: write check.safetensors of the weights in DIR")
    arguments = parser.parse_args()
    keep_freed_memory()
    torch.set_num_threads(1)
    if arguments.check_only:
        net = SmallDsa()
        try:
            net.load_state_dict(load_file(os.path.join(arguments.out, "model.safetensors")))
        except (OSError, RuntimeError, SafetensorError) as error:
            parser.error(f"--check-only: {error}")
        return write_check(net, arguments.out)
    if arguments.seed is None:
        parser.error("--seed: expected the seed of a model to train")
    if not 0 < arguments.steps_scale <= 100:
        parser.error("--steps-scale: expected a number above 0, at most 100")
    if arguments.warm_up_steps < 1 or not 0 < arguments.warm_up_rate < 1:
        parser.error("--warm-up-steps, --warm-up-rate: expected a step or more, and a rate between 0 and 1")
    try:  # before the work, not after it
        os.makedirs(arguments.out, exist_ok=True)
        write_config(arguments.out)
    except OSError as error:
        parser.error(f"--out: {error}")
    training = Training(arguments.seed)
    training.run(arguments.steps_scale, arguments.warm_up_steps, arguments.warm_up_rate)
    write(training.net, arguments.out)


if __name__ == "__main__":
    main()
