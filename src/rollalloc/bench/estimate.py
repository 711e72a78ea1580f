"""How long a leaderboard will take, before it begins, from rates that were measured."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from rollalloc.bench.plan import Plan

# Rollouts a second of one process on an idle core of an Intel Xeon at 2.5 GHz (Cascade Lake), evaluations included.
RATES: Mapping[str, float] = MappingProxyType({})
_UNKNOWN = 300.0  # rollouts a second, of a task that nobody measured


def seconds_of(task: str, rollouts: int) -> float:
    """Seconds of one process for that many rollouts on a task."""
    return rollouts / RATES.get(task, _UNKNOWN)


def hours_of(plan: Plan, processes: int) -> float:
    """Hours for a plan, with so many processes, each on a core of its own."""
    return sum(seconds_of(task.name, plan.rollouts_of(task)) for task in plan.tasks) / processes / 3600
