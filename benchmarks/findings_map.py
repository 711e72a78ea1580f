"""The map of regimes: what a rollout is worth under each method, by simulation with the real allocator, rates held fixed.

A row of advantage A on a prompt of success rate p adds A ∇log π to the update. In units of the optimizer's steps (each
parameter over the root of its mean squared gradient) let

    D(p) = E[∇log π | right] - E[∇log π | wrong],   G = ∇ mean success rate of the pool,   d(p) = ⟨D(p), G⟩
    signal = Σ A (r - p) d(p)     noise = Σ A² V(r, p),   V(r, p) = E[‖∇log π‖² | r]

E[∇log π | right] = (1 - p) D and E[∇log π | wrong] = -p D, since the mean of ∇log π is 0. A step of the best length gains
signal² / noise where the noise outweighs the signal, and the gains of independent batches add. So

    worth = (Σ signal)² / (Σ noise · rollouts paid)

says how far a rollout gets, whatever the scale of advantages, the learning rate and the size of batches. The ratio of two
methods' worths is how many times fewer rollouts the one needs. d and V are measured on the initial model (`measure`), not
assumed: with both constant, worth is the mean p (1 - p) of GRPO's rows, and the wrong rows of hopeless prompts would weigh
as little as the right ones of solved prompts do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from findings_runs import HOPELESS_BELOW, SOLVED_FROM, TUNING_SEED, rated_prompts
from numpy.typing import NDArray

from rollalloc.bench.presets import task_run
from rollalloc.core.allocator import Allocator
from rollalloc.core.events import Done, Event, Updated
from rollalloc.engines.likelihood import completion_logprobs
from rollalloc.engines.policy import Policy
from rollalloc.engines.sampler import Request, generate
from rollalloc.named import make_recipe

EDGES = (0.001, 0.01, 0.05, 0.15, 0.35, 0.65, 0.85, 0.93, 0.98, 0.995)  # of success rates
EACH = 60  # prompts of each bin
ATTEMPTS = 64  # rollouts to find a wrong one
SIZES = (4, 8, 16, 32, 64)  # rollouts a group
SHARES = (0, 20, 40, 60, 80)  # hopeless prompts, and solved ones, in %
PROMPTS = 16_384  # so many that none comes back


@dataclass(frozen=True)
class Worths:
    """What rows are worth, by bin of the success rate: B bins.

    Attributes:
        overlap_BB: ⟨D of the row's bin, mean ∇p of the pool's bin⟩. right_B, wrong_B: V.
    """

    overlap_BB: NDArray[np.float64]
    right_B: NDArray[np.float64]
    wrong_B: NDArray[np.float64]


def measure(tasks: Path, each: int = EACH, seed: int = 0) -> Worths:
    """The gradients of right and wrong answers to prompts of each bin, under the initial model."""
    run = task_run("skills/late", "", "grpo", seed, tasks)
    policy = Policy.load(run.source.model, device="cpu")
    prompts, answers, rate_N = rated_prompts(tasks, policy)
    rng, bin_N = np.random.default_rng(seed), np.digitize(rate_N, EDGES)
    chosen = [rng.permutation(np.flatnonzero(bin_N == at))[:each] for at in range(len(EDGES) + 1)]
    every = np.concatenate(chosen).tolist()
    gradient = partial(_gradient, policy)
    right_KP = torch.stack([gradient(prompts[at], answers[at]) for at in every])
    wrong = _wrong(policy, [prompts[at] for at in every], [answers[at] for at in every], run.settings.sampling)
    found_K = np.array([one is not None for one in wrong])
    wrong_KP = torch.stack(
        [gradient(prompts[at], one) for at, one in zip(every, wrong, strict=True) if one is not None]
    )
    unit_P = 1 / (torch.cat([right_KP, wrong_KP]).square().mean(dim=0).sqrt().sqrt() + 1e-6)
    right_KP, wrong_KP = right_KP * unit_P, wrong_KP * unit_P
    of_K = bin_N[every]
    rate_K = torch.tensor(rate_N[every], dtype=torch.float32)
    half_K = np.arange(len(every)) % 2 == 0  # of each bin one half makes D, the other G: no row meets itself
    bins = range(len(EDGES) + 1)

    def mean(rows_KP: torch.Tensor, of_bin: NDArray[np.bool_]) -> torch.Tensor:
        return rows_KP[torch.tensor(of_bin)].mean(dim=0)

    d_BP = torch.stack(
        [mean(right_KP, (of_K == b) & half_K) - mean(wrong_KP, (of_K == b)[found_K] & half_K[found_K]) for b in bins]
    )
    g_BP = torch.stack([mean(right_KP * rate_K[:, None], (of_K == b) & ~half_K) for b in bins])
    square = [(rows.square().sum(dim=1).double().numpy()) for rows in (right_KP, wrong_KP)]
    return Worths(
        (d_BP @ g_BP.T).double().numpy(),
        np.array([square[0][of_K == b].mean() for b in bins]),
        np.array([square[1][of_K[found_K] == b].mean() for b in bins]),
    )


def _gradient(policy: Policy, prompt: Sequence[int], completion: Sequence[int]) -> torch.Tensor:
    logprobs_BT, _ = completion_logprobs(policy.model, [prompt], [completion], pad_id=policy.pad_id)
    parameters = [each for each in policy.model.parameters() if each.requires_grad]
    return torch.cat([each.flatten() for each in torch.autograd.grad(logprobs_BT.sum(), parameters)])


def _wrong(policy: Policy, prompts: Sequence[Any], answers: Sequence[Any], sampling: Any) -> list[Any]:
    """A wrong rollout of each prompt; None where there was none."""
    asked = [Request(k, one, tuple(range(k * ATTEMPTS, (k + 1) * ATTEMPTS))) for k, one in enumerate(prompts)]
    made = generate(policy.model, asked, sampling, eos_ids=policy.eos_ids, pad_id=policy.pad_id, seed=1)
    wrong: list[Any] = [None] * len(prompts)
    for one in made:
        k = one.rollout // ATTEMPTS
        if tuple(one.tokens) != tuple(answers[k]):
            wrong[k] = one.tokens
    return wrong


# ----------------------------------------------------------------------------------------------------------- simulation


@dataclass(frozen=True)
class Earned:
    """What a simulated run came to: rollouts paid, rows trained, rows with an advantage, and `worth`."""

    paid: int
    rows: int
    teaching: int
    worth: float


def simulated(
    recipe: str, parameters: Any, rate_N: NDArray[np.float64], worths: Worths, seed: int, rollouts: int
) -> Earned:
    """A run of the real allocator on prompts whose success rates stay as they are, until so many rollouts are paid."""
    allocator = Allocator(make_recipe(recipe, parameters), len(rate_N), seed)
    rng = np.random.default_rng([seed, 1])
    bin_N = np.digitize(rate_N, EDGES)
    share_B = np.bincount(bin_N, minlength=len(EDGES) + 1) / len(rate_N)
    d_B = worths.overlap_BB @ share_B
    won: dict[int, bool] = {}
    rows = teaching = 0
    signal = noise = 0.0
    while allocator.paid < rollouts:
        actions = allocator.ask()
        events: list[Event] = []
        for order in actions.generate:
            for rollout, draw in zip(order.rollouts, rng.random(len(order.rollouts)).tolist(), strict=True):
                won[rollout] = draw < rate_N[order.prompt]
                events.append(Done(rollout, float(won[rollout]), float(won[rollout]), 1, allocator.version))
        if actions.batch is not None:
            for row in actions.batch.rows:
                credit, b, right = row.advantage * row.weight, bin_N[row.prompt], won[row.rollout]
                signal += credit * (right - rate_N[row.prompt]) * d_B[b]
                noise += credit * credit * (worths.right_B if right else worths.wrong_B)[b]
                rows, teaching = rows + 1, teaching + (credit != 0)
            events.append(Updated(allocator.version + 1))
        allocator.tell(events)
    return Earned(allocator.paid, rows, teaching, signal * abs(signal) / (noise * allocator.paid) if noise else 0.0)


def pool_rates(rate_N: NDArray[np.float64], hopeless: int, solved: int, seed: int = 0) -> NDArray[np.float64]:
    """Success rates of a pool with these shares in %, drawn from known ones."""
    rng, band_N = np.random.default_rng(seed), np.digitize(rate_N, (HOPELESS_BELOW, SOLVED_FROM))
    counts = np.diff(np.rint(np.cumsum([0, hopeless, 100 - hopeless - solved, solved]) * PROMPTS / 100)).astype(int)
    return np.concatenate([rng.choice(rate_N[band_N == band], count) for band, count in enumerate(counts)])
