"""How long what pilots said stays true: exact success rates of the same prompts at several versions of the weights.

With p_t and p_{t+s} of every prompt nothing has to be sampled: of k pilots at version t the number c of right ones is
Bin(k, p_t), and what m commits at version t + s come to is Bin(m, p_{t+s}). All figures are sums over prompts and c.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import binom

from findings_runs import Variant, run_of
from foresight import with_answers
from rollalloc.models.likelihood import exact_answers
from rollalloc.models.policy import Policy
from rollalloc.rewards.function import load_reward
from rollalloc.rewards.scorers import InlineScorer
from rollalloc.train.train import Trainer

LAGS = (0, 1, 2, 4, 8)  # updates of the weights between pilots and commits
SHOWN = 768  # prompts
RESAMPLES = 1_000


def rates(variant: Variant, moments: tuple[int, ...], tasks: Path, to: Path, seed: int) -> NDArray[np.float64]:
    """Train, and give p_TSN: the rates of N prompts at each moment (in versions) and each lag after it; kept in a file."""
    if to.exists():
        return np.load(to)
    run = run_of(variant, "", seed, tasks, rollouts=10**6)
    policy = Policy.load(run.model, device="cpu")
    train, answers = with_answers(run, policy, *run.prompts)
    shown = np.random.default_rng(seed).choice(len(answers), min(SHOWN, len(answers)), replace=False).tolist()
    tokens, right = [train.tokens[at] for at in shown], [answers[at] for at in shown]
    seen: dict[int, NDArray[np.float64]] = {}

    def look(version: int) -> None:
        if version in {moment + lag for moment in moments for lag in LAGS}:
            seen[version], _ = exact_answers(policy.model, tokens, right, pad_id=policy.pad_id)

    def listen(line: dict[str, Any]) -> None:
        if line["kind"] == "batch":
            look(line["batch"])

    look(0)
    run = replace(run, max_batches=moments[-1] + LAGS[-1])
    scorer = InlineScorer(load_reward(run.reward))
    Trainer(policy, run.make_recipe(), train, scorer, run, listener=listen).run()
    p_TSN = np.array([[seen[moment + lag] for lag in LAGS] for moment in moments])
    to.parent.mkdir(parents=True, exist_ok=True)
    with to.with_suffix(".part").open("wb") as file:
        np.save(file, p_TSN)
    to.with_suffix(".part").replace(to)
    return p_TSN


@dataclass(frozen=True)
class Decay:
    """What pilots of one age still say; each an array (3,): the figure and its 95% interval.

    Attributes:
        correlation: of the pilots' and the commits' success rate, over all prompts.
        accepted: the same over the prompts that the pilots let pass.
        variance: mean p (1 - p) of those, over what it was when their pilots ran.
        mixed: the chance that their commits alone are neither all right nor all wrong.
        solved: of prompts whose pilots were all right, the mean success rate.
        moved: mean |p_{t+s} - p_t| over all prompts.
    """

    correlation: NDArray[np.float64]
    accepted: NDArray[np.float64]
    variance: NDArray[np.float64]
    mixed: NDArray[np.float64]
    solved: NDArray[np.float64]
    moved: NDArray[np.float64]


def decay(p_TSN: NDArray[np.float64], lag: int, pilots: int, commits: int, window: tuple[float, float]) -> Decay:
    """What `pilots` pilots say of `commits` commits `lag` (an index of `LAGS`) later; intervals over prompts and moments.

    Args:
        p_TSN: of `rates`; runs may stand one after the other along the moments.
        window: means of the pilots that pass, both ends included.
    """
    then_TN, now_TN = p_TSN[:, 0], p_TSN[:, lag]
    count_C = np.arange(pilots + 1)
    x_C = count_C / pilots
    chance_TNC = binom.pmf(count_C, pilots, then_TN[..., None])
    passes_TNC = chance_TNC * ((x_C >= window[0]) & (x_C <= window[1]))
    spread_TN = now_TN * (1 - now_TN)

    def moments(weight_TNC: NDArray[np.float64]) -> list[NDArray[np.float64]]:
        w, wx = weight_TNC.sum(-1), weight_TNC @ x_C
        square = now_TN**2 + spread_TN / commits
        return [w, wx, weight_TNC @ x_C**2, w * now_TN, w * square, wx * now_TN]

    passed_TN = passes_TNC.sum(-1)
    both = 1 - now_TN**commits - (1 - now_TN) ** commits
    sums_JTN = np.stack(
        [
            *moments(chance_TNC),
            *moments(passes_TNC),
            passed_TN * spread_TN,
            passed_TN * then_TN * (1 - then_TN),
            passed_TN * both,
            chance_TNC[..., -1],
            chance_TNC[..., -1] * now_TN,
            np.abs(now_TN - then_TN),
        ]
    )
    drawn = [_figures(sums_JTN.mean(axis=(1, 2)))]
    rng = np.random.default_rng(0)
    times, prompts = then_TN.shape
    for _ in range(RESAMPLES):
        of_time_JN = sums_JTN[:, rng.integers(times, size=times)].mean(axis=1)
        drawn.append(_figures(of_time_JN @ rng.multinomial(prompts, np.full(prompts, 1 / prompts)) / prompts))
    low_high = np.quantile(drawn[1:], [0.025, 0.975], axis=0)
    return Decay(*np.vstack([drawn[0], low_high]).T)


def _figures(sums_J: NDArray[np.float64]) -> list[float]:
    every, passed, rest = sums_J[:6], sums_J[6:12], sums_J[12:]
    share = passed[0]
    return [
        _correlation(every),
        _correlation(passed),
        rest[0] / rest[1],
        rest[2] / share,
        rest[4] / rest[3],
        rest[5],
    ]


def _correlation(sums: NDArray[np.float64]) -> float:
    w, x, xx, y, yy, xy = sums
    return float((xy * w - x * y) / np.sqrt((xx * w - x * x) * (yy * w - y * y)))
