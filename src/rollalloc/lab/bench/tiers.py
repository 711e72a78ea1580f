"""Tiers of the leaderboard: tasks, budgets, seeds and searches, fixed here before any run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from rollalloc.lab.bench.methods import LADDER_METHODS
from rollalloc.lab.bench.rungs import PREFIX, RUNGS
from rollalloc.lab.bench.search import Rung, rungs

TRACKS = ("defaults", "tuned")
FIRST_TUNING_SEED = 1000
_FIRST_SEED = 5000  # unused so far; 4000 to 4007 had been looked at before any full run
_FIRST_OF_DEFAULTS = 9900  # unused so far
_FIRST_OF_LADDER = 9700  # unused so far


@dataclass(frozen=True, kw_only=True, slots=True)
class Tier:
    """One size of the leaderboard.

    Attributes:
        tasks: name → rollouts that each final run pays; results at that point are compared at equal budget.
        recipes: to compare; None: all that have a grid.
        methods: used instead of `recipes` in the defaults track: label → recipe and parameters.
        tracks: to run.
        rates: learning rates of a search.
        search: search of the tuned track, the same for every recipe; its first rung's settings are a multiple of `rates`.
        seeds: seeds of the tuned track's final runs.
        default_seeds: seeds of the defaults track's final runs.
        seeds_of: task → number of seeds, if not all.
        eval_every: rollouts between two points of the evaluation grid; None: the task's.
        hours: number of hours that it should take on two idle cores.
    """

    tasks: Mapping[str, int]
    recipes: tuple[str, ...] | None
    rates: tuple[float, ...]
    search: tuple[Rung, ...]
    seeds: tuple[int, ...]
    default_seeds: tuple[int, ...]
    eval_every: int | None = None
    hours: float
    methods: Mapping[str, tuple[str, Mapping[str, Any]]] = field(default_factory=dict[str, Any])
    tracks: tuple[str, ...] = TRACKS
    seeds_of: Mapping[str, int] = field(default_factory=dict[str, int])


def _seeds(count: int, first: int = _FIRST_SEED) -> tuple[int, ...]:
    return tuple(range(first, first + count))


TIERS: Mapping[str, Tier] = MappingProxyType(
    {
        # Only checks that everything works; its figures mean nothing.
        "smoke": Tier(
            tasks={"sort": 128},
            recipes=("grpo", "reinforce"),
            rates=(3e-4,),
            search=rungs(2, FIRST_TUNING_SEED, (0.5, 1.0)),
            seeds=_seeds(2),
            default_seeds=_seeds(2, _FIRST_OF_DEFAULTS),
            eval_every=32,
            hours=0.1,
        ),
        "ci": Tier(
            tasks={"rg/gcd": 4000},
            recipes=("grpo", "reinforce", "pilot_commit"),
            rates=(3e-4, 6e-4),
            search=rungs(4, FIRST_TUNING_SEED, (0.25, 0.5)),
            seeds=_seeds(3),
            default_seeds=_seeds(3, _FIRST_OF_DEFAULTS),
            eval_every=250,
            hours=1 / 6,
        ),
        "full": Tier(
            tasks={
                "skills/late": 16_000,
                "skills/mixed": 12_000,
                "skills/balanced": 8_000,
                "skills/graded": 5_000,
                "walks/mixed": 10_000,
                "rg/number_filtering_misled": 9_000,
                "rg/simple_equations": 8_000,
                "rg/spell_backward": 8_000,
            },
            recipes=None,
            rates=(3e-4, 6e-4, 1e-3),
            search=rungs(9, FIRST_TUNING_SEED, (0.125, 0.25, 1.0)),
            seeds=_seeds(8),
            default_seeds=_seeds(8, _FIRST_OF_DEFAULTS),
            hours=15,
        ),
        # Do findings on tiny models hold for larger ones? One mixture of questions, several model sizes.
        "ladder": Tier(
            tasks={rung.task: rung.run.max_rollouts for rung in RUNGS.values()},
            recipes=None,
            rates=(3e-4,),
            search=rungs(1, FIRST_TUNING_SEED, (0.5,)),
            seeds=_seeds(8),
            default_seeds=_seeds(max(rung.run.seeds for rung in RUNGS.values()), _FIRST_OF_LADDER),
            hours=24,
            methods=LADDER_METHODS,
            tracks=("defaults",),
            seeds_of={rung.task: rung.run.seeds for rung in RUNGS.values()},
        ),
    }
)
# Rollouts a second of one process on a core of an Intel Xeon at 2.5 GHz (Cascade Lake), evaluations on the grid included,
# between those of plain estimators and of groups, of runs that shared the machine. What was not measured is slow; the
# ladder's rungs say their own.
RATES: Mapping[str, float] = MappingProxyType(
    {
        "skills/balanced": 480.0,
        "skills/graded": 300.0,
        "skills/late": 450.0,
        "skills/mixed": 400.0,
        "walks/mixed": 240.0,
        "rg/gcd": 400.0,
        "rg/number_filtering_misled": 350.0,
        **{rung.task: rate for rung in RUNGS.values() if (rate := rung.run.rollouts_per_second) is not None},
    }
)
_UNMEASURED = min(rate for task, rate in RATES.items() if not task.startswith(PREFIX))
_START_S = 2.0  # overhead of a run: loading model and prompts, the last checkpoint


def seconds_of(task: str, rollouts: int, runs: int = 1) -> float:
    """Estimated process seconds for `runs` runs on a task that pay `rollouts` together."""
    return runs * _START_S + rollouts / RATES.get(task, _UNMEASURED)
