"""C-GRPO: generate more rollouts of a prompt, stage by stage, until its first success is within a conformal bound.

For runs in which hard prompts need many rollouts and easy prompts need few. Source: Fayyazi,
https://openreview.net/forum?id=TrdqzzvFCs, and the package trl-cgrpo 0.2.0.

How this differs from the package: only the score "first_success" is supported. The bound is calibrated on the last 200
training visits, so no rollouts of held-out prompts are needed. Those visits had other prompts and older weights. They are
not exchangeable with the next visit, so the coverage of conformal prediction is not guaranteed. See PAPERS.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil, inf

import numpy as np
from numpy.typing import NDArray

from rollalloc.core.group import GroupView
from rollalloc.core.packing import naturals
from rollalloc.core.prompts import PromptTable
from rollalloc.core.recipe import Recipe, Stage, at_least
from rollalloc.core.rule import (
    Act,
    JudgeRule,
    JudgeTraits,
    Memory,
    PromptTraits,
    Verdict,
    View,
)
from rollalloc.recipes.grpo import grpo
from rollalloc.recipes.racing import increments
from rollalloc.recipes.shapes import Sizes, groups_of, sized
from rollalloc.rules import advantages, judges, promote, sizes
from rollalloc.rules.judges import SUCCESS_ABOVE, TINY
from rollalloc.rules.prompts import Shuffled


def shape(rows: int = 64, group_rows: int = 4) -> Sizes:
    """Sizes that double up to a whole group, from 2 on, as in the package (2, 4, 8, 16, 32).

    Args:
        rows: rows of a batch, at least 1.
        group_rows: rollouts of a prompt after the last stage, at least 2.
    """
    sizes = [group_rows >> halvings for halvings in range(group_rows.bit_length())]
    if len(sizes) > 2:
        sizes.pop()  # 1
    return {"groups": groups_of(rows, group_rows), "sizes_S": tuple(reversed(sizes))}


@sized(shape)
def cgrpo(
    groups: int = 16,
    sizes_S: tuple[int, ...] = (2, 4),
    delta: float | None = None,
    visits: int = 200,
    deviation: advantages.Deviation | None = None,
) -> Recipe:
    """C-GRPO: stop a prompt when its first success is within a conformal bound. trl-cgrpo 0.2.0.

        a prompt stops at k rollouts if  j / k ≤ q̂_k,  j: place of its first success
        q̂_k: the ⌈(n + 1)(1 - delta)⌉-th smallest j / k of the last n visits; j / k counts as 1 if there is no success

    1. Generate `sizes_S[0]` rollouts of each prompt.
    2. Stop if the prompt's first success is early enough by the inequality. Otherwise go on to the next size.
    3. Train on all rollouts of the prompt as GRPO does, even if there is no success after the last size.

    Args:
        groups: prompts in a batch, at least 1.
        sizes_S: total rollouts of a prompt after each stage, increasing; at least two stages.
        delta: share of prompts that may have their first success later than the bound, in (0, 1). None: the share of
            visits without a success, plus 0.05.
        visits: n, the maximum number of visits that calibrate the bound; at least 1.
        deviation: the kind of standard deviation, see `grpo`.
    """
    more = increments(sizes_S)
    if len(more) < 2:
        raise ValueError(
            f"sizes_S must have at least two numbers of rollouts, so that a prompt can stop after the first, got {sizes_S}"
        )
    last = len(more) - 1
    stages = tuple(
        Stage(
            f"to {sizes_S[at]}",
            sizes.Fixed(size),
            Resolved(delta) if at < last else judges.Complete(),
            None,
            promote.Oldest(),
        )
        for at, size in enumerate(more)
    )
    return replace(grpo(groups, sizes_S[-1], deviation), stages=stages, prompts=FirstSuccesses(visits))


def first_success(metrics_G: NDArray[np.float64]) -> int:
    """The place of the first success, counted from 1; 0 without a success."""
    won = np.flatnonzero(metrics_G > SUCCESS_ABOVE)
    return int(won[0]) + 1 if won.size else 0


def conformal_place(places: Sequence[int], delta: float | None) -> float:
    """The place by which at least a share 1 - `delta` of the visits had their first success.

    Split conformal prediction: the min(n, ⌈(n + 1)(1 - delta)⌉)-th smallest place of n visits. The place of a visit
    without a success is infinite. C-GRPO has a threshold on place / k for each number k of rollouts; a single threshold
    on the place gives the same decisions.

    Args:
        places: place of the first success in each visit, counted from 1; 0 without a success.
        delta: in (0, 1). None: the share of visits without a success, plus 0.05, clipped to [0.05, 0.95].

    Returns:
        A place, counted from 1; infinity if there are no visits.
    """
    count = len(places)
    if not count:
        return inf
    if delta is None:
        delta = min(max(places.count(0) / count + 0.05, 0.05), 0.95)
    at = min(max(ceil((count + 1) * (1 - delta) - TINY), 1), count)
    return sorted(place or inf for place in places)[at - 1]


@dataclass(frozen=True, slots=True)
class Resolved(JudgeRule):
    """Train on a complete group whose first success is as early as expected; otherwise continue with the next stage.

        j ≤ q,  j: place of the group's first success,  q: `conformal_place` of the last visits

    This is the stopping rule of C-GRPO with the score "first_success"; see PAPERS.md. The visits come from the prompt rule
    `FirstSuccesses`. With another prompt rule, any success is enough.

    Attributes:
        delta: share of prompts that may have their first success later than q, in (0, 1). None: the share of visits
            without a success, plus 0.05.

    Raises:
        ValueError: delta is outside (0, 1).
    """

    delta: float | None = None

    def __post_init__(self) -> None:
        if self.delta is not None and not 0 < self.delta < 1:
            raise ValueError(f"delta must be in (0, 1), or None, got {self.delta!r}")

    traits = JudgeTraits(reads=("metrics_G",), reads_rate=True, waits_for_all=True)

    def __call__(self, group: GroupView, view: View) -> Verdict | None:
        if group.unfinished:
            return None
        place, expected = first_success(group.metrics_G), conformal_place(view.memory.get("places", []), self.delta)
        return Verdict(Act.TRAIN if 0 < place <= expected else Act.NEXT)

    def promises(self, verdict: Verdict | None, group: GroupView, view: View) -> dict[str, bool]:
        """Check the decision with C-GRPO's scores j / k. Visits without a success in k rollouts have the score 1."""
        places, k = view.memory.get("places", []), max(1, group.scored)
        scores = sorted([place / k if 0 < place <= k else 1.0 for place in places])
        delta = self.delta
        if delta is None and places:
            delta = min(max(sum(place == 0 for place in places) / len(places) + 0.05, 0.05), 0.95)
        at = min(len(scores), max(1, ceil((len(scores) + 1) * (1 - (delta or 0.0)) - TINY)))
        threshold = scores[at - 1] if scores else 1.0
        won = [g + 1 for g, metric in enumerate(group.metrics_G.tolist()) if metric > SUCCESS_ABOVE]
        return {
            "the judge decides exactly when all rollouts have ended": (verdict is None) == (group.unfinished > 0),
            "exactly the groups whose score is within the threshold are trained on; the others go on": (
                verdict is None or (verdict.act is Act.TRAIN) == bool(won and won[0] / k <= threshold)
            ),
        }


