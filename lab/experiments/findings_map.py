"""The map of regimes: what a rollout is worth under each method, from gradients that were measured.

A row of advantage A on a prompt of success rate p adds A ∇log π to the update. In units of the optimizer's steps (each
parameter over the root of its root mean squared gradient) let

    D(p) = E[∇log π | right] - E[∇log π | wrong]      G = ∇ of the pool's mean success rate      d(p) = ⟨D(p), G⟩
    signal = Σ A (r - p) d(p)                          noise = Σ A² V(r, p)                       V(r, p) = E[‖∇log π‖² | r]

for E[∇log π | right] = (1 - p) D and E[∇log π | wrong] = -p D, since the mean of ∇log π is 0. Where the noise outweighs the
signal, a step of the best length gains signal² / noise, and the gains of independent batches add. So

    worth = (E signal)² / (E noise · rollouts paid)

is how far a rollout gets, whatever the scale of the advantages, the learning rate and the size of a batch, and the ratio of
two worths is how many times fewer rollouts the one method needs. d and V are measured on the initial model, since constants
would mislead: right rows of solved prompts have hardly a gradient, and right rows of hopeless ones the largest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import binom

from findings_runs import HOPELESS_BELOW, SOLVED_FROM, rated_prompts
from rollalloc.core.allocator import Allocator
from rollalloc.core.events import Done, Event, Updated
from rollalloc.generate.sampler import Request, generate
from rollalloc.models.likelihood import completion_logprobs
from rollalloc.models.policy import Policy
from rollalloc.named import make_recipe
from rollalloc.tasks.presets import task_run

EDGES = (0.001, HOPELESS_BELOW, 0.05, 0.15, 0.35, 0.65, 0.85, SOLVED_FROM, 0.98)  # of the bins of success rates
EACH, ATTEMPTS = 60, 64  # prompts of a bin; rollouts of each in search of a wrong one
BINS = len(EDGES) + 1
Floats = NDArray[np.float64]
SIZES = (4, 8, 16, 32, 64)  # rollouts per group
RESAMPLES = 200
WINDOW = (0.125, 0.75)
LATE_SHARES = (0.3, 0.5)  # hopeless, solved: those of skills/late
POOLS = {
    "10 / 10": (0.1, 0.1),
    "30 / 50": LATE_SHARES,
    "40 / 40": (0.4, 0.4),
    "80 / 0": (0.8, 0.0),
    "0 / 80": (0.0, 0.8),
}

# -------------------------------------------------------------------------------------------------- what was measured


@dataclass(frozen=True)
class Gradients:
    """Inner products of ∇log π of K rows, the right answer and a wrong one of each prompt, in units of steps.

    Attributes:
        gram_KK: of the rows. bin_K, rate_K: of the row's prompt. right_K: which row it is. half_K: 0 or 1; of each bin the
            prompts of one half make D, those of the other G, so that no row meets itself.
    """

    gram_KK: Floats
    bin_K: NDArray[np.int64]
    rate_K: Floats
    right_K: NDArray[np.bool_]
    half_K: NDArray[np.int64]


@dataclass(frozen=True)
class Worths:
    """⟨D of the row's bin, mean ∇p of the pool's bin⟩, and V of right and of wrong rows."""

    overlap_BB: Floats
    right_B: Floats
    wrong_B: Floats


def measure(tasks: Path, to: Path, each: int = EACH) -> Gradients:
    """The gradients of right and of wrong answers to some prompts of each bin, under the initial model; kept in a file."""
    if not to.exists():
        run = task_run("skills/late", "grpo", 0, tasks)
        policy = Policy.load(run.model, device="cpu")
        prompts, answers, rate_N = rated_prompts(tasks, policy)
        rng, bin_N = np.random.default_rng(0), np.digitize(rate_N, EDGES)
        every = np.concatenate([rng.permutation(np.flatnonzero(bin_N == b))[:each] for b in range(BINS)]).tolist()
        wrong = _wrong(policy, [prompts[at] for at in every], [answers[at] for at in every], run.sampling)
        rows = [(k, answers[at]) for k, at in enumerate(every)] + [(k, one) for k, one in enumerate(wrong) if one]
        row_KP = torch.stack([_gradient(policy, prompts[every[k]], completion) for k, completion in rows])
        row_KP /= row_KP.square().mean(dim=0).sqrt().sqrt() + 1e-6
        of_K = np.array([k for k, _ in rows])
        at_K = np.array(every)[of_K]
        right_K = np.arange(len(rows)) < len(every)
        to.parent.mkdir(parents=True, exist_ok=True)
        gram_KK = (row_KP @ row_KP.T).double().numpy()
        with to.with_suffix(".part").open("wb") as file:
            np.savez(file, gram_KK=gram_KK, bin_K=bin_N[at_K], rate_K=rate_N[at_K], right_K=right_K, half_K=of_K % 2)
        to.with_suffix(".part").replace(to)
    return Gradients(**np.load(to))


def _gradient(policy: Policy, prompt: Sequence[int], completion: Sequence[int]) -> torch.Tensor:
    logprobs_BT, _ = completion_logprobs(policy.model, [prompt], [completion], pad_id=policy.pad_id)
    parameters = [each for each in policy.model.parameters() if each.requires_grad]
    return torch.cat([each.flatten() for each in torch.autograd.grad(logprobs_BT.sum(), parameters)])


def _wrong(policy: Policy, prompts: Sequence[Any], answers: Sequence[Any], sampling: Any) -> list[Sequence[int]]:
    """A wrong rollout of each prompt; empty where there was none."""
    asked = [Request(k, one, tuple(range(k * ATTEMPTS, (k + 1) * ATTEMPTS))) for k, one in enumerate(prompts)]
    found: list[Sequence[int]] = [()] * len(prompts)
    for made in generate(policy.model, asked, sampling, eos_ids=policy.eos_ids, pad_id=policy.pad_id, seed=1):
        k = made.rollout // ATTEMPTS
        if tuple(made.tokens) != tuple(answers[k]):
            found[k] = made.tokens
    return found


def worths(rows: Gradients, resample: int | None = None) -> Worths:
    """What the rows say of each bin; with a seed, of prompts drawn anew within each bin and half (for intervals)."""
    rng = np.random.default_rng(resample)
    cells = [(b, half, right) for b in range(BINS) for half in (0, 1) for right in (True, False)]
    weight: dict[Any, Floats] = {}
    for b, half, right in cells:
        of_cell_K = (rows.bin_K == b) & (rows.half_K == half) & (rows.right_K == right)
        count = int(of_cell_K.sum())
        drawn = np.ones(count) if resample is None else rng.multinomial(count, np.full(count, 1 / count))
        weight[b, half, right] = np.zeros(len(rows.bin_K))
        weight[b, half, right][of_cell_K] = drawn / count
    d_BK = np.stack([weight[b, 0, True] - weight[b, 0, False] for b in range(BINS)])
    g_BK = np.stack([weight[b, 1, True] * rows.rate_K for b in range(BINS)])
    norm_K = np.diag(rows.gram_KK)
    square = {
        right: np.array([(weight[b, 0, right] + weight[b, 1, right]) @ norm_K / 2 for b in range(BINS)])
        for right in (True, False)
    }
    return Worths(d_BK @ rows.gram_KK @ g_BK.T, square[True], square[False])


# ------------------------------------------------------------------------------------------------- what follows from it


@dataclass(frozen=True)
class Method:
    """What a candidate prompt costs and adds, by bin: sums over its rows of A (r - p), and of A² of right and wrong rows."""

    cost_B: Floats
    signal_B: Floats
    right_B: Floats
    wrong_B: Floats


def pool_of(rate_N: Floats, hopeless: float, solved: float) -> Floats:
    """Share of prompts in each bin where these shares of them are hopeless and solved, the rest as in `rate_N`."""
    band_N, bin_N = np.digitize(rate_N, (HOPELESS_BELOW, SOLVED_FROM)), np.digitize(rate_N, EDGES)
    shares = (hopeless, 1 - hopeless - solved, solved)
    of_band = [np.bincount(bin_N[band_N == b], minlength=BINS) / (band_N == b).sum() for b in range(len(shares))]
    return np.array(shares) @ of_band


def plain_rates(tasks: Path) -> Floats:
    """The initial model's success rate of every prompt that pools are made of."""
    return rated_prompts(tasks, Policy.load(task_run("skills/late", "grpo", 0, tasks).model, device="cpu"))[2]


