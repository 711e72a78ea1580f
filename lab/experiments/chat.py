"""What a pretrained model can do before training: how often it is right on each chat task, and how well that is predicted.

`rates` samples the tasks of `rollalloc data chat` and writes what it found; `predict` reads that, computes features of the
same prompts once from the same model, and says how well a logistic regression on them predicts prompts not seen.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from rollalloc.data.prompts import EncodedPrompts, encode_prompts, load_prompts
from rollalloc.generate.sampler import Request, generate
from rollalloc.models.featurizer import features_of
from rollalloc.models.policy import Policy
from rollalloc.models.settings import Sampling
from rollalloc.predict.quality import auc, calibration_error, log_losses
from rollalloc.predict.ridge import design, fit, measure, sigmoid
from rollalloc.tasks.chat import CHAT_TASKS, compute_score


def encoded(policy: Policy, file: Path, prompts: int) -> EncodedPrompts:
    found = load_prompts(file)
    return encode_prompts(
        found.without(range(prompts, len(found)), "not wanted"), policy.tokenizer, context=policy.context
    )


def rates(policy: Policy, data: Path, tasks: list[str], prompts: int, samples: int, out: Path, seed: int) -> None:
    """Success rates at temperature 1, with the standard error over prompts, and the share of groups that are mixed."""
    print(
        f"| task | right | 95% interval | groups of {samples} mixed | prompt tokens | answer tokens | cut off | rollouts/s |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for task in tasks:
        few = encoded(policy, data / task / "train.parquet", prompts)
        requests = [
            Request(n, tokens, tuple(range(n * samples, (n + 1) * samples))) for n, tokens in enumerate(few.tokens)
        ]
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
        rate = f"{p:.3f} | {p - half:.3f}–{p + half:.3f} | {mixed:.0%}"
        print(f"| {task} | {rate} | {asked:.0f} | {answered:.1f} | {cut:.0%} | {len(made) / seconds:.1f} |", flush=True)
        with out.open("a") as lines:
            for n, right_E in enumerate(right_NE):
                line = {"task": task, "key": of.keys[n], "right": right_E.tolist(), "said": texts[n * samples]}
                lines.write(json.dumps(line) + "\n")


def predict(policy: Policy, data: Path, found: Path, seed: int) -> None:
    """How well features of unseen prompts tell which succeed: five folds, 95% intervals by a bootstrap over prompts."""
    lines = [json.loads(line) for line in found.read_text().splitlines()]
    tasks = list(dict.fromkeys(line["task"] for line in lines))
    tokens: list[tuple[int, ...]] = []
    for task in tasks:
        mine = [line["key"] for line in lines if line["task"] == task]
        few = encoded(policy, data / task / "train.parquet", len(mine))
        assert list(few.prompt_set.keys) == mine, "these prompts are not the ones that were sampled"
        tokens += few.tokens
    made = features_of(policy.model, tokens, pad_id=policy.pad_id, seed=seed)
    print(f"features of {len(tokens)} prompts in {made.cost.seconds:.0f} s")
    count_N = np.array([len(line["right"]) for line in lines], float)
    hits_N = np.array([sum(line["right"]) for line in lines])
    task_N = np.array([tasks.index(line["task"]) for line in lines])
    said = {
        "the task alone": unseen(np.eye(len(tasks), dtype=np.float32)[task_N] * 4, hits_N, count_N, seed),
        "hidden": unseen(made.blocks["hidden"], hits_N, count_N, seed),
        "hidden, tokens, length": unseen(np.concatenate(list(made.blocks.values()), axis=1), hits_N, count_N, seed),
    }
    constant = log_loss(np.full(len(lines), hits_N.sum() / count_N.sum()), hits_N, count_N)
    print(f"right: {hits_N.sum() / count_N.sum():.3f}; log-loss of that rate {constant:.4f}")
    print("| features | AUC | within a task | log-loss | calibration error | mixed in the best tenth | in all |")
    print("|---|---|---|---|---|---|---|")
    mixed_N = (hits_N > 0) & (hits_N < count_N)
    for name, said_N in said.items():
        best = np.argsort(-said_N)[: len(lines) // 10]
        figures = [
            over_prompts(lambda at: auc(said_N[at], hits_N[at], count_N[at]), len(lines), seed),  # noqa: B023
            over_prompts(lambda at: within(said_N[at], hits_N[at], count_N[at], task_N[at]), len(lines), seed),  # noqa: B023
            f"{log_loss(said_N, hits_N, count_N):.4f}",
            f"{calibration_error(said_N, hits_N, count_N):.3f}",
            f"{mixed_N[best].mean():.0%}",
            f"{mixed_N.mean():.0%}",
        ]
        print(f"| {name} | {' | '.join(figures)} |")


def unseen(
    rows_ND: NDArray[np.float32], hits_N: NDArray[np.float64], count_N: NDArray[np.float64], seed: int
) -> NDArray[np.float64]:
    """The success rate of each prompt by a regression on the other four fifths."""
    fold_N = np.random.default_rng(seed).permutation(len(rows_ND)) % 5
    said_N = np.empty(len(rows_ND))
    for fold in range(5):
        kept_N = fold_N != fold
        scale = measure(rows_ND[kept_N])
        phi_KF = design(rows_ND[kept_N], *scale).astype(np.float64)
        ones_K = np.ones(len(phi_KF))
        nothing_F = np.zeros(phi_KF.shape[1])
        (theta_F,), *_ = fit(phi_KF, hits_N[kept_N], count_N[kept_N], ones_K, 0 * ones_K, [1.0], nothing_F[None])
        said_N[~kept_N] = sigmoid(design(rows_ND[~kept_N], *scale) @ theta_F)
    return said_N


def log_loss(said_N: NDArray[np.float64], hits_N: NDArray[np.float64], count_N: NDArray[np.float64]) -> float:
    return float(log_losses(said_N[:, None], hits_N, count_N)[0] / count_N.sum())


def within(
    said_N: NDArray[np.float64], hits_N: NDArray[np.float64], count_N: NDArray[np.float64], task_N: NDArray[np.int64]
) -> float | None:
    """The AUC in each task, weighted by its pairs of a success and a failure."""
    found = []
    for task in np.unique(task_N):
        at = task_N == task
        one = auc(said_N[at], hits_N[at], count_N[at])
        if one is not None:
            found.append((one, hits_N[at].sum() * (count_N[at] - hits_N[at]).sum()))
    return float(np.average([auc for auc, _ in found], weights=[pairs for _, pairs in found])) if found else None


def over_prompts(figure: Callable[[NDArray[np.int64]], float | None], prompts: int, seed: int) -> str:
    """A figure, and its 95% interval by drawing prompts again."""
    rng = np.random.default_rng(seed)
    drawn = [figure(rng.integers(prompts, size=prompts)) for _ in range(1000)]
    low, high = np.quantile([one for one in drawn if one is not None], (0.025, 0.975))
    return f"{figure(np.arange(prompts)):.3f} [{low:.3f}–{high:.3f}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["rates", "predict"])
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", type=Path, required=True, help="folder that `rollalloc data chat` made")
    parser.add_argument(
        "--out", type=Path, required=True, help="JSON lines, a prompt each; appended by rates, read by predict"
    )
    parser.add_argument("--tasks", nargs="+", default=list(CHAT_TASKS))
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    torch.set_num_threads(1)
    policy = Policy.load(given.model)
    if given.what == "predict":
        predict(policy, given.data, given.out, given.seed)
    else:
        rates(policy, given.data, given.tasks, given.prompts, given.samples, given.out, given.seed)


if __name__ == "__main__":
    main()
