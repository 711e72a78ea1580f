"""Pilot-Commit under load, beside its published loop: which groups get commits, how old they are, what a batch costs.

An order that is right on lists made by hand can be another one over a run: a priority for groups that are about to expire
makes a queue of the oldest where more groups pass in each round than a batch holds. So whole runs are compared here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from statistics import fmean

import numpy as np
import pytest

from rollalloc import Allocator, recipes
from rollalloc.core.events import Done, Updated

PILOTS, COMMITS, MOST_STALE = 16, 1, 4  # how many commits decides nothing here, and few of them are quick
LOWEST, HIGHEST = 0.125, 0.75
PROMPTS = 30_000  # more than are piloted, so that none comes back
BATCHES = {8: 50, 128: 9}  # by the groups in a batch


@dataclass
class Chosen:
    """What a run trained on: for each batch its prompts, the ages of their pilots, and all rollouts paid until then."""

    prompts: list[list[int]] = field(default_factory=list)
    ages: list[list[int]] = field(default_factory=list)
    paid: list[int] = field(default_factory=list)

    def mean_age(self) -> float:
        return fmean(age for batch in self.ages for age in batch)

    def share_at_the_limit(self) -> float:
        return fmean(age == MOST_STALE for batch in self.ages for age in batch)

    def variance(self, mean_N: dict[int, float]) -> float:
        """Mean variance of the pilots of the trained groups."""
        return fmean(variance_of(mean_N[prompt]) for batch in self.prompts for prompt in batch)


def variance_of(mean: float) -> float:
    return mean * (1 - mean)


def trained(promote: str, share: float, groups: int, seed: int) -> tuple[Chosen, list[list[int]], dict[int, float]]:
    """Our run, on prompts whose success rates do not move; and for the reference its pilots by rounds, with their means.

    A share of the prompts has a rate in [.25, .6], whose pilots are nearly all within the window. The others are hopeless or
    solved.
    """
    draw = np.random.default_rng([seed, groups])
    rate_N = np.where(draw.random(PROMPTS) < share, draw.uniform(0.25, 0.6, PROMPTS), draw.choice([0.0, 1.0], PROMPTS))
    recipe = recipes.pilot_commit(
        groups, PILOTS, COMMITS, 3 * groups, p_solve=1.0, confidence=None, reprobe_every=None,
        pilots="every_round", promote=promote, max_staleness=MOST_STALE,
    )  # fmt: skip
    allocator, chosen, rounds, mean_N = (
        Allocator(recipe, PROMPTS, seed),
        Chosen(),
        list[list[int]](),
        dict[int, float](),
    )
    while len(chosen.paid) < BATCHES[groups]:
        actions = allocator.ask()
        if actions.batch is not None:
            ages = {row.prompt: allocator.version - row.version for row in reversed(actions.batch.rows)}
            first_version = {row.prompt: row.version for row in reversed(actions.batch.rows)}
            assert len(first_version) == groups
            chosen.prompts.append(sorted(ages))
            chosen.ages.append(sorted(ages.values()))
            chosen.paid.append(allocator.paid)
            allocator.tell([Updated(allocator.version + 1)])
        done = list[Done]()
        for order in actions.generate:
            right_G = draw.random(len(order.rollouts)) < rate_N[order.prompt]
            if order.stage == 0:
                mean_N[order.prompt] = float(right_G.mean())
            done += [
                Done(rollout, right, right, 1, allocator.version)
                for rollout, right in zip(order.rollouts, right_G.astype(float).tolist(), strict=True)
            ]
        allocator.tell(done)
        if piloted := [order.prompt for order in actions.generate if order.stage == 0]:
            rounds.append(piloted)
    return chosen, rounds, mean_N


Waiting = tuple[int, int, int]  # step of its pilots, its number in the order of the draws, its prompt


def published(
    rounds: Sequence[Sequence[int]], mean_N: dict[int, float], groups: int, order: str, seed: int = 0
) -> Chosen:
    """The released loop, written from its algorithm, on rounds of pilots that were drawn already.

    In each round, the batch takes what it still lacks from the buffer, in the given order, and these prompts get commits.
    Then the prompts whose pilots of this round are within the window enter the buffer. When the batch is full, the step
    advances, and prompts with pilots older than the limit leave the buffer. Nothing has priority because it is about to
    leave. (The released code's limit is one step later, and its `least_recent` takes the newest.)
    """
    shuffle = np.random.default_rng(seed)
    keys: dict[str, Callable[[Waiting], tuple[float, ...]]] = {
        "top_variance": lambda waiting: (-variance_of(mean_N[waiting[2]]), -waiting[1]),
        "oldest": lambda waiting: (waiting[1],),
        "most_recent": lambda waiting: (-waiting[1],),
        "random": lambda waiting: (shuffle.random(),),
    }
    chosen, buffer, batch, number, step, paid = Chosen(), list[Waiting](), list[Waiting](), count(), 0, 0
    for piloted in rounds:
        buffer.sort(key=keys[order])
        taken = buffer[: groups - len(batch)]
        batch, buffer = batch + taken, buffer[len(taken) :]
        paid += len(piloted) * PILOTS + len(taken) * COMMITS
        buffer += [(step, next(number), prompt) for prompt in piloted if LOWEST <= mean_N[prompt] <= HIGHEST]
        if len(batch) < groups:
            continue
        chosen.prompts.append(sorted(prompt for _, _, prompt in batch))
        chosen.ages.append(sorted(step - begun for begun, _, _ in batch))
        chosen.paid.append(paid)
        batch, step = list[Waiting](), step + 1
        buffer = [waiting for waiting in buffer if step - waiting[0] <= MOST_STALE]
    return chosen


SIZES = [(8, 0.2), (8, 0.45), (8, 0.6), (8, 0.8), (128, 0.2), (128, 0.45), (128, 0.8)]


@pytest.mark.parametrize(("groups", "share"), SIZES)
@pytest.mark.parametrize("order", ["top_variance", "oldest", "most_recent"])
def test_every_batch_is_the_published_loops(order, groups, share):
    """On the same pilots the same prompts get commits, batch by batch: so ages, variances and costs are the same too."""
    ours, rounds, mean_N = trained(order, share, groups, seed=1)
    theirs = published(rounds, mean_N, groups, order)
    assert len(ours.paid) == BATCHES[groups]
    assert (ours.prompts, ours.ages, ours.paid) == (theirs.prompts, theirs.ages, theirs.paid)


@pytest.mark.parametrize(("groups", "share"), SIZES)
def test_random_order_has_the_published_loops_distribution(groups, share):
    """Means over the groups of a run. In 100 repetitions, the differences were at most .31, .004 and .013."""
    ours, rounds, mean_N = trained("random", share, groups, seed=2)
    theirs = published(rounds, mean_N, groups, "random")
    assert ours.mean_age() == pytest.approx(theirs.mean_age(), abs=0.4)
    assert ours.variance(mean_N) == pytest.approx(theirs.variance(mean_N), abs=0.01)
    assert ours.paid[-1] == pytest.approx(theirs.paid[-1], rel=0.05)


@pytest.mark.parametrize(("groups", "share"), [(8, 0.45), (8, 0.6), (128, 0.45)])
def test_top_variance_trains_on_young_groups_and_expiring_first_is_a_queue_of_the_oldest(groups, share):
    """In the published regime, more than a third of the pilots pass in each round."""
    by_variance, _, mean_N = trained("top_variance", share, groups, seed=3)
    queue, _, mean_of_queue_N = trained("expiring_first", share, groups, seed=3)
    assert by_variance.mean_age() < 1.4
    assert by_variance.share_at_the_limit() < 0.05
    assert queue.mean_age() > by_variance.mean_age() + 0.7
    assert queue.share_at_the_limit() > 0.3
    assert by_variance.variance(mean_N) > queue.variance(mean_of_queue_N)