def sampled_pool(rate_N: Floats, hopeless: float, solved: float, prompts: int = 16_384) -> Floats:
    """Rates of a pool with these shares, of so many prompts that none comes back in a run."""
    share_B, bin_N = pool_of(rate_N, hopeless, solved), np.digitize(rate_N, EDGES)
    of_bin_N = share_B[bin_N] / np.bincount(bin_N, minlength=BINS)[bin_N]
    return np.random.default_rng(0).choice(rate_N, prompts, p=of_bin_N / of_bin_N.sum())


def some_of(rate_N: Floats, each: int = 150) -> Floats:
    """Rates of so many prompts of each bin at most, whose means stand for the bin's."""
    bin_N = np.digitize(rate_N, EDGES)
    return np.concatenate([np.random.default_rng(b).permutation(rate_N[bin_N == b])[:each] for b in range(BINS)])


def worth(method: Method, pool_B: Floats, measured: Worths, visited_B: Floats | None = None) -> float:
    """Of a rollout, on a pool; or on the part of it that is visited, for the whole pool's sake."""
    of_B = pool_B if visited_B is None else visited_B
    signal = of_B @ (method.signal_B * (measured.overlap_BB @ pool_B))
    noise = of_B @ (method.right_B * measured.right_B + method.wrong_B * measured.wrong_B)
    return float(signal * abs(signal) / (noise * (of_B @ method.cost_B)))


