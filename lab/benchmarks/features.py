"""Speed of features of prompts, against bare forward passes of the same prompts: `make bench`.

One process, one thread, a small model with random weights. Each repeat times both, one after the other, by the processor's
seconds; the figure is the median of the repeats' ratios.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
from transformers import Qwen2ForCausalLM

from bars import Bars, with_smallest
from rollalloc.models.featurizer import BATCH_TOKENS, features_of
from rollalloc.models.likelihood import padded
from small import small_model

VOCABULARY, PAD, BAR = 10_000, 0, 0.8


def bare(model: Qwen2ForCausalLM, tokens: list[list[int]]) -> None:
    """Forward passes of prompts of like length, for the last hidden states."""
    ordered = sorted(tokens, key=len)
    while ordered:
        rows = 1
        while rows < len(ordered) and (rows + 1) * len(ordered[rows]) <= BATCH_TOKENS:
            rows += 1
        ids_BT, mask_BT = padded(ordered[:rows], PAD, side="right")
        with torch.inference_mode():
            model.model(input_ids=ids_BT, attention_mask=mask_BT.long(), use_cache=False)
        del ordered[:rows]


def seconds(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def main() -> None:
    parser = with_smallest(
        argparse.ArgumentParser(description="tokens a second of features, as a ratio to bare forward passes")
    )
    parser.add_argument("--prompts", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()
    prompts, repeats = (20, 1) if given.smallest else (given.prompts, given.repeats)
    bars = Bars(judged=not given.smallest)
    torch.set_num_threads(1)
    model, rng = small_model(VOCABULARY, hidden=256, layers=8).eval(), np.random.default_rng(0)
    for low, high in ((4, 16), (32, 256)):
        tokens = [rng.integers(1, VOCABULARY, size).tolist() for size in rng.integers(low, high + 1, prompts)]
        bare(model, tokens[:100])  # it warms up
        taken = [
            (seconds(lambda t=tokens: bare(model, t)), seconds(lambda t=tokens: features_of(model, t, pad_id=PAD)))
            for _ in range(repeats)
        ]
        ratios, total = [base / ours for base, ours in taken], sum(map(len, tokens))
        ratio = statistics.median(ratios)
        print(
            f"prompts of {low} to {high} tokens: {total / statistics.median(ours for _, ours in taken):,.0f} tokens a "
            f"second, {ratio:.2f} of a bare pass ({min(ratios):.2f} to {max(ratios):.2f}), "
            f"{bars.at_least(f'features of prompts of {low} to {high} tokens', ratio, BAR)}"
        )
    bars.end()


if __name__ == "__main__":
    main()