@dataclass(frozen=True, slots=True)
class FirstSuccesses(Shuffled):
    """Draw every prompt once an epoch, in random order. Remember the last visits, each by the place of its first success.

    The judge `Resolved` uses these places.

    Attributes:
        visits: number of visits to remember, at least 1.

    Raises:
        ValueError: the number of visits is below 1.
    """

    visits: int = 200

    def __post_init__(self) -> None:
        at_least("visits", self.visits, 1)

    traits = PromptTraits(reads_rate=True, reads=("metrics_G",), gives_baseline=False)

    def init(self, table: PromptTable) -> Memory:
        return Shuffled.init(self, table) | {"places": []}

    def observe(self, memory: Memory, group: GroupView, view: View) -> None:
        if group.scored:
            memory["places"] = [*memory["places"], first_success(group.metrics_G)][-self.visits :]

    def remap(self, memory: Memory, source_N: NDArray[np.int64], table: PromptTable) -> Memory:
        """Return the memory for another data set: its prompts in a new order, and the remembered visits."""
        return self.init(table) | {"places": memory["places"]}

    def check(self, memory: Memory, table: PromptTable) -> None:
        """Raise an error if this rule cannot have written the saved memory."""
        naturals(memory["places"], "places")

    def promises(
        self, picked: Sequence[int], before: Memory, k: int, free_N: NDArray[np.bool_], view: View
    ) -> dict[str, bool]:
        return Shuffled.promises(self, picked, before, k, free_N, view) | {
            "at most `visits` visits are kept": len(before["places"]) <= self.visits
        }
