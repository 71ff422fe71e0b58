#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes distillation.safetensors: losses and gradients of torch's autograd in float64.

The oracle writes the loss down as the paper does (a sum over served layers of KL(p || softmax(I)), through
torch.nn.functional.kl_div and log_softmax) and lets autograd find the gradient; nothing here knows the closed form.

    pip install torch==2.15.0 numpy==2.4.6 safetensors==0.8.0
    generate_distillation.py

Tensors of a case NAME: scores [rows, keys], attention [served layers, rows, keys] (each row sums to 1 over its
visible keys), lengths [rows]; losses, averages (KL from the mean attention) and gradient [rows, keys]. A selected case has
indices [rows, top_k] besides, -1 where an entry is empty; its losses and gradient are of the selected positions, and
`renormalised_mean` [rows, top_k] is the gradient of the wrong order: mean of the layers first, then normalised.
"""

import os

import numpy as np
import torch
from safetensors.numpy import save_file

HERE = os.path.dirname(os.path.abspath(__file__))
GENERATOR = torch.Generator().manual_seed(20260311)


def normal(*shape):
    return torch.randn(*shape, generator=GENERATOR, dtype=torch.float64)


def case(layers, lengths, keys, score_scale=1.0, top_k=None, hidden=(), zero_attention=0.0):
    """Scores, attention and, with top_k, a selection: the best top_k of each row without `hidden` entries."""
    rows = len(lengths)
    scores = score_scale * normal(rows, keys)
    attention = torch.zeros(layers, rows, keys, dtype=torch.float64)
    for row, length in enumerate(lengths):
        logits = 2 * normal(layers, length)
        if zero_attention:
            logits[torch.rand(layers, length, generator=GENERATOR) < zero_attention] = -torch.inf
            logits[:, 0] = 0  # some mass in each layer
        attention[:, row, :length] = torch.softmax(logits, -1) if length else 0
    result = {"scores": scores, "attention": attention, "lengths": torch.tensor(lengths, dtype=torch.int32)}
    if top_k is None:
        return result
    indices = torch.full((rows, top_k), -1, dtype=torch.int32)
    for row, length in enumerate(lengths):
        best = torch.sort(torch.topk(scores[row, :length], min(top_k, length)).indices).values
        best = best[: 0 if row in hidden else None]
        indices[row, : len(best)] = best.int()
    result["indices"] = indices
    return result


def kl(p, log_q):
    return torch.nn.functional.kl_div(log_q, p, reduction="sum")


def solve(tensors):
    scores, attention, lengths = tensors["scores"], tensors["attention"], tensors["lengths"]
    layers, rows, keys = attention.shape
    selected = "indices" in tensors
    width = tensors["indices"].shape[1] if selected else keys
    tensors |= {name: torch.zeros(rows, dtype=torch.float64) for name in ("losses", "averages")}
    tensors["gradient"] = torch.zeros(rows, width, dtype=torch.float64)
    if selected:
        tensors["renormalised_mean"] = torch.zeros(rows, width, dtype=torch.float64)
    for row in range(rows):
        where = tensors["indices"][row] if selected else torch.arange(int(lengths[row]))
        where = where[where >= 0].long()
        n = len(where)
        if n == 0:
            continue
        p = attention[:, row, where]
        p = p / p.sum(-1, keepdim=True)

        def gradient_of(loss_of):
            leaf = scores[row, where].clone().requires_grad_()
            loss = loss_of(torch.log_softmax(leaf, -1))
            loss.backward()
            return loss.detach(), leaf.grad

        tensors["losses"][row], tensors["gradient"][row, :n] = gradient_of(
            lambda log_q: sum(kl(p[j], log_q) for j in range(layers)) / layers)
        tensors["averages"][row], same = gradient_of(lambda log_q: kl(p.mean(0), log_q))
        assert torch.allclose(same, tensors["gradient"][row, :n], rtol=0, atol=1e-12)  # Proposition 1
        if selected:
            mean = attention[:, row, where].mean(0)
            tensors["renormalised_mean"][row, :n] = gradient_of(lambda log_q: kl(mean / mean.sum(), log_q))[1]
    return tensors


CASES = {
    "dense_1": case(1, [9, 9, 9], 9),
    "dense_2": case(2, [1, 7, 12, 3], 12),
    "dense_4": case(4, [5, 0, 16, 11, 2], 16),
    "dense_large_scores": case(4, [20, 13, 6], 20, score_scale=400.0),
    "dense_zero_attention": case(2, [10, 8], 10, zero_attention=0.4),
    "selected_1": case(1, [24, 19], 24, top_k=6),
    "selected_2": case(2, [30, 17, 22], 30, top_k=8),
    "selected_4_empty": case(4, [25, 3, 14, 0, 18], 25, top_k=7, hidden=(2,)),
    "selected_large_scores": case(4, [40, 33], 40, score_scale=400.0, top_k=10),
}

tensors = {}
for name, inputs in CASES.items():
    for tensor, values in solve(inputs).items():
        tensors[f"{name}.{tensor}"] = np.ascontiguousarray(values.numpy())
save_file(tensors, os.path.join(HERE, "distillation.safetensors"), {"torch": torch.__version__})
print(len(CASES), "cases,", len(tensors), "tensors")