def piloted(rate_N: Floats, pilots: int, n: int, window: tuple[float, float] = (0.125, 0.75)) -> Method:
    """Pilot-Commit where every prompt that passes is trained on: groups of n, of which the first are pilots.

    With 0 pilots it is GRPO; and DAPO where its surplus is carried, for groups without variance add nothing.
    """
    mean_C = np.arange(pilots + 1) / max(1, pilots)
    passes_C = (mean_C >= window[0] - 1e-9) & (mean_C <= window[1] + 1e-9) if pilots else np.array([True])
    pilot_NC = binom.pmf(np.arange(pilots + 1), pilots, rate_N[:, None]) * passes_C
    commit_NM = binom.pmf(np.arange(n - pilots + 1), n - pilots, rate_N[:, None])
    total_NT = np.stack([np.convolve(one, other) for one, other in zip(pilot_NC, commit_NM, strict=True)])
    mean_T = np.arange(n + 1) / n
    mixed_T = (mean_T > 0) & (mean_T < 1)
    passed_N = pilot_NC.sum(axis=1)
    return _method(
        rate_N,
        pilots + passed_N * (n - pilots),
        total_NT @ (n * np.sqrt(mean_T * (1 - mean_T))),
        total_NT @ (n * (1 - mean_T) * mixed_T),
        total_NT @ (n * mean_T * mixed_T),
    )


def plain(rate_N: Floats, pool_B: Floats, neg: float, baseline: bool = True) -> Method:
    """One rollout per prompt against the pool's mean reward, failures times `neg`; without a baseline and with 0 RAFT."""
    b = float(pool_B @ by_bin(rate_N, rate_N)) if baseline else 0.0
    spread_N, one_N = rate_N * (1 - rate_N), np.ones_like(rate_N)
    return _method(rate_N, one_N, spread_N * (1 - b + neg * b), rate_N * (1 - b) ** 2, (1 - rate_N) * (neg * b) ** 2)


