"""What verdicts are learned from: for each task that was run, the profile of its model and what every method paid.

The file beside this one is written by `experiments/evidence.py`; no number in it is typed by hand.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

import numpy as np

FILE = "evidence.json"
BASELINE = "grpo_n4"


@dataclass(frozen=True, slots=True)
class Paid:
    """What runs paid until their target.

    Attributes:
        rollouts: of a run, or the mean of several.
        censored: the target was not reached by all; then the rollouts are a lower bound.
        runs: that it is the mean of.
    """

    rollouts: float
    censored: bool
    runs: int = 1


@dataclass(frozen=True, slots=True, eq=False)
class Task:
    """A task of the evidence.

    Attributes:
        name: of the bench.
        target: accuracy that costs are to.
        milestone: it is half of the largest gain of a method, since fewer than two came to the target that was fixed before.
        signals: the mean of its profiles'.
        profiles: signals of independent profiles of 1,024 rollouts each, for what sampling alone changes.
        paid: method, a key of `rollalloc.lab.advise.verdict.CHOICES` → what it paid.
    """

    name: str
    target: float
    milestone: bool
    signals: Mapping[str, float]
    profiles: tuple[Mapping[str, float], ...]
    paid: Mapping[str, tuple[Paid, ...]]

    @property
    def family(self) -> str:
        """Tasks of one family are made alike."""
        return self.name.partition("/")[0]

    def cost(self, method: str) -> tuple[float, bool] | None:
        """Geometric mean of a method's rollouts to target, and whether it is a lower bound; None: it was not run."""
        found = self.paid.get(method, ())
        if not found:
            return None
        logs, runs = [np.log(one.rollouts) for one in found], [one.runs for one in found]
        return float(np.exp(np.average(logs, weights=runs))), any(one.censored for one in found)


@dataclass(frozen=True, slots=True, eq=False)
class Evidence:
    """Tasks, and where their figures come from, in words by name."""

    tasks: tuple[Task, ...]
    origin: Mapping[str, str]

    def without(self, *names: str) -> Evidence:
        """The evidence but for some tasks."""
        return Evidence(tuple(task for task in self.tasks if task.name not in names), self.origin)

    def described(self) -> dict[str, Any]:
        """As the file holds it."""
        return {"origin": dict(self.origin), "tasks": {task.name: _described(task) for task in self.tasks}}


def evidence_of(described: Mapping[str, Any]) -> Evidence:
    """The evidence that `Evidence.described` describes; each task has at least one profile."""
    tasks = tuple(_task_of(name, found) for name, found in described["tasks"].items())
    return Evidence(tasks, described["origin"])


def _described(task: Task) -> dict[str, Any]:
    return {
        "profiles": [dict(signals) for signals in task.profiles],
        "target": task.target,
        "milestone": task.milestone,
        "paid": {
            method: [[one.rollouts, one.censored, one.runs] for one in found] for method, found in task.paid.items()
        },
    }


def _task_of(name: str, found: Mapping[str, Any]) -> Task:
    profiles = found["profiles"]
    return Task(
        name=name,
        target=found["target"],
        milestone=found["milestone"],
        signals={signal: float(np.mean([one[signal] for one in profiles])) for signal in profiles[0]},
        profiles=tuple(profiles),
        paid={method: tuple(Paid(*one) for one in paid) for method, paid in found["paid"].items()},
    )


@cache
def evidence() -> Evidence:
    """The evidence of this package."""
    return evidence_of(json.loads((files("rollalloc.lab.advise") / FILE).read_text(encoding="utf-8")))
