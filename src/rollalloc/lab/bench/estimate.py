"""How long a leaderboard will take, before it begins, from rates that were measured."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from rollalloc.lab.bench.plan import Plan

# Rollouts a second of one process on a core of an Intel Xeon at 2.5 GHz (Cascade Lake), evaluations on the grid included,
# between those of plain estimators and of groups, of runs that shared the machine. What was not measured is slow.
RATES: Mapping[str, float] = MappingProxyType(
    {
        "skills/balanced": 480.0,
        "skills/graded": 300.0,
        "skills/late": 450.0,
        "skills/mixed": 400.0,
        "walks/mixed": 240.0,
        "rg/gcd": 400.0,
        "rg/spell_backward": 380.0,
        "rg/spell_backward_misled": 380.0,
        "rg/number_filtering_misled": 350.0,
    }
)
_UNKNOWN = min(RATES.values())
_START_S = 2.0  # of a run: model, prompts, the last checkpoint


def seconds_of(task: str, rollouts: int, runs: int = 1) -> float:
    """Seconds of one process for so many runs on a task, and their rollouts together."""
    return runs * _START_S + rollouts / RATES.get(task, _UNKNOWN)


def hours_of(plan: Plan, processes: int) -> float:
    """Hours for a plan, with so many processes, each on a core of its own; the making of tasks is not in it."""
    return total_seconds(plan) / processes / 3600


def total_seconds(plan: Plan) -> float:
    """Seconds of one process for a whole plan."""
    each = plan.runs // len(plan.tasks)
    return sum(seconds_of(task.name, plan.rollouts_of(task), each) for task in plan.tasks)
