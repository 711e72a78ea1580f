"""What a pretrained model can do before training: how often it is right on each chat task, and how well that is predicted.

`rates` samples the tasks of `rollalloc data chat` and writes what it found; `predict` reads that, computes features of the same
prompts once from the same model, and says how well a logistic regression on them predicts prompts that it has not seen.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np
import torch

from rollalloc.bench.tasks.chat import CHAT_TASKS, compute_score
from rollalloc.data.prompts import EncodedPrompts, encode_prompts, load_prompts
from rollalloc.engines.policy import Policy
from rollalloc.engines.sampler import Request, generate
from rollalloc.engines.sampling import Sampling


def encoded(policy: Policy, file: Path, prompts: int) -> EncodedPrompts:
    found = load_prompts(file)
    return encode_prompts(
        found.without(range(prompts, len(found)), "not wanted"), policy.tokenizer, context=policy.context
    )


def rates(policy: Policy, data: Path, tasks: list[str], prompts: int, samples: int, out: Path, seed: int) -> None:
    """Success rates at temperature 1, with the standard error over prompts, and the share of groups that are mixed."""
    print(f"| task | right | 95% interval | groups of {samples} mixed | prompt tokens | answer tokens | cut off | rollouts/s |")
    print("|---|---|---|---|---|---|---|---|")
    for task in tasks:
        few = encoded(policy, data / task / "train.parquet", prompts)
        requests = [Request(n, tokens, tuple(range(n * samples, (n + 1) * samples))) for n, tokens in enumerate(few.tokens)]
        begun = time.perf_counter()
        sampling = Sampling(CHAT_TASKS[task].max_new_tokens)
        made = generate(policy.model, requests, sampling, eos_ids=policy.eos_ids, pad_id=policy.pad_id, seed=seed)
        seconds = time.perf_counter() - begun
        of = few.prompt_set
        texts = [policy.text(one.tokens) for one in made]
        right = [
            compute_score(of.sources[n], text, of.ground_truths[n], of.extra_infos[n])
            for n, text in zip((one.rollout // samples for one in made), texts, strict=True)
        ]
        right_NE = np.array(right).reshape(len(of), samples)
        p_N = right_NE.mean(axis=1)
        p, half = p_N.mean(), 1.96 * p_N.std(ddof=1) / len(p_N) ** 0.5
        mixed, asked = ((p_N > 0) & (p_N < 1)).mean(), np.mean([len(tokens) for tokens in few.tokens])
        answered, cut = np.mean([len(one.tokens) for one in made]), np.mean([one.truncated for one in made])
        print(f"| {task} | {p:.3f} | {p - half:.3f}–{p + half:.3f} | {mixed:.0%} | {asked:.0f} | {answered:.1f} | {cut:.0%} | "
              f"{len(made) / seconds:.1f} |", flush=True)  # fmt: skip
        with out.open("a") as lines:
            for n, right_E in enumerate(right_NE):
                line = {"task": task, "key": of.keys[n], "right": right_E.tolist(), "said": texts[n * samples]}
                lines.write(json.dumps(line) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["rates", "predict"])
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", type=Path, required=True, help="folder that `rollalloc data chat` made")
    parser.add_argument("--out", type=Path, required=True, help="JSON lines, a prompt each; appended by rates, read by predict")
    parser.add_argument("--tasks", nargs="+", default=list(CHAT_TASKS))
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    torch.set_num_threads(1)
    policy = Policy.load(given.model)
    rates(policy, given.data, given.tasks, given.prompts, given.samples, given.out, given.seed)


if __name__ == "__main__":
    main()
