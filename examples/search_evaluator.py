#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""An evaluator for indexshare-search to start from; the loss is made up.

    indexshare-search --layers 12 --shared 9 --log search.jsonl --progress \
        --evaluator "python3 examples/search_evaluator.py"

Replace `loss_of` by your model: the mean loss per token over calibration data that stay the same for
every pattern. Answers go to standard output, everything else to standard error.
"""
import sys


def sources(pattern):
    """For each layer the one whose selection it reads: itself if F, else the nearest F below."""
    source = []
    for layer, role in enumerate(pattern):
        source.append(layer if role == "F" else source[-1])
    return source


def need(layer):
    """How much a layer loses per layer of distance to its source; some need their own selection."""
    return 1 + 7 * layer % 5


def loss_of(pattern, first_changed, accepted):
    """The loss of a pattern such as "FFSSFS".

    Layers below `first_changed` compute what they compute under `accepted`: an evaluator that kept
    their outputs under that pattern begins at `first_changed`. This one always computes all.
    """
    del first_changed, accepted
    distance = [layer - source for layer, source in enumerate(sources(pattern))]
    return 2.0 + sum(need(layer) * far for layer, far in enumerate(distance)) / 1000


def answer(line, state):
    """Handles one line from indexshare-search."""
    kind, *words = line.split()
    if kind == "hello":  # hello indexshare-search 1 LAYERS
        if words[:2] != ["indexshare-search", "1"]:
            sys.exit(f"search_evaluator.py: unknown protocol: {line.strip()}")
    elif kind == "accepted":  # accepted PATTERN
        state["accepted"] = words[0]
    elif kind == "evaluate":  # evaluate ID PATTERN FIRST_CHANGED
        number, pattern, first_changed = words
        try:
            loss = loss_of(pattern, int(first_changed), state["accepted"])
            print(f"loss {number} {loss!r}", flush=True)
        except Exception as reason:  # one line, so that the search can say why it ended
            print(f"error {number} {type(reason).__name__}: {reason}".replace("\n", " "), flush=True)


def main():
    state = {"accepted": None}
    for line in sys.stdin:
        if line.split() == ["bye"]:
            break
        answer(line, state)


if __name__ == "__main__":
    main()
