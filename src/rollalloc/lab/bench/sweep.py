"""Tuning with an equal budget for every recipe: the grids, and successive halving over them.

Every recipe has as many settings: learning rates × shapes of a batch, for the shape matters more than most allocators do,
so that GRPO's is tuned as the others'. All are tried on one seed with a small budget, the better half on another seed with a
larger one, and so on (Jamieson and Talwalkar, AISTATS 2016; the fresh seed at each rung is ours). So each gets the same
rollouts to search with:

    Σ over rungs of settings × seeds × budget.

A setting is better where it was censored on fewer seeds, then where it reached the target for fewer rollouts, then where it
came to a higher accuracy. What learns fast and ends low is liked too much by the first rungs, of every recipe alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from statistics import fmean
from typing import Any, NamedTuple

from rollalloc.lab.bench.presets import Tuned
from rollalloc.runs.cost import Curve, cost_to_target


def _shapes(names: str, rows: Sequence[tuple[Any, ...]], **changes: Any) -> list[dict[str, Any]]:
    return [dict(zip(names.split(), row, strict=True)) | changes for row in rows]


def _ahead(shapes: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Prompts for three batches are generated at a time."""
    return [shape | {"gen_groups": 3 * shape["groups"]} for shape in shapes]


_GROUPS = _shapes("groups n", ((8, 4), (16, 4), (8, 8), (16, 8), (32, 4), (8, 16)))
_DAPO = _ahead(_shapes("groups n", ((8, 4), (16, 4), (8, 8), (4, 8), (4, 16), (16, 8))))
_PILOTS = ((4, 4, 4), (8, 4, 4), (8, 2, 2), (16, 2, 2), (4, 4, 12), (16, 4, 4))
_MIXED = ((4, 4, 4, 4), (8, 4, 4, 4), (8, 2, 4, 4), (4, 4, 8, 8), (8, 4, 4, 6), (4, 4, 12, 8))
# Recipe -> the shapes tried, the small ones first; as many for each.
GRID: Mapping[str, list[dict[str, Any]]] = {
    "grpo": _GROUPS,
    "dr_grpo": _GROUPS,
    "dapo": _DAPO,
    "dapo_carry": _DAPO,
    "greso": _DAPO,
    "pilot_commit": _ahead(_shapes("groups n_pilot n_commit", _PILOTS)),
    "knapsack": _shapes("groups n most", ((16, 4, 16), (16, 4, 32), (8, 8, 32), (16, 8, 32), (32, 4, 16), (16, 4, 8))),
    "vcrl": _shapes(
        "groups n kappa", ((16, 4, 0.7), (8, 8, 0.7), (16, 4, 0.3), (16, 8, 0.7), (8, 16, 0.8), (8, 8, 0.3))
    ),
    "cgrpo": _shapes(
        "groups sizes_S",
        ((16, (2, 4, 8)), (16, (2, 4)), (8, (2, 4, 8, 16)), (8, (4, 8, 16)), (32, (2, 4)), (16, (4, 8))),
    ),
    "reinforce_ada": _shapes(
        "groups n round_n rounds",
        ((16, 4, 4, 4), (8, 4, 8, 4), (16, 4, 4, 2), (32, 4, 4, 4), (8, 8, 8, 4), (16, 2, 2, 4)),
    ),
    "pods": _shapes("groups n m", ((16, 6, 4), (8, 8, 4), (16, 8, 4), (16, 4, 2), (8, 16, 8), (8, 16, 4))),
    "darts": _shapes("groups shortest longest", ((8, 3, 1), (16, 2, 1), (16, 3, 1), (32, 3, 1), (8, 7, 1), (16, 7, 1))),
    "racing": _ahead(
        _shapes("groups sizes_S", ((8, (2, 4)), (16, (2, 4)), (8, (2, 8)), (4, (4, 8)), (8, (4, 8)), (16, (4, 8))))
    ),
    "reinforce": _shapes(
        "groups baseline neg replay",
        (
            (64, "running", 0.3, 64),
            (64, "running", 0.1, 0),
            (64, "running", 0.1, 64),
            (64, "running", 0.3, 0),
            (64, "batch", 0.1, 0),
            (32, "running", 0.1, 0),
        ),
    ),
    "rloo": _shapes("groups n", ((16, 4), (32, 2), (8, 8), (64, 2), (16, 8), (32, 4))),
    "raft": _shapes("groups n", ((32, 1), (64, 1), (128, 1), (16, 4), (32, 2), (16, 8))),
    "mopps": _shapes(
        "groups n decay", ((16, 4, 0.5), (16, 4, 1.0), (8, 8, 0.5), (16, 8, 0.5), (32, 4, 0.5), (32, 2, 0.5))
    ),
    "spo": _shapes("groups half_way", ((64, 0.06), (64, 0.02), (32, 0.06), (128, 0.06), (64, 0.006), (32, 0.02))),
    "foresight": _shapes(
        "groups exponent neg replay",
        (
            (32, 3.0, 0.1, 32),
            (64, 3.0, 0.3, 64),
            (64, 3.0, 0.1, 0),
            (64, None, 0.3, 64),
            (64, 3.0, 0.1, 64),
            (64, 3.0, 0.3, 0),
        ),
        once=False,
    ),
    "pilot_commit+pods": _ahead(_shapes("groups n_pilot n_commit m", _MIXED)),
}


