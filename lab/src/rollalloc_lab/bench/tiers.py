"""Tiers of the leaderboard: tasks, methods, budgets and seeds, fixed here before any run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from rollalloc.named import RECIPES
from rollalloc.recipes import grpo, reinforce
from rollalloc_lab.tasks.rungs import PREFIX

_FIRST_SEED = 9900  # seeds from here on were not used before
_FIRST_OF_LADDER = 9700  # the same for the ladder
_GROUPS, _ALONE = grpo.shape(), reinforce.shape()


@dataclass(frozen=True, kw_only=True, slots=True)
class Tier:
    """One size of the leaderboard.

    Attributes:
        tasks: budget of a run on each task, in rollouts. The results at the end of the budget are compared too.
        recipes: the recipes to compare.
        methods: recipe and parameters of each method, by label. If there are any, `recipes` is not used.
        seeds: seeds of the runs.
        seeds_of: number of seeds of a task, if it does not use all seeds.
        eval_every: rollouts between two points of the evaluation grid; None: the task's.
    """

    tasks: Mapping[str, int]
    recipes: tuple[str, ...] = ()
    methods: Mapping[str, tuple[str, Mapping[str, Any]]] = field(default_factory=dict[str, Any])
    seeds: tuple[int, ...]
    seeds_of: Mapping[str, int] = field(default_factory=dict[str, int])
    eval_every: int | None = None


def _seeds(count: int, first: int = _FIRST_SEED) -> tuple[int, ...]:
    return tuple(range(first, first + count))


# The methods of the ladder: label → recipe and parameters. Methods with groups, and `reinforce_replay`, have 64
# rollouts in a batch. All other parameters have their defaults.
LADDER_METHODS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "grpo": ("grpo", {"groups": 4, "n": 16}),  # the usual shape in practice
    "grpo_4": ("grpo", _GROUPS),
    "grpo_4_replay": ("grpo", {**_GROUPS, "replay": 64}),
    "rloo_2": ("rloo", {"groups": 32, "n": 2}),
    "dapo_carry": ("dapo_carry", {**_GROUPS, "gen_groups": 48}),
    "pilot_commit_4": ("pilot_commit", {"groups": 8, "n_pilot": 4, "n_commit": 4, "gen_groups": 24}),
    "pilot_commit_8": ("pilot_commit", {"groups": 2, "n_pilot": 8, "n_commit": 24, "gen_groups": 6}),
    "reinforce": ("reinforce", _ALONE),
    # REINFORCE with its former defaults.
    "reinforce_replay": ("reinforce", {"groups": 64, "n": 1, "neg": 0.1, "replay": 64}),
    "raft": ("raft", _ALONE),
    "foresight": ("foresight", _ALONE),
}

TIERS: Mapping[str, Tier] = MappingProxyType(
    {
        # Only checks that everything works; its figures mean nothing.
        "smoke": Tier(
            tasks={"sort": 128},
            recipes=("grpo", "reinforce"),
            seeds=_seeds(2),
            eval_every=32,
        ),
        "ci": Tier(
            tasks={"rg/gcd": 4000},
            recipes=("grpo", "reinforce", "pilot_commit"),
            seeds=_seeds(3),
            eval_every=250,
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
            recipes=tuple(RECIPES),
            seeds=_seeds(8),
        ),
        # Shows whether findings on tiny models hold for larger models: one mixture of questions, several model sizes.
        "ladder": Tier(
            tasks={"ladder/0.15m": 6_000, "ladder/1m": 6_000, "ladder/8m": 4_096, "ladder/135m": 1_024},
            seeds=_seeds(8, _FIRST_OF_LADDER),
            methods=LADDER_METHODS,
            seeds_of={"ladder/0.15m": 8, "ladder/1m": 8, "ladder/8m": 5, "ladder/135m": 5},
        ),
    }
)
# Rollouts per second of one process on a core of an Intel Xeon at 2.5 GHz (Cascade Lake), including evaluations on the
# grid. Each value is between the rate of a method with groups and the rate of a method without. Other runs used the
# machine during the measurement. Tasks that were not measured get a low value.
RATES: Mapping[str, float] = MappingProxyType(
    {
        "skills/balanced": 480.0,
        "skills/graded": 300.0,
        "skills/late": 450.0,
        "skills/mixed": 400.0,
        "walks/mixed": 240.0,
        "rg/gcd": 400.0,
        "rg/number_filtering_misled": 350.0,
        "ladder/0.15m": 900.0,
        "ladder/1m": 200.0,
        "ladder/8m": 60.0,
        "ladder/135m": 4.0,
    }
)
_UNMEASURED = min(rate for task, rate in RATES.items() if not task.startswith(PREFIX))
_START_S = 2.0  # overhead of a run, in seconds: loading the model and the prompts, and the last checkpoint


def seconds_of(task: str, rollouts: int, runs: int = 1) -> float:
    """Estimated process seconds for `runs` runs on a task; `rollouts` is the total that they pay."""
    return runs * _START_S + rollouts / RATES.get(task, _UNMEASURED)