def discarded(groups: int, generated: int, mixed: float) -> float:
    """Share of its mixed groups that DAPO keeps, which generates so many prompts per round until `groups` are mixed.

    groups / mixed over generated · E[rounds],   E[rounds] = Σ_r P(Bin(generated · r, mixed) < groups)
    """
    rounds = binom.cdf(groups - 1, generated * np.arange(10_000 // groups), mixed).sum()
    return float(groups / mixed / (generated * rounds))


def _method(rate_N: Floats, *columns: Floats) -> Method:
    return Method(*(by_bin(rate_N, column) for column in columns))


def by_bin(rate_N: Floats, column_N: Floats) -> Floats:
    """Mean of a column over the prompts of each bin; 0 where there are none."""
    bin_N = np.digitize(rate_N, EDGES)
    return np.bincount(bin_N, column_N, minlength=BINS) / np.maximum(1, np.bincount(bin_N, minlength=BINS))


def quarter(n: int) -> int:
    """Pilots of a group of n, as in the paper: a quarter; but one pilot is never inside the window."""
    return max(2, n // 4)


class Map:
    """Worths on pools of any shares, with intervals from prompts drawn anew."""

    def __init__(self, rate_N: Floats, rows: Gradients) -> None:
        self.rate_N, self.some_N, self.rows = rate_N, some_of(rate_N), rows
        self.measured = worths(rows)
        self.drawn = [worths(rows, seed) for seed in range(RESAMPLES)]
        self._groups: dict[Any, Method] = {}

    def groups(self, pilots: int, n: int, window: tuple[float, float] = WINDOW) -> Method:
        """Pilot-Commit, or GRPO where there are no pilots."""
        key = (pilots, n, window)
        if key not in self._groups:
            self._groups[key] = piloted(self.some_N, pilots, n, window)
        return self._groups[key]

    def plain(self, pool_B: Floats, neg: float = 0.1, baseline: bool = True) -> Method:
        """REINFORCE with one rollout per prompt, or RAFT."""
        return plain(self.some_N, pool_B, neg, baseline)

    def keeps(self, pool_B: Floats, n: int, groups: int) -> float:
        """What discarding its surplus leaves DAPO of GRPO's worth, generating three batches at a time."""
        mixed_N = 1 - self.some_N**n - (1 - self.some_N) ** n
        mixed = float(pool_B @ by_bin(self.some_N, mixed_N))
        return discarded(groups, 3 * groups, mixed)

    def method(self, name: str, n: int, pool_B: Floats) -> Method:
        """One of those that are trained, by its name."""
        if name in ("REINFORCE", "RAFT"):
            return self.plain(pool_B) if name == "REINFORCE" else self.plain(pool_B, 0.0, False)
        return self.groups(quarter(n) if name == "Pilot-Commit" else 0, n)

    def kept(self, name: str, n: int, pool_B: Floats, groups: int = 16) -> float:
        """What is left of a method's worth where it throws groups away."""
        return self.keeps(pool_B, n, groups) if name == "DAPO" else 1.0

    def over_grpo(self, name: str, n: int, shares: tuple[float, float], groups: int) -> Floats:
        """A method's worth over that of GRPO with the same n, and its interval."""
        kept = self.kept(name, n, pool_of(self.rate_N, *shares), groups)
        return kept * self.ratio(shares, lambda pool_B: self.method(name, n, pool_B), lambda _: self.groups(0, n))

    def evicted(self, shares: tuple[float, float], k: int, n: int) -> tuple[float, ...]:
        """Of prompts with k right pilots of k: mean rate, share below 0.9 and below 0.5; share of visits; worth without.

        The last is Pilot-Commit's worth on a pool that was visited once and lost them, over that on the whole pool.
        """
        pool_B = pool_of(self.rate_N, *shares)
        each_N = self.some_N**k
        gone_B = pool_B * by_bin(self.some_N, each_N)
        below = [pool_B @ by_bin(self.some_N, each_N * (self.some_N < at)) / gone_B.sum() for at in (0.9, 0.5)]
        mean = pool_B @ by_bin(self.some_N, each_N * self.some_N) / gone_B.sum()
        commits = self.groups(k, n)
        left_B = (pool_B - gone_B) / (1 - gone_B.sum())
        gained = worth(commits, pool_B, self.measured, left_B) / worth(commits, pool_B, self.measured)
        return float(mean), *map(float, below), float(gone_B.sum()), gained

    def ratio(
        self, shares: tuple[float, float], of: Callable[[Floats], Method], to: Callable[[Floats], Method]
    ) -> Floats:
        """worth(of) / worth(to) and its 95% interval."""
        pool_B = pool_of(self.rate_N, *shares)
        one, two = of(pool_B), to(pool_B)

        def at(measured: Worths) -> float:
            return worth(one, pool_B, measured) / worth(two, pool_B, measured)

        drawn = [at(each) for each in self.drawn]
        return np.array([at(self.measured), *np.quantile(drawn, [0.025, 0.975])])


# ---------------------------------------------------------------------------------- the same with the real allocator


@dataclass(frozen=True)
class Simulated:
    """Rollouts paid for each row that was trained, for each row that had an advantage, and the worth of a rollout."""

    row: float
    teaching: float
    worth: float


def simulated(recipe: str, parameters: Any, pool_N: Floats, measured: Worths, seed: int, rollouts: int) -> Simulated:
    """A run of the real allocator on prompts whose success rates stay as they are, until so many rollouts are paid."""
    allocator, rng = Allocator(make_recipe(recipe, parameters), len(pool_N), seed), np.random.default_rng([seed, 1])
    bin_N = np.digitize(pool_N, EDGES)
    d_B = measured.overlap_BB @ (np.bincount(bin_N, minlength=BINS) / len(pool_N))
    won: dict[int, bool] = {}
    rows = teaching = 0
    signal = noise = 0.0
    while allocator.paid < rollouts:
        actions = allocator.ask()
        events: list[Event] = []
        for order in actions.generate:
            for rollout, draw in zip(order.rollouts, rng.random(len(order.rollouts)).tolist(), strict=True):
                won[rollout] = draw < pool_N[order.prompt]
                events.append(Done(rollout, float(won[rollout]), float(won[rollout]), 1, allocator.version))
        if actions.batch is not None:
            for row in actions.batch.rows:
                b, right, credit = bin_N[row.prompt], won[row.rollout], row.advantage * row.weight
                signal += credit * (right - pool_N[row.prompt]) * d_B[b]
                noise += credit**2 * (measured.right_B if right else measured.wrong_B)[b]
                rows, teaching = rows + 1, teaching + (credit != 0)
            events.append(Updated(allocator.version + 1))
        allocator.tell(events)
    gain = signal * abs(signal) / (noise * allocator.paid) if noise else 0.0
    return Simulated(allocator.paid / max(1, rows), allocator.paid / max(1, teaching), float(gain))