@dataclass(frozen=True, slots=True)
class Rung:
    """One round of a search.

    Attributes:
        settings: that enter it.
        seeds: that each is tried on; no seed of a comparison.
        share: of a task's budget, in (0, 1], that a run may pay.
    """

    settings: int
    seeds: tuple[int, ...]
    share: float

    def budget(self, rollouts: int) -> int:
        """Rollouts of a run, where those of the task's final runs are given."""
        return round(self.share * rollouts)


class Trial(NamedTuple):
    """A run of a search that is over: its curve, and the accuracy of its last evaluation."""

    curve: Curve
    accuracy: float


@dataclass(frozen=True, slots=True, order=True)
class Score:
    """How good a setting is on a rung; less is better.

    Attributes:
        censored: seeds on which it did not reach the target.
        rollouts: to the target, mean over seeds; a censored run's budget. Infinite where a run diverged.
        error: 1 − the accuracy at the end, mean over seeds.
    """

    censored: int
    rollouts: float
    error: float


def rungs(settings: int, first_seed: int, shares: Sequence[float]) -> tuple[Rung, ...]:
    """A search that halves the settings at each rung, with a seed of its own for each.

    Args:
        settings: that it begins with.
        first_seed: of the first rung; the next ones follow it.
        shares: of a task's budget, one a rung.

    Raises:
        ValueError: fewer settings than rungs can halve.
    """
    if settings >> (len(shares) - 1) < 1:
        raise ValueError(f"{settings} settings cannot be halved {len(shares) - 1} times")
    return tuple(Rung(settings >> at, (first_seed + at,), share) for at, share in enumerate(shares))


def search_rollouts(search: Iterable[Rung], budget: int) -> int:
    """What a search may pay for each recipe, where the task's final runs may pay `budget` rollouts."""
    return sum(rung.settings * len(rung.seeds) * rung.budget(budget) for rung in search)


def settings_of(
    recipe: str, shapes: Sequence[Mapping[str, Any]], rates: Sequence[float], settings: int
) -> tuple[Tuned, ...]:
    """The settings that a recipe is searched over: the first shapes of its grid, each with every learning rate.

    Args:
        recipe: whose grid it is.
        shapes: its grid.
        rates: learning rates.
        settings: how many every recipe has, a multiple of the learning rates.

    Raises:
        ValueError: the grid is smaller, so that this recipe would be searched less than the others, or repeats itself.
    """
    wanted = settings // len(rates)
    if len(shapes) < wanted:
        raise ValueError(
            f"{recipe}: every method is searched over {wanted} shapes × {len(rates)} learning rates, but its GRID has only "
            f"{len(shapes)}; add {wanted - len(shapes)}"
        )
    if any(shape in shapes[:at] for at, shape in enumerate(shapes[:wanted])):
        raise ValueError(
            f"{recipe}: its GRID has the same parameters twice in the first {wanted}; each must be another"
        )
    return tuple(Tuned(dict(shape), rate) for rate in rates for shape in shapes[:wanted])


def score(trials: Sequence[Trial | None], target: float, budget: int) -> Score:
    """How good a setting is, by its runs on the seeds of a rung; None for a run that diverged."""
    known = [(trial, cost_to_target(trial.curve, target)) for trial in trials if trial is not None]
    if len(known) < len(trials) or any(cost is None for _, cost in known):
        return Score(len(trials), inf, inf)
    paid = [budget if cost is None or cost.censored else cost.paid["rollouts"] for _, cost in known]
    censored = sum(cost is None or cost.censored for _, cost in known)
    return Score(censored, fmean(paid), 1 - fmean(trial.accuracy for trial, _ in known))


def better(scores: Mapping[int, Score], keep: int) -> tuple[int, ...]:
    """The settings that go on, by number, the best first; of equals the one that stands earlier in the grid."""
    return tuple(sorted(scores, key=lambda number: (scores[number], number))[:keep])
